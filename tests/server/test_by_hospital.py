"""What the report says of each hospital, and what it says that nobody at the coordinator can know."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.common.metrics.auroc import ClassMetrics
from polyclinic.common.metrics.calibration import (
    DecisionCounts,
    OperatingPoint,
    ThresholdDecisions,
    count_decisions_at_points,
)
from polyclinic.common.metrics.score_histograms import compute_score_histogram
from polyclinic.server.reporting.by_hospital import (
    HIDDEN_BY_MASKS,
    HIDDEN_BY_NOISE,
    HIDDEN_BY_POLICIES,
    describe_unknown_figures,
    tabulate_hospitals,
)
from polyclinic.server.reporting.run_report import write_run_report
from polyclinic.server.runs.reader import read_run
from tests.server.reports import NAMES, SITES, body_text, check_page, write

FIGURES = asdict(ClassMetrics(0.8, 0.7, 0.6, 40, 60))
DECIDED = asdict(ThresholdDecisions(0.3, DecisionCounts(31, 9, 13, 47)))
PER_SITE = {
    "north": {"per_class": {NAMES[0]: FIGURES, NAMES[3]: FIGURES}, "decisions": {NAMES[0]: DECIDED}},
    "south": {"per_class": {NAMES[0]: FIGURES}},
}


def write_network_run(folder: Path, **more: Any) -> Path:
    return write(folder, backend="network", **{"per_site": PER_SITE, **more})


def test_decisions_of_a_site_are_counted_at_the_runs_threshold_and_at_a_half_without_one() -> None:
    scores, labels = np.array([0.1, 0.2, 0.35, 0.45, 0.6, 0.9]), np.array([0.0, 1, 0, 1, 1, 0])
    histogram = compute_score_histogram(scores, labels)
    point = OperatingPoint("youden", None, 0.3, (5, 5), DecisionCounts(0, 0, 0, 0))
    decided = count_decisions_at_points({"a": histogram, "b": histogram}, {"a": (point,)})
    # Above 0.3: 0.45 and 0.6 with the finding, 0.35 and 0.9 without it. Above 0.5: 0.6 and 0.9.
    assert decided["a"] == ThresholdDecisions(0.3, DecisionCounts(2, 1, 2, 1))
    assert decided["b"] == ThresholdDecisions(0.5, DecisionCounts(1, 2, 1, 2))


def test_the_page_has_decisions_purpose_and_levels_of_real_hospitals_alone(tmp_path: Path) -> None:
    experiment = {"run": {"seed": 1, "purpose": "Do we miss <edema>?"}}
    sites = {name: {"classes": classes, "level": "trusted"} for name, classes in SITES.items()}
    folder = write_network_run(tmp_path / "run", experiment=experiment, sites=sites)
    figures = tabulate_hospitals(read_run(folder).summary)
    assert figures is not None
    assert {name: [site for site, _ in of_sites] for name, of_sites in figures.decisions.items()} == {
        NAMES[0]: ["north"]
    }
    html = write_run_report(folder).read_text(encoding="utf-8")
    check_page(html)
    text = body_text(html)
    assert "Purpose: Do we miss <edema>?" in text
    assert "".join(["north", "0.3", "31", "9", "13", "47", "0.775", "0.783"]) in text  # the cells of a row
    assert "Level: whom the hospital’s policy trusts" in text
    simulated = write(tmp_path / "simulated", per_site=PER_SITE, sites=sites)
    text = body_text(write_run_report(simulated).read_text(encoding="utf-8"))
    for words in ("Decisions by hospital", "Level: whom", "cannot know"):
        assert words not in text


@pytest.mark.parametrize(
    ("privacy", "per_site", "sentence"),
    [
        ({}, PER_SITE, HIDDEN_BY_POLICIES),
        ({"secure_aggregation": True}, {}, HIDDEN_BY_MASKS),
        ({"level": "patient"}, {}, HIDDEN_BY_NOISE),
        ({"level": "patient"}, PER_SITE, HIDDEN_BY_POLICIES),  # with metrics outside privacy
    ],
)
def test_one_sentence_says_what_the_coordinator_cannot_know(
    tmp_path: Path, privacy: dict[str, Any], per_site: dict[str, Any], sentence: str
) -> None:
    folder = write_network_run(tmp_path / "run", per_site=per_site, experiment={"privacy": privacy})
    assert describe_unknown_figures(read_run(folder).summary) == sentence
    text = body_text(write_run_report(folder).read_text(encoding="utf-8"))
    assert sentence in text
    assert "flwr-client evaluate" in text
