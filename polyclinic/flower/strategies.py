"""Polyclinic's methods as Flower strategies for models as plain ``state_dict``, based on Flower's FedAvg."""

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
from polyclinic.flower.site import (
    ANNOTATED_KEY,
    CLASSES_KEY,
    HEAD_KEY,
    METHOD_KEY,
    PARAMETERS_KEY,
    START_KEY,
    STATISTICS_RECORD,
    TASK_KEY,
)
from polyclinic.strategies.aggregation.means import WholeHeadMean
from polyclinic.strategies.local.method_traits import Parameters
from polyclinic.strategies.methods import baselines, fedmlp, fedsld, surgical, unifed
from polyclinic.strategies.methods.base import Method, RoundContext, SequentialMethod
from polyclinic.strategies.methods.fedsld import Reduction

Messages = Iterable[Message]
ModelAndMetrics = tuple[ArrayRecord | None, MetricRecord | None]
TrainAtServer = Callable[[int, ArrayRecord], ArrayRecord]
"""Function that trains on images of the coordinator: given the round and a model, it returns the trained model."""
Content = TypeVar("Content")
log = getLogger("flwr")
source_node = attrgetter("metadata.src_node_id")
LABELS_TIMEOUT_S = 600.0
"""Maximum time to wait for the sites' labels, in seconds; a shorter timeout of ``start`` takes precedence."""
FEDMLP_PARAMETERS = {*fedmlp.FedMLPParameters.model_fields} - {*Parameters.model_fields, "heads", "stage_one_rounds"}
"""Parameters that only FedMLP has. Parameters of Polyclinic's aggregation and training have no effect here."""
LOSS_SLOPE_METRIC = "loss-slope"
"""Key in a site's ``MetricRecord`` for the :func:`polyclinic.flower.loss_slope` of its training."""


class SiteTrainingReply(NamedTuple):
    """A site's reply to training, with the fields of :class:`polyclinic.strategies.methods.base.SiteReply`."""

    model: ArrayRecord
    train_samples: float
    statistics: Arrays
    update: ModelGroups = ModelGroups()


