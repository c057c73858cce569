"""The whole check of a site's folder: connection, machine, data and one training step."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from polyclinic.client.check.connection import check_connection
from polyclinic.client.check.contract import (
    add_contract_faults,
    compare_data_with_plan,
    make_contract_points,
    make_release_point,
)
from polyclinic.client.check.data import check_site_data
from polyclinic.client.check.findings import CheckArea, CheckResult, ClassImageCounts
from polyclinic.client.check.machine import MachineMeasurements, check_machine_resources, measure_machine
from polyclinic.client.check.pixels import check_site_pixels, make_form_of_pictures
from polyclinic.client.check.training import check_trial_training, find_planned_training, prepare_training_trial
from polyclinic.client.check.words import check_site_words
from polyclinic.client.site.class_columns import make_label_declaration
from polyclinic.client.site.site_file import SiteSettings, read_site_toml_without_data
from polyclinic.common.config import Experiment
from polyclinic.common.contract_points import ContractPoint
from polyclinic.common.errors import BadInput

DEFAULT_IMAGES = 200
"""Number of images that the check decodes."""


def run_site_check(
    folder: Path,
    *,
    images: int | None = DEFAULT_IMAGES,
    offline: bool = False,
    experiment: Experiment | None = None,
    look: Callable[[SiteSettings], MachineMeasurements] = measure_machine,
    environment: Mapping[str, str] = os.environ,
) -> tuple[CheckResult, tuple[ClassImageCounts, ...]]:
    """Check a site's folder, without changing a file and without sending any of the data.

    Args:
        images: Number of images to decode; None for all.
        offline: Skip the connection.
        experiment: The experiment that will be run, if the coordinator has sent it.
        look: Function that measures the machine.

    Returns:
        The findings, and the counts of each class for the table of classes.

    Raises:
        BadInput: If site.toml itself cannot be read.
    """
    settings = read_site_toml_without_data(folder)
    machine = look(settings)
    connection = check_connection(settings, environment, offline=offline)
    data = check_site_data(settings, images)

    training = CheckArea("training")
    trial = None
    points = tuple[ContractPoint, ...]()
    if data.source is None or not data.pictures:
        training.add_note("no step was trained: no image could be read.")
    else:
        gpu = machine.gpu and settings.file.device != "cpu" and torch.cuda.is_available()
        planned = find_planned_training(settings, experiment, data.source)
        declaration = make_label_declaration(settings, data.source.class_names)
        form = make_form_of_pictures(settings, data.source, data.pictures)
        comparison = compare_data_with_plan(declaration, form, planned.plan)
        check_site_pixels(data.area, planned, comparison)
        check_site_words(data.area, planned, declaration, comparison)
        try:
            if experiment is not None:
                points = make_contract_points(settings, planned, data.source, comparison)
                points = (*points, make_release_point(connection))
                add_contract_faults(training, points)
            if (form.depth is not None) == planned.plan.model.takes_volumes:
                trial = prepare_training_trial(settings, planned, data.source, data.pictures, "cuda" if gpu else "cpu")
            else:
                training.add_note("no step was trained: the images are not those that the network takes.")
        except BadInput as bad:
            training.add_input_faults(bad)

    needs = trial.estimated_resource_needs if trial else None
    checked_machine = check_machine_resources(machine, settings, needs)
    if trial and needs:
        check_trial_training(training, trial, needs)
    areas = connection, checked_machine, data.area, training
    return CheckResult(settings.file.name, areas, points), data.classes
