"""Clipping of updates at the site: a wrapper of any method that sends one.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, section 2
("flat clipping"): the whole update is one vector.
"""

import numpy as np

from common.wire.records import Groups


def norm_of(update: Groups) -> float:
    """Euclidean length of all groups together."""
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in update.named().values())))


def clipped(update: Groups, bound: float) -> Groups:
    """The update, shortened to ``bound`` where it is longer; its direction stays."""
    length = norm_of(update)
    if length <= bound:
        return update
    if (factor := np.float32(bound / length)) < np.finfo(np.float32).tiny:  # too coarse: the length would be off
        return update.changed(lambda array: (array * np.float64(bound / length)).astype(np.float32))
    return update.changed(lambda array: array * factor)
