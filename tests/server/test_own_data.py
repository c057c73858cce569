"""``flwr-sim init``: an experiment for somebody's own table and pictures, made by the command and run."""

import json
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from PIL import Image

from common.config import read_experiment
from common.data.base.image_set import concatenate_image_sets
from common.data.base.spec import NpzDatasetSpec
from common.data.load import find_dataset_faults, load_dataset
from common.data.partition.spec import ClassListsPartitionSpec
from strategies.registry import find_method_faults
from tests.common.data.bombs import GOOD, png
from tests.common.data.dicom_files import dicom
from tests.network.real import flwr_sim


def table(folder: Path, header: str, *rows: str, suffix: str = ".png", mode: str = "L") -> Path:
    """Write a table, and a picture for each of its rows whose first cell names a file."""
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
    """Make rows ``NNN.png,pN,...``, two images a patient; ``{a}``, ``{b}`` are 0 or 1, ``{c}`` is 1 less ``{a}``."""
    return [f"{n:03}.png,p{n // 2}," + cells.format(a=n // 2 % 2, b=n // 3 % 2, c=1 - n // 2 % 2) for n in range(count)]


def made(path: Path, *options: str, code: int = 0) -> str:
    """Make an experiment for a table; return what the command prints."""
    ended = flwr_sim("init", path, "--out", path.parent / "mine.toml", *options)
    assert ended.code == code, ended.err
    return " ".join((ended.out + ended.err).split())


def data_of(path: Path) -> Any:
    """Return what the experiment that was made for a table says of its data."""
    return read_experiment(path.parent / "mine.toml", [], find_method_faults).experiment.data


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """A table of twenty patients with two classes."""
    return table(tmp_path, "file,patient,Fluid,Mass,age", *rows(40, "{a},{b},4{a}"))


def test_the_experiment_is_read_with_patients_and_classes(labels: Path) -> None:
    text = made(labels)
    assert "patients: column patient, 20 of them" in text
    assert "classes: Fluid 20, Mass 19" in text
    data = data_of(labels)
    assert (data.label_columns, data.patient_column, data.color) == (("Fluid", "Mass"), "patient", False)
    splits = load_dataset(data, labels.parent)
    parts = [set(part.patients) for part in (splits.train, splits.validation, splits.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20


def test_a_picture_that_claims_gigabytes_ends_nothing(labels: Path) -> None:
    (labels.parent / "scans" / "000.png").write_bytes(png(65535, 65535, GOOD))
    made(labels)


def test_unknown_patients_are_said_aloud_and_in_the_file(tmp_path: Path) -> None:
    path = table(tmp_path, "file,number,Fluid,Mass", *rows(40, "{a},{b}"))
    text = made(path)
    assert "patients: UNKNOWN" in text
    assert "--patient-column" in text
    assert "# patient_column" in (tmp_path / "mine.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").unlink()
    assert "patients: column number, 20 of them" in made(path, "--patient-column", "number")


def test_rows_without_a_picture_are_counted_and_left_out(tmp_path: Path) -> None:
    lost = ["lost1.png,p90,1,0", "lost2.png,p91,1,0"]
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), *lost)
    text = made(path)
    assert 'of 42, 2 rows name pictures that are not there, and left out: "lost1.png" in line 42, "lost2.png"' in text
    assert "Fluid 20" in text
    assert data_of(path).missing_files == "ignore"


def test_pictures_that_cannot_be_read_are_named_and_too_many_are_refused_as_a_run_does(labels: Path) -> None:
    scans = labels.parent / "scans"
    (scans / "003.png").write_bytes(b"")
    Image.new("L", (20, 20)).save(scans / "004.png", "TIFF")
    text = made(labels)
    assert "an experiment on 38 images" in text
    assert "003.png cannot be read, and is left out: empty." in text
    assert "004.png cannot be read, and is left out: a TIFF file; convert it to PNG" in text
    (labels.parent / "mine.toml").unlink()
    Image.new("L", (20, 20)).save(scans / "005.png", "BMP")
    packed = dicom(np.zeros((8, 8), np.uint16)).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.9\0")
    (scans / "006.png").write_bytes(packed)
    text = made(labels, code=2)
    assert "4 of 40 images cannot be read" in text
    assert '"004.png" (a TIFF file; convert it to PNG); "005.png" (a BMP file; convert it to PNG)' in text
    assert text.count("from PIL import Image") == 1
    assert not (labels.parent / "mine.toml").exists()


@pytest.mark.parametrize(("tint", "color"), [(0, False), (6, False), (60, True)])
def test_grey_that_is_stored_as_colour_is_noticed(tmp_path: Path, tint: int, color: bool) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"))
    for file in (tmp_path / "scans").iterdir():
        Image.new("RGB", (20, 20), (100 + tint, 100, 100)).save(file)
    made(path)
    assert data_of(path).color is color


@pytest.mark.parametrize("samples", [1, 3])
def test_the_depth_of_16_bit_pictures_is_proposed_for_all_and_no_picture_is_read_by_its_own(
    tmp_path: Path, samples: int
) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"))
    for number, file in enumerate(sorted((tmp_path / "scans").iterdir())):
        pixels = np.full((20, 20), 4000 if number == 7 else 1008 + number, np.uint16)
        file.write_bytes(imagecodecs.png_encode(pixels if samples == 1 else np.stack([pixels] * samples, -1)))
    assert "bit_depth = 12 is a guess" in made(path)
    assert (data_of(path).bit_depth, data_of(path).color) == (12, False)
    images = concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts)
    shown = {int(image.max()) for image in images.images}
    assert shown == {round((4000 if n == 7 else 1008 + n) * 255 / 4095) for n in range(40)}


def test_mixed_modalities_and_missing_windows_are_told(tmp_path: Path) -> None:
    path = table(tmp_path, "file,Fluid,Mass", *(f"{n:03}.dcm,{n % 2},{n // 2 % 2}" for n in range(40)))
    for n, file in enumerate(sorted(tmp_path / "scans" / f"{n:03}.dcm" for n in range(40))):
        window = {"WindowCenter": 100, "WindowWidth": 200} if n % 4 else {}
        names = {"PatientID": f"P{n // 2}" if n else "", "Modality": "CT" if n < 30 else "CR"}
        file.write_bytes(dicom(np.full((8, 8), n, np.uint16), **names, **window))
    text = made(path)
    assert "30 CT, 10 CR" in text
    assert "10 of 40 DICOM files name no window" in text
    assert "20 of them; none of these is split" in text
    assert "1 image without a PatientID" in text


def test_names_of_findings_in_one_column_are_taken(tmp_path: Path) -> None:
    lines = [f"{n:03}.png,p{n},{'Mass|Fluid' if n % 3 else 'Fluid'}" for n in range(30)]
    path = table(tmp_path, "Image,Subject ID,Findings", *lines, mode="RGB")
    assert "classes: Fluid 30, Mass 20" in made(path)
    data = data_of(path)
    assert (data.finding_column, data.classes, data.color) == ("Findings", ("Fluid", "Mass"), False)


def test_one_hot_columns_are_noticed_and_so_are_rare_classes(tmp_path: Path) -> None:
    text = made(table(tmp_path, "file,patient,Fluid,Dry", *rows(40, "{a},{c}")))
    assert "Each image shows exactly one of them" in text
    rare = ["300.png,p300,1,1", *[f"{n:03}.png,p{n},0,{n % 2}" for n in range(30)]]
    text = made(table(tmp_path / "rare", "file,patient,Rare,Mass", *rare))
    assert "fewer than 10 images show Rare" in text
    assert "exactly one" not in text


def test_patients_of_dicom_files_are_taken_where_the_table_names_none(tmp_path: Path) -> None:
    names = [f"{number:03}.dcm" for number in range(40)]
    path = table(tmp_path, "file,Fluid,Mass", *[f"{name},{n % 2},{n // 2 % 2}" for n, name in enumerate(names)])
    for number, name in enumerate(names):
        content = dicom(np.full((8, 8), number, np.uint16), PatientID=f"patient {number // 3}")
        (tmp_path / "scans" / name).write_bytes(content)
    text = made(path)
    assert "patients: PatientID of the DICOM files, 14 of them" in text
    assert "UNKNOWN" not in text + (tmp_path / "mine.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("header", "row", "options", "reason"),
    [
        ("file,patient,Fluid", "a.tif,p1,1", (), "no column of the table names pictures"),
        ("file,patient,Fluid", "a.png,p1,1.5", (), "no column is sure to hold labels"),
        (
            "file,patient,Fluid",
            "a.png,p1,yes\nb.png,p2,no",
            (),
            'hold words for them, which are not read: "Fluid" ("yes"',
        ),
        ("file,patient,Fluid", "lost.png,p1,1\nlost.png,p2,0", (), 'none of the 2 pictures of column "file"'),
        ("file,patient,Fluid", "a.png,p1,1", ("--patient-column", "patinet"), 'Did you mean "patient"?'),
        ("file,patient,Fluid", "a.png,p1,1", ("--image-column", "nope"), '"nope" is not a column'),
    ],
)
def test_a_table_that_cannot_be_understood_is_refused_with_a_remedy(
    header: str, row: str, options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    assert reason in made(table(tmp_path, header, row), *options, code=2)
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("007.png,p3,0,0", '"007.png" (lines 9 and 42: Fluid)'),
        ("lost.png,P-03,1,0", '"p3" (line 8) and "P-03" (line 42)'),
        ("lost.png,,1,0", "1 line without a patient, line 42 first"),
        ("lost.png,P-03,1,0", "Or add --join-patients"),
    ],
)
def test_a_table_that_a_run_would_refuse_is_refused(extra: str, reason: str, tmp_path: Path) -> None:
    text = made(table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), extra), code=2)
    assert reason in text
    assert not (tmp_path / "mine.toml").exists()


