"""Five hundred made-up runs: every printed figure lies within its stated error of scikit-learn's on the same images."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from common.metrics.auroc import FIGURES, SUMS, ClassMetrics, per_class, summarise
from common.metrics.measured import LARGEST_ERROR, TOO_WIDE, figure
from common.metrics.pooled import pool_sites, sum_histograms
from common.metrics.score_histograms import score_histogram
from server.federation.evaluation import class_result_from_histograms
from server.reporting.run_claims import DECIDED_BADLY, RANKED_WELL, prominent_limits, why_undefined
from server.runs.reader import read_run
from tests.server.reports import write

SITES = ("east", "north", "south")
RUNS = 500


def made_up(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores and labels of one class at three sites of 20 to 100 images each; many scores are tied in some runs."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3 * 20, 3 * 100))
    labels = (rng.random(n) < rng.uniform(0.05, 0.95)).astype(float)
    labels[:2] = 0, 1
    logits = rng.normal(rng.uniform(-8, 4), rng.uniform(0.01, 3), n) + labels * rng.uniform(-1, 5)
    scores = 1 / (1 + np.exp(-logits))
    return (np.round(scores, int(rng.integers(1, 4))) if seed % 3 == 0 else scores), labels


def exact(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> tuple[float, float, float]:
    """Scikit-learn's figures, in the order of ``FIGURES``."""
    return (
        float(roc_auc_score(labels, scores)),
        float(average_precision_score(labels, scores)),
        float(balanced_accuracy_score(labels, scores > 0.5)),
    )


def by_sums(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> ClassMetrics:
    """The class's result where the coordinator has the sum of three sites' histograms."""
    told = {site: {"mass": score_histogram(scores[at::3], labels[at::3])} for at, site in enumerate(SITES)}
    owners = {"mass": SITES}
    found = pool_sites(sum_histograms(told, owners), owners)
    return class_result_from_histograms(found.per_class["mass"] if found else None)


def printed(text: str) -> tuple[float, float]:
    """The figure and its error as a page has them; half a unit of the last digit where there is no error."""
    value, _, error = text.partition(" ± ")
    return float(value), float(error) if error else 0.5 * 10.0 ** -len(value.partition(".")[2])


@pytest.mark.parametrize("seed", range(0, RUNS, 50))
def test_each_printed_figure_of_a_sum_lies_within_its_stated_error_of_scikit_learns(seed: int) -> None:
    for run in range(seed, seed + 50):
        scores, labels = made_up(run)
        result = by_sums(scores, labels)
        for name, true in zip(FIGURES, exact(scores, labels), strict=True):
            shown = figure(result.measured(name))
            if shown == "n/a":
                assert result.errors[name] > LARGEST_ERROR
                continue
            value, error = printed(shown)
            assert abs(value - true) <= error + 1e-9, (run, name, shown, true)


def test_where_figures_are_exact_they_are_scikit_learns_to_the_printed_digit() -> None:
    for run in range(RUNS):
        scores, labels = made_up(run)
        result = per_class(scores[:, None], labels[:, None], ["mass"])["mass"]
        shown = [figure(result.measured(name)) for name in FIGURES]
        assert shown == [f"{true:.3f}" for true in exact(scores, labels)]


def test_no_pair_of_printed_figures_is_impossible_and_no_verdict_is_drawn_that_the_images_do_not_bear(
    tmp_path: Path,
) -> None:
    """The pair of exact figures is one that the printed pair allows; a warning holds of the exact figures, too."""
    warned = 0
    for run in range(RUNS):
        scores, labels = made_up(run)
        result, (auroc, precision, accuracy) = by_sums(scores, labels), exact(scores, labels)
        for shown, true in ((result.measured("auroc"), auroc), (result.measured("average_precision"), precision)):
            assert shown is None or abs(shown.value - true) <= shown.error + 1e-9
        perfect = [round(value, 9) == 1 for value in (result.auroc or 0, result.average_precision or 0)]
        assert perfect in ([True, True], [False, False])
        test = asdict(summarise({"mass": result}, {"mass"}, set(), SUMS))
        sites = {site: {"classes": ["mass"]} for site in SITES}
        folder = write(tmp_path / str(run), test=test, classes=["mass"], sites=sites, per_site={})
        said = [limit for limit in prominent_limits(read_run(folder)) if "threshold of 0.5 does not fit" in limit]
        warned += len(said)
        assert not said or (auroc >= RANKED_WELL and accuracy <= DECIDED_BADLY)
    assert warned > RUNS // 50  # the rule is tried


def test_a_figure_that_its_bins_leave_open_is_in_no_mean_and_the_page_gives_the_reason() -> None:
    scores, labels = np.full(90, 0.3), np.tile([0.0, 1.0], 45)  # every score is tied with every other
    result = by_sums(scores, labels)
    assert (result.auroc, result.errors["auroc"]) == (None, 0.5)
    good = ClassMetrics(0.9, 0.8, 0.7, 40, 50)
    test = summarise({"mass": result, "edema": good}, set(), set(), SUMS)
    assert figure(test.measured("auroc")) == "0.900"
    assert why_undefined(result) == TOO_WIDE
