"""Fit a model's probabilities on the hospital's validation images. Nothing leaves, and the model is not changed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from polyclinic.client.prediction.calibration import (
    Floats,
    ScalingMethod,
    SiteCalibration,
    calibrate_class,
    write_calibration,
)
from polyclinic.client.prediction.model import UsableModel
from polyclinic.client.site.settings import choose_training_device, load_site_data
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.prediction.masks import refuse_segmentation
from polyclinic.common.system.plain_text import format_number, format_utc_now
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.pixel_form import read_as_trained


def recalibrate_at_site(
    settings: SiteSettings, model: UsableModel, method: ScalingMethod, tell: Callable[[str], None]
) -> SiteCalibration:
    """Fit each learned class of a model on this site's images, and write ``calibration.json`` beside the model.

    Images of patients who opted out are not used.

    Raises:
        BadInput: If the data cannot be read, or model and site have no class in common.
    """
    data = read_as_trained(settings.file.data, model.description.pixels)
    own = replace(settings, file=settings.file.model_copy(update={"data": data}))
    site, _, _ = load_site_data(own, tell).make_present_site()
    site = site.name_classes_by(model.description.vocabulary)
    network = load_model(model.folder)
    device = choose_training_device(settings)
    refuse_segmentation(network, "recalibrate")
    if not set(model.learned_classes) & set(site.validation.class_names):
        named = quote_names(site.validation.class_names)
        problem = f"has {quote_names(model.learned_classes)}, and this site annotates {named}."
        raise BadInput([Fault("the model", problem, "Name a model of a study that this site took part in.")])
    scores = {
        part: compute_picture_probabilities(network, getattr(site, part), device) for part in ("validation", "test")
    }

    def select(part: str, name: str) -> tuple[Floats, Floats]:
        images: ImageSet = getattr(site, part)
        if name not in images.class_names:
            return np.zeros(0), np.zeros(0)
        column = images.class_names.index(name)
        return scores[part][:, network.class_names.index(name)], images.labels[:, column].astype(np.float64)

    fits = {
        name: calibrate_class(select("validation", name), select("test", name), method)
        for name in model.learned_classes
    }
    time = format_utc_now()
    sha256 = model.description.model_sha256
    calibration = SiteCalibration(model_sha256=sha256, method=method, time=time, classes=fits)
    write_calibration(model, calibration)
    return calibration


def format_calibration(calibration: SiteCalibration) -> Group:
    """Format a calibration for the terminal: for each class the fit, and the errors before and after it."""
    headings = ("class", "validation images", "slope", "offset", "error before", "after")
    table = fold_long_words(Table(*headings, width=80))
    notes = [Text("Error: the expected calibration error on the test part, 0 at best.")]
    for name, fit in calibration.classes.items():
        counts = f"{fit.positives:,} + {fit.negatives:,}"
        errors = (format_number(fit.error_before), format_number(fit.error_after))
        parameters = (format_number(fit.slope), format_number(fit.offset)) if fit.is_fitted else ("–", "–")
        table.add_row(Text(name), counts, *parameters, *errors)
        if fit.reason:
            notes.append(Text(f"{name} stays as it is: {fit.reason}."))
        elif fit.error_before is not None and fit.error_after is not None and fit.error_after > fit.error_before:
            notes.append(Text(f"{name}: the error on the test part grew; predict without --calibrated."))
    return Group(table, *notes)