def test_a_table_of_another_program_is_read_and_repeated_rows_count_once(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), "007.png,p3,1,0")
    path.write_bytes(path.read_text().replace(",", ";").replace("p3;", "p\u00e4\u00a0;").encode("latin-1"))
    text = made(path)
    assert "patients: column patient, 20 of them" in text
    assert "1 row said the same as an earlier one" in text
    assert sum(map(len, load_dataset(data_of(path), tmp_path).parts)) == 40


def test_spellings_of_a_finding_are_one_class_and_near_names_are_questioned(tmp_path: Path) -> None:
    cells = ["Effusion", "effusion|Mass", "No Finding", "['Efusion']", ""]
    path = table(tmp_path, "file,patient,finding", *(f"{n:03}.png,p{n},{cells[n % 5]}" for n in range(40)))
    text = made(path)
    assert "classes: Effusion 16, Mass 8, Efusion 8" in text
    assert 'one class or two? "Efusion" = "Effusion"' in text
    assert "exactly one" not in text
    path.write_text(path.read_text() + "003.png,p3,Mass;Effusion\n")
    (tmp_path / "mine.toml").unlink()
    assert '"Mass;Effusion" in line 42' in made(path, code=2)


def test_nothing_is_written_over(labels: Path) -> None:
    (labels.parent / "mine.toml").write_text("mine")
    assert "is there already" in made(labels, code=2)
    assert (labels.parent / "mine.toml").read_text() == "mine"


