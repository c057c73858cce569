"""Read pictures as those of a model's training were read, and compute their probabilities."""

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
    """Return the format of the images that a model was trained on.

    Args:
        rendering: Rendering by command-line options, which replaces that of the training; None for no such option.
        largest_mb: The largest decoded image, in MB.
    """
    options = form.rendering_options
    for key in RENDERING_KEYS:
        value = getattr(rendering or DEFAULT_RENDERING, key)
        if value != getattr(DEFAULT_RENDERING, key):
            options = replace(options, **{key: value})
    if rendering is not None and rendering.bit_depth is not None:
        options = replace(options, value_range=None)  # each of the two says which value is white
    # The images of a network's own shape alone may be of two sides; files are brought to a square.
    size = form.volume_size or max(form.height, form.width)
    return DecodedImageFormat(size, form.color, form.resize or "pad", replace(options, largest_mb=largest_mb))


def select_learned_classes(class_names: Sequence[str], unlearned: Collection[str]) -> list[str]:
    """Return the classes that a model has learned, in its order.

    Raises:
        BadInput: If it has learned none.
    """
    learned = [name for name in class_names if name not in unlearned]
    if not learned:
        raise BadInput([Fault("the model", "has learned none of its classes.", "Its report says why.")])
    return learned


def predict_from_files(
    network: SplitNetwork, data: Path, form: DecodedImageFormat, device: str = ""
) -> tuple[UnlabelledPictures, NDArray[np.float32]]:
    """Read images from files; return the images and their probabilities, ``(n, classes)``.

    Args:
        device: ``cpu`` or ``cuda``; empty for the GPU if there is one.

    Raises:
        BadInput: If the data holds no image, or all images are unreadable.
    """
    pictures = read_unlabelled_pictures(data, form)
    if not pictures.names:
        name, reason = next(iter(pictures.unreadable.items()), (data.name, "it holds no image"))
        raise_faults([make_unreadable_images_fault(data, name, reason)])
    return pictures, compute_picture_probabilities(network, pictures.images, device)
