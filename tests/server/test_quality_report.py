"""Facts about the report's intervals, calibration, decisions, confusion and pooled values."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest

from common.metrics.auroc import GLOBAL_MODEL, Summary, per_class, summarise
from common.metrics.bootstrap import auroc_intervals
from common.metrics.calibration import OperatingPoint, operating_points, quality
from common.metrics.measured import Measured, figure
from common.metrics.multi_class import multi_class
from common.metrics.pooled import pool_sites, sum_histograms
from common.metrics.score_histograms import score_histogram
from common.system.plain_text import format_interval
from server.reporting.run_claims import prominent_limits
from server.reporting.run_report import mean_of_sites, write_run_report
from server.runs.reader import read_run
from tests.server.reports import body_text, check_page, write

NAMES = ("edema", "hernia", "$x_1$ & <i>node</i>")


def scored(count: int = 240) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One class an image."""
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, count)
    logits = rng.normal(size=(count, 3)) + 2 * np.eye(3)[truth]
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), np.eye(3)[truth]


def own_images() -> Summary:
    scores, labels = scored()
    patients, rng = np.arange(len(labels)).astype(str), np.random.default_rng(0)
    return replace(
        summarise(per_class(scores, labels, NAMES), {"edema"}, set()),
        multi_class=multi_class(scores, labels),
        intervals=auroc_intervals(scores, labels, patients, NAMES, rng),
        quality=quality(scores, labels, NAMES, "multi_class"),
        operating_points=points(),
    )


def points() -> dict[str, tuple[OperatingPoint, ...]]:
    """Thresholds of the first two classes; of one they were chosen on few images."""
    scores, labels = scored()
    spread = [score_histogram(scores[:, c], labels[:, c]) for c in range(2)]
    few = score_histogram(scores[:30, 1], labels[:30, 1])
    return operating_points({NAMES[0]: spread[0], NAMES[1]: few}, dict(zip(NAMES, spread, strict=False)), 0.95)


def told_by_sites() -> Summary:
    """Two sites tell of edema, one of the node; nobody tells of hernia."""
    scores, labels = scored()
    halves = {"north": slice(0, None, 2), "south": slice(1, None, 2)}
    told = {
        site: {NAMES[c]: score_histogram(scores[rows, c], labels[rows, c]) for c in columns}
        for (site, rows), columns in zip(halves.items(), ((0, 2), (0,)), strict=True)
    }
    owners = dict.fromkeys(NAMES, ("north", "south"))
    results = per_class(scores, labels, NAMES)
    return replace(
        summarise(results, {"edema"}, set(), "mean over the sites' own test parts"),
        pooled=pool_sites(sum_histograms(told, owners), owners, np.random.default_rng(4)),
    )


def report(folder: Path, test: Summary) -> str:
    written = write(folder, test=asdict(test), classes=NAMES)
    return write_run_report(written).read_text(encoding="utf-8")


@pytest.mark.parametrize("test", [own_images(), told_by_sites()], ids=["own", "told"])
def test_the_report_is_whole_and_the_summary_comes_back_as_it_was_written(test: Summary, tmp_path: Path) -> None:
    check_page(report(tmp_path / "run", test))
    assert read_run(tmp_path / "run").summary.test == test


def test_intervals_stand_beside_each_auroc_and_as_whiskers_on_its_bar(tmp_path: Path) -> None:
    test = own_images()
    html = report(tmp_path / "run", test)
    assert test.intervals
    for name, interval in test.intervals.per_class.items():
        assert f"{test.per_class[name].auroc:.3f} {format_interval(interval)}" in body_text(html)
    assert f"95 % interval of the mean over classes is {format_interval(test.intervals.mean_auroc)}" in body_text(html)
    without = report(tmp_path / "other", replace(test, intervals=None))
    assert "bootstrap" not in body_text(without)
    bars, plain = (
        re.findall(r'<svg role="img" aria-label="Bar.*?</svg>', text, re.DOTALL)[0] for text in (html, without)
    )
    assert bars.count("currentColor") > plain.count("currentColor")


def test_decisions_confusion_and_calibration_are_those_of_the_summary(tmp_path: Path) -> None:
    test = own_images()
    text = body_text(report(tmp_path / "run", test))
    assert test.quality
    assert test.quality.confusion
    for name, made in test.quality.decisions.items():
        calibrated = test.quality.calibration[name]
        counts = f"{made.true_positives}{made.false_negatives}{made.false_positives}{made.true_negatives}"
        shares = f"{made.sensitivity:.3f}{made.specificity:.3f}{made.f1:.3f}"
        assert f"{name}{counts}{shares}{calibrated.expected_error:.3f}{calibrated.brier:.3f}" in text
    cells = [str(count) for row in test.quality.confusion for count in row if count]
    assert " ".join(cells) in text
    assert "Which class is taken for which" in text
    assert "pooled" not in text


