"""What an update looks like beside the others of its round and beside earlier ones: the maths, on plain arrays.

None of it condemns a site. It says which updates the sites should judge (:mod:`strategies.rounds.guard.verdict`).

- *Lengths* of the parts, as in :mod:`strategies.aggregation.outliers`.
- *Alignment*: for each class that three sites or more annotate (of two sites: both), the cosine of a site's head row
  (with its bias) with the sum of the other owners' rows, each at unit length so that no row outweighs another; the
  median over the classes. Where no head is sent, the cosine of the trunk instead. Where two of several sites annotate a
  class and their rows differ, nothing tells which is wrong: a site that turned its own row of such a class round, by
  however little, had the other left out.
  Measured on digits: 0.85 to 1 at honest sites that share classes (2 to 10 sites, up to 12 rounds), -0.96 to -1 for an
  update that is negated or trained on flipped labels.

Batch normalisation is not compared: honest sites with unlike images reached a cosine of -0.75 (HAM10000, vanilla FL).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from common.wire.records import Groups
from strategies.aggregation.mean import BLOCK
from strategies.aggregation.outliers import Lengths

Float64 = NDArray[np.float64]
FEW = 12
FEWEST_OWNERS = 3
SHORTEST = 1e-9
"""A sum of unit vectors that is shorter has no direction."""
SLIP = 1e-3
"""Rounding of a variance, as a part of one plus it."""
FEWEST_NUMBERS = 16
"""A part with fewer numbers may be constant by chance."""


@dataclass(frozen=True)
class Alignment:
    """How far an update points where the others do.

    Attributes:
        own: Median cosine with the others; None where there is nothing to compare.
        others: The same among the others alone, their median; None where fewer than two can be compared.
    """

    own: float | None = None
    others: float | None = None


NOTHING_TO_COMPARE = Alignment()


@dataclass(frozen=True)
class Signs:
    """What one update looks like.

    Attributes:
        lengths: Of its parts.
        head: Alignment of the head rows, or of the trunk where no head is sent.
        impossible: What no training makes: a part of one number throughout, or a negative variance; empty for nothing.
    """

    lengths: Lengths
    head: Alignment = NOTHING_TO_COMPARE
    impossible: str = ""


@dataclass(frozen=True)
class Variances:
    """Where the running variances of batch normalisation stand, and what they are before the round.

    Attributes:
        norm: The model's batch normalisation, ``(m,)``.
        places: Of variances in it.
    """

    norm: NDArray[np.float32]
    places: Sequence[slice] = ()

    def fault_in(self, update: Groups) -> str:
        """Why this site's batch normalisation cannot be; empty where it can."""
        if update.norm is None:
            return ""
        for place in self.places:
            before = self.norm[place].astype(np.float64)
            if (before + update.norm[place] < -SLIP * (1 + np.abs(before))).any():
                return "it makes a variance of batch normalisation negative"
        return ""


def signs_of(
    updates: Mapping[str, Groups],
    lengths: Mapping[str, Lengths],
    annotated: Mapping[str, Collection[str]],
    variances: Variances,
) -> dict[str, Signs]:
    """Compare the updates of a round.

    Args:
        updates: By site name.
        lengths: Of each update, :func:`strategies.aggregation.outliers.lengths_of`.
        annotated: Site -> the classes that it annotates; rows of other classes are not compared.
    """
    fewest = min(FEWEST_OWNERS, len(updates))
    cosines = {name: one for name, one in _cosines(updates, annotated).items() if len(one[0]) >= fewest}
    few = len({one for sent, _ in cosines.values() for one in sent}) <= FEW
    with_all = _aligned(cosines)
    found = {}
    for site, update in updates.items():
        # One of many sites hardly moves the others' alignment: it is then not worked out anew without each.
        beside = _aligned(cosines, but=site) if few else with_all
        others = [value for other, value in beside.items() if other != site]
        alignment = Alignment(with_all.get(site), median(others) if len(others) > 1 else None)
        found[site] = Signs(lengths[site], alignment, impossible(update, variances))
    return found


Products = Mapping[str, tuple[Sequence[str], Float64]]
"""What is compared -> the sites that sent it, and the cosines of every two of them."""


def _cosines(updates: Mapping[str, Groups], annotated: Mapping[str, Collection[str]]) -> Products:
    rows: dict[str, dict[str, Float64]] = {}
    for site, update in updates.items():
        if update.head is not None:
            for row, name in enumerate(update.head.class_names):
                if name in annotated[site]:
                    values = np.append(update.head.weight[row], update.head.bias[row]).astype(np.float64)
                    rows.setdefault(name, {})[site] = values
    if rows:
        return {name: (list(sent), _of_rows(list(sent.values()))) for name, sent in rows.items()}
    trunks = {site: update.trunk for site, update in updates.items() if update.trunk is not None}
    return {"trunk": (list(trunks), _of_flat(list(trunks.values())))} if trunks else {}


def _of_rows(rows: Sequence[Float64]) -> Float64:
    stacked = np.stack(rows)  # (owners, features + 1)
    return _normalised(stacked @ stacked.T)


def _of_flat(arrays: Sequence[NDArray[np.float32]]) -> Float64:
    """Block by block, for trunks may lie on disk."""
    products = np.zeros((len(arrays), len(arrays)))
    for start in range(0, len(arrays[0]), BLOCK):
        stacked = np.stack([array[start : start + BLOCK] for array in arrays]).astype(np.float64)
        products += stacked @ stacked.T
    return _normalised(products)


def _normalised(products: Float64) -> Float64:
    lengths = np.sqrt(np.diag(products))
    divisor = np.outer(lengths, lengths)
    cosines: Float64 = products / np.where(divisor > 0, divisor, 1.0)
    return cosines


def _aligned(cosines: Products, but: str = "") -> dict[str, float]:
    """Each site's median alignment with all the others but one, of whom nothing is in it; of a site alone, nothing."""
    found: dict[str, list[float]] = {}
    for sent, products in cosines.values():
        kept = [place for place, site in enumerate(sent) if site != but]
        if len(kept) > 1:
            values = _with_the_others(products if len(kept) == len(sent) else products[np.ix_(kept, kept)])
            for place, value in zip(kept, values.tolist(), strict=True):
                found.setdefault(sent[place], []).append(value)
    return {site: median(values) for site, values in found.items()}


def _with_the_others(products: Float64) -> Float64:
    """The cosine of each site's unit vector with the sum of the others', ``(m,)``, from those of every two of them."""
    own, sums = np.diag(products), products.sum(axis=1)
    lengths = np.sqrt(np.maximum(sums.sum() - 2 * sums + own, 0.0))
    there = lengths > SHORTEST
    return np.where(there, (sums - own) / np.where(there, lengths, 1.0), 0.0)


def impossible(update: Groups, variances: Variances) -> str:
    """What of an update no training makes, in words; empty for nothing."""
    head = None if update.head is None else update.head.weight.ravel()
    if any(array is not None and _one_number(array) for array in (update.trunk, update.norm, head)):
        return "all numbers of a part are the same"
    return variances.fault_in(update)


def _one_number(array: NDArray[np.float32]) -> bool:
    if array.size < FEWEST_NUMBERS or array[0] == 0 or (array[:FEWEST_NUMBERS] != array[0]).any():
        return False  # of a trained part the first numbers differ; then the others need not be read
    return bool((array == array[0]).all())
