"""A mean teacher: the running mean of a network in training.

Tarvainen and Valpola: "Mean teachers are better role models", NeurIPS 2017.
"""

import torch

from common.models.network import SplitNetwork


def decay_after(steps: int, decay: float) -> float:
    """The teacher is the plain mean of all students so far until that would be slower than ``decay``."""
    return min(1 - 1 / (steps + 1), decay)


@torch.no_grad()
def follow(teacher: SplitNetwork, student: SplitNetwork, decay: float) -> None:
    """Running mean of parameters, and of batch normalisation's means and variances."""
    now = student.state_dict()
    for name, mean in teacher.state_dict().items():
        if mean.is_floating_point():
            mean.lerp_(now[name], 1 - decay)
