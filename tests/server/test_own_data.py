"""``flwr-sim init``: an experiment for somebody's own table and pictures, made by the command and run."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

import studies.cli
from common.config import read_experiment
from common.data.load import load
from strategies.registry import find_method_faults
from tests.common.data.bombs import GOOD, png
from tests.common.data.dicom_files import dicom
from tests.network.real import typed


def table(folder: Path, header: str, *rows: str, suffix: str = ".png", mode: str = "L") -> Path:
    """A table, and a picture for each of its rows whose first cell names one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scans").mkdir(exist_ok=True)
    for number, row in enumerate(rows):
        name = row.split(",")[0]
        if name.endswith(suffix) and not name.startswith("lost"):
            pixels = np.full((20, 20, 3) if mode == "RGB" else (20, 20), number % 256, np.uint8)
            Image.fromarray(pixels, mode).save(folder / "scans" / name)
    path = folder / "labels.csv"
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def rows(count: int, cells: str) -> list[str]:
    """Rows ``NNN.png,pN,...``, two images a patient; ``{a}``, ``{b}`` are 0 or 1, ``{c}`` the opposite of ``{a}``."""
    return [f"{n:03}.png,p{n // 2}," + cells.format(a=n // 2 % 2, b=n // 3 % 2, c=1 - n // 2 % 2) for n in range(count)]


def made(path: Path, *options: str) -> tuple[int, str, Path]:
    out = path.parent / "mine.toml"
    ended = typed(studies.cli.main, "init", path, "--out", out, *options)
    return ended.code, ended.out + ended.err, out


def test_what_it_writes_is_read_with_patients_and_classes(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass,age", *rows(40, "{a},{b},4{a}"))
    code, said, out = made(path)
    assert code == 0
    assert "patients: column patient, 20 of them" in said
    assert "classes: Fluid 20, Mass 19" in said
    assert "age" not in said.split("classes:")[1].splitlines()[0]
    data = read_experiment(out, [], find_method_faults).experiment.data
    assert (data.label_columns, data.patient_column, data.color) == (("Fluid", "Mass"), "patient", False)
    splits = load(data, out.parent)
    parts = [set(part.patients) for part in (splits.train, splits.validation, splits.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20


def test_a_picture_that_claims_gigabytes_ends_nothing(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass,age", *rows(40, "{a},{b},4{a}"))
    (tmp_path / "scans" / "000.png").write_bytes(png(65535, 65535, GOOD))
    assert made(path)[0] == 0


def test_unknown_patients_are_said_aloud_and_in_the_file(tmp_path: Path) -> None:
    path = table(tmp_path, "file,number,Fluid,Mass", *rows(40, "{a},{b}"))
    code, said, out = made(path)
    assert code == 0
    assert "patients: UNKNOWN" in said
    assert "--patient-column" in said
    assert "# patient_column" in out.read_text(encoding="utf-8")
    out.unlink()
    _, said, out = made(path, "--patient-column", "number")
    assert "patients: column number, 20 of them" in said


def test_rows_without_a_picture_are_counted_and_left_out(tmp_path: Path) -> None:
    lost = ["lost1.png,p90,1,0", "lost2.png,p91,1,0"]
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), *lost)
    _, said, out = made(path)
    assert "2 of 42 rows have no picture there" in said
    assert "Fluid 20" in said
    assert read_experiment(out, [], find_method_faults).experiment.data.missing_files == "ignore"


def test_pictures_that_cannot_be_read_are_told_before_anything_runs(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"))
    for number in range(3):
        (tmp_path / "scans" / f"{number:03}.png").write_text("no picture", encoding="utf-8")
    (tmp_path / "scans" / "003.png").write_bytes(b"")
    packed = dicom(np.zeros((8, 8), np.uint16)).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.9\0")
    (tmp_path / "scans" / "004.png").write_bytes(packed)
    code, said, _ = made(path)
    assert code == 0
    assert "3 of the 40 that were looked at cannot be read: neither PNG, JPEG, DICOM nor NIfTI." in said
    assert "1 of the 40 that were looked at cannot be read: empty." in said
    assert "1 of the 40 that were looked at cannot be read: packed as 1.2.840.10008.1.2.9." in said


def test_names_of_findings_in_one_column_are_taken(tmp_path: Path) -> None:
    found = [f"{n:03}.png,p{n},{'Mass|Fluid' if n % 3 else 'Fluid'}" for n in range(30)]
    path = table(tmp_path, "Image,Subject ID,Findings", *found, mode="RGB")
    _, said, out = made(path)
    data = read_experiment(out, [], find_method_faults).experiment.data
    assert (data.finding_column, data.classes, data.color) == ("Findings", ("Fluid", "Mass"), True)
    assert "classes: Fluid 30, Mass 20" in said


def test_one_hot_columns_are_noticed_and_so_are_rare_classes(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Dry", *rows(40, "{a},{c}"))
    _, said, _ = made(path)
    assert "Each image shows exactly one of them" in said
    rare = ["300.png,p300,1,1", *[f"{n:03}.png,p{n},0,{n % 2}" for n in range(30)]]
    _, said, _ = made(table(tmp_path / "rare", "file,patient,Rare,Mass", *rare))
    assert "fewer than 10 images show Rare" in said
    assert "exactly one" not in said


def test_patients_of_dicom_files_are_taken_where_the_table_names_none(tmp_path: Path) -> None:
    names = [f"{number:03}.dcm" for number in range(12)]
    path = table(tmp_path, "file,Fluid,Mass", *[f"{name},{n % 2},{n // 2 % 2}" for n, name in enumerate(names)])
    for number, name in enumerate(names):
        image = Dataset()
        image.file_meta = FileMetaDataset()
        image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        image.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.1"
        image.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        image.PatientID = f"patient {number // 3}"
        image.save_as(tmp_path / "scans" / name, enforce_file_format=True)
    _, said, out = made(path)
    assert "patients: PatientID of the DICOM files, 4 of them" in said
    assert "UNKNOWN" not in said + out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("header", "row", "options", "reason"),
    [
        ("file,patient,Fluid", "a.tif,p1,1", (), "no column of the table names pictures"),
        ("file,patient,Fluid", "a.png,p1,1.5", (), "no column holds labels"),
        ("file,patient,Fluid", "lost.png,p1,1\nlost.png,p2,0", (), 'none of the 2 pictures of column "file"'),
        ("file,patient,Fluid", "a.png,p1,1", ("--patient-column", "patinet"), 'Did you mean "patient"?'),
        ("file,patient,Fluid", "a.png,p1,1", ("--image-column", "nope"), '"nope" is not a column'),
    ],
)
def test_a_table_that_cannot_be_understood_is_refused_with_a_remedy(
    header: str, row: str, options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    code, said, out = made(table(tmp_path, header, row), *options)
    assert code == 2
    assert reason in " ".join(said.split())
    assert not out.exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"))
    (tmp_path / "mine.toml").write_text("mine")
    code, said, out = made(path)
    assert (code, out.read_text()) == (2, "mine")
    assert "is there already" in said
