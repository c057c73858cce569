"""The audit of a count sheet: could each hidden number be another one, given all that is disclosed?

A hidden number is safe if we find two populations with all disclosed numbers in which it differs by half a threshold.
The reader is assumed to know the rules, and to know of each hidden column whether it is hidden for its own number. Each
search changes the true population in one way that leaves all other tables as they are:

- values of an attribute are exchanged between patients whose classes differ in one class at least;
- states of hidden classes are changed, while the states of visible classes stay;
- combinations: states and values are exchanged at will, as far as all disclosed numbers stay.

Searches move some combinations of classes and leave the others as they are. So a number without a proof may still be
safe, and more is hidden than necessary; a proof is never wrong.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.counts.feasible import FeasibleCounts, Indices
from polyclinic.client.counts.units import STATE_NUMBERS, Column, CountedData, CountedUnits, name_combinations
from polyclinic.common.counts import ABSENT, ALL, CLASS, COMBINATIONS, CROSSED, PRESENT, STATES

PATIENT_STATES = (PRESENT, ABSENT)
"""States of a class that say something about a patient."""
UNITS = ("patients", "images")
MOVING_ROWS = (12, 32)
"""Combinations of classes that a search moves: in the first attempt, and in the second."""
COMBINATIONS_AT_A_TIME = 12
"""Hidden combinations of classes in one system."""
SHORT_LISTS = ("sex", "age", "intensity", "size")
"""Attributes whose values everybody knows, also those of nobody here."""

Target = tuple[Column, str, str]
"""A hidden number: column, state and unit."""


@dataclass(frozen=True)
class Tally:
    """The units of each combination of states of classes, by a value.

    Attributes:
        states: int8 ``(combinations, classes)``.
        numbers: ``(combinations, values)``.
    """

    states: NDArray[np.int8]
    numbers: NDArray[np.int64]

    def select_numbers(self, rows: Indices, values: Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers ``(rows, values)`` of some combinations at some values."""
        selected: NDArray[np.int64] = self.numbers[rows][:, list(values)]
        return selected


def tally_units(units: CountedUnits, columns: Sequence[int], places: Indices, values: int) -> Tally:
    """Count units by combination of states and by value.

    Args:
        columns: The classes that distinguish combinations.
        places: ``(n,)``, the value of each unit.
        values: Number of values.
    """
    states, rows = np.unique(units.states[:, list(columns)], axis=0, return_inverse=True)
    numbers = np.zeros((len(states), values), np.int64)
    np.add.at(numbers, (rows.reshape(-1), places), 1)
    return Tally(states, numbers)


