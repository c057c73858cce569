"""What an update looks like beside the others of its round and beside earlier ones: the maths, on plain arrays.

None of it condemns a site. It says which updates the sites should judge (:mod:`strategies.rounds.guard.verdict`).

- *Lengths* of the parts, as in :mod:`strategies.aggregation.outliers`.
- *Alignment*: for each class that at least two sites annotate, the cosine of a site's head row (with its bias) with the
  sum of the other owners' rows, each at unit length so that no row outweighs another; the median over the classes.
  Where no head is sent, the cosine of the trunk instead.
  Measured on digits: 0.85 to 1 at honest sites that share classes (2 to 10 sites, up to 12 rounds), -0.96 to -1 for an
  update that is negated or trained on flipped labels.

Batch normalisation is not compared: honest sites with unlike images reached a cosine of -0.75 (HAM10000, vanilla FL).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.wire.records import Groups
from strategies.aggregation.mean import BLOCK
from strategies.aggregation.outliers import Lengths

Float64 = NDArray[np.float64]
FEW = 12
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
    found = _Alignments.of(_cosines(updates, annotated))
    return {
        site: Signs(lengths[site], found.of_site(site), impossible(update, variances))
        for site, update in updates.items()
    }


@dataclass(frozen=True)
class _Alignments:
    """How far each site's update points where the others' do; NaN where there is nothing to compare.

    Attributes:
        sites: Those that sent what is compared, ``n`` of them.
        with_all: Each site's alignment with all the others, ``(n,)``.
        without: Row i, column j: site i's alignment with all the others but site j, ``(n, n)``. One of many sites
            hardly moves the others' alignment: of more than :data:`FEW` every column is ``with_all``.
    """

    sites: Sequence[str]
    with_all: Float64
    without: Float64

    @classmethod
    def of(cls, cosines: "Products") -> "_Alignments":
        """The median over what both sent."""
        sites = sorted({one for sent, _ in cosines.values() for one in sent})
        n = len(sites)
        every = [_alignments_in(products, [sites.index(one) for one in sent], n) for sent, products in cosines.values()]
        if not every:
            return cls((), np.zeros(0), np.zeros((0, 0)))
        with_all = _median([with_all for with_all, _ in every])
        return cls(sites, with_all, _median([without for _, without in every]))

    def of_site(self, site: str) -> Alignment:
        """A site's own alignment, and the median of the others' without it."""
        if site not in self.sites:
            known = self.with_all[~np.isnan(self.with_all)]
            return Alignment(None, float(np.median(known)) if len(known) > 1 else None)
        place = self.sites.index(site)
        others = np.delete(self.without[:, place], place)
        known = others[~np.isnan(others)]
        own = self.with_all[place]
        return Alignment(None if np.isnan(own) else float(own), float(np.median(known)) if len(known) > 1 else None)


def _median(values: Sequence[Float64]) -> Float64:
    """Over the first axis, of those that are known."""
    stacked = np.stack(values)
    unknown = np.isnan(stacked)
    if not unknown.any():
        return np.median(stacked, axis=0)
    none_known = unknown.all(axis=0)
    medians: Float64 = np.nanmedian(np.where(none_known, 0.0, stacked), axis=0)
    return np.where(none_known, np.nan, medians)


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


def _alignments_in(products: Float64, places: Sequence[int], n: int) -> tuple[Float64, Float64]:
    """Alignments in one thing that is compared; NaN where nobody is left.

    Args:
        products: The cosines of every two of the ``m`` sites that sent it, ``(m, m)``.
        places: Where these stand among all.
        n: Number of all sites.

    Returns:
        With all the others ``(n,)``, and with all others but one ``(n, n)``, of which the columns of more than
        :data:`FEW` sites are not worked out.
    """
    with_all = np.full(n, np.nan)
    with_all[places] = _with_the_others(products)
    without = np.repeat(with_all[:, None], n, axis=1)  # a site that did not send it is not among the others anyway
    for row, place in enumerate(places if n <= FEW else ()):  # nothing of a site may be in the others' numbers
        kept = [one for one in range(len(places)) if one != row]
        without[np.delete(places, row), place] = _with_the_others(products[np.ix_(kept, kept)])
    return with_all, without


def _with_the_others(products: Float64) -> Float64:
    """The cosine of each site's unit vector with the sum of the others', ``(m,)``, from those of every two of them."""
    if len(products) < 2:
        return np.full(len(products), np.nan)
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
