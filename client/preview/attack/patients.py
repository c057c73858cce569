"""Whether one known picture is in this hospital's data, and in which part.

*Single patients*: the attacker has the picture. A dense unit behind convolutions that pass the image on is a matched
filter for it, after whitening by images that are alike. If the unit's weights move in training, the picture was trained
on: one request asks for hundreds of pictures. A head that looks at the unit alone moves the AUROC of the test part if
the picture is in it.

*Models that fail*: a unit that answers to one picture and to no other is made so strong that its class's probability is
no number. Of a site without the picture all is as ever; else a loss, a score, a count or an error may say so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from client.preview.attack.adversary import DENSE, Adversary, Attempt, layers_of, pass_pixels_through, passed_pixels
from common.config import Plan
from common.data.base.image_set import ImageSet, joined
from common.models.network import SplitNetwork, build
from common.models.state import layout_of, read_state
from common.wire.records import EvaluateReply

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
    """List the pictures to look for: of parts of the site's data, and of neither."""
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
    parts = [_part_of(*pair) for pair in zip(moved, tested, strict=True)]
    right = [part == truth for part, truth in zip(parts, wanted.parts, strict=True)]
    by_part = {
        part: sum(ok for ok, truth in zip(right, wanted.parts, strict=True) if truth == part)
        for part in set(wanted.parts)
    }
    wrong = sum(part not in ("", truth) for part, truth in zip(parts, wanted.parts, strict=True))
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
        response=at.response,
    )


def _part_of(trained: bool | None, tested: bool | None) -> str:
    if trained:
        return "train"
    if tested:
        return "test"
    return "neither" if trained is False and tested is False else ""


@torch.no_grad()
def _answering(network: SplitNetwork, wanted: Sought) -> None:
    """Make one dense unit answer to each picture and to no other."""
    pass_pixels_through(network)
    dense = layers_of(network).dense
    seen, alike = (
        passed_pixels(network, images).flatten(1).double().numpy() for images in (wanted.images, wanted.alike)
    )
    filters, offsets = filters_for(seen, alike)
    dense.weight[: len(filters), : SIDE * SIDE] = torch.from_numpy(filters)
    dense.bias[: len(filters)] = torch.from_numpy(offsets)


def filters_for(pictures: Floats, alike: Floats) -> tuple[Floats, Floats]:
    """Compute weights ``(pictures, numbers)`` and offsets of units that are above 0 for their own picture only."""
    centre, covariance = alike.mean(axis=0), np.cov(alike, rowvar=False)
    numbers = len(centre)
    covariance = covariance + SHRINKAGE * np.trace(covariance) / numbers * np.eye(numbers)
    away = pictures - centre
    whitened = np.linalg.solve(covariance, away.T).T
    weights = whitened / (away * whitened).sum(axis=1, keepdims=True)
    return weights, -weights @ centre - ANSWERS_FROM


def _moved(at: Adversary, plan: Plan, network: SplitNetwork, count: int) -> list[bool | None]:
    """Check whether each picture's unit moved in training; None where no update came."""
    reply = at.trains(plan, read_state(network))
    if reply is None or reply.update.trunk is None:
        return [None] * count
    moved = np.abs(reply.update.trunk[layout_of(network).slices()[f"{DENSE}.bias"]])
    if at.site.policy.epsilon is None:
        return [bool(change > 0) for change in moved[:count]]
    rest = moved[count:]  # units that answer to nothing: noise alone
    return [bool(change > 4 * rest.std() + 1e-30) or None for change in moved[:count]]


def _tested(at: Adversary, plan: Plan, network: SplitNetwork, count: int) -> list[bool | None]:
    """Check whether each picture moved an AUROC of the test part; None where nothing was reported."""
    found: list[bool | None] = []
    for unit in range(count):
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.weight[:, unit] = 100.0
        reply = at.judges(plan, read_state(network), test=True)
        scores = [] if reply is None else [auroc for auroc in reply.auroc if not np.isnan(auroc)]
        found.append(any(abs(auroc - 0.5) > 1e-9 for auroc in scores) if scores else None)
    return found


# ---------------------------------------------------------------------- models that fail


STRONG = 1e30
OUT_OF_ALL_BOUNDS = 1e3
"""A loss that no model of this network has without the picture."""


