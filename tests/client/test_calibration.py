"""Recalibration of a model's probabilities at a hospital."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from polyclinic.client.prediction.calibration import (
    MIN_CLASS_IMAGES,
    calibrate_class,
    compute_logits,
    fit_scaling,
    scale_probabilities,
)


def draw(slope: float, offset: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of a model, and labels that are true with probability sigmoid(slope * logit + offset)."""
    random = np.random.default_rng(seed)
    scores = random.uniform(0.02, 0.98, count)
    true = 1 / (1 + np.exp(-(slope * compute_logits(scores) + offset)))
    return scores, (random.random(count) < true).astype(float)


@pytest.mark.parametrize(("slope", "offset"), [(0.5, -1.0), (2.0, 0.7), (1.0, 0.0)])
def test_platt_scaling_equals_an_unpenalised_logistic_regression_on_the_logits(slope: float, offset: float) -> None:
    scores, labels = draw(slope, offset, 4000, 1)
    theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(compute_logits(scores)[:, None], labels)
    assert fit_scaling(scores, labels, "platt") == pytest.approx((theirs.coef_[0, 0], theirs.intercept_[0]), abs=1e-4)


def test_temperature_scaling_equals_a_logistic_regression_without_intercept() -> None:
    scores, labels = draw(0.5, 0.0, 4000, 2)
    theirs = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(compute_logits(scores)[:, None], labels)
    assert fit_scaling(scores, labels, "temperature") == pytest.approx((theirs.coef_[0, 0], 0.0), abs=1e-4)


def test_the_error_on_test_images_falls_where_the_model_is_overconfident() -> None:
    fit = calibrate_class(draw(0.4, -1.0, 3000, 3), draw(0.4, -1.0, 3000, 4), "platt")
    assert fit.is_fitted
    assert fit.error_before is not None
    assert fit.error_after is not None
    assert fit.error_after < 0.04 < 0.15 < fit.error_before


def test_the_test_part_changes_no_parameter() -> None:
    validation = draw(0.5, 0.2, 500, 5)
    first, second = (calibrate_class(validation, draw(0.5, 0.2, 500, seed), "platt") for seed in (6, 7))
    assert (first.slope, first.offset) == (second.slope, second.offset)
    assert first.error_after != second.error_after


def test_a_class_with_too_few_positives_stays_as_it_is_and_says_so() -> None:
    scores, labels = np.linspace(0.1, 0.9, 200), np.zeros(200)
    labels[: MIN_CLASS_IMAGES - 1] = 1
    labels[150:] = np.nan
    fit = calibrate_class((scores, labels), (scores, labels), "platt")
    assert (fit.slope, fit.offset, fit.positives) == (1.0, 0.0, MIN_CLASS_IMAGES - 1)
    assert f"{MIN_CLASS_IMAGES - 1} validation images show it" in fit.reason
    assert fit.error_before == fit.error_after


def test_a_fit_that_would_turn_the_order_round_is_not_used() -> None:
    scores, labels = draw(-1.0, 0.0, 1000, 8)
    fit = calibrate_class((scores, labels), (scores, labels), "platt")
    assert not fit.is_fitted
    assert scale_probabilities(scores, fit.slope, fit.offset) == pytest.approx(scores)


def test_probabilities_of_zero_and_one_stay_finite() -> None:
    scaled = scale_probabilities(np.array([0.0, 1.0]), 0.5, 0.1)
    assert np.isfinite(scaled).all()
    assert 0 < scaled[0] < 0.5 < scaled[1] < 1
