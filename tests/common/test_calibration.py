"""Calibration, curves, thresholds and decisions are scikit-learn's; those from histograms lie within their bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    balanced_accuracy_score,
    brier_score_loss,
    confusion_matrix,
    f1_score,
    precision_recall_curve,
    recall_score,
    roc_curve,
)

from polyclinic.common.metrics.calibration import (
    MAX_CURVE_POINTS,
    DecisionCounts,
    OperatingPoint,
    ReliabilityBin,
    choose_operating_points,
    compute_calibration,
    compute_pooled_calibration,
    compute_roc_curve,
    compute_score_quality,
    compute_wilson_interval,
    count_decisions,
    count_pooled_decisions,
)
from polyclinic.common.metrics.pooled import compute_pooled_metrics, sum_site_histograms
from polyclinic.common.metrics.score_histograms import (
    BIN_EDGES,
    SCORE_BINS,
    ScoreHistogram,
    compute_score_histogram,
    find_score_bins,
)

Floats = NDArray[np.floating]
seeds, counts, spreads = st.integers(0, 10**6), st.integers(1, 400), st.floats(0, 4)


def random_case(seed: int) -> tuple[Floats, Floats]:
    """Scores, some on a border of the tenths, and labels of both kinds."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 400))
    labels = (rng.random(count) < rng.uniform(0.05, 0.95)).astype(np.float64)
    labels[:2] = 0, 1
    return np.round(rng.beta(*rng.uniform(0.1, 3, 2), count), int(rng.choice([1, 3, 12]))), labels


def partly_labelled(seed: int, count: int, spread: float) -> tuple[Floats, Floats]:
    """Scores between 0 and 1, and labels 1, 0 or NaN."""
    random = np.random.default_rng(seed)
    labels = random.choice([1.0, 0.0, np.nan], count, p=[0.3, 0.6, 0.1])
    return 1 / (1 + np.exp(-random.normal(spread * np.nan_to_num(labels), 1.0))), labels


@given(seeds)
@settings(max_examples=100)
def test_calibration_is_that_of_scikit_learn_and_from_a_histogram_lies_within_its_bound(seed: int) -> None:
    scores, labels = random_case(seed)
    result = compute_calibration(scores, labels)
    shares, means = calibration_curve(labels, scores, n_bins=10)
    filled = [each for each in result.bins if each.images]
    images = np.array([each.images for each in filled])
    assert [each.mean_score for each in filled] == pytest.approx(means)
    assert [each.positives / each.images for each in filled] == pytest.approx(shares)
    assert result.expected_error == pytest.approx(np.sum(images * np.abs(shares - means)) / len(scores))
    assert result.brier == pytest.approx(brier_score_loss(labels, scores))
    assert result.within == 0
    rough = compute_pooled_calibration(compute_score_histogram(scores, labels))
    assert [(b.images, b.positives) for b in rough.bins] == [(b.images, b.positives) for b in result.bins]
    assert abs(rough.expected_error - result.expected_error) <= rough.within + 1e-12
    assert abs(rough.brier - result.brier) <= rough.within + 1e-12
    assert rough.within < 0.003


@given(seeds)
@settings(max_examples=50)
def test_decisions_are_those_of_scikit_learn_and_exact_from_a_histogram(seed: int) -> None:
    scores, labels = random_case(seed)
    result, answer = count_decisions(scores, labels), scores > 0.5
    matrix = [[result.true_negatives, result.false_positives], [result.false_negatives, result.true_positives]]
    assert matrix == confusion_matrix(labels, answer).tolist()
    assert result.sensitivity == pytest.approx(recall_score(labels, answer))
    assert result.specificity == pytest.approx(recall_score(labels, answer, pos_label=0))
    assert result.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, answer))
    assert result.f1 == pytest.approx(f1_score(labels, answer))
    assert count_pooled_decisions(compute_score_histogram(scores, labels)) == result


def test_a_case_worked_by_hand_in_which_unlabelled_scores_do_not_count() -> None:
    # Scores .12 .18 in one bin, .9 in the bin that ends there; two unknown. Means .15 and .9; shares 1/2 and 1.
    # Error: (2 * |.15 - .5| + 1 * |.9 - 1|) / 3 = .8 / 3. Brier: (.12^2 + .82^2 + .1^2) / 3 = .6968 / 3.
    result = compute_calibration(np.array([0.12, 0.18, 0.9, 0.4, np.nan]), np.array([0, 1, 1, np.nan, np.nan]))
    assert result.bins[1] == ReliabilityBin(2, 1, pytest.approx(0.15))
    assert result.bins[8] == ReliabilityBin(1, 1, pytest.approx(0.9))
    assert result.bins[4] == ReliabilityBin(0, 0, None)
    assert (result.expected_error, result.brier) == pytest.approx((0.8 / 3, 0.6968 / 3))


