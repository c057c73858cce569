"""Query for the classes that each site labels: the strategy sends it once, and the site's ``ClientApp`` answers."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from polyclinic.common.wire.records import RollCallAnswer
from polyclinic.strategies.local.site_method import SiteMethod

LABELS_QUERY = "labels"
"""Name of the Flower query, and of the ``ConfigRecord`` in the answer."""


@dataclass(frozen=True)
class SiteLabels:
    """The classes that a site labels, and its number of positive images for each class.

    Attributes:
        classes: Names of the classes that the site labels.
        positives: Number of training images that show each of ``classes``; only FedSLD needs it.
        images: Number of all training images; only FedSLD needs it.

    Raises:
        ValueError: If ``classes`` is not an ordered list of different names, or a count is negative.
        TypeError: If a count is not an integer.
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
    """Register a function that returns the classes that this site labels, in a ``ClientApp``.

    Use it as a decorator. The function receives Flower's ``Context`` and returns :class:`SiteLabels`::

        @labels(app)
        def labelled(context: Context) -> SiteLabels:
            return SiteLabels(("atelectasis", "effusion"))
    """

    def decorate(function: Callable[[Context], SiteLabels]) -> Callable[[Context], SiteLabels]:
        @app.query(LABELS_QUERY)
        def answer_label_query(message: Message, context: Context) -> Message:
            site = function(context)
            fields = dict[str, Any](classes=[*site.classes], positives=[*site.positives], images=site.images)
            return Message(RecordDict({LABELS_QUERY: ConfigRecord(fields)}), reply_to=message)

        return function

    return decorate


class UnknownLabels(ValueError):
    """Raised if some nodes did not answer with valid classes; the message has the nodes and the reasons."""


def format_node_as_site_name(node: int) -> str:
    """Return the site name that a method uses for a node; names sort in the order of node ids."""
    return f"{node:020d}"


def ask_sites_for_labels(
    grid: Grid, nodes: Iterable[int], timeout: float, classes: Sequence[str], method: SiteMethod
) -> tuple[dict[str, RollCallAnswer], str]:
    """Ask nodes which of the model's classes they label, and wait at most ``timeout`` seconds for the answers.

    Args:
        classes: Class names of the model's head rows.
        method: The site's half of the method, which declares if it needs image counts.

    Returns:
        Site -> answer; and a text with a line for each node without a valid answer. An answer is invalid if it has a
        class that is not in ``classes``, or no image counts although the method needs them.
    """
    kind = f"{MessageType.QUERY}.{LABELS_QUERY}"
    questions = [Message(RecordDict(), message_type=kind, dst_node_id=node) for node in sorted(nodes)]
    faults = dict.fromkeys(sorted(nodes), f"did not say which classes it labels: no reply within {timeout:g} s")
    answers = dict[str, RollCallAnswer]()
    for reply in grid.send_and_receive(questions, timeout=timeout) if questions else ():
        node = reply.metadata.src_node_id
        if reply.has_error():
            faults[node] = f"did not say which classes it labels: {shorten_error(reply.error.reason)}"
            continue
        fields: dict[str, Any] = {"classes": (), **reply.content.config_records.get(LABELS_QUERY, {})}
        try:
            site = SiteLabels(**fields)
            names = tuple(site.classes)
            positives = tuple(site.positives)
            images = site.images
            negatives = tuple(images - count for count in positives)
            name = format_node_as_site_name(node)
            answer = RollCallAnswer("", name, names, names, images, 0, 0, "", "", positives, negatives)
        except (TypeError, ValueError) as error:
            faults[node] = f"sent labels that cannot be read: {error}"
            continue
        needs_counts = method.payload.label_counts
        if unknown := [label for label in names if label not in classes]:
            faults[node] = f"labels {unknown}; the model's rows are {list(classes)}"
        elif needs_counts and not positives:
            faults[node] = "sent no counts: this strategy needs positives and images in its SiteLabels"
        elif needs_counts and method.task == "multi_class" and sum(positives) > images:
            faults[node] = f"counts {sum(positives)} positives in {images} images of classes that exclude one another"
        else:
            answers[name] = answer
            del faults[node]
    return answers, "\n".join(f"node {node} {fault}" for node, fault in faults.items())


def shorten_error(reason: str | None) -> str:
    """Shorten the reason of a Flower error to one line, because the reason may be a complete traceback of Ray."""
    if f"registered with name '{LABELS_QUERY}'" in (reason := reason or ""):
        return "its ClientApp needs @polyclinic.flower.labels(app)"
    # The type of the exception, and its message in brackets.
    parts = re.fullmatch(r"<class '(?:\w+\.)*(.*?)'>:<'(.*)'>", reason, re.DOTALL)
    lines = (parts[2] if parts else reason).strip().splitlines() or [parts[1] if parts else "no reason given"]
    return lines[-1].rpartition(" occurred. Message: ")[2]
