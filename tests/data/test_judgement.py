"""A column of a stranger's table holds labels, or is named with the cells that are in the way."""

import random
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.data.tables.csv import CsvTable, read_csv_table
from polyclinic.data.tables.judgement import (
    find_missing_value_codes,
    get_finding_certainty,
    is_free_text_column,
    is_metadata_column_name,
    is_no_finding_name,
    judge_column_content,
    looks_like_split_column,
)
from polyclinic.data.tables.patient_columns import guess_patient_column, list_possible_patient_columns
from polyclinic.data.tables.roles import guess_column_roles
from tests.data.conftest import long


def columns_of(folder: Path, header: str, *lines: str) -> CsvTable:
    path = folder / "t.csv"
    path.write_text("\n".join((header, *(f"{n}.png,{line}" for n, line in enumerate(lines)))), encoding="utf-8")
    return read_csv_table(path, "labels")


def numbered(cells: str) -> list[str]:
    """Forty lines of these cells, which may name the line, a pair or four of lines, 0 or 1 in turn, and a word."""
    words = ("arm", "leg", "head")
    return [cells.format(row=n + 10, n=n // 2 + 10, half=n // 4 + 10, flag=n % 2, word=words[n % 3]) for n in range(40)]


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
    assert judge_column_content(columns_of(tmp_path, "file,Mass", *texts).get_column("Mass")).kind == kind


FULL = ("1,0", "0,1", "1,1", "0,0") * 5
NO_FINDINGS = [
    ("file,Fluid,Mass", (*FULL, "1,ja"), '"Mass" ("ja" in line 22). Write 1'),
    ("file,Fluid,Mass", (*FULL, "1,0.5", "0,0.5"), '"Mass" ("0.5" in line 22 (2 lines))'),
    ("file,Fluid,Mass", (*FULL, "1,2"), "Or use the other columns only: --findings Fluid"),
    ("file,sex,Mass", ("w,ja", "m,nein") * 5, '"Mass" ("ja" in line 2 (5 lines), "nein" in line 3 (5 lines))'),
    ("file,Hospital,Mass", ("a,x", "b,") * 5, '"Mass" ("x" in line 2 (5 lines))'),
    ("file,Mass", ("0.04", "0.93") * 5, "by the limit that you choose"),
    ("file,sex,view", ("w,PA", "m,AP") * 5, 'the table has "file", "sex", "view"'),
    ("file,Region", ("Lunge", "Herz") * 5, "add it to the command: --findings Region"),
    ("file,,", ("p,Mass", "q,Fluid") * 5, "2 columns have no name in the first line"),
]


@pytest.mark.parametrize(("header", "lines", "reason"), NO_FINDINGS)
def test_no_other_column_is_taken_for_the_findings_nor_one_with_a_slip_for_another_kind(
    header: str, lines: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    source = "Hospital" if "Hospital" in header else ""
    with pytest.raises(BadInput) as bad:
        guess_column_roles(columns_of(tmp_path, header, *lines), "file", source=source)
    assert reason in str(bad.value)


def test_the_user_names_the_findings(tmp_path: Path) -> None:
    slip = columns_of(tmp_path, "file,Fluid,Mass", *FULL, "1,ja")
    assert guess_column_roles(slip, "file", findings=["Fluid"]).label_columns == ("Fluid",)
    columns = columns_of(tmp_path, "file,Region,Mass", *(("Lunge,1", "Herz,0") * 5))
    assert guess_column_roles(columns, "file").label_columns == ("Mass",)
    assert guess_column_roles(columns, "file", findings=["Region"]).classes == {"Lunge": 5, "Herz": 5}


NORMAL = ("o.B.", "O. B.", "ohne Befund", "unauffällig", "Unauffälliger", "kein path. Befund", "No acute findings")
NORMAL += ("normaler Befund", "negativ", "altersentsprechend", "i.O.", "normal CXR", "healthy control", "sin hallazgos")
NORMAL += ("no finding", "normal", "NAD", "keine Auffälligkeiten", "Normalbefund", "kein pathologischer Befund")
CERTAINTY = {
    "denied": "J18.9A; j91 A; I50.14A R; kein Rundherd; Pneumonie, ausgeschlossen; no mass; ausgeschl. Fraktur",
    "doubted": "J18.9V; J91 (V); V.a. Erguss; Va. Erguss; Verdacht auf Mass; ? Mass; Mass?; Rundherd?; r/o mass; "
    "Pneumonie (V.a.); mass, suspected",
    "past": "C50.9Z; Z.n. Fraktur; Z.n. Erguss; status post CABG; Fraktur Z.n.",
    None: "J18.9; J18.9G; H40.1GR; Z01.6; S72.001A; T1a; BI-RADS 4a; Vaskulitis; Normal variant; clear abnormality; "
    "abnormal; Nodule; Normal variant of rib; Notch; Pneumonia; Noduläre Läsion; " + "; ".join(NORMAL),
}


@pytest.mark.parametrize("certainty", CERTAINTY)
def test_how_certain_a_finding_is_is_read_from_its_words_or_the_letter_of_its_code(certainty: str | None) -> None:
    names = CERTAINTY[certainty].split("; ")
    assert {name: get_finding_certainty(name) for name in names} == dict.fromkeys(names, certainty)
    assert [name for name in names if is_no_finding_name(name)] == [name for name in names if name in NORMAL]


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
    assert find_missing_value_codes(names.split()) == codes.split()


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
def test_sentences_and_parts_are_no_names(cells: Sequence[str], is_text: bool, is_split: bool, tmp_path: Path) -> None:
    column = columns_of(tmp_path, "file,other", *(f'"{cell}"' for cell in cells)).get_column("other")
    assert (is_free_text_column(column), looks_like_split_column(column)) == (is_text, is_split)


IDS = ("patient", "Patient ID", "PatNr", "pid", "MRN", "Subject", "PatientID", "Patientennummer", "ID of the patient")
IDS += ("participant_id", "Patienten-Nr.", "anonymised patient id", "num\u00e9ro patient", "hospital_number", "case")
IDS += ("PatientID_DICOM", "PTID", "pt_id", "Study Patient ID", "De-identified patient", "Hospital Patient Number")
IDS += ("Source Patient ID", "NHS number", "CPR", "Código paciente", "N° patient", "medical record no.", "患者ID")
STEMS = ("Patient ", "patient_", "Subject ", "PATIENT_", "Patienten", "Patient", "lesion_", "person ")
STEMS += ("Number of patient ",)
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


@pytest.mark.parametrize("seed", range(30))
def test_what_a_column_says_of_a_patient_is_never_taken_for_the_patient(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    headings = dict.fromkeys(draw.choice(STEMS) + draw.choice([*ATTRIBUTES]) for _ in range(4))
    cells = {name: next(cell for end, cell in ATTRIBUTES.items() if name.endswith(end)) for name in headings}
    number = draw.choice([*IDS, None])
    order = [*headings, *([] if number is None else [number])]
    draw.shuffle(order)
    lines = list[str]()
    for row in range(80):
        values = {"age": draw.randint(20, 89), "few": draw.randint(1, 9), "word": draw.choice(["arm", "leg", "head"])}
        lines.append(",".join(cells.get(name, f"x{row // 2}").format(**values) for name in order))
    patient = guess_patient_column(columns_of(tmp_path, ",".join(("file", *order)), *lines), ["file"])
    assert patient == (None if number in ("hospital_number", "case") else number)


@pytest.mark.parametrize(
    ("header", "cells", "patient", "offered"),
    [
        ("patient,Patient ID", "{n},p{n}", "Patient ID", ["patient", "Patient ID"]),
        ("Patient Name,patient", "Doe{n},{n}", "Patient Name", ["Patient Name", "patient"]),
        ("subject_id,MRN", "s{n},m{n}", "subject_id", ["subject_id", "MRN"]),
        ("patient,EID", "{half},{row}", "patient", ["patient", "EID"]),
        ("EID,view", "{row},PA", None, ["EID"]),
        ("EID,view", "{n},PA", "EID", ["EID"]),
        ("patient_id,view", "{row},PA", "patient_id", ["patient_id"]),
        ("Hospital Patient Number,Study Patient ID", "{row},{half}", "Study Patient ID", None),
        ("subject_id,MRN", "{row},{half}", "MRN", None),
        ("Site Patient ID,patient_id", "{flag}{word},{n}", "patient_id", None),
        ("patient,view", "{flag},PA", None, []),
        ("subject,view", "{word},PA", None, []),
        ("Person,view", "{n}5.5,PA", None, []),
        ("lesion_id,view", "HAM_00{n},PA", None, ["lesion_id"]),
        ("rad_id,view", "R{half},PA", None, []),
        ("trial patient code,exam", "T0{n},E0{half}", None, ["trial patient code"]),
        ("Patient,patient_id", "19{n}-01-02,p{row}", "patient_id", ["patient_id"]),
    ],
)
def test_of_columns_that_may_name_the_patient_the_surest_is_taken_or_none(
    header: str, cells: str, patient: str | None, offered: list[str] | None, tmp_path: Path
) -> None:
    names = header.split(",")
    columns = columns_of(tmp_path, f"file,{header}", *numbered(cells))
    assert guess_patient_column(columns, ["file"]) == patient
    assert list_possible_patient_columns(columns, names) == (names if offered is None else offered)


SECOND = ("NHS number", "CPR", "Study Patient ID", "Hospital Patient Number", "Source Patient ID", "patient_hash")
SECOND += ("pt_no", "EID", "MRN", "subject_id", "Patient", "Patient key")


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", ["patient_id", "PatientID", "Patient-Nr.", "Patientennummer"])
@pytest.mark.parametrize("every", [5, *long((2, 40))])
def test_blank_cells_of_a_second_number_change_no_patient(first: str, second: str, every: int, tmp_path: Path) -> None:
    cells = [(f"p{n // 2 + 10}", "" if n % every == 0 else f"s{n // 2 + 10}") for n in range(40)]
    columns = columns_of(tmp_path, f"file,{first},{second}", *(f"{name},{number}" for name, number in cells))
    assert guess_patient_column(columns, image="file") == first
    columns = columns_of(tmp_path, f"file,{second},{first}", *(f"{number},{name}" for name, number in cells))
    assert guess_patient_column(columns, image="file") == first


@pytest.mark.parametrize(
    ("header", "cells", "message"),
    [
        ("subject_id,MRN", "s{n},m{half}", '"m10" of "MRN" is "s10" of "subject_id" in line 2, and "s11" in line 4'),
        ("patient,patients", "{half},{n}", '"10" of "patient" is "10" of "patients" in line 2, and "11" in line 4'),
        ("patient_id,Patient", "{row},{half}", '"10" of "Patient" is "10" of "patient_id" in line 2, and "11"'),
        ("NHS number,CPR", "{half},{n}", '"10" of "NHS number" is "10" of "CPR" in line 2, and "11" in line 4'),
    ],
)
def test_columns_equally_sure_to_name_patients_are_a_question(
    header: str, cells: str, message: str, tmp_path: Path
) -> None:
    lines = [f"{line},{n % 2}" for n, line in enumerate(numbered(cells))]
    columns = columns_of(tmp_path, f"file,{header},Mass", *lines)
    with pytest.raises(BadInput) as bad:
        guess_column_roles(columns, "file")
    options = " or ".join(f"--patient-column {shlex.quote(name)}" for name in header.split(","))
    assert message in str(bad.value)
    assert str(bad.value).endswith(options)
    chosen = header.split(",")[0]
    assert guess_column_roles(columns, "file", chosen).patient == chosen


METADATA = ("PatientSex", "sex_male", "Sex (1=f)", "Sexo", "K\u00f6n", "gender_code", "view_PA", "AP", "is_test")
METADATA += ("train", "test_set", "exclude", "Geschlecht_w", "age_over_60", "Age_Years")


def test_columns_of_sex_view_and_split_are_findings_only_if_the_user_names_them(tmp_path: Path) -> None:
    names = (*METADATA, "Age-related macular degeneration", "AP diameter", "Lateral fracture", "strain", "Mass")
    assert [name for name in names if is_metadata_column_name(name)] == [*METADATA]
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
FLAGS += "quality bad_quality duplicate drop follow_up Female_Pelvis_Mass Test_Bolus Split_Cord held_out heldout tst "
FLAGS += "is_tst trn valset cv_fold fold_3 intest tuning image_quality_ok qc_pass passed_qc is_labeled bedside_xray "
FLAGS += "Left_eye eye_left od_os Right_breast side_r 性别 пол geslacht sukupuoli kjønn is_man liegendaufnahme"
REAL = "normale anormale Anomale proximale minimale maximale Overview Merkmal RT OD Left_Effusion nodule_right "
REAL += "lateral_meniscus skin_fold poor_inspiration foreign_body testis left_atrium_enlarged age_related_amd"
BINARY = [f"{n % 2},{n // 2 % 2},{n % 3 % 2}" for n in range(24)]


@pytest.mark.parametrize("flag", FLAGS.split())
def test_a_flag_that_may_be_no_finding_is_a_question_with_both_commands(flag: str, tmp_path: Path) -> None:
    columns = columns_of(tmp_path, f"file,Mass,{flag},Lesion", *BINARY)
    both = "--findings Mass --findings Lesion"
    with pytest.raises(BadInput) as bad:
        guess_column_roles(columns, "file")
    assert f"{both} --findings {shlex.quote(flag)} (all are findings) or {both} (without these)" in str(bad.value)
    assert guess_column_roles(columns, "file", findings=["Mass"]).label_columns == ("Mass",)


@pytest.mark.parametrize("name", REAL.split())
def test_a_heading_that_only_contains_a_word_for_a_flag_is_a_class(name: str, tmp_path: Path) -> None:
    columns = columns_of(tmp_path, f"file,Mass,{name},Lesion", *BINARY)
    assert guess_column_roles(columns, "file").label_columns == ("Mass", name, "Lesion")


@pytest.mark.parametrize("heading", ["Merkmale", "Final review", "Anomale", "Conclusion finale", "Überview"])
def test_a_column_of_findings_may_have_a_heading_that_ends_like_a_sex_or_view(heading: str, tmp_path: Path) -> None:
    columns = columns_of(tmp_path, f"file,{heading}", *["Rundherd", "Erguss", "Erguss|Rundherd", "o.B."] * 6)
    assert guess_column_roles(columns, "file").classes == {"Rundherd": 12, "Erguss": 12}


def one_hot(count: int) -> list[str]:
    return [",".join(str(int(row % count == place)) for place in range(count)) for row in range(24)]


def independent(count: int) -> list[str]:
    draw = random.Random(count)
    return [",".join(draw.choice("01") for _ in range(count)) for _ in range(24)]


SIDES = "Left Effusion,Right Effusion,Lateral fracture"


@pytest.mark.parametrize(
    ("header", "lines", "classes"),
    [
        ("A,B,C,D", one_hot(4), "A,B,C,D"),
        ("N,D,G,C,A,H,M,O", one_hot(8), "N,D,G,C,A,H,M,O"),
        ("N,D,G,C,A,H,M,O", independent(8), "N,D,G,C,A,H,M,O"),
        ("Left,Right,Both", one_hot(3), "Left,Right,Both"),
        ("left,Mass,Nodule", independent(3), "Mass,Nodule"),
        ("Hand,Eye,Breast", independent(3), "Hand,Eye,Breast"),
        ("Mass,Nodule,sex,AP", independent(4), "Mass,Nodule"),
        (SIDES, independent(3), SIDES),
    ],
)
def test_letters_and_codes_are_classes_by_their_neighbours_and_cells(
    header: str, lines: list[str], classes: str, tmp_path: Path
) -> None:
    roles = guess_column_roles(columns_of(tmp_path, f"file,{header}", *lines), "file")
    assert ",".join(roles.label_columns) == classes


@pytest.mark.parametrize("header", ["A,B,C,D", "DR,ARMD,MH,AP,M,TSLN"])
def test_letters_and_codes_that_may_be_no_classes_are_a_question(header: str, tmp_path: Path) -> None:
    columns = columns_of(tmp_path, f"file,{header}", *independent(header.count(",") + 1))
    with pytest.raises(BadInput, match=r"--findings (D|AP --findings M) .all are findings"):
        guess_column_roles(columns, "file")


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
        ("remarks", "MEL;scar", "MEL,NV", True),
        ("quality", "good;poor;normal", "MEL,NV", False),
        ("blood_pressure", "normal;high", "DR,AMD", False),
        ("eye", "OD;OS;OD/OS", "N,G,C", False),
        ("ethnicity", "White;Asian;White/Asian", "PE,PTX", False),
        ("device", "Canon/CR;Canon/DR;Fuji/CR", "DR,AMD", False),
        ("comment", "repeat|motion;motion;ok", "MEL,NV", False),
        ("treatment", "surgery+chemo;surgery;none", "MEL,NV", False),
        ("bmi_class", "normal;overweight;obese", "DR,AMD", False),
        ("diagnosis_method", "histology;consensus", "MEL,NV", False),
        ("family_history", "melanoma;none;nevus", "MEL,NV", True),
        ("diagnosis", "eczema;psoriasis", "MEL,NV", True),
        ("confirmed_diagnosis", "BKL;DF;VASC", "MEL,NV", True),
        ("confirmed_diagnosis", "histology;consensus", "MEL,NV", False),
        ("disease_type", "ALL;AML;CLL", "target", True),
        ("nyha_class", "I;II;III", "MEL,NV", False),
    ],
)
def test_findings_are_recognised_by_their_cells_beside_a_single_flag(
    header: str, cells: str, flag: str, is_question: bool, tmp_path: Path
) -> None:
    each, flags = cells.split(";"), flag.split(",")
    lines = [",".join((each[n % len(each)], *(str((n + at) % 5 % 2) for at in range(len(flags))))) for n in range(24)]
    columns = columns_of(tmp_path, f"file,{header},{flag}", *lines)
    if is_question:
        with pytest.raises(BadInput, match=f"--findings '?{header}'? or --findings '?{flags[0]}"):
            guess_column_roles(columns, "file")
    else:
        roles = guess_column_roles(columns, "file")
        expected = header if header in ("Finding Labels", "pathology") else tuple(flags)
        assert (roles.finding or roles.label_columns) == expected


@pytest.mark.parametrize(
    ("cells", "classes", "doubtful"),
    [
        ("nv mel bkl nv bcc", "nv mel bkl bcc", ""),
        ("missing caries crown missing|caries healthy", "missing caries crown", ""),
        ("open Mass Nodule", "Mass Nodule", "open"),
        ("nv Erguss Rundherd Pneumonie", "Erguss Rundherd Pneumonie", "nv"),
        ("UNK MEL NV BCC", "MEL NV BCC", "UNK"),
    ],
)
def test_nevus_among_codes_and_missing_teeth_are_classes(
    cells: str, classes: str, doubtful: str, tmp_path: Path
) -> None:
    roles = guess_column_roles(columns_of(tmp_path, "file,dx", *(cells.split() * 4)), "file")
    assert (set(roles.classes), " ".join(roles.doubtful)) == (set(classes.split()), doubtful)


CODES = (
    "mel nv bcc akiec bkl df vasc",
    "DR ARMD MH DN MYA BRVO TSLN",
    "MEL NV BCC AK BKL DF VASC SCC",
    "PE PTX ILD TB",
)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("unread", ["", "KA", "ka", "ND", "nb", "NR", "ND KA"])
def test_abbreviations_for_unread_images_are_a_question_among_codes(codes: str, unread: str, tmp_path: Path) -> None:
    roles = guess_column_roles(columns_of(tmp_path, "file,dx", *((codes + " " + unread).split() * 4)), "file")
    assert (set(roles.classes), set(roles.not_assessed)) == (set(codes.split()), set(unread.split()))
    assert not roles.doubtful


def test_the_remedy_for_two_kinds_of_labels_lists_no_doubtful_flag(tmp_path: Path) -> None:
    lines = [f"{('melanoma', 'nevus')[n % 2]},{n % 2},{n // 2 % 2},{n % 3 % 2}" for n in range(24)]
    with pytest.raises(BadInput) as bad:
        guess_column_roles(columns_of(tmp_path, "file,diagnosis,MEL,NV,holdout", *lines), "file")
    assert "--findings diagnosis or --findings MEL --findings NV (without" in str(bad.value)
    assert "--findings holdout" not in str(bad.value)


@pytest.mark.parametrize(
    ("cells", "not_assessed"),
    [("mass;nodule;no view", "no view"), ("mass;poor quality|mass;nodule;No Finding", "poor quality")],
)
def test_words_for_unread_images_are_in_one_list_of_their_own(cells: str, not_assessed: str, tmp_path: Path) -> None:
    roles = guess_column_roles(columns_of(tmp_path, "file,finding", *(cells.split(";") * 15)), "file")
    assert (set(roles.not_assessed), dict(roles.doubtful), dict(roles.alone)) == ({not_assessed}, {}, {})


@pytest.mark.parametrize("other", ["bmi_class", "NYHA class", "diagnosis method", "dx_type", "disease duration"])
def test_a_heading_that_qualifies_a_diagnosis_or_class_is_not_that_of_the_findings(other: str, tmp_path: Path) -> None:
    lines = [f"{('low', 'high', 'normal')[n % 3]},{('Mass', 'Nodule', 'No Finding')[n // 2 % 3]}" for n in range(24)]
    assert guess_column_roles(columns_of(tmp_path, f"file,{other},diagnosis", *lines), "file").finding == "diagnosis"


@pytest.mark.parametrize(
    ("header", "cells"),
    [
        ("confirmed diagnosis", "MEL;BCC;NEV"),
        ("diagnosis_from_biopsy", "G1;G2;G3"),
        ("Diagnosis (confirmed by histology)", "Naevuszellnaevus;Basaliom"),
        ("label_by_expert", "AD;MCI;CN"),
        ("type of finding", "A1;B2;C3"),
    ],
)
def test_the_only_column_whose_heading_speaks_of_findings_has_them(header: str, cells: str, tmp_path: Path) -> None:
    columns = columns_of(tmp_path, f"file,scanner,{header}", *(f"GE,{each}" for each in cells.split(";") * 8))
    assert guess_column_roles(columns, "file").finding == header


def test_a_remedy_offers_no_flag_as_the_only_finding(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, "file,Mass,smoker", "1,0", "0,1", "vielleicht,1", "1,0", *["0,1"] * 9)
    with pytest.raises(BadInput) as bad:
        guess_column_roles(columns, "file")
    assert "smoker" not in str(bad.value)
