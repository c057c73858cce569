"""How many images show a class: out of losses, the digits of a score, an update, or the hash of what stays.

The model of most of these says the same of every image: what a loss or a bias then moves by is a count. From updates:
one step of gradient descent, in a batch of all images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from client.preview.attack.adversary import DENSE, Adversary, Attempt, layers_of
from common.config import Plan, PrivacySection
from common.data.base.image_set import ImageSet
from common.models.network import Head, build
from common.models.state import ModelState, layout_of, read_state, state_sha256
from common.models.zoo.spec import Task
from common.wire.records import UNKNOWN_COUNT, TrainReply

SURE = 30.0
TESTS = 4
STOPS = "`training_figures = false`"


@dataclass(frozen=True)
class Count:
    """A count that the site reports to nobody: how many images of one part show a class."""

    part: str
    row: int
    truth: int


def undisclosed_counts(at: Adversary) -> list[Count]:
    """List counts of training and validation images by class that the policy does not report."""
    site, counts = at.site, list[Count]()
    for part in ("train", "validation"):
        images: ImageSet = getattr(site, part)
        reported = set(at.rows) - site.hides(part) if part == "train" and site.policy.label_counts else set()
        counts += [
            Count(part, row, int((images.labels[:, images.class_names.index(name)] == 1).sum()))
            for row, name in enumerate(at.rows)
            if len(images) and name not in reported
        ]
    return counts


def _small(at: Adversary) -> Plan:
    batch = max(len(at.site.train), 1)
    return at.plan(
        {"architecture": "tiny_cnn", "image_size": 16}, {"optimizer": "sgd", "lr": 1e-30, "batch_size": batch}
    )


def constant(plan: Plan, rows: tuple[str, ...], row: int | None = None) -> ModelState:
    """Make a model of zeros that says the same of every image; of one class that it is there, surely."""
    model = read_state(build(plan.model, rows, 1))
    for values in (model.trunk, model.norm, model.head.weight, model.head.bias):
        values[:] = 0
    if row is not None:
        model.head.bias[row] = SURE
    return model


def from_losses(at: Adversary) -> Attempt:
    """Ask for the loss of a model that is sure of one class, for each class and part."""
    plan, sought = _small(at), undisclosed_counts(at)
    guesses = [_guess(at, plan, count) for count in sought]
    right = [guess is not None and round(guess) == count.truth for guess, count in zip(guesses, sought, strict=True)]
    return Attempt(
        "counts from losses",
        "How many images show a class, out of losses",
        "A model that says of every image that it shows one class has a loss that counts the images without it. One "
        "request a class and part, each in a run of its own.",
        sum(right),
        len(sought),
        "counts that the site does not tell",
        STOPS,
        response=at.response,
    )


def _guess(at: Adversary, plan: Plan, count: Count) -> float | None:
    """Return the count that a loss gives away, as the attacker works it out.

    It knows the classes that no validation figure is over: it could try how many they are.
    """
    model = constant(plan, at.rows, count.row)
    if count.part == "train":
        trained = at.trains(plan, model)
        loss, images = (None, 0) if trained is None else (trained.train_loss, trained.train_samples)
    else:
        judged = at.judges(plan, model)
        loss, images = (None if judged is None else judged.validation_loss), len(at.site.validation)
    if loss is None:
        return None
    one_class = plan.model.task == "multi_class"
    rows = len(at.rows) - (len(at.site.hides("validation")) if count.part == "validation" else 0)
    others = 0.0 if one_class else np.log(2) * (rows - 1)
    return images - (loss * (1 if one_class else rows) - others) * images / SURE


def from_digits(at: Adversary) -> Attempt:
    """Look which pair of counts the digits of scores allow, where counts are told rounded."""
    step, test, left = at.site.policy.round_counts_to, at.site.test, dict[str, set[tuple[int, int]]]()
    for seed in range(TESTS if step > 1 else 0):
        for name, fits in _fitting_by_class(at, seed, step):
            left[name] = left.get(name, fits) & fits
    found = 0
    for name, fits in left.items():
        column = test.labels[:, test.class_names.index(name)]
        found += fits == {(int((column == 1).sum()), int((column == 0).sum()))}
    return Attempt(
        "counts from digits",
        "How many test images show a class, out of the digits of its scores",
        "AUROC and balanced accuracy are whole numbers over twice the product of both counts: of the pairs that a "
        f"rounded pair allows, few have the digits that were told. {TESTS} models, each in a run of its own."
        + ("" if step > 1 else " Here counts of large classes are told as they are."),
        found,
        len(set(at.rows) - at.site.hides("test")) if step > 1 and len(test) else 0,
        "counts that `round_counts_to` rounds",
        "`test_metrics = false`",
        response=at.response,
    )


def _fitting_by_class(at: Adversary, seed: int, step: int) -> Iterator[tuple[str, set[tuple[int, int]]]]:
    """Train and test one model; of each class the pairs of counts that its scores allow."""
    plan, run = _small(at), at.new_run()
    model = read_state(build(plan.model, at.rows, seed))
    at.trains(plan, model, run)
    reply = at.judges(plan, model, run, test=True)
    for row, name in enumerate(() if reply is None else reply.class_names):
        assert reply is not None
        positives, negatives, auroc = reply.positives[row], reply.negatives[row], reply.auroc[row]
        if positives != UNKNOWN_COUNT and not np.isnan(auroc):
            yield name, set(_fitting((auroc, reply.balanced_accuracy[row]), positives, negatives, step))


def _fitting(scores: tuple[float, float], positives: int, negatives: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of counts whose scores can have these digits: AUROC and balanced accuracy are whole over 2pn."""
    for p in range(positives, positives + step):
        for n in range(negatives, negatives + step):
            whole = [2 * p * n * Fraction(score) for score in scores]
            if p * n and all(abs(value - round(value)) < Fraction(1, 10**6) for value in whole):
                yield p, n


