"""Attacks that infer how many images show a class, from losses, digits of scores, updates, or the hash of a local head.

Most of these attacks send a model that gives every image the same output, so that the loss, or the update of a bias,
depends only on a count. Attacks on updates ask for one step of gradient descent over all images in one batch.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.client.preview.attack.adversary import (
    DENSE_LAYER,
    Adversary,
    AttackResult,
    read_trunk_tensor_update,
    select_fedsld_cnn_layers,
    zero_all_parameters,
)
from polyclinic.common.config import HospitalPlan, PrivacySection
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState, hash_model_state, make_model_layout, read_model_state
from polyclinic.common.wire.records import UNKNOWN_COUNT, TrainReply
from polyclinic.data.base.image_set import ImageSet

CERTAIN_LOGIT = 30.0
"""Logit of a class that a model predicts with certainty."""
TESTED_MODELS = 4
ZERO_LEARNING_RATE = 1e-30
"""Learning rate so small that training changes nothing."""
UNDISCLOSED_COUNTS = "counts that the site does not tell"
NOISE_MEASURE = 'of others noise (`level = "private"`)'
FEW_PATIENTS_MEASURE = "`train_hidden_classes = false` for classes of few patients; "
COUNTED_BIAS = 2.0**10
"""Initial value of a bias whose change counts images."""
BIAS_STEP_PER_IMAGE = 2.0**-12
"""Change of that bias for one image: a multiple of the float32 resolution at the bias, so that sums are exact."""
ROUNDING_OFFSET = 2.0**60
"""A number so large that rounding removes the change of a training step."""


@dataclass(frozen=True)
class UndisclosedCount:
    """A count that the site does not report: how many images of ``part`` show the class of head row ``row``.

    Attributes:
        part: ``train``, ``validation`` or ``test``.
        row: Head row of the class.
        truth: The count's true value.
    """

    part: str
    row: int
    truth: int


def list_undisclosed_counts(adversary: Adversary, *parts: str) -> list[UndisclosedCount]:
    """List the counts of images by class that the site does not report, in each of ``parts``, such as ``train``.

    Args:
        adversary: The attacker, with its copy of the site.
    """
    site = adversary.site
    counts = list[UndisclosedCount]()
    for part in parts:
        images: ImageSet = getattr(site, part)
        reported = (
            set(adversary.head_class_names) - site.hidden_classes(part)
            if part == "train" and site.policy.label_counts
            else set()
        )
        counts += [
            UndisclosedCount(part, row, int((images.labels[:, images.class_names.index(name)] == 1).sum()))
            for row, name in enumerate(adversary.head_class_names)
            if len(images) and name not in reported
        ]
    return counts


def make_constant_output_model(adversary: Adversary, plan: HospitalPlan, row: int | None = None) -> ModelState:
    """Make a model whose output is the same for every image, because its parameters are 0.

    Args:
        row: Head row whose class the model predicts with certainty; None for no class.
    """
    model = read_model_state(adversary.build_attacked_network(plan))
    for values in (model.trunk, model.norm, model.head.weight, model.head.bias):
        values[:] = 0
    if row is not None:
        model.head.bias[row] = CERTAIN_LOGIT
    return model


def infer_counts_from_losses(adversary: Adversary) -> AttackResult:
    """Infer the counts of images by class and part from the loss of a model that always predicts one class.

    The attack is given the number of hidden classes of the validation part, since an attacker could try all numbers.
    """
    plan = adversary.make_attack_plan("tiny_cnn", 16, ZERO_LEARNING_RATE)
    counts = list_undisclosed_counts(adversary, "train", "validation")
    recovered = 0
    for count in counts:
        model = make_constant_output_model(adversary, plan, count.row)
        rows = len(adversary.head_class_names)
        loss = None
        images = 0
        if count.part == "train":
            if trained := adversary.request_training(plan, model):
                loss = trained.train_loss
                images = trained.train_samples
        else:
            rows -= len(adversary.site.hidden_classes("validation"))
            if evaluated := adversary.request_evaluation(plan, model):
                loss = evaluated.validation_loss
                images = len(adversary.site.validation)

        if loss is not None:
            rows = 1 if plan.model.task == "multi_class" else rows
            recovered += count.truth == round(
                images - (loss * rows - math.log(2) * (rows - 1)) * images / CERTAIN_LOGIT
            )
    return AttackResult(
        "counts from losses",
        "How many images show a class, out of losses",
        "A model that says of every image that it shows one class has a loss that counts the images without it. One "
        "request a class and part, each in a run of its own.",
        recovered,
        len(counts),
        UNDISCLOSED_COUNTS,
        "`training_figures = false`",
        response=adversary.response,
    )


def infer_counts_from_score_digits(adversary: Adversary) -> AttackResult:
    """Infer exact counts of test images by class from digits of AUROC and balanced accuracy, if counts are rounded."""
    step = adversary.site.policy.round_counts_to
    test = adversary.site.test
    pairs = dict[str, set[tuple[int, int]]]()
    tolerance = Fraction(1, 10**6)  # of a whole number
    for seed in range(TESTED_MODELS if step > 1 else 0):
        plan = adversary.make_attack_plan("tiny_cnn", 16, ZERO_LEARNING_RATE)
        run = adversary.make_unused_run_name()
        model = read_model_state(adversary.build_attacked_network(plan, seed))
        adversary.request_training(plan, model, run)
        if (reply := adversary.request_evaluation(plan, model, run, test=True)) is None:
            continue

        for row, name in enumerate(reply.class_names):
            positives = reply.positives[row]
            negatives = reply.negatives[row]
            auroc = reply.auroc[row]
            if positives == UNKNOWN_COUNT or np.isnan(auroc):
                continue
            scores = [Fraction(auroc), Fraction(reply.balanced_accuracy[row])]  # each is a whole number over 2 x p x n
            allowed = set[tuple[int, int]]()
            for p, n in itertools.product(range(positives, positives + step), range(negatives, negatives + step)):
                products = [2 * p * n * score for score in scores]
                if p * n and all(abs(product - round(product)) < tolerance for product in products):
                    allowed.add((p, n))
            pairs[name] = pairs.get(name, allowed) & allowed

    recovered = 0
    for name, allowed in pairs.items():
        column = test.labels[:, test.class_names.index(name)]
        recovered += allowed == {(int((column == 1).sum()), int((column == 0).sum()))}
    return AttackResult(
        "counts from digits",
        "How many test images show a class, out of the digits of its scores",
        "AUROC and balanced accuracy are whole numbers over twice the product of both counts: of the pairs that a "
        f"rounded pair allows, few have the digits that were told. {TESTED_MODELS} models, each in a run of its own."
        + ("" if step > 1 else " Here counts of large classes are told as they are."),
        recovered,
        len(set(adversary.head_class_names) - adversary.site.hidden_classes("test")) if step > 1 and len(test) else 0,
        "counts that `round_counts_to` rounds",
        "`test_metrics = false`",
        response=adversary.response,
    )


# ---------------------------------------------------------------------- out of updates


def infer_counts_from_head(adversary: Adversary) -> AttackResult:
    """Infer the counts of training images by class from the update of the head's biases, with one request."""
    plan = adversary.make_attack_plan("tiny_cnn", 16, 1.0)
    reply = adversary.request_training(plan, make_constant_output_model(adversary, plan))
    head = None if reply is None else reply.update.head
    return _make_count_attack_result(
        "counts from head rows",
        "How many training images show a class, out of the change of its head row",
        "One step from a model of zeros: the change of each class's bias is the share of images that show it.",
        adversary,
        *_infer_counts_from_biases(adversary, plan, reply, None if head is None else head.bias),
        stops=f"{FEW_PATIENTS_MEASURE}{NOISE_MEASURE}, or `parts` without `head`",
    )


