"""Attacks that infer if a picture of the attacker is in this hospital's data, and in which part.

*Single patients*: a crafted network has a dense unit that is active for this picture only (a matched filter, whitened
by similar images). If training changes the unit's weights, the picture is in the training part; one request tests
hundreds of pictures. If a head that reads only this unit changes the AUROC of the test part, the picture is in the test
part.

*Models that fail*: the unit's weights are so large that the output for this picture is not a finite number. A site
without the picture answers as usual. At a site with the picture, a loss, a score, a count or an error may differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polyclinic.client.preview.attack.adversary import (
    DENSE_LAYER,
    Adversary,
    AttackResult,
    compute_dense_layer_input,
    read_trunk_tensor_update,
    select_fedsld_cnn_layers,
    set_pixel_passing_weights,
)
from polyclinic.client.preview.attack.counts import ZERO_LEARNING_RATE
from polyclinic.common.config import HospitalPlan
from polyclinic.common.models.network import SplitNetwork
from polyclinic.common.models.state import make_model_layout, read_model_state
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets

INPUT_SIDE = 60
"""Side of the network's input, in pixels."""
DENSE_INPUT_SIDE = 12
"""Side of the image that the dense layer receives, in pixels."""
ACTIVATION_THRESHOLD = 0.9
"""Output of a filter above which its unit counts as active.

The attack makes one unit with one filter for each tested picture. The filter gives 1 for that picture, perhaps 0.7 for
another picture of the same patient, and far less for other pictures.
"""
COVARIANCE_SHRINKAGE = 0.1
"""Share of the mean variance that is added to the diagonal of the covariance."""


@dataclass(frozen=True)
class PicturesOfUnknownPart:
    """The pictures that the attacker searches in the site's data.

    Attributes:
        images: Pictures of parts of the site's data, and pictures that are not in it.
        parts: The true part of each picture: ``train``, ``validation``, ``test`` or ``neither``.
        alike: Similar images, which give the mean and covariance for the filters of single pictures.
    """

    images: ImageSet
    parts: Sequence[str]
    alike: ImageSet


def join_pictures_of_parts(strangers: ImageSet, alike: ImageSet, **parts: ImageSet) -> PicturesOfUnknownPart:
    """Join pictures of the site's parts with strangers, which are not in its data, and record the true part of each.

    Args:
        alike: Similar images, from which the attacker computes its filters.
        parts: Pictures of ``train``, ``validation`` or ``test``.
    """
    kinds = [(part, images) for part, images in (*parts.items(), ("neither", strangers)) if len(images)]
    truth = [part for part, images in kinds for _ in range(len(images))]
    return PicturesOfUnknownPart(concatenate_image_sets([images for _, images in kinds]), truth, alike)


def infer_parts_of_pictures(adversary: Adversary, pictures: PicturesOfUnknownPart) -> AttackResult:
    """Infer if each picture is in the training part, in the test part or in neither.

    All pictures together take one request to train, and each picture takes one request to test.
    """
    plan = adversary.make_attack_plan("fedsld_cnn", INPUT_SIDE, 1e3)
    network = adversary.build_attacked_network(plan)
    set_pixel_passing_weights(network)
    _set_picture_detecting_units(network, pictures.images, pictures.alike)
    count = len(pictures.parts)
    truth = pictures.parts

    # In the training part: training changed the picture's unit. None: no update came, or noise may hide the change.
    change = read_trunk_tensor_update(
        adversary.request_training(plan, read_model_state(network)),
        make_model_layout(network).tensor_slices()[f"{DENSE_LAYER}.bias"],
    )
    trained: list[bool | None] = [None] * count
    if change is not None:
        unit_changes = np.abs(change[:count])
        others = np.abs(change[count:])
        if adversary.site.policy.epsilon is None:
            trained = [bool(size > 0) for size in unit_changes]
        else:  # the other units are never active, so their changes are only noise
            trained = [bool(size > 4 * others.std() + 1e-30) or None for size in unit_changes]

    # In the test part: a head that reads only the picture's unit gives an AUROC other than 0.5. None: no AUROC came.
    tested: list[bool | None] = []
    for unit in range(count):
        with torch.no_grad():
            network.head.weight.zero_()
            network.head.weight[:, unit] = 100.0
        reply = adversary.request_evaluation(plan, read_model_state(network), test=True)
        scores = [] if reply is None else [auroc for auroc in reply.auroc if not np.isnan(auroc)]
        tested.append(any(abs(auroc - 0.5) > 1e-9 for auroc in scores) if scores else None)

    guesses = [_guess_part(train, test) for train, test in zip(trained, tested, strict=True)]
    pairs = list(zip(guesses, truth, strict=True))
    wrong = sum(guess not in ("", part) for guess, part in pairs)
    by_part = [
        f"in {part}: {sum(guess == true_part == part for guess, true_part in pairs)} of {list(truth).count(part)}"
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
        response=adversary.response,
    )


