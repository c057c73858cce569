"""Which classes each site labels: the coordinator asks once, a site's ``ClientApp`` answers.

The question is a Flower query named ``labels``; the answer is one ``ConfigRecord``.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from common.contract import LabelContract
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
        TypeError: If the names are no list of texts, or a count is no whole number.
        ValueError: If there is no class, a name repeats, or the counts do not fit the classes or the images.
    """

    classes: Sequence[str]
    positives: Sequence[int] = ()
    images: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.positives, Iterable):
            raise TypeError(f"positives must be a list of whole numbers, got {self.positives!r}")
        object.__setattr__(self, "classes", check_class_names(self.classes))
        object.__setattr__(self, "positives", tuple(_to_whole_number("positives", count) for count in self.positives))
        object.__setattr__(self, "images", _to_whole_number("images", self.images))
        if self.positives and len(self.positives) != len(self.classes):
            raise ValueError(f"{len(self.classes)} classes and {len(self.positives)} counts of positives")
        if any(not 0 <= count <= self.images for count in self.positives):
            raise ValueError(f"positives must be from 0 to images = {self.images}, got {list(self.positives)}")
        if self.positives and not self.images:
            raise ValueError("positives need images above 0: leave out the node of a site without training images")


def check_class_names(names: object) -> tuple[str, ...]:
    """Check the names of classes, and return them as a tuple.

    Raises:
        TypeError: If they are no list of texts.
        ValueError: If there is none, or one repeats.
    """
    if isinstance(names, str | bytes | Set | Mapping) or not isinstance(names, Iterable):
        raise TypeError(f"classes must be a list of names in an order, got {names!r}")
    checked = tuple(names)
    if wrong := [name for name in checked if not isinstance(name, str)]:
        raise TypeError(f"names of classes are texts, got {wrong[0]!r}")
    if not checked:
        raise ValueError("classes must hold at least one class")
    if len(set(checked)) != len(checked):
        raise ValueError(f"classes must differ, got {list(checked)}")
    return tuple(map(str, checked))


def _to_whole_number(name: str, count: Any) -> int:
    """Return a whole number of Python, numpy or torch as an int; 3.0 is a whole number, too."""
    try:
        number = math.nan if isinstance(count, str) else float(count)
    except (TypeError, ValueError):
        number = math.nan
    if not number.is_integer():
        raise TypeError(f"{name} must be whole numbers, got {count!r}")
    return int(number)


def labels(app: ClientApp) -> Callable[[Callable[[Context], SiteLabels]], Callable[[Context], SiteLabels]]:
    """Let a ``ClientApp`` answer the coordinator's question which classes this site labels.

    Used as a decorator of a function that gets Flower's ``Context`` and returns :class:`SiteLabels`::

        @labels(app)
        def labelled(context: Context) -> SiteLabels:
            return SiteLabels(("atelectasis", "effusion"))

    Raises:
        TypeError: If ``app`` is no ``ClientApp``: ``@labels`` without ``(app)``.
    """
    if not isinstance(app, ClientApp):
        raise TypeError(f"write @labels(app), with app your ClientApp; got {type(app).__name__}")

    def decorate(function: Callable[[Context], SiteLabels]) -> Callable[[Context], SiteLabels]:
        @app.query(QUERY)
        def answer(message: Message, context: Context) -> Message:
            site = function(context)
            if not isinstance(site, SiteLabels):
                raise TypeError(f"{function.__name__} must return SiteLabels, got {type(site).__name__}")
            record = ConfigRecord({"classes": list(site.classes), "images": site.images})
            record["positives"] = list(site.positives)
            return Message(RecordDict({RECORD: record}), reply_to=message)

        return function

    return decorate


class UnknownLabels(ValueError):
    """Raised with the nodes whose labels the coordinator cannot use, and why."""


def site_name(node: int) -> str:
    """Return the name of a node as a method's rules know it: names sort as nodes do."""
    return f"{node:020d}"


