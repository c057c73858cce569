"""Join the tables of MIMIC-CXR-JPG: labels by study, views by picture, and the official split."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from polyclinic.data.base.spec import MimicDatasetSpec
from polyclinic.data.base.vocabulary import PART_WORDS
from polyclinic.data.tables.csv import CsvTable, read_csv_table
from polyclinic.data.tables.search import PictureSearch

MIMIC_COLUMNS = frozenset(("subject_id", "study_id", "Atelectasis", "Cardiomegaly", "Support Devices"))
"""Columns of ``mimic-cxr-2.0.0-chexpert.csv`` and ``-negbio.csv``, in which a line is a study."""
_VIEWS = MimicDatasetSpec.model_fields["views"].default
_METADATA, _SPLIT = "mimic-cxr-2.0.0-metadata.csv", "mimic-cxr-2.0.0-split.csv"


def join_mimic_tables(
    table: Path, columns: CsvTable, search: PictureSearch
) -> tuple[list[list[str]], Mapping[str, str]]:
    """Return the frontal pictures of each study in a table of labels by study, and the part of each picture.

    The views are those of the metadata table beside the table of labels. Without that table, a study has all pictures
    of its folder. The parts are those of the split table; without it there are none.
    """
    studies = list(zip(columns["subject_id"].tolist(), columns["study_id"].tolist(), strict=True))
    parts_of = _read_parts(table)
    frontal = _read_frontal_pictures(table)
    paths, parts = list[list[str]](), dict[str, str]()
    for subject, study in studies:
        folder = f"p{subject[:2]}/p{subject}/s{study}"
        files = search.list_pictures_of_folder(folder)
        if frontal is not None:
            files = [file for file in files if Path(file).stem in frontal[study]]
        paths.append(files)
        for file in files:
            if (part := parts_of.get(Path(file).stem)) is not None:
                parts[file] = part
    complete = all(file in parts for of_study in paths for file in of_study)
    return paths, parts if complete else {}


def _find_beside(table: Path, name: str) -> Path | None:
    files = [table.parent / name, table.parent / f"{name}.gz"]
    return next((file for file in files if file.is_file()), None)


def _read_frontal_pictures(table: Path) -> Mapping[str, set[str]] | None:
    """Return the names of the frontal pictures of each study; None without a metadata table."""
    file = _find_beside(table, _METADATA)
    if file is None:
        return None
    columns = read_csv_table(file, "labels")
    pictures = defaultdict[str, set[str]](set)
    rows = zip(
        columns["study_id"].tolist(), columns["dicom_id"].tolist(), columns["ViewPosition"].tolist(), strict=True
    )
    for study, picture, view in rows:
        if view in _VIEWS:
            pictures[study].add(picture)
    return pictures


def _read_parts(table: Path) -> Mapping[str, str]:
    """Return the part of each picture by its name; empty without a split table."""
    file = _find_beside(table, _SPLIT)
    if file is None:
        return {}
    columns = read_csv_table(file, "labels")
    rows = zip(columns["dicom_id"].tolist(), columns["split"].tolist(), strict=True)
    return {picture: PART_WORDS.get(part.casefold(), "") for picture, part in rows}
