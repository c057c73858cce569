"""What makes a method: what travels, how a site learns, how updates merge, what does not fit."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from pydantic import BaseModel, ConfigDict, Field

from common.config import EvaluationSection, ParticipationSection, Plan, TrainingSection
from common.contract import LabelContract
from common.data.base.image_set import Splits
from common.errors import BadInput, Fault, quoted
from common.models.state import ModelState
from common.models.zoo.spec import Task
from common.wire.quantization import Form
from common.wire.records import NO_ARRAYS, Arrays, TrainReply
from strategies.aggregation.mean import HeadMean, WholeHeadMean
from strategies.aggregation.means import Weighting, Weights
from strategies.aggregation.robust import RobustMean
from strategies.aggregation.server_optimizer import Moments, ServerOptimizer
from strategies.base.round_context import RoundContext
from strategies.local.early_stopping import Settling
from strategies.local.losses import Loss, Missing, loss_for
from strategies.local.objective import LocalRound, Situation, proximal
from strategies.local.training import Examples, plain
from strategies.local.training_losses import chosen_loss

if TYPE_CHECKING:
    from strategies.engine.coordinator import Coordinator

TrunkRule = Literal["fedavg", "fedbn", "fedbn_plus"]
"""How the trunk is averaged (specs 1.5 step 2).

``fedavg``: every tensor, batch normalisation's four included (plain mean of the variances).
``fedbn``: batch normalisation stays at the site (Li et al., ICLR 2021); there is no global model then.
``fedbn_plus``: batch normalisation is frozen at its initial, pre-trained values everywhere and never sent up
("FedFBN", Kulkarni et al. 2023, arXiv 2303.06180).
"""


Criterion = Literal["auroc", "loss"]
"""What counts as a site's loss of a model; see :mod:`strategies.engine.best_round`."""

Pooled = Literal["no", "negative", "masked", "known"]


class Parameters(BaseModel):
    """The ``[method]`` table that every averaging method shares: its wrappers are here.

    Attributes:
        proximal_mu: Keeps a site near the model it received (FedProx), in addition to the method's own loss.
        clip_update: Longest Euclidean length of what a site sends.
        compress_update: Form in which the trunk of an update travels; what rounding loses is added to the next one.
        server_optimizer: Takes the mean update for a gradient (FedAdam, FedYogi, momentum).
        mean: A mean that a few wrong updates cannot move far, in the place of the plain one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    trunk: TrunkRule = "fedavg"
    weighting: Weighting = "uniform"
    warm_up_epochs: int = Field(0, ge=0)
    warm_up_lr: float = Field(1e-3, gt=0)
    proximal_mu: float = Field(0.0, ge=0)
    clip_update: float | None = Field(None, gt=0)
    compress_update: Form = "float32"
    server_optimizer: ServerOptimizer | None = None
    mean: RobustMean | None = None


@dataclass(frozen=True)
class WarmUp:
    """Local epochs before round 1 with the backbone frozen; the epoch with the lowest validation loss is kept."""

    epochs: int
    lr: float


About = Literal["images", "signs", "positives", "counts"]
"""Whom a statistic is about: all training images; of each head row's class the negatives and the positives (its first
two axes), or the positives (its first axis); or it counts each class's images."""


@dataclass(frozen=True)
class Statistic:
    """What a site's reply may hold beside its update.

    Attributes:
        name: In the record; part of the wire.
        about: Whom it is about: a site sends nothing about few patients.
        meaning: For hospitals, in plain words.
    """

    name: str
    about: About
    meaning: str


@dataclass(frozen=True)
class Traffic:
    """What passes between coordinator and hospital: data, so that a hospital's policy can judge it before a round.

    Attributes:
        trunk: Whether the trunk is averaged; else each site trains its own.
        head: Whether head rows are averaged over the sites that hold them.
        rows: Head rows a site holds: ``own`` for its annotated classes in its own order, ``all`` for the run's.
        sends_rows: Of those it sends ``all``, or only its ``own``, so that a class's row is made by its owners.
        statistics: What a reply may hold beside the update; nothing else leaves a site.
        label_counts: Whether the roll call asks how many images show each class.
    """

    trunk: bool = True
    head: bool = True
    rows: Literal["own", "all"] = "all"
    sends_rows: Literal["own", "all"] = "all"
    statistics: tuple[Statistic, ...] = ()
    label_counts: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return tuple(one.name for one in self.statistics)


