"""A hospital's folder of pictures and its table. The wording of faults is held by ``tests/bad_input/messages``."""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from polyclinic.common.errors import BadInput
from polyclinic.data import load
from polyclinic.data.base.image_set import PARTS
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.load import find_dataset_faults, load_dataset
from polyclinic.data.tables.labels import open_folder_label_table

WritePng = Callable[[str], None]
NOT_A_PICTURE = "neither PNG, JPEG, DICOM nor NIfTI"


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


def spec(**settings: Any) -> FolderDatasetSpec:
    common = {"kind": "folder", "images": "pictures", "labels": "labels.csv", "image_column": "image", "image_size": 6}
    labels = {} if "finding_column" in settings else {"label_columns": ["Mass", "Edema"]}
    return FolderDatasetSpec.model_validate({**common, **labels, "patient_column": "patient", **settings})


def test_without_a_split_column_the_part_of_a_patient_does_not_depend_on_other_patients(folder: Path) -> None:
    def parts() -> dict[str, str]:
        splits = load_dataset(spec(), folder)
        named = zip(PARTS, splits.parts, strict=True)
        return {patient: name for name, part in named for patient in part.patients.tolist()}

    everyone, table = parts(), folder / "labels.csv"
    assert sorted(everyone, key=int) == [str(patient) for patient in range(20)]
    assert set(everyone.values()) == set(PARTS)
    lines = table.read_text().splitlines(keepends=True)
    for patient in everyone:
        table.write_text("".join(line for line in lines if line.split(",")[1] != patient))
        assert parts() == {name: part for name, part in everyone.items() if name != patient}


def test_without_a_patient_column_the_part_of_an_image_follows_from_its_file(folder: Path) -> None:
    def parts() -> dict[str, str]:
        table = open_folder_label_table(spec(patient_column=None), folder)
        return dict(zip(table.files.names.tolist(), table.parts.tolist(), strict=True))

    everyone, table = parts(), folder / "labels.csv"
    assert set(everyone.values()) == set(PARTS)
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:1] + lines[2:]))  # without the first image, all others have another place
    del everyone["00.png"]
    assert parts() == everyone


def test_a_table_that_was_checked_is_read_again_at_the_next_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(
        load, "open_folder_label_table", lambda *given: calls.append("read") or open_folder_label_table(*given)
    )
    assert find_dataset_faults(spec(), folder) == []
    load_dataset(spec(), folder)
    assert calls == ["read"]
    load_dataset(spec(), folder)
    assert calls == ["read", "read"]


@pytest.mark.parametrize(
    "name", ["../outside/secret.png", "{folder}/outside/secret.png", "../pictures/../outside/secret.png"]
)
def test_a_picture_outside_of_the_folder_is_named(folder: Path, write_png: WritePng, name: str) -> None:
    write_png("outside/secret.png")
    table = (folder / "labels.csv").read_text()
    (folder / "labels.csv").write_text(table.replace("03.png", name.format(folder=folder), 1))
    (note,) = [note for note in load_dataset(spec(), folder).train.notes if "outside of the folder" in note]
    assert note.startswith("The table names 1 image outside")
    assert name.format(folder=folder) in note


@pytest.mark.parametrize("name", ["../pictures/03.png", "{folder}/pictures/03.png", "03..png", "{folder}/link/03.png"])
def test_a_picture_in_the_folder_is_not_named_whatever_its_path(folder: Path, write_png: WritePng, name: str) -> None:
    write_png("pictures/03..png")
    (folder / "link").symlink_to(folder / "pictures")
    table = (folder / "labels.csv").read_text()
    (folder / "labels.csv").write_text(table.replace("03.png", name.format(folder=folder), 1))
    for images in ("pictures", "link"):
        notes = load_dataset(spec(images=images), folder).train.notes
        assert [note for note in notes if "outside of the folder" in note] == []