def in_hospitals(folder: Path, column: str, *hospitals: str, header: str = "Fluid,Mass") -> Path:
    """A table of forty images: the first of two hospitals labels one class, the second both."""
    lines = [f"{line},{hospitals[n // 20]}" for n, line in enumerate([*rows(20, ",{b}"), *rows(40, "{a},{b}")[20:]])]
    return table(folder, f"file,patient,{header},{column}", *lines)


@pytest.mark.parametrize(
    ("column", "hospitals"),
    [
        ("Hospital_ID", ("1", "0")),
        ("centreNo", ("7", "8")),
        ("Uniklinik", ("Ulm", "Jena")),
        ("where", ("Hospital A", "Hospital B")),
        ("group", ("A", "B")),
    ],
)
def test_hospitals_are_recognised_by_name_by_cells_and_by_who_labels_what(
    column: str, hospitals: tuple[str, str], tmp_path: Path
) -> None:
    text = made(in_hospitals(tmp_path, column, *hospitals))
    assert f"hospitals: column {column}, 2 of them" in text
    assert "without a label" not in text  # where each hospital has labelled all that it looks for
    partition = read_experiment(tmp_path / "mine.toml", [], find_method_faults).experiment.partition
    assert isinstance(partition, ClassListsPartitionSpec)
    assert partition.images == "source"
    assert partition.lists == {hospitals[0]: ("Mass",), hospitals[1]: ("Fluid", "Mass")}


@pytest.mark.parametrize("column", ["sex", "View Position", "anatom_site", "clinical_history"])
def test_other_columns_are_no_hospitals(column: str, tmp_path: Path) -> None:
    assert "hospitals: no column names them" in made(in_hospitals(tmp_path, column, "A", "B"))
    assert data_of(tmp_path / "labels.csv").source_column is None


def test_what_a_hospital_must_correct_is_named_and_may_be_left_aside(tmp_path: Path) -> None:
    path = in_hospitals(tmp_path, "Hospital", "North", "NORTH")
    path.write_text(path.read_text() + "039.png,p19,0,0,\n")
    text = made(path, code=2)
    assert '"North" (line 2) and "NORTH" (line 22)' in text
    assert "1 line without a hospital, line 42 first" in text
    made(path, "--source-column", "", code=2)  # the last line contradicts line 41
    path.write_text(path.read_text().rsplit("039", 1)[0])
    assert "--source-column" in made(path, "--source-column", "")
    assert data_of(path).source_column is None


def test_patients_of_several_hospitals_are_counted(tmp_path: Path) -> None:
    path = in_hospitals(tmp_path, "Hospital", "North", "South")
    path.write_text(path.read_text().replace(",p19,", ",p0,"))
    assert "1 patient has images of several hospitals" in made(path)


def spellings(folder: Path) -> Path:
    """Write a table of two hospitals with a spelling each, of which the second is the more frequent."""
    lines = [f"{line},{'NS'[n // 20]}" for n, line in enumerate([*rows(20, "{a},,{b}"), *rows(40, ",{a},{b}")[20:]])]
    lines = [line.replace(",,0", ",,1") for line in lines]
    return table(folder, "file,patient,Pleural Effusion,pleural_effusion,Mass,Hospital", *lines)


def test_two_spellings_of_a_class_may_both_stay(tmp_path: Path) -> None:
    path = spellings(tmp_path)
    text = made(path)
    name = 'such as synonyms."pleural_effusion" = "pleural_effusion of one hospital"'
    assert f"To keep both, give one a name of its own there, {name}" in text
    text = (tmp_path / "mine.toml").read_text()
    text = text.replace('# synonyms."pleural_effusion" = "Pleural Effusion"', name.removeprefix("such as "))
    (tmp_path / "mine.toml").write_text(text)
    run = ("run", tmp_path / "mine.toml", "--out", tmp_path / "run", "--backend", "inline", "--set", "run.rounds=1")
    assert flwr_sim(*run).code == 0
    classes = json.loads((tmp_path / "run" / "summary.json").read_text())["classes"]
    assert classes == ["Mass", "Pleural Effusion", "pleural_effusion of one hospital"]


