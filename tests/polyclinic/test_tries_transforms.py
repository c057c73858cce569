"""Transforms of training images as people have them: seeded, called with what they expect, or named and refused."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import monai.transforms
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import v2

import polyclinic as pc
from polyclinic.common.plugins import PLUGIN_PREFIX, TRANSFORMS, register_local_plugin
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.data.images.augmentation import augment_images_weakly
from polyclinic.data.images.user_transform import takes_batch_and_generator
from tests.polyclinic.pictures import SMALL, pictures

IMAGES = 255 * torch.rand(16, 3, 8, 6, generator=torch.Generator().manual_seed(5))


def changed(transform: Any, seed: int) -> Tensor:
    name = PLUGIN_PREFIX + register_local_plugin(TRANSFORMS, transform)
    return augment_images_weakly(IMAGES, AugmentationSpec(transform=name), torch.Generator().manual_seed(seed))


class Own:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()

    def __call__(self, image: Tensor) -> Tensor:
        return image * float(self.random.uniform(0.5, 1))


class OfAModule(nn.Module):
    """A transform of batches with a default."""

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return images * torch.rand(len(images), 1, 1, 1, generator=generator)


class Kornia(nn.Module):
    """As kornia's: parameters by name, and a batch of one for one image."""

    def forward(self, *images: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
        image = images[0].reshape(-1, *images[0].shape[-3:])
        return image.flip(-1) if torch.rand(()) < 0.5 else image


# The first shape that the transform gets, of 16 images of (3, 8, 6).
ONE, ALL = (3, 8, 6), (16, 3, 8, 6)
SEEDED: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "MONAI RandFlip": (lambda: monai.transforms.RandFlip(prob=0.5, spatial_axis=1), ONE),
    "MONAI RandRotate": (lambda: monai.transforms.RandRotate(0.4, prob=0.5), ONE),
    "MONAI RandGaussianNoise": (lambda: monai.transforms.RandGaussianNoise(prob=0.5, std=9.0), ONE),
    "MONAI Compose": (
        lambda: monai.transforms.Compose([monai.transforms.RandFlip(0.5, 0), monai.transforms.RandZoom(0.5)]),
        ONE,
    ),
    "torchvision v1": (lambda: transforms.Compose([transforms.RandomRotation(30)]), ONE),
    "torchvision v2": (lambda: v2.Compose([v2.RandomHorizontalFlip(), v2.RandomAffine(20)]), ONE),
    "as kornia's": (Kornia, ONE),
    "a generator of its own": (Own, ONE),
    "numpy": (lambda: lambda image: image * float(np.random.uniform(0.5, 1)), ONE),
    "random": (lambda: lambda image: image.flip(-1) if random.random() < 0.5 else image, ONE),
    "torch": (lambda: lambda image: image * torch.rand(()), ONE),
    "our generator": (lambda: lambda images, generator: images * torch.rand((), generator=generator), ALL),
    "two arguments": (lambda: lambda x, g: x * torch.rand(len(x), 1, 1, 1, generator=g), ALL),
    "two arguments, and numpy": (lambda: lambda images, rng: images * float(np.random.uniform(0.5, 1)), ALL),
    "a module of batches": (OfAModule, ALL),
}


@pytest.mark.parametrize(("make", "shape"), SEEDED.values(), ids=SEEDED)
def test_a_transform_follows_from_the_seed_and_gets_what_it_expects(
    make: Callable[[], Any], shape: tuple[int, ...]
) -> None:
    transform = make()
    before = IMAGES.clone()
    first, other, again = (changed(transform, seed) for seed in (1, 2, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert type(first) is Tensor
    assert first.shape == IMAGES.shape
    assert torch.equal(IMAGES, before)
    assert (ALL if takes_batch_and_generator(transform) else ONE) == shape


def test_a_flip_of_monai_flips_the_axis_that_it_names_image_by_image() -> None:
    result = changed(monai.transforms.RandFlip(prob=0.5, spatial_axis=1), 3)
    is_flipped = [torch.equal(image, given.flip(2)) for image, given in zip(result, IMAGES, strict=True)]
    is_same = [torch.equal(image, given) for image, given in zip(result, IMAGES, strict=True)]
    assert [flipped or same for flipped, same in zip(is_flipped, is_same, strict=True)] == [True] * len(IMAGES)
    assert 0 < sum(is_flipped) < len(IMAGES)


def test_a_partial_is_called_by_the_arguments_that_it_leaves() -> None:
    def fade(images: Tensor, generator: torch.Generator, by: float) -> Tensor:
        return images * by

    assert takes_batch_and_generator(partial(fade, by=0.5))
    assert torch.equal(changed(partial(fade, by=0.5), 1), IMAGES * 0.5)


def reseed(image: Tensor) -> Tensor:
    return image * float(np.random.default_rng().uniform(0.5, 1))  # of the operating system


def run(out: Path, **more: Any) -> pc.FinishedRun:
    return pc.simulate(SMALL, dataset=pictures(), out=out, **more)


def test_a_random_transform_of_monai_makes_the_same_model_again_and_resumes(tmp_path: Path) -> None:
    flip = monai.transforms.RandFlip(prob=0.5, spatial_axis=1)
    first, second = (run(tmp_path / name, transform=flip) for name in ("first", "second"))
    assert first.model_sha256 == second.model_sha256
    assert first.model_sha256 != run(tmp_path / "none").model_sha256
    assert first.summary["reproducible"] is True
    assert run(tmp_path / "first", transform=flip, resume=True).model_sha256 == first.model_sha256


def test_a_transform_that_cannot_be_seeded_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "run", transform=reseed)
    assert done.summary["reproducible"] is False
    (note,) = [note for note in done.notes if "not reproducible" in note]
    assert "transform=reseed" in note
    assert note in str(done)


REFUSED: dict[str, tuple[Any, str]] = {
    # wrong model: black pictures
    "ColorJitter of floats from 0 to 1": (v2.ColorJitter(0.3), r"lambda image: 255 \* NAME\(image / 255\)"),
    "ToTensor's range, of batches": (lambda images, generator: images / 255, r"lambda images, generator: 255"),
    # nothing would be changed, or the run would end at its first batch
    "a class": (v2.RandomHorizontalFlip, r"Pass an object of it: transform=RandomHorizontalFlip\(\)"),
    "a transform of dictionaries": (monai.transforms.RandFlipd(keys=["image"]), r"transform\(image\)"),
    "8 bits": (lambda image: image.to(torch.uint8), "made torch.uint8"),
}


@pytest.mark.parametrize(("transform", "words"), REFUSED.values(), ids=REFUSED)
def test_transforms_that_would_train_something_else_are_refused(transform: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(pc.BadInput, match=words):
        run(tmp_path / "run", transform=transform)
    assert not (tmp_path / "run").exists()
