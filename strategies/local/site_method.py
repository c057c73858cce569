"""The hospital's half of a method: its traits, and the hooks by which it differs from FedAvg.

Each method is two classes, one for each side. The hospital runs only its own half.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar, final

from polyclinic.common.config import EvaluationSection, HospitalPlan, TrainingSection
from polyclinic.common.contract import PooledLabels
from polyclinic.common.errors import BadInput, Fault, WireError, quote_names
from polyclinic.common.models.zoo.spec import Task, is_segmentation
from polyclinic.common.wire.records import Arrays
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.local.losses import (
    PLAIN_LOSSES,
    BatchWeight,
    LossFunction,
    Missing,
    make_batch_weight,
    make_training_loss,
)
from polyclinic.strategies.local.method_traits import Criterion, MethodTraits, Parameters, Payload, SequentialTraits
from polyclinic.strategies.local.model_parts import ModelParts
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples, LocalRound, add_proximal_term, plain
from polyclinic.strategies.local.segmentation_losses import SEGMENTATION_LOSSES

OLD_MEMBERS = {
    *{field.name for field in fields(SequentialTraits)} - {"payload"},
    *("table", "declared", "plain_client", "full_coverage", "takes_volumes", "multi_class", "no_segmentation"),
    *("chooses_loss", "needs_global_norm", "declared_payload", "client", "find_parameter_faults"),
}
"""Members of a method's class in release 0.1.0, which are now in its traits, or have another name."""


