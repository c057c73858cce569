"""Facts about measures of a task with one class an image."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, recall_score

from polyclinic.common.errors import ModelDiverged
from polyclinic.common.metrics.multi_class import (
    CorrectPredictionCount,
    MultiClassMetrics,
    RoundAccuracy,
    compute_confusion_matrix,
    compute_multi_class_metrics,
    compute_round_accuracy,
    estimate_accuracy_density,
    find_best_client_accuracies,
)
from tests.federations import read_vectors

UNKNOWN = float("nan")


def vector_metrics(method: str) -> dict[str, Any]:
    vector = read_vectors(f"{method}.json")
    if not vector:
        pytest.skip(f"../shared/vectors/{method}.json is absent")
    return dict(vector["metrics"])


def one_hot(truth: list[int], classes: int) -> NDArray[np.float64]:
    return np.eye(classes)[truth]


def scored(predicted: list[int], truth: list[int], classes: int) -> MultiClassMetrics:
    return compute_multi_class_metrics(one_hot(predicted, classes), one_hot(truth, classes))


answers = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20)


def test_the_measures_of_unifed_are_those_of_one_matrix_over_the_test_set() -> None:
    vector = vector_metrics("unifed")
    result = compute_multi_class_metrics(np.array(vector["logits"]), one_hot(vector["y"], 4))
    measures = ("accuracy", "sens_macro_recall", "spec_macro", "f1_macro")
    expected = [pytest.approx(vector["proper_global_macro"][name]) for name in measures]
    assert result == MultiClassMetrics(*expected, images=len(vector["y"]))


def test_the_best_accuracies_of_fedsld_are_the_vectors_and_come_from_two_rounds() -> None:
    vector = vector_metrics("fedsld")
    pairs = [zip(row, vector["n_test"], strict=True) for row in vector["correct_per_round_client"]]
    rounds = {number: sites(**{f"site-{i}": pair for i, pair in enumerate(row)}) for number, row in enumerate(pairs, 1)}
    scores = [compute_round_accuracy(sites) for sites in rounds.values()]
    assert [score.mean for score in scores if score] == pytest.approx(vector["mean_client_acc"])
    assert [score.pooled for score in scores if score] == pytest.approx(vector["pooled_acc"])
    best = find_best_client_accuracies(rounds)
    assert best.best_mean_client_test_accuracy == pytest.approx(vector["expected_BMCTA"])
    assert best.best_test_accuracy == pytest.approx(vector["expected_BTA"])
    assert (best.best_mean_round, best.best_pooled_round) == (2, 3)
    assert best.per_site == {"site-0": 0.6, "site-1": 0.8, "site-2": 0.5}


def test_a_matrix_worked_by_hand_leaves_out_the_class_that_no_image_has() -> None:
    # Truth 0 0 0 1, said 0 0 2 0; class 2 is in no image. Recall 2/3 and 0/1 -> 1/3.
    # Specificity of 0: its one negative is taken for 0 -> 0/1; of 1: all three are right -> 3/3 -> mean 1/2.
    # F1 of 0: 2 * 2 / (3 + 3); of 1: 0 -> mean 1/3.
    expected = MultiClassMetrics(0.5, pytest.approx(1 / 3), pytest.approx(1 / 2), pytest.approx(1 / 3), 4)
    assert scored([0, 0, 2, 0], [0, 0, 0, 1], 3) == expected


@given(answers)
@settings(max_examples=40)
def test_the_measures_are_those_of_scikit_learn_over_the_classes_present(pairs: list[tuple[int, int]]) -> None:
    predicted, truth = [p for p, _ in pairs], [t for _, t in pairs]
    result, present = scored(predicted, truth, 4), sorted(set(truth))
    more = {"labels": present, "average": "macro", "zero_division": 0}
    assert (result.accuracy, result.images) == (pytest.approx(accuracy_score(truth, predicted)), len(truth))
    assert result.sensitivity == pytest.approx(recall_score(truth, predicted, **more))
    assert result.f1 == pytest.approx(f1_score(truth, predicted, **more))
    of_each = [
        recall_score(np.equal(truth, name), np.equal(predicted, name), pos_label=False, zero_division=np.nan)
        for name in present
    ]
    assert result.specificity == (pytest.approx(np.mean(of_each)) if len(present) > 1 else None)
    matrix = compute_confusion_matrix(np.array(predicted), np.array(truth), 4)
    assert matrix.tolist() == confusion_matrix(truth, predicted, labels=range(4)).tolist()
    unknown = np.array([[0.0, UNKNOWN, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [UNKNOWN] * 4])
    scores = np.vstack([one_hot(predicted, 4), np.full((3, 4), UNKNOWN)])
    assert compute_multi_class_metrics(scores, np.vstack([one_hot(truth, 4), unknown])) == result


def test_a_class_is_known_though_its_source_does_not_annotate_every_other() -> None:
    labels = np.array([[1.0, 0.0, UNKNOWN], [UNKNOWN, 1.0, 0.0]])
    result = compute_multi_class_metrics(np.array([[0.1, 0.0, 0.7], [0.2, 0.6, 0.2]]), labels)
    assert result == scored([2, 1], [0, 1], 3)


def test_nothing_to_score_has_no_measures() -> None:
    assert compute_multi_class_metrics(np.zeros((0, 3)), np.zeros((0, 3))) is None
    assert compute_multi_class_metrics(np.zeros((2, 3)), np.full((2, 3), UNKNOWN)) is None


@pytest.mark.parametrize(
    ("scores", "labels", "fault"),
    [
        ([[0.2, 0.8]], [[1.0, 1.0]], "1 images have several classes"),
        ([[0.2, 0.8]], [[-1.0, 1.0]], "Labels hold -1"),
        ([[0.2, 0.8]], [[0.0, 1.0, 0.0]], "of one shape"),
    ],
)
def test_several_classes_an_image_are_refused(scores: list[list[float]], labels: list[list[float]], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        compute_multi_class_metrics(np.array(scores), np.array(labels))


def test_scores_that_are_not_finite_are_a_model_that_diverged() -> None:
    with pytest.raises(ModelDiverged, match="the model diverged: scores of an image are NaN"):
        compute_multi_class_metrics(np.array([[0.2, UNKNOWN]]), np.array([[0.0, 1.0]]))


def sites(**counts: tuple[int, int]) -> dict[str, CorrectPredictionCount]:
    return {site: CorrectPredictionCount(*pair) for site, pair in counts.items()}


def test_a_site_that_was_absent_or_tested_nothing_is_left_out_of_its_rounds_mean() -> None:
    assert compute_round_accuracy(sites(north=(3, 4), south=(0, 0))) == RoundAccuracy(0.75, 0.75)
    best = find_best_client_accuracies({1: sites(north=(1, 4), south=(1, 1)), 2: sites(north=(3, 4))})
    assert (best.best_mean_client_test_accuracy, best.best_mean_round) == (0.75, 2)
    assert best.per_site == {"north": 0.75}


@pytest.mark.parametrize(
    "rounds",
    [
        {1: {}, 2: sites(north=(0, 4)), 3: sites(north=(0, 0))},
        {3: sites(north=(2, 4)), 2: sites(north=(1, 2)), 1: sites(north=(0, 2))},
    ],
    ids=["rounds in which nobody tested", "the earlier of equal rounds"],
)
def test_the_best_round_is_the_first_of_the_best_that_were_tested(
    rounds: dict[int, dict[str, CorrectPredictionCount]],
) -> None:
    best = find_best_client_accuracies(rounds)
    assert (best.best_mean_round, best.best_pooled_round) == (2, 2)


def test_without_a_tested_round_there_is_no_best() -> None:
    assert find_best_client_accuracies({1: {}, 2: sites(north=(0, 0))}) is None


def test_the_density_of_two_sites_is_the_mean_of_two_bells_of_scotts_width() -> None:
    # Sample SD of .4 and .6 is .1 * sqrt(2); Scott's factor for two points is 2 ** (-1/5).
    curve = estimate_accuracy_density([0.4, 0.6], points=5)
    assert curve
    grid, density = curve
    width = 0.1 * 2**0.5 * 2**-0.2
    bells = [np.exp(-(((grid - site) / width) ** 2) / 2) / (width * (2 * np.pi) ** 0.5) for site in (0.4, 0.6)]
    assert grid.tolist() == [0, 0.25, 0.5, 0.75, 1]
    np.testing.assert_allclose(density, np.mean(bells, axis=0), rtol=1e-9)


@pytest.mark.parametrize("accuracies", [[], [0.8], [0.8, 0.8, 0.8]])
def test_accuracies_without_width_have_no_density(accuracies: list[float]) -> None:
    assert estimate_accuracy_density(accuracies) is None