class LabelledSites(FedAvg):
    """Base class of the strategies: Flower's FedAvg with knowledge of the classes that each site labels.

    Args:
        head: Name of the model's last layer in its ``state_dict``: ``head.weight (classes, features)`` and, if there is
            one, ``head.bias (classes,)``.
        classes: The class of each row of the head, in order.
        task: ``multi_label``, or ``multi_class`` if the classes exclude each other.
        parameters: The method's parameters by name.
        options: Options of Flower's ``FedAvg``. By default, metrics that all sites sent are averaged.

    Raises:
        ValueError: If ``classes`` is not a list of different names, the task is unknown, or a parameter is invalid.

    Attributes:
        method: The method that the strategy runs.
        not_wrapped: Reason why another strategy, such as Flower's differential privacy, cannot wrap this one; empty if
            it can.
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
        self.head = head
        self.classes = tuple(SiteLabels(classes).classes)
        self._timeout = 3600.0
        self._in_start = False
        self.reset_earlier_run()

    def reset_earlier_run(self) -> None:
        """Reset all state of an earlier run."""
        self.answers: dict[str, RollCallAnswer] = {}
        self.statistics: Arrays = {}
        self._round = -1
        self._sent = ArrayRecord()
        self._start = secrets.token_hex(8)
        self._nodes = list[int]()
        self._asked = set[int]()
        self._unlabelled_classes = list[str]()

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, *args: Any, **kw: Any
    ) -> Result:
        """Run all rounds, like Flower's ``Strategy.start``; before round 1, ask all sites which classes they label.

        Raises:
            UnknownLabels: If a site does not answer with valid labels before round 1.
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
        """Select sites like FedAvg, and send each site the classes that it labels."""
        self.refuse_if_wrapped()
        self._extract_head(arrays)  # refuse a wrong name before a site trains for an hour
        if server_round <= self._round:  # a new run; a wrapping strategy does not call our ``start``
            self.reset_earlier_run()
        self._round = server_round
        self._sent = arrays
        self._asked = set()
        messages = self._ask_and_add_labels(list(super().configure_train(server_round, arrays, config, grid)), grid)
        self._nodes = [message.metadata.dst_node_id for message in messages]
        return messages

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Select sites like FedAvg, and send each the same content as for training."""
        return self._ask_and_add_labels(list(super().configure_evaluate(server_round, arrays, config, grid)), grid)

    def aggregate_train(self, server_round: int, replies: Messages) -> ModelAndMetrics:
        """Aggregate the usable replies; log a warning with node and reason for each unusable reply."""
        self.refuse_if_wrapped()
        ordered = sorted(replies, key=source_node)  # the order of arrival must not change the sums
        fit, trained = self.read_replies(server_round, ordered, self.read_reply, self._nodes)
        log.info("aggregate_train: Received %s results and %s failures", len(fit), len(ordered) - len(fit))
        if not trained:
            return None, None
        # FedAvg's method would end the run because of one unusable reply, without naming the node.
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
        """Average the metrics of usable replies; log a warning with node and reason for each unusable reply."""
        read = partial(records.read_reply_weight, key=self.weighted_by_key)
        ordered = sorted(replies, key=source_node)
        fit, _ = self.read_replies(server_round, ordered, read, nodes=())
        log.info("aggregate_evaluate: Received %s results and %s failures", len(fit), len(ordered) - len(fit))
        contents = [reply.content for reply in fit]
        return self.evaluate_metrics_aggr_fn(contents, self.weighted_by_key) if contents else None

    def refuse_if_wrapped(self) -> None:
        """Raise a ``TypeError`` if another strategy wraps this one, and :attr:`not_wrapped` is not empty."""
        if self.not_wrapped and not self._in_start:
            name = type(self).__name__
            raise TypeError(f"{name} cannot be wrapped by another strategy: {self.not_wrapped}; use {name}.start")

    def read_replies(
        self, server_round: int, replies: Messages, read: Callable[[Message], Content], nodes: Sequence[int]
    ) -> tuple[list[Message], dict[str, Content]]:
        """Read replies; log a warning for each unusable reply.

        Args:
            read: Function that reads a reply, or raises a ``ValueError`` if it is unusable.
            nodes: Nodes of which at least one must send a usable reply; empty if no reply is required.

        Returns:
            The usable replies, and site -> content of its reply.

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
        """Read a reply to training; raise a ``ValueError`` if it is unusable."""
        if len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
            raise ValueError("it needs one ArrayRecord and one MetricRecord")
        (model,) = reply.content.array_records.values()
        weight = records.read_reply_weight(reply, self.weighted_by_key)
        if fault := records.find_model_fault(model, self._sent):
            raise ValueError(fault)
        features = self._extract_head(model).features
        statistics = self.read_statistics(reply)
        site = format_node_as_site_name(reply.metadata.src_node_id)
        for name, shape in self.method.statistics_shape(self.round_context(), site, features).items():
            sent = statistics[name].shape if name in statistics else ()
            if name not in statistics or sent != shape:
                raise ValueError(f"its {name} have the shape {sent}, not {shape}")
        return SiteTrainingReply(model, weight, statistics)

    def read_statistics(self, reply: Message) -> Arrays:
        """Return the method's statistics in a site's reply; empty if the method has none.

        Raises:
            ValueError: If the method has statistics, and the reply does not.
        """
        if not self.method.site.payload.statistics:
            return {}
        if STATISTICS_RECORD not in reply.content.config_records:
            remedy = "use FedMLPSite and put what its finish() returns into the reply"
            raise ValueError(f"it sent no {STATISTICS_RECORD!r}: {remedy}")
        return records.unpack_arrays(reply.content.config_records[STATISTICS_RECORD])

    def aggregate_reply_statistics(self, replies: Mapping[str, SiteTrainingReply]) -> None:
        """Aggregate the statistics in the sites' replies with the rules of the method."""
        self.statistics = self.method.aggregate_statistics(self.round_context(), replies)

    def round_context(self) -> RoundContext:
        """Return the data of this round for the method: the labels of each site, the statistics, the round number."""
        answers = dict(sorted(self.answers.items()))
        contract = LabelContract(self.classes, {site: answer.class_names for site, answer in answers.items()})
        return RoundContext(self.method.site.task, contract, answers, self.statistics, self._round)

    def _extract_head(self, model: ArrayRecord) -> Head:
        return records.copy_head(model, self.head, self.classes)

    def _ask_and_add_labels(self, messages: Sequence[Message], grid: Grid) -> list[Message]:
        """Add the site's labelled classes and the method's data to each of Flower's messages.

        New nodes are first asked for their labels. Messages to sites with unknown labels are dropped.

        Raises:
            UnknownLabels: If a node does not answer with valid labels when nodes are asked for the first time. Later
                this is only logged as a warning.
        """
        if not messages:
            return []
        unknown = {node for node in grid.get_node_ids() if format_node_as_site_name(node) not in self.answers}
        nodes = unknown - self._asked
        wait_s = min(LABELS_TIMEOUT_S, self._timeout)
        # Ask each node once in a round, so that a node that does not answer delays training but not evaluation.
        self._asked |= nodes
        answers, faults = ask_sites_for_labels(grid, nodes, wait_s, self.classes, self.method.site)
        if faults and not self.answers:
            raise UnknownLabels(faults)
        if faults:
            log.warning("left out of this round: %s", faults)
        self.answers |= answers
        context = self.round_context()
        unlabelled_classes = [name for name in self.classes if not context.contract.annotating_sites(name)]
        if unlabelled_classes != self._unlabelled_classes:
            log.warning("no site labels %s", unlabelled_classes)
            self._unlabelled_classes = unlabelled_classes
        statistics_for = self.method.statistics_for(context)
        method = self.method.site
        labelled = list[Message]()
        shared = {CLASSES_KEY: list(self.classes), TASK_KEY: method.task, HEAD_KEY: self.head, START_KEY: self._start}
        shared |= {METHOD_KEY: method.name, PARAMETERS_KEY: method.parameters.model_dump_json()}
        for message in messages:
            node = message.metadata.dst_node_id
            site = format_node_as_site_name(node)
            if site not in context.answers:
                continue
            content = RecordDict(dict(message.content))
            fields = {**shared, ANNOTATED_KEY: context.contract.annotated_class_mask(site).tolist()}
            content[self.configrecord_key] = ConfigRecord({**content.config_records[self.configrecord_key], **fields})
            if statistics := statistics_for(site):
                content[STATISTICS_RECORD] = records.pack_arrays(statistics)
            labelled.append(Message(content, message_type=message.metadata.message_type, dst_node_id=node))
        return labelled


