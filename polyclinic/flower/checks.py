"""What is read and checked in Flower's records: a model's head, a site's reply, metrics, and a method's statistics."""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence, Set
from io import BytesIO
from logging import WARNING, getLogger
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from common.models.network import Head
from common.wire.records import Arrays
from polyclinic.flower.labels import shorten_error

log = getLogger("flwr")
Classes = tuple[str, ...]

# ---------------------------------------------------------------------- a model's head


def suggest_layer(head: str, layers: Sequence[str]) -> str:
    """Return `` Did you mean ...?`` with the most similar layer's name; an empty string if none is similar."""
    whole = head.removesuffix(".weight").removesuffix(".bias")  # a tensor's name in place of its layer's
    inside = [layer for layer in layers if layer.endswith(f".{whole}")]  # _orig_mod.fc of a compiled model
    meant = [whole] if whole in layers else inside or difflib.get_close_matches(head, layers, 1)
    return f" Did you mean {meant[0]!r}?" if meant else ""


def copy_head(arrays: ArrayRecord, head: str, classes: Classes) -> Head:
    """Copy a model's last layer; a bias that it does not have is zero.

    Raises:
        ValueError: If the model has no such layer, or the layer has another number of rows or another type.
    """
    if (key := f"{head}.weight") not in arrays:
        if parts := sorted(name for name in arrays if name.startswith(f"{head}.") and name != f"{head}.bias"):
            raise ValueError(f"the model has {parts} in place of {key!r}: the head must be a plain torch.nn.Linear")
        layers = sorted(name.removesuffix(".weight") for name in arrays if name.endswith(".weight"))
        raise ValueError(
            f"the model has no {key!r}; its layers with weights are {layers}.{suggest_layer(head, layers)}"
        )
    weight = arrays[key].numpy()
    if weight.dtype not in (np.float32, np.float16):
        raise ValueError(f"{key!r} is {weight.dtype}; a head is float32 or float16: use model.float()")
    if weight.ndim != 2 or len(weight) != len(classes):
        raise ValueError(
            f"{key!r} has the shape {weight.shape}; {len(classes)} classes need ({len(classes)}, features)"
        )
    bias = arrays[f"{head}.bias"].numpy() if f"{head}.bias" in arrays else np.zeros(len(classes))
    return Head(classes, weight.astype(np.float32), bias.astype(np.float32))


def replace_head(arrays: ArrayRecord, name: str, head: Head) -> ArrayRecord:
    """Return a model with another head, in the types that it had."""
    rows = {f"{name}.weight": head.weight, f"{name}.bias": head.bias}
    return ArrayRecord(
        {key: Array(rows[key].astype(array.numpy().dtype)) if key in rows else array for key, array in arrays.items()}
    )


def find_other_row_tensors(arrays: ArrayRecord, head: str, classes: Classes) -> list[str]:
    """Return the head's tensors beside weight and bias that have a row for each class, as LoRA's have."""
    layer = head.removesuffix(".base_layer")  # where PEFT puts the layer that it wraps
    return [
        name
        for name, array in arrays.items()
        if name.startswith(f"{layer}.") and tuple(array.shape)[:1] == (len(classes),)
        if name not in (f"{head}.weight", f"{head}.bias")
    ]


# ---------------------------------------------------------------------- replies


def filter_fitting_replies(
    server_round: int, replies: Iterable[Message], fault_in: Callable[[Message], str]
) -> list[Message]:
    """Return the replies that can be used and those that hold an error; warn of every other reply.

    Args:
        fault_in: Returns why a reply cannot be used; an empty string where it can.
    """
    fit = list[Message]()
    for reply in replies:
        if fault := "" if reply.has_error() else fault_in(reply):
            node = reply.metadata.src_node_id
            log.log(WARNING, "round %s: the reply of node %s is left out: %s", server_round, node, fault)
        else:
            fit.append(reply)
    return fit


def require_usable_replies(
    server_round: int,
    replies: Sequence[Message],
    nodes: Iterable[int],
    timeout: float,
    fault_in: Callable[[Message], str],
) -> list[Message]:
    """Return the replies as :func:`filter_fitting_replies` does, for training: without one model the run cannot go on.

    Args:
        nodes: Nodes that received the model.
        timeout: Seconds that they had.

    Raises:
        RuntimeError: If no reply can be used, with each node's reason.
    """
    faults = dict.fromkeys(nodes, f"no reply within {timeout:g} s")
    for reply in replies:
        failed = f"it failed: {shorten_error(reply.error.reason or '')}" if reply.has_error() else ""
        faults[reply.metadata.src_node_id] = failed or fault_in(reply)
    if faults and all(faults.values()):
        reasons = [f"node {node}: {fault}" for node, fault in sorted(faults.items())]
        raise RuntimeError("\n".join([f"round {server_round}: no reply can be used:", *reasons]))
    return filter_fitting_replies(server_round, replies, lambda reply: faults[reply.metadata.src_node_id])


def get_model(reply: Message) -> ArrayRecord:
    """Return the one model of a reply, under any name."""
    return next(iter(reply.content.array_records.values()))


def get_metrics(content: RecordDict) -> MetricRecord:
    """Return the one record of metrics of a reply, under any name."""
    return next(iter(content.metric_records.values()))


def get_weight(reply: Message, key: str) -> float:
    """Return the weight of a reply in a mean; :func:`explain_metrics_fault` checks it.

    Args:
        key: Name of the weight in the metrics.
    """
    weight: Any = get_metrics(reply.content)[key]
    return float(weight)


