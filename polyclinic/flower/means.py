"""Means that Flower's own rule gets wrong: of whole numbers, and of metrics that not every site sent."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray


def whole_numbers_kept(mean: ArrayRecord, models: Sequence[ArrayRecord]) -> ArrayRecord:
    """A mean of models with every integer and bool entry put back on which all models agree.

    Flower multiplies entries by weights that sum to 1 up to rounding: an index of 3 comes out as 2.9999..., which a
    model that loads it into int64 takes for 2. A tensor on which all agree keeps its type, too.
    """
    return ArrayRecord({name: _kept(array, [model[name].numpy() for model in models]) for name, array in mean.items()})


def _kept(mean: Array, values: Sequence[NDArray[np.generic]]) -> Array:
    first = values[0]
    if np.issubdtype(first.dtype, np.inexact):
        return mean
    same = np.all([first == other for other in values], axis=0)
    return Array(first if same.all() else np.where(same, first, mean.numpy()))


def metric_means(records: list[RecordDict], key: str) -> MetricRecord:
    """The mean of each metric over the sites that sent it, by weight; Flower's own mean where all sent it.

    A metric of lists that differ in length has no mean and is left out.

    Args:
        records: The sites' replies, each with one ``MetricRecord``.
        key: Name of the weight in it.
    """
    given = [_metrics(record) for record in records]
    means = MetricRecord()
    for name in dict.fromkeys(name for metrics in given for name in metrics if name != key):
        sent = [metrics for metrics in given if name in metrics]
        if len({_length(metrics[name]) for metrics in sent}) == 1:
            weights = [float(metrics[key]) for metrics in sent]  # type: ignore[arg-type]
            means[name] = _mean([metrics[name] for metrics in sent], weights)
    return means


def _mean(values: Sequence[Any], weights: Sequence[float]) -> float | list[float]:
    shares = [weight / sum(weights) for weight in weights]
    if isinstance(values[0], list):
        return [_sum(column, shares) for column in zip(*values, strict=True)]
    return _sum(values, shares)


def _sum(values: Sequence[float], shares: Sequence[float]) -> float:
    return float(sum(value * share for value, share in zip(values, shares, strict=True)))


def uneven(replies: Sequence[Message]) -> list[str]:
    """What is to be said of metrics that not every reply has, or that differ in length."""
    given = {reply.metadata.src_node_id: _metrics(reply.content) for reply in replies if not reply.has_error()}
    said = list[str]()
    for name in dict.fromkeys(name for metrics in given.values() for name in metrics):
        lengths = {node: _length(metrics[name]) for node, metrics in given.items() if name in metrics}
        nodes = ", ".join(map(str, sorted(lengths)))
        if len(set(lengths.values())) > 1:
            said.append(f"the metric {name!r} of nodes {nodes} differs in length: it has no mean")
        elif len(lengths) < len(given):
            said.append(f"only node {nodes} sent the metric {name!r}: its mean is over those that sent it")
    return said


def _metrics(record: RecordDict) -> MetricRecord:
    return next(iter(record.metric_records.values()))


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else -1
