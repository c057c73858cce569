"""``flwr-sim predict``: write a model's probabilities as a csv file that is safe to open in a spreadsheet."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import SplitNetwork, compute_image_probabilities
from polyclinic.common.models.saved import load_model, read_model_description
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.prediction.dicom_segmentation import OPTION as DICOM_SEG
from polyclinic.common.prediction.dicom_segmentation import make_segmentation_writer
from polyclinic.common.prediction.files import (
    make_trained_image_format,
    predict_from_files,
    select_learned_classes,
)
from polyclinic.common.prediction.masks import MaskOptions, map_values_to_classes, predict_masks
from polyclinic.common.prediction.pictures import UnlabelledPictures
from polyclinic.common.system.csv_text import format_rows_as_csv
from polyclinic.common.system.files import find_output_file_faults, is_file, write_atomically
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB
from polyclinic.data.base.spec import (
    DEFAULT_RENDERING,
    Axis,
    BitDepth,
    Frame,
    ImageSize,
    LargestMb,
    PictureRenderingOptions,
    Resize,
    Spacing,
    ValueRange,
    Window,
)
from polyclinic.data.base.volume_arrays import add_channel_axis, is_image_array
from polyclinic.data.images.pixels import ImageTensors
from polyclinic.data.images.reading import DecodedImageFormat, resize_images
from polyclinic.data.sources.plugin import LabelledImages
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.unlearned import read_unlearned_classes


class _RunPictureSettings(BaseModel):
    """The settings in ``[data]`` of a run's experiment by which a file is converted to an image."""

    kind: str = ""
    image_size: ImageSize | None = None
    resize: Resize = "pad"
    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None
    largest_mb: LargestMb = DEFAULT_LARGEST_MB
    bit_depth: BitDepth | None = None
    jpeg_draft: bool = False
    value_range: ValueRange | None = None
    spacing: Spacing | None = None
    mask_values: dict[str, int] = Field(default_factory=dict)


def _read_run_data_settings(folder: Path) -> _RunPictureSettings:
    """Return the settings of a run's data; the defaults if the folder has no readable summary."""
    if is_file(folder / "summary.json"):
        with suppress(BadInput, ValidationError):  # of another version, or edited: the model alone is enough
            return _RunPictureSettings.model_validate(read_run(folder).summary.experiment.get("data") or {})
    return _RunPictureSettings()


def choose_model_image_format(
    folder: Path, network: SplitNetwork, rendering: PictureRenderingOptions | None = None
) -> DecodedImageFormat:
    """Return how files are converted to images for a saved model.

    They are read as those of the training, if the model says how that was. For a model of an earlier release, resizing
    and rendering are those of the run if ``folder`` is a run folder with a readable summary, else the defaults.

    Args:
        rendering: Rendering by command-line options, which replaces the run's; None if there is no such option.
    """
    if (form := read_model_description(folder).pixels) is not None:
        return make_trained_image_format(form, rendering, _read_run_data_settings(folder).largest_mb)
    shown = _read_run_data_settings(folder)
    options = None if rendering is None or replace(rendering, bit_depth=None) == DEFAULT_RENDERING else rendering
    bit_depth = rendering.bit_depth if rendering else None
    shown_as = replace(
        options or PictureRenderingOptions(shown.frame, shown.axis, shown.window),
        largest_mb=shown.largest_mb,
        bit_depth=bit_depth or shown.bit_depth,
        jpeg_draft=shown.jpeg_draft,
        value_range=None if bit_depth else shown.value_range,
        spacing=shown.spacing,
    )
    return DecodedImageFormat(network.spec.image_size, network.spec.channels == 3, shown.resize, shown_as)


