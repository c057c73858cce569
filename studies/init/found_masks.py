"""For ``flwr-sim init``: find the mask columns of a table, and their files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.data.base.names import is_blank_cell
from polyclinic.data.tables.csv import CsvColumn, CsvTable
from polyclinic.data.tables.search import PictureSearch
from polyclinic.studies.init.masks import (
    MOST_MASKS_READ,
    MaskClasses,
    MaskColumn,
    describe_mask_columns,
    has_few_values,
    name_mask_classes,
    parse_named_values,
    survey_mask_column,
)
from polyclinic.studies.init.pictures import LOOKED_AT, name_series, spread_over_rows
from polyclinic.studies.init.questions import ColumnHints, Question

_LISTED = 3
MOST_LOST = 0.5
"""Fraction of cells that may name no file in a column of files."""


@dataclass(frozen=True)
class FoundMasks:
    """The mask files of a table.

    Attributes:
        columns: The mask columns.
        folder: The folder from which the paths in the cells start.
        classes: The classes of the masks, as far as they are known.
    """

    columns: tuple[MaskColumn, ...]
    folder: Path
    classes: MaskClasses


def find_masks(
    table: Path, columns: CsvTable, search: PictureSearch, hints: ColumnHints
) -> tuple[FoundMasks | None, list[Question]]:
    """Find the mask columns of a table, and return the questions about their values.

    If the user names finding columns and no mask columns, there are no masks.

    Raises:
        BadInput: If masks in columns that the user names do not exist, or are in several folders.
    """
    if hints.findings and not hints.masks:
        return None, []
    searches = [search, *([PictureSearch(table.parent, search.finder)] if hints.images else [])]
    candidates = hints.masks or tuple(name for name in columns if name != hints.image)
    located = {name: _locate_masks(columns.get_column(name), searches) for name in candidates}
    if hints.masks:
        raise_faults([_make_no_masks_fault(name, table) for name in hints.masks if located[name] is None])
    named = {name: found for name, found in located.items() if found is not None}
    rows = {name: _list_spread_rows(columns.get_column(name)) for name in named}
    if not hints.masks:
        few = [name for name in named if all(map(has_few_values, _take_files(columns, name, named[name], rows[name])))]
        named = {name: named[name] for name in few}
    image = hints.image or _find_image_column(columns, search, named)
    if not named or not image:
        return None, []
    pictures = _locate_images(columns.get_column(image), search)
    surveys = list[MaskColumn]()
    for name, folder in named.items():
        files = zip(rows[name], _take_files(columns, name, folder, rows[name]), strict=True)
        pairs = [(pictures[row], mask) for row, mask in files if row in pictures and mask.is_file()]
        survey = survey_mask_column(name, pairs)
        if survey is None and hints.masks:
            survey = MaskColumn(name)  # what is wrong with which mask, the reading of all of them says
        surveys += [survey] if survey is not None else []
    if not surveys:
        return None, []
    folders = {named[column.name] for column in surveys}
    if len(folders) > 1:
        problem = "lie in several folders, from which the cells start: "
        problem += f"{list_first_and_count_rest(sorted(map(str, folders)), _LISTED)}."
        raise BadInput([Fault("masks", problem, "Write the paths of all masks from one folder.")])
    classes, questions = name_mask_classes(surveys, parse_named_values(hints.mask_classes))
    return FoundMasks(tuple(surveys), folders.pop(), classes), questions


def describe_masks(masks: FoundMasks, names: Sequence[str], hints: ColumnHints, *, is_open: bool) -> dict[str, str]:
    """Return the rules by which mask columns and their classes were found."""
    how = "you named it" if len(names) == 1 else "you named them"
    rules = {"masks": f"{', '.join(names)}: {how}" if hints.masks else describe_mask_columns(names)}
    return rules if is_open else rules | {"classes": masks.classes.rule}


def _locate_masks(column: CsvColumn, searches: Sequence[PictureSearch]) -> Path | None:
    """Return the folder from which the cells of a column lead to files; None if half of them do not."""
    cells = [cell for cell in column.cells if not is_blank_cell(cell)]
    for search in searches:
        if cells and search.share_of_pictures(cells)[0] > MOST_LOST:
            located = search.locate_pictures(cells)
            if located.names_lead_there and any(located.paths):
                return located.folder
    return None


def _make_no_masks_fault(name: str, table: Path) -> Fault:
    problem = f"no file that it names is in the folder of {table.name}, or in --images."
    return Fault(f"--mask-column {name}", problem, "Write the paths of the masks from one of these folders.")


def _list_spread_rows(column: CsvColumn) -> list[int]:
    """Return some rows, spread over the table, in which a column is filled."""
    rows = np.flatnonzero(~column.find_blank_rows())
    return [int(rows[place]) for place in spread_over_rows(len(rows))][:: max(1, LOOKED_AT // MOST_MASKS_READ)]


def _take_files(columns: CsvTable, name: str, folder: Path, rows: Sequence[int]) -> list[Path]:
    column = columns.get_column(name)
    return [folder / column.cells[column.places[row]] for row in rows]


def _find_image_column(columns: CsvTable, search: PictureSearch, masks: Mapping[str, Path]) -> str:
    """Return the only column, besides mask columns, that names files or folders of slices; otherwise ``""``."""
    others = [name for name in columns if name not in masks]
    images = [name for name in others if _locate_images(columns.get_column(name), search)]
    return images[0] if len(images) == 1 else ""


def _locate_images(column: CsvColumn, search: PictureSearch) -> dict[int, Path]:
    """Return row -> the picture (or folder of slices) in a column's cell; empty if most cells name none."""
    located = search.locate_pictures([column.cells[place] for place in column.places])
    places = dict[int, Path]()
    for row, path in enumerate(located.paths):
        cell = column.cells[column.places[row]]
        if path is not None:
            places[row] = located.folder / path
        elif not is_blank_cell(cell) and name_series(search.root, cell):
            places[row] = search.root / cell
    return places if len(places) > MOST_LOST * len(column.places) else {}