def test_two_spellings_of_a_class_wait_for_a_decision(tmp_path: Path) -> None:
    path = spellings(tmp_path)
    assert "Next: first decide on synonyms" in made(path)
    assert data_of(path).class_names == ("Pleural Effusion", "pleural_effusion", "Mass")
    run = ("run", tmp_path / "mine.toml", "--out", tmp_path / "run", "--backend", "inline", "--set", "run.rounds=1")
    ended = flwr_sim(*run)
    assert (ended.code, "look like one class" in ended.err) == (2, True)
    line = '"pleural_effusion" = "Pleural Effusion"'
    assert line in ended.err
    assert (
        f"# synonyms.{line}" in (tmp_path / "mine.toml").read_text()
    )  # the same, though the other name is more frequent
    text = (tmp_path / "mine.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("# synonyms", "synonyms"))
    assert data_of(path).class_names == ("Pleural Effusion", "Mass")
    assert flwr_sim(*run).code == 0
    model = json.loads((tmp_path / "run" / "model.json").read_text())
    assert "pleural_effusion" not in str(model)


def test_pictures_in_a_folder_for_each_hospital_are_recognised(tmp_path: Path) -> None:
    path = in_hospitals(tmp_path, "Hospital", "North", "South")
    path.write_text(path.read_text().replace("file,patient", "file,Pat.-ID"))
    for place in ("North", "South"):
        (tmp_path / "scans" / "all" / place).mkdir(parents=True)
    for number, line in enumerate(path.read_text().splitlines()[1:]):
        place = line.rpartition(",")[2]
        (tmp_path / "scans" / f"{number:03}.png").rename(tmp_path / "scans" / "all" / place / f"{number:03}.png")
        path.write_text(path.read_text().replace(f"{number:03}.png", f"{place}\\{number:03}.png"))
    made(path)
    assert (data_of(path).images, data_of(path).patient_column) == ("scans/all", "Pat.-ID")
    assert sum(map(len, load_dataset(data_of(path), tmp_path).parts)) == 40


def findings(folder: Path, *cells: str, count: int = 40) -> Path:
    """Write a table of findings in one column, the cells in turn."""
    lines = (f"{n:03}.png,p{n},{cells[n % len(cells)]}" for n in range(count))
    return table(folder, "file,patient,Befund", *lines)


def test_words_for_normal_are_no_classes(tmp_path: Path) -> None:
    path = findings(tmp_path, "Erguss", "Rundherd;Erguss", "o.B.", "unauffällig", "Rundherd")
    text = made(path)
    assert "classes: Erguss 16, Rundherd 16 " in text
    assert 'no finding: "o.B.", "unauffällig".' in text
    data = data_of(path)
    assert (data.classes, data.no_finding[-2:]) == (("Erguss", "Rundherd"), ("o.B.", "unauffällig"))
    labels = concatenate_image_sets(load_dataset(data, tmp_path).parts).labels
    assert (labels.sum(axis=0).tolist(), int(np.isnan(labels).sum())) == ([16, 16], 0)


def test_none_is_a_blank_cell_and_said_to_be_one(tmp_path: Path) -> None:
    text = made(findings(tmp_path, "Erguss", "Rundherd", "None", "o.B."))
    assert "classes: Erguss 10, Rundherd 10 without a label (blank or -1), of 40: Erguss 10, Rundherd 10." in text
    assert '"None" counts as a blank cell. If it says that nothing was found, add it to no_finding.' in text


def test_words_of_one_column_are_shown_as_such(tmp_path: Path) -> None:
    text = made(findings(tmp_path, "Var", "Yok", "Yok", ""))
    assert "These are the words of column Befund. Words for yes and no are no findings." in text


def test_a_name_that_is_always_alone_is_a_question(tmp_path: Path) -> None:
    path = findings(tmp_path, "Erguss", "Rundherd;Erguss", "Blande", "Rundherd;Erguss", "Rundherd")
    assert "Blande (8) never" not in made(path)
    (tmp_path / "mine.toml").unlink()
    path = findings(tmp_path, "Erguss", "Rundherd;Erguss", "Blande", "Rundherd;Erguss")
    text = made(path)
    assert "Blande (10) never stands beside another finding" in text
    assert 'no_finding = ["No Finding", "No Findings", "Normal", "Blande"]' in text


def test_doubtful_findings_wait_for_a_decision(tmp_path: Path) -> None:
    path = findings(tmp_path, "Erguss", "Rundherd;Erguss", "V.a. Erguss", "Rundherd?;Erguss", "kein Rundherd")
    text = made(path)
    assert "denied, doubted, past or nothing: V.a. Erguss 8, Rundherd? 8, kein Rundherd 8." in text
    assert 'such as synonyms."V.a. Erguss" = "Erguss"' in text
    assert "Next: first decide on the names after other_findings" in text
    run = ("run", tmp_path / "mine.toml", "--out", tmp_path / "run", "--backend", "inline", "--set", "run.rounds=1")
    ended = flwr_sim(*run)
    assert (ended.code, '"V.a. Erguss" in line 4 (8 lines), which is no class' in ended.err) == (2, True)
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("# other_findings", "other_findings"), encoding="utf-8")
    assert flwr_sim(*run).code == 0
    labels = concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts).labels
    assert labels.sum(axis=0).tolist() == [24, 8]


def test_cells_that_name_nothing_wait_for_a_decision(tmp_path: Path) -> None:
    path = findings(tmp_path, "['Erguss']", "\"['Rundherd', 'Erguss']\"", "[]", "", "['']")
    text = made(path)
    assert "classes: Erguss 16, Rundherd 8 without" in text
    assert "denied, doubted, past or nothing: [] 8, [''] 8. A run refuses these until you decide" in text
    assert "synonyms" not in text
    run = ("run", tmp_path / "mine.toml", "--out", tmp_path / "run", "--backend", "inline", "--set", "run.rounds=1")
    ended = flwr_sim(*run)
    assert (ended.code, '"[]" in line 4 (8 lines)' in ended.err) == (2, True)
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("# other_findings", "other_findings"), encoding="utf-8")
    labels = concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts).labels
    assert [int((labels == value).sum()) for value in (1, 0)] == [24, 40]
    assert int(np.isnan(labels).any(axis=1).sum()) == 8


def test_a_hospital_of_zeros_alone_and_hospitals_of_like_names_are_questions(tmp_path: Path) -> None:
    places = ("St. Mary", "St. Mary Hosp.", "Univ. South")
    lines = [f"{n:03}.png,p{n // 2},{places[n % 3]},{n // 3 % 2 * (n % 3 > 0)},{n // 3 % 2}" for n in range(60)]
    text = made(table(tmp_path, "file,number,Hospital,Fluid,Mass", *lines))
    assert "only 0 there, though others have 1: St. Mary Fluid." in text
    assert 'one hospital or two? "St. Mary" and "St. Mary Hosp.".' in text
    assert "images patients" not in text  # which are unknown
    assert "without a label" not in text


