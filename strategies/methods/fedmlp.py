"""FedMLP: each site labels some classes, and learns the other classes from prototypes averaged over all sites.

Sun, Wu, Shi, Yu, Yang, Cheng, Yan: "FedMLP: Federated Multi-label Medical Image Classification under Task
Heterogeneity", MICCAI 2024. Each site labels some classes; its labels of the other classes are missing.

Stage 1, rounds 1 to ``stage_one_rounds``: the weighted partial-class loss on the site's classes, with logits adjusted
by each class's frequency at the site; and consistency with the received model on the other classes. Stage 2: for a
missing class, an image whose feature is much nearer to one of the class's two global prototypes (negative, positive) is
tagged with that label for the rest of the run. Tags are trained on like labels; all other entries stay consistent with
the received model.

Hospital: stores its tags; from the last round of stage 1 on, sends its prototypes after training and, for the classes
that it does not label, the *difficulty*. Coordinator: FedAvg, and the means of prototypes and difficulties.

Symbols: Z is the cosine of a feature with the negative prototype P0 minus that with the positive P1; tau is the share
of the seemingly negative or positive images that is tagged in a round; d is a class's difficulty, T a rate. A site
sends NaN for values that it has no images for, and means omit NaN. Sums run in float64 in the order of site names.

Departs from the authors' code: docs/papers.md#decisions-fedmlp has each point. Because of a condition typed twice, that
code also drops a class's positives in a round without negative tags; and it sends zeros for a prototype without images.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.models.network import Model, compute_features_and_logits
from polyclinic.common.wire.records import Arrays
from polyclinic.strategies.aggregation.means import HeadMean, Weighting, WholeHeadMean
from polyclinic.strategies.local.losses import PLAIN_LOSSES, LossFunction
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload, Statistic
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, Losses, copy_model_as_teacher
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Stage, make_share_of_rounds
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply, convert_to_json_numbers
from polyclinic.strategies.methods.surgical import OwnersMean

Floats = NDArray[np.floating]
Float64 = NDArray[np.float64]
Tags = NDArray[np.int8]
"""1 for positive, 0 for negative, -1 for not tagged; ``(n,)`` of one class, or ``(n, classes)``."""

Rounding = Literal["floor", "ceil"]
"""``floor`` is the authors' choice: at their rates it tags no negatives among fewer than 200 images. ``ceil``, for
small sites, tags at least one image of each sign (seemingly negative, seemingly positive), unless the share is 0."""


class FedMLPParameters(Parameters):
    """The ``[method]`` table of ``fedmlp``; (ablation: X) is the paper's name of an ablation.

    A tag is a pseudo-label for a class that the site does not label. The difficulty of a class, from 0 to 1, is the
    share of images with a certain prediction.

    Attributes:
        stage_one_rounds: Number of rounds before the first tags; the authors' t1 is 50. Half of the run's rounds, at
            most 50, if the experiment gives none.
        tag_rate_negative: T0: share of the images that are tagged as negative in a round at difficulty 1.
        tag_rate_positive: T1: the same for positive tags.
        sure_below: L: a lower probability is certain.
        sure_above: R: a higher probability is certain.
        rounding: ``ceil`` tags at least one image of each sign, as a small site needs; ``floor`` is the authors' rule.
        weighted_partial_loss: False counts missing labels as negative, without logit adjustment (ablation: WPC).
        detection: False never tags missing labels (ablation: MLD).
        self_adaptive: True multiplies the tag rates by the difficulty (ablation: SAT).
        consistency: True keeps predictions for entries without labels near the received model's (ablation: CR).
        consistency_stage_one: False does so in stage 2 alone.
        prototype_weighting: How the sites' prototypes are weighted in their mean.
        heads: ``own`` averages a class's head row only over the sites that label the class, as surgical aggregation.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "stage_one_rounds": make_share_of_rounds("half", 1, 2, most=50)
    }
    weighting: Weighting = "samples"
    stage_one_rounds: int = Field(50, ge=1)
    tag_rate_negative: float = Field(0.005, ge=0, le=1)
    tag_rate_positive: float = Field(0.01, ge=0, le=1)
    sure_below: float = Field(0.3, ge=0, le=1)
    sure_above: float = Field(0.7, ge=0, le=1)
    rounding: Rounding = "ceil"
    weighted_partial_loss: bool = True
    detection: bool = True
    self_adaptive: bool = True
    consistency: bool = True
    consistency_stage_one: bool = True
    prototype_weighting: Weighting = "samples"
    heads: Literal["all", "own"] = "all"

    @model_validator(mode="after")
    def _check_parameter_combination(self) -> Self:
        if self.sure_below > self.sure_above:
            raise ValueError(f"sure_below, {self.sure_below}, must not lie above sure_above, {self.sure_above}")
        if self.consistency and not self.weighted_partial_loss:
            raise ValueError(
                "consistency makes no sense without weighted_partial_loss: every entry has a target then; "
                "set consistency = false too"
            )
        return self

    def list_stages(self) -> tuple[Stage, ...]:
        """Return stage 2; none if the switches of the ablation make both stages alike."""
        consistency_begins = self.consistency and not self.consistency_stage_one
        if not self.detection and not consistency_begins:
            return ()
        event = "stage 2, in which missing labels are tagged, begins"
        return (Stage(event, self.stage_one_rounds + 1, ("stage_one_rounds",)),)


