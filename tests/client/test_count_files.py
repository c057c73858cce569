"""Counts that a hospital reads from the headers of its files: sizes of pictures, and devices of DICOM files."""

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.common.counts import CountQuestion
from polyclinic.common.wire.counts import CountReply
from polyclinic.data.images.picture_header import PictureHeader, read_picture_header
from tests.client.counted import asked
from tests.data.dicom_files import dicom

SITE = """name = "north"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
patient_column = "patient"
label_columns = ["Effusion"]
image_size = 8
{more}

[policy]
smallest_count = {smallest}
"""
SIDES = {"below 256": (255, 400), "256-511": (256, 300), "512-1023": (2000, 1023), "1024 and more": (1024, 1024)}
"""Value of the table ``size`` -> width and height of a picture."""
DEVICES = ({"Manufacturer": "Acme", "ManufacturerModelName": "X 1"}, {"ManufacturerModelName": "Beta 2"}, {})


def write_hospital(
    folder: Path, files: list[tuple[str, bytes | tuple[int, int]]], more: str = "", smallest: int = 10
) -> Path:
    """Write a hospital with one patient for each file, and a line of its table for each."""
    (folder / "images").mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as table:
        writer = csv.writer(table)
        writer.writerow(["image", "patient", "Effusion", "scanner"])
        for number, (name, content) in enumerate(files):
            if isinstance(content, bytes):
                (folder / "images" / name).write_bytes(content)
            else:
                Image.new("L", content, number % 200).save(folder / "images" / name)
            writer.writerow([name, f"P{number}", number % 2, f"scanner {number % 2}"])
    (folder / "site.toml").write_text(SITE.format(more=more, smallest=smallest), encoding="utf-8")
    return folder


def count(folder: Path, *tables: str) -> tuple[CountReply, dict[tuple[str, str], int]]:
    """The answer of a hospital, and table and value -> number of patients."""
    reply = asked(load_site(read_site_settings(folder), lambda line: None), CountQuestion(tables=tables))
    return reply, {(key[0], key[3]): reply.patients[place] for key, place in reply.cells.items()}


def test_pictures_are_counted_by_the_shorter_side_that_their_files_have(tmp_path: Path) -> None:
    names = [name for name in SIDES for _ in range(12)]
    north = write_hospital(tmp_path / "north", [(f"{place}.png", SIDES[name]) for place, name in enumerate(names)])
    reply, patients = count(north, "size", "device")
    assert patients == {("size", name): 12 for name in SIDES} | {("size", "not stated"): 0}
    assert reply.missing == ("device",)


def test_a_size_of_few_patients_is_hidden_with_another_one(tmp_path: Path) -> None:
    sides = [SIDES["below 256"]] * 20 + [SIDES["256-511"]] * 20 + [SIDES["512-1023"]] * 3
    north = write_hospital(tmp_path / "north", [(f"{place}.png", size) for place, size in enumerate(sides)])
    _, patients = count(north, "size")
    assert ("size", "512-1023") not in patients
    assert len(patients) <= 2


def test_the_device_of_dicom_files_is_that_of_their_headers_unless_a_column_is_named(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    content = [
        dicom(random.integers(0, 4000, (300, 280)).astype(np.uint16), **DEVICES[place % 3]) for place in range(45)
    ]
    files = [(f"{place}.dcm", each) for place, each in enumerate(content)]
    _, patients = count(write_hospital(tmp_path / "a", files, smallest=0), "device", "size")
    told = {value: number for (table, value), number in patients.items() if table == "device"}
    assert told == {"Acme X 1": 15, "Beta 2": 15, "not stated": 15}
    assert patients["size", "256-511"] == 45
    named = write_hospital(tmp_path / "b", files, 'device_column = "scanner"', smallest=0)
    _, patients = count(named, "device")
    assert Counter(patients) == {("device", "scanner 0"): 23, ("device", "scanner 1"): 22}


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", bytes(128) + b"DICM", b"\x1f\x8b damaged"])
def test_of_a_damaged_file_nothing_is_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_picture_header(tmp_path / "file") == PictureHeader()
    assert read_picture_header(tmp_path / "none") == PictureHeader()
