"""FedMLP: each site labels some classes, and learns to detect the others from everybody's prototypes.

Sun, Wu, Shi, Yu, Yang, Cheng, Yan: "FedMLP: Federated Multi-label Medical Image Classification under Task
Heterogeneity", MICCAI 2024 (specs 3). Each site labels some classes; its labels of the others are missing.

Stage 1, rounds 1 to ``stage_one_rounds``: the weighted partial-class loss (its own classes, logits adjusted by how
often the site sees each), and consistency with the received model on the classes it does not label. Stage 2: each
image whose feature is much nearer to one of the two global prototypes of a missing class is tagged with that label, for
ever; tags are trained on like labels, the rest stays consistent with the received model.

Hospital: tags, in its own memory; after training from the last round of stage 1 on, its prototypes and, for the classes
that it does not label, the *difficulty*. Coordinator: FedAvg, and the means of prototypes and difficulties.

The names of the maths: Z is how much more a feature is like the negative prototype P0 than like the positive P1; tau is
the share of the seemingly negative or positive images that is tagged in a round; d is a class's difficulty, T a rate.
Of what a site has nothing to say it sends NaN, which means leave out; sums run in float64 in the order of site names.

Departs from the authors' code: see decisions M1 to M6 in specs 3; besides, that code drops a class's positives in a
round that tags no negatives, by a condition typed twice, and sends zeros for a prototype without images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from common.models.network import Model, features_and_logits
from common.wire.records import Arrays
from strategies.aggregation.means import HeadMean, Weighting, WholeHeadMean
from strategies.local.losses import Loss, loss_for
from strategies.local.objective import Batch, ClientContext, LocalRound, Losses, fixed_copy
from strategies.local.site_method import Parameters, Payload, SiteMethod, Statistic
from strategies.methods.base import Method, RoundContext, SiteReply, finite_by_name
from strategies.methods.surgical import OwnersMean

Floats = NDArray[np.floating]
Float64 = NDArray[np.float64]
Tags = NDArray[np.int8]
"""1 for positive, 0 for negative, -1 for not tagged; ``(n,)`` of one class, or with classes behind it."""

Rounding = Literal["floor", "ceil"]
"""``floor`` is the authors': at their rates it tags no negative among fewer than 200 images. ``ceil``, for small sites,
tags at least one of each sign that there is, unless the share is 0."""


class FedMLPParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        stage_one_rounds: Rounds before the first tags; the authors' t1 is 50.
        tag_rate_negative, tag_rate_positive: T0 and T1: share tagged in a round at difficulty 1.
        sure_below, sure_above: L and R: probabilities outside are sure.
        rounding: ``ceil`` tags at least one image of each sign, as a small site needs; ``floor`` is the authors'.
        weighted_partial_loss: Else missing counts as negative, unadjusted (ablation: WPC).
        detection: Tag missing labels at all (ablation: MLD).
        self_adaptive: The rates are multiplied by the difficulty (ablation: SAT).
        consistency, consistency_stage_one: Stay near the received model where there is no label (ablation: CR).
        prototype_weighting: Of the sites' prototypes.
        heads: ``own``: a class's head row is averaged over the sites that label it only, as in surgical aggregation.
    """

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
    def _sure_at_both_ends(self) -> Self:
        if self.sure_below > self.sure_above:
            raise ValueError(f"sure_below, {self.sure_below}, must not lie above sure_above, {self.sure_above}")
        return self

    @model_validator(mode="after")
    def _consistency_has_entries(self) -> Self:
        if self.consistency and not self.weighted_partial_loss:
            raise ValueError(
                "consistency makes no sense without weighted_partial_loss: missing counts as negative then, "
                "and no entry is left that has no target; set consistency = false too"
            )
        return self


# ---------------------------------------------------------------------- how often a site sees a class (eq. 3)


def positive_prior(positives: ArrayLike, images: int) -> Float64:
    """Share of a site's images in which each class is present.

    Departs from the paper in keeping half an image away from 0 and 1, where its logarithm is infinite.

    Args:
        positives: Images labelled or tagged as positive, ``(classes,)``.
        images: All training images of the site, those of unknown label included.
    """
    margin = 1 / (2 * images)
    return np.clip(np.asarray(positives, np.float64) / images, margin, 1 - margin)


def adjustment(prior: Float64) -> Float64:
    """The logarithm of the odds of ``prior``, to be added to training logits."""
    return np.log(prior) - np.log1p(-prior)


