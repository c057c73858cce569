"""Metrics of a user's own package: computed by class at the sites and at the coordinator, told where it is allowed."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from sklearn.metrics import average_precision_score

from polyclinic.client.gate.policy_rules import RequestedWork, check_reply_rules, check_request_rules
from polyclinic.client.site.disclosure import suppress_class_metrics
from polyclinic.client.site.policy import UNLIMITED_KEYS, SitePolicy
from polyclinic.common.config import EvaluationSection, make_hospital_plan
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.metrics.auroc import (
    ClassMetrics,
    adapt_plugin_metric,
    average_plugin_metrics,
    compute_metrics_per_class,
)
from polyclinic.common.wire.records import EvaluateReply
from polyclinic.strategies.registry import build_site_method
from tests.federations import experiment, federation, finished
from tests.third_parties import install, stairs

YOUDEN = "plugin:youden"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site-packages", monkeypatch)


def scored() -> tuple[np.ndarray, np.ndarray]:
    scores = np.array([[0.9, 0.2], [0.6, 0.3], [0.4, 0.8], [0.1, 0.9]])
    return scores, np.array([[1, 0], [1, np.nan], [0, 0], [0, 0.0]])


def test_it_is_computed_of_each_class_over_the_known_labels() -> None:
    calls = list[tuple[list[float], list[float]]]()

    def metric(scores: np.ndarray, labels: np.ndarray) -> float:
        calls.append((scores.tolist(), labels.tolist()))
        return 7

    of_class = compute_metrics_per_class(*scored(), ("a", "b"), {"plugin:seven": metric})
    assert calls == [([0.9, 0.6, 0.4, 0.1], [1, 1, 0, 0])]  # of "b" there is no positive
    assert [of_class[name].more for name in "ab"] == [{"plugin:seven": 7.0}, {"plugin:seven": None}]
    assert average_plugin_metrics(of_class.values()) == {"plugin:seven": 7.0}


def test_a_plug_in_cannot_change_what_ours_are_computed_of() -> None:
    def rude(scores: np.ndarray, labels: np.ndarray) -> float:
        scores[:], labels[:] = 0, 0
        return 0

    scores, labels = scored()
    assert compute_metrics_per_class(scores, labels, ("a", "b"), {"plugin:rude": rude})["a"].auroc == 1
    assert scores[0, 0] == 0.9


def fails(scores: np.ndarray, labels: np.ndarray) -> float:
    raise ValueError("patient Jane Roe")


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (fails, "failed: ValueError."),
        (lambda scores, labels: "much", "failed: ValueError."),
        (lambda scores, labels: scores, "failed: TypeError."),
        (lambda scores, labels: float("inf"), "returned inf"),
        (lambda scores, labels: -1e12, "returned -1e+12"),
    ],
)
def test_one_that_fails_is_named_without_its_words(metric: Callable[..., float], problem: str) -> None:
    with pytest.raises(BadInput) as refused:
        compute_metrics_per_class(*scored(), ("a", "b"), {"plugin:bad": metric})
    assert f"evaluation.metrics: plugin:bad: {problem}" in str(refused.value)
    assert "Roe" not in str(refused.value)


def labels_first(truth: np.ndarray, scores: np.ndarray) -> float:
    """A metric in scikit-learn's order, which refuses truths that are not 0 or 1."""
    if not np.isin(truth, (0, 1)).all():
        raise ValueError("the truth is 0 or 1")
    return float((truth * scores).sum())


def test_one_that_wants_the_labels_first_is_told_the_line_to_write() -> None:
    with pytest.raises(BadInput) as refused:
        compute_metrics_per_class(*scored(), ("a", "b"), {"plugin:bad": labels_first})
    assert "lambda scores, labels: NAME(labels, scores)" in refused.value.faults[0].remedy
    turned = {"plugin:good": lambda scores, labels: labels_first(labels, scores)}
    assert compute_metrics_per_class(*scored(), ("a", "b"), turned)["a"].more == {"plugin:good": 1.5}  # 0.9 and 0.6


@pytest.mark.parametrize("metric", [average_precision_score, partial(average_precision_score, pos_label=1)])
def test_a_metric_of_scikit_learn_gets_the_labels_first(metric: Callable[..., float]) -> None:
    scores, labels = np.array([0.9, 0.6, 0.4, 0.1]), np.array([0, 1, 1, 0.0])
    of_class = compute_metrics_per_class(
        scores[:, None], labels[:, None], ("a",), {"plugin:ap": adapt_plugin_metric(metric)}
    )
    assert of_class["a"].more == {"plugin:ap": pytest.approx((1 / 2 + 2 / 3) / 2)}


