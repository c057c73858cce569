"""Bootstrap intervals of AUROCs: each resample is scikit-learn's weighted AUROC, each interval close to SciPy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import bootstrap, norm
from sklearn.metrics import roc_auc_score

from polyclinic.common.metrics.bootstrap import (
    AurocIntervals,
    RankedClassScores,
    bootstrap_auroc_intervals,
    compute_newcombe_interval,
    compute_pooled_auroc_interval,
)
from polyclinic.common.metrics.pooled import estimate_sampled_site_intervals
from polyclinic.common.metrics.score_histograms import SCORE_BINS, ScoreHistogram, compute_score_histogram

Floats = NDArray[np.floating]


def generator(seed: int = 5) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_case(seed: int, count: int, classes: int = 1) -> tuple[Floats, Floats, NDArray[np.str_]]:
    """Scores with ties, labels of both kinds in every class, every image of its own patient."""
    rng = generator(seed)
    labels = (rng.random((count, classes)) < 0.3).astype(np.float32)
    labels[:2] = [[0], [1]]
    scores = np.round(rng.normal(size=labels.shape) + labels, 2)
    return scores, labels, np.arange(count).astype(str)


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_a_resample_is_the_weighted_auroc_of_scikit_learn(seed: int) -> None:
    scores, labels, _ = random_case(seed, 40)
    weights = generator(seed).standard_exponential((40, 3), dtype=np.float32)
    aurocs = RankedClassScores.from_scores(scores[:, 0], labels[:, 0]).compute_weighted_aurocs(weights)
    expected = [roc_auc_score(labels[:, 0], scores[:, 0], sample_weight=weights[:, r]) for r in range(3)]
    assert aurocs == pytest.approx(expected, rel=1e-5)


def test_the_interval_is_close_to_that_of_resampling_positives_and_negatives_by_scipy() -> None:
    scores, labels, patients = random_case(1, 400)
    interval = bootstrap_auroc_intervals(scores, labels, patients, ["mass"], generator()).per_class["mass"]

    def auroc(positives: Floats, negatives: Floats) -> float:
        pairs = positives[:, None] - negatives
        return float(np.mean(pairs > 0) + np.mean(pairs == 0) / 2)

    kinds = tuple(scores[labels == kind] for kind in (1, 0))
    drawn = bootstrap(kinds, auroc, n_resamples=2000, vectorized=False, method="percentile", rng=generator(1))
    expected, width = drawn.confidence_interval, np.diff(interval)[0]
    assert interval == pytest.approx((expected.low, expected.high), abs=0.15 * width)


def test_the_mean_over_classes_is_taken_over_the_same_patients() -> None:
    # Two equal classes: their mean varies as much as each of them. Two independent ones: by about a factor 0.7 less.
    scores, labels, patients = random_case(7, 300, classes=2)
    alike = bootstrap_auroc_intervals(scores[:, [0, 0]], labels[:, [0, 0]], patients, ["a", "b"], generator())
    other = bootstrap_auroc_intervals(scores, labels, patients, ["a", "b"], generator())
    assert alike.mean_auroc == pytest.approx(alike.per_class["a"], abs=0.03 * np.diff(alike.per_class["a"])[0])
    ratio = np.diff(other.mean_auroc)[0] / np.mean([np.diff(interval)[0] for interval in other.per_class.values()])
    assert 0.6 < ratio < 0.85


def test_several_images_of_one_patient_count_as_one_and_make_the_interval_wider() -> None:
    scores, labels, patients = random_case(9, 100)
    copies = (np.repeat(scores, 4, axis=0), np.repeat(labels, 4, axis=0))
    once = bootstrap_auroc_intervals(scores, labels, patients, ["a"], generator())
    by_patient = bootstrap_auroc_intervals(*copies, np.repeat(patients, 4), ["a"], generator())
    by_image = bootstrap_auroc_intervals(*copies, np.arange(400).astype(str), ["a"], generator())
    assert by_patient.per_class["a"] == pytest.approx(once.per_class["a"])
    assert np.diff(by_image.per_class["a"]) < 0.6 * np.diff(by_patient.per_class["a"])


def test_a_class_with_one_positive_keeps_it_in_every_resample() -> None:
    scores, labels, patients = random_case(11, 60)
    labels[:] = 0
    labels[7] = 1
    low, high = bootstrap_auroc_intervals(scores, labels, patients, ["a"], generator()).per_class["a"]
    assert 0 <= low < roc_auc_score(labels[:, 0], scores[:, 0]) < high <= 1


def test_classes_without_an_auroc_have_no_interval_and_unknown_labels_are_left_out() -> None:
    scores, labels, patients = random_case(13, 80, classes=3)
    labels[:, 1], labels[40:, 2], scores[40:, 2] = np.nan, np.nan, np.nan
    intervals = bootstrap_auroc_intervals(scores, labels, patients, ["a", "b", "c"], generator())
    assert list(intervals.per_class) == ["a", "c"]
    low, high = intervals.per_class["c"]
    assert low < roc_auc_score(labels[:40, 2], scores[:40, 2]) < high
    alone = bootstrap_auroc_intervals(scores[:, [1]], labels[:, [1]], patients, ["b"], generator())
    assert alone == AurocIntervals(None, {})


def test_the_same_generator_gives_the_same_intervals() -> None:
    case = random_case(17, 50, classes=2)
    first, again, other = (bootstrap_auroc_intervals(*case, ["a", "b"], generator(seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("seed", [1, 2])
def test_the_interval_from_counts_by_score_is_hardly_another(seed: int) -> None:
    scores, labels, patients = random_case(seed, 400)
    scores = 1 / (1 + np.exp(-scores))
    exact = bootstrap_auroc_intervals(scores, labels, patients, ["mass"], generator()).per_class["mass"]
    pooled = compute_pooled_auroc_interval(compute_score_histogram(scores[:, 0], labels[:, 0]), generator(seed))
    assert pooled == pytest.approx(exact, abs=0.15 * np.diff(exact)[0])


def test_one_bin_leaves_everything_open_and_one_kind_of_image_has_no_interval() -> None:
    positives, none = 7 * np.eye(SCORE_BINS, dtype=np.int64)[3], np.zeros(SCORE_BINS, np.int64)
    assert compute_pooled_auroc_interval(ScoreHistogram(positives, positives), generator()) == pytest.approx((0, 1))
    assert compute_pooled_auroc_interval(ScoreHistogram(positives, none), generator()) is None
    assert compute_pooled_auroc_interval(ScoreHistogram(none, positives), generator()) is None


def test_the_interval_covers_the_true_auroc_about_as_often_as_it_says() -> None:
    random, true = generator(3), norm.cdf(1 / np.sqrt(2))
    covered = []
    for _ in range(100):
        logits = np.concatenate([random.normal(1, 1, 60), random.normal(0, 1, 140)])
        spread = compute_score_histogram(1 / (1 + np.exp(-logits)), np.repeat([1.0, 0.0], [60, 140]))
        low, high = compute_pooled_auroc_interval(spread, random) or (1.0, 0.0)
        covered.append(low <= true <= high)
    assert 0.88 <= np.mean(covered) <= 1.0  # 0.95 and three standard errors


@given(st.floats(0, 1), st.integers(1, 500), st.integers(1, 500))
def test_newcombes_equation_holds_at_both_ends_of_an_interval(auroc: float, positives: int, negatives: int) -> None:
    """Newcombe's equation holds there, and nearer by it does not."""

    def beyond(true: float) -> float:
        spread = 1 + ((positives + negatives) / 2 - 1) * ((1 - true) / (2 - true) + true / (1 + true))
        chance = float(norm.ppf(0.975)) ** 2 * true * (1 - true) * spread / (positives * negatives)
        return (auroc - true) ** 2 - chance

    low, high = compute_newcombe_interval(auroc, positives, negatives)
    assert 0 <= low <= auroc <= high <= 1
    for end, outer in ((low, 0.0), (high, 1.0)):
        assert abs(beyond(end)) < 1e-9 or end == outer
        assert all(beyond(end + part * (auroc - end)) <= 1e-12 for part in (0.001, 0.1, 0.5, 0.9))
        assert all(beyond(end + part * (outer - end)) >= -1e-12 for part in (0.001, 0.1, 0.5, 0.9))


