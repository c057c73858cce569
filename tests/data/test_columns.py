"""The plain rules for the columns of an unknown table: whole headings, cells of 0 and 1, names."""

from pathlib import Path

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.data.tables.columns import (
    FINDING_HEADINGS,
    HOSPITAL_HEADINGS,
    PATIENT_HEADINGS,
    choose_image_column,
    choose_patient_column,
    find_wrong_label_cells,
    is_label_column,
    list_columns_by_heading,
    names_findings,
)
from polyclinic.data.tables.csv import CsvTable, read_csv_table, read_first_rows
from polyclinic.data.tables.files import PictureFileFinder
from polyclinic.data.tables.search import PictureSearch
from polyclinic.studies.init.questions import ColumnHints
from polyclinic.studies.init.roles import assign_column_roles, read_finding_names


def columns_of(folder: Path, header: str, *lines: str) -> CsvTable:
    path = folder / "t.csv"
    text = "\n".join((header, *(f"{n}.png,{line}" for n, line in enumerate(lines))))
    path.write_text(text, encoding="utf-8")
    return read_csv_table(path, "labels")


@pytest.mark.parametrize(
    ("heading", "role"),
    [
        ("Patient ID", "patient"),
        ("patient_id", "patient"),
        ("PATIENT-ID", "patient"),
        ("subject", "patient"),
        ("MRN", "patient"),
        ("Patient Age", ""),
        ("patients", ""),
        ("lesion_id", ""),
        ("study_id", ""),
        ("Hospital", "hospital"),
        ("site_id", "hospital"),
        ("anatom_site", ""),
        ("hospital_number", ""),
        ("Finding Labels", "findings"),
        ("dx", "findings"),
        ("dx_type", ""),
        ("bmi_class", ""),
    ],
)
def test_a_heading_has_a_role_only_as_a_whole(heading: str, role: str) -> None:
    headings = {"patient": PATIENT_HEADINGS, "hospital": HOSPITAL_HEADINGS, "findings": FINDING_HEADINGS}
    roles = [name for name, of_role in headings.items() if list_columns_by_heading([heading], of_role)]
    assert roles == ([role] if role else [])


@pytest.mark.parametrize(
    ("cells", "are_labels", "wrong", "are_names"),
    [
        ("1 0 -1 _ 1.0 0,0", True, 0, False),
        ("1 1 _ _", True, 0, False),
        ("yes no TRUE false _", True, 0, False),
        ("0 0 _ 0", False, 0, False),
        ("1 0 1 0 1 0 1 0 0 0.5", False, 1, False),
        ("1 0 1 0 1 0 1 0 0 ja", False, 1, True),
        ("1 0 ja nein ja", False, 0, True),
        ("0 0 1 3 3 2 2", False, 0, False),
        ("Mass Nodule _", False, 0, True),
        ("41 67 53", False, 0, False),
    ],
)
def test_a_column_of_labels_is_recognised_by_its_cells(
    cells: str, are_labels: bool, wrong: int, are_names: bool, tmp_path: Path
) -> None:
    texts = [f'"{cell.replace("_", "")}"' for cell in cells.split()]
    column = columns_of(tmp_path, "file,Mass", *texts).get_column("Mass")
    assert is_label_column(column) == are_labels
    assert len(find_wrong_label_cells(column)) == wrong
    assert names_findings(column) == are_names


def test_two_columns_of_patients_are_one_if_they_group_alike_else_a_question(tmp_path: Path) -> None:
    alike = columns_of(tmp_path, "file,patient_id,MRN", *(f"p{n // 2},m{n // 2}" for n in range(8)))
    assert choose_patient_column(alike) == "patient_id"
    apart = columns_of(tmp_path, "file,patient_id,MRN", *(f"p{n // 2},m{n // 4}" for n in range(8)))
    with pytest.raises(BadInput, match='"patient_id", "MRN" may each name the patients'):
        choose_patient_column(apart)
    assert choose_patient_column(columns_of(tmp_path, "file,number", "1", "2")) is None


def test_the_column_of_pictures_without_a_folder_is_the_one_of_endings(tmp_path: Path) -> None:
    assert choose_image_column(columns_of(tmp_path, "file,note", "a", "b")) == "file"
    with pytest.raises(BadInput, match='"file", "other" name pictures'):
        choose_image_column(columns_of(tmp_path, "file,other", "a.png", "b.dcm"))


