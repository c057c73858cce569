"""Calls a user's transform of training images with a batch, or image by image, and with seeded generators.

A transform gets a batch and a generator, ``transform(images, generator)``, if it needs two arguments or calls the
second ``generator`` or ``rng``. Any other, such as those of MONAI and torchvision, gets one image ``(channels, height,
width)`` at a time. All other generators that the transform reaches are seeded before each call.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.plugins import PLUGIN_PREFIX, TRANSFORMS, load_plugin_entry_point
from polyclinic.common.system.hashing import derive_seed
from polyclinic.data.images.random_generators import RandomGenerators

GENERATOR_NAMES = ("generator", "rng")
"""Names of a second parameter that gets the generator, even if it has a default."""


def transform_training_images(name: str, images: Tensor, draws: Tensor, generator: torch.Generator) -> Tensor:
    """Apply a user's transform to float pixels 0..255, ``(batch, channels, height, width)``.

    Args:
        name: The transform's name in an experiment, ``plugin:NAME``.
        draws: ``(n, batch)`` random numbers, from which follow the seeds of the generators that the transform reaches.
        generator: The generator that a transform of batches gets.

    Raises:
        BadInput: If the transform is not installed, or returns another shape or type.
    """
    transform = _prepare_transform(name)
    if transform.takes_batch:
        with transform.generators.use_seed(_derive_seed_from_draws(draws)):
            return _check_result(name, images, transform.function(images, generator))
    changed = []
    for number, image in enumerate(images):
        with transform.generators.use_seed(_derive_seed_from_draws(draws[:, number])):
            # A copy: a transform that changes its image in place would change the data set.
            changed.append(_check_result(name, image, transform.function(image.clone())))
    return torch.stack(changed) if changed else images


def takes_batch_and_generator(transform: Callable[..., Any]) -> bool:
    """Return True if a transform needs two arguments, or calls its second parameter as in :data:`GENERATOR_NAMES`."""
    try:
        # The signature of a module's __call__ is that of any arguments.
        function = transform.forward if isinstance(transform, nn.Module) else transform
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # no function, which its first call reports; or one of C
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    second = positional[1]
    return second.default is second.empty or second.name in GENERATOR_NAMES


@dataclass(frozen=True)
class _PreparedTransform:
    """A user's transform, how it is called, and the generators that it reaches."""

    function: Callable[..., Any]
    takes_batch: bool
    generators: RandomGenerators


_prepared: dict[str, _PreparedTransform] = {}
"""The last transform of each name; the search for its generators takes longer than a call."""


def _prepare_transform(name: str) -> _PreparedTransform:
    function = load_plugin_entry_point(TRANSFORMS, name.removeprefix(PLUGIN_PREFIX))
    prepared = _prepared.get(name)
    if prepared is None or prepared.function is not function:
        prepared = _PreparedTransform(function, takes_batch_and_generator(function), RandomGenerators(function))
        _prepared[name] = prepared
    return prepared


def _derive_seed_from_draws(draws: Tensor) -> int:
    return derive_seed("transform", draws.numpy().tobytes().hex())


def _check_result(name: str, given: Tensor, result: Any) -> Tensor:
    """Return a transform's result as a plain tensor of the type and on the device of ``given``.

    Raises:
        BadInput: If it has another shape, or is no tensor of floats.
    """
    if isinstance(result, Tensor) and result.shape == (1, *given.shape):  # kornia makes a batch of one image
        result = result[0]
    if not isinstance(result, Tensor) or result.shape != given.shape or not result.is_floating_point():
        got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        problem = f'"{name}" made {got} of float pixels {tuple(given.shape)}; shape and kind must stay.'
        raise BadInput([Fault("augmentation.transform", problem)])
    return result.as_subclass(Tensor).to(given)  # MONAI returns a MetaTensor
