"""How far sites' models lie from one another and from a mean of them: the maths, on inner products of their updates.

All sites of a round start from one model, so models differ by as much as updates do. Distances are Euclidean over all
values that a site sends, as the papers write them; the authors' code of both RSCFed and FedNoRo adds up the lengths of
each tensor's difference instead.

Sums run in float64, term by term and not by BLAS, whose order may change with the number of threads.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.wire.records import Groups

Float64 = NDArray[np.float64]

BLOCK = 2**15
"""Numbers multiplied at a time: a quarter of a megabyte in float64."""


def inner_products(updates: Sequence[Groups]) -> Float64:
    """Inner product of every two sites' updates, over all groups; ``(sites, sites)``."""
    named = [update.named() for update in updates]
    products = np.zeros((len(updates), len(updates)))
    for group in named[0]:
        flat = [arrays[group].reshape(-1) for arrays in named]
        for start in range(0, len(flat[0]), BLOCK):
            block = np.stack([values[start : start + BLOCK] for values in flat]).astype(np.float64)
            products += np.einsum("in,jn->ij", block, block)
    return products


def distances_from_mean(products: Float64, weights: Float64) -> Float64:
    """Distance of each site's model from the weighted mean of all; ``(sites,)``.

    Args:
        products: :func:`inner_products` of these sites.
        weights: ``(sites,)``; they need not sum to one.
    """
    shares = weights / weights.sum()
    with_mean = products @ shares  # (sites,)
    return _root(np.diag(products) - 2 * with_mean + shares @ with_mean)


def distances_between(products: Float64) -> Float64:
    """Distance of every two sites' models; ``(sites, sites)``."""
    squares = np.diag(products)
    return _root(squares[:, None] + squares[None, :] - 2 * products)


def _root(squares: Float64) -> Float64:
    return np.sqrt(np.maximum(squares, 0.0))  # rounding can take the square of a tiny distance below zero
