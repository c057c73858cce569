"""The official tables of NIH ChestX-ray14, CheXpert and MIMIC-CXR (CXR-LT labels), and the names of known classes.

Splits are made over all rows of a table before rows without a file are left out, so that a patient stands on the same
side no matter which part of the data set a site holds. Class names of public npz files that hold none are those of
MedMNIST 2D (Yang et al., 2023), MNIST and CIFAR-10, in label order.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.base.spec import ChexpertSpec, MimicSpec, NihSpec, PictureSpec
from common.data.base.splits import Names
from common.data.tables.csv import Columns, finding_matrix, label_matrix, read_columns
from common.data.tables.labels import (
    LabelTable,
    part_faults,
    split_by_patient,
    with_files_only,
    with_validation,
)
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.system.files import missing_folder
from common.system.plain_text import counted


def unknown_faults(where: str, names: Sequence[str], class_names: Sequence[str]) -> list[Fault]:
    return [
        Fault(
            f"{where}[{place}]",
            f'"{name}" is not a class of the data, whose classes are {quoted(class_names)}.',
            did_you_mean(name, class_names),
        )
        for place, name in enumerate(names)
        if name not in class_names
    ]


def repeated_faults(where: str, names: Sequence[str]) -> list[Fault]:
    twice = sorted({name for name in names if names.count(name) > 1})
    return [Fault(where, f"{quoted(twice)} stands there more than once.")] if twice else []


_ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
_CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    "chestmnist": (
        "Atelectasis",
        "Cardiomegaly",
        "Pleural Effusion",
        "Infiltration",
        "Mass",
        "Nodule",
        "Pneumonia",
        "Pneumothorax",
        "Consolidation",
        "Edema",
        "Emphysema",
        "Fibrosis",
        "Pleural Thickening",
        "Hernia",
    ),
    "dermamnist": (
        "actinic keratoses and intraepithelial carcinoma",
        "basal cell carcinoma",
        "benign keratosis-like lesions",
        "dermatofibroma",
        "melanoma",
        "melanocytic nevi",
        "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("grade 0", "grade 1", "grade 2", "grade 3", "grade 4"),
    "breastmnist": ("malignant", "normal or benign"),
    "bloodmnist": (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocytes",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ),
    "tissuemnist": (
        "collecting duct, connecting tubule",
        "distal convoluted tubule",
        "glomerular endothelial cells",
        "interstitial endothelial cells",
        "leukocytes",
        "podocytes",
        "proximal tubule segments",
        "thick ascending limb",
    ),
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
    "mnist": tuple("0123456789"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}


def known_classes(stem: str) -> tuple[str, ...]:
    """Return the class names of a file by its stem (``octmnist``, ``octmnist_64``, ``cifar10_jpeg``), or none."""
    return _CLASSES.get(re.sub(r"(_\d+|_jpeg)$", "", stem.lower()), ())


NIH_CLASSES = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Hernia",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pleural Effusion",
    "Pleural Thickening",
    "Pneumonia",
    "Pneumothorax",
)
CHEXPERT_CLASSES = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Enlarged Cardiomediastinum",
    "Fracture",
    "Lung Lesion",
    "Lung Opacity",
    "Pleural Effusion",
    "Pleural Other",
    "Pneumonia",
    "Pneumothorax",
    "Support Devices",
)
MIMIC_CLASSES = tuple(sorted({*NIH_CLASSES, *CHEXPERT_CLASSES}))
_NIH_OWN_NAME = {"Pleural Effusion": "Effusion", "Pleural Thickening": "Pleural_Thickening"}


def open_nih(spec: NihSpec, base: Path) -> LabelTable:
    """Read NIH's ``Data_Entry`` table; "No Finding" is no class but the absence of all.

    Raises:
        BadInput: With all faults.
    """
    columns = _columns(spec, base, ("Image Index", "Finding Labels", "Patient ID", "View Position"))
    own_names = [_NIH_OWN_NAME.get(name, name) for name in NIH_CLASSES]
    folder = base / spec.images
    paths = {name: Path(parent, name) for parent, _, names in os.walk(folder) for name in names}
    names = columns["Image Index"]
    table = _table(
        files=tuple(paths.get(name) or folder / name for name in names),
        labels=finding_matrix(columns["Finding Labels"], "|", own_names),
        class_names=NIH_CLASSES,
        patients=columns["Patient ID"],
    )
    table = _nih_parts(spec, base, table, names)
    views = columns["View Position"]
    return with_files_only(table if spec.view is None else table.rows(np.flatnonzero(views == spec.view)), spec)


def _nih_parts(spec: NihSpec, base: Path, table: LabelTable, names: Names) -> LabelTable:
    if spec.train_val_list is None or spec.test_list is None:
        return split_by_patient(table, spec.split_seed)
    lists = {"data.train_val_list": base / spec.train_val_list, "data.test_list": base / spec.test_list}
    stop_on([Fault(where, f"there is no file {path}.") for where, path in lists.items() if not path.is_file()])
    train, test = (np.isin(names, path.read_text(encoding="utf-8").split()) for path in lists.values())
    neither = names[~train & ~test]
    if len(neither):
        problem = f"{counted(len(neither), 'image')} of {spec.labels} in neither list: {quoted(neither, 5)}."
        raise BadInput([Fault("data.train_val_list", problem, "Give the lists that belong to the table.")])
    parted = replace(table, parts=np.where(test, "test", "train"))
    stop_on(part_faults("data.test_list", parted))
    return with_validation(parted, spec.validation_fraction, spec.split_seed)


def open_chexpert(spec: ChexpertSpec, base: Path) -> LabelTable:
    """Read CheXpert's ``train.csv``: frontal images, the patient from the path.

    Raises:
        BadInput: With all faults.
    """
    columns = _columns(spec, base, ("Path", "Frontal/Lateral", *CHEXPERT_CLASSES))
    columns = _rows(columns, columns["Frontal/Lateral"] == "Frontal", 'have "Frontal" in column "Frontal/Lateral"')
    table = _table(
        files=tuple(_chexpert_file(base / spec.images, path) for path in columns["Path"]),
        labels=label_matrix(columns, CHEXPERT_CLASSES, uncertain=spec.uncertain, blank=spec.blank, where="data.labels"),
        class_names=CHEXPERT_CLASSES,
        patients=_chexpert_patients(columns["Path"]),
    )
    return with_files_only(split_by_patient(table, spec.split_seed), spec)


def _chexpert_file(folder: Path, path: str) -> Path:
    """``CheXpert-v1.0-small/train/...`` under ``folder``, or under ``folder`` without its first part."""
    full = folder / path
    return full if full.parent.is_dir() else folder.joinpath(*Path(path).parts[1:])


def _chexpert_patients(paths: Names) -> Names:
    """``.../patient00042/study1/view1_frontal.jpg`` is patient 42.

    Raises:
        BadInput: If a path has no such part.
    """
    folders = [next((part for part in path.split("/") if part.startswith("patient")), "") for path in paths]
    nameless = [path for path, folder in zip(paths, folders, strict=True) if not folder[len("patient") :].isdecimal()]
    if nameless:
        problem = f'{len(nameless)} paths have no part such as "patient00042": {quoted(nameless, 5)}.'
        raise BadInput([Fault("data.labels", problem)])
    return np.array([str(int(folder[len("patient") :])) for folder in folders])


def open_mimic(spec: MimicSpec, base: Path) -> LabelTable:
    """Read a CXR-LT table: frontal views, files by ``fpath`` or by MIMIC-CXR-JPG's own layout.

    Raises:
        BadInput: With all faults.
    """
    classes = spec.classes or MIMIC_CLASSES
    columns = _columns(spec, base, ("dicom_id", "subject_id", "study_id", "ViewPosition", *classes))
    frontal = np.isin(columns["ViewPosition"], spec.views)
    columns = _rows(columns, frontal, f"have one of the views {quoted(spec.views)}")
    if "fpath" in columns:
        paths = [path if path.startswith("files/") else f"files/{path}" for path in columns["fpath"]]
    else:
        triples = zip(columns["subject_id"], columns["study_id"], columns["dicom_id"], strict=True)
        paths = [f"files/p{subject[:2]}/p{subject}/s{study}/{dicom}.jpg" for subject, study, dicom in triples]
    table = _table(
        files=tuple(base / spec.images / path for path in paths),
        labels=label_matrix(columns, classes, uncertain=spec.uncertain, blank=spec.blank, where="data.labels"),
        class_names=classes,
        patients=columns["subject_id"],
    )
    parted = split_by_patient(table, spec.split_seed) if spec.split == "patients" else table
    return with_files_only(parted, spec)


def _columns(spec: PictureSpec, base: Path, wanted: tuple[str, ...]) -> Columns:
    """Read the table and check the folder and the columns at once."""
    faults = missing_folder("data.images", base / spec.images)
    try:
        columns = read_columns(base / spec.labels, "data.labels", spec.largest_mb)
    except BadInput as bad:
        raise BadInput([*faults, *bad.faults]) from bad
    table = Path(spec.labels).name
    lacking = [
        Fault(
            "data.labels",
            f'{table} has no column "{name}"; its columns are {quoted(columns)}.',
            did_you_mean(name, columns),
        )
        for name in wanted
        if name not in columns
    ]
    stop_on(faults + lacking)
    return columns


def _rows(columns: Columns, keep: NDArray[np.bool_], what: str) -> Columns:
    if not keep.any():
        raise BadInput([Fault("data.labels", f"none of the {len(keep)} rows {what}.")])
    return {name: column[keep] for name, column in columns.items()}


def _table(
    files: tuple[Path, ...], labels: NDArray[np.float32], class_names: tuple[str, ...], patients: Names
) -> LabelTable:
    """No source is known, and everything is "test" until split."""
    count = len(files)
    return LabelTable(files, labels, class_names, patients, np.full(count, ""), np.full(count, "test"))
