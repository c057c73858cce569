"""Who annotates which class: draws for simulated networks, as ``(sites, classes)`` truth tables."""

from random import Random

import numpy as np
from numpy.typing import NDArray

_DRAWS = 10_000


def deal_classes(
    shared: NDArray[np.bool_], positives: NDArray[np.intp], minimum: int, random: np.random.Generator
) -> NDArray[np.bool_]:
    """Give the shared classes to all sites and deal the others one each, round-robin in random order.

    With ``minimum`` > 0 a class goes to the next site with at least so many positives, or to the next site if none has;
    sites with fewer classes come first, so the deal stays as even as the data allows, and a site that would be left
    without any class takes one from the richest.

    Args:
        shared: ``(classes,)``.
        positives: ``(sites, classes)`` positive training images.

    Returns:
        ``(sites, classes)`` whether the site annotates the class.
    """
    owned = np.repeat(shared[None, :], len(positives), axis=0)
    order = random.permutation(len(positives))
    for column in random.permutation(np.flatnonzero(~shared)):
        by_turn = order[np.argsort(owned[order].sum(axis=1), kind="stable")]
        able = by_turn[positives[by_turn, column] >= minimum]
        owned[(able if len(able) else by_turn)[0], column] = True
    return _nobody_empty(owned, positives)


def _nobody_empty(owned: NDArray[np.bool_], positives: NDArray[np.intp]) -> NDArray[np.bool_]:
    owned = owned.copy()
    for site in np.flatnonzero(~owned.any(axis=1)):
        richest = int(np.argmax(owned.sum(axis=1)))
        columns = np.flatnonzero(owned[richest])
        column = columns[np.argmax(positives[site, columns])]
        owned[richest, column], owned[site, column] = False, True
    return owned


def random_owners(sites: int, classes: int, random: np.random.Generator) -> NDArray[np.bool_]:
    """Draw ``(sites, classes)``: 1 to ``sites`` owners per class; a site left with none joins the owners of one."""
    owned = np.zeros((sites, classes), dtype=np.bool_)
    for column in range(classes):
        owned[random.permutation(sites)[: random.integers(1, sites + 1)], column] = True
    for site in np.flatnonzero(~owned.any(axis=1)):
        owned[site, random.integers(classes)] = True
    return owned


def lists_without_missing(sites: int, classes: int, missing: int, seed: int) -> NDArray[np.bool_]:
    """Draw ``(sites, classes)`` lists that each lack ``missing`` classes, until every class has an owner.

    As FedMLP's authors draw them, with Python's own generator, site after site; they take the first draw as it comes,
    also where a class has no owner. Gives up after many draws, and returns the last.
    """
    if classes - missing == 1:
        return np.eye(classes, dtype=np.bool_)[np.arange(sites) % classes]
    random = Random(seed)
    for _ in range(_DRAWS):
        owned = np.zeros((sites, classes), dtype=np.bool_)
        for site in range(sites):
            owned[site, random.sample(range(classes), classes - missing)] = True
        if owned.any(axis=0).all():
            break
    return owned
