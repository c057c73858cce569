"""FedLSM: pseudo-labels for sure images, mixtures of unsure images, and head rows weighted by positives.

Deng, Luo, Chen: "Scale Federated Learning for Label Set Mismatch in Medical Image Classification", MICCAI 2023 (arXiv
2304.06931). We had the abstract, descriptions of the paper and the authors' code (dzp2095/FedLSM, its part for
ChestX-ray14), whose facts we follow.

The authors' method. *Uncertainty*: before each round the received model predicts all of a site's images; an image is as
uncertain as the mean of ``-p log p`` over the classes that the site does not annotate. *Sure images* (all but the most
uncertain): a mean teacher sees a weak view. A missing class whose probability is at least 0.85 is taken as present, at
most 0.01 as absent; the student learns these and the site's own labels on a strong view. *Unsure images* (the most
uncertain): each is mixed with one of the surest (MixUp), and so are both labels; here 0.7 and 0.005 are enough to take
an unsure image's class as present or absent. This loss weighs 0.1. *Aggregation*: the trunk by images; a class's head
row by each site's positives of the class in the round, pseudo-labels included.

Departures from the code:

- Its losses are means over all entries before they meet a mask of the sure ones, so that the mask leaves nothing out.
  Here an entry without a label and without a pseudo-label is left out, as the abstract's "different training
  strategies on data with different uncertainty levels" needs.
- It weighs classes by numbers of positives that the simulating server counts in all sites' label files. Here a site
  weighs positives by its own counts (``balanced``), as in our other comparators.
- Pools are shares of a site's images, not numbers, because sites differ in size; pairs are drawn with replacement.
- The first predictions are made in evaluation mode. The code leaves its network in training mode, where the rank of
  an image depends on its batch.
- A site's positives are sent as a share of the images, and weigh with the images that count for the site. A class
  without positives anywhere has the plain mean, where the code divides by zero.
- One class an image (ISIC in the code) is refused: here each image of a site shows a class of the site.
- A site that annotates every class has no unsure images, and trains on the strong view with its labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import Model, compute_logits
from polyclinic.common.wire.records import Arrays
from polyclinic.data.images.augmentation import augment_images_strongly
from polyclinic.strategies.aggregation.means import Float64, RowWeights, Weighting, Weights
from polyclinic.strategies.local.losses import BatchWeight, compute_positive_weights
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload, Statistic
from polyclinic.strategies.local.objective import (
    Batch,
    ClientContext,
    LabelledExamples,
    LocalRound,
    Losses,
    copy_model_as_teacher,
    update_teacher_average,
)
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply
from polyclinic.strategies.methods.fedfixmatch import compute_unlabelled_loss

POSITIVE_SHARE = "positive_share"
"""Name of the share of images that show each class, by label or pseudo-label, in a reply."""


class FedLSMParameters(Parameters):
    """The ``[method]`` table of ``fedlsm``. The defaults are those of the authors' code for ChestX-ray14.

    Attributes:
        uncertain_share: Share of a site's images that are unsure: the most uncertain ones (500 of some 9,800).
        confident_share: Share of a site's images that are mixed with unsure ones: the surest (2,000 of some 9,800).
        present_above: A missing class of a sure image is present from this probability on.
        absent_below: It is absent up to this probability.
        unsure_present_above: As ``present_above``, for unsure images.
        unsure_absent_below: As ``absent_below``, for unsure images.
        pairs: Mixed images of a batch over the batch's images; at least two mixed images (4 of 64).
        mixing: Both parameters of the Beta distribution from which a batch's share of the unsure image is drawn.
        mixed_weight: Weight of the loss of mixed images.
        teacher_decay: Decay of the teacher's moving average, which begins anew in each round.
        balanced: True to weigh the positive labels of a class by the site's ratio ``known labels / positives`` of the
            class; pseudo-labels weigh 1.
    """

    weighting: Weighting = "samples"
    uncertain_share: float = Field(0.05, ge=0, lt=1)
    confident_share: float = Field(0.2, gt=0, lt=1)
    present_above: float = Field(0.85, gt=0.5, lt=1)
    absent_below: float = Field(0.01, ge=0, lt=0.5)
    unsure_present_above: float = Field(0.7, gt=0.5, lt=1)
    unsure_absent_below: float = Field(0.005, ge=0, lt=0.5)
    pairs: float = Field(1 / 16, gt=0, le=1)
    mixing: float = Field(0.2, gt=0)
    mixed_weight: float = Field(0.1, ge=0)
    teacher_decay: float = Field(0.999, ge=0, lt=1)
    balanced: bool = True

    @model_validator(mode="after")
    def check_shares(self) -> Self:
        """Check that no image is both unsure and among the surest."""
        if self.uncertain_share + self.confident_share > 1:
            raise ValueError("uncertain_share and confident_share add up to more than 1: an image would be in both.")
        return self


# ---------------------------------------------------------------------- maths


def compute_uncertainty(logits: Tensor, missing: Tensor) -> Tensor:
    """Return each image's uncertainty ``(n,)``: ``-p log p`` of the missing classes, over the number of all classes.

    Args:
        logits: The received model's logits ``(n, rows)``.
        missing: Mask of the classes that the site does not annotate, ``(rows,)``.
    """
    entries: Tensor = torch.special.entr(logits.sigmoid() * missing)
    return entries.mean(dim=1)


def choose_pools(uncertainty: Tensor, uncertain_share: float, confident_share: float) -> tuple[Tensor, Tensor]:
    """Return the indices of the most uncertain images, the most uncertain first, and of the surest, the surest first.

    Equal images are in the order of the data. There may be no unsure image; there is at least one sure image.
    """
    ranked = torch.argsort(uncertainty, stable=True)  # the surest first
    n = len(ranked)
    unsure = int(uncertain_share * n)
    sure = min(max(round(confident_share * n), 1), n - unsure)
    return ranked[n - unsure :].flip(0), ranked[:sure]


def assign_pseudo_labels(teacher: Tensor, present_above: float, absent_below: float) -> Tensor:
    """Return 1 or 0 where the teacher is sure, NaN elsewhere.

    Args:
        teacher: The teacher's logits, of any shape.
        present_above, absent_below: Probabilities from which on, and up to which, the teacher is sure.
    """
    probabilities = teacher.sigmoid()
    pseudo = torch.full_like(probabilities, torch.nan)
    pseudo[probabilities >= present_above] = 1
    pseudo[probabilities <= absent_below] = 0
    return pseudo


def draw_rows(pool: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Draw indices ``(rows,)`` from a pool, with replacement."""
    places = torch.randint(len(pool), (rows,), generator=generator)
    return pool[places.to(pool.device)]