def findings(folder: Path, *cells: str) -> CsvTable:
    return columns_of(folder, "file,finding", *(f'"{cell}"' for cell in cells))


@pytest.mark.parametrize(
    ("cells", "separator", "classes"),
    [
        ("Mass;Effusion;Mass\nEffusion;No Finding", "\n", "Mass;Effusion"),
        ("Mass;Effusion;Mass,Effusion;No Finding", ",", "Mass;Effusion"),
        ("Mass;Effusion;Mass\tEffusion;-", "\t", "Mass;Effusion"),
        ("Mass;Effusion;Mass/Effusion;#N/A", "/", "Mass;Effusion"),
        ("Mass, benign;Mass, malignant;Mass, benign|Cyst;Cyst", "|", "Mass, benign;Mass, malignant;Cyst"),
        ("Mass, benign;Mass, malignant;Cyst", "|", "Mass, benign;Mass, malignant;Cyst"),
        ("Mass & scar;Cyst|Mass & scar;Cyst;Edema", "|", "Mass & scar;Cyst;Edema"),
    ],
)
def test_a_comma_separates_only_names_that_stand_alone_too(
    cells: str, separator: str, classes: str, tmp_path: Path
) -> None:
    names = read_finding_names(findings(tmp_path, *cells.split(";") * 3), "finding", ColumnHints())
    assert (names.separator, set(names.classes)) == (separator, set(classes.split(";")))


@pytest.mark.parametrize(
    "cells", ["Mass, Edema;Mass;Edema;Mass|Nodule;Nodule", "Mass;Effusion;Mass|Effusion;Mass+Effusion"]
)
def test_a_name_that_consists_of_other_names_is_refused(cells: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="which consists of names of the column"):
        read_finding_names(findings(tmp_path, *cells.split(";")), "finding", ColumnHints())


@pytest.mark.parametrize("flag", ["sex", "Gender", "view", "lateral", "split", "No Finding", "fold"])
def test_a_flag_of_the_short_list_is_no_finding_and_any_other_is_one(flag: str, tmp_path: Path) -> None:
    lines = [f"{n % 2},{n // 2 % 2},{n % 3 % 2}" for n in range(24)]
    columns = columns_of(tmp_path, f"file,Mass,{flag},smoker", *lines)
    roles, _ = assign_column_roles(columns, PictureSearch(tmp_path, PictureFileFinder()), ColumnHints())
    assert roles.label_columns == ("Mass", "smoker")


@pytest.mark.parametrize(
    ("header", "cells", "offered"),
    [
        ("dx,target", "nv,1;mel,0;bkl,1", ["dx", "target"]),
        ("dx,class", "nv,a;mel,b;bkl,a", ["dx", "class"]),
        ("region,grade", "arm,mild;leg,severe;arm,mild", ["region", "grade"]),
        ("label,age", "3,41;2,50;3,50", ["label", "age"]),
    ],
)
def test_several_columns_or_none_of_findings_are_a_question(
    header: str, cells: str, offered: list[str], tmp_path: Path
) -> None:
    columns = columns_of(tmp_path, f"file,{header}", *cells.split(";") * 4)
    _, questions = assign_column_roles(columns, PictureSearch(tmp_path, PictureFileFinder()), ColumnHints())
    (question,) = questions
    assert (question.option, [choice.value for choice in question.choices]) == ("--findings", offered)


def test_the_first_rows_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes('sep=;\n\nfile;"a\n b"\n\u00e4.png;1\nb.png;0\n'.encode("cp1252"))
    assert read_first_rows(path, 2) == [["file", "a b"], ["\u00e4.png", "1"]]
    path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    assert read_first_rows(tmp_path / "missing.csv", 2) == []


def test_a_cell_of_many_letters_is_read_and_a_longer_one_is_named(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, "file,report", f'"{"no finding " * 12727}"')
    assert len(columns.get_column("report").cells[0]) == 139_996
    lines = "\n".join("no finding " * 60 for _ in range(2000))
    with pytest.raises(BadInput, match="Remove the column of long texts"):
        columns_of(tmp_path, "file,report", f'"{lines}"')