def test_without_a_known_label_there_is_no_calibration_and_without_a_kind_no_share() -> None:
    assert compute_calibration(np.array([0.2]), np.array([np.nan])) is None
    none = count_decisions(np.array([0.2]), np.array([np.nan]))
    assert none == DecisionCounts(0, 0, 0, 0)
    assert (none.sensitivity, none.specificity, none.balanced_accuracy, none.f1) == (None, None, None, None)


# ---------------------------------------------------------------------- several classes, several sites


def one_class_an_image(seed: int, images: int = 60, classes: int = 4) -> tuple[Floats, Floats, NDArray[np.intp]]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, images)
    return rng.dirichlet(np.full(classes, 0.7), images), np.eye(classes)[truth], truth


def test_the_confusion_of_a_multi_class_task_is_that_of_scikit_learn_over_images_of_known_class() -> None:
    scores, labels, truth = one_class_an_image(4)
    labels[:5] = np.nan
    result = compute_score_quality(scores, labels, "abcd", "multi_class")
    answer = scores.argmax(axis=1)
    assert np.array(result.confusion).tolist() == confusion_matrix(truth[5:], answer[5:], labels=range(4)).tolist()
    assert result.top_class == compute_calibration(scores.max(axis=1)[5:], (answer == truth)[5:].astype(float))


def test_a_multi_label_task_has_decisions_for_each_class_and_no_confusion_between_them() -> None:
    scores, labels, _ = one_class_an_image(5)
    labels[:, 2] = np.nan
    result = compute_score_quality(scores, labels, "abcd", "multi_label")
    assert (result.confusion, result.top_class) == (None, None)
    assert list(result.calibration) == list(result.decisions) == ["a", "b", "d"]
    assert result.decisions["b"] == count_decisions(scores[:, 1], labels[:, 1])


def test_pooling_adds_up_the_sites_with_histograms_and_names_those_without() -> None:
    scores, labels = random_case(8)
    halves = {"north": slice(0, None, 2), "south": slice(1, None, 2)}
    histograms = {site: {"mass": compute_score_histogram(scores[rows], labels[rows])} for site, rows in halves.items()}
    owners = {"edema": ("north", "south"), "mass": ("east", "north", "south")}
    pooled = compute_pooled_metrics(sum_site_histograms(histograms, owners), owners)
    assert list(pooled.per_class) == ["mass"]
    of_class, decisions = pooled.per_class["mass"], count_decisions(scores, labels)
    assert (of_class.sites, of_class.silent) == (("north", "south"), ("east",))
    assert (of_class.positives, of_class.negatives) == (np.sum(labels == 1), np.sum(labels == 0))
    assert (of_class.decisions, of_class.balanced_accuracy) == (decisions, decisions.balanced_accuracy)
    assert pooled.mean_auroc == of_class.auroc


def test_the_mean_of_pooled_classes_leaves_out_those_without_a_value() -> None:
    # mass: both pairs right, 1; hernia: no positive; edema: one of two pairs right, 1/2.
    scores = {"mass": ((0.9, 1), (0.2, 0), (0.4, 0)), "hernia": ((0.9, 0),), "edema": ((0.3, 1), (0.2, 0), (0.4, 0))}
    site = {name: compute_score_histogram(*np.array(rows).T) for name, rows in scores.items()}
    owners = dict.fromkeys(site, ("north",))
    pooled = compute_pooled_metrics(sum_site_histograms({"north": site}, owners), owners)
    assert pooled.mean_auroc.value == pytest.approx(0.75)
    assert pooled.per_class["hernia"].auroc is None
    assert (
        compute_pooled_metrics(sum_site_histograms({"north": {}}, {"mass": ("north",)}), {"mass": ("north",)}) is None
    )


# ---------------------------------------------------------------------- curves


@given(seeds, st.integers(20, 3000), spreads)
@settings(max_examples=50)
def test_every_point_of_both_curves_is_one_of_scikit_learns(seed: int, count: int, spread: float) -> None:
    scores, labels = partly_labelled(seed, count, spread)
    curve, labelled = compute_roc_curve(compute_score_histogram(scores, labels)), ~np.isnan(labels)
    if len(set(labels[labelled])) < 2:
        assert curve is None
        return
    binned = BIN_EDGES[find_score_bins(scores[labelled]) + 1]  # images of one bin cannot be told apart
    rates, sensitivities, _ = roc_curve(labels[labelled], binned, drop_intermediate=False)
    precision, recall, _ = precision_recall_curve(labels[labelled], binned)
    detected, alarms = np.array(curve.detected), np.array(curve.alarms)

    def pairs(first: Floats, second: Floats) -> list[tuple[float, float]]:
        return [(round(a, 9), round(b, 9)) for a, b in zip(first, second, strict=True)]

    ours = pairs(alarms / alarms[-1], detected / detected[-1])
    assert set(ours) <= set(pairs(rates, sensitivities))
    assert (ours[0], ours[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert len(ours) == len(set(ours)) <= MAX_CURVE_POINTS
    detected, alarms = detected[1:], alarms[1:]
    assert set(pairs(detected / detected[-1], detected / (detected + alarms))) <= set(pairs(recall, precision))


@given(seeds)
@settings(max_examples=50)
def test_the_points_that_are_kept_hardly_change_the_area(seed: int) -> None:
    scores, labels = partly_labelled(seed, 2000, 1.5)
    curve, labelled = compute_roc_curve(compute_score_histogram(scores, labels)), ~np.isnan(labels)
    rates, sensitivities, _ = roc_curve(labels[labelled], scores[labelled])
    ours = np.trapezoid(np.array(curve.detected) / curve.detected[-1], np.array(curve.alarms) / curve.alarms[-1])
    assert ours == pytest.approx(np.trapezoid(sensitivities, rates), abs=0.004)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_class_of_one_kind_of_image_has_no_curve(label: float) -> None:
    assert compute_roc_curve(compute_score_histogram(np.array([0.1, 0.7]), np.full(2, label))) is None


@given(st.integers(1, 500), st.data())
@settings(max_examples=50)
def test_intervals_are_wilsons(whole: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, whole))
    (low,), (high,) = compute_wilson_interval(np.array([float(part)]), np.array([float(whole)]))
    expected = binomtest(part, whole).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-6)


