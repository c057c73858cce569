"""One check, from the folder to the result; every area is looked at as far as the others let it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from client.check.connection import check_connection
from client.check.data import Data, check_data
from client.check.findings import AreaFindings, Finding, Result, note, of_input
from client.check.labels import ClassCounts
from client.check.machine import Machine, check_machine, measured
from client.check.training import TrainingTrial, check_training, trial_of, work_of
from client.site.site_file import Settings, read_credentials, read_file_only
from common.config import Experiment
from common.errors import BadInput
from common.security.identity import SiteKit, read_key, read_kit

IMAGES = 200


def check(
    folder: Path,
    *,
    images: int | None = IMAGES,
    offline: bool = False,
    experiment: Experiment | None = None,
    look: Callable[[Settings], Machine] = measured,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Result, tuple[ClassCounts, ...]]:
    """Check a site's folder; nothing of it is changed, nothing leaves.

    Args:
        images: How many to decode; None for all.
        offline: Leave the connection out.
        experiment: What will be run, where the coordinator has given it.
        look: Measures the machine.

    Returns:
        What was found, and the label table.

    Raises:
        BadInput: If site.toml itself cannot be read.
    """
    settings = read_file_only(folder)
    machine = look(settings)
    connection = _connection(settings, environment, offline=offline)
    data = check_data(settings, images)
    trial, lacking = _trial(settings, experiment, data, machine)
    needs = trial.needs if trial else None
    judged = check_machine(machine, settings, needs)
    training = check_training(trial, needs) if trial and needs else AreaFindings("training", (), tuple(lacking))
    return Result(settings.file.name, (connection, judged, data.checked, training)), data.classes


def _connection(settings: Settings, environment: Mapping[str, str], *, offline: bool) -> AreaFindings:
    """Check the connection; files that do not fit together are faults, and the connection is tried all the same."""
    if offline and not settings.kit_path.is_file():
        waiting = f"not looked at (--offline); {settings.kit_path.name} is still to come from the coordinator."
        return AreaFindings("connection", (), (*_faults_of_key(settings), note(waiting)))
    faults = list[Finding]()
    try:
        read_credentials(settings)
    except BadInput as bad:
        faults = of_input(bad)
    if offline:
        return AreaFindings("connection", (), (*faults, note("not looked at (--offline).")))
    kit = _kit(settings)
    if kit is None:
        return AreaFindings(
            "connection", (), (*faults, note("not looked at: without the kit the address is not known."))
        )
    try:
        key = read_key(settings.key_path)
    except BadInput:
        key = None
    checked = check_connection(kit, key, environment)
    return AreaFindings("connection", checked.passed, (*faults, *checked.findings), checked.facts)


def _faults_of_key(settings: Settings) -> list[Finding]:
    try:
        read_key(settings.key_path)
    except BadInput as bad:
        return of_input(bad)
    return []


def _kit(settings: Settings) -> SiteKit | None:
    try:
        return read_kit(settings.kit_path)
    except BadInput:
        return None


def _trial(
    settings: Settings, experiment: Experiment | None, data: Data, machine: Machine
) -> tuple[TrainingTrial | None, list[Finding]]:
    """Something to train, or why there is nothing."""
    if data.source is None or not data.looks:
        return None, [note("no step was trained: no image could be read.")]
    work = work_of(settings, experiment, data.source)
    device = "cuda" if machine.gpu and settings.file.device != "cpu" else "cpu"
    try:
        return trial_of(settings, work, data.source, data.looks, _usable(device)), []
    except BadInput as bad:
        return None, of_input(bad)


def _usable(device: str) -> str:
    """A step is trained on what is there, no matter what was said to have been measured."""
    return device if torch.cuda.is_available() else "cpu"
