"""For ``flwr-sim init``: detect the hospitals of a label table, their annotated classes, and synonyms of classes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, quote_names
from polyclinic.common.system.plain_text import format_as_json_text, format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import find_placeholder_patients
from polyclinic.data.base.names import make_class_spelling_key, make_name_similarity_key
from polyclinic.data.tables.csv import CsvTable
from polyclinic.data.tables.judgement import is_metadata_column_name, judge_column_content, split_diagnosis_code
from polyclinic.data.tables.labels import LabelTable, convert_hospital_to_site_name
from polyclinic.data.tables.roles import (
    ColumnRoles,
    describe_non_label_cells,
    find_class_synonyms,
    rank_name_similarity,
)

MOST_HOSPITALS, MOST_COLUMNS, MOST_COMPARED = 30, 10, 300
"""Lines and columns of the table for the terminal; hospitals whose names are compared with one another."""


@dataclass(frozen=True)
class HospitalsInTable:
    """The hospitals of a label table, sorted by name.

    Attributes:
        column: Name of the column that names the hospital.
        by_label: True if the table has label columns: a hospital annotates a class if a cell is not blank. False if the
            table has a column of findings: a hospital annotates the classes that it names, or all if it names none.
        annotated: ``(hospitals, classes)``, whether the hospital annotates the class.
        positives: ``(hospitals, classes)``, number of images that show the class.
        labelled: ``(hospitals, classes)``, number of images with a label of the class.
        images: ``(hospitals,)``, number of images.
        patients: ``(hospitals,)``, number of patients; None if patients are unknown.
        trains: ``(hospitals,)``, whether the hospital has training images.
        shared_patients: Number of patients with images in more than one hospital.
    """

    column: str
    by_label: bool
    names: Sequence[str]
    class_names: Sequence[str]
    annotated: NDArray[np.bool_]
    positives: NDArray[np.intp]
    labelled: NDArray[np.intp]
    images: NDArray[np.intp]
    patients: NDArray[np.intp] | None
    trains: NDArray[np.bool_]
    shared_patients: int

    def find_unlabelled_hospital_faults(
        self, columns: CsvTable, roles: ColumnRoles, findings: Sequence[str]
    ) -> list[Fault]:
        """Return a fault for each hospital that has training images but no readable label.

        The message names columns with cells that the hospital may have meant as labels.

        Args:
            findings: Columns that the user named as labels; if there are any, the message names no others.
        """
        faults, source = [], columns.get_column(self.column)
        for name, row, trains in zip(self.names, self.annotated, self.trains, strict=True):
            if row.any() or not trains:
                continue
            places = [place for place, cell in enumerate(source.cells) if convert_hospital_to_site_name(cell) == name]
            own = columns.select_rows(np.isin(source.places, places))
            others = [other for other, of in roles.unused.items() if of.may_be_labels]
            judged = {other: judge_column_content(own.get_column(other)) for other in others}
            meant = {other: of for other, of in judged.items() if of.foreign and not is_metadata_column_name(other)}
            problem = f'"{name}" of column {self.column} has no label that can be read.'
            remedy = "Write its labels in the columns of the others: 1, 0, -1, or nothing where it does not look."
            if findings:
                problem += f" Its cells of {quote_names(findings, MOST_COLUMNS)} are blank"
                problem += f", or {quote_names(roles.not_assessed)}: not assessed." if roles.not_assessed else "."
                remedy = 'Take its lines out of the table, or add --source-column "" for sites that are made up.'
            elif meant:
                problem += f" Its cells are no labels in {describe_non_label_cells(own, meant)}."
                remedy = "Write 1 (shows it), 0 (does not), -1 (doubtful) or nothing (nobody looked) in these cells."
            faults.append(Fault("--source-column", problem, remedy))
        return faults

    def format_partition_lists(self) -> str:
        """Return the lines of ``[partition.lists]`` in the experiment file."""
        return "\n".join(
            f"{format_as_json_text(name)} = "
            f"{format_as_json_text([label for label, has in zip(self.class_names, row, strict=True) if has])}"
            for name, row in zip(self.names, self.annotated, strict=True)
            if row.any()
        )

    def describe_hospitals(self) -> list[str]:
        """Return lines for the user: classes by hospital, and peculiarities such as shared patients."""
        label = "images that show it / images with a label" if self.by_label else "images that show it"
        lines = [f"hospitals: column {self.column}, {len(self.names)} of them. Of each class: {label}; - where"]
        lines[0] += " all cells are blank:" if self.by_label else " a hospital never names it:"
        rows = [["", *self.class_names, "images", *(["patients"] if self.patients is not None else [])]]
        for place in range(min(len(self.names), MOST_HOSPITALS)):
            cells = [
                "-" if not has else f"{positive}/{labelled}" if self.by_label else f"{positive}"
                for has, positive, labelled in zip(
                    self.annotated[place], self.positives[place], self.labelled[place], strict=True
                )
            ]
            patients = [] if self.patients is None else [str(self.patients[place])]
            rows.append([self.names[place], *cells, str(self.images[place]), *patients])
        if len(rows[0]) > MOST_COLUMNS and len(rows) <= MOST_COLUMNS:
            rows = [list(column) for column in zip(*rows, strict=True)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            right = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append(f"    {name.ljust(widths[0])}  {right}")
        if len(self.names) > MOST_HOSPITALS:
            lines.append(f"    and {len(self.names) - MOST_HOSPITALS} more.")
        if not self.by_label and not self.annotated.all():
            lines += [
                "    A class that a hospital never names is taken for one that it does not look for: unknown in all of",
                "    its images, also those of the test. If it does look for it, add it in [partition.lists].",
            ]
        only = (self.positives == self.labelled).all(axis=1) & self.annotated.any(axis=1) & self.by_label
        if only.any() and not only.all():
            names = ", ".join(np.array(self.names)[only].tolist())
            lines += [
                f"    only 1 and blank, no 0: {names}. If blank says absent there, write 0: images of a hospital that",
                "    never says absent teach that every image shows the class.",
            ]
        never = self.annotated & (self.positives == 0) & self.positives.any(axis=0) & self.by_label
        if never.any():
            pairs = [f"{self.names[row]} {self.class_names[column]}" for row, column in np.argwhere(never).tolist()]
            lines += [
                f"    only 0 there, though others have 1: {list_first_and_count_rest(pairs, MOST_COLUMNS)}.",
                "    Some programs write 0 where nobody looked: if so, remove the class from the hospital's list in",
                "    [partition.lists].",
            ]
        alike = [
            f'"{first}" and "{second}"'
            for first, second in combinations(self.names[:MOST_COMPARED], 2)
            if _may_be_same_hospital(first, second)
        ]
        if alike:
            lines += [
                f"    one hospital or two? {'; '.join(alike[:MOST_COLUMNS])}.",
                "    Each name is a site of its own: if two mean one hospital, write them in one way in the table.",
            ]
        if idle := [name for name, trains in zip(self.names, self.trains, strict=True) if not trains]:
            lines.append(f"    Without training images, and therefore tested, but no site: {', '.join(idle)}.")
        if self.shared_patients:
            shared = format_count_with_noun(self.shared_patients, "patient has images", "patients have images")
            lines.append(
                f"    {shared} of several hospitals. Each counts as one person, and stands on one side of the split."
            )
            lines.append("    If every hospital gives numbers of its own, write the hospital in front of them.")
        return lines


def _may_be_same_hospital(name: str, other: str) -> bool:
    """Return True if two hospital names are similar, or if one has all words of the other, possibly abbreviated.

    For example, ``"University Hospital Ulm"`` has all words of ``"Univ. Ulm"``. Numbers in such names must be equal.
    """
    short, long = sorted((make_name_similarity_key(name).split(), make_name_similarity_key(other).split()), key=len)
    is_within = all(any(word.startswith(part) or part.startswith(word) for word in long) for part in short)
    is_same_number = re.findall(r"\d+", name) == re.findall(r"\d+", other)
    return (is_within and is_same_number) or rank_name_similarity(name, other) is not None


def detect_hospitals_in_table(roles: ColumnRoles, table: LabelTable) -> HospitalsInTable | None:
    """Detect the hospitals of a table; return None if no column names hospitals."""
    if roles.source is None:
        return None
    names, places = np.unique(table.sources, return_inverse=True)
    places, count = places.reshape(-1), len(names)
    shows, has_label = table.labels == 1, ~np.isnan(table.labels)
    positives, labelled = (  # number of images, (hospitals, classes)
        np.stack([np.bincount(places[column], minlength=count) for column in of_class.T], axis=1)
        for of_class in (shows, has_label)
    )
    if roles.finding is None:
        annotated = labelled > 0
    else:  # a hospital whose images are all normal has looked for every class
        annotated = (positives > 0) | ((positives.sum(axis=1) == 0)[:, None] & (labelled > 0))
    people, persons = np.unique(table.patients, return_inverse=True)
    pairs = np.unique(persons.reshape(-1) * count + places)  # each patient at each hospital
    is_named = not find_placeholder_patients(people).any()
    return HospitalsInTable(
        column=roles.source,
        by_label=roles.finding is None,
        names=names.tolist(),
        class_names=table.class_names,
        annotated=annotated,
        positives=positives,
        labelled=labelled,
        images=np.bincount(places),
        patients=np.bincount(pairs % count) if is_named else None,
        trains=np.bincount(places[table.parts == "train"], minlength=count) > 0,
        shared_patients=int((np.bincount(pairs // count) > 1).sum()) if is_named else 0,
    )


def propose_class_synonyms(roles: ColumnRoles, table: LabelTable, hospitals: HospitalsInTable | None) -> dict[str, str]:
    """Return class name -> name that may replace it, because both may mean the same class.

    The replacement is the more frequent name; if that name has several spellings, it is the alphabetically first of
    them, as in the error message of a run. A diagnosis code that ends in G (confirmed) is replaced by the code without
    this G.
    """
    shows = (table.labels == 1).astype(np.float32)
    by_row = (~np.isnan(table.labels)).astype(np.float32) if roles.finding is None else shows
    counts = dict(zip(table.class_names, shows.sum(axis=0).astype(int).tolist(), strict=True))
    together = by_row.T @ by_row > 0
    one_place = together if roles.finding is None else np.ones_like(together)
    if hospitals is not None:
        used = hospitals.annotated.astype(np.float32)
        one_place = used.T @ used > 0
    synonyms = find_class_synonyms(counts, together, one_place)
    for usual in sorted(set(synonyms.values())):
        own = [name for name, other in synonyms.items() if other == usual]
        first = min(name for name in (usual, *own) if make_class_spelling_key(name) == make_class_spelling_key(usual))
        synonyms |= dict.fromkeys((usual, *own), first)
        del synonyms[first]
    codes = {code: name for name in table.class_names if (code := split_diagnosis_code(name))}
    for (number, certainty), name in codes.items():
        if certainty == "g" and (bare := codes.get((number, ""))):  # G means: confirmed
            synonyms[name] = synonyms.get(bare, bare)
    return synonyms


def has_spelling_variants(synonyms: Mapping[str, str]) -> bool:
    """Return whether some names differ only in spelling, which a run refuses until a person decides."""
    return any(make_class_spelling_key(own) == make_class_spelling_key(name) for own, name in synonyms.items())
