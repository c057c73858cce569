"""Read pictures in the pixel form of a model's training images, and compute their probabilities."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.network import SplitNetwork
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.prediction.pictures import (
    UnlabelledPictures,
    make_unreadable_images_fault,
    read_unlabelled_pictures,
)
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB
from polyclinic.data.base.pixel_form import RENDERING_KEYS, PixelForm
from polyclinic.data.base.spec import DEFAULT_RENDERING, PictureRenderingOptions
from polyclinic.data.images.reading import DecodedImageFormat


def make_trained_image_format(
    form: PixelForm, rendering: PictureRenderingOptions | None = None, largest_mb: int = DEFAULT_LARGEST_MB
) -> DecodedImageFormat:
    """Return the image format in which files are decoded for a model.

    Args:
        form: Pixel form of the model's training images.
        rendering: Command-line options that replace rendering settings of the training; None for no option.
        largest_mb: Size limit of a decoded image, in MB.
    """
    options = form.rendering_options
    for key in RENDERING_KEYS:
        value = getattr(rendering or DEFAULT_RENDERING, key)
        if value != getattr(DEFAULT_RENDERING, key):
            options = replace(options, **{key: value})
    if rendering is not None and rendering.bit_depth is not None:
        options = replace(options, value_range=None)  # both options define the white value
    # Files are resized to a square.
    size = form.volume_size or max(form.height, form.width)
    return DecodedImageFormat(size, form.color, form.resize or "pad", replace(options, largest_mb=largest_mb))


def select_learned_classes(class_names: Sequence[str], unlearned: Collection[str]) -> list[str]:
    """Return the classes that a model has learned, in the order of its outputs.

    Raises:
        BadInput: If it has learned none.
    """
    learned = [name for name in class_names if name not in unlearned]
    if not learned:
        raise BadInput([Fault("the model", "has learned none of its classes.", "Its report says why.")])
    return learned


def predict_from_files(
    network: SplitNetwork, data: Path, image_format: DecodedImageFormat, device: str = ""
) -> tuple[UnlabelledPictures, NDArray[np.float32]]:
    """Read images from files; return the images and their probabilities, ``(n, classes)``.

    Args:
        network: The model.
        data: An npz file, a picture, or a folder of pictures.
        image_format: Format in which files are decoded.
        device: ``cpu`` or ``cuda``; empty for the GPU if there is one.

    Raises:
        BadInput: If there is no image, or all images are unreadable.
    """
    pictures = read_unlabelled_pictures(data, image_format)
    if not pictures.names:
        name, reason = next(iter(pictures.unreadable.items()), (data.name, "it holds no image"))
        raise_faults([make_unreadable_images_fault(data, name, reason)])
    return pictures, compute_picture_probabilities(network, pictures.images, device)
