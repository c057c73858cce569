"""Polyclinic's methods as Flower strategies for plain ``state_dict`` models, on top of Flower's FedAvg."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import getLogger
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar, cast, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from polyclinic.common.contract import LabelContract
from polyclinic.common.models.network import Head
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.wire.records import Arrays, ModelGroups, RollCallAnswer
from polyclinic.flower import records
from polyclinic.flower.labels import (
    SiteLabels,
    UnknownLabels,
    ask_sites_for_labels,
    format_node_as_site_name,
    shorten_error,
)
from polyclinic.flower.site import ANNOTATED_KEY, CLASSES_KEY, HEAD, METHOD, PARAMETERS, START, STATISTICS, TASK_KEY
from polyclinic.strategies.aggregation.means import WholeHeadMean
from polyclinic.strategies.local.method_traits import Parameters
from polyclinic.strategies.methods import baselines, fedmlp, fedsld, surgical, unifed
from polyclinic.strategies.methods.base import Method, RoundContext, SequentialMethod
from polyclinic.strategies.methods.fedsld import Reduction

Messages = Iterable[Message]
ModelAndMetrics = tuple[ArrayRecord | None, MetricRecord | None]
TrainAtServer = Callable[[int, ArrayRecord], ArrayRecord]
"""Trains on the coordinator's own images: round and model in, model out."""
Content = TypeVar("Content")
log, source_node = getLogger("flwr"), attrgetter("metadata.src_node_id")
ROLL_CALL_S = 600.0
"""The longest wait for the sites' labels, in seconds; the wait is shorter where ``start``'s timeout is."""
FEDMLP_PARAMETERS = {*fedmlp.FedMLPParameters.model_fields} - {*Parameters.model_fields, "heads", "stage_one_rounds"}
"""Parameters of FedMLP itself; the others are of the product's aggregation and training, and of no effect here."""
SLOPE = "loss-slope"
"""Key of a site's ``MetricRecord``: :func:`polyclinic.flower.loss_slope` of its training."""


class SiteTrainingReply(NamedTuple):
    """A site's reply to training, as the method's rules read it
    (:class:`polyclinic.strategies.methods.base.SiteReply`).
    """

    model: ArrayRecord
    train_samples: float
    statistics: Arrays
    update: ModelGroups = ModelGroups()


