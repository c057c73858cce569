"""Weak and strong random augmentation of a batch of training images, on the images' device.

Weak augmentation follows the Keras layers of Kulkarni et al., "Surgical Aggregation", ML4H 2024, in this order:
rotation, horizontal flip, zoom, contrast; we add a translation before the contrast. All steps but contrast are one
affine transform, so that an image is interpolated once (in Keras once per layer). Reflection fills pixels from outside
the image. A volume is changed in the same way in three dimensions: it is rotated around its first axis, from feet to
head, and mirrored along its last, from right to left.

Strong augmentation is RandAugment (Cubuk et al., CVPR Workshops 2020) followed by Cutout, as in the appendix of Sohn et
al., "FixMatch", NeurIPS 2020: each image gets two of fourteen operations (n = 2), each with a strength drawn uniformly
from its whole range (m = 10), and then a grey square of half the image's side. Departure: reflection fills pixels from
outside the image, which are black in the paper. ``_change_image_saturation`` leaves grey images unchanged.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.data.images.user_transform import transform_training_images

Interpolation = Literal["bilinear", "nearest"]
_WEAK_DRAWS_PER_PICTURE = 7
_WEAK_DRAWS_PER_VOLUME = 9


def count_draws_per_image(images: Tensor) -> int:
    """Return the number of random numbers that weak augmentation draws for each image.

    Changes that are off are counted too, so that turning one off does not alter the random numbers of the others.

    Args:
        images: ``(batch, channels, height, width)``, or volumes ``(batch, channels, depth, height, width)``.
    """
    return _WEAK_DRAWS_PER_VOLUME if images.ndim == 5 else _WEAK_DRAWS_PER_PICTURE


def augment_images_weakly(images: Tensor, spec: AugmentationSpec, generator: torch.Generator) -> Tensor:
    """Apply weak random augmentation to float pixels 0..255, ``(batch, channels, height, width)``, or to volumes.

    The input tensor itself is returned if all changes are off.

    Args:
        spec: The kinds of changes and their largest amounts.
        generator: A CPU generator even for images on a GPU, so that the random choices do not depend on the device.

    Raises:
        BadInput: If the user's transform, ``spec.transform``, is not installed or returns another shape or type.
    """
    if spec == AugmentationSpec():
        return images
    draws = torch.rand(count_draws_per_image(images), len(images), generator=generator)
    images = apply_weak_augmentation(images, spec, draws)
    if spec.transform is None:
        return images
    return transform_training_images(spec.transform, images, draws, generator)


def augment_images_with_labels(
    images: Tensor, labels: Tensor, spec: AugmentationSpec, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Apply the same weak random augmentation to images or volumes and to their label maps.

    Label maps are interpolated by the nearest pixel, so that each label stays 1, 0 or NaN. Contrast changes images
    only. One generator gives the same changes as in :func:`augment_images_weakly`.

    Args:
        images: Float pixels 0..255, ``(batch, channels, *spatial)``.
        labels: ``(batch, classes, *spatial)``, NaN for unknown.
    """
    draws = torch.rand(count_draws_per_image(images), len(images), generator=generator)
    geometric = spec.model_copy(update={"contrast": 0.0})
    # An unknown label is -1 during the transform, because NaN would spread by interpolation.
    labels = apply_weak_augmentation(labels.nan_to_num(nan=-1.0), geometric, draws, mode="nearest")
    labels = labels.masked_fill(labels < 0, torch.nan)
    return apply_weak_augmentation(images, spec, draws), labels