# ---------------------------------------------------------------------- how often a site sees a class (eq. 3)


def compute_positive_class_shares(positives: ArrayLike, images: int) -> Float64:
    """Return the share of a site's images in which each class is present, ``(classes,)``.

    Departs from the paper: the share is kept half an image away from 0 and 1, where its log odds are infinite.

    Args:
        positives: Images labelled or tagged as positive, ``(classes,)``.
        images: All training images of the site, including those of unknown label.
    """
    margin = 1 / (2 * images)
    return np.clip(np.asarray(positives, np.float64) / images, margin, 1 - margin)


def compute_logit_adjustment(prior: Float64) -> Float64:
    """Return the log odds of the classes' priors, which training adds to the logits."""
    return np.log(prior) - np.log1p(-prior)


def compute_target_logit_adjustment(targets: Tensor) -> Tensor:
    """Return the log odds of each class's share of positives among a site's targets, ``(classes,)``.

    Training adds them to the logits.

    Args:
        targets: All targets of the site, ``(n, classes)``: 1, 0 or NaN.
    """
    positives = (targets == 1).sum(dim=0).cpu().numpy()
    values = compute_logit_adjustment(compute_positive_class_shares(positives, len(targets)))
    return torch.from_numpy(values.astype(np.float32)).to(targets.device)


# ---------------------------------------------------------------------- prototypes and difficulty (eq. 6 and 10)


def compute_class_prototypes(features: Floats, labels: Floats) -> Float64:
    """Return the mean features of a site's negatives and positives of each class, ``(classes, 2, features)``.

    Args:
        features: ``(n, features)``.
        labels: True labels 1, 0 or NaN for unknown, ``(n, classes)``; all NaN for a class that the site does not label.
    """
    members = np.stack([labels == 0, labels == 1], axis=-1)  # (n, classes, 2)
    counts = members.sum(axis=0)  # (classes, 2)
    sums = np.tensordot(members.astype(np.float64), features.astype(np.float64), axes=(0, 0))
    return np.where(counts[..., None] > 0, sums / np.maximum(counts, 1)[..., None], np.nan)


def average_without_nan(local: Mapping[str, Floats], weights: Mapping[str, float]) -> Float64:
    """Average arrays of one shape over sites, entry by entry and without NaN; NaN where all are NaN.

    Args:
        local: Site -> its array.
        weights: Site -> its weight: number of training images, as in the authors' code, or 1 each, as in eq. 6.
    """
    shape = next(iter(local.values())).shape
    total, weight = np.zeros(shape), np.zeros(shape)
    for site in sorted(local):
        is_known = ~np.isnan(local[site])
        total += np.where(is_known, weights[site] * local[site].astype(np.float64), 0.0)
        weight += np.where(is_known, weights[site], 0.0)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)