def _guess_part(train: bool | None, test: bool | None) -> str:
    """Return the part in which a picture seems to be; empty if the attacker received too little to decide."""
    if train:
        return "train"
    if test:
        return "test"
    return "neither" if train is False and test is False else ""


@torch.no_grad()
def _set_picture_detecting_units(
    network: SplitNetwork, images: ImageSet, others: ImageSet, strength: float = 1.0
) -> None:
    """Set the dense layer's weights so that each of ``images`` activates one unit, which no other image activates.

    Args:
        others: Similar images, which give the mean and covariance for the units' weights.
        strength: Factor of all weights and biases.
    """
    pictures, alike = (compute_dense_layer_input(network, each) for each in (images, others))  # (n, numbers)
    centre = alike.mean(axis=0)
    covariance = np.cov(alike, rowvar=False)
    numbers = len(centre)
    covariance = covariance + COVARIANCE_SHRINKAGE * np.trace(covariance) / numbers * np.eye(numbers)
    centred = pictures - centre
    whitened = np.linalg.solve(covariance, centred.T).T
    filters = whitened / (centred * whitened).sum(axis=1, keepdims=True)  # (n, numbers)
    offsets = -filters @ centre - ACTIVATION_THRESHOLD  # (n,)
    dense = select_fedsld_cnn_layers(network).dense
    dense.weight[: len(filters), : DENSE_INPUT_SIDE * DENSE_INPUT_SIDE] = torch.from_numpy(filters * strength)
    dense.bias[: len(filters)] = torch.from_numpy(offsets * strength)


# ---------------------------------------------------------------------- models that fail


LARGE_WEIGHT = 1e30
MAX_PLAUSIBLE_LOSS = 1e3
"""A validation loss above this shows that the picture is in the validation part."""


def infer_parts_by_failing_model(adversary: Adversary, pictures: PicturesOfUnknownPart) -> AttackResult:
    """Membership attack: infer if each picture is in the validation part, in the test part or in neither.

    For each picture the attacker sends a model whose output for this picture is not a finite number. If the site's
    loss, scores or comparison with training alone then differ from those of a model that does not fail, the picture is
    in the part that was evaluated.
    """
    plan = adversary.make_attack_plan("fedsld_cnn", INPUT_SIDE, ZERO_LEARNING_RATE)
    asks = {
        "compare_local": True,
        "test_each_round": adversary.site.policy.test_each_round and adversary.site.policy.test_metrics,
    }
    plan = plan.model_copy(update={"evaluation": plan.evaluation.model_copy(update=asks)})

    usual = _probe_with_failing_model(adversary, plan, pictures, None)
    pairs = []
    for index, truth in enumerate(pictures.parts):
        answers = _probe_with_failing_model(adversary, plan, pictures, index)
        guess = ""
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
        response=adversary.response,
    )


def _probe_with_failing_model(
    adversary: Adversary, plan: HospitalPlan, pictures: PicturesOfUnknownPart, index: int | None
) -> tuple[Any, ...] | None:
    """Send a model that fails on one picture; return the answers to compare, the validation loss first.

    Return None if the site refuses to train. Then the model fails on a training image, which may be a similar one.

    Args:
        index: Index of the picture; None for a control model, which fails on no picture.
    """
    network = adversary.build_attacked_network(plan)
    run = adversary.make_unused_run_name()
    set_pixel_passing_weights(network)
    with torch.no_grad():
        network.head.weight.zero_()
        if index is not None:
            _set_picture_detecting_units(
                network, pictures.images.select_rows(np.array([index])), pictures.alike, LARGE_WEIGHT
            )
            network.head.weight[:, 0] = LARGE_WEIGHT
    model = read_model_state(network)
    images: tuple[int | None, ...] = ()
    if adversary.site.policy.epsilon is None:  # otherwise each training costs budget, and the site soon declines
        if (trained := adversary.request_training(plan, model, run)) is None:
            return None
        images = trained.test_images, trained.test_correct
    evaluated = adversary.request_evaluation(plan, model, run)
    tested = adversary.request_evaluation(plan, model, run, test=True)
    compared = adversary.request_comparison(plan, model, run)
    scores = (
        () if tested is None else (*map(math.isnan, tested.auroc), len(tested.class_names), tested.test_images is None)
    )
    signs: tuple[bool, ...] = (False,)
    if evaluated is not None:
        loss = evaluated.validation_loss
        is_implausible = loss is not None and not abs(loss) < MAX_PLAUSIBLE_LOSS
        signs = True, loss is None, is_implausible, evaluated.validation_auroc is None
    return signs, scores, compared is None, images
