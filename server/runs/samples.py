"""Sample test images with correct and wrong predictions, or outlines, for the report of a simulated run.

By default, only images that are not of patients (digits, phantoms) are shown, because users forward reports.
"""

import base64
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from polyclinic.common.config import Experiment
from polyclinic.common.metrics.score_histograms import DECISION_THRESHOLD
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import (
    Precision,
    SplitNetwork,
    compute_image_probabilities,
    select_head_row_labels,
)
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.prediction.outlined_images import (
    choose_spread_indices,
    compare_test_images,
    draw_chosen_images,
    rank_images,
)
from polyclinic.common.system.files import write_atomically
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.data.images.reading import encode_png_thumbnail
from polyclinic.server.runs.reader import (
    SAMPLES,
    ClassOutlines,
    ClassSampleImages,
    ReportSampleImages,
    SampleImage,
    SampleOutline,
)

PredictionKind = Literal["found", "missed", "false alarm"]
PREDICTION_KINDS: tuple[PredictionKind, ...] = get_args(PredictionKind)
PATIENT_FREE_DATA_KINDS = ("digits", "phantom", "organs")
"""Kinds of data sets whose images are not of patients."""
SAMPLES_PER_KIND = 2
MAX_CLASSES = 12
MAX_EXAMINED_IMAGES = 2000
MAX_EXAMINED_OUTLINES = 200
OUTLINES_PER_CLASS = 3
PICTURE_SIDES = (96, 64, 48, 32, 24, 16)
"""Sizes of pictures in pixels, of which the largest is used at which all pictures fit into the limit."""
MAX_PICTURE_BYTES = 300_000
"""Greatest number of bytes of all pictures together."""


def report_shows_sample_images(experiment: Experiment) -> bool:
    """Return True if the report of this experiment shows sample images, or outlines of a segmentation model."""
    if experiment.evaluation.sample_grid is not None:
        return experiment.evaluation.sample_grid
    datasets = [data for data in (experiment.data, experiment.server_data) if data is not None]
    return all(data.kind in PATIENT_FREE_DATA_KINDS for data in datasets)


def write_sample_images(
    folder: Path, network: SplitNetwork, test: ImageSet, device: str = "cpu", precision: Precision = "auto"
) -> None:
    """Write ``samples.json`` with correctly and wrongly classified images of the first classes.

    Only this account can read the file, because the images may be of patients.
    """
    if is_segmentation(network.spec.task):
        write_sample_outlines(folder, network, test, device, precision)
        return
    test = test.select_rows(np.arange(min(len(test), MAX_EXAMINED_IMAGES)))
    move_network_to_device(network, device)
    scores = compute_image_probabilities(network, load_pixels_on_device(test, device), precision)
    labels = select_head_row_labels(test, network.class_names).numpy()
    predicted = scores > DECISION_THRESHOLD  # (n, classes)
    if network.spec.task == "multi_class":
        predicted = np.eye(scores.shape[1], dtype=np.bool_)[scores.argmax(axis=1)]
    names = network.class_names[:MAX_CLASSES]
    chosen = dict[str, list[tuple[PredictionKind, int]]]()
    for column, name in enumerate(names):
        # The most confident predictions come first; ties are broken by the order of images.
        order = np.argsort(-scores[:, column], kind="stable")
        is_predicted = predicted[:, column]
        is_positive = labels[:, column] == 1
        is_negative = labels[:, column] == 0
        ranked = (
            (is_positive & is_predicted, order),
            (is_positive & ~is_predicted, order[::-1]),
            (is_negative & is_predicted, order),
        )
        chosen[name] = [
            (kind, int(row))
            for kind, (is_of_kind, ranked_rows) in zip(PREDICTION_KINDS, ranked, strict=True)
            for row in ranked_rows[is_of_kind[ranked_rows]][:SAMPLES_PER_KIND]
        ]
    rows = sorted({row for class_samples in chosen.values() for _, row in class_samples})
    images = list(test.select_rows(np.array(rows, np.intp)).images)
    for side in PICTURE_SIDES:
        files = [encode_png_thumbnail(image, side) for image in images]
        if sum(map(len, files)) <= MAX_PICTURE_BYTES:
            break
    pictures = {row: base64.b64encode(file).decode() for row, file in zip(rows, files, strict=True)}
    classes = []
    for column, (name, class_samples) in enumerate(chosen.items()):
        samples = [
            SampleImage(
                kind=kind,
                probability=float(scores[row, column]),
                truth=tuple(
                    class_name for class_name, label in zip(network.class_names, labels[row], strict=True) if label == 1
                ),
                png=pictures[row],
            )
            for kind, row in class_samples
        ]
        classes.append(ClassSampleImages(name=name, samples=tuple(samples)))
    left_out = len(network.class_names) - len(names)
    samples_file = ReportSampleImages(classes=tuple(classes), classes_left_out=left_out, examined=len(test))
    write_atomically(folder / SAMPLES, samples_file.model_dump_json().encode(), private=True)


def write_sample_outlines(
    folder: Path, network: SplitNetwork, test: ImageSet, device: str = "cpu", precision: Precision = "auto"
) -> None:
    """Write ``samples.json`` with outlines of the first classes: on the images with highest, median and lowest Dice.

    Only this account can read the file, because the images may be of patients.
    """
    test = test.select_rows(np.arange(min(len(test), MAX_EXAMINED_OUTLINES)))
    move_network_to_device(network, device)
    compared = compare_test_images(network, test, device, precision)
    names = network.class_names[:MAX_CLASSES]
    chosen = dict[str, list[tuple[int, float]]]()
    for column, name in enumerate(names):
        rows, dice = rank_images(compared, column)
        chosen[name] = [
            (int(rows[index]), float(dice[index])) for index in choose_spread_indices(len(rows), OUTLINES_PER_CLASS)
        ]
    drawn = draw_chosen_images(network, test, chosen, device, precision)
    outlines = [
        ClassOutlines(name=name, samples=tuple(SampleOutline(dice=each.dice, png=each.png) for each in images))
        for name, images in drawn.items()
    ]
    left_out = len(network.class_names) - len(names)
    samples = ReportSampleImages(outlines=tuple(outlines), classes_left_out=left_out, examined=len(test))
    write_atomically(folder / SAMPLES, samples.model_dump_json().encode(), private=True)
