"""Clipping of updates at the site: a wrapper of any method that sends one.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, section 2
("flat clipping"): the whole update is one vector.
"""

from dataclasses import replace

import numpy as np

from common.models.state import Head
from common.wire.records import Groups


def norm_of(update: Groups) -> float:
    """Euclidean length of all groups together."""
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in update.named().values())))


def clipped(update: Groups, bound: float) -> Groups:
    """The update, shortened to ``bound`` where it is longer; its direction stays."""
    length = norm_of(update)
    if length <= bound:
        return update
    factor, head = np.float32(bound / length), update.head
    return replace(
        update,
        trunk=None if update.trunk is None else update.trunk * factor,
        norm=None if update.norm is None else update.norm * factor,
        head=head and Head(head.class_names, head.weight * factor, head.bias * factor),
    )
