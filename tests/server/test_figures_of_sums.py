"""Figures that are sums over sites, within their stated errors; the report's intervals, calibration and decisions."""

import json
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from polyclinic.common.metrics.auroc import (
    FIGURES,
    GLOBAL_MODEL_NOTE,
    SUMMED_HISTOGRAMS_NOTE,
    ClassMetrics,
    FinalTestSummary,
    compute_metrics_per_class,
    summarise_test_results,
)
from polyclinic.common.metrics.bootstrap import bootstrap_auroc_intervals
from polyclinic.common.metrics.calibration import choose_operating_points, compute_score_quality
from polyclinic.common.metrics.measured import (
    LARGE_ERROR_NOTE,
    MAX_METRIC_ERROR,
    ValueWithError,
    format_value_with_error,
)
from polyclinic.common.metrics.multi_class import compute_multi_class_metrics
from polyclinic.common.metrics.pooled import compute_pooled_metrics, sum_site_histograms
from polyclinic.common.metrics.score_histograms import compute_score_histogram
from polyclinic.common.system.plain_text import format_interval
from polyclinic.server.federation.evaluation import compute_class_metrics_from_sums
from polyclinic.server.reporting.run_claims import (
    HIGH_AUROC,
    LOW_BALANCED_ACCURACY,
    explain_missing_auroc,
    list_prominent_limitations,
)
from polyclinic.server.reporting.run_report import compute_means_over_sites, write_run_report
from polyclinic.server.runs.reader import read_run
from tests.network.real import lines_of
from tests.server.reports import body_text, check_page, write

SITES = ("east", "north", "south")
RUNS = 200


