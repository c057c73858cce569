"""``flwr-sim init`` asks what its rules do not settle: in a terminal as a dialogue, elsewhere as a command to paste."""

import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.load import load_dataset
from polyclinic.server.runs.reader import read_run
from polyclinic.server.simulation.simulate import check_simulation_experiment
from polyclinic.strategies.registry import find_method_faults
from polyclinic.studies.init.questions import (
    Choice,
    ColumnHints,
    Question,
    refuse_open_questions,
    wrap_line,
)
from tests.network.real import flwr_sim


def pictures(folder: Path, *names: str, first: int = 0) -> None:
    for number, name in enumerate(names, start=first):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (16, 16), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name, "PNG")


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A physician's own table: no well-known heading, a picture that is not there, and names with spaces."""
    folder = tmp_path / "my data"
    pictures(folder / "pics", *(f"{n:03}.png" for n in range(40)))
    cells = [f"{n:03}.png,F{n // 2},{('Rundherd', 'Erguss')[n // 2 % 2]}" for n in range(40)]
    return write(folder / "labels.csv", "Bild,Fall Nr,Was's zu sehen ist", *cells, "lost.png,F99,Erguss")


def images_of(path: Path) -> ImageSet:
    data = read_experiment(path, [], find_method_faults).experiment.data
    assert data is not None
    return concatenate_image_sets(load_dataset(data, path.parent).parts)


def talked(answers: Sequence[str], *arguments: object) -> tuple[int, str]:
    """Run ``flwr-sim`` in a terminal of 80 columns, answer each of its prompts, and return its exit code and text."""
    code = "from polyclinic.studies.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    program = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    os.close(theirs)
    text, left = b"", list(answers)
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the program has ended
            break
        if not piece:
            break
        text += piece
        if text.endswith(b"    > ") and left:
            os.write(terminal, f"{left.pop(0)}\n".encode())
        elif text.endswith(b"    > "):  # a question more than the test answers
            os.write(terminal, b"\x04")
    os.close(terminal)
    return program.wait(60), " ".join(text.decode().split())


def test_a_person_at_a_terminal_answers_the_questions_in_a_dialogue(own: Path) -> None:
    out = own.parent / "mine.toml"
    code, text = talked(["3", "perhaps", "yes", "0", "", "1"], "init", own, "--out", out)
    assert code == 0, text
    head = "Bild Fall Nr Was's zu sehen ist 000.png F0 Rundherd"
    assert head in text
    assert "Question 1 of 3. Which word says that a finding is present?" in text
    assert "Question 2 of 3. Of 41 lines, 1 line names a picture that is not there" in text
    assert "Question 3 of 3. Which column names the patients?" in text
    assert text.count("That is no answer. Type a number, from 1 to") == 2
    images = images_of(out)
    assert (images.class_names, len(images), len(set(images.patients))) == (("Erguss", "Rundherd"), 40, 20)


def test_a_dialogue_that_is_left_or_answered_with_no_writes_nothing(own: Path) -> None:
    out = own.parent / "mine.toml"
    for answers, reason in (
        (["3", "no"], "nothing was written"),
        (["3", "yes", "\x04"], "The question was not answered"),
    ):
        code, text = talked(answers, "init", own, "--out", out)
        assert (code, out.exists(), reason in text) == (2, False, True), text


def test_without_a_terminal_all_questions_come_at_once_with_a_command_that_runs(own: Path) -> None:
    out = own.parent / "mine.toml"
    ended = flwr_sim("init", own, "--out", out)
    assert (ended.code, out.exists()) == (2, False)
    open_options = [line.split()[1] for line in ended.err.splitlines() if line.startswith("error ")]
    assert open_options == ["--present:", "--ignore-missing-files:", "--patient-column:"]
    command = shlex.split(ended.err.splitlines()[-1])
    assert command[:2] == ["flwr-sim", "init"]
    unchanged = flwr_sim(*command[1:])
    assert (unchanged.code, out.exists(), unchanged.err.count("??? stands for an answer")) == (2, False, 2)
    first, second = (place for place, word in enumerate(command) if word == "???")
    command[first], command[second] = "Fall Nr", ""
    ended_again = flwr_sim(*command[1:])
    assert ended_again.code == 0, ended_again.err
    assert images_of(out).class_names == ("Erguss", "Rundherd")


