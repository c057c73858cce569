"""The records of ``flwr-server count``: the question, and a hospital's answer."""

from dataclasses import dataclass
from typing import Annotated

from polyclinic.common.counts import ALL, MAX_QUESTION_CHARACTERS, STATES, TABLE_MENU
from polyclinic.common.errors import WireError
from polyclinic.common.wire.bounds import (
    COUNT_BOUND,
    MAX_CLASSES,
    MAX_IMAGES,
    NAME_BOUND,
    ClassNames,
    Count,
    ListBound,
    LongTextBound,
    NumberRangeBound,
    PlainLineBound,
    RunNameText,
    Text,
)

MAX_CELLS = 200_000
"""Maximum number of counts in an answer; each class of a large study by year has some 200."""
MAX_NOISE = 1e6
"""Maximum standard deviation of the noise on a count."""
COUNT_ROUND = 1
"""The round number of the masked sum of a question."""

TableNames = Annotated[tuple[str, ...], ListBound(len(TABLE_MENU), NAME_BOUND)]
CellTexts = Annotated[tuple[str, ...], ListBound(MAX_CELLS, PlainLineBound(2_000))]
CellCounts = Annotated[tuple[int, ...], ListBound(MAX_CELLS, COUNT_BOUND)]
NoisyCounts = Annotated[tuple[int, ...], ListBound(MAX_CELLS, NumberRangeBound(-MAX_IMAGES, MAX_IMAGES))]


@dataclass(frozen=True)
class CountRequest:
    """Request to count: tables of a fixed menu, which the hospital answers from its count sheet.

    Attributes:
        question: The question as JSON (:class:`polyclinic.common.counts.CountQuestion`).
    """

    run: RunNameText
    question: Annotated[str, LongTextBound(MAX_QUESTION_CHARACTERS)]


@dataclass(frozen=True)
class CountReply:
    """A site's answer to a :class:`CountRequest`: the counts of its sheet that the policy allows.

    Index i of ``tables``, ``classes``, ``states``, ``values``, ``patients`` and ``images`` belongs to count i.

    Attributes:
        level: The `level` of this site's policy.
        as_of: The day on which the sheet was made; after a change of fewer patients than `smallest_count`, the old
            sheet still answers.
        smallest_count: The value of this site's key `smallest_count`.
        class_names: The classes that this site annotates, by the federation's names, as far as the question asks.
        allowed: The tables that this answer covers (`counts`).
        refused: The tables of the question that `counts` does not allow.
        missing: The tables that this site has no data for: its `[data]` names no column.
        tables: The table of each count; a count that `smallest_count` hides is left out, and so are others of its
            line and more lines, so that it cannot be computed.
        classes: The class of each count; empty in tables without classes.
        states: For each count, if the class is present, absent or not annotated.
        values: The value of each count, such as a band of ages; empty in the table of classes.
        patients: The number of patients. A patient counts once in a table, by the first image; with noise from the
            budget (`epsilon`, `counts_epsilon`), it may be below 0.
        images: The number of images; empty if noise is added.
        noise: The standard deviation of the noise on each number of patients; 0 for exact numbers.
        masked_rows: Under `masked_only`, the rows of counts that leave the site only in a sum over sites.
    """

    run: RunNameText
    site: Text
    level: Text
    as_of: Text
    smallest_count: Count
    class_names: ClassNames
    allowed: TableNames
    refused: TableNames = ()
    missing: TableNames = ()
    tables: CellTexts = ()
    classes: CellTexts = ()
    states: CellTexts = ()
    values: CellTexts = ()
    patients: NoisyCounts = ()
    images: CellCounts = ()
    noise: Annotated[float, NumberRangeBound(0.0, MAX_NOISE)] = 0.0
    masked_rows: Annotated[tuple[str, ...], ListBound(MAX_CLASSES * len(TABLE_MENU), PlainLineBound(2_000))] = ()

    def __post_init__(self) -> None:
        columns = (self.tables, self.classes, self.states, self.values, self.patients)
        if len({len(column) for column in columns}) > 1 or len(self.images) not in (0, len(self.tables)):
            raise WireError("each count must have a table, a class, a state, a value and a number.")
        if len(self.cells) < len(self.tables):
            raise WireError("each count must be stated once.")
        if not set(self.tables) <= set(self.allowed) or not set(self.allowed) <= TABLE_MENU.keys():
            raise WireError("counts must be of tables that the answer covers.")
        if not set(self.states) <= {ALL, *STATES} or not set(self.classes) <= {"", *self.class_names}:
            raise WireError("counts must be of the classes that the answer names.")
        if not self.noise and min(self.patients, default=0) < 0:
            raise WireError("a number of patients without noise cannot be below 0.")
        if list(self.masked_rows) != sorted(set(self.masked_rows)):
            raise WireError("masked_rows must be sorted, once each.")

    @property
    def cells(self) -> dict[tuple[str, str, str, str], int]:
        """(table, class, state, value) -> index of the count."""
        keys = zip(self.tables, self.classes, self.states, self.values, strict=True)
        return {key: index for index, key in enumerate(keys)}


CountRecord = CountRequest | CountReply
