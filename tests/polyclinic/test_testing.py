"""The checks for authors of plug-ins: a sound package passes, and each kind of mistake is found and named."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.errors import BadInput
from polyclinic import testing
from polyclinic.data import LabelledImages
from tests.third_parties import install, put_in


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site-packages", monkeypatch)


def test_a_sound_package_passes(tmp_path: Path) -> None:
    testing.check_network("stairs", channels=1, image_size=16)
    testing.check_loss("absolute")
    testing.check_dataset("stripes", tmp_path, {"images": 100})
    testing.check_metric("youden")


@pytest.mark.parametrize(
    "check",
    [testing.check_network, testing.check_loss, testing.check_metric, lambda name: testing.check_dataset(name, Path())],
)
def test_one_that_is_not_installed_is_named(check: Callable[[str], None]) -> None:
    with pytest.raises(BadInput, match="nobodys"):
        check("nobodys")


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


@pytest.mark.parametrize(
    ("network", "problem"),
    [
        (unseeded, "two networks of one seed differ"),
        (lambda channels, size: Hidden(float(drawn.random())), "beside parameters and running statistics is lost"),
        (lambda channels, size: flat(channels, size, Neighbours), "an image's features depend on others"),
        (lambda channels, size: flat(channels, size, Idle), "no gradient reaches backbone.spare.weight"),
    ],
)
def test_a_mistake_in_a_network_is_named(
    network: Callable[[int, int], nn.Module], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(monkeypatch, "network", network)
    with pytest.raises(AssertionError, match=problem):
        testing.check_network("stairs", channels=1, image_size=16)


def mean_square(logits: Tensor, labels: Tensor) -> Tensor:
    return ((logits - labels.nan_to_num()) ** 2)[~labels.isnan()].mean()


def writes(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    value = mean_square(logits, labels)
    labels[0, 0] = 7
    return value


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (lambda logits, labels, annotated: 1.0, "returns float"),
        (lambda logits, labels, annotated: logits.mean(dim=1), r"of shape \(16,\)"),
        (lambda logits, labels, annotated: (logits - labels).square().mean(), "is nan"),
        (lambda logits, labels, annotated: logits.square().mean(), "moves logits whose label is unknown"),
        (writes, "changes the labels"),
        (lambda logits, labels, annotated: mean_square(logits, labels) * float(drawn.random()), "the second time"),
    ],
)
def test_a_mistake_in_a_loss_is_named(loss: Callable[..., Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, "absolute", loss)
    with pytest.raises(AssertionError, match=problem):
        testing.check_loss("absolute")


def changing(folder: Path, options: Mapping[str, Any]) -> LabelledImages:
    pixels = drawn.integers(0, 255, (60, 8, 8), dtype=np.uint8)
    return LabelledImages(pixels, np.eye(2, dtype=np.float32)[np.arange(60) % 2], ("a", "b"))


def of_parts(*parts: str) -> Callable[..., LabelledImages]:
    """Images with the one class in every one of them."""
    count = 5 * len(parts)
    images = LabelledImages(np.zeros((count, 8, 8), np.uint8), np.ones((count, 1), np.float32), ("a",), parts=parts * 5)
    return lambda folder, options: images


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        (changing, "differs when it is read again"),
        (of_parts("train", "validation"), "no image in the test part"),
        (of_parts("train", "validation", "test"), "no class has a positive and a negative"),
    ],
)
def test_a_mistake_in_a_data_set_is_named(
    dataset: Callable[..., LabelledImages], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(monkeypatch, "stripes", dataset)
    with pytest.raises(AssertionError, match=problem):
        testing.check_dataset("stripes", tmp_path)


def test_a_mistake_in_a_metric_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, "youden", lambda scores, labels: scores[0])
    with pytest.raises(AssertionError, match="with the images in another order"):
        testing.check_metric("youden")
    put_in(monkeypatch, "youden", lambda scores, labels: 1 / (scores.std() - scores.std()))
    with pytest.raises(BadInput, match="plugin:youden"):
        testing.check_metric("youden")
