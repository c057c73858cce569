"""DeLong's test, Holm's correction, and intervals by patient."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from polyclinic.common.metrics.delong import compare_by_delong, compute_delong_covariance
from polyclinic.common.metrics.patient_intervals import (
    bootstrap_average_precision_interval,
    bootstrap_interval,
    bootstrap_share_interval,
)

# Of each patient: albumin, total protein, K-G score, and 1 if surgery helped. DeLong et al., Biometrics 1988, as
# printed in SAS/STAT's User's Guide, The LOGISTIC Procedure, "Comparing Receiver Operating Characteristic Curves".
# The page with SAS's own output was not at hand: the expected figures were not compared with it.
TABLE = """
3.0 5.8 10 0  3.2 6.3 5 1  3.9 6.8 3 1  2.8 4.8 6 0  3.2 5.8 3 1  0.9 4.0 5 0  2.5 5.7 8 0  1.6 5.6 5 1
3.8 5.7 5 1  3.7 6.7 6 1  3.2 5.4 4 1  3.8 6.6 6 1  4.1 6.6 5 1  3.6 5.7 5 1  4.3 7.0 4 1  3.6 6.7 4 0
2.3 4.4 6 1  4.2 7.6 4 0  4.0 6.6 6 0  3.5 5.8 6 1  3.8 6.8 7 1  3.0 4.7 8 0  4.5 7.4 5 1  3.7 7.4 5 1
3.1 6.6 6 1  4.1 8.2 6 1  4.3 7.0 5 1  4.3 6.5 4 1  3.2 5.1 5 1  2.6 4.7 6 1  3.3 6.8 6 0  1.7 4.0 7 0
3.7 6.1 5 1  3.3 6.3 7 1  4.2 7.7 6 1  3.5 6.2 5 1  2.9 5.7 9 0  2.1 4.8 7 1  2.8 6.2 8 0  4.0 7.0 7 1
3.3 5.7 6 1  3.7 6.9 5 1  3.6 6.6 5 1
"""
OVARIAN_CANCER = np.array(TABLE.split(), np.float64).reshape(-1, 4)
ALBUMIN, PROTEIN, SCORE = OVARIAN_CANCER[:, 0], OVARIAN_CANCER[:, 1], 10 - OVARIAN_CANCER[:, 2]
HELPED = OVARIAN_CANCER[:, 3]


def test_areas_and_standard_errors_of_the_papers_patients() -> None:
    aurocs, covariance = compute_delong_covariance(np.stack([ALBUMIN, PROTEIN, SCORE]), HELPED)
    assert aurocs.round(4).tolist() == [0.7366, 0.6478, 0.7258]
    assert np.sqrt(np.diag(covariance)).round(4).tolist() == [0.0927, 0.1000, 0.1028]


def test_differences_of_areas_and_their_tests_of_the_papers_patients() -> None:
    albumin, protein = (compare_by_delong(each, SCORE, HELPED) for each in (ALBUMIN, PROTEIN))
    assert albumin is not None
    assert protein is not None
    assert (round(albumin.difference, 4), round(albumin.standard_error, 4)) == (0.0108, 0.0953)
    assert (round(protein.difference, 4), round(protein.standard_error, 4)) == (-0.0780, 0.1046)
    assert albumin.p_value == pytest.approx(0.9102, abs=5e-5)
    assert protein.p_value == pytest.approx(0.4561, abs=5e-5)


def test_the_joint_test_of_three_areas_of_the_papers_patients() -> None:
    aurocs, covariance = compute_delong_covariance(np.stack([ALBUMIN, PROTEIN, SCORE]), HELPED)
    contrast = np.array([[0, 1, -1], [1, 0, -1]])
    differences = contrast @ aurocs
    chi_square = differences @ np.linalg.solve(contrast @ covariance @ contrast.T, differences)
    assert round(float(chi_square), 4) == 2.5340


SAMPLES = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(SAMPLES)
def test_the_fast_algorithm_gives_the_areas_and_covariances_of_the_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = np.array([1, 1, 0, 0, *random.integers(0, 2, 20)])
    scores = random.integers(0, 8, (2, len(labels))) / 8  # with ties
    aurocs, covariance = compute_delong_covariance(scores, labels)
    pairs = [model[labels == 1][:, None] - model[labels == 0][None] for model in scores]
    won = [(pair > 0) + (pair == 0) / 2 for pair in pairs]  # (positives, negatives)
    assert aurocs == pytest.approx([pair.mean() for pair in won])
    by_positive, by_negative = (np.cov([pair.mean(axis=axis) for pair in won]) for axis in (1, 0))
    expected = by_positive / (labels == 1).sum() + by_negative / (labels == 0).sum()
    assert covariance == pytest.approx(expected, abs=1e-12)


def test_models_that_rank_all_images_alike_have_no_p_value_and_one_positive_no_test() -> None:
    comparison = compare_by_delong(ALBUMIN, 2 * ALBUMIN, HELPED)
    assert comparison is not None
    assert (comparison.difference, comparison.p_value) == (0.0, None)
    assert compare_by_delong(ALBUMIN[:3], PROTEIN[:3], np.array([1.0, 0.0, 0.0])) is None


def test_with_equal_weights_the_average_precision_is_that_of_scikit_learn() -> None:
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, 60).astype(np.float32)
    scores = (random.integers(0, 9, 60) / 9 + labels / 4).astype(np.float32)  # with ties
    patients = np.arange(60).astype(np.str_)

    class Equal:
        """A generator whose patients all weigh the same."""

        def standard_exponential(self, shape: tuple[int, int], dtype: type) -> object:
            return np.ones(shape, dtype)

    interval = bootstrap_average_precision_interval(scores, labels, patients, Equal())  # type: ignore[arg-type]
    assert interval == pytest.approx([average_precision_score(labels, scores)] * 2)


def test_repeating_each_image_of_a_patient_leaves_intervals_as_they_are() -> None:
    random = np.random.default_rng(2)
    hits, patients = random.random(80) < 0.8, np.arange(80).astype(np.str_)
    once = bootstrap_share_interval(hits, patients, np.random.default_rng(0))
    often = bootstrap_share_interval(np.repeat(hits, 5), np.repeat(patients, 5), np.random.default_rng(0))
    assert once is not None
    assert often == pytest.approx(once)
    as_if_independent = bootstrap_share_interval(
        np.repeat(hits, 5), np.arange(400).astype(np.str_), np.random.default_rng(0)
    )
    assert as_if_independent is not None
    assert as_if_independent[1] - as_if_independent[0] < 0.6 * (once[1] - once[0])


def test_an_interval_of_all_images_right_still_ends_below_one() -> None:
    interval = bootstrap_share_interval(np.ones(10, np.bool_), np.arange(10).astype(np.str_), np.random.default_rng(0))
    assert interval is not None
    assert interval[0] == pytest.approx(0.7225, abs=1e-4)  # Wilson: 1 / (1 + 1.96**2 / 10)
    assert interval[1] == 1.0
    assert bootstrap_share_interval(np.ones(0, np.bool_), np.array([], np.str_), np.random.default_rng(0)) is None


def test_the_bootstrap_of_an_auroc_covers_the_auroc() -> None:
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 200)
    scores = random.normal(labels, 1)
    low, high = bootstrap_interval(
        lambda weights: np.array([roc_auc_score(labels, scores, sample_weight=each) for each in weights.T[:2]]),
        np.arange(200).astype(np.str_),
        np.random.default_rng(0),
    )
    assert low < roc_auc_score(labels, scores) < high
