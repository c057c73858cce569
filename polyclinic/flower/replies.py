"""Which replies of a round can be used: of the others the node and the reason are said."""

import math
from collections.abc import Callable, Iterable
from logging import WARNING, getLogger

import numpy as np
from flwr.app import ArrayRecord, Message

from polyclinic.flower.heads import head_of

log = getLogger("flwr")


def usable(server_round: int, replies: Iterable[Message], fault_in: Callable[[Message], str]) -> list[Message]:
    """Replies that can be used, and those that hold an error; a warning names the node of every other one.

    They come in ascending order of nodes.

    Args:
        fault_in: Why a reply cannot be used; empty where it can.

    Raises:
        ValueError: If sites replied and no reply can be used, with each node's reason.
    """
    came = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
    faults = {id(reply): fault_in(reply) for reply in came if not reply.has_error()}
    refused = [reply for reply in came if faults.get(id(reply))]
    if refused and len(refused) == len(faults):
        reasons = [f"node {reply.metadata.src_node_id}: {faults[id(reply)]}" for reply in refused]
        raise ValueError("\n".join([f"round {server_round}: no reply can be used:", *reasons]))
    for reply in refused:
        node = reply.metadata.src_node_id
        log.log(WARNING, "round %s: the reply of node %s is left out: %s", server_round, node, faults[id(reply)])
    return [reply for reply in came if not faults.get(id(reply))]


def misfit(reply: Message, sent: ArrayRecord, head: str, classes: tuple[str, ...], key: str) -> str:
    """Why a reply does not fit the model that was sent; empty where it does.

    Args:
        sent: The model that the sites received.
        head: Name of its last layer.
        key: What a reply weighs by, in its ``MetricRecord``.
    """
    if len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
        return "it needs one ArrayRecord and one MetricRecord"
    (model,) = reply.content.array_records.values()
    try:
        weight_in(reply, key)
        if fault := _other_arrays(model, sent):
            return fault
        head_of(model, head, classes)
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
    for verb, names in (
        ("lacks", sent.keys() - model.keys()),
        ("has, which was not sent,", model.keys() - sent.keys()),
    ):
        if names:
            return f"its model {verb} " + ", ".join(map(repr, sorted(names)))
    for name, array in model.items():
        values, expected = array.numpy(), tuple(sent[name].shape)
        if values.shape != expected:
            return f"{name!r} has the shape {values.shape}, not {expected}"
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
            return f"{name!r} holds values that are not finite"
    return ""