class LabelledSites(FedAvg):
    """Base class of the strategies: Flower's FedAvg, extended by the classes that each site labels.

    Args:
        head: Name of the model's last layer in its ``state_dict``: ``head.weight (classes, features)`` and, if there is
            one, ``head.bias (classes,)``.
        classes: Names of the head's rows, in order.
        task: ``multi_label``, or ``multi_class`` if the classes exclude each other.
        parameters: The method's parameters by name.
        options: Options of Flower's ``FedAvg``. Without metric aggregation functions of your own, metrics that all
            sites sent are averaged.

    Raises:
        ValueError: If ``classes`` is not a list of different names, the task is unknown, or a parameter is invalid.

    Attributes:
        method: The method that the strategy runs.
        not_wrapped: Why no other strategy, such as Flower's differential privacy, can wrap this one; else empty.
    """

    method_class: ClassVar[type[Method]] = baselines.PartialLoss
    not_wrapped: ClassVar[str] = ""

    def __init__(
        self,
        *,
        head: str,
        classes: Sequence[str],
        task: Task = "multi_label",
        parameters: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if task not in get_args(Task):
            raise ValueError(f"task must be one of {list(get_args(Task))}, got {task!r}")
        self.method = self.method_class(parameters, task)
        for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
            if options.get(name) is None:
                setattr(self, name, partial(records.average_common_metrics, getattr(self, name)))
        self.head, self.classes = head, tuple(SiteLabels(classes).classes)
        self._timeout, self._in_start = 3600.0, False
        self.reset_earlier_run()

    def reset_earlier_run(self) -> None:
        """Reset all state of an earlier run."""
        self.answers: dict[str, RollCallAnswer] = {}
        self.statistics: Arrays = {}
        self._round, self._sent, self._start = -1, ArrayRecord(), secrets.token_hex(8)
        self._nodes, self._asked, self._unowned = list[int](), set[int](), list[str]()

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, *args: Any, **kw: Any
    ) -> Result:
        """Run all rounds, like Flower's ``Strategy.start``; at first ask all sites which classes they label.

        Raises:
            UnknownLabels: If any of the sites gives no usable labels before round 1.
            RuntimeError: If no reply of a round is usable, with the reason for each node.
        """
        for stage in self.method.site.parameters.list_stages():
            if stage.first_round > num_rounds:
                event = f"{type(self).__name__}: {stage.event} in round {stage.first_round}"
                log.warning("%s, and num_rounds is %s: the model is that of the first stage", event, num_rounds)
        self._timeout, self._in_start = timeout, True
        try:
            return super().start(grid, initial_arrays, num_rounds, timeout, *args, **kw)
        finally:
            self._in_start = False

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Select sites like FedAvg, and tell each which rows of the model it labels."""
        self.refuse_if_wrapped()
        self._extract_head(arrays)  # refuse a wrong name before a site trains for an hour
        if server_round <= self._round:  # a wrapper's start is not ours, rounds tell both
            self.reset_earlier_run()
        self._round, self._sent, self._asked = server_round, arrays, set()
        messages = self._ask_and_add_labels(list(super().configure_train(server_round, arrays, config, grid)), grid)
        self._nodes = [message.metadata.dst_node_id for message in messages]
        return messages

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Select sites like FedAvg, and send each the same content as for training."""
        return self._ask_and_add_labels(list(super().configure_evaluate(server_round, arrays, config, grid)), grid)

    def aggregate_train(self, server_round: int, replies: Messages) -> ModelAndMetrics:
        """Aggregate the usable replies; log a warning with node and reason for each other reply."""
        self.refuse_if_wrapped()
        ordered = sorted(replies, key=source_node)  # the same bits no matter who was first
        fit, trained = self.read_replies(server_round, ordered, self.read_reply, self._nodes)
        log.info("aggregate_train: Received %s results and %s failures", len(fit), len(ordered) - len(fit))
        if not trained:
            return None, None
        # Not by FedAvg's own method, which ends the run over one reply that differs, and names no node.
        contents = [reply.content for reply in fit]
        mean = records.average_models(contents, self.weighted_by_key)
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        self.aggregate_reply_statistics(trained)
        model = records.restore_integer_entries(mean, [reply.model for reply in trained.values()])
        owned = [self.answers[site].class_names for site in trained]
        partial_rows = [name for name in self.classes if not all(name in classes for classes in owned)]
        if self.method.head_mean_class is WholeHeadMean or not partial_rows:
            return model, metrics
        # A row that only some sites label is averaged over these sites.
        head, before = self._extract_head(model), self._extract_head(self._sent)
        owners = self.method.head_mean_class(self.classes, head.features)
        for reply, classes in zip(trained.values(), owned, strict=True):
            owners.add(self._extract_head(reply.model).select_rows(classes), reply.train_samples)
        weight, bias, is_sent = owners.mean
        for row in map(self.classes.index, partial_rows):
            head.weight[row] = weight[row] if is_sent[row] else before.weight[row]
            head.bias[row] = bias[row] if is_sent[row] else before.bias[row]
        for key, rows in ((f"{self.head}.weight", head.weight), (f"{self.head}.bias", head.bias)):
            if key in model:
                model[key] = Array(rows.astype(model[key].numpy().dtype))
        return model, metrics

    def aggregate_evaluate(self, server_round: int, replies: Messages) -> MetricRecord | None:
        """Average the metrics of usable replies; log a warning with node and reason for each other reply."""
        read = partial(records.read_reply_weight, key=self.weighted_by_key)
        ordered = sorted(replies, key=source_node)
        fit, _ = self.read_replies(server_round, ordered, read, nodes=())
        log.info("aggregate_evaluate: Received %s results and %s failures", len(fit), len(ordered) - len(fit))
        contents = [reply.content for reply in fit]
        return self.evaluate_metrics_aggr_fn(contents, self.weighted_by_key) if contents else None

    def refuse_if_wrapped(self) -> None:
        """Raise ``TypeError`` if another strategy wraps this one and :attr:`not_wrapped` says why it must not."""
        if self.not_wrapped and not self._in_start:
            name = type(self).__name__
            raise TypeError(f"{name} cannot be wrapped by another strategy: {self.not_wrapped}; use {name}.start")

    def read_replies(
        self, server_round: int, replies: Messages, read: Callable[[Message], Content], nodes: Sequence[int]
    ) -> tuple[list[Message], dict[str, Content]]:
        """Read replies; log a warning for each unusable one.

        Args:
            read: Reads a reply, or raises ``ValueError`` if it is unusable.
            nodes: Nodes of which at least one must send a usable reply; empty if none is required.

        Returns:
            The usable replies, and site -> content of each of them.

        Raises:
            RuntimeError: If ``nodes`` is not empty and no reply is usable, with the reason for each node.
        """
        fit, contents = list[Message](), dict[str, Content]()
        faults = dict.fromkeys(nodes, f"no reply within {self._timeout:g} s")
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                faults[node] = f"it failed: {shorten_error(reply.error.reason)}"
                log.info("round %s: node %s: %s", server_round, node, faults[node])
                continue
            try:
                contents[format_node_as_site_name(node)] = read(reply)
                fit.append(reply)
            except ValueError as fault:
                faults[node] = str(fault)
                log.warning("round %s: the reply of node %s is left out: %s", server_round, node, fault)
        if nodes and not contents:
            reasons = [f"node {node}: {fault}" for node, fault in sorted(faults.items())]
            raise RuntimeError("\n".join([f"round {server_round}: no reply can be used:", *reasons]))
        return fit, contents

    def read_reply(self, reply: Message) -> SiteTrainingReply:
        """Read a reply to training; raise ``ValueError`` if it is unusable."""
        if len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
            raise ValueError("it needs one ArrayRecord and one MetricRecord")
        (model,), weight = reply.content.array_records.values(), records.read_reply_weight(reply, self.weighted_by_key)
        if fault := records.find_model_fault(model, self._sent):
            raise ValueError(fault)
        features, statistics = self._extract_head(model).features, self.read_statistics(reply)
        site = format_node_as_site_name(reply.metadata.src_node_id)
        for name, shape in self.method.statistics_shape(self.round_context(), site, features).items():
            sent = statistics[name].shape if name in statistics else ()
            if name not in statistics or sent != shape:
                raise ValueError(f"its {name} have the shape {sent}, not {shape}")
        return SiteTrainingReply(model, weight, statistics)

    def read_statistics(self, reply: Message) -> Arrays:
        """Return the method's statistics in a site's reply; empty if the method has none.

        Raises:
            ValueError: If they are missing.
        """
        if not self.method.site.payload.statistics:
            return {}
        if STATISTICS not in reply.content.config_records:
            remedy = "use FedMLPSite and put what its finish() returns into the reply"
            raise ValueError(f"it sent no {STATISTICS!r}: {remedy}")
        return records.unpack_arrays(reply.content.config_records[STATISTICS])

    def aggregate_reply_statistics(self, replies: Mapping[str, SiteTrainingReply]) -> None:
        """Aggregate the statistics in the sites' replies by the method's rules."""
        self.statistics = self.method.aggregate_statistics(self.round_context(), replies)

    def round_context(self) -> RoundContext:
        """Return this round's data for the method's rules: each site's labels, the statistics and the round number."""
        answers = dict(sorted(self.answers.items()))
        contract = LabelContract(self.classes, {site: answer.class_names for site, answer in answers.items()})
        return RoundContext(self.method.site.task, contract, answers, self.statistics, self._round)

    def _extract_head(self, model: ArrayRecord) -> Head:
        return records.copy_head(model, self.head, self.classes)

    def _ask_and_add_labels(self, messages: Sequence[Message], grid: Grid) -> list[Message]:
        """Add the site's labelled classes and the method's data to each of Flower's messages.

        New nodes are first asked for their labels. Messages to sites with unknown labels are dropped.

        Raises:
            UnknownLabels: If a node gives no usable labels when nodes are asked for the first time. Later this is only
                logged, as a warning.
        """
        if not messages:
            return []
        unknown = {node for node in grid.get_node_ids() if format_node_as_site_name(node) not in self.answers}
        nodes, wait_s = unknown - self._asked, min(ROLL_CALL_S, self._timeout)
        self._asked |= nodes  # once a round: a silent node holds up training, not evaluation, too
        answers, faults = ask_sites_for_labels(grid, nodes, wait_s, self.classes, self.method.site)
        if faults and not self.answers:
            raise UnknownLabels(faults)
        if faults:
            log.warning("left out of this round: %s", faults)
        self.answers |= answers
        context, labelled = self.round_context(), list[Message]()
        before, self._unowned = self._unowned, [n for n in self.classes if not context.contract.annotating_sites(n)]
        if self._unowned != before:
            log.warning("no site labels %s", self._unowned)
        statistics_for, method = self.method.statistics_for(context), self.method.site
        shared = {CLASSES_KEY: list(self.classes), TASK_KEY: method.task, HEAD: self.head, START: self._start}
        shared |= {METHOD: method.name, PARAMETERS: method.parameters.model_dump_json()}
        for message in messages:
            node, content = message.metadata.dst_node_id, RecordDict(dict(message.content))
            if (site := format_node_as_site_name(node)) not in context.answers:
                continue
            own = {**shared, ANNOTATED_KEY: context.contract.annotated_class_mask(site).tolist()}
            content[self.configrecord_key] = ConfigRecord({**content.config_records[self.configrecord_key], **own})
            if statistics := statistics_for(site):
                content[STATISTICS] = records.pack_arrays(statistics)
            labelled.append(Message(content, message_type=message.metadata.message_type, dst_node_id=node))
        return labelled