class PartialLoss(LabelledSites):
    """FedAvg with a partial loss: a site's loss ignores the classes that the site does not label."""


class VanillaFL(LabelledSites):
    """FedAvg with absent labels: a class that a site does not label counts as negative. A baseline for comparison."""

    method_class = baselines.VanillaFedAvg


class SurgicalAggregation(LabelledSites):
    """FedAvg, except that the head row of a class is averaged only over the sites that label the class.

    Kulkarni et al., "Surgical Aggregation: Federated Class-Heterogeneous Learning", ML4H 2024, eq. 2. If all replying
    sites label a class, its row is bit for bit equal to that of Flower's FedAvg. If no replying site labels a class,
    its row stays unchanged.
    """

    method_class = surgical.SurgicalAggregation


class FedSLD(LabelledSites):
    """FedAvg with a weighted loss; the weight of a label is its frequency in the batch divided by that in all sites.

    Equation 3 of Luo and Wu, "FedSLD: Federated Learning with Shared Label Distribution for Medical Image
    Classification", 2021. The sites send how many of their images show each class (``SiteLabels.positives`` and
    ``.images``).

    Args:
        reduction: Divisor of the sum of the weighted losses in a batch. ``sum_over_batch``: the number of images with a
            known class; with ``multi_label``, the number of known labels. ``weighted_mean``: the sum of the weights.
            ``sum``: no divisor, as in eq. 3; with ``multi_label``, which is our extension, the number of classes with a
            known label in the batch.
        options: As for :class:`LabelledSites`.
    """

    method_class = fedsld.FedSLD

    def __init__(self, *, reduction: Reduction = "sum_over_batch", **options: Any) -> None:
        super().__init__(parameters={"reduction": reduction}, **options)


