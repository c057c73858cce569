"""Averaging strategies over plain ``state_dict``s: Flower's FedAvg with what the sites' labels change."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import WARNING, getLogger
from typing import Any, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from common.models.zoo.spec import Task
from polyclinic.flower.heads import head_of, other_rows, with_head
from polyclinic.flower.keys import ANNOTATED, CLASSES, MISSING, PRIOR, REDUCTION, TASK
from polyclinic.flower.labels import RollCall, UnknownLabels, class_names
from polyclinic.flower.means import metric_means, uneven, whole_numbers_kept
from polyclinic.flower.replies import fitting, metrics_fault, misfit, usable, weight_in
from strategies.local.losses import Missing
from strategies.methods.fedsld import Reduction, label_prior, prior_over
from strategies.methods.surgical import OwnersMean

log = getLogger("flwr")
ROLL_CALL_S = 600.0
"""Most seconds to wait for the sites' labels; less where ``start``'s timeout is shorter."""


class LabelledSites(FedAvg):
    """Flower's FedAvg that knows which classes each site labels, and tells each site so.

    Args:
        head: Name of the model's last layer in its ``state_dict``: ``head.weight (classes, features)`` and, if there is
            one, ``head.bias (classes,)``.
        classes: Names of its rows, in their order.
        task: ``multi_label``, or ``multi_class`` where classes exclude one another.
        options: Those of Flower's ``FedAvg``. Without an aggregation function of your own for metrics, each metric is
            averaged over the sites that sent it, with a warning where that is not all.

    Raises:
        TypeError: If ``head`` is no text, or ``classes`` is no list of texts.
        ValueError: If names of classes repeat, or there is no such task.
    """

    missing: Missing = "masked"
    needs_counts = False
    """Whether every site has to say how many images show each of its classes."""

    not_wrapped = ""
    """Why another strategy, as Flower's for differential privacy, cannot wrap this one; empty where it can."""

    def __init__(self, *, head: str, classes: Sequence[str], task: Task = "multi_label", **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(head, str):
            raise TypeError(f"head is the name of one layer, got {head!r}: a model of several heads is not supported")
        if task not in get_args(Task):
            raise ValueError(f"task must be one of {list(get_args(Task))}, got {task!r}")
        self.train_metrics_aggr_fn = options.get("train_metrics_aggr_fn") or metric_means
        self.evaluate_metrics_aggr_fn = options.get("evaluate_metrics_aggr_fn") or metric_means
        self.head, self.classes, self.task = head, class_names(classes), task
        self._timeout, self._in_start, self._round = 3600.0, False, -1
        self.begin(ArrayRecord())

    def begin(self, arrays: ArrayRecord) -> None:
        """Forget what an earlier start left.

        Args:
            arrays: The initial model.
        """
        self.roll_call = RollCall(self.classes, self.needs_counts, exclusive=self.task == "multi_class")
        self._sent, self._asked = arrays, list[int]()
        self._called, self._said = set[int](), set[str]()

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
            timeout: Seconds for each round's training and evaluation; for the labels, at most 600 of them.

        Raises:
            UnknownLabels: If, before round 1, a site does not say which classes it labels.
            RuntimeError: If no reply of a round can be used, with each node's reason.
        """
        with self._own_start(timeout):
            return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    @contextmanager
    def _own_start(self, timeout: float) -> Iterator[None]:
        self._timeout, self._in_start = timeout, True
        try:
            yield
        finally:
            self._in_start = False

    def _only_in_own_start(self) -> None:
        if self.not_wrapped and not self._in_start:
            name = type(self).__name__
            raise TypeError(
                f"{name} cannot be wrapped by another strategy: {self.not_wrapped}; use {name}.start itself"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's own choice of sites; each gets the model, and which of its rows it labels.

        Raises:
            TypeError: If another strategy calls it and cannot.
            ValueError: If the model has no such head.
            UnknownLabels: If, before any site has trained, one does not say which classes it labels. A site that joins
                later and does not is left out with a warning.
        """
        self._only_in_own_start()
        head_of(arrays, self.head, self.classes)  # a wrong name is told before a site trains for an hour
        if server_round <= self._round or not self._sent:  # a wrapper's start is not ours, rounds tell both
            self.begin(arrays)
        self._round, self._sent, self._called = server_round, arrays, set()
        messages = self._with_labels(list(super().configure_train(server_round, arrays, config, grid)), grid)
        self._asked = [message.metadata.dst_node_id for message in messages]
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As for training."""
        return self._with_labels(list(super().configure_evaluate(server_round, arrays, config, grid)), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies that fit the model; a warning names the node of every other one.

        Raises:
            RuntimeError: If sites were asked and no reply can be used.
        """
        self._only_in_own_start()
        came = sorted(replies, key=_node)  # the same bits no matter who was first
        return self.combined(usable(server_round, came, self._asked, self._timeout, self.fault_in))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the replies that have metrics and a weight; a warning names the node of every other one."""
        came = sorted(replies, key=_node)
        judged = fitting(server_round, came, lambda reply: metrics_fault(reply, self.weighted_by_key))
        self._say_uneven(judged, self.evaluate_metrics_aggr_fn)
        return super().aggregate_evaluate(server_round, judged)

    def _check_and_log_replies(
        self, replies: Iterable[Message], is_train: bool, validate: bool = True
    ) -> tuple[list[Message], list[Message]]:
        """Without Flower's own check, which ends the run without a node: each reply was checked before."""
        return super()._check_and_log_replies(replies, is_train, validate=False)

    def _say_uneven(self, replies: Sequence[Message], function: object) -> None:
        if function is metric_means:
            self._say(*uneven(replies))

    def _say(self, *texts: str) -> None:
        """Warn once in a start."""
        for text in texts:
            if text not in self._said:
                log.log(WARNING, "%s", text)
            self._said.add(text)

    def combined(self, replies: Sequence[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's mean of replies in ascending order of nodes; those that hold an error are counted only."""
        self._say_uneven(replies, self.train_metrics_aggr_fn)
        arrays, metrics = super().aggregate_train(0, replies)
        if arrays is None:
            return arrays, metrics
        models = [next(iter(reply.content.array_records.values())) for reply in replies if not reply.has_error()]
        return whole_numbers_kept(arrays, models), metrics

    def fault_in(self, reply: Message) -> str:
        """Why a reply to training cannot be used; empty where it can."""
        return misfit(reply, self._sent, self.head, self.classes, self.weighted_by_key)

    def told(self, node: int) -> Mapping[str, Any]:
        """What a site is told beside the user's own configuration."""
        return {
            CLASSES: list(self.classes),
            ANNOTATED: self.roll_call.annotated(node).tolist(),
            MISSING: self.missing,
            TASK: self.task,
        }

    def records(self) -> Mapping[str, ArrayRecord]:
        """What every site is sent beside the model."""
        return {}

    def _with_labels(self, messages: Sequence[Message], grid: Grid) -> list[Message]:
        if messages:
            self._call_the_roll(grid)
        return [self._for_site(message) for message in messages if message.metadata.dst_node_id in self.roll_call]

    def _call_the_roll(self, grid: Grid) -> None:
        """Ask who was not asked yet; once some sites are known, one that cannot answer is left out with the reason."""
        begun, nodes = bool(self.roll_call.said), set(grid.get_node_ids()) - self._called
        self._called |= nodes  # once a round: a silent node holds up training, not evaluation, too
        try:
            self.roll_call.ask(grid, nodes, min(ROLL_CALL_S, self._timeout))
        except UnknownLabels as fault:
            if not begun:
                raise
            log.log(WARNING, "left out of this round: %s", fault)
        if unowned := [name for name in self.classes if not self.roll_call.owners(name, self.roll_call.said)]:
            self._say(f"no site labels {unowned}")

    def _for_site(self, message: Message) -> Message:
        node, given = message.metadata.dst_node_id, message.content
        config = ConfigRecord({**given.config_records[self.configrecord_key], **self.told(node)})
        arrays = given.array_records[self.arrayrecord_key]
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        content.update(self.records())
        return Message(content, message_type=message.metadata.message_type, dst_node_id=node)


def _node(reply: Message) -> int:
    return reply.metadata.src_node_id


class PartialLoss(LabelledSites):
    """FedAvg; a site's loss leaves out the classes that it does not label."""


class VanillaFL(LabelledSites):
    """FedAvg; a class that a site does not label counts as absent. The baseline that partial labels break."""

    missing = "negative"


class SurgicalAggregation(LabelledSites):
    """Each class's head row is averaged over the sites that label it, the rest by FedAvg.

    Kulkarni et al., "Surgical Aggregation: Federated Class-Heterogeneous Learning", ML4H 2024, eq. 2. Where every site
    that replied labels a class, its row is the one that Flower's FedAvg computed: with the same labels everywhere the
    result is Flower's, bit for bit. A row that nobody owns stays as it was sent.
    """

    def begin(self, arrays: ArrayRecord) -> None:
        """A warning, too, of what has a row for each class and is averaged over all sites all the same."""
        super().begin(arrays)
        if rows := other_rows(arrays, self.head, self.classes):
            self._say(f"{rows} have a row for each class; only weight and bias are averaged over a class's owners")

    def combined(self, replies: Sequence[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's mean, with the rows put in that not every site labels."""
        arrays, metrics = super().combined(replies)
        if arrays is None:
            return arrays, metrics
        came = [reply for reply in replies if not reply.has_error()]
        nodes = [reply.metadata.src_node_id for reply in came]
        partial = [name for name in self.classes if len(self.roll_call.owners(name, nodes)) < len(nodes)]
        return self._with_rows(arrays, came, partial), metrics

    def _with_rows(self, arrays: ArrayRecord, came: Sequence[Message], partial: Sequence[str]) -> ArrayRecord:
        """The record with the rows of these classes averaged over their owners."""
        if not partial:
            return arrays
        head = head_of(arrays, self.head, self.classes)
        owners = OwnersMean(self.classes, head.features)
        for reply in came:
            own = self.roll_call.of(reply.metadata.src_node_id).classes
            (model,) = reply.content.array_records.values()
            owners.add(head_of(model, self.head, self.classes).rows(own), weight_in(reply, self.weighted_by_key))
        weight, bias, sent = owners.mean
        before = head_of(self._sent, self.head, self.classes)
        for name in partial:
            row = self.classes.index(name)
            head.weight[row] = weight[row] if sent[row] else before.weight[row]
            head.bias[row] = bias[row] if sent[row] else before.bias[row]
        return with_head(arrays, self.head, head)


class FedSLD(LabelledSites):
    """FedAvg; a site weighs each label by how common it is in its batch against how common it is in the federation.

    Luo and Wu, "FedSLD: Federated Learning with Shared Label Distribution for Medical Image Classification", 2021,
    eq. 3. The sites tell how many of their images show each class (``SiteLabels.positives`` and ``.images``).

    Args:
        reduction: With ``multi_class``, ``sum`` is the paper's eq. 3 and ``sum_over_batch`` divides it by the images of
            known class. With ``multi_label``, our extension, ``sum`` is divided by the number of classes of which the
            batch has a label, and ``sum_over_batch`` is the mean over all known entries: NaN leaves the divisor.
            ``weighted_mean`` divides by the sum of the weights.
        options: As for :class:`LabelledSites`.

    Raises:
        ValueError: If there is no such reduction.
    """

    needs_counts = True

    def __init__(self, *, reduction: Reduction = "sum_over_batch", **options: Any) -> None:
        super().__init__(**options)
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction must be one of {list(get_args(Reduction))}, got {reduction!r}")
        self.reduction = reduction

    def told(self, node: int) -> Mapping[str, Any]:
        """The prior of the site's own classes, too; 0 for the others."""
        positives, images = self.roll_call.counts()
        prior = prior_over(self.roll_call.annotated(node), label_prior(positives, images), self.task)
        return {**super().told(node), PRIOR: prior.tolist(), REDUCTION: self.reduction}
