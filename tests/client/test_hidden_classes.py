"""Labels of hidden classes, where each image shows one class: nothing in an update without noise depends on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.supercore.task_identity import TaskIdentity

from client.training.model_and_images import unpack
from common.config import Plan
from common.wire.records import TrainRequest
from strategies.registry import STRATEGIES
from tests.client.hidden_labels import hospital, one_class_an_image, sent
from tests.client.rounds import beginning, plan, request

CLASSES = ("a", "b", "c", "d")
METHODS = sorted(
    name for name, one in STRATEGIES.items() if one.multi_class and name not in ("individual", "centralised")
)


@pytest.fixture(autouse=True)
def _flower_knows_where_it_is() -> None:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # read by Message() to fill its metadata


def requests(method: str, **tables: Any) -> list[TrainRequest]:
    """Two rounds."""
    tree = plan(method, {}, batch_size=8).model_dump(mode="json")
    of = Plan.model_validate({**tree, **tables, "model": {**tree["model"], "task": "multi_class", "norm": "group"}})
    first = request(of, beginning(of, CLASSES))
    return [replace(first, round=number + 1, counted=number, best=number - 1) for number in (0, 1)]


@pytest.mark.parametrize("method", METHODS)
def test_no_update_depends_on_labels_of_hidden_classes(method: str, tmp_path: Path) -> None:
    updates, hidden = [], set()
    for shown in (1, 3):
        at = hospital(tmp_path / str(shown), CLASSES, one_class_an_image(4, shown))
        hidden.add(at.hides("train"))
        updates.append(sent(at, requests(method)))
    assert hidden == {frozenset("ad")}
    assert updates[0] == updates[1]


def test_nothing_is_known_of_an_image_that_shows_a_hidden_class(tmp_path: Path) -> None:
    """Its absence from all other classes would say as much."""
    at = hospital(tmp_path, CLASSES, labels := one_class_an_image(4, 2))
    examples = unpack(at, requests("surgical")[0]).examples("train")
    known = ~examples.labels.isnan().all(dim=1).numpy()
    assert known.tolist() == labels[:, 1:3].any(axis=1).tolist()
    assert bool(examples.labels[:, [0, 3]].isnan().all())


@pytest.mark.parametrize(
    "tables",
    [
        {"privacy": {"secure_aggregation": True}},
        {"privacy": {"level": "update", "noise_multiplier": 1.0, "max_update_norm": 1.0}},
    ],
    ids=["masks", "noise"],
)
def test_they_are_trained_on_where_noise_or_masks_cover_them(tables: dict[str, Any], tmp_path: Path) -> None:
    at = hospital(tmp_path, CLASSES, labels := one_class_an_image(4, 2))
    examples = unpack(at, requests("surgical", **tables, evaluation={"result": "last"})[0]).examples("train")
    assert np.array_equal(examples.labels.numpy(), labels)
