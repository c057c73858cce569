"""Noise on what a site sends: clipped update and clipped statistics as one Gaussian mechanism a round.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, with the noise
added at the site itself, so that nobody has to be trusted with the bare update.

Two data sets, however unlike, give updates of length at most C each, which lie at most 2 C apart: the sensitivity is
twice the bound. Update and statistics, each over its own bound, together move by at most ``2 sqrt(2)``; so every part's
noise grows by the root of the number of parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.wire.records import Arrays, Groups
from strategies.local.updates import clipped, times
from strategies.privacy.noise import SHRUNK, Grid, NoiseSource

Array = NDArray[np.float32]


@dataclass(frozen=True)
class NoisyReply:
    """Hides all data that a site has, in its update and its method's statistics."""

    max_update_norm: float
    max_statistics_norm: float
    noise_multiplier: float
    noise: NoiseSource

    def __call__(self, update: Groups, statistics: Arrays) -> tuple[Groups, Arrays]:
        """What may leave. A statistic that is not there becomes noise too: that it is missing says something."""
        parts = bool(update.named()) + bool(statistics)
        spread = 2 * self.noise_multiplier * parts**0.5
        if not all(np.isfinite(array).all() for array in update.named().values()):
            update = update.changed(np.zeros_like)  # that training diverged says something too
        short = clipped(update, self.max_update_norm * SHRUNK)
        known = {name: np.nan_to_num(array, nan=0.0) for name, array in sorted(statistics.items())}
        told = shortened(known, self.max_statistics_norm * SHRUNK)
        of_update = Grid(spread * self.max_update_norm, self.max_update_norm)
        of_statistics = Grid(spread * self.max_statistics_norm, self.max_statistics_norm)
        return (
            short.changed(lambda array: self._noisy(array, of_update)),
            {name: self._noisy(array, of_statistics) for name, array in told.items()},
        )

    def _noisy(self, array: Array, grid: Grid) -> Array:
        steps = grid.steps_of(torch.from_numpy(np.array(array, np.float64)))
        return grid.released(steps, self.noise).numpy()


def shortened(arrays: Mapping[str, Array], bound: float) -> Mapping[str, Array]:
    """Arrays as one vector, at most so long; its direction stays."""
    length = float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays.values())))
    return arrays if length <= bound else {name: times(array, bound / length) for name, array in arrays.items()}