class PartialLoss(LabelledSites):
    """FedAvg with a partial loss: a site's loss ignores the classes that the site does not label."""


class VanillaFL(LabelledSites):
    """FedAvg with absent labels: a class that a site does not label counts as negative. A baseline for comparison."""

    method_class = baselines.VanillaFedAvg


class SurgicalAggregation(LabelledSites):
    """FedAvg, except that each class's head row is averaged only over the sites that label the class.

    Kulkarni et al., "Surgical Aggregation: Federated Class-Heterogeneous Learning", ML4H 2024, eq. 2. A row whose class
    is labelled by all replying sites is that of Flower's FedAvg, bit for bit. A row whose class no replying site labels
    stays unchanged.
    """

    method_class = surgical.SurgicalAggregation


class FedSLD(LabelledSites):
    """FedAvg with a weighted loss: a label's weight is its frequency in the batch divided by that in the federation.

    Equation 3 of Luo and Wu, "FedSLD: Federated Learning with Shared Label Distribution for Medical Image
    Classification", 2021. The sites send how many of their images show each class (``SiteLabels.positives`` and
    ``.images``).

    Args:
        reduction: Divisor of the sum of a batch's weighted losses. ``sum_over_batch``: the number of images of known
            class; with ``multi_label``, of known labels. ``weighted_mean``: the sum of the weights. ``sum``: none, as
            in eq. 3; with ``multi_label``, our extension, the number of classes that have a known label in the batch.
        options: As for :class:`LabelledSites`.
    """

    method_class = fedsld.FedSLD

    def __init__(self, *, reduction: Reduction = "sum_over_batch", **options: Any) -> None:
        super().__init__(parameters={"reduction": reduction}, **options)


