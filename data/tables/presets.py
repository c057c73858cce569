"""Read the official label tables of NIH ChestX-ray14, CheXpert and MIMIC-CXR (CXR-LT labels).

The split uses all rows of a table, including rows whose image is missing. Therefore a patient is in the same part at
each site, even if the sites have different images of the data set.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.spec import ChexpertDatasetSpec, MimicDatasetSpec, NihDatasetSpec, PictureFolderSpec
from polyclinic.data.base.splits import StringArray, find_patient_name_faults
from polyclinic.data.tables.cells import FindingColumnRules, LabelColumnRules, parse_finding_column, parse_label_columns
from polyclinic.data.tables.class_names import CHEXPERT_CLASSES, MIMIC_CLASSES, NIH_CLASSES
from polyclinic.data.tables.csv import CsvTable
from polyclinic.data.tables.files import LazyPicturePaths, PictureFileFinder
from polyclinic.data.tables.labels import (
    LabelTable,
    drop_missing_files,
    find_patient_overlap_faults,
    hold_out_validation_patients,
    read_table_and_find_folder,
    split_label_table,
)

_NAME_IN_NIH_TABLE = {"Pleural Effusion": "Effusion", "Pleural Thickening": "Pleural_Thickening"}


def open_nih_table(spec: NihDatasetSpec, base: Path) -> LabelTable:
    """Read NIH's ``Data_Entry`` table; "No Finding" means that all classes are absent.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    required = ("Image Index", "Finding Labels", "Patient ID", "View Position")
    columns, folder = _read_checked_columns(spec, base, required)
    own_names = [_NAME_IN_NIH_TABLE.get(name, name) for name in NIH_CLASSES]
    names = columns["Image Index"]
    paths = _find_picture_paths(folder, frozenset(names.tolist()))
    labels, _ = parse_finding_column(
        columns.get_column("Finding Labels"), "Finding Labels", FindingColumnRules(own_names)
    )
    table = _make_unsplit_table(
        files=LazyPicturePaths.from_folder_and_names(folder, [paths.get(name, name) for name in names.tolist()]),
        labels=labels,
        class_names=NIH_CLASSES,
        patients=columns["Patient ID"],
        lines=columns.lines,
    )
    if spec.train_val_list is None or spec.test_list is None:
        table = split_label_table(table, spec.split_seed)
    else:
        lists = {"data.train_val_list": base / spec.train_val_list, "data.test_list": base / spec.test_list}
        raise_faults([Fault(where, f"there is no file {path}.") for where, path in lists.items() if not path.is_file()])
        train, test = (np.isin(names, path.read_text(encoding="utf-8").split()) for path in lists.values())
        neither = names[~train & ~test]
        if len(neither):
            count = format_count_with_noun(len(neither), "image")
            problem = f"{count} of {spec.labels} in neither list: {quote_names(neither, 5)}."
            raise BadInput([Fault("data.train_val_list", problem, "Give the lists that belong to the table.")])
        table = replace(table, parts=np.where(test, "test", "train"))
        raise_faults(find_patient_overlap_faults("data.test_list", table))
        table = hold_out_validation_patients(table, spec.validation_fraction, spec.split_seed)
    views = columns["View Position"]
    return drop_missing_files(
        table if spec.view is None else table.select_rows(np.flatnonzero(views == spec.view)), spec
    )