def test_a_label_column_of_nothing_else_is_a_question(tmp_path: Path) -> None:
    lines = [f"{n:03}.png,p{n},{n % 2},{n // 2 % 2},{int(n % 4 == 0)}" for n in range(40)]
    text = made(table(tmp_path, "file,patient,Fluid,Mass,dx___99", *lines))
    assert "dx___99 (10) never stands beside another finding" in text
    assert "take it out of label_columns." in text


def test_letters_of_another_code_page_are_shown(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,K\u0131r\u0131k,Mass", *rows(40, "{a},{b}"))
    assert "not UTF-8" not in made(path)
    (tmp_path / "mine.toml").unlink()
    path.write_bytes(path.read_text(encoding="utf-8").encode("cp1254"))
    assert 'is not UTF-8, and read as Windows-1252: "K\u00fdr\u00fdk".' in made(path)


def test_pictures_that_are_reduced_are_said_to_be(labels: Path) -> None:
    assert "larger than" not in made(labels)
    (labels.parent / "mine.toml").unlink()
    Image.new("L", (96, 80)).save(labels.parent / "scans" / "000.png")
    assert "larger than 64 pixels: reduced to image_size" in made(labels)


def test_an_npz_file_is_no_table(tmp_path: Path) -> None:
    np.savez(tmp_path / "skin.npz", train_images=np.zeros(1))
    assert 'kind = "npz"' in made(tmp_path / "skin.npz", code=2)


@pytest.mark.parametrize("arrays", [("images", "labels"), ("images", "labels", "patient")])
def test_an_npz_file_of_one_set_is_refused_once_with_how_to_divide_it(arrays: tuple[str, ...], tmp_path: Path) -> None:
    np.savez(tmp_path / "skin.npz", **{name: np.zeros(2, np.uint8) for name in arrays})
    spec = NpzDatasetSpec(kind="npz", path="skin.npz", classes=("a", "b"))
    (fault,) = find_dataset_faults(spec, tmp_path)
    assert (fault.where, "is not divided" in fault.problem) == ("data.path", True)
    assert "An npz file that is not divided" in fault.remedy


def test_columns_in_spellings_of_one_name_wait_for_a_decision(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Kirik,KIRIK,Mass", *rows(40, "{a},{a},{b}"))
    assert 'one class or two? "Kirik" = "KIRIK"' in made(path)
    (tmp_path / "mine.toml").unlink()
    path.write_text(path.read_text().replace("000.png,p0,0,0", "000.png,p0,0,1"))
    text = made(path, code=2)
    assert 'mean "KIRIK" and say different things in 1 line, line 2 first. Correct these lines' in text


def test_label_columns_without_any_0_wait_for_the_meaning_of_a_blank(tmp_path: Path) -> None:
    lines = [line.replace(",0", ",") for line in rows(40, "{a},{b}")]
    path = table(tmp_path, "file,patient,Fluid,Mass", *(line.replace("00.png", "00.png") for line in lines))
    text = made(path)
    assert "only 1 and blank, no 0: Fluid, Mass." in text
    assert "Next: first decide on blank in" in text
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("# blank =", "blank ="), encoding="utf-8")
    labels = concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts).labels
    assert [(labels == value).sum(axis=0).tolist() for value in (1, 0)] == [[20, 19], [20, 21]]


def test_a_hospital_whose_labels_are_words_is_told_which_cells(tmp_path: Path) -> None:
    own = [f"{n:03}.png,p{n // 2},North,{n // 2 % 2},{n // 3 % 2},," for n in range(20)]
    foreign = [
        f"{n:03}.png,p{n // 2},South,,,{'ja' if n % 3 else 'nein'},{('k.A.', 'nein')[n % 2]}" for n in range(20, 40)
    ]
    path = table(tmp_path, "file,patient,Hospital,Fluid,Mass,Erguss,Herd", *own, *foreign)
    text = made(path, code=2)
    assert '"South" of column Hospital has no label that can be read.' in text
    assert '"Erguss" ("ja" in line 22 (13 lines), "nein" in line 23 (7 lines)); "Herd" ("k.A." in line 22' in text
    assert "Remove these lines" not in text


def test_a_synonym_of_a_column_of_findings_is_a_class_of_no_hospital(tmp_path: Path) -> None:
    cells = ("Effusion", "Mass|Effusion", "Mass", "No Finding")
    other = ("effusion_pleural", "Mass|effusion_pleural", "Mass", "No Finding")
    lines = [f"{n:03}.png,p{n},{'NS'[n % 2]},{(cells, other)[n % 2][n // 2 % 4]}" for n in range(80)]
    path = table(tmp_path, "file,patient,Hospital,Finding", *lines)
    assert 'one class or two? "effusion_pleural" = "Effusion"' in made(path)
    text = (tmp_path / "mine.toml").read_text().replace("# synonyms", "synonyms")
    (tmp_path / "mine.toml").write_text(text)
    run = ("run", tmp_path / "mine.toml", "--out", tmp_path / "run", "--backend", "inline", "--set", "run.rounds=1")
    assert flwr_sim(*run).code == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["classes"] == ["Effusion", "Mass"]


