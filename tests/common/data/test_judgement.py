"""A column of a stranger's table holds labels, or is named with the cells that are in the way."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.data.tables.csv import CsvColumns, read_csv_columns
from common.data.tables.judgement import (
    find_missing_codes,
    finding_certainty,
    is_free_text,
    is_metadata_column_name,
    is_no_finding_name,
    judge_column,
    may_be_split,
)
from common.data.tables.roles import guess_column_roles, guess_patient_column, list_possible_patient_columns
from common.errors import BadInput


def columns_of(folder: Path, header: str, *lines: str) -> CsvColumns:
    path = folder / "t.csv"
    path.write_text("\n".join((header, *(f"{n}.png,{line}" for n, line in enumerate(lines)))), encoding="utf-8")
    return read_csv_columns(path, "labels")


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
    assert judge_column(columns_of(tmp_path, "file,Mass", *texts).get_column("Mass")).kind == kind


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
        guess_column_roles(columns, "file")
    assert reason in str(bad.value)
    assert guess_column_roles(columns, "file", findings=["Fluid"]).label_columns == ("Fluid",)


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
        guess_column_roles(
            columns_of(tmp_path, header, *lines), "file", source="Hospital" if "Hospital" in header else ""
        )
    assert reason in str(bad.value)


def test_the_user_names_the_findings(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, "file,Region,Mass", *(("Lunge,1", "Herz,0") * 5))
    assert guess_column_roles(columns, "file").label_columns == ("Mass",)
    assert guess_column_roles(columns, "file", findings=["Region"]).classes == {"Lunge": 5, "Herz": 5}


NORMAL = ("o.B.", "O. B.", "ohne Befund", "unauffällig", "Unauffälliger", "kein path. Befund", "No acute findings")
NORMAL += ("normaler Befund", "negativ", "altersentsprechend", "i.O.", "normal CXR", "healthy control", "sin hallazgos")
NORMAL += ("no finding", "normal", "NAD", "keine Auffälligkeiten", "Normalbefund", "kein pathologischer Befund")
DOUBTFUL = ("Rundherd?", "kein Rundherd", "V.a. Erguss", "Va. Erguss", "Z.n. Erguss", "no mass", "? Mass", "r/o mass")
FINDINGS = (
    "clear abnormality",
    "abnormal",
    "Nodule",
    "Normal variant of rib",
    "Vaskulitis",
    "Notch",
    "Pneumonia",
    "Noduläre Läsion",
)


def test_names_that_say_normal_or_doubt_a_finding_are_told_from_findings() -> None:
    assert [name for name in (*NORMAL, *DOUBTFUL, *FINDINGS) if is_no_finding_name(name)] == [*NORMAL]
    assert [name for name in (*NORMAL, *DOUBTFUL, *FINDINGS) if finding_certainty(name)] == [*DOUBTFUL]


@pytest.mark.parametrize(
    ("certainty", "names"),
    [
        ("denied", "J18.9A; j91 A; I50.14A R; kein Rundherd; Pneumonie, ausgeschlossen; no mass; ausgeschl. Fraktur"),
        (
            "doubted",
            "J18.9V; J91 (V); V.a. Erguss; Verdacht auf Mass; ? Mass; Mass?; Pneumonie (V.a.); mass, suspected",
        ),
        ("past", "C50.9Z; Z.n. Fraktur; status post CABG; Fraktur Z.n."),
        (None, "J18.9; J18.9G; H40.1GR; Z01.6; S72.001A; T1a; BI-RADS 4a; Vaskulitis; Normal variant"),
    ],
)
def test_how_certain_a_finding_is_is_read_from_its_words_or_the_letter_of_its_code(
    certainty: str | None, names: str
) -> None:
    each = names.split("; ")
    assert {name: finding_certainty(name) for name in each} == dict.fromkeys(each, certainty)


@pytest.mark.parametrize(
    ("names", "codes"),
    [
        ("0 1 2 3 4 9", "9"),
        ("1 2 3 4 5 99 -1", "-1 99"),
        ("0 1 98 99", "98 99"),
        ("1 2 3 4 5 6 7 8 9", ""),
        ("mild severe 9 -99", "-99 9"),
        ("99", ""),
        ("1 2 3", ""),
        ("0 1 2 3 U", "U"),
        ("0 1 2 4a 4b n.b. 5", "n.b."),
        ("1 2 mild severe", ""),
    ],
)
def test_a_number_apart_from_the_grades_is_a_code_for_a_missing_value(names: str, codes: str) -> None:
    assert find_missing_codes(names.split()) == codes.split()


TEXTS = ("Befund: Kein Hinweis auf Erguss. Herz normal gross.", "The heart is normal in size. No effusion is seen.")
NAMES = ("Mass", "Mass|Nodule, Effusion|Atelectasis|Pneumonia|Fibrosis|Edema|Hernia", "No acute findings.", "Thorax pa")


@pytest.mark.parametrize(
    ("cells", "is_text", "is_split"),
    [
        (TEXTS, True, False),
        (NAMES, False, False),
        ([f"left lung number {n} with opacity" for n in range(40)], True, False),
        (("holdout", "dev"), False, True),
        (("intern", "extern"), False, True),
        (("Training", "Test 1", "Test 2"), False, True),
        (("A", "B"), False, False),
        (("public", "private"), False, False),
        (("train", "Ulm"), False, False),
    ],
)
def test_sentences_and_words_for_parts_are_no_names(
    cells: Sequence[str], is_text: bool, is_split: bool, tmp_path: Path
) -> None:
    column = columns_of(tmp_path, "file,other", *(f'"{cell}"' for cell in cells)).get_column("other")
    assert (is_free_text(column), may_be_split(column)) == (is_text, is_split)


IDS = ("patient", "Patient ID", "PatNr", "pid", "MRN", "Subject", "PatientID", "Patientennummer", "ID of the patient")
IDS += ("participant_id", "Patienten-Nr.", "anonymised patient id", "num\u00e9ro patient", "hospital_number", "case")
IDS += ("PatientID_DICOM", "PTID", "pt_id", "Study Patient ID", "De-identified patient", "Hospital Patient Number")
IDS += ("Source Patient ID", "NHS number", "CPR", "Código paciente", "N° patient", "medical record no.", "患者ID")
STEMS = (
    "Patient ",
    "patient_",
    "Subject ",
    "PATIENT_",
    "Patienten",
    "Patient",
    "lesion_",
    "person ",
    "Number of patient ",
)
ATTRIBUTES = {
    "Age": "{age}",
    "alter": "{age}",
    "weight": "{age}.5",
    "group": "g{few}",
    "type": "type {few}",
    "location": "{word}",
    "visits": "{few}",
    "who labelled": "{word}",
    "Position": "{word}",
    "Gender": "{word}",
    "Study ID": "x{age}",
    "doctor id": "r{few}",
    "BirthDate": "19{age}-01-02",
    "Size": "1.{age}",
    "postcode": "{age}0{age}",
}


@pytest.mark.parametrize("seed", range(90))
def test_what_a_column_says_of_a_patient_is_never_taken_for_the_patient(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    headings = dict.fromkeys(draw.choice(STEMS) + draw.choice([*ATTRIBUTES]) for _ in range(4))
    cells = {name: next(cell for end, cell in ATTRIBUTES.items() if name.endswith(end)) for name in headings}
    number = draw.choice([*IDS, None])
    order = [*headings, *([] if number is None else [number])]
    draw.shuffle(order)
    lines = [
        ",".join(
            cells.get(name, f"x{row // 2}").format(
                age=draw.randint(20, 89), few=draw.randint(1, 9), word=draw.choice(["arm", "leg", "back", "head"])
            )
            for name in order
        )
        for row in range(80)
    ]
    patient = guess_patient_column(columns_of(tmp_path, ",".join(("file", *order)), *lines), ["file"])
    assert patient == (None if number in ("hospital_number", "case") else number)


@pytest.mark.parametrize(
    ("header", "cells", "patient", "offered"),
    [
        ("patient,Patient ID", "{n},p{n}", "Patient ID", ["patient", "Patient ID"]),
        ("Patient Name,patient", "Doe{n},{n}", "Patient Name", ["Patient Name", "patient"]),
        ("subject_id,MRN", "s{n},m{half}", None, ["subject_id", "MRN"]),
        ("patient,patients", "{half},{n}", None, ["patient", "patients"]),
        ("patient,view", "{flag},PA", None, []),
        ("subject,view", "{word},PA", None, []),
        ("Person,view", "{n}5.5,PA", None, []),
        ("lesion_id,view", "HAM_00{n},PA", None, ["lesion_id"]),
        ("rad_id,view", "R{half},PA", None, []),
        ("trial patient code,exam", "T0{n},E0{half}", None, ["trial patient code"]),
    ],
)
def test_of_columns_that_may_name_the_patient_the_surest_is_taken_or_none(
    header: str, cells: str, patient: str | None, offered: list[str], tmp_path: Path
) -> None:
    lines = [
        cells.format(n=n // 2 + 10, half=n // 4 + 10, flag=n % 2, word=("arm", "leg", "head")[n % 3]) for n in range(40)
    ]
    columns = columns_of(tmp_path, f"file,{header}", *lines)
    names = header.split(",")
    assert (guess_patient_column(columns, ["file"]), list_possible_patient_columns(columns, names)) == (
        patient,
        offered,
    )


NO_FINDINGS = ("PatientSex", "sex_male", "Sex (1=f)", "Sexo", "K\u00f6n", "gender_code", "view_PA", "AP", "is_test")
NO_FINDINGS += ("train", "test_set", "exclude", "Geschlecht_w", "age_over_60", "Age_Years")


def test_columns_of_sex_view_and_split_are_findings_only_if_the_user_names_them(tmp_path: Path) -> None:
    names = (*NO_FINDINGS, "Age-related macular degeneration", "AP diameter", "Lateral fracture", "strain", "Mass")
    assert [name for name in names if is_metadata_column_name(name)] == [*NO_FINDINGS]
    columns = columns_of(tmp_path, "file,sex_male,view_PA", *("1,0", "0,1") * 5)
    with pytest.raises(BadInput, match="--findings sex_male --findings view_PA"):
        guess_column_roles(columns, "file")
    assert guess_column_roles(columns, "file", findings=["view_PA"]).label_columns == ("view_PA",)


def test_findings_beside_columns_of_0_and_1_are_a_question_unless_they_are_the_same(tmp_path: Path) -> None:
    lines = [f"{('Mass', 'Fluid|Mass', 'No Finding')[n % 3]},{int(n % 3 == 1)},{int(n % 3 < 2)}" for n in range(12)]
    columns = columns_of(tmp_path, "file,Finding Labels,dead,smoker", *lines)
    with pytest.raises(BadInput, match="--findings 'Finding Labels' or --findings dead --findings smoker"):
        guess_column_roles(columns, "file")
    assert guess_column_roles(columns, "file", findings=["Finding Labels"]).classes == {"Mass": 8, "Fluid": 4}
    columns = columns_of(tmp_path, "file,Finding Labels,Fluid,Mass", *lines)
    assert guess_column_roles(columns, "file").label_columns == ("Fluid", "Mass")


FLAGS = (
    "is_validation val holdout fold testing Femenino femme homme mujer pohlavi lateral frontal erect supine portable "
)
FLAGS += "quality bad_quality duplicate drop follow_up Female_Pelvis_Mass Test_Bolus Split_Cord"


@pytest.mark.parametrize("flag", FLAGS.split())
def test_a_flag_that_may_be_no_finding_is_a_question_with_both_commands(flag: str, tmp_path: Path) -> None:
    lines = [f"{n % 2},{n // 2 % 2},{n % 3 % 2}" for n in range(24)]
    columns = columns_of(tmp_path, f"file,Mass,{flag},Lesion", *lines)
    both = "--findings Mass --findings Lesion"
    with pytest.raises(BadInput, match=f"{both} --findings {flag} .all are findings. or {both} .without these."):
        guess_column_roles(columns, "file")
    assert guess_column_roles(columns, "file", findings=["Mass"]).label_columns == ("Mass",)


def one_hot(count: int) -> list[str]:
    return [",".join(str(int(row % count == place)) for place in range(count)) for row in range(24)]


def independent(count: int) -> list[str]:
    draw = random.Random(count)
    return [",".join(draw.choice("01") for _ in range(count)) for _ in range(24)]


@pytest.mark.parametrize(
    ("header", "lines", "classes"),
    [
        ("A,B,C,D", one_hot(4), "A,B,C,D"),
        ("N,D,G,C,A,H,M,O", one_hot(8), "N,D,G,C,A,H,M,O"),
        ("N,D,G,C,A,H,M,O", independent(8), "N,D,G,C,A,H,M,O"),
        ("A,B,C,D", independent(4), None),
        ("DR,ARMD,MH,AP,M,TSLN", independent(6), None),
        ("Mass,Nodule,sex,AP", independent(4), "Mass,Nodule"),
        (
            "Left Effusion,Right Effusion,Lateral fracture",
            independent(3),
            "Left Effusion,Right Effusion,Lateral fracture",
        ),
    ],
)
def test_letters_and_codes_are_classes_by_their_neighbours_and_cells(
    header: str, lines: list[str], classes: str | None, tmp_path: Path
) -> None:
    columns = columns_of(tmp_path, f"file,{header}", *lines)
    if classes is None:
        with pytest.raises(BadInput, match=r"--findings (D|AP --findings M) .all are findings"):
            guess_column_roles(columns, "file")
    else:
        assert ",".join(guess_column_roles(columns, "file").label_columns) == classes


@pytest.mark.parametrize(
    ("header", "cells", "flag", "is_question"),
    [
        ("pathology", "Mass;Nodule;Mass|Nodule;No Finding", "dead", True),
        ("Pathologie", "Erguss;Rundherd;Erguss|Rundherd;o.B.", "verstorben", True),
        ("Impression", "Mass;Nodule;Edema;Normal", "ICU", True),
        ("remarks", "rot|blau;blau;rot", "dead", True),
        ("scanner", "GE;Siemens", "dead", False),
        ("area", "back;trunk", "Mass", False),
        ("remarks", "rot|blau;blau;rot", "Mass", False),
        ("Finding Labels", "Mass;Nodule;No Finding", "Follow-up #", False),
        ("pathology", "Mass;Nodule;No Finding", "lateral", False),
    ],
)
def test_findings_are_recognised_by_their_cells_beside_a_single_flag(
    header: str, cells: str, flag: str, is_question: bool, tmp_path: Path
) -> None:
    each = cells.split(";")
    columns = columns_of(tmp_path, f"file,{header},{flag}", *(f"{each[n % len(each)]},{n % 5 % 2}" for n in range(24)))
    if is_question:
        with pytest.raises(BadInput, match=f"--findings '?{header}'? or --findings '?{flag}"):
            guess_column_roles(columns, "file")
    else:
        roles = guess_column_roles(columns, "file")
        assert (roles.finding or roles.label_columns) == (
            (flag,) if header in ("scanner", "area", "remarks") else header
        )


@pytest.mark.parametrize(
    ("cells", "classes", "doubtful"),
    [
        ("nv mel bkl nv bcc", "nv mel bkl bcc", ""),
        ("NV MEL ND KA BCC AKIEC", "NV MEL ND KA BCC AKIEC", ""),
        ("missing caries crown missing|caries healthy", "missing caries crown", ""),
        ("open Mass Nodule", "Mass Nodule", "open"),
        ("nv Erguss Rundherd Pneumonie", "Erguss Rundherd Pneumonie", "nv"),
        ("UNK MEL NV BCC", "MEL NV BCC", "UNK"),
    ],
)
def test_a_code_for_a_missing_value_is_a_class_among_codes(
    cells: str, classes: str, doubtful: str, tmp_path: Path
) -> None:
    roles = guess_column_roles(columns_of(tmp_path, "file,dx", *(cells.split() * 4)), "file")
    assert (set(roles.classes), " ".join(roles.doubtful)) == (set(classes.split()), doubtful)


def test_a_remedy_offers_no_flag_as_the_only_finding(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, "file,Mass,smoker", "1,0", "0,1", "vielleicht,1", "1,0", *["0,1"] * 9)
    with pytest.raises(BadInput) as bad:
        guess_column_roles(columns, "file")
    assert "smoker" not in str(bad.value)
