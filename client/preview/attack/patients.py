"""Attacks that tell if one known picture is in this hospital's data, and in which part.

*Single patients*: the attacker has the picture. A dense unit behind convolutions that pass the image on is a matched
filter for it, after whitening by similar images. If the unit's weights move in training, the picture was trained on:
one request asks for hundreds of pictures. A head that looks at the unit alone moves the AUROC of the test part if the
picture is in it.

*Models that fail*: a unit that answers to one picture and to no other is made so strong that its class's probability is
no number. A site without the picture answers as ever; from a site with it a loss, a score, a count or an error may
differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from client.preview.attack.adversary import (
    DENSE,
    Adversary,
    AttackResult,
    compute_dense_layer_input,
    fedsld_cnn_layers,
    set_pixel_passing_weights,
    trunk_tensor_change,
)
from client.preview.attack.counts import STILL
from common.config import Plan
from common.data.base.image_set import ImageSet, concatenate
from common.models.network import SplitNetwork
from common.models.state import layout_of, read_state

SIZE, SIDE = 60, 12
ANSWERS_FROM = 0.9
"""A filter gives 1 for its own picture, perhaps 0.7 for another of the same patient, far less for others."""
SHRINKAGE = 0.1


@dataclass(frozen=True)
class PicturesToLocate:
    """Pictures whose part of the site's data the attacker wants to find.

    Attributes:
        images: Pictures of parts of the site's data, and of none.
        parts: The truth: ``train``, ``validation``, ``test`` or ``neither`` for each picture.
        alike: Other images, to whiten by.
    """

    images: ImageSet
    parts: Sequence[str]
    alike: ImageSet


def list_pictures_to_locate(strangers: ImageSet, alike: ImageSet, **parts: ImageSet) -> PicturesToLocate:
    """List the pictures to look for: those of parts of the site's data, and strangers."""
    kinds = [(part, images) for part, images in (*parts.items(), ("neither", strangers)) if len(images)]
    truth = [part for part, images in kinds for _ in range(len(images))]
    return PicturesToLocate(concatenate([images for _, images in kinds]), truth, alike)


def locate_pictures(at: Adversary, pictures: PicturesToLocate) -> AttackResult:
    """Find the part of every picture by one request to train for all and one test for each."""
    plan = at.make_plan("fedsld_cnn", SIZE, 1e3)
    network = at.build_network(plan)
    set_pixel_passing_weights(network)
    _set_units_for_pictures(network, pictures.images, pictures.alike)
    count, truth = len(pictures.parts), pictures.parts
    trained, tested = _find_changed_units(at, plan, network, count), _find_changed_scores(at, plan, network, count)
    guesses = [
        "train" if train else "test" if test else "neither" if train is False and test is False else ""
        for train, test in zip(trained, tested, strict=True)
    ]
    pairs = list(zip(guesses, truth, strict=True))
    wrong = sum(guess not in ("", part) for guess, part in pairs)
    by_part = [
        f"in {part}: {sum(guess == own == part for guess, own in pairs)} of {list(truth).count(part)}"
        for part in sorted(set(truth))
    ]
    return AttackResult(
        "single persons",
        "Whether one known picture is in the training part, in the test part or in neither",
        "For each picture a unit that answers to it alone: one request to train for all of them, and one test each, "
        "every one in a run of its own. Found: images whose part was identified.",
        sum(guess == part for guess, part in pairs),
        count,
        "pictures",
        'in training `level = "private"`; in the test part `test_metrics = false`',
        notes=by_part + ([f"{wrong} placed wrongly"] if wrong else []),
        response=at.response,
    )


@torch.no_grad()
def _set_units_for_pictures(network: SplitNetwork, images: ImageSet, others: ImageSet, strength: float = 1.0) -> None:
    """Set the dense layer's weights so that one unit is above 0 for each of these images and for no other."""
    pictures, alike = (compute_dense_layer_input(network, each) for each in (images, others))  # (n, numbers)
    centre, covariance = alike.mean(axis=0), np.cov(alike, rowvar=False)
    numbers = len(centre)
    covariance = covariance + SHRINKAGE * np.trace(covariance) / numbers * np.eye(numbers)
    away = pictures - centre
    whitened = np.linalg.solve(covariance, away.T).T
    filters = whitened / (away * whitened).sum(axis=1, keepdims=True)  # (n, numbers)
    offsets = -filters @ centre - ANSWERS_FROM  # (n,)
    dense = fedsld_cnn_layers(network).dense
    dense.weight[: len(filters), : SIDE * SIDE] = torch.from_numpy(filters * strength)
    dense.bias[: len(filters)] = torch.from_numpy(offsets * strength)


