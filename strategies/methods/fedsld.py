"""FedSLD: each image's loss is weighted by its class's share in the batch over its share in the federation.

Luo and Wu, "FedSLD: Federated Learning with Shared Label Distribution for Medical Image Classification", 2021. p_b:
share of a class in the batch; P: its share in the federation, the *prior*; an image with label y gets the weight
``p_b(y) / P(y)``, without gradient.

Coordinator: computes the prior from the label counts of the roll call. Hospital: weighs each batch.

Departs from the paper, whose eq. 3 sums over the batch and does not train (docs/papers.md#fedsld-reduction): by default
the sum is divided by the number of images. Because ``sum_c p_b(c)^2 / P(c) >= 1``, the weights lengthen the steps of
sites with skewed labels. The baseline ``fedavg_scaled`` (FedAvg with an equally raised learning rate) shows how much of
the gain is due to that.

Our extension to multi-label tasks: each class is a distribution of two outcomes, present and absent, and each known
entry (a class of an image) gets the weight ``p_b / P`` of its outcome.

A site may keep label counts to itself (docs/papers.md#fedsld-counts); such counts are unknown, not 0. In a multi-class
task the counts of a site's classes sum to its number of images, so unknown counts share the remaining images equally. A
site that sends no count is omitted, and a site whose statistics do not count (:class:`RoundContext`).
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

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import Fault, quote_names
from polyclinic.common.models.network import Model
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.wire.records import Arrays
from polyclinic.strategies.aggregation.means import HeadMean, Weighting, WholeHeadMean
from polyclinic.strategies.local.losses import (
    LossFunction,
    Missing,
    cross_entropy_per_image,
    fill_missing_labels,
    mask_images_of_known_class,
    mask_unknown_logits,
    mean_over_mask,
)
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload
from polyclinic.strategies.local.objective import Batch, ClientContext, LabelledExamples, LocalRound, plain
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, RoundContext
from polyclinic.strategies.methods.surgical import OwnersMean

Float64 = NDArray[np.float64]

Reduction = Literal["sum_over_batch", "sum", "weighted_mean"]


class FedSLDParameters(Parameters):
    """The ``[method]`` table of ``fedsld``.

    Attributes:
        reduction: Divisor of the sum of weighted losses. ``sum_over_batch``: the number of images of known class, or in
            a multi-label task of known labels. ``weighted_mean``: the sum of the weights. ``sum``: no divisor, as in
            eq. 3, or in a multi-label task the number of classes with a known label in the batch.
        heads: ``own`` gives each site the head rows of its own classes only, averaged as in surgical aggregation.
        missing: How the loss treats classes that a site does not annotate.
    """

    weighting: Weighting = "samples"
    reduction: Reduction = "sum_over_batch"
    heads: Literal["all", "own"] = "all"
    missing: Missing = "masked"


class ScaledFedAvgParameters(Parameters):
    """The ``[method]`` table of ``fedavg_scaled``, which trains with the mean size of FedSLD's weights.

    FedSLD weighs a label of class c by ``p(c) / P(c)``: the class's share in the batch over its share in the
    federation.

    Attributes:
        scale: ``federation`` multiplies the learning rate of all sites by one factor: the mean of ``sum_c p_i(c)^2 /
            P(c)`` over sites i, weighted by their images, where p_i is a class's share at the site. ``batch``
            multiplies the loss of each batch by the mean of FedSLD's weights of its labels.
        missing: How the loss treats classes that a site does not annotate.
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


def compute_federation_prior(context: RoundContext) -> Float64:
    """Return the :func:`compute_label_prior` of the sites whose statistics count, ``(classes,)``.

    A class without a count from any such site gets the mean share of the other classes. That happens only if the single
    site that stated a count does not count any more; with a share of 0, no site would train the class.
    """
    positives, images = collect_label_counts(context)
    prior = compute_label_prior(positives, images)
    unknown = np.isnan(positives).all(axis=0)
    if unknown.all():
        return np.full(len(prior), 0.5 if context.task == "multi_label" else 1 / len(prior))
    return np.where(unknown, prior[~unknown].mean(), prior)


def compute_expected_label_weight(shares: Float64, prior: Float64) -> float:
    """Return FedSLD's expected weight ``sum_c p(c)^2 / P(c)``, at least 1; shares p and prior P sum to one."""
    there = prior > 0
    return float((shares[there] ** 2 / prior[there]).sum())