def infer_counts_from_trunk(adversary: Adversary) -> AttackResult:
    """Infer the counts of training images by class from the update of the dense layer before the head.

    The attacker sends a model in which one unit of this layer stands for each class. After one step of gradient
    descent, the change of that unit's bias gives the share of images that show the class, even if no head row is sent.
    """
    plan = adversary.make_attack_plan("fedsld_cnn", 60, 1.0)
    network = adversary.build_attacked_network(plan)
    zero_all_parameters(network)
    with torch.no_grad():
        select_fedsld_cnn_layers(network).dense.bias[: len(adversary.head_class_names)] = 1
        network.head.weight.fill_diagonal_(1)
        network.head.bias.fill_(-1)  # each class has probability 0.5 for every image
    reply = adversary.request_training(plan, read_model_state(network))
    change = read_trunk_tensor_update(reply, make_model_layout(network).tensor_slices()[f"{DENSE_LAYER}.bias"])
    return _make_count_attack_result(
        "counts from the trunk",
        "How many training images show a class, out of the layer below the head",
        "One step from a model in which one unit stands for each class: the change of the unit's bias is the share of "
        "images that show it, also where no head row leaves.",
        adversary,
        *_infer_counts_from_biases(
            adversary, plan, reply, None if change is None else change[: len(adversary.head_class_names)]
        ),
        stops=FEW_PATIENTS_MEASURE + NOISE_MEASURE,
    )


