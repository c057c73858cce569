import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from common.data.base.spec import FolderSpec
from common.data.load import faults, load
from common.errors import BadInput

WritePng = Callable[[str], None]


@pytest.fixture
def folder(tmp_path: Path, write_png: WritePng) -> Path:
    """Forty images of twenty patients, labels "Mass" and "Edema" with some uncertain and blank."""
    lines = ["image,patient,Mass,Edema,finding,part"]
    for index in range(40):
        write_png(f"pictures/{index:02}.png")
        mass, edema = ("1", "0", "-1", "")[index % 4], ("0", "1")[index % 2]
        part = ("train", "train", "train", "test")[index // 10]
        lines.append(f"{index:02}.png,{index // 2},{mass},{edema},{('Mass|Edema', 'No Finding')[index % 2]},{part}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def spec(**settings: Any) -> FolderSpec:
    common = {"kind": "folder", "images": "pictures", "labels": "labels.csv", "image_column": "image", "image_size": 6}
    labels = {} if "finding_column" in settings else {"label_columns": ["Mass", "Edema"]}
    return FolderSpec.model_validate({**common, **labels, "patient_column": "patient", **settings})


def messages(base: Path, **settings: Any) -> list[str]:
    return [str(fault) for fault in faults(spec(**settings), base)]


def change(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def test_the_patients_are_split_without_a_split_column(folder: Path) -> None:
    splits = load(spec(), folder)
    # Every second image has Edema, so all 20 patients are abnormal: 14, 2 and 4 of them, two images each.
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [28, 4, 8]


def test_pictures_are_padded_with_black_unless_stretched(folder: Path) -> None:
    padded, stretched = load(spec(), folder).train.images, load(spec(resize="stretch"), folder).train.images
    assert padded[0][3].tolist() == [0, 200, 200, 200, 200, 0]  # 6 x 4 pixels become 6 x 6
    assert (stretched == 200).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 0, np.nan, np.nan]),
        ({"uncertain": "positive"}, [1, 0, 1, np.nan]),
        ({"uncertain": "negative", "blank": "negative"}, [1, 0, 0, 0]),
    ],
)
def test_uncertain_and_blank_mean_what_the_policy_says(
    folder: Path, settings: dict[str, str], expected: list[float]
) -> None:
    splits = load(spec(split_column="part", validation_fraction=0, **settings), folder)
    np.testing.assert_array_equal(splits.train.labels[:4, 0], np.array(expected, dtype=np.float32))


def test_a_split_column_without_validation_rows_holds_out_training_patients(folder: Path) -> None:
    splits = load(spec(split_column="part", validation_fraction=0.2), folder)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [24, 6, 10]


def test_findings_in_one_column_are_read_from_a_gzipped_table(folder: Path) -> None:
    text = (folder / "labels.csv").read_text()
    (folder / "labels.csv.gz").write_bytes(gzip.compress(text.encode()))
    settings = {"labels": "labels.csv.gz", "finding_column": "finding", "classes": ["Edema", "Mass"]}
    splits = load(spec(**settings, split_column="part", validation_fraction=0), folder)
    assert splits.train.labels[:2].tolist() == [[1, 1], [0, 0]]


def test_a_column_that_is_not_there_is_named_with_the_nearest(folder: Path) -> None:
    columns = 'whose columns are "image", "patient", "Mass", "Edema", "finding", "part".'
    assert messages(folder, label_columns=["Mass", "Edemas"], patient_column="Patients") == [
        f'data.label_columns[1]: "Edemas" is not a column of labels.csv, {columns} Did you mean "Edema"?',
        f'data.patient_column: "Patients" is not a column of labels.csv, {columns} Did you mean "patient"?',
    ]


def test_a_misspelt_finding_is_named_with_the_nearest(folder: Path) -> None:
    assert messages(folder, finding_column="finding", classes=["Mass", "Oedema", "Hernia"]) == [
        'data.classes[1]: "Oedema" never occurs in column "finding". Did you mean "Edema"?'
    ]


