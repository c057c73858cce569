"""Counts over real processes: three hospitals with unlike labels and policies, and one that is not connected."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.network.real import Coordinator, Machine, Site, flwr_server, lines_of, machine

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.usefixtures("no_proxy")]

SITE = """\
name = "{name}"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "file"
patient_column = "patient"
label_columns = {columns}
sex_column = "sex"
age_column = "age"
date_column = "day"
image_size = 8
{more}

[policy]
{policy}

[data.synonyms]
{synonyms}
"""
COLUMNS = {"east": ["Effusion", "Mass"], "north": ["Erguss", "Nodule"], "south": ["Mass", "Nodule"]}
"""The label columns of each hospital. North's "Erguss" is Effusion."""
SYNONYMS = {"north": '"Erguss" = "Effusion"'}
POLICIES = {"south": 'counts = ["class", "sex"]', "north": "smallest_count = 0"}
MORE = {"north": 'sex_words = {"1" = "male", "2" = "female"}'}
WORDS = {
    "east": {"F": "female", "M": "male"},
    "north": {"2": "female", "1": "male"},
    "south": {"w": "female", "m": "male"},
}
QUESTION = 'title = "How many?"\ndeadline_s = 240.0\n'


def made_rows(name: str, seed: int) -> list[dict[str, str]]:
    """The label table of a hospital: 60 patients with one or two images each."""
    random = np.random.default_rng(seed)
    rows = []
    for patient in range(60):
        sex = str(random.choice(list(WORDS[name])))
        labels = {
            column: str(int(random.random() < share)) for column, share in zip(COLUMNS[name], (0.4, 0.05), strict=True)
        }
        for image in range(int(random.integers(1, 3))):
            row = {"file": f"{patient}-{image}.png", "patient": f"P{patient}", "sex": sex, **labels}
            rows.append({**row, "age": str(30 + patient), "day": f"{2019 + image}-05-01"})
    return rows


def made_hospital(folder: Path, name: str, seed: int) -> list[dict[str, str]]:
    """Write the folder of a hospital; return its label table."""
    rows = made_rows(name, seed)
    (folder / "images").mkdir(parents=True)
    random = np.random.default_rng(seed)
    for row in rows:
        Image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / "images" / row["file"])
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = SITE.format(
        name=name,
        columns=json.dumps(COLUMNS[name]),
        more=MORE.get(name, ""),
        policy=POLICIES.get(name, ""),
        synonyms=SYNONYMS.get(name, ""),
    )
    (folder / "site.toml").write_text(text, encoding="utf-8")
    return rows


@pytest.fixture(scope="module")
def hospitals(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Coordinator, dict[str, Site], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("counts")
    here: Machine
    with machine(folder / "machine") as here:
        tables = {name: made_hospital(folder / "data" / name, name, seed) for seed, name in enumerate(COLUMNS)}
        coordinator = Coordinator(here)
        sites = {name: coordinator.admit(coordinator.site(folder / "data" / name)) for name in COLUMNS}
        coordinator.admit(coordinator.site(folder / "data" / "east", "west"))  # never started
        coordinator.start()
        for site in sites.values():
            site.connect()
        coordinator.sees(*sites.values())
        yield coordinator, sites, tables


def count_truth(tables: dict[str, list[dict[str, str]]], name: str, column: str) -> dict[str, tuple[int, int]]:
    """State -> patients and images of one class at one hospital."""
    rows = tables[name]
    words = {"1": "present", "0": "absent"}
    images = Counter(words[row[column]] for row in rows)
    patients = Counter(
        words[max(row[column] for row in rows if row["patient"] == who)] for who in {row["patient"] for row in rows}
    )
    return {state: (patients[state], images[state]) for state in words.values()}


def test_counts_are_the_pooled_truth_where_they_are_told_and_absent_hospitals_are_named(
    hospitals: tuple[Coordinator, dict[str, Site], dict[str, Any]], tmp_path: Path
) -> None:
    coordinator, sites, tables = hospitals
    question = tmp_path / "question.toml"
    question.write_text(QUESTION, encoding="utf-8")
    ended = flwr_server("count", coordinator.folder, question, "--out", tmp_path / "counts")
    assert ended.code == 1, ended.err  # one hospital did not answer
    answer = json.loads((tmp_path / "counts" / "counts.json").read_text(encoding="utf-8"))
    assert list(answer["sites"]) == ["east", "north", "south"]
    assert list(answer["silent"]) == ["west"]
    assert answer["sites"]["south"]["allowed"] == ["class", "sex"]
    assert answer["sites"]["north"]["classes"] == {"Effusion": ["Effusion"], "Nodule": ["Nodule"]}
    told = {(line["table"], line["class"], line["state"], line["value"]): line for line in answer["counts"]}

    effusion = {name: count_truth(tables, name, column) for name, column in (("east", "Effusion"), ("north", "Erguss"))}
    for state in ("present", "absent"):
        line = told["class", "Effusion", state, ""]
        pooled = [sum(of[state][place] for of in effusion.values()) for place in (0, 1)]
        assert (line["all"]["patients"], line["all"]["images"], line["all"]["is_bound"]) == (*pooled, False)
        assert list(line["sites"]) == ["east", "north"]
    # Mass is rare at east (hidden), and common at south: the sum is what south told, and a bound.
    south = count_truth(tables, "south", "Mass")["present"]
    line = told["class", "Mass", "present", ""]
    assert (line["all"]["patients"], line["all"]["images"], line["all"]["is_bound"]) == (*south, True)
    assert line["sites"]["east"] == {"patients": None, "images": None, "is_bound": True}
    # All sexes are of enough patients; 60 patients at each hospital, whose words were understood.
    for sex in ("female", "male"):
        number = sum(
            len({row["patient"] for row in tables[name] if WORDS[name][row["sex"]] == sex}) for name in COLUMNS
        )
        shown = told["sex", "", "all", sex]["all"]
        assert shown["patients"] == number or shown["is_bound"]
    assert told["sex", "", "all", "female"]["sites"]["north"]["patients"] == len(
        {row["patient"] for row in tables["north"] if row["sex"] == "2"}
    )

    page = (tmp_path / "counts" / "counts.html").read_text(encoding="utf-8")
    assert "west" in page
    assert "at least" in page
    with (tmp_path / "counts" / "counts.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["site"] for row in rows} == {"all", "east", "north", "south"}
    assert "west: it is not connected" in ended.out

    again = flwr_server("count", coordinator.folder, question, "--json")
    assert json.loads(again.out)["counts"] == answer["counts"]
    audit = lines_of(sites["south"].folder / "state" / "audit.jsonl")
    records = [
        (line["record"], line["decision"]) for line in audit if line.get("record") in ("CountRequest", "CountReply")
    ]
    assert records == [("CountRequest", "allow"), ("CountReply", "allow")] * 2


def test_a_question_to_a_hospital_that_is_not_admitted_is_refused(
    hospitals: tuple[Coordinator, dict[str, Site], dict[str, Any]], tmp_path: Path
) -> None:
    question = tmp_path / "question.toml"
    question.write_text('sites = ["nowhere"]\n', encoding="utf-8")
    ended = flwr_server("count", hospitals[0].folder, question)
    assert ended.code == 2
    assert "nowhere" in ended.err
    question.write_text('tables = ["klass"]\n', encoding="utf-8")
    assert flwr_server("count", hospitals[0].folder, question).code == 2
