"""The hospital's half of a method: training at a site, and a declaration of all data that leaves the hospital.

Each method is two classes, one for each side. The hospital runs only its own half. The declaration is data, so that a
hospital's policy can check it before a round, and the coordinator can check replies against it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from polyclinic.common.config import EvaluationSection, HospitalPlan, TrainingSection
from polyclinic.common.contract import LabelContract
from polyclinic.common.errors import BadInput, Fault, WireError, quote_names
from polyclinic.common.models.zoo.spec import Task, is_segmentation
from polyclinic.common.wire.records import Arrays, NumberFormat
from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.aggregation.robust import RobustMeanRule
from polyclinic.strategies.aggregation.server_optimizer import ServerOptimizer
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.local.losses import (
    PLAIN_LOSSES,
    BatchWeight,
    LossFunction,
    Missing,
    make_batch_weight,
    make_training_loss,
)
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples, LocalRound, add_proximal_term, plain
from polyclinic.strategies.local.segmentation_losses import SEGMENTATION_LOSSES
from polyclinic.strategies.local.stages import RoundDefault, Stage

TrunkRule = Literal["fedavg", "fedbn", "fedbn_plus"]
"""How the trunk is averaged (docs/papers.md#surgical-trunk).

``fedavg``: every tensor is averaged, including batch normalisation (plain mean of the variances).
``fedbn``: batch normalisation stays local at each site (Li et al., ICLR 2021), so there is no global model.
``fedbn_plus``: batch normalisation is frozen at its initial, pre-trained values at all sites and never sent
("FedFBN", Kulkarni et al. 2023, arXiv 2303.06180).
"""

Criterion = Literal["auroc", "loss"]
"""The figure by which the best round is chosen: mean AUROC, or loss."""

Pooled = Literal["no", "negative", "masked", "known"]
"""How missing labels count if a simulation pools all images at one site; ``no`` if it does not pool."""


class Parameters(BaseModel):
    """The keys of the ``[method]`` table of every method that averages updates.

    Attributes:
        trunk: ``fedavg`` averages batch normalisation like all else. ``fedbn`` leaves it at each site, so that there is
            no global model. ``fedbn_plus`` freezes it as it is in ``model.weights``, which it needs.
        weighting: A site's weight in every mean: 1 (``uniform``, as secure aggregation needs), or its number of
            training images (``samples``).
        warm_up_epochs: Local epochs with a frozen backbone at the beginning of a site's first round (under secure
            aggregation, of round 1 alone); the epoch with the lowest validation loss is used.
        warm_up_lr: Learning rate of the warm-up.
        proximal_mu: Strength of the proximal term (FedProx), which is added to the method's loss.
        clip_update: The largest Euclidean length of a site's update.
        compress_update: Number format in which a site sends its trunk: ``float16`` halves the bytes, ``int8`` quarters
            them. The rounding error is added to the next update.
        compress_model: Number format in which the coordinator sends the trunk; it rounds its own model to that format,
            and adds the rounding error to the next round's model.
        server_optimizer: Server optimiser, which uses the mean update as a gradient (FedAdam, FedYogi, momentum).
        mean: A robust mean instead of the plain one, so that a few wrong updates have little effect.
        round_defaults: Setting that counts rounds -> its value where the experiment gives none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {}

    trunk: TrunkRule = "fedavg"
    weighting: Weighting = "uniform"
    warm_up_epochs: int = Field(0, ge=0)
    warm_up_lr: float = Field(1e-3, gt=0)
    proximal_mu: float = Field(0.0, ge=0)
    clip_update: float | None = Field(None, gt=0)
    compress_update: NumberFormat = "float32"
    compress_model: NumberFormat = "float32"
    server_optimizer: ServerOptimizer | None = None
    mean: RobustMeanRule | None = None

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the stages, ramps and periods that a run must reach, so that it is a run of this method."""
        return ()


Granularity = Literal["images", "signs", "positives", "counts"]
"""The images that a statistic describes, for the site's disclosure limits: all training images; the negatives and
positives of each class (first two axes); or the positives of each class (first axis). ``counts`` are numbers of images
of each class."""


@dataclass(frozen=True)
class Statistic:
    """A statistic that a site's reply may contain in addition to the update.

    Attributes:
        name: Name of the statistic in records.
        granularity: The images that each entry describes; a site omits entries that describe too few patients.
        meaning: Description for hospitals in plain words.
        least: Smallest possible value; a reply with a smaller one does not count.
    """

    name: str
    granularity: Granularity
    meaning: str
    least: float = -math.inf

    def find_impossible_value(self, values: NDArray[np.floating]) -> str:
        """Return a sentence on the smallest value if it is impossible; empty if all are possible or NaN."""
        smallest = float(np.nanmin(values, initial=math.inf))
        return (
            f'"{self.name}" holds {smallest:.3g}, and cannot be below {self.least:g}' if smallest < self.least else ""
        )


@dataclass(frozen=True)
class Payload:
    """Declares the model parts and statistics that sites send and receive, so that a policy can check them in advance.

    Attributes:
        trunk: True if the trunk is averaged; otherwise each site trains its own.
        head: True if head rows are averaged over the sites that send them; otherwise each site trains its own.
        rows: Head rows that a site holds: ``own`` for its annotated classes in its own order, ``all`` for all classes
            of the run.
        sends_rows: Head rows that a site sends: ``all`` that it holds, or only its ``own``.
        statistics: Statistics that a reply may contain in addition to the update; no other data leaves a site.
        label_counts: True if the roll call asks for the number of images that show each class.
    """

    trunk: bool = True
    head: bool = True
    rows: Literal["own", "all"] = "all"
    sends_rows: Literal["own", "all"] = "all"
    statistics: tuple[Statistic, ...] = ()
    label_counts: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the declared statistics."""
        return tuple(statistic.name for statistic in self.statistics)


