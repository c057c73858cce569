"""Run folders are read and compared, and each site's gain is told."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from scipy.stats import ttest_1samp

from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.auroc import ClassMetrics, summarise_test_results
from polyclinic.common.metrics.calibration import DecisionCounts, OperatingPoint, ScoreQuality
from polyclinic.common.metrics.multi_class import BestClientAccuracies, MultiClassMetrics, RoundAccuracy
from polyclinic.server.reporting.page import AnnotatedClassGroup
from polyclinic.server.reporting.run_claims import describe_way_to_mean_auroc
from polyclinic.server.reporting.tables import make_class_auroc_table
from polyclinic.server.runs.reader import read_run
from polyclinic.studies.claims import (
    describe_headline_result,
    describe_method_verdicts,
    describe_site_gains,
    format_difference_interval,
)
from polyclinic.studies.comparison import MeanAndSd, MethodComparison, MethodResult, compare_methods, write_comparison
from polyclinic.studies.comparison_report import (
    comparison_as_markdown,
    draw_auroc_by_method,
    draw_auroc_by_subset,
    draw_gains_by_site,
    format_comparison_tables,
)
from tests.studies.made_runs import compared, metrics, run_of, summary

CLASSES = ("edema", "hernia", "mass", "nodule")


def aurocs(*values: float) -> dict[str, float]:
    return dict(zip(CLASSES, values, strict=True))


TWO_SEEDS = (
    summary("good", aurocs(0.8, 0.8, 0.8, 0.8), {"mass"}, seed=0),
    summary("good", aurocs(0.9, 0.9, 0.9, 0.9), {"edema"}, seed=1),
    summary("poor", aurocs(0.7, 0.6, 0.5, 0.4), {"mass"}, seed=0),
    summary("poor", aurocs(0.75, 0.65, 0.55, 0.45), {"edema"}, seed=1),
)
"""``good`` beats ``poor`` by .1 to .4 in seed 0 and by .15 to .45 in seed 1; the unique class differs by seed."""


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(content))
    lines = '{"round": 1, "absent": {"south": "late"}, "test_accuracy": {"mean": 0.5, "pooled": 0.6}}\n{"round": 2}\n'
    (folder / "rounds.jsonl").write_text(lines)
    return folder


def printed(table: RenderableType) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def multi_class_run(accuracy: float, seed: int = 0) -> dict[str, Any]:
    """A run with one class an image; its test set holds one class only, so that specificity is undefined."""
    content = summary("good", {"edema": 0.8}, seed=seed)
    content["test"]["multi_class"] = asdict(MultiClassMetrics(accuracy, accuracy, None, 0.6, 20))
    return content | {"client_accuracy": asdict(BestClientAccuracies(0.9, 4, 0.85, 2, {"north": 0.95, "south": 0.85}))}


def test_run_folders_with_and_without_one_class_an_image_are_read_as_they_were_written(tmp_path: Path) -> None:
    content = summary("good", {"edema": 0.8, "hernia": None}, {"edema"}, seed=3, something_newer=1)
    del content["test"]["multi_class"]  # as before there were such measures
    run = read_run(write(tmp_path / "run", content))
    assert run.summary.test.per_class["hernia"].auroc is None
    assert run.summary.test.unique_classes.classes == ("edema",)
    assert run.summary.available_metrics == {}
    assert [each.absent for each in run.rounds] == [{"south": "late"}, {}]
    assert run.rounds[0].test_accuracy == RoundAccuracy(0.5, 0.6)
    exclusive = read_run(write(tmp_path / "exclusive", multi_class_run(0.7))).summary
    assert exclusive.test.multi_class == MultiClassMetrics(0.7, 0.7, None, 0.6, 20)
    assert exclusive.client_accuracy == BestClientAccuracies(0.9, 4, 0.85, 2, {"north": 0.95, "south": 0.85})


def test_every_missing_file_a_wrong_value_and_a_torn_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        read_run(tmp_path)
    assert [Path(fault.where).name for fault in error.value.faults] == ["summary.json", "rounds.jsonl"]
    with pytest.raises(BadInput, match=r"summary\.json: rounds: "):
        read_run(write(tmp_path / "wrong", {"method": "surgical", "rounds": "many"}))
    folder = write(tmp_path / "torn", TWO_SEEDS[0])
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{"rou')
    with pytest.raises(BadInput, match=r"rounds\.jsonl line 2"):
        read_run(folder)


def test_a_method_is_averaged_over_its_seeds_with_the_sample_sd_and_each_seed_has_its_unique_classes() -> None:
    # Means over classes of "poor": .55 and .60 -> mean .575, sample SD .05 / sqrt(2) = .03536.
    # Its unique classes: mass in seed 0 (.5), edema in seed 1 (.75) -> mean .625.
    comparison = compared(*TWO_SEEDS)
    poor = comparison.methods[1]
    assert poor.seeds == (0, 1)
    assert (poor.auroc["all"].mean, poor.auroc["all"].sd) == pytest.approx((0.575, 0.035355), abs=1e-6)
    assert (poor.auroc["unique"].mean, poor.per_class["hernia"]) == pytest.approx((0.625, 0.625))
    # (0, mass): .8 - .5 = .3;  (1, edema): .9 - .75 = .15.
    result = comparison.find_method_contrast("poor", "unique", "classes x seeds").result
    assert (result.pairs, result.mean_difference) == (2, pytest.approx(0.225))
    assert comparison.class_groups == {"shared": ("hernia", "nodule"), "varies": ("edema", "mass")}
    one_seed = compared(TWO_SEEDS[0], TWO_SEEDS[2])
    assert {each.pairing for each in one_seed.contrasts} == {"classes"}
    assert one_seed.methods[0].auroc["all"].sd is None


def test_pooled_training_is_judged_on_the_reference_s_unique_classes_and_few_pairs_are_not_tested() -> None:
    federated = summary("good", {"edema": 0.8, "mass": 0.7}, {"mass"})
    pooled = summary("pooled", {"edema": 0.6, "mass": 0.5}, sites={"all": {"classes": ["edema", "mass"]}})
    comparison = compared(federated, pooled)
    assert comparison.methods[1].auroc["unique"].mean == 0.5
    (sentence,) = describe_method_verdicts(comparison)
    assert "2 pairs are too few" in sentence


def test_nothing_and_the_same_method_and_seed_twice_are_refused() -> None:
    with pytest.raises(BadInput, match="no run to compare"):
        compare_methods([])
    with pytest.raises(BadInput, match='"good" with seed 0'):
        compared(TWO_SEEDS[0], TWO_SEEDS[0])


def test_a_comparison_says_of_a_method_what_its_runs_say_of_themselves() -> None:
    contents = [summary("ours", {"mass": 0.8, "edema": 0.7}, seed=seed) for seed in (0, 1)]
    poor = [summary("theirs", {"mass": 0.5, "edema": 0.6}, seed=seed, best_round=2 - seed) for seed in (0, 1)]
    for content, (low, high) in zip(poor, ((0.4, 0.6), (0.51, 0.7)), strict=True):
        content["test"]["intervals"] = {"mean_auroc": None, "per_class": {"mass": (low, high)}, "over": "images"}
    cautions = [each for each in compared(*contents, *poor).cautions if each.startswith("theirs: ")]
    assert cautions == [
        "theirs: not detected better than by chance, because the 95 % interval does not lie above an AUROC of 0.5: "
        "“mass” (1 of 2 runs).",
        "theirs: with 1 seed of 2 (0) validation was best in the last round: more rounds may give a better model.",
    ]


def test_a_method_that_scores_all_images_alike_is_named_with_a_cause() -> None:
    alike = summary("theirs", {"mass": 0.5, "edema": 0.5})
    for result in alike["test"]["per_class"].values():
        result["average_precision"] = 30 / 39
    cautions = compared(summary("ours", {"mass": 0.8, "edema": 0.7}), alike).cautions
    (caution,) = [each for each in cautions if "one score" in each]
    assert caution.startswith("theirs: with 1 seed of 1 (0) the model gives all test images of every class one score.")
    assert "batch normalisation" in caution


def test_what_makes_a_comparison_uneven_and_an_initial_model_are_cautions() -> None:
    first = summary("first", {"edema": 0.8, "mass": None}, {"mass"}, contract_hash="a")
    second = summary("second", {"edema": 0.7, "mass": 0.7}, {"mass"}, contract_hash="b", best_round=0)
    more = summary("second", {"edema": 0.7, "mass": 0.7}, {"mass"}, seed=1, best_round=1)
    cautions = compared(first, second, more).cautions
    for words in (
        '"edema": fewer than 10 test images',
        'first: no AUROC for "mass"',
        "pairs come from the 1 they share",
        "same sites and labels",
        "second: with 1 seed of 2 (0)",
    ):
        assert [words in caution for caution in cautions].count(True) == 1, words
    assert len(cautions) == 5


def test_terminal_and_markdown_tables_have_the_same_figures_and_those_of_one_class_an_image_where_a_run_has_them() -> (
    None
):
    comparison = compared(*TWO_SEEDS)
    cells = ["0.575 ± 0.035", "0.625 ± 0.177", "+0.275"]
    shown, markdown = printed(format_comparison_tables(comparison)), comparison_as_markdown(comparison)
    assert all(cell in shown and cell in markdown for cell in cells)
    headings, _, _, poor = lines = markdown.splitlines()[2:6]  # below the title
    assert [line.count("|") for line in lines] == [7] * 4
    assert "| AUROC, unique | average precision | balanced accuracy |" in headings
    assert "| against | difference | 95 % interval | compared classes | reference is |" in markdown
    interval = format_difference_interval(comparison.find_method_contrast("poor").result)
    assert f"| poor | +0.275 | {interval} | 4 | too few seeds |" in markdown
    # In these runs all three measures of a class are equal, so "poor" has .575 +- .035 over all classes thrice.
    assert poor.count("0.575 ± 0.035") == 3
    exclusive = compared(multi_class_run(0.7), summary("poor", {"edema": 0.6}))
    shown, more = printed(format_comparison_tables(exclusive)), comparison_as_markdown(exclusive)
    assert all(word in shown and word in more for word in ("accuracy", "F1", "BMCTA", "BTA", "0.700"))
    assert [line.count("n/a") for line in more.splitlines() if line.startswith("| poor")][-1] == 5
    assert "BMCTA" not in markdown


def test_measures_of_one_class_an_image_are_averaged_over_seeds() -> None:
    # .7 and .8: mean .75, sample SD .1 / sqrt(2) = .0707. One seed alone has a BMCTA; specificity is undefined in both.
    (method,) = compared(multi_class_run(0.7), multi_class_run(0.8, seed=1) | {"client_accuracy": None}).methods
    assert method.measures["accuracy"].mean == pytest.approx(0.75)
    assert method.measures["accuracy"].sd == pytest.approx(0.0707107, abs=1e-6)
    assert method.measures["best_mean_client_test_accuracy"] == MeanAndSd(0.9, None)
    assert "specificity" not in method.measures


def test_intervals_are_averaged_over_the_seeds_that_have_them() -> None:
    first, second = (summary("good", {"edema": 0.7, "mass": 0.6}, seed=seed) for seed in (0, 1))
    first["test"]["intervals"] = {"mean_auroc": [0.5, 0.7], "per_class": {"edema": [0.5, 0.7]}}
    second["test"]["intervals"] = {"mean_auroc": [0.5, 0.7], "per_class": {"edema": [0.6, 1.0], "mass": [0.2, 0.8]}}
    (both,), (alone,) = compared(first, second).methods, compared(first).methods
    assert both.intervals == {"edema": pytest.approx((0.55, 0.85)), "mass": pytest.approx((0.2, 0.8))}
    assert alone.intervals == {"edema": (0.5, 0.7)}


def coverage(*contents: Mapping[str, Any]) -> str:
    return printed(make_class_auroc_table({content["name"]: run_of(content).summary for content in contents}))


def test_the_coverage_table_marks_or_counts_owners_and_marks_the_best_method() -> None:
    first = summary("first", {"edema": 0.8, "hernia": None, "mass": 0.7}, {"mass"})
    second = summary("[b]second", {"edema": 0.6, "hernia": None, "mass": 0.9}, {"mass"})
    lines = {line.split("│")[1].strip(): line for line in coverage(first, second).splitlines() if "│" in line}
    assert [lines[name].count("●") for name in ("edema", "mass")] == [2, 1]
    assert "★ 0.800 │" in lines["edema"]
    assert "★ 0.900 │" in lines["mass"]
    assert lines["hernia"].count("n/a") == 2
    assert list(lines).index("annotated by one site only") == list(lines).index("mass") - 1
    sites = {f"site{n:02}": {"classes": ["edema"]} for n in range(30)}
    assert "30 of 30" in coverage(summary("good", {"edema": 0.8}, sites=sites))  # instead of marks


def test_a_class_that_few_test_images_show_counts_in_no_mean_of_any_method_as_in_a_single_run() -> None:
    contents = []
    for name, rare in (("ours", 0.5), ("theirs", 0.9)):
        content = summary(name, {"edema": 0.8, "mass": 0.7})
        few = summarise_test_results({**metrics({"edema": 0.8}), **metrics({"mass": rare}, positives=29)}, (), ())
        contents.append({**content, "test": asdict(few)})
    comparison = compared(*contents)
    assert [method.auroc["all"].mean for method in comparison.methods] == [pytest.approx(0.8)] * 2
    assert comparison.methods[1].per_class == {"edema": 0.8, "mass": 0.9}
    assert comparison.find_method_contrast("theirs").result.mean_difference == pytest.approx(0)
    assert any("here without “mass” (29)" in caution for caution in comparison.cautions)


def test_without_a_class_that_enough_test_images_show_a_comparison_has_no_mean_and_says_why() -> None:
    contents = []
    for name in ("ours", "theirs"):
        few = summarise_test_results(metrics({"edema": 0.8, "mass": 0.7}, positives=12), (), ())
        contents.append({**summary(name, {"edema": 0.8, "mass": 0.7}), "test": asdict(few)})
    comparison = compared(*contents)
    assert [method.auroc["all"].mean for method in comparison.methods] == [None, None]
    assert comparison.find_method_contrast("theirs").result.mean_difference is None
    (caution,) = [each for each in comparison.cautions if "No mean AUROC can be given" in each]
    assert "fewer show “edema” (12) and “mass” (12)." in caution
    assert "A mean AUROC needs about 2.5 times as many test images" in caution  # 30 over 12


def test_a_class_that_enough_test_images_show_with_one_seed_only_has_a_mean_of_that_seed() -> None:
    contents = []
    for name in ("ours", "theirs"):
        for seed, positives in enumerate((29, 31)):
            test = summarise_test_results(metrics({"edema": 0.8}, positives=positives), (), ())
            contents.append({**summary(name, {"edema": 0.8}, seed=seed), "test": asdict(test)})
    comparison = compared(*contents)
    assert comparison.methods[0].auroc_by_seed["all"] == {0: None, 1: pytest.approx(0.8)}
    (caution,) = [each for each in comparison.cautions if "30 test images or more show" in each]
    assert caution.endswith("here without “edema” (29).")


def test_a_way_to_a_mean_auroc_names_the_key_of_a_table() -> None:
    few = asdict(summarise_test_results(metrics({"edema": 0.8}, positives=15), (), ()))
    tables = {"experiment": {"data": {"split_column": None}}}
    content = {**summary("ours", {"edema": 0.8}), "test": few}
    assert "2.0 times" in describe_way_to_mean_auroc(run_of(content).summary)
    assert "split_column" not in describe_way_to_mean_auroc(run_of(content).summary)
    assert "split_column = " in describe_way_to_mean_auroc(run_of(content | tables).summary)
    assert describe_way_to_mean_auroc(run_of(summary("ours", {"edema": 0.8})).summary) == ""


def test_methods_of_one_model_in_each_seed_are_said_to_be_the_same() -> None:
    every = {"sites": {"north": {"classes": CLASSES}, "south": {"classes": CLASSES}}}
    contents = [
        summary(name, dict.fromkeys(CLASSES, 0.8), seed=seed, model_sha256=f"{seed}", **every)
        for name in ("ours", "theirs")
        for seed in (0, 1)
    ]
    comparison = compared(*contents)
    assert comparison.same_models == {"theirs": True}
    headline = describe_headline_result(comparison)
    assert headline == "ours and theirs end with the same model in each seed, because every site annotates every class."
    (verdict,) = describe_method_verdicts(comparison)
    assert verdict.startswith("theirs is the same model as ours in each seed")
    assert "no label is missing" in verdict


def test_the_same_model_with_missing_labels_has_another_reason() -> None:
    contents = [
        summary(name, dict.fromkeys(CLASSES, 0.8), CLASSES[:1], model_sha256="a") for name in ("ours", "theirs")
    ]
    comparison = compared(*contents)
    assert comparison.same_models == {"theirs": False}
    assert "every class" not in describe_headline_result(comparison)
    assert "no label is missing" not in describe_method_verdicts(comparison)[0]


def test_the_same_initial_model_has_another_reason() -> None:
    every = {"sites": {"north": {"classes": CLASSES}}, "best_round": 0, "model_sha256": "a"}
    comparison = compared(*(summary(name, dict.fromkeys(CLASSES, 0.8), **every) for name in ("ours", "theirs")))
    assert comparison.same_models == {"theirs": False}


def test_methods_that_differ_in_one_seed_are_compared() -> None:
    contents = [
        summary(name, dict.fromkeys(CLASSES, 0.8), seed=seed, model_sha256=sha256)
        for name, seed, sha256 in (("ours", 0, "a"), ("theirs", 0, "a"), ("ours", 1, "b"), ("theirs", 1, "c"))
    ]
    assert compared(*contents).same_models == {}


def test_classes_of_which_nothing_is_found_at_one_half_are_named_with_the_way_out() -> None:
    none_found = DecisionCounts(0, 30, 2, 168)
    point = OperatingPoint("youden", None, 0.2, (30, 30), none_found)
    test = replace(
        summarise_test_results(metrics({"edema": 0.9}), (), ()),
        quality=ScoreQuality({}, {"edema": none_found}),
        operating_points={"edema": (point,)},
    )
    content = {**summary("ours", {"edema": 0.9}), "test": asdict(test)}
    (caution,) = [each for each in compared(content).cautions if "sensitivity 0" in each]
    assert "“edema” (1 of 1 run)" in caution
    assert "Thresholds chosen on validation images" in caution


def test_figures_with_an_error_are_not_compared() -> None:
    content = [summary(name, dict.fromkeys(CLASSES, 0.8)) for name in ("exact", "summed")]
    for test in (content[1]["test"], *content[1]["test"]["per_class"].values()):
        test["errors"] = {"auroc": 0.004}
    comparison = compared(*content)
    exact, summed = comparison.methods
    assert (exact.auroc["all"].mean, summed.auroc["all"].mean) == (pytest.approx(0.8), None)
    assert comparison.find_method_contrast("summed", "all").result.mean_difference is None
    assert any("error (±)" in caution for caution in comparison.cautions)


def a_method(
    label: str, *, sd: float | None = None, unique: float | None = None, per_class: Mapping[str, float] | None = None
) -> MethodResult:
    spreads = {"all": MeanAndSd(0.8, sd), "shared": MeanAndSd(0.9, sd), "unique": MeanAndSd(unique, None)}
    none = MeanAndSd(None, None)
    return MethodResult(label, (0,), "", spreads, none, none, per_class or {}, {}, {})


def test_a_method_without_a_subset_has_no_marker_there_and_one_seed_no_line() -> None:
    svg = ElementTree.fromstring(draw_auroc_by_subset([a_method("one"), a_method("two", sd=0.01, unique=0.7)]))
    markers = [group.get("style", "") for group in svg.iter("g")]
    lines = [path.get("style", "") for path in svg.iter("path") if "stroke-width: 2" in path.get("style", "")]
    assert sum("fill: var(--blue)" in style for style in markers) == 2 + 1  # and one in the legend
    assert sum("fill: var(--vermilion)" in style for style in markers) == 3 + 1
    assert sum("var(--vermilion)" in style for style in lines) == 2


def test_a_class_axis_reaches_to_chance_only_where_values_are_near() -> None:
    for low, line in ((0.6, True), (0.98, False)):
        method = a_method("a", per_class={"edema": low, "mass": 0.99})
        drawn = draw_auroc_by_method([method], [AnnotatedClassGroup("shared", ("edema", "mass"))])
        assert ("stroke-dasharray" in drawn) == line, low


Aurocs = Mapping[str, Mapping[str, float | None]]  # site -> class -> AUROC at that site
Content = dict[str, Any]


def run(name: str, aurocs: Aurocs, **more: Any) -> Content:
    per_site = {
        site: {"per_class": {c: asdict(ClassMetrics(a, a, a, 30, 9)) for c, a in of_site.items()}}
        for site, of_site in aurocs.items()
    }
    sites = {site: {"classes": list(of_site)} for site, of_site in aurocs.items()}
    classes = sorted({c for of_site in aurocs.values() for c in of_site})
    return summary(name, dict.fromkeys(classes, 0.5), **{"sites": sites, "per_site": per_site, **more})


def seeds_of(name: str, aurocs: Aurocs, changes: Sequence[float] = (0.0, 0.0, 0.0)) -> list[Content]:
    """Make a run for each change, which is added to every AUROC."""
    return [
        run(name, {site: {c: a + change for c, a in of_site.items()} for site, of_site in aurocs.items()}, seed=seed)
        for seed, change in enumerate(changes)
    ]


GOOD = {"north": {"edema": 0.9, "mass": 0.7}, "south": {"edema": 0.6}}
ALONE = {"north": {"edema": 0.8, "mass": 0.74}, "south": {"edema": 0.65}}


@pytest.fixture
def two() -> MethodComparison:
    return compared(run("good", GOOD), run("individual", ALONE))


def test_a_gain_is_the_mean_difference_over_the_site_s_classes_and_then_over_seeds(two: MethodComparison) -> None:
    north, south = two.site_gains
    # north: (.9 - .8 + .7 - .74) / 2; one of its two classes is worse
    assert (north.gain, north.auroc, north.other_auroc) == pytest.approx((0.03, 0.8, 0.77))
    assert (north.classes, north.losses, north.sd) == (("edema", "mass"), 1, None)
    assert south.gain == pytest.approx(-0.05)
    undefined = {"north": {"edema": 0.8, "mass": None}, "south": {"edema": 0.6}}
    north = compared(run("good", GOOD), run("x", undefined)).site_gains[0]
    assert (north.classes, north.gain) == (("edema",), pytest.approx(0.1))
    # .03 and .01: mean .02, sample SD .01 * sqrt(2)
    other = {"north": {"edema": 0.84, "mass": 0.74}, "south": {"edema": 0.6}}
    again = (run("good", GOOD, seed=1), run("individual", other, seed=1))
    north = compared(run("good", GOOD), run("individual", ALONE), *again).site_gains[0]
    assert (north.gain, north.sd, north.seeds) == (pytest.approx(0.02), pytest.approx(0.01 * 2**0.5), (0, 1))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            (0.0,),
            "Beside training alone (individual), with too few seeds for a verdict, which needs 3: "
            "north +0.030 (0.770 → 0.800) and south −0.050 (0.650 → 0.600).",
        ),
        (
            (0.0, 0.001, 0.002),
            "1 of 2 sites gains over training alone (individual): north +0.031 (0.770 → 0.801). "
            "1 of 2 sites loses against it: south −0.049 (0.650 → 0.601).",
        ),
        (
            (-0.04, 0.0, 0.05),
            "Not distinguishable from training alone (individual) at 2 sites: "
            "north +0.033 (0.770 → 0.803) and south −0.047 (0.650 → 0.603).",
        ),
    ],
    ids=["one seed", "clear", "within the seeds' spread"],
)
def test_a_board_reads_who_gains_and_who_loses(changes: Sequence[float], sentence: str) -> None:
    comparison = compared(*seeds_of("good", GOOD, changes), *seeds_of("individual", ALONE))
    assert describe_site_gains(comparison) == [sentence]


def test_sites_are_corrected_for_their_number() -> None:
    sites = {f"s{n:02}": {"edema": 0.7} for n in range(40)}
    gain = compared(*seeds_of("good", sites, (0.01, 0.02, 0.03)), *seeds_of("x", sites)).site_gains[0]
    p = ttest_1samp([0.01, 0.02, 0.03], 0.0).pvalue
    assert (gain.p, gain.verdict) == (pytest.approx(min(1.0, 40 * p)), "open")


UNDEFINED = {"north": {"edema": None, "mass": None}, "south": {"edema": None}}


@pytest.mark.parametrize(
    ("other", "more", "reason"),
    [
        ({"pooled": {"edema": 0.8, "mass": 0.8}}, {}, "it has no such site"),
        ({"north": {"edema": 0.8}, "south": {"edema": 0.7}}, {}, "the site annotates other classes there"),
        (UNDEFINED, {}, "no class of the site has an AUROC with both"),
        (GOOD, {"per_site": {}}, "the site was not tested with both"),
        (GOOD, {"seed": 7}, "no seed in common"),
    ],
)
def test_what_cannot_be_compared_has_its_reason(other: Aurocs, more: dict[str, Any], reason: str) -> None:
    north = compared(run("good", GOOD), run("x", other, **more)).site_gains[0]
    assert (north.gain, north.reason) == (None, reason)


def test_other_test_images_are_not_compared() -> None:
    other = json.loads(json.dumps(run("x", GOOD)).replace('"positives": 30', '"positives": 31'))
    comparison = compared(run("good", GOOD), other)
    reason = "it was tested on other images there"
    assert {gain.reason for gain in comparison.site_gains} == {reason}
    assert describe_site_gains(comparison) == [f"No site can be compared with x: {reason}."]
    assert draw_gains_by_site(comparison) == ""


def test_an_ensemble_of_local_models_is_compared_as_a_method_of_its_own() -> None:
    per_site = {"south": {"per_class": {"edema": asdict(metrics({"edema": 0.5})["edema"])}}}
    ensemble = {
        "test": asdict(summarise_test_results(metrics({"edema": 0.75}), (), (), "ensemble")),
        "per_site": per_site,
    }
    comparison = compared(run("good", GOOD), run("individual", ALONE, ensemble=ensemble))
    assert [method.label for method in comparison.methods] == ["good", "individual", "individual (ensemble)"]
    assert comparison.methods[2].per_class == {"edema": 0.75}
    assert comparison.site_gains[-1].gain == pytest.approx(0.1)
    assert "an ensemble of models trained alone" in describe_site_gains(comparison)[1]


def test_the_json_file_has_every_test_and_every_gain(tmp_path: Path, two: MethodComparison) -> None:
    written = json.loads(write_comparison(compared(*TWO_SEEDS), tmp_path / "comparison.json").read_text())
    assert (written["reference"], len(written["contrasts"])) == ("good", 6)
    assert written["methods"][1]["auroc"]["all"]["mean"] == pytest.approx(0.575)
    gains = json.loads(write_comparison(two, tmp_path / "gains.json").read_text())["site_gains"]
    assert [gain["site"] for gain in gains] == ["north", "south"]


def test_many_sites_are_counted_in_words_and_ranked_in_the_figure() -> None:
    many = {f"site{n:02}": {"edema": 0.5 + n / 100} for n in range(40)}
    comparison = compared(run("good", many), run("x", {site: {"edema": 0.5} for site in many}))
    sentence = describe_site_gains(comparison)[0]
    assert "site39 +0.390" in sentence
    assert sentence.endswith("and 35 more.")
    assert len({gain.site for gain in comparison.site_gains}) == 40
    assert "from the largest loss" in draw_gains_by_site(comparison)
