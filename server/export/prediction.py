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
from polyclinic.common.prediction.dicom_segmentation import SEGMENTATION_OPTION as DICOM_SEG
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
    """Return the format to which files are converted for a saved model: size, colour, resizing and rendering.

    The model's description has the format of the training images. A model of an earlier release has none. Then resizing
    and rendering are those of the run if ``folder`` is a run folder with a readable summary, else the defaults.

    Args:
        rendering: Rendering by command-line options, which replaces the run's; None if there is no such option.
    """
    pixel_form = read_model_description(folder).pixels
    settings = _read_run_data_settings(folder)
    if pixel_form is not None:
        return make_trained_image_format(pixel_form, rendering, settings.largest_mb)
    bit_depth = rendering.bit_depth if rendering else None
    if rendering is None or replace(rendering, bit_depth=None) == DEFAULT_RENDERING:
        rendering = PictureRenderingOptions(settings.frame, settings.axis, settings.window)
    rendering = replace(
        rendering,
        largest_mb=settings.largest_mb,
        bit_depth=bit_depth or settings.bit_depth,
        jpeg_draft=settings.jpeg_draft,
        value_range=None if bit_depth else settings.value_range,
        spacing=settings.spacing,
    )
    return DecodedImageFormat(network.spec.image_size, network.spec.channels == 3, settings.resize, rendering)


def predict_to_csv(
    folder: Path,
    data: Path,
    destination: Path,
    rendering: PictureRenderingOptions | None = None,
    codes: Sequence[str] | None = None,
) -> UnlabelledPictures:
    """Write a csv file with the probabilities of every image, one row per image; return the images.

    A class that the model has not learned has no column. An unreadable image has a row with empty cells, and the reason
    in the last column. A segmentation model writes masks instead, with the pixel values of the run's training masks.

    Args:
        folder: Folder of the model.
        data: An image, or a folder or npz file of images.
        destination: The new csv file; for a segmentation model, the new folder of masks.
        rendering: How multi-frame DICOM files and volumes become one image; None to use the run's settings.
        codes: Codes of classes for DICOM segmentations of the masks; None writes no segmentations.

    Raises:
        BadInput: If the model is unreadable, no image is readable, or the destination exists.
    """
    raise_faults(find_output_file_faults(destination))
    network = load_model(folder)
    learned = select_learned_classes(network.class_names, read_unlearned_classes(folder))
    image_format = choose_model_image_format(folder, network, rendering)
    if is_segmentation(network.spec.task):
        description = read_model_description(folder)
        mask_values = _read_run_data_settings(folder).mask_values
        options = MaskOptions(map_values_to_classes(mask_values, description.vocabulary or {}))
        if codes is not None:
            title = folder.resolve().name
            largest_mb = image_format.rendering.largest_mb
            writer = make_segmentation_writer(title, description.model_sha256, learned, codes, largest_mb)
            options = replace(options, segmentations=writer)
        return predict_masks(network, learned, data, image_format, destination, options)
    if codes is not None:
        problem = "is about masks, and this model gives a probability for each image."
        raise BadInput([Fault(DICOM_SEG, problem, f"Leave {DICOM_SEG} out.")])
    pictures, probabilities = predict_from_files(network, data, image_format)
    probabilities = probabilities[:, [network.class_names.index(name) for name in learned]]
    header = ["image", *learned, "unreadable"]
    rows = [[name, *row.tolist(), None] for name, row in zip(pictures.names, probabilities, strict=True)]
    unreadable_rows = [[name, *[None] * len(learned), reason] for name, reason in pictures.unreadable.items()]
    # Readable only by this account, because file names often hold names or numbers of patients.
    write_atomically(destination, format_rows_as_csv([header, *rows, *unreadable_rows]), private=True)
    return pictures


def predict_from_dataset(folder: Path, network: SplitNetwork, dataset: LabelledImages) -> NDArray[np.float32]:
    """Return the probabilities of a user's own data set, ``(n, classes)``; its labels are not read.

    The images are read as a run reads the test images of such a data set.

    Args:
        folder: Folder of the run, whose data settings are used.

    Raises:
        BadInput: If the images are no data set, or an image cannot be read.
    """
    from polyclinic.data.sources.torch_dataset import open_torch_dataset, refuse_wrong_value_range

    images: Any = dataset.images
    is_uint8_array = isinstance(images, np.ndarray) and images.dtype == np.uint8
    if is_uint8_array and dataset.value_range is None and dataset.item is None:
        if not images.size or not is_image_array(images.shape):
            problem = f"must have the shape (n, height, width) or (n, height, width, 3), not {images.shape}."
            raise BadInput([Fault("images", problem)])
        settings = _read_run_data_settings(folder)
        size = settings.image_size if settings.kind == "plugin" else None
        image_size = size if isinstance(size, int) else None
        images = add_channel_axis(images)
        return compute_picture_probabilities(network, resize_images(images, image_size, settings.resize))
    pictures = open_torch_dataset(images, type(images).__name__, dataset.value_range, dataset.item)
    pictures.share_outside = 0.0  # the first image was read when the data set was opened
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels = ImageTensors(pictures, None, torch.device(device))
    probabilities = compute_image_probabilities(move_network_to_device(network, device), pixels)
    refuse_wrong_value_range(pictures)
    return probabilities


def describe_other_file_reading(folder: Path) -> str:
    """Return a warning if a run was trained on a user's own data set, whose transforms are not applied to files.

    The result is empty for other runs.
    """
    if _read_run_data_settings(folder).kind != "plugin":
        return ""
    return (
        "The run was trained on a data set of your own: files are read by Polyclinic's rules, not by the transforms of "
        "that data set, so orientation, contrast and size may differ."
    )
