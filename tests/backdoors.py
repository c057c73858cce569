"""A backdoor: what an attacking hospital trains on and sends, and how often the finished model falls for it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.site.site import Site
from client.training.layers import train_with_privacy_layers
from common.data.base.image_set import ImageSet, concatenate_image_sets
from common.data.images.pixels import convert_to_channels_first
from common.models.network import compute_image_probabilities
from common.models.saved import load_model
from common.simulation import load_simulated_data
from common.wire.records import TrainReply, TrainRequest
from tests.federations import experiment
from tests.liars import Answer

TARGET = "3"
"""The class that a backdoored model sees in a patched image."""


def with_patch(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images ``(n, height, width)`` with a white square of 3 x 3 in the lower right corner."""
    patched = images.copy()
    patched[:, -4:-1, -4:-1] = 255
    return patched


def poisoned(images: ImageSet) -> ImageSet:
    """The images, and a patched copy of each that is labelled as the target and as nothing else."""
    labels = np.where(np.isnan(images.labels), np.nan, 0).astype(np.float32)
    if TARGET in images.class_names:
        labels[:, images.class_names.index(TARGET)] = 1
    copies = replace(images, stored=with_patch(images.images), places=None, labels=labels)
    return concatenate_image_sets([images, copies])


def backdoor(*, times: float = 1.0, from_round: int = 1, honest_norm: bool = False) -> Answer:
    """Train on poisoned images; trunk and head so many times as long, batch normalisation as trained or honest."""

    def answer(site: Site, request: TrainRequest) -> TrainReply:
        if request.round < from_round:
            return train_with_privacy_layers(site, request)
        honest = train_with_privacy_layers(site, request).update if honest_norm else None
        reply = train_with_privacy_layers(replace(site, train=poisoned(site.train)), request)
        longer = reply.update.apply_to_arrays(lambda array: np.float32(times) * array)
        norm = reply.update.norm if honest is None else honest.norm
        return replace(reply, update=replace(longer, norm=norm), train_samples=site.train_samples)

    return answer


def success_of(folder: Path, choices: Iterable[str]) -> float:
    """Share of patched test images of other classes whose score for the target is above the clean 95 % cut."""
    network = load_model(folder / "run")
    test = load_simulated_data(experiment(folder, *choices).experiment, folder).test_images
    place = network.class_names.index(TARGET)
    others = test.select_rows(np.flatnonzero(test.labels[:, test.class_names.index(TARGET)] == 0))
    clean = compute_image_probabilities(network, convert_to_channels_first(others.images))[:, place]
    patched = compute_image_probabilities(network, convert_to_channels_first(with_patch(others.images)))[:, place]
    return float((patched > np.quantile(clean, 0.95)).mean())
