"""The page of the images that a model judges worst, for this hospital's staff: ``flwr-client evaluate --failures``.

The page shows images of patients. It is separate from the page of figures, so that the figures can be passed on alone.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.evaluation.evaluation import DataToScore
from polyclinic.common.evaluation.figures import ScoredImages
from polyclinic.common.reporting.page import write_html_page
from polyclinic.data.base.image_set import find_placeholder_patients
from polyclinic.data.base.spec import DataSpec, FolderDatasetSpec
from polyclinic.data.images.reading import encode_png_thumbnail

FAILURES_PAGE = "failures.html"
MAX_PICTURE_SIDE = 160
"""Length of a picture's longer side on the page, in pixels."""


@dataclass(frozen=True)
class FailureCase:
    """An image that a model judges wrong, with its score.

    Attributes:
        name: The image's name in the label table, or its number if the data has no names.
        patient: Name of the patient; empty if unknown.
        score: The model's probability of the class.
        shows: The classes that the image shows by its labels.
        picture: PNG file in base64.
    """

    name: str
    patient: str
    score: float
    shows: tuple[str, ...]
    picture: str


@dataclass(frozen=True)
class ClassFailures:
    """The images of one class that a model judges worst.

    Attributes:
        missed: Images that show the class, in rising order of their scores.
        alarms: Images that do not show the class, in falling order of their scores.
    """

    model: str
    class_name: str
    missed: tuple[FailureCase, ...]
    alarms: tuple[FailureCase, ...]


def write_failures_page(path: Path, data: DataToScore, scored: ScoredImages, spec: DataSpec, count: int) -> Path:
    """Write the page of the images that models judge worst; only the file's owner may read it.

    Args:
        data: The scored images.
        spec: The settings of the data.
        count: Maximum number of images of each kind (missed, alarms), class and model.
    """
    names = name_images(data, spec)
    failures = list[ClassFailures]()
    for model, by_class in scored.scores.items():
        for class_name, scores in by_class.items():
            if class_name in scored.class_names:
                rows = [ranked[:count] for ranked in rank_failures(scored, class_name, scores)]
                missed, alarms = (_make_cases(data, scored, names, scores, rows_of_kind) for rows_of_kind in rows)
                failures.append(ClassFailures(model, class_name, missed, alarms))
    return write_html_page(
        "failures.html.j2", path, (Path(__file__).parent,), private=True, site=data.name, failures=failures
    )


def rank_failures(
    scored: ScoredImages, class_name: str, scores: NDArray[np.floating]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return two arrays of image rows: positives of a class by rising score, and negatives by falling score.

    Images with an unknown label are left out.
    """
    labels = scored.labels[:, scored.class_names.index(class_name)]
    shown = np.flatnonzero(labels == 1)
    absent = np.flatnonzero(labels == 0)
    missed = shown[np.argsort(scores[shown], kind="stable")]
    alarms = absent[np.argsort(-scores[absent], kind="stable")]
    return missed, alarms


def name_images(data: DataToScore, spec: DataSpec) -> Sequence[str]:
    """Return the name of each image in the label table; its number if the table has no names of images."""
    if isinstance(spec, FolderDatasetSpec) and data.images.lines is not None:
        return [str(name) for name in data.read_cells(spec.image_column)]
    return [f"image {row + 1}" for row in range(len(data.images))]


def _make_cases(
    data: DataToScore,
    scored: ScoredImages,
    names: Sequence[str],
    scores: NDArray[np.floating],
    rows: NDArray[np.intp],
) -> tuple[FailureCase, ...]:
    images = data.images.select_rows(rows)
    patients = np.where(find_placeholder_patients(images.patients), "", images.patients)
    cases = []
    for row, patient, pixels in zip(rows, patients, images.images, strict=True):
        shows = tuple(name for name, label in zip(scored.class_names, scored.labels[row], strict=True) if label == 1)
        picture = base64.b64encode(encode_png_thumbnail(pixels, MAX_PICTURE_SIDE)).decode()
        cases.append(FailureCase(names[row], str(patient), float(scores[row]), shows, picture))
    return tuple(cases)
