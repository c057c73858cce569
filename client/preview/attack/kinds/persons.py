"""Whether one known radiograph is in this hospital's data, and in which part: by units that answer to it alone.

The attacker has the picture. A dense unit behind convolutions that pass the image on is a matched filter for it, after
whitening by images that are alike. If the unit's weights move in training, the picture was trained on: one request asks
for hundreds of pictures. A head that looks at the unit alone moves the AUROC of the test part if the picture is in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from client.preview.attack.kinds.adversary import Adversary
from client.preview.attack.kinds.attempt import Attempt
from client.preview.attack.kinds.crafted import DENSE, hand_images_on, handed_on, layers_of
from common.config import Plan
from common.data.base.image_set import ImageSet, joined
from common.models.network import SplitNetwork, build
from common.models.state import layout_of, read_state

SIZE, SIDE = 60, 12
ANSWERS_FROM = 0.9
"""Of its own picture the filter makes 1; of another of the same patient perhaps 0.7, of others far less."""
SHRINKAGE = 0.1
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sought:
    """Pictures that the attacker has; which part each is in, it wants to know.

    Attributes:
        images: Those of one part of the site's data, of another, and of neither, one after the other.
        parts: ``train``, ``validation``, ``test`` or ``neither`` of each.
        alike: Other images, to whiten by.
    """

    images: ImageSet
    parts: Sequence[str]
    alike: ImageSet


def sought(strangers: ImageSet, alike: ImageSet, **parts: ImageSet) -> Sought:
    """The pictures to look for: of parts of the site's data, and of neither."""
    kinds = [(part, images) for part, images in (*parts.items(), ("neither", strangers)) if len(images)]
    named = [part for part, images in kinds for _ in range(len(images))]
    return Sought(joined([images for _, images in kinds]), named, alike)


def persons(at: Adversary, wanted: Sought) -> Attempt:
    """Place every picture: one request to train for all, one test for each."""
    model = {"architecture": "fedsld_cnn", "image_size": SIZE}
    plan = at.plan(model, {"optimizer": "sgd", "lr": 1e3, "batch_size": len(at.site.train)})
    network = build(plan.model, at.rows, 1)
    _answering(network, wanted)
    moved, tested = _moved(at, plan, network, len(wanted.parts)), _tested(at, plan, network, len(wanted.parts))
    said = [_said(*pair) for pair in zip(moved, tested, strict=True)]
    right = [one == truth for one, truth in zip(said, wanted.parts, strict=True)]
    by_part = {
        part: sum(ok for ok, one in zip(right, wanted.parts, strict=True) if one == part) for part in set(wanted.parts)
    }
    wrong = sum(one not in ("", truth) for one, truth in zip(said, wanted.parts, strict=True))
    return Attempt(
        "single persons",
        "Whether one known picture is in the training part, in the test part or in neither",
        "For each picture a unit that answers to it alone: one request to train for all of them, and one test each, "
        "every one in a run of its own. Found: images whose part was identified.",
        sum(right),
        len(right),
        "pictures",
        'in training `level = "private"`; in the test part `test_metrics = false`',
        notes=[f"in {part}: {by_part[part]} of {list(wanted.parts).count(part)}" for part in sorted(by_part)]
        + ([f"{wrong} placed wrongly"] if wrong else []),
        said=at.said,
    )


def _said(trained: bool | None, tested: bool | None) -> str:
    if trained:
        return "train"
    if tested:
        return "test"
    return "neither" if trained is False and tested is False else ""


@torch.no_grad()
def _answering(network: SplitNetwork, wanted: Sought) -> None:
    """Make one dense unit answer to each picture and to no other."""
    hand_images_on(network)
    dense = layers_of(network).dense
    seen, alike = (handed_on(network, images).flatten(1).double().numpy() for images in (wanted.images, wanted.alike))
    filters, offsets = filters_for(seen, alike)
    dense.weight[: len(filters), : SIDE * SIDE] = torch.from_numpy(filters)
    dense.bias[: len(filters)] = torch.from_numpy(offsets)


def filters_for(pictures: Floats, alike: Floats) -> tuple[Floats, Floats]:
    """Weights ``(pictures, numbers)`` and offsets of units that are above 0 for their own picture only."""
    centre, covariance = alike.mean(axis=0), np.cov(alike, rowvar=False)
    numbers = len(centre)
    covariance = covariance + SHRINKAGE * np.trace(covariance) / numbers * np.eye(numbers)
    away = pictures - centre
    whitened = np.linalg.solve(covariance, away.T).T
    weights = whitened / (away * whitened).sum(axis=1, keepdims=True)
    return weights, -weights @ centre - ANSWERS_FROM


def _moved(at: Adversary, plan: Plan, network: SplitNetwork, count: int) -> list[bool | None]:
    """Whether each picture's unit moved in training; None where no update came."""
    reply = at.trains(plan, read_state(network))
    if reply is None or reply.update.trunk is None:
        return [None] * count
    moved = np.abs(reply.update.trunk[layout_of(network).slices()[f"{DENSE}.bias"]])
    if at.site.policy.epsilon is None:
        return [bool(one > 0) for one in moved[:count]]
    rest = moved[count:]  # units that answer to nothing: noise alone
    return [bool(one > 4 * rest.std() + 1e-30) or None for one in moved[:count]]


def _tested(at: Adversary, plan: Plan, network: SplitNetwork, count: int) -> list[bool | None]:
    """Whether each picture moved an AUROC of the test part; None where nothing was told."""
    found: list[bool | None] = []
    for unit in range(count):
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.weight[:, unit] = 100.0
        reply = at.judges(plan, read_state(network), test=True)
        scores = [] if reply is None else [one for one in reply.auroc if not np.isnan(one)]
        found.append(any(abs(one - 0.5) > 1e-9 for one in scores) if scores else None)
    return found