@dataclass(frozen=True)
class SheetAudit:
    """The audit of a sheet with these disclosed columns and hidden classes.

    Attributes:
        smallest: Fewest patients of a count that may be disclosed.
    """

    data: CountedData
    smallest: int
    disclosed: frozenset[Column]
    hidden: frozenset[str]

    @property
    def _width(self) -> int:
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
        return tally_units(units, columns, units.places[attribute], len(self.data.values[attribute]))

    def _list_used_values(self, attribute: str) -> list[int]:
        """Return the values that a reader knows of: all of a short list, else those that occur."""
        values = len(self.data.values[attribute])
        if attribute in SHORT_LISTS:
            return list(range(values))
        occurring = [self._get_units(unit).places[attribute] for unit in UNITS]
        return [int(value) for value in np.unique(np.concatenate(occurring))]

    # ------------------------------------------------------------------ values of an attribute

    def find_unsafe_values(self, attribute: str) -> set[Column]:
        """Return the hidden columns of an attribute, of all patients and of visible classes, without a proof."""
        tallies = {unit: self._tally(unit, self._visible, attribute) for unit in UNITS}
        crossed = self._visible if attribute in CROSSED else ()
        unsafe = set[Column]()
        for name in ("", *crossed):
            table = f"class_by_{attribute}" if name else attribute
            values = [self.data.values[attribute][place] for place in self._list_used_values(attribute)]
            hidden = {(table, name, value) for value in values} - self.disclosed
            for together in [UNITS] if attribute == "sex" else [UNITS[:1], UNITS[1:]]:
                unproved = hidden
                for most in MOVING_ROWS:
                    if unproved:
                        rows = {unit: _choose_rows(tallies[unit], self._visible, name, most) for unit in together}
                        search = _ValueSearch(self, attribute, tallies, rows, unproved)
                        unproved = search.find_unsafe_columns()
                unsafe |= unproved
        return unsafe

    # ------------------------------------------------------------------ hidden classes

    def find_unsafe_values_of_hidden_classes(self, attribute: str) -> set[Column]:
        """Return the columns of hidden classes without a proof, by an attribute, or their totals (empty text).

        Units change the states of hidden classes and nothing else, so that all disclosed numbers stay.
        """
        if not self.hidden:
            return set()
        names = self.data.class_names
        unsafe = set[Column]()
        is_coupled = attribute in ("", "sex")
        for together in [UNITS] if is_coupled else [UNITS[:1], UNITS[1:]]:
            unsafe |= _HiddenClassSearch(
                self, attribute, {unit: self._tally(unit, names, attribute) for unit in together}
            ).find_unsafe_columns()
        return unsafe

    # ------------------------------------------------------------------ combinations

    def find_unsafe_combinations(self, deadline: float) -> set[Column]:
        """Return the hidden combinations of visible classes without a proof.

        Args:
            deadline: Time on ``time.monotonic`` after which the others count as without a proof.
        """
        unsafe = set[Column]()
        for unit in UNITS:
            tallies = {name: self._tally(unit, self._visible, name) for name in ("", *self.data.values)}
            values = np.unique(name_combinations(tallies[""].states, self._visible)).tolist()
            hidden = [column for value in values if (column := (COMBINATIONS, "", value)) not in self.disclosed]
            for start in range(0, len(hidden), COMBINATIONS_AT_A_TIME):
                batch = set(hidden[start : start + COMBINATIONS_AT_A_TIME])
                if time.monotonic() < deadline:
                    batch = _CombinationSearch(self, unit, tallies, batch).find_unsafe_columns()
                unsafe |= batch
        return unsafe

    def add_rule(self, system: FeasibleCounts, unknowns: Indices, truth: int) -> None:
        """Add the bound that a reader concludes from a hidden number: below the threshold, or not below it.

        Args:
            unknowns: The unknowns in the number; the rest of it stays as it is.
            truth: The number.
        """
        constant = truth - int(system.truth[unknowns].sum())
        if truth < self.smallest:
            system.add_sum(unknowns, -np.inf, self.smallest - 1 - constant)
        else:
            system.add_sum(unknowns, self.smallest - constant, np.inf)

    def find_unsafe_columns(self, system: FeasibleCounts) -> set[Column]:
        """Return the columns of a system's targets without a proof."""
        unsafe = system.find_unsafe_targets(self._width)
        return {target[0] for target in unsafe if isinstance(target, tuple)}


def _choose_rows(tally: Tally, names: Sequence[str], name: str, most: int) -> Indices:
    """Return the combinations to move for a class: pairs that differ in this class alone first, then the largest.

    Args:
        names: The classes of the tally.
        name: The class; empty for all units.
    """
    sizes = tally.numbers.sum(axis=1)
    largest = np.argsort(-sizes, kind="stable")
    chosen = dict[int, None]()
    if name:
        place = names.index(name)
        others = np.delete(tally.states, place, axis=1)
        _, groups = np.unique(others, axis=0, return_inverse=True)
        groups = groups.reshape(-1)
        by_state = {state: tally.states[:, place] == number for state, number in STATE_NUMBERS.items()}
        pairs = list[tuple[int, int]]()
        for group in np.unique(groups).tolist():
            both = [int(sizes[(groups == group) & by_state[state]].sum()) for state in PATIENT_STATES]
            if min(both):
                pairs.append((-min(both), group))
        for _, group in sorted(pairs):
            chosen |= dict.fromkeys(np.flatnonzero(groups == group).tolist())
            if len(chosen) >= 3 * most // 4:
                break
    for row in largest.tolist():
        if len(chosen) >= most:
            break
        chosen[row] = None
    return np.sort(np.array(list(chosen), np.intp))