def test_pictures_are_padded_with_black_unless_stretched(folder: Path) -> None:
    padded, stretched = (load_dataset(spec(resize=way), folder).train.images for way in ("pad", "stretch"))
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
def test_uncertain_and_blank_follow_the_policy(folder: Path, settings: dict[str, str], expected: list[float]) -> None:
    splits = load_dataset(spec(split_column="part", validation_fraction=0, **settings), folder)
    np.testing.assert_array_equal(splits.train.labels[:4, 0], np.array(expected, dtype=np.float32))


def test_a_split_column_holds_out_training_patients_only_if_it_has_no_validation_rows(folder: Path) -> None:
    splits = load_dataset(spec(split_column="part", validation_fraction=0.2), folder)
    held_out = set(splits.validation.patients.tolist())
    assert len(splits.train) + len(splits.validation) == 30
    assert len(splits.test) == 10
    assert held_out
    assert not held_out & set(splits.train.patients.tolist())
    table = folder / "labels.csv"
    table.write_text(re.sub(r"(?m)^(2\d.*),train$", r"\1,validation", table.read_text()))
    splits = load_dataset(spec(split_column="part", validation_fraction=0.2), folder)
    assert [len(part) for part in splits.parts] == [20, 10, 10]


def test_findings_in_one_column_are_read_from_a_gzipped_table(folder: Path) -> None:
    (folder / "labels.csv.gz").write_bytes(gzip.compress((folder / "labels.csv").read_bytes()))
    settings = {"labels": "labels.csv.gz", "finding_column": "finding", "classes": ["Edema", "Mass"]}
    splits = load_dataset(spec(**settings, split_column="part", validation_fraction=0), folder)
    assert splits.train.labels[:2].tolist() == [[1, 1], [0, 0]]


def test_missing_pictures_are_counted_where_the_key_says_so(folder: Path) -> None:
    (folder / "pictures" / "07.png").unlink()
    splits = load_dataset(spec(missing_files="ignore"), folder)
    assert splits.train.missing == 1
    assert sum(map(len, splits.parts)) == 39


def test_unreadable_pictures_are_left_out_and_listed_up_to_the_budget(folder: Path) -> None:
    (folder / "pictures" / "04.png").write_bytes(b"\x89PNG torn")
    (folder / "pictures" / "05.png").write_bytes(b"GIF89a")
    splits = load_dataset(spec(), folder)
    assert sum(map(len, splits.parts)) == 38
    skipped = {skip.name: skip.reason for part in splits.parts for skip in part.skipped}
    assert sorted(skipped) == ["04.png", "05.png"]
    assert skipped["05.png"].startswith("a GIF file; convert it to PNG")
    assert all((part.images.max(axis=(1, 2)) == 200).all() for part in splits.parts)
    (folder / "pictures" / "21.png").write_bytes(b"no picture")
    with pytest.raises(BadInput, match=rf'3 of 40 images .*skip_budget = 0.05.*"21.png" \({NOT_A_PICTURE}\)') as bad:
        load_dataset(spec(), folder)
    assert [(fault.where, fault.cause) for fault in bad.value.faults] == [("data.images", "unreadable")]


def test_an_unreadable_picture_is_named_with_its_folder(folder: Path) -> None:
    (folder / "pictures" / "04.png").write_bytes(b"\x89PNG torn")
    (folder / "pictures").rename(folder / "north")
    (folder / "pictures").mkdir()
    (folder / "north").rename(folder / "pictures" / "north")
    table = folder / "labels.csv"
    table.write_text(re.sub(r"(?m)^(?=\d)", "north/", table.read_text()))
    splits = load_dataset(spec(), folder)
    assert [skip.name for part in splits.parts for skip in part.skipped] == ["north/04.png"]


@pytest.mark.parametrize(
    "settings",
    [{"label_columns": []}, {"finding_column": "finding"}, {"label_columns": ["Mass"], "finding_column": "finding"}],
)
def test_labels_are_named_by_one_setting(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"label_columns, or finding_column|belong together"):
        spec(**settings)
