"""Stages of a method: settings that count rounds, and the rounds that a run needs to reach every stage.

A method's table of parameters declares how such a setting follows from ``run.rounds`` where an experiment gives none
(``round_defaults``), and in which round each stage begins (``list_stages``). The coordinator writes the values into the
experiment before hospitals get its plan. It refuses a run that ends before a stage begins: its model would be that of
another method.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""A ``[method]`` table as the user wrote it, so values may be invalid."""


@dataclass(frozen=True)
class RoundDefault:
    """The value of a setting that counts rounds, where the experiment gives none.

    Attributes:
        rule: The rule in words, such as "half of the rounds, at most 50".
        compute: Function of the run's rounds and of the settings that are given or already computed.
    """

    rule: str
    compute: Callable[[int, Settings], int]


@dataclass(frozen=True)
class Stage:
    """A stage, ramp or period of a method that some rounds of a run must reach.

    Attributes:
        event: A clause that goes before "in round 11", such as "stage 2, which tags missing labels, begins".
        first_round: The round of the event.
        settings: Keys from which the round follows, of ``[method]`` or dotted; the last one is named in a fault.
        without: Setting that leaves the stage out, such as "ramp_rounds = 0"; empty if there is none.
    """

    event: str
    first_round: int
    settings: tuple[str, ...]
    without: str = ""


def _count_all_but_the_last(rounds: int, settings: Settings) -> int:
    return max(1, rounds - 1)


ALL_BUT_THE_LAST = RoundDefault("all but the last", _count_all_but_the_last)


def make_share_of_rounds(name: str, numerator: int, denominator: int, most: int) -> RoundDefault:
    """Return a default that is a share of the run's rounds: at least one, at most the paper's value.

    Args:
        name: The share in words, such as "half".
        most: The paper's value.
    """

    def compute(rounds: int, settings: Settings) -> int:
        return min(most, max(1, rounds * numerator // denominator))

    return RoundDefault(f"{name} of the rounds, at most {most}", compute)


def add_round_defaults(defaults: Mapping[str, RoundDefault], given: Settings, rounds: int) -> dict[str, Any]:
    """Return a ``[method]`` table with defaults for the settings that count rounds and that it does not give."""
    settings = dict(given)
    for key, default in defaults.items():
        if key not in settings:
            settings[key] = default.compute(rounds, settings)
    return settings


def get_round_count(settings: Settings, key: str, default: int) -> int:
    """Return a setting that counts rounds; the default if it is missing, or is no such number (it is refused later)."""
    value = settings.get(key, default)
    return value if isinstance(value, int) and value >= 0 else default
