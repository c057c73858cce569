"""Which replies of a round can be used: of the others the node and the reason are said."""

import math
from collections.abc import Callable, Iterable, Set
from logging import WARNING, getLogger

import numpy as np
from flwr.app import ArrayRecord, Message

from polyclinic.flower.heads import head_of
from polyclinic.flower.labels import why

log = getLogger("flwr")
FaultIn = Callable[[Message], str]


def fitting(server_round: int, replies: Iterable[Message], fault_in: FaultIn) -> list[Message]:
    """Replies that can be used, and those that hold an error; a warning names the node of every other one.

    Args:
        fault_in: Why a reply cannot be used; empty where it can.
    """
    came = list(replies)
    faults = {id(reply): fault_in(reply) for reply in came if not reply.has_error()}
    for reply in came:
        if fault := faults.get(id(reply)):
            node = reply.metadata.src_node_id
            log.log(WARNING, "round %s: the reply of node %s is left out: %s", server_round, node, fault)
    return [reply for reply in came if not faults.get(id(reply))]


def usable(
    server_round: int, replies: Iterable[Message], asked: Iterable[int], timeout: float, fault_in: FaultIn
) -> list[Message]:
    """As :func:`fitting`, for training: without one model the run cannot go on.

    Args:
        asked: Nodes that were sent the model.
        timeout: Seconds that they had.

    Raises:
        RuntimeError: If sites were asked and no reply can be used, with each node's reason.
    """
    came = list(replies)
    faults = dict.fromkeys(asked, f"no reply within {timeout:g} s")
    for reply in came:
        node = reply.metadata.src_node_id
        faults[node] = f"it failed: {why(reply.error.reason or '')}" if reply.has_error() else fault_in(reply)
    if faults and all(faults.values()):
        reasons = [f"node {node}: {fault}" for node, fault in sorted(faults.items())]
        raise RuntimeError("\n".join([f"round {server_round}: no reply can be used:", *reasons]))
    return fitting(server_round, came, lambda reply: faults[reply.metadata.src_node_id])


def misfit(reply: Message, sent: ArrayRecord, head: str, classes: tuple[str, ...], key: str) -> str:
    """Why a reply does not fit the model that was sent; empty where it does.

    Args:
        sent: The model that the sites received.
        head: Name of its last layer.
        key: What a reply weighs by, in its ``MetricRecord``.
    """
    if len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
        return "it needs one ArrayRecord and one MetricRecord"
    if fault := metrics_fault(reply, key):
        return fault
    (model,) = reply.content.array_records.values()
    return model_fault(model, sent, head, classes)


def model_fault(model: ArrayRecord, sent: ArrayRecord, head: str, classes: tuple[str, ...]) -> str:
    """Why a trained model does not fit the one before training; empty where it does."""
    try:
        if fault := _other_arrays(model, sent):
            return fault
        head_of(model, head, classes)
    except ValueError as error:
        return str(error)
    return ""


def metrics_fault(reply: Message, key: str) -> str:
    """Why a reply's metrics cannot be averaged; empty where they can."""
    if len(reply.content.metric_records) != 1:
        return "it needs one MetricRecord"
    try:
        weight_in(reply, key)
    except ValueError as error:
        return str(error)
    return ""


def weight_in(reply: Message, key: str) -> float:
    """What a site's reply weighs in a mean.

    Raises:
        ValueError: If its metrics do not say so, or it weighs nothing.
    """
    records = reply.content.metric_records.values()
    weight = next((record[key] for record in records if key in record), None)
    if not isinstance(weight, int | float):
        raise ValueError(f"it sent no {key!r} in its metrics")
    if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"{key!r} must be above 0, got {weight}")
    return float(weight)


def _other_arrays(model: ArrayRecord, sent: ArrayRecord) -> str:
    """How a model differs in form from another, or that its values are not finite; empty where it fits.

    An infinity that stands in the other model, too, fits: a mask of attention holds some.
    """
    if prefix := _prefix(model.keys(), sent.keys()):
        return f"its model's names begin with {prefix!r}: send the state_dict() of the model inside torch.compile()"
    for verb, names in (
        ("lacks", sent.keys() - model.keys()),
        ("has, which was not sent,", model.keys() - sent.keys()),
    ):
        if names:
            return f"its model {verb} " + ", ".join(map(repr, sorted(names)))
    for name, array in model.items():
        values, expected = array.numpy(), sent[name].numpy()
        if values.shape != expected.shape:
            return f"{name!r} has the shape {values.shape}, not {expected.shape}"
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values[values != expected]).all():
            return f"{name!r} holds values that are not finite"
    return ""


def _prefix(names: Set[str], expected: Set[str]) -> str:
    """What all names have in front of those that are expected, or nothing."""
    first = min(expected)
    found = {name.removesuffix(first) for name in names if name.endswith(first)} - {""}
    return next((prefix for prefix in found if {prefix + name for name in expected} == set(names)), "")
