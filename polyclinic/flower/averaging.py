"""Averaging strategies over plain ``state_dict``s: Flower's FedAvg with what a method and the sites' labels change."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import WARNING, getLogger
from operator import attrgetter
from typing import Any, ClassVar, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from common.models.zoo.spec import Task
from common.wire.records import Arrays, Groups
from polyclinic.flower.checks import (
    average_common_metrics,
    check_replies,
    copy_head,
    find_metrics_fault,
    find_model_fault,
    get_model,
    get_weight,
    pack_arrays,
    replace_head,
    restore_whole_numbers,
    unpack_arrays,
)
from polyclinic.flower.labels import LabelRollCall, UnknownLabels, check_class_names, site_name
from polyclinic.flower.site import ANNOTATED, CLASSES, HEAD, METHOD, PARAMETERS, START, STATISTICS, TASK
from strategies.aggregation.means import WholeHeadMean
from strategies.local.site_method import Parameters
from strategies.methods import baselines, fedmlp, fedsld, surgical
from strategies.methods.base import Method, RoundContext
from strategies.methods.fedsld import Reduction

log = getLogger("flwr")
ROLL_CALL_S = 600.0
"""The longest wait for the sites' labels, in seconds; the wait is shorter where ``start``'s timeout is."""
FEDMLP_PARAMETERS = (
    fedmlp.FedMLPParameters.model_fields.keys() - Parameters.model_fields.keys() - {"heads", "stage_one_rounds"}
)
"""Parameters of FedMLP itself; the others are of the product's aggregation and training, and of no effect here."""
source_node = attrgetter("metadata.src_node_id")


@dataclass(frozen=True)
class ReplyForMethod:
    """The part of a site's reply that a method's rules read (:class:`strategies.methods.base.SiteReply`)."""

    train_samples: float
    statistics: Arrays
    update: Groups = field(default_factory=Groups)


