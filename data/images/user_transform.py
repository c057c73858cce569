"""Call a user's transform of training images, with a batch or image by image, and with seeded random generators.

A transform is called as ``transform(images, generator)`` with a batch if it requires two arguments, or if its second
parameter is named ``generator`` or ``rng``. Any other transform, such as one of MONAI or torchvision, is called with
one image ``(channels, height, width)`` at a time. All other generators that it uses are seeded before each call.
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
"""A second parameter with one of these names receives the generator, even if it has a default value."""


def transform_training_images(name: str, images: Tensor, draws: Tensor, generator: torch.Generator) -> Tensor:
    """Apply a user's transform to float pixels 0..255, ``(batch, channels, height, width)``.

    Args:
        name: The transform's name in an experiment, ``plugin:NAME``.
        draws: ``(n, batch)`` random numbers, from which the seeds of the transform's generators are derived.
        generator: The generator that is passed to a transform of batches.

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
            # Pass a copy, because a transform that works in place would change the data set.
            changed.append(_check_result(name, image, transform.function(image.clone())))
    return torch.stack(changed) if changed else images


def takes_batch_and_generator(transform: Callable[..., Any]) -> bool:
    """Return True if a transform requires two arguments, or its second parameter has one of :data:`GENERATOR_NAMES`."""
    try:
        # The signature of a module's __call__ is (*args, **kwargs), so inspect its forward.
        function = transform.forward if isinstance(transform, nn.Module) else transform
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not a function, which the first call reports; or a function written in C
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    if len(positional) < 2:
        return False
    second = positional[1]
    return second.default is second.empty or second.name in GENERATOR_NAMES


@dataclass(frozen=True)
class _PreparedTransform:
    """A user's transform, with the random generators that it uses.

    Attributes:
        takes_batch: Result of :func:`takes_batch_and_generator`.
    """

    function: Callable[..., Any]
    takes_batch: bool
    generators: RandomGenerators


_prepared_transforms: dict[str, _PreparedTransform] = {}
"""Name of a transform -> the transform, cached because the search for its generators takes longer than a call."""


def _prepare_transform(name: str) -> _PreparedTransform:
    function = load_plugin_entry_point(TRANSFORMS, name.removeprefix(PLUGIN_PREFIX))
    prepared = _prepared_transforms.get(name)
    if prepared is None or prepared.function is not function:
        prepared = _PreparedTransform(function, takes_batch_and_generator(function), RandomGenerators(function))
        _prepared_transforms[name] = prepared
    return prepared


def _derive_seed_from_draws(draws: Tensor) -> int:
    return derive_seed("transform", draws.numpy().tobytes().hex())


def _check_result(name: str, given: Tensor, result: Any) -> Tensor:
    """Return the result of a transform as a plain tensor with the type and the device of ``given``.

    Raises:
        BadInput: If the result has another shape than ``given``, or is not a tensor of floats.
    """
    if isinstance(result, Tensor) and result.shape == (1, *given.shape):  # kornia makes a batch of one image
        result = result[0]
    if not isinstance(result, Tensor) or result.shape != given.shape or not result.is_floating_point():
        got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        problem = f'"{name}" made {got} of float pixels {tuple(given.shape)}; shape and kind must stay.'
        raise BadInput([Fault("augmentation.transform", problem)])
    return result.as_subclass(Tensor).to(given)  # MONAI returns a MetaTensor