def made_up(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw scores and labels of one class at three sites of 20 to 100 images each, with many ties in some runs."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3 * 20, 3 * 100))
    labels = (rng.random(n) < rng.uniform(0.05, 0.95)).astype(float)
    labels[:2] = 0, 1
    logits = rng.normal(rng.uniform(-8, 4), rng.uniform(0.01, 3), n) + labels * rng.uniform(-1, 5)
    scores = 1 / (1 + np.exp(-logits))
    return (np.round(scores, int(rng.integers(1, 4))) if seed % 3 == 0 else scores), labels


@cache
def exact(seed: int) -> tuple[float, float, float]:
    """Return scikit-learn's figures, in the order of ``FIGURES``."""
    scores, labels = made_up(seed)
    return (
        float(roc_auc_score(labels, scores)),
        float(average_precision_score(labels, scores)),
        float(balanced_accuracy_score(labels, scores > 0.5)),
    )


def by_sums(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> ClassMetrics:
    """Return the class's result where the coordinator has the sum of three sites' histograms."""
    histograms = {
        site: {"mass": compute_score_histogram(scores[at::3], labels[at::3])} for at, site in enumerate(SITES)
    }
    owners = {"mass": SITES}
    pooled = compute_pooled_metrics(sum_site_histograms(histograms, owners), owners)
    return compute_class_metrics_from_sums(pooled.per_class["mass"] if pooled else None)


def printed(text: str) -> tuple[float, float]:
    """Read a figure and its error as a page has them; half a unit of the last digit where there is no error."""
    value, _, error = text.partition(" ± ")
    return float(value), float(error) if error else 0.5 * 10.0 ** -len(value.partition(".")[2])


def test_each_printed_figure_of_a_sum_lies_within_its_stated_error_of_scikit_learns() -> None:
    for run in range(RUNS):
        result = by_sums(*made_up(run))
        for name, true in zip(FIGURES, exact(run), strict=True):
            shown = format_value_with_error(result.metric_with_error(name))
            if shown == "n/a":
                assert result.errors[name] > MAX_METRIC_ERROR
                continue
            value, error = printed(shown)
            assert abs(value - true) <= error + 1e-9, (run, name, shown, true)


def test_where_figures_are_exact_they_are_scikit_learns_to_the_printed_digit() -> None:
    for run in range(RUNS):
        scores, labels = made_up(run)
        result = compute_metrics_per_class(scores[:, None], labels[:, None], ["mass"])["mass"]
        shown = [format_value_with_error(result.metric_with_error(name)) for name in FIGURES]
        assert shown == [f"{true:.3f}" for true in exact(run)]


def test_no_pair_of_printed_figures_is_impossible_and_no_verdict_is_unfounded(tmp_path: Path) -> None:
    """The pair of exact figures is one that the printed pair allows; a warning holds of the exact figures, too."""
    warned = 0
    for run in range(RUNS):
        result, (auroc, precision, accuracy) = by_sums(*made_up(run)), exact(run)
        for name, true in zip(FIGURES[:2], (auroc, precision), strict=True):
            shown = result.metric_with_error(name)
            assert shown is None or abs(shown.value - true) <= shown.error + 1e-9
        perfect = [round(value, 9) == 1 for value in (result.auroc or 0, result.average_precision or 0)]
        assert perfect in ([True, True], [False, False])
        test = asdict(summarise_test_results({"mass": result}, {"mass"}, set(), SUMMED_HISTOGRAMS_NOTE))
        sites = {site: {"classes": ["mass"]} for site in SITES}
        folder = write(tmp_path / str(run), test=test, classes=["mass"], sites=sites, per_site={})
        limits = list_prominent_limitations(read_run(folder))
        warnings = sum("threshold of 0.5 does not fit" in limit for limit in limits)
        warned += warnings
        assert not warnings or (auroc >= HIGH_AUROC and accuracy <= LOW_BALANCED_ACCURACY)
    assert warned > RUNS // 50  # the rule is tried


def test_a_figure_that_its_bins_leave_open_is_in_no_mean_and_the_page_gives_the_reason() -> None:
    scores, labels = np.full(90, 0.3), np.tile([0.0, 1.0], 45)  # every score is tied with every other
    result = by_sums(scores, labels)
    assert (result.auroc, result.errors["auroc"]) == (None, 0.5)
    good = ClassMetrics(0.9, 0.8, 0.7, 40, 50)
    test = summarise_test_results({"mass": result, "edema": good}, set(), set(), SUMMED_HISTOGRAMS_NOTE)
    assert format_value_with_error(test.compute_mean_with_error("auroc")) == "0.900"
    assert explain_missing_auroc(result) == LARGE_ERROR_NOTE


NAMES = ("edema", "hernia", "$x_1$ & <i>node</i>")
RNG = np.random.default_rng(3)
TRUTH = RNG.integers(0, 3, 240)
LABELS = np.eye(3)[TRUTH]  # one class an image
LOGITS = RNG.normal(size=LABELS.shape) + 2 * LABELS
SCORES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
RESULTS = compute_metrics_per_class(SCORES, LABELS, NAMES)

SPREAD = {name: compute_score_histogram(SCORES[:, c], LABELS[:, c]) for c, name in enumerate(NAMES[:2])}
FEW = compute_score_histogram(SCORES[:30, 1], LABELS[:30, 1])
POINTS = choose_operating_points({NAMES[0]: SPREAD[NAMES[0]], NAMES[1]: FEW}, SPREAD, 0.95)
"""Thresholds of the first two classes; of the second they were chosen on few images."""
OWN = replace(
    summarise_test_results(RESULTS, {"edema"}, set()),
    multi_class=compute_multi_class_metrics(SCORES, LABELS),
    intervals=bootstrap_auroc_intervals(
        SCORES, LABELS, np.arange(len(LABELS)).astype(str), NAMES, np.random.default_rng(0)
    ),
    quality=compute_score_quality(SCORES, LABELS, NAMES, "multi_class"),
    operating_points=POINTS,
)
"""The coordinator's own test images."""

OWNERS = dict.fromkeys(NAMES, ("north", "south"))
HISTOGRAMS = {
    site: {NAMES[c]: compute_score_histogram(SCORES[start::2, c], LABELS[start::2, c]) for c in columns}
    for site, start, columns in (("north", 0, (0, 2)), ("south", 1, (0,)))
}
BY_SITES = replace(
    summarise_test_results(RESULTS, {"edema"}, set(), "mean over the sites' own test parts"),
    pooled=compute_pooled_metrics(sum_site_histograms(HISTOGRAMS, OWNERS), OWNERS, np.random.default_rng(4)),
)
"""Two sites report edema, one the node; nobody reports hernia."""


def report(folder: Path, test: FinalTestSummary) -> str:
    return write_run_report(write(folder, test=asdict(test), classes=NAMES)).read_text(encoding="utf-8")


@pytest.mark.parametrize("test", [OWN, BY_SITES], ids=["own", "by sites"])
def test_the_report_is_whole_and_the_summary_comes_back_as_it_was_written(
    test: FinalTestSummary, tmp_path: Path
) -> None:
    check_page(report(tmp_path / "run", test))
    assert read_run(tmp_path / "run").summary.test == test


def test_intervals_stand_beside_each_auroc_and_as_whiskers_on_its_bar(tmp_path: Path) -> None:
    html = report(tmp_path / "run", OWN)
    text = body_text(html)
    assert OWN.intervals
    for name, interval in OWN.intervals.per_class.items():
        assert f"{OWN.per_class[name].auroc:.3f} {format_interval(interval)}" in text
    assert f"95 % interval of the mean over classes is {format_interval(OWN.intervals.mean_auroc)}" in text
    without = report(tmp_path / "other", replace(OWN, intervals=None))
    assert "bootstrap" not in body_text(without)
    whiskers, plain = (
        re.findall(r'<svg role="img" aria-label="Bar.*?</svg>', page, re.DOTALL)[0].count("currentColor")
        for page in (html, without)
    )
    assert whiskers > plain


def test_decisions_confusion_and_calibration_are_those_of_the_summary(tmp_path: Path) -> None:
    text = body_text(report(tmp_path / "run", OWN))
    assert OWN.quality
    assert OWN.quality.confusion
    for name, made in OWN.quality.decisions.items():
        calibrated = OWN.quality.calibration[name]
        counts = f"{made.true_positives}{made.false_negatives}{made.false_positives}{made.true_negatives}"
        shares = f"{made.sensitivity:.3f}{made.specificity:.3f}{made.f1:.3f}"
        assert f"{name}{counts}{shares}{calibrated.expected_error:.3f}{calibrated.brier:.3f}" in text
    assert " ".join(str(count) for row in OWN.quality.confusion for count in row if count) in text
    assert "Which class is taken for which" in text
    assert "pooled" not in text


def test_thresholds_chosen_on_validation_have_their_shares_with_intervals(tmp_path: Path) -> None:
    html = body_text(report(tmp_path / "run", OWN))
    for name, (youden, sensitive) in POINTS.items():
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


def test_pooled_values_stand_beside_the_mean_of_sites_and_a_class_that_no_site_reports_is_unknown(
    tmp_path: Path,
) -> None:
    text = body_text(report(tmp_path / "run", BY_SITES))
    assert BY_SITES.pooled
    edema, auroc = BY_SITES.pooled.per_class["edema"], BY_SITES.per_class["edema"].auroc
    assert f"edema{auroc:.3f}{format_value_with_error(edema.auroc)} {format_interval(edema.interval)}" in text
    assert "by chance" not in text
    assert "unknown: no site told" in text
    assert "2 of 2" in text
    assert "1 of 2" in text
    assert "known to within 0.00" in text
    over = [BY_SITES.per_class[name].auroc for name in (NAMES[0], NAMES[2])]
    assert compute_means_over_sites(BY_SITES)[0] == pytest.approx(np.mean([each for each in over if each is not None]))


@pytest.mark.parametrize(
    ("auroc", "interval", "judged"),
    [
        (ValueWithError(0.53), (0.45, 0.61), True),
        (ValueWithError(0.53, 0.02), (0.45, 0.61), True),
        (ValueWithError(0.60, 0.04), (0.47, 0.73), False),  # 0.03 higher, it lies above 0.5
        (ValueWithError(0.63, 0.204), (0.36, 0.90), False),  # the page prints no AUROC either
    ],
)
def test_a_pooled_interval_that_includes_chance_is_a_verdict_only_where_the_error_cannot_change_it(
    auroc: ValueWithError, interval: tuple[float, float], judged: bool, tmp_path: Path
) -> None:
    assert BY_SITES.pooled
    classes = BY_SITES.pooled.per_class
    guessed = {**classes, "edema": replace(classes["edema"], interval=interval, auroc=auroc)}
    text = body_text(report(tmp_path / "run", replace(BY_SITES, pooled=replace(BY_SITES.pooled, per_class=guessed))))
    assert ("“edema” is not detected better than by chance" in text) == judged


def test_a_run_written_before_there_was_any_of_it_still_has_a_report(tmp_path: Path) -> None:
    old = {name: value for name, value in asdict(OWN).items() if name not in ("intervals", "quality", "pooled")}
    html = write_run_report(write(tmp_path / "run", test=old, classes=NAMES)).read_text(encoding="utf-8")
    assert "Calibration and decisions" not in html


def test_a_figure_has_no_digit_below_its_error_and_the_exact_one_lies_within_what_is_printed() -> None:
    assert format_value_with_error(ValueWithError(0.75, 0.01)) == "0.75 ± 0.01"
    assert format_value_with_error(ValueWithError(0.7449, 0.01)) == "0.74 ± 0.02"  # 0.7549 is possible
    assert format_value_with_error(ValueWithError(0.75001, 0.00001)) == "0.750 ± 0.001"
    assert format_value_with_error(ValueWithError(0.75001)) == "0.750"
    assert format_value_with_error(ValueWithError(0.9, 0.051)) == "n/a: error above 0.05"
    assert format_value_with_error(None) == "n/a"


def test_counts_of_test_images_are_added_up_over_sites_only_where_the_score_is_a_mean_over_them() -> None:
    most = replace(BY_SITES.per_class["edema"], positives=3, negatives=4)
    test = replace(BY_SITES, per_class={**BY_SITES.per_class, "edema": most})
    assert test.pooled
    edema = test.pooled.per_class["edema"]
    assert test.get_class_image_counts("edema") == (edema.positives, edema.negatives)
    for other in (replace(test, note=GLOBAL_MODEL_NOTE), replace(test, pooled=None)):
        assert other.get_class_image_counts("edema") == (3, 4)


def test_a_class_whose_head_row_stayed_masked_in_every_round_is_named_as_not_learned(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    lines = lines_of(folder / "rounds.jsonl")
    closed = [["edema", "mass"], *[["mass"]] * (len(lines) - 1)]
    text = "".join(json.dumps({**line, "closed_rows": rows}) + "\n" for line, rows in zip(lines, closed, strict=True))
    (folder / "rounds.jsonl").write_text(text, encoding="utf-8")
    assert any("“mass” was not learned" in limit for limit in list_prominent_limitations(read_run(folder)))