def adjustment_of(targets: Tensor) -> Tensor:
    """:func:`adjustment` by a whole site's targets ``(n, classes)``, as float32 ``(classes,)`` on their device."""
    positives = (targets == 1).sum(dim=0).cpu().numpy()
    values = adjustment(positive_prior(positives, len(targets)))
    return torch.from_numpy(values.astype(np.float32)).to(targets.device)


# ---------------------------------------------------------------------- prototypes and difficulty (eq. 6 and 10)


def local_prototypes(features: Floats, labels: Floats) -> Float64:
    """Mean feature of a site's negatives and of its positives, class by class.

    Args:
        features: ``(n, features)``.
        labels: True labels 1, 0 or NaN for unknown, ``(n, classes)``; all NaN for a class the site does not label.

    Returns:
        Prototypes ``(classes, 2, features)``, negative first.
    """
    members = np.stack([labels == 0, labels == 1], axis=-1)  # (n, classes, 2)
    counts = members.sum(axis=0)  # (classes, 2)
    sums = np.tensordot(members.astype(np.float64), features.astype(np.float64), axes=(0, 0))
    return np.where(counts[..., None] > 0, sums / np.maximum(counts, 1)[..., None], np.nan)


def global_prototypes(local: Mapping[str, Floats], weights: Mapping[str, float]) -> Float64:
    """Average each prototype over the sites that have it; NaN where nobody does.

    Args:
        local: Site -> its prototypes, ``(classes, 2, features)``.
        weights: Site -> its training images, as in the authors' code, or 1 each, as in eq. 6.
    """
    return _mean_of_known(local, weights)


def difficulty(probabilities: Floats, low: float = 0.3, high: float = 0.7) -> Float64:
    """Share of images of which the model is sure, class by class: probability below ``low`` or above ``high``.

    Args:
        probabilities: Unadjusted, ``(n, classes)``.
    """
    return np.asarray(((probabilities < low) | (probabilities > high)).mean(axis=0), np.float64)


def global_difficulty(local: Mapping[str, Floats], weights: Mapping[str, float]) -> Float64:
    """Average each class's difficulty over the sites that do NOT label it; 1 where all do.

    Eq. 10 writes the sites that label it, but the paper's words are "negative class difficulty", and so the authors'
    code has it.

    Args:
        local: Site -> its :func:`difficulty`, NaN for classes that it labels, ``(classes,)``.
        weights: Site -> its training images.
    """
    return np.nan_to_num(_mean_of_known(local, weights), nan=1.0)


def global_statistics(
    sent: Mapping[str, Mapping[str, Floats]],
    own: Mapping[str, NDArray[np.bool_]],
    images: Mapping[str, float],
    before: Mapping[str, Floats],
    weighting: Literal["samples", "uniform"],
) -> dict[str, NDArray[np.float32]]:
    """The global prototypes and difficulties after a round; what nobody says stays as it was.

    Args:
        sent: Site -> its ``prototypes (classes, 2, features)`` and ``difficulty (classes,)``; at least one site.
        own: Site -> the classes that it labels, ``(classes,)``: of the others' prototypes it has no say, nor of the
            difficulty of its own.
        images: Site -> its training images.
        before: The global ones of the round before; empty where there were none.
        weighting: Of the prototypes.
    """
    weights = images if weighting == "samples" else dict.fromkeys(sent, 1.0)
    seen = {
        site: np.where(own[site][:, None, None], statistics["prototypes"], np.nan) for site, statistics in sent.items()
    }
    sure = {site: np.where(own[site], np.nan, statistics["difficulty"].clip(0, 1)) for site, statistics in sent.items()}
    prototypes, sureness = global_prototypes(seen, weights), global_difficulty(sure, images)
    known = np.any([~np.isnan(values) for values in sure.values()], axis=0)
    return {
        "prototypes": _where_known(~np.isnan(prototypes), prototypes, before.get("prototypes", prototypes)),
        "difficulty": _where_known(known, sureness, before.get("difficulty", sureness)),
    }


def _where_known(known: NDArray[np.bool_], now: Floats, before: Floats) -> NDArray[np.float32]:
    return np.where(known, now, before).astype(np.float32)


def cosines(vectors: Floats) -> Float64:
    """Cosine of the angle between every two of some vectors, ``(n, features)``; NaN for one that is unknown or zero.

    Returns:
        ``(n, n)``, symmetric.
    """
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)  # (n, 1)
    unit = vectors / np.where(lengths > 0, lengths, np.nan)
    return np.clip(unit @ unit.T, -1.0, 1.0)


