"""Base class of the coordinator's half of each method.

It averages head rows, weighs sites, and collects the statistics of their replies.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from polyclinic.common.config import HospitalPlan, ParticipationSection
from polyclinic.common.contract import LabelContract
from polyclinic.common.errors import Fault
from polyclinic.common.models.state import ModelState
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.wire.records import NO_ARRAYS, Arrays, ModelGroups, RollCallAnswer
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.strategies.aggregation.means import HeadMean, RowWeights, Weights, WholeHeadMean
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.local.site_method import SequentialSite, SiteMethod

if TYPE_CHECKING:
    from polyclinic.strategies.engine.coordinator import Coordinator


@dataclass(frozen=True)
class RoundContext:
    """The data that a method's rules may use: the coordinator's knowledge at the beginning or end of a round.

    ``answers`` has no site whose statistics do not count. Nor has ``statistics``, unless the method stores statistics
    by site (``stores_statistics_by_site``). So a method that uses only these two needs no check of its own.

    Attributes:
        contract: The run's classes, and the classes that each site annotates.
        answers: Site -> its answer to the roll call, for the sites whose statistics count; claims that are too large
            are lowered (:mod:`polyclinic.strategies.engine.admission_limits`).
        statistics: Statistics that the method has aggregated so far; part of the coordinator's state.
        round: Number of the round that begins or has just ended.
        uncounted: Excluded sites, and sites whose statistics do not count
            (:attr:`polyclinic.strategies.engine.state.FederationState.uncounted`).
        site_models: Site -> the model as the site passed it on in this round, in the order of visits; only for
            :meth:`Method.aggregate_statistics` of sequential methods with
            :attr:`polyclinic.strategies.local.method_traits.SequentialTraits.stores_site_models`.
    """

    task: Task
    contract: LabelContract
    answers: Mapping[str, RollCallAnswer]
    statistics: Arrays
    round: int
    seed: int = 0
    uncounted: frozenset[str] = frozenset()
    site_models: Mapping[str, ModelState] = field(default_factory=dict)


class SiteReply(Protocol):
    """The part of a site's reply that a method's rules use."""

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
    """The coordinator's half of FedAvg (McMahan et al., AISTATS 2017) and base class of all methods.

    Subclasses override the rules in which they differ. All rules are pure functions, so that an audit can recompute a
    run from stored updates. A method is also a Flower ``Strategy``: call :meth:`prepare`, which makes a
    :class:`polyclinic.strategies.engine.coordinator.Coordinator` that handles every call, then :meth:`start`.

    Args:
        parameters: The ``[method]`` table.

    Raises:
        pydantic.ValidationError: If the table is invalid.
        BadInput: If the method does not support the task.

    Attributes:
        site_class: Class of the hospital's half.
        site: The hospital's half with these parameters; the coordinator reads its declarations.
    """

    site_class: ClassVar[type[SiteMethod]] = SiteMethod
    site: SiteMethod
    _coordinator: "Coordinator"

    def __init__(self, parameters: Mapping[str, Any] | None = None, task: Task = "multi_label") -> None:
        self.site = self.site_class(parameters, task)

    # ------------------------------------------------------------------ the rules of a round

    @property
    def head_mean_class(self) -> HeadMean:
        """Return the class that averages head rows; in FedAvg the average is over all sites.

        An object is made from the class names and the width of a head row, and receives the sites' heads one by one.
        """
        return WholeHeadMean

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function from a site's name to the statistics that the site receives with the model."""
        return lambda site: NO_ARRAYS

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of each statistic that a site's reply must contain.

        Args:
            features: Width of a head row.
        """
        return {}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the statistics that the coordinator stores after a round; ``replies`` are sorted by site name."""
        return context.statistics

    def site_weights(
        self, context: RoundContext, replies: Mapping[str, SiteReply], weights: Weights
    ) -> Weights | RowWeights:
        """Convert each site's plain weight into the site's weight in this round's means.

        With :class:`RowWeights` each head row has a weight of its own; then the sites send every row.

        Args:
            replies: Accepted replies, in the order of site names.
            weights: One plain weight for each site; neither the plain nor the returned weights need to sum to one.
        """
        return weights

    def finalize(self, server_round: int, model: ModelState, moments: Moments) -> tuple[ModelState, Moments]:
        """Return the new global model and the new moments; this class returns ``model`` and ``moments`` unchanged.

        Args:
            model: The previous global model plus the round's mean updates.
            moments: Arrays that the coordinator stores between rounds, of a server optimiser or of the method.
        """
        return model, moments

    # ------------------------------------------------------------------ figures, and what does not fit

    def compute_round_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return figures of the statistics after a round for ``rounds.jsonl``; None stands for an unknown number."""
        return {}

    def compute_summary_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return the figures of the last round's statistics that ``summary.json`` records."""
        return {}

    def find_roll_call_faults(self, context: RoundContext) -> list[Fault]:
        """Return the faults in the answers to the roll call that make this method impossible.

        A fault that names its site leaves out this site if the run can go on without it; any other fault ends the run.
        """
        return []

    # ------------------------------------------------------------------ a Flower strategy

    def prepare(self, plan: HospitalPlan, participation: ParticipationSection, run: str, **options: Any) -> Self:
        """Make the coordinator of one run, which handles all later calls.

        The arguments are those of :class:`polyclinic.strategies.engine.coordinator.Coordinator`.
        """
        from polyclinic.strategies.engine.sequential import (
            make_coordinator,  # here: a hospital's process loads no engine
        )

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
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Train all rounds; see :meth:`polyclinic.strategies.engine.coordinator.Coordinator.start`.

        Args:
            grid: Flower's connection to the sites.
            initial_arrays: The initial model.
            num_rounds: Total number of rounds.
            timeout: Seconds for each exchange.
            train_config: Ignored, with a warning, as are ``evaluate_config`` and ``evaluate_fn``.
            evaluate_config: Ignored.
            evaluate_fn: Ignored.
            should_stop: Ends the run early, as in Flower 1.43: called after each round with the round's number and the
                result so far, it returns True to make this round the last.
        """
        if train_config or evaluate_config or evaluate_fn:
            warnings.warn("the plan settles training and evaluation; the extra arguments are ignored", stacklevel=2)
        return self._coordinator.start(grid, initial_arrays, num_rounds, timeout, should_stop)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one training message for each site of the round, with the coordinator's model.

        Only ``server_round`` and ``grid`` are used; the other arguments belong to Flower's interface.
        """
        return self._coordinator.configure_train(server_round, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Update the coordinator's model from the accepted replies; return None in place of arrays, and the mean loss.

        The mean is the training loss over the sites that send one; the metrics are empty if there is no loss.
        """
        loss = self._coordinator.aggregate_train(server_round, replies).mean_train_loss
        return None, MetricRecord({} if loss is None else {"train-loss": loss})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages that request the validation loss of the coordinator's current model.

        No argument is used; the arguments belong to Flower's interface.
        """
        return self._coordinator.configure_evaluate()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the sites' validation figures of the last model; return their mean loss, or None without any loss."""
        self._coordinator.aggregate_evaluate(replies)
        mean = self._coordinator.last_validation.mean_loss
        return None if mean is None else MetricRecord({"validation-loss": mean})

    def summary(self) -> None:
        """Print nothing, because the run folder and the progress bar show all figures."""


@dataclass(frozen=True)
class ServerTrainingSettings:
    """Settings of the coordinator's own training (UniFed), whose model is mixed with the hospitals' model.

    Attributes:
        early_stopping: The early stopping rule of the coordinator's training.
        alpha: Weight of the hospitals' model in the mixture.
        patience: The run ends after this many rounds without a better model on the coordinator's validation part.
    """

    early_stopping: EarlyStopping
    alpha: float
    patience: int


class SequentialMethod(Method):
    """Base class of methods that pass one model from hospital to hospital instead of averaging updates."""

    site_class = SequentialSite
    site: SequentialSite

    @property
    def server_training_settings(self) -> ServerTrainingSettings | None:
        """Return the settings of the coordinator's own training; None if it does not train."""
        return None

    def order_sites(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the order in which the model visits the sites of a round; ``sites`` are sorted by name."""
        return sites

    def result_after_site_visit(
        self, server_round: int, left: int, hops: int, result: ModelState, passed: ModelState
    ) -> ModelState:
        """Return the round's result after this site; by default ``passed``, the model that the site returned.

        Args:
            server_round: Number of this round.
            left: Number of rounds after this one.
            hops: Number of sites visited in this round, including this site.
            result: Result after the previous site; at the first site the model from the beginning of the round.
        """
        return passed


AnyMethod = TypeVar("AnyMethod", bound=Method)


def make_method(rules: type[AnyMethod], site_class: type[SiteMethod]) -> type[AnyMethod]:
    """Return the coordinator's half of a method that differs from another one at the hospitals alone.

    The class has the name of the hospital's half without ``Site``, and must be bound to this name in the same module.

    Args:
        rules: The class whose rules it has: :class:`Method` for those of FedAvg, or :class:`SequentialMethod`.
        site_class: The hospital's half.
    """
    name = site_class.__name__.removesuffix("Site")
    members = {"site_class": site_class, "__module__": site_class.__module__, "__doc__": site_class.__doc__}
    return type(name, (rules,), members)


def convert_to_json_numbers(values: Mapping[str, NDArray[np.floating]]) -> dict[str, float | None]:
    """Convert arrays of one number each to numbers for JSON; NaN and infinity become None."""
    numbers = {name: float(value.item()) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def find_missing_coordinator_images(method: Method, own: DatasetSplits | None) -> list[Fault]:
    """Return a fault if the method trains at the coordinator, and training or validation images are missing there."""
    if not isinstance(method, SequentialMethod) or method.server_training_settings is None:
        return []
    if own and len(own.train) and len(own.validation):
        return []
    problem = f"{method.site.name} trains on images of the coordinator's own, and judges by them; there are none."
    remedy = 'Name them in [server_data]; in simulation partition.kind = "tasks" sets some aside too.'
    return [Fault("run.method", problem, remedy)]
