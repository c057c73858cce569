"""Apply a network of patches to a whole image by a sliding window, with MONAI's ``sliding_window_inference``."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.system.packages import refuse_missing_packages

WINDOWS_PER_BATCH = 2
"""Number of windows in a batch; two, because some layers fail on one."""
PATCH_KEY = "model.patch_size"


def refuse_missing_sliding_window(spec: ModelSpec) -> None:
    """Check that MONAI is installed if a model reads its images in patches.

    Raises:
        BadInput: If MONAI is needed and not installed.
    """
    if spec.patch_size is not None:
        refuse_missing_packages(PATCH_KEY, "monai")


def slide_over_images(compute: Callable[[Tensor], Tensor], images: Tensor, spec: ModelSpec) -> Tensor:
    """Apply a function to windows of images; return for each pixel the weighted mean over the windows that cover it.

    Args:
        compute: Maps windows ``(windows, channels, *spec.sides)`` to maps ``(windows, rows, *spec.sides)``.
        images: Float pixels ``(batch, channels, *spatial)``; an axis smaller than a window is padded with black.
        spec: The model, with patch size, overlap and blending.

    Returns:
        Maps ``(batch, rows, *spatial)``.
    """
    from monai.inferers import utils  # takes seconds to import

    slide: Any = utils.sliding_window_inference
    maps: Tensor = slide(
        images,
        spec.sides,
        WINDOWS_PER_BATCH,
        compute,
        overlap=spec.patch_overlap,
        mode=spec.patch_blending,
    )
    return maps


def describe_sliding_window(spec: ModelSpec) -> str:
    """Return the sliding window of a model as text: ``windows of 96 x 96 x 96, overlap 0.5, gaussian blending``."""
    sides = " x ".join(map(str, spec.sides))
    return f"windows of {sides}, overlap {spec.patch_overlap:g}, {spec.patch_blending} blending"