def test_an_image_in_two_lines_and_a_line_without_patient_are_faults(folder: Path) -> None:
    change(folder / "labels.csv", "03.png,1,", "02.png,,")
    assert messages(folder) == [
        'data.image_column: 1 image in more than one line: "02.png". Give each image one line.',
        "data.patient_column: 1 line without a patient, line 5 first. Fill them, or leave patient_column out.",
    ]


def test_a_cell_that_is_no_label_is_named_with_its_line(folder: Path) -> None:
    change(folder / "labels.csv", "03.png,1,,", "03.png,1,yes,")
    assert messages(folder) == [
        'data.label_columns: column "Mass" holds "yes" in line 5; expected 1, 0, -1 or nothing.'
    ]


def test_a_ragged_table_is_refused(folder: Path) -> None:
    change(folder / "labels.csv", "03.png,1,,", "03.png,1,,,")
    assert messages(folder) == [
        "data.labels: 1 line of labels.csv without the header's 6 cells, line 5 first. "
        "Quote cells that contain a comma."
    ]


def test_unknown_split_values_are_named(folder: Path) -> None:
    change(folder / "labels.csv", ",test", ",holdout")
    assert messages(folder, split_column="part") == [
        'data.split_column: values are "train", "val" or "validation", and "test"; got "holdout".'
    ]


def test_a_patient_in_two_parts_is_named(folder: Path) -> None:
    change(folder / "labels.csv", "30.png,15,", "30.png,14,")
    assert messages(folder, split_column="part") == [
        'data.split_column: 1 patient in both train and test: "14". '
        "Put all images of a patient on one side of the split."
    ]


def test_pictures_that_are_not_there_are_a_fault_or_counted(folder: Path) -> None:
    (folder / "pictures" / "07.png").unlink()
    assert messages(folder) == [
        'data.images: 1 of 40 images named in labels.csv are not in pictures: "07.png". '
        'Add them, or set missing_files = "ignore" to leave them out.'
    ]
    splits = load(spec(missing_files="ignore"), folder)
    assert splits.train.missing == 1
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 39


def test_two_unreadable_pictures_of_forty_are_left_out_and_listed(folder: Path) -> None:
    (folder / "pictures" / "04.png").write_bytes(b"\x89PNG torn")
    (folder / "pictures" / "05.png").write_bytes(b"GIF89a")
    splits = load(spec(), folder)
    parts = (splits.train, splits.validation, splits.test)
    assert sum(map(len, parts)) == 38
    skipped = {skip.name: skip.reason for part in parts for skip in part.skipped}
    assert sorted(skipped) == ["04.png", "05.png"]
    assert skipped["05.png"] == "neither PNG, JPEG, DICOM nor NIfTI"
    assert all((part.images.max(axis=(1, 2)) == 200).all() for part in parts)


def test_three_unreadable_pictures_of_forty_stop_the_load_by_name(folder: Path) -> None:
    for name in ("04", "05", "21"):
        (folder / "pictures" / f"{name}.png").write_bytes(b"GIF89a")
    with pytest.raises(BadInput) as caught:
        load(spec(split_column="part", validation_fraction=0), folder)
    assert str(caught.value) == (
        "data.images: 3 of 40 images cannot be read, more than skip_budget = 0.05 allows: "
        '"04.png" (neither PNG, JPEG, DICOM nor NIfTI); "05.png" (neither PNG, JPEG, DICOM nor NIfTI); '
        '"21.png" (neither PNG, JPEG, DICOM nor NIfTI). Repair or remove them, or raise skip_budget.'
    )


@pytest.mark.parametrize(
    "settings",
    [{"label_columns": []}, {"finding_column": "finding"}, {"label_columns": ["Mass"], "finding_column": "finding"}],
)
def test_labels_must_be_said_in_one_way(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"label_columns, or finding_column|belong together"):
        spec(**settings)
