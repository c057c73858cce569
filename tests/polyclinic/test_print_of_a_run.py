"""Python says of a run what its page says: the same sentences, and no figure that the page does not give."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import polyclinic as pc
from polyclinic.common.metrics.auroc import GLOBAL_MODEL_NOTE, ClassMetrics, summarise_test_results
from polyclinic.common.metrics.bootstrap import AurocIntervals
from polyclinic.common.metrics.calibration import DecisionCounts, OperatingPoint, ScoreQuality
from polyclinic.server.reporting.run_report import write_run_report
from tests.server.reports import NAMES, RESULTS, SITES, write

FEW = {name: replace(result, positives=9) if result.positives else result for name, result in RESULTS.items()}
NONE = {name: ClassMetrics(None, None, None, 0, 200) for name in NAMES}
SAME = {
    name: replace(result, auroc=0.5, average_precision=(result.positives or 0) / 200, balanced_accuracy=0.5)
    for name, result in RESULTS.items()
    if result.positives
}
POOR = ScoreQuality({}, {"mass": DecisionCounts(0, 30, 2, 168)})
CHOSEN = {"mass": (OperatingPoint("youden", None, 0.125, (40, 60), DecisionCounts(20, 10, 2, 168)),)}


def of(results: dict[str, ClassMetrics], note: str = GLOBAL_MODEL_NOTE, **more: Any) -> dict[str, Any]:
    return {"test": asdict(replace(summarise_test_results(results, {"edema"}, set(NAMES[2:]), note), **more))}


def sites(south: list[str] = SITES["south"], x: list[str] = SITES["<b>x</b>"], **more: Any) -> dict[str, Any]:
    counts = {"train_samples": 1200, "validation_samples": 90, **more}
    classes = {**SITES, "<b>x</b>": x, "south": south}
    return {"sites": {name: {"classes": names, **counts} for name, names in classes.items()}}


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "one score for all images": (of(SAME), "The model gives all test images of every class one score"),
    "the initial model was best": ({"best_round": 0}, "all figures are of the initial model"),
    "no class is both positive and negative": (of(NONE), "none of 5 classes has an AUROC"),
    "few test images": (of(FEW), "no mean AUROC can be given: at most 9 of the test images show a class"),
    "some classes have few test images": ({}, "that 30 test images or more show, without 结节 (20)"),
    "withheld by noise": (of(NONE, withheld="noise covers no figure"), "not tested"),
    "a class was not tested": ({}, "“hernia” (no positive test image)"),
    "a site was left out as harmful": ({"excluded": {"north": "its trunk moves too far"}}, "north harmed the model"),
    "a site was absent": ({}, "south took part in no round: the model was trained without it"),
    "absent in several rounds": ({}, "south was absent in 3 of 3 rounds"),
    "a class that nobody trained": (sites(south=["edema", "mass"], x=["edema"]), "“mass” was never trained"),
    "a class of one site": ({}, "are annotated by north alone"),
    "not reproducible": ({"notes": ["This run is not reproducible."]}, "This run is not reproducible."),
    "a note of the label table": ({"notes": ["Column “x” counts as no class."]}, "Column “x” counts as no class."),
    "patients unknown": ({"patients_known": False}, "does not say which images belong to one patient"),
    "unreadable pictures": ({"skipped_images": [{"name": "a.png", "reason": "truncated"}]}, "a.png"),
    "stopped early": ({"experiment": {"run": {"rounds": 9}}}, "ended after 3 of at most 9 rounds"),
    "best in the last round": ({"best_round": 3}, "more rounds may give a better model"),
    "no round chosen": ({"last_model_because": "two sites state figures"}, "No best round was chosen"),
    "few validation images": (sites(validation_samples=4), "Few validation images chose the tested model"),
    "statements that do not count": (
        {"statistics": {"counted": ["north"], "uncounted": {"south": "late"}}},
        "What south states has no part",
    ),
    "a lowered claim": (
        {"statistics": {"lowered": {"north": {"claimed": 9000, "counted": 100}}}},
        "north claims 9,000 training images",
    ),
    "hidden counts": (sites(positives={"mass": None}), "too few patients to tell a count"),
    "sites drawn to test": ({"drawn_to_test": ["north"]}, "drawn at random"),
    "scored by the sites": (of(RESULTS, "mean over the sites' own test parts"), "The score is the mean over the sites"),
    "no better than chance": (
        of(RESULTS, intervals=AurocIntervals((0.5, 0.8), {"mass": (0.3, 0.6)}, over="images")),
        "chance",
    ),
    "no positive found at 0.5": (of(RESULTS, quality=POOR), "finds none of the positive test images of “mass”"),
    "thresholds chosen on validation": (
        of(RESULTS, quality=POOR, operating_points=CHOSEN),
        "Thresholds chosen on validation images are on the run's page under “Thresholds chosen on validation images”: "
        "0.125 for “mass”.",
    ),
    "one seed": ({}, "This is one run, with seed 1"),
}


def sentences_of_the_page(root: ElementTree.Element) -> list[str]:
    """Return result, cautions and limits as the page shows them."""
    header = root.find(".//header")
    assert header is not None
    top = [p for p in header.findall("p") if p.get("class") in ("lead", "caution")]
    lists = [section.findall("ul/li") for section in root.iter("section") if is_about_limits(section)]
    return ["".join(each.itertext()) for each in (*top, *(limit for items in lists for limit in items))]


def is_about_limits(section: ElementTree.Element) -> bool:
    return section.findtext("h2") == "What this run does not show"


def mean_tile(root: ElementTree.Element) -> str | None:
    tiles = {tile.findtext("span"): tile.findtext("strong") for tile in root.iterfind(".//ul[@class='tiles']/li")}
    return tiles["mean AUROC"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_is_printed_with_every_sentence_of_its_page(kind: str, tmp_path: Path) -> None:
    changes, words = KINDS[kind]
    run = pc.load(write(tmp_path / "run", **changes))
    root = ElementTree.fromstring(write_run_report(run.folder).read_text(encoding="utf-8"))
    page, lines = sentences_of_the_page(root), str(run).splitlines()
    assert [run.result, *run.notes] == page
    assert [line.removeprefix("! ").removeprefix("- ") for line in lines if not line.startswith("What")][:-1] == page
    assert any(words in sentence for sentence in page)
    html = "".join(ElementTree.fromstring(f"<div>{run._repr_html_()}</div>").itertext())
    assert all(sentence in html for sentence in page)
    assert mean_tile(root) == ("n/a" if run.mean_auroc is None else f"{run.mean_auroc:.3f}")


def test_a_mean_of_few_images_is_none_with_its_reason(tmp_path: Path) -> None:
    run = pc.load(write(tmp_path / "run", **of(FEW), best_round=0))
    assert run.summary["test"]["mean_auroc"] is not None
    assert run.mean_auroc is None
    for text in (run.result, str(run), repr(run), run._repr_html_()):
        assert "no mean AUROC can be given: at most 9 of the test images show a class" in text
        assert not re.search(r"mean AUROC (is )?0\.", text)
    assert "all figures are of the initial model" in run.notes[0]


def test_no_sentence_says_that_validation_chose_a_round_where_it_chose_none(tmp_path: Path) -> None:
    few = sites(validation_samples=4)
    run = pc.load(write(tmp_path / "run", **few, best_round=3, last_model_because="two sites state figures"))
    assert [note for note in run.notes if "No best round was chosen by validation" in note]
    assert not [note for note in run.notes if "chose the tested model" in note or "Validation was best" in note]


def test_a_tie_with_the_initial_model_is_not_called_better(tmp_path: Path) -> None:
    run = pc.load(write(tmp_path / "run", best_round=0))
    assert run.notes[0].startswith("In 3 rounds validation did not get better than before training: all figures")


def test_a_model_of_different_scores_with_an_auroc_of_one_half_gives_not_one_score(tmp_path: Path) -> None:
    mixed = {name: replace(result, average_precision=0.31) for name, result in SAME.items()}
    run = pc.load(write(tmp_path / "run", **of(mixed)))
    assert not [note for note in run.notes if "one score" in note]


def test_the_mean_of_the_initial_model_is_never_shown_without_that_word(tmp_path: Path) -> None:
    run = pc.load(write(tmp_path / "run", best_round=0))
    assert f"mean AUROC {run.mean_auroc:.3f} of the initial model" in repr(run)


def test_a_class_has_the_figures_of_the_page_or_the_reason_why_not(tmp_path: Path) -> None:
    classes = pc.load(write(tmp_path / "run")).classes
    assert list(classes.index) == NAMES
    assert classes.loc["edema", "auroc"] == 0.81
    assert classes.loc["edema", "note"] == ""
    assert classes.loc["hernia", "note"] == "no positive test image"
    assert classes.loc["hernia", ["auroc", "average_precision", "low", "high"]].isna().all()
    assert classes.loc["hernia", "negatives"] == 200


def test_a_metric_of_ones_own_is_in_the_table_of_classes_and_in_print(tmp_path: Path) -> None:
    own = "plugin:own-share-0123456789ab"
    results = {name: replace(result, more={own: result.auroc and 0.25}) for name, result in RESULTS.items()}
    run = pc.load(write(tmp_path / "run", **of(results)))
    assert run.classes["share"].dropna().to_dict() == dict.fromkeys((n for n in NAMES if n != "hernia"), 0.25)
    for text in (str(run), run._repr_html_()):
        assert "Metrics of your own, mean over the classes: share 0.250." in text


def test_two_metrics_of_one_name_and_one_that_is_called_like_a_column_keep_their_full_names(tmp_path: Path) -> None:
    names = [f"plugin:own-{name}-0123456789ab" for name in ("auroc", "share")] + ["plugin:own-share-ba9876543210"]
    results = {name: replace(result, more=dict.fromkeys(names, 0.25)) for name, result in RESULTS.items()}
    run = pc.load(write(tmp_path / "run", **of(results)))
    assert set(names) <= set(run.classes.columns)
    assert run.classes.loc["edema", "auroc"] == 0.81


def test_a_table_is_printed_with_all_its_columns(tmp_path: Path) -> None:
    classes = pc.load(write(tmp_path / "run")).classes
    with pd.option_context("display.max_columns", 4):
        text = str(classes)
    assert set(classes.columns) <= set(text.split())
    assert "..." not in text


def test_the_summary_holds_the_same_sentences_for_programs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = pc.simulate("digits_surgical", settings={"run.rounds": 2, "simulation.backend": "inline"}, out=out)
    claims = json.loads((out / "summary.json").read_text(encoding="utf-8"))["claims"]
    assert (claims["result"], *claims["cautions"], *claims["limits"]) == (run.result, *run.notes)
    assert (claims["mean_auroc"], claims["no_mean_because"]) == (run.mean_auroc, "")