class LabelledSites(FedAvg):
    """Flower's FedAvg that knows which classes each site labels, and sends each site its part of a method.

    Args:
        head: Name of the model's last layer in its ``state_dict``: ``head.weight (classes, features)`` and, if there is
            one, ``head.bias (classes,)``.
        classes: Names of the head's rows, in their order.
        task: ``multi_label``, or ``multi_class`` where classes exclude one another.
        parameters: Parameters of the method, by name.
        options: Those of Flower's ``FedAvg``. Without an aggregation function of your own for metrics, the mean is of
            the metrics that all sites sent.

    Raises:
        ValueError: If ``classes`` is no list of different names, there is no such task, or a parameter does not fit.

    Attributes:
        method: The rules that the strategy follows.
        not_wrapped: Why no other strategy, as Flower's for differential privacy, can wrap this one; else empty.
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
        if options.get("train_metrics_aggr_fn") is None:
            self.train_metrics_aggr_fn = partial(average_common_metrics, self.train_metrics_aggr_fn)
        if options.get("evaluate_metrics_aggr_fn") is None:
            self.evaluate_metrics_aggr_fn = partial(average_common_metrics, self.evaluate_metrics_aggr_fn)
        self.head, self.classes, self.task = head, check_class_names(classes), task
        self._timeout, self._in_start, self._round = 3600.0, False, -1
        self.begin(ArrayRecord())

    def begin(self, arrays: ArrayRecord) -> None:
        """Forget what an earlier start left; ``arrays`` is the initial model."""
        needs_counts = self.method.site.traffic.label_counts
        self.roll_call = LabelRollCall(self.classes, needs_counts, self.task == "multi_class", {})
        self.statistics: Arrays = {}
        self._sent, self._start = arrays, secrets.token_hex(8)
        self._nodes, self._asked, self._unowned = list[int](), set[int](), list[str]()

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
        """Run the rounds; arguments and result as in Flower's ``Strategy.start``. Each start asks the labels anew.

        Where one model is passed on, ``timeout`` is for each site's training.

        Raises:
            UnknownLabels: If, before round 1, a site does not say which classes it labels.
            RuntimeError: If no reply of a round can be used, with each node's reason.
        """
        self._timeout, self._in_start = timeout, True
        try:
            grid = self.prepare(grid, initial_arrays, train_config or ConfigRecord())
            return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        finally:
            self._in_start = False

    def prepare(self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord) -> Grid:
        """Prepare the run before round 1; return the grid that sends the messages of its rounds."""
        return grid

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose sites as Flower does; each receives the model, and which of its rows it labels."""
        self.refuse_wrapper()
        copy_head(arrays, self.head, self.classes)  # refuse a wrong name before a site trains for an hour
        if server_round <= self._round or not self._sent:  # a wrapper's start is not ours, rounds tell both
            self.begin(arrays)
        self._round, self._sent, self._asked = server_round, arrays, set()
        messages = self._add_labels(list(super().configure_train(server_round, arrays, config, grid)), grid)
        self._nodes = [message.metadata.dst_node_id for message in messages]
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose sites as Flower does; each receives what it receives for training."""
        return self._add_labels(list(super().configure_evaluate(server_round, arrays, config, grid)), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies that fit the model; a warning names the node of every other one."""
        self.refuse_wrapper()
        ordered = sorted(replies, key=source_node)  # the same bits no matter who was first
        fit = self.usable_replies(server_round, ordered, self.find_fault)
        arrays, metrics = super().aggregate_train(server_round, fit)
        trained = [reply for reply in fit if not reply.has_error()]
        if arrays is None or not trained:
            return arrays, metrics
        self.learn(trained)
        return self._average_owners_rows(restore_whole_numbers(arrays, list(map(get_model, trained))), trained), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the replies that have metrics and a weight; a warning names the nodes of all replies without."""
        find_fault = partial(find_metrics_fault, key=self.weighted_by_key)
        fit, _ = check_replies(server_round, sorted(replies, key=source_node), find_fault)
        return super().aggregate_evaluate(server_round, fit)

    def _check_and_log_replies(
        self, replies: Iterable[Message], is_train: bool, validate: bool = True
    ) -> tuple[list[Message], list[Message]]:
        """Leave out Flower's own check, which ends the run without a node: each reply was checked before."""
        return super()._check_and_log_replies(replies, is_train, validate=False)

    def refuse_wrapper(self) -> None:
        """Raise ``TypeError`` if another strategy calls this one and cannot."""
        if self.not_wrapped and not self._in_start:
            name = type(self).__name__
            raise TypeError(f"{name} cannot be wrapped by another strategy: {self.not_wrapped}; use {name}.start")

    def usable_replies(
        self, server_round: int, replies: Iterable[Message], find_fault: Callable[[Message], str]
    ) -> list[Message]:
        """Return the replies of :func:`check_replies`; raise ``RuntimeError`` if none can be used."""
        fit, faults = check_replies(server_round, replies, find_fault)
        faults = dict.fromkeys(self._nodes, f"no reply within {self._timeout:g} s") | faults
        if faults and all(faults.values()):
            reasons = [f"node {node}: {fault}" for node, fault in sorted(faults.items())]
            raise RuntimeError("\n".join([f"round {server_round}: no reply can be used:", *reasons]))
        return fit

    def find_fault(self, reply: Message) -> str:
        """Return why a reply to training cannot be used; an empty string where it can."""
        if len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
            return "it needs one ArrayRecord and one MetricRecord"
        fault = find_metrics_fault(reply, self.weighted_by_key) or find_model_fault(get_model(reply), self._sent)
        if fault:
            return fault
        try:
            features = copy_head(get_model(reply), self.head, self.classes).features
            statistics = self.read_statistics(reply)
        except ValueError as error:
            return str(error)
        site = site_name(source_node(reply))
        for name, shape in self.method.statistics_shape(self.round_context(), site, features).items():
            if name not in statistics or statistics[name].shape != shape:
                return f"its {name} have the shape {statistics[name].shape if name in statistics else ()}, not {shape}"
        return ""

    def read_statistics(self, reply: Message) -> Arrays:
        """Return the method's statistics in a site's reply; raise ``ValueError`` if they are missing."""
        if not self.method.site.traffic.statistics:
            return {}
        if STATISTICS not in reply.content.config_records:
            remedy = "use FedMLPSite and put what its finish() returns into the reply"
            raise ValueError(f"it sent no {STATISTICS!r}: {remedy}")
        return unpack_arrays(reply.content.config_records[STATISTICS])

    def learn(self, replies: Sequence[Message]) -> None:
        """Let the method aggregate the statistics of the replies, in ascending order of their nodes."""
        by_site = dict[str, ReplyForMethod]()
        for reply in replies:
            weight = get_weight(reply, self.weighted_by_key)
            by_site[site_name(source_node(reply))] = ReplyForMethod(weight, self.read_statistics(reply))
        self.statistics = self.method.aggregate_statistics(self.round_context(), by_site)

    def round_context(self) -> RoundContext:
        """Return the context of this round that the method's rules receive."""
        roll_call = self.roll_call
        return RoundContext(self.task, roll_call.contract, roll_call.by_site, self.statistics, self._round)

    def _add_labels(self, messages: Sequence[Message], grid: Grid) -> list[Message]:
        """Return Flower's messages with each site's part of the method, for the sites whose labels are known.

        Once some sites are known, one that cannot say its labels is left out with the reason.
        """
        if not messages:
            return []
        known, nodes = bool(self.roll_call.answers), set(grid.get_node_ids()) - self._asked
        self._asked |= nodes  # once a round: a silent node holds up training, not evaluation, too
        try:
            self.roll_call.ask(grid, nodes, min(ROLL_CALL_S, self._timeout))
        except UnknownLabels as fault:
            if not known:
                raise
            log.log(WARNING, "left out of this round: %s", fault)
        context, answers = self.round_context(), self.roll_call.answers
        unowned = [name for name in self.classes if not context.contract.owners(name)]
        if unowned != self._unowned:
            log.log(WARNING, "no site labels %s", unowned)
            self._unowned = unowned
        statistics_for, site, labelled = self.method.statistics_for(context), self.method.site, list[Message]()
        for message in messages:
            if (node := message.metadata.dst_node_id) not in answers:
                continue
            parts: dict[str, Any] = {
                CLASSES: list(self.classes),
                ANNOTATED: [name in answers[node].class_names for name in self.classes],
                TASK: self.task,
                METHOD: site.name,
                PARAMETERS: site.parameters.model_dump_json(),
                HEAD: self.head,
                START: self._start,
            }
            config = ConfigRecord({**message.content.config_records[self.configrecord_key], **parts})
            arrays = message.content.array_records[self.arrayrecord_key]
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
            if statistics := statistics_for(site_name(node)):
                content[STATISTICS] = pack_arrays(statistics)
            labelled.append(Message(content, message_type=message.metadata.message_type, dst_node_id=node))
        return labelled

    def _average_owners_rows(self, arrays: ArrayRecord, replies: Sequence[Message]) -> ArrayRecord:
        """Return the model with rows that not every site labels averaged over their owners, if the method does so."""
        owned = {source_node(reply): self.roll_call.answers[source_node(reply)].class_names for reply in replies}
        partial_rows = [name for name in self.classes if not all(name in classes for classes in owned.values())]
        if self.method.head_mean is WholeHeadMean or not partial_rows:
            return arrays
        head = copy_head(arrays, self.head, self.classes)
        owners = self.method.head_mean(self.classes, head.features)
        for reply in replies:
            rows = copy_head(get_model(reply), self.head, self.classes).rows(owned[source_node(reply)])
            owners.add(rows, get_weight(reply, self.weighted_by_key))
        (weight, bias, is_sent), before = owners.mean, copy_head(self._sent, self.head, self.classes)
        for row in map(self.classes.index, partial_rows):
            head.weight[row] = weight[row] if is_sent[row] else before.weight[row]
            head.bias[row] = bias[row] if is_sent[row] else before.bias[row]
        return replace_head(arrays, self.head, head)


