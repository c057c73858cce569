"""ROC and precision-recall curves of histograms, beside scikit-learn's of the same scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import precision_recall_curve, roc_curve

from common.metrics.calibration import POINTS, compute_roc_curve, compute_wilson_interval
from common.metrics.score_histograms import EDGES, compute_score_histogram, find_score_bins

Values = NDArray[np.float64]


def drawn(seed: int, count: int, spread: float) -> tuple[Values, Values]:
    """Scores in 0..1 and labels 1, 0 or NaN."""
    random = np.random.default_rng(seed)
    labels = random.choice([1.0, 0.0, np.nan], count, p=[0.3, 0.6, 0.1])
    logits = random.normal(spread * np.nan_to_num(labels), 1.0)
    return 1 / (1 + np.exp(-logits)), labels


@given(st.integers(0, 10**6), st.integers(20, 3000), st.floats(0, 4))
def test_every_point_is_one_of_scikit_learns(seed: int, count: int, spread: float) -> None:
    scores, labels = drawn(seed, count, spread)
    curve, labelled = compute_roc_curve(compute_score_histogram(scores, labels)), ~np.isnan(labels)
    if len(set(labels[labelled])) < 2:
        assert curve is None
        return
    binned = EDGES[find_score_bins(scores[labelled]) + 1]  # images of one bin cannot be told apart
    rates, sensitivities, _ = roc_curve(labels[labelled], binned, drop_intermediate=False)
    detected, alarms = np.array(curve.detected), np.array(curve.alarms)
    theirs = {(round(a, 9), round(b, 9)) for a, b in zip(rates, sensitivities, strict=True)}
    ours = [(round(a, 9), round(b, 9)) for a, b in zip(alarms / alarms[-1], detected / detected[-1], strict=True)]
    assert set(ours) <= theirs
    assert (ours[0], ours[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert len(ours) == len(set(ours)) <= POINTS
    precision, recall, _ = precision_recall_curve(labels[labelled], binned)
    pairs = {(round(r, 9), round(p, 9)) for p, r in zip(precision, recall, strict=True)}
    mine = {(round(d / detected[-1], 9), round(d / (d + a), 9)) for d, a in zip(detected[1:], alarms[1:], strict=True)}
    assert mine <= pairs


@given(st.integers(0, 10**6))
def test_the_points_that_are_kept_hardly_change_the_area(seed: int) -> None:
    scores, labels = drawn(seed, 2000, 1.5)
    curve, labelled = compute_roc_curve(compute_score_histogram(scores, labels)), ~np.isnan(labels)
    rates, sensitivities, _ = roc_curve(labels[labelled], scores[labelled])
    ours = np.trapezoid(np.array(curve.detected) / curve.detected[-1], np.array(curve.alarms) / curve.alarms[-1])
    assert ours == pytest.approx(np.trapezoid(sensitivities, rates), abs=0.004)


def test_a_class_without_positives_or_negatives_has_no_curve() -> None:
    scores = np.array([0.1, 0.7])
    assert compute_roc_curve(compute_score_histogram(scores, np.zeros(2))) is None
    assert compute_roc_curve(compute_score_histogram(scores, np.ones(2))) is None


@given(st.integers(1, 500), st.data())
def test_intervals_are_wilsons(whole: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, whole))
    (low,), (high,) = compute_wilson_interval(np.array([float(part)]), np.array([float(whole)]))
    expected = binomtest(part, whole).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-6)
