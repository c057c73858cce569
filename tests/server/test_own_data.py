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


def test_class_folders_become_a_table_and_an_experiment(tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / "cf" / ("mono", "lympho")[number % 2] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 20), number, np.uint8)).save(path)
    made(tmp_path / "cf", "--patient-column", "", says=["mine.csv: a table of 40 pictures in 2 class folders"])
    everything = concatenate_image_sets(load_dataset(data_of(tmp_path / "cf"), tmp_path).parts)
    assert sorted(everything.class_names) == ["lympho", "mono"]
    assert everything.labels.sum(axis=0).tolist() == [20.0, 20.0]
    (tmp_path / "mine.csv").unlink()
    refused = flwr_sim("init", tmp_path / "cf" / "mono", "--out", tmp_path / "other.toml")
    assert refused.code == 2
    assert not (tmp_path / "other.csv").exists()


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


def test_a_table_without_patients_is_a_question(tmp_path: Path) -> None:
    path = labelled(tmp_path, "file,number,Fluid,Mass")
    refused(path, says=["Which column names the patients?", "--patient-column number p0, p1, p2 and 17 more"])
    made(path, "--patient-column", "", says=["each image counts as a patient of its own, as you said"])
    assert "# patient_column" in experiment_of(path).read_text(encoding="utf-8")
    made(path, "--patient-column", "number", says=["patients: column number, 20 of them"])


