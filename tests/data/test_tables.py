"""Tables of any program: what is read is what the table says, and what says nothing is refused with its line."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from polyclinic.common.errors import BadInput
from polyclinic.data.base.names import (
    find_similar_names,
    map_names_to_group_names,
    normalize_name,
    normalize_name_array,
)
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.images import store
from polyclinic.data.images.store import DecodedImageStore
from polyclinic.data.load import load_dataset, open_label_table
from polyclinic.data.tables.csv import read_csv_table
from polyclinic.data.tables.files import PictureFileFinder
from polyclinic.data.tables.labels import LabelTable

ROWS = 24
NFD_NAME, NFC_NAME = "Mu\u0308ller", "M\u00fcller"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures that nobody decodes."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "scans").mkdir()
    for row in range(ROWS):
        (folder / "scans" / f"{row:02}.png").touch()
    return folder


def spec_of(**settings: Any) -> FolderDatasetSpec:
    files = {"images": "scans", "labels": "t.csv", "image_column": "file", "patient_column": "id"}
    labels = {} if "finding_column" in settings else {"label_columns": ("Mass", "Edema")}
    return FolderDatasetSpec.model_validate(
        {"kind": "folder", **files, **labels, "missing_files": "ignore", **settings}
    )


def read(folder: Path, table: str | bytes, **settings: Any) -> LabelTable:
    (folder / "t.csv").write_bytes(table.encode() if isinstance(table, str) else table)
    return open_label_table(spec_of(**settings), folder)


def refusals(folder: Path, table: str | bytes, **settings: Any) -> dict[str, str]:
    """The faults of a table by their keys."""
    with pytest.raises(BadInput) as caught:
        read(folder, table, **settings)
    return {fault.where: str(fault) for fault in caught.value.faults}


def rows_of(*rows: str, header: str = "file,id,Mass,Edema") -> str:
    """A table with these rows behind the name of a picture each."""
    return "\n".join([header, *(f"{number:02}.png,{row}" for number, row in enumerate(rows))]) + "\n"


HEADER = "file,id,finding"
FINDINGS: dict[str, Any] = {"finding_column": "finding", "classes": ("Effusion", "Mass")}
PLEURAL: dict[str, Any] = {"finding_column": "finding", "classes": ("Pleural Effusion", "Mass")}


def findings(*cells: str) -> str:
    """A table with these findings of a picture and a patient each."""
    return written([HEADER.split(","), *([f"{row:02}.png", f"p{row}", cell] for row, cell in enumerate(cells))])


# ---------------------------------------------------------------------- names

INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u202a\u2066\u061c\u180e\ufe0f\u034f\u2800"
SPACES = " \t\n\r\x0b\x0c\x1c\x85\u00a0\u1680\u2000\u2007\u2009\u2028\u202f\u205f\u3000"


@given(st.text())
def test_a_normalised_name_stays_as_it_is(text: str) -> None:
    assert normalize_name(normalize_name(text)) == normalize_name(text)


@pytest.mark.parametrize("sign", INVISIBLE)
def test_signs_without_a_glyph_are_no_part_of_a_name(sign: str) -> None:
    assert normalize_name(f"{sign}p{sign}1{sign}") == "p1"


@pytest.mark.parametrize("space", SPACES)
def test_all_white_space_is_one_space(space: str) -> None:
    assert normalize_name(f"{space}Lung{space} Mass{space}") == "Lung Mass"


ALIKE_NAMES = (  # numbers; signs and letters; words and endings; groups of digits; other alphabets; names of people
    "7 = 7.0; 7 = 7,00; 007 = 7; 1234 = 1,234; '7 = 7; 7 = +7; 7 = 7e0; 1_1 = 1_1.0; p7 = p7.0; 1 = 1.0.0; 1e3 = 1000",
    "P-1 = p1; P 01 = p_1; A.b = a b; P+1 = P1; P~1 = P 1; P7 = (P7); 7 = P7; A-BC-1 = ABC1; AB C1 = ABC-01",
    "7 = MRN:7; Patient 007 = 7; P7 = Pat7; P-7 = ID P7; P7 = p7.dcm; P7 = P7.nii.gz; sub-007 = 7; Pt. 7 = P7",
    "P1 = 01; P0 = 00",
    "Case 12 = 12; Patient No. 12 = 12; Fall-Nr. 012 = 12; ACC:1234 = 1234; P1@north = P1; P1^^^north = P1",
    "north\\P1 = north/P1; P1 = north\\P1; north/P-01 = p1^North; 7^^^A&1.2&ISO^MR = 7; 12-034 = 12034",
    "943 476 5919 = 9434765919; 943 4765919 = 943-476-5919; 012-345-6789 = 123456789; 1\u2019234 = 1234",
    "3f2504e0-4f89-11d3-9a0c-0305e82c3301 = 3F2504E04F8911D39A0C0305E82C3301; \u00c5sa = Aasa; S\u00f8ren = Soeren",
    "\uff17 = 7; \u0667 = 7; 7 = \u21167; \u0420\u0410\u04251 = PAX1; \u0391\u03921 = ab1; \uff30\uff11 = p1",
    f"{NFC_NAME} = muller; {NFC_NAME} = Mueller; Doe^John = Doe^John^^^; Doe, John = DOE^JOHN; John Doe = Doe^John",
    "Anna van der Berg = van der Berg, Anna; 1234/56 = 123456; 12,34,567 = 1234567",
)
UNLIKE_NAMES = (
    "1-23 = 12-3; 12-34-5 = 1-234-5; A1-1 = A11; 1.2.840.1.11 = 1.2.840.11.1; 1.2.840.1.11 = 1.2.840.111; 7 = 70",
    "p1 = p2; 2cae05 = 2ca005; 1.2.30 = 1.23.0; 1.2 = 1.2.0; A1 = AA1; C7 = 7; P7.1 = P7; A:1 = B:1; acc12 = ac12",
    "north/P1 = south/P1; P1^north = P2^north; Doe^John = Doe^Jane; Anna Maria = Maria Anna; का = कि",
)


def pairs(lines: Sequence[str]) -> list[list[str]]:
    return [pair.split(" = ") for pair in "; ".join(lines).split("; ")]


@pytest.mark.parametrize(("name", "other"), [*pairs(ALIKE_NAMES), ("patient_id=7", "ID7")])
def test_names_that_may_be_one_are_similar(name: str, other: str) -> None:
    for names in ([name, "x", other], [other, "x", name]):
        assert {*find_similar_names(names)} | {*find_similar_names(names).values()} == {name, other}


@pytest.mark.parametrize(("name", "other"), pairs(UNLIKE_NAMES))
def test_names_with_other_letters_or_numbers_are_not_similar(name: str, other: str) -> None:
    assert find_similar_names([name, other]) == {}


@pytest.mark.parametrize(
    "names",
    [
        [str(number) for number in range(3000)],
        [f"site-{site:03}-{number:02}" for site in range(1, 60) for number in range(1, 60)],
        [f"{site}-{number}" for site in range(1, 60) for number in range(1, 60)],
        [f"{year}-{month}-{day}" for year in (2023, 2024) for month in range(1, 13) for day in range(1, 29)],
        [f"{day:02}{month:02}{number:06}" for day in (1, 11) for month in (1, 11) for number in range(900)],
        [f"{number * 7919:09}"[:3] + f" {number * 6007 % 1000:03} {number:04}" for number in range(3000)],
        [f"{number * 2654435761 % 2**32:08x}" for number in range(3000)],
        [f"{number * 2654435761 % 2**32:08x}-{number:04x}" for number in range(3000)],
    ],
)
def test_numbers_of_one_form_are_not_similar(names: list[str]) -> None:
    assert find_similar_names(list(dict.fromkeys(names))) == {}


@hypothesis_settings(max_examples=40)
@given(st.permutations(["1-2345", "12345", "12-345", "north/P9", "P9", "south/P9", "x"]))
def test_all_names_of_a_group_are_joined_in_any_order(names: list[str]) -> None:
    groups = dict.fromkeys(("1-2345", "12345", "12-345"), "1-2345")
    groups |= dict.fromkeys(("north/P9", "P9", "south/P9"), "P9")
    assert map_names_to_group_names(find_similar_names(names)) == groups


def test_a_text_in_a_formula_is_that_text() -> None:
    assert normalize_name('="007"') == normalize_name(' ="007 "\u200b') == "007"
    assert normalize_name('="a"&"b"') == '="a"&"b"'


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (np.array([7.0, 8.0]), ["7", "8"]),
        (np.array([b"p1 ", b"p\xc3\xa9"]), ["p1", "p\u00e9"]),
        (np.array(["p1\u200b", "p2"]), ["p1", "p2"]),
        (np.array([7, "a"], dtype=object), ["7", "a"]),
        (np.array([0.5, 1.0]), ["0.5", "1.0"]),
    ],
)
def test_names_come_from_arrays_of_any_kind(values: NDArray[Any], names: list[str]) -> None:
    assert normalize_name_array(values).tolist() == names


def test_a_table_in_use_is_not_read_again_unless_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,b\n1,2\n")
    columns = read_csv_table(file, "labels")
    assert read_csv_table(file, "data.labels") is columns
    file.write_text("a,b\n1,23\n")
    assert read_csv_table(file, "labels")["b"].tolist() == ["23"]


# ---------------------------------------------------------------------- forms of a table

PLAIN = [
    ["file", "id", "Mass", "Edema"],
    *([f"{row:02}.png", f"p{row}", str(row % 2), str(row % 3 % 2)] for row in range(6)),
]


def written(rows: Sequence[Sequence[str]] = PLAIN, separator: str = ",", ending: str = "\n") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, lineterminator=ending).writerows(rows)
    return file.getvalue()


UMLAUT = written().replace("p3", NFC_NAME)
FORMS: Mapping[str, str | bytes] = {
    "semicolons": written(separator=";"),
    "tabs": written(separator="\t"),
    "bars": written(separator="|"),
    "Excel's separator line": "sep=;\r\n" + written(separator=";", ending="\r\n"),
    "a byte order mark": b"\xef\xbb\xbf" + written().encode(),
    "UTF-16": written(separator="\t").encode("utf-16"),
    "old line ends": written(ending="\r"),
    "every cell quoted": re.sub(r"[^,\n]+", r'"\g<0>"', written()),
    "spaces before quotes": re.sub(r",([^,\n]+)", r', "\1"', written()),
    "empty lines and lines of separators": written().replace("\n", "\n\n,,,\n"),
    "spaces around everything": written().replace(",", "\u00a0 , "),
    "decimal commas": re.sub(r",([01])\b", r',"\1,0"', written()),
    "decimal commas between semicolons": re.sub(r";([01])\b", r";\1,0", written(separator=";")),
    "numbers with points": re.sub(r",([01])\b", r",\1.00", written()),
    "columns without a name": re.sub(r"(?m)$(?=\n)", ",,", written()),
    "other columns with separators and quotes": written([[*row, 'a;b|"c"\td, e\nf'] for row in PLAIN]),
    "signs without a glyph in the header": written().replace("Mass", "\ufeffMa\u00adss "),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_is_read_in_any_form(form: str, folder: Path) -> None:
    table = read(folder, FORMS[form])
    assert table.patients.tolist() == [f"p{row}" for row in range(6)]
    assert table.labels.tolist() == [[row % 2, row % 3 % 2] for row in range(6)]


def test_text_of_an_old_mac_is_refused_by_its_line(folder: Path) -> None:
    for name in ("Fl\u00e4che", "gro\u00df", "M\u00fcller", "m\u00e9diastin"):
        (folder / "t.csv").write_bytes(f"file,id,Mass,Edema\n00.png,{name},1,0\n".encode("mac-roman"))
        with pytest.raises(BadInput, match="line 2"):
            read_csv_table(folder / "t.csv", "data.labels")
        (folder / "t.csv").write_bytes(f"file,id,Mass,Edema\n00.png,{name},1,0\n".encode("cp1252"))
        assert read_csv_table(folder / "t.csv", "data.labels")["id"].tolist() == [name]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
def test_letters_beyond_ascii_are_read(encoding: str, folder: Path) -> None:
    table = UMLAUT if encoding != "cp1252" else UMLAUT.replace("p4", "\u201eK\u2026")
    patients = read(folder, table.encode(encoding)).patients.tolist()
    assert NFC_NAME in patients
    assert ("\u201eK\u2026" in patients) == (encoding == "cp1252")


def test_a_file_of_two_encodings_names_one_patient_once(folder: Path) -> None:
    rows = [f"{row:02}.png,{NFC_NAME},1,0\n".encode("latin-1" if row % 2 else "utf-8") for row in range(6)]
    assert set(read(folder, b"file,id,Mass,Edema\n" + b"".join(rows)).patients.tolist()) == {NFC_NAME}


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ('file,id,Mass,Edema\n00.png,"p\n1",1,0\n01.png,p2,ja,0\n', 4),
        ('file,id,"Mass",Edema,"re\nport"\n\n00.png,p1,1,0,"a\r\n\r\nb"\n01.png,p2,ja,0,x\n', 7),
        ("sep=,\nfile,id,Mass,Edema\n,,,\n00.png,p1,ja,0\n", 4),
        ("\n\nfile,id,Mass,Edema\r\n\r\n00.png,p1,ja,0\r\n", 5),
        ("file,id,Mass,Edema\r00.png,p1,ja,0\r", 2),
    ],
)
def test_line_numbers_are_those_of_the_file(table: str, line: int, folder: Path) -> None:
    assert f'"ja" in line {line};' in refusals(folder, table)["data.label_columns"]


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ('file,id,Mass,Edema\n00.png,p1,"1"1,0\n', "line 2"),
        ("file;id;Mass;Edema\n00.png;p1;1;0\n01.png;p2;1;0;0\n", "semicolons"),
        ("file,id,Mass,Mass \n00.png,p1,1,0\n", '"Mass"'),
        (b"file,id,Mass,Edema\n00.png,p1,1,0\n01.png,p\0,1,0\n", "line 3"),
    ],
)
def test_a_form_that_has_no_one_meaning_is_refused(table: str | bytes, word: str, folder: Path) -> None:
    assert word in refusals(folder, table)["data.labels"]


# ---------------------------------------------------------------------- labels

TRUTH = {"present": 1.0, "absent": 0.0, "uncertain": np.nan, "blank": np.nan}
SPELLINGS = {
    "present": ["1", "1.0", "1,0", "1.", "+1", " 1\u00a0", "1\u200b", "1.000"],
    "absent": ["0", "0.0", "0,00", "-0.0", "\t0"],
    "uncertain": ["-1", "-1.0", "-1,0", "\u22121"],
    "blank": ["", " ", "nan", "NaN", "NA", "N/A", "#N/A", "<NA>", "NULL", "None", "\\N", "\u200b"],
}
MEANINGS = st.sampled_from(list(SPELLINGS)).flatmap(
    lambda meaning: st.sampled_from(SPELLINGS[meaning]).map(lambda cell: (meaning, cell))
)
SEPARATED = st.sampled_from([",", ";", "\t", "|"])


@hypothesis_settings(max_examples=40)
@given(st.lists(st.tuples(MEANINGS, MEANINGS), min_size=1, max_size=ROWS), SEPARATED)
def test_labels_are_those_that_were_written(folder: Path, cells: list[Any], separator: str) -> None:
    rows = [[f"{row:02}.png", f"p{row}", mass[1], edema[1]] for row, (mass, edema) in enumerate(cells)]
    expected = [[TRUTH[mass[0]], TRUTH[edema[0]]] for mass, edema in cells]
    table = read(folder, written([PLAIN[0], *rows], separator))
    np.testing.assert_array_equal(table.labels, np.array(expected, dtype=np.float32))


def test_words_of_label_columns_mean_what_the_user_lists_in_any_case(folder: Path) -> None:
    words = ("ja", "Nein", "?", "", "1", "no", "2")
    table = rows_of(*(f"p{row},{word},0" for row, word in enumerate(words)))
    settings = {"present": ["JA", "no"], "absent": ["nein", "2"], "not_assessed": ["?"], "blank": "negative"}
    labels = read(folder, table, **settings).labels[:, 0]
    np.testing.assert_array_equal(labels, [1, 0, np.nan, 0, 1, 1, 0])


def slow_label(cell: str) -> float | None:
    """A label read letter by letter; None where it is none."""
    text = "".join(letter for letter in cell if unicodedata.category(letter) not in ("Cf", "Cc") or letter.isspace())
    if text.strip() == ".":
        return np.nan
    text = text.strip().replace(",", ".").replace("\u2212", "-")
    if text.lower() in ("", "nan", "na", "n/a", "#n/a", "<na>", "nat", "null", "none", "\\n"):
        return np.nan
    try:
        value = float(text) if set(text) <= set("+-.01") else None
    except ValueError:
        return None
    return {1.0: 1.0, 0.0: 0.0, -1.0: np.nan}.get(value) if value is not None else None


@given(st.lists(st.one_of(st.text("01-+., aN\u200b\u00a0", max_size=4), st.text(max_size=3)), min_size=1, max_size=8))
def test_any_cell_is_read_as_by_a_slow_reference_or_refused(folder: Path, cells: list[str]) -> None:
    cells = [re.sub("[\0\r]", "", cell) for cell in cells]  # a carriage return that is not quoted ends a line
    expected = [slow_label(cell) for cell in cells]
    table = written([PLAIN[0], *([f"{row:02}.png", f"p{row}", cell, "0"] for row, cell in enumerate(cells))])
    try:
        labels = read(folder, table.encode(errors="surrogatepass")).labels[:, 0]
    except BadInput:
        # Python reads numbers with a leading zero, point or comma; they are no labels. Nothing else may be refused.
        odd = any(re.search(r"[01]{2}|^\W*[.,]|[+-]$", normalize_name(cell)) for cell in cells)
        assert odd or None in expected or any(unicodedata.category(letter) == "Cs" for cell in cells for letter in cell)
        return
    assert None not in expected
    np.testing.assert_array_equal(labels, np.array(expected, dtype=np.float32))


NO_LABELS = ["2", "-2", "0.5", "ja", "01", "1e0", "--1", "1.0.0", "1;0", "nil", "-", "?", "\u00bd", "wahr"]


@pytest.mark.parametrize("cell", NO_LABELS)
def test_a_cell_that_is_no_label_is_refused_with_its_line(cell: str, folder: Path) -> None:
    assert f'"{cell}" in line 3' in refusals(folder, rows_of("p0,1,0", f"p1,{cell},0"))["data.label_columns"]


# ---------------------------------------------------------------------- findings

NAMES: Mapping[str, Sequence[float]] = {
    "Effusion": (1, 0),
    "effusion ": (1, 0),
    "EFFUSION\u200b": (1, 0),
    "Mass": (0, 1),
    "\u00a0mass": (0, 1),
    "Effusion|Mass": (1, 1),
    "Mass | Effusion|": (1, 1),
    "['Mass', 'Effusion']": (1, 1),
    '["Effusion"]': (1, 0),
    "No Finding": (0, 0),
    "no  finding": (0, 0),
    "NORMAL": (0, 0),
    "": (np.nan, np.nan),
    "NaN": (np.nan, np.nan),
}


@hypothesis_settings(max_examples=40)
@given(st.lists(st.sampled_from(list(NAMES)), min_size=1, max_size=ROWS))
def test_findings_are_those_that_were_written(folder: Path, cells: list[str]) -> None:
    table = read(folder, findings(*cells), **FINDINGS)
    np.testing.assert_array_equal(table.labels, np.array([NAMES[cell] for cell in cells], dtype=np.float32))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("Efusion", ['"Efusion" in line 3', 'Did you mean "Effusion"?']),
        ("Mass|Efusion", ['"Efusion" in line 3']),
        ("Pleural Effusion", ['Did you mean "Effusion"?']),
        ("Effusion;Mass", ['separated by ";"']),
        ("Effusion/Mass", ['separated by "/"']),
        ("Effusion + Mass", ['separated by "+"']),
        ("Mass, left", ['separated by ","']),
        ("Nodule", ['"Nodule" in line 3', "data.other_findings"]),
        ("nil", ["data.no_finding"]),
        ("1", ['"1" in line 3']),
        ("Ma\u00dfs", ['"Ma\u00dfs" in line 3']),
        ("[Mass]", ['"[Mass]" in line 3']),
    ],
)
def test_a_part_that_is_no_class_is_refused_with_its_line(cell: str, words: list[str], folder: Path) -> None:
    (text,) = refusals(folder, findings("Mass", cell), **FINDINGS).values()
    assert all(word in text for word in words), text


def test_a_cell_that_names_a_class_and_no_finding_is_refused(folder: Path) -> None:
    assert "line 3" in refusals(folder, findings("Mass", "Mass|No Finding"), **FINDINGS)["data.finding_column"]
    table = findings("Mass", "No Finding|Pacemaker|normal")
    assert read(folder, table, **FINDINGS, other_findings=("Pacemaker",)).labels.tolist() == [[0, 1], [0, 0]]


def test_other_findings_are_counted_and_those_like_a_class_are_not_guessed(folder: Path) -> None:
    table = findings("Mass", "Nodule|Mass", "Nodule", "Hernia")
    for others in (("Nodule", "Hernia"), ("*",)):
        read_table = read(folder, table, **FINDINGS, other_findings=others)
        assert read_table.other_findings == {"Nodule": 2, "Hernia": 1}
        assert read_table.labels.tolist() == [[0, 1], [0, 1], [0, 0], [0, 0]]
    (note,) = read_table.notes
    assert "Nodule 2, Hernia 1" in note or "Nodule 2 and Hernia 1" in note
    assert '"Hernia"' in refusals(folder, table, **FINDINGS, other_findings=("Nodule",))["data.classes"]
    table = findings("Mass", "Masses")
    assert '"Masses" in line 3' in refusals(folder, table, **FINDINGS, other_findings=("*",))["data.classes"]
    assert read(folder, table, **FINDINGS, other_findings=("Masses",)).other_findings == {"Masses": 1}


@pytest.mark.parametrize("cell", ["mild scarring", "Abnormal", "Hernia", "poor quality"])
def test_a_finding_that_shares_letters_with_a_short_class_is_another_finding(cell: str, folder: Path) -> None:
    settings: dict[str, Any] = {"finding_column": "finding", "classes": ("ILD", "Mass"), "other_findings": ("*",)}
    assert read(folder, findings("Mass", cell), **settings).labels.tolist() == [[0, 1], [0, 0]]
    assert 'contains "ILD"' in refusals(folder, findings("oldILD"), **settings)["data.classes"]


SIGNS = ("\n", "\t", " and ", " und ", " ", "-", "_", ".", ":")
PARTS = "Effusion; effusions; Pleural; effusion, pleural"
OF_A_MASS = "[Mass]; ('Mass', 'Effusion'); {'Mass'}; ['Mass', nan]; \"Mass\"; Mass12mm; rightMassLarge"
OF_AN_EFFUSION = "large pleural effusion; no Effusion; Effusion: 0; PleuralEffusion; Randeffusion"
CONTAINING: list[tuple[str, str, dict[str, Any]]] = [
    *((f"Mass{sign}Effusion", json.dumps(sign), FINDINGS) for sign in SIGNS),
    ("Mass\r\nEffusion", '"\\n"', FINDINGS),
    ("Mass&Hernia", '"&"', FINDINGS),
    ("Mass\uff1bHernia", "\uff1b", FINDINGS),
    *((f"Mass{sign}Effusion", sign.strip(), FINDINGS) for sign in ("\u00b7", " \u2022 ", "\u3001")),
    *((cell, "Mass", FINDINGS) for cell in OF_A_MASS.split("; ")),
    *((cell, "Effusion", FINDINGS) for cell in OF_AN_EFFUSION.split("; ")),
    ("normal study", "Normal", FINDINGS),
    *((cell, "Pleural Effusion", PLEURAL) for cell in PARTS.split("; ")),
]


@pytest.mark.parametrize(("cell", "word", "settings"), CONTAINING)
def test_a_name_that_contains_a_class_or_is_a_part_of_one_is_no_other_finding_unless_it_is_listed(
    cell: str, word: str, settings: dict[str, Any], folder: Path
) -> None:
    (text,) = refusals(folder, findings("Mass", cell), **settings, other_findings=("*",)).values()
    assert all(part in text for part in ("in line 3", word, "data.other_findings")), text
    labels = read(folder, findings("Mass", cell), **settings, other_findings=("*", cell), separator="@").labels
    assert labels.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("separator", "cell"), [("\n", "Mass\r\n Effusion"), ("\r\n", "Mass\nEffusion"), ("\t", "Mass\tEffusion")]
)
def test_line_ends_and_tabs_can_separate_findings(separator: str, cell: str, folder: Path) -> None:
    table = read(folder, findings("Mass", cell), **FINDINGS, separator=separator)
    assert table.labels.tolist() == [[0, 1], [1, 1]]


def test_a_class_may_be_written_over_two_lines_of_a_cell(folder: Path) -> None:
    rows = [HEADER.split(","), ["00.png", "p\n0", "Pleural\nEffusion"], ["01.png", "p 0", "Mass"]]
    table = read(folder, written(rows), **PLEURAL)
    assert (table.labels.tolist(), set(table.patients.tolist())) == ([[1, 0], [0, 1]], {"p 0"})


NOTHING = ["-", "?", "--", "unknown", "Unknown", "not read yet", "not reported", "nil", "n.a.", "pending", "0"]
NOTHING += ["#REF!", "#VALUE!", "#DIV/0!", "#NAME?", "#WERT!", "#NV", "####", "Mass|nan", "Mass|?"]
NOTHING += ["[nan]", "[None]", "(-)", "[]", "['']", "[ '', \"\" ]", "{}", "|", " | "]
NOTHING += ["#NA", "#N/A N/A", "-nan", "1.#QNAN", "-1.#IND", "NA_character_", "=NA()", "&nbsp;", "_x000D_"]
NOTHING += ["NaN.0", "(null)", "pd.NA", "undefined", ".a", "UNK", "TBA", "see report", "not available.", "no result"]
NOTHING += ["missing data", "Not assessable"]


@pytest.mark.parametrize("cell", NOTHING)
@pytest.mark.parametrize("blank", ["unknown", "negative"])
def test_a_cell_that_names_nothing_is_never_absent(cell: str, blank: str, folder: Path) -> None:
    text = refusals(folder, findings("Mass", cell), **FINDINGS, other_findings=("*",), blank=blank)["data.classes"]
    assert all(part in text for part in ("in line 3", "data.no_finding")), text


def test_a_cell_that_names_nothing_can_be_listed(folder: Path) -> None:
    listed = ("-", "none", "NA", "[]")
    for settings in ({"no_finding": listed}, {"other_findings": listed}):
        table = read(folder, findings("Mass", "-", "None", "NA", "[]"), **FINDINGS, **settings)
        assert table.labels.tolist() == [[0, 1], [0, 0], [0, 0], [0, 0], [0, 0]]


def test_case_counts_between_classes_that_differ_in_nothing_else(folder: Path) -> None:
    settings = {"finding_column": "finding", "classes": ("MASS", "Mass")}
    assert read(folder, findings("MASS", "Mass"), **settings).labels.tolist() == [[1, 0], [0, 1]]
    assert "data.classes" in refusals(folder, findings("mass"), **settings)


@pytest.mark.parametrize(("blank", "value"), [("unknown", np.nan), ("negative", 0.0)])
def test_blank_findings_follow_the_key(blank: str, value: float, folder: Path) -> None:
    table = read(folder, findings("", "Mass", "NA", "#N/A", "None", "\\N"), **FINDINGS, blank=blank)
    np.testing.assert_array_equal(table.labels, [[value, value], [0, 1], *[[value, value]] * 4])


@pytest.mark.parametrize(
    "settings",
    [
        {**FINDINGS, "uncertain": "negative"},
        {"separator": ";"},
        {"other_findings": ["Nodule"]},
        {**FINDINGS, "classes": ["Mass", "Mass\u200b"]},
        {**FINDINGS, "classes": ["Mass|Nodule"]},
        {"label_columns": ["Mass", " Mass"]},
        {**FINDINGS, "present": ["ja"]},
        {"present": ["ja"], "absent": ["JA"]},
    ],
)
def test_a_key_without_an_effect_is_refused(settings: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValidationError):
        read(folder, written(), **settings)


def test_all_faults_of_all_columns_are_named_together(folder: Path) -> None:
    table = "file,id,Mass,Edema,part,centre\n00.png,p0,ja,0,train,A\n,P0,1,no,often,a\n02.png,,1,0,train,A\n"
    keys = refusals(folder, table, split_column="part", source_column="centre").keys()
    of_columns = {f"data.{name}_column" for name in ("image", "patient", "split", "source")}
    assert keys == {*of_columns, "data.label_columns"}


# ---------------------------------------------------------------------- patients

SAME = ["{}", "{} ", "\u00a0{}", "{}\u200b", "\ufeff{}", "{}\t"]
ALIKE = ["{0}.0", "00{0}", "P{0}", "p {0}", "p-0{0}"]


def fold_all(name: str) -> str:
    """The numbers and words of a patient's name, with nothing that a person may write in two ways."""
    bare = re.sub(r"^p[^\w]*(?=\d)", "", normalize_name(name).casefold())
    words = re.findall(r"\d+|[a-z]+", re.sub(r"^(\d+)\.0+$", r"\1", bare))
    return " ".join(word.lstrip("0") or "0" if word.isdecimal() else word for word in words)


