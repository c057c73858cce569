"""The coordinator's half of a method: the mean of head rows, the weights of sites and the method's statistics."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from common.config import ParticipationSection, Plan
from common.contract import LabelContract
from common.data.base.image_set import Splits
from common.errors import Fault, quote_names
from common.models.state import ModelState
from common.models.zoo.spec import Task
from common.wire.records import NO_ARRAYS, Arrays, ModelGroups, RollCallAnswer
from strategies.aggregation.means import HeadMean, Weights, WholeHeadMean
from strategies.aggregation.server_optimizer import Moments
from strategies.local.early_stopping import EarlyStopping
from strategies.local.site_method import SequentialSite, SiteMethod

if TYPE_CHECKING:
    from strategies.engine.coordinator import Coordinator


@dataclass(frozen=True)
class RoundContext:
    """All that a method's rules may look at: the knowledge of the coordinator when a round begins or ends.

    Attributes:
        contract: The run's classes, and which of them each site annotates.
        answers: Answers to the roll call, by site.
        statistics: Statistics that the method aggregated so far; part of the coordinator's state.
        round: Number of the round that begins or has just ended.
    """

    task: Task
    contract: LabelContract
    answers: Mapping[str, RollCallAnswer]
    statistics: Arrays
    round: int
    seed: int = 0


class SiteReply(Protocol):
    """The part of a site's reply that a method's rules read."""

    @property
    def train_samples(self) -> float:
        """Return the number of training images."""

    @property
    def update(self) -> ModelGroups:
        """Return the update: the trained model minus the received model."""

    @property
    def statistics(self) -> Arrays:
        """Return the statistics that the site sent for the method, by name."""


class Method(Strategy):
    """FedAvg (McMahan et al., AISTATS 2017), the base of all methods: each overrides the rules in which it differs.

    All rules are pure functions, so that a run can be checked by computing it again from stored updates. As a Flower
    ``Strategy`` a method hands every call to a :class:`strategies.engine.coordinator.Coordinator`: call
    :meth:`prepare`, then :meth:`start`.

    Args:
        parameters: The ``[method]`` table.

    Raises:
        pydantic.ValidationError: For a table that does not fit.
        BadInput: Where the method does not serve the task.

    Attributes:
        site_class: Class of the hospital's half.
        site: The hospital's half with these parameters; both sides read what it declares.
    """

    site_class: ClassVar[type[SiteMethod]] = SiteMethod
    site: SiteMethod
    _coordinator: "Coordinator"

    def __init__(self, parameters: Mapping[str, Any] | None = None, task: Task = "multi_label") -> None:
        self.site = self.site_class(parameters, task)

    @property
    def last_rounds(self) -> int:
        """Return the number of a run's last rounds that differ from the others, so that the run cannot be extended."""
        return 0

    # ------------------------------------------------------------------ the rules of a round

    @property
    def head_mean(self) -> HeadMean:
        """Return the factory of the accumulator that averages head rows: in FedAvg over all sites.

        The factory takes the class names and the width of the head's rows; the accumulator takes the sites' heads one
        by one.
        """
        return WholeHeadMean

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function from a site's name to the statistics that the site receives with the model."""
        return lambda site: NO_ARRAYS

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the statistics that a site's reply must hold.

        Args:
            context: The knowledge when the round began.
            features: Width of a head row.
        """
        return {}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the statistics that the coordinator keeps after a round.

        Args:
            context: The knowledge when the round began.
            replies: Replies that count, in the order of site names.
        """
        return context.statistics

    def site_weights(self, context: RoundContext, replies: Mapping[str, SiteReply], weights: Weights) -> Weights:
        """Turn each site's plain weight into the weight that it has in this round's means.

        Args:
            context: The knowledge when the round began.
            replies: Replies that count, in the order of site names.
            weights: One plain weight for each site; neither these nor the returned ones need to sum to one.
        """
        return weights

    def finalize(self, server_round: int, model: ModelState, moments: Moments) -> tuple[ModelState, Moments]:
        """Change the model that the mean updates make into the global model; return it with the new moments.

        A method may store arrays for later rounds in the moments, which are part of the coordinator's state.
        """
        return model, moments

    # ------------------------------------------------------------------ figures, and what does not fit

    def round_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return figures of the statistics after a round, for ``rounds.jsonl``; None marks an unknown number."""
        return {}

    def summary_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return figures of the statistics after the last round, which go to ``summary.json``."""
        return {}

    def contract_faults(self, contract: LabelContract) -> list[Fault]:
        """Return the faults because of which the method cannot serve this label contract."""
        mean = self.site.parameters.mean
        if mean is not None and len(contract.sites) < mean.fewest_sites:
            problem = f"{mean.kind} needs {mean.fewest_sites} sites or more; there are {len(contract.sites)}."
            return [Fault("method.mean", problem, "Leave it out, or choose another.")]
        partial = [name for name in contract.class_names if name not in contract.shared_classes]
        if not self.site.full_coverage or not partial:
            return []
        problem = f"{self.site.name} needs every class annotated by every site; {quote_names(partial)} are not."
        remedy = 'Use "surgical" or "partial_loss", which learn from partial labels, or "vanilla": missing is negative.'
        return [Fault("run.method", problem, remedy)]

    def roll_call_faults(self, context: RoundContext) -> list[Fault]:
        """Return the faults in the answers to the roll call that prevent this method."""
        return []

    # ------------------------------------------------------------------ a Flower strategy

    def prepare(self, plan: Plan, participation: ParticipationSection, run: str, **options: Any) -> Self:
        """Prepare the coordination of one run.

        Args:
            plan: The part of the experiment that hospitals receive.
            options: Options of :class:`strategies.engine.coordinator.Coordinator`.
        """
        from strategies.engine.sequential import make_coordinator  # here: a hospital's process loads no engine

        self._coordinator = make_coordinator(self, plan, participation, run, **options)
        return self

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds of training; see :meth:`strategies.engine.coordinator.Coordinator.start`."""
        if train_config or evaluate_config or evaluate_fn:
            warnings.warn("the plan settles training and evaluation; the extra arguments are ignored", stacklevel=2)
        return self._coordinator.start(grid, initial_arrays, num_rounds, timeout)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one training message for each site of the round, with the coordinator's model."""
        return self._coordinator.configure_train(server_round, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Update the coordinator's model by the replies that count; return the mean training loss, but no arrays."""
        loss = self._coordinator.aggregate_train(server_round, replies).mean_train_loss
        return None, MetricRecord({} if loss is None else {"train-loss": loss})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages that ask for the validation loss of the model after the last round."""
        return self._coordinator.configure_evaluate()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the sites' validation figures of the last model; return their mean loss."""
        self._coordinator.aggregate_evaluate(replies)
        mean = self._coordinator.last_validation.mean_loss
        return None if mean is None else MetricRecord({"validation-loss": mean})

    def summary(self) -> None:
        """Print nothing, because the run folder and the progress bar show all figures."""


@dataclass(frozen=True)
class ServerTraining:
    """Settings by which the coordinator trains on its own images and mixes the result into the model (UniFed).

    Attributes:
        early_stopping: The early stopping rule of its training.
        alpha: Weight of the hospitals' model in the mixture.
        patience: Rounds without a better model on the coordinator's validation part after which the run ends.
    """

    early_stopping: EarlyStopping
    alpha: float
    patience: int


class SequentialMethod(Method):
    """Base of methods that pass one model from hospital to hospital instead of averaging updates."""

    site_class = SequentialSite

    @property
    def server_training(self) -> ServerTraining | None:
        """Return the settings of the coordinator's own training; None where it does not train."""
        return None

    def order(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the sites of a round, given sorted by name, in the order in which the model visits them."""
        return sites

    def after_hop(self, left: int, hops: int, result: ModelState, passed: ModelState) -> ModelState:
        """Return the model that the round would end with after this site: here the model as the site left it.

        Args:
            left: Number of rounds that follow this one.
            hops: Number of sites visited in this round, this one included.
            result: Result after the site before; at the first site the model that the round began with.
            passed: The model after this site.
        """
        return passed


def convert_to_json_numbers(values: Mapping[str, NDArray[np.floating]]) -> dict[str, float | None]:
    """Turn arrays of one number each into numbers for JSON, with None for NaN and infinity."""
    numbers = {name: float(value.item()) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def find_coordinator_image_faults(method: Method, own: Splits | None) -> list[Fault]:
    """Return a fault if the method trains at the coordinator, which lacks training or validation images."""
    if not isinstance(method, SequentialMethod) or method.server_training is None:
        return []
    if own and len(own.train) and len(own.validation):
        return []
    problem = f"{method.site.name} trains on images of the coordinator's own, and judges by them; there are none."
    remedy = 'Name them in [server_data]; in simulation partition.kind = "tasks" sets some aside too.'
    return [Fault("run.method", problem, remedy)]
