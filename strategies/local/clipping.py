"""Clipping of updates at the site: a wrapper of any method that sends one.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, section 2
("flat clipping"): the whole update is one vector.
"""

import numpy as np
from numpy.typing import NDArray

from common.wire.records import Groups


def norm_of(update: Groups) -> float:
    """Euclidean length of all groups together."""
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in update.named().values())))


def clipped(update: Groups, bound: float) -> Groups:
    """The update, shortened to ``bound`` where it is longer; its direction stays."""
    length = norm_of(update)
    if length <= bound:
        return update
    return update.changed(lambda array: times(array, bound / length))


def times(array: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """The product. As a float32 a very small factor is too coarse: what is shortened by it would be too long."""
    if factor < np.finfo(np.float32).tiny:
        return (array * np.float64(factor)).astype(np.float32)
    return array * np.float32(factor)