@given(st.data(), st.lists(st.integers(1, 9), min_size=2, max_size=ROWS), st.booleans())
def test_no_spelling_puts_a_patient_in_two_parts(
    folder: Path, data: st.DataObject, numbers: list[int], alike: bool
) -> None:
    spellings = st.sampled_from(SAME + ALIKE if alike else SAME)
    ids = [data.draw(spellings).format(number) for number in numbers]
    rows = [
        [f"{row:02}.png", name, str(number % 2), "0"]
        for row, (name, number) in enumerate(zip(ids, numbers, strict=True))
    ]
    table = read(folder, written([PLAIN[0], *rows]), similar_patients="join" if alike else "fault")
    parts = {(fold_all(name), part) for name, part in zip(ids, table.parts.tolist(), strict=True)}
    assert len(parts) == len(set(map(fold_all, ids))) == len(set(table.patients.tolist()))


@given(st.lists(st.text("pP01 .-\u00a0\u200b", min_size=1, max_size=4), min_size=2, max_size=10))
def test_patients_that_are_read_are_alike_in_nothing(folder: Path, ids: list[str]) -> None:
    rows = [[f"{row:02}.png", name, "1", "0"] for row, name in enumerate(ids)]
    try:
        patients = read(folder, written([PLAIN[0], *rows])).patients
    except BadInput:
        return
    assert len(set(map(fold_all, ids))) == len(set(patients.tolist()))


