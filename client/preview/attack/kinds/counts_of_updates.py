"""How many training images show a class: out of head rows, out of the layer below, and out of a hash of what stays.

One step of gradient descent, in a batch of all images, from a model that says the same of every image: what a bias then
moves by is a count.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from client.preview.attack.kinds.adversary import Adversary
from client.preview.attack.kinds.attempt import Attempt
from client.preview.attack.kinds.counts import Count, constant, untold
from client.preview.attack.kinds.crafted import DENSE, layers_of
from common.config import Plan
from common.models.network import build
from common.models.state import Head, ModelState, layout_of, read_state, state_sha256
from common.models.zoo.spec import Task
from common.wire.records import TrainReply

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
    sought = [count for count in untold(at) if count.part == "train"] if at.honest.model.task == "multi_label" else []
    found = [_hashed(at, count.row) == count.truth for count in sought]
    return _attempt(
        "counts from hashes",
        "How many training images show a class, out of the hash of a head that never leaves",
        "Each site has a head of its own. One step from a head that only one class moves; the site then says which "
        "model it judged, by its hash, and the attacker tries every count.",
        at,
        (sum(found), sought),
        stops="masks or noise on updates: the hash is then of what the coordinator sent",
    )


def _hashed(at: Adversary, row: int) -> int | None:
    """The count whose head has the hash that the site tells."""
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
    """The model with the head that one step makes."""
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
    """How many counts the change of one bias a class gives, and those that were looked for."""
    sought = [count for count in untold(at) if count.part == "train"]
    if reply is None or change is None:
        return 0, sought
    guesses = _fitting(change.astype(np.float64), at, reply.train_samples, plan.model.task)
    return sum(round(guesses[count.row]) == count.truth for count in sought), sought


def _fitting(change: NDArray[np.float64], at: Adversary, images: int, task: Task) -> NDArray[np.float64]:
    """The count of each class that a change of its bias gives.

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
    return min(tried, key=lambda one: float(np.abs(one - np.round(one))[moved].max(initial=0.0)))


def _attempt(
    name: str, title: str, tried: str, at: Adversary, found: tuple[int, Sequence[Count]], *, stops: str
) -> Attempt:
    recovered, sought = found
    hidden = sum(at.rows[count.row] in at.site.hides(count.part) for count in sought)
    notes = [f"{hidden} of them are of classes that `smallest_count` hides"]
    things = "counts that the site does not tell"
    return Attempt(name, title, tried, recovered, len(sought), things, stops, notes=notes, said=at.said)
