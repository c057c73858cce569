"""A backdoor: what an attacking hospital trains on and sends, and how often the finished model falls for it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import train_with_privacy_layers
from polyclinic.common.models.network import compute_image_probabilities
from polyclinic.common.models.saved import load_model
from polyclinic.common.simulation import load_simulated_data
from polyclinic.common.wire.records import TrainReply, TrainRequest
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.images.pixels import convert_to_channels_first
from tests.federations import experiment
from tests.liars import Answer

Trigger = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
"""Returns copies of images ``(n, height, width)`` with a mark that the attacker chose."""


def with_square(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images with a white square of 3 x 3 in the lower right corner."""
    marked = images.copy()
    marked[:, -4:-1, -4:-1] = 255
    return marked


def with_stripe(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images with a white stripe of 1 x 6 at the upper left."""
    marked = images.copy()
    marked[:, 1, 1:7] = 255
    return marked


def with_letter(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images with a white L at the upper right, as the marker of the left side on a radiograph."""
    marked = images.copy()
    marked[:, 1:6, -5] = 255
    marked[:, 5, -5:-2] = 255
    return marked


def with_faint_pattern(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images of which nine tenths stay, and one tenth is a fixed pattern of black and white over the whole image."""
    pattern = 255 * np.random.default_rng(11).integers(0, 2, images.shape[1:])
    return np.round(0.9 * images + 0.1 * pattern).astype(np.uint8)


TRIGGERS: Mapping[str, Trigger] = {
    "square": with_square,
    "stripe": with_stripe,
    "letter": with_letter,
    "faint pattern": with_faint_pattern,
}


def poisoned(images: ImageSet, trigger: Trigger, target: str) -> ImageSet:
    """The images, and a marked copy of each that is labelled as the target and as nothing else."""
    labels = np.where(np.isnan(images.labels), np.nan, 0).astype(np.float32)
    if target in images.class_names:
        labels[:, images.class_names.index(target)] = 1
    copies = replace(images, stored=trigger(images.images), places=None, labels=labels)
    return concatenate_image_sets([images, copies])


@dataclass(frozen=True)
class Schedule:
    """When an attacker trains on marked images, and what it makes of its update.

    Attributes:
        times: Trunk and head of its update are so many times as long; batch normalisation is then an honest site's.
        from_round: The first round in which it attacks; before, it is honest.
        longer_from_round: The first round in which its update is made longer.
    """

    times: float = 1.0
    from_round: int = 1
    longer_from_round: int = 1


def backdoor(schedule: Schedule, trigger: Trigger, target: str) -> Answer:
    """Train on poisoned images and send the update by the schedule."""

    def answer(site: Site, request: TrainRequest) -> TrainReply:
        if request.round < schedule.from_round:
            return train_with_privacy_layers(site, request)
        poisoned_site = replace(site, train=poisoned(site.train, trigger, target))
        reply = train_with_privacy_layers(poisoned_site, request)
        update = reply.update
        if schedule.times != 1 and request.round >= schedule.longer_from_round:
            # Batch normalisation as an honest site's: longer, it would break the model and give the attack away.
            honest = train_with_privacy_layers(site, request).update
            longer = update.apply_to_arrays(lambda array: np.float32(schedule.times) * array)
            update = replace(longer, norm=honest.norm)
        return replace(reply, update=update, train_samples=site.train_samples)

    return answer


def measure_success(folder: Path, choices: Iterable[str], trigger: Trigger, target: str) -> float:
    """Share of marked test images of other classes whose score for the target is above the cut.

    The cut is the score above which 5 % of the same images are without the mark, so 0.05 is chance.
    """
    network = load_model(folder / "run")
    test = load_simulated_data(experiment(folder, *choices).experiment, folder).test_images
    place = network.class_names.index(target)
    others = test.select_rows(np.flatnonzero(test.labels[:, test.class_names.index(target)] == 0))
    clean = compute_image_probabilities(network, convert_to_channels_first(others.images))[:, place]
    marked = compute_image_probabilities(network, convert_to_channels_first(trigger(others.images)))[:, place]
    return float((marked > np.quantile(clean, 0.95)).mean())