class SiteMethod:
    """The hospital's half of FedAvg and base class of all methods, which give their traits and override some hooks.

    Args:
        parameters: The ``[method]`` table.

    Raises:
        pydantic.ValidationError: If the table is invalid.
        BadInput: If the method does not support the task.

    Attributes:
        traits: The fixed properties of the method.
        parameters: The ``[method]`` table.
        task: The task of the run.
    """

    traits: ClassVar[MethodTraits]
    parameters: Parameters

    def __init__(self, parameters: Mapping[str, Any] | None = None, task: Task = "multi_label") -> None:
        self.parameters = self.traits.parameters_class.model_validate(dict(parameters or {}))
        self.task = task
        if task == "multi_class" and not self.traits.supports_multi_class:
            problem = f"{self.name} asks of each class by itself whether it is there"
            problem = f"{problem}; in a multi-class task classes exclude others."
            raise BadInput([Fault("run.method", problem, 'Use "fedsld" or "unifed", or model.task = "multi_label".')])
        if is_segmentation(task) and self.traits.reason_against_segmentation:
            reason = self.traits.reason_against_segmentation
            problem = f"{self.name} does not go with segmentation: {reason}."
            remedy = 'Use "surgical", "partial_loss" or "condistfl".'
            raise BadInput([Fault("run.method", problem, remedy)])

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse a class written for release 0.1.0: its training would be ignored, and the model would be FedAvg's.

        Raises:
            TypeError: With the names of the old members.
        """
        super().__init_subclass__(**more)
        if old := sorted(vars(cls).keys() & OLD_MEMBERS):
            remedy = "Give traits = MethodTraits(...) and override make_round: docs/new-method.md"
            raise TypeError(f"{cls.__name__} has members of release 0.1.0: {quote_names(old)}. {remedy}.")

    # ------------------------------------------------------------------ hooks: what a method may override

    @cached_property
    def payload(self) -> Payload:
        """Return the data that sites send and receive with these parameters."""
        return self.traits.payload

    @cached_property
    def missing_labels_count_as(self) -> Missing:
        """Return how the loss treats classes that a site does not annotate."""
        return getattr(self.parameters, "missing", self.traits.missing)

    @property
    def pooled_missing_labels(self) -> PooledLabels:
        """Return how missing labels count if a simulation pools all images at one site; ``no`` if it does not pool."""
        return "no"

    @cached_property
    def loss(self) -> LossFunction:
        """Return the loss that validation measures, which is by default also the training loss."""
        losses = SEGMENTATION_LOSSES if is_segmentation(self.task) else PLAIN_LOSSES
        return losses[self.task, self.missing_labels_count_as]

    def make_batch_weight(self, examples: LabelledExamples, spec: TrainingSection) -> BatchWeight:
        """Return the function that weighs batches whose gradients are added up, to go with the training loss."""
        return make_batch_weight(spec, self.task, self.missing_labels_count_as, examples.labels)

    @cached_property
    def early_stopping(self) -> EarlyStopping | None:
        """Return the rule that stops a site's training in a round; None for the experiment's number of epochs."""
        return None

    @property
    def special_last_rounds(self) -> int:
        """Return how many rounds at the end of a run differ from the others; a run with any cannot be extended."""
        return 0

    def local_loss(self, statistics: Arrays, examples: LabelledExamples, spec: TrainingSection) -> LossFunction:
        """Return the training loss, for methods whose loss depends only on the logits of one view of each image.

        Args:
            statistics: The statistics that the coordinator sent.
        """
        return self.choose_training_loss(examples, spec)

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round of a site: its objective, and functions for the statistics and the stored state."""
        return LocalRound(plain(self.local_loss(context.statistics, context.examples, context.spec)))

    def find_own_parameter_faults(self) -> list[Fault]:
        """Return the faults of parameters that contradict one another in this method alone; by default none."""
        return []

    def find_training_faults(self, training: TrainingSection) -> list[Fault]:
        """Return the faults of a ``[training]`` table with which the method would not be itself; by default none."""
        return []

    # ------------------------------------------------------------------ what follows from traits and hooks

    @property
    def name(self) -> str:
        """Return the method's name in experiment files."""
        return self.traits.name

    @final
    @cached_property
    def parts(self) -> ModelParts:
        """Return which parts of the model sites send, and which stay at a site."""
        return ModelParts(self.payload, self.parameters.trunk, self.task, self.traits.trains_own_model)

    @final
    @cached_property
    def loss_is_per_image(self) -> bool:
        """Return True if a site's loss is the mean of a separate loss of each image, as noise for each image needs."""
        overrides_loss = self._overrides_round or type(self).local_loss is not SiteMethod.local_loss
        return self.traits.loss_is_per_image or not overrides_loss

    @final
    @cached_property
    def looks_at_images(self) -> bool:
        """Return True if training uses images or draws views of them in another way than FedAvg.

        Then the features of a frozen backbone are computed anew for every batch.
        """
        return self.traits.looks_at_images and self._overrides_round

    @property
    def _overrides_round(self) -> bool:
        return type(self).make_round is not SiteMethod.make_round

    @final
    def choose_training_loss(self, examples: LabelledExamples, spec: TrainingSection) -> LossFunction:
        """Return the training loss: the one chosen in ``[training]``, or :attr:`loss`.

        Raises:
            BadInput: If a chosen plug-in is not installed.
        """
        loss = make_training_loss(spec, self.loss, self.task, self.missing_labels_count_as, examples.labels)
        return examples.simplify_loss(loss)

    @final
    @cached_property
    def default_selection_criterion(self) -> Criterion:
        """Return the method's default criterion for the best round: AUROC in multi-label tasks, otherwise loss.

        The papers compare AUROC, and the plain loss says little about adjusted or weighted logits. UniFed uses the loss
        in multi-class tasks. In segmentation the mean Dice takes the place of the AUROC.
        """
        return "loss" if self.task == "multi_class" else "auroc"

    @final
    def choose_selection_criterion(self, evaluation: EvaluationSection) -> Criterion:
        """Return the criterion for the best round: the experiment's, or the method's default."""
        return self.default_selection_criterion if evaluation.criterion == "method" else evaluation.criterion

    @final
    def stores_site_state(self, plan: HospitalPlan) -> bool:
        """Return True if this method and plan need a state on the site's disk between rounds.

        The state is of local parts of the model, the optimiser, the method's arrays, or rounding errors. A site fails a
        round if its state is missing.
        """
        compresses = self.parameters.compress_update != "float32"
        keeps_parts = self.parts.keeps_local_parts or self.traits.keeps_method_state
        return keeps_parts or plan.keeps_optimizer_state or compresses

    @final
    def make_local_round(self, context: ClientContext) -> LocalRound:
        """Return the local round of :meth:`make_round`, with FedProx's proximal term if ``proximal_mu`` is set.

        Raises:
            WireError: If a plug-in's ``make_round`` returns something else than a local round.
        """
        mu = self.parameters.proximal_mu
        if not mu:
            return self._make_checked_round(context)
        sends_head = self.payload.head
        sends_norm = self.parts.sends_batch_norm
        return add_proximal_term(self._make_checked_round, mu, head=sends_head, norm=sends_norm)(context)

    def _make_checked_round(self, context: ClientContext) -> LocalRound:
        local: Any = self.make_round(context)
        if not isinstance(local, LocalRound):
            remedy = "Return LocalRound(objective), where objective(model, batch) is what training minimises"
            problem = f"{self.name}: make_round() returned a {type(local).__name__}, not a LocalRound."
            raise WireError(f"{problem} {remedy}: docs/new-method.md.")
        return local


class SequentialSite(SiteMethod):
    """Base class of the hospital's half of methods that pass one model from hospital to hospital."""

    traits: ClassVar[SequentialTraits]

    def averages_in_round(self, server_round: int) -> bool:
        """Return True if all sites receive the same model in this round, and their updates are averaged."""
        return False


def compute_largest_epoch_count(method: SiteMethod, plan: HospitalPlan) -> int:
    """Return the largest possible number of local epochs in a round: the experiment's or the early stopping cap.

    The larger one counts, because a site without validation labels trains the experiment's number.
    """
    return max(plan.training.epochs, method.early_stopping.cap if method.early_stopping else 0, 1)