def test_names_with_a_drive_and_a_column_of_cases_are_recognised(tmp_path: Path) -> None:
    path = table(tmp_path, "file,Fallnr,Fluid,Mass", *rows(40, "{a},{b}"))
    assert "--patient-column Fallnr" in made(path)
    (tmp_path / "mine.toml").unlink()
    path.write_text(path.read_text().replace("Fallnr", "Fall Datum"))
    assert "patients: UNKNOWN" in (text := made(path))
    assert "--patient-column 'Fall" not in text
    (tmp_path / "mine.toml").unlink()
    assert "They look like dates" in made(path, "--patient-column", "Fall Datum")
    (tmp_path / "mine.toml").unlink()
    path.write_text(path.read_text().replace("\n0", "\nD:\\export\\0"))
    assert '"000.png" is there: remove the beginning "D:\\export\\" from the names' in made(path, code=2)
    (tmp_path / "scans" / "a" / "b").mkdir(parents=True)
    for file in (tmp_path / "scans").glob("*.png"):
        file.rename(tmp_path / "scans" / "a" / "b" / file.name)
    path.write_text(path.read_text().replace("D:\\export\\", "//pacs/x/a/b/").replace("Mass\n", "Mass\n,,,\n"))
    assert '"a/b/000.png" is there: remove the beginning "//pacs/x/"' in made(path, code=2)