def compute_site_label_prior(context: RoundContext, everywhere: Float64, site: str) -> NDArray[np.float32]:
    """Return a site's prior over the run's classes, ``(classes,)``; 0 for classes that the site does not annotate.

    The prior of a class is its share in the federation. In a multi-class task the shares of the site's classes are
    divided by their sum, so that they sum to one.

    Args:
        everywhere: The federation's :func:`compute_label_prior`.
    """
    prior = np.where(context.contract.annotated_class_mask(site), everywhere, 0.0)
    if context.task == "multi_class":
        prior = prior / max(prior.sum(), 1e-12)
    return prior.astype(np.float32)


def collect_label_counts(context: RoundContext) -> tuple[Float64, Float64]:
    """Return the sites' counts of positives and of images, each ``(sites, classes)`` in name order; NaN for unknown.

    In a multi-class task, if a site does not send the counts of some classes, its remaining images are divided equally
    among these classes.
    """
    names = context.contract.class_names
    positives, images = (np.full((len(context.answers), len(names)), np.nan) for _ in range(2))
    for site, (_, answer) in enumerate(sorted(context.answers.items())):
        if not answer.positives:
            continue
        columns = [names.index(name) for name in answer.class_names]
        present, absent = np.array(answer.positives, np.float64), np.array(answer.negatives, np.float64)
        is_known = (present >= 0) & (absent >= 0)
        if context.task == "multi_class":
            total = float((present + absent)[is_known].max()) if is_known.any() else float(answer.train_samples)
            remaining = max(total - present[is_known].sum(), 0.0) / max((~is_known).sum(), 1)
            positives[site, columns], images[site, columns] = np.where(is_known, present, remaining), total
        else:
            positives[site, columns] = np.where(is_known, present, np.nan)
            images[site, columns] = np.where(is_known, present + absent, np.nan)
    return positives, images


def compute_mean_label_weight(context: RoundContext) -> float:
    """Return FedSLD's expected weight of a label, averaged over the sites with their numbers of images as weights.

    See :func:`compute_expected_label_weight`. In a multi-label task the average is also over classes.
    """
    positives, images = collect_label_counts(context)
    everywhere = compute_federation_prior(context)
    factors, weights = list[float](), list[float]()
    for site, own_positives, own_images in zip(sorted(context.answers), positives, images, strict=True):
        if not np.nansum(own_images) > 0:
            continue
        prior = compute_site_label_prior(context, everywhere, site).astype(np.float64)
        shares = np.divide(own_positives, own_images, out=np.zeros_like(prior), where=own_images > 0)
        pairs = [(shares, prior)]
        if context.task == "multi_label":  # each class is a distribution of two
            stated = np.flatnonzero(np.isfinite(own_images) & (own_images > 0))
            pairs = [(np.array([shares[c], 1 - shares[c]]), np.array([prior[c], 1 - prior[c]])) for c in stated]
        factors.append(float(np.mean([compute_expected_label_weight(*pair) for pair in pairs])))
        weights.append(float(np.nanmax(own_images)))
    return float(np.average(factors, weights=weights)) if factors else 1.0


def find_uncounted_label_faults(context: RoundContext) -> list[Fault]:
    """Return a fault if a class's share in the federation is unknown, because its images would get the weight 0."""
    silent = np.any(_find_needed_counts(context), axis=0)
    names = [name for name, is_silent in zip(context.contract.class_names, silent.tolist(), strict=True) if is_silent]
    if not names:
        return []
    problem = f"needs how many images show each class; too few sites send it of {quote_names(names)}."
    remedy = (
        "Hospitals send it with label_counts = true under [policy]; never of a class of few patients (smallest_count)."
    )
    return [Fault("run.method", problem, remedy)]


def find_sites_without_needed_counts(context: RoundContext) -> list[Fault]:
    """Return the fault of :func:`find_uncounted_label_faults` for each site that does not send a needed count.

    Without these sites the share of every class is known.
    """
    lacking = np.any(_find_needed_counts(context), axis=1).tolist()
    sites = [site for site, lacks in zip(context.contract.sites, lacking, strict=True) if lacks]
    return [replace(fault, site=site) for site in sites for fault in find_uncounted_label_faults(context)]


