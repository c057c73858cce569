"""Pictures in folders of classes, hospitals and parts: what becomes which column, and what is asked."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from polyclinic.common.errors import BadInput
from polyclinic.data.tables.class_folders import write_table_of_class_folders

Rows = list[dict[str, str]]


def draw(root: Path, folders: Sequence[str], count: int = 2) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (4, 4), number).save(root / folder / f"{number}.png")
    return root


def table_of(root: Path, statement: str | None = None) -> tuple[Rows, str]:
    table = root.parent / "it.csv"
    line = write_table_of_class_folders(root, table, statement)
    with table.open(newline="") as file:
        return list(csv.DictReader(file)), line


CENTRES = ("site_1/ill", "site_1/well", "site_2/ill", "site_2/well")
PLACES = ("north/ill", "north/well", "south/ill", "south/well")


@pytest.mark.parametrize(("folders", "statement"), [(CENTRES, None), (PLACES, "/1")])
def test_folders_called_like_hospitals_or_named_so_are_a_column_of_hospitals(
    tmp_path: Path, folders: Sequence[str], statement: str | None
) -> None:
    rows, line = table_of(draw(tmp_path / "it", folders), statement)
    assert {(row["hospital"], row["class"]) for row in rows} == {tuple(folder.split("/")) for folder in folders}
    assert "in 2 class folders" in line
    assert "Its column hospital is the first folder of each path" in line


def test_folders_that_may_be_classes_or_hospitals_are_asked(tmp_path: Path) -> None:
    root = draw(tmp_path / "it", PLACES)
    with pytest.raises(BadInput, match=r"are the folders north and south hospitals.*\n.*--source-column /1"):
        table_of(root)
    assert not (tmp_path / "it.csv").exists()
    rows, _ = table_of(root, "")
    assert {row["class"] for row in rows} == {"north", "south"}
    assert "hospital" not in rows[0]


def test_hospitals_below_classes_are_named_by_their_level(tmp_path: Path) -> None:
    rows, _ = table_of(draw(tmp_path / "it", ("ill/north", "ill/south", "well/north")), "/2")
    assert {(row["hospital"], row["class"]) for row in rows} == {("north", "ill"), ("south", "ill"), ("north", "well")}


def test_folders_of_parts_are_the_split_and_no_class(tmp_path: Path) -> None:
    folders = ("train/ill", "train/well", "test/ill", "test/well", "val/ill")
    rows, line = table_of(draw(tmp_path / "it", folders))
    assert {row["class"] for row in rows} == {"ill", "well"}
    assert {row["split"] for row in rows} == {"train", "test", "validation"}
    assert "Its column split" in line


def test_numbered_patients_below_the_classes_are_no_question(tmp_path: Path) -> None:
    rows, _ = table_of(draw(tmp_path / "it", ("ill/p1", "ill/p2", "well/p1", "well/p2")))
    assert {row["class"] for row in rows} == {"ill", "well"}


def test_folders_of_parts_alone_have_no_classes(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none for classes"):
        table_of(draw(tmp_path / "it", ("train", "test")))
