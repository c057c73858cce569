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

from common.wire.records import RollCallAnswer
from strategies.local.site_method import SiteMethod

QUERY, RECORD = "labels", "labels"


@dataclass(frozen=True)
class SiteLabels:
    """The classes that a site labels, and how many of its images show them.

    Attributes:
        classes: Names of the classes that the site labels.
        positives: Training images that show each of these classes, in the same order; only FedSLD needs them.
        images: Number of all training images; only FedSLD needs it.

    Raises:
        ValueError: If ``classes`` is no list of different names (a set has no order), or a count is below 0.
        TypeError: If a count is no whole number.
    """

    classes: Sequence[str]
    positives: Sequence[int] = ()
    images: int = 0

    def __post_init__(self) -> None:
        names = self.classes
        if isinstance(names, str) or not isinstance(names, Sequence) or not names or len(set(names)) < len(names):
            raise ValueError(f"classes must be a list of different names in an order, got {names!r}")
        object.__setattr__(self, "classes", tuple(names))
        object.__setattr__(self, "positives", tuple(map(index, self.positives)))
        object.__setattr__(self, "images", index(self.images))
        if min(self.positives, default=0) < 0:
            raise ValueError(f"positives must not be below 0, got {list(self.positives)}")


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
            fields: dict[str, Any] = {"classes": list(site.classes), "positives": list(site.positives)}
            return Message(RecordDict({RECORD: ConfigRecord({**fields, "images": site.images})}), reply_to=message)

        return function

    return decorate


class UnknownLabels(ValueError):
    """Raised with the nodes whose labels the coordinator cannot use, and why."""


def site_name_of_node(node: int) -> str:
    """Return the name of a node as a method's rules know it: names sort as nodes do."""
    return f"{node:020d}"


def ask_labels(
    grid: Grid, nodes: Iterable[int], timeout: float, classes: Sequence[str], method: SiteMethod
) -> tuple[dict[str, RollCallAnswer], str]:
    """Ask nodes which of the model's classes they label, and wait ``timeout`` seconds for them.

    Returns:
        The answers by site, in the form in which a method reads them; and a line for each node that does not answer,
        labels a class that the model has no row for, or does not count images where the method needs it.
    """
    kind = f"{MessageType.QUERY}.{QUERY}"
    questions = [Message(RecordDict(), message_type=kind, dst_node_id=node) for node in sorted(nodes)]
    faults = dict.fromkeys(sorted(nodes), f"did not say which classes it labels: no reply within {timeout:g} s")
    answers = dict[str, RollCallAnswer]()
    for reply in grid.send_and_receive(questions, timeout=timeout) if questions else ():
        node = reply.metadata.src_node_id
        try:
            answers[site_name_of_node(node)] = _read_answer(reply, classes, method)
            del faults[node]
        except UnknownLabels as fault:
            faults[node] = str(fault)
    return answers, "\n".join(f"node {node} {fault}" for node, fault in faults.items())


def _read_answer(reply: Message, classes: Sequence[str], method: SiteMethod) -> RollCallAnswer:
    """Read a site's answer; raise :class:`UnknownLabels` without the node if it cannot be used."""
    if reply.has_error():
        raise UnknownLabels(f"did not say which classes it labels: {shorten_error(reply.error.reason)}")
    fields: dict[str, Any] = {"classes": (), **reply.content.config_records.get(RECORD, {})}
    try:
        site = SiteLabels(**fields)
        names, positives, images = tuple(site.classes), tuple(site.positives), site.images
        negatives, name = tuple(images - count for count in positives), site_name_of_node(reply.metadata.src_node_id)
        answer = RollCallAnswer("", name, names, names, images, 0, 0, "", "", positives, negatives)
    except (TypeError, ValueError) as error:
        raise UnknownLabels(f"sent labels that cannot be read: {error}") from None
    if unknown := [name for name in names if name not in classes]:
        raise UnknownLabels(f"labels {unknown}; the model's rows are {list(classes)}")
    if method.traffic.label_counts:
        if not positives:
            raise UnknownLabels("sent no counts: this strategy needs positives and images in its SiteLabels")
        if method.task == "multi_class" and (shown := sum(positives)) > images:
            problem = f"{shown} positives in {images} images of classes that exclude one another"
            raise UnknownLabels(f"counts {problem}")
    return answer


def shorten_error(reason: str | None) -> str:
    """Return Flower's reason of a site's error in one line: it may hold Ray's whole remote traceback."""
    if f"registered with name '{QUERY}'" in (reason := reason or ""):
        return "its ClientApp needs @polyclinic.flower.labels(app)"
    # The type of the exception, and its message in brackets.
    parts = re.fullmatch(r"<class '(?:\w+\.)*(.*?)'>:<'(.*)'>", reason, re.DOTALL)
    lines = (parts[2] if parts else reason).strip().splitlines() or [parts[1] if parts else "no reason given"]
    return lines[-1].rpartition(" occurred. Message: ")[2]
