"""Compute a saved model's class probabilities for images from Python: a data set, an array, or files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault
from polyclinic.data.sources.dataset_items import MapStyleDataset
from polyclinic.data.sources.plugin import LabelledImages

if TYPE_CHECKING:
    from polyclinic.common.models.network import SplitNetwork

Files = str | Path | Sequence[str | Path]
ImagesToPredict = LabelledImages | MapStyleDataset | NDArray[np.uint8] | Files
"""Custom images, a uint8 array ``(n, height, width[, 3])``, or paths."""
_ACCEPTED_IMAGES = (
    "a map-style data set, pc.LabelledImages, a uint8 array, the path of a file or folder, or several paths"
)


class FileReadingWarning(UserWarning):
    """Warns that image files are decoded in another way than the data set on which the model was trained."""


class UnlearnedClassWarning(UserWarning):
    """Warns that the predictions leave out a class that the model has not learned."""


def predict_images(
    folder: Path, network: SplitNetwork, images: ImagesToPredict
) -> tuple[list[str] | None, NDArray[np.float32]]:
    """Return names ``(n,)`` and class probabilities ``(n, classes)`` of images; the names are None if images have none.

    Args:
        folder: Folder of the run; its settings determine how files are read.
        network: The model.
        images: A data set, an array or files.

    Warns:
        FileReadingWarning: If files are read, and the run was trained on a custom data set.

    Raises:
        BadInput: If there is no image, or none is readable.
    """
    from polyclinic.common.prediction.masks import refuse_segmentation
    from polyclinic.data.sources.shared_items import is_map_style_dataset
    from polyclinic.server.export.prediction import predict_from_dataset

    refuse_segmentation(network, "run.predict in Python")
    if isinstance(images, np.ndarray):
        return None, _predict_from_array(folder, network, images)
    if isinstance(images, LabelledImages):
        return None, predict_from_dataset(folder, network, images)
    if isinstance(images, str | Path):
        return _predict_from_paths(folder, network, [images])
    if isinstance(images, Mapping):
        problem = "is a dictionary of parts."
        raise BadInput([Fault("images", problem, 'Give one of them: run.predict(parts["test"]).')])
    if isinstance(images, Sequence) and images and all(isinstance(file, str | Path) for file in images):
        return _predict_from_paths(folder, network, images)
    if is_map_style_dataset(wrapped_dataset := getattr(images, "dataset", None)) and not hasattr(images, "__getitem__"):
        problem = f"is a {type(images).__name__}, which makes batches of its {type(wrapped_dataset).__name__}."
        raise BadInput([Fault("images", problem, "Pass its data set: run.predict(loader.dataset).")])
    if not is_map_style_dataset(images) or not len(images):
        what = "an empty " if is_map_style_dataset(images) else "a "
        raise BadInput([Fault("images", f"must be {_ACCEPTED_IMAGES}, not {what}{type(images).__name__}.")])
    return None, predict_from_dataset(folder, network, LabelledImages(images))


def _predict_from_array(folder: Path, network: SplitNetwork, images: NDArray[Any]) -> NDArray[np.float32]:
    from polyclinic.common.models.scoring import compute_picture_probabilities
    from polyclinic.data.base.volume_arrays import add_channel_axis, is_image_array
    from polyclinic.data.images.bands import scale_values_to_8_bits
    from polyclinic.server.export.prediction import choose_model_image_format

    if not images.size:
        raise BadInput([Fault("images", f"of shape {images.shape} hold no pixel.")])
    if images.dtype != np.uint8 or not is_image_array(images.shape):
        shapes = "(n, height, width) or (n, height, width, 3)"
        problem = f"must be uint8 of shape {shapes}, not {images.dtype} {images.shape}."
        remedy = "Name black and white of other numbers: pc.LabelledImages(images, value_range=(a, b))."
        raise BadInput([Fault("images", problem, remedy if images.dtype != np.uint8 else "")])
    if (value_range := choose_model_image_format(folder, network).rendering.value_range) is not None:
        images = scale_values_to_8_bits(images, value_range)
    images = add_channel_axis(images)
    return compute_picture_probabilities(network, images)


def _predict_from_paths(
    folder: Path, network: SplitNetwork, files: Sequence[str | Path]
) -> tuple[list[str], NDArray[np.float32]]:
    """Return names and probabilities of the pictures in files; an unreadable picture has NaN in every class."""
    from polyclinic.common.prediction.files import predict_from_files
    from polyclinic.server.export.prediction import (
        choose_model_image_format,
        describe_other_file_reading,
    )

    if sentence := describe_other_file_reading(folder):
        remedy = "run.predict(dataset) reads as in training."
        warnings.warn(f"{sentence} {remedy}", FileReadingWarning, stacklevel=4)
    image_format = choose_model_image_format(folder, network)
    results = [predict_from_files(network, Path(file), image_format) for file in files]
    names = [name for pictures, _ in results for name in (*pictures.names, *pictures.unreadable)]
    row_of_nan = np.full((1, len(network.class_names)), np.nan, np.float32)
    rows = []
    for pictures, scores in results:
        rows += [scores, *[row_of_nan] * len(pictures.unreadable)]
    return names, np.concatenate(rows)
