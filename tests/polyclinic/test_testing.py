"""The checks for authors of plug-ins: a sound package passes, and each kind of mistake is found and named."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyclinic import testing
from polyclinic.common.errors import BadInput
from polyclinic.data import LabelledImages
from tests.third_parties import install, put_in


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site-packages", monkeypatch)


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "network": lambda name, folder: testing.check_network(name, channels=1, image_size=16),
    "absolute": lambda name, folder: testing.check_loss(name),
    "stripes": lambda name, folder: testing.check_dataset(name, folder, {"images": 100}),
    "youden": lambda name, folder: testing.check_metric(name),
}
"""Part of the package -> its check."""
NAMES = {"network": "stairs"}
"""Entry points that have another name than their part."""


def check(part: str, folder: Path) -> None:
    CHECKS[part](NAMES.get(part, part), folder)


@pytest.mark.parametrize("part", CHECKS)
def test_a_sound_part_passes_and_one_that_is_not_installed_is_named(part: str, tmp_path: Path) -> None:
    check(part, tmp_path)
    with pytest.raises(BadInput, match="nobodys"):
        CHECKS[part]("nobodys", tmp_path)


class Hidden(nn.Module):
    """Holds a factor beside its parameters."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.inner = factor, flat(1, 16)

    def forward(self, images: Tensor) -> Tensor:
        return self.factor * self.inner(images)


class Neighbours(nn.Sequential):
    """Takes the mean over the batch from each image."""

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = super().forward(images)
        return features - features.mean(dim=0)


class Idle(nn.Sequential):
    """Has a layer that nothing goes through."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.spare = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        for part in list(self)[:2]:
            images = part(images)
        return images


def flat(channels: int, size: int, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return kind(nn.Flatten(), nn.Linear(channels * size * size, 8))


drawn = np.random.default_rng(0)


def unseeded(channels: int, size: int) -> nn.Module:
    network = flat(channels, size)
    with torch.no_grad():
        network[1].bias.copy_(torch.from_numpy(drawn.random(8)))
    return network


def mean_square(logits: Tensor, labels: Tensor) -> Tensor:
    return ((logits - labels.nan_to_num()) ** 2)[~labels.isnan()].mean()


def writes(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    value = mean_square(logits, labels)
    labels[0, 0] = 7
    return value


def changing(folder: Path, options: Mapping[str, Any]) -> LabelledImages:
    pixels = drawn.integers(0, 255, (60, 8, 8), dtype=np.uint8)
    return LabelledImages(pixels, np.eye(2, dtype=np.float32)[np.arange(60) % 2], ("a", "b"))


def of_parts(*parts: str) -> Callable[..., LabelledImages]:
    """Images with the one class in every one of them."""
    count = 5 * len(parts)
    pictures = np.random.default_rng(0).integers(0, 256, (count, 8, 8), np.uint8)
    images = LabelledImages(pictures, np.ones((count, 1), np.float32), ("a",), parts=parts * 5)
    return lambda folder, options: images


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("network", unseeded, "two networks of one seed differ"),
        ("network", lambda *size: Hidden(float(drawn.random())), "beside parameters and running statistics is lost"),
        ("network", lambda *size: flat(*size, Neighbours), "an image's features depend on others"),
        ("network", lambda *size: flat(*size, Idle), "no gradient reaches backbone.spare.weight"),
        ("absolute", lambda *three: 1.0, "returns float"),
        ("absolute", lambda logits, *more: logits.mean(dim=1), r"of shape \(16,\)"),
        ("absolute", lambda logits, labels, annotated: (logits - labels).square().mean(), "is nan"),
        ("absolute", lambda logits, *more: logits.square().mean(), "moves logits whose label is unknown"),
        ("absolute", writes, "changes the labels"),
        ("absolute", lambda *three: mean_square(*three[:2]) * float(drawn.random()), "the second time"),
        ("stripes", changing, "differs when it is read again"),
        ("stripes", of_parts("train", "validation"), "no image in the test part"),
        ("stripes", of_parts("train", "validation", "test"), "no class has a positive and a negative"),
        ("youden", lambda scores, labels: scores[0], "with the images in another order"),
        ("youden", lambda scores, labels: 1 / (scores.std() - scores.std()), "plugin:youden"),
    ],
)
def test_a_mistake_is_named(
    part: str, value: Callable[..., Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(monkeypatch, part, value)
    with pytest.raises((AssertionError, BadInput), match=problem):
        check(part, tmp_path)
