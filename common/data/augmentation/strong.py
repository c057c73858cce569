"""Strong random changes to training images, a whole batch at once on its own device: RandAugment, then Cutout.

Cubuk et al., "RandAugment", CVPR Workshops 2020, in the form that Sohn et al., "FixMatch", NeurIPS 2020, gave it in
their appendix: each image gets two of fourteen changes (n = 2), each of a strength drawn anew from its whole range
(m = 10), and then loses a square of half its side. Turned, sheared and shifted images have the pixels from outside
mirrored in, as in :mod:`common.data.augmentation.weak`; theirs become black there. On grey images ``_colour`` changes
nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from common.data.augmentation.weak import rotations, sampled

TIMES = 2
HOLE = 0.5
GREY = 127.0

_DRAWS = 2 * TIMES + 2  # for each change which and how strong, and where the square lies
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601


def strongly_augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return strongly changed float pixels 0..255, ``(batch, channels, height, width)``.

    Args:
        images: Float pixels; cut off at 0 and 255.
        generator: On the CPU, wherever the images are.
    """
    return strongly_changed(images, torch.rand(_DRAWS, len(images), generator=generator))


def strongly_changed(images: Tensor, draws: Tensor) -> Tensor:
    """Return ``images`` changed as the random numbers say, without drawing any.

    Args:
        images: Float pixels ``(batch, channels, height, width)``.
        draws: ``(6, batch)`` in [0, 1): which change and how strong, the same of the second; height and width of the
            square's middle.
    """
    images = images.clamp(0, 255)
    for which, strengths in zip(draws[:-2:2], draws[1:-2:2], strict=True):
        images = _changed_once(images, (which * len(CHANGES)).long(), strengths)
    return _with_hole(images, draws[-2].to(images), draws[-1].to(images))


def _changed_once(images: Tensor, which: Tensor, strengths: Tensor) -> Tensor:
    changed = images.clone()
    for number, change in enumerate(CHANGES):
        chosen = (which == number).nonzero().flatten()
        if len(chosen):
            rows = chosen.to(images.device)
            changed[rows] = change(images[rows], strengths[chosen].to(images))
    return changed


def _with_hole(images: Tensor, middle_y: Tensor, middle_x: Tensor) -> Tensor:
    """Paint a grey square, whose middle lies anywhere in the image, over each."""
    height, width = images.shape[2:]
    half = HOLE * min(height, width) / 2
    rows = torch.arange(height, device=images.device) + 0.5
    columns = torch.arange(width, device=images.device) + 0.5
    inside_y = (rows - middle_y[:, None] * height).abs() < half  # (batch, height)
    inside_x = (columns - middle_x[:, None] * width).abs() < half
    return torch.where((inside_y[:, :, None] & inside_x[:, None, :])[:, None], GREY, images)


# ---------------------------------------------------------------------- changes: images, strengths (batch,) in [0, 1)


def _identity(images: Tensor, strengths: Tensor) -> Tensor:
    return images


def _autocontrast(images: Tensor, strengths: Tensor) -> Tensor:
    """Stretch each channel to 0..255; one that is all alike stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * 255 / (high - low).clamp(min=1e-6), images)


def _equalized(images: Tensor, strengths: Tensor) -> Tensor:
    from torchvision.transforms.v2.functional import equalize  # takes seconds to import

    pixels: Tensor = equalize(images.round().to(torch.uint8))
    return pixels.to(images)


def _posterized(images: Tensor, strengths: Tensor) -> Tensor:
    """Keep the 4 to 8 highest bits."""
    step = 2 ** (4 - (5 * strengths).floor())[:, None, None, None]
    return (images / step).floor() * step


def _solarized(images: Tensor, strengths: Tensor) -> Tensor:
    """Turn pixels from a threshold on, 0 to 256, into their negative."""
    return torch.where(images >= 256 * strengths[:, None, None, None], 255 - images, images)


def _towards(other: Tensor, images: Tensor, strengths: Tensor) -> Tensor:
    """Keep 0.05 to 0.95 of the difference from another picture."""
    return other + (images - other) * (0.05 + 0.9 * strengths[:, None, None, None])


def _brightness(images: Tensor, strengths: Tensor) -> Tensor:
    return _towards(torch.zeros_like(images), images, strengths)


def _contrast(images: Tensor, strengths: Tensor) -> Tensor:
    return _towards(images.mean((1, 2, 3), keepdim=True), images, strengths)


def _colour(images: Tensor, strengths: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    grey = (images * images.new_tensor(_LUMINANCE).reshape(1, 3, 1, 1)).sum(1, keepdim=True)
    return _towards(grey, images, strengths)


def _sharpness(images: Tensor, strengths: Tensor) -> Tensor:
    """Towards a smoothed picture: the pixel five times with its eight neighbours."""
    sides = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    smooth = (9 * functional.avg_pool2d(sides, 3, stride=1) + 4 * images) / 13
    return _towards(smooth, images, strengths)


def _rotated(images: Tensor, strengths: Tensor) -> Tensor:
    """Rotate by up to 30 degrees either way."""
    linear = rotations((2 * strengths - 1) * 30 / 360, images)
    return sampled(images, torch.cat((linear, linear.new_zeros(len(images), 2, 1)), 2))


def _moved(images: Tensor, strengths: Tensor, place: tuple[int, int], most: float) -> Tensor:
    """Sample with one entry of the identity's ``(2, 3)`` matrix moved by up to ``most`` either way."""
    transforms = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    transforms[:, place[0], place[1]] += (2 * strengths - 1) * most
    return sampled(images, transforms)


def _sheared_x(images: Tensor, strengths: Tensor) -> Tensor:
    return _moved(images, strengths, (0, 1), 0.3)


def _sheared_y(images: Tensor, strengths: Tensor) -> Tensor:
    return _moved(images, strengths, (1, 0), 0.3)


def _translated_x(images: Tensor, strengths: Tensor) -> Tensor:
    return _moved(images, strengths, (0, 2), 2 * 0.3)  # a side is 2 wide


def _translated_y(images: Tensor, strengths: Tensor) -> Tensor:
    return _moved(images, strengths, (1, 2), 2 * 0.3)


CHANGES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _autocontrast,
    _brightness,
    _colour,
    _contrast,
    _equalized,
    _identity,
    _posterized,
    _rotated,
    _sharpness,
    _sheared_x,
    _sheared_y,
    _solarized,
    _translated_x,
    _translated_y,
)
