"""A folder of DICOM files: how they are packed and whose they are, before a run."""

import io
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom import uid

from polyclinic.client.check.data import check_site_data
from polyclinic.client.check.findings import CheckArea
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.settings import read_site_settings
from polyclinic.data.base.image_set import make_placeholder_patient_names
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.images.syntaxes import DECODER_BY_SYNTAX
from polyclinic.data.tables.labels import LabelTable, open_folder_label_table
from tests.data.dicom_files import dicom
from tests.data.dicom_syntaxes import by_gdcm, in_fragments, plain, source

SPEC = """kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["Mass"]
image_size = 16
"""


def write_site(folder: Path, files: Sequence[bytes]) -> Path:
    """Write a site's folder of these files."""
    (folder / "images").mkdir()
    rows = [f"{place:02d}.dcm,{place % 2}" for place in range(len(files))]
    (folder / "labels.csv").write_text("\n".join(["image,Mass", *rows]), encoding="utf-8")
    for place, content in enumerate(files):
        (folder / "images" / f"{place:02d}.dcm").write_bytes(content)
    (folder / "site.toml").write_text(f'name = "north"\n[data]\n{SPEC}', encoding="utf-8")
    return folder


def of_patient(name: str, study: str = "0") -> bytes:
    pixels = np.random.default_rng(len(name)).integers(0, 4096, (16, 16), np.uint16)
    return dicom(pixels, PatientID=name.strip(), StudyInstanceUID=f"1.{study}" if study != "0" else None)


def table_of(folder: Path, files: Sequence[bytes]) -> LabelTable:
    """The table of a site with these files."""
    write_site(folder, files)
    return open_folder_label_table(FolderDatasetSpec.model_validate(tomllib.loads(SPEC)), folder)


@pytest.mark.parametrize(
    ("names", "patients"),
    [
        (["Ann", "Bo", "Ann"], ["Ann", "Bo", "Ann"] * 7),
        (["", "", ""], make_placeholder_patient_names(21).tolist()),
        (["ANONYMOUS", "", "ANONYMOUS"], make_placeholder_patient_names(21).tolist()),
        (["ANONYMOUS"] * 3, make_placeholder_patient_names(21).tolist()),
        (["ANONYMOUS", "anon", "Unknown"], make_placeholder_patient_names(21).tolist()),
        (["Ann", "ANON", "Bo"], [("Ann", f"unknown#{place}", "Bo")[place % 3] for place in range(21)]),
    ],
    ids=["named", "no names", "one name or none", "all of one name", "words", "some words"],
)
def test_patients_are_those_of_the_files_if_these_name_them(
    names: list[str], patients: list[str], tmp_path: Path
) -> None:
    assert list(map(str, table_of(tmp_path, [*map(of_patient, names * 7)]).patients)) == patients


def test_no_patient_stands_on_two_sides_of_the_split(tmp_path: Path) -> None:
    table = table_of(tmp_path, [of_patient(f"P{place % 10}") for place in range(40)])
    sides = {name: set(table.parts[table.patients == name]) for name in table.patients}
    assert {len(parts) for parts in sides.values()} == {1}
    assert {"train", "test"} <= set(table.parts)


def test_a_file_of_another_kind_is_a_patient_of_its_own(tmp_path: Path) -> None:
    files = [of_patient(f"P{place}") for place in range(20)]
    files[3] = b"no DICOM"
    patients = table_of(tmp_path, files).patients.tolist()
    assert (patients[2], patients[3], len(set(patients))) == ("P2", "unknown#3", 20)
    passed = check_site_data(read_site_settings(tmp_path), None).area.passed
    assert any("PatientID of 19 of 20 files" in line for line in passed)


def checked(folder: Path, change: Callable[[bytes], bytes], count: int) -> CheckArea:
    """The check's data area of 20 files, of which the first few are changed."""
    files = [plain(source(8), 8, PatientID=f"P{place}") for place in range(20)]
    files[:count] = map(change, files[:count])
    return check_site_data(read_site_settings(write_site(folder, files)), None).area