def _find_picture_paths(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Search all subfolders for files with these names, and return name -> path relative to ``folder``.

    Raises:
        BadInput: If a folder cannot be listed, or two different files have the same name.
    """
    listings = PictureFileFinder()
    paths = dict[str, str]()
    repeated = list[str]()
    for subfolder, name in listings.list_files_recursively(folder):
        if name in names:
            path = f"{subfolder}/{name}"
            first = paths.setdefault(name, path)
            if first != path and (folder / first).resolve() != (folder / path).resolve():
                repeated.append(f'"{first}" and "{path}"')
    faults = listings.find_unlistable_folder_faults()
    if repeated:
        problem = f"{format_count_with_noun(len(repeated), 'file')} with the name of another one: "
        problem += f"{list_first_and_count_rest(repeated, 5)}."
        faults.append(Fault("data.images", problem, "Remove one of each two, or name the folder that holds only one."))
    raise_faults(faults)
    return paths


def open_chexpert_table(spec: ChexpertDatasetSpec, base: Path) -> LabelTable:
    """Read CheXpert's ``train.csv``: only frontal images; the patient is taken from the path of the image.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    columns, folder = _read_checked_columns(spec, base, ("Path", "Frontal/Lateral", *CHEXPERT_CLASSES))
    columns = _select_table_rows(
        columns, columns["Frontal/Lateral"] == "Frontal", 'have "Frontal" in column "Frontal/Lateral"'
    )
    paths = columns["Path"].tolist()
    # The folder of images is CheXpert-v1.0* itself, or its parent folder.
    first_folders = {path.partition("/")[0] for path in paths} - {""}
    missing_folders = {first for first in first_folders if not (folder / first).is_dir()}
    relative = [path.partition("/")[2] if path.partition("/")[0] in missing_folders else path for path in paths]
    labels = parse_label_columns(columns, CHEXPERT_CLASSES, LabelColumnRules(spec.uncertain, spec.blank, "data.labels"))
    # The patient of .../patient00042/study1/view1_frontal.jpg is 42.
    patients = [next((part for part in path.split("/") if part.startswith("patient")), "") for path in paths]
    nameless = [path for path, name in zip(paths, patients, strict=True) if not name[len("patient") :].isdecimal()]
    if nameless:
        problem = f'{len(nameless)} paths have no part such as "patient00042": {quote_names(nameless, 5)}.'
        raise BadInput([Fault("data.labels", problem)])
    table = _make_unsplit_table(
        files=LazyPicturePaths.from_folder_and_names(folder, relative),
        labels=labels,
        class_names=CHEXPERT_CLASSES,
        patients=np.array([str(int(name[len("patient") :])) for name in patients]),
        lines=columns.lines,
    )
    return drop_missing_files(split_label_table(table, spec.split_seed), spec)


def open_mimic_table(spec: MimicDatasetSpec, base: Path) -> LabelTable:
    """Read a CXR-LT table: only frontal images; paths come from column ``fpath``, or have MIMIC-CXR-JPG's layout.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    classes = spec.classes or MIMIC_CLASSES
    required = ("dicom_id", "subject_id", "study_id", "ViewPosition", *classes)
    columns, folder = _read_checked_columns(spec, base, required)
    frontal = np.isin(columns["ViewPosition"], spec.views)
    columns = _select_table_rows(columns, frontal, f"have one of the views {quote_names(spec.views)}")
    if "fpath" in columns:
        paths = [path if path.startswith("files/") else f"files/{path}" for path in columns["fpath"]]
    else:
        triples = zip(columns["subject_id"], columns["study_id"], columns["dicom_id"], strict=True)
        paths = [f"files/p{subject[:2]}/p{subject}/s{study}/{dicom}.jpg" for subject, study, dicom in triples]
    table = _make_unsplit_table(
        files=LazyPicturePaths.from_folder_and_names(folder, paths),
        labels=parse_label_columns(columns, classes, LabelColumnRules(spec.uncertain, spec.blank, "data.labels")),
        class_names=classes,
        patients=columns["subject_id"],
        lines=columns.lines,
    )
    parted = split_label_table(table, spec.split_seed) if spec.split == "patients" else table
    return drop_missing_files(parted, spec)


def _read_checked_columns(spec: PictureFolderSpec, base: Path, required: tuple[str, ...]) -> tuple[CsvTable, Path]:
    """Read the table and locate the image folder.

    Args:
        base: The folder to which paths in ``spec`` are relative.
        required: The columns that the table must have.

    Raises:
        BadInput: With the faults of the table and of the folder.
    """
    columns, folder, faults = read_table_and_find_folder(spec, base)
    table = Path(spec.labels).name
    for name in [name for name in required if name not in columns]:
        problem = f'{table} has no column "{name}"; its columns are {quote_names(columns)}.'
        faults.append(Fault("data.labels", problem, suggest_nearest_name(name, columns)))
    raise_faults(faults)
    return columns, folder


def _select_table_rows(columns: CsvTable, index: NDArray[np.bool_], what: str) -> CsvTable:
    """Return the selected rows of a table.

    Args:
        index: ``(rows,)``, True for the rows to select.
        what: End of the error message "none of the 9 rows ...", such as "have one of the views PA".

    Raises:
        BadInput: If no row is selected.
    """
    if not index.any():
        raise BadInput([Fault("data.labels", f"none of the {len(index)} rows {what}.")])
    return columns.select_rows(index)


def _make_unsplit_table(
    files: LazyPicturePaths,
    labels: NDArray[np.float32],
    class_names: tuple[str, ...],
    patients: StringArray,
    lines: NDArray[np.int32],
) -> LabelTable:
    """Create a table without centres, with all images in the test part until it is split.

    Raises:
        BadInput: If a patient's name is unusable, or two similar names may mean one patient.
    """
    count = len(files)
    raise_faults(find_patient_name_faults("data.labels", patients))
    return LabelTable(
        files=files,
        labels=labels,
        class_names=class_names,
        patients=patients,
        sources=np.full(count, ""),
        parts=np.full(count, "test"),
        lines=lines,
    )