class SiteMethod:
    """The hospital's half of FedAvg and base class of all methods, which override some members.

    Args:
        parameters: The ``[method]`` table.

    Raises:
        pydantic.ValidationError: If the table is invalid.
        BadInput: If the method does not support the task.

    Attributes:
        name: Name in experiment files.
        table: Schema of the ``[method]`` table.
        declared: The data that sites send and receive with default parameters.
        missing: How the loss treats classes that a site does not annotate, if the ``[method]`` table has no such key.
        plain_client: True if a site's loss is the mean of a separate loss of each image.
        looks_at_images: True if :meth:`client` uses the images or draws views of them; then the features of a frozen
            backbone are computed anew for every batch.
        weighs_updates: True if the coordinator computes weights from updates; then it stores all updates of a round.
        reads_updates: True if the coordinator's statistics follow from single updates; then, too, it stores them.
        full_coverage: True if every site must annotate every class.
        takes_volumes: True if the method trains on volumes.
        multi_class: True if the method supports tasks in which classes exclude one another.
        no_segmentation: Why the method does not go with labels of pixels; empty if it does.
        selection: Who chooses the best round: the ``federation`` by the sites' mean, or each ``site`` for itself.
        sequential: True if the model passes from hospital to hospital instead of being averaged.
        hospitals_train: True if hospitals train at all.
        ranks_sites: True if every site trains once before round 1, to determine the order of the sites.
        chooses_loss: True if ``[training]`` may choose another loss; False if the loss is part of the method.
        needs_global_norm: Why batch normalisation cannot stay at the sites; empty if it can.
        stores_statistics_by_site: True if the names of the statistics that the coordinator stores are sites. Then the
            method leaves out those of sites that do not count (``context.uncounted``). If False, the stored statistics
            are dropped when a site that is in them does not count any more.
        trains_own_model: True if a site also trains a whole model of its own, which never leaves it and which it tests
            (:attr:`LocalRound.own_objective`).
        keeps_method_state: True if :attr:`LocalRound.method_state` makes arrays that a site stores for its next round.
    """

    name: ClassVar[str]
    table: ClassVar[type[Parameters]] = Parameters
    declared: ClassVar[Payload] = Payload()
    missing: ClassVar[Missing] = "masked"
    plain_client: ClassVar[bool] = True
    looks_at_images: ClassVar[bool] = False
    weighs_updates: ClassVar[bool] = False
    reads_updates: ClassVar[bool] = False
    full_coverage: ClassVar[bool] = False
    takes_volumes: ClassVar[bool] = True
    multi_class: ClassVar[bool] = True
    no_segmentation: ClassVar[str] = ""
    selection: ClassVar[Literal["federation", "site"]] = "federation"
    sequential: ClassVar[bool] = False
    hospitals_train: ClassVar[bool] = True
    ranks_sites: ClassVar[bool] = False
    chooses_loss: ClassVar[bool] = True
    needs_global_norm: ClassVar[str] = ""
    stores_statistics_by_site: ClassVar[bool] = False
    trains_own_model: ClassVar[bool] = False
    keeps_method_state: ClassVar[bool] = False
    parameters: Parameters

    def __init_subclass__(cls, **more: Any) -> None:
        """Set the flags ``plain_client`` and ``looks_at_images`` of a subclass with its own objective or loss."""
        super().__init_subclass__(**more)
        if vars(cls).keys() & {"client", "local_loss"}:
            cls.plain_client = vars(cls).get("plain_client", False)
        if "client" in vars(cls):
            cls.looks_at_images = vars(cls).get("looks_at_images", True)

    def __init__(self, parameters: Mapping[str, Any] | None = None, task: Task = "multi_label") -> None:
        self.parameters, self.task = self.table.model_validate(dict(parameters or {})), task
        if task == "multi_class" and not self.multi_class:
            problem = f"{self.name} asks of each class by itself whether it is there"
            problem = f"{problem}; in a multi-class task classes exclude others."
            raise BadInput([Fault("run.method", problem, 'Use "fedsld" or "unifed", or model.task = "multi_label".')])
        if is_segmentation(task) and self.no_segmentation:
            problem = f"{self.name} does not go with segmentation: {self.no_segmentation}."
            remedy = 'Use "surgical", "partial_loss" or "condistfl".'
            raise BadInput([Fault("run.method", problem, remedy)])

    # ------------------------------------------------------------------ declared data

    @cached_property
    def declared_payload(self) -> Payload:
        """Return the data that sites send and receive with these parameters."""
        return self.declared

    @cached_property
    def missing_labels_count_as(self) -> Missing:
        """Return how the loss treats classes that a site does not annotate."""
        return getattr(self.parameters, "missing", self.missing)

    @cached_property
    def loss(self) -> LossFunction:
        """Return the loss that validation measures, which is by default also the training loss."""
        losses = SEGMENTATION_LOSSES if is_segmentation(self.task) else PLAIN_LOSSES
        return losses[self.task, self.missing_labels_count_as]

    def choose_training_loss(self, examples: LabelledExamples, spec: TrainingSection) -> LossFunction:
        """Return the training loss: the one chosen in ``[training]``, or :attr:`loss`.

        Raises:
            BadInput: If a chosen plug-in is not installed.
        """
        loss = make_training_loss(spec, self.loss, self.task, self.missing_labels_count_as, examples.labels)
        return examples.simplify_loss(loss)

    def make_batch_weight(self, examples: LabelledExamples, spec: TrainingSection) -> BatchWeight:
        """Return the function that weighs batches whose gradients are added up, to go with the training loss."""
        return make_batch_weight(spec, self.task, self.missing_labels_count_as, examples.labels)

    @cached_property
    def default_selection_criterion(self) -> Criterion:
        """Return the method's default criterion for the best round: AUROC in multi-label tasks, otherwise loss.

        The papers compare AUROC, and the plain loss says little about adjusted or weighted logits. UniFed uses the loss
        in multi-class tasks. In segmentation the mean Dice takes the place of the AUROC.
        """
        return "loss" if self.task == "multi_class" else "auroc"

    def choose_selection_criterion(self, evaluation: EvaluationSection) -> Criterion:
        """Return the criterion for the best round: the experiment's, or the method's default."""
        return self.default_selection_criterion if evaluation.criterion == "method" else evaluation.criterion

    @property
    def pooled_missing_labels(self) -> Pooled:
        """Return how missing labels count if a simulation pools all images at one site; ``no`` if it does not pool."""
        return "no"

    @cached_property
    def early_stopping(self) -> EarlyStopping | None:
        """Return the rule that stops a site's training in a round; None for the experiment's number of epochs."""
        return None

    @cached_property
    def sends_batch_norm(self) -> bool:
        """Return True if batch normalisation is averaged with the trunk."""
        return self.declared_payload.trunk and self.parameters.trunk == "fedavg"

    @cached_property
    def keeps_batch_norm_local(self) -> bool:
        """Return True if batch normalisation is trained at each site and never sent."""
        return self.parameters.trunk == "fedbn"

    @cached_property
    def freezes_batch_norm(self) -> bool:
        """Return True if batch normalisation is neither trained nor updated."""
        return self.parameters.trunk == "fedbn_plus"

    @cached_property
    def has_global_model(self) -> bool:
        """Return True if training results in one model for all sites and classes, which all of them use."""
        return (
            self.declared_payload.trunk
            and self.declared_payload.head
            and not self.trains_own_model
            and (self.sends_batch_norm or self.freezes_batch_norm)
        )

    @cached_property
    def keeps_local_parts(self) -> bool:
        """Return True if a site keeps parts of its model that it never sends."""
        return not self.has_global_model

    def stores_site_state(self, plan: HospitalPlan) -> bool:
        """Return True if a site stores a state after each round for its next one; then a missing state is a fault."""
        compresses = self.parameters.compress_update != "float32"
        return self.keeps_local_parts or self.keeps_method_state or plan.keeps_optimizer_state or compresses

    @cached_property
    def trains_alone(self) -> bool:
        """Return True if every site trains alone, so that no model part is averaged."""
        return not self.declared_payload.trunk and not self.declared_payload.head

    def select_own_rows(self, site: str, contract: LabelContract) -> tuple[str, ...]:
        """Return the head rows that a site holds, in the order of its own head."""
        return contract.sites[site] if self.declared_payload.rows == "own" else contract.class_names

    @cached_property
    def tests_all_rows(self) -> bool:
        """Return True if a site tests the model with the head rows of all classes, though it trains with its own alone.

        Where classes of pixels exclude one another, a pixel goes to the highest row. The model that the run saves
        decides among all classes; one of fewer rows has fewer rivals, and its Dice would flatter the saved model.
        """
        is_exclusive = self.task == "exclusive_segmentation"
        return is_exclusive and self.has_global_model and self.declared_payload.rows == "own"

    def select_test_rows(self, site: str, contract: LabelContract) -> tuple[str, ...]:
        """Return the head rows with which a site tests the model: its own, or those of all classes."""
        return contract.class_names if self.tests_all_rows else self.select_own_rows(site, contract)

    def select_sent_rows(self, held: tuple[str, ...], annotated: Collection[str]) -> tuple[str, ...]:
        """Return the classes whose head rows a site sends: all that it holds, or only those that it annotates.

        The method's :attr:`Payload.sends_rows` decides between the two.

        Args:
            held: Classes whose head rows the site holds.
            annotated: Classes that the site annotates, so that its images have labels for them.
        """
        return held if self.declared_payload.sends_rows == "all" else tuple(name for name in held if name in annotated)

    @property
    def special_last_rounds(self) -> int:
        """Return how many rounds at the end of a run differ from the others; a run with any cannot be extended."""
        return 0

    # ------------------------------------------------------------------ training

    def local_loss(self, statistics: Arrays, examples: LabelledExamples, spec: TrainingSection) -> LossFunction:
        """Return the training loss, for methods whose loss depends only on the logits of one view of each image.

        Args:
            statistics: The statistics that the coordinator sent.
        """
        return self.choose_training_loss(examples, spec)

    def client(self, context: ClientContext) -> LocalRound:
        """Return the local round of a site: its objective, and functions for the statistics and the stored state."""
        return LocalRound(plain(self.local_loss(context.statistics, context.examples, context.spec)))

    def make_local_round(self, context: ClientContext) -> LocalRound:
        """Return the local round of :meth:`client`, with FedProx's proximal term if ``proximal_mu`` is set."""
        mu = self.parameters.proximal_mu
        if not mu:
            return self._call_client(context)
        sends_head, sends_norm = self.declared_payload.head, self.sends_batch_norm
        return add_proximal_term(self._call_client, mu, head=sends_head, norm=sends_norm)(context)

    def _call_client(self, context: ClientContext) -> LocalRound:
        """Return the result of :meth:`client`; ``WireError`` if a plug-in's method returns something else."""
        local: Any = self.client(context)
        if not isinstance(local, LocalRound):
            remedy = "Return LocalRound(objective), where objective(model, batch) is what training minimises"
            problem = f"{self.name}: client() returned a {type(local).__name__}, not a LocalRound."
            raise WireError(f"{problem} {remedy}: docs/new-method.md.")
        return local

    # ------------------------------------------------------------------ faults of parameters and contract

    def find_parameter_faults(self) -> list[Fault]:
        """Return the faults of parameters that contradict one another."""
        faults, reason = list[Fault](), self.explain_no_averaging()
        if self.needs_global_norm and self.parameters.trunk == "fedbn":
            problem = f'makes no sense in {self.name}: {self.needs_global_norm}, and with "fedbn" there is none.'
            faults.append(Fault("method.trunk", problem, 'Use "fedavg" or "fedbn_plus".'))
        problem, keys = f"makes no sense in {self.name}: {reason}.", self.list_averaging_options() if reason else []
        faults += [Fault(f"method.{key}", problem, "Leave it out.") for key in keys]
        if self.parameters.mean is not None and self.weighs_updates:
            problem = f"makes no sense in {self.name}: it weighs the sites by a rule of its own."
            faults.append(Fault("method.mean", problem, "Leave it out."))
        return faults

    def find_training_faults(self, training: TrainingSection) -> list[Fault]:
        """Return the faults of a ``[training]`` table with which the method would not be itself; by default none."""
        return []

    def find_contract_faults(self, contract: LabelContract) -> list[Fault]:
        """Return the faults if the method does not support a label contract: the classes that each site annotates."""
        mean = self.parameters.mean
        if mean is not None and len(contract.sites) < mean.min_sites_for_robust_mean:
            needed = mean.min_sites_for_robust_mean
            problem = f"{mean.kind} needs {needed} sites or more; there are {len(contract.sites)}."
            return [Fault("method.mean", problem, "Leave it out, or choose another.")]
        shared = frozenset(contract.shared_classes)
        partial = [name for name in contract.class_names if name not in shared]
        if not self.full_coverage or not partial:
            return []
        problem = f"{self.name} needs every class annotated by every site; {quote_names(partial)} are not."
        remedy = 'Use "surgical" or "partial_loss", which learn from partial labels, or "vanilla": missing is negative.'
        return [Fault("run.method", problem, remedy)]

    def list_averaging_options(self) -> list[str]:
        """Return the names of the parameters for averaging whose values differ from their defaults."""
        keys = ("proximal_mu", "clip_update", "compress_update", "compress_model", "server_optimizer", "mean")
        return [key for key in keys if getattr(self.parameters, key) != Parameters.model_fields[key].default]

    def explain_no_averaging(self) -> str:
        """Return why the method averages nothing; empty if it averages updates."""
        if self.pooled_missing_labels != "no":
            return "there is one pseudo-site, and nothing to average"
        return "" if self.declared_payload.trunk else "every site trains by itself, and nothing is averaged"


