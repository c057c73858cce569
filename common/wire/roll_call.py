"""The records of the roll call, typed, frozen and checked when built: who a site is, and why it cannot take part."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from common.models.head import Head
from common.wire.bounds import COUNT_OR_UNKNOWN, ClassNames, Count, Counts, Document, Name, Text, Words
from common.wire.errors import WireError
from common.wire.hello import LONGEST_RELEASE

ROLL_CALL, REFUSAL = "query.roll_call", "query.refusal"
"""Types of the messages that carry them, of Flower's kind ``query``."""
REFUSALS = ("name", "version", "labels")

UNKNOWN_COUNT = -1
"""Stands for a label count that a site's policy keeps at home: unknown, not 0."""

PlanText = Annotated[str, Document(2**20)]
"""A plan as JSON; an ordinary one has some two thousand characters."""


def is_run(run: str) -> bool:
    """Whether a run may have this name: a site keeps its memory in a folder of it, which must not lead elsewhere.

    No capital letters: to some disks two names are one that differ in these only.
    """
    return re.fullmatch(r"[a-z0-9_][a-z0-9_-]{0,63}", run) is not None


def check_rows(head: Head | None, class_names: Sequence[str]) -> None:
    """Raise unless a model's head has exactly the rows that a request names, in its order.

    Under masks sites compare what they were sent, row by row: it has to be what they train from.

    Raises:
        WireError: If it has others.
    """
    if head is not None and tuple(head.class_names) != tuple(class_names):
        raise WireError("the model's head has other rows, or in another order, than the request names.")


def check_run(run: str) -> None:
    if not is_run(run):
        raise WireError(f"run must be small letters, digits, dashes and underscores, not {run[:80]!r}.")


@dataclass(frozen=True)
class RollCall:
    """Coordinator asks: who are you, what do you annotate, how much do you have?"""

    run: Text
    plan: PlanText

    def __post_init__(self) -> None:
        check_run(self.run)


@dataclass(frozen=True)
class RollCallAnswer:
    """Site answers. ``class_names`` are canonical, in the site's own order; ``names`` its own words for them.

    Attributes:
        train_samples: As the site's policy rounds it; it weighs by this number too.
        validation_samples: :data:`UNKNOWN_COUNT` where they are of few patients.
        positives, negatives: Training images known to show each class, and known not to; empty where the method does
            not ask or the site's policy does not tell, :data:`UNKNOWN_COUNT` where it keeps one class's count.
        smallest_count: It tells no count of fewer patients than this.
        holds_frozen: Whether the frozen part of the plan's model is on its disk, so that it need not be sent.
    """

    run: Text
    site: Text
    names: ClassNames
    class_names: ClassNames
    train_samples: Count
    validation_samples: Annotated[int, COUNT_OR_UNKNOWN]
    patients: Count
    layout: Text
    version: Annotated[str, Name(LONGEST_RELEASE)]
    positives: Counts = ()
    negatives: Counts = ()
    smallest_count: Count = 0
    holds_frozen: bool = False

    def __post_init__(self) -> None:
        if len(self.names) != len(self.class_names):
            raise WireError("names and class_names must have one entry a label.")
        if self.patients > self.train_samples:  # both are rounded down to one base, which keeps their order
            raise WireError(f"{self.patients:,} patients cannot have {self.train_samples:,} training images.")
        pairs = list(zip(self.positives, self.negatives, strict=False))
        if len(self.positives) != len(self.negatives) or len(pairs) not in (0, len(self.class_names)):
            raise WireError("label counts must be one a class, of both kinds.")
        if any(min(pair) < UNKNOWN_COUNT or sum(pair) > self.train_samples for pair in pairs):
            raise WireError("label counts must be from 0 to the training images together, or -1 for unknown.")


@dataclass(frozen=True)
class Refusal:
    """Coordinator tells a site that it cannot take part in this run, and why; there is no second try.

    Attributes:
        kind: ``name``, ``version`` or ``labels``: what has to be fixed.
    """

    run: Text
    kind: Text
    reason: Annotated[str, Words()]

    def __post_init__(self) -> None:
        if self.kind not in REFUSALS:
            raise WireError(f"a refusal is of kind {', '.join(REFUSALS)}, not {self.kind!r}.")


@dataclass(frozen=True)
class RefusalNoted:
    """Site has read why."""

    run: Text
    site: Text
