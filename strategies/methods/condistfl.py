"""ConDistFL: a site holds the classes that it does not annotate to the model it received.

Wang, Shen, Myronenko et al.: "ConDistFL: Conditional Distillation for Federated Learning from Partially Annotated
Data", DeCaF 2023 (arXiv 2308.04070), and its longer version, arXiv 2412.18833. Both segment. We had abstracts and the
authors' published code (NVFlare, research/condist-fl), whose facts we follow.

The authors' method, with FedAvg. A site minimises the supervised loss over its own organs, plus a weight times a Dice
loss between the probabilities of student and teacher for everything else. The teacher is the received model, in
evaluation mode, on the same view; both are softened by the temperature 2. The probabilities are *conditional*: that a
voxel shows this class given that it shows none of the site's own. Voxels that show an own organ by label, or by the
teacher, are left out. The weight grows linearly from 0.01 in the first round to 1 in the last.

In exclusive segmentation that is our version, with the marginal loss as supervised loss, as in the authors' code, and
the background as one of the groups that are distilled. Departures: each class is a group of its own (the authors join
an organ and its tumour), one pixel is added to both sides of a Dice, and the optimiser is the experiment's. In
segmentation of classes that may overlap, a class's conditional probability is its own, and no pixel is left out.

Our version for multi-label images. Classes do not exclude one another, so a class's conditional probability is its own
probability, and no image is left out. The Dice loss, which compares areas, becomes the Kullback-Leibler divergence of
present and absent, as the mean over images and over the classes that the site does not annotate. In a multi-class task
every image of a site shows an own class; all would be left out, so that task is refused.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.models.network import Model
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, copy_model_as_teacher
from polyclinic.strategies.local.segmentation_losses import (
    conditional_distillation_loss,
    independent_distillation_loss,
    marginal_loss,
)
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Settings, Stage
from polyclinic.strategies.methods.base import Method, make_method


def _choose_ramp(rounds: int, settings: Settings) -> int:
    return max(0, rounds - 1)


class ConDistFLParameters(Parameters):
    """The ``[method]`` table of ``condistfl``. The defaults are those of the authors' code.

    Attributes:
        temperature: Divisor of the logits of student and teacher; above 1 softens.
        first_weight: Weight of the distance from the teacher in round 1.
        last_weight: Its weight after ``ramp_rounds`` rounds.
        ramp_rounds: Rounds over which the weight grows linearly; if the experiment gives none, up to the last round.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "ramp_rounds": RoundDefault("up to the last round", _choose_ramp)
    }
    temperature: float = Field(2.0, gt=0)
    first_weight: float = Field(0.01, ge=0)
    last_weight: float = Field(1.0, ge=0)
    ramp_rounds: int = Field(119, ge=0)

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the round in which the weight is ``last_weight``."""
        if self.first_weight == self.last_weight:
            return ()
        event = "the distance from the received model has its last weight"
        return (Stage(event, self.ramp_rounds + 1, ("ramp_rounds",), "ramp_rounds = 0"),)


def compute_distillation_weight(finished: int, first: float, last: float, rounds: int) -> float:
    """Return the weight after a number of finished rounds: ``first``, then linearly up to ``last`` after ``rounds``."""
    return first + (last - first) * (min(1.0, finished / rounds) if rounds else 1.0)


def compute_distance_from_teacher(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean over entries of the Kullback-Leibler divergence KL(teacher || student), in nats.

    Args:
        student: Logits of the classes that the site does not annotate, ``(batch, classes)``, at least one class.
        teacher: The teacher's logits of the same view and classes.
        temperature: Divisor of both.
    """
    targets = (teacher / temperature).sigmoid()
    cross_entropy = binary_cross_entropy_with_logits(student / temperature, targets)
    entropy = binary_cross_entropy_with_logits(teacher / temperature, targets)
    return cross_entropy - entropy


class ConDistFLSite(SiteMethod):
    """The hospital's half of ConDistFL: its own labels, and the received model's predictions for other classes."""

    traits = MethodTraits("condistfl", parameters_class=ConDistFLParameters, supports_multi_class=False)
    parameters: ConDistFLParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: the loss over own classes, plus the weighted distance from the received model."""
        parameters = self.parameters
        supervised = self.choose_training_loss(context.examples, context.spec)
        if self.task == "exclusive_segmentation" and context.spec.loss == "plain":
            supervised = marginal_loss  # without the exclusion loss: what excludes the own classes is distilled
        teacher = copy_model_as_teacher(context.network)
        weight = compute_distillation_weight(
            context.round - 1, parameters.first_weight, parameters.last_weight, parameters.ramp_rounds
        )

        def objective(model: Model, batch: Batch) -> Tensor:
            view = batch.view()
            others = ~batch.annotated
            student = batch.logits(model, view)
            loss = supervised(student, batch.labels, batch.annotated)
            if not others.any():
                return loss
            with torch.no_grad():
                received = batch.logits(teacher, view)
            return loss + weight * self._measure_distance(student, received, batch)

        return LocalRound(objective)

    def _measure_distance(self, student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
        """Return the distance between the logits of student and teacher, for the classes that the site lacks."""
        temperature = self.parameters.temperature
        others = ~batch.annotated
        if self.task == "exclusive_segmentation":
            return conditional_distillation_loss(student, teacher, batch.labels, batch.annotated, temperature)
        if self.task == "segmentation":
            return independent_distillation_loss(student, teacher, batch.annotated, temperature)
        return compute_distance_from_teacher(student[:, others], teacher[:, others], temperature)


ConDistFL = make_method(Method, ConDistFLSite)
"""The coordinator's half, with the rules of FedAvg."""
