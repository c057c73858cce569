"""Strategies that pass one model from site to site instead of averaging: UniFed and its baseline."""

from collections.abc import Callable, Iterable, Sequence
from logging import WARNING, getLogger
from typing import Any, ClassVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from common.wire.records import Arrays
from polyclinic.flower.averaging import LabelledSites
from polyclinic.flower.checks import find_model_fault, get_metrics, get_model
from polyclinic.flower.labels import shorten_error, site_name
from strategies.aggregation.means import mix_tensors
from strategies.methods import unifed
from strategies.methods.base import SequentialMethod

log = getLogger("flwr")
SLOPE = "loss-slope"
"""Key of a site's ``MetricRecord``: :func:`polyclinic.flower.loss_slope` of its training."""
TrainAtServer = Callable[[int, ArrayRecord], ArrayRecord]
"""Trains the mixed model of the round before on the coordinator's own images: round and model in, model out."""


class SequentialTraining(LabelledSites):
    """One model goes from site to site in a round, in ascending order of their node numbers.

    A site that does not reply is skipped: the pass goes on from the last model that came back. A class that a site does
    not label counts as absent, as in the paper: a softmax or a sigmoid over all classes. ``aggregate_train`` gets a
    round's replies in the order of the pass; its model is the last one, and an override can save it or put another in
    its place.
    """

    method_class: ClassVar[type[SequentialMethod]] = unifed.SequentialTraining
    method: SequentialMethod
    not_wrapped = "it passes one model on from site to site"

    def prepare(self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord) -> Grid:
        """Return a grid on which a model visits the sites of a round one after the other."""
        return cast(Grid, _PassingGrid(grid, self._pass_model))

    def _pass_model(self, grid: Grid, messages: Sequence[Message], timeout: float | None) -> list[Message]:
        """Return the replies of a round, each to the model of the last good reply before it."""
        by_site = {site_name(message.metadata.dst_node_id): message for message in messages}
        model, replies, self._faults = None, list[Message](), dict[int, str]()
        for site in self.method.order(self.round_context(), sorted(by_site)):
            message, node = by_site[site], by_site[site].metadata.dst_node_id
            if model is not None:
                message.content[self.arrayrecord_key] = model
            (reply,) = grid.send_and_receive([message], timeout=timeout) or (None,)
            if reply is not None:
                replies.append(reply)
            if reply is None or reply.has_error():
                reason = "no reply" if reply is None else shorten_error(reply.error.reason or "")
                log.log(WARNING, "round %s: node %s is skipped: %s", self._round, node, reason)
                continue
            self._faults[node] = self.find_fault(reply)
            if not self._faults[node]:
                model = get_model(reply)
                self.learn([reply])
        return replies

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model of the last reply that can be used, and the mean of the metrics."""
        self.refuse_wrapper()
        fit = self.usable_replies(server_round, replies, lambda reply: self._faults[reply.metadata.src_node_id])
        trained = [reply for reply in fit if not reply.has_error()]
        if not trained:
            return None, None
        metrics = self.train_metrics_aggr_fn([reply.content for reply in trained], self.weighted_by_key)
        return get_model(trained[-1]), metrics


class _PassingGrid:
    """A grid that hands the messages of a round's training over to a pass; all else is the grid's own."""

    def __init__(
        self, grid: Grid, pass_model: Callable[[Grid, Sequence[Message], float | None], list[Message]]
    ) -> None:
        self._grid, self._pass_model = grid, pass_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the replies; those to training in the order of the pass."""
        every = list(messages)
        if every and every[0].metadata.message_type == MessageType.TRAIN:
            return self._pass_model(self._grid, every, timeout)
        return self._grid.send_and_receive(every, timeout=timeout)


class UniFed(SequentialTraining):
    """The easiest task first: sites in the order in which their training loss falls, the fastest first.

    Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
    Tasks", 2024. Before round 1 every site trains once from the initial model to be put into an order. Each reply's
    ``MetricRecord`` holds ``loss-slope``, :func:`polyclinic.flower.loss_slope` of the losses of all its batches; a site
    stops when :class:`polyclinic.flower.EarlyStopping` says so.

    Args:
        train_at_server: Trains on the coordinator's own images; None where it has none, and nothing is mixed.
        alpha: Share of the sites' model in the mixture with the coordinator's; 0.7 by the paper's text.
        options: As for :class:`LabelledSites`.
    """

    method_class = unifed.UniFed

    def __init__(self, *, train_at_server: TrainAtServer | None = None, alpha: float = 0.7, **options: Any) -> None:
        super().__init__(parameters={"alpha": alpha}, **options)
        self.train_at_server, self.alpha = train_at_server, alpha

    def prepare(self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord) -> Grid:
        """Rank the sites: all train side by side from the initial model, and only their slopes are kept."""
        fraction, self.fraction_train = self.fraction_train, 1.0  # every site is ranked, no matter who is drawn later
        messages = self.configure_train(0, arrays, config, grid)
        self.fraction_train = fraction
        for reply in self.usable_replies(0, grid.send_and_receive(messages, timeout=self._timeout), self.find_fault):
            if not reply.has_error():
                self.learn([reply])
        return super().prepare(grid, arrays, config)

    def read_statistics(self, reply: Message) -> Arrays:
        """Return the slope, which stands in the metrics; raise ``ValueError`` if there is none."""
        slope = get_metrics(reply.content).get(SLOPE)
        if not isinstance(slope, int | float):
            raise ValueError(f"it sent no {SLOPE!r}: put polyclinic.flower.loss_slope(losses) in its metrics")
        return {"slope": np.array([slope])}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Mix in what the coordinator trains on images of its own, from the mixed model of the round before.

        Raises:
            ValueError: If the coordinator's model does not fit: the check of the sites' replies.
        """
        model, metrics = super().aggregate_train(server_round, replies)
        if self.train_at_server is None or model is None:
            return model, metrics
        trained = self.train_at_server(server_round, self._sent)
        if fault := find_model_fault(trained, model):
            raise ValueError(f"round {server_round}: what train_at_server returned does not fit: {fault}")
        return mix_models(model, trained, self.alpha), metrics


def mix_models(sites: ArrayRecord, server: ArrayRecord, alpha: float) -> ArrayRecord:
    """Mix every floating tensor of two models; whole numbers are the sites', and infinities, which both have."""
    mixed = ArrayRecord(dict(sites))
    for key, array in sites.items():
        values = array.numpy()
        if np.issubdtype(values.dtype, np.floating):
            with np.errstate(invalid="ignore"):  # 0 times an infinity, which both hold
                mean = mix_tensors(values, server[key].numpy(), alpha).astype(values.dtype)
            mixed[key] = Array(np.where(np.isinf(values), values, mean))
    return mixed
