"""A site with images of its own, and requests of a round to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from client.site.policy import Policy
from client.site.site import Site
from common.config import Plan
from common.contract import Declaration
from common.data.base.image_set import ImageSet
from common.models.network import build
from common.models.state import ModelState, read_state
from common.wire.records import EvaluateRequest, Groups, TrainRequest

OWN = ("b", "a")


def images(seed: int, count: int, class_names: tuple[str, ...] = OWN) -> ImageSet:
    """Noise, brighter where the first class is present; every class occurs and is absent."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (count, len(class_names))).astype(np.float32)
    labels[0], labels[1] = 0, 1
    pixels = rng.integers(0, 180, (count, 16, 16)) + 60 * labels[:, :1, None]
    names = np.array([f"{seed}-{row}" for row in range(count)])
    return ImageSet(pixels.astype(np.uint8), labels, class_names, names, np.full(count, ""))


def site(folder: Path, **policy: Any) -> Site:
    """A hospital with few images, of level trusted unless its policy says otherwise."""
    parts = images(1, 40), images(2, 16), images(3, 16)
    return Site(Declaration("north", OWN), *parts, folder, policy=Policy(**policy), durable=False)


def plan(method: str, parameters: dict[str, Any], **training: Any) -> Plan:
    return Plan.model_validate(
        {
            "run": {"method": method, "seed": 5},
            "method": parameters,
            "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16, "neck": 8},
            "training": {"batch_size": 8, "lr": 0.01, **training},
            "augmentation": {},
        }
    )


def beginning(of: Plan, rows: Sequence[str] = OWN) -> ModelState:
    return read_state(build(of.model, rows, of.run.seed))


def request(of: Plan, model: ModelState, server_round: int = 1, counted: int = 0, best: int = -1) -> TrainRequest:
    groups = Groups(model.trunk, model.norm, model.head)
    facts = (of.model_dump_json(), "contract", model.head.class_names)
    even = np.full(len(model.head.class_names), 0.5, np.float32)
    told = {"prior": even, "factor": even[:1]} if of.run.method in ("fedsld", "fedavg_scaled") else {}
    return TrainRequest("run", server_round, *facts, counted, best, "", groups, told)


def evaluation(of: Plan, model: ModelState, server_round: int, counted: int, best: int) -> EvaluateRequest:
    asked = request(of, model, server_round, counted, best)
    facts = {name: value for name, value in vars(asked).items() if name != "statistics"}
    return EvaluateRequest(**facts, test=True)