def _add_images_of_patients(system: FeasibleCounts, sums: Mapping[str, Indices], truth: Mapping[str, int]) -> None:
    """Add that a count of images is at least the count of their patients.

    Args:
        sums, truth: Unit -> the unknowns in the count, and the whole count.
    """
    constants = {unit: truth[unit] - int(system.truth[sums[unit]].sum()) for unit in UNITS}
    unknowns = np.concatenate([sums["images"], sums["patients"]])
    signs = np.concatenate([np.ones(len(sums["images"])), -np.ones(len(sums["patients"]))])
    system.add_combination(unknowns, signs, constants["patients"] - constants["images"], np.inf)


class _ValueSearch:
    """Searches for populations with other values of one attribute, with the same number of each combination.

    Args:
        rows: Unit -> the combinations that move.
        hidden: The columns that are looked at.
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
        place = 0
        truth = list[NDArray[np.int64]]()
        for unit, chosen in rows.items():
            numbers = tallies[unit].select_numbers(chosen, self._values)
            self._starts[unit] = place
            truth.append(numbers.reshape(-1))
            place += numbers.size
        self._system = FeasibleCounts(np.concatenate(truth))

    def find_unsafe_columns(self) -> set[Column]:
        audit = self._audit
        width = len(self._values)
        for unit, chosen in self._rows.items():
            for row in range(len(chosen)):
                self._system.add_known_sum(self._starts[unit] + row * width + np.arange(width))
        names = audit._visible if self._attribute in CROSSED else ()
        for position, place in enumerate(self._values):
            value = audit.data.values[self._attribute][place]
            self._add_column((self._attribute, "", value), position, place)
            for name in names:
                self._add_column((f"class_by_{self._attribute}", name, value), position, place)
        return audit.find_unsafe_columns(self._system)

    def _add_column(self, column: Column, position: int, place: int) -> None:
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
                truth[unit] = int(tally.numbers[showing, place].sum())
                if column in self._audit.disclosed:
                    self._system.add_known_sum(sums[unit])
                elif not name or state in PATIENT_STATES:
                    if unit == "patients":
                        self._audit.add_rule(self._system, sums[unit], truth[unit])
                    if column in self._hidden:
                        self._system.targets[column, state, unit] = sums[unit]
            if len(sums) == len(UNITS):
                _add_images_of_patients(self._system, sums, truth)


class _HiddenClassSearch:
    """Searches for populations with other states of hidden classes, with the same states of visible ones.

    Args:
        tallies: Unit -> its tally by all classes.
    """

    def __init__(self, audit: SheetAudit, attribute: str, tallies: Mapping[str, Tally]) -> None:
        self._audit = audit
        self._attribute = attribute
        self._tallies = tallies
        self._values = audit._list_used_values(attribute) if attribute else [0]
        names = audit.data.class_names
        self._shown = [place for place, name in enumerate(names) if name not in audit.hidden]
        self._rows = {unit: self._choose_movable_rows(tally) for unit, tally in tallies.items()}
        self._starts = dict[str, int]()
        place = 0
        truth = list[NDArray[np.int64]]()
        for unit, chosen in self._rows.items():
            numbers = tallies[unit].select_numbers(chosen, self._values)
            self._starts[unit] = place
            truth.append(numbers.reshape(-1))
            place += numbers.size
        self._system = FeasibleCounts(np.concatenate(truth))

    def _choose_movable_rows(self, tally: Tally) -> Indices:
        """Return the combinations in groups of equal visible states; the largest groups of two and more."""
        groups = self._group_by_visible_states(tally)
        sizes = tally.numbers.sum(axis=1)
        several = [group for group in np.unique(groups).tolist() if (groups == group).sum() > 1]
        several.sort(key=lambda group: -int(sizes[groups == group].sum()))
        chosen = list[int]()
        for group in several:
            chosen += np.flatnonzero(groups == group).tolist()
            if len(chosen) >= MOVING_ROWS[-1]:
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
                truth[unit] = [int(tally.numbers[showing, place].sum()) for place in self._values]
                if unit == "patients":
                    self._audit.add_rule(self._system, np.concatenate(sums[unit]), sum(truth[unit]))
                for place, unknowns in zip(self._values, sums[unit], strict=True):
                    value = self._audit.data.values[self._attribute][place] if self._attribute else ""
                    table = f"class_by_{self._attribute}" if self._attribute else CLASS
                    self._system.targets[(table, name, value), state, unit] = unknowns
            if len(sums) == len(UNITS):
                for position in range(width):
                    at = {unit: of[position] for unit, of in sums.items()}
                    _add_images_of_patients(self._system, at, {unit: of[position] for unit, of in truth.items()})


class _CombinationSearch:
    """Searches for populations with other combinations of visible classes, all tables of attributes included.

    Args:
        hidden: The combinations that are looked at.
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
        place = 0
        truth = list[NDArray[np.int64]]()
        for name, tally in tallies.items():
            numbers = tally.select_numbers(self._rows, self._values[name])
            self._starts[name] = place
            truth.append(numbers.reshape(-1))
            place += numbers.size
        self._system = FeasibleCounts(np.concatenate(truth))

    def _choose_rows(self, states: NDArray[np.int8]) -> Indices:
        """Return the rows of the hidden combinations, those of one class less or more, and the largest."""
        values = {column[2] for column in self._hidden}
        places = np.flatnonzero(np.isin(self._every, sorted(values)))
        distances = (states[:, None, :] != states[None, places, :]).sum(axis=2).min(axis=1, initial=states.shape[1] + 1)
        sizes = self._tallies[""].numbers.sum(axis=1)
        order = np.lexsort((-sizes, distances))
        near = order[: 2 * MOVING_ROWS[-1] // 3]
        largest = np.argsort(-sizes, kind="stable")
        chosen = dict.fromkeys([*places.tolist(), *near.tolist(), *largest.tolist()])
        return np.sort(np.array(list(chosen)[: MOVING_ROWS[-1]], np.intp))

    def find_unsafe_columns(self) -> set[Column]:
        rows = np.arange(len(self._rows))
        self._system.add_known_sum(rows)
        for name in self._audit._visible:
            self._add_column((CLASS, name, ""), "", 0)
        for attribute, values in self._values.items():
            width = len(values)
            for row in rows.tolist() if attribute else ():
                unknowns = self._starts[attribute] + row * width + np.arange(width)
                self._system.add_combination(np.append(unknowns, row), np.append(np.ones(width), -1.0), 0, 0)
            for position, place in enumerate(values) if attribute else ():
                value = self._audit.data.values[attribute][place]
                self._add_column((attribute, "", value), attribute, position)
                for name in self._audit._visible if attribute in CROSSED else ():
                    self._add_column((f"class_by_{attribute}", name, value), attribute, position)
        combinations = self._every[self._rows]
        sizes = self._tallies[""].numbers.sum(axis=1)
        for value in np.unique(combinations).tolist():
            column = (COMBINATIONS, "", value)
            unknowns = np.flatnonzero(combinations == value)
            if column in self._audit.disclosed:
                self._system.add_known_sum(unknowns)
                continue
            if self._unit == "patients":
                self._audit.add_rule(self._system, unknowns, int(sizes[self._every == value].sum()))
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
                self._audit.add_rule(self._system, unknowns, int(tally.numbers[showing, values[position]].sum()))
