"""FedSLD: each loss is weighted by the label's share in the batch divided by its share in the federation.

Luo and Wu, "FedSLD: Federated Learning with Shared Label Distribution for Medical Image Classification", 2021
(specs 4.3, 4.4). p_b: share of a class in the batch; P: its share in the federation, the *prior*; image k with label y
weighs ``p_b(y) / P(y)``, without a gradient through p_b.

Coordinator: the prior from the label counts of the roll call. Hospital: the weights, batch by batch.

Departs from the paper, whose eq. 3 sums over the batch and does not train (specs L1): by default the sum is divided by
the number of images. Since ``sum_c p_b(c)^2 / P(c) >= 1``, that lengthens the steps of skewed sites. The baseline
``fedavg_scaled``, FedAvg with a learning rate lengthened alike, shows how much of the gain is due to that.

Our extension to multi-label tasks: each class is a distribution of two, present and absent, and each known entry weighs
``p_b / P`` of its own side.

The prior comes from the label counts of the roll call (specs 4.3, step 1). A site may keep counts to itself: these are
unknown, not 0. In a multi-class task the counts of a site's classes add up to its images, so the unknown ones share the
rest of its images evenly. A site without any count is left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from common.config import TrainingSection
from common.errors import Fault, quote_names
from common.models.network import Model
from common.models.zoo.spec import Task
from common.wire.records import Arrays, RollCallAnswer
from strategies.aggregation.means import HeadMean, Weighting, WholeHeadMean
from strategies.local.losses import (
    Loss,
    Missing,
    cross_entropy_per_image,
    fill_missing_labels,
    is_class_known,
    mask_unknown_logits,
    mean_of_chosen,
)
from strategies.local.objective import Batch, ClientContext, Examples, LocalRound, plain
from strategies.local.site_method import Parameters, Payload, SiteMethod
from strategies.methods.base import Method, RoundContext
from strategies.methods.surgical import OwnersMean

Float64 = NDArray[np.float64]

Reduction = Literal["sum_over_batch", "sum", "weighted_mean"]


class FedSLDParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        reduction: ``sum_over_batch`` divides the weighted losses by the number of images, ``sum`` (eq. 3 as written) by
            nothing, ``weighted_mean`` by the sum of the weights.
        heads: ``own`` gives each site the rows of its own classes only, averaged as in surgical aggregation.
        missing: Treatment in the loss of the classes that a site does not annotate.
    """

    weighting: Weighting = "samples"
    reduction: Reduction = "sum_over_batch"
    heads: Literal["all", "own"] = "all"
    missing: Missing = "masked"


class ScaledFedAvgParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        scale: ``federation``: one factor for all, the mean over the sites, by images, of ``sum_c p_i(c)^2 / P(c)``;
            ``batch``: each batch's own mean weight.
    """

    weighting: Weighting = "samples"
    scale: Literal["federation", "batch"] = "federation"
    missing: Missing = "masked"


# ---------------------------------------------------------------------- the label distribution of the federation


def compute_label_prior(positives: Float64, images: Float64) -> Float64:
    """Return each class's share in the federation, ``sum_i n_ic / sum_i n_i`` over sites with counts; ``(classes,)``.

    Args:
        positives: Images of each class, ``(sites, classes)``; NaN for an unknown count.
        images: Images of known label, ``(sites, classes)``; NaN for an unknown count.
    """
    total = np.nansum(images, axis=0)
    return np.asarray(np.nansum(positives, axis=0) / np.where(total > 0, total, 1.0), np.float64)


def expected_label_weight(shares: Float64, prior: Float64) -> float:
    """Return ``sum_c p(c)^2 / P(c)``, at least 1: the mean of FedSLD's weights where p is the share of each class.

    Args:
        shares: p, which sums to one.
        prior: P, which sums to one.
    """
    there = prior > 0
    return float((shares[there] ** 2 / prior[there]).sum())


def compute_site_prior(context: RoundContext, everywhere: Float64, site: str) -> NDArray[np.float32]:
    """Return a site's prior over the run's classes; 0 for those that it does not annotate.

    In a multi-class task it runs over the site's own classes only and sums to one: the class of an image, given that it
    is one of these.

    Args:
        everywhere: The :func:`compute_label_prior` of the federation.
    """
    prior = np.where(context.contract.annotated_classes(site), everywhere, 0.0)
    if context.task == "multi_class":
        prior = prior / max(prior.sum(), 1e-12)
    return prior.astype(np.float32)


def collect_label_counts(context: RoundContext) -> tuple[Float64, Float64]:
    """Return the sites' positives and images, both ``(sites, classes)`` in the order of names; NaN for unknown."""
    counts = [_complete_label_counts(answer, context) for _, answer in sorted(context.answers.items())]
    return np.stack([positives for positives, _ in counts]), np.stack([images for _, images in counts])