class FedMLP(LabelledSites):
    """FedAvg; from prototypes of all sites, each site learns to detect the classes that it does not label.

    Sun et al., "FedMLP: Federated Multi-label Medical Image Classification under Task Heterogeneity", MICCAI 2024.

    Args:
        stage_one_rounds: Number of rounds of the first stage, before missing labels are detected.
        parameters: FedMLP's own parameters by name (:class:`polyclinic.strategies.methods.fedmlp.FedMLPParameters`).
        options: As for :class:`LabelledSites`; the task must be ``multi_label``.
    """

    method_class = fedmlp.FedMLP
    not_wrapped = "clipping and noise on models would leave its prototypes as they are"

    def __init__(self, *, stage_one_rounds: int, parameters: Mapping[str, Any] | None = None, **options: Any) -> None:
        if unknown := sorted((parameters or {}).keys() - FEDMLP_PARAMETERS):
            raise ValueError(f"FedMLP has no parameter {unknown[0]!r}; it has {sorted(FEDMLP_PARAMETERS)}")
        super().__init__(parameters={**(parameters or {}), "stage_one_rounds": stage_one_rounds}, **options)


# ---------------------------------------------------------------------- one model that is passed on


class SequentialTraining(LabelledSites):
    """Train one model at one site after the other in each round, in ascending order of node ids.

    A site that does not reply is skipped. A class that a site does not label counts as negative, as in the paper.
    ``aggregate_train`` receives a round's replies in the order of training and returns the last model.
    """

    method_class: ClassVar[type[SequentialMethod]] = unifed.SequentialTraining
    method: SequentialMethod
    not_wrapped = "it passes one model on from site to site"

    def start(self, grid: Grid, *args: Any, **options: Any) -> Result:
        """Run all rounds; each site has ``timeout`` seconds for its training."""
        self._grid = grid
        return super().start(cast(Grid, _ModelPassingGrid(grid, self)), *args, **options)

    def aggregate_train(self, server_round: int, replies: Messages) -> ModelAndMetrics:
        """Return the model of the last usable reply, and the averaged metrics."""
        self.refuse_if_wrapped()
        fit, trained = self.read_replies(server_round, replies, self.read_reply, self._nodes)
        if not trained:
            return None, None
        contents = [reply.content for reply in fit]
        return [*trained.values()][-1].model, self.train_metrics_aggr_fn(contents, self.weighted_by_key)