def _find_needed_counts(context: RoundContext) -> NDArray[np.bool_]:
    """Return an array ``(sites, classes)``, True for each unknown count by which a class's share is unknown."""
    positives, images = collect_label_counts(context)
    unknown = context.contract.annotation_matrix() & np.isnan(positives)
    one_sided = (np.nansum(positives, axis=0) == 0) | (np.nansum(images - positives, axis=0) == 0)
    silent = np.isnan(positives).all(axis=0) | (unknown.any(axis=0) & one_sided)
    return np.asarray(unknown & silent, np.bool_)


# ---------------------------------------------------------------------- weights of images and entries (eq. 3)
# Shapes: logits and labels (batch, rows), labels 1, 0 or NaN for unknown; prior (rows,).


def compute_batch_class_weights(labels: Tensor, prior: Tensor) -> Tensor:
    """Return the weight of every class, ``(rows,)``: its share in the batch over its prior; 0 if the prior is 0."""
    is_known = mask_images_of_known_class(labels)
    share = labels.nan_to_num().sum(dim=0) / is_known.sum().clamp(min=1)
    return _divide_by_prior(share, prior)


def _divide_by_prior(share: Tensor, prior: Tensor) -> Tensor:
    return torch.where(prior > 0, share / torch.where(prior > 0, prior, 1.0), 0.0)


def compute_batch_image_weights(labels: Tensor, prior: Tensor) -> Tensor:
    """Return the weight of every image by its class, ``(batch,)``; 0 for an image of unknown class."""
    return labels.nan_to_num() @ compute_batch_class_weights(labels, prior)


def compute_label_entry_weights(labels: Tensor, prior: Tensor) -> Tensor:
    """Return the weight of every entry (a class of an image) of a multi-label task, ``(batch, rows)``.

    The weight is the share of the entry's label (present or absent) in the batch divided by that in the federation; 0
    if the label is unknown, or if its share in the federation is 0.

    Args:
        labels: 1, 0, or NaN for unknown, ``(batch, rows)``.
        prior: Share of present labels of each class in the federation, ``(rows,)``.
    """
    is_known = ~labels.isnan()
    share = labels.nan_to_num().sum(dim=0) / is_known.sum(dim=0).clamp(min=1)
    present, absent = _divide_by_prior(share, prior), _divide_by_prior(1 - share, 1 - prior)
    return torch.where(is_known, torch.where(labels == 1, present, absent), 0.0)


def compute_weighted_cross_entropy(logits: Tensor, labels: Tensor, prior: Tensor, reduction: Reduction) -> Tensor:
    """Return the cross-entropy of a multi-class task with a weight for each image (eq. 3).

    The weight is the share of the image's class in the batch divided by its ``prior``. The softmax omits classes whose
    label is unknown; an image without a known class counts 0.
    """
    weights = compute_batch_image_weights(labels, prior)
    is_known = mask_images_of_known_class(labels)
    losses = torch.where(is_known, cross_entropy_per_image(mask_unknown_logits(logits, labels), labels), 0.0)
    return _reduce_losses(losses * weights, weights, is_known.sum(), reduction)


def compute_weighted_binary_loss(logits: Tensor, labels: Tensor, prior: Tensor, reduction: Reduction) -> Tensor:
    """Return the loss of eq. 3 for a multi-label task: binary cross-entropy with a weight for each label.

    Departs from the paper, which has only multi-class tasks. With ``reduction`` "sum" the losses are added over images
    and averaged over classes.

    Args:
        prior: Share of present labels of each class in the federation, ``(rows,)``.
    """
    weights = compute_label_entry_weights(labels, prior)
    is_known = ~labels.isnan()
    losses = binary_cross_entropy_with_logits(logits, labels.nan_to_num(), reduction="none") * weights
    if reduction == "sum":
        return losses.sum() / is_known.any(dim=0).sum().clamp(min=1)
    return _reduce_losses(losses, weights, is_known.sum(), reduction)


