"""Score histograms add up, and what they say of AUROC and average precision holds of the scores themselves."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.metrics import average_precision_score, roc_auc_score

from polyclinic.common.metrics.bootstrap import compute_pooled_auroc_interval
from polyclinic.common.metrics.calibration import (
    choose_operating_points,
    compute_pooled_calibration,
    compute_roc_curve,
    count_pooled_decisions,
)
from polyclinic.common.metrics.measured import ValueWithError
from polyclinic.common.metrics.score_histograms import (
    BIN_CENTRES,
    BIN_EDGES,
    FIRST_POSITIVE_BIN,
    SCORE_BINS,
    TENTH_EDGES,
    ScoreHistogram,
    compute_pooled_auroc,
    compute_pooled_average_precision,
    compute_score_histogram,
    find_score_bins,
)

CASES = 200
ROUNDING = 1e-12
Floats = NDArray[np.floating]


def random_case(seed: int) -> tuple[Floats, Floats]:
    """Rare and common classes, unsure and sure models, few and many images, with and without ties."""
    rng = np.random.default_rng(seed)
    count, share = int(rng.integers(4, 600)), rng.choice([0.01, 0.1, 0.5, 0.9])
    labels = (rng.random(count) < share).astype(np.float32)
    labels[:2] = 0, 1
    logits = rng.normal(rng.uniform(-8, 3), rng.uniform(0.05, 5), count) + rng.uniform(-1, 4) * labels
    scores = expit(logits).astype(np.float32)
    return np.round(scores, int(rng.choice([1, 2, 9]))), labels


def test_auroc_and_average_precision_lie_within_their_bounds_in_many_random_cases() -> None:
    for seed in range(CASES):
        scores, labels = random_case(seed)
        histogram = compute_score_histogram(scores, labels)
        auroc, precision = compute_pooled_auroc(histogram), compute_pooled_average_precision(histogram)
        exact = roc_auc_score(labels, scores), average_precision_score(labels, scores)
        for bounded, value in zip((auroc, precision), exact, strict=True):
            assert bounded.low - ROUNDING <= value <= bounded.high + ROUNDING, (seed, bounded, value)
            assert bounded.value == pytest.approx((bounded.low + bounded.high) / 2)


@pytest.mark.parametrize(("centre", "spread", "ahead"), [(-4, 1.5, 1.2), (0, 1, 1), (-8, 5, 10), (-14, 6, 14)])
def test_bounds_are_narrow_for_rare_and_common_findings_and_for_sure_models(
    centre: float, spread: float, ahead: float
) -> None:
    rng = np.random.default_rng(2)
    labels = (rng.random(3000) < 0.1).astype(np.float64)
    scores = expit(rng.normal(centre, spread, 3000) + ahead * labels).astype(np.float32)
    histogram = compute_score_histogram(scores, labels)
    auroc, precision = compute_pooled_auroc(histogram), compute_pooled_average_precision(histogram)
    assert auroc.high - auroc.low < 0.004
    assert precision.high - precision.low < 0.02


bin_counts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6).filter(
    lambda rows: sum(p for p, _ in rows) > 0 and sum(n for _, n in rows) > 0
)


def placed(rows: list[tuple[int, int]], positive: float, step: float) -> tuple[Floats, Floats]:
    """Scores and labels: in bin b the negatives at b, the positives from b + ``positive`` on, ``step`` apart."""
    of_positives = [b + positive + step * i for b, (p, _) in enumerate(rows) for i in range(p)]
    of_negatives = [float(b) for b, (_, n) in enumerate(rows) for _ in range(n)]
    return np.array(of_positives + of_negatives), np.repeat([1, 0], [len(of_positives), len(of_negatives)])


@given(bin_counts)
@settings(max_examples=50)
def test_both_bounds_are_attained_by_some_order_within_the_bins(rows: list[tuple[int, int]]) -> None:
    counts = np.zeros((2, SCORE_BINS), np.int64)
    counts[:, 100 : 100 + len(rows)] = np.array(rows).T
    auroc, precision = (of(ScoreHistogram(*counts)) for of in (compute_pooled_auroc, compute_pooled_average_precision))
    above, below = placed(rows, 0.3, 0.0), placed(rows, -0.3, 0.01)
    assert roc_auc_score(above[1], above[0]) == pytest.approx(auroc.high)
    assert roc_auc_score(below[1], below[0]) == pytest.approx(auroc.low)
    assert average_precision_score(above[1], above[0]) == pytest.approx(precision.high)
    assert average_precision_score(below[1], below[0]) == pytest.approx(precision.low)


def test_bounds_worked_by_hand() -> None:
    # One bin with a positive and two negatives, above it one with a positive. Pairs: 2 decided, 2 open of 4.
    # Precisions: 1 for the upper positive; the lower one has 2 of 2 to 2 of 4: (1 + 1) / 2 to (1 + 1/2) / 2.
    counts = np.zeros((2, SCORE_BINS), np.int64)
    counts[:, 7], counts[:, 8] = (1, 2), (1, 0)
    histogram = ScoreHistogram(*counts)
    assert compute_pooled_auroc(histogram) == ValueWithError(0.75, 0.25)
    precision = compute_pooled_average_precision(histogram)
    assert (precision.low, precision.high) == pytest.approx((0.75, 1.0), abs=ROUNDING)


def test_histograms_of_sites_add_up_to_that_of_all_their_images() -> None:
    scores, labels = random_case(3)
    labels[5:9] = np.nan
    parts = [compute_score_histogram(scores[rows::3], labels[rows::3]) for rows in range(3)]
    whole, total = compute_score_histogram(scores, labels), parts[0] + parts[1] + parts[2]
    np.testing.assert_array_equal(total.positives, whole.positives)
    np.testing.assert_array_equal(total.negatives, whole.negatives)
    assert whole.positives.sum() == np.sum(labels == 1)


def test_bins_cover_the_scale_from_0_to_1_have_borders_at_every_tenth_and_are_finer_near_the_ends() -> None:
    widths = np.diff(BIN_EDGES)
    assert (len(BIN_EDGES), BIN_EDGES[0], BIN_EDGES[-1]) == (SCORE_BINS + 1, 0.0, 1.0)
    assert set(TENTH_EDGES) <= set(BIN_EDGES)
    np.testing.assert_allclose(BIN_EDGES, 1 - BIN_EDGES[::-1], atol=1e-12)
    assert 0 < widths.min() < widths.max() < 0.003
    assert widths[BIN_EDGES[1:] < 0.001].max() < 1e-4


def test_a_border_belongs_to_the_bin_below_so_that_only_scores_above_a_half_count_as_yes() -> None:
    scores = np.array([0.0, 0.5, np.nextafter(0.5, 1), 1.0])
    assert find_score_bins(scores).tolist() == [0, FIRST_POSITIVE_BIN - 1, FIRST_POSITIVE_BIN, SCORE_BINS - 1]
    np.testing.assert_array_equal(find_score_bins(BIN_CENTRES), np.arange(SCORE_BINS))


def test_without_positives_or_without_negatives_there_is_no_value() -> None:
    for label in (0, 1):
        histogram = compute_score_histogram(np.array([0.2, 0.7]), np.array([label, np.nan]))
        assert compute_pooled_auroc(histogram) is None
        assert compute_pooled_average_precision(histogram) is None


@pytest.mark.parametrize("score", [-0.1, 1.5, np.nan])
def test_a_score_that_is_no_probability_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        compute_score_histogram(np.array([0.1, score]), np.array([0.0, 1.0]))
    compute_score_histogram(np.array([0.1, score]), np.array([0.0, np.nan]))


@pytest.mark.parametrize("counts", [np.zeros(SCORE_BINS - 1, np.int64), np.full(SCORE_BINS, -1)])
def test_what_is_no_histogram_is_refused(counts: NDArray[np.int64]) -> None:
    with pytest.raises(ValueError, match="counts of 0 or more"):
        ScoreHistogram(counts, np.zeros(SCORE_BINS, np.int64))


def lower_bound_by_listing(histogram: ScoreHistogram) -> float:
    """The mean precision over the ranks of all positives, one entry an image."""
    positives, wrong = histogram.positives[::-1], np.cumsum(histogram.negatives[::-1])
    rank = np.arange(1, positives.sum() + 1)
    return float(np.mean(rank / (rank + np.repeat(wrong, positives))))


@pytest.mark.parametrize("seed", range(CASES))
def test_the_lower_bound_of_the_average_precision_is_that_of_a_list_of_all_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    filled = rng.random((2, SCORE_BINS)) < rng.choice([0.002, 0.1, 1.0])
    most = rng.choice([1, 3, 50, 1000], (2, 1))
    counts = np.where(filled, rng.integers(0, most + 1, (2, SCORE_BINS)), 0)
    counts[0, rng.integers(SCORE_BINS)] += 1
    counts[1, rng.integers(SCORE_BINS)] += int(rng.choice([1, 10**6]))
    histogram = ScoreHistogram(*counts)
    precision = compute_pooled_average_precision(histogram)
    assert precision is not None
    assert precision.low == pytest.approx(lower_bound_by_listing(histogram), abs=ROUNDING)


def test_what_sites_state_sets_neither_the_memory_nor_the_time_of_their_figures() -> None:
    """A site may state 10**9 images of each kind, 10,000 sites 10**13; the figures are those of a millionth of them."""
    many, few = (ScoreHistogram(*np.full((2, SCORE_BINS), each, np.int64)) for each in (10**10, 10**4))
    sensitivity = 0.9
    tracemalloc.start()
    try:
        auroc, precision = compute_pooled_auroc(many), compute_pooled_average_precision(many)
        quality = compute_pooled_calibration(many), compute_roc_curve(many)
        interval = compute_pooled_auroc_interval(many, np.random.default_rng(0))
        points = choose_operating_points({"x": many}, {"x": many}, sensitivity)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200e6
    assert auroc is not None
    assert precision is not None
    assert interval is not None
    assert all(quality)
    assert auroc == compute_pooled_auroc(few)
    assert precision.low == pytest.approx(lower_bound_by_listing(few), abs=1e-6)
    assert interval[0] <= auroc.value <= interval[1]
    assert points["x"][-1].decisions == count_pooled_decisions(
        many, int(np.searchsorted(BIN_EDGES, points["x"][-1].threshold))
    )