class _ModelPassingGrid:
    """A Flower Grid that sends training messages one after another, each with the model of the site before."""

    def __init__(self, grid: Grid, strategy: SequentialTraining) -> None:
        self._grid, self._strategy = grid, strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Messages, *, timeout: float | None = None) -> Messages:
        """Send messages and return the replies; in training, each site in turn receives the latest usable model."""
        messages, model, replies = list(messages), None, list[Message]()
        if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
            return self._grid.send_and_receive(messages, timeout=timeout)
        strategy, by_site = self._strategy, dict[str, Message]()
        for message in messages:
            by_site[format_node_as_site_name(message.metadata.dst_node_id)] = message
        for site in strategy.method.order_sites(strategy.round_context(), sorted(by_site)):
            if model is not None:
                by_site[site].content[strategy.arrayrecord_key] = model
            (reply,) = self._grid.send_and_receive([by_site[site]], timeout=timeout) or (None,)
            replies += [] if reply is None else [reply]
            if reply is None or reply.has_error():
                reason = "no reply" if reply is None else shorten_error(reply.error.reason)
                log.warning("round %s: node %s is skipped: %s", strategy.round_context().round, int(site), reason)
                continue
            try:
                trained = strategy.read_reply(reply)
            except ValueError:  # aggregate_train says why it is left out
                continue
            strategy.aggregate_reply_statistics({site: trained})
            model = trained.model
        return replies


class UniFed(SequentialTraining):
    """Sequential training, easiest task first: sites whose training loss falls fastest come first.

    Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
    Tasks", 2024. Before round 1, every site trains once from the initial model, only to determine the order. The
    ``MetricRecord`` of each reply must hold ``loss-slope``, computed by :func:`polyclinic.flower.loss_slope` from the
    losses of all batches. A site ends its training by :class:`polyclinic.flower.EarlyStopping`.

    Args:
        train_at_server: Function that trains the previous round's model on the coordinator's own images. The result of
            each round is then ``alpha`` times the sites' model plus ``1 - alpha`` times the coordinator's. None: the
            coordinator does not train, and the sites' model is the result.
        alpha: Weight of the sites' model, as above; 0.7 in the paper.
        options: As for :class:`LabelledSites`.
    """

    method_class = unifed.UniFed

    def __init__(self, *, train_at_server: TrainAtServer | None = None, alpha: float = 0.7, **options: Any) -> None:
        super().__init__(parameters={"alpha": alpha}, **options)
        self.train_at_server, self.alpha = train_at_server, alpha

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Select sites like FedAvg; before round 1 let all sites train once, and use only their loss slopes."""
        if server_round == 1:
            fraction, self.fraction_train = self.fraction_train, 1.0  # all are ranked, no matter who is drawn later
            messages = super().configure_train(0, arrays, config, grid)
            self.fraction_train = fraction
            replies = self._grid.send_and_receive(messages, timeout=self._timeout)
            self.aggregate_reply_statistics(self.read_replies(0, replies, self.read_reply, self._nodes)[1])
        return super().configure_train(server_round, arrays, config, grid)

    def read_statistics(self, reply: Message) -> Arrays:
        """Return the loss slope from a reply's metrics; raise ``ValueError`` if it is missing."""
        slope = records.get_reply_metrics(reply.content).get(SLOPE)
        if not isinstance(slope, int | float):
            raise ValueError(f"it sent no {SLOPE!r}: put polyclinic.flower.loss_slope(losses) in its metrics")
        return {"slope": np.array([slope])}

    def aggregate_train(self, server_round: int, replies: Messages) -> ModelAndMetrics:
        """Return the model of the last site that trained in this round, and the averaged metrics.

        If the user gave the function ``train_at_server``, the site's model is mixed with the model that this function
        trains on the coordinator's images.

        Raises:
            ValueError: If the model of ``train_at_server`` has other tensors or shapes, or values that are not finite.
            RuntimeError: If no reply is usable, with the reason for each node.
        """
        model, metrics = super().aggregate_train(server_round, replies)
        if self.train_at_server is None or model is None:
            return model, metrics
        trained = self.train_at_server(server_round, self._sent)
        if fault := records.find_model_fault(trained, model):
            raise ValueError(f"round {server_round}: what train_at_server returned does not fit: {fault}")
        return records.mix_array_records(model, trained, self.alpha), metrics