class PartialLoss(LabelledSites):
    """FedAvg; a site's loss leaves out the classes that it does not label."""


class VanillaFL(LabelledSites):
    """FedAvg; a class that a site does not label counts as absent. The baseline that partial labels break."""

    method_class = baselines.Vanilla


class SurgicalAggregation(LabelledSites):
    """Each class's head row is averaged over the sites that label it, the rest by FedAvg.

    Kulkarni et al., "Surgical Aggregation: Federated Class-Heterogeneous Learning", ML4H 2024, eq. 2. Where every site
    that replied labels a class, its row is the one that Flower's FedAvg computed: with the same labels everywhere the
    result is Flower's, bit for bit. A row that nobody owns stays as it was sent.
    """

    method_class = surgical.SurgicalAggregation


class FedSLD(LabelledSites):
    """FedAvg; a site weighs each label by how common it is in its batch against how common it is in the federation.

    Luo and Wu, "FedSLD: Federated Learning with Shared Label Distribution for Medical Image Classification", 2021,
    eq. 3. The sites send how many of their images show each class (``SiteLabels.positives`` and ``.images``).

    Args:
        reduction: With ``multi_class``, ``sum`` is the paper's eq. 3 and ``sum_over_batch`` divides it by the images of
            known class. With ``multi_label``, our extension, ``sum`` is divided by the number of classes of which the
            batch has a label, and ``sum_over_batch`` is the mean over all known entries: NaN leaves the divisor.
            ``weighted_mean`` divides by the sum of the weights.
        options: As for :class:`LabelledSites`.
    """

    method_class = fedsld.FedSLD

    def __init__(self, *, reduction: Reduction = "sum_over_batch", **options: Any) -> None:
        super().__init__(parameters={"reduction": reduction}, **options)


class FedMLP(LabelledSites):
    """FedAvg; sites learn to detect the classes that they do not label from the prototypes of all sites.

    Sun et al., "FedMLP: Federated Multi-label Medical Image Classification under Task Heterogeneity", MICCAI 2024.

    Args:
        stage_one_rounds: Rounds before missing labels are detected.
        parameters: Those of :class:`strategies.methods.fedmlp.FedMLPParameters` that are FedMLP's own, by name.
        options: As for :class:`LabelledSites`; the task is ``multi_label``.

    Raises:
        ValueError: For parameters that do not fit.
    """

    method_class = fedmlp.FedMLP
    method: fedmlp.FedMLP
    not_wrapped = "clipping and noise on models would leave its prototypes as they are"

    def __init__(self, *, stage_one_rounds: int, parameters: Mapping[str, Any] | None = None, **options: Any) -> None:
        if unknown := sorted((parameters or {}).keys() - FEDMLP_PARAMETERS):
            raise ValueError(f"FedMLP has no parameter {unknown[0]!r}; it has {sorted(FEDMLP_PARAMETERS)}")
        super().__init__(parameters={**(parameters or {}), "stage_one_rounds": stage_one_rounds}, **options)
