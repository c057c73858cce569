"""CheXpert, MIMIC-CXR and NIH's official lists, on small files of the same layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from polyclinic.data.base.spec import ChexpertDatasetSpec, DataSpec, MimicDatasetSpec, NihDatasetSpec
from polyclinic.data.load import find_dataset_faults, load_dataset, open_label_table
from polyclinic.data.tables.class_names import CHEXPERT_CLASSES, MIMIC_CLASSES, NIH_CLASSES

WritePng = Callable[[str], None]
ADAPTER: TypeAdapter[DataSpec] = TypeAdapter(DataSpec)


@pytest.fixture
def chexpert(tmp_path: Path, write_png: WritePng) -> Path:
    """Ten patients with a frontal and a lateral image each; Edema is 1.0, 0.0, -1.0 or blank in turn."""
    lines = [",".join(["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "No Finding", *CHEXPERT_CLASSES])]
    for patient in range(1, 11):
        for view in ("frontal", "lateral"):
            path = f"CheXpert-v1.0-small/train/patient{patient:05}/study1/view1_{view}.jpg"
            write_png(path)
            edema = ("1.0", "0.0", "-1.0", "")[patient % 4]
            labels = [edema if name == "Edema" else "" for name in CHEXPERT_CLASSES]
            lines.append(",".join([path, "Female", "68", view.capitalize(), "AP", "", *labels]))
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_chexpert_keeps_frontal_images_and_takes_uncertain_and_blank_as_negative(chexpert: Path) -> None:
    spec = ChexpertDatasetSpec(kind="chexpert", images=".", labels="train.csv", image_size=8)
    splits = load_dataset(spec, chexpert)
    assert [len(part) for part in splits.parts] == [6, 0, 4]  # 2 + 8 patients, rounded down
    assert splits.class_names == CHEXPERT_CLASSES
    patients = [*splits.train.patients, *splits.test.patients]
    edema = np.concatenate([splits.train.labels, splits.test.labels])[:, CHEXPERT_CLASSES.index("Edema")]
    assert sorted(patient for patient, label in zip(patients, edema, strict=True) if label == 1) == ["4", "8"]
    assert not np.isnan(edema).any()


def test_chexpert_may_be_given_as_its_own_folder_and_uncertain_as_unknown(chexpert: Path) -> None:
    settings = {"images": "CheXpert-v1.0-small", "labels": "train.csv", "uncertain": "unknown"}
    table = open_label_table(ChexpertDatasetSpec.model_validate({"kind": "chexpert", **settings}), chexpert)
    assert all(file.is_file() for file in table.files)
    unknown = np.isnan(table.labels).any(axis=1)
    assert sorted(table.patients[unknown].tolist()) == ["10", "2", "6"]


def test_a_chexpert_table_without_a_class_is_refused(chexpert: Path) -> None:
    text = (chexpert / "train.csv").read_text()
    (chexpert / "train.csv").write_text(text.replace("Pleural Other", "Pleural Others"))
    (fault,) = find_dataset_faults(ChexpertDatasetSpec(kind="chexpert", images=".", labels="train.csv"), chexpert)
    assert (fault.where, fault.remedy) == ("data.labels", 'Did you mean "Pleural Others"?')


@pytest.fixture
def mimic(tmp_path: Path, write_png: WritePng) -> Path:
    """Twelve images of six patients, one of them lateral, in MIMIC-CXR-JPG's folders."""
    lines = [",".join(["dicom_id", "subject_id", "study_id", "ViewPosition", *MIMIC_CLASSES, "Pneumoperitoneum"])]
    for index in range(12):
        subject, study, dicom = 10_000_032 + index // 2, 50_000_000 + index, f"02aa804e-{index:04}"
        write_png(f"files/p10/p{subject}/s{study}/{dicom}.jpg")
        view = "LATERAL" if index == 0 else ("AP", "PA")[index % 2]
        labels = ["1" if index % 3 == 0 else "0"] * (len(MIMIC_CLASSES) + 1)
        lines.append(",".join([dicom, str(subject), str(study), view, *labels]))
    (tmp_path / "cxr-lt.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def mimic_spec(**settings: Any) -> MimicDatasetSpec:
    common = {"kind": "mimic", "images": ".", "labels": "cxr-lt.csv", "image_size": 8}
    return MimicDatasetSpec.model_validate({**common, **settings})


def test_mimic_is_a_test_set_of_the_twenty_classes_by_default(mimic: Path) -> None:
    splits = load_dataset(mimic_spec(), mimic)
    assert [len(part) for part in splits.parts] == [0, 0, 11]
    assert len(splits.class_names) == 20


def test_mimic_may_be_split_by_patient_and_cut_to_some_classes(mimic: Path) -> None:
    splits = load_dataset(mimic_spec(split="patients", classes=["Edema", "Mass"], views=["PA"]), mimic)
    assert len(splits.train) == 3  # 2 patients with a positive, 4 without: int(1.4) + int(2.8)
    assert splits.class_names == ("Edema", "Mass")


def test_a_mimic_column_is_named_with_the_nearest(mimic: Path) -> None:
    (fault,) = find_dataset_faults(mimic_spec(classes=["Oedema"]), mimic)
    assert fault.remedy == 'Did you mean "Edema"?'


@pytest.fixture
def nih(tmp_path: Path, write_png: WritePng) -> Path:
    """Sixteen patients with one image each in two of NIH's folders; the last four are the official test part."""
    lines = ["Image Index,Finding Labels,Follow-up #,Patient ID,View Position"]
    for patient in range(1, 17):
        write_png(f"images_{patient % 2 + 1:03}/images/{patient:08}_000.png")
        finding = ("Effusion|Pleural_Thickening", "No Finding")[patient % 2]
        lines.append(f"{patient:08}_000.png,{finding},0,{patient},{('AP', 'PA', 'PA')[patient % 3]}")
    (tmp_path / "Data_Entry_2017.csv").write_text("\n".join(lines) + "\n")
    names = [line.split(",")[0] for line in lines[1:]]
    (tmp_path / "train_val_list.txt").write_text("\n".join(names[:12]))
    (tmp_path / "test_list.txt").write_text("\n".join(names[12:]))
    return tmp_path


def nih_spec(**settings: Any) -> NihDatasetSpec:
    return NihDatasetSpec.model_validate(
        {"kind": "nih", "images": ".", "labels": "Data_Entry_2017.csv", "image_size": 8, **settings}
    )


LISTS = {"train_val_list": "train_val_list.txt", "test_list": "test_list.txt"}


def test_nihs_own_lists_are_obeyed_and_validation_is_held_out(nih: Path) -> None:
    splits = load_dataset(nih_spec(**LISTS, validation_fraction=0.34), nih)
    assert [len(part) for part in splits.parts] == [8, 4, 4]  # 2 of 6 + 2 of 6 held out
    assert sorted(splits.test.patients.tolist()) == ["13", "14", "15", "16"]


def test_nihs_names_become_the_shared_ones(nih: Path) -> None:
    table = open_label_table(nih_spec(), nih)
    found = {NIH_CLASSES[place] for place in np.flatnonzero(table.labels.any(axis=0))}
    assert found == {"Pleural Effusion", "Pleural Thickening"}
    assert table.labels.sum() == 16  # 8 patients with both


def test_one_view_of_nih_is_kept_without_moving_patients_between_parts(nih: Path) -> None:
    every, frontal = open_label_table(nih_spec(), nih), open_label_table(nih_spec(view="PA"), nih)
    part_of = dict(zip(every.files, every.parts, strict=True))
    assert [int(name) for name in frontal.patients] == [patient for patient in range(1, 17) if patient % 3]
    assert [part_of[file] for file in frontal.files] == frontal.parts.tolist()


def test_different_files_of_one_name_are_refused_and_links_to_a_file_are_not(nih: Path, write_png: WritePng) -> None:
    (nih / "all").mkdir()
    (nih / "all" / "00000002_000.png").symlink_to(nih / "images_001/images/00000002_000.png")
    write_png("all/other.png")
    write_png("elsewhere/other.png")
    assert len(open_label_table(nih_spec(), nih).files) == 16
    write_png("all/00000003_000.png")
    (fault,) = find_dataset_faults(nih_spec(), nih)
    assert (fault.where, fault.problem.count("00000003_000.png")) == ("data.images", 2)


def test_an_image_in_neither_list_and_a_missing_list_are_faults(nih: Path) -> None:
    (nih / "test_list.txt").write_text("00000013_000.png\n00000014_000.png\n00000015_000.png\n")
    (fault,) = find_dataset_faults(nih_spec(**LISTS), nih)
    assert (fault.where, '"00000016_000.png"' in fault.problem) == ("data.train_val_list", True)
    (nih / "test_list.txt").unlink()
    assert [fault.where for fault in find_dataset_faults(nih_spec(**LISTS), nih)] == ["data.test_list"]


def test_a_data_set_is_read_by_its_kind() -> None:
    spec = ADAPTER.validate_python({"kind": "nih", "images": ".", "labels": "x.csv"})
    assert isinstance(spec, NihDatasetSpec)
    assert spec.missing_files == "ignore"