def test_copies_of_a_picture_are_told_apart_by_what_is_wrong_with_them(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"))
    for copy, first in (
        ("005", "004"),
        ("009", "004"),
        ("013", "012"),  # says the same
    ):
        (tmp_path / "scans" / f"{copy}.png").write_bytes((tmp_path / "scans" / f"{first}.png").read_bytes())
    path.write_text(path.read_text().replace("005.png,p2,0,1", "005.png,p2,1,1"))
    text = made(path)
    assert (
        '1 image with the very bytes of an earlier one of the same patient, but other labels: "005.png" is "004.png".'
        in text
    )
    assert '1 image with the very bytes of an earlier one of another patient: "009.png" is "004.png".' in text
    assert "013.png" not in text


def test_a_table_of_studies_is_told_from_one_of_pictures(tmp_path: Path) -> None:
    path = table(tmp_path, "accession,Fluid,Mass", *(f"A{n},{n % 2},{n // 2 % 2}" for n in range(8)))
    for number in range(8):
        (tmp_path / "scans" / f"A{number}").mkdir()
        Image.new("L", (20, 20)).save(tmp_path / "scans" / f"A{number}" / "IM0001", "PNG")
    assert 'Column "accession" names folders: a line for each picture is needed' in made(path, code=2)


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    lines = [f"{n:03}.png,q{n // 4},{n % 2},{20 + n},p{n // 2},{n // 2 % 2},{n // 3 % 2}" for n in range(40)]
    path = table(tmp_path, "file,Patient,sex_male,Patient Age,Patient ID,Fluid,Mass", *lines)
    text = made(path)
    assert "patients: column Patient ID, 20 of them" in text
    assert "Left out, though it may name patients too: Patient." in text
    assert "0 and 1, but no findings by their names: sex_male." in text
    assert "not used: Patient, Patient Age." in text
    path.write_text(path.read_text().replace("Patient,sex", "MRN,sex"))
    (tmp_path / "mine.toml").unlink()
    text = made(path, code=2)
    assert "--patient-column MRN or --patient-column 'Patient ID'" in text
    text = made(path, "--patient-column", "Patient ID")
    assert "Left out, though it may name patients too: MRN." in text


def test_a_number_of_each_image_is_no_patient_and_said_to_be_none(tmp_path: Path) -> None:
    text = made(
        table(tmp_path, "file,EID,Fluid,Mass", *(f"{n:03}.png,{900 + n},{n % 2},{n // 2 % 2}" for n in range(40)))
    )
    assert "patients: UNKNOWN" in text
    assert "EID has another value for each image, as an examination has." in text


def test_two_columns_of_pictures_are_a_question_and_labels_of_the_other_picture_are_named(tmp_path: Path) -> None:
    lines = [f"{n:03}_L.png,{n:03}_R.png,p{n},{n % 2},{n // 2 % 2},{n % 3 % 2}" for n in range(40)]
    path = table(tmp_path, "left,right,patient,Mass_left,Mass_right,Fluid_left", *lines)
    for number in range(40):
        Image.new("L", (20, 20), number).save(tmp_path / "scans" / f"{number:03}_R.png")
    text = made(path, code=2)
    assert "--image-column left or --image-column right" in text
    text = made(path, "--image-column", "left", code=2)
    assert 'these columns say what other pictures (of "right") show: "Mass_right"; labels' in text
    assert "--findings Mass_left --findings Fluid_left (without these)" in text
    every = [part for name in ("Mass_left", "Mass_right", "Fluid_left") for part in ("--findings", name)]
    text = made(path, "--image-column", "left", *every)
    assert "NOT USED, though they name pictures too: right." in text
    assert "WRONG PICTURE, by their names: Mass_right say what right shows." in text
    assert "--image-column left --findings Mass_left --findings Fluid_left" in text
    assert "40 pictures of the folder that no line names: 000_R.png, 001_R.png, 002_R.png and 37 more." in text
    (tmp_path / "mine.toml").unlink()
    text = made(path, "--image-column", "right", "--findings", "Mass_right")
    assert "WRONG PICTURE" not in text
    assert "0 and 1, and not named with --findings: Mass_left, Fluid_left." in text


@pytest.mark.parametrize(
    ("header", "right", "labels", "foreign"),
    [
        ("left,right", "{:03}_R.png", "glaucoma_left,glaucoma_right", "glaucoma_right"),
        ("left,right", "{:03}_R", "glaucoma_left,glaucoma_right", "glaucoma_right"),
        ("img_OS,img_OD", "{:03}_R.jpg", "DR_OS,DR_OD,AMD_OS", "DR_OD"),
        ("pre,post", "{:03}_R.png", "tumour,tumour_post", "tumour_post"),
        ("left,note", "x", "glaucoma_left,glaucoma_right,dx_cataract", "glaucoma_right"),
        ("image,mask", "{:03}_mask.png", "Mass,Fluid_left,Fluid_right", ""),
        ("image,prior", "{:03}_old.png", "Mass,prior_surgery", "prior_surgery"),
        ("left,right", "{:03}_R.png", "glaucoma,drusen", ""),
    ],
)
def test_labels_of_pictures_that_are_elsewhere_are_a_question(
    header: str, right: str, labels: str, foreign: str, tmp_path: Path
) -> None:
    names = labels.split(",")
    lines = [
        ",".join((f"{n:03}.png", right.format(n), f"p{n}", *(str(n // (at + 1) % 2) for at in range(len(names)))))
        for n in range(40)
    ]
    path = table(tmp_path, f"{header},patient,{labels}", *lines)
    text = made(path, "--images", str(tmp_path / "scans"), code=2 if foreign else 0)
    assert (f' show: "{foreign}"; labels are learned for those of column' in text) == bool(foreign)
    rest = [name for name in names if name != foreign]
    if foreign:
        made(path, *(part for name in rest for part in ("--findings", name)))
    assert list(data_of(path).label_columns) == rest


@pytest.mark.parametrize("other", ["scans/{0}.png", "{0}", "{0}.PNG"])
def test_two_columns_that_name_the_same_pictures_are_no_question(other: str, tmp_path: Path) -> None:
    path = table(
        tmp_path, "file,path,patient,Mass", *(f"{n:03}.png,{other.format(f'{n:03}')},p{n},{n % 2}" for n in range(40))
    )
    made(path)
    assert data_of(path).image_column in ("file", "path")


def test_codes_of_icd_10_gm_that_exclude_or_suspect_a_finding_are_no_classes(tmp_path: Path) -> None:
    path = findings(tmp_path, "J90; J18.9", "J90G", "J90A; J18.9G", "J18.9V", "J90")
    path.write_text(path.read_text().replace("Befund", "ICD"))
    text = made(path)
    assert "classes: J90 16, J18.9 8, J90G 8, J18.9G 8" in text
    assert "denied, doubted, past or nothing: J90A 8, J18.9V 8." in text
    assert 'one class or two? "J90G" = "J90", "J18.9G" = "J18.9"' in text
    assert 'synonyms."J18.9V" = "J18.9"' in text
    assert 'synonyms."J90A"' not in text
    assert "Other findings of the table count as no class" not in text
    assert "Next: first decide on the names after other_findings and synonyms" in text
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    text = text.replace("# other_findings", "other_findings").replace("# synonyms", "synonyms")
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert data_of(path).class_names == ("J90", "J18.9")
    labels = concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts).labels
    assert labels.sum(axis=0).tolist() == [24, 16]


def test_a_column_of_certainties_beside_codes_is_a_question(tmp_path: Path) -> None:
    lines = [f"{n:03}.png,p{n},{('J90', 'J18.9')[n % 2]},{'GAVG'[n % 4]}" for n in range(40)]
    path = table(tmp_path, "file,patient,ICD10,Sicherheit", *lines)
    assert 'column "Sicherheit" may say how certain those of "ICD10" are: "A" in line 3' in made(path, code=2)
    path.write_text(path.read_text().replace(",A\n", ",G\n").replace(",V\n", ",G\n"))
    made(path)


@pytest.mark.parametrize(
    ("cells", "classes", "not_assessed"),
    [
        (("1", "2", "3", "99", "2"), ("2", "1", "3"), ("99",)),
        (("mild", "ungradable", "severe", "-9", "mild"), ("mild", "severe"), ("ungradable", "-9")),
        (
            ("Mass", "nicht beurteilbar", "Mass|Fluid", "unreadable", ""),
            ("Mass", "Fluid"),
            ("nicht beurteilbar", "unreadable"),
        ),
    ],
)
def test_words_and_codes_for_images_that_nobody_could_assess_are_no_classes(
    cells: tuple[str, ...], classes: tuple[str, ...], not_assessed: tuple[str, ...], tmp_path: Path
) -> None:
    path = findings(tmp_path, *cells)
    text = made(path, "--findings", "Befund")
    assert "not assessed, by the word or the code: " in text
    assert "Next: first decide on those after not_assessed" in text
    assert data_of(path).classes == classes
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("# not_assessed", "not_assessed"), encoding="utf-8")
    assert data_of(path).not_assessed == not_assessed
    labels = concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts).labels
    unknown = sum(cell in ("", *not_assessed) for cell in cells)
    assert int(np.isnan(labels).all(axis=1).sum()) == int(np.isnan(labels).any(axis=1).sum()) == 8 * unknown


def test_blank_findings_wait_for_their_meaning_where_no_image_is_without_a_finding(tmp_path: Path) -> None:
    text = made(path := findings(tmp_path, "Mass", "Mass|Fluid", "", "Fluid"))
    assert "EVERY IMAGE THAT COUNTS SHOWS A FINDING. The others (10 of 40) have a blank cell" in text
    assert "Next: first decide on blank" in text
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("# blank", "blank"), encoding="utf-8")
    labels = concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts).labels
    assert [(labels == value).sum(axis=0).tolist() for value in (1, 0)] == [[20, 20], [20, 20]]
    (tmp_path / "words").mkdir()
    text = made(findings(tmp_path / "words", "Benign", "Malignant", "Nondiagnostic", "ungraded"))
    assert "EVERY IMAGE" not in text
    assert "Next: first decide on those after not_assessed in" in text
    assert "EVERY IMAGE" not in made(findings(tmp_path / "normal", "Mass", "Mass|Fluid", "", "No Finding"))