def apply_weak_augmentation(
    images: Tensor, spec: AugmentationSpec, draws: Tensor, mode: Interpolation = "bilinear"
) -> Tensor:
    """Apply weak augmentation to float pixels ``(batch, channels, height, width)`` with given random numbers.

    Args:
        mode: How values between pixels are computed.
        spec: The kinds of changes and their largest amounts.
        draws: ``(7, batch)`` in [0, 1): rotation, shift up, shift left, vertical zoom, horizontal zoom, contrast, and
            horizontal flip. In the first six, 0.5 changes nothing, and 0 and 1 are the extremes; the flip applies below
            0.5. Volumes have two more, shift and zoom along their first axis.
    """
    assert images.is_floating_point(), images.dtype
    if images.ndim == 5:
        return _augment_volumes(images, spec, draws, mode)
    turn, shift_y, shift_x, zoom_y, zoom_x, contrast = (2 * draws[:6] - 1).unbind()  # each (batch,), in [-1, 1)
    mirrored = (draws[6] < 0.5) & spec.horizontal_flip
    if spec.rotation or spec.zoom or spec.translate:
        sign = 1 - 2 * mirrored.float()  # first flip, then zoom; a positive zoom shows more than the original
        scales = torch.stack((sign * (1 + zoom_x * spec.zoom), 1 + zoom_y * spec.zoom), 1)
        linear = make_rotation_matrices(turn * spec.rotation, images) @ torch.diag_embed(scales)  # (batch, 2, 2)
        shift = torch.stack((shift_x, shift_y), 1)[:, :, None] * 2 * spec.translate  # (batch, 2, 1); a side is 2 wide
        images = apply_affine_transforms(images, torch.cat((linear, linear @ shift), 2), mode)
    elif spec.horizontal_flip:
        images = torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(3), images)
    return _change_contrast(images, contrast * spec.contrast) if spec.contrast else images


def _change_contrast(images: Tensor, changes: Tensor) -> Tensor:
    """Multiply the distance of each pixel from its channel's mean by 1 plus the change of the image.

    Args:
        changes: ``(batch,)``.
    """
    factors = (1 + changes).to(images).reshape(-1, *[1] * (images.ndim - 1))
    mean = images.mean(tuple(range(2, images.ndim)), keepdim=True)  # of each channel of each image
    return mean + (images - mean) * factors


def _augment_volumes(volumes: Tensor, spec: AugmentationSpec, draws: Tensor, mode: Interpolation) -> Tensor:
    """Apply weak augmentation to volumes ``(batch, channels, depth, height, width)``.

    Args:
        draws: ``(9, batch)``, as in :func:`apply_weak_augmentation`.
    """
    turn, shift_y, shift_x, zoom_y, zoom_x, contrast = (2 * draws[:6] - 1).unbind()  # each (batch,), in [-1, 1)
    shift_z, zoom_z = (2 * draws[7:] - 1).unbind()
    mirrored = (draws[6] < 0.5) & spec.horizontal_flip
    if spec.rotation or spec.zoom or spec.translate:
        sign = 1 - 2 * mirrored.float()
        scales = torch.stack(
            (sign * (1 + zoom_x * spec.zoom), 1 + zoom_y * spec.zoom, 1 + zoom_z * spec.zoom), 1
        )  # (batch, 3), along width, height and depth
        rotation = torch.eye(3).repeat(len(volumes), 1, 1)
        rotation[:, :2, :2] = make_rotation_matrices(turn * spec.rotation, volumes[:, :, 0])
        linear = rotation @ torch.diag_embed(scales)  # (batch, 3, 3)
        shift = torch.stack((shift_x, shift_y, shift_z), 1)[:, :, None] * 2 * spec.translate  # a side is 2 wide
        volumes = apply_affine_transforms(volumes, torch.cat((linear, linear @ shift), 2), mode)
    elif spec.horizontal_flip:
        volumes = torch.where(mirrored.to(volumes.device).reshape(-1, 1, 1, 1, 1), volumes.flip(4), volumes)
    return _change_contrast(volumes, contrast * spec.contrast) if spec.contrast else volumes


def make_rotation_matrices(turns: Tensor, images: Tensor) -> Tensor:
    """Return matrices ``(batch, 2, 2)`` that rotate images without distortion, even if they are not square.

    The matrices map output to input coordinates, both from -1 to 1 across the image.

    Args:
        turns: ``(batch,)`` angles in full turns.
        images: ``(batch, channels, height, width)``; only the aspect ratio is used.
    """
    angles = 2 * math.pi * turns
    cos, sin = angles.cos(), angles.sin()
    aspect = images.shape[2] / images.shape[3]
    return torch.stack((cos, -sin * aspect, sin / aspect, cos), 1).reshape(-1, 2, 2)