def predict_to_csv(
    folder: Path,
    data: Path,
    destination: Path,
    rendering: PictureRenderingOptions | None = None,
    codes: Sequence[str] | None = None,
) -> UnlabelledPictures:
    """Write a csv file with the probabilities of every image, one row per image; return the images.

    Of a segmentation, ``destination`` is a new folder of masks, whose label maps have the values of the run's own.
    A class that the model has not learned has no column. An unreadable image has a row with empty cells, and the reason
    in the last column.

    Args:
        rendering: How multi-frame DICOM files and volumes become one image; None to use the run's settings.
        codes: Codes of classes for DICOM segmentations of the masks; None writes no segmentations.

    Raises:
        BadInput: If the model is unreadable, no image is readable, or the destination exists.
    """
    raise_faults(find_output_file_faults(destination))
    network, unlearned = load_model(folder), read_unlearned_classes(folder)
    learned = select_learned_classes(network.class_names, unlearned)
    form = choose_model_image_format(folder, network, rendering)
    if is_segmentation(network.spec.task):
        description, own = read_model_description(folder), _read_run_data_settings(folder).mask_values
        options = MaskOptions(map_values_to_classes(own, description.vocabulary or {}))
        if codes is not None:
            title, largest_mb = folder.resolve().name, form.rendering.largest_mb
            writer = make_segmentation_writer(title, description.model_sha256, learned, codes, largest_mb)
            options = replace(options, segmentations=writer)
        return predict_masks(network, learned, data, form, destination, options)
    if codes is not None:
        problem = "is about masks, and this model gives a probability for each image."
        raise BadInput([Fault(DICOM_SEG, problem, f"Leave {DICOM_SEG} out.")])
    pictures, probabilities = predict_from_files(network, data, form)
    probabilities = probabilities[:, [network.class_names.index(name) for name in learned]]
    header = ["image", *learned, "unreadable"]
    read = [[name, *row.tolist(), None] for name, row in zip(pictures.names, probabilities, strict=True)]
    unread = [[name, *[None] * len(learned), why] for name, why in pictures.unreadable.items()]
    # Only for this account: names of files often hold names or numbers of patients.
    write_atomically(destination, format_rows_as_csv([header, *read, *unread]), private=True)
    return pictures


def predict_from_dataset(folder: Path, network: SplitNetwork, given: LabelledImages) -> NDArray[np.float32]:
    """Return probabilities ``(n, classes)`` of a user's images, read as a run reads them in tests; labels are not read.

    Args:
        folder: Folder of the run, whose settings for such data sets hold.

    Raises:
        BadInput: If the images are no data set, or an image cannot be read.
    """
    from polyclinic.data.sources.torch_dataset import open_torch_dataset, refuse_wrong_value_range

    stored: Any = given.images
    if isinstance(stored, np.ndarray) and stored.dtype == np.uint8 and given.value_range is None and given.item is None:
        if not stored.size or not is_image_array(stored.shape):
            problem = f"must have the shape (n, height, width) or (n, height, width, 3), not {stored.shape}."
            raise BadInput([Fault("images", problem)])
        settings = _read_run_data_settings(folder)
        size = settings.image_size if settings.kind == "plugin" else None
        image_size = size if isinstance(size, int) else None
        stored = add_channel_axis(stored)
        return compute_picture_probabilities(network, resize_images(stored, image_size, settings.resize))
    pictures = open_torch_dataset(stored, type(stored).__name__, given.value_range, given.item)
    pictures.share_outside = 0.0  # the first image was read when the data set was opened
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels = ImageTensors(pictures, None, torch.device(device))
    probabilities = compute_image_probabilities(move_network_to_device(network, device), pixels)
    refuse_wrong_value_range(pictures)
    return probabilities


def describe_other_file_reading(folder: Path) -> str:
    """Return a sentence if a run was trained on a data set of the user's own, which reads files in its own way."""
    if _read_run_data_settings(folder).kind != "plugin":
        return ""
    return (
        "The run was trained on a data set of your own: files are read by Polyclinic's rules, not by the transforms of "
        "that data set, so orientation, contrast and size may differ."
    )
