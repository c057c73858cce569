"""How much of each class each site gets, ``(classes, sites)``, and the deal by it; see ``label_partition``."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float64]
Ends = Callable[[Shares, int], NDArray[np.intp]]
Random = np.random.RandomState | np.random.Generator


def practical_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Give of each class 80 % to one site, 10 % to another, 1 % to each other; one list is shuffled on and on."""
    share = np.array([0.01] * (sites - 2) + [0.1, 0.8])
    rows = []
    for _ in range(classes):
        random.shuffle(share)
        rows.append(share.copy())
    return np.stack(rows)


def pathological_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Two classes a site, in turn from shuffled decks of all classes; each class in random shares over its owners.

    Where a site's two come from different decks they may be the same class; then it has one.
    """
    decks = [random.permutation(classes) for _ in range(2 * sites // classes + 1)]
    pairs = np.concatenate(decks)[: 2 * sites].reshape(sites, 2)
    shares = np.zeros((classes, sites))
    for column in range(classes):
        owners = np.flatnonzero((pairs == column).any(axis=1))
        drawn = random.rand(len(owners))
        shares[column, owners] = drawn / drawn.sum()
    return shares


def rest_dropped(share: Shares, count: int) -> NDArray[np.intp]:
    """Where each site's hand of ``count`` ends; each is rounded down, and what that leaves is nobody's."""
    return np.cumsum((share * count).astype(np.intp))


def all_dealt(share: Shares, count: int) -> NDArray[np.intp]:
    """Where each site's hand of ``count`` ends; the last ends with the last."""
    ends = (np.cumsum(share) * count).astype(np.intp)
    ends[-1] = count
    return ends


def dealt(classes: NDArray[np.intp], shares: Shares, ends: Ends, random: Random) -> list[NDArray[np.intp]]:
    """Deal what is of the given classes ``(n,)``, class after class, each shuffled; return numbers at each site."""
    hands = []
    for column, share in enumerate(shares):
        members = random.permutation(np.flatnonzero(classes == column))
        hands.append(np.split(members, ends(share, len(members)))[:-1])
    return [np.concatenate(hand) for hand in zip(*hands, strict=True)]