NOBODY = "; NaN; \u200b; -; ANON; Anonymous; no name; unknown; UNK; \\N; (null); #REF!; N.A.; [REDACTED]; *; Anonymous^"
NOBODY += "; ANON^; No^Name; XXXX; unknown patient; Patient unknown; not available; missing; PATIENT"
NOBODY += "; de identified; TBD; NoPatientID; Test^Patient"


def test_similar_patients_stop_with_the_pairs_and_their_lines(folder: Path) -> None:
    text = refusals(folder, rows_of("p1,1,0", "p2,1,0", "P-01,0,1", "7,0,1", "7.0,0,1"))["data.patient_column"]
    assert '"p1" (line 2) and "P-01" (line 4); "7" (line 5) and "7.0" (line 6)' in text
    assert 'similar_patients = "join"' in text


@pytest.mark.parametrize(
    ("patient", "word"),
    [
        *((name, "without a patient") for name in NOBODY.split("; ")),
        ("1.23457E+11", "shortened"),
        ("1E+14", "shortened"),
    ],
)
def test_a_cell_that_names_no_patient_is_refused_with_its_line(patient: str, word: str, folder: Path) -> None:
    text = refusals(folder, rows_of("p0,1,0", f"{patient},1,0"))["data.patient_column"]
    assert word in text
    assert "line 3" in text


