"""Random changes to training images, a whole batch at once on its own device, in pixel space.

After Kulkarni et al., "Surgical Aggregation", ML4H 2024, whose Keras layers come in this order: rotation, horizontal
flip, zoom, contrast; our translation stands before contrast. All but contrast make up one sampling grid, so an image
is interpolated once, where Keras does it once per layer; pixels from outside are mirrored in ("reflect").
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from common.data.augmentation.spec import AugmentationSpec
from common.errors import BadInput, Fault
from common.plugins import PLUGIN, TRANSFORMS, loaded

DRAWS = 7
"""Random numbers per image, always as many, so that turning one change off leaves the others as they were."""


def augment(images: Tensor, spec: AugmentationSpec, generator: torch.Generator) -> Tensor:
    """Return changed float pixels ``(batch, channels, height, width)``; the very same tensor if all is off.

    Args:
        images: Float pixels, 0..255.
        spec: How much of what.
        generator: On the CPU, wherever the images are, so that a GPU makes the same choices.

    Raises:
        BadInput: If the transform of a plug-in is not installed, or returns something else than such images.
    """
    if spec == AugmentationSpec():
        return images
    images = changed(images, spec, torch.rand(DRAWS, len(images), generator=generator))
    return images if spec.transform is None else _transformed(images, spec.transform, generator)


def changed(images: Tensor, spec: AugmentationSpec, draws: Tensor) -> Tensor:
    """Return ``images`` changed as the random numbers say, without drawing any.

    Args:
        images: Float pixels ``(batch, channels, height, width)``.
        spec: How much of what.
        draws: ``(7, batch)`` in [0, 1): turn, what lies below comes up, what lies right comes left, height, width,
            contrast (in each of these 0.5 changes nothing, 0 and 1 are the extremes), and mirror (below 0.5).
    """
    assert images.is_floating_point(), images.dtype
    turn, shift_y, shift_x, zoom_y, zoom_x, contrast = (2 * draws[:6] - 1).unbind()  # each (batch,), in [-1, 1)
    mirrored = (draws[6] < 0.5) & spec.horizontal_flip
    if spec.rotation or spec.zoom or spec.translate:
        linear = rotations(turn * spec.rotation, images) @ _scalings(zoom_y * spec.zoom, zoom_x * spec.zoom, mirrored)
        shift = torch.stack((shift_x, shift_y), 1)[:, :, None] * 2 * spec.translate  # (batch, 2, 1); a side is 2 wide
        images = sampled(images, torch.cat((linear, linear @ shift), 2))
    elif spec.horizontal_flip:
        images = torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(3), images)
    return _with_contrast(images, 1 + contrast * spec.contrast) if spec.contrast else images


def _transformed(images: Tensor, name: str, generator: torch.Generator) -> Tensor:
    came = loaded(TRANSFORMS, name.removeprefix(PLUGIN))(images, generator)
    if not isinstance(came, Tensor) or came.shape != images.shape or not came.is_floating_point():
        got = f"{came.dtype} {tuple(came.shape)}" if isinstance(came, Tensor) else type(came).__name__
        problem = f'"{name}" made {got} of float pixels {tuple(images.shape)}; shape and kind must stay.'
        raise BadInput([Fault("augmentation.transform", problem)])
    return came.to(images)


def rotations(turns: Tensor, images: Tensor) -> Tensor:
    """Matrices ``(batch, 2, 2)`` from output to input places; x and y run from -1 to 1 for any sides of the image."""
    angles = 2 * math.pi * turns
    cos, sin = angles.cos(), angles.sin()
    aspect = images.shape[2] / images.shape[3]
    return torch.stack((cos, -sin * aspect, sin / aspect, cos), 1).reshape(-1, 2, 2)


def _scalings(zoom_y: Tensor, zoom_x: Tensor, mirrored: Tensor) -> Tensor:
    """Diagonal matrices ``(batch, 2, 2)``: flip, then zoom; a positive zoom shows more than the original."""
    sign = 1 - 2 * mirrored.float()
    return torch.diag_embed(torch.stack((sign * (1 + zoom_x), 1 + zoom_y), 1))


def sampled(images: Tensor, transforms: Tensor) -> Tensor:
    """Sample bilinearly at transformed places; ``transforms`` is ``(batch, 2, 3)``."""
    grid = functional.affine_grid(transforms.to(images), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _with_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Stretch about the mean of each channel of each image."""
    mean = images.mean((2, 3), keepdim=True)
    return mean + (images - mean) * factors.to(images)[:, None, None, None]