def compute_class_difficulty(probabilities: Floats, low: float = 0.3, high: float = 0.7) -> Float64:
    """Return for each class the share of images with a certain prediction: probability below ``low`` or above ``high``.

    Departs from eq. 10, which averages this share over the sites that label the class. Here, as in the authors' code,
    it is averaged over the sites that do not label the class; the paper's words "negative class difficulty" fit this.

    Args:
        probabilities: Probabilities without logit adjustment, ``(n, classes)``.
    """
    return np.asarray(((probabilities < low) | (probabilities > high)).mean(axis=0), np.float64)


def compute_pairwise_cosines(vectors: Floats) -> Float64:
    """Return the cosines ``(n, n)`` between vectors ``(n, features)``; NaN for zero and NaN vectors."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)  # (n, 1)
    unit = vectors / np.where(lengths > 0, lengths, np.nan)
    return np.clip(unit @ unit.T, -1.0, 1.0)


# ---------------------------------------------------------------------- tags (eq. 8)


def compute_prototype_margins(features: Floats, negative: Floats, positive: Floats) -> NDArray[np.float64]:
    """Return Z, ``(n,)``: each image's cosine with the negative prototype minus that with the positive prototype.

    Args:
        features: Features of the images, ``(n, features)``.
        negative, positive: P0 and P1, ``(features,)``; NaN if no site has one, and then the result is NaN.
    """

    def cosine(prototype: Floats) -> Float64:  # 0 for a vector of zeros
        rows = features.astype(np.float64)
        column = prototype.astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(column)
        return np.asarray(rows @ column / np.where(lengths == 0, 1.0, lengths), np.float64)

    return cosine(negative) - cosine(positive)


def compute_share_of_images_to_tag(difficulty: float, rate: float) -> float:
    """Return tau = d T (difficulty times rate), the share of images to tag in a round, limited to 0 to 1."""
    return min(1.0, max(0.0, difficulty) * rate)


def tag_surest_images(
    z: Floats, untagged: NDArray[np.bool_], tau_negative: float, tau_positive: float, rounding: Rounding
) -> Tags:
    """Tag the most certain images of one class: those with the largest Z as negative (0), the smallest as positive (1).

    An image without a tag is seemingly negative if Z >= 0, and seemingly positive if Z < 0. Of equal values of Z the
    lower index comes first.

    Args:
        z: Z of each image, ``(n,)``; see :func:`compute_prototype_margins`.
        untagged: True for images that have no tag yet, ``(n,)``.
        tau_negative, tau_positive: Shares, 0 to 1, of the seemingly negative and positive images to tag.
        rounding: How the numbers of images to tag are rounded.

    Returns:
        This round's new tags, -1 for every other image, ``(n,)``.
    """

    def find_surest_images(rank: Floats, candidates: NDArray[np.bool_], share: float) -> NDArray[np.intp]:
        indices = np.flatnonzero(candidates)
        count = math.floor(share * len(indices)) if rounding == "floor" else math.ceil(share * len(indices))
        return indices[np.argsort(rank[indices], kind="stable")[: min(len(indices), count)]]

    new = np.full(len(z), -1, np.int8)
    new[find_surest_images(-z, untagged & (z >= 0), tau_negative)] = 0
    new[find_surest_images(z, untagged & (z < 0), tau_positive)] = 1
    return new


# ---------------------------------------------------------------------- the two objectives, on logits


def cross_entropy_per_entry(logits: Tensor, targets: Tensor, adjustment: Tensor | None) -> Tensor:
    """Return the binary cross-entropy of each entry ``(batch, classes)``, 0 where the target is NaN.

    Args:
        adjustment: The result of :func:`compute_logit_adjustment`, ``(classes,)``, which is added to the logits; None
            adds nothing.
    """
    adjusted = logits if adjustment is None else logits + adjustment
    entries = binary_cross_entropy_with_logits(adjusted, targets.nan_to_num(), reduction="none")
    return torch.where(targets.isnan(), 0.0, entries)


def compute_squared_probability_differences(student: Tensor, teacher: Tensor) -> Tensor:
    """Return each squared difference of student and teacher probabilities, without gradient for the teacher."""
    return (student.sigmoid() - teacher.detach().sigmoid()).square()


def compute_supervised_loss(views: Sequence[Tensor], targets: Tensor, adjustment: Tensor | None) -> Tensor:
    """Return the mean cross-entropy over the entries that have a target, averaged over views of the same images.

    The divisor is the number of entries with a target (docs/papers.md#fedmlp-scale). Departs from the paper, which
    divides an image's sum by all classes, and from the authors' code, which divides by annotated classes and the
    nominal batch size.

    Args:
        views: Logits ``(batch, classes)`` of each view.
        targets: 1, 0, or NaN for none, ``(batch, classes)``.
        adjustment: Log odds that are added to the logits, ``(classes,)``; None adds nothing.
    """
    known_entries = (~targets.isnan()).sum().clamp(min=1)
    losses = []
    for view in views:
        losses.append(cross_entropy_per_entry(view, targets, adjustment).sum() / known_entries)
    return torch.stack(losses).mean()


def compute_teacher_consistency_loss(views: Sequence[Tensor], teachers: Sequence[Tensor], annotated: Tensor) -> Tensor:
    """Return the mean squared difference between the probabilities of model and teacher.

    The mean is over the views and over the classes that the site does not label.

    Args:
        views: The trained model's logits of each view, ``(batch, classes)``.
        teachers: The teacher's logits, one for each view or for another view of the same images.
        annotated: True for the classes that the site labels, ``(classes,)``.
    """
    means = []
    for view, teacher in zip(views, teachers, strict=True):
        entries = compute_squared_probability_differences(view[:, ~annotated], teacher[:, ~annotated])
        means.append(entries.sum() / max(1, entries.numel()))
    return torch.stack(means).mean()


def compute_first_stage_loss(
    views: Sequence[Tensor],
    teachers: Sequence[Tensor] | None,
    targets: Tensor,
    annotated: Tensor,
    adjustment: Tensor | None,
) -> Tensor:
    """Return the loss of the rounds before the first tags: supervised loss, plus consistency if there are teachers.

    The paper uses consistency only in the second stage; the authors' code uses it here, too. Without consistency, the
    head rows of classes that the site does not label drift with the shared features
    (docs/papers.md#fedmlp-consistency).

    Args:
        views: The trained model's logits of each view, ``(batch, classes)``.
        teachers: The received model's logits of the same views; None for no consistency.
        targets: Labels ``(batch, classes)``, NaN for unknown.
        annotated: True for the classes that the site labels, ``(classes,)``.
        adjustment: Log odds that are added to the logits, ``(classes,)``; None adds nothing.
    """
    loss = compute_supervised_loss(views, targets, adjustment)
    return loss if teachers is None else loss + compute_teacher_consistency_loss(views, teachers, annotated)


def compute_second_stage_loss(
    student: Tensor, teacher: Tensor | None, targets: Tensor, annotated: Tensor, adjustment: Tensor | None
) -> Tensor:
    """Return the loss of the rounds with tags (pseudo-labels), computed on one view of the images.

    The sum over all entries is divided by their number. An entry with a label or tag adds its cross-entropy. An
    untagged entry of a class that the site does not label adds the squared distance from the teacher's probability. An
    entry of a labelled class whose label is unknown adds 0. Without a teacher (ablation CR), as in the authors' code,
    the loss is :func:`compute_supervised_loss`.

    Args:
        student, teacher: Logits ``(batch, classes)`` of the trained and of the received model.
        targets: Labels and tags ``(batch, classes)``, NaN if there is neither.
        annotated: True for the classes that the site labels, ``(classes,)``.
        adjustment: Log odds that are added to the student's logits, ``(classes,)``; None adds nothing.
    """
    if teacher is None:
        return compute_supervised_loss([student], targets, adjustment)
    untagged = targets.isnan() & ~annotated
    distilled = torch.where(untagged, compute_squared_probability_differences(student, teacher), 0.0)
    return (cross_entropy_per_entry(student, targets, adjustment) + distilled).sum() / targets.numel()


# ---------------------------------------------------------------------- hospital


class FedMLPSite(SiteMethod):
    """The hospital's half of FedMLP: partial loss and consistency; in stage 2, tags are used like labels."""

    traits = MethodTraits(
        "fedmlp",
        parameters_class=FedMLPParameters,
        payload=Payload(
            statistics=(
                Statistic(
                    "prototypes",
                    "signs",
                    "mean features of each class's images, present and absent; of one image, that image's",
                ),
                Statistic("difficulty", "images", "of each class, on what share of images the model is sure"),
            )
        ),
        supports_multi_class=False,
        reason_against_segmentation="it looks for missing labels by the features of whole images",
        allows_other_loss=False,
        reason_for_global_norm="its teacher is the model of all",
        keeps_method_state=True,
    )
    parameters: FedMLPParameters

    @cached_property
    def payload(self) -> Payload:
        """Return the declared data; with ``heads = "own"`` a site sends only the head rows of its own classes."""
        return replace(self.traits.payload, sends_rows=self.parameters.heads)

    @cached_property
    def loss(self) -> LossFunction:
        """Return cross-entropy on the site's classes, or on all classes if missing labels count as negative."""
        return PLAIN_LOSSES[self.task, "masked" if self.parameters.weighted_partial_loss else "negative"]

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: in stage 2 it tags missing labels before training, and stores the tags."""
        local = FedMLPRound(context, self.parameters)
        return LocalRound(local.objective, local.statistics, method_state=local.method_state)


def split_digests(digests: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return each digest as four whole numbers below 2^16, float32 ``(n, 4)``, which float32 holds exactly."""
    return np.ascontiguousarray(digests).view(np.uint16).reshape(len(digests), 4).astype(np.float32)


def align_stored_tags(stored: Arrays, digests: NDArray[np.float32], shape: tuple[int, ...]) -> Tags:
    """Return the stored tags, ``(n, classes)``, in the order of the present images; -1 for an image without tags.

    Images come and go between rounds when a hospital changes its table or a patient opts out.

    Args:
        stored: The arrays ``tags`` and ``images`` that the site stored in its last round; empty before the first.
        digests: Result of :func:`split_digests` for the present images; empty if images never change.
        shape: ``(n, classes)``.
    """
    tags = np.full(shape, -1, np.int8)
    if "tags" not in stored:
        return tags
    if len(stored.get("images", ())) == 0 or not len(digests):
        # A state of release 0.1.0, or images that never change: they are known by their places.
        return stored["tags"].astype(np.int8) if stored["tags"].shape == shape else tags
    places = defaultdict[bytes, list[int]](list)
    for place, digest in enumerate(stored["images"]):
        places[digest.tobytes()].append(place)
    for row, digest in enumerate(digests):
        if earlier := places[digest.tobytes()]:
            # Equal pictures take the tags in their order.
            tags[row] = stored["tags"][earlier.pop(0)]
    return tags


class FedMLPRound:
    """One round of FedMLP at one site.

    Attributes:
        second_stage: True in stage 2, in which missing labels are tagged unless ``detection`` is False.
        tags: Tags of all training images, ``(n, classes)``: 1, 0, or -1 for none. A tag is a pseudo-label of an image
            for a class that the site does not annotate.
        digests: Result of :func:`split_digests` for the training images.
        targets: The label where the site annotates the class, else the tag. Where there is neither: NaN, or 0 if
            missing labels count as negative.
    """

    def __init__(self, context: ClientContext, parameters: FedMLPParameters) -> None:
        self.context, self.parameters = context, parameters
        self.labels = context.examples.labels.cpu().numpy()  # (n, classes)
        self.annotated = context.examples.annotated.cpu().numpy()  # (classes,)
        self.second_stage = context.round > parameters.stage_one_rounds
        self.teacher = copy_model_as_teacher(context.network)
        read_digests = context.examples.read_digests
        self.digests = np.zeros((0, 4), np.float32) if read_digests is None else split_digests(read_digests())
        self.tags: Tags = align_stored_tags(context.method_state, self.digests, self.labels.shape)
        if self.second_stage and parameters.detection and "prototypes" in context.statistics:
            self.tags = self.tag_missing_labels()
        targets = np.where(self.annotated, self.labels, np.where(self.tags >= 0, self.tags, np.nan))
        if not parameters.weighted_partial_loss:
            targets = np.where(~self.annotated & np.isnan(targets), 0.0, targets)
        self.targets = torch.from_numpy(targets.astype(np.float32)).to(context.examples.labels.device)
        # By each class's positives at this site, true or tagged.
        self.adjustment = compute_target_logit_adjustment(self.targets) if parameters.weighted_partial_loss else None

    def tag_missing_labels(self) -> Tags:
        """Return all tags of the training images: those of earlier rounds, which never change, and the new ones.

        A tag is a pseudo-label, 1 or 0, of an image for a class that the site does not annotate. New tags go to the
        images whose features, computed by the received model, differ most in their similarity to the class's two global
        prototypes (present and absent), at the rate of docs/papers.md#fedmlp-rate.

        Returns:
            ``(n, classes)``: 1, 0, or -1 for no tag.
        """
        statistics = self.context.statistics
        parameters = self.parameters
        features, _ = self._compute_features_and_probabilities(self.teacher)
        every = self.tags.copy()  # (n, classes)
        for column in np.flatnonzero(~self.annotated):
            ease = float(statistics["difficulty"][column]) if parameters.self_adaptive else 1.0
            negative, positive = statistics["prototypes"][column]
            new = tag_surest_images(
                compute_prototype_margins(features, negative, positive),
                every[:, column] < 0,
                compute_share_of_images_to_tag(ease, parameters.tag_rate_negative),
                compute_share_of_images_to_tag(ease, parameters.tag_rate_positive),
                parameters.rounding,
            )
            every[:, column] = np.where(every[:, column] >= 0, every[:, column], new)  # an old tag never changes
        return every

    def objective(self, model: Model, batch: Batch) -> Tensor:
        """Return the loss of a batch: on two views of the images in stage 1, on one view in stage 2."""
        views = [batch.view()] if self.second_stage else [batch.view(), batch.view()]
        teachers, students = list[Tensor](), list[Tensor]()
        if self.parameters.consistency and (self.second_stage or self.parameters.consistency_stage_one):
            with torch.no_grad():
                for view in views:
                    teachers.append(batch.logits(self.teacher, view))
        for view in views:
            students.append(batch.logits(model, view))
        targets = self.targets[batch.rows]
        annotated = batch.annotated
        if not self.second_stage:
            return compute_first_stage_loss(students, teachers or None, targets, annotated, self.adjustment)
        teacher = teachers[0] if teachers else None
        return compute_second_stage_loss(students[0], teacher, targets, annotated, self.adjustment)

    def statistics(self, model: Model, losses: Losses) -> Arrays:
        """Return the prototypes of the labelled classes and the difficulty of the other classes.

        The result is empty before the last round of stage 1, and if missing labels are never tagged. See
        :func:`compute_class_prototypes` and :func:`compute_class_difficulty`.
        """
        if not self.parameters.detection or self.context.round < self.parameters.stage_one_rounds:
            return {}
        features, probabilities = self._compute_features_and_probabilities(model)
        labels = np.where(self.annotated, self.labels, np.nan)
        sure = compute_class_difficulty(probabilities, self.parameters.sure_below, self.parameters.sure_above)
        return {
            "prototypes": compute_class_prototypes(features, labels).astype(np.float32),
            "difficulty": np.where(self.annotated, np.nan, sure).astype(np.float32),
        }

    def method_state(self, model: Model) -> Arrays:
        """Return the tags, which the site stores for the rest of the run."""
        return {"tags": self.tags.astype(np.float32), "images": self.digests}

    def _compute_features_and_probabilities(self, model: Model) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return features and unadjusted probabilities of all training images without augmentation."""
        features, logits = compute_features_and_logits(model, self.context.examples.images, self.context.spec.precision)
        return features.cpu().numpy(), logits.sigmoid().cpu().numpy()


# ---------------------------------------------------------------------- coordinator


class FedMLP(Method):
    """The coordinator's half of FedMLP: FedAvg, and the means of prototypes (eq. 6) and difficulties (eq. 10)."""

    site_class = FedMLPSite
    site: FedMLPSite

    @property
    def head_mean_class(self) -> HeadMean:
        """Return the class that averages head rows: over all sites, or with ``heads = "own"`` over the row's owners."""
        return OwnersMean if self.site.parameters.heads == "own" else WholeHeadMean

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives every site the global prototypes and difficulties."""
        return lambda site: context.statistics

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a site's prototypes and difficulties; empty before the last round of stage 1.

        The result is also empty if missing labels are never tagged.
        """
        if not self.site.parameters.detection or context.round < self.site.parameters.stage_one_rounds:
            return {}
        classes = len(context.contract.class_names)
        return {"prototypes": (classes, 2, features), "difficulty": (classes,)}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the global prototypes and difficulties after a round; values that no site sent do not change.

        A site's prototypes count for the classes that it labels, its difficulties for the other classes.
        """
        sent = {site: reply for site, reply in replies.items() if "prototypes" in reply.statistics}
        if not sent:
            return context.statistics
        annotated = {site: context.contract.annotated_class_mask(site) for site in sent}
        images = {site: float(reply.train_samples) for site, reply in sent.items()}
        weights = images if self.site.parameters.prototype_weighting == "samples" else dict.fromkeys(sent, 1.0)
        local = {
            site: np.where(annotated[site][:, None, None], reply.statistics["prototypes"], np.nan)
            for site, reply in sent.items()
        }
        difficulty = {site: reply.statistics["difficulty"].clip(0, 1) for site, reply in sent.items()}
        sure = {site: np.where(annotated[site], np.nan, of_site) for site, of_site in difficulty.items()}
        now = {"prototypes": average_without_nan(local, weights), "difficulty": average_without_nan(sure, images)}
        first = {"prototypes": now["prototypes"], "difficulty": np.ones(len(context.contract.class_names))}
        return {
            name: np.where(np.isnan(mean), context.statistics.get(name, first[name]), mean).astype(np.float32)
            for name, mean in now.items()
        }

    def compute_round_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return each class's difficulty; None for a class that every site labels.

        The result is empty until sites have sent difficulties.
        """
        if "difficulty" not in context.statistics:
            return {}
        values = np.where(context.contract.annotation_matrix().all(axis=0), np.nan, context.statistics["difficulty"])
        return {"difficulty": convert_to_json_numbers(dict(zip(context.contract.class_names, values, strict=True)))}

    def compute_summary_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return the cosines between the global prototypes, but not the vectors themselves."""
        if "prototypes" not in context.statistics:
            return {}
        prototypes = context.statistics["prototypes"]

        def to_json_numbers(values: Iterable[np.floating]) -> list[float | None]:
            return [None if np.isnan(value) else float(value) for value in values]

        positives = [to_json_numbers(row) for row in compute_pairwise_cosines(prototypes[:, 1])]
        signs = to_json_numbers(compute_pairwise_cosines(pair)[0, 1] for pair in prototypes)
        return {"prototypes": {"classes": list(context.contract.class_names), "positives": positives, "signs": signs}}
