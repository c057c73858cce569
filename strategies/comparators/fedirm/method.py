"""FedIRM, both halves; one of the comparators of FedMLP's tables.

Liu, Yang, Dou, Heng: "Federated Semi-supervised Medical Image Classification via Inter-client Relation Matching",
MICCAI 2021.

The paper's: sites with labels train on them and tell their disease relation matrix
(:mod:`strategies.comparators.fedirm.relations`, temperature 2); the coordinator averages the matrices and hands the
mean to the sites without labels. These join after 20 rounds and minimise two terms, weighted by a Gaussian ramp-up over
rounds: consistency, the squared difference from a mean teacher that sees another view, and inter-client relation
matching, the KL divergence both ways between the federation's relations and those of the batch, by pseudo-labels of
which several passes with dropout are sure. We had the abstract and the authors' published code, not the text, so
equation numbers are missing. That code weighs both terms by 15, takes half of the divergences' sum, and sums
consistency over classes; we take 1, the sum, and means.

Ours, for several labels an image of which a site annotates some:

- Every site is one with labels for the classes it annotates and one without for the others: it minimises the partial
  loss on the former and, from round ``supervised_rounds`` + 1 on, the two terms on the latter. With nothing missing it
  is FedAvg.
- A matrix's row is told by the sites that annotate its class, of the images that show it, and averaged over them; the
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
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from common.models.inference import logits_of
from common.models.network import SplitNetwork
from common.wire.records import Arrays, TrainReply
from strategies.aggregation.means import Weighting
from strategies.base.method import (
    Method,
    Parameters,
    Statistic,
    Traffic,
)
from strategies.base.round_context import RoundContext
from strategies.comparators.fedirm.relations import log_relations, mean_relations, mismatch, ramp_up, surely_shown
from strategies.fedmlp.losses import consistency
from strategies.local.losses import Loss, known_entries, positive_weights
from strategies.local.mean_teacher import decay_after, follow
from strategies.local.objective import LocalRound, Situation, fixed_copy
from strategies.local.training import Batch, Losses, plain


class FedIRMParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        supervised_rounds: Rounds on labels alone; relations are told from the last of them on.
        ramp_rounds: Rounds, from the first of all, over which the unlabelled terms' weight grows.
        unlabelled_weight: Theirs, once it is fully grown.
        teacher_decay: Of the teacher's running mean, at most; in a round's first steps it follows faster.
        temperature: Softens relations.
        passes: Of the teacher, for a pseudo-label.
        entropy_below: In nats; entries whose pseudo-label is less sure are in no relation. 0.5 is a probability of 0.8.
        balanced: A positive label weighs the site's known labels of that class over its positives.
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


class FedIRM(Method):
    """FedAvg, and the mean of the sites' disease relation matrices, which a site without labels has to match."""

    name = "fedirm"
    table = FedIRMParameters
    parameters: FedIRMParameters
    declared = Traffic(
        statistics=(Statistic("relations", "positives", "what the model says of each class's images on average"),)
    )
    plain_client = False
    looks_at_images = True
    chooses_loss = False
    multi_class = False

    @property
    def loss(self) -> Loss:
        """Cross-entropy over the entries with a label."""
        return known_entries

    def statistics_for(self, known: RoundContext) -> Callable[[str], Arrays]:
        """The mean relations."""
        return lambda site: known.statistics

    def statistics_shape(self, known: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Relations, from the last supervised round on."""
        return expected(known, self.parameters)

    def aggregate_statistics(self, known: RoundContext, replies: Mapping[str, TrainReply]) -> Arrays:
        """The mean relations."""
        return learned(known, replies)

    def client(self, situation: Situation) -> LocalRound:
        """Partial loss; later consistency and relation matching too."""
        return FedIRMClient(situation, self.parameters).round()


# ---------------------------------------------------------------------- coordinator


def expected(known: RoundContext, parameters: FedIRMParameters) -> Mapping[str, tuple[int, ...]]:
    """What every site tells from the last supervised round on."""
    classes = len(known.contract.class_names)
    return {"relations": (classes, classes)} if known.round >= parameters.supervised_rounds else {}


def learned(known: RoundContext, replies: Mapping[str, TrainReply]) -> Arrays:
    """This round's mean relations; a row of which nobody says anything stays as it was."""
    told = {
        site: np.where(known.contract.annotated(site)[:, None], reply.statistics["relations"], np.nan)
        for site, reply in replies.items()
        if "relations" in reply.statistics
    }
    if not told:
        return known.statistics
    now = mean_relations(told)
    before = known.statistics.get("relations", now)
    return {"relations": np.where(np.isnan(now), before, now).astype(np.float32)}


# ---------------------------------------------------------------------- hospital


class FedIRMClient:
    """One round at one site."""

    def __init__(self, situation: Situation, parameters: FedIRMParameters) -> None:
        self.situation, self.parameters = situation, parameters
        self.missing = ~situation.examples.annotated  # (classes,)
        self.weight = parameters.unlabelled_weight * ramp_up(situation.round - 1, parameters.ramp_rounds)
        positives = positive_weights(situation.examples.labels) if parameters.balanced else None
        self.supervised = partial(known_entries, positive_weight=positives)

    def round(self) -> LocalRound:
        """Say what is minimised and told."""
        if self.situation.round <= self.parameters.supervised_rounds or not self.missing.any():
            return LocalRound(plain(self.supervised), self.told)
        self.steps = 0
        self.teacher = teacher_of(self.situation.network)
        self.federation = self._federation()
        return LocalRound(self.objective, self.told)

    def _federation(self) -> Tensor:
        """The federation's relations of the classes that this site does not annotate, NaN where there is none."""
        classes = len(self.missing)
        nothing = np.full((classes, classes), np.nan, np.float32)
        told = self.situation.told.get("relations", nothing)
        return torch.from_numpy(told.copy()).to(self.missing.device)[self.missing]

    def objective(self, network: SplitNetwork, batch: Batch) -> Tensor:
        """Partial loss, consistency and relation matching, on one view for the student and several for the teacher."""
        self._follow(network)
        student = batch.logits(network, batch.view())
        teachers = [self._taught(batch) for _ in range(self.parameters.passes)]
        likely = torch.stack([logits.sigmoid() for logits in teachers]).mean(dim=0)[:, self.missing]
        members = surely_shown(likely, self.parameters.entropy_below)
        own = log_relations(student, members, self.parameters.temperature)
        unlabelled = consistency([student], teachers[:1], batch.annotated) + mismatch(own, members, self.federation)
        return self.supervised(student, batch.labels, batch.annotated) + self.weight * unlabelled

    def _taught(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return batch.logits(self.teacher, batch.view())

    def _follow(self, network: SplitNetwork) -> None:
        """Let the teacher follow the step that the student has made since the last batch; there is none before."""
        if self.steps:
            follow(self.teacher, network, decay_after(self.steps, self.parameters.teacher_decay))
        self.steps += 1

    def told(self, network: SplitNetwork, losses: Losses) -> Arrays:
        """The trained model's relations of the classes annotated here, over all training images as they are."""
        if self.situation.round < self.parameters.supervised_rounds:
            return {}
        examples = self.situation.examples
        logits = logits_of(network, examples.images, self.situation.spec.precision)
        members = (examples.labels == 1) & examples.annotated
        with torch.no_grad():
            relations = log_relations(logits, members, self.parameters.temperature).exp()
        told = torch.where(members.any(dim=0)[:, None], relations, torch.nan)
        return {"relations": told.cpu().numpy()}


def teacher_of(network: SplitNetwork) -> SplitNetwork:
    """A copy that is not trained: batch normalisation as in evaluation, dropout as in training."""
    teacher = fixed_copy(network)
    for module in teacher.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    return teacher