def test_rows_without_a_picture_are_left_out_only_if_the_user_says_so(tmp_path: Path) -> None:
    lost = ["lost1.png,p90,1,0", "lost2.png,p91,1,0"]
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), *lost)
    not_there = 'Of 42 lines, 2 lines name a picture that is not there: "lost1.png" in line 42, "lost2.png" in line 43.'
    refused(path, says=[not_there, "--ignore-missing-files"])
    left_out = (
        'of 42 lines, 2 lines name pictures that are not there; they are left out: "lost1.png" in line 42, "lost2.png"'
    )
    made(path, "--ignore-missing-files", says=[left_out, "Fluid 20"], missing_files="ignore")
    path.write_text(path.read_text().partition("lost1")[0])
    made(path, missing_files="fault")


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
    window = {"WindowCenter": 20, "WindowWidth": 40}
    path = of_dicom(tmp_path, lambda n: {"PatientID": f"patient {n // 3}", **window})
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
        ("file,patient,Fluid", ["a,p1,1", "b,p2,0"], (), "Which column names the pictures?"),
        ("file,patient,Fluid", ["a.png,p1,1.5", "b.png,p2,0.5"], (), "Which columns say what a picture shows?"),
        ("file,patient,Fluid", ["a.png,p1,ja", "b.png,p2,nein"], (), "--present ja in Fluid"),
        (DOUBLE, [*rows(40, "{a},{b}"), "040.png,p3,ja,0"], (), '"Fluid" ("ja" in line 42). Correct the cells'),
        ("file,patient,Fluid", ["lost.png,p1,1", "lost.png,p2,0"], (), 'none of the 2 pictures of column "file"'),
        ("file,patient,Fluid", ["a.png,p1,1"], ("--patient-column", "patinet"), 'Did you mean "patient"?'),
        ("file,patient,Fluid", ["a.png,p1,1"], ("--image-column", "nope"), '"nope" is not a column'),
        (DOUBLE, [*rows(40, "{a},{b}"), "007.png,p3,0,0"], (), '"007.png" (lines 9 and 42: Fluid)'),
        (DOUBLE, [*rows(40, "{a},{b}"), "040.png,P-03,1,0"], (), '"p3" (line 8) and "P-03" (line 42)'),
        (DOUBLE, [*rows(40, "{a},{b}"), "040.png,,1,0"], (), "1 line without a patient, line 42 first"),
        (
            DOUBLE,
            [*rows(40, "{a},{b}"), "040.png,P-03,1,0"],
            (),
            "That is right for the split also if they are two.",
        ),
        (
            DOUBLE,
            [*rows(40, "{a},{b}"), "040.png,P-03,1,0"],
            (),
            "write each patient in one way in the table. --join-patients",
        ),
    ],
)
def test_a_table_that_is_not_understood_or_that_a_run_would_refuse_is_refused_with_a_remedy(
    header: str, lines: list[str], options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    refused(table(tmp_path, header, *lines), *options, says=[reason])


def test_a_table_of_another_program_is_read_and_repeated_rows_count_once(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *rows(40, "{a},{b}"), "007.png,p3,1,0")
    path.write_bytes(path.read_text().replace(",", ";").replace("p3;", "p\u00e4\u00a0;").encode("latin-1"))
    made(path, says=["patients: column patient, 20 of them", "1 line said the same as an earlier one"])
    assert len(images_of(path)) == 40


def test_spellings_of_a_finding_that_differ_in_case_are_one_class(tmp_path: Path) -> None:
    cells = ["Effusion", "effusion|Mass", "No Finding", "['Efusion']", ""]
    path = table(tmp_path, "file,patient,finding", *patients(lambda n: cells[n % 5]))
    made(path, says=["classes: Effusion 16, Mass 8, Efusion 8"], lacks=["exactly one", "one class or two?"])
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


@pytest.mark.parametrize(("column", "hospitals"), [("Hospital_ID", ("1", "0")), ("centre", ("7", "8"))])
def test_a_well_known_heading_names_the_hospitals(column: str, hospitals: tuple[str, str], tmp_path: Path) -> None:
    # Each hospital has labelled all that it looks for.
    path = in_hospitals(tmp_path, column, *hospitals)
    made(path, says=[f"hospitals: column {column}, 2 of them"], lacks=["without a label"])
    partition = read_experiment(experiment_of(path), [], find_method_faults).experiment.partition
    assert isinstance(partition, ClassListsPartitionSpec)
    assert partition.images == "source"
    assert partition.lists == {hospitals[0]: ("Mass",), hospitals[1]: ("Fluid", "Mass")}


def test_the_method_has_a_reason_and_the_other_one_follows_whether_hospitals_share_a_class(tmp_path: Path) -> None:
    """Two hospitals share Mass; the simulated hospitals of two classes share none."""
    shared, alone = in_hospitals(tmp_path / "a", "centre", "7", "8"), labelled(tmp_path / "b")
    reason = "method: surgical, ahead of methods that pass one model on, in equal time"
    assert "polyclinic" not in made(shared, says=[reason, 'method = "fedseq" with missing = "masked"'])
    assert "fedseq" not in made(alone, says=[reason, 'method = "polyclinic"'])
    files = [read_experiment(experiment_of(path), [], find_method_faults) for path in (shared, alone)]
    assert {file.experiment.run.method for file in files} == {"surgical"}


def test_several_columns_of_hospitals_are_a_question(tmp_path: Path) -> None:
    lines = [f"{line},{'NS'[n // 20]},{'EW'[n % 3 % 2]}" for n, line in enumerate(rows(40, "{a},{b}"))]
    path = table(tmp_path, "file,patient,Fluid,Mass,site,centre", *lines)
    refused(path, says=["Which column names the hospitals?", "--source-column site N and S", "--source-column ''"])
    made(path, "--source-column", "site", source_column="site")


@pytest.mark.parametrize("column", ["sex", "View Position", "anatom_site", "Uniklinik", "group"])
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


def test_pictures_in_a_folder_for_each_hospital_are_found_by_their_paths(tmp_path: Path) -> None:
    path = in_hospitals(tmp_path, "Hospital", "North", "South")
    for place in ("North", "South"):
        (tmp_path / "scans" / "all" / place).mkdir(parents=True)
    for number in range(40):
        place, file = ("North", "South")[number // 20], f"{number:03}.png"
        (tmp_path / "scans" / file).rename(tmp_path / "scans" / "all" / place / file)
        edit(path, (file, f"{place}\\{file}"))
    made(path, images="scans/all", patient_column="patient", labels="labels.csv")
    assert len(images_of(path)) == 40


def findings(folder: Path, *cells: str) -> Path:
    """Write a table of findings in one column, the cells in turn."""
    return table(folder, "file,patient,finding", *patients(lambda n: cells[n % len(cells)]))


@pytest.mark.parametrize("word", ["No Finding", "normal", "NO FINDINGS"])
def test_three_words_say_that_nothing_was_found_and_others_are_classes(word: str, tmp_path: Path) -> None:
    path = findings(tmp_path, "Erguss", "Rundherd;Erguss", word, "o.B.", "Rundherd")
    made(path, says=["classes: Erguss 16, Rundherd 16, o.B. 8 ", "Move a word that says that nothing was found from"])
    assert counts_of(path) == [[16, 16, 8], [24, 24, 32]]


@pytest.mark.parametrize("cell", ["unknown", "[]", "?", "not assessed"])
def test_cells_that_name_nothing_make_the_labels_of_an_image_unknown(cell: str, tmp_path: Path) -> None:
    path = findings(
        tmp_path, "['Erguss']", "\"['Rundherd', 'Erguss']\"", f"\"['{cell}']\"" if cell == "" else cell, "", "-"
    )
    made(path, says=["classes: Erguss 16, Rundherd 8 without", f"not assessed: {cell} 8, - 8."])
    assert counts_of(path) == [[16, 8], [0, 8]]
    assert int(np.isnan(images_of(path).labels).any(axis=1).sum()) == 24
    assert ran(path).code == 0


PLACES = ("St. Mary", "Ulm", "Univ. South")


@pytest.mark.parametrize(
    ("header", "lines", "says", "lacks"),
    [
        pytest.param(
            "file,patient,Hospital,Fluid,Mass",
            [f"{n:03}.png,p{n},{PLACES[n % 3]},{n // 3 % 2 * (n % 3 > 0)},{n // 3 % 2}" for n in range(60)],
            ["Of these all labels are 0, and some of other hospitals are 1: St. Mary Fluid."],
            ["without a label"],
            id="zeros alone at one hospital",
        ),
        pytest.param(
            "file,patient,Fluid,Mass,zero",
            patients(lambda n: f"{n % 2},{n // 2 % 2},0"),
            ["no image shows it: zero; not used."],
            [],
            id="a column of zeros",
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
    made(
        path,
        says=["No image is without it: Fluid, Mass, whose labels are 1 or blank.", "Next: first decide on blank in"],
    )
    confirm(path, "blank =")
    assert counts_of(path) == [[20, 19], [20, 21]]


def test_a_hospital_whose_labels_are_words_is_told_which_cells(tmp_path: Path) -> None:
    own = [f"{n:03}.png,p{n // 2},North,{n // 2 % 2},{n // 3 % 2},," for n in range(20)]
    foreign = [
        f"{n:03}.png,p{n // 2},South,,,{'ja' if n % 3 else 'nein'},{('k.A.', 'nein')[n % 2]}" for n in range(20, 40)
    ]
    cells = '"Erguss" (ja and nein) and "Herd" (k.A. and nein)'
    refused(
        table(tmp_path, "file,patient,Hospital,Fluid,Mass,Erguss,Herd", *own, *foreign),
        "--findings",
        "Fluid",
        "--findings",
        "Mass",
        says=['"South" of column Hospital has no label: its cells of "Fluid", "Mass" are blank.', cells],
        lacks=["Remove these lines"],
    )


def test_a_synonym_of_a_column_of_findings_is_a_class_of_no_hospital(tmp_path: Path) -> None:
    cells = ("Effusion", "Mass|Effusion", "Mass", "No Finding")
    other = ("effu-sion", "Mass|effu-sion", "Mass", "No Finding")
    lines = patients(lambda n: f"{'NS'[n % 2]},{(cells, other)[n % 2][n // 2 % 4]}", 80)
    path = table(tmp_path, "file,patient,Hospital,Finding", *lines)
    made(path, says=['one class or two? "effu-sion" = "Effusion"'])
    confirm(path, "synonyms")
    assert classes_of_run(path) == ["Effusion", "Mass"]


def test_names_with_a_drive_are_refused_with_their_beginning(tmp_path: Path) -> None:
    path = labelled(tmp_path)
    edit(path, ("\n0", "\nD:\\export\\0"))
    refused(path, says=['"000.png" is there: remove the beginning "D:\\export\\" from the names'])
    (tmp_path / "scans" / "a" / "b").mkdir(parents=True)
    for file in (tmp_path / "scans").glob("*.png"):
        file.rename(tmp_path / "scans" / "a" / "b" / file.name)
    edit(path, ("D:\\export\\", "//pacs/x/a/b/"))
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


def test_a_line_for_a_folder_gives_its_labels_to_all_pictures_in_it(tmp_path: Path) -> None:
    lines = [f"A{n},p{n // 2},{n % 2},{n // 2 % 2}" for n in range(40)]
    path = table(tmp_path, "accession,patient,Fluid,Mass", *lines)
    for number in range(40):
        (tmp_path / "scans" / f"A{number}" / "series").mkdir(parents=True)
        for image in range(2):
            place = tmp_path / "scans" / f"A{number}" / "series" / f"IM000{image}"
            Image.new("L", (20, 20), 2 * number + image).save(place, "PNG")
        (tmp_path / "scans" / f"A{number}" / "report.txt").write_text("no picture")
    says = ["accession: its cells are names of folders, each with pictures", "an experiment on 80 images"]
    made(path, says=says, labels="mine.csv", patient_column="patient")
    assert counts_of(path) == [[40, 40], [40, 40]]
    assert len(set(images_of(path).patients)) == 20
    (tmp_path / "mine.csv").unlink()


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    lines = [f"{n:03}.png,q{n // 4},{n % 2},{20 + n},p{n // 2},{n // 2 % 2},{n // 3 % 2}" for n in range(40)]
    path = table(tmp_path, "file,number,sex,Patient Age,Patient ID,Fluid,Mass", *lines)
    made(path, says=["patients: column Patient ID, 20 of them", "not used: number, sex, Patient Age."])
    edit(path, ("number,sex", "MRN,sex"))
    refused(path, says=["they group the pictures differently", "--patient-column MRN", "--patient-column 'Patient ID'"])
    made(path, "--patient-column", "Patient ID", says=["not used: MRN, sex, Patient Age."])


def test_two_columns_of_pictures_are_a_question(tmp_path: Path) -> None:
    lines = [f"{n:03}_L.png,{n:03}_R.png,p{n},{n % 2},{n // 2 % 2},{n % 3 % 2}" for n in range(40)]
    path = table(tmp_path, "left,right,patient,Mass_left,Mass_right,Fluid_left", *lines)
    for number in range(40):
        Image.new("L", (20, 20), number).save(tmp_path / "scans" / f"{number:03}_R.png")
    several = "Several do, and the labels of a line are learned for one picture."
    refused(path, says=[several, "--image-column left 000_L.png", "--image-column right 000_R.png"])
    own = ("--findings", "Mass_left", "--findings", "Fluid_left")
    says = [
        "40 pictures of the folder that no line names: 000_R.png, 001_R.png, 002_R.png and 37 more.",
        "not used: right, Mass_right.",
    ]
    made(path, "--image-column", "left", *own, says=says, label_columns=("Mass_left", "Fluid_left"))


@pytest.mark.parametrize("other", ["scans/{0}.png", "{0}", "{0}.PNG"])
def test_two_columns_that_name_the_same_pictures_are_no_question(other: str, tmp_path: Path) -> None:
    lines = [f"{n:03}.png,{other.format(f'{n:03}')},p{n},{n % 2}" for n in range(40)]
    made(path := table(tmp_path, "file,path,patient,Mass", *lines))
    assert data_of(path).image_column in ("file", "path")


def test_blank_findings_wait_for_their_meaning_where_no_image_is_without_a_finding(tmp_path: Path) -> None:
    path = findings(tmp_path, "Mass", "Mass|Fluid", "", "Fluid")
    every = "EVERY IMAGE THAT COUNTS SHOWS A FINDING. The others have a cell that counts as blank"
    made(path, says=[every, "Next: first decide on blank"])
    confirm(path, "blank")
    assert counts_of(path) == [[20, 20], [20, 20]]
    made(findings(tmp_path / "normal", "Mass", "Mass|Fluid", "", "No Finding"), lacks=["EVERY IMAGE"])


def test_a_split_in_other_words_is_not_used_and_waits_for_a_decision(tmp_path: Path) -> None:
    lines = [f"{line},{('dev', 'holdout')[n % 8 // 6]}" for n, line in enumerate(rows(40, "{a},{b}"))]
    path = table(tmp_path, "file,patient,Fluid,Mass,split", *lines)
    split = "split: split is NOT USED, because its cells (dev and holdout) are not train, val and test."
    made(path, says=[split, "Next: first decide on split_column"])
    edit(path, (",dev", ",train"), (",holdout", ",test"))
    made(path, says=["split: column split, train 26, validation 4, test 10."], split_column="split")


def test_reports_are_neither_offered_nor_printed(tmp_path: Path) -> None:
    reports = (
        "Befund: Kein Hinweis auf Erguss. Das Herz ist normal gross.",
        "Ein Erguss rechts. Das Herz ist gross geworden.",
    )
    lines = [f"{line},{reports[n % 2]},2019-01-{n % 9 + 10}" for n, line in enumerate(rows(40, "{a},{b}"))]
    path = table(tmp_path, "file,patient,Fluid,Mass,Report,visit", *lines)
    made(path, lacks=["Kein Hinweis"])
    refused(path, "--findings", "Report", says=['column "Report" holds texts'], lacks=["Kein Hinweis auf"])


def test_an_ending_other_than_that_of_the_file_is_named(tmp_path: Path) -> None:
    path = labelled(tmp_path)
    for number in range(20, 40):
        file = tmp_path / "scans" / f"{number:03}.png"
        file.rename(file.with_suffix(".jpeg"))
    ending = '"020.jpeg" is there, and no "020.png"'
    unnamed = "20 pictures of the folder that no line names: 020.jpeg"
    refused(path, says=[f"{ending}: 20 names end otherwise than the file."])
    made(path, "--ignore-missing-files", says=[f"{ending}: 20 names end otherwise than the file.", unnamed])
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


def test_the_named_columns_are_the_subject_of_the_refusal(tmp_path: Path) -> None:
    lines = patients(lambda n: f"{'NS'[n // 20]},{n % 2 + 1},{n % 2 if n < 20 else ''}")
    path = table(tmp_path, "file,patient,Hospital,Calc,Mass", *lines)
    refused(path, "--findings", "Mass", says=['"S" of column Hospital has no label: its cells of "Mass" are blank.'])
    refused(path, "--findings", "Mass", "--findings", "Calc", says=['column "Calc" holds "2" in line 3 (20 lines)'])


@pytest.mark.parametrize("text", ['{"images": [], "annotations": []}', '\ufeff\n[{"file": "a.png"}]'])
def test_json_is_named_as_such(text: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8")
    refused(tmp_path / "labels.csv", says=["labels.csv is JSON, and no table."])
