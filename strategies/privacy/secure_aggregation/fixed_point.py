"""Updates as integers modulo 2**32, whose sums are exact in any order.

All sites count alike: weights that differ and are known would tell in a sum which part is whose. Of n sites each number
u of an update is cut to [-r, r] and becomes round(u * 2**30 / (r * n)). So no sum leaves [-2**30 - n/2, 2**30 + n/2]:
what does is no sum of updates but what is left of a mask. The mean errs by at most r * n / 2**31, divided by the part
of the sites that survives.
"""

import numpy as np
from numpy.typing import NDArray

from common.wire.secure_aggregation import Integers

ONE = 2**30
BLOCK = 2**16
"""Numbers turned at a time: half a megabyte in float64."""


def fixed_point(update: NDArray[np.float32], divisor: int, largest: float) -> Integers:
    """An update's numbers as integers.

    Args:
        divisor: At least as many as there are sites.
        largest: r; numbers beyond are cut.

    Raises:
        ValueError: If a number is not finite.
    """
    result = np.empty(len(update), np.uint32)
    factor = 1 / divisor * (ONE / largest)
    for start in range(0, len(update), BLOCK):
        block = update[start : start + BLOCK].astype(np.float64)
        if not np.isfinite(block).all():
            raise ValueError("an update that is not finite cannot be masked")
        np.clip(block, -largest, largest, out=block)
        result[start : start + BLOCK] = np.rint(block * factor).astype(np.int32).view(np.uint32)
    return result


def cut(update: NDArray[np.float32], largest: float) -> int:
    """How many numbers lie beyond the range."""
    return int(np.count_nonzero(np.abs(update) > largest))


def plausible(total: Integers, sites: int) -> bool:
    """Whether this can be a sum of so many sites' numbers; one with a mask left on is told by each number in two."""
    signed = total.view(np.int32)
    limit = ONE + sites
    return not len(signed) or bool(-limit <= signed.min() and signed.max() <= limit)


def from_fixed_point(total: Integers, largest: float) -> NDArray[np.float64]:
    """A sum as it was before it was turned into integers."""
    return total.view(np.int32) * np.float64(largest / ONE)
