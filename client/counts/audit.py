"""The audit of a count sheet: a proof that hidden numbers cannot be computed from the disclosed ones.

A hidden number is safe if two populations exist that have all disclosed numbers, and in which the hidden number differs
by at least half of the policy's threshold. The reader is assumed to know the rules of this program, and to know which
columns are hidden because of their own number. Each search changes the true population in one way, and leaves all other
tables unchanged:

- it exchanges values of an attribute between patients whose classes differ in at least one class;
- it changes states of hidden classes, and keeps the states of visible classes;
- it exchanges states and values freely, if all disclosed numbers stay (for the table of combinations of classes).

A search changes only some combinations of classes, so it may miss a proof. Then more is hidden than necessary; a proof
is never wrong.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.counts.feasible import FeasibleCounts, Indices
from polyclinic.client.counts.units import STATE_NUMBERS, Column, CountedData, CountedUnits, name_combinations
from polyclinic.common.counts import ABSENT, ALL, CLASS_TABLE, COMBINATIONS_TABLE, CROSSED_ATTRIBUTES, PRESENT, STATES

PATIENT_STATES = (PRESENT, ABSENT)
"""States of a class that disclose something about a patient."""
COUNTED_UNITS = ("patients", "images")
MAX_MOVED_COMBINATIONS = (12, 32)
"""Maximum number of combinations of classes that a search changes, in its first and in its second attempt."""
COMBINATIONS_PER_SYSTEM = 12
"""Number of hidden combinations of classes that are searched with one system of equations."""
FIXED_VALUE_ATTRIBUTES = ("sex", "age", "intensity", "size")
"""Attributes with a fixed list of values; a reader also knows the values that no patient of the hospital has."""

Target = tuple[Column, str, str]
"""A hidden number: its column, state and unit."""


@dataclass(frozen=True)
class Tally:
    """Numbers of patients or images, by combination of class states and by value of an attribute.

    Attributes:
        states: int8 ``(combinations, classes)``, the state of each class in each combination.
        numbers: int64 ``(combinations, values)``.
    """

    states: NDArray[np.int8]
    numbers: NDArray[np.int64]

    def select_numbers(self, rows: Indices, values: Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers ``(rows, values)`` of some combinations at some values."""
        selected: NDArray[np.int64] = self.numbers[rows][:, list(values)]
        return selected


def tally_units(units: CountedUnits, columns: Sequence[int], value_indices: Indices, values: int) -> Tally:
    """Count units by combination of states and by value.

    Args:
        columns: Column numbers of the classes whose states make a combination.
        value_indices: ``(n,)``, the index of each unit's value.
        values: Number of values.
    """
    states, rows = np.unique(units.states[:, list(columns)], axis=0, return_inverse=True)
    numbers = np.zeros((len(states), values), np.int64)
    np.add.at(numbers, (rows.reshape(-1), value_indices), 1)
    return Tally(states, numbers)


