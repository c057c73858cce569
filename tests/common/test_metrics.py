"""Facts about per-class metrics with unknown labels."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from polyclinic.common.errors import ModelDiverged
from polyclinic.common.metrics.auroc import (
    ClassMetrics,
    compute_mean_and_sd,
    compute_metrics_per_class,
    summarise_test_results,
)
from tests.federations import read_vectors

SURGICAL, FEDMLP = read_vectors("surgical.json"), read_vectors("fedmlp.json")
UNKNOWN = float("nan")


def column(*values: float) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)[:, None]


@pytest.mark.skipif(not SURGICAL, reason="shared vectors are not beside the project")
def test_auroc_mean_and_sd_equal_the_authors_vector() -> None:
    vector = SURGICAL["auroc"]
    results = compute_metrics_per_class(np.array(vector["score"]), np.array(vector["y"], dtype=float), ["a", "b", "c"])
    aurocs = [result.auroc for result in results.values()]
    assert aurocs == pytest.approx(vector["per_class"], rel=1e-5)
    assert compute_mean_and_sd(aurocs) == pytest.approx((vector["mean"], vector["sd_population_ddof0"]), rel=1e-9)


@pytest.mark.skipif(not FEDMLP, reason="../shared/vectors/fedmlp.json is absent")
def test_the_means_over_classes_are_fedmlps() -> None:
    vector = FEDMLP["metrics"]
    results = compute_metrics_per_class(np.array(vector["prob"]), np.array(vector["y"], dtype=float), ["a", "b", "c"])
    summary = summarise_test_results(results, (), ())
    assert summary.mean_balanced_accuracy == pytest.approx(vector["BACC_macro_binary"], rel=1e-9)
    assert summary.mean_average_precision == pytest.approx(vector["mAP_macro"], rel=1e-9)
    assert summary.mean_auroc == pytest.approx(vector["AUC_macro"], rel=1e-9)


def test_a_class_worked_by_hand() -> None:
    # Positives .9 .4, negatives .6 .1 .4: right order in .9>(.6 .1 .4) and .4>.1, a tie with .4 -> 4.5 of 6 pairs.
    # Over .5: one of two positives, one of three negatives -> (1/2 + 2/3) / 2.
    # Precision by falling threshold: 1/1 at .9 (recall 1/2), 1/2 at .6, 2/4 at .4 (recall 1) -> 1/2 + 1/2 * 1/2.
    result = compute_metrics_per_class(column(0.9, 0.4, 0.6, 0.1, 0.4), column(1, 1, 0, 0, 0), ["mass"])["mass"]
    assert result.auroc == pytest.approx(4.5 / 6)
    assert result.balanced_accuracy == pytest.approx(7 / 12)
    assert result.average_precision == pytest.approx(0.75)
    assert (result.positives, result.negatives) == (2, 3)


@pytest.mark.parametrize(
    ("labels", "positives", "negatives"),
    [((0, 0, 0), 0, 3), ((1, 1, UNKNOWN), 2, 0), ((UNKNOWN, UNKNOWN, UNKNOWN), 0, 0)],
)
def test_a_class_of_one_kind_of_image_is_undefined(labels: tuple[float, ...], positives: int, negatives: int) -> None:
    result = compute_metrics_per_class(column(0.2, 0.7, 0.4), column(*labels), ["mass"])["mass"]
    assert result == ClassMetrics(None, None, None, positives, negatives)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_refused_by_the_name_of_its_class(score: float) -> None:
    with pytest.raises(ModelDiverged, match='1 of 2 scores of class "mass" are NaN or infinite'):
        compute_metrics_per_class(
            np.array([[0.1, score], [0.2, 0.3]]), np.array([[0.0, 1.0], [1.0, 0.0]]), ["edema", "mass"]
        )


@pytest.mark.parametrize(
    ("labels", "names", "reason"),
    [((-1, 1), ["mass"], 'class "mass" hold -1'), ((0, 1), ["edema", "mass"], "for 2 classes")],
)
def test_labels_of_another_form_are_refused(labels: tuple[float, ...], names: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compute_metrics_per_class(column(0.1, 0.2), column(*labels), names)


def test_mean_and_sd_leave_out_what_is_undefined() -> None:
    # Mean of .6 and .8 is .7; population SD is .1 (the sample SD would be .141).
    assert compute_mean_and_sd([0.6, None, 0.8]) == pytest.approx((0.7, 0.1))
    assert compute_mean_and_sd([None]) == (None, None)


def test_the_summary_separates_shared_from_unique_classes() -> None:
    results = {
        "edema": ClassMetrics(0.9, 0.5, 0.7, 3, 7),
        "hernia": ClassMetrics(None, None, None, 0, 10),
        "mass": ClassMetrics(0.6, 0.3, 0.5, 4, 6),
    }
    summary = summarise_test_results(results, shared={"edema"}, unique={"mass", "hernia"})
    assert summary.mean_auroc == pytest.approx(0.75)
    assert summary.mean_average_precision == pytest.approx(0.4)
    assert summary.shared_classes.mean_auroc == 0.9
    assert (summary.unique_classes.mean_auroc, summary.unique_classes.classes) == (0.6, ("hernia", "mass"))
    assert json.loads(json.dumps(asdict(summary)))["per_class"]["hernia"]["auroc"] is None


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_every_measure_is_that_of_scikit_learn_over_the_known_labels_of_each_class(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.round(rng.random((30, 3)), int(rng.integers(1, 6)))
    labels = rng.choice([0.0, 1.0, UNKNOWN], (30, 3))
    labels[:2] = [[0.0], [1.0]]
    scores[np.isnan(labels)] = rng.choice([0.5, UNKNOWN])
    for place, metrics in enumerate(compute_metrics_per_class(scores, labels, "abc").values()):
        labelled = ~np.isnan(labels[:, place])
        truth, score = labels[labelled, place], scores[labelled, place]
        assert metrics.auroc == pytest.approx(roc_auc_score(truth, score))
        assert metrics.average_precision == pytest.approx(average_precision_score(truth, score))
        assert metrics.balanced_accuracy == pytest.approx(balanced_accuracy_score(truth, score > 0.5))
        assert (metrics.positives, metrics.negatives) == (np.sum(truth == 1), np.sum(truth == 0))