def infer_counts_from_hash(adversary: Adversary) -> AttackResult:
    """Infer the counts of training images by class from the hash of a model whose head never leaves the site.

    The site reports the hash of the model that it evaluated, and the attacker tries every count.
    """
    counts = list_undisclosed_counts(adversary, "train") if adversary.honest.model.task == "multi_label" else []
    images = len(adversary.site.train)
    recovered = 0
    for undisclosed in counts:
        row = undisclosed.row
        plan = adversary.make_attack_plan(
            "tiny_cnn", 16, BIAS_STEP_PER_IMAGE * images * len(adversary.head_class_names)
        )
        plan = plan.model_copy(update={"run": plan.run.model_copy(update={"method": "pfl"})})
        network = adversary.build_attacked_network(plan)
        zero_all_parameters(network)
        with torch.no_grad():
            last = [module for module in network.backbone.modules() if isinstance(module, torch.nn.GroupNorm)][-1]
            last.bias[0] = 1  # a feature that is 1 for every image
            network.head.weight[:, 0] = ROUNDING_OFFSET
            network.head.bias[:] = ROUNDING_OFFSET
            network.head.weight[row, 0] = -COUNTED_BIAS
            network.head.bias[row] = COUNTED_BIAS

        model = read_model_state(network)
        layout = make_model_layout(network)
        run = adversary.make_unused_run_name()
        adversary.request_training(plan, model, run)
        reply = adversary.request_evaluation(plan, model, run, test=True, counted=1)

        for count in range(images + 1) if reply else ():
            change = np.float32(BIAS_STEP_PER_IMAGE * (images / 2 - count))  # of one step
            weight = model.head.weight.copy()
            bias = model.head.bias.copy()
            weight[row, 0] -= change
            bias[row] -= change
            trained = ModelState(model.trunk, model.norm, Head(model.head.class_names, weight, bias))
            if reply and hash_model_state(trained, layout) == reply.model_sha256:
                recovered += count == undisclosed.truth
                break
    return _make_count_attack_result(
        "counts from hashes",
        "How many training images show a class, out of the hash of a head that never leaves",
        "Each site has a head of its own. One step from a head that only one class moves; the site then says which "
        "model it judged, by its hash, and the attacker tries every count.",
        adversary,
        recovered,
        counts,
        stops="masks or noise on updates: the hash is then of what the coordinator sent",
    )


def _infer_counts_from_biases(
    adversary: Adversary, plan: HospitalPlan, reply: TrainReply | None, change: NDArray[np.float32] | None
) -> tuple[int, list[UndisclosedCount]]:
    """Compute the count of each class from the update of its bias, and compare the counts with the true ones.

    The site rounds its number of images down, and does not report how many classes the loss averages over. The attacker
    tries all values of both, because with the right values all counts are whole numbers.

    Args:
        change: For each class the update of one bias in a step of learning rate 1, ``(classes,)``; None for no update.

    Returns:
        The number of counts that are right, and the true counts that the site does not report.
    """
    counts = list_undisclosed_counts(adversary, "train")
    if reply is None or change is None:
        return 0, counts
    change = change.astype(np.float64)
    rows = len(adversary.head_class_names)
    totals = range(reply.train_samples, reply.train_samples + adversary.site.policy.round_counts_to)
    if plan.model.task == "multi_class":
        guesses = [total * (change + 1 / rows) for total in totals]
    else:
        guesses = [total * (change * trained + 0.5) for total in totals for trained in range(1, rows + 1)]
    moved = change != 0
    best = min(guesses, key=lambda guess: float(np.abs(guess - np.round(guess))[moved].max(initial=0.0)))
    return sum(round(best[count.row]) == count.truth for count in counts), counts


def _make_count_attack_result(
    name: str,
    title: str,
    tried: str,
    adversary: Adversary,
    recovered: int,
    counts: Sequence[UndisclosedCount],
    *,
    stops: str,
) -> AttackResult:
    hidden = sum(adversary.head_class_names[count.row] in adversary.site.hidden_classes(count.part) for count in counts)
    notes = [f"{hidden} of them are of classes that `smallest_count` hides"]
    return AttackResult(
        name, title, tried, recovered, len(counts), UNDISCLOSED_COUNTS, stops, notes=notes, response=adversary.response
    )


# ---------------------------------------------------------------------- around a budget


def bypass_privacy_budget(adversary: Adversary) -> AttackResult:
    """Try to get metrics from a site with a privacy budget, by a request to evaluate in a run without privacy."""
    has_budget = adversary.site.policy.epsilon is not None
    answered = False
    if has_budget:
        plan = adversary.make_attack_plan("tiny_cnn", 16, 0.01, 64).model_copy(update={"privacy": PrivacySection()})
        reply = adversary.request_evaluation(plan, read_model_state(adversary.build_attacked_network(plan)), test=True)
        answered = reply is not None and (reply.validation_loss is not None or bool(reply.class_names))
    return AttackResult(
        "round the budget",
        "An evaluation that walks round a privacy budget",
        "A request to evaluate and test a model, in a run without privacy."
        + ("" if has_budget else " This site has no budget (`epsilon`)."),
        int(answered),
        int(has_budget),
        "requests",
        "`epsilon` is asked at every request",
        response=adversary.response,
    )
