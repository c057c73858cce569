"""The coordinator's half of a method beside averaging, as values: what it tells sites and learns from their replies."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.contract import LabelContract
from common.errors import Fault
from common.models.zoo.spec import Task
from common.wire.records import NO_ARRAYS, Arrays, RollCallAnswer, TrainReply


@dataclass(frozen=True)
class Known:
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


def tell_nothing(known: Known) -> Callable[[str], Arrays]:
    """No statistics."""
    return lambda site: NO_ARRAYS


def learn_nothing(known: Known, replies: Mapping[str, TrainReply]) -> Arrays:
    """What was known stays."""
    return known.statistics


def expect_nothing(known: Known, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
    """A reply holds no statistics."""
    return {}


def nothing_to_note(known: Known) -> Mapping[str, Any]:
    """No figures for the run folder."""
    return MappingProxyType({})


def always_able(known: Known) -> list[Fault]:
    """The roll call cannot lack anything."""
    return []


def finite_by_name(values: Mapping[str, NDArray[np.floating]]) -> dict[str, float | None]:
    """Single numbers as JSON has them: None for NaN and infinity."""
    numbers = {name: float(value.item()) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


@dataclass(frozen=True)
class Guidance:
    """What a method's coordinator does beside averaging.

    Attributes:
        tell: Once an exchange; what it returns gives the statistics that one site receives with the model, for the
            head rows that it holds.
        expects: Names and shapes of the statistics in one site's reply, given the width of a head row.
        learn: The statistics after a round, from the accepted replies in the order of site names.
        faults: What the roll call lacks for this method.
        note_round: What the statistics after a round say, for its line in ``rounds.jsonl``: numbers that JSON has,
            None for what is not known.
        note_end: Likewise after the last round, for ``summary.json``.
    """

    tell: Callable[[Known], Callable[[str], Arrays]] = tell_nothing
    expects: Callable[[Known, str, int], Mapping[str, tuple[int, ...]]] = expect_nothing
    learn: Callable[[Known, Mapping[str, TrainReply]], Arrays] = learn_nothing
    faults: Callable[[Known], list[Fault]] = always_able
    note_round: Callable[[Known], Mapping[str, Any]] = nothing_to_note
    note_end: Callable[[Known], Mapping[str, Any]] = nothing_to_note


SILENT = Guidance()
