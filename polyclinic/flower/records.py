"""Read, check and average Flower records: models and their heads, metrics, and statistics of a method."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from polyclinic.common.models.network import Head
from polyclinic.common.wire.records import Arrays
from polyclinic.strategies.aggregation.means import mix_tensors

MetricMean = Callable[[list[RecordDict], str], MetricRecord]

# ---------------------------------------------------------------------- a model's head


def copy_head(arrays: ArrayRecord, head: str, classes: tuple[str, ...]) -> Head:
    """Return a copy of a model's last layer, with zeros for a missing bias.

    Args:
        arrays: The model's tensors by name.
        head: Name of the last layer.
        classes: Names of the layer's rows.

    Raises:
        ValueError: If the layer is missing, or has a wrong type or shape.
    """
    if (key := f"{head}.weight") not in arrays:
        layers = sorted(name.removesuffix(".weight") for name in arrays if name.endswith(".weight"))
        raise ValueError(f"the model has no {key!r}; its layers with weights are {layers}")
    weight = arrays[key].numpy()
    if weight.dtype not in (np.float32, np.float16):
        raise ValueError(f"{key!r} is {weight.dtype}; a head is float32 or float16: use model.float()")
    if weight.ndim != 2 or len(weight) != len(classes):
        rows = f"{len(classes)} classes need ({len(classes)}, features)"
        raise ValueError(f"{key!r} has the shape {weight.shape}; {rows}")
    bias = arrays[f"{head}.bias"].numpy() if f"{head}.bias" in arrays else np.zeros(len(classes))
    return Head(classes, weight.astype(np.float32), bias.astype(np.float32))


# ---------------------------------------------------------------------- replies


def get_reply_metrics(content: RecordDict) -> MetricRecord:
    """Return the only MetricRecord of a reply; its key may be any."""
    return next(iter(content.metric_records.values()))


def read_reply_weight(reply: Message, key: str) -> float:
    """Return the weight with which a reply counts in averages, a number above 0.

    Args:
        key: Name of the weight in the reply's metrics.

    Raises:
        ValueError: If the reply has no such weight, or not exactly one MetricRecord.
    """
    if len(reply.content.metric_records) != 1:
        raise ValueError("it needs one MetricRecord")
    weight = get_reply_metrics(reply.content).get(key)
    if not isinstance(weight, int | float):
        raise ValueError(f"it sent no {key!r} in its metrics")
    if not 0 < weight < math.inf:
        raise ValueError(f"{key!r} must be above 0, got {weight}")
    return float(weight)


def find_model_fault(model: ArrayRecord, sent: ArrayRecord) -> str:
    """Return an error message if a trained model does not match the model that was sent to the site; else empty.

    It must have the same tensors and shapes, and finite values. Infinite entries are accepted where the sent model has
    them too, as in attention masks.
    """
    if missing := sorted(sent.keys() - model.keys()):
        return f"its model lacks {', '.join(map(repr, missing))}"
    if unexpected := sorted(model.keys() - sent.keys()):
        return f"its model has, which was not sent, {', '.join(map(repr, unexpected))}"
    for name, array in model.items():
        values, expected = array.numpy(), sent[name].numpy()
        if values.shape != expected.shape:
            return f"{name!r} has the shape {values.shape}, not {expected.shape}"
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values[values != expected]).all():
            return f"{name!r} holds values that are not finite"
    return ""


# ---------------------------------------------------------------------- means


def average_models(contents: Sequence[RecordDict], key: str) -> ArrayRecord:
    """Return the weighted mean of the models in replies; it is bit for bit equal to that of Flower's ``FedAvg``.

    Args:
        contents: The contents of the sites' replies, each with one model; all models have the same tensors.
        key: Name of the weight in a reply's metrics.
    """
    weights: list[Any] = [get_reply_metrics(content)[key] for content in contents]
    total = sum(weights)
    sums: dict[str, NDArray[Any]] = {}
    for content, weight in zip(contents, weights, strict=True):
        (model,) = content.array_records.values()
        for name, array in model.items():
            part = array.numpy() * (weight / total)
            if name in sums:
                sums[name] += part
            else:
                sums[name] = part
    return ArrayRecord({name: Array(np.asarray(values)) for name, values in sums.items()})


def restore_integer_entries(mean: ArrayRecord, models: Sequence[ArrayRecord]) -> ArrayRecord:
    """Return the mean of models, in which integer and bool entries that are equal in all models are not averaged.

    Flower's weights sum to 1 only up to rounding. So the mean of an index 3 may become 2.9999, which int64 truncates to
    2. A tensor that is equal in all models also keeps its type.
    """
    restored = ArrayRecord(dict(mean))
    for name, array in mean.items():
        if not np.issubdtype(models[0][name].numpy().dtype, np.inexact):
            values = np.stack([model[name].numpy() for model in models])  # (sites, ...)
            first = values[0, ...]
            is_equal = (values == values[0]).all(axis=0)
            restored[name] = Array(first if is_equal.all() else np.where(is_equal, first, array.numpy()))
    return restored


def average_common_metrics(mean: MetricMean, contents: list[RecordDict], key: str) -> MetricRecord:
    """Average only the metrics that all sites sent; lists must have the same length at all sites.

    Args:
        mean: Flower's function that averages metrics.
        contents: The contents of the sites' replies.
        key: Name of the weight in a reply's metrics.
    """
    metrics = [get_reply_metrics(content) for content in contents]
    # Name of each metric, with the length of a list or -1 for a number.
    lengths = [
        {name: len(value) if isinstance(value, list) else -1 for name, value in record.items()} for record in metrics
    ]
    common = dict(set.intersection(*(set(record_lengths.items()) for record_lengths in lengths)))
    selected = [MetricRecord({name: record[name] for name in record if name in common}) for record in metrics]
    return mean([RecordDict({"metrics": record}) for record in selected], key)


def mix_array_records(sites: ArrayRecord, server: ArrayRecord, alpha: float) -> ArrayRecord:
    """Return ``alpha * sites + (1 - alpha) * server``; integers and infinite entries are taken from ``sites``."""
    mixed = ArrayRecord(dict(sites))
    for key, array in sites.items():
        values = array.numpy()
        if np.issubdtype(values.dtype, np.floating):
            with np.errstate(invalid="ignore"):  # 0 times infinity is NaN, and is replaced below
                mean = mix_tensors(values, server[key].numpy(), alpha).astype(values.dtype)
            mixed[key] = Array(np.where(np.isinf(values), values, mean))
    return mixed


# ---------------------------------------------------------------------- a method's statistics


def pack_arrays(arrays: Arrays) -> ConfigRecord:
    """Store arrays in a ConfigRecord, because Flower's mods and averages would treat an ``ArrayRecord`` as a model."""
    return ConfigRecord({"arrays": save({name: np.asarray(value, np.float32) for name, value in arrays.items()})})


def unpack_arrays(record: ConfigRecord) -> dict[str, np.ndarray]:
    """Read arrays that :func:`pack_arrays` stored; raise a ``ValueError`` if the record has none."""
    try:
        return load(record["arrays"])  # type: ignore[arg-type]
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"it holds no arrays: {error}") from None
