"""Bounds of the fields of records, checked on receipt: length and characters of text, range of numbers.

A field's bound is an annotation of its type (``Annotated``), which :func:`check_field_bounds` reads. A test requires a
bound for every text and number of every record. :mod:`polyclinic.strategies.engine.exchange` checks limits that depend
on the round.
"""

import functools
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from polyclinic.common.errors import WireError
from polyclinic.common.metrics.auroc import MAX_METRIC_MAGNITUDE
from polyclinic.common.plugins import MAX_PLUGIN_METRICS
from polyclinic.common.system.plain_names import RunName
from polyclinic.common.system.plain_text import is_plain_text, make_printable_line, make_printable_lines

MAX_IMAGES = 10**9
"""Maximum number of images of one site; a larger number is an error or a lie, and would outweigh every other site."""
MAX_CLASSES = 2_000
"""Maximum number of classes of one site; the largest public set of labels of chest images has 193."""
MAX_SITES = 10_000
MAX_ROUNDS = 10**9
MAX_LOSS = 1e6
"""Largest mean cross-entropy, in nats per image; a model with this loss is broken, and larger numbers say no more.

A site reports this number for a larger loss and for one that is not finite (:func:`clip_reported_loss`), so no site is
left out because it reports its loss.
"""
MAX_SECONDS = 1e8
"""Maximum duration: about three years."""
MAX_EPOCHS = 10**6
MAX_EPSILON = 1e9
MAX_STATISTIC = 1e9
"""Largest absolute value in a method's statistics. Features, losses, counts and shares are far smaller; the squares of
a thousand such numbers can be added in float32.
"""


@dataclass(frozen=True)
class NumberRangeBound:
    """The bound of a number: from ``least`` to ``most``. NaN is accepted here; the codec rejects it where it is not
    allowed.
    """

    least: float
    most: float

    def find_bound_violation(self, value: Any) -> str:
        """Return the reason why a value is out of bounds; empty if it is valid."""
        if self.least <= value <= self.most or (isinstance(value, float) and math.isnan(value)):
            return ""
        least, most, actual = (_format_number(number) for number in (self.least, self.most, value))
        return f"must be from {least} to {most}, not {actual}"


def _format_number(number: Any) -> str:
    if not isinstance(number, int):
        return f"{number:g}"
    return f"{number:,}" if abs(number) < 2**64 else "a number of more than 64 bits"


@dataclass(frozen=True)
class PlainLineBound:
    """The bound of a name or other short text: one line of at most ``longest`` printable characters."""

    longest: int = 200

    def find_bound_violation(self, value: Any) -> str:
        if len(value) <= self.longest and is_plain_text(value):
            return ""
        expected = f"must be one line of at most {self.longest} printable characters"
        actual = "characters that cannot be printed" if len(value) <= self.longest else f"{len(value):,} characters"
        return f"{expected}; it has {actual}: {make_printable_line(value, 80)}"


@dataclass(frozen=True)
class RunNameBound:
    """The bound of a run's name: a :class:`RunName`, because sites and coordinator use it in file names."""

    def find_bound_violation(self, value: Any) -> str:
        try:
            RunName(value)
        except ValueError:
            return f"must be {RunName.rule}, not {make_printable_line(value, 80)}"
        return ""


@dataclass(frozen=True)
class LongTextBound:
    """The bound of text that only programs read: at most ``longest`` characters of any kind."""

    longest: int

    def find_bound_violation(self, value: Any) -> str:
        if len(value) <= self.longest:
            return ""
        return f"must be at most {self.longest:,} characters, not {len(value):,}"


@dataclass(frozen=True)
class EscapedFreeText:
    """Marks text for people, such as the reason of a failure: it is never rejected, but escaped and cut on receipt."""

    def find_bound_violation(self, value: Any) -> str:
        return ""


@dataclass(frozen=True)
class ListBound:
    """The bound of a list: at most ``most`` entries, and a bound for each entry."""

    most: int
    bound: NumberRangeBound | PlainLineBound

    def find_bound_violation(self, value: Any) -> str:
        if len(value) > self.most:
            return f"must have at most {self.most:,} entries, not {len(value):,}"
        if not value:
            return ""
        # First check all entries at once, which is fast. A NaN makes min and max NaN or is ignored, so it cannot hide
        # another invalid entry.
        if isinstance(self.bound, NumberRangeBound):
            fits = self.bound.least <= min(value) and max(value) <= self.bound.most
        else:
            fits = max(map(len, value)) <= self.bound.longest and is_plain_text("".join(value))
        if fits:
            return ""
        violations = ((n, self.bound.find_bound_violation(entry)) for n, entry in enumerate(value, 1))
        return next((f"entry {n}: {violation}" for n, violation in violations if violation), "")