def _find_changed_units(at: Adversary, plan: Plan, network: SplitNetwork, count: int) -> list[bool | None]:
    """Check for each sought picture whether the unit that answers to it changed in training.

    A picture that did is in the training part; the value is None without an update, or where noise may hide a change.
    """
    change = trunk_tensor_change(
        at.request_training(plan, read_state(network)), layout_of(network).slices()[f"{DENSE}.bias"]
    )
    if change is None:
        return [None] * count
    moved, others = np.abs(change[:count]), np.abs(change[count:])
    if at.site.policy.epsilon is None:
        return [bool(size > 0) for size in moved]
    # The other units answer to nothing: their changes are noise alone.
    return [bool(size > 4 * others.std() + 1e-30) or None for size in moved]


def _find_changed_scores(at: Adversary, plan: Plan, network: SplitNetwork, count: int) -> list[bool | None]:
    """Check for each sought picture whether a head that reads only its unit moves a test AUROC away from 0.5.

    A picture that does is in the test part; the value is None where no AUROC was reported.
    """
    moved: list[bool | None] = []
    for unit in range(count):
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.weight[:, unit] = 100.0
        reply = at.request_evaluation(plan, read_state(network), test=True)
        scores = [] if reply is None else [auroc for auroc in reply.auroc if not np.isnan(auroc)]
        moved.append(any(abs(auroc - 0.5) > 1e-9 for auroc in scores) if scores else None)
    return moved


# ---------------------------------------------------------------------- models that fail


STRONG = 1e30
OUT_OF_ALL_BOUNDS = 1e3
"""A loss that no model of this network has without the picture."""


def locate_pictures_by_failure(at: Adversary, pictures: PicturesToLocate) -> AttackResult:
    """Find the part of every picture by a model that fails on it: by loss, scores and benefit."""
    plan = at.make_plan("fedsld_cnn", SIZE, STILL)
    asks = {"compare_local": True, "test_each_round": at.site.policy.test_each_round and at.site.policy.test_metrics}
    plan = plan.model_copy(update={"evaluation": plan.evaluation.model_copy(update=asks)})
    usual = _ask_about_picture(at, plan, pictures, None)
    pairs = []
    for place, truth in enumerate(pictures.parts):
        answers, guess = _ask_about_picture(at, plan, pictures, place), ""
        if answers is not None and usual is not None:
            in_test = "test" if answers[1:] != usual[1:] else "neither"
            guess = "validation" if answers[0] != usual[0] else in_test
        pairs.append((guess, truth))
    present = sum(truth != "neither" for _, truth in pairs)
    wrong = sum(guess not in ("", "neither") for guess, truth in pairs if truth == "neither")
    strangers = len(pairs) - present
    return AttackResult(
        "models that fail",
        "Whether one known picture is in the validation or the test part, by a model that fails on it",
        "For each picture a model whose answer to it is no number. It is trained for one step that changes nothing, "
        "judged, tested and compared with training alone, every one in a run of its own.",
        sum(guess == truth != "neither" for guess, truth in pairs),
        present,
        "pictures",
        "`training_figures = false`, `test_metrics = false`",
        by_chance=present * wrong / strangers if strangers else 0.0,
        notes=[f"{wrong} of {strangers} pictures of neither part were placed wrongly"],
        response=at.response,
    )


def _ask_about_picture(
    at: Adversary, plan: Plan, pictures: PicturesToLocate, place: int | None
) -> tuple[Any, ...] | None:
    """Ask about a model that fails on one picture, or on none; return the answers that can show it, the loss first.

    None where the site does not train the model: it fails on a training image, which may only be like the picture.
    """
    network, run = at.build_network(plan), at.name_new_run()
    set_pixel_passing_weights(network)
    with torch.no_grad():
        network.head.weight.zero_()
        if place is not None:
            _set_units_for_pictures(network, pictures.images.select_rows(np.array([place])), pictures.alike, STRONG)
            network.head.weight[:, 0] = STRONG
    model = read_state(network)
    images: tuple[int | None, ...] = ()
    if at.site.policy.epsilon is None:  # else each training costs budget, and the site soon declines
        if (trained := at.request_training(plan, model, run)) is None:
            return None
        images = trained.test_images, trained.test_correct
    judged = at.request_evaluation(plan, model, run)
    tested = at.request_evaluation(plan, model, run, test=True)
    compared = at.request_comparison(plan, model, run)
    scores = (
        () if tested is None else (*map(math.isnan, tested.auroc), len(tested.class_names), tested.test_images is None)
    )
    signs: tuple[bool, ...] = (False,)
    if judged is not None:
        loss = judged.validation_loss
        beyond = loss is not None and not abs(loss) < OUT_OF_ALL_BOUNDS
        signs = True, loss is None, beyond, judged.validation_auroc is None
    return signs, scores, compared is None, images