# ---------------------------------------------------------------------- operating points


def operating_points(chosen: ScoreHistogram, tested: ScoreHistogram, target: float) -> tuple[OperatingPoint, ...]:
    """Return the points of one class, none where it has none."""
    return tuple(choose_operating_points({"a": chosen}, {"a": tested}, target).get("a", ()))


def shares_above(scores: Floats, labels: Floats, threshold: float) -> tuple[float, float]:
    """Sensitivity and specificity."""
    above = scores > threshold
    return float(above[labels == 1].mean()), float((~above)[labels == 0].mean())


@given(seeds, counts, counts, spreads, st.floats(0.05, 1))
@settings(max_examples=60)
def test_both_rules_are_a_search_over_all_borders(
    seed: int, validation: int, test: int, spread: float, target: float
) -> None:
    chosen, tested = partly_labelled(seed, validation, spread), partly_labelled(seed + 1, test, spread)
    points = operating_points(compute_score_histogram(*chosen), compute_score_histogram(*tested), target)
    images = (int((chosen[1] == 1).sum()), int((chosen[1] == 0).sum()))
    if not all(images) or np.isnan(tested[1]).all():
        assert points == ()
        return
    scores, labels = tested
    for point in points:
        answer = scores > point.threshold
        cells = [(labels[answer == above] == truth).sum() for truth in (1, 0) for above in (True, False)]
        assert point.decisions == DecisionCounts(*cells)
    *youdens, sensitive = points
    pairs = [shares_above(*chosen, edge) for edge in BIN_EDGES]
    best = max(sum(pair) for pair in pairs)
    assert bool(youdens) == (best > 1 + 1e-9)
    for youden in youdens:
        assert sum(shares_above(*chosen, youden.threshold)) == pytest.approx(best)
        assert (youden.target, youden.chosen_on) == (None, images)
    assert sensitive.threshold == max(edge for edge, pair in zip(BIN_EDGES, pairs, strict=True) if pair[0] >= target)
    assert (sensitive.target, sensitive.chosen_on) == (target, images)


@given(counts, st.data())
@settings(max_examples=50)
def test_a_target_that_some_images_reach_exactly_is_reached(positives: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(1, positives)) / positives
    scores = np.arange(1, 2 * positives + 1) / (2 * positives + 1)
    histogram = compute_score_histogram(scores, np.repeat([0.0, 1.0], positives))
    point = operating_points(histogram, histogram, share)[-1]
    assert point.rule == "sensitivity"
    assert point.threshold == max(edge for edge in BIN_EDGES if (scores[positives:] > edge).mean() >= share)


def test_between_two_groups_far_apart_the_threshold_is_in_the_middle() -> None:
    apart = ScoreHistogram(*(5 * np.eye(SCORE_BINS, dtype=np.int64)[[900, 100]]))
    assert [point.threshold for point in operating_points(apart, apart, 1.0)] == [BIN_EDGES[501], BIN_EDGES[900]]


def test_where_no_threshold_is_better_than_one_answer_for_all_there_is_no_youden_point() -> None:
    backwards = ScoreHistogram(*(5 * np.eye(SCORE_BINS, dtype=np.int64)[[100, 900]]))
    assert [point.rule for point in operating_points(backwards, backwards, 1.0)] == ["sensitivity"]


def test_what_has_one_kind_of_image_only_has_no_threshold() -> None:
    none, some = np.zeros(SCORE_BINS, np.int64), np.eye(SCORE_BINS, dtype=np.int64)[5]
    both, neither = ScoreHistogram(some, some), ScoreHistogram(none, none)
    for chosen in (ScoreHistogram(some, none), ScoreHistogram(none, some), neither):
        assert operating_points(chosen, both, 0.9) == ()
    assert operating_points(both, both, 0.9) != ()
    assert operating_points(both, neither, 0.9) == ()
    assert choose_operating_points({"a": both}, {}, 0.9) == {}