def test_thresholds_chosen_on_validation_have_their_shares_with_intervals(tmp_path: Path) -> None:
    html = body_text(report(tmp_path / "run", own_images()))
    for name, (youden, sensitive) in points().items():
        for rule, point in (("Youden", youden), ("sensitivity ≥ 0.95", sensitive)):
            made, (with_it, without) = point.decisions, point.chosen_on
            shares = [
                (made.true_positives, made.false_negatives),
                (made.true_negatives, made.false_positives),
                (made.true_positives, made.false_positives),
                (made.true_negatives, made.false_negatives),
            ]
            cells = []
            for part, rest in shares:
                ends = binomtest(part, part + rest).proportion_ci(method="wilson")
                cells.append(f"{100 * part / (part + rest):.0f} % ({100 * ends.low:.0f}–{100 * ends.high:.0f})")
            assert "".join([name, rule, f"{point.threshold:.4g}{with_it} + {without}", *cells]) in html
    assert "quite another threshold: hernia." in html
    assert "none without it was reported: $x_1$ & <i>node</i>." in html


def test_pooled_values_stand_beside_the_mean_of_sites_and_what_no_site_told_is_unknown(tmp_path: Path) -> None:
    test = told_by_sites()
    text = body_text(report(tmp_path / "run", test))
    assert test.pooled
    edema = test.pooled.per_class["edema"]
    assert f"edema{test.per_class['edema'].auroc:.3f}{figure(edema.auroc)} {format_interval(edema.interval)}" in text
    assert "by chance" not in text
    assert "unknown: no site told" in text
    assert "2 of 2" in text
    assert "1 of 2" in text
    assert "known to within 0.00" in text
    over = [test.per_class[name].auroc for name in (NAMES[0], NAMES[2])]
    assert mean_of_sites(test)[0] == pytest.approx(np.mean([each for each in over if each is not None]))


BY_CHANCE = "the 95 % interval of the test images of all sites that report the class includes an AUROC of 0.5"


@pytest.mark.parametrize(
    ("auroc", "interval", "judged"),
    [
        (Measured(0.53), (0.45, 0.61), True),
        (Measured(0.53, 0.02), (0.45, 0.61), True),
        (Measured(0.60, 0.04), (0.47, 0.73), False),  # 0.03 higher, it lies above 0.5
        (Measured(0.63, 0.204), (0.36, 0.90), False),  # the page prints no AUROC either
    ],
)
def test_a_pooled_interval_that_includes_chance_is_a_verdict_only_where_the_error_cannot_change_it(
    auroc: Measured, interval: tuple[float, float], judged: bool, tmp_path: Path
) -> None:
    test = told_by_sites()
    assert test.pooled
    guessed = replace(test.pooled.per_class["edema"], interval=interval, auroc=auroc)
    pooled_too = replace(test.pooled, per_class={**test.pooled.per_class, "edema": guessed})
    text = body_text(report(tmp_path / "run", replace(test, pooled=pooled_too)))
    assert (f"“edema” is not detected better than by chance: {BY_CHANCE}" in text) == judged


def test_a_run_written_before_there_was_any_of_it_still_has_a_report(tmp_path: Path) -> None:
    old = {
        name: value for name, value in asdict(own_images()).items() if name not in ("intervals", "quality", "pooled")
    }
    html = write_run_report(write(tmp_path / "run", test=old, classes=NAMES)).read_text(encoding="utf-8")
    assert "Calibration and decisions" not in html


def test_a_figure_has_no_digit_below_its_error_and_the_exact_one_lies_within_what_is_printed() -> None:
    assert figure(Measured(0.75, 0.01)) == "0.75 ± 0.01"
    assert figure(Measured(0.7449, 0.01)) == "0.74 ± 0.02"  # 0.7549 is possible
    assert figure(Measured(0.75001, 0.00001)) == "0.750 ± 0.001"
    assert figure(Measured(0.75001)) == "0.750"
    assert figure(Measured(0.9, 0.051)) == "n/a: error above 0.05"
    assert figure(None) == "n/a"


def test_counts_of_test_images_are_added_up_over_sites_only_where_the_score_is_a_mean_over_them() -> None:
    test = told_by_sites()
    most = replace(test.per_class["edema"], positives=3, negatives=4)
    test = replace(test, per_class={**test.per_class, "edema": most})
    assert test.pooled
    edema = test.pooled.per_class["edema"]
    assert test.counts("edema") == (edema.positives, edema.negatives)
    assert replace(test, note=GLOBAL_MODEL).counts("edema") == (3, 4)
    assert replace(test, pooled=None).counts("edema") == (3, 4)


def test_a_class_whose_head_row_stayed_masked_in_every_round_is_named_as_not_learned(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    closed = [["edema", "mass"], *[["mass"]] * (len(lines) - 1)]
    text = "".join(json.dumps({**line, "closed_rows": rows}) + "\n" for line, rows in zip(lines, closed, strict=True))
    (folder / "rounds.jsonl").write_text(text, encoding="utf-8")
    names = "“mass” was not learned: its head row stayed masked in every round"
    assert any(names in limit for limit in prominent_limits(read_run(folder)))