# ---------------------------------------------------------------------- out of updates


NOISE = 'of others noise (`level = "private"`)'
FEW_PATIENTS = "`train_hidden_classes = false` for classes of few patients; "
OFFSET, STEP = 2.0**10, 2.0**-12
"""A bias, and what one image moves it by: a multiple of the distance of numbers there, so that no sum is rounded."""
ABSORBS = 2.0**60
"""A number so large that the change of a step is rounded away."""


def from_head_rows(at: Adversary) -> Attempt:
    """Read the counts of training images off the change of the head's biases: one request for all classes."""
    plan = _one_step(at, "tiny_cnn", 16)
    reply = at.trains(plan, constant(plan, at.rows))
    head = None if reply is None else reply.update.head
    return _attempt(
        "counts from head rows",
        "How many training images show a class, out of the change of its head row",
        "One step from a model of zeros: the change of each class's bias is the share of images that show it.",
        at,
        _read_off(at, plan, reply, None if head is None else head.bias),
        stops=f"{FEW_PATIENTS}{NOISE}, or `parts` without `head`",
    )


def from_trunk(at: Adversary) -> Attempt:
    """Read them off the layer below the head: a unit for each class, at which no other class's row looks."""
    plan = _one_step(at, "fedsld_cnn", 60)
    network = build(plan.model, at.rows, 1)
    with torch.no_grad():
        for value in network.parameters():
            value.zero_()
        layers_of(network).dense.bias[: len(at.rows)] = 1
        network.head.weight.fill_diagonal_(1)
        network.head.bias.fill_(-1)  # of every image each class is as likely as not
    reply = at.trains(plan, read_state(network))
    trunk, place = None if reply is None else reply.update.trunk, layout_of(network).slices()[f"{DENSE}.bias"]
    return _attempt(
        "counts from the trunk",
        "How many training images show a class, out of the layer below the head",
        "One step from a model in which one unit stands for each class: the change of the unit's bias is the share of "
        "images that show it, also where no head row leaves.",
        at,
        _read_off(at, plan, reply, None if trunk is None else trunk[place][: len(at.rows)]),
        stops=FEW_PATIENTS + NOISE,
    )


def from_hash(at: Adversary) -> Attempt:
    """Have a head trained that stays, and try which count gives the hash of the model that the site says it judged."""
    sought = (
        [count for count in undisclosed_counts(at) if count.part == "train"]
        if at.honest.model.task == "multi_label"
        else []
    )
    right = [_hashed(at, count.row) == count.truth for count in sought]
    return _attempt(
        "counts from hashes",
        "How many training images show a class, out of the hash of a head that never leaves",
        "Each site has a head of its own. One step from a head that only one class moves; the site then says which "
        "model it judged, by its hash, and the attacker tries every count.",
        at,
        (sum(right), sought),
        stops="masks or noise on updates: the hash is then of what the coordinator sent",
    )