def test_long_numbers_that_end_in_zeros_were_cut_by_a_spreadsheet(folder: Path) -> None:
    whole = [f"12345678901234{number:02}" for number in (17, 20, 23, 35, 41, 56)]  # one in ten ends in 0
    assert len(set(read(folder, rows_of(*(f"{name},1,0" for name in whole))).patients)) == 6
    cut = ["1234567890123000", "1234567890123000", "1234567890124000", *whole[:2]]
    text = refusals(folder, rows_of(*(f"{name},1,0" for name in cut)))["data.patient_column"]
    assert "shortened" in text
    assert '"1234567890123000" in line 2 (2 lines)' in text


@pytest.mark.parametrize(
    ("name", "count", "others", "is_named"),
    [
        ("2", 22, 2, True),
        ("H-22", 11, 13, True),
        ("q8x", 8, 13, False),
        *((name, 5, 15, True) for name in ("ANON1", "0000000", "XX1")),
        *((name, 1, 15, False) for name in ("ANON1", "0")),
        ("q7x", 5, 15, False),
    ],
)
def test_a_patient_of_most_images_is_named_and_a_pseudonym_for_nobody_if_many_images_have_it(
    name: str, count: int, others: int, is_named: bool, folder: Path
) -> None:
    rows = [*(f"{name},1,0" for _ in range(count)), *(f"q{row}x,1,0" for row in range(others))]
    notes = read(folder, rows_of(*rows)).notes
    assert [f'"{name}" is the patient of {count} of' in note for note in notes] == [True] * is_named