def explain_metrics_fault(reply: Message, key: str) -> str:
    """Return why a reply's metrics cannot be averaged; an empty string where they can."""
    if len(reply.content.metric_records) != 1:
        return "it needs one MetricRecord"
    weight = get_metrics(reply.content).get(key)
    if not isinstance(weight, int | float):
        return f"it sent no {key!r} in its metrics"
    return "" if 0 < weight < math.inf else f"{key!r} must be above 0, got {weight}"


def explain_model_fault(model: ArrayRecord, sent: ArrayRecord, head: str, classes: Classes) -> str:
    """Return how a trained model differs in form from the one that was sent; an empty string where it fits.

    An infinity that was sent, too, fits: a mask of attention holds some.
    """
    if prefix := _find_name_prefix(model.keys(), sent.keys()):
        return f"its model's names begin with {prefix!r}: send the state_dict() of the model inside torch.compile()"
    if lacks := sorted(sent.keys() - model.keys()):
        return f"its model lacks {', '.join(map(repr, lacks))}"
    if more := sorted(model.keys() - sent.keys()):
        return f"its model has, which was not sent, {', '.join(map(repr, more))}"
    for name, array in model.items():
        values, expected = array.numpy(), sent[name].numpy()
        if values.shape != expected.shape:
            return f"{name!r} has the shape {values.shape}, not {expected.shape}"
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values[values != expected]).all():
            return f"{name!r} holds values that are not finite"
    try:
        copy_head(model, head, classes)
    except ValueError as error:
        return str(error)
    return ""


def _find_name_prefix(names: Set[str], expected: Set[str]) -> str:
    """Return the prefix that all expected names have in a reply; an empty string if they have none."""
    first = min(expected)
    prefixes = {name.removesuffix(first) for name in names if name.endswith(first)} - {""}
    return next((prefix for prefix in prefixes if {prefix + name for name in expected} == set(names)), "")


# ---------------------------------------------------------------------- means


def restore_whole_numbers(mean: ArrayRecord, models: Sequence[ArrayRecord]) -> ArrayRecord:
    """Return a mean of models with every integer and bool entry put back on which all models agree.

    Flower multiplies entries by weights that sum to 1 up to rounding: an index of 3 comes out as 2.9999..., which a
    model that loads it into int64 takes for 2. A tensor on which all agree keeps its type, too.
    """

    def with_whole_numbers(name: str, array: Array) -> Array:
        first, *others = (model[name].numpy() for model in models)
        if np.issubdtype(first.dtype, np.inexact):
            return array
        same = np.all([first == other for other in (first, *others)], axis=0)
        return Array(first if same.all() else np.where(same, first, array.numpy()))

    return ArrayRecord({name: with_whole_numbers(name, array) for name, array in mean.items()})


def average_metrics(contents: Sequence[RecordDict], key: str) -> MetricRecord:
    """Return the mean of each metric over the sites that sent it, by weight; Flower's own mean where all sent it.

    A metric of lists that differ in length has no mean and is left out.

    Args:
        contents: Replies, each with one ``MetricRecord``.
        key: Name of the weight in it.
    """
    every, means = [get_metrics(content) for content in contents], MetricRecord()
    for name in dict.fromkeys(name for metrics in every for name in metrics if name != key):
        senders: list[Any] = [metrics for metrics in every if name in metrics]
        total = sum(float(metrics[key]) for metrics in senders)
        shares = [float(metrics[key]) / total for metrics in senders]
        values = [metrics[name] for metrics in senders]
        if all(isinstance(value, list) for value in values) and len(set(map(len, values))) == 1:
            means[name] = [_weighted_sum(column, shares) for column in zip(*values, strict=True)]
        elif not any(isinstance(value, list) for value in values):
            means[name] = _weighted_sum(values, shares)
    return means


def _weighted_sum(values: Sequence[float], shares: Sequence[float]) -> float:
    return float(sum(value * share for value, share in zip(values, shares, strict=True)))


def describe_uneven_metrics(replies: Iterable[Message]) -> list[str]:
    """Describe the metrics that not every reply has, or that differ in length."""
    every = {reply.metadata.src_node_id: get_metrics(reply.content) for reply in replies if not reply.has_error()}
    notes = list[str]()
    for name in dict.fromkeys(name for metrics in every.values() for name in metrics):
        values = {node: metrics[name] for node, metrics in sorted(every.items()) if name in metrics}
        nodes = ", ".join(map(str, values))
        if len({len(value) if isinstance(value, list) else -1 for value in values.values()}) > 1:
            notes.append(f"the metric {name!r} of nodes {nodes} differs in length: it has no mean")
        elif len(values) < len(every):
            notes.append(f"only node {nodes} sent the metric {name!r}: its mean is over those that sent it")
    return notes


# ---------------------------------------------------------------------- a method's statistics


def pack_arrays(arrays: Arrays) -> ConfigRecord:
    """Write arrays into a record that is no model: mods and means of Flower take every ``ArrayRecord`` for one."""
    return ConfigRecord({name: Array(np.asarray(value)).data for name, value in arrays.items()})


def unpack_arrays(record: ConfigRecord) -> dict[str, NDArray[np.float32]]:
    """Read the arrays of :func:`pack_arrays`; entries of another kind are left out.

    Raises:
        ValueError: If an entry holds no array.
    """
    return {name: _parse_array(data) for name, data in record.items() if isinstance(data, bytes)}


def _parse_array(data: bytes) -> NDArray[np.float32]:
    try:
        return np.asarray(np.lib.format.read_array(BytesIO(data), allow_pickle=False), np.float32)
    except (EOFError, ValueError) as error:
        raise ValueError(f"it is no array: {error}") from None
