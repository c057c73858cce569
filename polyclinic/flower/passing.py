"""Strategies that pass one model from site to site instead of averaging: UniFed and its baseline."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import WARNING, getLogger
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from polyclinic.flower.keys import SLOPE
from polyclinic.flower.labels import why
from polyclinic.flower.replies import model_fault, usable
from polyclinic.flower.strategies import LabelledSites
from strategies.aggregation.means import mixed
from strategies.local.early_stopping import EarlyStopping
from strategies.methods.unifed import easy_first, loss_slope

__all__ = ["EarlyStopping", "SequentialTraining", "UniFed", "loss_slope"]
log = getLogger("flwr")
TrainAtServer = Callable[[int, ArrayRecord], ArrayRecord]
"""Trains the mixed model of the round before on the coordinator's own images: round and model in, model out."""


class SequentialTraining(LabelledSites):
    """One model goes from site to site in a round, in ascending order of their node numbers.

    A site that does not reply is skipped: the pass goes on from the last model that came back. ``missing`` is
    ``negative`` as in the paper: a softmax or a sigmoid over all classes. ``aggregate_train`` gets a round's replies in
    the order of the pass; its model is the last one, and an override can save it or put another in its place.
    """

    missing = "negative"
    not_wrapped = "it passes one model on from site to site"

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
            timeout: Seconds for each site's training, and for each evaluation; for the labels, at most 600 of them.

        Raises:
            UnknownLabels: If, before round 1, a site does not say which classes it labels.
            RuntimeError: If no reply of a round can be used, with each node's reason.
        """
        with self._own_start(timeout):
            self.before_rounds(initial_arrays, train_config or ConfigRecord(), grid, timeout)
            passing = cast(Grid, _Passing(grid, self._passed))
            return super().start(
                passing, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            )

    def _passed(self, grid: Grid, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        """The replies of a round, each to the model that the last good one before it held."""
        by_node = {message.metadata.dst_node_id: message for message in messages}
        model, came, self._faults = None, list[Message](), dict[int, str]()
        for node in self.order(self._round, list(by_node)):
            message = by_node[node]
            if model is not None:
                message.content[self.arrayrecord_key] = model
            (reply,) = grid.send_and_receive([message], timeout=timeout) or (None,)
            if reply is not None:
                came.append(reply)
            if reply is None or reply.has_error():
                reason = "no reply" if reply is None else why(reply.error.reason or "")
                log.log(WARNING, "round %s: node %s is skipped: %s", self._round, node, reason)
                continue
            self._faults[node] = self.fault_in(reply)
            if not self._faults[node]:
                (model,) = reply.content.array_records.values()
                self.visited(node, _metrics(reply))
        return came

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model of the last reply that can be used, and the mean of their metrics.

        Raises:
            TypeError: If another strategy calls it.
            RuntimeError: If sites were asked and no reply can be used.
        """
        self._only_in_own_start()
        checked = usable(
            server_round, replies, self._asked, self._timeout, lambda reply: self._faults[reply.metadata.src_node_id]
        )
        used = [reply for reply in checked if not reply.has_error()]
        if not used:
            return None, None
        (model,) = used[-1].content.array_records.values()
        self._say_uneven(used, self.train_metrics_aggr_fn)
        metrics = self.train_metrics_aggr_fn([reply.content for reply in used], self.weighted_by_key)
        return self.after_pass(server_round, model), metrics

    def visited(self, node: int, metrics: MetricRecord) -> None:
        """Called with what a site replied beside the model."""


class _Passing:
    """A grid that lets a model visit the sites of a round one after the other; all else is the grid's own."""

    def __init__(
        self, grid: Grid, passed: Callable[[Grid, Sequence[Message], float | None], Sequence[Message]]
    ) -> None:
        self._grid, self._passed = grid, passed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Replies to training in the order of the pass."""
        every = list(messages)
        if every and every[0].metadata.message_type == MessageType.TRAIN:
            return self._passed(self._grid, every, timeout)
        return self._grid.send_and_receive(every, timeout=timeout)


class UniFed(SequentialTraining):
    """The easiest task first: sites in the order in which their training loss falls, the fastest first.

    Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
    Tasks", 2024. Before round 1 every site trains once from the initial model to be put into an order. Each reply's
    ``MetricRecord`` holds ``loss-slope``, :func:`loss_slope` of the losses of all its batches; a site stops when
    :class:`EarlyStopping` says so.

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

    def begin(self, arrays: ArrayRecord) -> None:
        """The ranking, too, is that of this start."""
        super().begin(arrays)
        self.slopes: dict[int, float] = {}

    def before_rounds(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float) -> None:
        """All sites train side by side from the initial model; only the slopes are kept."""
        fraction, self.fraction_train = self.fraction_train, 1.0  # every site is ranked, no matter who is drawn later
        messages = self.configure_train(0, arrays, config, grid)
        self.fraction_train = fraction
        replies = grid.send_and_receive(messages, timeout=timeout)
        for reply in usable(0, replies, self._asked, timeout, self.fault_in):
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
        """Mix in what the coordinator trains on images of its own, from the mixed model of the round before.

        Raises:
            TypeError: If ``train_at_server`` returns no ``ArrayRecord``.
            ValueError: If its model does not fit: the check of the sites' replies.
        """
        if self.train_at_server is None:
            return model
        trained = self.train_at_server(server_round, self._sent)
        if not isinstance(trained, ArrayRecord):
            kind = type(trained).__name__
            raise TypeError(f"train_at_server must return ArrayRecord(model.state_dict()), got {kind}")
        if fault := model_fault(trained, model, self.head, self.classes):
            raise ValueError(f"round {server_round}: what train_at_server returned does not fit: {fault}")
        return mixture(model, trained, self.alpha)


def mixture(sites: ArrayRecord, server: ArrayRecord, alpha: float) -> ArrayRecord:
    """Mix every floating tensor of two models; whole numbers are the sites', and infinities, which both have."""
    return ArrayRecord({key: _mixed(array, server, key, alpha) for key, array in sites.items()})


def _mixed(array: Array, server: Mapping[str, Array], key: str, alpha: float) -> Array:
    values = array.numpy()
    if not np.issubdtype(values.dtype, np.floating):
        return array
    other = server[key].numpy()
    with np.errstate(invalid="ignore"):  # 0 times an infinity, which both hold
        mixture = mixed(values, other, alpha).astype(values.dtype)
    return Array(np.where(np.isinf(values), values, mixture))


def _metrics(reply: Message) -> MetricRecord:
    (metrics,) = reply.content.metric_records.values()
    return metrics
