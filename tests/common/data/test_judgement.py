"""A column of a stranger's table holds labels, or is named with the cells that are in the way."""

from pathlib import Path

import pytest

from common.data.tables.csv import TableColumns, read_columns
from common.data.tables.judgement import is_doubtful, judge_column, says_normal
from common.data.tables.roles import guess_roles
from common.errors import BadInput


def columns_of(folder: Path, header: str, *lines: str) -> TableColumns:
    path = folder / "t.csv"
    path.write_text("\n".join((header, *(f"{n}.png,{line}" for n, line in enumerate(lines)))), encoding="utf-8")
    return read_columns(path, "labels")


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ("1 0 -1 _ 1.0 0,0", "labels"),
        ("1 1 _ _", "labels"),
        ("0 0 _ 0", "other"),
        ("1 1 1 1", "other"),
        ("1 0 1 0 1 0 1 0 0 0.5", "almost labels"),
        ("1 0 1 0 1 0 1 0 0 2", "almost labels"),
        ("1 0 ja nein ja", "almost labels"),
        ("1 0 k.A. k.A. -", "almost labels"),
        ("1 0 9 1 9", "almost labels"),
        ("0 1 0,5 0,93", "almost labels"),
        ("x _ x _", "words"),
        ("TRUE FALSE ja nein WAHR FALSCH _", "words"),
        ("pos neg NR neg", "words"),
        ("0 0 1 3 3 2 2", "numbers"),
        ("0,04 0,93 _", "numbers"),
        ("41 67 53", "other"),
        ("w m w", "other"),
        ("PA AP PA", "other"),
        ("Mass Nodule", "other"),
    ],
)
def test_a_column_is_judged_by_its_cells(cells: str, kind: str, tmp_path: Path) -> None:
    texts = [f'"{cell.replace("_", "")}"' for cell in cells.split()]
    assert judge_column(columns_of(tmp_path, "file,Mass", *texts).column("Mass")).kind == kind


FULL = ("1,0", "0,1", "1,1", "0,0") * 5


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ((*FULL, "1,ja"), '"Mass" ("ja" in line 22). Write 1'),
        ((*FULL, "1,0.5", "0,0.5"), '"Mass" ("0.5" in line 22 (2 lines))'),
        ((*FULL, "1,2"), "Or use the other columns only: --findings Fluid"),
    ],
)
def test_a_label_column_with_a_slip_is_no_column_of_another_kind(
    lines: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    columns = columns_of(tmp_path, "file,Fluid,Mass", *lines)
    with pytest.raises(BadInput) as bad:
        guess_roles(columns, "file")
    assert reason in str(bad.value)
    assert guess_roles(columns, "file", findings=["Fluid"]).label_columns == ("Fluid",)


@pytest.mark.parametrize(
    ("header", "lines", "reason"),
    [
        ("file,sex,Mass", ("w,ja", "m,nein") * 5, '"Mass" ("ja" in line 2 (5 lines), "nein" in line 3 (5 lines))'),
        ("file,Hospital,Mass", ("a,x", "b,") * 5, '"Mass" ("x" in line 2 (5 lines))'),
        ("file,Mass", ("0.04", "0.93") * 5, "by the limit that you choose"),
        ("file,sex,view", ("w,PA", "m,AP") * 5, 'the table has "file", "sex", "view"'),
        ("file,Region", ("Lunge", "Herz") * 5, "add it to the command: --findings Region"),
        ("file,,", ("p,Mass", "q,Fluid") * 5, "2 columns have no name in the first line"),
    ],
)
def test_no_other_column_is_taken_for_the_findings(
    header: str, lines: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as bad:
        guess_roles(columns_of(tmp_path, header, *lines), "file", source="Hospital" if "Hospital" in header else "")
    assert reason in str(bad.value)


def test_the_user_names_the_findings(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, "file,Region,Mass", *(("Lunge,1", "Herz,0") * 5))
    assert guess_roles(columns, "file").label_columns == ("Mass",)
    assert guess_roles(columns, "file", findings=["Region"]).classes == {"Lunge": 5, "Herz": 5}


NORMAL = ("o.B.", "O. B.", "ohne Befund", "unauffällig", "Unauffälliger", "kein path. Befund", "No acute findings")
NORMAL += ("no finding", "normal", "NAD", "keine Auffälligkeiten", "Normalbefund", "kein pathologischer Befund")
DOUBTFUL = ("Rundherd?", "kein Rundherd", "V.a. Erguss", "Va. Erguss", "Z.n. Erguss", "no mass", "? Mass", "r/o mass")
FINDINGS = ("Nodule", "Normal variant of rib", "Vaskulitis", "Notch", "Pneumonia", "Noduläre Läsion")


def test_names_that_say_normal_or_doubt_a_finding_are_told_from_findings() -> None:
    assert [name for name in (*NORMAL, *DOUBTFUL, *FINDINGS) if says_normal(name)] == [*NORMAL]
    assert [name for name in (*NORMAL, *DOUBTFUL, *FINDINGS) if is_doubtful(name)] == [*DOUBTFUL]
