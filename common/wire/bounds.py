"""Bounds of the fields of records, checked on receipt: length and characters of text, range of numbers.

A field's bound is an annotation of its type (``Annotated``), which :func:`check_field_bounds` reads. A test requires
a bound for every text and number of every record. :mod:`polyclinic.strategies.engine.exchange` checks the limits that
depend on the round.
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

MOST_IMAGES = 10**9
"""Most images of one site: more is an error or a lie, and would outweigh every other site."""
MOST_CLASSES = 2_000
"""Most classes of one site; the largest public set of labels of chest images has 193."""
MOST_SITES = 10_000
MOST_ROUNDS = 10**9
MOST_LOSS = 1e6
"""Largest mean cross-entropy, in nats an image. A model with that loss is broken; a larger number says nothing more. An
honest site reports this number for a larger loss and for one that is not finite (:func:`clip_reported_loss`), so no
site is left out for an honest report."""
MOST_SECONDS = 1e8
"""About three years."""
MOST_EPOCHS = 10**6
MOST_EPSILON = 1e9
MOST_STATISTIC = 1e9
"""Largest magnitude in a method's statistics. Features, losses, counts and shares stay far below it; the squares of a
thousand such numbers still add up in float32."""


@dataclass(frozen=True)
class NumberRangeBound:
    """The bound of a number: from ``least`` to ``most``. NaN is accepted here; the codec rejects it if not allowed."""

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
    """The bound of a run's name, which sites and coordinator make names of files of: a :class:`RunName`."""

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
    """Marks text for a person, such as the reason of a failure: never rejected, but escaped and cut on receipt."""

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
        # All entries at once where nothing is wrong. A NaN among them makes min and max NaN or is ignored; no other
        # entry hides behind it.
        if isinstance(self.bound, NumberRangeBound):
            fits = self.bound.least <= min(value) and max(value) <= self.bound.most
        else:
            fits = max(map(len, value)) <= self.bound.longest and is_plain_text("".join(value))
        if fits:
            return ""
        violations = ((n, self.bound.find_bound_violation(entry)) for n, entry in enumerate(value, 1))
        return next((f"entry {n}: {violation}" for n, violation in violations if violation), "")


Bound = NumberRangeBound | PlainLineBound | RunNameBound | LongTextBound | EscapedFreeText | ListBound
BOUNDS = typing.get_args(Bound)

NAME = PlainLineBound()
SHARE = NumberRangeBound(0.0, 1.0 + 1e-9)
"""Range of AUROC, average precision and balanced accuracy; rounding may end just above 1."""
VALIDATION_LOSS = NumberRangeBound(0.0, MOST_LOSS)
"""Range of a validation loss: a mean of cross-entropies (:mod:`polyclinic.strategies.local.losses`), never below 0."""
TRAIN_LOSS = NumberRangeBound(-MOST_LOSS, MOST_LOSS)
"""Range of a training loss: the loss of a method may hold divergences, which rounding can put below 0."""
COUNT = NumberRangeBound(0, MOST_IMAGES)
COUNT_OR_UNKNOWN = NumberRangeBound(-1, MOST_IMAGES)
ROUND = NumberRangeBound(0, MOST_ROUNDS)
SECONDS = NumberRangeBound(0.0, MOST_SECONDS)
EPSILON = NumberRangeBound(0.0, MOST_EPSILON)
EPOCHS = NumberRangeBound(0, MOST_EPOCHS)

Text = Annotated[str, NAME]
RunNameText = Annotated[str, RunNameBound()]
ClassNames = Annotated[tuple[str, ...], ListBound(MOST_CLASSES, NAME)]
SiteNames = Annotated[tuple[str, ...], ListBound(MOST_SITES, NAME)]
RoundNumber = Annotated[int, ROUND]
Count = Annotated[int, COUNT]
Figures = Annotated[
    tuple[float, ...],
    ListBound(MOST_CLASSES * MAX_PLUGIN_METRICS, NumberRangeBound(-MAX_METRIC_MAGNITUDE, MAX_METRIC_MAGNITUDE)),
]
MetricNames = Annotated[tuple[str, ...], ListBound(MAX_PLUGIN_METRICS, NAME)]
Counts = Annotated[tuple[int, ...], ListBound(MOST_CLASSES, COUNT_OR_UNKNOWN)]
Shares = Annotated[tuple[float, ...], ListBound(MOST_CLASSES, SHARE)]


@functools.cache
def list_field_bounds(record: type) -> dict[str, Bound]:
    """Return field name -> bound for a record class, without fields that have no bound."""
    hints = typing.get_type_hints(record, include_extras=True)
    marks_of = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: bound for name, marks in marks_of.items() for bound in marks if isinstance(bound, BOUNDS)}


def escape_free_text_fields(record: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return a record's field values, with text for people (:class:`EscapedFreeText`) escaped and cut."""
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


def refuse_unprintable_names(names: Iterable[str], what: str, most: int = MOST_CLASSES) -> None:
    """Raise :class:`WireError` if there are too many names, or one is too long or has unprintable characters.

    Args:
        what: Description of the names, with which the error message begins.
        most: Maximum number of names.
    """
    if fault := ListBound(most, NAME).find_bound_violation(tuple(names)):
        raise WireError(f"{what}: {fault}.")


def clip_reported_loss(loss: float | None) -> float | None:
    """Clip a loss to :data:`MOST_LOSS` before a site reports it; NaN becomes :data:`MOST_LOSS`, too."""
    if loss is None:
        return None
    return MOST_LOSS if math.isnan(loss) else min(loss, MOST_LOSS)