class SequentialSite(SiteMethod):
    """Base class of the hospital's half of methods that pass one model from hospital to hospital.

    Attributes:
        stores_site_models: True if the coordinator's statistics follow from the models that sites passed on in a round.
        has_averaging_rounds: True if updates are averaged in some rounds (:meth:`averages_in_round`).
    """

    sequential = True
    missing = "negative"
    stores_site_models: ClassVar[bool] = False
    has_averaging_rounds: ClassVar[bool] = False

    def averages_in_round(self, server_round: int) -> bool:
        """Return True if all sites receive the same model in this round, and their updates are averaged."""
        return False

    def list_averaging_options(self) -> list[str]:
        """Return the names of changed parameters that make no sense in a method that passes the model on.

        These are parameters for averaging, weighting and warm-up with a value other than the default. If hospitals
        train, ``proximal_mu`` is not among them.
        """
        options = [key for key in super().list_averaging_options() if key != "proximal_mu" or not self.hospitals_train]
        options += ["weighting"] if self.parameters.weighting != "uniform" else []
        return options + (["warm_up_epochs"] if self.parameters.warm_up_epochs else [])

    def explain_no_averaging(self) -> str:
        """Return why the method averages nothing: the model is passed on."""
        return "the model is passed on, not averaged"

    def find_parameter_faults(self) -> list[Fault]:
        """Return the base class's faults, and one if ``trunk = "fedbn"`` keeps batch normalisation at the sites."""
        faults = super().find_parameter_faults()
        if self.parameters.trunk == "fedbn":
            problem = f"makes no sense in {self.name}: the whole network is passed on, batch normalisation too."
            faults.append(Fault("method.trunk", problem, 'Use "fedavg" or "fedbn_plus".'))
        return faults


def compute_largest_epoch_count(method: SiteMethod, plan: HospitalPlan) -> int:
    """Return the largest possible number of local epochs in a round: the experiment's or the early stopping cap.

    The larger one counts, because a site without validation labels trains the experiment's number.
    """
    return max(plan.training.epochs, method.early_stopping.cap if method.early_stopping else 0, 1)
