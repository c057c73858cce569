"""FedIRM: a class without labels at a site must relate to other classes there as it does at sites that label it.

Liu, Yang, Dou, Heng: "Federated Semi-supervised Medical Image Classification via Inter-client Relation Matching",
MICCAI 2021.

The paper's: sites with labels train on them and send their disease relation matrix (temperature 2); the coordinator
averages the matrices and sends the mean to the sites without labels. These join after 20 rounds and minimise two terms,
weighted by a Gaussian ramp-up over rounds: consistency, the squared difference from a mean teacher that sees another
view, and inter-client relation matching, the KL divergence both ways between the federation's relations and those of
the batch, by pseudo-labels of which several passes with dropout are sure. We had the abstract and the authors'
published code, not the text, so equation numbers are missing. That code weighs both terms by 15, takes half of the
divergences' sum, and sums consistency over classes; we take 1, the sum, and means.

Ours, for several labels an image of which a site annotates some:

- Every site is one with labels for the classes it annotates and one without for the others: it minimises the partial
  loss on the former and, from round ``supervised_rounds`` + 1 on, the two terms on the latter. With nothing missing it
  is FedAvg.
- A matrix's row is sent by the sites that annotate its class, of the images that show it, and averaged over them; the
  columns are all classes, no matter who annotates them. An image may be in several rows.
- A pseudo-label is an entry that is more likely present than absent; its uncertainty is the entropy of that alone.
  The authors' code keeps an image with an entropy below 2 nats and a confidence from 0.3, which of five classes leaves
  out hardly any and of two outcomes none; ours is a bound that does.
- The networks of FedMLP's tables have no dropout: the passes differ by augmented views, and by dropout in a neck. They
  are the teacher's, whose batch normalisation stays as it is, for passes of the student would move its own.
- The teacher starts each round as the received model. The authors' stays at its site and is never brought back to the
  others' model; ours needs no memory, and a site that was absent has none that is out of date.
- FedMLP's authors weigh positives by images over positives, counted for all classes from labels that the site does not
  have; we weigh by the site's own counts.

A *relation* is a row over all classes that sums to one: what the model says on average of the images that show one
class, softened; the rows of all classes are the disease relation matrix.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from common.models.network import Model, compute_logits
from common.wire.records import Arrays
from strategies.aggregation.means import Weighting
from strategies.local.losses import compute_positive_weights, partial_loss
from strategies.local.objective import (
    Batch,
    ClientContext,
    LocalRound,
    Losses,
    copy_as_teacher,
    move_teacher,
    plain,
    teacher_decay,
)
from strategies.local.site_method import Parameters, Payload, SiteMethod, Statistic
from strategies.methods.base import Method, RoundContext, SiteReply
from strategies.methods.fedmlp import consistency_loss

Floats = NDArray[np.floating]


class FedIRMParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        supervised_rounds: Rounds on labels alone; sites send relations from the last of them on.
        ramp_rounds: Rounds, from round 1, over which the weight of the unlabelled terms grows.
        unlabelled_weight: The highest weight of the unlabelled terms.
        teacher_decay: Highest decay of the teacher's running mean; in a round's first steps the decay is lower.
        temperature: Divisor of the logits from which relations are computed.
        passes: Number of the teacher's passes whose mean gives a pseudo-label.
        entropy_below: Bound in nats; entries of a higher entropy are in no relation. 0.5 is a probability of 0.8.
        balanced: True to weigh positive labels by the site's known labels of their class divided by its positives.
    """

    weighting: Weighting = "samples"
    supervised_rounds: int = Field(20, ge=0)
    ramp_rounds: int = Field(30, ge=0)
    unlabelled_weight: float = Field(1.0, ge=0)
    teacher_decay: float = Field(0.99, ge=0, lt=1)
    temperature: float = Field(2.0, gt=0)
    passes: int = Field(8, ge=1)
    entropy_below: float = Field(0.5, gt=0)
    balanced: bool = True


# ---------------------------------------------------------------------- relations
# Shapes: logits (n, classes); members (n, rows) says which images show the class of which row.


def compute_log_relations(logits: Tensor, members: Tensor, temperature: float) -> Tensor:
    """Return the logarithm of each row's relation: log-softmax of its images' mean logits over a temperature.

    Returns:
        Array ``(rows, classes)``; a row without images is uniform.
    """
    weights = members.to(logits)
    means = weights.T @ logits / weights.sum(dim=0).clamp(min=1)[:, None]
    return torch.log_softmax(means / temperature, dim=1)


def is_surely_present(probabilities: Tensor, entropy_below: float) -> Tensor:
    """Return a mask of the entries that are likelier present than absent and whose entropy is below a bound in nats."""
    entropy: Tensor = torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)
    return (probabilities > 0.5) & (entropy < entropy_below)


def relation_divergence(own: Tensor, members: Tensor, federation: Tensor) -> Tensor:
    """Return the symmetric Kullback-Leibler divergence of the site's and the federation's relations.

    It is ``sum (p - q)(log p - log q)``, averaged over the rows that both have; 0 without a gradient if there are none.

    Args:
        own: The site's :func:`compute_log_relations`.
        members: Images that belong to each of the site's rows; a row without images is left out.
        federation: Relations ``(rows, classes)``, which get no gradient; a row that no site sent is NaN.
    """
    both = members.any(dim=0) & ~federation.isnan().any(dim=1)
    theirs = federation.nan_to_num(1.0).clamp(min=1e-8)
    divergences = ((own.exp() - theirs) * (own - theirs.log())).sum(dim=1)
    return torch.where(both, divergences, 0.0).sum() / both.sum().clamp(min=1)


