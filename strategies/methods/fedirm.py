"""FedIRM: sites match the relations between classes that other sites have learned from labels.

Liu, Yang, Dou, Heng: "Federated Semi-supervised Medical Image Classification via Inter-client Relation Matching",
MICCAI 2021.

A *relation* is a row over all classes that sums to one: the softened mean prediction for the images that show one
class. The rows of all classes are the *disease relation matrix*.

The paper's method. Sites with labels train on them and send their disease relation matrix (temperature 2). The
coordinator sends the mean matrix to the sites without labels, which join after 20 rounds. They minimise two terms, with
a Gaussian ramp-up over rounds: consistency, the squared difference from a mean teacher that sees another view; and
inter-client relation matching, the symmetric KL divergence between the federation's relations and the batch's. The
batch's relations use pseudo-labels that are certain over several passes with dropout. We had the abstract and the
authors' published code, not the text, so equation numbers are missing. That code weighs both terms by 15, halves the
sum of the divergences, and sums consistency over classes; we use 1, the sum, and means.

Our version, because images have several labels and a site annotates some classes:

- Every site is a labelled site for the classes that it annotates and an unlabelled site for the others. It minimises
  the partial loss on the former and, after ``supervised_rounds`` rounds, both terms on the latter. If no label is
  missing, this is FedAvg.
- The row of a class is sent by the sites that annotate the class, computed over the images that show it, and averaged
  over these sites. The columns are all classes. An image may belong to several rows.
- A pseudo-label is an entry that is more likely present than absent; its uncertainty is the entropy of the two
  probabilities. The authors' code accepts an entropy below 2 nats and a confidence from 0.3, which rejects hardly any
  of five classes and none of two outcomes; our bound is stricter.
- The networks of FedMLP's tables have no dropout, so the passes differ by augmented views and by dropout in a neck. The
  teacher makes the passes, because passes of the student would change its batch normalisation.
- The teacher starts each round as the received model, so that nothing is stored at the site and no teacher is outdated.
  The authors' teacher stays at its site.
- FedMLP's authors weigh positives by images over positives, counted with labels that the site does not have; we use the
  site's own counts.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from polyclinic.common.models.network import Model, compute_logits
from polyclinic.common.wire.records import Arrays
from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.local.losses import compute_positive_weights, partial_loss
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload, Statistic
from polyclinic.strategies.local.objective import (
    Batch,
    ClientContext,
    LocalRound,
    Losses,
    compute_teacher_decay,
    copy_model_as_teacher,
    plain,
    update_teacher_average,
)
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Stage, make_share_of_rounds
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply
from polyclinic.strategies.methods.fedmlp import compute_teacher_consistency_loss

Floats = NDArray[np.floating]


class FedIRMParameters(Parameters):
    """The ``[method]`` table of ``fedirm``. A class's relation is the mean prediction for images that show the class.

    Attributes:
        supervised_rounds: Number of rounds on labels alone; sites send relations from the last of these rounds on. A
            third of the run's rounds, at most 20, if the experiment gives none.
        ramp_rounds: Number of rounds, from round 1, over which the weight of the unlabelled terms grows; half of the
            run's rounds, at most 30, if the experiment gives none.
        unlabelled_weight: The largest weight of the unlabelled terms.
        teacher_decay: Largest decay of the teacher's running mean; in a round's first steps the decay is lower.
        temperature: Divisor of the logits from which relations are computed.
        passes: Number of the teacher's passes whose mean gives a pseudo-label.
        entropy_below: Bound in nats: an image with a higher entropy for a class does not count for the class's
            relation. 0.5 corresponds to a probability of 0.8.
        balanced: True to weigh the positive labels of a class by the site's ratio ``known labels / positives`` of the
            class.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "supervised_rounds": make_share_of_rounds("a third", 1, 3, most=20),
        "ramp_rounds": make_share_of_rounds("half", 1, 2, most=30),
    }
    weighting: Weighting = "samples"
    supervised_rounds: int = Field(20, ge=0)
    ramp_rounds: int = Field(30, ge=0)
    unlabelled_weight: float = Field(1.0, ge=0)
    teacher_decay: float = Field(0.99, ge=0, lt=1)
    temperature: float = Field(2.0, gt=0)
    passes: int = Field(8, ge=1)
    entropy_below: float = Field(0.5, gt=0)
    balanced: bool = True

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the first round with unlabelled terms, and the round in which they have their largest weight."""
        if not self.unlabelled_weight:
            return ()
        supervised = self.supervised_rounds
        ramp = self.ramp_rounds
        event = "training without labels begins"
        return (
            Stage(event, supervised + 1, ("supervised_rounds",), "supervised_rounds = 0"),
            Stage("its terms reach their weight", ramp + 1, ("ramp_rounds",), "ramp_rounds = 0"),
        )


# ---------------------------------------------------------------------- relations
# Shapes: logits (n, classes); members (n, rows) says which images show the class of which row.


def compute_log_relations(logits: Tensor, members: Tensor, temperature: float) -> Tensor:
    """Return the logarithm of the relations of some classes to all classes, ``(rows, classes)``.

    There is one row for each of these classes: the log-softmax of the mean logits of the images that show the class.

    Args:
        logits: ``(batch, classes)``.
        members: True for the images that show the class of a row, bool ``(batch, rows)``; a row without images becomes
            uniform.
        temperature: Divisor of the mean logits.
    """
    weights = members.to(logits)
    means = weights.T @ logits / weights.sum(dim=0).clamp(min=1)[:, None]
    return torch.log_softmax(means / temperature, dim=1)


def mask_confident_positives(probabilities: Tensor, entropy_below: float) -> Tensor:
    """Return a mask of the entries with a probability above 0.5 and an entropy below ``entropy_below`` nats."""
    entropy: Tensor = torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)
    return (probabilities > 0.5) & (entropy < entropy_below)


def compute_relation_divergence(own: Tensor, members: Tensor, federation: Tensor) -> Tensor:
    """Return the symmetric Kullback-Leibler divergence between the site's and the federation's class relations.

    It is ``sum (p - q)(log p - log q)``, averaged over the rows that both have; 0 without gradient if there are none.

    Args:
        own: The site's :func:`compute_log_relations`, ``(rows, classes)``.
        members: True for the images that show the class of a row, ``(batch, rows)``; a row without images is omitted.
        federation: Relations ``(rows, classes)``, without gradient; a row that no site sent is NaN.
    """
    both = members.any(dim=0) & ~federation.isnan().any(dim=1)
    theirs = federation.nan_to_num(1.0).clamp(min=1e-8)
    divergences = ((own.exp() - theirs) * (own - theirs.log())).sum(dim=1)
    return torch.where(both, divergences, 0.0).sum() / both.sum().clamp(min=1)


def average_class_relations(relations: Mapping[str, Floats]) -> NDArray[np.float64]:
    """Return the unweighted mean of each class's relation over the sites that sent it; NaN if none did.

    Args:
        relations: Site -> its relations ``(classes, classes)``: in each row the mean prediction for images of one
            class. A row that does not sum to one, or has a negative entry, is omitted.
    """
    rows = np.stack([relations[site].astype(np.float64) for site in sorted(relations)])  # (sites, classes, classes)
    good = (rows >= 0).all(axis=2) & (np.abs(rows.sum(axis=2) - 1) < 1e-3)
    count = good.sum(axis=0)[:, None]
    total = np.where(good[..., None], rows, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def compute_unlabelled_loss_weight(finished: int, rounds: int) -> float:
    """Return the weight of the unlabelled terms as a fraction of its largest value.

    It is ``exp(-5 (1 - finished / rounds)^2)``, and 1 from ``rounds`` finished rounds on.
    """
    return math.exp(-5 * (1 - min(1.0, finished / rounds)) ** 2) if rounds else 1.0


def copy_as_dropout_teacher(model: Model) -> Model:
    """Return a frozen copy of the model: batch normalisation in evaluation mode, dropout in training mode."""
    teacher = copy_model_as_teacher(model)
    for module in teacher.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    return teacher


# ---------------------------------------------------------------------- hospital


class FedIRMSite(SiteMethod):
    """The hospital's half of FedIRM: partial loss; later also consistency and relation matching for missing labels."""

    traits = MethodTraits(
        "fedirm",
        parameters_class=FedIRMParameters,
        payload=Payload(
            statistics=(Statistic("relations", "positives", "what the model says of each class's images on average"),)
        ),
        supports_multi_class=False,
        reason_against_segmentation="it compares what the model says of whole images",
        allows_other_loss=False,
    )
    parameters: FedIRMParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: it trains on labels, and later also by consistency and relation matching.

        The second part begins after the supervised rounds, at sites that do not label all classes.
        """
        local = FedIRMRound(context, self.parameters)
        return LocalRound(local.objective if local.matches else plain(local.supervised), local.statistics)


class FedIRMRound:
    """One round of FedIRM at one site.

    Attributes:
        missing: Mask of the classes that the site does not label, ``(classes,)``.
        weight: Weight of the unlabelled terms in this round.
        supervised: The loss of the labelled entries.
        matches: True if this round matches the site's relations with the federation's.
    """

    def __init__(self, context: ClientContext, parameters: FedIRMParameters) -> None:
        self.context, self.parameters = context, parameters
        self.missing = ~context.examples.annotated
        ramp = compute_unlabelled_loss_weight(context.round - 1, parameters.ramp_rounds)
        self.weight = parameters.unlabelled_weight * ramp
        positives = compute_positive_weights(context.examples.labels) if parameters.balanced else None
        self.supervised = partial(partial_loss, positive_weight=positives)
        self.matches = bool(context.round > parameters.supervised_rounds and self.missing.any())
        if self.matches:
            self.steps = 0
            self.teacher = copy_as_dropout_teacher(context.network)
        nothing = np.full((len(self.missing), len(self.missing)), np.nan, np.float32)
        relations = context.statistics.get("relations", nothing)
        self.federation = torch.from_numpy(relations.copy()).to(self.missing.device)[self.missing]

    def objective(self, model: Model, batch: Batch) -> Tensor:
        """Return the partial loss plus the weighted terms for missing labels.

        These are the squared distance from the teacher's probabilities, and the divergence from the federation's class
        relations.
        """
        if self.steps:  # the teacher follows the step that the student has made since the last batch
            decay = compute_teacher_decay(self.steps, self.parameters.teacher_decay)
            update_teacher_average(self.teacher, model, decay)
        self.steps += 1
        student = batch.logits(model, batch.view())
        with torch.no_grad():
            teachers = [batch.logits(self.teacher, batch.view()) for _ in range(self.parameters.passes)]
        likely = torch.stack([logits.sigmoid() for logits in teachers]).mean(dim=0)[:, self.missing]
        members = mask_confident_positives(likely, self.parameters.entropy_below)
        own = compute_log_relations(student, members, self.parameters.temperature)
        consistency = compute_teacher_consistency_loss([student], teachers[:1], batch.annotated)
        unlabelled = consistency + compute_relation_divergence(own, members, self.federation)
        return self.supervised(student, batch.labels, batch.annotated) + self.weight * unlabelled

    def statistics(self, model: Model, losses: Losses) -> Arrays:
        """Return the class relations ``(classes, classes)``: in each row the mean prediction for images of one class.

        They are computed with the trained model from all training images, without augmentation. Rows are NaN for
        classes that the site does not label or has no image of. The result is empty before the last supervised round.
        """
        if self.context.round < self.parameters.supervised_rounds:
            return {}
        examples = self.context.examples
        logits = compute_logits(model, examples.images, self.context.spec.precision)
        members = (examples.labels == 1) & examples.annotated
        with torch.no_grad():
            relations = compute_log_relations(logits, members, self.parameters.temperature).exp()
        return {"relations": torch.where(members.any(dim=0)[:, None], relations, torch.nan).cpu().numpy()}


# ---------------------------------------------------------------------- coordinator


class FedIRM(Method):
    """The coordinator's half of FedIRM: FedAvg, and the mean of the sites' disease relation matrices."""

    site_class = FedIRMSite
    site: FedIRMSite

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives every site the mean class relations."""
        return lambda site: context.statistics

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of a site's class relations; empty before the last supervised round."""
        classes = len(context.contract.class_names)
        return {"relations": (classes, classes)} if context.round >= self.site.parameters.supervised_rounds else {}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return this round's mean class relations; a row that no site sent keeps its earlier value."""
        relations = {
            site: np.where(context.contract.annotated_class_mask(site)[:, None], reply.statistics["relations"], np.nan)
            for site, reply in replies.items()
            if "relations" in reply.statistics
        }
        if not relations:
            return context.statistics
        now = average_class_relations(relations)
        before = context.statistics.get("relations", now)
        return {"relations": np.where(np.isnan(now), before, now).astype(np.float32)}