def test_every_role_can_be_a_question_of_the_same_call(tmp_path: Path) -> None:
    names = [f"{n:03}_{side}.png" for n in range(20) for side in "LR"]
    pictures(tmp_path / "scans", *names)
    rows = [f"{n:03}_L.png,{n:03}_R.png,{'NS'[n % 2]},{'EW'[n % 3 % 2]},a{n % 3},b{n % 4}" for n in range(20)]
    path = write(tmp_path / "t.csv", "left,right,site,centre,grade,kind", *rows)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    options = [line.split()[1] for line in ended.err.splitlines() if line.startswith("error ")]
    assert options == ["--image-column:", "--source-column:", "--findings:", "--patient-column:"]


def test_enter_takes_the_answer_that_is_safe(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png,p{n // 2},{n // 2 % 2},{'NS'[n % 2]},{'EW'[n % 3 % 2]}" for n in range(40)]
    path = write(tmp_path / "t.csv", "file,patient,Mass,site,centre", *rows)
    code, text = talked([""], "init", path, "--out", tmp_path / "mine.toml")
    assert (code, "Type a number; Enter for 3." in text) == (0, True), text
    assert "source_column" not in (tmp_path / "mine.toml").read_text(encoding="utf-8")


LABELLED = ("file,patient,Mass", *(f"{n:03}.png,p{n // 2},{n // 2 % 2}" for n in range(40)))


def test_a_name_in_two_folders_is_a_question_so_that_no_mask_is_trained_on(tmp_path: Path) -> None:
    names = [f"{n:03}.png" for n in range(40)]
    pictures(tmp_path / "images", *names)
    pictures(tmp_path / "masks", *names, first=100)
    path = write(tmp_path / "labels.csv", *LABELLED)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert ended.code == 2
    assert '40 names of the table fit two files, such as "images/000.png" and "masks/000.png"' in ended.err
    folder = ("--images", tmp_path / "images")
    assert flwr_sim("init", path, "--out", tmp_path / "mine.toml", *folder).code == 0
    files = images_of(tmp_path / "mine.toml")
    assert len(files) == 40
    assert 'images = "images"' in (tmp_path / "mine.toml").read_text(encoding="utf-8")


def test_a_folder_a_patient_is_read_as_a_whole(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"case{n // 2}/series/{n:03}.png" for n in range(40)))
    path = write(tmp_path / "labels.csv", *LABELLED)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert ended.code == 0, ended.err
    assert "They lie in 20 folders" in ended.out
    assert len(images_of(tmp_path / "mine.toml")) == 40
    assert path.read_text(encoding="utf-8").splitlines()[1] == "000.png,p0,0"  # the user's own table stays


def test_the_same_name_in_each_patients_folder_needs_the_path_in_the_cell(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"p{n // 2}/{n % 2}.png" for n in range(40)))
    rows = [f"{n % 2}.png,p{n // 2},{n // 2 % 2}" for n in range(40)]
    path = write(tmp_path / "labels.csv", "file,patient,Mass", *rows)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert (ended.code, "write the folder before the name" in ended.err) == (2, True)
    write(path, "file,patient,Mass", *(f"p{n // 2}/{row}" for n, row in enumerate(rows)))
    assert flwr_sim("init", path, "--out", tmp_path / "mine.toml").code == 0
    assert len(images_of(tmp_path / "mine.toml")) == 40


def test_the_first_picture_is_no_heading(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"IM{n:03}" for n in range(40)))
    path = write(tmp_path / "labels.csv", *(f"IM{n:03},p{n // 2},{n // 2 % 2}" for n in range(40)))
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml", "--patient-column", "column2")
    assert ended.code == 0, ended.err
    assert "The first line names no columns: it is data." in ended.out
    assert len(images_of(tmp_path / "mine.toml")) == 40


def test_a_new_table_writes_over_no_file_and_goes_if_the_data_are_refused(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"case{n // 2}/{n:03}.png" for n in range(40)))
    path = write(tmp_path / "labels.csv", *LABELLED, "000.png,p0,1")
    (tmp_path / "mine.csv").write_text("mine", encoding="utf-8")
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert (ended.code, "mine.csv" in ended.err) == (2, True)
    assert (tmp_path / "mine.csv").read_text(encoding="utf-8") == "mine"
    ended = flwr_sim("init", path, "--out", tmp_path / "other.toml")
    assert (ended.code, "lines 2 and 42" in ended.err) == (2, True)
    assert not (tmp_path / "other.csv").exists()