def average_relations(relations: Mapping[str, Floats]) -> NDArray[np.float64]:
    """Return the mean of each row over the sites that sent it, each with the same weight; NaN where none did.

    Args:
        relations: Site -> its relations ``(classes, classes)``. A row that does not sum to one, or has an entry below
            0, is left out.
    """
    rows = np.stack([relations[site].astype(np.float64) for site in sorted(relations)])  # (sites, classes, classes)
    good = (rows >= 0).all(axis=2) & (np.abs(rows.sum(axis=2) - 1) < 1e-3)
    count = good.sum(axis=0)[:, None]
    total = np.where(good[..., None], rows, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def unlabelled_weight_share(finished: int, rounds: int) -> float:
    """Return the share of the unlabelled terms' full weight: ``exp(-5 (1 - w / W)^2)`` after w of W rounds, then 1."""
    return math.exp(-5 * (1 - min(1.0, finished / rounds)) ** 2) if rounds else 1.0


def make_teacher(model: Model) -> Model:
    """Return a teacher, which does not learn: batch normalisation as in evaluation, dropout as in training."""
    teacher = copy_as_teacher(model)
    for module in teacher.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    return teacher


# ---------------------------------------------------------------------- hospital


class FedIRMSite(SiteMethod):
    """The hospital's half of FedIRM: partial loss; later also consistency and relation matching without labels."""

    name = "fedirm"
    table = FedIRMParameters
    parameters: FedIRMParameters
    declared = Payload(
        statistics=(Statistic("relations", "positives", "what the model says of each class's images on average"),)
    )
    chooses_loss = False
    multi_class = False

    def client(self, context: ClientContext) -> LocalRound:
        """Return a round on labels; after the supervised rounds it also matches relations of classes without labels."""
        local = FedIRMRound(context, self.parameters)
        return LocalRound(local.objective if local.matches else plain(local.supervised), local.statistics)


class FedIRMRound:
    """One round of FedIRM at one site.

    Attributes:
        missing: The classes that the site does not label, ``(classes,)``.
        weight: Weight of the unlabelled terms in this round.
        supervised: The loss of the labelled entries.
        matches: True if this round matches the site's relations with the federation's.
    """

    def __init__(self, context: ClientContext, parameters: FedIRMParameters) -> None:
        self.context, self.parameters = context, parameters
        self.missing = ~context.examples.annotated
        self.weight = parameters.unlabelled_weight * unlabelled_weight_share(context.round - 1, parameters.ramp_rounds)
        positives = compute_positive_weights(context.examples.labels) if parameters.balanced else None
        self.supervised = partial(partial_loss, positive_weight=positives)
        self.matches = bool(context.round > parameters.supervised_rounds and self.missing.any())
        if self.matches:
            self.steps, self.teacher = 0, make_teacher(context.network)
        nothing = np.full((len(self.missing), len(self.missing)), np.nan, np.float32)
        relations = context.statistics.get("relations", nothing)
        self.federation = torch.from_numpy(relations.copy()).to(self.missing.device)[self.missing]

    def objective(self, model: Model, batch: Batch) -> Tensor:
        """Return partial loss plus weighted consistency with the teacher and divergence from global relations."""
        if self.steps:  # the teacher follows the step that the student has made since the last batch
            move_teacher(self.teacher, model, teacher_decay(self.steps, self.parameters.teacher_decay))
        self.steps += 1
        student = batch.logits(model, batch.view())
        with torch.no_grad():
            teachers = [batch.logits(self.teacher, batch.view()) for _ in range(self.parameters.passes)]
        likely = torch.stack([logits.sigmoid() for logits in teachers]).mean(dim=0)[:, self.missing]
        members = is_surely_present(likely, self.parameters.entropy_below)
        own = compute_log_relations(student, members, self.parameters.temperature)
        unlabelled = consistency_loss([student], teachers[:1], batch.annotated) + relation_divergence(
            own, members, self.federation
        )
        return self.supervised(student, batch.labels, batch.annotated) + self.weight * unlabelled

    def statistics(self, model: Model, losses: Losses) -> Arrays:
        """Return the trained model's relations of the site's classes, over all training images without augmentation."""
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
    """FedAvg; the mean of the sites' disease relation matrices goes back to the sites, which match it."""

    site_class = FedIRMSite
    site: FedIRMSite

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return the mean relations, the same for all sites."""
        return lambda site: context.statistics

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of relations, from the last supervised round on."""
        classes = len(context.contract.class_names)
        return {"relations": (classes, classes)} if context.round >= self.site.parameters.supervised_rounds else {}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return this round's mean relations; a row that no site sent stays as it was."""
        relations = {
            site: np.where(context.contract.annotated_classes(site)[:, None], reply.statistics["relations"], np.nan)
            for site, reply in replies.items()
            if "relations" in reply.statistics
        }
        if not relations:
            return context.statistics
        now = average_relations(relations)
        before = context.statistics.get("relations", now)
        return {"relations": np.where(np.isnan(now), before, now).astype(np.float32)}
