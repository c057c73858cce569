"""Choose the counts of a sheet that may be disclosed, so that no count of few patients can be computed from them.

A column has the numbers of one class and one value: patients and images in which the class is present, absent and not
annotated. A column is hidden if fewer patients than the policy's threshold show the class, or fewer lack it; a 0 is
hidden too. More columns are then hidden until each hidden number could be at least half a threshold larger or smaller,
given all that is disclosed (:mod:`polyclinic.client.counts.audit`). Their order is that of values and names, because an
order by numbers would disclose numbers.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from polyclinic.client.counts.audit import PATIENT_STATES, SheetAudit
from polyclinic.client.counts.units import CellKey, Column, CountedData, count_cells, name_combinations
from polyclinic.common.counts import (
    ALL,
    CLASS_TABLE,
    COMBINATION_SEPARATOR,
    COMBINATIONS_TABLE,
    CROSSED_ATTRIBUTES,
    NO_CLASS,
    NOT_STATED,
)

COMBINATIONS_TIMEOUT_S = 40.0
"""Maximum time of the audit of the table of combinations; if it takes longer, the table is hidden."""


@dataclass(frozen=True)
class DisclosedColumns:
    """The columns of a sheet that may be disclosed.

    Attributes:
        hidden_classes: Classes of which nothing is disclosed.
        combined: All classes that are not hidden; the table of combinations counts images by these.
    """

    columns: frozenset[Column]
    hidden_classes: frozenset[str]
    combined: tuple[str, ...]


def choose_disclosed_columns(data: CountedData, smallest: int) -> DisclosedColumns:
    """Return the columns that may be disclosed.

    Args:
        smallest: The policy's ``smallest_count``; 0 hides nothing.
    """
    if not smallest:
        cells = count_cells(data.patients, data, data.class_names)
        columns = frozenset((table, name, value) for table, name, _, value in cells)
        return DisclosedColumns(columns, frozenset(), data.class_names)
    protection = SheetProtection(data, smallest)
    protection.hide_classes()
    for attribute in data.values:
        protection.hide_values(attribute)
    protection.hide_combinations()
    return protection.result


@dataclass
class SheetProtection:
    """The choice of the disclosed columns of one sheet, while columns are being hidden.

    Attributes:
        smallest: The policy's threshold: the minimum number of patients of a disclosed count.
        disclosed: The columns that are disclosed so far.
        hidden: Classes of which nothing is disclosed.
    """

    data: CountedData
    smallest: int
    disclosed: set[Column] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)

    @property
    def result(self) -> DisclosedColumns:
        return DisclosedColumns(frozenset(self.disclosed), frozenset(self.hidden), self.visible)

    @property
    def visible(self) -> tuple[str, ...]:
        """Return the classes that are not hidden."""
        return tuple(name for name in self.data.class_names if name not in self.hidden)

    @cached_property
    def _counts(self) -> dict[CellKey, int]:
        return count_cells(self.data.patients, self.data, ())

    def _is_large(self, column: Column) -> bool:
        """Return True if each count of patients in a column is at least the threshold.

        The column "not stated" of an attribute that the table states for every image counts as large: its zeros
        disclose nothing about a patient.
        """
        table, name, value = column
        if value == NOT_STATED and not self._has_unstated_value(table.removeprefix("class_by_")):
            return True
        states = PATIENT_STATES if name else (ALL,)
        return all(self._counts[table, name, state, value] >= self.smallest for state in states)

    def _has_unstated_value(self, attribute: str) -> bool:
        """Return True if the hospital's table does not state the attribute for at least one image."""
        index = self.data.values[attribute].index(NOT_STATED)
        return bool((self.data.images.value_indices[attribute] == index).any())

    # ------------------------------------------------------------------ classes and combinations

    def hide_classes(self) -> None:
        """Hide the classes that few patients show or lack, and further classes if needed."""
        names = self.data.class_names
        self.disclosed = {(CLASS_TABLE, name, "") for name in names if self._is_large((CLASS_TABLE, name, ""))}
        self.hidden = {name for name in names if (CLASS_TABLE, name, "") not in self.disclosed}
        while self.hidden and self.visible:
            unsafe = self._audit.find_unsafe_values_of_hidden_classes("")
            if not unsafe:
                return
            for name in sorted({column[1] for column in unsafe}):
                self._hide_class(_find_next(name, names, self.visible))

    def _hide_class(self, name: str | None) -> None:
        if name is not None:
            self.hidden.add(name)
            self.disclosed = {column for column in self.disclosed if column[1] != name}

    def hide_combinations(self) -> None:
        """Choose the combinations of visible classes that are disclosed."""
        visible = self.visible
        if not visible:
            return
        columns = [self.data.class_names.index(name) for name in visible]
        names, counts = np.unique(name_combinations(self.data.patients.states[:, columns], visible), return_counts=True)
        large = {name for name, count in zip(names.tolist(), counts.tolist(), strict=True) if count >= self.smallest}
        self.disclosed |= {(COMBINATIONS_TABLE, "", name) for name in large}
        deadline = time.monotonic() + COMBINATIONS_TIMEOUT_S
        while large:
            unsafe = {column[2] for column in self._audit.find_unsafe_combinations(deadline)}
            if not unsafe:
                return
            more = {
                name
                for combination in sorted(unsafe)
                if (name := _find_related_combination(combination, large)) is not None
            }
            more |= large if time.monotonic() > deadline else set()
            large -= more
            self.disclosed -= {(COMBINATIONS_TABLE, "", name) for name in more}

    # ------------------------------------------------------------------ attributes

    def hide_values(self, attribute: str) -> None:
        """Choose the values of one attribute that are disclosed, of all patients and of each visible class."""
        values = self.data.values[attribute]
        table = f"class_by_{attribute}"
        crossed_classes = self.visible if attribute in CROSSED_ATTRIBUTES else ()
        self.disclosed |= {(attribute, "", value) for value in values if self._is_large((attribute, "", value))}
        for name in crossed_classes:
            self.disclosed |= {(table, name, value) for value in values if self._is_large((table, name, value))}
        for name in ("", *crossed_classes):
            line = table if name else attribute
            hidden = [value for value in values if (line, name, value) not in self.disclosed]
            if len(hidden) == 1:
                self._hide_value(attribute, name, _find_next(hidden[0], values, self._list_disclosed(line, name)))
        self._hide_classes_by_value(attribute)
        while any(column[0] in (attribute, table) for column in self.disclosed):
            self._hide_classes_at_hidden_values(attribute)
            unsafe = self._audit.find_unsafe_values(attribute)
            if not unsafe:
                return
            before = len(self.disclosed)
            for column in sorted(unsafe):
                self._hide_beside(attribute, column)
            if len(self.disclosed) == before:  # no other column is left to hide, so hide the whole table
                hidden_table = table if any(column[0] == table for column in self.disclosed) else attribute
                self.disclosed = {column for column in self.disclosed if column[0] != hidden_table}

    def _hide_classes_by_value(self, attribute: str) -> None:
        """Hide the table of classes by this attribute if numbers of hidden classes can be computed from it."""
        table = f"class_by_{attribute}"
        if attribute in CROSSED_ATTRIBUTES and self._audit.find_unsafe_values_of_hidden_classes(attribute):
            self.disclosed = {column for column in self.disclosed if column[0] != table}

    def _list_disclosed(self, table: str, name: str) -> list[str]:
        return [column[2] for column in self.disclosed if column[:2] == (table, name)]

    def _hide_value(self, attribute: str, name: str, value: str | None) -> None:
        if value is not None:
            self.disclosed.discard((f"class_by_{attribute}" if name else attribute, name, value))

    def _hide_classes_at_hidden_values(self, attribute: str) -> None:
        """Hide each class at the values whose number of patients is hidden, because a class's states add up to it."""
        table = f"class_by_{attribute}"
        shown = set(self._list_disclosed(attribute, ""))
        self.disclosed = {column for column in self.disclosed if column[0] != table or column[2] in shown}

    def _hide_beside(self, attribute: str, column: Column) -> None:
        """Hide one more column to protect ``column``: of the same class, else the same value, else of all patients."""
        table, name, value = column
        values = self.data.values[attribute]
        if name and (more := _find_next(value, values, self._list_disclosed(table, name))) is not None:
            self._hide_value(attribute, name, more)
            return
        others = [column[1] for column in self.disclosed if column[0] == table and column[2] == value and column[1]]
        if name and (other := _find_next(name, self.data.class_names, others)) is not None:
            self._hide_value(attribute, other, value)
            return
        self._hide_value(attribute, "", _find_next(value, values, self._list_disclosed(attribute, "")))

    @property
    def _audit(self) -> SheetAudit:
        return SheetAudit(self.data, self.smallest, frozenset(self.disclosed), frozenset(self.hidden))


def _find_next(item: str, order: Sequence[str], options: Iterable[str]) -> str | None:
    """Return the option that comes next after ``item`` in ``order``; after the end, start at the beginning."""
    available = set(options) - {item}
    start = order.index(item) if item in order else 0
    return next((name for name in (*order[start + 1 :], *order[: start + 1]) if name in available), None)


def _find_related_combination(combination: str, options: Iterable[str]) -> str | None:
    """Return the combination to hide for the protection of another one.

    The best is a combination of some of the other one's classes, with the most classes; then the first by name.
    """
    classes = set(combination.split(COMBINATION_SEPARATOR)) - {NO_CLASS}

    def rank(option: str) -> tuple[bool, int, str]:
        option_classes = set(option.split(COMBINATION_SEPARATOR)) - {NO_CLASS}
        return not option_classes < classes, -len(option_classes), option

    return min(options, key=rank, default=None)