def test_spellings_of_one_hospital_are_refused_and_blank_ones_are_unknown(folder: Path) -> None:
    header = "file,id,Mass,Edema,centre"
    table = rows_of("p0,1,0,North Clinic", "p1,1,0,north-clinic", header=header)
    assert "line 3" in refusals(folder, table, source_column="centre")["data.source_column"]
    for name, other in (("St. Mary's", "St Marys"), ("CHU-Sud", "C.H.U. Sud"), ("Klinik Köln", "KLINIK KOELN")):
        table = rows_of(f"p0,1,0,{name}", f"p1,1,0,{other}", header=header)
        assert f'"{other}" (line 3)' in refusals(folder, table, source_column="centre")["data.source_column"]
    table = rows_of(
        "p0,1,0,Ward 1 12", "p1,1,0,Ward 11 2", "p2,1,0,St. Mary's Hospital", "p3,1,0,St Mary", header=header
    )
    assert len(set(read(folder, table, source_column="centre").sources)) == 4
    table = rows_of("p0,1,0,North ", "p1,1,0,N/A", "p2,1,0,North\u200b", header=header)
    assert read(folder, table, source_column="centre").sources.tolist() == ["North", "", "North"]


# ---------------------------------------------------------------------- pictures


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "scans" / name).touch()
    return folder


