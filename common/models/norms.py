"""The Euclidean length of a flat array of a model or an update, which also shows if all its numbers are finite."""

import math

import numpy as np
from numpy.typing import NDArray

BLOCK = 2**13
"""Number of squares that are added at a time: BLAS adds so few on one thread, in one order."""
LEAST = 1e-20
"""Smallest sum of squares that float32 computes to six digits, which is enough for a length."""


def compute_euclidean_norm(values: NDArray[np.float32]) -> float:
    """Return the Euclidean length of a flat array; it is finite if and only if all numbers are."""
    whole = len(values) // BLOCK * BLOCK
    rows = values[:whole].reshape(-1, 1, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.matmul(rows, rows.transpose(0, 2, 1))  # (blocks, 1, 1), each as by ``block @ block``
        total = 0.0
        for square in squares.ravel().tolist():
            total += square
        total += float(values[whole:] @ values[whole:])
    if not LEAST <= total < math.inf:  # a square that a float32 does not hold
        total = 0.0
        for start in range(0, len(values), BLOCK):
            total += float(np.square(values[start : start + BLOCK], dtype=np.float64).sum())
    return math.sqrt(total)