def _reduce_losses(weighted: Tensor, weights: Tensor, count: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "sum":
        return weighted.sum()
    divisor = count.clamp(min=1) if reduction == "sum_over_batch" else weights.sum().clamp(min=1e-12)
    return weighted.sum() / divisor


WEIGHTS: Mapping[Task, Callable[[Tensor, Tensor], Tensor]] = {
    "multi_class": compute_batch_image_weights,
    "multi_label": compute_label_entry_weights,
}

WEIGHTED: Mapping[Task, Callable[[Tensor, Tensor, Tensor, Reduction], Tensor]] = {
    "multi_class": compute_weighted_cross_entropy,
    "multi_label": compute_weighted_binary_loss,
}


# ---------------------------------------------------------------------- hospital


class FedSLDSite(SiteMethod):
    """The hospital's half of FedSLD: each loss is weighted by batch share over federation share."""

    traits = MethodTraits(
        "fedsld",
        parameters_class=FedSLDParameters,
        payload=Payload(label_counts=True),
        reason_against_segmentation="it weighs whole images by the distribution of their labels",
        allows_other_loss=False,
    )
    parameters: FedSLDParameters

    @cached_property
    def payload(self) -> Payload:
        """Return the declared data; with ``heads = "own"`` each site has the head rows of its own classes only."""
        return replace(self.traits.payload, rows=self.parameters.heads)

    def local_loss(self, statistics: Arrays, examples: LabelledExamples, spec: TrainingSection) -> LossFunction:
        """Return the loss that weighs images by their class's share in the batch over its share in the federation."""
        prior = torch.from_numpy(statistics["prior"].copy()).to(examples.labels.device)

        def loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
            labels = fill_missing_labels(labels, annotated, self.parameters.missing)
            return WEIGHTED[self.task](logits, labels, prior, self.parameters.reduction)

        return loss


class ScaledFedAvgSite(SiteMethod):
    """The hospital's half of ``fedavg_scaled``: the plain loss, with a raised learning rate or a factor per batch."""

    traits = MethodTraits(
        "fedavg_scaled",
        parameters_class=ScaledFedAvgParameters,
        payload=Payload(label_counts=True),
        looks_at_images=False,
        reason_against_segmentation="it weighs whole images by the distribution of their labels",
    )
    parameters: ScaledFedAvgParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round.

        ``scale = "federation"`` multiplies the learning rate by one factor for all sites; ``"batch"`` multiplies each
        batch's loss by the mean weight of its labels.
        """
        loss = self.choose_training_loss(context.examples, context.spec)
        if self.parameters.scale == "federation":
            return LocalRound(plain(loss), lr_factor=float(context.statistics["factor"][0]))
        prior = torch.from_numpy(context.statistics["prior"].copy()).to(context.examples.labels.device)

        def objective(model: Model, batch: Batch) -> Tensor:
            labels = fill_missing_labels(batch.labels, batch.annotated, self.parameters.missing)
            weights = WEIGHTS[self.task](labels, prior)
            return mean_over_mask(weights > 0, weights) * plain(loss)(model, batch)

        return LocalRound(objective)


# ---------------------------------------------------------------------- coordinator


class FedSLD(Method):
    """The coordinator's half of FedSLD: FedAvg, and the label prior P from the label counts of the roll call."""

    site_class = FedSLDSite
    site: FedSLDSite

    @property
    def head_mean_class(self) -> HeadMean:
        """Return the class that averages head rows: over all sites, or with ``heads = "own"`` over the row's owners."""
        return OwnersMean if self.site.parameters.heads == "own" else WholeHeadMean

    def find_roll_call_faults(self, context: RoundContext) -> list[Fault]:
        """Return a fault for each site that does not send a count that the share of a class needs."""
        return find_sites_without_needed_counts(context)

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives each site the federation's label prior for the classes of its head rows."""
        everywhere = compute_federation_prior(context)
        contract = context.contract

        def select_prior_of_site(site: str) -> Arrays:
            prior = compute_site_label_prior(context, everywhere, site)
            rows = self.site.parts.select_own_rows(site, contract)
            return {"prior": prior[[contract.class_names.index(name) for name in rows]]}

        return select_prior_of_site


class ScaledFedAvg(Method):
    """Control experiment for FedSLD: FedAvg with the learning rate times FedSLD's mean weight.

    The reason is at docs/papers.md#fedsld-control.
    """

    site_class = ScaledFedAvgSite
    site: ScaledFedAvgSite

    def find_roll_call_faults(self, context: RoundContext) -> list[Fault]:
        """Return a fault for each site that does not send a count that the share of a class needs."""
        return find_sites_without_needed_counts(context)

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives each site the statistics of its training.

        ``scale = "federation"`` gives one learning rate factor, equal for all sites; ``"batch"`` gives the site's label
        prior.
        """
        if self.site.parameters.scale == "batch":
            everywhere = compute_federation_prior(context)
            return lambda site: {"prior": compute_site_label_prior(context, everywhere, site)}
        factor = np.array([compute_mean_label_weight(context)], np.float32)
        return lambda site: {"factor": factor}
