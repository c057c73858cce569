"""Which classes each site labels: the coordinator asks once, a site's ``ClientApp`` answers.

The question is a Flower query named ``labels``; the answer is one ``ConfigRecord``.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from numpy.typing import NDArray

QUERY, RECORD = "labels", "labels"


@dataclass(frozen=True)
class SiteLabels:
    """What a site says of its labels.

    Attributes:
        classes: Names of the classes that it labels.
        positives: Training images that show each of these classes, in the same order; only FedSLD needs it.
        images: Training images in all; only FedSLD needs it.

    Raises:
        TypeError: If names are no list of texts, or a count is no whole number.
        ValueError: If there is no class, a name repeats, or there is not one count for each class.
    """

    classes: Sequence[str]
    positives: Sequence[int] = ()
    images: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", class_names(self.classes))
        object.__setattr__(self, "positives", _counts(self.positives))
        object.__setattr__(self, "images", _count("images", self.images))
        if self.positives and len(self.positives) != len(self.classes):
            raise ValueError(f"{len(self.classes)} classes and {len(self.positives)} counts of positives")
        if any(not 0 <= count <= self.images for count in self.positives):
            raise ValueError(f"positives must be from 0 to images = {self.images}, got {list(self.positives)}")
        if self.positives and not self.images:
            raise ValueError(
                "positives need images, the number of training images in all, above 0: a site without training images "
                "cannot take part, so leave its node out of the federation"
            )


def class_names(given: object) -> tuple[str, ...]:
    """Names of classes, checked.

    Raises:
        TypeError: If they are no list of texts.
        ValueError: If there is none, or one repeats.
    """
    if isinstance(given, str | bytes):
        raise TypeError(f"classes must be a list of names, not the text {given!r}")
    if isinstance(given, Set | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"classes must be a list of names in an order, got {given!r}")
    names = tuple(given)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"names of classes are texts, got {wrong[0]!r}")
    if not names:
        raise ValueError("classes must hold at least one class")
    if len(set(names)) != len(names):
        raise ValueError(f"classes must differ, got {list(names)}")
    return tuple(map(str, names))


def _counts(given: object) -> tuple[int, ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"positives must be a list of whole numbers, got {given!r}")
    return tuple(_count("positives", one) for one in given)


def _count(name: str, given: Any) -> int:
    """A whole number of any kind: Python's, numpy's, a tensor's; 3.0 is one too."""
    try:
        number = float(given) if not isinstance(given, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not number.is_integer():
        raise TypeError(f"{name} must be whole numbers, got {given!r}")
    return int(number)


def labels(app: ClientApp) -> Callable[[Callable[[Context], SiteLabels]], Callable[[Context], SiteLabels]]:
    """Let a ``ClientApp`` answer the coordinator's question which classes this site labels.

    Used as a decorator of a function that gets Flower's ``Context`` and returns :class:`SiteLabels`::

        @labels(app)
        def own(context: Context) -> SiteLabels:
            return SiteLabels(("atelectasis", "effusion"))

    Raises:
        TypeError: If ``app`` is no ``ClientApp``: ``@labels`` without ``(app)``.
    """
    if not isinstance(app, ClientApp):
        raise TypeError(f"write @labels(app), with app your ClientApp; got {type(app).__name__}")

    def decorate(function: Callable[[Context], SiteLabels]) -> Callable[[Context], SiteLabels]:
        @app.query(QUERY)
        def answer(message: Message, context: Context) -> Message:
            said = function(context)
            if not isinstance(said, SiteLabels):
                raise TypeError(f"{function.__name__} must return SiteLabels, got {type(said).__name__}")
            record = ConfigRecord({"classes": list(said.classes), "images": said.images})
            record["positives"] = [int(count) for count in said.positives]
            return Message(RecordDict({RECORD: record}), reply_to=message)

        return function

    return decorate


class UnknownLabels(ValueError):
    """Sites whose labels the coordinator cannot use; says which and why."""


class RollCall:
    """What the sites said of their labels; a site that joins later is asked when it does.

    Args:
        classes: Names of the head's rows, in their order.
        needs_counts: Whether a site has to say how many images show each class.
        exclusive: Whether an image shows one class at most.
    """

    def __init__(self, classes: Sequence[str], needs_counts: bool = False, exclusive: bool = False) -> None:
        self.classes, self._needs_counts, self._exclusive = tuple(classes), needs_counts, exclusive
        self._said: dict[int, SiteLabels] = {}

    def ask(self, grid: Grid, nodes: Iterable[int], timeout: float) -> None:
        """Ask the nodes that have not answered yet.

        Args:
            timeout: Seconds to wait for the answers.

        Raises:
            UnknownLabels: If a node does not answer, or labels a class that the model has no row for.
        """
        new = sorted(set(nodes) - self._said.keys())
        if not new:
            return
        kind = f"{MessageType.QUERY}.{QUERY}"
        asked = [Message(RecordDict(), message_type=kind, dst_node_id=node) for node in new]
        replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(asked, timeout=timeout)}
        faults = [fault for node in new if (fault := self._taken(node, replies.get(node), timeout))]
        if faults:
            raise UnknownLabels("\n".join(faults))

    def _taken(self, node: int, reply: Message | None, timeout: float) -> str:
        """Note a node's answer; return what is wrong with it."""
        if reply is None:
            return f"node {node} did not say which classes it labels: no reply within {timeout:g} s"
        if reply.has_error():
            return f"node {node} did not say which classes it labels: {why(reply.error.reason or '')}"
        record = reply.content.config_records.get(RECORD, ConfigRecord())
        try:
            said = SiteLabels(_words(record, "classes"), _numbers(record, "positives"), _number(record, "images"))
        except (TypeError, ValueError) as error:
            return f"node {node} sent labels that cannot be read: {error}"
        if unknown := [name for name in said.classes if name not in self.classes]:
            return f"node {node} labels {unknown}; the model's rows are {list(self.classes)}"
        if self._needs_counts and not said.positives:
            return f"node {node} told no counts: this strategy needs positives and images in its SiteLabels"
        if self._needs_counts and self._exclusive and sum(said.positives) > said.images:
            shown = sum(said.positives)
            return f"node {node} counts {shown} positives in {said.images} images of classes that exclude one another"
        self._said[node] = said
        return ""

    def __contains__(self, node: int) -> bool:
        return node in self._said

    def of(self, node: int) -> SiteLabels:
        """What a node said.

        Raises:
            KeyError: If it was not asked.
        """
        return self._said[node]

    def owners(self, name: str, nodes: Collection[int]) -> list[int]:
        """Those of the nodes that label a class, in ascending order."""
        return sorted(node for node in nodes if name in self._said[node].classes)

    def annotated(self, node: int) -> NDArray[np.bool_]:
        """Which of the head's rows a node labels, bool ``(classes,)``."""
        return np.array([name in self._said[node].classes for name in self.classes], np.bool_)

    def counts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Positives and images, both ``(sites, classes)`` in ascending order of nodes; NaN where a site tells none."""
        positives = np.full((len(self._said), len(self.classes)), np.nan)
        images = positives.copy()
        for row, (_, said) in enumerate(sorted(self._said.items())):
            for name, count in zip(said.classes, said.positives, strict=False):
                positives[row, self.classes.index(name)] = count
                images[row, self.classes.index(name)] = said.images
        return positives, images

    @property
    def said(self) -> Mapping[int, SiteLabels]:
        """All answers, by node."""
        return dict(self._said)


def why(reason: str) -> str:
    """A site's error in one line: Flower's reason holds Ray's whole remote traceback.

    Args:
        reason: As Flower tells it: the type of the exception, and its text in brackets.
    """
    if f"registered with name '{QUERY}'" in reason:
        return "its ClientApp needs @polyclinic.flower.labels(app)"
    flowers = re.fullmatch(r"<class '(?:\w+\.)*(.*?)'>:<'(.*)'>", reason, re.DOTALL)
    kind, text = flowers.groups() if flowers else ("no reason given", reason)
    lines = [line.strip().rpartition(" occurred. Message: ")[2] for line in text.splitlines() if line.strip()]
    if not lines:
        return kind
    return f"{kind}: {lines[0]}" if flowers and len(lines) == 1 else lines[-1]  # of a traceback the end


def _words(record: ConfigRecord, key: str) -> list[str]:
    value = record.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{key} is no list of texts")
    return [str(one) for one in value]


def _numbers(record: ConfigRecord, key: str) -> list[int]:
    value = record.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise TypeError(f"{key} is no list of whole numbers")
    return [int(one) for one in value]


def _number(record: ConfigRecord, key: str) -> int:
    value = record.get(key, 0)
    if not isinstance(value, int):
        raise TypeError(f"{key} is no whole number")
    return value