def test_one_positive_above_all_negatives_proves_little() -> None:
    scores, labels = np.linspace(0, 1, 50)[:, None], np.eye(50)[:, [49]]
    low, high = bootstrap_auroc_intervals(scores, labels, np.arange(50).astype(str), ["a"], generator()).per_class["a"]
    assert low < 0.5
    assert high == 1


@pytest.mark.parametrize("seed", range(12))
def test_the_mean_of_classes_that_every_resample_ranks_alike_has_an_interval_of_some_width(seed: int) -> None:
    _, labels, patients = random_case(seed, 8 + seed, classes=1 + seed % 3)
    names = [str(c) for c in range(labels.shape[1])]
    perfect = bootstrap_auroc_intervals(
        labels + generator(seed).random(labels.shape) / 2, labels, patients, names, generator()
    )
    constant = bootstrap_auroc_intervals(np.zeros(labels.shape), labels, patients, names, generator())
    assert perfect.mean_auroc[1] == 1
    assert perfect.mean_auroc[0] <= 0.99
    low, high = constant.mean_auroc
    assert low <= 0.49 < 0.51 <= high
    assert high - 0.5 == pytest.approx(0.5 - low, abs=1e-6)


# ---------------------------------------------------------------------- means over a sample of sites


def test_the_interval_of_one_class_is_students_with_cochrans_correction() -> None:
    # mean 0.6, s² = (0.01 + 0.01) / 2 = 0.01; 3 of 12 sites: (1 - 1/4) 0.01 / 3 = 0.0025; t(0.975, 2) = 4.302653
    sample = estimate_sampled_site_intervals({"a": {"x": 0.5, "y": 0.6, "z": 0.7}}, {"a": 0.25}, 3, 12)
    assert sample.per_class["a"] == pytest.approx((0.6 - 4.302653 * 0.05, 0.6 + 4.302653 * 0.05), abs=1e-6)
    assert sample.mean_auroc == pytest.approx(sample.per_class["a"])
    assert (sample.drawn, sample.of) == (3, 12)


