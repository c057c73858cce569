"""Thresholds chosen on some images and judged on others, beside scikit-learn and a search over all thresholds."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import precision_score, recall_score

from common.metrics.calibration import choose_operating_points
from common.metrics.score_histograms import BINS, EDGES, ScoreHistogram, compute_score_histogram

Values = NDArray[np.float64]


def drawn(seed: int, count: int, spread: float) -> tuple[Values, Values]:
    """Scores between 0 and 1, and labels 1, 0 or NaN."""
    random = np.random.default_rng(seed)
    labels = random.choice([1.0, 0.0, np.nan], count, p=[0.3, 0.6, 0.1])
    return 1 / (1 + np.exp(-random.normal(spread * np.nan_to_num(labels), 1.0))), labels


@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 400), st.floats(0, 4), st.floats(0.05, 1))
def test_both_rules_are_a_search_over_all_borders(
    seed: int, validation: int, test: int, spread: float, target: float
) -> None:
    chosen, tested = drawn(seed, validation, spread), drawn(seed + 1, test, spread)
    points = choose_operating_points(
        {"a": compute_score_histogram(*chosen)}, {"a": compute_score_histogram(*tested)}, target
    )
    shares = [_shares(*chosen, edge) for edge in EDGES]
    if shares[0] is None or np.isnan(tested[1]).all():
        assert points == {}
        return
    *youdens, sensitive = points["a"]
    pairs = [pair for pair in shares if pair is not None]
    best = max(sum(pair) for pair in pairs)
    assert bool(youdens) == (best > 1 + 1e-9)
    for youden in youdens:
        own = _shares(*chosen, youden.threshold)
        assert sum(own) == pytest.approx(best)
        assert youden.target is None
        assert youden.chosen_on == sensitive.chosen_on
    assert sensitive.threshold == max(edge for edge, pair in zip(EDGES, pairs, strict=True) if pair[0] >= target)
    assert sensitive.target == target
    assert sensitive.chosen_on == (int((chosen[1] == 1).sum()), int((chosen[1] == 0).sum()))


def _shares(scores: Values, labels: Values, threshold: float) -> tuple[float, float] | None:
    """Sensitivity and specificity; None without positives or without negatives."""
    if not (labels == 1).any() or not (labels == 0).any():
        return None
    above = scores > threshold
    return float(above[labels == 1].mean()), float((~above)[labels == 0].mean())


@given(st.integers(1, 400), st.data())
def test_a_target_that_some_images_reach_exactly_is_reached(positives: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(1, positives)) / positives
    scores = np.arange(1, 2 * positives + 1) / (2 * positives + 1)
    labels = np.repeat([0.0, 1.0], positives)
    histograms = {"a": compute_score_histogram(scores, labels)}
    point = choose_operating_points(histograms, histograms, share)["a"][-1]
    reached = [edge for edge in EDGES if (scores[positives:] > edge).mean() >= share]
    assert point.rule == "sensitivity"
    assert point.threshold == max(reached)


def ratio(part: int, rest: int) -> float | None:
    return part / (part + rest) if part + rest else None


@given(st.integers(0, 10**6), st.floats(0, 4))
def test_the_four_shares_are_scikit_learns_on_the_test_images(seed: int, spread: float) -> None:
    chosen, (scores, labels) = drawn(seed, 200, spread), drawn(seed + 1, 300, spread)
    points = choose_operating_points(
        {"a": compute_score_histogram(*chosen)}, {"a": compute_score_histogram(scores, labels)}, 0.9
    )["a"]
    labelled = ~np.isnan(labels)
    truth = labels[labelled] == 1
    for point in points:
        answer, shares = scores[labelled] > point.threshold, point.decisions
        for ours, theirs, label in (
            (shares.sensitivity, recall_score, 1),
            (shares.specificity, recall_score, 0),
            (ratio(shares.true_positives, shares.false_positives), precision_score, 1),
            (ratio(shares.true_negatives, shares.false_negatives), precision_score, 0),
        ):
            if ours is None:
                assert not (answer == bool(label)).any()
            else:
                assert ours == pytest.approx(theirs(truth, answer, pos_label=label))


def test_between_two_groups_far_apart_the_threshold_is_in_the_middle() -> None:
    counts = np.zeros((2, BINS), np.int64)
    counts[0, 900], counts[1, 100] = 5, 5
    apart = ScoreHistogram(counts[0], counts[1])
    youden, sensitive = choose_operating_points({"a": apart}, {"a": apart}, 1.0)["a"]
    assert youden.threshold == EDGES[501]
    assert sensitive.threshold == EDGES[900]


def test_what_has_one_kind_of_image_only_has_no_threshold() -> None:
    none, some = np.zeros(BINS, np.int64), np.eye(BINS, dtype=np.int64)[5]
    for positives, negatives in product((none, some), repeat=2):
        points = choose_operating_points(
            {"a": ScoreHistogram(positives, negatives)}, {"a": ScoreHistogram(some, some)}, 0.9
        )
        assert bool(points) == bool(positives.any() and negatives.any())
    assert choose_operating_points({"a": ScoreHistogram(some, some)}, {"a": ScoreHistogram(none, none)}, 0.9) == {}
    assert choose_operating_points({"a": ScoreHistogram(some, some)}, {}, 0.9) == {}
