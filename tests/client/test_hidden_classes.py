"""Labels of hidden classes, where each image shows one class: nothing in an update without noise depends on them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client.app import count_training_images_per_class
from polyclinic.client.benefit.compare import LOCAL_TRAINING_FOLDER, compare_with_local_only_training
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import evaluate_with_privacy_layers
from polyclinic.client.training.task import prepare_local_task
from polyclinic.common.config import HospitalPlan
from polyclinic.common.wire.records import TrainRequest
from polyclinic.strategies.registry import STRATEGIES
from tests.client.hidden_labels import FEW, IMAGES, Labels, hospital, one_class_an_image, sent, several_classes_an_image
from tests.client.rounds import beginning, benefit_request, changed_plan, evaluation, plan, private_plan, request

CLASSES = ("a", "b", "c", "d")
METHODS = sorted(
    name
    for name, item in STRATEGIES.items()
    if item.site_class.traits.supports_multi_class and name not in ("individual", "centralised")
)


def requests(method: str, task: str = "multi_class", **tables: Any) -> list[TrainRequest]:
    """Two rounds."""
    tree = plan(method).model_dump(mode="json")
    of = HospitalPlan.model_validate({**tree, **tables, "model": {**tree["model"], "task": task, "norm": "group"}})
    first = request(of, beginning(of, CLASSES))
    return [replace(first, round=number + 1, counted=number, best=number - 1) for number in (0, 1)]


@pytest.mark.parametrize(
    ("labels_of", "hidden"),
    [
        (one_class_an_image, "ad"),
        # Of images that show a class and a hidden one the class is still known: else their number would show.
        (several_classes_an_image, "cd"),
    ],
)
def test_no_update_depends_on_labels_of_hidden_classes(
    labels_of: Callable[[int, int], Labels], hidden: str, tmp_path: Path
) -> None:
    """Other methods: below, and where an image shows several classes in tests/strategies/test_contract.py."""
    sites = [hospital(tmp_path / str(shown), CLASSES, labels_of(4, shown)) for shown in (1, 3)]
    assert {at.hidden_classes("train") for at in sites} == {frozenset(hidden)}
    few, more = (sent(at, requests("surgical")) for at in sites)
    assert few == more


EXCLUSIVE = one_class_an_image(4, 2)
NEARLY_EXCLUSIVE = EXCLUSIVE.copy()
"""One image shows two classes, and one none."""
NEARLY_EXCLUSIVE[20] = (0, 1, 1, 0)
NEARLY_EXCLUSIVE[21] = 0
WITH_A_CLASS_OF_NONE = EXCLUSIVE.copy()
"""The second class means none of the others: an image shows it, or one or two of the others."""
WITH_A_CLASS_OF_NONE[(EXCLUSIVE[:, 2] == 1).nonzero()[0][::3], 0] = 1
KINDS = {"exclusive": EXCLUSIVE, "nearly exclusive": NEARLY_EXCLUSIVE, "with a class of none": WITH_A_CLASS_OF_NONE}
HIDDEN = {"exclusive": [0, 3], "nearly exclusive": [0, 3], "with a class of none": [3]}


def with_and_without(kind: str, folder: Path, **policy: Any) -> tuple[Site, Site]:
    """A hospital, and one without the images that show hidden classes alone."""
    labels = KINDS[kind]
    alone = ~np.delete(labels, HIDDEN[kind], axis=1).any(axis=1)
    assert alone.any()
    at = hospital(folder / "with", CLASSES, labels, **policy)
    hidden = {part: at.hidden_classes(part) for part in ("train", "validation", "test")}
    assert {CLASSES.index(name) for name in hidden["train"]} == set(HIDDEN[kind])
    left = at.train.select_rows(np.flatnonzero(~alone))
    return at, replace(at, train=left, hidden=hidden, folder=folder / "without")


MULTI_LABEL = ("surgical", "partial_loss", "fedfixmatch", "fedmlp")
WITH_TASK = [
    *((method, "multi_class", "exclusive") for method in METHODS),
    *((method, "multi_label", kind) for method in MULTI_LABEL for kind in KINDS),
]


@pytest.mark.parametrize(("method", "task", "kind"), WITH_TASK)
def test_an_update_is_that_of_a_hospital_without_the_images_that_show_hidden_classes_alone(
    method: str, task: str, kind: str, tmp_path: Path
) -> None:
    """Their absence from all other classes would say what they show; so would what is done to unlabelled images."""
    at, without = with_and_without(kind, tmp_path)
    assert sent(at, requests(method, task)) == sent(without, requests(method, task))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [{}, {"epsilon": 8.0}, {"masked_only": True}, {"peers": {"south": "key"}}])
def test_what_a_hospital_says_of_itself_counts_only_images_that_an_update_without_masks_is_made_of(
    policy: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """How many those are can be read off one update; what is said in other runs must not count the others either."""
    at, without = with_and_without(kind, tmp_path, label_counts=True, **policy)
    facts = [
        (
            site.train_samples,
            len(site.reported_training_images),
            (count_training_images_per_class(site, 1), count_training_images_per_class(site, 0)),
            sorted(set(site.reported_training_images.patients)),
        )
        for site in (at, without)
    ]
    assert facts[0] == facts[1]
    assert facts[0][0] == len(without.train) < len(at.train)
    every = hospital(tmp_path / "every", CLASSES, KINDS[kind], train_hidden_classes=True)
    assert every.train_samples == len(every.train)


@pytest.mark.parametrize(("leaves", "same"), [(True, True), (False, False)])
def test_models_of_a_comparison_whose_figures_leave_do_not_depend_on_hidden_labels_in_a_private_run_either(
    leaves: bool, same: bool, tmp_path: Path
) -> None:
    """The run's noise does not cover them."""
    of = private_plan(plan(), level="update", noise_multiplier=1e4)
    of = changed_plan(of, run={"rounds": 4}, evaluation={"compare_local": True})
    first, models = beginning(of, CLASSES), []
    for shown in (1, 3):
        labels = several_classes_an_image(4, shown)
        policy = {"epsilon": 8.0, "metrics_outside_privacy": leaves}
        at = hospital(tmp_path / str(shown), CLASSES, labels, **policy)
        assert at.hidden_classes("train") == {"c", "d"}
        compare_with_local_only_training(at, benefit_request(of, first, first, 4, 4))
        folders = [at.folder / LOCAL_TRAINING_FOLDER / name for name in ("model", "fine-tuned")]
        models.append([path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.safetensors"))])
    assert len(models[0]) == 2
    assert (models[0] == models[1]) == same


MASKS: dict[str, Any] = {"privacy": {"secure_aggregation": True}}
NOISE: dict[str, Any] = {
    "privacy": {"level": "update", "noise_multiplier": 1.0, "max_update_norm": 1.0},
    "evaluation": {"checkpoint": "last"},
}
NO_NOISE: dict[str, Any] = {**NOISE, "privacy": {**NOISE["privacy"], "noise_multiplier": 0.0}}


@pytest.mark.parametrize(
    ("tables", "policy", "trained_on"),
    [
        (MASKS, {"peers": {"south": "key", "east": "key"}}, False),  # of a sum of few, parts can be worked out
        (MASKS, {"masked_only": True}, False),  # and the coordinator may have made up the others
        (NOISE, {"epsilon": 8.0}, True),  # the budget bounds how little noise there is
        (NOISE, {}, False),
        (NO_NOISE, {}, False),
    ],
)
def test_they_are_trained_on_where_the_policy_makes_sure_of_noise(
    tables: dict[str, Any], policy: dict[str, Any], trained_on: bool, tmp_path: Path
) -> None:
    at = hospital(tmp_path, CLASSES, EXCLUSIVE, **policy)
    examples = prepare_local_task(at, requests("surgical", **tables)[0]).make_labelled_examples("train")
    assert np.array_equal(examples.labels.numpy(), EXCLUSIVE) == trained_on


def test_known_limit_without_a_budget_one_patient_turns_on_all_labels_of_a_class(tmp_path: Path) -> None:
    """The docs say so: the noise of a plan does not cover whether a class is hidden."""
    rows = {}
    for policy in ({}, {"epsilon": 8.0}):
        for shown in (FEW - 1, FEW):
            at = hospital(tmp_path / f"{shown}{len(policy)}", CLASSES, several_classes_an_image(4, shown), **policy)
            examples = prepare_local_task(at, requests("surgical", "multi_label", **NOISE)[0]).make_labelled_examples(
                "train"
            )
            rows[bool(policy), shown] = int((~examples.labels[:, -2].isnan()).sum())
    assert rows == {(False, FEW - 1): 0, (False, FEW): IMAGES, (True, FEW - 1): IMAGES, (True, FEW): IMAGES}


def test_no_figure_that_leaves_depends_on_labels_of_hidden_classes_that_are_trained_on(tmp_path: Path) -> None:
    of, replies = plan(), []
    first = beginning(of, CLASSES)
    for shown in (1, 3):
        at = hospital(tmp_path / str(shown), CLASSES, several_classes_an_image(4, shown), train_hidden_classes=True)
        assert at.hidden_classes("validation") == at.hidden_classes("test") == {"c", "d"}
        replies.append(evaluate_with_privacy_layers(at, evaluation(of, first, 1, 0, -1)))
        assert replies[-1].validation_loss
    few, more = (
        (reply.validation_loss, reply.validation_auroc, reply.class_names, reply.auroc[:2], reply.validation_classes)
        for reply in replies
    )
    assert few == more
    assert all(np.isnan(reply.auroc[2:]).all() for reply in replies)
