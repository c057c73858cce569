"""Compute a whole image by a window that slides over it, with MONAI's ``sliding_window_inference``."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.system.packages import refuse_missing_packages

WINDOWS_AT_A_TIME = 2
"""Windows of a batch, because some layers fail on one."""
PATCH_KEY = "model.patch_size"


def refuse_missing_sliding_window(spec: ModelSpec) -> None:
    """Check that MONAI is installed if a model reads its images in patches.

    Raises:
        BadInput: If it is not.
    """
    if spec.patch_size is not None:
        refuse_missing_packages(PATCH_KEY, "monai")


def slide_over_images(compute: Callable[[Tensor], Tensor], images: Tensor, spec: ModelSpec) -> Tensor:
    """Return what a function computes for whole images, as the weighted mean over the windows that cover each pixel.

    Args:
        compute: From windows ``(windows, channels, *spec.sides)`` to maps ``(windows, rows, *spec.sides)``.
        images: Float pixels ``(batch, channels, *spatial)``; an axis smaller than a window is padded with black.
    """
    from monai.inferers import utils  # takes seconds to import

    slide: Any = utils.sliding_window_inference
    maps: Tensor = slide(
        images,
        spec.sides,
        WINDOWS_AT_A_TIME,
        compute,
        overlap=spec.patch_overlap,
        mode=spec.patch_blending,
    )
    return maps


def describe_sliding_window(spec: ModelSpec) -> str:
    """Describe the window of a model of patches: ``windows of 96 x 96 x 96, overlap 0.5, gaussian blending``."""
    sides = " x ".join(map(str, spec.sides))
    return f"windows of {sides}, overlap {spec.patch_overlap:g}, {spec.patch_blending} blending"