def test_patients_stay_known_beside_files_without_one_whose_study_stays_together(tmp_path: Path) -> None:
    patients = table_of(tmp_path, [*map(of_patient, "ABAB  C  ", "123455672")]).patients.tolist()
    assert patients == ["A", "B", "A", "B", "unknown#1.5", "unknown#1.5", "C", "unknown#1.7", "B"]
    area = check_site_data(read_site_settings(tmp_path), None).area
    assert any("PatientID of 5 of 9 files" in line for line in area.passed)
    assert any(finding.problem.startswith("3 images without a PatientID") for finding in area.findings)


def test_the_check_notes_mixed_modalities_and_files_without_a_window(tmp_path: Path) -> None:
    window = {"WindowCenter": 128, "WindowWidth": 256}
    files = [plain(source(8), 8, PatientID=f"P{n}", Modality="CT" if n < 12 else "CR", **window) for n in range(19)]
    files.append(plain(source(8), 8, PatientID="Z", Modality="CR"))
    files[3] = plain(source(8), 8, PatientID="P3", Modality="CT", WindowCenter=9000, WindowWidth=20)
    area = check_site_data(read_site_settings(write_site(tmp_path, files)), None).area
    problems = [finding.problem for finding in area.findings]
    assert any("12 CT, 8 CR" in problem for problem in problems)
    assert any(problem.startswith("1 of 20 DICOM files name no window") for problem in problems)
    (name,) = (problem.rpartition(": ")[2] for problem in problems if problem.startswith("1 DICOM or NIfTI file"))
    assert name == "03.dcm."


def test_the_check_notes_mirrored_slices_unequal_densities_and_nearly_black_pictures(tmp_path: Path) -> None:
    dim = source(8) // 25
    window = {"WindowCenter": 128, "WindowWidth": 256}
    files = [
        plain(dim, 8, PatientID=f"P{place}", ImageOrientationPatient=[side, 0, 0, 0, 1, 0], **window)
        for place, side in enumerate([1] * 9 + [-1] * 3)
    ]
    content = io.BytesIO()
    Image.fromarray(dim).save(content, "PNG", dpi=(72, 144))
    problems = [
        finding.problem
        for finding in check_site_data(
            read_site_settings(write_site(tmp_path, [*files, content.getvalue()])), None
        ).area.findings
    ]
    assert any("(9 L\\P, 3 R\\P)" in problem for problem in problems)
    assert any(problem.startswith("1 PNG or JPEG file states pixels that are not square") for problem in problems)
    (dark,) = (problem for problem in problems if "nearly black" in problem)
    assert "13 of 13 pictures" in dark
    assert "value_range = [0, 15]" in dark


def test_the_check_counts_transfer_syntaxes_and_names_the_source_of_patients(tmp_path: Path) -> None:
    area = checked(tmp_path, lambda file: by_gdcm(file, uid.JPEGLosslessSV1), 5)
    assert area.facts["transfer_syntaxes"] == {uid.JPEGLosslessSV1: 5, uid.ExplicitVRLittleEndian: 15}
    passed = " ".join(area.passed)
    assert "PatientID of 20 of 20 files" in passed
    assert "15 Explicit VR Little Endian, 5 JPEG Lossless" in passed


def test_the_check_says_which_transfer_syntax_cannot_be_read(tmp_path: Path) -> None:
    area = checked(tmp_path, lambda file: in_fragments(file, bytes(8), syntax=uid.MPEG2MPML), 2)
    (fault,) = [finding for finding in area.findings if "packed as" in finding.problem]
    assert (fault.severity.name, fault.exit_code) == ("FAULT", ClientExitCode.UNREADABLE)
    assert fault.problem.startswith("2 DICOM files packed as MPEG2 Main Profile / Main Level")


def test_the_docs_list_every_transfer_syntax_that_is_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\d.]+)` \|", page, re.MULTILINE)
    assert listed == sorted(DECODER_BY_SYNTAX, key=lambda syntax: [int(part) for part in syntax.split(".")])