def test_nothing_is_told_of_a_class_of_few_patients() -> None:
    metrics = ClassMetrics(0.5, 0.5, 0.5, 20, 30, {YOUDEN: 0.25})
    assert suppress_class_metrics(metrics, SitePolicy(), hidden=False).more == {YOUDEN: 0.25}
    assert suppress_class_metrics(metrics, SitePolicy(), hidden=True).more == {YOUDEN: None}


@pytest.mark.parametrize("names", [("youden",), ("plugin:",), tuple(f"plugin:{n}" for n in range(21)), 3])
def test_names_that_cannot_be_are_refused(names: object) -> None:
    with pytest.raises(ValidationError):
        EvaluationSection.model_validate({"metrics": names})


@pytest.mark.slow
def test_a_run_ends_with_it_in_summary_report_and_tensorboard_and_in_the_same_model(tmp_path: Path) -> None:
    _, plain = finished("run.rounds=1")
    federation(tmp_path, "run.rounds=1", f'evaluation.metrics=["{YOUDEN}"]', out="measured", pages=True)
    summary = json.loads((tmp_path / "measured" / "summary.json").read_text())
    assert summary["model_sha256"] == plain["model_sha256"]
    of_class = {name: metrics["more"][YOUDEN] for name, metrics in summary["test"]["per_class"].items()}
    defined = [value for value in of_class.values() if value is not None]
    assert summary["test"]["mean_more"][YOUDEN] == pytest.approx(np.mean(defined))
    assert all(0 <= value <= 1 for value in defined)
    for site in summary["per_site"].values():
        assert all(set(metrics["more"]) == {YOUDEN} for metrics in site["per_class"].values())
    assert (
        f'<th scope="col">{YOUDEN.removeprefix("plugin:")}</th>' in (tmp_path / "measured" / "report.html").read_text()
    )


def request_rule(rule: str, policy: SitePolicy, work: RequestedWork) -> str:
    return next(reason for name, reason in check_request_rules(policy, work) if name == rule)


def requested(tmp_path: Path, *metrics: str) -> RequestedWork:
    file = experiment(tmp_path, f"evaluation.metrics={json.dumps(metrics or [YOUDEN])}")
    return RequestedWork(make_hospital_plan(file.experiment), build_site_method(file.experiment), images=100)


def test_it_is_declined_until_it_is_listed_and_when_its_files_differ(tmp_path: Path) -> None:
    work, rule = requested(tmp_path), partial(request_rule, "policy.metrics")
    assert rule(SitePolicy(metrics=("*",)), requested(tmp_path, YOUDEN, YOUDEN)) == ""
    assert rule(SitePolicy(), work) == f'it does not have "{YOUDEN}"'
    assert rule(SitePolicy(metrics=(YOUDEN,)), work) == ""
    assert rule(SitePolicy.model_validate(UNLIMITED_KEYS), work) == ""
    module = Path(str(stairs().__file__))
    module.write_text(module.read_text() + "\n")
    assert rule(SitePolicy(metrics=("*",)), work).count("youden of stairs 1.0 (files ") == 2


REPLY = EvaluateReply(
    run="r", round=1, site="east", validation_loss=None, validation_auroc=None, class_names=("a", "b"),
    auroc=(0.5, 0.5), average_precision=(0.5, 0.5), balanced_accuracy=(0.5, 0.5), positives=(20, 20),
    negatives=(20, 20), model_sha256="", metric_names=(YOUDEN,), metric_values=(0.1, float("nan")),
)  # fmt: skip


def test_a_reply_tells_no_metric_that_the_plan_did_not_ask_for(tmp_path: Path) -> None:
    policy, work = SitePolicy(metrics=("*",)), requested(tmp_path)
    assert dict(check_reply_rules(policy, work, REPLY))["evaluation.metrics"] == ""
    refusals = dict(check_reply_rules(policy, work, replace(REPLY, metric_names=("plugin:other",))))
    assert refusals["evaluation.metrics"] == 'the plan does not ask for "plugin:other"'


@pytest.mark.parametrize(
    "change",
    [{"metric_values": (0.1,)}, {"metric_names": (YOUDEN, YOUDEN), "metric_values": (0.1,) * 4}, {"metric_names": ()}],
)
def test_a_reply_whose_metrics_do_not_fit_is_refused(change: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(WireError, match="one value a class"):
        replace(REPLY, **change)
