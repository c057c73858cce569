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


# Of each patient: 1 if the outcome was poor, WFNS, S100B and NDKA. Turck et al., Intensive Care Medicine 2010, as in
# the data set aSAH of the R package pROC (Robin et al., BMC Bioinformatics 2011).
HAEMORRHAGE_TABLE = """
0 1 0.13 3.01  0 1 0.14 8.54  0 1 0.1 8.09  0 1 0.04 10.42  1 3 0.13 17.4  1 2 0.1 12.75  0 5 0.47 6  1 4 0.16 13.2
0 1 0.18 15.54  0 2 0.1 6.01  1 5 0.12 15.96  0 2 0.1 17.86  1 5 0.44 5.18  1 5 0.71 8.9  0 1 0.04 13.41
0 2 0.08 20.75  1 5 0.49 11.6  0 2 0.04 16.11  1 2 0.07 32.37  1 5 0.33 54.82  1 2 0.09 32.41  0 1 0.09 49.94
1 1 0.07 40.34  0 1 0.11 9.47  0 1 0.07 6.29  0 2 0.17 12.53  0 1 0.07 6.54  0 2 0.11 6.3  0 1 0.13 80.3
0 1 0.19 12.8  0 3 0.05 9.8  0 4 0.16 9.81  1 2 0.41 9.85  0 1 0.14 18.21  0 4 0.34 5.03  1 5 0.35 14.04
1 4 0.48 21.93  0 1 0.09 8.02  1 4 0.96 7.42  1 2 0.25 8.38  0 5 0.5 6.59  0 5 0.46 9.63  0 1 0.16 13.12
0 1 0.07 7.96  0 2 0.43 14.34  0 4 0.45 41.43  0 1 0.11 7.63  0 1 0.08 7.06  0 2 0.09 12.59  1 5 0.86 13.56
1 5 0.52 3.87  0 2 0.08 9.44  0 1 0.06 7.66  0 2 0.13 12.98  1 5 2.07 419.19  0 1 0.1 27.19  0 2 0.14 22.27
0 2 0.15 9.95  1 2 0.07 21.22  0 1 0.06 11.73  1 5 0.77 10.4  0 1 0.05 58.83  0 1 0.09 6.39  1 2 0.3 11.09
1 5 0.03 12.22  1 2 0.09 13.67  0 1 0.04 17.21  1 4 0.23 22.63  1 5 0.7 12.9  0 2 0.09 9.7  1 4 0.27 21.57
1 4 0.71 8.23  1 1 0.08 72.57  1 4 0.26 15.54  0 1 0.08 10.51  0 2 0.16 10.6  0 1 0.09 14.57  1 4 0.13 5.19
1 2 0.1 9.63  0 1 0.08 4.61  1 2 0.11 21.48  0 3 0.33 17.3  0 2 0.11 12.71  0 4 0.28 9.44  0 2 0.07 11.07
0 1 0.1 19.46  0 4 0.32 10.83  1 5 0.22 5.37  0 1 0.07 11.97  0 1 0.05 7.75  0 5 0.24 9.83  0 4 0.38 10.55
0 2 0.1 28.49  0 2 0.15 8.53  0 1 0.08 12.57  0 1 0.14 12.9  0 1 0.1 46.83  0 3 0.07 11.68  0 1 0.04 12.67
0 2 0.19 9.01  1 5 0.56 9.57  1 2 0.14 34.06  1 2 0.58 11.72  1 5 0.32 14.26  1 5 0.82 47.61  1 5 0.74 11.67
0 2 0.15 24.58  0 4 0.47 10.33  0 4 0.17 13.87  1 5 0.44 15.89  0 1 0.15 22.43  0 1 0.5 6.79  0 1 0.48 13.45
"""
HAEMORRHAGE = np.array(HAEMORRHAGE_TABLE.split(), np.float64).reshape(-1, 4)
MARKERS = {"wfns": HAEMORRHAGE[:, 1], "s100b": HAEMORRHAGE[:, 2], "ndka": HAEMORRHAGE[:, 3]}


# Z, p-value, and ends of the 95 % interval that pROC's own tests expect of roc.test (tests/testthat/test-roc.test.R).
@pytest.mark.parametrize(
    ("first", "second", "z", "p_value", "low", "high"),
    [
        ("wfns", "s100b", 2.20898359144091, 0.0271757822291882, 0.0104061769564846, 0.174214419249478),
        ("wfns", "ndka", 2.79777591868904, 0.00514557970691098, 0.0634011709339876, 0.3600405634833566),
        ("ndka", "s100b", -1.39077002573558, 0.164295175223054, -0.2876917446341914, 0.0488706064228094),
    ],
)
def test_the_test_equals_that_of_proc(
    first: str, second: str, z: float, p_value: float, low: float, high: float
) -> None:
    comparison = compare_by_delong(MARKERS[first], MARKERS[second], HAEMORRHAGE[:, 0])
    assert comparison is not None
    reach = 1.959963984540054 * comparison.standard_error
    figures = (comparison.difference / comparison.standard_error, comparison.p_value)
    assert figures == pytest.approx((z, p_value), rel=1e-12)
    assert (comparison.difference - reach, comparison.difference + reach) == pytest.approx((low, high), rel=1e-12)


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