def _complete_label_counts(answer: RollCallAnswer, context: RoundContext) -> tuple[Float64, Float64]:
    names = context.contract.class_names
    positives, images = np.full(len(names), np.nan), np.full(len(names), np.nan)
    if not answer.positives:
        return positives, images
    own = [names.index(name) for name in answer.class_names]
    present, absent = np.array(answer.positives, np.float64), np.array(answer.negatives, np.float64)
    is_known = (present >= 0) & (absent >= 0)
    if context.task == "multi_class":
        total = float((present + absent)[is_known].max()) if is_known.any() else float(answer.train_samples)
        left = max(total - present[is_known].sum(), 0.0)
        positives[own], images[own] = np.where(is_known, present, left / max((~is_known).sum(), 1)), total
    else:
        positives[own], images[own] = np.where(is_known, present, np.nan), np.where(is_known, present + absent, np.nan)
    return positives, images


def mean_label_weight(context: RoundContext) -> float:
    """Return FedSLD's mean weight of a label: :func:`expected_label_weight`, averaged over the sites by their images.

    In a multi-label task it is averaged over classes, too.
    """
    positives, images = collect_label_counts(context)
    everywhere = compute_label_prior(positives, images)
    factors, weights = list[float](), list[float]()
    for site, own_positives, own_images in zip(sorted(context.answers), positives, images, strict=True):
        if not np.nansum(own_images) > 0:
            continue
        prior = compute_site_prior(context, everywhere, site).astype(np.float64)
        shares = np.divide(own_positives, own_images, out=np.zeros_like(prior), where=own_images > 0)
        pairs = [(shares, prior)]
        if context.task == "multi_label":  # each class is a distribution of two
            stated = np.flatnonzero(np.isfinite(own_images) & (own_images > 0))
            pairs = [(np.array([shares[c], 1 - shares[c]]), np.array([prior[c], 1 - prior[c]])) for c in stated]
        factors.append(float(np.mean([expected_label_weight(*pair) for pair in pairs])))
        weights.append(float(np.nanmax(own_images)))
    return float(np.average(factors, weights=weights))


def find_uncounted_classes(context: RoundContext) -> list[Fault]:
    """Return a fault if a class's share is unknown, because images that show it would get the weight 0."""
    positives, images = collect_label_counts(context)
    owners = context.contract.annotation_matrix()
    unknown = (owners & np.isnan(positives)).any(axis=0)
    one_sided = (np.nansum(positives, axis=0) == 0) | (np.nansum(images - positives, axis=0) == 0)
    silent = np.isnan(positives).all(axis=0) | (unknown & one_sided)
    names = [name for name, is_silent in zip(context.contract.class_names, silent.tolist(), strict=True) if is_silent]
    if not names:
        return []
    problem = f"needs how many images show each class; too few sites send it of {quote_names(names)}."
    remedy = (
        "Hospitals send it with label_counts = true under [policy]; never of a class of few patients (smallest_count)."
    )
    return [Fault("run.method", problem, remedy)]


# ---------------------------------------------------------------------- weights of images and entries (eq. 3)
# Shapes: logits and labels (batch, rows), labels 1, 0 or NaN for unknown; prior (rows,).


def weigh_classes(labels: Tensor, prior: Tensor) -> Tensor:
    """Return ``p_b(c) / P(c)`` of every class ``(rows,)``; 0 where the prior is 0, for such a class cannot occur."""
    is_known = is_class_known(labels)
    share = labels.nan_to_num().sum(dim=0) / is_known.sum().clamp(min=1)
    return _divide_by_prior(share, prior)


def _divide_by_prior(share: Tensor, prior: Tensor) -> Tensor:
    return torch.where(prior > 0, share / torch.where(prior > 0, prior, 1.0), 0.0)


def weigh_images(labels: Tensor, prior: Tensor) -> Tensor:
    """Return the weight of every image ``(batch,)`` by its class; 0 where the class is not known.

    Args:
        labels: ``(batch, rows)``, one 1 a row.
        prior: ``(rows,)``.
    """
    return labels.nan_to_num() @ weigh_classes(labels, prior)


def weigh_entries(labels: Tensor, prior: Tensor) -> Tensor:
    """Return the weight of every entry ``(batch, rows)`` of a multi-label task; 0 where its label is not known."""
    is_known = ~labels.isnan()
    share = labels.nan_to_num().sum(dim=0) / is_known.sum(dim=0).clamp(min=1)
    present, absent = _divide_by_prior(share, prior), _divide_by_prior(1 - share, 1 - prior)
    return torch.where(is_known, torch.where(labels == 1, present, absent), 0.0)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, prior: Tensor, reduction: Reduction) -> Tensor:
    """Return eq. 3 for a multi-class task, with a softmax over the classes known of an image."""
    weights = weigh_images(labels, prior)
    is_known = is_class_known(labels)
    losses = torch.where(is_known, cross_entropy_per_image(mask_unknown_logits(logits, labels), labels), 0.0)
    return _reduce_losses(losses * weights, weights, is_known.sum(), reduction)


