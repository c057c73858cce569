"""Averaging strategies over plain ``state_dict``s: Flower's FedAvg with what a method and the sites' labels change."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING, getLogger
from typing import Any, ClassVar, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from common.models.zoo.spec import Task
from common.wire.records import Arrays, Groups
from polyclinic.flower.checks import (
    average_metrics,
    copy_head,
    describe_uneven_metrics,
    explain_metrics_fault,
    explain_model_fault,
    filter_fitting_replies,
    find_other_row_tensors,
    get_model,
    get_weight,
    pack_arrays,
    replace_head,
    require_usable_replies,
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
        options: Those of Flower's ``FedAvg``. Without an aggregation function of your own for metrics, each metric is
            averaged over the sites that sent it, with a warning where that is not all.

    Raises:
        TypeError: If ``head`` is no text, or ``classes`` is no list of texts.
        ValueError: If names of classes repeat, there is no such task, or a parameter does not fit.

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
        if not isinstance(head, str):
            raise TypeError(f"head is the name of one layer, got {head!r}: a model of several heads is not supported")
        if task not in get_args(Task):
            raise ValueError(f"task must be one of {list(get_args(Task))}, got {task!r}")
        self.method = self.method_class(parameters, task)
        self.train_metrics_aggr_fn = options.get("train_metrics_aggr_fn") or average_metrics
        self.evaluate_metrics_aggr_fn = options.get("evaluate_metrics_aggr_fn") or average_metrics
        self.head, self.classes, self.task = head, check_class_names(classes), task
        self._timeout, self._in_start, self._round = 3600.0, False, -1
        self.begin(ArrayRecord())

    def begin(self, arrays: ArrayRecord) -> None:
        """Forget what an earlier start left.

        Args:
            arrays: The initial model.
        """
        needs_counts = self.method.site.traffic.label_counts
        self.roll_call = LabelRollCall(self.classes, needs_counts=needs_counts, exclusive=self.task == "multi_class")
        self.statistics: Arrays = {}
        self._sent, self._start = arrays, secrets.token_hex(8)
        self._nodes, self._called, self._warned = list[int](), set[int](), set[str]()

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

        Args:
            timeout: Seconds for each round's training and evaluation, or for each site's training where one model is
                passed on; for the labels, at most 600 of them.

        Raises:
            UnknownLabels: If, before round 1, a site does not say which classes it labels.
            RuntimeError: If no reply of a round can be used, with each node's reason.
        """
        self._timeout, self._in_start = timeout, True
        try:
            grid = self.ready(grid, initial_arrays, train_config or ConfigRecord(), num_rounds)
            return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        finally:
            self._in_start = False

    def ready(self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord, num_rounds: int) -> Grid:
        """Prepare the run before round 1; return the grid that sends the messages of its rounds."""
        return grid

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose sites as Flower does; each receives the model, and which of its rows it labels.

        Raises:
            TypeError: If another strategy calls it and cannot.
            ValueError: If the model has no such head.
            UnknownLabels: If, before any site has trained, one does not say which classes it labels. A site that joins
                later and does not is left out with a warning.
        """
        self.refuse_wrapper()
        copy_head(arrays, self.head, self.classes)  # refuse a wrong name before a site trains for an hour
        if server_round <= self._round or not self._sent:  # a wrapper's start is not ours, rounds tell both
            self.begin(arrays)
        self._round, self._sent, self._called = server_round, arrays, set()
        messages = self._with_labels(list(super().configure_train(server_round, arrays, config, grid)), grid)
        self._nodes = [message.metadata.dst_node_id for message in messages]
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose sites as Flower does; each receives what it receives for training."""
        return self._with_labels(list(super().configure_evaluate(server_round, arrays, config, grid)), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies that fit the model; a warning names the node of every other one.

        Raises:
            RuntimeError: If no site's reply can be used.
        """
        self.refuse_wrapper()
        ordered = sorted(replies, key=_source_node)  # the same bits no matter who was first
        fit = require_usable_replies(server_round, ordered, self._nodes, self._timeout, self.fault_in)
        self.warn_uneven(fit, self.train_metrics_aggr_fn)
        arrays, metrics = super().aggregate_train(server_round, fit)
        trained = [reply for reply in fit if not reply.has_error()]
        if arrays is None or not trained:
            return arrays, metrics
        self.learn(trained)
        return self._with_owners_rows(restore_whole_numbers(arrays, list(map(get_model, trained))), trained), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the replies that have metrics and a weight; a warning names the nodes of all replies without."""
        fit = filter_fitting_replies(
            server_round,
            sorted(replies, key=_source_node),
            lambda reply: explain_metrics_fault(reply, self.weighted_by_key),
        )
        self.warn_uneven(fit, self.evaluate_metrics_aggr_fn)
        return super().aggregate_evaluate(server_round, fit)

    def _check_and_log_replies(
        self, replies: Iterable[Message], is_train: bool, validate: bool = True
    ) -> tuple[list[Message], list[Message]]:
        """Leave out Flower's own check, which ends the run without a node: each reply was checked before."""
        return super()._check_and_log_replies(replies, is_train, validate=False)

    def refuse_wrapper(self) -> None:
        """Raise if another strategy calls this one and cannot.

        Raises:
            TypeError: With the reason.
        """
        if self.not_wrapped and not self._in_start:
            name = type(self).__name__
            raise TypeError(f"{name} cannot be wrapped by another strategy: {self.not_wrapped}; use {name}.start")

    def warn_uneven(self, replies: Sequence[Message], function: object) -> None:
        """Warn of metrics that not every site sent, unless the user gave a function of their own for the mean."""
        if function is average_metrics:
            self.warn(*describe_uneven_metrics(replies))

    def warn(self, *texts: str) -> None:
        """Log each warning once in a run, however often it occurs."""
        for text in texts:
            if text not in self._warned:
                log.log(WARNING, "%s", text)
            self._warned.add(text)

    def fault_in(self, reply: Message) -> str:
        """Return why a reply to training cannot be used; an empty string where it can."""
        if len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
            return "it needs one ArrayRecord and one MetricRecord"
        if fault := explain_metrics_fault(reply, self.weighted_by_key) or explain_model_fault(
            get_model(reply), self._sent, self.head, self.classes
        ):
            return fault
        try:
            statistics = self.statistics_in(reply)
        except ValueError as error:
            return str(error)
        features = copy_head(self._sent, self.head, self.classes).features
        site = site_name(_source_node(reply))
        for name, shape in self.method.statistics_shape(self.round_context(), site, features).items():
            if name not in statistics or statistics[name].shape != shape:
                return f"its {name} have the shape {statistics[name].shape if name in statistics else ()}, not {shape}"
        return ""

    def statistics_in(self, reply: Message) -> Arrays:
        """Return the method's statistics in a site's reply.

        Raises:
            ValueError: If the method has some, and the reply has no record of them.
        """
        if not self.method.site.traffic.statistics:
            return {}
        if STATISTICS not in reply.content.config_records:
            raise ValueError(
                f"it sent no {STATISTICS!r}: use FedMLPSite and put what its finish() returns into the reply"
            )
        return unpack_arrays(reply.content.config_records[STATISTICS])

    def learn(self, replies: Sequence[Message]) -> None:
        """Let the method aggregate the statistics of the replies, in ascending order of their nodes."""
        by_site = {
            site_name(_source_node(reply)): ReplyForMethod(
                get_weight(reply, self.weighted_by_key), self.statistics_in(reply)
            )
            for reply in replies
        }
        self.statistics = self.method.aggregate_statistics(self.round_context(), by_site)

    def round_context(self) -> RoundContext:
        """Return the context of this round that the method's rules receive."""
        needs_counts, roll_call = self.method.site.traffic.label_counts, self.roll_call
        answers = roll_call.label_counts if needs_counts else {}
        return RoundContext(self.task, roll_call.contract, answers, self.statistics, self._round)

    def _with_labels(self, messages: Sequence[Message], grid: Grid) -> list[Message]:
        if not messages:
            return []
        self._call_the_roll(grid)
        statistics_for = self.method.statistics_for(self.round_context())
        answered = [message for message in messages if _destination_node(message) in self.roll_call.answers]
        return [self._for_site(message, statistics_for(site_name(_destination_node(message)))) for message in answered]

    def _call_the_roll(self, grid: Grid) -> None:
        """Ask every new node; once some sites are known, one that cannot answer is left out with the reason."""
        first, nodes = not self.roll_call.answers, set(grid.get_node_ids()) - self._called
        self._called |= nodes  # once a round: a silent node holds up training, not evaluation, too
        try:
            self.roll_call.ask(grid, nodes, min(ROLL_CALL_S, self._timeout))
        except UnknownLabels as fault:
            if first:
                raise
            log.log(WARNING, "left out of this round: %s", fault)
        labelled = {name for answer in self.roll_call.answers.values() for name in answer.classes}
        if unowned := [name for name in self.classes if name not in labelled]:
            self.warn(f"no site labels {unowned}")

    def _for_site(self, message: Message, statistics: Arrays) -> Message:
        node, received, site = _destination_node(message), message.content, self.method.site
        labelled = self.roll_call.answers[node].classes
        config = ConfigRecord(
            {
                **received.config_records[self.configrecord_key],
                CLASSES: list(self.classes),
                ANNOTATED: [name in labelled for name in self.classes],
                TASK: self.task,
                METHOD: site.name,
                PARAMETERS: site.parameters.model_dump_json(),
                HEAD: self.head,
                START: self._start,
            }
        )
        arrays = received.array_records[self.arrayrecord_key]
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        if statistics:
            content[STATISTICS] = pack_arrays(statistics)
        return Message(content, message_type=message.metadata.message_type, dst_node_id=node)

    def _with_owners_rows(self, arrays: ArrayRecord, replies: Sequence[Message]) -> ArrayRecord:
        """Return the model with rows that not every site labels averaged over their owners, if the method does so."""
        owned = {_source_node(reply): self.roll_call.answers[_source_node(reply)].classes for reply in replies}
        partial = [name for name in self.classes if not all(name in classes for classes in owned.values())]
        if self.method.head_mean is WholeHeadMean or not partial:
            return arrays
        head = copy_head(arrays, self.head, self.classes)
        owners = self.method.head_mean(self.classes, head.features)
        for reply in replies:
            rows = copy_head(get_model(reply), self.head, self.classes).rows(owned[_source_node(reply)])
            owners.add(rows, get_weight(reply, self.weighted_by_key))
        (weight, bias, is_sent), before = owners.mean, copy_head(self._sent, self.head, self.classes)
        for row in map(self.classes.index, partial):
            head.weight[row] = weight[row] if is_sent[row] else before.weight[row]
            head.bias[row] = bias[row] if is_sent[row] else before.bias[row]
        return replace_head(arrays, self.head, head)


def _source_node(reply: Message) -> int:
    return reply.metadata.src_node_id


def _destination_node(message: Message) -> int:
    return message.metadata.dst_node_id


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

    def begin(self, arrays: ArrayRecord) -> None:
        """Forget what an earlier start left; warn of tensors with a row for each class that all sites average."""
        super().begin(arrays)
        if rows := find_other_row_tensors(arrays, self.head, self.classes):
            self.warn(f"{rows} have a row for each class; only weight and bias are averaged over a class's owners")


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

    Raises:
        ValueError: If there is no such reduction.
    """

    method_class = fedsld.FedSLD

    def __init__(self, *, reduction: Reduction = "sum_over_batch", **options: Any) -> None:
        super().__init__(parameters={"reduction": reduction}, **options)


class FedMLP(LabelledSites):
    """FedAvg; sites learn to detect the classes that they do not label from the prototypes of all sites.

    Sun et al., "FedMLP: Federated Multi-label Medical Image Classification under Task Heterogeneity", MICCAI 2024.

    Args:
        stage_one_rounds: Rounds before missing labels are detected.
        parameters: By name: ``tag_rate_negative``, ``tag_rate_positive`` (share tagged in a round at difficulty 1),
            ``sure_below``, ``sure_above`` (probabilities outside are sure), ``rounding`` (``ceil`` or ``floor``),
            ``weighted_partial_loss``, ``detection``, ``self_adaptive``, ``consistency``, ``consistency_stage_one``
            (parts of the ablation), ``prototype_weighting`` (``samples`` or ``uniform``).
        options: As for :class:`LabelledSites`.

    Raises:
        ValueError: For parameters that do not fit, and for ``task="multi_class"``: prototypes are of classes that an
            image shows or does not show.
    """

    method_class = fedmlp.FedMLP
    method: fedmlp.FedMLP
    not_wrapped = "clipping and noise on models would leave its prototypes as they are"

    def __init__(self, *, stage_one_rounds: int, parameters: Mapping[str, Any] | None = None, **options: Any) -> None:
        if options.get("task") == "multi_class":
            raise ValueError('FedMLP is for "multi_label" only; for "multi_class" use SurgicalAggregation or FedSLD')
        if unknown := sorted((parameters or {}).keys() - FEDMLP_PARAMETERS):
            hint = ": it is an argument of its own" if unknown[0] == "stage_one_rounds" else ""
            raise ValueError(f"FedMLP has no parameter {unknown[0]!r}{hint}; it has {sorted(FEDMLP_PARAMETERS)}")
        super().__init__(parameters={**(parameters or {}), "stage_one_rounds": stage_one_rounds}, **options)

    def ready(self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord, num_rounds: int) -> Grid:
        """Warn where the rounds end before missing labels are detected."""
        parameters = self.method.site.parameters
        if parameters.detection and num_rounds <= (first := parameters.stage_one_rounds):
            log.log(WARNING, "no missing label is detected: %s rounds, stage_one_rounds %s", num_rounds, first)
        return super().ready(grid, arrays, config, num_rounds)