def apply_affine_transforms(images: Tensor, transforms: Tensor, mode: Interpolation = "bilinear") -> Tensor:
    """Transform each image by its affine matrix in ``transforms``.

    Args:
        transforms: ``(batch, 2, 3)``; of volumes ``(batch, 3, 4)``.
        mode: How values between pixels are computed.
    """
    grid = functional.affine_grid(transforms.to(images), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode=mode, padding_mode="reflection", align_corners=False)


CHANGES_PER_IMAGE = 2
"""Number of RandAugment operations for each image (n in the paper)."""
HOLE_SHARE = 0.5
"""Side of the Cutout square, as a share of the shorter side of the image."""
HOLE_VALUE = 127.0
"""Value of the pixels in the Cutout square, a middle grey."""
_STRONG_DRAWS_PER_PICTURE = 2 * CHANGES_PER_IMAGE + 2
"""Random numbers for each image: operation and strength of each change, and two coordinates of the Cutout square."""
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601


def augment_images_strongly(images: Tensor, generator: torch.Generator) -> Tensor:
    """Apply RandAugment and Cutout to float pixels ``(batch, channels, height, width)``, which are clamped to 0..255.

    Args:
        generator: A CPU generator even for images on a GPU.
    """
    return apply_strong_augmentation(images, torch.rand(_STRONG_DRAWS_PER_PICTURE, len(images), generator=generator))


def apply_strong_augmentation(images: Tensor, draws: Tensor) -> Tensor:
    """Apply strong augmentation to float pixels ``(batch, channels, height, width)`` with given random numbers.

    Args:
        draws: ``(6, batch)`` in [0, 1): the first operation and its strength, the second operation and its strength,
            and the vertical and horizontal centre of the Cutout square.
    """
    images = images.clamp(0, 255)
    operations = (draws[:-2:2] * len(RANDOM_CHANGES)).long()  # (2, batch), index of the operation
    for operation, strengths in zip(operations, draws[1:-2:2], strict=True):
        before = images
        images = before.clone()
        for number, change in enumerate(RANDOM_CHANGES.values()):
            chosen = (operation == number).nonzero().flatten()
            if len(chosen):
                rows = chosen.to(images.device)
                images[rows] = change(before[rows], strengths[chosen].to(images))
    height, width = images.shape[2:]
    half = HOLE_SHARE * min(height, width) / 2
    rows = torch.arange(height, device=images.device) + 0.5
    columns = torch.arange(width, device=images.device) + 0.5
    inside_y = (rows - draws[-2].to(images)[:, None] * height).abs() < half  # (batch, height)
    inside_x = (columns - draws[-1].to(images)[:, None] * width).abs() < half  # (batch, width)
    return torch.where((inside_y[:, :, None] & inside_x[:, None, :])[:, None], HOLE_VALUE, images)


# ---------------------------------------------------------------------- changes: images, strengths (batch,) in [0, 1)


def _stretch_channel_contrast(images: Tensor, strengths: Tensor) -> Tensor:
    """Stretch the values of each channel to 0..255; a constant channel stays unchanged. ``strengths`` has no effect."""
    low = images.amin((2, 3), keepdim=True)
    high = images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * 255 / (high - low).clamp(min=1e-6), images)


