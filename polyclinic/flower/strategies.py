"""Averaging strategies over plain ``state_dict``s: Flower's FedAvg with what the sites' labels change."""

from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING, getLogger
from typing import Any, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from common.models.zoo.spec import Task
from polyclinic.flower.heads import head_of, with_head
from polyclinic.flower.keys import ANNOTATED, CLASSES, MISSING, PRIOR, REDUCTION, TASK
from polyclinic.flower.labels import RollCall, UnknownLabels, class_names
from polyclinic.flower.replies import misfit, usable, weight_in
from strategies.fedsld.prior import label_prior, prior_over
from strategies.fedsld.weights import Reduction
from strategies.local.losses import Missing
from strategies.surgical import OwnersMean

log = getLogger("flwr")
ROLL_CALL_S = 600.0
"""Seconds to wait for the sites' labels."""


class LabelledSites(FedAvg):
    """Flower's FedAvg that knows which classes each site labels, and tells each site so.

    Args:
        head: Name of the model's last layer in its ``state_dict``: ``head.weight (classes, features)`` and, if there is
            one, ``head.bias (classes,)``.
        classes: Names of its rows, in their order.
        task: ``multi_label``, or ``multi_class`` where classes exclude one another.
        options: Those of Flower's ``FedAvg``.

    Raises:
        TypeError: If ``head`` is no text, or ``classes`` is no list of texts.
        ValueError: If names of classes repeat, or there is no such task.
    """

    missing: Missing = "masked"
    needs_counts = False
    """Whether every site has to say how many images show each of its classes."""

    def __init__(self, *, head: str, classes: Sequence[str], task: Task = "multi_label", **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(head, str):
            raise TypeError(f"head is the name of one layer, got {head!r}: a model of several heads is not supported")
        if task not in get_args(Task):
            raise ValueError(f"task must be one of {list(get_args(Task))}, got {task!r}")
        self.head, self.classes, self.task = head, class_names(classes), task
        self.roll_call = RollCall(self.classes, self.needs_counts)
        self._sent, self._unowned = ArrayRecord(), list[str]()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's own choice of sites; each gets the model, and which of its rows it labels.

        Raises:
            ValueError: If the model has no such head.
            UnknownLabels: If, before any site has trained, one does not say which classes it labels. A site that joins
                later and does not is left out with a warning.
        """
        head_of(arrays, self.head, self.classes)  # a wrong name is told before a site trains for an hour
        self._sent = arrays
        messages = list(super().configure_train(server_round, arrays, config, grid))
        return self._with_labels(messages, grid)

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
            ValueError: If sites replied and no reply fits.
        """
        return self.combined(
            usable(server_round, replies, self.fault_in)
        )  # sorted: the same bits no matter who was first

    def combined(self, replies: Sequence[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's mean of replies in ascending order of nodes; those that hold an error are counted only."""
        return super().aggregate_train(0, replies)

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
        begun = bool(self.roll_call.said)
        try:
            self.roll_call.ask(grid, grid.get_node_ids(), ROLL_CALL_S)
        except UnknownLabels as fault:
            if not begun:
                raise
            log.log(WARNING, "left out of this round: %s", fault)
        unowned = [name for name in self.classes if not self.roll_call.owners(name, self.roll_call.said)]
        if unowned and unowned != self._unowned:
            log.log(WARNING, "no site labels %s", unowned)
        self._unowned = unowned

    def _for_site(self, message: Message) -> Message:
        node, given = message.metadata.dst_node_id, message.content
        config = ConfigRecord({**given.config_records[self.configrecord_key], **self.told(node)})
        arrays = given.array_records[self.arrayrecord_key]
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        content.update(self.records())
        return Message(content, message_type=message.metadata.message_type, dst_node_id=node)


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
        reduction: ``sum_over_batch`` divides the weighted losses by the number of images, ``sum`` is the paper's eq. 3,
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
