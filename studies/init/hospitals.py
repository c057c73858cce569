"""For ``flwr-sim init``: the hospitals of a label table, their annotated classes, and names of one spelling."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, quote_names
from polyclinic.common.system.plain_text import format_as_json_text, format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import find_placeholder_patients
from polyclinic.data.base.names import make_class_spelling_key
from polyclinic.data.tables.columns import describe_some_cells
from polyclinic.data.tables.csv import CsvTable
from polyclinic.data.tables.labels import LabelTable, convert_hospital_to_site_name
from polyclinic.studies.init.found_masks import FoundMasks
from polyclinic.studies.init.roles import ColumnRoles

MOST_SIMULATED = 3
"""Simulated hospitals where no column names hospitals."""
MOST_HOSPITALS, MOST_COLUMNS = 30, 10
"""Lines and columns of the table for the terminal."""
WIDEST = 76
"""Characters of a row up to which the hospitals are the rows; of a wider table, the narrower direction is shown."""


def choose_simulated_hospitals(class_count: int) -> tuple[int, int]:
    """Return the number of hospitals to simulate, and the number of classes that all of them annotate."""
    sites = min(MOST_SIMULATED, class_count)
    return sites, int(class_count > sites)


def describe_simulated_hospitals(class_count: int) -> list[str]:
    """Return lines for the user on the simulated hospitals, and on the labels that they hide."""
    sites, shared = choose_simulated_hospitals(class_count)
    simulated = format_count_with_noun(sites, "simulated hospital")
    lines = [f"hospitals: no column names them; patients are divided over {simulated}."]
    if sites > 1:
        classes = "Each class" if not shared else "All annotate one class; each other class"
        lines.append(
            f"    {classes} is annotated by one of them alone, and the others hide its labels: shared = {shared} in "
            "[partition] says how many classes all of them annotate."
        )
    return lines


@dataclass(frozen=True)
class HospitalsInTable:
    """The hospitals of a label table, sorted by name.

    Attributes:
        column: Name of the column that names the hospital.
        by_label: True if the table has label columns, or a column of masks for each class: a hospital annotates a class
            if a cell is not blank. False if the table has a column of findings, or of label maps: a hospital annotates
            the classes that it names, or that its masks show; all if it names none.
        of_masks: True if masks say where the classes are.
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
    of_masks: bool = False

    @property
    def evidence(self) -> str:
        """Why a hospital counts as annotating a class, for the experiment file."""
        if self.by_label:
            return "those of which not all of its cells are blank"
        if self.of_masks:
            return "those that its masks show"
        return "those that its findings name; all where they name none"

    def find_unlabelled_hospital_faults(self, columns: CsvTable, roles: ColumnRoles) -> list[Fault]:
        """Return a fault for each hospital that has training images but no label.

        The message shows its cells in the columns without a role, which it may have meant as labels.
        """
        faults, source = [], columns.get_column(self.column)
        labels = roles.label_columns or roles.mask_columns or ([roles.finding] if roles.finding else [])
        for name, row, trains in zip(self.names, self.annotated, self.trains, strict=True):
            if row.any() or not trains:
                continue
            places = [place for place, cell in enumerate(source.cells) if convert_hospital_to_site_name(cell) == name]
            own = columns.select_rows(np.isin(source.places, places))
            others = [
                f'"{other}" ({describe_some_cells(own.get_column(other))})' for other in roles.unused if other in own
            ]
            problem = (
                f'"{name}" of column {self.column} has no label: its cells of {quote_names(labels, MOST_COLUMNS)} '
            )
            problem += "are blank."
            if others:
                problem += f" Columns that are not used: {list_first_and_count_rest(others, MOST_COLUMNS)}."
            remedy = "Write its labels in the columns of the others, or take its lines out of the table, or add "
            remedy += '--source-column "" for simulated hospitals.'
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
        shows = "masks that show it" if self.of_masks else "images that show it"
        labelled = "masks" if self.of_masks else "images with a label"
        counted = f"{shows} / {labelled}" if self.by_label else shows
        lines = [f"hospitals: column {self.column}, {len(self.names)} of them. Of each class: {counted}; - where"]
        never = " no mask of the hospital shows it:" if self.of_masks else " a hospital never names it:"
        lines[0] += " all cells are blank:" if self.by_label else never
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
        turned = [list(column) for column in zip(*rows, strict=True)]
        if _measure_width(rows) > WIDEST and _measure_width(turned) < _measure_width(rows):
            rows = turned
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            right = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append(f"    {name.ljust(widths[0])}  {right}")
        if len(self.names) > MOST_HOSPITALS:
            lines.append(f"    and {len(self.names) - MOST_HOSPITALS} more.")
        if len(self.names) > 1 and self.annotated.all():
            lines.append("    All hospitals annotate all classes: surgical and vanilla train the same model here.")
        if not self.by_label and not self.annotated.all():
            how = "that no mask of a hospital shows" if self.of_masks else "that a hospital never names"
            looks = "outline" if self.of_masks else "look for"
            lines.append(
                f"    A class {how} is taken for one that it does not {looks}: unknown in all of its images, also "
                f"those of the test. If it does {looks} it, add it in [partition.lists]."
            )
        only = (self.positives == self.labelled).all(axis=1) & self.annotated.any(axis=1) & self.by_label
        # The pixels around an area teach a segmentation where it is not.
        if only.any() and not only.all() and not self.of_masks:
            names = ", ".join(np.array(self.names)[only].tolist())
            lines.append(
                f"    Labels of {names} are all 1 or blank, and never 0. If a blank cell says absent there, write 0: "
                "images of a hospital that never says absent teach that every image shows the class."
            )
        never_shown = self.annotated & (self.positives == 0) & self.positives.any(axis=0) & self.by_label
        if never_shown.any():
            places = np.argwhere(never_shown).tolist()
            pairs = [f"{self.names[row]} {self.class_names[column]}" for row, column in places]
            listed = list_first_and_count_rest(pairs, MOST_COLUMNS)
            there = "all labels are 0, and some of other hospitals are 1"
            if self.of_masks:
                there = "all masks are empty, and some of other hospitals are not"
            lines += [
                f"    Of these {there}: {listed}.",
                "    Some programs write that where nobody looked: if so, remove the class from the hospital's list in "
                "[partition.lists].",
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


def _measure_width(rows: Sequence[Sequence[str]]) -> int:
    """Return the number of characters of a row of the table in the terminal."""
    return sum(2 + max(map(len, column)) for column in zip(*rows, strict=True))


def detect_hospitals_in_table(
    roles: ColumnRoles, table: LabelTable, masks: FoundMasks | None
) -> HospitalsInTable | None:
    """Detect the hospitals of a table; return None if no column names hospitals.

    Args:
        masks: The masks, whose files are the labels of ``table``; None for a table of labels.
    """
    if roles.source is None:
        return None
    names, places = np.unique(table.sources, return_inverse=True)
    places, count = places.reshape(-1), len(names)
    shows, has_label = table.labels == 1, ~np.isnan(table.labels)
    positives, labelled = (  # number of images, (hospitals, classes)
        np.stack([np.bincount(places[column], minlength=count) for column in of_class.T], axis=1)
        for of_class in (shows, has_label)
    )
    by_label = roles.finding is None and (masks is None or not masks.classes.are_exclusive)
    if by_label:
        annotated = labelled > 0
    else:  # a hospital whose images are all normal has looked for every class, and a class that none has, for all
        is_shown = positives > 0
        shows_none = ~is_shown.any(axis=1, keepdims=True) | ~is_shown.any(axis=0, keepdims=True)
        annotated = is_shown | (shows_none & (labelled > 0))
    people, persons = np.unique(table.patients, return_inverse=True)
    pairs = np.unique(persons.reshape(-1) * count + places)  # each patient at each hospital
    is_named = not find_placeholder_patients(people).any()
    return HospitalsInTable(
        column=roles.source,
        by_label=by_label,
        of_masks=masks is not None,
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


def propose_spelling_synonyms(class_names: Sequence[str]) -> dict[str, str]:
    """Return class name -> alphabetically first name of the same letters and digits; a run refuses to have both."""
    groups = dict[str, list[str]]()
    for name in sorted(class_names):
        groups.setdefault(make_class_spelling_key(name), []).append(name)
    return {name: names[0] for names in groups.values() for name in names[1:]}