class FedMLP(LabelledSites):
    """FedAvg, in which each site learns to detect the classes that it does not label, from prototypes of all sites.

    Sun et al., "FedMLP: Federated Multi-label Medical Image Classification under Task Heterogeneity", MICCAI 2024.

    Args:
        stage_one_rounds: Number of rounds of the first stage, before missing labels are detected.
        parameters: Parameters of FedMLP by name (:class:`polyclinic.strategies.methods.fedmlp.FedMLPParameters`).
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
    """Sequential training: in each round, the sites train one model one after another, in ascending order of node ids.

    A site that does not reply is skipped. A class that a site does not label counts as negative, as in the UniFed
    paper. ``aggregate_train`` receives the replies of a round in the order of training, and returns the last model.
    """

    method_class: ClassVar[type[SequentialMethod]] = unifed.SequentialTraining
    method: SequentialMethod
    not_wrapped = "it passes one model on from site to site"

    def start(self, grid: Grid, *args: Any, **options: Any) -> Result:
        """Run all rounds; ``timeout`` is the maximum training time of each site in seconds."""
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
    """A Flower Grid that sends training messages one after another, each with the model of the previous site."""

    def __init__(self, grid: Grid, strategy: SequentialTraining) -> None:
        self._grid, self._strategy = grid, strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Messages, *, timeout: float | None = None) -> Messages:
        """Send messages and return the replies; in training, each site in turn receives the latest usable model."""
        messages = list(messages)
        model = None
        replies = list[Message]()
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
            except ValueError:  # aggregate_train logs the reason
                continue
            strategy.aggregate_reply_statistics({site: trained})
            model = trained.model
        return replies


class UniFed(SequentialTraining):
    """Sequential training with the easiest task first: the sites train in the order in which their loss falls fastest.

    Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
    Tasks", 2024. Before round 1, every site trains once from the initial model, only to determine the order. The
    ``MetricRecord`` of each reply must have the key ``loss-slope``, which :func:`polyclinic.flower.loss_slope` computes
    from the losses of all batches. A site stops its training with :class:`polyclinic.flower.EarlyStopping`.

    Args:
        train_at_server: Function that trains the model of the previous round on images of the coordinator. The result
            of a round is then ``alpha`` times the sites' model plus ``1 - alpha`` times the coordinator's model. If
            None, the coordinator does not train, and the result is the sites' model.
        alpha: Weight of the sites' model; 0.7 in the paper.
        options: As for :class:`LabelledSites`.
    """

    method_class = unifed.UniFed

    def __init__(self, *, train_at_server: TrainAtServer | None = None, alpha: float = 0.7, **options: Any) -> None:
        super().__init__(parameters={"alpha": alpha}, **options)
        self.train_at_server, self.alpha = train_at_server, alpha

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Select sites like FedAvg; before round 1 let all sites train once, and use only their loss slopes."""
        if server_round == 1:
            # Rank all sites, even if only a fraction of them trains in each round.
            fraction = self.fraction_train
            self.fraction_train = 1.0
            messages = super().configure_train(0, arrays, config, grid)
            self.fraction_train = fraction
            replies = self._grid.send_and_receive(messages, timeout=self._timeout)
            self.aggregate_reply_statistics(self.read_replies(0, replies, self.read_reply, self._nodes)[1])
        return super().configure_train(server_round, arrays, config, grid)

    def read_statistics(self, reply: Message) -> Arrays:
        """Return the loss slope from the metrics of a reply; raise a ``ValueError`` if it is missing."""
        slope = records.get_reply_metrics(reply.content).get(LOSS_SLOPE_METRIC)
        if not isinstance(slope, int | float):
            raise ValueError(
                f"it sent no {LOSS_SLOPE_METRIC!r}: put polyclinic.flower.loss_slope(losses) in its metrics"
            )
        return {"slope": np.array([slope])}

    def aggregate_train(self, server_round: int, replies: Messages) -> ModelAndMetrics:
        """Return the model of the last site that trained in this round, and the averaged metrics.

        With ``train_at_server``, the site's model is mixed with the model that this function returns.

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