def draw_mixing_share(parameter: float, generator: torch.Generator) -> float:
    """Draw a share from the Beta distribution with twice the same parameter."""
    seed = int(torch.randint(2**31, (1,), generator=generator))  # torch's own distributions take no generator
    return float(np.random.default_rng(seed).beta(parameter, parameter))


def compute_row_weights(shares: Sequence[Float64], weights: Weights) -> list[Float64]:
    """Return each site's weight for each head row ``(rows,)``: its positives of the class.

    A row without positives at any site has the sites' plain weights.

    Args:
        shares: Each site's share of images that show each class ``(rows,)``; NaN counts as 0, and more than 1 as 1.
        weights: Each site's plain weight.
    """
    positives = [
        np.clip(np.nan_to_num(share), 0.0, 1.0) * weight for share, weight in zip(shares, weights, strict=True)
    ]
    shown = np.sum(positives, axis=0) > 0
    return [np.where(shown, row, weight) for row, weight in zip(positives, weights, strict=True)]


# ---------------------------------------------------------------------- hospital


class FedLSMSite(SiteMethod):
    """The hospital's half of FedLSM: own labels, pseudo-labels of sure images, mixtures of unsure ones."""

    traits = MethodTraits(
        "fedlsm",
        parameters_class=FedLSMParameters,
        payload=Payload(
            statistics=(
                Statistic(
                    POSITIVE_SHARE,
                    "positives",
                    "for each class, the share of training images that show it, by label or by the model's own opinion",
                ),
            )
        ),
        weighs_updates=True,
        supports_volumes=False,  # RandAugment and Cutout change pictures
        supports_multi_class=False,
        reason_against_segmentation="it mixes two images, whose pixels do not lie in one place",
        allows_other_loss=False,
    )
    parameters: FedLSMParameters

    def make_batch_weight(self, examples: LabelledExamples, spec: TrainingSection) -> BatchWeight:
        """Return a function that weighs a batch by its images, because the loss is a mean over all their entries."""
        return lambda labels, annotated: labels.new_tensor(float(len(labels)))

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: labels and pseudo-labels on strong views, and mixtures of unsure and sure images."""
        local = FedLSMRound(context, self.parameters)
        return LocalRound(local.objective, local.statistics)


@dataclass(frozen=True)
class SureImages:
    """The sure images of a batch: two views ``(sure, channels, height, width)``, and labels ``(sure, rows)``."""

    weak: Tensor
    strong: Tensor
    labels: Tensor


@dataclass(frozen=True)
class MixedPairs:
    """Pairs of images to mix, ``(pairs, channels, height, width)``, with their labels.

    ``share`` is the weight of the unsure image in the mixture; the other image has the rest.
    """

    unsure: Tensor
    surest: Tensor
    unsure_labels: Tensor
    surest_labels: Tensor
    share: float


class TeacherLoss:
    """The loss of one round at one site, for images that are already drawn; the teacher labels them.

    Args:
        teacher: The mean teacher, at first a copy of the received model.
        classes: Number of classes.
        positive_weight: Weight of each class's positives ``(classes,)``; None for 1.
    """

    def __init__(
        self, parameters: FedLSMParameters, teacher: Model, classes: int, positive_weight: Tensor | None = None
    ) -> None:
        self.parameters, self.teacher, self._positive_weight = parameters, teacher, positive_weight
        self._teacher_is_behind = False  # the student took a step that the teacher has not followed yet
        self._positives = np.zeros(classes)
        self._images = 0

    def compute_loss(self, model: Model, batch: Batch, sure: SureImages, pairs: MixedPairs | None) -> Tensor:
        """Return the loss of the sure images' strong views plus the weighted loss of mixed images."""
        self.follow_student(model)
        parameters = self.parameters
        pseudo = self._ask_teacher(batch, sure.weak, parameters.present_above, parameters.absent_below)
        targets = torch.where(batch.annotated, sure.labels, pseudo)
        self._positives += (targets == 1).sum(dim=0).cpu().numpy()
        self._images += len(targets)
        if pairs is None:
            return compute_unlabelled_loss(batch.logits(model, sure.strong), targets, self._positive_weight)
        mixed = torch.lerp(pairs.surest, pairs.unsure, pairs.share)
        student = batch.logits(model, torch.cat([sure.strong, mixed]))  # one batch, as in the authors' code
        of_strong = student[: len(targets)]
        of_mixed = student[len(targets) :]
        loss = parameters.mixed_weight * compute_unlabelled_loss(of_mixed, self._mix_labels(batch, pairs))
        if len(targets):
            loss = loss + compute_unlabelled_loss(of_strong, targets, self._positive_weight)
        return loss

    def follow_student(self, model: Model) -> None:
        """Move the teacher's parameters towards the student's, if it took a step; running statistics are copied."""
        if self._teacher_is_behind:
            update_teacher_average(self.teacher, model, self.parameters.teacher_decay)
            for part, of_student in zip(self.teacher.modules(), model.modules(), strict=True):
                for running, now in zip(part.buffers(recurse=False), of_student.buffers(recurse=False), strict=True):
                    running.copy_(now)
        self._teacher_is_behind = True

    def compute_positive_shares(self) -> Float64:
        """Return the share of sure images that show each class, by label or pseudo-label, over all batches so far."""
        return self._positives / max(self._images, 1)

    def _mix_labels(self, batch: Batch, pairs: MixedPairs) -> Tensor:
        """Return the mixture of both images' labels and pseudo-labels; NaN where the teacher is not sure of both.

        As in the authors' code, the site's own label of an entry does not count either if the teacher is not sure.
        """
        parameters = self.parameters
        mixed = list[Tensor]()
        for images, labels, above, below in (
            (pairs.unsure, pairs.unsure_labels, parameters.unsure_present_above, parameters.unsure_absent_below),
            (pairs.surest, pairs.surest_labels, parameters.present_above, parameters.absent_below),
        ):
            pseudo = self._ask_teacher(batch, images, above, below)
            mixed.append(torch.where(batch.annotated & ~pseudo.isnan(), labels, pseudo))
        return torch.lerp(mixed[1], mixed[0], pairs.share)

    def _ask_teacher(self, batch: Batch, images: Tensor, present_above: float, absent_below: float) -> Tensor:
        """Return the teacher's pseudo-labels of these images; see :func:`assign_pseudo_labels`."""
        with torch.no_grad():
            return assign_pseudo_labels(batch.logits(self.teacher, images), present_above, absent_below)