def weighted_binary_cross_entropy(logits: Tensor, labels: Tensor, prior: Tensor, reduction: Reduction) -> Tensor:
    """Return our extension to multi-label tasks; ``sum`` runs over images and takes the mean over a site's classes."""
    weights, is_known = weigh_entries(labels, prior), ~labels.isnan()
    losses = binary_cross_entropy_with_logits(logits, labels.nan_to_num(), reduction="none") * weights
    if reduction == "sum":
        return losses.sum() / is_known.any(dim=0).sum().clamp(min=1)
    return _reduce_losses(losses, weights, is_known.sum(), reduction)


def _reduce_losses(weighted: Tensor, weights: Tensor, count: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "sum":
        return weighted.sum()
    divisor = count.clamp(min=1) if reduction == "sum_over_batch" else weights.sum().clamp(min=1e-12)
    return weighted.sum() / divisor


WEIGHTS: Mapping[Task, Callable[[Tensor, Tensor], Tensor]] = {"multi_class": weigh_images, "multi_label": weigh_entries}

WEIGHTED: Mapping[Task, Callable[[Tensor, Tensor, Tensor, Reduction], Tensor]] = {
    "multi_class": weighted_cross_entropy,
    "multi_label": weighted_binary_cross_entropy,
}


# ---------------------------------------------------------------------- hospital


class FedSLDSite(SiteMethod):
    """The hospital's half of FedSLD: each entry's loss is weighted by p_b / P."""

    name = "fedsld"
    table = FedSLDParameters
    parameters: FedSLDParameters
    declared = Payload(label_counts=True)
    chooses_loss = False

    @cached_property
    def traffic(self) -> Payload:
        """Return the declared data; with ``heads = "own"`` each site has the head rows of its own classes only."""
        return replace(self.declared, rows=self.parameters.heads)

    def local_loss(self, statistics: Arrays, examples: Examples, spec: TrainingSection) -> Loss:
        """Return the loss that weighs each batch by how common its classes are in the federation."""
        prior = torch.from_numpy(statistics["prior"].copy()).to(examples.labels.device)

        def loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
            labels = fill_missing_labels(labels, annotated, self.parameters.missing)
            return WEIGHTED[self.task](logits, labels, prior, self.parameters.reduction)

        return loss


class ScaledFedAvgSite(SiteMethod):
    """The hospital's half of ``fedavg_scaled``: the plain loss, with longer steps."""

    name = "fedavg_scaled"
    table = ScaledFedAvgParameters
    parameters: ScaledFedAvgParameters
    declared = Payload(label_counts=True)
    looks_at_images = False

    def client(self, context: ClientContext) -> LocalRound:
        """Return a round that multiplies the learning rate by one factor for all, or the loss by each batch's own."""
        loss = self.training_loss(context.examples, context.spec)
        if self.parameters.scale == "federation":
            return LocalRound(plain(loss), lr_factor=float(context.statistics["factor"][0]))
        prior = torch.from_numpy(context.statistics["prior"].copy()).to(context.examples.labels.device)

        def objective(model: Model, batch: Batch) -> Tensor:
            labels = fill_missing_labels(batch.labels, batch.annotated, self.parameters.missing)
            weights = WEIGHTS[self.task](labels, prior)
            return mean_of_chosen(weights > 0, weights) * plain(loss)(model, batch)

        return LocalRound(objective)


# ---------------------------------------------------------------------- coordinator


class FedSLD(Method):
    """FedAvg in which every site receives the label prior P, computed from the label counts of the roll call."""

    site_class = FedSLDSite
    site: FedSLDSite

    @property
    def head_mean(self) -> HeadMean:
        """Return the class that averages head rows: with ``heads = "own"`` each row over its class's owners only."""
        return OwnersMean if self.site.parameters.heads == "own" else WholeHeadMean

    def roll_call_faults(self, context: RoundContext) -> list[Fault]:
        """Return the fault of classes of unknown share."""
        return find_uncounted_classes(context)

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return for each site the federation's label distribution over the classes of its head rows, for its loss."""
        everywhere, contract = compute_label_prior(*collect_label_counts(context)), context.contract

        def prior_of(site: str) -> Arrays:
            prior = compute_site_prior(context, everywhere, site)
            rows = self.site.rows_of(site, contract)
            return {"prior": prior[[contract.class_names.index(name) for name in rows]]}

        return prior_of


class ScaledFedAvg(Method):
    """FedAvg with the learning rate multiplied by FedSLD's mean weight: the control experiment (specs 4.4)."""

    site_class = ScaledFedAvgSite
    site: ScaledFedAvgSite

    def roll_call_faults(self, context: RoundContext) -> list[Fault]:
        """Return the fault of classes of unknown share."""
        return find_uncounted_classes(context)

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return one factor for all sites, or each site's prior for the factors of its batches."""
        if self.site.parameters.scale == "batch":
            everywhere = compute_label_prior(*collect_label_counts(context))
            return lambda site: {"prior": compute_site_prior(context, everywhere, site)}
        factor = np.array([mean_label_weight(context)], np.float32)
        return lambda site: {"factor": factor}
