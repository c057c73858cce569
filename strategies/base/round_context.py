"""What the coordinator knows when a round begins or ends: what a method's rules may look at."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.contract import LabelContract
from common.models.zoo.spec import Task
from common.wire.records import Arrays, RollCallAnswer


@dataclass(frozen=True)
class RoundContext:
    """What the coordinator knows when a round begins or ends.

    Attributes:
        answers: To the roll call, by site.
        statistics: What it learned so far; part of its state.
        round: The round that begins or has just ended.
        seed: The run's.
    """

    task: Task
    contract: LabelContract
    answers: Mapping[str, RollCallAnswer]
    statistics: Arrays
    round: int
    seed: int = 0


def finite_by_name(values: Mapping[str, NDArray[np.floating]]) -> dict[str, float | None]:
    """Single numbers as JSON has them: None for NaN and infinity."""
    numbers = {name: float(value.item()) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