def _hashed(at: Adversary, row: int) -> int | None:
    """Find the count whose head has the hash that the site reports."""
    images, rows = len(at.site.train), len(at.rows)
    plan = _one_step(at, "tiny_cnn", 16, lr=STEP * images * rows)
    plan = plan.model_copy(update={"run": plan.run.model_copy(update={"method": "pfl"})})
    network = build(plan.model, at.rows, 1)
    with torch.no_grad():
        for value in network.parameters():
            value.zero_()
        last = [module for module in network.backbone.modules() if isinstance(module, torch.nn.GroupNorm)][-1]
        last.bias[0] = 1  # a feature that is 1 for every image
        network.head.weight[:, 0], network.head.bias[:] = ABSORBS, ABSORBS
        network.head.weight[row, 0], network.head.bias[row] = -OFFSET, OFFSET
    model, run = read_state(network), at.new_run()
    at.trains(plan, model, run)
    reply = at.judges(plan, model, run, counted=1)
    layout = layout_of(network)
    for count in range(images + 1) if reply is not None else ():
        assert reply is not None
        if state_sha256(_moved(model, row, np.float32(STEP * (images / 2 - count))), layout) == reply.model_sha256:
            return count
    return None


def _moved(model: ModelState, row: int, change: np.float32) -> ModelState:
    """Return the model with the head that one step makes."""
    weight, bias = model.head.weight.copy(), model.head.bias.copy()
    weight[row, 0] -= change
    bias[row] -= change
    return ModelState(model.trunk, model.norm, Head(model.head.class_names, weight, bias))


def _one_step(at: Adversary, architecture: str, size: int, lr: float = 1.0) -> Plan:
    training: dict[str, Any] = {"optimizer": "sgd", "lr": lr, "batch_size": len(at.site.train)}
    return at.plan({"architecture": architecture, "image_size": size}, training)


def _read_off(
    at: Adversary, plan: Plan, reply: TrainReply | None, change: NDArray[np.float32] | None
) -> tuple[int, list[Count]]:
    """Count how many counts the change of one bias a class gives, and those that were looked for."""
    sought = [count for count in undisclosed_counts(at) if count.part == "train"]
    if reply is None or change is None:
        return 0, sought
    guesses = _counts_from(change.astype(np.float64), at, reply.train_samples, plan.model.task)
    return sum(round(guesses[count.row]) == count.truth for count in sought), sought


def _counts_from(change: NDArray[np.float64], at: Adversary, images: int, task: Task) -> NDArray[np.float64]:
    """Work out the count of each class that a change of its bias gives.

    How many images there are exactly (their number is told rounded down), and over how many classes the loss is a mean,
    the attacker tries: with the right ones all counts are whole numbers.
    """
    rows = len(at.rows)
    many = range(images, images + at.site.policy.round_counts_to)
    if task == "multi_class":
        tried = [each * (change + 1 / rows) for each in many]
    else:
        tried = [each * (change * trained + 0.5) for each in many for trained in range(1, rows + 1)]
    moved = change != 0
    return min(tried, key=lambda counts: float(np.abs(counts - np.round(counts))[moved].max(initial=0.0)))


def _attempt(
    name: str, title: str, tried: str, at: Adversary, found: tuple[int, Sequence[Count]], *, stops: str
) -> Attempt:
    recovered, sought = found
    hidden = sum(at.rows[count.row] in at.site.hides(count.part) for count in sought)
    notes = [f"{hidden} of them are of classes that `smallest_count` hides"]
    things = "counts that the site does not tell"
    return Attempt(name, title, tried, recovered, len(sought), things, stops, notes=notes, response=at.response)


# ---------------------------------------------------------------------- around a budget


def bypass_budget(at: Adversary) -> Attempt:
    """Ask a site that takes part with privacy only to evaluate without."""
    budget = at.site.policy.epsilon is not None
    answered = False
    if budget:
        plan = at.plan({"architecture": "tiny_cnn", "image_size": 16}, {"optimizer": "sgd", "lr": 0.01})
        plan = plan.model_copy(update={"privacy": PrivacySection()})
        reply = at.judges(plan, read_state(build(plan.model, at.rows, 1)), test=True)
        answered = reply is not None and (reply.validation_loss is not None or bool(reply.class_names))
    return Attempt(
        "round the budget",
        "An evaluation that walks round a privacy budget",
        "A request to evaluate and test a model, in a run without privacy."
        + ("" if budget else " This site has no budget (`epsilon`)."),
        int(answered),
        int(budget),
        "requests",
        "`epsilon` is asked at every request",
        response=at.response,
    )
