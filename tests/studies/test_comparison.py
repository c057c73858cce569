"""Facts about reading run folders and comparing them."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from common.errors import BadInput
from common.metrics.auroc import ClassMetrics, summarise
from common.metrics.multi_class import ClientAccuracy, MultiClassMetrics, RoundAccuracy
from server.reporting.page import ClassGroup
from server.reporting.tables import coverage_table
from server.runs.reader import RunSummary, read_run
from studies.claims import verdict_sentences
from studies.comparison import Comparison, MethodResult, Spread, compare, write_comparison
from studies.comparison_report import comparison_table, draw_auroc_by_method, draw_shared_and_unique, markdown_table

CLASSES = ("edema", "hernia", "mass", "nodule")


def summary(name: str, seed: int, aurocs: Mapping[str, float | None], unique: set[str], **more: Any) -> dict[str, Any]:
    results = {c: ClassMetrics(aurocs[c], aurocs[c], aurocs[c], 5 if aurocs[c] else 0, 9) for c in aurocs}
    return {
        "name": name,
        "method": "surgical",
        "rounds": 2,
        "seed": seed,
        "classes": list(aurocs),
        "sites": {"north": {"classes": list(aurocs)}, "south": {"classes": sorted(set(aurocs) - unique)}},
        "test": asdict(summarise(results, set(aurocs) - unique, unique)),
        **more,
    }


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(content))
    (folder / "rounds.jsonl").write_text(
        '{"round": 1, "sites": ["north"], "absent": {"south": "late"}}\n{"round": 2}\n'
    )
    return folder


def compared(tmp_path: Path, *contents: Mapping[str, Any]) -> Comparison:
    return compare([read_run(write(tmp_path / str(index), content)) for index, content in enumerate(contents)])


def printed(table: RenderableType) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def read(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, RunSummary]:
    return {label: RunSummary.model_validate(content) for label, content in contents.items()}


def two_seeds() -> list[dict[str, Any]]:
    """``good`` beats ``poor`` by .1 to .4 in seed 0 and by .15 to .45 in seed 1; the unique class differs by seed."""
    return [
        summary("good", 0, dict(zip(CLASSES, (0.8, 0.8, 0.8, 0.8), strict=True)), {"mass"}),
        summary("good", 1, dict(zip(CLASSES, (0.9, 0.9, 0.9, 0.9), strict=True)), {"edema"}),
        summary("poor", 0, dict(zip(CLASSES, (0.7, 0.6, 0.5, 0.4), strict=True)), {"mass"}),
        summary("poor", 1, dict(zip(CLASSES, (0.75, 0.65, 0.55, 0.45), strict=True)), {"edema"}),
    ]


def multi_class_run(name: str, seed: int, accuracy: float) -> dict[str, Any]:
    """A run with one class an image; its test set holds one class only, so that specificity is undefined."""
    content = summary(name, seed, {"edema": 0.8}, set())
    content["test"]["multi_class"] = asdict(MultiClassMetrics(accuracy, accuracy, None, 0.6, 20))
    return content | {"client_accuracy": asdict(ClientAccuracy(0.9, 4, 0.85, 2, {"north": 0.95, "south": 0.85}))}


def test_a_run_with_one_class_an_image_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", multi_class_run("good", 0, 0.7))
    (folder / "rounds.jsonl").write_text('{"round": 1, "test_accuracy": {"mean": 0.5, "pooled": 0.6}}\n')
    run = read_run(folder)
    assert run.summary.test.multi_class == MultiClassMetrics(0.7, 0.7, None, 0.6, 20)
    assert run.summary.client_accuracy == ClientAccuracy(0.9, 4, 0.85, 2, {"north": 0.95, "south": 0.85})
    assert run.rounds[0].test_accuracy == RoundAccuracy(0.5, 0.6)


def test_a_run_written_before_there_were_such_measures_has_none(tmp_path: Path) -> None:
    content = summary("good", 0, {"edema": 0.8}, set())
    del content["test"]["multi_class"]
    assert read_run(write(tmp_path / "run", content)).summary.measures == {}


def test_a_run_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    content = summary("good", 3, {"edema": 0.8, "hernia": None}, {"edema"}, something_newer=1)
    run = read_run(write(tmp_path / "run", content))
    assert run.summary.test.per_class["hernia"].auroc is None
    assert run.summary.test.unique_classes.classes == ("edema",)
    assert [each.absent for each in run.rounds] == [{"south": "late"}, {}]


def test_every_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        read_run(tmp_path)
    assert [Path(fault.where).name for fault in error.value.faults] == ["summary.json", "rounds.jsonl"]


def test_a_file_that_is_not_ours_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {"method": "surgical", "rounds": "many"})
    with pytest.raises(BadInput, match=r'summary\.json: rounds: must be a whole number; got "many"\.'):
        read_run(folder)


def test_a_torn_line_is_named_by_its_number(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", two_seeds()[0])
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{"rou')
    with pytest.raises(BadInput, match=r"rounds\.jsonl line 2"):
        read_run(folder)


def test_a_method_is_averaged_over_its_seeds_with_the_sample_sd(tmp_path: Path) -> None:
    # Means over classes of "poor": .55 and .60 -> mean .575, sample SD .05 / sqrt(2) = .03536.
    # Its unique classes: mass in seed 0 (.5), edema in seed 1 (.75) -> mean .625.
    poor = compared(tmp_path, *two_seeds()).methods[1]
    assert poor.seeds == (0, 1)
    assert poor.auroc["all"].mean == pytest.approx(0.575)
    assert poor.auroc["all"].sd == pytest.approx(0.035355, abs=1e-6)
    assert poor.auroc["unique"].mean == pytest.approx(0.625)
    assert poor.per_class["hernia"] == pytest.approx(0.625)


def test_pairs_of_unique_classes_are_those_unique_in_their_own_seed(tmp_path: Path) -> None:
    # (0, mass): .8 - .5 = .3;  (1, edema): .9 - .75 = .15.
    result = compared(tmp_path, *two_seeds()).contrast("poor", "unique", "classes x seeds").result
    assert result.pairs == 2
    assert result.mean_difference == pytest.approx(0.225)


def test_a_class_whose_kind_changes_with_the_seed_is_said_to_vary(tmp_path: Path) -> None:
    groups = compared(tmp_path, *two_seeds()).class_groups
    assert groups == {"shared": ("hernia", "nodule"), "varies": ("edema", "mass")}


def test_a_difference_within_the_noise_is_not_distinguishable(tmp_path: Path) -> None:
    one, two = (0.8, 0.7, 0.9, 0.6), (0.7, 0.81, 0.79, 0.7)
    contents = [
        summary(name, seed, dict(zip(CLASSES, aurocs, strict=True)), {"mass"})
        for name, aurocs in (("one", one), ("two", two))
        for seed in range(3)
    ]
    assert verdict_sentences(compared(tmp_path, *contents))[0].startswith("one is not distinguishable from two")


def test_too_few_classes_are_not_tested_and_the_sentence_says_so(tmp_path: Path) -> None:
    few = [summary(name, 0, {"edema": auroc}, set()) for name, auroc in (("one", 0.8), ("two", 0.7))]
    (sentence,) = verdict_sentences(compared(tmp_path, *few))
    assert "cannot be tested: 1 pair is too few" in sentence


def test_one_seed_needs_no_second_pairing(tmp_path: Path) -> None:
    comparison = compared(tmp_path, two_seeds()[0], two_seeds()[2])
    assert {each.pairing for each in comparison.contrasts} == {"classes"}
    assert comparison.methods[0].auroc["all"].sd is None


def test_pooled_training_is_judged_on_the_reference_s_unique_classes(tmp_path: Path) -> None:
    federated = summary("good", 0, {"edema": 0.8, "mass": 0.7}, {"mass"})
    pooled = summary("pooled", 0, {"edema": 0.6, "mass": 0.5}, set(), sites={"all": {"classes": ["edema", "mass"]}})
    assert compared(tmp_path, federated, pooled).methods[1].auroc["unique"].mean == 0.5


def test_the_same_method_and_seed_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r'"good" with seed 0 is already in .*0\.'):
        compared(tmp_path, two_seeds()[0], two_seeds()[0])


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(BadInput, match="no run to compare"):
        compare([])


def test_what_makes_a_comparison_uneven_is_said(tmp_path: Path) -> None:
    one = summary("one", 0, {"edema": 0.8, "mass": None}, {"mass"}, contract_hash="a")
    two = summary("two", 0, {"edema": 0.7, "mass": 0.7}, {"mass"}, contract_hash="b")
    more = summary("two", 1, {"edema": 0.7, "mass": 0.7}, {"mass"})
    rare, missing, seeds, contract = compared(tmp_path, one, two, more).cautions
    assert rare.startswith(
        '"edema": fewer than 10 test images with or without the finding in at least one run; the means'
    )
    assert missing == 'one: no AUROC for "mass" in at least one run; the means leave it out.'
    assert "different seeds; pairs come from the 1 they share" in seeds
    assert "did not train on the same sites and labels" in contract


def test_figures_of_the_initial_model_are_said_to_be_so(tmp_path: Path) -> None:
    runs = two_seeds()
    runs[2]["best_round"], runs[3]["best_round"] = 0, 1
    found = compared(tmp_path, *runs).cautions
    assert "poor: with 1 seed of 2 (1) validation was best before round 1; the initial model is tested." not in found
    assert "poor: with 1 seed of 2 (0) validation was best before round 1; the initial model is tested." in found
    assert not any("good: with" in each for each in found)


def test_the_json_holds_every_test(tmp_path: Path) -> None:
    path = write_comparison(compared(tmp_path, *two_seeds()), tmp_path / "comparison.json")
    written = json.loads(path.read_text())
    assert written["reference"] == "good"
    assert len(written["contrasts"]) == 6
    assert written["methods"][1]["auroc"]["all"]["mean"] == pytest.approx(0.575)


def test_terminal_and_markdown_tables_say_the_same(tmp_path: Path) -> None:
    comparison = compared(tmp_path, *two_seeds())
    cells = ["0.575 ± 0.035", "0.625 ± 0.177", "+0.275"]
    shown, markdown = printed(comparison_table(comparison)), markdown_table(comparison)
    assert all(cell in shown and cell in markdown for cell in cells)
    assert [line.count("|") for line in markdown.splitlines()] == [9] * 4


def test_markdown_says_average_precision_and_balanced_accuracy(tmp_path: Path) -> None:
    # In these runs all three measures of a class are equal, so "poor" has .575 +- .035 over all classes thrice.
    headings, _, _, poor = markdown_table(compared(tmp_path, *two_seeds())).splitlines()
    assert "| AUROC, unique | average precision | balanced accuracy | good ahead by, all |" in headings
    assert poor.count("0.575 ± 0.035") == 3


def test_measures_of_one_class_an_image_are_averaged_over_seeds(tmp_path: Path) -> None:
    # .7 and .8: mean .75, sample SD .1 / sqrt(2) = .0707. One seed alone has a BMCTA; specificity is undefined in both.
    one, two = multi_class_run("good", 0, 0.7), multi_class_run("good", 1, 0.8)
    (method,) = compared(tmp_path, one, two | {"client_accuracy": None}).methods
    assert method.measures["accuracy"].mean == pytest.approx(0.75)
    assert method.measures["accuracy"].sd == pytest.approx(0.0707107, abs=1e-6)
    assert method.measures["best_mean_client_test_accuracy"] == Spread(0.9, None)
    assert "specificity" not in method.measures


def test_intervals_are_averaged_over_the_seeds_that_have_them(tmp_path: Path) -> None:
    one, two = (summary("good", seed, {"edema": 0.7, "mass": 0.6}, set()) for seed in (0, 1))
    one["test"]["intervals"] = {"mean_auroc": [0.5, 0.7], "per_class": {"edema": [0.5, 0.7]}}
    two["test"]["intervals"] = {"mean_auroc": [0.5, 0.7], "per_class": {"edema": [0.6, 1.0], "mass": [0.2, 0.8]}}
    (method,) = compared(tmp_path, one, two).methods
    assert method.intervals == {"edema": pytest.approx((0.55, 0.85)), "mass": pytest.approx((0.2, 0.8))}
    (without,) = compare([read_run(folder) for folder in sorted(tmp_path.iterdir())][:1]).methods
    assert without.intervals == {"edema": (0.5, 0.7)}


def test_tables_show_measures_of_one_class_an_image_only_where_a_run_has_them(tmp_path: Path) -> None:
    comparison = compared(tmp_path, multi_class_run("good", 0, 0.7), summary("poor", 0, {"edema": 0.6}, set()))
    shown, markdown = printed(comparison_table(comparison)), markdown_table(comparison)
    without = markdown_table(compare([read_run(tmp_path / "1")]))
    assert all(word in shown and word in markdown for word in ("accuracy", "F1", "BMCTA", "BTA", "0.700"))
    assert markdown.splitlines()[-1].count("n/a") >= len(comparison.measures) == 5
    assert "BMCTA" not in without


def test_the_coverage_table_marks_owners_and_the_best_method() -> None:
    one = summary("one", 0, {"edema": 0.8, "hernia": None, "mass": 0.7}, {"mass"})
    two = summary("[b]two", 0, {"edema": 0.6, "hernia": None, "mass": 0.9}, {"mass"})
    lines = {
        line.split("│")[1].strip(): line
        for line in printed(coverage_table(read({"one": one, "[b]two": two}))).splitlines()
        if "│" in line
    }
    assert lines["edema"].count("●") == 2
    assert lines["mass"].count("●") == 1
    assert "★ 0.800 │" in lines["edema"]
    assert "★ 0.900 │" in lines["mass"]
    assert lines["hernia"].count("n/a") == 2
    assert list(lines).index("annotated by one site only") == list(lines).index("mass") - 1


def test_many_sites_are_counted_instead_of_marked() -> None:
    content = summary("one", 0, {"edema": 0.8}, set(), sites={f"site{n:02}": {"classes": ["edema"]} for n in range(30)})
    assert "30 of 30" in printed(coverage_table(read({"one": content})))


def test_figures_with_an_error_are_not_compared(tmp_path: Path) -> None:
    aurocs = dict.fromkeys(CLASSES, 0.8)
    content = [summary(name, 0, aurocs, set()) for name in ("exact", "summed")]
    for one in content[1]["test"]["per_class"].values():
        one["errors"] = {"auroc": 0.004}
    content[1]["test"]["errors"] = {"auroc": 0.004}
    comparison = compared(tmp_path, *content)
    exact, summed = comparison.methods
    assert (exact.auroc["all"].mean, summed.auroc["all"].mean) == (pytest.approx(0.8), None)
    assert comparison.contrast("summed", "all").result.mean_difference is None
    assert any("error (±) are not compared" in caution for caution in comparison.cautions)


def test_a_method_without_a_subset_has_no_marker_there_and_one_seed_no_line() -> None:
    def method(label: str, sd: float | None, unique: float | None) -> MethodResult:
        aurocs = {"all": Spread(0.8, sd), "shared": Spread(0.9, sd), "unique": Spread(unique, None)}
        none = Spread(None, None)
        return MethodResult(label, (0,), "", aurocs, none, none, {}, {}, {})  # type: ignore[arg-type]

    svg = ElementTree.fromstring(draw_shared_and_unique([method("one", None, None), method("two", 0.01, 0.7)]))
    markers = [use.get("style", "") for use in svg.iter("use")]
    lines = [path.get("style", "") for path in svg.iter("path") if "stroke-width: 2" in path.get("style", "")]
    assert sum("fill: var(--blue)" in style for style in markers) == 2 + 1  # and one in the legend
    assert sum("fill: var(--vermilion)" in style for style in markers) == 3 + 1
    assert sum("var(--vermilion)" in style for style in lines) == 2


def test_a_class_axis_reaches_to_chance_only_where_values_are_near() -> None:
    def line(low: float) -> bool:
        of = MethodResult("a", (0,), "", {}, Spread(low, None), Spread(low, None), {"edema": low, "mass": 0.99}, {}, {})
        return "stroke-dasharray" in draw_auroc_by_method([of], [ClassGroup("shared", ("edema", "mass"))])

    assert line(0.6)
    assert not line(0.98)