def test_a_column_of_words_for_parts_is_a_question_and_no_hospital(tmp_path: Path) -> None:
    lines = [f"{line},{('dev', 'holdout')[n % 8 // 6]}" for n, line in enumerate(rows(40, "{a},{b}"))]
    text = made(path := table(tmp_path, "file,patient,Fluid,Mass,dataset", *lines))
    assert 'split: is it dataset ("dev", "holdout")? It is NOT USED' in text
    assert "--source-column dataset" not in text
    assert "Next: first decide on split_column" in text
    (tmp_path / "mine.toml").unlink()
    path.write_text(path.read_text().replace(",dev", ",train").replace(",holdout", ",test"))
    assert "split: column dataset, train 28, validation 2, test 10." in made(path)
    assert data_of(path).split_column == "dataset"


def test_reports_are_neither_offered_nor_printed(tmp_path: Path) -> None:
    reports = (
        "Befund: Kein Hinweis auf Erguss. Das Herz ist normal gross.",
        "Ein Erguss rechts. Das Herz ist gross geworden.",
    )
    lines = [f"{line},{reports[n % 2]},2019-01-{n % 9 + 10}" for n, line in enumerate(rows(40, "{a},{b}"))]
    path = table(tmp_path, "file,patient,Fluid,Mass,Report,visit", *lines)
    assert "Kein Hinweis" not in made(path)
    (tmp_path / "mine.toml").unlink()
    text = made(path, "--findings", "Report", code=2)
    assert 'column "Report" holds texts' in text
    assert "Kein Hinweis auf" not in text
    path.write_text(
        path.read_text().replace("Fluid,Mass", "Region,Grade").replace(",1,", ",Lunge,").replace(",0,", ",Herz,")
    )
    text = made(path, code=2)
    assert "add it to the command: --findings Region or --findings Grade" in text


def test_an_ending_other_than_that_of_the_file_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"))
    for number in range(20, 40):
        file = tmp_path / "scans" / f"{number:03}.png"
        file.rename(file.with_suffix(".jpeg"))
    text = made(path)
    assert '"020.jpeg" is there, and no "020.png": 20 names end otherwise than the file.' in text
    assert "20 pictures of the folder that no line names: 020.jpeg" in text
    for number in range(20):
        (tmp_path / "scans" / f"{number:03}.png").unlink()
    (tmp_path / "mine.toml").unlink()
    assert '"020.jpeg" is there, and no "020.png"' in made(path, code=2)


def test_names_with_another_ending_are_found_beside_labels_that_are_names_of_files(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Mass", *(f"{n}.tif,p{n},{n % 2}" for n in range(40)))
    for number in range(40):
        Image.new("L", (20, 20), number).save(tmp_path / "scans" / f"{number}.tiff", "PNG")
    assert '"0.tiff" is there, and no "0.tif": 40 names end otherwise than the file.' in made(path, code=2)
    path.write_text(path.read_text().replace(".tif,", ","))
    made(path)
    assert len(concatenate_image_sets(load_dataset(data_of(path), tmp_path).parts)) == 40


def test_the_named_column_is_the_subject_of_the_refusal(tmp_path: Path) -> None:
    lines = [f"{n:03}.png,p{n},{'NS'[n // 20]},{n % 2 + 1},{n % 2 if n < 20 else ''}" for n in range(40)]
    path = table(tmp_path, "file,patient,Hospital,Calc,Mass", *lines)
    assert 'column "Calc" holds "1" in line 2 (20 lines), "2" in line 3 (20 lines)' in made(
        path, "--findings", "Calc", code=2
    )
    text = made(path, "--findings", "Mass", code=2)
    assert '"S" of column Hospital has no label that can be read. Its cells of "Mass" are blank.' in text
    path.write_text(path.read_text().replace("000.png,p0,N,1,0", "000.png,p0,N,1,9"))
    assert 'These hold 1 and 2, perhaps for yes and no: "Calc"' in made(path, code=2)


def test_readers_of_one_finding_and_letters_for_findings_are_recognised(tmp_path: Path) -> None:
    lines = [line.removesuffix("_") for line in rows(40, "{a},{a},{b},{c},{b}")]
    text = made(path := table(tmp_path, "file,patient,Mass_R1,Mass_consensus,N,D,G", *lines))
    assert "one finding of several readers? Mass_R1, Mass_consensus." in text
    assert data_of(path).label_columns == ("Mass_R1", "Mass_consensus", "N", "D", "G")


def test_numbers_of_rows_without_a_heading_are_no_lost_column(tmp_path: Path) -> None:
    lines = [f"{line},{n + 1}" for n, line in enumerate(rows(40, "{a},{b}"))]
    assert "no name in the first line" not in made(table(tmp_path, "file,patient,Fluid,Mass,", *lines))


@pytest.mark.parametrize("text", ['{"images": [], "annotations": []}', '\ufeff\n[{"file": "a.png"}]'])
def test_json_is_named_as_such(text: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8")
    assert "labels.csv is JSON, and no table." in made(tmp_path / "labels.csv", code=2)
