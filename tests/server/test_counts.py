"""Answers to a count question, pooled and shown: a sum is exact only where nobody hid a part."""

import json
from pathlib import Path

import pytest

from polyclinic.common.counts import CountQuestion, make_row_name
from polyclinic.common.vocabulary import VocabularyEntry
from polyclinic.common.wire.counts import CountReply
from polyclinic.server.counts.pool import Count, CountResult, SiteCounts, read_masked_rows
from polyclinic.server.reporting.counts import format_count_cell, make_counts_csv, write_count_files
from polyclinic.studies.cli import main
from tests.federations import DIGITS

VOCABULARY = {"Fluid": VocabularyEntry(synonyms=("Effusion", "Erguss")), "Mass": VocabularyEntry()}
QUESTION = CountQuestion(vocabulary=VOCABULARY)
PRESENT = ("class", "Fluid", "present", "")


def reply(site: str, told: dict[tuple[str, str, str, str], tuple[int, int]], **more: object) -> CountReply:
    facts: dict[str, object] = {"level": "trusted", "as_of": "2026-11-30", "smallest_count": 10, **more}
    columns = list(zip(*told, strict=True)) or [(), (), (), ()]
    names = ("tables", "classes", "states", "values")
    facts |= dict(zip(names, columns, strict=True))
    facts["patients"] = tuple(patients for patients, _ in told.values())
    if not facts.get("noise"):
        facts["images"] = tuple(images for _, images in told.values())
    return CountReply(run="r", site=site, **facts)  # type: ignore[arg-type]


def line(word: str, *numbers: tuple[int, int]) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    states = ("present", "absent", "not annotated")
    return {("class", word, state, ""): number for state, number in zip(states, numbers, strict=True)}


def result(*replies: CountReply) -> CountResult:
    sites = {each.site: SiteCounts.from_reply(each, QUESTION) for each in replies}
    return CountResult(QUESTION, "r", "2026-11-30T00:00:00+00:00", sites, {"west": "it is not connected"})


def test_words_of_one_class_are_summed_over_hospitals() -> None:
    both = result(
        reply("east", line("Effusion", (20, 30), (40, 50), (0, 0)), class_names=("Effusion",), allowed=("class",)),
        reply("north", line("Erguss", (11, 12), (15, 16), (1, 1)), class_names=("Erguss",), allowed=("class",)),
        reply("south", line("Mass", (50, 50), (50, 50), (0, 0)), class_names=("Mass",), allowed=("class",)),
    )
    assert both.pool_count(PRESENT) == Count(31, 42)
    assert both.get_site_count("south", PRESENT) is None
    assert both.classes == ("Fluid", "Mass")


def test_a_hidden_part_makes_a_lower_bound_and_nothing_told_is_hidden() -> None:
    both = result(
        reply("east", line("Effusion", (20, 30), (40, 50), (0, 0)), class_names=("Effusion",), allowed=("class",)),
        reply("north", {}, class_names=("Erguss",), allowed=("class",)),
    )
    assert both.pool_count(PRESENT) == Count(20, 30, is_bound=True)
    assert format_count_cell(both.pool_count(PRESENT)) == "at least 20 / 30"
    assert (
        format_count_cell(result(reply("north", {}, class_names=("Erguss",), allowed=("class",))).pool_count(PRESENT))
        == "hidden"
    )


def test_two_words_of_one_hospital_for_one_class_cannot_be_added() -> None:
    told = line("Effusion", (20, 30), (40, 50), (0, 0)) | line("Erguss", (12, 12), (48, 68), (0, 0))
    one = result(reply("east", told, class_names=("Effusion", "Erguss"), allowed=("class",)))
    assert one.pool_count(PRESENT).patients is None
    assert "several words for Fluid" in one.describe_site("east")


def test_a_value_that_is_left_out_is_zero_only_if_the_others_are_all() -> None:
    whole = line("Mass", (20, 30), (40, 50), (0, 0))
    years = {("year", "", "all", "2019"): (25, 30), ("year", "", "all", "2020"): (35, 50)}
    options = {"class_names": ("Mass",), "allowed": ("class", "year")}
    other = ("year", "", "all", "2021")
    assert result(reply("east", whole | years, **options)).pool_count(other) == Count(0, 0)
    part = dict(list(years.items())[:1])
    assert result(reply("east", whole | part, **options)).pool_count(other).patients is None


def test_a_noisy_number_has_an_interval_which_does_not_go_below_0() -> None:
    noisy = reply("east", line("Mass", (20, 0), (-4, 0), (0, 0)), class_names=("Mass",), allowed=("class",), noise=5.0)
    one = result(noisy)
    count = one.pool_count(("class", "Mass", "present", ""))
    assert (count.images, count.interval) == (None, (10, 30))
    assert format_count_cell(one.pool_count(("class", "Mass", "absent", ""))) == "0 (0–6)"


def test_a_row_of_a_masked_sum_says_how_many_hospitals_hide_their_part() -> None:
    # female: 30 patients with 40 images, one of three hospitals hides; male: nobody hides; not stated: all hide.
    rows = {make_row_name("sex", ""): [30, 40, 1, 50, 60, 0, 0, 0, 3]}
    masked = read_masked_rows(rows, {"sex": ("a", "b", "c")}, ("a", "b", "c"))
    assert masked.cells == {
        ("sex", "", "all", "female"): Count(30, 40, is_bound=True),
        ("sex", "", "all", "male"): Count(50, 60),
    }
    assert masked.hidden["sex", "", "all", "not stated"] == 3


def test_json_csv_and_page_have_all_hospitals(tmp_path: Path) -> None:
    both = result(
        reply("east", line("Effusion", (20, 30), (40, 50), (0, 0)), class_names=("Effusion",), allowed=("class",)),
        reply("<b>", {}, class_names=("Erguss",), allowed=("class",), refused=("sex",), missing=("year",)),
    )
    page, table, facts = write_count_files(both, tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    assert "at least 20 / 30" in text
    assert "<b>" not in text
    assert "west" in text
    assert table.read_text(encoding="utf-8") == make_counts_csv(both)
    assert make_counts_csv(both).splitlines()[1] == "all,class,Fluid,present,,20,30,,,1"
    saved = json.loads(facts.read_text(encoding="utf-8"))
    assert saved["silent"] == {"west": "it is not connected"}
    assert saved["counts"][0]["sites"]["<b>"]["patients"] is None
    assert {path.stat().st_mode & 0o777 for path in (page, table, facts)} == {0o600}


def test_flwr_sim_counts_the_images_of_each_simulated_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "digits.toml").write_text(DIGITS, encoding="utf-8")
    (tmp_path / "question.toml").write_text('tables = ["class"]\n', encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["count", str(tmp_path / "digits.toml"), str(tmp_path / "question.toml"), "--json"])
    assert ended.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    lines = {(each["class"], each["state"]): each["all"]["images"] for each in answer["counts"]}
    sites = {name: len(of["classes"]) for name, of in answer["sites"].items()}
    assert len(sites) == 3
    for name in {name for name, _ in lines}:
        annotating = sum(name in of["classes"] for of in answer["sites"].values())
        images = sum(number for (of, _), number in lines.items() if of == name)
        assert images % annotating >= 0
        assert images > 400 * annotating
