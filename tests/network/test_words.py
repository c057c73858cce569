"""Over the network: three hospitals with words of their own for two findings, before round 1.

With the study's vocabulary, or with the line that a refusal prints, the run ends in the model of hospitals that wrote
the study's words from the beginning.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from polyclinic.server.reporting.model_card import render_model_card
from polyclinic.server.reporting.run_report import write_run_report
from polyclinic.server.runs.unlearned import NO_POSITIVE_REASON
from tests.federations import SMALL_RUN
from tests.network.federated import connected, events, hash_in, sites_by_round
from tests.network.real import Coordinator, Program, Site, flwr_client, flwr_server, flwr_sim, summary_of, written

pytestmark = pytest.mark.slow

HOSPITALS = ("east", "north", "south")
EXPERIMENT = f"""{SMALL_RUN.format(channels=1)}[training]
batch_size = 32
lr = 0.01
"""
VOCABULARY = """
[vocabulary.Lymphocyte]
synonyms = ["lympho", "Lymphozyt"]
definition = "small, round nucleus"
[vocabulary."Pleural effusion"]
synonyms = ["Pleuraerguss"]
"""
STUDY = ("Lymphocyte", "Pleural effusion")
"""The study's classes; a hospital's words for them follow in this order."""
OWN = {"east": STUDY, "north": ("Lymphozyt", "Pleuraerguss"), "south": ("lympho", "Pleural effusion")}
SITE = """name = "{name}"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = {columns}
split_column = "part"
image_size = 16

