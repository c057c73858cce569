"""How scores are spread: told where the experiment asks and the hospital allows it, and of small classes never."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

import polyclinic
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import evaluate_with_privacy_layers
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.metrics.score_histograms import BIN_EDGES, SCORE_BINS
from polyclinic.common.plugins import METRICS, identify_plugin, register_local_plugin
from polyclinic.common.simulation import load_undivided_data
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.records import EvaluateReply
from polyclinic.data.base.image_set import ImageSet
from tests.client.hidden_labels import hospital, several_classes_an_image
from tests.client.rounds import beginning, changed_plan, evaluation, images, plan, record_of, request, send
from tests.federations import experiment, federation, of_type, overheard

NAMES = ("Mass", "Edema")


def figures_of_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[dict[str, Any], list[Any]]:
    """A run's test figures, and the sites' replies to the last evaluation and to the test after it."""
    traffic = overheard(monkeypatch)
    test = federation(folder, "run.rounds=1", *overrides)["test"]
    return test, [decode_record(content, EvaluateReply) for content in of_type(traffic.up, "evaluate")]


def test_pooled_values_enclose_those_of_shared_images_and_thresholds_are_chosen_on_validation_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, replies = figures_of_run(tmp_path, monkeypatch, "evaluation.sensitivity=0.8")
    classes = [(reply.class_names, reply.histogram_classes, reply.validation_classes) for reply in replies]
    assert classes[:3] == [((), (), ())] * 3
    assert all(tested and tested == spread for tested, spread, _ in classes[3:])
    for name, exact in test["per_class"].items():
        pooled = test["pooled"]["per_class"][name]
        for measure in ("auroc", "average_precision"):
            assert abs(pooled[measure]["value"] - exact[measure]) <= pooled[measure]["error"] + 1e-9
        assert pooled["balanced_accuracy"] == pytest.approx(exact["balanced_accuracy"])
        assert pooled["positives"] == len(pooled["sites"]) * exact["positives"]
        assert pooled["interval"] is None  # each image is there once a site
    assert test["pooled"]["mean_auroc"]["value"] == pytest.approx(test["mean_auroc"], abs=0.005)
    histograms = [reply.validation_histograms for reply in replies[3:]]
    assert set(test["operating_points"]) == set(test["per_class"])
    for name, (youden, sensitive) in test["operating_points"].items():
        positives = sum(of_site[name].positives for of_site in histograms if name in of_site)
        negatives = sum(of_site[name].negatives for of_site in histograms if name in of_site)
        assert youden["chosen_on"] == sensitive["chosen_on"] == [positives.sum(), negatives.sum()]
        above = BIN_EDGES[:-1] >= sensitive["threshold"]
        assert positives[above].sum() >= 0.8 * positives.sum() > positives[above][1:].sum()
        for point in (youden["decisions"], sensitive["decisions"]):
            tested = test["per_class"][name]
            assert point["true_positives"] + point["false_negatives"] == tested["positives"]
            assert point["false_positives"] + point["true_negatives"] == tested["negatives"]


def test_a_run_that_does_not_ask_receives_no_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test, replies = figures_of_run(tmp_path, monkeypatch, "evaluation.pooled=false")
    assert [(reply.histogram_classes, reply.validation_classes) for reply in replies] == [((), ())] * 6
    assert (test["pooled"], test["operating_points"]) == (None, {})


FEW = 40


@pytest.mark.parametrize(
    ("keys", "classes"),
    [
        ({}, ("a", "c")),
        ({"score_histograms": False}, ()),
        ({"training_figures": False}, ()),
        ({"smallest_count": FEW}, ()),  # patients of the validation part
        ({"smallest_count": 0}, ("a", "b", "c")),
        ({"level": "masked", "score_histograms": True}, ()),
        ({"level": "private"}, ()),
    ],
)
def test_validation_scores_leave_by_the_policy(
    keys: dict[str, object], classes: tuple[str, ...], tmp_path: Path
) -> None:
    labels = np.eye(3, dtype=np.float32)[np.repeat(np.arange(3), [20, 3, 30])]
    labels[:10, 2] = 1  # so that classes do not add up
    who = np.array([f"p{row}" for row in range(len(labels))])
    images = np.random.default_rng(1).integers(0, 255, (len(labels), 16, 16)).astype(np.uint8)
    part = ImageSet(images, labels, ("a", "b", "c"), who, np.full(len(labels), ""))
    policy = SitePolicy.model_validate(keys)
    judged = part.select_rows(np.arange(0, len(labels), 2)) if policy.smallest_count == FEW else part
    at = Site(LabelDeclaration("north", part.class_names), part, judged, part, tmp_path, policy=policy, durable=False)
    of = plan("fedavg")
    reply = evaluate_with_privacy_layers(at, evaluation(of, beginning(of, part.class_names), 1, 1, -1))
    assert reply.validation_classes == classes
    assert not reply.histogram_classes or policy.score_histograms
    assert len(reply.validation_positive_scores) == len(classes) * SCORE_BINS


@pytest.mark.parametrize("numerator", [0, 1e10], ids=["fails", "is too large"])
def test_a_metric_that_fails_is_not_defined_and_its_error_stays_at_the_site(numerator: float, tmp_path: Path) -> None:
    """Of hidden classes, too: an error as the answer said that a picture with one is in the test part."""

    def metric(scores: np.ndarray, labels: np.ndarray) -> float:
        if not numerator:
            raise ZeroDivisionError(f"{labels.sum():g} images")
        return float(numerator + labels.sum())

    name, lines = f"plugin:{register_local_plugin(METRICS, metric)}", list[str]()
    at = hospital(tmp_path, NAMES, several_classes_an_image(2, 8), metrics=(name,))
    at = replace(at, test=images(3, 200, NAMES), tell=lines.append)
    of = changed_plan(plan(), evaluation={"metrics": (name,)})
    of = of.model_copy(update={"plugins": (identify_plugin(METRICS, name.removeprefix("plugin:")),)})
    first = beginning(of, NAMES)
    assert not send(at, "train", request(of, first)).has_error()
    reply = record_of(send(at, "evaluate", evaluation(of, first, 1, 1, -1)), EvaluateReply)
    assert reply.metric_names == (name,)
    assert np.isnan(reply.metric_values).all()
    assert not np.isnan(reply.auroc).all()
    assert any(name in line for line in lines)


def test_each_class_has_the_figures_of_scikit_learn_at_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site tests on 361 images, 32 to 41 of which show a class."""
    monkeypatch.setattr("polyclinic.client.simulation.SIMULATED_SITE_POLICY", SitePolicy())
    summary = federation(tmp_path, "run.rounds=1")
    file = experiment(tmp_path)
    test = load_undivided_data(file.experiment, file.base_folder).test
    scores = polyclinic.predict(tmp_path / "run", test.images)
    tables = [summary["test"]["per_class"], *(site["per_class"] for site in summary["per_site"].values())]
    assert [len(table) for table in tables] == [10, 5, 5, 4]
    for table in tables:
        for name, figures in table.items():
            labels, values = test.labels[:, test.class_names.index(name)], scores[name].to_numpy()
            expected = {
                "auroc": roc_auc_score(labels, values),
                "average_precision": average_precision_score(labels, values),
                "balanced_accuracy": balanced_accuracy_score(labels, values >= 0.5),
            }
            assert {key: figures[key] for key in expected} == pytest.approx(expected, abs=1e-6)
            assert (figures["auroc"], figures["average_precision"]) != (1.0, 0.0)
    assert len({figures["auroc"] for figures in tables[0].values()}) == 10