@dataclass(frozen=True)
class SheetAudit:
    """The audit of a count sheet.

    Attributes:
        smallest: The policy's threshold: the minimum number of patients of a disclosed count.
        disclosed: The columns that are disclosed.
        hidden: Classes of which nothing is disclosed.
    """

    data: CountedData
    smallest: int
    disclosed: frozenset[Column]
    hidden: frozenset[str]

    @property
    def _min_difference(self) -> int:
        return -(-self.smallest // 2)

    @cached_property
    def _visible(self) -> tuple[str, ...]:
        return tuple(name for name in self.data.class_names if name not in self.hidden)

    def _get_units(self, unit: str) -> CountedUnits:
        return self.data.patients if unit == "patients" else self.data.images

    def _tally(self, unit: str, names: Sequence[str], attribute: str) -> Tally:
        units = self._get_units(unit)
        columns = [self.data.class_names.index(name) for name in names]
        if not attribute:
            return tally_units(units, columns, np.zeros(len(units), np.intp), 1)
        return tally_units(units, columns, units.value_indices[attribute], len(self.data.values[attribute]))

    def _list_used_values(self, attribute: str) -> list[int]:
        """Return the indices of the values that a reader knows: all of a fixed list, otherwise all that occur."""
        values = len(self.data.values[attribute])
        if attribute in FIXED_VALUE_ATTRIBUTES:
            return list(range(values))
        occurring = [self._get_units(unit).value_indices[attribute] for unit in COUNTED_UNITS]
        return [int(value) for value in np.unique(np.concatenate(occurring))]

    # ------------------------------------------------------------------ values of an attribute

    def find_unsafe_values(self, attribute: str) -> set[Column]:
        """Return the hidden columns of an attribute without a proof, for all patients and for each visible class."""
        tallies = {unit: self._tally(unit, self._visible, attribute) for unit in COUNTED_UNITS}
        crossed_classes = self._visible if attribute in CROSSED_ATTRIBUTES else ()
        unsafe = set[Column]()
        for name in ("", *crossed_classes):
            table = f"class_by_{attribute}" if name else attribute
            values = [self.data.values[attribute][index] for index in self._list_used_values(attribute)]
            hidden = {(table, name, value) for value in values} - self.disclosed
            for unit_group in [COUNTED_UNITS] if attribute == "sex" else [COUNTED_UNITS[:1], COUNTED_UNITS[1:]]:
                unproved = hidden
                for max_rows in MAX_MOVED_COMBINATIONS:
                    if unproved:
                        rows = {unit: _choose_rows(tallies[unit], self._visible, name, max_rows) for unit in unit_group}
                        search = _ValueSearch(self, attribute, tallies, rows, unproved)
                        unproved = search.find_unsafe_columns()
                unsafe |= unproved
        return unsafe

    # ------------------------------------------------------------------ hidden classes

    def find_unsafe_values_of_hidden_classes(self, attribute: str) -> set[Column]:
        """Return the columns of hidden classes without a proof.

        The search changes only the states of hidden classes, so that all disclosed numbers stay.

        Args:
            attribute: The attribute by which the classes are counted; empty for their totals.
        """
        if not self.hidden:
            return set()
        names = self.data.class_names
        unsafe = set[Column]()
        is_coupled = attribute in ("", "sex")
        for unit_group in [COUNTED_UNITS] if is_coupled else [COUNTED_UNITS[:1], COUNTED_UNITS[1:]]:
            unsafe |= _HiddenClassSearch(
                self, attribute, {unit: self._tally(unit, names, attribute) for unit in unit_group}
            ).find_unsafe_columns()
        return unsafe

    # ------------------------------------------------------------------ combinations

    def find_unsafe_combinations(self, deadline: float) -> set[Column]:
        """Return the hidden combinations of visible classes without a proof.

        Args:
            deadline: Time of ``time.monotonic``; combinations not searched by then count as without a proof.
        """
        unsafe = set[Column]()
        for unit in COUNTED_UNITS:
            tallies = {name: self._tally(unit, self._visible, name) for name in ("", *self.data.values)}
            values = np.unique(name_combinations(tallies[""].states, self._visible)).tolist()
            hidden = [column for value in values if (column := (COMBINATIONS_TABLE, "", value)) not in self.disclosed]
            for start in range(0, len(hidden), COMBINATIONS_PER_SYSTEM):
                batch = set(hidden[start : start + COMBINATIONS_PER_SYSTEM])
                if time.monotonic() < deadline:
                    batch = _CombinationSearch(self, unit, tallies, batch).find_unsafe_columns()
                unsafe |= batch
        return unsafe

    def add_threshold_bound(self, system: FeasibleCounts, unknowns: Indices, truth: int) -> None:
        """Add the bound that a reader knows of a hidden number: it is below the threshold, or it is not.

        Args:
            unknowns: The unknowns whose sum, plus a constant, is the hidden number.
            truth: The true hidden number.
        """
        constant = truth - int(system.truth[unknowns].sum())
        if truth < self.smallest:
            system.add_sum(unknowns, -np.inf, self.smallest - 1 - constant)
        else:
            system.add_sum(unknowns, self.smallest - constant, np.inf)

    def find_unsafe_columns(self, system: FeasibleCounts) -> set[Column]:
        """Return the columns of a system's targets for which the search finds no proof."""
        unsafe = system.find_unsafe_targets(self._min_difference)
        return {target[0] for target in unsafe if isinstance(target, tuple)}


def _choose_rows(tally: Tally, names: Sequence[str], name: str, max_rows: int) -> Indices:
    """Choose the combinations that a search changes: first those that differ only in one class, then the largest.

    Args:
        names: The classes of the tally.
        name: The class in which the first combinations differ; empty to choose only by size.
        max_rows: Maximum number of combinations.

    Returns:
        Sorted row numbers of the tally.
    """
    sizes = tally.numbers.sum(axis=1)
    largest = np.argsort(-sizes, kind="stable")
    chosen = dict[int, None]()
    if name:
        column = names.index(name)
        others = np.delete(tally.states, column, axis=1)
        _, groups = np.unique(others, axis=0, return_inverse=True)
        groups = groups.reshape(-1)
        by_state = {state: tally.states[:, column] == number for state, number in STATE_NUMBERS.items()}
        pairs = list[tuple[int, int]]()
        for group in np.unique(groups).tolist():
            pair_sizes = [int(sizes[(groups == group) & by_state[state]].sum()) for state in PATIENT_STATES]
            if min(pair_sizes):
                pairs.append((-min(pair_sizes), group))
        for _, group in sorted(pairs):
            chosen |= dict.fromkeys(np.flatnonzero(groups == group).tolist())
            if len(chosen) >= 3 * max_rows // 4:
                break
    for row in largest.tolist():
        if len(chosen) >= max_rows:
            break
        chosen[row] = None
    return np.sort(np.array(list(chosen), np.intp))


def _add_images_of_patients(system: FeasibleCounts, sums: Mapping[str, Indices], truth: Mapping[str, int]) -> None:
    """Add the bound that a count of images is at least the count of their patients.

    Args:
        sums: Unit -> the unknowns in the count.
        truth: Unit -> the true count.
    """
    constants = {unit: truth[unit] - int(system.truth[sums[unit]].sum()) for unit in COUNTED_UNITS}
    unknowns = np.concatenate([sums["images"], sums["patients"]])
    signs = np.concatenate([np.ones(len(sums["images"])), -np.ones(len(sums["patients"]))])
    system.add_combination(unknowns, signs, constants["patients"] - constants["images"], np.inf)


class _ValueSearch:
    """Search for populations with other values of one attribute and the same number of each combination of classes.

    Args:
        tallies: Unit -> its tally by visible classes and by the attribute.
        rows: Unit -> the combinations that the search changes.
        hidden: The hidden columns for which a proof is searched.
    """

    def __init__(
        self,
        audit: SheetAudit,
        attribute: str,
        tallies: Mapping[str, Tally],
        rows: Mapping[str, Indices],
        hidden: set[Column],
    ) -> None:
        self._audit = audit
        self._attribute = attribute
        self._tallies = tallies
        self._rows = rows
        self._hidden = hidden
        self._values = audit._list_used_values(attribute)
        self._starts = dict[str, int]()
        offset = 0
        truth = list[NDArray[np.int64]]()
        for unit, chosen in rows.items():
            numbers = tallies[unit].select_numbers(chosen, self._values)
            self._starts[unit] = offset
            truth.append(numbers.reshape(-1))
            offset += numbers.size
        self._system = FeasibleCounts(np.concatenate(truth))

    def find_unsafe_columns(self) -> set[Column]:
        audit = self._audit
        width = len(self._values)
        for unit, chosen in self._rows.items():
            for row in range(len(chosen)):
                self._system.add_known_sum(self._starts[unit] + row * width + np.arange(width))
        names = audit._visible if self._attribute in CROSSED_ATTRIBUTES else ()
        for position, value_index in enumerate(self._values):
            value = audit.data.values[self._attribute][value_index]
            self._add_column((self._attribute, "", value), position, value_index)
            for name in names:
                self._add_column((f"class_by_{self._attribute}", name, value), position, value_index)
        return audit.find_unsafe_columns(self._system)

    def _add_column(self, column: Column, position: int, value_index: int) -> None:
        name = column[1]
        for state in STATES if name else (ALL,):
            sums = dict[str, Indices]()
            truth = dict[str, int]()
            for unit, chosen in self._rows.items():
                tally = self._tallies[unit]
                showing = np.ones(len(tally.states), np.bool_)
                if name:
                    showing = tally.states[:, self._audit._visible.index(name)] == STATE_NUMBERS[state]
                moving = np.flatnonzero(showing[chosen])
                sums[unit] = self._starts[unit] + moving * len(self._values) + position
                truth[unit] = int(tally.numbers[showing, value_index].sum())
                if column in self._audit.disclosed:
                    self._system.add_known_sum(sums[unit])
                elif not name or state in PATIENT_STATES:
                    if unit == "patients":
                        self._audit.add_threshold_bound(self._system, sums[unit], truth[unit])
                    if column in self._hidden:
                        self._system.targets[column, state, unit] = sums[unit]
            if len(sums) == len(COUNTED_UNITS):
                _add_images_of_patients(self._system, sums, truth)


class _HiddenClassSearch:
    """Search for populations with other states of hidden classes and the same states of visible classes.

    Args:
        tallies: Unit -> its tally by all classes.
    """

    def __init__(self, audit: SheetAudit, attribute: str, tallies: Mapping[str, Tally]) -> None:
        self._audit = audit
        self._attribute = attribute
        self._tallies = tallies
        self._values = audit._list_used_values(attribute) if attribute else [0]
        names = audit.data.class_names
        self._shown = [column for column, name in enumerate(names) if name not in audit.hidden]
        self._rows = {unit: self._choose_movable_rows(tally) for unit, tally in tallies.items()}
        self._starts = dict[str, int]()
        offset = 0
        truth = list[NDArray[np.int64]]()
        for unit, chosen in self._rows.items():
            numbers = tallies[unit].select_numbers(chosen, self._values)
            self._starts[unit] = offset
            truth.append(numbers.reshape(-1))
            offset += numbers.size
        self._system = FeasibleCounts(np.concatenate(truth))

    def _choose_movable_rows(self, tally: Tally) -> Indices:
        """Choose combinations that differ only in hidden classes: the largest groups with equal visible states."""
        groups = self._group_by_visible_states(tally)
        sizes = tally.numbers.sum(axis=1)
        several = [group for group in np.unique(groups).tolist() if (groups == group).sum() > 1]
        several.sort(key=lambda group: -int(sizes[groups == group].sum()))
        chosen = list[int]()
        for group in several:
            chosen += np.flatnonzero(groups == group).tolist()
            if len(chosen) >= MAX_MOVED_COMBINATIONS[-1]:
                break
        return np.sort(np.array(chosen, np.intp))

    def _group_by_visible_states(self, tally: Tally) -> Indices:
        _, groups = np.unique(tally.states[:, self._shown], axis=0, return_inverse=True)
        return np.asarray(groups.reshape(-1), np.intp)

    def find_unsafe_columns(self) -> set[Column]:
        audit = self._audit
        width = len(self._values)
        for unit, chosen in self._rows.items():
            groups = self._group_by_visible_states(self._tallies[unit])[chosen]
            for group in np.unique(groups).tolist():
                rows = np.flatnonzero(groups == group)
                for position in range(width):
                    self._system.add_known_sum(self._starts[unit] + rows * width + position)
        for name in sorted(audit.hidden):
            self._add_class(name)
        return audit.find_unsafe_columns(self._system)

    def _add_class(self, name: str) -> None:
        width = len(self._values)
        for state in PATIENT_STATES:
            sums = dict[str, list[Indices]]()
            truth = dict[str, list[int]]()
            for unit, chosen in self._rows.items():
                tally = self._tallies[unit]
                showing = tally.states[:, self._audit.data.class_names.index(name)] == STATE_NUMBERS[state]
                rows = np.flatnonzero(showing[chosen])
                sums[unit] = [self._starts[unit] + rows * width + position for position in range(width)]
                truth[unit] = [int(tally.numbers[showing, index].sum()) for index in self._values]
                if unit == "patients":
                    self._audit.add_threshold_bound(self._system, np.concatenate(sums[unit]), sum(truth[unit]))
                for value_index, unknowns in zip(self._values, sums[unit], strict=True):
                    value = self._audit.data.values[self._attribute][value_index] if self._attribute else ""
                    table = f"class_by_{self._attribute}" if self._attribute else CLASS_TABLE
                    self._system.targets[(table, name, value), state, unit] = unknowns
            if len(sums) == len(COUNTED_UNITS):
                for position in range(width):
                    value_sums = {unit: unit_sums[position] for unit, unit_sums in sums.items()}
                    value_truth = {unit: unit_truth[position] for unit, unit_truth in truth.items()}
                    _add_images_of_patients(self._system, value_sums, value_truth)


class _CombinationSearch:
    """Search for populations with other combinations of visible classes, in which all disclosed numbers stay.

    Args:
        tallies: Attribute -> its tally by visible classes; the empty text is for the numbers without an attribute.
        hidden: The hidden combinations for which a proof is searched.
    """

    def __init__(self, audit: SheetAudit, unit: str, tallies: Mapping[str, Tally], hidden: set[Column]) -> None:
        self._audit = audit
        self._unit = unit
        self._tallies = tallies
        self._hidden = hidden
        states = tallies[""].states
        self._every = name_combinations(states, audit._visible)
        self._rows = self._choose_rows(states)
        self._values = {name: audit._list_used_values(name) if name else [0] for name in tallies}
        self._starts = dict[str, int]()
        offset = 0
        truth = list[NDArray[np.int64]]()
        for name, tally in tallies.items():
            numbers = tally.select_numbers(self._rows, self._values[name])
            self._starts[name] = offset
            truth.append(numbers.reshape(-1))
            offset += numbers.size
        self._system = FeasibleCounts(np.concatenate(truth))

    def _choose_rows(self, states: NDArray[np.int8]) -> Indices:
        """Choose the rows that the search changes: the hidden combinations, the most similar ones, and the largest."""
        values = {column[2] for column in self._hidden}
        hidden_rows = np.flatnonzero(np.isin(self._every, sorted(values)))
        distances = (
            (states[:, None, :] != states[None, hidden_rows, :]).sum(axis=2).min(axis=1, initial=states.shape[1] + 1)
        )
        sizes = self._tallies[""].numbers.sum(axis=1)
        order = np.lexsort((-sizes, distances))
        most_similar = order[: 2 * MAX_MOVED_COMBINATIONS[-1] // 3]
        largest = np.argsort(-sizes, kind="stable")
        chosen = dict.fromkeys([*hidden_rows.tolist(), *most_similar.tolist(), *largest.tolist()])
        return np.sort(np.array(list(chosen)[: MAX_MOVED_COMBINATIONS[-1]], np.intp))

    def find_unsafe_columns(self) -> set[Column]:
        rows = np.arange(len(self._rows))
        self._system.add_known_sum(rows)
        for name in self._audit._visible:
            self._add_column((CLASS_TABLE, name, ""), "", 0)
        for attribute, values in self._values.items():
            width = len(values)
            for row in rows.tolist() if attribute else ():
                unknowns = self._starts[attribute] + row * width + np.arange(width)
                self._system.add_combination(np.append(unknowns, row), np.append(np.ones(width), -1.0), 0, 0)
            for position, value_index in enumerate(values) if attribute else ():
                value = self._audit.data.values[attribute][value_index]
                self._add_column((attribute, "", value), attribute, position)
                for name in self._audit._visible if attribute in CROSSED_ATTRIBUTES else ():
                    self._add_column((f"class_by_{attribute}", name, value), attribute, position)
        combinations = self._every[self._rows]
        sizes = self._tallies[""].numbers.sum(axis=1)
        for value in np.unique(combinations).tolist():
            column = (COMBINATIONS_TABLE, "", value)
            unknowns = np.flatnonzero(combinations == value)
            if column in self._audit.disclosed:
                self._system.add_known_sum(unknowns)
                continue
            if self._unit == "patients":
                self._audit.add_threshold_bound(self._system, unknowns, int(sizes[self._every == value].sum()))
            if column in self._hidden:
                self._system.targets[column, ALL, self._unit] = unknowns
        unsafe = self._audit.find_unsafe_columns(self._system)
        return unsafe | {column for column in self._hidden if column[2] not in set(combinations.tolist())}

    def _add_column(self, column: Column, attribute: str, position: int) -> None:
        name = column[1]
        tally = self._tallies[attribute]
        values = self._values[attribute]
        for state in STATES if name else (ALL,):
            showing = np.ones(len(tally.states), np.bool_)
            if name:
                showing = tally.states[:, self._audit._visible.index(name)] == STATE_NUMBERS[state]
            unknowns = self._starts[attribute] + np.flatnonzero(showing[self._rows]) * len(values) + position
            if column in self._audit.disclosed:
                self._system.add_known_sum(unknowns)
            elif self._unit == "patients" and (not name or state in PATIENT_STATES):
                self._audit.add_threshold_bound(
                    self._system, unknowns, int(tally.numbers[showing, values[position]].sum())
                )