class Method(Strategy):
    """One federated method, both halves: a Flower strategy on the coordinator, the client's half at the hospital.

    This class declares; :class:`strategies.base.method.Method` runs the rounds. A method overrides what
    differs from FedAvg. All of its rules are pure, so that a run can be added up again from the updates that it kept.

    Args:
        parameters: The ``[method]`` table.
        task: Of the model.

    Raises:
        pydantic.ValidationError: For a table that does not fit.
        BadInput: Where the method does not serve the task.

    Attributes:
        name: As in experiment files.
        table: Schema of the ``[method]`` table.
        declared: The traffic, as far as no parameter changes it.
        missing: What a class counts as in the loss that a site does not annotate, where no parameter says so.
        plain_client: Whether a site minimises the mean loss of each image alone; False where :meth:`client` does more.
        looks_at_images: Whether :meth:`client` looks at images, or draws views of them, beside the network's features;
            then a frozen backbone sees them in every batch.
        weighs_updates: Whether :meth:`site_weights` looks at what the updates are; then all of them are kept until the
            round is decided.
        full_coverage: Refuse a run in which a site does not annotate every class.
        multi_class: Whether the method serves tasks in which classes exclude one another.
        selection: Who picks the best round: the federation by the sites' mean, or each site for itself.
        sequential: Whether the model goes from hospital to hospital instead of being averaged.
        hospitals_train: Whether hospitals train at all.
        ranks_sites: Whether every site trains once before round 1, to be put into an order.
        chooses_loss: Whether ``[training]`` may choose another loss; False where the method's own is part of it.
    """

    name: ClassVar[str]
    table: ClassVar[type[Parameters]] = Parameters
    declared: ClassVar[Traffic] = Traffic()
    missing: ClassVar[Missing] = "masked"
    plain_client: ClassVar[bool] = True
    looks_at_images: ClassVar[bool] = False
    weighs_updates: ClassVar[bool] = False
    full_coverage: ClassVar[bool] = False
    multi_class: ClassVar[bool] = True
    selection: ClassVar[Literal["federation", "site"]] = "federation"
    sequential: ClassVar[bool] = False
    hospitals_train: ClassVar[bool] = True
    ranks_sites: ClassVar[bool] = False
    chooses_loss: ClassVar[bool] = True
    parameters: Parameters
    _coordinator: "Coordinator"

    def __init_subclass__(cls, **more: Any) -> None:
        """Take a class with a :meth:`client` of its own for one that does more, where it does not say otherwise."""
        super().__init_subclass__(**more)
        if "client" in vars(cls):
            cls.plain_client = vars(cls).get("plain_client", False)
            cls.looks_at_images = vars(cls).get("looks_at_images", True)

    def __init__(self, parameters: Mapping[str, Any] | None = None, task: Task = "multi_label") -> None:
        self.parameters, self.task = self.table.model_validate(dict(parameters or {})), task
        if task == "multi_class" and not self.multi_class:
            raise BadInput([_multi_class_fault(self.name)])

    # ------------------------------------------------------------------ declared data

    @property
    def traffic(self) -> Traffic:
        """What travels with these parameters."""
        return self.declared

    @property
    def counts_missing_as(self) -> Missing:
        """What a class counts as in the loss that a site does not annotate."""
        return getattr(self.parameters, "missing", self.missing)

    @property
    def loss(self) -> Loss:
        """What validation measures, and what a plain client minimises where ``[training]`` chooses no other."""
        return loss_for(self.task, self.counts_missing_as)

    def training_loss(self, examples: Examples, spec: TrainingSection) -> Loss:
        """What a plain client minimises: see :mod:`strategies.local.training_losses`.

        Raises:
            BadInput: If a plug-in is named that is not installed.
        """
        return chosen_loss(spec, self.loss, self.task, self.counts_missing_as, examples.labels)

    @property
    def criterion(self) -> Criterion:
        """What the best round is chosen by, where the experiment does not say: ranking, if classes are yes or no.

        Several methods train adjusted or weighted logits, of which the plain loss says little; and ranking is what
        the papers compare. Where classes exclude one another it is the loss, as in UniFed (specs 2.4).
        """
        return "auroc" if self.task == "multi_label" else "loss"

    def chosen_by(self, evaluation: EvaluationSection) -> Criterion:
        """The criterion of a run: the experiment's, or the method's own where it names none."""
        return self.criterion if evaluation.criterion == "method" else evaluation.criterion

    @property
    def pooled(self) -> Pooled:
        """Whether one pseudo-site trains on everybody's images (simulation only), and what missing labels are there."""
        return "no"

    @property
    def head_mean(self) -> HeadMean:
        """How head rows are averaged: in FedAvg over all sites."""
        return WholeHeadMean

    @property
    def settling(self) -> Settling | None:
        """When a site stops training in a round; None trains the experiment's number of epochs."""
        return None

    @property
    def warm_up(self) -> WarmUp:
        return WarmUp(self.parameters.warm_up_epochs, self.parameters.warm_up_lr)

    @property
    def trains_at_coordinator(self) -> bool:
        """Whether the coordinator trains on images of its own."""
        return False

    @property
    def sends_norm(self) -> bool:
        """Whether batch normalisation is averaged with the trunk."""
        return self.traffic.trunk and self.parameters.trunk == "fedavg"

    @property
    def frozen_norm(self) -> bool:
        """Whether batch normalisation is neither trained nor updated."""
        return self.parameters.trunk == "fedbn_plus"

    @property
    def has_global_model(self) -> bool:
        """Whether the coordinator ends with one model for all classes."""
        return self.traffic.trunk and self.traffic.head and (self.sends_norm or self.frozen_norm)

    @property
    def keeps_local_parts(self) -> bool:
        """Whether a site holds a part of its model that never leaves it."""
        return not self.has_global_model

    @property
    def shares_nothing(self) -> bool:
        """Whether every site trains by itself."""
        return not self.traffic.trunk and not self.traffic.head

    def rows_of(self, site: str, contract: LabelContract) -> tuple[str, ...]:
        """The head rows that a site holds, in the order its head has them."""
        return contract.sites[site] if self.traffic.rows == "own" else contract.class_names

    def rows_sent(self, held: tuple[str, ...], annotated: Collection[str]) -> tuple[str, ...]:
        """The head rows that a site sends, of those it holds."""
        return held if self.traffic.sends_rows == "all" else tuple(name for name in held if name in annotated)

    # ------------------------------------------------------------------ the hospital's half

    def client(self, situation: Situation) -> LocalRound:
        """What a site minimises in this round, sends beside its update, and keeps for the next."""
        return LocalRound(plain(self.training_loss(situation.examples, situation.spec)))

    def local_round(self, situation: Situation) -> LocalRound:
        """:meth:`client`, with the pull back to the received model where ``proximal_mu`` is set."""
        mu = self.parameters.proximal_mu
        if not mu:
            return self.client(situation)
        return proximal(self.client, mu, head=self.traffic.head, norm=self.sends_norm)(situation)

    # ------------------------------------------------------------------ the coordinator's half beside averaging

    def statistics_for(self, known: RoundContext) -> Callable[[str], Arrays]:
        """Called once an exchange; returns what gives the statistics that one site receives with the model."""
        return lambda site: NO_ARRAYS

    def statistics_shape(self, known: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the statistics in one site's reply, given the width of a head row."""
        return {}

    def aggregate_statistics(self, known: RoundContext, replies: Mapping[str, TrainReply]) -> Arrays:
        """The coordinator's statistics after a round, from the replies that count, in the order of site names."""
        return known.statistics

    def site_weights(self, known: RoundContext, replies: Mapping[str, TrainReply], weights: Weights) -> Weights:
        """Turn each site's plain weight into the weight that it has in this round's means.

        Args:
            known: When the round began.
            replies: Those that count, in the order of site names.
            weights: One a site; they need not sum to one, nor need those returned.
        """
        return weights

    def finalize(self, server_round: int, model: ModelState, moments: Moments) -> tuple[ModelState, Moments]:
        """The global model after a round, from the model that the means make.

        What must last goes into the moments, which are part of the coordinator's state.
        """
        return model, moments

    def roll_call_faults(self, known: RoundContext) -> list[Fault]:
        """What the answers to the roll call lack for this method."""
        return []

    def round_figures(self, known: RoundContext) -> Mapping[str, Any]:
        """What the statistics after a round say, for ``rounds.jsonl``; None for a number that is not known."""
        return {}

    def summary_figures(self, known: RoundContext) -> Mapping[str, Any]:
        """What the statistics after the last round say, for ``summary.json``."""
        return {}

    # ------------------------------------------------------------------ what does not fit

    def image_faults(self, own: Splits | None) -> list[Fault]:
        """What the coordinator's own images lack for this method."""
        return []

    def refuse_unfit(self, contract: LabelContract) -> None:
        """Raise :class:`BadInput` if the method cannot serve this contract."""
        mean = self.parameters.mean
        if mean is not None and len(contract.sites) < mean.fewest:
            problem = f"{mean.kind} needs {mean.fewest} sites or more; there are {len(contract.sites)}."
            raise BadInput([Fault("method.mean", problem, "Leave it out, or choose another.")])
        if not self.full_coverage or len(contract.shared_classes) == len(contract.class_names):
            return
        partial = [name for name in contract.class_names if name not in contract.shared_classes]
        problem = f"{self.name} needs every class annotated by every site; {quoted(partial)} are not."
        remedy = 'Use "surgical" or "partial_loss", which learn from partial labels, or "vanilla": missing is negative.'
        raise BadInput([Fault("run.method", problem, remedy)])

    def contradictions(self) -> list[Fault]:
        """What in this method's parameters makes no sense together."""
        reason = self.why_nothing_is_averaged()
        faults = [
            Fault(f"method.{key}", f"makes no sense in {self.name}: {reason}.", "Leave it out.")
            for key in self.of_averaging()
            if reason
        ]
        if self.parameters.mean is not None and self.weighs_updates:
            problem = f"makes no sense in {self.name}: it weighs the sites by a rule of its own."
            faults.append(Fault("method.mean", problem, "Leave it out."))
        return faults

    def of_averaging(self) -> list[str]:
        """The parameters that are set and mean something only where updates are averaged."""
        given = self.parameters
        set_here = {
            "proximal_mu": bool(given.proximal_mu),
            "clip_update": given.clip_update is not None,
            "compress_update": given.compress_update != "float32",
            "server_optimizer": given.server_optimizer is not None,
            "mean": given.mean is not None,
        }
        return [key for key, is_set in set_here.items() if is_set]

    def why_nothing_is_averaged(self) -> str:
        """The reason; empty where updates are averaged."""
        if self.pooled != "no":
            return "there is one pseudo-site, and nothing to average"
        return "" if self.traffic.trunk else "every site trains by itself, and nothing is averaged"

    # ------------------------------------------------------------------ a Flower strategy

    def prepare(
        self,
        plan: Plan,
        participation: ParticipationSection,
        run: str,
        **options: Any,
    ) -> Self:
        """Make ready to coordinate one run as a Flower ``Strategy``.

        Args:
            plan: The part of the experiment that hospitals receive.
            run: Identifier of the run.
            options: As of :class:`strategies.engine.coordinator.Coordinator`.
        """
        from strategies.engine.sequential import coordinator_of  # here: a hospital's process loads no engine

        self._coordinator = coordinator_of(self, plan, participation, run, **options)
        return self

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train; see :meth:`strategies.engine.coordinator.Coordinator.start`."""
        if train_config or evaluate_config or evaluate_fn:
            warnings.warn("the plan settles training and evaluation; the extra arguments are ignored", stacklevel=2)
        return self._coordinator.start(grid, initial_arrays, num_rounds, timeout)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message a site; the model is the coordinator's."""
        return self._coordinator.configure_train(server_round, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Move the coordinator's model by the replies that count."""
        loss = self._coordinator.aggregate_train(server_round, replies).mean_train_loss
        return None, MetricRecord({} if loss is None else {"train-loss": loss})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the validation loss of the model as it stands after the last round."""
        return self._coordinator.configure_evaluate()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note what sites state of the last model."""
        self._coordinator.aggregate_evaluate(replies)
        mean = self._coordinator.last_validation.mean_loss
        return None if mean is None else MetricRecord({"validation-loss": mean})

    def summary(self) -> None:
        """Print nothing: the run folder and the progress bar have it all."""


def most_epochs(method: Method, plan: Plan) -> int:
    """Local epochs of a round at most: a site that trains until its loss settles may go on to the rule's end."""
    return max(plan.training.epochs, method.settling.cap if method.settling else 0, 1)


@dataclass(frozen=True)
class ServerTraining:
    """The coordinator trains on images of its own, and mixes the result with the hospitals' model (UniFed).

    Attributes:
        settling: When it stops, each round.
        alpha: Weight of the hospitals' model in the mixture.
        patience: Rounds without a better model on the coordinator's validation part after which the run ends.
    """

    settling: Settling
    alpha: float
    patience: int


class SequentialMethod(Method):
    """One model is passed on from hospital to hospital, round by round: averaging over cohorts of one."""

    sequential = True
    missing = "negative"

    @property
    def server_training(self) -> ServerTraining | None:
        """How the coordinator trains; None where it does not."""
        return None

    @property
    def trains_at_coordinator(self) -> bool:
        """Whether the coordinator trains on images of its own."""
        return self.server_training is not None

    def order(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the sites of a round, which are sorted by name, in the order in which the model passes through."""
        return sites

    def after_hop(self, left: int, hops: int, result: ModelState, passed: ModelState) -> ModelState:
        """Return what a round would end with after one more hop: the model as it was passed on.

        Args:
            left: Rounds that follow this one.
            hops: In this round, this one included.
            result: The same after the hop before; the model that the round began with before the first.
            passed: The model after this hop.
        """
        return passed

    def image_faults(self, own: Splits | None) -> list[Fault]:
        """A coordinator that trains needs images of its own."""
        if not self.trains_at_coordinator or (own and len(own.train) and len(own.validation)):
            return []
        problem = f"{self.name} trains on images of the coordinator's own, and judges by them; there are none."
        remedy = 'Name them in [server_data]; in simulation partition.kind = "tasks" sets some aside too.'
        return [Fault("run.method", problem, remedy)]

    def of_averaging(self) -> list[str]:
        """A pass hands every site a model to stay near, too; and it has no weights and no warm-up."""
        given, found = self.parameters, super().of_averaging()
        if self.hospitals_train:
            found = [key for key in found if key != "proximal_mu"]
        found += ["weighting"] if given.weighting != "uniform" else []
        return found + (["warm_up_epochs"] if given.warm_up_epochs else [])

    def why_nothing_is_averaged(self) -> str:
        """The reason."""
        return "the model is passed on, not averaged"

    def contradictions(self) -> list[Fault]:
        """The whole network is passed on."""
        found = super().contradictions()
        if self.parameters.trunk == "fedbn":
            problem = f"makes no sense in {self.name}: the whole network is passed on, batch normalisation too."
            found.append(Fault("method.trunk", problem, 'Use "fedavg" or "fedbn_plus".'))
        return found


def without_local_norm(name: str, trunk: TrunkRule, why: str) -> list[Fault]:
    """Refuse batch normalisation that stays at the sites, for a method that needs the model of all."""
    if trunk != "fedbn":
        return []
    problem = f'makes no sense in {name}: {why}, and with "fedbn" there is none.'
    return [Fault("method.trunk", problem, 'Use "fedavg" or "fedbn_plus".')]


def _multi_class_fault(name: str) -> Fault:
    problem = f"{name} asks of each class by itself whether it is there; in a multi-class task classes exclude others."
    return Fault("run.method", problem, 'Use "fedsld" or "unifed", or model.task = "multi_label".')