class FedLSMRound:
    """One round of FedLSM at one site.

    Attributes:
        unsure: Indices of the images that are mixed ``(unsure,)``.
        surest: Indices of the images with which they are mixed ``(surest,)``.
    """

    def __init__(self, context: ClientContext, parameters: FedLSMParameters) -> None:
        self.parameters = parameters
        self.examples = context.examples
        examples = context.examples
        missing = ~context.examples.annotated
        # A class without positives here, so a missing one too, has the weight 1.
        weight = compute_positive_weights(examples.labels) if parameters.balanced else None
        self.loss = TeacherLoss(parameters, copy_model_as_teacher(context.network), len(missing), weight)
        logits = compute_logits(context.network, examples.images, context.spec.precision)
        uncertain_share = parameters.uncertain_share if missing.any() else 0.0
        uncertainty = compute_uncertainty(logits, missing)
        self.unsure, self.surest = choose_pools(uncertainty, uncertain_share, parameters.confident_share)
        self._is_sure = torch.ones(len(examples), dtype=torch.bool, device=missing.device)
        self._is_sure[self.unsure] = False

    def objective(self, model: Model, batch: Batch) -> Tensor:
        """Draw two views of the batch's sure images, and pairs to mix; return the loss of both."""
        sure = self._is_sure[batch.rows]
        strong = augment_images_strongly(batch.view(), batch.generator)[sure]
        images = SureImages(batch.view()[sure], strong, batch.labels[sure])
        return self.loss.compute_loss(model, batch, images, self._draw_pairs(batch))

    def statistics(self, model: Model, losses: Losses) -> Arrays:
        """Return the share of sure images that show each class, by label or pseudo-label, over the round's batches."""
        return {POSITIVE_SHARE: self.loss.compute_positive_shares().astype(np.float32)}

    def _draw_pairs(self, batch: Batch) -> MixedPairs | None:
        """Draw pairs of an unsure and a sure image; None if the site has no unsure images. No image is augmented."""
        if not len(self.unsure):
            return None
        count = max(round(self.parameters.pairs * len(batch.rows)), 2)
        unsure, surest = (draw_rows(pool, count, batch.generator) for pool in (self.unsure, self.surest))
        images = self.examples.images
        labels = self.examples.labels
        share = draw_mixing_share(self.parameters.mixing, batch.generator)
        return MixedPairs(images[unsure].float(), images[surest].float(), labels[unsure], labels[surest], share)


# ---------------------------------------------------------------------- coordinator


class FedLSM(Method):
    """The coordinator's half of FedLSM: FedAvg; a class's head row weighs a site's positives of the class."""

    site_class = FedLSMSite
    site: FedLSMSite

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of a site's shares of images: one for each class."""
        return {POSITIVE_SHARE: (len(context.contract.class_names),)}

    def site_weights(self, context: RoundContext, replies: Mapping[str, SiteReply], weights: Weights) -> RowWeights:
        """Return the plain weights for the trunk; a head row weighs each site's number of images with the class."""
        shares = [reply.statistics[POSITIVE_SHARE].astype(np.float64) for reply in replies.values()]
        return RowWeights(weights, compute_row_weights(shares, weights))