class LabelRollCall:
    """The labels of all sites that have answered; a site that joins later is asked then.

    Args:
        classes: Names of the head's rows, in their order.
        needs_counts: A site has to state how many images show each class.
        exclusive: An image shows one class at most.

    Attributes:
        answers: Labels of each site, by node.
    """

    def __init__(self, classes: Sequence[str], *, needs_counts: bool, exclusive: bool) -> None:
        self.classes, self._needs_counts, self._exclusive = tuple(classes), needs_counts, exclusive
        self.answers: dict[int, SiteLabels] = {}

    def ask(self, grid: Grid, nodes: Iterable[int], timeout: float) -> None:
        """Ask the nodes that have not answered yet.

        Args:
            timeout: Seconds to wait for the answers.

        Raises:
            UnknownLabels: If a node does not answer, or labels a class that the model has no row for.
        """
        new = sorted(set(nodes) - self.answers.keys())
        if not new:
            return
        kind = f"{MessageType.QUERY}.{QUERY}"
        questions = [Message(RecordDict(), message_type=kind, dst_node_id=node) for node in new]
        replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(questions, timeout=timeout)}
        silence = f"no reply within {timeout:g} s"
        if faults := [fault for node in new if (fault := self._note(node, replies.get(node), silence))]:
            raise UnknownLabels("\n".join(faults))

    def _note(self, node: int, reply: Message | None, silence: str) -> str:
        """Store a node's answer; return what is wrong with it, or an empty string."""
        if reply is None or reply.has_error():
            reason = silence if reply is None else shorten_error(reply.error.reason or "")
            return f"node {node} did not say which classes it labels: {reason}"
        record: dict[str, Any] = {"classes": (), **reply.content.config_records.get(RECORD, {})}
        try:
            site = SiteLabels(**record)
        except (TypeError, ValueError) as error:
            return f"node {node} sent labels that cannot be read: {error}"
        if unknown := [name for name in site.classes if name not in self.classes]:
            return f"node {node} labels {unknown}; the model's rows are {list(self.classes)}"
        if self._needs_counts and not site.positives:
            return f"node {node} sent no counts: this strategy needs positives and images in its SiteLabels"
        if self._needs_counts and self._exclusive and (shown := sum(site.positives)) > site.images:
            return f"node {node} counts {shown} positives in {site.images} images of classes that exclude one another"
        self.answers[node] = site
        return ""

    @property
    def contract(self) -> LabelContract:
        """Return which of the head's rows each site labels."""
        return LabelContract(
            self.classes, {site_name(node): tuple(a.classes) for node, a in sorted(self.answers.items())}
        )

    @property
    def label_counts(self) -> dict[str, RollCallAnswer]:
        """Return the counts of each site in the form in which a method reads them."""
        counts = dict[str, RollCallAnswer]()
        for node, answer in self.answers.items():
            site, names, positives = site_name(node), tuple(answer.classes), tuple(answer.positives)
            negatives = tuple(answer.images - count for count in positives)
            counts[site] = RollCallAnswer("", site, names, names, answer.images, 0, 0, "", "", positives, negatives)
        return counts


def shorten_error(reason: str) -> str:
    """Return a site's error in one line: Flower's reason holds Ray's whole remote traceback.

    Args:
        reason: Flower's text: the type of the exception, and its message in brackets.
    """
    if f"registered with name '{QUERY}'" in reason:
        return "its ClientApp needs @polyclinic.flower.labels(app)"
    parts = re.fullmatch(r"<class '(?:\w+\.)*(.*?)'>:<'(.*)'>", reason, re.DOTALL)
    kind, text = parts.groups() if parts else ("no reason given", reason)
    lines = [line.strip().rpartition(" occurred. Message: ")[2] for line in text.splitlines() if line.strip()]
    if not lines:
        return kind
    return f"{kind}: {lines[0]}" if parts and len(lines) == 1 else lines[-1]  # of a traceback the end
