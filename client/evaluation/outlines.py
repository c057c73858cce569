"""``flwr-client evaluate`` of a segmentation: Dice, distances and outlines on a hospital's own images.

Nothing leaves the hospital. The page may show images of patients, so it is for this hospital's staff. No record of a
run contains a picture, at any level of the policy, so the coordinator's report of a real run shows no outlines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.client.evaluation.site import ALL_IMAGES, TEST_PART, load_images_to_score
from polyclinic.client.site.settings import choose_training_device, read_site_settings
from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.metrics.segmentation import SegmentationSummary, compute_patient_figures, summarise_patients
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.saved import load_model, read_model_description
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, is_segmentation
from polyclinic.common.prediction.outlined_images import (
    OutlinedImage,
    compare_test_images,
    draw_chosen_images,
    rank_images,
)
from polyclinic.common.reporting.page import write_html_page
from polyclinic.common.system.files import make_private_folder
from polyclinic.common.vocabulary import merge_words_of_classes
from polyclinic.data.base.image_set import ImageSet, are_all_patients_known
from polyclinic.data.base.pixel_form import read_as_trained
from polyclinic.data.images.outlines import COLOR_LEGEND

OUTLINES_PAGE = "outlines.html"


@dataclass(frozen=True)
class ClassPictures:
    """Images of one class in rising order of their Dice, each with its patient's name, empty if unknown."""

    name: str
    images: tuple[tuple[OutlinedImage, str], ...]


@dataclass(frozen=True)
class SegmentationAtSite:
    """The figures of a segmentation on a hospital's own images.

    Attributes:
        images: Number of images that were compared.
        about: A sentence that describes these images.
        figures: Dice and distances by class.
        page: Path of the HTML page.
    """

    images: int
    about: str
    figures: SegmentationSummary
    page: Path

    def make_json(self) -> dict[str, Any]:
        """Return the figures for ``--json``."""
        by_class = {
            name: {"dice": each.dice, "hd95": each.hd95, "patients": each.patients, "missed": each.missed}
            for name, each in self.figures.per_class.items()
        }
        return {
            "images": self.images,
            "unit": self.figures.unit,
            "mean_dice": self.figures.mean_dice,
            "classes": by_class,
        }


def is_segmentation_model(folder: Path) -> bool:
    """Return True if a folder contains a segmentation model."""
    return (folder / DESCRIPTION_FILE).is_file() and is_segmentation(read_model_description(folder).model.task)


def refuse_unfit_options(models: Sequence[Path], by: Sequence[str]) -> None:
    """Refuse options that have no meaning for a segmentation model.

    Raises:
        BadInput: If subgroups or several models are given.
    """
    if by:
        raise BadInput([Fault("--by", "is about scores of images, and this model segments.", "Leave it out.")])
    if len(models) > 1:
        problem = "is a segmentation, whose figures are those of one model."
        raise BadInput([Fault(str(models[0]), problem, "Name it alone.")])


def evaluate_segmentation_at_site(
    folder: Path, model: Path, out: Path, *, all_images: bool, worst: int, tell: Callable[[str], None]
) -> SegmentationAtSite:
    """Compare a model's predicted outlines with this hospital's outlines, and write the page.

    Args:
        folder: The site's folder.
        model: Folder of the model.
        out: Folder of the page.
        all_images: True for all images; False for the test part, as the site's earlier runs used it.
        worst: Number of images with the lowest Dice that the page shows for each class.
        tell: Prints lines for the hospital's staff.

    Raises:
        BadInput: If the data has no masks, or shares no class with the model.
    """
    settings = read_site_settings(folder)
    saved = read_model_description(model)
    device = choose_training_device(settings)
    as_trained = read_as_trained(settings.file.data, saved.pixels)

    loaded, _ = load_images_to_score(settings, as_trained, all_images=all_images, tell=tell)
    images = merge_words_of_classes(loaded, saved.vocabulary or {})
    unlearned = saved.unlearned or {}
    names = [name for name in saved.class_names if name in images.class_names and name not in unlearned]
    _refuse_images_without_outlines(images, names, saved.class_names)

    network = move_network_to_device(load_model(model), device)
    compared = compare_test_images(network, images, device, distances=True)
    columns = {name: network.class_names.index(name) for name in names}
    figures_by_class = {
        name: compute_patient_figures(compared, images.patients, column) for name, column in columns.items()
    }
    unit = "pixels" if images.masks is None or images.masks.spacing is None else "mm"
    over = "patients" if are_all_patients_known(images.patients) else "images"
    figures = replace(summarise_patients(figures_by_class, np.random.default_rng(0)), unit=unit, over=over)

    chosen = dict[str, list[tuple[int, float]]]()
    for name, column in columns.items():
        rows, dice = rank_images(compared, column)
        chosen[name] = list(zip(rows[:worst].tolist(), dice[:worst].tolist(), strict=True))
    pictures = _name_patients(images, draw_chosen_images(network, images, chosen, device)) if worst else ()

    make_private_folder(out)
    page = write_html_page(
        "outlines.html.j2",
        out / OUTLINES_PAGE,
        (Path(__file__).parent,),
        private=True,
        site=settings.file.name,
        model=model.resolve().name,
        about=ALL_IMAGES if all_images else TEST_PART,
        count=len(images),
        overlap=figures,
        pictures=pictures,
        colours=COLOR_LEGEND,
    )
    return SegmentationAtSite(len(images), ALL_IMAGES if all_images else TEST_PART, figures, page)


def _refuse_images_without_outlines(images: ImageSet, names: Sequence[str], known: Sequence[str]) -> None:
    if images.masks is None:
        problem = "has no masks, and the model segments."
        raise BadInput([Fault("data", problem, "Name mask_column with mask_values, or mask_columns, in site.toml.")])
    if not names:
        problem = f"outlines {quote_names(images.class_names)}, and the model has learned {quote_names(known)}."
        raise BadInput([Fault("data", problem, "Write [data.synonyms] in site.toml where words differ.")])


def _name_patients(images: ImageSet, drawn: Mapping[str, Sequence[OutlinedImage]]) -> tuple[ClassPictures, ...]:
    """Add the names of patients to the pictures of each class."""
    has_patients = are_all_patients_known(images.patients)

    def get_patient(image: OutlinedImage) -> str:
        return str(images.patients[image.row]) if has_patients else ""

    return tuple(
        ClassPictures(name, tuple((image, get_patient(image)) for image in class_images))
        for name, class_images in drawn.items()
    )