[data.synonyms]
{synonyms}
"""


def write_hospital(folder: Path, part: int) -> Path:
    """A third of 450 digits as pictures."""
    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    for index in range(part, 450, 3):
        pixels = (255 * np.kron(digits.images[index] / 16, np.ones((2, 2)))).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
    return folder


def write_words(folder: Path, part: int, words: tuple[str, ...], **synonyms: str) -> None:
    """The hospital's table and settings, with its own words for the two findings; no image shows a further class."""
    lines = [f"image,{','.join(words)},part"]
    for place, index in enumerate(range(part, 450, 3)):
        digit = int(load_digits().target[index])
        kind = ("test", "val", "train", "train", "train")[place % 5]
        cells = [int(digit > 4), digit % 2, *[0] * (len(words) - 2)]
        lines.append(f"{index}.png,{','.join(map(str, cells))},{kind}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    own = "\n".join(f'"{word}" = "{name}"' for word, name in synonyms.items())
    columns = "[" + ", ".join(f'"{word}"' for word in words) + "]"
    text = SITE.format(name=folder.name, columns=columns, synonyms=own)
    (folder / "site.toml").write_text(text, encoding="utf-8")


@dataclass
class Federation:
    """Three hospitals, and the words that each had at its last start."""

    folder: Path
    plain: Path
    stated: Path
    coordinator: Coordinator
    sites: list[Site]

    def set_words(self, words: Mapping[str, tuple[str, ...]], synonyms: Mapping[str, dict[str, str]] = {}) -> None:
        for part, site in enumerate(self.sites):
            site.end()
            write_words(site.folder, part, words[site.name], **synonyms.get(site.name, {}))
            site.start()
        self.coordinator.sees(*self.sites)

    def site(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def run(self, name: str, *overrides: str, experiment: Path | None = None) -> Program:
        file = experiment or self.plain
        return self.coordinator.run(file, self.folder / name, *overrides, sites=3, once=True)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("words")
    for name in ("plain", "stated"):
        (folder / name).mkdir()
    plain, stated = written(EXPERIMENT, folder / "plain"), written(EXPERIMENT + VOCABULARY, folder / "stated")
    data = [write_hospital(folder / "data" / name, part) for part, name in enumerate(HOSPITALS)]
    for part, path in enumerate(data):
        write_words(path, part, STUDY)
    with connected(plain, folder / "machine", data=data) as (coordinator, sites):
        yield Federation(folder, plain, stated, coordinator, sites)


@pytest.fixture(scope="module")
def agreed(federation: Federation) -> str:
    """The model of three hospitals that write the study's words."""
    federation.run("agreed").succeeds()
    assert events(federation.folder / "agreed", "classes_of_one_site") == []
    return hash_in(federation.folder / "agreed")


def test_synonyms_in_the_vocabulary_give_the_model_of_hospitals_that_write_the_studys_words(
    federation: Federation, agreed: str
) -> None:
    federation.set_words(OWN)
    for site in federation.sites:
        checked = flwr_client("check", site.folder, "--experiment", federation.stated, "--offline")
        assert checked.code == 0, checked.out
    assert "Lymphozyt as Lymphocyte" in flwr_client(
        "check", federation.site("north").folder, "--experiment", federation.stated, "--offline"
    ).out.replace("\n", " ")
    out = federation.folder / "synonyms"
    federation.run("synonyms", experiment=federation.stated).succeeds()
    assert hash_in(out) == agreed
    assert sites_by_round(out) == [list(HOSPITALS)] * 2
    assert summary_of(out)["classes"] == list(STUDY)
    assert '"small, round nucleus"' in (out / "model.json").read_text(encoding="utf-8")
    assert "small, round nucleus" in write_run_report(out).read_text(encoding="utf-8")
    assert "| Lymphocyte | small, round nucleus | lympho and Lymphozyt |" in render_model_card(out)


def test_a_word_outside_the_vocabulary_is_refused_by_check_and_at_the_roll_call_with_the_line_to_write(
    federation: Federation, agreed: str
) -> None:
    federation.set_words(OWN | {"south": ("lymphos", "Pleural effusion")})
    south = federation.site("south")
    checked = flwr_client("check", south.folder, "--experiment", federation.stated, "--offline")
    assert checked.code == 47
    (line,) = set(re.findall(r'"lymphos" = "[^"]+"', checked.out))
    out = federation.folder / "without-south"
    federation.run("without-south", "participation.min_sites=2", experiment=federation.stated).succeeds()
    (left_out,) = events(out, "left_out")
    assert left_out["site"] == "south"
    assert line in left_out["reason"]
    south.program.says(line)
    federation.set_words(OWN | {"south": ("lymphos", "Pleural effusion")}, {"south": {"lymphos": "Lymphocyte"}})
    federation.run("repaired", experiment=federation.stated).succeeds()
    assert hash_in(federation.folder / "repaired") == agreed


def test_without_a_vocabulary_words_that_look_alike_stop_the_run_before_round_1_with_both_ways_out(
    federation: Federation, agreed: str
) -> None:
    federation.set_words(OWN)
    run = federation.run("alike")
    assert run.ends() != 0
    assert '"Lymphozyt" = "Lymphocyte"' in run.output
    assert '"lympho" = "Lymphocyte"' in run.output
    assert 'distinct_classes = ["Lymphozyt", "lympho"]' in run.output
    assert not (federation.folder / "alike" / "model.json").exists()
    (refused,) = events(federation.folder / "alike", "refused")
    assert '"Lymphozyt" = "Lymphocyte"' in refused["reason"]
    federation.site("north").program.says('"Lymphozyt" = "Lymphocyte"')
    federation.site("east").program.says("may be one class in two words")  # the other side
    lines = {
        "north": {"Lymphozyt": "Lymphocyte", "Pleuraerguss": "Pleural effusion"},
        "south": {"lympho": "Lymphocyte"},
    }
    federation.set_words(OWN, lines)
    # The same command line again: nothing was trained.
    federation.run("alike").succeeds()
    assert hash_in(federation.folder / "alike") == agreed


def test_a_class_of_one_hospital_is_asked_about_on_both_sides_and_the_run_goes_on(federation: Federation) -> None:
    """Words that share no spelling: nobody but people can know that they mean one class."""
    federation.set_words(
        {"east": STUDY, "north": STUDY, "south": ("Lymphocyte", "Pleuraerguss")},
    )
    run, out = federation.run("asked"), federation.folder / "asked"
    run.succeeds()
    line = 'distinct_classes = ["Pleuraerguss"]'
    assert line in run.output
    assert 'One site alone annotates: "Pleuraerguss" (south)' in run.output
    federation.site("south").program.says('No other site annotates "Pleuraerguss"')
    assert "No other site annotates" not in federation.site("east").program.output
    (asked,) = events(out, "classes_of_one_site")
    assert asked["classes"] == summary_of(out)["classes_of_one_site"] == {"Pleuraerguss": "south"}
    report = write_run_report(out).read_text(encoding="utf-8")
    assert "Pleuraerguss” is annotated by one site alone" in html.unescape(report)
    confirmed = federation.run("confirmed", f"participation.{line}")
    confirmed.succeeds()
    assert "One site alone" not in confirmed.output
    assert hash_in(federation.folder / "confirmed") == hash_in(out)


def test_a_class_that_no_image_of_its_hospitals_shows_is_unlearned_as_far_as_their_policies_tell_it(
    federation: Federation,
) -> None:
    federation.set_words({"east": STUDY, "north": (*STUDY, "Basophil"), "south": STUDY})
    run, out = federation.run("few"), federation.folder / "few"
    run.succeeds()
    assert (summary_of(out)["unlearned"], summary_of(out)["maybe_unlearned"]) == ({}, ["Basophil"])
    assert "Not known whether the model has learned Basophil" in " ".join(run.output.split())
    picture = federation.site("east").folder / "images" / "0.png"
    predicted = flwr_sim("predict", out, picture, "--out", federation.folder / "few.csv")
    assert "Not known whether the model has learned Basophil" in predicted.out
    north = federation.site("north")
    north.end()
    with (north.folder / "site.toml").open("a", encoding="utf-8") as file:
        file.write("\n[policy]\nsmallest_count = 0\n")
    north.start()
    federation.coordinator.sees(*federation.sites)
    federation.run("none").succeeds()
    assert summary_of(federation.folder / "none")["unlearned"] == {"Basophil": NO_POSITIVE_REASON}
    assert summary_of(federation.folder / "none")["maybe_unlearned"] == []
    table = federation.folder / "none.csv"
    flwr_sim("predict", federation.folder / "none", picture, "--out", table)
    assert table.read_text(encoding="utf-8").splitlines()[0] == '"image","Lymphocyte","Pleural effusion","unreadable"'


# ---------------------------------------------------------------------- the table of what is agreed and what differs


def table_lines(output: str) -> list[str]:
    """The lines of a table with borders, and those of its cells."""
    return [line for line in output.splitlines() if line[:1] in "┏┃┡│└├"]


def test_both_sides_see_what_differs_before_a_run_with_the_lines_to_write_and_then_that_all_agree(
    federation: Federation, agreed: str
) -> None:
    words = OWN | {"south": ("lymphos", "Pleural effusion")}
    federation.set_words(words)
    north = federation.site("north")
    north.end()
    north.edit(north.toml, ("image_size = 16", "image_size = 24"))
    north.start()
    federation.coordinator.sees(*federation.sites)
    before = sorted(path.name for path in federation.folder.iterdir())
    arguments = ("status", federation.coordinator.folder, "--contract", federation.stated)
    shown = flwr_server(*arguments)
    assert shown.code == 1
    for line in ('"lymphos" = "Lymphocyte"', "image_size = 16"):
        assert line in shown.out
    assert max(map(len, table_lines(shown.out))) <= 80
    contract = json.loads(flwr_server(*arguments, "--json").out)
    assert not contract["agreed"]
    differing = {
        (site, name): point["write"]
        for site, points in contract["sites"].items()
        for name, point in points.items()
        if not point["agreed"]
    }
    assert differing == {("north", "sizes"): ["image_size = 16"], ("south", "words"): ['"lymphos" = "Lymphocyte"']}
    assert contract["sites"]["east"]["counts"]["here"] == "90 training images, 90 patients"
    assert {points["level"]["here"] for points in contract["sites"].values()} == {"trusted"}
    assert sorted(path.name for path in federation.folder.iterdir()) == before  # no run folder
    checked = flwr_client("check", federation.site("south").folder, "--experiment", federation.stated, "--offline")
    assert max(map(len, table_lines(checked.out))) <= 80
    row = next(line for line in table_lines(checked.out) if "words !" in line)
    assert '"lymphos" =' in row
    federation.set_words(words, {"south": {"lymphos": "Lymphocyte"}})  # and the size of before
    agreeing = flwr_server(*arguments)
    assert (agreeing.code, "All hospitals agree." in agreeing.out) == (0, True)
    federation.run("after-contract", experiment=federation.stated).succeeds()
    assert hash_in(federation.folder / "after-contract") == agreed


def test_a_hospital_that_is_away_or_declines_is_named_in_the_table(federation: Federation) -> None:
    federation.set_words(OWN)
    north, south = federation.site("north"), federation.site("south")
    south.end()
    south.edit(south.toml, ("[data.synonyms]", '[policy]\nlevel = "masked"\n\n[data.synonyms]'))
    south.start()
    federation.coordinator.sees(south)
    north.end()
    federation.coordinator.sees(north, state="stopped")
    contract = json.loads(
        flwr_server("status", federation.coordinator.folder, "--contract", federation.stated, "--json").out
    )
    assert contract["sites"].keys() == {"east"}
    assert contract["silent"]["north"] == "not connected"
    assert "policy.masked_only" in contract["silent"]["south"]
    checked = flwr_client("check", south.folder, "--experiment", federation.stated, "--offline", "--json")
    level = json.loads(checked.out)["contract"]["level"]
    assert (checked.code, level["here"], level["agreed"]) == (48, "masked", False)


def test_without_a_vocabulary_the_table_asks_about_words_too(federation: Federation) -> None:
    federation.set_words({"east": STUDY, "north": ("Lymphozyt", "Pleural effusion"), "south": ("lympho", "Blast")})
    shown = flwr_server("status", federation.coordinator.folder, "--contract", federation.plain)
    assert shown.code == 1
    assert '"Lymphozyt" = "Lymphocyte"' in shown.out
    assert 'distinct_classes = ["Blast"]' in shown.out