def _mean_of_known(local: Mapping[str, Floats], weights: Mapping[str, float]) -> Float64:
    shape = next(iter(local.values())).shape
    total, weight = np.zeros(shape), np.zeros(shape)
    for site in sorted(local):
        known = ~np.isnan(local[site])
        total += np.where(known, weights[site] * local[site].astype(np.float64), 0.0)
        weight += np.where(known, weights[site], 0.0)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)


# ---------------------------------------------------------------------- tags (eq. 8)


def z_scores(features: Floats, negative: Floats, positive: Floats) -> NDArray[np.float64]:
    """Cosine of each feature with the negative prototype less that with the positive; ``(n,)``.

    Args:
        features: ``(n, features)``.
        negative: P0, ``(features,)``; NaN where nobody has one, and so is the result.
        positive: P1.
    """
    return _cosines(features, negative) - _cosines(features, positive)


def share_tagged(difficulty: float, rate: float) -> float:
    """Share of images to tag in a round: tau = d T, from 0 to 1 for any difficulty that a site states."""
    return min(1.0, max(0.0, difficulty) * rate)


def tags(z: Floats, untagged: NDArray[np.bool_], tau_negative: float, tau_positive: float, rounding: Rounding) -> Tags:
    """Tag the surest images of one class: the largest Z as negative, the smallest as positive.

    The shares are of the untagged images with Z >= 0, and of those with Z < 0. Ties go to the lower index.

    Args:
        z: ``(n,)``.
        untagged: Images that have no tag yet, ``(n,)``.
        tau_negative: Share, 0 to 1, of the seemingly negative to tag.
        tau_positive: The same of the seemingly positive.
        rounding: Of share times images.

    Returns:
        This round's new tags, -1 for every other image, ``(n,)``.
    """
    new = np.full(len(z), -1, np.int8)
    new[_surest(-z, untagged & (z >= 0), tau_negative, rounding)] = 0
    new[_surest(z, untagged & (z < 0), tau_positive, rounding)] = 1
    return new


def with_tags(old: Tags, new: Tags) -> Tags:
    """Add new tags; an old one is never changed."""
    return np.where(old >= 0, old, new)


def _surest(rank: Floats, candidates: NDArray[np.bool_], share: float, rounding: Rounding) -> NDArray[np.intp]:
    """Indices of the share of candidates that ranks lowest."""
    indices = np.flatnonzero(candidates)
    wanted = share * len(indices)
    count = min(len(indices), math.floor(wanted) if rounding == "floor" else math.ceil(wanted))
    return indices[np.argsort(rank[indices], kind="stable")[:count]]


def _cosines(features: Floats, prototype: Floats) -> NDArray[np.float64]:
    """Cosine of each row with the prototype; 0 for a vector of zeros."""
    rows, column = features.astype(np.float64), prototype.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(column)
    return np.asarray(rows @ column / np.where(lengths == 0, 1.0, lengths), np.float64)


# ---------------------------------------------------------------------- the two objectives, on logits


def cross_entropies(logits: Tensor, targets: Tensor, adjustment: Tensor | None) -> Tensor:
    """Binary cross-entropy of each entry, 0 where its target is NaN; ``(batch, classes)``.

    Args:
        adjustment: Added to the logits, ``(classes,)``: :func:`adjustment`.
    """
    adjusted = logits if adjustment is None else logits + adjustment
    entries = binary_cross_entropy_with_logits(adjusted, targets.nan_to_num(), reduction="none")
    return torch.where(targets.isnan(), 0.0, entries)


