"""``flwr-sim init``: an experiment for somebody's own table and pictures, made by the command and run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import imagecodecs
import numpy as np
import pytest
from PIL import Image

from polyclinic.common.config import read_experiment
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.base.spec import NpzDatasetSpec
from polyclinic.data.load import find_dataset_faults, load_dataset
from polyclinic.data.partition.spec import ClassListsPartitionSpec
from polyclinic.strategies.registry import find_method_faults
from tests.data.bombs import GOOD, png
from tests.data.dicom_files import dicom
from tests.network.real import flwr_sim
from tests.server.commands import Ended


def table(folder: Path, header: str, *rows: str, suffix: str = ".png", mode: str = "L") -> Path:
    """Write a table, and a picture for each of its rows whose first cell names a file."""
    (folder / "scans").mkdir(parents=True, exist_ok=True)
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


def patients(cells: Callable[[int], str], count: int = 40) -> list[str]:
    """Make rows ``NNN.png,pN,...``, one image a patient."""
    return [f"{n:03}.png,p{n},{cells(n)}" for n in range(count)]


def labelled(folder: Path, header: str = "file,patient,Fluid,Mass") -> Path:
    """Write a table of forty images, two a patient, with two classes."""
    return table(folder, header, *rows(40, "{a},{b}"))


def made(
    path: Path, *options: str, code: int = 0, says: Sequence[str] = (), lacks: Sequence[str] = (), **data: object
) -> str:
    """Make an experiment for a table in the place of an earlier one; return what the command prints.

    Args:
        says: Parts of it.
        lacks: Texts that are not in it.
        data: What the experiment says of its data.
    """
    written = path.parent / "mine.toml"
    written.unlink(missing_ok=True)
    ended = flwr_sim("init", path, "--out", written, *options)
    assert (ended.code, written.exists()) == (code, code == 0), ended.err
    text = " ".join((ended.out + ended.err).split())
    assert ([part for part in says if part not in text], [part for part in lacks if part in text]) == ([], []), text
    if data:
        read = data_of(path)
        assert {name: getattr(read, name) for name in data} == data
    return text


def refused(path: Path, *options: str, says: Sequence[str] = (), lacks: Sequence[str] = ()) -> None:
    """Check that no experiment is made for a table, and what the command prints."""
    made(path, *options, code=2, says=says, lacks=lacks)


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")


def experiment_of(path: Path) -> Path:
    return path.parent / "mine.toml"


def confirm(path: Path, *keys: str) -> None:
    """Take the proposals of the experiment for these keys, as a person does."""
    edit(experiment_of(path), *((f"# {key}", key) for key in keys))


def data_of(path: Path) -> Any:
    """Return what the experiment that was made for a table says of its data."""
    return read_experiment(experiment_of(path), [], find_method_faults).experiment.data


def images_of(path: Path) -> ImageSet:
    """Return all images of the experiment that was made for a table."""
    return concatenate_image_sets(load_dataset(data_of(path), path.parent).parts)


def counts_of(path: Path) -> list[list[int]]:
    """Return the images of each class that show it, and those that do not."""
    labels = images_of(path).labels
    return [(labels == value).sum(axis=0).tolist() for value in (1, 0)]


def ran(path: Path) -> Ended:
    """Run the experiment that was made for a table, for one round."""
    out = ("--out", path.parent / "run", "--backend", "inline", "--set", "run.rounds=1")
    with patch("polyclinic.server.federation.set_up.write_run_pages"):  # to draw takes longer than to train
        return flwr_sim("run", experiment_of(path), *out)


def classes_of_run(path: Path) -> list[str]:
    assert ran(path).code == 0
    return list(json.loads((path.parent / "run" / "summary.json").read_text())["classes"])


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """A table of twenty patients with two classes."""
    return table(tmp_path, "file,patient,Fluid,Mass,age", *rows(40, "{a},{b},4{a}"))


def test_the_experiment_is_read_with_patients_and_classes(labels: Path) -> None:
    says, names = ["patients: column patient, 20 of them", "classes: Fluid 20, Mass 19"], ("Fluid", "Mass")
    made(labels, says=says, label_columns=names, patient_column="patient", color=False)
    parts = [set(part.patients) for part in load_dataset(data_of(labels), labels.parent).parts]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20


def test_a_picture_that_claims_gigabytes_ends_nothing(labels: Path) -> None:
    (labels.parent / "scans" / "000.png").write_bytes(png(65535, 65535, GOOD))
    made(labels)


def test_unknown_patients_are_said_aloud_and_in_the_file(tmp_path: Path) -> None:
    path = labelled(tmp_path, "file,number,Fluid,Mass")
    made(path, says=["patients: UNKNOWN", "--patient-column"])
    assert "# patient_column" in experiment_of(path).read_text(encoding="utf-8")
    made(path, "--patient-column", "number", says=["patients: column number, 20 of them"])


def test_rows_without_a_picture_are_counted_and_left_out(tmp_path: Path) -> None:
    lost = ["lost1.png,p90,1,0", "lost2.png,p91,1,0"]
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), *lost)
    left_out = 'of 42, 2 rows name pictures that are not there, and left out: "lost1.png" in line 42, "lost2.png"'
    made(path, says=[left_out, "Fluid 20"], missing_files="ignore")


def test_pictures_that_cannot_be_read_are_named_and_too_many_are_refused_as_a_run_does(labels: Path) -> None:
    scans = labels.parent / "scans"
    (scans / "003.png").write_bytes(b"")
    Image.new("L", (20, 20)).save(scans / "004.png", "TIFF")
    unread = ("003.png cannot be read, and is left out: empty.", "004.png cannot be read, and is left out: a TIFF file")
    made(labels, says=["an experiment on 38 images", *unread])
    Image.new("L", (20, 20)).save(scans / "005.png", "BMP")
    packed = dicom(np.zeros((8, 8), np.uint16)).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.9\0")
    (scans / "006.png").write_bytes(packed)
    files = '"004.png" (a TIFF file; convert it to PNG); "005.png" (a BMP file; convert it to PNG)'
    text = made(labels, code=2, says=["4 of 40 images cannot be read", files])
    assert text.count("from PIL import Image") == 1


@pytest.mark.parametrize(("tint", "color"), [(0, False), (6, False), (60, True)])
def test_grey_that_is_stored_as_colour_is_noticed(tmp_path: Path, tint: int, color: bool) -> None:
    path = labelled(tmp_path)
    for file in (tmp_path / "scans").iterdir():
        Image.new("RGB", (20, 20), (100 + tint, 100, 100)).save(file)
    made(path, color=color)


@pytest.mark.parametrize("samples", [1, 3])
def test_the_depth_of_16_bit_pictures_is_proposed_for_all_and_no_picture_is_read_by_its_own(
    tmp_path: Path, samples: int
) -> None:
    path = labelled(tmp_path)
    for number, file in enumerate(sorted((tmp_path / "scans").iterdir())):
        pixels = np.full((20, 20), 4000 if number == 7 else 1008 + number, np.uint16)
        file.write_bytes(imagecodecs.png_encode(pixels if samples == 1 else np.stack([pixels] * samples, -1)))
    made(path, says=["bit_depth = 12 is a guess"], bit_depth=12, color=False)
    shown = {int(image.max()) for image in images_of(path).images}
    assert shown == {round((4000 if n == 7 else 1008 + n) * 255 / 4095) for n in range(40)}


def of_dicom(folder: Path, elements: Callable[[int], dict[str, Any]]) -> Path:
    """Write a table that names no patients, and DICOM files with these elements."""
    path = table(folder, "file,Fluid,Mass", *(f"{n:03}.dcm,{n % 2},{n // 2 % 2}" for n in range(40)))
    for n in range(40):
        (folder / "scans" / f"{n:03}.dcm").write_bytes(dicom(np.full((8, 8), n, np.uint16), **elements(n)))
    return path


def test_mixed_modalities_and_missing_windows_are_told(tmp_path: Path) -> None:
    def elements(n: int) -> dict[str, Any]:
        window = {"WindowCenter": 100, "WindowWidth": 200} if n % 4 else {}
        return {"PatientID": f"P{n // 2}" if n else "", "Modality": "CT" if n < 30 else "CR", **window}

    windows, identity = "10 of 40 DICOM files name no window", "1 image without a PatientID"
    made(of_dicom(tmp_path, elements), says=["30 CT, 10 CR", windows, "20 of them; none of these is split", identity])


def test_patients_of_dicom_files_are_taken_where_the_table_names_none(tmp_path: Path) -> None:
    path = of_dicom(tmp_path, lambda n: {"PatientID": f"patient {n // 3}"})
    text = made(path, says=["patients: PatientID of the DICOM files, 14 of them"])
    assert "UNKNOWN" not in text + experiment_of(path).read_text(encoding="utf-8")


def test_names_of_findings_in_one_column_are_taken(tmp_path: Path) -> None:
    lines = patients(lambda n: "Mass|Fluid" if n % 3 else "Fluid", 30)
    path = table(tmp_path, "Image,Subject ID,Findings", *lines, mode="RGB")
    names = ("Fluid", "Mass")
    made(path, says=["classes: Fluid 30, Mass 20"], finding_column="Findings", classes=names, color=False)


DOUBLE = "file,patient,Fluid,Mass"


@pytest.mark.parametrize(
    ("header", "lines", "options", "reason"),
    [
        ("file,patient,Fluid", ["a.tif,p1,1"], (), "no column of the table names pictures"),
        ("file,patient,Fluid", ["a.png,p1,1.5"], (), "no column is sure to hold labels"),
        ("file,patient,Fluid", ["a.png,p1,yes", "b.png,p2,no"], (), 'hold words for them, which are not read: "Fluid"'),
        ("file,patient,Fluid", ["lost.png,p1,1", "lost.png,p2,0"], (), 'none of the 2 pictures of column "file"'),
        ("file,patient,Fluid", ["a.png,p1,1"], ("--patient-column", "patinet"), 'Did you mean "patient"?'),
        ("file,patient,Fluid", ["a.png,p1,1"], ("--image-column", "nope"), '"nope" is not a column'),
        (DOUBLE, [*rows(40, "{a},{b}"), "007.png,p3,0,0"], (), '"007.png" (lines 9 and 42: Fluid)'),
        (DOUBLE, [*rows(40, "{a},{b}"), "lost.png,P-03,1,0"], (), '"p3" (line 8) and "P-03" (line 42)'),
        (DOUBLE, [*rows(40, "{a},{b}"), "lost.png,,1,0"], (), "1 line without a patient, line 42 first"),
        (DOUBLE, [*rows(40, "{a},{b}"), "lost.png,P-03,1,0"], (), "Or add --join-patients"),
    ],
)
def test_a_table_that_is_not_understood_or_that_a_run_would_refuse_is_refused_with_a_remedy(
    header: str, lines: list[str], options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    refused(table(tmp_path, header, *lines), *options, says=[reason])


def test_a_table_of_another_program_is_read_and_repeated_rows_count_once(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), "007.png,p3,1,0")
    path.write_bytes(path.read_text().replace(",", ";").replace("p3;", "p\u00e4\u00a0;").encode("latin-1"))
    made(path, says=["patients: column patient, 20 of them", "1 row said the same as an earlier one"])
    assert len(images_of(path)) == 40


def test_spellings_of_a_finding_are_one_class_and_near_names_are_questioned(tmp_path: Path) -> None:
    cells = ["Effusion", "effusion|Mass", "No Finding", "['Efusion']", ""]
    path = table(tmp_path, "file,patient,finding", *patients(lambda n: cells[n % 5]))
    near = 'one class or two? "Efusion" = "Effusion"'
    made(path, says=["classes: Effusion 16, Mass 8, Efusion 8", near], lacks=["exactly one"])
    path.write_text(path.read_text() + "003.png,p3,Mass;Effusion\n")
    refused(path, says=['"Mass;Effusion" in line 42'])


def test_nothing_is_written_over(labels: Path) -> None:
    experiment_of(labels).write_text("mine")
    ended = flwr_sim("init", labels, "--out", experiment_of(labels))
    assert (ended.code, "is there already" in ended.err) == (2, True)
    assert experiment_of(labels).read_text() == "mine"


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
    # Each hospital has labelled all that it looks for.
    path = in_hospitals(tmp_path, column, *hospitals)
    made(path, says=[f"hospitals: column {column}, 2 of them"], lacks=["without a label"])
    partition = read_experiment(experiment_of(path), [], find_method_faults).experiment.partition
    assert isinstance(partition, ClassListsPartitionSpec)
    assert partition.images == "source"
    assert partition.lists == {hospitals[0]: ("Mass",), hospitals[1]: ("Fluid", "Mass")}


@pytest.mark.parametrize("column", ["sex", "View Position", "anatom_site", "clinical_history"])
def test_other_columns_are_no_hospitals(column: str, tmp_path: Path) -> None:
    made(in_hospitals(tmp_path, column, "A", "B"), says=["hospitals: no column names them"], source_column=None)


def test_what_a_hospital_must_correct_is_named_and_may_be_left_aside(tmp_path: Path) -> None:
    path = in_hospitals(tmp_path, "Hospital", "North", "NORTH")
    path.write_text(path.read_text() + "039.png,p19,0,0,\n")
    refused(path, says=['"North" (line 2) and "NORTH" (line 22)', "1 line without a hospital, line 42 first"])
    refused(path, "--source-column", "")  # the last line contradicts line 41
    path.write_text(path.read_text().rsplit("039", 1)[0])
    made(path, "--source-column", "", says=["--source-column"], source_column=None)


def test_patients_of_several_hospitals_are_counted(tmp_path: Path) -> None:
    path = in_hospitals(tmp_path, "Hospital", "North", "South")
    edit(path, (",p19,", ",p0,"))
    made(path, says=["1 patient has images of several hospitals"])


def spellings(folder: Path) -> Path:
    """Write a table of two hospitals with a spelling each, of which the second is the more frequent."""
    lines = [f"{line},{'NS'[n // 20]}" for n, line in enumerate([*rows(20, "{a},,{b}"), *rows(40, ",{a},{b}")[20:]])]
    lines = [line.replace(",,0", ",,1") for line in lines]
    return table(folder, "file,patient,Pleural Effusion,pleural_effusion,Mass,Hospital", *lines)


def test_two_spellings_of_a_class_may_both_stay(tmp_path: Path) -> None:
    path = spellings(tmp_path)
    name = 'synonyms."pleural_effusion" = "pleural_effusion of one hospital"'
    made(path, says=[f"To keep both, give one a name of its own there, such as {name}"])
    edit(experiment_of(path), ('# synonyms."pleural_effusion" = "Pleural Effusion"', name))
    assert classes_of_run(path) == ["Mass", "Pleural Effusion", "pleural_effusion of one hospital"]


def test_two_spellings_of_a_class_wait_for_a_decision(tmp_path: Path) -> None:
    path = spellings(tmp_path)
    three = ("Pleural Effusion", "pleural_effusion", "Mass")
    made(path, says=["Next: first decide on synonyms"], class_names=three)
    ended, line = ran(path), '"pleural_effusion" = "Pleural Effusion"'
    assert (ended.code, "look like one class" in ended.err, line in ended.err) == (2, True, True)
    # The proposal is the same, though the other name is more frequent.
    assert f"# synonyms.{line}" in experiment_of(path).read_text()
    confirm(path, "synonyms")
    assert data_of(path).class_names == ("Pleural Effusion", "Mass")
    assert ran(path).code == 0
    assert "pleural_effusion" not in (tmp_path / "run" / "model.json").read_text()


def test_pictures_in_a_folder_for_each_hospital_are_recognised(tmp_path: Path) -> None:
    path = in_hospitals(tmp_path, "Hospital", "North", "South")
    edit(path, ("file,patient", "file,Pat.-ID"))
    for place in ("North", "South"):
        (tmp_path / "scans" / "all" / place).mkdir(parents=True)
    for number in range(40):
        place, file = ("North", "South")[number // 20], f"{number:03}.png"
        (tmp_path / "scans" / file).rename(tmp_path / "scans" / "all" / place / file)
        edit(path, (file, f"{place}\\{file}"))
    made(path, images="scans/all", patient_column="Pat.-ID")
    assert len(images_of(path)) == 40


def findings(folder: Path, *cells: str) -> Path:
    """Write a table of findings in one column, the cells in turn."""
    return table(folder, "file,patient,Befund", *patients(lambda n: cells[n % len(cells)]))


def test_words_for_normal_are_no_classes(tmp_path: Path) -> None:
    path = findings(tmp_path, "Erguss", "Rundherd;Erguss", "o.B.", "unauffällig", "Rundherd")
    made(path, says=["classes: Erguss 16, Rundherd 16 ", 'no finding: "o.B.", "unauffällig".'])
    data = data_of(path)
    assert (data.classes, data.no_finding[-2:]) == (("Erguss", "Rundherd"), ("o.B.", "unauffällig"))
    assert counts_of(path) == [[16, 16], [24, 24]]


BLANK = (
    "classes: Erguss 10, Rundherd 10 without a label (blank or -1), of 40: Erguss 10, Rundherd 10.",
    '"None" counts as a blank cell. If it says that nothing was found, add it to no_finding.',
)
ALONE = (
    "Blande (10) never stands beside another finding",
    'no_finding = ["No Finding", "No Findings", "Normal", "Blande"]',
)
WORDS = "These are the words of column Befund. Words for yes and no are no findings."


@pytest.mark.parametrize(
    ("cells", "says", "lacks"),
    [
        pytest.param(("Erguss", "Rundherd", "None", "o.B."), BLANK, (), id="None is a blank cell"),
        pytest.param(("Var", "Yok", "Yok", ""), (WORDS,), (), id="words for yes and no"),
        pytest.param(("Erguss", "Rundherd;Erguss", "Blande", "Rundherd;Erguss"), ALONE, (), id="a name always alone"),
        pytest.param(
            ("Erguss", "Rundherd;Erguss", "Blande", "Rundherd;Erguss", "Rundherd"),
            (),
            ("Blande (8) never",),
            id="two names alone",
        ),
    ],
)
def test_what_the_cells_of_findings_may_mean_is_said(
    cells: Sequence[str], says: Sequence[str], lacks: Sequence[str], tmp_path: Path
) -> None:
    made(findings(tmp_path, *cells), says=says, lacks=lacks)


def test_doubtful_findings_wait_for_a_decision(tmp_path: Path) -> None:
    path = findings(tmp_path, "Erguss", "Rundherd;Erguss", "V.a. Erguss", "Rundherd?;Erguss", "kein Rundherd")
    doubtful = "denied, doubted, past or nothing: V.a. Erguss 8, Rundherd? 8, kein Rundherd 8."
    decide = "Next: first decide on the names after other_findings"
    made(path, says=[doubtful, 'such as synonyms."V.a. Erguss" = "Erguss"', decide])
    ended = ran(path)
    assert (ended.code, '"V.a. Erguss" in line 4 (8 lines), which is no class' in ended.err) == (2, True)
    confirm(path, "other_findings")
    assert ran(path).code == 0
    assert counts_of(path)[0] == [24, 8]


def test_cells_that_name_nothing_wait_for_a_decision(tmp_path: Path) -> None:
    path = findings(tmp_path, "['Erguss']", "\"['Rundherd', 'Erguss']\"", "[]", "", "['']")
    nothing = "denied, doubted, past or nothing: [] 8, [''] 8. A run refuses these until you decide"
    made(path, says=["classes: Erguss 16, Rundherd 8 without", nothing], lacks=["synonyms"])
    ended = ran(path)
    assert (ended.code, '"[]" in line 4 (8 lines)' in ended.err) == (2, True)
    confirm(path, "other_findings")
    assert counts_of(path) == [[16, 8], [16, 24]]
    assert int(np.isnan(images_of(path).labels).any(axis=1).sum()) == 8


PLACES = ("St. Mary", "St. Mary Hosp.", "Univ. South")


@pytest.mark.parametrize(
    ("header", "lines", "says", "lacks"),
    [
        pytest.param(
            "file,number,Hospital,Fluid,Mass",
            [f"{n:03}.png,p{n // 2},{PLACES[n % 3]},{n // 3 % 2 * (n % 3 > 0)},{n // 3 % 2}" for n in range(60)],
            ["only 0 there, though others have 1: St. Mary Fluid.", 'one hospital or two? "St. Mary" and "St. Mary H'],
            ["images patients", "without a label"],  # patients are unknown
            id="zeros alone at one hospital, names alike",
        ),
        pytest.param(
            "file,patient,Fluid,Mass,dx___99",
            patients(lambda n: f"{n % 2},{n // 2 % 2},{int(n % 4 == 0)}"),
            ["dx___99 (10) never stands beside another finding", "take it out of label_columns."],
            [],
            id="a label column of nothing else",
        ),
        pytest.param(
            "file,EID,Fluid,Mass",
            [f"{n:03}.png,{900 + n},{n % 2},{n // 2 % 2}" for n in range(40)],
            ["patients: UNKNOWN", "EID has another value for each image, as an examination has."],
            [],
            id="a number of each image is no patient",
        ),
        pytest.param(
            "file,patient,Fluid,Mass,",
            [f"{line},{n + 1}" for n, line in enumerate(rows(40, "{a},{b}"))],
            [],
            ["no name in the first line"],
            id="numbers of rows without a heading",
        ),
        pytest.param(
            "file,patient,Fluid,Dry",
            rows(40, "{a},{c}"),
            ["Each image shows exactly one of them"],
            [],
            id="one class an image",
        ),
        pytest.param(
            "file,patient,Rare,Mass",
            ["300.png,p300,1,1", *patients(lambda n: f"0,{n % 2}", 30)],
            ["fewer than 10 images show Rare"],
            ["exactly one"],
            id="a rare class",
        ),
    ],
)
def test_what_is_odd_about_a_table_is_said(
    header: str, lines: list[str], says: list[str], lacks: list[str], tmp_path: Path
) -> None:
    made(table(tmp_path, header, *lines), says=says, lacks=lacks)


def test_letters_of_another_code_page_are_shown(tmp_path: Path) -> None:
    path = labelled(tmp_path, "file,patient,K\u0131r\u0131k,Mass")
    made(path, lacks=["not UTF-8"])
    path.write_bytes(path.read_text(encoding="utf-8").encode("cp1254"))
    made(path, says=['is not UTF-8, and read as Windows-1252: "K\u00fdr\u00fdk".'])


def test_pictures_that_are_reduced_are_said_to_be(labels: Path) -> None:
    made(labels, lacks=["larger than"])
    Image.new("L", (96, 80)).save(labels.parent / "scans" / "000.png")
    made(labels, says=["larger than 64 pixels: reduced to image_size"])


def test_an_npz_file_is_no_table(tmp_path: Path) -> None:
    np.savez(tmp_path / "skin.npz", train_images=np.zeros(1))
    refused(tmp_path / "skin.npz", says=['kind = "npz"'])


@pytest.mark.parametrize("arrays", [("images", "labels"), ("images", "labels", "patient")])
def test_an_npz_file_of_one_set_is_refused_once_with_how_to_divide_it(arrays: tuple[str, ...], tmp_path: Path) -> None:
    np.savez(tmp_path / "skin.npz", **{name: np.zeros(2, np.uint8) for name in arrays})
    spec = NpzDatasetSpec(kind="npz", path="skin.npz", classes=("a", "b"))
    (fault,) = find_dataset_faults(spec, tmp_path)
    assert (fault.where, "is not divided" in fault.problem) == ("data.path", True)
    assert "An npz file that is not divided" in fault.remedy


def test_columns_in_spellings_of_one_name_wait_for_a_decision(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Kirik,KIRIK,Mass", *rows(40, "{a},{a},{b}"))
    made(path, says=['one class or two? "Kirik" = "KIRIK"'])
    edit(path, ("000.png,p0,0,0", "000.png,p0,0,1"))
    refused(path, says=['mean "KIRIK" and say different things in 1 line, line 2 first. Correct these lines'])


def test_label_columns_without_any_0_wait_for_the_meaning_of_a_blank(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *(line.replace(",0", ",") for line in rows(40, "{a},{b}")))
    made(path, says=["only 1 and blank, no 0: Fluid, Mass.", "Next: first decide on blank in"])
    confirm(path, "blank =")
    assert counts_of(path) == [[20, 19], [20, 21]]


def test_a_hospital_whose_labels_are_words_is_told_which_cells(tmp_path: Path) -> None:
    own = [f"{n:03}.png,p{n // 2},North,{n // 2 % 2},{n // 3 % 2},," for n in range(20)]
    foreign = [
        f"{n:03}.png,p{n // 2},South,,,{'ja' if n % 3 else 'nein'},{('k.A.', 'nein')[n % 2]}" for n in range(20, 40)
    ]
    cells = '"Erguss" ("ja" in line 22 (13 lines), "nein" in line 23 (7 lines)); "Herd" ("k.A." in line 22'
    refused(
        table(tmp_path, "file,patient,Hospital,Fluid,Mass,Erguss,Herd", *own, *foreign),
        says=['"South" of column Hospital has no label that can be read.', cells],
        lacks=["Remove these lines"],
    )


def test_a_synonym_of_a_column_of_findings_is_a_class_of_no_hospital(tmp_path: Path) -> None:
    cells = ("Effusion", "Mass|Effusion", "Mass", "No Finding")
    other = ("effusion_pleural", "Mass|effusion_pleural", "Mass", "No Finding")
    lines = patients(lambda n: f"{'NS'[n % 2]},{(cells, other)[n % 2][n // 2 % 4]}", 80)
    path = table(tmp_path, "file,patient,Hospital,Finding", *lines)
    made(path, says=['one class or two? "effusion_pleural" = "Effusion"'])
    confirm(path, "synonyms")
    assert classes_of_run(path) == ["Effusion", "Mass"]


def test_names_with_a_drive_and_a_column_of_cases_are_recognised(tmp_path: Path) -> None:
    path = labelled(tmp_path, "file,Fallnr,Fluid,Mass")
    made(path, says=["--patient-column Fallnr"])
    edit(path, ("Fallnr", "Fall Datum"))
    made(path, says=["patients: UNKNOWN"], lacks=["--patient-column 'Fall"])
    made(path, "--patient-column", "Fall Datum", says=["They look like dates"])
    edit(path, ("\n0", "\nD:\\export\\0"))
    refused(path, says=['"000.png" is there: remove the beginning "D:\\export\\" from the names'])
    (tmp_path / "scans" / "a" / "b").mkdir(parents=True)
    for file in (tmp_path / "scans").glob("*.png"):
        file.rename(tmp_path / "scans" / "a" / "b" / file.name)
    edit(path, ("D:\\export\\", "//pacs/x/a/b/"), ("Mass\n", "Mass\n,,,\n"))
    refused(path, says=['"a/b/000.png" is there: remove the beginning "//pacs/x/"'])


def test_copies_of_a_picture_are_told_apart_by_what_is_wrong_with_them(tmp_path: Path) -> None:
    path = labelled(tmp_path)
    for copy, first in (("005", "004"), ("009", "004"), ("013", "012")):  # the last one says the same
        (tmp_path / "scans" / f"{copy}.png").write_bytes((tmp_path / "scans" / f"{first}.png").read_bytes())
    edit(path, ("005.png,p2,0,1", "005.png,p2,1,1"))
    very = "1 image with the very bytes of an earlier one of"
    same, other = "the same patient, but other labels", "another patient"
    says = [f'{very} {same}: "005.png" is "004.png".', f'{very} {other}: "009.png" is "004.png".']
    made(path, says=says, lacks=["013.png"])


def test_a_table_of_studies_is_told_from_one_of_pictures(tmp_path: Path) -> None:
    path = table(tmp_path, "accession,Fluid,Mass", *(f"A{n},{n % 2},{n // 2 % 2}" for n in range(8)))
    for number in range(8):
        (tmp_path / "scans" / f"A{number}").mkdir()
        Image.new("L", (20, 20)).save(tmp_path / "scans" / f"A{number}" / "IM0001", "PNG")
    refused(path, says=['Column "accession" names folders: a line for each picture is needed'])


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    lines = [f"{n:03}.png,q{n // 4},{n % 2},{20 + n},p{n // 2},{n // 2 % 2},{n // 3 % 2}" for n in range(40)]
    path = table(tmp_path, "file,Patient,sex_male,Patient Age,Patient ID,Fluid,Mass", *lines)
    left_out, unused = "Left out, though it may name patients too: Patient.", "not used: Patient, Patient Age."
    flag = "0 and 1, but no findings by their names: sex_male."
    made(path, says=["patients: column Patient ID, 20 of them", left_out, flag, unused])
    edit(path, ("Patient,sex", "MRN,sex"))
    refused(path, says=["--patient-column MRN or --patient-column 'Patient ID'"])
    made(path, "--patient-column", "Patient ID", says=["Left out, though it may name patients too: MRN."])


def test_two_columns_of_pictures_are_a_question_and_labels_of_the_other_picture_are_named(tmp_path: Path) -> None:
    lines = [f"{n:03}_L.png,{n:03}_R.png,p{n},{n % 2},{n // 2 % 2},{n % 3 % 2}" for n in range(40)]
    path = table(tmp_path, "left,right,patient,Mass_left,Mass_right,Fluid_left", *lines)
    for number in range(40):
        Image.new("L", (20, 20), number).save(tmp_path / "scans" / f"{number:03}_R.png")
    refused(path, says=["--image-column left or --image-column right"])
    foreign = 'these columns say what other pictures (of "right") show: "Mass_right"; labels'
    without = "--findings Mass_left --findings Fluid_left"
    refused(path, "--image-column", "left", says=[foreign, f"{without} (without these)"])
    every = [part for name in ("Mass_left", "Mass_right", "Fluid_left") for part in ("--findings", name)]
    says = [
        "NOT USED, though they name pictures too: right.",
        "WRONG PICTURE, by their names: Mass_right say what right shows.",
        f"--image-column left {without}",
        "40 pictures of the folder that no line names: 000_R.png, 001_R.png, 002_R.png and 37 more.",
    ]
    made(path, "--image-column", "left", *every, says=says)
    unnamed = "0 and 1, and not named with --findings: Mass_left, Fluid_left."
    made(path, "--image-column", "right", "--findings", "Mass_right", says=[unnamed], lacks=["WRONG PICTURE"])


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
    flags = [",".join(str(n // (at + 1) % 2) for at in range(len(names))) for n in range(40)]
    lines = [f"{n:03}.png,{right.format(n)},p{n},{flags[n]}" for n in range(40)]
    path = table(tmp_path, f"{header},patient,{labels}", *lines)
    text = made(path, "--images", str(tmp_path / "scans"), code=2 if foreign else 0)
    assert (f' show: "{foreign}"; labels are learned for those of column' in text) == bool(foreign)
    rest = [name for name in names if name != foreign]
    if foreign:
        made(path, *(part for name in rest for part in ("--findings", name)))
    assert list(data_of(path).label_columns) == rest


@pytest.mark.parametrize("other", ["scans/{0}.png", "{0}", "{0}.PNG"])
def test_two_columns_that_name_the_same_pictures_are_no_question(other: str, tmp_path: Path) -> None:
    lines = [f"{n:03}.png,{other.format(f'{n:03}')},p{n},{n % 2}" for n in range(40)]
    made(path := table(tmp_path, "file,path,patient,Mass", *lines))
    assert data_of(path).image_column in ("file", "path")


def test_codes_of_icd_10_gm_that_exclude_or_suspect_a_finding_are_no_classes(tmp_path: Path) -> None:
    path = findings(tmp_path, "J90; J18.9", "J90G", "J90A; J18.9G", "J18.9V", "J90")
    edit(path, ("Befund", "ICD"))
    says = [
        "classes: J90 16, J18.9 8, J90G 8, J18.9G 8",
        "denied, doubted, past or nothing: J90A 8, J18.9V 8.",
        'one class or two? "J90G" = "J90", "J18.9G" = "J18.9"',
        'synonyms."J18.9V" = "J18.9"',
        "Next: first decide on the names after other_findings and synonyms",
    ]
    made(path, says=says, lacks=['synonyms."J90A"', "Other findings of the table count as no class"])
    confirm(path, "other_findings", "synonyms")
    assert data_of(path).class_names == ("J90", "J18.9")
    assert counts_of(path)[0] == [24, 16]


def test_a_column_of_certainties_beside_codes_is_a_question(tmp_path: Path) -> None:
    lines = patients(lambda n: f"{('J90', 'J18.9')[n % 2]},{'GAVG'[n % 4]}")
    path = table(tmp_path, "file,patient,ICD10,Sicherheit", *lines)
    refused(path, says=['column "Sicherheit" may say how certain those of "ICD10" are: "A" in line 3'])
    edit(path, (",A\n", ",G\n"), (",V\n", ",G\n"))
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
    decide = "Next: first decide on those after not_assessed"
    made(path, "--findings", "Befund", says=["not assessed, by the word or the code: ", decide], classes=classes)
    confirm(path, "not_assessed")
    assert data_of(path).not_assessed == not_assessed
    unlabelled = np.isnan(images_of(path).labels)
    unknown = sum(cell in ("", *not_assessed) for cell in cells)
    assert int(unlabelled.all(axis=1).sum()) == int(unlabelled.any(axis=1).sum()) == 8 * unknown


def test_blank_findings_wait_for_their_meaning_where_no_image_is_without_a_finding(tmp_path: Path) -> None:
    path = findings(tmp_path, "Mass", "Mass|Fluid", "", "Fluid")
    every = "EVERY IMAGE THAT COUNTS SHOWS A FINDING. The others (10 of 40) have a blank cell"
    made(path, says=[every, "Next: first decide on blank"])
    confirm(path, "blank")
    assert counts_of(path) == [[20, 20], [20, 20]]
    words = findings(tmp_path / "words", "Benign", "Malignant", "Nondiagnostic", "ungraded")
    made(words, says=["Next: first decide on those after not_assessed in"], lacks=["EVERY IMAGE"])
    made(findings(tmp_path / "normal", "Mass", "Mass|Fluid", "", "No Finding"), lacks=["EVERY IMAGE"])


def test_a_column_of_words_for_parts_is_a_question_and_no_hospital(tmp_path: Path) -> None:
    lines = [f"{line},{('dev', 'holdout')[n % 8 // 6]}" for n, line in enumerate(rows(40, "{a},{b}"))]
    path = table(tmp_path, "file,patient,Fluid,Mass,dataset", *lines)
    split = 'split: is it dataset ("dev", "holdout")? It is NOT USED'
    made(path, says=[split, "Next: first decide on split_column"], lacks=["--source-column dataset"])
    edit(path, (",dev", ",train"), (",holdout", ",test"))
    made(path, says=["split: column dataset, train 28, validation 2, test 10."], split_column="dataset")


def test_reports_are_neither_offered_nor_printed(tmp_path: Path) -> None:
    reports = (
        "Befund: Kein Hinweis auf Erguss. Das Herz ist normal gross.",
        "Ein Erguss rechts. Das Herz ist gross geworden.",
    )
    lines = [f"{line},{reports[n % 2]},2019-01-{n % 9 + 10}" for n, line in enumerate(rows(40, "{a},{b}"))]
    path = table(tmp_path, "file,patient,Fluid,Mass,Report,visit", *lines)
    made(path, lacks=["Kein Hinweis"])
    refused(path, "--findings", "Report", says=['column "Report" holds texts'], lacks=["Kein Hinweis auf"])
    edit(path, ("Fluid,Mass", "Region,Grade"), (",1,", ",Lunge,"), (",0,", ",Herz,"))
    refused(path, says=["add it to the command: --findings Region or --findings Grade"])


def test_an_ending_other_than_that_of_the_file_is_named(tmp_path: Path) -> None:
    path = labelled(tmp_path)
    for number in range(20, 40):
        file = tmp_path / "scans" / f"{number:03}.png"
        file.rename(file.with_suffix(".jpeg"))
    ending = '"020.jpeg" is there, and no "020.png"'
    unnamed = "20 pictures of the folder that no line names: 020.jpeg"
    made(path, says=[f"{ending}: 20 names end otherwise than the file.", unnamed])
    for number in range(20):
        (tmp_path / "scans" / f"{number:03}.png").unlink()
    refused(path, says=[ending])


def test_names_with_another_ending_are_found_beside_labels_that_are_names_of_files(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Mass", *(f"{n}.tif,p{n},{n % 2}" for n in range(40)))
    for number in range(40):
        Image.new("L", (20, 20), number).save(tmp_path / "scans" / f"{number}.tiff", "PNG")
    refused(path, says=['"0.tiff" is there, and no "0.tif": 40 names end otherwise than the file.'])
    edit(path, (".tif,", ","))
    made(path)
    assert len(images_of(path)) == 40


def test_the_named_column_is_the_subject_of_the_refusal(tmp_path: Path) -> None:
    lines = patients(lambda n: f"{'NS'[n // 20]},{n % 2 + 1},{n % 2 if n < 20 else ''}")
    path = table(tmp_path, "file,patient,Hospital,Calc,Mass", *lines)
    cells = 'column "Calc" holds "1" in line 2 (20 lines), "2" in line 3 (20 lines)'
    refused(path, "--findings", "Calc", says=[cells])
    unlabelled = '"S" of column Hospital has no label that can be read. Its cells of "Mass" are blank.'
    refused(path, "--findings", "Mass", says=[unlabelled])
    edit(path, ("000.png,p0,N,1,0", "000.png,p0,N,1,9"))
    refused(path, says=['These hold 1 and 2, perhaps for yes and no: "Calc"'])


def test_readers_of_one_finding_and_letters_for_findings_are_recognised(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Mass_R1,Mass_consensus,N,D,G", *rows(40, "{a},{a},{b},{c},{b}"))
    names = ("Mass_R1", "Mass_consensus", "N", "D", "G")
    made(path, says=["one finding of several readers? Mass_R1, Mass_consensus."], label_columns=names)


@pytest.mark.parametrize("text", ['{"images": [], "annotations": []}', '\ufeff\n[{"file": "a.png"}]'])
def test_json_is_named_as_such(text: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8")
    refused(tmp_path / "labels.csv", says=["labels.csv is JSON, and no table."])
