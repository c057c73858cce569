"""Bounds that the coordinator sets on one site's influence: on the length of its update and on its share of images.

Norm bounding: no update is longer than a multiple of the usual length. Sun, Kairouz, Suresh, McMahan, "Can You Really
Backdoor Federated Learning?", arXiv:1911.07963, 2019, section 4: the server shortens every update to a length M and
keeps its direction. Departs from the paper in two points:

- M is a multiple of the median length of the round's updates, because no fixed number fits every model and every round.
- Trunk, batch normalisation and head rows are bounded separately, because the largest part would hide the others. A
  head row is compared with each site's longest row, because too few sites may own its class for a median.

Shortening keeps the running variances of batch normalisation positive, between their old and new values. With fewer
than three sites no update is shortened, because the median of two lengths does not tell which one is too long.

Largest share: a site states its number of training images at the roll call, and nobody can check it; a billion images
would dominate the mean. Counts are capped only if ``participation.largest_share`` is set: honest counts differ by any
factor, so a default that fits every honest run would still allow a share of 99 %. A site with more than
:data:`DOMINANT_SHARE` of all images is named in ``events.jsonl`` in any case.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.models.network import Head
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.strategies.aggregation.means import Float32

Float64 = NDArray[np.float64]

MIN_SITES_FOR_MEDIAN = 3
"""Smallest number of sites from whose lengths a median is taken."""
TRUNK, NORM, HEAD_ROW = "trunk", "batch normalisation", "head row"

Lengths = Mapping[str, float]
"""Part of an update -> its Euclidean length; for head rows, that of the longest row."""


def compute_update_part_norms(update: ModelGroups) -> dict[str, float]:
    """Return the Euclidean length of each part of an update: trunk, batch normalisation and the longest head row."""
    lengths = {}
    for part, values, length in ((TRUNK, update.trunk, update.trunk_length), (NORM, update.norm, update.norm_length)):
        if values is not None:
            lengths[part] = length
    if update.head is not None:
        lengths[HEAD_ROW] = float(_compute_head_row_norms(update.head).max(initial=0.0))
    return lengths


def compute_median_part_norms(lengths: Iterable[Lengths]) -> dict[str, float]:
    """Return the median over sites of each part's length: trunk, batch normalisation, the site's longest head row.

    A part that fewer than three sites sent is omitted.

    Args:
        lengths: For each site, part -> length of that part of the site's update.
    """
    sent: dict[str, list[float]] = {}
    for of_site in lengths:
        for part, length in of_site.items():
            sent.setdefault(part, []).append(length)
    medians = dict[str, float]()
    for part, values in sent.items():
        if len(values) >= MIN_SITES_FOR_MEDIAN:
            medians[part] = statistics.median(values)
    return medians


def clip_update_by_median_norms(
    update: ModelGroups, lengths: Lengths, medians: Lengths, clip: float
) -> tuple[ModelGroups, str]:
    """Shorten the parts of an update (trunk, batch normalisation, head rows) that are too long.

    Args:
        update: One site's update.
        lengths: Part -> its length in this update; for head rows, the length of the longest row.
        medians: Part -> median of its length over the sites.
        clip: The largest length of a part, in median lengths.

    Returns:
        The update, and a sentence on the part that was shortened most; the sentence is empty if no part was too long.
    """
    relative = divide_norms_by_medians(lengths, medians)
    if max(relative.values(), default=0.0) <= clip:
        return update, ""
    long = {part: times for part, times in relative.items() if times > clip}
    if TRUNK in long and update.trunk is not None:
        update = replace(update, trunk=_scale_array_in_float64(update.trunk, clip / long[TRUNK]))
    if NORM in long and update.norm is not None:
        update = replace(update, norm=_scale_array_in_float64(update.norm, clip / long[NORM]))
    if HEAD_ROW in long and update.head is not None:
        head = update.head
        bound = clip * medians[HEAD_ROW]
        rows = _compute_head_row_norms(head)  # (classes,)
        factors = np.minimum(1.0, bound / np.where(rows > 0, rows, 1.0))
        too_long = rows > bound  # a row that is not long keeps its very bits
        weight = np.where(too_long[:, None], head.weight * factors[:, None], head.weight).astype(np.float32)
        bias = np.where(too_long, head.bias * factors, head.bias).astype(np.float32)
        update = replace(update, head=Head(head.class_names, weight, bias))
    worst = max(sorted(long), key=long.__getitem__)
    return update, f"its {worst} was {long[worst]:.3g} times the median length, and was shortened to {clip:g} times"


def clip_long_updates(
    replies: Mapping[str, TrainReply], clip: float, lengths: Mapping[str, Lengths] = MappingProxyType({})
) -> tuple[dict[str, TrainReply], dict[str, str]]:
    """Shorten the parts of a round's updates that are longer than ``clip`` times the median length of the part.

    Args:
        replies: Site -> its reply with its update of the round.
        clip: The largest length of a part, in median lengths of the round.
        lengths: Site -> lengths of the parts of its update, for sites whose update is already measured.

    Returns:
        All replies with bounded updates; and for each shortened site a sentence that says how.
    """
    measured = dict[str, Lengths]()
    for site, reply in replies.items():
        measured[site] = lengths.get(site) or compute_update_part_norms(reply.update)
    medians = compute_median_part_norms(measured.values())
    result = dict(replies)
    done = dict[str, str]()
    for site, reply in replies.items():
        update, sentence = clip_update_by_median_norms(reply.update, measured[site], medians, clip)
        if sentence:
            result[site], done[site] = replace(reply, update=update), sentence
    return result, done


def divide_norms_by_medians(lengths: Lengths, medians: Lengths) -> dict[str, float]:
    """Return the length of each part of an update divided by the median length of that part.

    Parts without a median are omitted. If the median is 0, the result is infinite, or 0 for a length of 0.
    """
    relative = dict[str, float]()
    for part, length in lengths.items():
        if part not in medians:
            continue
        if medians[part]:
            relative[part] = length / medians[part]
        else:
            relative[part] = math.inf if length else 0.0
    return relative


def _scale_array_in_float64(array: Float32, factor: float) -> Float32:
    """Return the array times the factor as float32, computed in float64 to keep tiny factors accurate."""
    return (array * np.float64(factor)).astype(np.float32)


def _compute_head_row_norms(head: Head) -> Float64:
    weight = head.weight.astype(np.float64)
    squares = np.einsum("cf,cf->c", weight, weight) + np.square(head.bias, dtype=np.float64)
    return np.asarray(np.sqrt(squares), np.float64)  # (classes,)


DOMINANT_SHARE = 0.9
"""Share of all images above which one site dominates a run."""


def cap_image_counts(images: Mapping[str, int], largest_share: float) -> dict[str, int]:
    """Return the sites' image counts, capped so that none exceeds ``largest_share`` of their sum; they weigh the mean.

    The counts of sites above the cap are lowered to the cap; the other counts stay. If there are too few sites for any
    cap to satisfy the share, all sites get the smallest site's count.

    Args:
        images: Site -> number of images that it stated at the roll call, at least 1.
        largest_share: Largest share of one site, above 0 and at most 1.
    """
    if largest_share >= 1 or not images:
        return dict(images)
    ordered = sorted(images.values(), reverse=True)
    for capped in range(len(ordered)):
        if capped * largest_share >= 1:
            break
        most = largest_share * sum(ordered[capped:]) / (1 - capped * largest_share)  # share of (capped * most + rest)
        if ordered[capped] <= most:
            return {site: min(count, max(int(most), 1)) for site, count in images.items()}
    return dict.fromkeys(images, ordered[-1])


def find_dominant_sites(images: Mapping[str, int]) -> dict[str, float]:
    """Return site -> its share of all images, for sites with a share above 90 %; empty in a run with one site."""
    total = sum(images.values())
    shares = {site: count / total for site, count in images.items()} if total and len(images) > 1 else {}
    return {site: share for site, share in shares.items() if share > DOMINANT_SHARE}
