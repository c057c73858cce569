"""The label distribution of the federation, from what the sites say at the roll call.

Luo and Wu, "FedSLD", 2021 (specs 4.3, step 1). A site may keep counts to itself: what is not told is unknown, not 0.

In a multi-class task the classes of a site's images add up, so the counts that it keeps share what is left of its
images, evenly. A site that tells nothing is left out.
"""

import numpy as np
from numpy.typing import NDArray

from common.errors import Fault, quoted
from common.models.zoo.spec import Task
from common.wire.records import RollCallAnswer
from strategies.base.round_context import RoundContext

Float64 = NDArray[np.float64]


def label_prior(positives: Float64, images: Float64) -> Float64:
    """Share of each class in the federation, ``(classes,)``: ``sum_i n_ic / sum_i n_i`` over the sites that say.

    Args:
        positives: ``(sites, classes)`` images of each class; NaN where a site does not say.
        images: ``(sites, classes)`` images about which it could say, NaN as above.
    """
    total = np.nansum(images, axis=0)
    return np.asarray(np.nansum(positives, axis=0) / np.where(total > 0, total, 1.0), np.float64)


def chi_square_factor(shares: Float64, prior: Float64) -> float:
    """``sum_c p(c)^2 / P(c)``: the mean of FedSLD's weights where p is the share of each class; at least 1.

    Args:
        shares: They sum to one, as the prior does.
    """
    there = prior > 0
    return float((shares[there] ** 2 / prior[there]).sum())


def federation_prior(known: RoundContext) -> Float64:
    """:func:`label_prior` of what the sites said at the roll call."""
    return label_prior(*label_counts(known))


def own_prior(known: RoundContext, everywhere: Float64, site: str) -> NDArray[np.float32]:
    """The prior over the run's classes; 0 for those that the site does not annotate.

    In a multi-class task it runs over the site's own classes only and sums to one: what an image is, given that it is
    one of these.

    Args:
        everywhere: The :func:`federation_prior`, the same for all sites.
    """
    return prior_over(known.contract.annotated(site), everywhere, known.task)


def prior_over(annotated: NDArray[np.bool_], everywhere: Float64, task: Task) -> NDArray[np.float32]:
    """:func:`own_prior` of a site that annotates these classes, bool ``(classes,)``."""
    prior = np.where(annotated, everywhere, 0.0)
    if task == "multi_class":
        prior = prior / max(prior.sum(), 1e-12)
    return prior.astype(np.float32)


def label_counts(known: RoundContext) -> tuple[Float64, Float64]:
    """What the sites said, in the order of their names: positives and images, both ``(sites, classes)``, or NaN."""
    counts = [_counts_of(answer, known) for _, answer in sorted(known.answers.items())]
    return np.stack([positives for positives, _ in counts]), np.stack([images for _, images in counts])


def _counts_of(answer: RollCallAnswer, known: RoundContext) -> tuple[Float64, Float64]:
    names = known.contract.class_names
    positives, images = np.full(len(names), np.nan), np.full(len(names), np.nan)
    if not answer.positives:
        return positives, images
    own = [names.index(name) for name in answer.class_names]
    present, absent = np.array(answer.positives, np.float64), np.array(answer.negatives, np.float64)
    told = (present >= 0) & (absent >= 0)
    if known.task == "multi_class":
        total = float((present + absent)[told].max()) if told.any() else float(answer.train_samples)
        left = max(total - present[told].sum(), 0.0)
        positives[own], images[own] = np.where(told, present, left / max((~told).sum(), 1)), total
    else:
        positives[own], images[own] = np.where(told, present, np.nan), np.where(told, present + absent, np.nan)
    return positives, images


def mean_factor(known: RoundContext) -> float:
    """Mean over the sites, by images, of :func:`chi_square_factor`; in a multi-label task also over their classes."""
    positives, images = label_counts(known)
    everywhere = label_prior(positives, images)
    factors, weights = list[float](), list[float]()
    for site, own_positives, own_images in zip(sorted(known.answers), positives, images, strict=True):
        if np.nansum(own_images) > 0:
            prior = own_prior(known, everywhere, site).astype(np.float64)
            factors.append(_factor(known.task, own_positives, own_images, prior))
            weights.append(float(np.nanmax(own_images)))
    return float(np.average(factors, weights=weights))


def _factor(task: Task, positives: Float64, images: Float64, prior: Float64) -> float:
    shares = np.divide(positives, images, out=np.zeros_like(prior), where=images > 0)
    if task == "multi_class":
        return chi_square_factor(shares, prior)
    said = np.flatnonzero(np.isfinite(images) & (images > 0))
    pairs = [(np.array([shares[c], 1 - shares[c]]), np.array([prior[c], 1 - prior[c]])) for c in said]
    return float(np.mean([chi_square_factor(*pair) for pair in pairs]))


def uncounted(known: RoundContext) -> list[Fault]:
    """Classes of which nobody tells how common they are: images that show them would weigh nothing."""
    positives, images = label_counts(known)
    owners = known.contract.coverage()
    unknown = (owners & np.isnan(positives)).any(axis=0)
    one_sided = (np.nansum(positives, axis=0) == 0) | (np.nansum(images - positives, axis=0) == 0)
    silent = np.isnan(positives).all(axis=0) | (unknown & one_sided)
    names = [name for name, is_silent in zip(known.contract.class_names, silent.tolist(), strict=True) if is_silent]
    if not names:
        return []
    problem = f"needs how many images show each class; too few sites tell it of {quoted(names)}."
    remedy = (
        "Hospitals send it with label_counts = true under [policy]; never of a class of few patients (smallest_count)."
    )
    return [Fault("run.method", problem, remedy)]
