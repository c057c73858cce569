"""Which classes each site labels: the coordinator asks once, a site's ``ClientApp`` answers.

The question is a Flower query named ``labels``; the answer is one ``ConfigRecord``.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from common.contract import LabelContract
from common.errors import WireError
from common.wire.records import RollCallAnswer

QUERY, RECORD = "labels", "labels"


@dataclass(frozen=True)
class SiteLabels:
    """The classes that a site labels, and how many of its images show them.

    Attributes:
        classes: Names of the classes that the site labels.
        positives: Training images that show each of these classes, in the same order; only FedSLD needs them.
        images: Number of all training images; only FedSLD needs it.

    Raises:
        ValueError: If ``classes`` is no list of different names, or a count is below 0.
        TypeError: If a count is no whole number.
    """

    classes: Sequence[str]
    positives: Sequence[int] = ()
    images: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", check_class_names(self.classes))
        object.__setattr__(self, "positives", tuple(map(index, self.positives)))
        object.__setattr__(self, "images", index(self.images))
        if min(self.positives, default=0) < 0:
            raise ValueError(f"positives must not be below 0, got {list(self.positives)}")


def check_class_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes as a tuple.

    Raises:
        ValueError: If they are no list of different names: a set has no order.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not names or len(set(names)) < len(names):
        raise ValueError(f"classes must be a list of different names in an order, got {names!r}")
    return tuple(names)


def labels(app: ClientApp) -> Callable[[Callable[[Context], SiteLabels]], Callable[[Context], SiteLabels]]:
    """Let a ``ClientApp`` answer the coordinator's question which classes this site labels.

    Used as a decorator of a function that gets Flower's ``Context`` and returns :class:`SiteLabels`::

        @labels(app)
        def labelled(context: Context) -> SiteLabels:
            return SiteLabels(("atelectasis", "effusion"))
    """

    def decorate(function: Callable[[Context], SiteLabels]) -> Callable[[Context], SiteLabels]:
        @app.query(QUERY)
        def answer(message: Message, context: Context) -> Message:
            site = function(context)
            fields: dict[str, Any] = {
                "classes": list(site.classes),
                "positives": list(site.positives),
                "images": site.images,
            }
            return Message(RecordDict({RECORD: ConfigRecord(fields)}), reply_to=message)

        return function

    return decorate


class UnknownLabels(ValueError):
    """Raised with the nodes whose labels the coordinator cannot use, and why."""


def site_name(node: int) -> str:
    """Return the name of a node as a method's rules know it: names sort as nodes do."""
    return f"{node:020d}"


@dataclass
class LabelRollCall:
    """The labels of all sites that have answered; a site that joins later is asked then.

    Attributes:
        classes: Names of the head's rows, in their order.
        needs_counts: True if a site has to state how many images show each class.
        exclusive: True if an image shows one class at most.
        answers: Node -> the site's labels, in the form in which a method reads them.
    """

    classes: tuple[str, ...]
    needs_counts: bool
    exclusive: bool
    answers: dict[int, RollCallAnswer]

    def ask(self, grid: Grid, nodes: Iterable[int], timeout: float) -> None:
        """Ask the nodes that have not answered yet; wait ``timeout`` seconds for them.

        Raises:
            UnknownLabels: If a node does not answer, or labels a class that the model has no row for.
        """
        new, kind = sorted(set(nodes) - self.answers.keys()), f"{MessageType.QUERY}.{QUERY}"
        questions = [Message(RecordDict(), message_type=kind, dst_node_id=node) for node in new]
        replies = grid.send_and_receive(questions, timeout=timeout) if new else ()
        reasons = dict.fromkeys(new, f"did not say which classes it labels: no reply within {timeout:g} s")
        for reply in replies:
            reasons[reply.metadata.src_node_id] = self._read_answer(reply)
        if faults := [f"node {node} {reason}" for node, reason in reasons.items() if reason]:
            raise UnknownLabels("\n".join(faults))

    def _read_answer(self, reply: Message) -> str:
        """Store a node's answer; return what is wrong with it, or an empty string."""
        if reply.has_error():
            return f"did not say which classes it labels: {shorten_error(reply.error.reason or '')}"
        node = reply.metadata.src_node_id
        fields: dict[str, Any] = {"classes": (), **reply.content.config_records.get(RECORD, {})}
        try:
            site = SiteLabels(**fields)
            names, positives, images = tuple(site.classes), tuple(site.positives), site.images
            negatives = tuple(images - count for count in positives)
            answer = RollCallAnswer("", site_name(node), names, names, images, 0, 0, "", "", positives, negatives)
        except (TypeError, ValueError, WireError) as error:
            return f"sent labels that cannot be read: {error}"
        if unknown := [name for name in names if name not in self.classes]:
            return f"labels {unknown}; the model's rows are {list(self.classes)}"
        if self.needs_counts and not positives:
            return "sent no counts: this strategy needs positives and images in its SiteLabels"
        if self.needs_counts and self.exclusive and (shown := sum(positives)) > images:
            return f"counts {shown} positives in {images} images of classes that exclude one another"
        self.answers[node] = answer
        return ""

    @property
    def contract(self) -> LabelContract:
        """Return which of the head's rows each site labels."""
        return LabelContract(self.classes, {answer.site: answer.class_names for answer in self.by_site.values()})

    @property
    def by_site(self) -> dict[str, RollCallAnswer]:
        """Return the answers by the sites' names, sorted."""
        return {answer.site: answer for _, answer in sorted(self.answers.items())}


def shorten_error(reason: str) -> str:
    """Return a site's error in one line: Flower's reason may hold Ray's whole remote traceback.

    Args:
        reason: Flower's text: the type of the exception, and its message in brackets.
    """
    if f"registered with name '{QUERY}'" in reason:
        return "its ClientApp needs @polyclinic.flower.labels(app)"
    parts = re.fullmatch(r"<class '(?:\w+\.)*(.*?)'>:<'(.*)'>", reason, re.DOTALL)
    lines = (parts[2] if parts else reason).strip().splitlines() or [parts[1] if parts else "no reason given"]
    return lines[-1].rpartition(" occurred. Message: ")[2]