Bound = NumberRangeBound | PlainLineBound | RunNameBound | LongTextBound | EscapedFreeText | ListBound
BOUND_TYPES = typing.get_args(Bound)

NAME_BOUND = PlainLineBound()
SHARE_BOUND = NumberRangeBound(0.0, 1.0 + 1e-9)
"""Range of AUROC, average precision and balanced accuracy; rounding may give slightly more than 1."""
VALIDATION_LOSS_BOUND = NumberRangeBound(0.0, MAX_LOSS)
"""Range of a validation loss: a mean of cross-entropies (:mod:`polyclinic.strategies.local.losses`), never negative."""
TRAIN_LOSS_BOUND = NumberRangeBound(-MAX_LOSS, MAX_LOSS)
"""Range of a training loss; a method's loss may contain divergences, which rounding can make negative."""
COUNT_BOUND = NumberRangeBound(0, MAX_IMAGES)
COUNT_OR_UNKNOWN_BOUND = NumberRangeBound(-1, MAX_IMAGES)
ROUND_BOUND = NumberRangeBound(0, MAX_ROUNDS)
SECONDS_BOUND = NumberRangeBound(0.0, MAX_SECONDS)
EPSILON_BOUND = NumberRangeBound(0.0, MAX_EPSILON)
EPOCHS_BOUND = NumberRangeBound(0, MAX_EPOCHS)

Text = Annotated[str, NAME_BOUND]
RunNameText = Annotated[str, RunNameBound()]
ClassNames = Annotated[tuple[str, ...], ListBound(MAX_CLASSES, NAME_BOUND)]
SiteNames = Annotated[tuple[str, ...], ListBound(MAX_SITES, NAME_BOUND)]
RoundNumber = Annotated[int, ROUND_BOUND]
Count = Annotated[int, COUNT_BOUND]
Figures = Annotated[
    tuple[float, ...],
    ListBound(MAX_CLASSES * MAX_PLUGIN_METRICS, NumberRangeBound(-MAX_METRIC_MAGNITUDE, MAX_METRIC_MAGNITUDE)),
]
MetricNames = Annotated[tuple[str, ...], ListBound(MAX_PLUGIN_METRICS, NAME_BOUND)]
Counts = Annotated[tuple[int, ...], ListBound(MAX_CLASSES, COUNT_OR_UNKNOWN_BOUND)]
Shares = Annotated[tuple[float, ...], ListBound(MAX_CLASSES, SHARE_BOUND)]


@functools.cache
def list_field_bounds(record: type) -> dict[str, Bound]:
    """Return field name -> bound for a record class, without fields that have no bound."""
    hints = typing.get_type_hints(record, include_extras=True)
    bounds = dict[str, Bound]()
    for name, hint in hints.items():
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, BOUND_TYPES):
                bounds[name] = annotation
    return bounds


def escape_free_text_fields(record: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return a record's field values with text for people (:class:`EscapedFreeText`) escaped and cut."""
    for name, bound in list_field_bounds(record).items():
        if isinstance(bound, EscapedFreeText) and values[name]:
            values = {**values, name: make_printable_lines(values[name])}
    return values


def check_field_bounds(record: object) -> None:
    """Raise :class:`WireError` if any field of this record is out of bounds."""
    kind: type = type(record)
    for name, bound in list_field_bounds(kind).items():
        value = getattr(record, name)
        if value is not None and (fault := bound.find_bound_violation(value)):
            raise WireError(f"{kind.__name__}.{name} {fault}.")


def refuse_unprintable_names(names: Iterable[str], what: str, limit: int = MAX_CLASSES) -> None:
    """Raise :class:`WireError` if there are too many names, or one is too long or has unprintable characters.

    Args:
        names: The names.
        what: Description of the names, with which the error message begins.
        limit: Maximum number of names.
    """
    if fault := ListBound(limit, NAME_BOUND).find_bound_violation(tuple(names)):
        raise WireError(f"{what}: {fault}.")


def clip_reported_loss(loss: float | None) -> float | None:
    """Clip a loss to :data:`MAX_LOSS` before a site reports it; NaN becomes :data:`MAX_LOSS`, too."""
    if loss is None:
        return None
    return MAX_LOSS if math.isnan(loss) else min(loss, MAX_LOSS)
