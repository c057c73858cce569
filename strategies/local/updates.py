"""Clipping of an update, and rounding of an update or of a model before it is sent; available to any method.

Clipping: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
section 2 ("flat clipping"): the whole update is one vector.

Rounding with error feedback: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014;
Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019. A
round's rounding error is added to the next update or model. Only the trunk is rounded: the other parts are small, and a
running variance does not tolerate errors.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.wire.codec import round_to_number_format
from polyclinic.common.wire.records import ModelGroups, NumberFormat


def compute_whole_update_norm(update: ModelGroups) -> float:
    """Return the Euclidean length of an update: all model parts together as one vector."""
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in update.to_named_arrays().values())))


def clip_update_to_norm(update: ModelGroups, bound: float) -> ModelGroups:
    """Scale an update down to the Euclidean length ``bound`` if it is longer."""
    length = compute_whole_update_norm(update)
    if length <= bound:
        return update
    return update.apply_to_arrays(lambda array: scale_array(array, bound / length))


def scale_array(array: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """Return an array times a factor as float32; a tiny factor is multiplied in float64 to stay accurate."""
    if factor < np.finfo(np.float32).tiny:
        return (array * np.float64(factor)).astype(np.float32)
    return array * np.float32(factor)


def compress_trunk(groups: ModelGroups, unsent: ModelGroups, form: NumberFormat) -> tuple[ModelGroups, ModelGroups]:
    """Return groups with a trunk rounded to the number format ``form``, and the rounding error for the next round.

    Args:
        groups: A site's update, or the coordinator's model.
        unsent: The rounding error of earlier rounds, which is added to the trunk before it is rounded.
    """
    if form == "float32" or groups.trunk is None:
        return groups, ModelGroups()
    exact = groups.trunk if unsent.trunk is None else groups.trunk + unsent.trunk
    sent = round_to_number_format(exact, form)
    return replace(groups, trunk=sent, form=form), ModelGroups(trunk=exact - sent)
