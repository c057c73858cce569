"""Whether one known picture is in the validation or the test part: by models that fail on this picture alone.

A unit that answers to one picture and to no other is made so strong that its class's probability is no number. Of a
site without the picture all is as ever; else a loss, a score, a count or an error may say so.
"""

from typing import Any

import numpy as np
import torch

from client.preview.attack.kinds.adversary import Adversary
from client.preview.attack.kinds.attempt import Attempt
from client.preview.attack.kinds.crafted import hand_images_on, handed_on, layers_of
from client.preview.attack.kinds.persons import SIDE, SIZE, Sought, filters_for
from common.config import Plan
from common.data.base.image_set import ImageSet
from common.models.network import SplitNetwork, build
from common.models.state import read_state
from common.wire.records import EvaluateReply

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
    usual = _told(at, plan, wanted, None)
    said = [_said(_told(at, plan, wanted, place), usual) for place in range(len(wanted.parts))]
    present = [one for one in wanted.parts if one != "neither"]
    right = sum(one == truth != "neither" for one, truth in zip(said, wanted.parts, strict=True))
    wrong = sum(one not in ("", "neither") for one, truth in zip(said, wanted.parts, strict=True) if truth == "neither")
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
        said=at.said,
    )


def _said(told: tuple[Any, ...] | None, usual: tuple[Any, ...] | None) -> str:
    if told is None or usual is None:
        return ""
    if told[0] != usual[0]:
        return "validation"
    return "test" if told[1:] != usual[1:] else "neither"


def _told(at: Adversary, plan: Plan, wanted: Sought, place: int | None) -> tuple[Any, ...] | None:
    """What the site reports about a model that fails on one picture: the parts that can show it, the loss first.

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
    return tuple(bool(np.isnan(one)) for one in tested.auroc), len(tested.class_names), tested.test_images is None


@torch.no_grad()
def _failing(network: SplitNetwork, wanted: Sought, place: int | None) -> None:
    """Make the network's answers no numbers for one picture, and 0 for all others; for none where None."""
    hand_images_on(network)
    network.head.weight.zero_()
    if place is None:
        return
    dense, one = layers_of(network).dense, np.array([place])
    seen, alike = (_flat(network, images) for images in (wanted.images.rows(one), wanted.alike))
    weights, offsets = filters_for(seen, alike)
    dense.weight[:1, : SIDE * SIDE] = torch.from_numpy(weights * STRONG)
    dense.bias[:1] = torch.from_numpy(offsets * STRONG)
    network.head.weight[:, 0] = STRONG


def _flat(network: SplitNetwork, images: ImageSet) -> np.ndarray[Any, np.dtype[np.float64]]:
    return handed_on(network, images).flatten(1).double().numpy()
