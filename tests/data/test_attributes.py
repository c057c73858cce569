"""Sex, age, year and device in a hospital's table: for counts alone."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.errors import BadInput
from polyclinic.data.base.attributes import UNKNOWN_NUMBER, parse_age_cell, parse_sex_cell, parse_year_cell
from polyclinic.data.base.image_set import concatenate_image_sets
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.load import load_dataset

TABLE = """\
file,patient,a,sex,age,day,model
1.png,p1,1,F,45,2019-03-01,X100
2.png,p2,0,männlich,1960,20200301,X100
3.png,p3,0,?,045Y,01.03.2021,
4.png,p4,1,,,,X200
"""
COLUMNS = {"sex_column": "sex", "age_column": "age", "date_column": "day", "device_column": "model"}


@pytest.mark.parametrize(
    ("cell", "sex"), [("F", "female"), (" Weiblich", "female"), ("M", "male"), ("2", "female"), ("X", ""), ("0", "")]
)
def test_words_for_sex_are_read_in_any_case_and_others_are_not_stated(cell: str, sex: str) -> None:
    assert parse_sex_cell(cell, {"2": "female"}) == sex


@pytest.mark.parametrize(
    ("cell", "age"),
    [
        ("45", 45),
        ("045Y", 45),
        ("011M", 0),
        ("45.0", 45),
        ("1960", 1960),
        ("12.4.1960", 1960),
        ("old", -1),
        ("450", -1),
    ],
)
def test_an_age_is_in_years_or_a_year_of_birth(cell: str, age: int) -> None:
    assert parse_age_cell(cell) == age


@pytest.mark.parametrize(
    ("cell", "year"),
    [
        ("2019", 2019),
        ("20190301", 2019),
        ("2019-03-01 12:30", 2019),
        ("1.3.2019", 2019),
        ("3/1/19", -1),
        ("2019-2020", -1),
    ],
)
def test_a_date_has_its_year_in_four_digits(cell: str, year: int) -> None:
    assert parse_year_cell(cell) == year


def spec(**more: object) -> FolderDatasetSpec:
    named = {"images": ".", "labels": "table.csv", "image_column": "file", "patient_column": "patient"}
    return FolderDatasetSpec.model_validate(
        {"kind": "folder", **named, "label_columns": ["a"], "image_size": 8, "duplicates": "drop_from_training", **more}
    )


def made_folder(folder: Path) -> None:
    (folder / "table.csv").write_text(TABLE, encoding="utf-8")
    random = np.random.default_rng(1)
    for name in range(1, 5):
        Image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{name}.png")


def test_the_columns_of_a_table_stay_with_their_images(tmp_path: Path) -> None:
    made_folder(tmp_path)
    splits = load_dataset(spec(**COLUMNS), tmp_path)
    images = concatenate_image_sets(splits.parts)
    attributes = images.attributes
    assert attributes is not None
    order = np.argsort(images.patients)
    assert attributes.sex[order].tolist() == ["female", "male", "", ""]
    assert attributes.age_at_image[order].tolist() == [45, 60, 45, UNKNOWN_NUMBER]
    assert attributes.year[order].tolist() == [2019, 2020, 2021, UNKNOWN_NUMBER]
    assert attributes.device[order].tolist() == ["X100", "X100", "", "X200"]
    assert attributes.columns == ("sex", "age", "year", "device")
    (note,) = [note for note in splits.train.notes if note.startswith("sex_column")]
    assert '"?" in line 4' in note


def test_without_such_columns_nothing_is_known_and_a_missing_column_is_a_fault(tmp_path: Path) -> None:
    made_folder(tmp_path)
    assert load_dataset(spec(), tmp_path).train.attributes is None
    with pytest.raises(BadInput, match='"gender" is not a column'):
        load_dataset(spec(sex_column="gender"), tmp_path)
