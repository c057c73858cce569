"""The Euclidean norm of a flat array, such as a model or an update; it also shows if all numbers are finite."""

import math

import numpy as np
from numpy.typing import NDArray

BLOCK_LENGTH = 2**13
"""Number of squares per matrix product; for so few BLAS uses one thread and always adds in the same order."""
MIN_FLOAT32_SUM_OF_SQUARES = 1e-20
"""Smallest sum of squares that float32 computes to six digits, which is precise enough for a norm."""


def compute_euclidean_norm(values: NDArray[np.float32]) -> float:
    """Return the Euclidean norm of a flat array; it is finite if and only if all numbers are finite."""
    full_blocks_end = len(values) // BLOCK_LENGTH * BLOCK_LENGTH
    rows = values[:full_blocks_end].reshape(-1, 1, BLOCK_LENGTH)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.matmul(rows, rows.transpose(0, 2, 1))  # (blocks, 1, 1), each as by ``block @ block``
        total = 0.0
        for square in squares.ravel().tolist():
            total += square
        total += float(values[full_blocks_end:] @ values[full_blocks_end:])
    # A square overflows or underflows float32, so add in float64.
    if not MIN_FLOAT32_SUM_OF_SQUARES <= total < math.inf:
        total = 0.0
        for start in range(0, len(values), BLOCK_LENGTH):
            total += float(np.square(values[start : start + BLOCK_LENGTH], dtype=np.float64).sum())
    return math.sqrt(total)