@pytest.mark.parametrize(
    ("marks", "labels"),
    [
        (("Mass", "Mass", "No finding"), {"Mass": 1.0}),
        (("Mass", "No finding", "No finding"), {"Mass": 0.0}),
        (("Mass", "No finding"), {"Mass": np.nan}),
        (("Mass", "Nodule", ""), {"Mass": np.nan, "Nodule": np.nan}),
        (("Mass", "", ""), {"Mass": 1.0}),
    ],
)
def test_the_majority_of_readers_decides_and_a_tie_is_unknown(
    marks: Sequence[str], labels: dict[str, float], tmp_path: Path
) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png,p{n},R{reader},{mark}" for n in range(1) for reader, mark in enumerate(marks)]
    rows += [f"{n:03}.png,p{n},R0,{('Mass', 'Nodule', 'No finding')[n % 3]}" for n in range(1, 40)]
    path = write(tmp_path / "labels.csv", "image,patient,rad_id,class_name", *rows)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert ended.code == 0, ended.err
    images = images_of(tmp_path / "mine.toml")
    row = images.labels[images.patients.tolist().index("p0")]
    values = {name: float(row[images.class_names.index(name)]) for name in labels}
    np.testing.assert_array_equal(list(values.values()), list(labels.values()))


def test_lines_of_one_picture_without_readers_name_all_that_it_shows(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png,p{n},{name}" for n in range(40) for name in (("Mass", "Nodule"), ("No finding",))[n % 2]]
    path = write(tmp_path / "labels.csv", "image,patient,class_name", *rows)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert ended.code == 0, ended.err
    assert (images_of(tmp_path / "mine.toml").labels == 1).sum(axis=0).tolist() == [20, 20]
    write(path, "image,patient,class_name", *rows, "001.png,p1,Mass")
    ended = flwr_sim("init", path, "--out", tmp_path / "again.toml")
    assert (ended.code, "name a finding, and say that there is none" in ended.err) == (2, True)


def files_and_patients(folder: Path, header: str, cells: Sequence[str]) -> Path:
    """Write a table of forty pictures, one a patient, whose further cells repeat."""
    pictures(folder / "scans", *(f"{n:03}.png" for n in range(40)))
    return write(folder / "t.csv", header, *(f"{n:03}.png,p{n},{cells[n % len(cells)]}" for n in range(40)))


def test_columns_of_words_beside_those_of_0_and_1_are_a_question(tmp_path: Path) -> None:
    cells = ("1,0,Mass,nein", "0,1,Mass,ja", "1,1,Nodule,nein", "0,0,Effusion,ja")
    path = files_and_patients(tmp_path, "file,patient,smoker,quality,Primary finding,Erguss", cells)
    out = tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    assert (ended.code, ended.err.count("error --findings: Which columns")) == (2, 1)
    assert "--findings smoker --findings quality" in ended.err
    words = flwr_sim("init", path, "--out", out, "--findings", "smoker", "--findings", "Primary finding")
    assert (words.code, "--present Mass" in words.err) == (2, True)
    assert "If the words are names of findings, name their column alone: --findings." in words.err
    code, text = talked(["Primary finding", "4"], "init", path, "--out", out)
    assert code == 0, text
    assert images_of(out).class_names == ("Mass", "Nodule", "Effusion")


def yes(value: object, words: str = "ja nein") -> str:
    return words.split()[0 if value else 1]


def table_of_words(folder: Path, header: str, rows: Sequence[Sequence[str]]) -> Path:
    pictures(folder / "scans", *(f"{n:03}.png" for n in range(40)))
    return write(folder / "t.csv", header, *(",".join((f"{n:03}.png", f"p{n}", *row)) for n, row in enumerate(rows)))


@pytest.mark.parametrize("words", ["ja nein", "WAHR FALSCH", "vorhanden fehlt", "+ -", "oui non", "j n"])
def test_which_of_two_words_means_present_is_one_question_and_what_init_writes_runs(words: str, tmp_path: Path) -> None:
    rows = [(yes(n % 2, words), yes(n % 5 == 0, words)) for n in range(40)]
    path = table_of_words(tmp_path, "file,patient,Erguss,Infiltrat", rows)
    out, present = tmp_path / "mine.toml", words.split()[0]
    ended = flwr_sim("init", path, "--out", out)
    assert (ended.code, ended.err.count("error ")) == (2, 1)
    assert f"--present {present}" in ended.err
    ended = flwr_sim("init", path, "--out", out, "--present", present)
    assert ended.code == 0, ended.err
    images = images_of(out)
    assert images.class_names == ("Erguss", "Infiltrat")
    assert [(images.labels == value).sum(axis=0).tolist() for value in (1, 0)] == [[20, 8], [20, 32]]


def test_an_x_beside_blank_cells_is_a_question_and_blank_a_decision_before_the_run(tmp_path: Path) -> None:
    path = table_of_words(tmp_path, "file,patient,Erguss", [("xX"[n % 4 // 3] if n % 2 else "",) for n in range(40)])
    out = tmp_path / "mine.toml"
    code, text = talked(["x"], "init", path, "--out", out)
    assert (code, "first decide on blank in" in text) == (0, True), text
    labels = images_of(out).labels
    assert ((labels == 1).sum(), np.isnan(labels).sum()) == (20, 20)


def test_words_in_columns_that_the_user_named_are_asked_about_and_beside_1_and_0(tmp_path: Path) -> None:
    rows = [(f"{n % 2}", yes(n % 4), "mw"[n % 2]) for n in range(40)]
    path = table_of_words(tmp_path, "file,patient,Mass,Erguss,Geschlecht", rows)
    out, named = tmp_path / "mine.toml", ("--findings", "Mass", "--findings", "Erguss")
    first = flwr_sim("init", path, "--out", out)
    assert "--findings Erguss" in first.err
    ended = flwr_sim("init", path, "--out", out, *named)
    assert (ended.code, "in Geschlecht" in ended.err, "--present ''" in ended.err) == (2, False, False)
    ended = flwr_sim("init", path, "--out", out, *named, "--present", "JA")
    assert ended.code == 0, ended.err
    assert (images_of(out).labels == 1).sum(axis=0).tolist() == [20, 30]


def test_a_third_word_is_unknown_once_present_and_absent_are_named(tmp_path: Path) -> None:
    rows = [(("ja", "nein", "fraglich")[n % 3], yes(n % 2)) for n in range(39)]
    path = table_of_words(tmp_path, "file,patient,Erguss,Infiltrat", rows)
    out, named = tmp_path / "mine.toml", ("--findings", "Erguss", "--findings", "Infiltrat", "--present", "ja")
    ended = flwr_sim("init", path, "--out", out, *named)
    assert (ended.code, "error --absent: Which word says" in ended.err) == (2, True)
    assert "--absent fraglich" in ended.err
    ended = flwr_sim("init", path, "--out", out, *named, "--absent", "nein")
    assert ended.code == 0, ended.err
    labels = images_of(out).labels
    assert [int(np.isnan(column).sum()) for column in labels.T] == [13, 0]
    assert "unknown: fraglich" in ended.out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--present", "jo"), 'no column holds "jo"'),
        (("--present", "ja", "--present", "nein"), 'all words of column "Erguss"'),
        (("--present", "???"), "??? stands for an answer"),
        (("--present", "ja", "--absent", "no"), 'no column holds "no"'),
    ],
)
def test_a_word_that_cannot_mean_present_is_refused(options: Sequence[str], reason: str, tmp_path: Path) -> None:
    path = table_of_words(tmp_path, "file,patient,Erguss", [(yes(n % 2),) for n in range(40)])
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml", *options)
    assert (ended.code, reason in ended.err) == (2, True), ended.err


def test_init_run_and_report_count_what_is_left_out_and_joined(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(43)))
    names = {0: "P-0", 1: "p0", 2: "P-1", 3: "p1"}
    rows = [f"{n:03}.png,{names.get(n, f'p{n}')},{n // 4 % 2},{n // 8 % 2}" for n in range(43)]
    path = write(tmp_path / "t.csv", "file,patient,Mass,Scar", *rows, "lost.png,p99,1,1")
    out, options = tmp_path / "mine.toml", ("--ignore-missing-files", "--join-patients")
    ended = flwr_sim("init", path, "--out", out, *options)
    assert ended.code == 0, ended.err
    settings = ("--backend", "inline", "--set", "run.rounds=1")
    run = flwr_sim("run", out, "--out", tmp_path / "run", *settings)
    assert run.code == 0, run.err
    omissions = read_run(tmp_path / "run").summary.omissions
    missing = "Of 44 images that the table names, 1 is not there, and is left out."
    joined = "Similar names of patients were joined: 2 names count as the patient of another name."
    assert omissions[:2] == (missing, joined)
    assert omissions[2].startswith("Of 34 training and validation images, ")
    said, printed = (" ".join(text.split()) for text in (ended.out, run.out))
    assert "of 44 lines, 1 line names a picture that is not there" in said
    assert all(sentence in said for sentence in omissions[1:])
    assert all(sentence in printed for sentence in omissions)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert all(sentence in page for sentence in omissions)


def test_init_says_which_labels_simulated_hospitals_hide_and_how_many_there_can_be(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,patient,Mass,Scar", ("1,0", "0,1", "1,1"))
    out = tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    said = " ".join(ended.out.split())
    assert "patients are divided over 2 simulated hospitals." in said
    assert "Each class is annotated by one of them alone, and the others hide its labels: shared = 0 in" in said
    text = out.read_text(encoding="utf-8")
    assert "all others hide its labels" in text
    out.write_text(text.replace("sites = 2", "sites = 3"), encoding="utf-8")
    refused = flwr_sim("run", out, "--out", tmp_path / "run", "--backend", "inline")
    assert (refused.code, "share a class: shared = 1" in refused.err) == (2, True)
    out.write_text(text.replace("sites = 2", "sites = 3").replace("shared = 0", "shared = 1"), encoding="utf-8")
    check_simulation_experiment(read_experiment(out, [], find_method_faults))


def test_a_question_is_wrapped_to_the_width_of_the_terminal() -> None:
    question = Question("--findings", "one two three four five six seven eight nine ten", (Choice("a", "b"),))
    with pytest.raises(BadInput) as refused:
        refuse_open_questions([question], Path("t.csv"), Path("m.toml"), ColumnHints(), 40)
    lines = f"error {refused.value}".splitlines()
    assert lines[:2] == ["error --findings: one two three four", "    five six seven eight nine ten"]


def test_a_name_that_contains_another_name_is_a_decision_before_the_run(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,patient,finding", ("Mass", "Effusion", "no Effusion", "Massive scar"))
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    said = " ".join(ended.out.split())
    assert 'names in names: "no Effusion" contains "Effusion".' in said
    assert "first decide on classes in" in said


def test_a_site_that_most_patients_share_is_a_question(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png,p{n // 2},{('back', 'face')[n % 2]},{n // 2 % 2}" for n in range(40)]
    path = write(tmp_path / "t.csv", "file,patient,site,Mass", *rows)
    out = tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    assert ended.code == 2
    assert "Does site name hospitals? 20 of 20 patients have pictures of several." in ended.err
    assert flwr_sim("init", path, "--out", out, "--source-column", "site").code == 0


def test_one_column_for_two_roles_is_refused(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,Fall,Befund", ("Mass", "Scar"))
    options = ("--patient-column", "Befund", "--findings", "Befund")
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml", *options)
    assert (ended.code, 'column "Befund" is named for --patient-column, too.' in ended.err) == (2, True)


def test_a_title_above_the_headings_is_no_question(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    lines = [
        "Befunde 2024;;",
        "file;patient;finding",
        *(f"{n:03}.png;p{n};{('Mass', 'Scar')[n % 2]}" for n in range(40)),
    ]
    ended = flwr_sim("init", write(tmp_path / "t.csv", *lines), "--out", tmp_path / "mine.toml")
    assert (ended.code, "If lines stand above the headings, delete them." in ended.err) == (2, True)


def test_the_new_table_never_has_the_name_of_the_users_own(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png,p{n},{name}" for n in range(40) for name in (("Mass", "Scar"), ("No finding",))[n % 2]]
    path = write(tmp_path / "long.csv", "file,patient,finding", *rows)
    ended = flwr_sim("init", path, "--out", tmp_path / "long.toml")
    assert ended.code == 0, ended.err
    assert path.read_text(encoding="utf-8").splitlines()[1] == rows[0]
    assert len(images_of(tmp_path / "long.toml")) == 40


def test_the_user_may_say_the_separator_and_the_word_for_no_finding(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,patient,finding", ("Mass+Scar", "o.B.", "Edema+Scar", "Edema+Mass"))
    out = tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out, "--separator", "+", "--no-finding", "o.B.")
    assert ended.code == 0, ended.err
    images = images_of(out)
    assert sorted(images.class_names) == ["Edema", "Mass", "Scar"]
    assert [float(count) for count in (images.labels == 1).sum(axis=0)] == [20, 20, 20]
    assert int((images.labels.sum(axis=1) == 0).sum()) == 10
    wrong = flwr_sim("init", path, "--out", tmp_path / "other.toml", "--no-finding", "normal lung")
    assert (wrong.code, 'holds no name "normal lung"' in wrong.err) == (2, True)


def test_patients_of_similar_names_are_a_question(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png,{'P-007' if n == 7 else f'p{n // 2}'},{n // 2 % 2}" for n in range(40)]
    path = write(tmp_path / "t.csv", "file,patient,Mass", *rows, "")
    out = tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    assert (ended.code, ended.err.splitlines()[-1].endswith("--join-patients")) == (2, True)
    code, text = talked(["yes"], "init", path, "--out", out)
    assert code == 0, text
    assert len(set(images_of(out).patients)) == 20


def test_a_folder_of_each_picture_is_offered_as_the_patient(tmp_path: Path) -> None:
    names = [f"P{n // 2:04}/{n:03}.png" for n in range(40)]
    pictures(tmp_path / "scans", *names)
    path = write(tmp_path / "t.csv", "file,Mass", *(f"{name},{n // 2 % 2}" for n, name in enumerate(names)))
    out = tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    assert (ended.code, "the first folder of each path: P0000, P0001" in ended.err) == (2, True)
    ended = flwr_sim("init", path, "--out", out, "--patient-column", "/1")
    assert ended.code == 0, ended.err
    assert len(set(images_of(out).patients)) == 20


def test_columns_that_may_name_hospitals_are_named_at_the_end(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,patient,Klinik,finding", ("Bonn,Mass", "Ulm,Scar", "Ulm,Edema"))
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert "delete the new file, and add --source-column. It may be: Klinik." in " ".join(ended.out.split())
    before, _, _ = ended.out.partition("mine.toml: an experiment")
    assert "If one is it: --source-column Klinik" in " ".join(before.split())


def test_no_line_is_wider_than_the_terminal_but_a_command_or_a_path(own: Path) -> None:
    names = [f"Class number {n}" for n in range(30)]
    pictures(own.parent / "wide", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png,p{n},{'|'.join(names[n % 10 :: 10])}" for n in range(40)]
    path = write(own.parent / "wide.csv", "file,patient,finding", *rows)
    ended = flwr_sim("init", path, "--out", own.parent / "wide.toml", "--images", own.parent / "wide")
    assert ended.code == 0, ended.err
    wide = [line for line in ended.out.splitlines() if len(line) > 160 and "flwr-sim" not in line]
    assert wide == []
    assert "flwr-sim compare" in ended.out


def test_a_column_of_readers_has_any_name_if_the_user_says_so(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    marks = ("Mass", "Scar", "No finding")
    rows = [f"{n:03}.png,p{n},{who},{marks[n % 3]}" for n in range(40) for who in ("Ada", "Ben")]
    path = write(tmp_path / "t.csv", "file,patient,befunder,finding", *rows, "000.png,p0,Eva,No finding")
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert (ended.code, "--reader-column" in ended.err) == (2, True)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml", "--reader-column", "befunder")
    assert ended.code == 0, ended.err
    images = images_of(tmp_path / "mine.toml")
    assert (images.labels == 1).sum(axis=0).tolist() == [14, 13]


def test_sentences_are_wrapped_and_rows_of_tables_that_fit_are_not() -> None:
    assert wrap_line("    north  1  20", 40) == ["    north  1  20"]
    assert wrap_line("    one two three four five six seven eight nine ten", 40) == [
        "    one two three four five six seven",
        "        eight nine ten",
    ]


KEIN_ERGUSS = ("Erguss", "kein Erguss", "V.a. Pneumonie", "Pneumonie", "Rundherd", "Infiltrat")


def lines_of_findings(folder: Path, *more: str) -> Path:
    """Write a line a finding: each picture has two lines."""
    pictures(folder / "scans", *(f"{n:03}.png" for n in range(42)))
    rows = [f"{n:03}.png,p{n},{KEIN_ERGUSS[(n + step) % 6]}" for n in range(42) for step in (0, 3)]
    return write(folder / "long.csv", "file,patient,Befund", *rows, *more)


def test_names_in_names_are_a_decision_also_where_each_finding_has_a_line(tmp_path: Path) -> None:
    path, out = lines_of_findings(tmp_path), tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out, "--findings", "Befund")
    said = " ".join(ended.out.split())
    assert ended.code == 0, ended.err
    assert "names in names: " in said
    assert '"kein Erguss" contains "Erguss"' in said
    assert '"V.a. Pneumonie" contains "Pneumonie"' in said
    assert "first decide on classes in" in said
    assert 'These are the words of column "Befund".' in said


def test_a_name_is_no_class_or_unknown_if_the_user_says_so(tmp_path: Path) -> None:
    path, out = lines_of_findings(tmp_path), tmp_path / "mine.toml"
    options = ("--findings", "Befund", "--other-finding", "kein Erguss", "--not-assessed", "V.a. Pneumonie")
    ended = flwr_sim("init", path, "--out", out, *options)
    assert ended.code == 0, ended.err
    assert "first decide" not in ended.out
    images = images_of(out)
    assert sorted(images.class_names) == ["Erguss", "Infiltrat", "Pneumonie", "Rundherd"]
    # Pictures 0 and 3 of each six have Erguss and Pneumonie, 1 and 4 Rundherd; 2 and 5 Infiltrat.
    counts = dict(zip(images.class_names, (images.labels == 1).sum(axis=0).tolist(), strict=True))
    assert counts == {"Erguss": 14, "Infiltrat": 14, "Pneumonie": 14, "Rundherd": 14}


def test_a_name_that_excludes_one_finding_contradicts_no_other(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    names = (("Pneumonie", "kein Erguss"), ("Erguss",), ("unauffällig",), ("kein Erguss",))
    rows = [f"{n:03}.png,p{n},{name}" for n in range(40) for name in names[n % 4]]
    path, out = write(tmp_path / "long.csv", "file,patient,finding", *rows), tmp_path / "mine.toml"
    no_finding = ("--no-finding", "unauffällig")
    ended = flwr_sim("init", path, "--out", out, *no_finding, "--no-finding", "kein Erguss")
    assert (ended.code, "--other-finding 'kein Erguss'" in ended.err) == (2, True), ended.err
    ended = flwr_sim("init", path, "--out", out, *no_finding, "--other-finding", "kein Erguss")
    assert ended.code == 0, ended.err
    assert "no finding: unauffällig 10. Such a line shows no class." in ended.out
    images = images_of(out)
    assert set(images.class_names) == {"Erguss", "Pneumonie"}
    assert [(images.labels == value).sum(axis=0).tolist() for value in (1, 0)] == [[10, 10], [30, 30]]


def test_the_sign_between_all_names_is_named_as_it_is_typed(tmp_path: Path) -> None:
    cells = ("Mass + Scar", "Mass", "Scar", "Edema")
    path, out = files_and_patients(tmp_path, "file,patient,finding", cells), tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    assert (ended.code, "add --separator +." in ended.err) == (2, True), ended.err
    assert flwr_sim("init", path, "--out", out, "--separator", "+").code == 0
    assert sorted(images_of(out).class_names) == ["Edema", "Mass", "Scar"]


THREE_WORDS = ("negativ", "positiv", "fraglich")


def test_a_third_word_in_the_column_that_the_user_named_is_asked_about(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,patient,Ergebnis", THREE_WORDS)
    out, named = tmp_path / "mine.toml", ("--findings", "Ergebnis")
    ended = flwr_sim("init", path, "--out", out, *named)
    options = [line.split()[1] for line in ended.err.splitlines() if line.startswith("error ")]
    assert (ended.code, options) == (2, ["--present:", "--absent:"])
    assert all(f"--absent {word}" in ended.err for word in THREE_WORDS)
    ended = flwr_sim("init", path, "--out", out, *named, "--present", "positiv")
    options = [line.split()[1] for line in ended.err.splitlines() if line.startswith("error ")]
    assert (ended.code, options) == (2, ["--absent:"])
    code, text = talked(["2", "1"], "init", path, "--out", out, *named)
    assert code == 0, text
    assert "unknown: fraglich" in " ".join(text.split())
    images = images_of(out)
    assert images.class_names == ("Ergebnis",)
    assert [int((images.labels == value).sum()) for value in (1, 0)] == [13, 14]
    assert int(np.isnan(images.labels).sum()) == 13


def test_few_names_of_findings_remain_classes_and_nobody_asks_for_absent(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,patient,Befund", ("Rundherd", "Erguss", "Infiltrat"))
    out = tmp_path / "mine.toml"
    code, text = talked(["4"], "init", path, "--out", out, "--findings", "Befund")
    assert (code, "Which word says that a finding is absent?" in text) == (0, False), text
    assert images_of(out).class_names == ("Rundherd", "Erguss", "Infiltrat")


def test_a_column_of_1_and_0_and_a_word_is_offered_and_its_word_is_unknown(tmp_path: Path) -> None:
    cells = [f"{('1', '0', 'n.b.')[n % 3]},{n % 2}" for n in range(12)]
    path, out = files_and_patients(tmp_path, "file,Fall,Erguss,Rundherd", cells), tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    assert "--findings Erguss --findings Rundherd  all columns of 0 and 1" in ended.err
    assert "--patient-column Erguss" not in ended.err
    code, text = talked(["3", "1", "1", "1"], "init", path, "--out", out)
    assert code == 0, text
    assert "The command" not in text
    images = images_of(out)
    assert images.class_names == ("Erguss", "Rundherd")
    assert np.isnan(images.labels).sum(axis=0).tolist() == [13, 0]


def test_answers_are_not_lost_if_the_dialogue_ends_in_an_error(tmp_path: Path) -> None:
    path = files_and_patients(tmp_path, "file,patient,Resultat", ("oui", "non", "douteux"))
    out = tmp_path / "mine.toml"
    code, text = talked(["1", "oui", "\x04"], "init", path, "--out", out)
    assert (code, out.exists()) == (2, False)
    assert "The command with your answers so far:" in text
    assert "--findings Resultat --present oui" in text


def test_a_range_of_numbers_is_an_answer(tmp_path: Path) -> None:
    cells = [f"{n % 2},{n % 3 % 2},{('gut', 'matt')[n % 2]}" for n in range(12)]
    path = files_and_patients(tmp_path, "file,patient,Erguss,Rundherd,Qualität", cells)
    code, text = talked(["1-2"], "init", path, "--out", tmp_path / "mine.toml")
    assert code == 0, text
    assert images_of(tmp_path / "mine.toml").class_names == ("Erguss", "Rundherd")


def test_a_last_line_of_totals_is_a_question_and_left_out(tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"p{n // 2};{n:03}.png;{n % 2};{n // 2 % 2}" for n in range(40)]
    path = write(tmp_path / "t.csv", "patient;file;Erguss;Rundherd", *rows, "Summe;;104;110")
    out = tmp_path / "mine.toml"
    ended = flwr_sim("init", path, "--out", out)
    options = [line.split()[1] for line in ended.err.splitlines() if line.startswith("error ")]
    assert (ended.code, options) == (2, ["--leave-out-last-line:"]), ended.err
    assert "line 42 (Summe, 104 and 110)" in ended.err
    ended = flwr_sim("init", path, "--out", out, "--leave-out-last-line")
    assert ended.code == 0, ended.err
    assert len(images_of(out)) == 40


@pytest.mark.parametrize("title", ["Röntgen-Thorax Export", "Röntgen, Export;;", "Röntgen"])
def test_a_title_that_is_narrower_than_the_table_is_named(title: str, tmp_path: Path) -> None:
    pictures(tmp_path / "scans", *(f"{n:03}.png" for n in range(40)))
    rows = [f"{n:03}.png;p{n};{('Mass', 'Scar')[n % 2]};1,5" for n in range(40)]
    path = write(tmp_path / "t.csv", title, "", "file;patient;finding;dose", *rows)
    ended = flwr_sim("init", path, "--out", tmp_path / "mine.toml")
    assert (ended.code, "If lines stand above the headings, delete them" in ended.err) == (2, True), ended.err
