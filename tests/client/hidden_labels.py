"""A hospital whose labels of hidden classes can differ while all else is the same."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.wire.records import TrainReply, TrainRequest
from tests.client.rounds import images, record_of, send

IMAGES, FEW = 40, 5
Labels = NDArray[np.float32]


def several_classes_an_image(classes: int, shown: int) -> Labels:
    """So few patients show the last class but one, and as few are without the last; others are in half of the images.

    With two classes only one is hidden.
    """
    labels = np.zeros((IMAGES, classes), np.float32)
    labels[::2] = 1
    labels[:, -2] = 0
    labels[5 : 5 + shown, -2] = 1
    if classes > 2:
        labels[:, -1] = 1
        labels[9 : 9 + shown, -1] = 0
    return labels


def one_class_an_image(classes: int, shown: int) -> Labels:
    """So few patients show the last class; the first is hidden with it, since the counts add up."""
    rows = np.arange(IMAGES) % (classes - 2) + 1
    rows[: 2 * FEW] = 0
    rows[:shown] = classes - 1
    return np.eye(classes, dtype=np.float32)[rows]


def hospital(folder: Path, classes: Sequence[str], labels: Labels, *, turned: bool = False, **policy: Any) -> Site:
    """A hospital that does not train on labels of hidden classes.

    Args:
        turned: The validation part and the test part are of other images, with the opposite labels.
    """
    site_policy = SitePolicy(**{"smallest_count": FEW, "networks": ("*",), "train_hidden_classes": False, **policy})
    parts = []
    for number, count in enumerate((len(labels), 16, 16)):
        other = turned and number > 0
        pixels = images(number + 9 * other, count, ("bright", "dark"))  # of which the labels here say nothing
        own_labels = 1 - labels[:count] if other else labels[:count]
        parts.append(replace(pixels, labels=own_labels, class_names=tuple(classes)))
    return Site(LabelDeclaration("site-1", tuple(classes)), *parts, folder, policy=site_policy, durable=False)


def sent(at: Site, requests: Iterable[TrainRequest]) -> list[dict[str, bytes]]:
    """What each reply says of training, and by how many images it weighs; validation figures are the meter's."""
    replies = []
    for request in requests:
        reply = record_of(send(at, "train", request), TrainReply)
        arrays = {**reply.update.to_named_arrays(), **reply.statistics}
        replies.append({name: array.tobytes() for name, array in arrays.items()})
        replies[-1] |= {"epochs": str(reply.epochs).encode(), "train_samples": str(reply.train_samples).encode()}
    return replies