def test_sites_that_test_two_classes_move_both_together() -> None:
    # Each class alone: moved by 0.75**0.5 / 6**0.5 * (-0.1, 0, 0.1); the mean of two like classes moves as one does.
    alike = {"x": 0.5, "y": 0.6, "z": 0.7}
    both = estimate_sampled_site_intervals({"a": alike, "b": alike}, {"a": 0.25, "b": 0.25}, 3, 12)
    assert both.mean_auroc == pytest.approx(both.per_class["a"])
    # Turned round, what one class gains by a draw the other loses: nothing is left to chance.
    turned = estimate_sampled_site_intervals(
        {"a": alike, "b": {"x": 0.7, "y": 0.6, "z": 0.5}}, {"a": 0.25, "b": 0.25}, 3, 12
    )
    assert turned.mean_auroc == pytest.approx((0.6, 0.6))


def test_a_class_whose_sites_were_all_asked_is_known() -> None:
    sample = estimate_sampled_site_intervals({"a": {"x": 0.5, "y": 0.7}, "b": {"x": 0.9}}, {"a": 1.0, "b": 1.0}, 2, 9)
    assert sample.per_class == {"a": (0.6, 0.6), "b": (0.9, 0.9)}
    assert sample.mean_auroc == (0.75, 0.75)


def test_there_is_no_interval_where_one_site_stands_for_several_or_nothing_is_told() -> None:
    sample = estimate_sampled_site_intervals(
        {"a": {"x": 0.5, "y": 0.7}, "b": {"x": 0.9}, "c": {}}, {"a": 0.5, "b": 0.5, "c": 0}, 2, 4
    )
    assert list(sample.per_class) == ["a"]
    assert sample.mean_auroc is None
    nothing = estimate_sampled_site_intervals({"a": {}}, {"a": 0.5}, 2, 4)
    assert (nothing.mean_auroc, nothing.per_class) == (None, {})


def test_intervals_hold_the_mean_over_all_sites_in_95_of_100_draws() -> None:
    generator = np.random.default_rng(5)
    sites, classes = 400, "abc"
    annotates = generator.random((sites, len(classes))) < [0.9, 0.5, 0.3]
    skill = generator.normal(0, 0.05, (sites, 1)) + generator.normal(0, 0.05, (sites, len(classes)))
    aurocs = np.clip(0.75 + skill, 0, 1)
    truth = np.mean([aurocs[annotates[:, c], c].mean() for c in range(len(classes))])
    held = 0
    for _ in range(600):
        drawn = generator.choice(sites, 60, replace=False)
        values = {n: {str(s): aurocs[s, c] for s in drawn if annotates[s, c]} for c, n in enumerate(classes)}
        shares = {n: len(values[n]) / int(annotates[:, c].sum()) for c, n in enumerate(classes)}
        interval = estimate_sampled_site_intervals(values, shares, 60, sites).mean_auroc
        held += interval[0] <= truth <= interval[1]
    # binomial: 600 at 0.95: mean 570, standard deviation 5.3
    assert abs(held - 570) < 4 * 5.3
