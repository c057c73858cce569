"""Strategies that pass one model from site to site instead of averaging: UniFed and its baseline."""

import time
from collections.abc import Callable, Mapping, Sequence
from logging import INFO, WARNING, getLogger
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from polyclinic.flower.keys import SLOPE
from polyclinic.flower.replies import usable
from polyclinic.flower.strategies import LabelledSites
from strategies.aggregation.interpolation import mixed
from strategies.local.early_stopping import Settling
from strategies.unifed.difficulty import easy_first, loss_slope

__all__ = ["SequentialTraining", "Settling", "UniFed", "loss_slope"]
log = getLogger("flwr")
TrainAtServer = Callable[[int, ArrayRecord], ArrayRecord]
"""Trains the mixed model of the round before on the coordinator's own images: round and model in, model out."""


class SequentialTraining(LabelledSites):
    """One model goes from site to site in a round, in ascending order of their node numbers.

    A site that does not reply is skipped: the pass goes on from the last model that came back. ``missing`` is
    ``negative`` as in the paper: a softmax or a sigmoid over all classes.
    """

    missing = "negative"

    def order(self, server_round: int, nodes: Sequence[int]) -> Sequence[int]:
        """The nodes of a round in the order in which the model visits them."""
        return sorted(nodes)

    def before_rounds(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float) -> None:
        """What comes before round 1: nothing."""

    def after_pass(self, server_round: int, model: ArrayRecord) -> ArrayRecord:
        """The model that a round ends with."""
        return model

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds; arguments and result as in Flower's ``Strategy.start``.

        Args:
            timeout: Seconds for each site's training, and for each evaluation.

        Raises:
            RuntimeError: If no site replied in a round.
            ValueError: If sites replied and no reply fits the model.
        """
        train, evaluate = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, model = Result(), initial_arrays
        if evaluate_fn and (found := evaluate_fn(0, model)) is not None:
            result.evaluate_metrics_serverapp[0] = found
        self.before_rounds(model, train, grid, timeout)
        for server_round in range(1, num_rounds + 1):
            began = time.monotonic()
            passed, metrics = self._passed(server_round, model, train, grid, timeout)
            result.arrays = model = self.after_pass(server_round, passed)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            messages = self.configure_evaluate(server_round, model, evaluate, grid)
            judged = self.aggregate_evaluate(server_round, grid.send_and_receive(messages, timeout=timeout))
            if judged is not None:
                result.evaluate_metrics_clientapp[server_round] = judged
            if evaluate_fn and (found := evaluate_fn(server_round, model)) is not None:
                result.evaluate_metrics_serverapp[server_round] = found
            log.log(INFO, "round %s: %.1f s", server_round, time.monotonic() - began)
        return result

    def _passed(
        self, server_round: int, model: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """The model after it went through every site of the round, and the mean of their metrics."""
        messages = self.configure_train(server_round, model, config, grid)
        by_node = {message.metadata.dst_node_id: message for message in messages}
        came, used, faults = list[Message](), list[Message](), dict[int, str]()
        for node in self.order(server_round, list(by_node)):
            message = by_node[node]
            message.content[self.arrayrecord_key] = model
            (reply,) = grid.send_and_receive([message], timeout=timeout) or (None,)
            if reply is None or reply.has_error():
                reason = "no reply" if reply is None else reply.error.reason
                log.log(WARNING, "round %s: node %s is skipped: %s", server_round, node, reason)
                continue
            came.append(reply)
            faults[node] = self.fault_in(reply)
            if not faults[node]:
                (model,) = reply.content.array_records.values()
                self.visited(node, _metrics(reply))
                used.append(reply)
        usable(
            server_round, came, lambda reply: faults[reply.metadata.src_node_id]
        )  # says which are left out, and raises where none is used
        if not used:
            raise RuntimeError(f"no site replied in round {server_round}")
        return model, self.train_metrics_aggr_fn([reply.content for reply in used], self.weighted_by_key)

    def visited(self, node: int, metrics: MetricRecord) -> None:
        """Called with what a site replied beside the model."""


class UniFed(SequentialTraining):
    """The easiest task first: sites in the order in which their training loss falls, the fastest first.

    Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
    Tasks", 2024. Before round 1 every site trains once from the initial model to be put into an order. Each reply's
    ``MetricRecord`` holds ``loss-slope``, :func:`loss_slope` of the losses of all its batches; a site stops when
    :class:`Settling` says so.

    Args:
        train_at_server: Trains on the coordinator's own images; None where it has none, and nothing is mixed.
        alpha: Share of the sites' model in the mixture with the coordinator's; 0.7 by the paper's text.
        options: As for :class:`LabelledSites`.

    Raises:
        ValueError: If ``alpha`` is no number from 0 to 1.
    """

    def __init__(self, *, train_at_server: TrainAtServer | None = None, alpha: float = 0.7, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be a number from 0 to 1, got {alpha!r}")
        self.train_at_server, self.alpha = train_at_server, alpha
        self.slopes: dict[int, float] = {}

    def before_rounds(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float) -> None:
        """All sites train side by side from the initial model; only the slopes are kept."""
        fraction, self.fraction_train = self.fraction_train, 1.0  # every site is ranked, no matter who is drawn later
        messages = self.configure_train(0, arrays, config, grid)
        self.fraction_train = fraction
        for reply in usable(0, grid.send_and_receive(messages, timeout=timeout), self.fault_in):
            if not reply.has_error():
                self.visited(reply.metadata.src_node_id, _metrics(reply))

    def fault_in(self, reply: Message) -> str:
        """A reply needs the slope, too."""
        if fault := super().fault_in(reply):
            return fault
        if not isinstance(_metrics(reply).get(SLOPE), int | float):
            return f"it sent no {SLOPE!r}: put polyclinic.flower.loss_slope(losses) in its metrics"
        return ""

    def visited(self, node: int, metrics: MetricRecord) -> None:
        """Note the slope."""
        self.slopes[node] = float(cast(float, metrics[SLOPE]))

    def order(self, server_round: int, nodes: Sequence[int]) -> Sequence[int]:
        """By the slope that each site sent last; a site that sent none comes last."""
        ranked = easy_first({node: self.slopes[node] for node in nodes if node in self.slopes})
        return (*ranked, *sorted(set(nodes) - set(ranked)))

    def after_pass(self, server_round: int, model: ArrayRecord) -> ArrayRecord:
        """Mix in what the coordinator trains on images of its own, from the mixed model of the round before."""
        if self.train_at_server is None:
            return model
        return mixture(model, self.train_at_server(server_round, self._sent), self.alpha)


def mixture(sites: ArrayRecord, server: ArrayRecord, alpha: float) -> ArrayRecord:
    """Mix every floating tensor of two models; whole numbers are the sites'."""
    return ArrayRecord({key: _mixed(array, server, key, alpha) for key, array in sites.items()})


def _mixed(array: Array, server: Mapping[str, Array], key: str, alpha: float) -> Array:
    values = array.numpy()
    if not np.issubdtype(values.dtype, np.floating):
        return array
    return Array(mixed(values, server[key].numpy(), alpha).astype(values.dtype))


def _metrics(reply: Message) -> MetricRecord:
    (metrics,) = reply.content.metric_records.values()
    return metrics