def _equalize_channel_histograms(images: Tensor, strengths: Tensor) -> Tensor:
    """Spread the values of each channel so that all of 0..255 occur about equally often, as ``PIL.ImageOps.equalize``.

    A channel with too few different values stays unchanged. ``strengths`` has no effect. The result equals
    torchvision's ``equalize``. We do not use torchvision, because it takes seconds to import and may not fit the
    installed torch.
    """
    pixels = images.round().long()  # (batch, channels, height, width), 0..255
    values = pixels.flatten(2)  # (batch, channels, height * width)
    counts = values.new_zeros((*values.shape[:2], 256)).scatter_add(2, values, torch.ones_like(values))
    lower = counts.cumsum(2) - counts  # number of pixels below each value
    highest = counts.gather(2, values.amax(2, keepdim=True))  # number of pixels at the channel's highest value
    step = (values.shape[2] - highest) // 255  # pixels for each value of the result; (batch, channels, 1)
    table = ((lower + step // 2) // step.clamp(min=1)).clamp(max=255)
    equalized = table.gather(2, values).view_as(pixels)
    return torch.where(step[..., None] > 0, equalized, pixels).to(images)


def _blend_two_pictures(other: Tensor, images: Tensor, strengths: Tensor) -> Tensor:
    """Blend ``images`` with ``other``; the weight of ``images`` is 0.05 at strength 0, and 0.95 at strength 1."""
    return other + (images - other) * (0.05 + 0.9 * strengths[:, None, None, None])


def _change_image_saturation(images: Tensor, strengths: Tensor) -> Tensor:
    """Blend colour images with their grey version; images of one channel stay unchanged."""
    if images.shape[1] == 1:
        return images
    grey = (images * images.new_tensor(_LUMINANCE).reshape(1, 3, 1, 1)).sum(1, keepdim=True)
    return _blend_two_pictures(grey, images, strengths)


def _change_image_sharpness(images: Tensor, strengths: Tensor) -> Tensor:
    """Blend images with a smoothed copy of themselves; the weight of the original rises with the strength.

    The smoothing kernel of 3x3 pixels weighs the centre 5 and each of the eight neighbours 1.
    """
    sides = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    smooth = (9 * functional.avg_pool2d(sides, 3, stride=1) + 4 * images) / 13
    return _blend_two_pictures(smooth, images, strengths)


def _keep_highest_bits(images: Tensor, strengths: Tensor) -> Tensor:
    """Set the lowest bits of each pixel to 0, so that 4 to 8 remain; fewer bits remain at a low strength."""
    lost_bits = 4 - (5 * strengths).floor()  # (batch,), 0 to 4
    steps = 2 ** lost_bits[:, None, None, None]
    return images - images % steps


def _shear_or_shift_images(images: Tensor, strengths: Tensor, entry: tuple[int, int], maximum: float) -> Tensor:
    """Shear or shift each image by an affine matrix ``(2, 3)``: the identity with one changed entry.

    Args:
        strengths: ``(batch,)``; 0 adds ``-maximum`` to the entry, 0.5 adds 0, and 1 adds ``maximum``.
        entry: Row and column of the changed entry.
        maximum: Largest change of the entry.
    """
    transforms = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    row, column = entry
    transforms[:, row, column] += (2 * strengths - 1) * maximum
    return apply_affine_transforms(images, transforms)


RANDOM_CHANGES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": _stretch_channel_contrast,
    "brightness": lambda images, strengths: _blend_two_pictures(torch.zeros_like(images), images, strengths),
    "colour": _change_image_saturation,
    "contrast": lambda images, strengths: _blend_two_pictures(images.mean((1, 2, 3), keepdim=True), images, strengths),
    "equalized": _equalize_channel_histograms,
    "identity": lambda images, strengths: images,
    "posterized": _keep_highest_bits,
    # By up to 30 degrees in either direction, with a column of zeros for the shift.
    "rotated": lambda images, strengths: apply_affine_transforms(
        images, functional.pad(make_rotation_matrices((2 * strengths - 1) * 30 / 360, images), (0, 1))
    ),
    "sharpness": _change_image_sharpness,
    "sheared_x": partial(_shear_or_shift_images, entry=(0, 1), maximum=0.3),
    "sheared_y": partial(_shear_or_shift_images, entry=(1, 0), maximum=0.3),
    # Invert the pixels at or above a threshold.
    "solarized": lambda images, strengths: torch.where(
        images >= 256 * strengths[:, None, None, None], 255 - images, images
    ),
    "translated_x": partial(_shear_or_shift_images, entry=(0, 2), maximum=2 * 0.3),  # a side is 2 wide
    "translated_y": partial(_shear_or_shift_images, entry=(1, 2), maximum=2 * 0.3),
}
"""The fourteen operations of RandAugment: functions of images ``(batch, channels, height, width)`` and strengths
``(batch,)``."""