def failures(at: Adversary, wanted: Sought) -> Attempt:
    """Ask about a model that fails on it, for each picture: its loss, its scores, and the comparison with others."""
    plan = at.plan(
        {"architecture": "fedsld_cnn", "image_size": SIZE},
        {"optimizer": "sgd", "lr": 1e-30, "batch_size": max(len(at.site.train), 1)},
    )
    asks = {"alone": True, "test_each_round": at.site.policy.test_each_round and at.site.policy.test_metrics}
    plan = plan.model_copy(update={"evaluation": plan.evaluation.model_copy(update=asks)})
    usual = _answers_about(at, plan, wanted, None)
    parts = [_part_by_failure(_answers_about(at, plan, wanted, place), usual) for place in range(len(wanted.parts))]
    present = [part for part in wanted.parts if part != "neither"]
    pairs = list(zip(parts, wanted.parts, strict=True))
    right = sum(part == truth != "neither" for part, truth in pairs)
    wrong = sum(part not in ("", "neither") for part, truth in pairs if truth == "neither")
    strangers = len(wanted.parts) - len(present)
    return Attempt(
        "models that fail",
        "Whether one known picture is in the validation or the test part, by a model that fails on it",
        "For each picture a model whose answer to it is no number. It is trained for one step that changes nothing, "
        "judged, tested and compared with training alone, every one in a run of its own.",
        right,
        len(present),
        "pictures",
        "`training_figures = false`, `test_metrics = false`",
        by_chance=len(present) * wrong / strangers if strangers else 0.0,
        notes=[f"{wrong} of {strangers} pictures of neither part were placed wrongly"],
        response=at.response,
    )


def _part_by_failure(answers: tuple[Any, ...] | None, usual: tuple[Any, ...] | None) -> str:
    if answers is None or usual is None:
        return ""
    if answers[0] != usual[0]:
        return "validation"
    return "test" if answers[1:] != usual[1:] else "neither"


def _answers_about(at: Adversary, plan: Plan, wanted: Sought, place: int | None) -> tuple[Any, ...] | None:
    """Ask about a model that fails on one picture; return what can show it, the loss first.

    None where the site does not train it: it fails on a training image, which may only be like the picture.
    """
    network, run = build(plan.model, at.rows, 1), at.new_run()
    _failing(network, wanted, place)
    model = read_state(network)
    images: tuple[int | None, ...] = ()
    if at.site.policy.epsilon is None:  # else each training costs budget, and the site soon declines
        if (trained := at.trains(plan, model, run)) is None:
            return None
        images = trained.test_images, trained.test_correct
    judged = at.judges(plan, model, run)
    tested = at.judges(plan, model, run, test=True)
    compared = at.compares(plan, model, run)
    return _of_loss(judged), _of_scores(tested), compared is None, images


def _of_loss(judged: EvaluateReply | None) -> tuple[bool, ...]:
    if judged is None:
        return (False,)
    loss = judged.validation_loss
    return True, loss is None, loss is not None and not abs(loss) < OUT_OF_ALL_BOUNDS, judged.validation_auroc is None


def _of_scores(tested: EvaluateReply | None) -> tuple[Any, ...]:
    if tested is None:
        return ()
    return tuple(map(math.isnan, tested.auroc)), len(tested.class_names), tested.test_images is None


@torch.no_grad()
def _failing(network: SplitNetwork, wanted: Sought, place: int | None) -> None:
    """Make the network's answers no numbers for one picture, and 0 for all others; for none where None."""
    pass_pixels_through(network)
    network.head.weight.zero_()
    if place is None:
        return
    dense = layers_of(network).dense
    seen, alike = _flat(network, wanted.images.rows(np.array([place]))), _flat(network, wanted.alike)
    weights, offsets = filters_for(seen, alike)
    dense.weight[:1, : SIDE * SIDE] = torch.from_numpy(weights * STRONG)
    dense.bias[:1] = torch.from_numpy(offsets * STRONG)
    network.head.weight[:, 0] = STRONG


def _flat(network: SplitNetwork, images: ImageSet) -> np.ndarray[Any, np.dtype[np.float64]]:
    return passed_pixels(network, images).flatten(1).double().numpy()