def distances(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared difference of each entry's unadjusted probability from the teacher's, which gets no gradient."""
    return (student.sigmoid() - teacher.detach().sigmoid()).square()


def supervised(views: Sequence[Tensor], targets: Tensor, adjustment: Tensor | None) -> Tensor:
    """Mean cross-entropy over the entries that have a target, and over views of the same images.

    The paper divides a row's sum by all classes, the authors' code by those annotated and the nominal batch size.
    Ours is the code's, with the entries actually there counted (M6).
    """
    known = (~targets.isnan()).sum().clamp(min=1)
    return torch.stack([cross_entropies(view, targets, adjustment).sum() / known for view in views]).mean()


def consistency(views: Sequence[Tensor], teachers: Sequence[Tensor], annotated: Tensor) -> Tensor:
    """Mean :func:`distances` over the entries of classes the site does not label, and over views.

    Args:
        teachers: The received global model's logits of the same views.
    """
    pairs = zip(views, teachers, strict=True)
    per_view = [distances(view[:, ~annotated], teacher[:, ~annotated]) for view, teacher in pairs]
    return torch.stack([entries.sum() / max(1, entries.numel()) for entries in per_view]).mean()


def first_stage(
    views: Sequence[Tensor],
    teachers: Sequence[Tensor] | None,
    targets: Tensor,
    annotated: Tensor,
    adjustment: Tensor | None,
) -> Tensor:
    """Objective of the rounds before the first tags.

    The paper has consistency in the second stage only, the authors' code here; without it the rows of classes that
    the site does not label drift with the shared features (M2).
    """
    loss = supervised(views, targets, adjustment)
    return loss if teachers is None else loss + consistency(views, teachers, annotated)


def second_stage(
    student: Tensor, teacher: Tensor | None, targets: Tensor, annotated: Tensor, adjustment: Tensor | None
) -> Tensor:
    """Objective once there are tags: one view, every entry of the batch weighing the same.

    Cross-entropy where there is a label or a tag, distance from the teacher where there is no tag yet, summed and
    divided by all entries of the batch. Entries that nobody knows add nothing to the sum. Without a teacher it is
    :func:`supervised`, divided by the supervised entries, as the authors' code with that line left out.
    """
    if teacher is None:
        return supervised([student], targets, adjustment)
    untagged = targets.isnan() & ~annotated
    distilled = torch.where(untagged, distances(student, teacher), 0.0)
    return (cross_entropies(student, targets, adjustment) + distilled).sum() / targets.numel()


# ---------------------------------------------------------------------- hospital


class FedMLPSite(SiteMethod):
    """Partial loss and consistency; in stage 2 tags count like labels."""

    name = "fedmlp"
    table = FedMLPParameters
    parameters: FedMLPParameters
    declared = Payload(
        statistics=(
            Statistic(
                "prototypes",
                "signs",
                "mean features of each class's images, present and absent; of one image, that image's",
            ),
            Statistic("difficulty", "images", "of each class, on what share of images the model is sure"),
        )
    )
    chooses_loss = False
    multi_class = False
    needs_global_norm = "its teacher is the model of all"

    @property
    def traffic(self) -> Payload:
        """``heads = "own"``: a site sends the rows of its own classes only."""
        return replace(self.declared, sends_rows=self.parameters.heads)

    @property
    def loss(self) -> Loss:
        """Cross-entropy on the site's own classes; without the weighted partial loss missing counts as negative."""
        return loss_for(self.task, "masked" if self.parameters.weighted_partial_loss else "negative")

    def client(self, context: ClientContext) -> LocalRound:
        """Tag, in stage 2, before training; send statistics, and keep the tags."""
        local = FedMLPRound(context, self.parameters)
        return LocalRound(local.objective, local.statistics, notes=local.notes)


class FedMLPRound:
    """One round at one site.

    Attributes:
        second_stage: Missing labels are tagged in this round.
        tags: Of all training images, ``(n, classes)``.
        targets: Labels, and tags where there is no label; NaN for the rest, or 0 where missing counts as negative.
    """

    def __init__(self, context: ClientContext, parameters: FedMLPParameters) -> None:
        self.context, self.parameters = context, parameters
        self.labels = context.examples.labels.cpu().numpy()  # (n, classes)
        self.annotated = context.examples.annotated.cpu().numpy()  # (classes,)
        self.second_stage = context.round > parameters.stage_one_rounds
        self.teacher = fixed_copy(context.network)
        kept = context.notes.get("tags")
        self.tags: Tags = np.full(self.labels.shape, -1, np.int8) if kept is None else kept.astype(np.int8)
        if self.second_stage and parameters.detection and "prototypes" in context.statistics:
            self.tags = self.tagged()
        targets = np.where(self.annotated, self.labels, np.where(self.tags >= 0, self.tags, np.nan))
        if not parameters.weighted_partial_loss:
            targets = np.where(~self.annotated & np.isnan(targets), 0.0, targets)
        self.targets = torch.from_numpy(targets.astype(np.float32)).to(context.examples.labels.device)
        # By each class's positives at this site, true or tagged.
        self.adjustment = adjustment_of(self.targets) if parameters.weighted_partial_loss else None

    def tagged(self) -> Tags:
        """Return the tags with this round's new ones, from the received model's features (specs 3.5, steps 1 to 4)."""
        statistics, parameters = self.context.statistics, self.parameters
        features, _ = self._features_and_probabilities(self.teacher)
        every = self.tags.copy()
        for column in np.flatnonzero(~self.annotated):
            ease = float(statistics["difficulty"][column]) if parameters.self_adaptive else 1.0
            negative, positive = statistics["prototypes"][column]
            new = tags(
                z_scores(features, negative, positive),
                every[:, column] < 0,
                share_tagged(ease, parameters.tag_rate_negative),
                share_tagged(ease, parameters.tag_rate_positive),
                parameters.rounding,
            )
            every[:, column] = with_tags(every[:, column], new)
        return every

    def objective(self, model: Model, batch: Batch) -> Tensor:
        """Return the loss of a batch: in stage 1 of two views of the images, in stage 2 of one."""
        targets, annotated = self.targets[batch.rows], batch.annotated
        if self.second_stage:
            view = batch.view()
            teacher = self._taught(batch, view) if self.parameters.consistency else None
            return second_stage(batch.logits(model, view), teacher, targets, annotated, self.adjustment)
        views = [batch.view(), batch.view()]
        consistent = self.parameters.consistency and self.parameters.consistency_stage_one
        teachers = [self._taught(batch, view) for view in views] if consistent else None
        students = [batch.logits(model, view) for view in views]
        return first_stage(students, teachers, targets, annotated, self.adjustment)

    def _taught(self, batch: Batch, view: Tensor) -> Tensor:
        with torch.no_grad():
            return batch.logits(self.teacher, view)

    def statistics(self, model: Model, losses: Losses) -> Arrays:
        """Return prototypes and difficulty of the trained model, from the last round of stage 1 on (specs 3.4)."""
        if not self.parameters.detection or self.context.round < self.parameters.stage_one_rounds:
            return {}
        features, probabilities = self._features_and_probabilities(model)
        labels = np.where(self.annotated, self.labels, np.nan)
        sure = difficulty(probabilities, self.parameters.sure_below, self.parameters.sure_above)
        return {
            "prototypes": local_prototypes(features, labels).astype(np.float32),
            "difficulty": np.where(self.annotated, np.nan, sure).astype(np.float32),
        }

    def notes(self, model: Model) -> Arrays:
        """Return the tags: they last for the whole run."""
        return {"tags": self.tags.astype(np.float32)}

    def _features_and_probabilities(self, model: Model) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Features and unadjusted probabilities of all training images as they are, not augmented."""
        features, logits = features_and_logits(model, self.context.examples.images, self.context.spec.precision)
        return features.cpu().numpy(), logits.sigmoid().cpu().numpy()


# ---------------------------------------------------------------------- coordinator


class FedMLP(Method):
    """FedAvg; besides, the means of the sites' prototypes (eq. 6) and difficulties (eq. 10) go back to all."""

    site_class = FedMLPSite
    site: FedMLPSite

    @property
    def head_mean(self) -> HeadMean:
        """``heads = "own"``: over a class's owners, as in surgical aggregation."""
        return OwnersMean if self.site.parameters.heads == "own" else WholeHeadMean

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Send the global prototypes and difficulties to all."""
        return lambda site: context.statistics

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Expect both from every site, from the last round of stage 1 on."""
        if not self.site.parameters.detection or context.round < self.site.parameters.stage_one_rounds:
            return {}
        classes = len(context.contract.class_names)
        return {"prototypes": (classes, 2, features), "difficulty": (classes,)}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the global prototypes and difficulties; where no site says anything, those of the round before."""
        sent = {site: reply.statistics for site, reply in replies.items() if "prototypes" in reply.statistics}
        if not sent:
            return context.statistics
        images = {site: float(replies[site].train_samples) for site in sent}
        own = {site: context.contract.annotated(site) for site in sent}
        return global_statistics(sent, own, images, context.statistics, self.site.parameters.prototype_weighting)

    def round_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return each class's difficulty, once sites have sent theirs; None where every site labels the class."""
        if "difficulty" not in context.statistics:
            return {}
        values = np.where(context.contract.coverage().all(axis=0), np.nan, context.statistics["difficulty"])
        return {"difficulty": finite_by_name(dict(zip(context.contract.class_names, values, strict=True)))}

    def summary_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return how much the global prototypes are alike, not the vectors themselves."""
        if "prototypes" not in context.statistics:
            return {}
        prototypes = context.statistics["prototypes"]
        between = cosines(prototypes[:, 1])
        within = np.array([cosines(pair)[0, 1] for pair in prototypes])
        alike = [[None if np.isnan(value) else float(value) for value in row] for row in between]
        apart = [None if np.isnan(value) else float(value) for value in within]
        return {"prototypes": {"classes": list(context.contract.class_names), "positives": alike, "signs": apart}}
