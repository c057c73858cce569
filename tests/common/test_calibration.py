"""Calibration and decisions are scikit-learn's, and those from histograms lie within what they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, confusion_matrix, f1_score, recall_score

from common.metrics.calibration import (
    DecisionCounts,
    ReliabilityBin,
    compute_calibration,
    compute_pooled_calibration,
    compute_score_quality,
    count_decisions,
    count_pooled_decisions,
)
from common.metrics.pooled import pool_site_histograms, sum_site_histograms
from common.metrics.score_histograms import compute_score_histogram

Floats = NDArray[np.floating]
seeds = st.integers(0, 10_000)


def random_case(seed: int) -> tuple[Floats, Floats]:
    """Scores, some on a border of the tenths, and labels of both kinds."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 400))
    labels = (rng.random(count) < rng.uniform(0.05, 0.95)).astype(np.float64)
    labels[:2] = 0, 1
    return np.round(rng.beta(*rng.uniform(0.1, 3, 2), count), int(rng.choice([1, 3, 12]))), labels


@given(seeds)
@settings(max_examples=200)
def test_error_and_brier_score_are_those_of_scikit_learn(seed: int) -> None:
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


@given(seeds)
@settings(max_examples=200)
def test_calibration_from_a_histogram_lies_within_what_it_says(seed: int) -> None:
    scores, labels = random_case(seed)
    exact, rough = (
        compute_calibration(scores, labels),
        compute_pooled_calibration(compute_score_histogram(scores, labels)),
    )
    assert [(b.images, b.positives) for b in rough.bins] == [(b.images, b.positives) for b in exact.bins]
    assert abs(rough.expected_error - exact.expected_error) <= rough.within + 1e-12
    assert abs(rough.brier - exact.brier) <= rough.within + 1e-12
    assert rough.within < 0.003


@given(seeds)
@settings(max_examples=100)
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


def test_a_case_worked_by_hand() -> None:
    # Scores .12 .18 in one bin, .9 in the bin that ends there; one unknown. Means .15 and .9; shares 1/2 and 1.
    # Error: (2 * |.15 - .5| + 1 * |.9 - 1|) / 3 = .8 / 3. Brier: (.12^2 + .82^2 + .1^2) / 3 = .6968 / 3.
    result = compute_calibration(np.array([0.12, 0.18, 0.9, 0.4]), np.array([0, 1, 1, np.nan]))
    assert result.bins[1] == ReliabilityBin(2, 1, pytest.approx(0.15))
    assert result.bins[8] == ReliabilityBin(1, 1, pytest.approx(0.9))
    assert result.bins[4] == ReliabilityBin(0, 0, None)
    assert result.expected_error == pytest.approx(0.8 / 3)
    assert result.brier == pytest.approx(0.6968 / 3)


def test_a_score_that_is_not_finite_counts_only_where_the_label_is_known() -> None:
    result = compute_calibration(np.array([0.25, np.nan]), np.array([1, np.nan]))
    assert result.brier == pytest.approx(0.5625)


def test_without_a_known_label_there_is_no_calibration_and_without_a_kind_no_share() -> None:
    assert compute_calibration(np.array([0.2]), np.array([np.nan])) is None
    none = count_decisions(np.array([0.2]), np.array([np.nan]))
    assert none == DecisionCounts(0, 0, 0, 0)
    assert (none.sensitivity, none.specificity, none.balanced_accuracy, none.f1) == (None, None, None, None)


def one_class_an_image(seed: int, images: int = 60, classes: int = 4) -> tuple[Floats, Floats, NDArray[np.intp]]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, images)
    return rng.dirichlet(np.full(classes, 0.7), images), np.eye(classes)[truth], truth


def test_the_confusion_of_a_multi_class_task_is_that_of_scikit_learn_without_images_of_unknown_class() -> None:
    scores, labels, truth = one_class_an_image(4)
    labels[:5] = np.nan
    result = compute_score_quality(scores, labels, "abcd", "multi_class")
    answer = scores.argmax(axis=1)
    assert np.array(result.confusion).tolist() == confusion_matrix(truth[5:], answer[5:], labels=range(4)).tolist()
    assert result.top_class == compute_calibration(scores.max(axis=1)[5:], (answer == truth)[5:].astype(float))


def test_a_task_of_yes_and_no_questions_has_decisions_for_each_class_and_no_confusion_between_them() -> None:
    scores, labels, _ = one_class_an_image(5)
    labels[:, 2] = np.nan
    result = compute_score_quality(scores, labels, "abcd", "multi_label")
    assert (result.confusion, result.top_class) == (None, None)
    assert list(result.calibration) == list(result.decisions) == ["a", "b", "d"]
    assert result.decisions["b"] == count_decisions(scores[:, 1], labels[:, 1])


def test_pooling_adds_up_who_told_and_names_who_did_not() -> None:
    scores, labels = random_case(8)
    halves = {"north": slice(0, None, 2), "south": slice(1, None, 2)}
    histograms = {site: {"mass": compute_score_histogram(scores[rows], labels[rows])} for site, rows in halves.items()}
    owners = {"edema": ("north", "south"), "mass": ("east", "north", "south")}
    pooled = pool_site_histograms(sum_site_histograms(histograms, owners), owners)
    assert list(pooled.per_class) == ["mass"]
    of_class = pooled.per_class["mass"]
    assert (of_class.sites, of_class.silent) == (("north", "south"), ("east",))
    assert (of_class.positives, of_class.negatives) == (np.sum(labels == 1), np.sum(labels == 0))
    assert of_class.decisions == count_decisions(scores, labels)
    assert of_class.balanced_accuracy == count_decisions(scores, labels).balanced_accuracy
    assert pooled.mean_auroc == of_class.auroc


def test_the_mean_of_pooled_classes_leaves_out_those_without_a_value_and_nothing_told_is_nothing_pooled() -> None:
    # mass: both pairs right, 1; hernia: no positive; edema: one of two pairs right, 1/2.
    scores = {"mass": ((0.9, 1), (0.2, 0), (0.4, 0)), "hernia": ((0.9, 0),), "edema": ((0.3, 1), (0.2, 0), (0.4, 0))}
    site = {name: compute_score_histogram(*np.array(rows).T) for name, rows in scores.items()}
    owners = dict.fromkeys(site, ("north",))
    pooled = pool_site_histograms(sum_site_histograms({"north": site}, owners), owners)
    assert pooled.mean_auroc.value == pytest.approx(0.75)
    assert pooled.per_class["hernia"].auroc is None
    assert pool_site_histograms(sum_site_histograms({"north": {}}, {"mass": ("north",)}), {"mass": ("north",)}) is None
