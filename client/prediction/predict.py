"""``flwr-client predict``: the probabilities of a model for a hospital's own files. Nothing leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.prediction.calibration import CALIBRATION_FILE, calibrate_probabilities, read_calibration
from polyclinic.client.prediction.model import UsableModel
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import raise_faults
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.prediction.dicom_segmentation import make_segmentation_writer
from polyclinic.common.prediction.files import make_trained_image_format, predict_from_files
from polyclinic.common.prediction.masks import MaskOptions, map_values_to_classes, predict_masks
from polyclinic.common.prediction.pictures import locate_picture
from polyclinic.common.prediction.segmentation_options import refuse_codes_without_segmentations
from polyclinic.common.system.csv_text import format_rows_as_csv
from polyclinic.common.system.files import find_output_folder_faults, make_private_folder, write_atomically
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.reading import DecodedImageFormat

PREDICTIONS_CSV_FILE = "predictions.csv"
PREDICTIONS_JSON_FILE = "predictions.json"


@dataclass(frozen=True)
class SitePredictions:
    """The probabilities of a model for a hospital's files.

    Attributes:
        model: The model.
        source: The file or folder of the images.
        class_names: The classes that the model has learned, one for each column.
        names: Name of each image, relative to ``source`` if that is a folder.
        probabilities: ``(n, classes)``; ``(n, 0)`` for a segmentation, whose masks are files.
        unreadable: Name of each unreadable image -> reason.
        others: Names of files in the folder that are not pictures.
        calibrated: Classes whose probabilities were recalibrated at this site.
    """

    model: UsableModel
    source: Path
    class_names: tuple[str, ...]
    names: tuple[str, ...]
    probabilities: NDArray[np.float64]
    unreadable: Mapping[str, str]
    others: tuple[str, ...]
    calibrated: tuple[str, ...] = ()

    def find_file(self, name: str) -> Path:
        """Return the path of the picture file with this name."""
        return locate_picture(self.source, name)


def predict_at_site(
    model: UsableModel, images: Path, out: Path, *, calibrated: bool, device: str, masks: MaskOptions | None = None
) -> SitePredictions:
    """Write a model's predictions for images into a new folder: probabilities as csv and JSON, or masks as PNG.

    Args:
        images: A picture, a DICOM file, a folder of them, or an npz file.
        out: A new folder that only this account can open, because names of files often contain names of patients.
        calibrated: Apply the recalibration in ``calibration.json`` beside the model.
        device: ``cpu`` or ``cuda``.
        masks: Options for the files of masks; None for the defaults.

    Raises:
        BadInput: If no image can be read, the folder exists, or there is no calibration of this model.
    """
    raise_faults(find_output_folder_faults(out))
    calibration = read_calibration(model) if calibrated else None
    network = load_model(model.folder)
    classes = tuple(model.learned_classes)
    if is_segmentation(network.spec.task):
        options = replace(masks or MaskOptions(), device=device)
        masked = predict_masks(network, classes, images, choose_image_format(model), out, options)
        nothing = np.zeros((len(masked.names), 0))
        unreadable = {**masked.unreadable, **masked.without_segmentation}
        return SitePredictions(model, images, classes, masked.names, nothing, unreadable, masked.others)
    pictures, scores = predict_from_files(network, images, choose_image_format(model), device)
    probabilities = scores[:, [network.class_names.index(name) for name in classes]].astype(np.float64)
    fitted = tuple(name for name in classes if calibration and calibration.classes[name].is_fitted)
    if calibration:
        probabilities = calibrate_probabilities(probabilities, classes, calibration)
    predictions = SitePredictions(
        model, images, classes, pictures.names, probabilities, pictures.unreadable, pictures.others, fitted
    )
    make_private_folder(out)
    write_atomically(out / PREDICTIONS_CSV_FILE, _format_csv(predictions), private=True)
    write_atomically(out / PREDICTIONS_JSON_FILE, _format_json(predictions).encode(), private=True)
    return predictions


def make_mask_options(
    settings: SiteSettings, model: UsableModel, codes: Sequence[str], *, segments: bool
) -> MaskOptions:
    """Return the options for files of masks at a site.

    Args:
        codes: DICOM codes of classes, in the syntax of :mod:`polyclinic.common.prediction.dicom_segmentation`.
        segments: Also write DICOM segmentations.

    Raises:
        BadInput: If highdicom is missing, or a code is wrong.
    """
    site_values = getattr(settings.file.data, "mask_values", {})
    values = map_values_to_classes(site_values, model.description.vocabulary or {}, settings.synonyms)
    refuse_codes_without_segmentations(codes, segments=segments)
    if not segments:
        return MaskOptions(values)
    description = model.description
    form = choose_image_format(model)
    classes = model.learned_classes
    largest_mb = form.rendering.largest_mb
    writer = make_segmentation_writer(model.title, description.model_sha256, classes, codes, largest_mb)
    return MaskOptions(values, writer)


def choose_image_format(model: UsableModel) -> DecodedImageFormat:
    """Return the format for decoded files: that of the training images if the model states it, else a default."""
    if (form := model.description.pixels) is not None:
        return make_trained_image_format(form)
    spec = model.description.model
    return DecodedImageFormat(spec.image_size, spec.channels == 3, "pad", PictureRenderingOptions())


def _format_csv(predictions: SitePredictions) -> bytes:
    header = ["image", *predictions.class_names, "unreadable"]
    rows = zip(predictions.names, predictions.probabilities, strict=True)
    readable_rows = [[name, *row.tolist(), None] for name, row in rows]
    empty = [None] * len(predictions.class_names)
    unreadable_rows = [[name, *empty, reason] for name, reason in predictions.unreadable.items()]
    return format_rows_as_csv([header, *readable_rows, *unreadable_rows])


def _format_json(predictions: SitePredictions) -> str:
    model = predictions.model
    content = {
        "run": model.run,
        "title": model.title,
        "model_sha256": model.description.model_sha256,
        "calibrated": list(predictions.calibrated),
        "calibration": CALIBRATION_FILE if predictions.calibrated else "",
        "unlearned": dict(model.unlearned),
        "images": {
            name: dict(zip(predictions.class_names, row.tolist(), strict=True))
            for name, row in zip(predictions.names, predictions.probabilities, strict=True)
        },
        "unreadable": dict(predictions.unreadable),
    }
    return format_as_json_text(content, indent=1) + "\n"
