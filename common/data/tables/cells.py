"""The meaning of a table's cells: labels, findings, parts of a split.

A label column holds 1, 0, -1 (uncertain) or nothing. A column of findings holds names with a separator between them.
Cells come normalised (:mod:`common.data.base.names`). A cell that means nothing here is a fault with its line.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.data.base.decoded_size import LARGEST_MB
from common.data.base.names import fold_likeness, is_blank
from common.data.base.spec import NO_FINDING, LabelPolicy
from common.data.base.splits import Names
from common.data.tables.csv import Column, Columns, read_columns
from common.errors import BadInput, Fault, did_you_mean, stop_on

_LABEL = re.compile(r"([+\-\u2212]?)([01])(?:[.,]0*)?")
_POLICY = {"unknown": np.nan, "negative": 0.0, "positive": 1.0}
_LIST = re.compile(r"""\[\s*(?:(?:'[^']*'|"[^"]*")[\s,]*)*\]""")
_LIST_ITEM = re.compile(r"""'([^']*)'|"([^"]*)\"""")
OTHER_SEPARATORS = ("|", ";", ",", "/", "+", "&", "\\")
_MOST_FAULTS = 20
PART_NAMES = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}


def read_label(cell: str) -> Literal["present", "absent", "uncertain", "blank"] | None:
    """Return the meaning of a cell of a label column, such as ``1``, ``0.0``, ``-1`` or ``1,0``; None for any other."""
    if is_blank(cell):
        return "blank"
    match = _LABEL.fullmatch(cell)
    if match is None:
        return None
    if match[2] == "0":
        return "absent"
    return "present" if match[1] in ("", "+") else "uncertain"


def label_matrix(
    columns: Columns, names: Sequence[str], *, uncertain: LabelPolicy, blank: LabelPolicy, where: str
) -> NDArray[np.float32]:
    """Turn label columns of 1, 0, -1 and blank into float32 ``(n, classes)``.

    Raises:
        BadInput: Naming, of each column, the cells that are none of these, and their lines.
    """
    value_of = {"present": 1.0, "absent": 0.0, "uncertain": _POLICY[uncertain], "blank": _POLICY[blank], None: np.nan}
    matrix = np.empty((len(columns.lines), len(names)), dtype=np.float32)
    faults = []
    for place, name in enumerate(names):
        column = columns.column(name)
        meanings = [read_label(cell) for cell in column.cells]
        if foreign := [number for number, meaning in enumerate(meanings) if meaning is None]:
            problem = f'column "{name}" holds {column.where(foreign)}; expected 1, 0, -1 or nothing.'
            faults.append(Fault(where, problem))
        matrix[:, place] = np.array([value_of[meaning] for meaning in meanings], dtype=np.float32)[column.places]
    stop_on(faults)
    return matrix


@dataclass(frozen=True)
class FindingRules:
    """The reading of a column whose cells name findings.

    Attributes:
        classes: The names of the classes, as the cells write them.
        separator: Between the names in a cell; a cell may also be a list as Python writes it, ``['Mass', 'Nodule']``.
        no_finding: Names that say that all classes are absent; they stand alone in a cell.
        others: Names of findings that are no class; ``"*"`` stands for all that are unlike any class.
        blank: The meaning of a blank cell for all classes.
        keys: The keys of the config file, by field, for faults; a table of a public data set has none.
    """

    classes: Sequence[str]
    separator: str = "|"
    no_finding: Sequence[str] = NO_FINDING
    others: Sequence[str] = ()
    blank: LabelPolicy = "unknown"
    keys: Mapping[str, str] = field(default_factory=dict)


def split_findings(cell: str, separator: str) -> list[str]:
    """Return the names of findings in a cell such as ``"Mass|Nodule"``, without empty ones."""
    if _LIST.fullmatch(cell):
        parts = [first or second for first, second in _LIST_ITEM.findall(cell)]
    else:
        parts = cell.split(separator)
    return [name for part in parts if (name := part.strip())]


class _Vocabulary:
    """The places of names in a list; case counts only between two names that differ in nothing else."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        folded = Counter(name.casefold() for name in self._places)
        self._folded = {name.casefold(): at for name, at in self._places.items() if folded[name.casefold()] == 1}

    def find(self, name: str) -> int | None:
        """Return the place of a name, or None for a name that the list does not have."""
        place = self._places.get(name)
        return self._folded.get(name.casefold()) if place is None else place

    def has(self, name: str) -> bool:
        """Return True for a name that the list has."""
        return self.find(name) is not None


def finding_matrix(column: Column, name: str, rules: FindingRules) -> tuple[NDArray[np.float32], dict[str, int]]:
    """Turn cells such as ``"Mass|Nodule"`` into float32 ``(n, classes)``.

    Args:
        name: The name of the column, for faults.

    Returns:
        The labels, and the number of rows of each finding that is no class.

    Raises:
        BadInput: Naming each part of a cell that is neither a class, nor another finding, nor "no finding".
    """
    classes, absent, others = (_Vocabulary(names) for names in (rules.classes, rules.no_finding, rules.others))
    of_cell = np.zeros((len(column.cells), len(rules.classes)), dtype=np.float32)
    foreign, contradictions = dict[str, set[int]](), list[int]()
    for place, cell in enumerate(column.cells):
        parts = [] if is_blank(cell) else split_findings(cell, rules.separator)
        if not parts:
            of_cell[place] = _POLICY[rules.blank]
        denied = False
        for part in parts:
            if (number := classes.find(part)) is not None:
                of_cell[place, number] = 1
            elif absent.has(part):
                denied = True
            else:
                foreign.setdefault(part, set()).add(place)
        if denied and of_cell[place].any():
            contradictions.append(place)
    unlisted = {part: places for part, places in foreign.items() if not others.has(part)}
    faults = _unlisted_faults(column, name, rules, unlisted)
    if contradictions:
        problem = f'column "{name}" names a class and says that there is no finding: {column.where(contradictions)}.'
        faults.append(Fault(rules.keys.get("column", "data.labels"), problem, "Correct these cells."))
    stop_on(faults)
    counts = column.counts()
    return of_cell[column.places], {part: int(counts[list(places)].sum()) for part, places in foreign.items()}


def _unlisted_faults(
    column: Column, name: str, rules: FindingRules, unlisted: Mapping[str, Collection[int]]
) -> list[Fault]:
    """Return the faults of names that no key of the config file lists, given the places of the cells of each."""
    keys = {key: rules.keys.get(key, "data.labels") for key in ("classes", "separator")}
    near_names = {fold_likeness(label): f'Did you mean "{label}"?' for label in rules.classes}
    names, all_others = _Vocabulary([*rules.classes, *rules.no_finding]), "*" in rules.others
    faults, unlike = list[Fault](), dict[str, Collection[int]]()
    for part, places in unlisted.items():
        near = near_names.get(fold_likeness(part)) or did_you_mean(part, rules.classes, 0.8 if all_others else 0.6)
        divided = ((mark, split_findings(part, mark)) for mark in OTHER_SEPARATORS)
        marks = [mark for mark, pieces in divided if len(pieces) > 1 and any(map(names.has, pieces))]
        problem = f'column "{name}" holds {column.where_parts({part: places})}, which is no class.'
        if len(faults) == _MOST_FAULTS or not (near or marks):
            unlike[part] = places
        elif marks:
            faults.append(Fault(keys["separator"], problem, f'Are its names separated by "{marks[0]}"?'))
        else:
            other = f" If it is another finding, list it in {rules.keys['others']}." if rules.keys else ""
            faults.append(Fault(keys["classes"], problem, near + other))
    if unlike and not (all_others and len(faults) < _MOST_FAULTS):
        verb = "which is no class" if len(unlike) == 1 else "which are no classes"
        problem = f'column "{name}" holds {column.where_parts(unlike, 10)}, {verb}.'
        remedy = "Correct the table."
        if rules.keys:
            remedy = f"Correct the table, or list in {rules.keys['others']} what is a finding but no class "
            remedy += f'("*" for all), and in {rules.keys["no_finding"]} what says that there is no finding.'
        faults.append(Fault(keys["classes"], problem, remedy))
    return faults


def parse_parts(column: Column, name: str, where: str) -> Names:
    """Read a column that says "train", "val" or "validation", and "test".

    Raises:
        BadInput: Naming every other value with its line.
    """
    names = [cell.casefold() for cell in column.cells]
    if foreign := [place for place, part in enumerate(names) if part not in PART_NAMES]:
        problem = f'column "{name}" holds {column.where(foreign)}; expected "train", "val" or "validation", and "test".'
        raise BadInput([Fault(where, problem)])
    return np.array([PART_NAMES[part] for part in names], dtype="<U10")[column.places]


def count_uncertain_and_blank(
    path: Path, names: Collection[str], largest_mb: int = LARGEST_MB
) -> dict[str, tuple[int, int]]:
    """Count the cells of -1 and the blank ones of each label column, by its name.

    Raises:
        BadInput: If the table cannot be read.
    """
    columns = read_columns(path, "data.labels", largest_mb)
    totals = {}
    for name in names:
        if name in columns:
            column = columns.column(name)
            meanings = np.array([read_label(cell) or "" for cell in column.cells])[column.places]
            totals[name] = int((meanings == "uncertain").sum()), int((meanings == "blank").sum())
    return totals