@pytest.mark.parametrize(
    ("on_disk", "in_table"),
    [
        (f"{NFD_NAME}.png", f"{NFC_NAME}.png"),
        (f"{NFC_NAME}.png", f"{NFD_NAME}.png"),
        (f"{NFD_NAME}/a.png", f"{NFC_NAME}/a.png"),
        ("a  b.png", "a b.png"),
        ("a\u00a0b.png", "a b.png"),
        ("A.PNG", "a.png"),
        ("Sub/A.png", "sub/a.png"),
        ("sub/a.png", "sub\\a.png"),
        ("a.dcm", "a"),
        ("1.2.840.dcm", "1.2.840"),
        ("a.nii.gz", "a"),
        ("b/a.png", "./b//a.png"),
    ],
)
def test_a_picture_is_found_under_a_name_nobody_can_tell_from_it(on_disk: str, in_table: str, tmp_path: Path) -> None:
    table = read(touch(tmp_path, on_disk), f"file,id,Mass,Edema\n{in_table},p0,1,0\n", missing_files="fault")
    assert os.path.samefile(table.files[0], tmp_path / "scans" / on_disk)


def test_folder_and_table_are_found_in_either_form_of_unicode(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    (tmp_path / "scans").rename(tmp_path / NFD_NAME)
    (tmp_path / f"{NFD_NAME}.csv").write_text("file,id,Mass,Edema\na.png,p0,1,0\n")
    table = open_label_table(spec_of(images=NFC_NAME, labels=f"{NFC_NAME}.csv", patient_column=None), tmp_path)
    assert table.files[0].exists()


@pytest.mark.parametrize(
    ("on_disk", "in_table"),
    [
        (("A.png", "a.PNG"), "a.png"),
        (("a.dcm", "a.png"), "a"),
        (("1.2.840.113",), "1.2.840"),
        (("a.txt",), "a"),
        (("a.png",), "/a.png"),
    ],
)
def test_a_picture_is_not_guessed(on_disk: tuple[str, ...], in_table: str, tmp_path: Path) -> None:
    touch(tmp_path, *on_disk)
    assert in_table in refusals(tmp_path, f"file,id,Mass,Edema\n{in_table},p0,1,0\n")["data.images"]


def test_lines_that_say_the_same_of_a_picture_count_once_and_others_are_refused(folder: Path) -> None:
    same = "file,id,Mass,Edema\n00.png,p0,1,0\n./00.png,p0,1.0,0\n01.png,p1,1,\n01.PNG,p1,1,NA\n"
    table = read(folder, same)
    assert (len(table.files), table.repeated) == (2, 2)
    for line, column in {
        "p0,0,0": "Mass",
        "p9,1,0": "patient",
        "p0,1,": "Edema",
        "p9,0,": "Mass, Edema and patient",
    }.items():
        text = refusals(folder, f"file,id,Mass,Edema\n00.png,p0,1,0\n00.png,{line}\n")["data.image_column"]
        assert f'"00.png" (lines 2 and 3: {column})' in text


@pytest.mark.parametrize("name", ["s  1.png", "s\u00a01.png", "s 1\u200b.png"])
def test_two_files_whose_names_are_equal_in_a_cell_are_refused(name: str, tmp_path: Path) -> None:
    touch(tmp_path, "s 1.png", name, "a.png")
    (text,) = refusals(tmp_path, f"file,id,Mass,Edema\n{name},p0,1,0\n", missing_files="ignore").values()
    assert "2 files differ only" in text
    assert read(tmp_path, "file,id,Mass,Edema\na.png,p0,1,0\n").missing == 0


@pytest.mark.parametrize(
    ("on_disk", "name"),
    pairs(
        ["Ma\u00dfe.png = Masse.png; s1.png = \u017f1.png; \ufb01.png = fi.png; \u03b1\u03c2b.png = \u03b1\u03c3b.png"]
    ),
)
def test_a_file_with_other_letters_is_another_file(on_disk: str, name: str, tmp_path: Path) -> None:
    touch(tmp_path, on_disk, "a.png")
    table = f"file,id,Mass,Edema\n{name},p0,1,0\na.png,p1,0,1\n"
    assert "1 of 2 images" in refusals(tmp_path, table, missing_files="fault")["data.images"]
    assert read(tmp_path, table, missing_files="ignore").missing == 1


def test_a_folder_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    (tmp_path / "scans" / "disk").symlink_to(tmp_path / "unmounted")
    table = "file,id,Mass,Edema\ndisk/1.png,p0,1,0\na.png,p1,0,1\n"
    assert "the link leads nowhere" in refusals(tmp_path, table, missing_files="ignore")["data.images"]


def test_a_link_is_the_picture_that_it_leads_to(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "sub/b.png")
    (tmp_path / "scans" / "link.png").symlink_to("a.png")
    (tmp_path / "scans" / "twin.png").hardlink_to(tmp_path / "scans" / "a.png")
    header = "file,id,Mass,Edema\na.png,p0,1,0\n"
    for name in ("link.png", "twin.png", "sub/../a.png"):
        assert read(tmp_path, f"{header}{name},p0,1,0\n").repeated == 1
        text = refusals(tmp_path, f"{header}{name},p1,1,0\n")["data.image_column"]
        assert f'"{name}" (lines 2 and 3: patient)' in text


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose pictures a, b and c, of which b is a copy of a, are all decoded into a cache."""
    monkeypatch.setattr(store, "CACHE_THRESHOLD_BYTES", 0)
    monkeypatch.setattr(store, "MIN_FILE_AGE_S", 0.0)
    (tmp_path / "scans").mkdir()
    for name, grey in (("a", 101), ("b", 101), ("c", 102)):  # files of one size
        Image.new("L", (20, 20), grey).save(tmp_path / "scans" / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize(("row", "count"), [("p0,1,0", 0), ("p0,1,", 0), ("p0,0,0", 1), ("p1,1,0", 1), ("p1,0,1", 1)])
@pytest.mark.parametrize("is_cached", [False, True])
def test_copies_of_a_picture_whose_rows_disagree_are_named(row: str, count: int, is_cached: bool, cached: Path) -> None:
    (cached / "t.csv").write_text(f"file,id,Mass,Edema\na.png,p0,1,0\nb.png,{row}\nc.png,p2,0,1\n")
    place = DecodedImageStore(cached / "cache" if is_cached else None)
    for _ in range(2):
        notes = load_dataset(spec_of(), cached, place).train.notes
        assert ['"b.png" is "a.png"' in note for note in notes] == [True] * count


def test_the_second_start_reads_nothing_of_the_pictures(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cached / "t.csv").write_text("file,id,Mass,Edema\na.png,p0,1,0\nb.png,p1,0,0\n")
    place, opened, open_file = DecodedImageStore(cached / "cache"), list[str](), Path.open

    def note_name(path: Path, *arguments: Any, **others: Any) -> Any:
        opened.append(path.suffix)
        return open_file(path, *arguments, **others)

    first = load_dataset(spec_of(), cached, place).train.notes
    monkeypatch.setattr(Path, "open", note_name)
    assert load_dataset(spec_of(), cached, place).train.notes == first != ()
    assert ".csv" in opened
    assert ".png" not in opened


AS_NOBODY = """
import os, sys
from pathlib import Path
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.load import find_dataset_faults
files = dict(images="scans", labels="t.csv", image_column="file", label_columns=("Mass",), patient_column="id")
fault, ignore = (FolderDatasetSpec(kind="folder", **files, missing_files=key) for key in ("fault", "ignore"))
find_dataset_faults(fault, Path(sys.argv[1]))  # as root, so that all modules are loaded
if os.geteuid() == 0:
    os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
for spec in (fault, ignore):
    print(*find_dataset_faults(spec, Path(sys.argv[1])))
"""


@pytest.mark.parametrize("name", ["b/0.png", "b/sub/0.png"])
def test_a_folder_that_cannot_be_listed_is_a_fault_by_its_name(name: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = touch(Path(made), "a/0.png", name)
        folder.chmod(0o755)
        (folder / "t.csv").write_text(f"file,id,Mass\na/0.png,p0,1\n{name},p1,1\n")
        for entry in (folder / "t.csv", *folder.rglob("*")):  # another test may have left its umask
            entry.chmod(0o755)
        (folder / "scans" / "b").chmod(0)
        command = [sys.executable, "-c", AS_NOBODY, made]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        (folder / "scans" / "b").chmod(0o755)
    expected = f'data.images: 1 folder cannot be listed: "{made}/scans/b" (Permission denied).'
    assert [expected in line for line in ended.stdout.splitlines()] == [True, True], ended.stderr


# ---------------------------------------------------------------------- size

CHECK = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]) << 20, int(sys.argv[2]) << 20))
import numpy as np
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.load import find_dataset_faults
begin = time.process_time()
labels = {"finding_column": "finding", "classes": ["Effusion", "Mass"]}
spec = FolderDatasetSpec.model_validate({"kind": "folder", "images": "scans", "labels": "t.csv", "image_column": "file",
    "patient_column": "id", "source_column": "centre", "missing_files": "ignore", **labels})
problems = find_dataset_faults(spec, Path(sys.argv[1]))
print([fault.where for fault in problems], time.process_time() - begin)
"""


@pytest.mark.parametrize(
    ("rows", "mebibytes"), [(10**5, 256), pytest.param(10**6, 1024, marks=pytest.mark.long, id="million")]
)
def test_a_million_rows_take_twenty_seconds_and_a_gigabyte_at_most(rows: int, mebibytes: int, tmp_path: Path) -> None:
    cells = ["Effusion", "Mass", "Effusion|Mass", "No Finding"]
    with (tmp_path / "t.csv").open("w", encoding="utf-8") as file:
        file.write("file,id,finding,age,centre\n")
        lines = (f"{row:08}.png,P{row // 3:07},{cells[row % 4]},{row % 90},H{row % 12}\n" for row in range(rows))
        file.writelines(lines)
    touch(tmp_path, "00000000.png")
    command = [sys.executable, "-c", CHECK, str(tmp_path), str(mebibytes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout.startswith("[] "), ended.stderr[-2000:]
    begin = time.process_time()
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        assert len({cell for row in csv.reader(file) for cell in row}) > rows
    plain_reading = time.process_time() - begin  # a slower or shared core
    assert float(ended.stdout.split()[1]) < max(rows / 50_000, 16 * plain_reading)


@hypothesis_settings(max_examples=50)
@given(st.lists(st.tuples(*[st.sampled_from(["1", "0", "-1", ""])] * 3), min_size=1, max_size=ROWS))
def test_names_of_one_class_give_its_label_or_the_line_that_disagrees(
    folder: Path, cells: list[tuple[str, str, str]]
) -> None:
    rows = rows_of(
        *(f"p{row}," + ",".join(of_row) for row, of_row in enumerate(cells)), header="file,id,Mass,mass_2,Edema"
    )
    settings: Any = {"label_columns": ("Mass", "mass_2", "Edema"), "synonyms": {"mass_2": "Tumour", "Mass": "Tumour"}}
    sides = [{float(cell) for cell in of_row[:2] if cell in ("0", "1")} for of_row in cells]
    if differ := [row for row, side in enumerate(sides) if len(side) == 2]:
        assert f"line {differ[0] + 2} first" in refusals(folder, rows, **settings)["data.synonyms"]
    else:
        table = read(folder, rows, **settings)
        assert table.class_names == ("Tumour", "Edema")
        assert [label for label in table.labels[:, 0].tolist() if label == label] == [*map(min, filter(None, sides))]


def test_findings_of_several_names_are_one_class(folder: Path) -> None:
    table = findings("Effusion", "Pleural Effusion|Mass", "No Finding", "")
    for classes in (("Effusion", "Mass"), ("Effusion", "Pleural Effusion", "Mass")):
        settings = {"finding_column": "finding", "classes": classes, "synonyms": {"Pleural Effusion": "Effusion"}}
        read_table = read(folder, table, **settings)
        assert read_table.class_names == ("Effusion", "Mass")
        assert np.array_equal(read_table.labels, [[1, 0], [1, 1], [0, 0], [np.nan] * 2], equal_nan=True)


def test_links_to_folders_are_followed_each_folder_once(tmp_path: Path) -> None:
    (tmp_path / "disk" / "below").mkdir(parents=True)
    for name in ("a.png", "below/b.png"):
        (tmp_path / "disk" / name).write_bytes(b"")
    here = tmp_path / "here"
    here.mkdir()
    (here / "images").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "below" / "up").symlink_to(here)
    found = PictureFileFinder().list_files_recursively(here)
    assert sorted(found) == [("images", "a.png"), ("images/below", "b.png")]
