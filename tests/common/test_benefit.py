"""Whether a site is better off alone: the intervals, and a sentence that says no more than they carry."""

import re
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from polyclinic.common.metrics.benefit import (
    COMPARED_SITE_MODELS,
    CONTENDER_MODELS,
    MIN_PRINTED_NUMBER,
    FederationBenefit,
    SiteModel,
    compare_interval_with_zero,
    format_benefit_sentence,
)
from polyclinic.common.metrics.bootstrap import EstimateWithInterval, bootstrap_auroc_intervals, compare_mean_aurocs

CLASSES = ("edema", "hernia", "mass", "nodule")


def images(seed: int, count: int = 120) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Scores of three models, the second as good as the first and the third better; labels; two images a patient."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, (count, 2)).astype(np.float32)
    noise = [generator.normal(size=(count, 2)) for _ in range(3)]
    scores = [noise[0] + labels, noise[1] + labels, noise[2] / 4 + labels]
    return scores, labels, np.array([f"p{row // 2}" for row in range(count)])


def test_means_are_those_of_scikit_learn_and_differences_are_over_the_first() -> None:
    scores, labels, patients = images(0)
    means, gains = compare_mean_aurocs(scores, labels, patients, np.random.default_rng(1))
    expected = [np.mean([roc_auc_score(labels[:, c], model[:, c]) for c in (0, 1)]) for model in scores]
    assert [mean.value for mean in means] == pytest.approx(expected)
    assert [gain.value for gain in gains] == pytest.approx([expected[1] - expected[0], expected[2] - expected[0]])
    assert compare_interval_with_zero(gains[1].interval) == "above"


def test_a_models_interval_is_the_one_that_a_test_of_it_alone_has() -> None:
    scores, labels, patients = images(0)
    means, _ = compare_mean_aurocs(scores, labels, patients, np.random.default_rng(1))
    alone = bootstrap_auroc_intervals(scores[0], labels, patients, ("a", "b"), np.random.default_rng(1))
    assert means[0].interval == pytest.approx(alone.mean_auroc)


def test_a_model_that_ranks_as_the_first_does_is_not_told_from_it() -> None:
    scores, labels, patients = images(0)
    means, (gain,) = compare_mean_aurocs([scores[0], scores[0] * 3 - 1], labels, patients, np.random.default_rng(1))
    low, high = means[0].interval
    assert gain.value == 0
    assert gain.interval[0] < 0 < gain.interval[1]
    assert gain.interval[1] - gain.interval[0] < (high - low) / 2  # the same patients for both


def test_one_positive_patient_decides_nothing_however_sure_the_resamples_are() -> None:
    labels = np.array([[1.0]] + [[0.0]] * 30)
    patients = np.array([f"p{row}" for row in range(31)])
    best, below_three = labels.copy(), labels.copy()
    below_three[1:4] = 2.0
    _, (gain,) = compare_mean_aurocs([below_three, best], labels, patients, np.random.default_rng(1))
    assert gain.value == pytest.approx(0.1)  # in every resample the one positive is first with one, and never with both
    assert gain.interval[0] < 0 < gain.interval[1]


def test_models_that_are_equally_good_are_told_apart_in_few_of_many_draws() -> None:
    """95 % of such intervals hold 0; of 50 draws more than 6 that do not would be chance in less than 1 of 80."""
    wrong = 0
    for seed in range(50):
        scores, labels, patients = images(seed, 60)
        _, (gain, _) = compare_mean_aurocs(scores, labels, patients, np.random.default_rng(seed))
        wrong += not gain.interval[0] <= 0 <= gain.interval[1]
    assert wrong <= 6


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (MIN_PRINTED_NUMBER, 1, "above"),
        (0.0004, 1, "open"),
        (-1, -MIN_PRINTED_NUMBER, "below"),
        (-1, -0.0004, "open"),
        (-1, 1, "open"),
    ],
)
def test_an_interval_that_prints_as_reaching_zero_is_open(low: float, high: float, expected: str) -> None:
    assert compare_interval_with_zero((low, high)) == expected


@st.composite
def estimates(draw: st.DrawFn, least: float) -> EstimateWithInterval:
    """A figure within its interval; often one that ends near zero."""
    ends = st.floats(least, 1) | st.sampled_from(
        [0.0, MIN_PRINTED_NUMBER, 0.0004, -0.0004, -MIN_PRINTED_NUMBER]
    ).filter(lambda x: x >= least)
    low, value, high = sorted(draw(st.tuples(ends, ends, ends)))
    return EstimateWithInterval(value, (low, high))


@st.composite
def benefits(draw: st.DrawFn) -> FederationBenefit:
    names = draw(st.lists(st.sampled_from(CLASSES), min_size=1, unique=True))
    aurocs: Mapping[SiteModel, Mapping[str, float]] = {
        m: {n: draw(st.floats(0, 1)) for n in names} for m in COMPARED_SITE_MODELS
    }
    means = {model: draw(estimates(0.0)) for model in COMPARED_SITE_MODELS}
    gains = {model: draw(estimates(-1.0)) for model in CONTENDER_MODELS}
    return FederationBenefit(aurocs, means, gains, draw(st.sampled_from(["patients", "images"])))


def printed(value: float) -> str:
    text = f"{abs(value):.3f}"
    return text if text == "0.000" else ("−" if value < 0 else "+") + text


def better_ways(benefit: FederationBenefit) -> set[SiteModel]:
    ahead = {model for model in CONTENDER_MODELS if benefit.gain[model].interval[0] >= MIN_PRINTED_NUMBER}
    return {model for model in ahead if benefit.mean[model].interval[0] > 0.5}


@settings(max_examples=120)
@given(benefits())
def test_a_sentence_has_every_figure_and_no_more_than_the_intervals_carry(benefit: FederationBenefit) -> None:
    sentence, tested = format_benefit_sentence("north", benefit, CLASSES), len(benefit.compared_classes)
    above = better_ways(benefit)
    worse = benefit.gain["federated"].interval[1] <= -MIN_PRINTED_NUMBER and benefit.mean["alone"].interval[0] > 0.5
    assert sentence.startswith("north is better off with the federation") == bool(above)
    assert sentence.startswith("north is better off alone:") == (worse and not above)
    assert sentence.startswith("Whether north is better off") == (not above and not worse)
    assert sentence.count("better off") == 1
    verdict = sentence.split(": on its own")[0].replace("and the federated model", "")
    ways = {"federated": "the federated model(?! fine)", "fine_tuned": "fine-tuned", "ensemble": "the ensemble"}
    assert {model for model, words in ways.items() if re.search(words, verdict)} == above
    assert ("over its 4 classes is" in sentence) == (tested == 4)
    assert (f"over {tested} of its 4 classes is" in sentence) == (tested < 4)
    assert sentence.count(f"intervals over {benefit.over})") == 1
    for model in COMPARED_SITE_MODELS:
        mean = benefit.mean[model]
        assert f"{mean.value:.3f} ({mean.interval[0]:.3f}–{mean.interval[1]:.3f})" in sentence
    for gain in benefit.gain.values():
        low, high = map(printed, gain.interval)
        assert f"a difference of {printed(gain.value)} ({low} to {high})" in sentence
    assert len(re.findall(r"\d\.\d{3}", sentence)) == 3 * 4 + 3 * 3
