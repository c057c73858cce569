"""Robust means, which a few wrong updates cannot move far, and distances between updates; maths on plain arrays.

Coordinate-wise median and trimmed mean: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018, definitions 1 and 2.
Krum and multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent", NeurIPS 2017, sections 3 and 5.

As in the papers, every site counts once, no matter how many images it states. Departs from Yin et al. in one point: of
n values ``ceil(fraction * n)`` are dropped at each end. The paper rounds down, which would drop none with a handful of
hospitals.

RSCFed and FedNoRo weigh sites by distances between models. All sites of a round start from one model, so the distance
of two models is the distance of their updates. Distances are Euclidean over all values that a site sends, as in the
papers; the authors' code of both methods adds up the norm of each tensor instead. Sums run in float64 and not by BLAS,
whose order of addition may change with the number of threads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.aggregation.means import (
    NUMBERS_PER_BLOCK,
    BlockwiseMean,
    Float32,
    Float64,
    MergedUpdates,
    PrecomputedHeadMean,
    PrecomputedMean,
    UpdateMeans,
    Weights,
    run_in_blocks,
)

Kind = Literal["coordinate_median", "trimmed_mean", "krum"]

KEYS_OF_KIND: dict[str, tuple[str, ...]] = {
    "coordinate_median": (),
    "trimmed_mean": ("fraction",),
    "krum": ("byzantine", "keep"),
}
"""The further keys of each kind of robust mean."""


class RobustMeanRule(BaseModel):
    """The ``method.mean`` setting: the name of a robust mean, or a table with the name as ``kind`` and further keys.

    Attributes:
        kind: ``coordinate_median``: the median of each number (Yin et al., ICML 2018). ``trimmed_mean``: the mean of
            each number without the largest and smallest values. ``krum``: the update that lies closest to its nearest
            ones (Blanchard et al., NeurIPS 2017).
        fraction: For the trimmed mean: share of the sites whose values are dropped at each end, at least one site.
        byzantine: For Krum: assumed number of sites that send arbitrary values.
        keep: For Krum: number of best sites that are averaged; 2 or more is multi-Krum.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Kind
    fraction: float = Field(0.1, gt=0, lt=0.5)
    byzantine: int = Field(1, ge=1)
    keep: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _parse_rule_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _refuse_keys_of_other_kinds(self) -> "RobustMeanRule":
        if others := sorted(self.model_fields_set - {"kind", *KEYS_OF_KIND[self.kind]}):
            raise ValueError(f"{', '.join(others)} is no key of {self.kind}")
        return self

    @property
    def min_sites_for_robust_mean(self) -> int:
        """Return the number of sites that the rule needs; with fewer sites the plain mean is used."""
        return 2 * self.byzantine + 3 if self.kind == "krum" else 3

    def count_trimmed_values(self, sites: int) -> int:
        """Return how many values a trimmed mean over ``sites`` values drops at each end; at least one value is left."""
        share = math.ceil(self.fraction * sites - 1e-9)  # 0.1 * 30 is a little more than 3
        return min(share, (sites - 1) // 2)


def compute_robust_mean(vectors: Sequence[Sequence[Float32]], rule: RobustMeanRule) -> list[Float64]:
    """Return the robust mean of the sites' vectors, split into parts like the vectors.

    Args:
        vectors: One vector for each site, at least :attr:`RobustMeanRule.min_sites_for_robust_mean`; a vector is a list
            of flat arrays, such as trunk and batch normalisation.
    """
    parts = [[site[place] for site in vectors] for place in range(len(vectors[0]))]
    if rule.kind == "krum":
        chosen = choose_sites_by_krum(compute_squared_site_distances(parts), rule.byzantine, rule.keep)
        return [apply_rule_by_coordinate([part[site] for site in chosen], compute_coordinate_mean) for part in parts]
    cut = rule.count_trimmed_values(len(vectors))
    of_block = (
        compute_coordinate_median
        if rule.kind == "coordinate_median"
        else lambda values: compute_coordinate_trimmed_mean(values, cut)
    )
    return [apply_rule_by_coordinate(part, of_block) for part in parts]


def average_updates_robustly(
    model: ModelState, updates: Sequence[ModelGroups], weights: Weights, rule: RobustMeanRule
) -> MergedUpdates:
    """Return the robust means of the sites' updates.

    Trunk and batch normalisation together are one vector for each site. Each head row is a vector of its own, for the
    sites that own its class. A part that fewer sites sent than the rule needs gets the plain mean, and
    :class:`MergedUpdates` names the part.

    Args:
        model: The model that the sites started training from.
        updates: At least one update, in the order of site names. All have a trunk or none has one; the same holds for
            batch normalisation and head.
        weights: One weight for each site; only plain means use the weights.
    """
    flat = [[array for array in (update.trunk, update.norm) if array is not None] for update in updates]
    of_trunk = iter(map(PrecomputedMean, _compute_robust_or_plain_mean(flat, weights, rule)))
    trunk = None if updates[0].trunk is None else next(of_trunk)
    norm = None if updates[0].norm is None else next(of_trunk)
    few = ["trunk"] if flat[0] and len(updates) < rule.min_sites_for_robust_mean else []
    rows: dict[str, dict[int, Float32]] = {name: {} for name in model.head.class_names}
    for site, update in enumerate(updates):
        if update.head is not None:
            for row, name in enumerate(update.head.class_names):
                rows[name][site] = np.append(update.head.weight[row], update.head.bias[row])  # (features + 1,)
    mean, sent = np.zeros((len(rows), model.head.features + 1)), np.zeros(len(rows), np.bool_)
    for row, (name, owners) in enumerate(rows.items()):
        if owners:
            shares = [weights[site] for site in owners]
            (mean[row],) = _compute_robust_or_plain_mean([[array] for array in owners.values()], shares, rule)
            sent[row] = True
            few += [name] if len(owners) < rule.min_sites_for_robust_mean else []
    head = None if updates[0].head is None else PrecomputedHeadMean((mean[:, :-1], mean[:, -1], sent))
    return MergedUpdates(UpdateMeans(model, trunk, norm, head), tuple(few))


def _compute_robust_or_plain_mean(
    vectors: Sequence[Sequence[Float32]], weights: Weights, rule: RobustMeanRule
) -> list[Float64]:
    """Return the robust mean if there are enough sites for it, otherwise the plain weighted mean."""
    if not vectors[0]:
        return []
    if len(vectors) >= rule.min_sites_for_robust_mean:
        return compute_robust_mean(vectors, rule)
    return [BlockwiseMean(list(zip(part, weights, strict=True))).mean for part in zip(*vectors, strict=True)]


def compute_coordinate_mean(values: Float64) -> Float64:
    """Return the mean of each coordinate of ``(sites, n)``."""
    return np.asarray(values.mean(axis=0), np.float64)


def compute_coordinate_median(values: Float64) -> Float64:
    """Return the median of each coordinate of ``(sites, n)`` (Yin et al., definition 1)."""
    return np.asarray(np.median(values, axis=0), np.float64)


def compute_coordinate_trimmed_mean(values: Float64, cut: int) -> Float64:
    """Return the mean of each coordinate of ``(sites, n)`` without ``cut`` values at either end (definition 2)."""
    return compute_coordinate_mean(np.sort(values, axis=0)[cut : len(values) - cut])


def choose_sites_by_krum(distances: Float64, byzantine: int, keep: int = 1) -> list[int]:
    """Return the ascending indices of the ``keep`` sites that lie closest to the others.

    A site's score is the sum of its squared distances to its ``n - byzantine - 2`` nearest sites. The sites with the
    lowest scores are chosen; of equal scores the first wins. At most ``n - byzantine`` sites are returned.

    Args:
        distances: Squared distances ``(n, n)``; ``n`` is at least ``2 * byzantine + 3``.
        byzantine: Assumed number of sites that send arbitrary values.
    """
    sites = len(distances)
    near = np.sort(distances + np.diag(np.full(sites, np.inf)), axis=1)[:, : sites - byzantine - 2]
    best = np.argsort(near.sum(axis=1), kind="stable")[: min(keep, sites - byzantine)]
    return sorted(best.tolist())


def compute_squared_site_distances(parts: Sequence[Sequence[Float32]]) -> Float64:
    """Return the squared Euclidean distances between the sites' vectors, ``(sites, sites)``.

    Args:
        parts: For each part of the vectors, one flat array for each site.
    """
    sites = len(parts[0])
    total = np.zeros((sites, sites), np.float64)
    for part in parts:
        for start in range(0, len(part[0]), NUMBERS_PER_BLOCK):
            values = _stack_site_blocks(part, slice(start, start + NUMBERS_PER_BLOCK))
            for site in range(sites - 1):
                total[site, site + 1 :] += np.square(values[site + 1 :] - values[site]).sum(axis=1)
    return total + total.T


def apply_rule_by_coordinate(part: Sequence[Float32], rule: Callable[[Float64], Float64]) -> Float64:
    """Apply a rule such as the median over sites to every coordinate of one part of the vectors, block by block.

    Args:
        part: The flat array of each site.
        rule: Function from ``(sites, n)`` to ``(n,)``.
    """
    result = np.empty(part[0].shape, np.float64)

    def fill_block(block: slice) -> None:
        result[block] = rule(_stack_site_blocks(part, block))

    run_in_blocks(len(result), fill_block)
    return result


def _stack_site_blocks(part: Sequence[Float32], block: slice) -> Float64:
    return np.stack([values[block] for values in part]).astype(np.float64)  # (sites, block)


def compute_update_inner_products(updates: Sequence[ModelGroups]) -> Float64:
    """Return the inner product of every two sites' updates over all model parts, ``(sites, sites)``."""
    named = [update.to_named_arrays() for update in updates]
    products = np.zeros((len(updates), len(updates)))
    for group in named[0]:
        flat = [arrays[group].reshape(-1) for arrays in named]
        for start in range(0, len(flat[0]), NUMBERS_PER_BLOCK):
            block = np.stack([values[start : start + NUMBERS_PER_BLOCK] for values in flat]).astype(np.float64)
            products += np.einsum("in,jn->ij", block, block)
    return products


def compute_distances_from_mean_model(products: Float64, weights: Float64) -> Float64:
    """Return the distance of each site's model from the weighted mean model, ``(sites,)``.

    Args:
        products: The sites' :func:`compute_update_inner_products`.
        weights: Weights ``(sites,)``; they need not sum to one.
    """
    shares = weights / weights.sum()
    with_mean = products @ shares  # (sites,)
    return _compute_clipped_square_root(np.diag(products) - 2 * with_mean + shares @ with_mean)


def compute_distances_between_models(products: Float64) -> Float64:
    """Return every two models' distance, ``(sites, sites)``, from :func:`compute_update_inner_products`."""
    squares = np.diag(products)
    return _compute_clipped_square_root(squares[:, None] + squares[None, :] - 2 * products)


def _compute_clipped_square_root(squares: Float64) -> Float64:
    return np.sqrt(np.maximum(squares, 0.0))  # rounding can take the square of a tiny distance below zero
