"""Plan the network of a run from all hospitals' training volumes, before the run's own roll call.

A first roll call asks every hospital for sums over its volumes (:mod:`polyclinic.common.volume_fingerprint`). The rules
of nnU-Net (:mod:`polyclinic.common.models.zoo.unet_planning`) give patch size, batch size, levels and normalisation
from these sums. Then they are part of the experiment, as if its file named them, and the run's own roll call sends them
to the hospitals.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray
from pydantic import ValidationError

from polyclinic.common.config import Experiment, PlanningSection, make_hospital_plan
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.models.zoo.spec import MIN_UNET_LEVELS, PLANNED_KEYS, PLANNED_NETWORK, ModelSpec, is_segmentation
from polyclinic.common.models.zoo.unet_planning import (
    COARSE_PERCENTILE,
    FEWEST_VOXELS,
    UNetPlan,
    choose_target_spacing,
    plan_unet,
)
from polyclinic.common.system.files import write_atomically
from polyclinic.common.volume_fingerprint import VolumeFingerprint, compute_percentile
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.data.base.spec import FolderDatasetSpec, describe_sides, format_image_size
from polyclinic.data.images.volume_notes import survey_volumes
from polyclinic.data.tables.labels import open_folder_label_table
from polyclinic.server.federation.evaluation import RunContext
from polyclinic.server.runs.progress import SilentRunProgress
from polyclinic.strategies.engine.events import MissingReplyStatus, RunCallbacks
from polyclinic.strategies.engine.membership import RunMembership
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.engine.sequential import make_coordinator
from polyclinic.strategies.registry import build_experiment_strategy

PLANNING_FILE = "planning.json"
PLANNING_RUN_SUFFIX = "-planning"
"""Suffix of the run name in the first roll call; it needs another name, because hospitals accept one plan per run."""
MAX_VOLUMES_PER_IMAGE = 2
"""Greatest number of volumes in a hospital's sums per stated training image; its policy rounds that number down."""
MAX_READ_HEADERS = 50
"""Number of volumes, spread over a table, whose headers are read to propose a missing spacing."""
MIN_GREY_DEVIATION = 1.0
"""Smallest standard deviation of grey values (0 to 255) for normalisation, so that nothing is divided by zero."""


@dataclass(frozen=True)
class PlannedNetwork:
    """The planned network, and the sums over volumes from which it was planned.

    Attributes:
        sites: The hospitals whose volumes are in the sums.
        left_out: Hospital that does not send its sums -> the reason.
        volumes: Number of training volumes.
        median_spacing: Spacing by the rules of nnU-Net, in mm.
        spacing: Spacing of the volumes as the hospitals read them, in mm.
        median_shape: Median number of voxels along each axis at this spacing.
        unet: The planned network.
        mean: Mean grey value of the outlined voxels, from 0 to 1; None if hospitals do not send it.
        std: Standard deviation of these grey values; None if hospitals do not send it.
    """

    sites: tuple[str, ...]
    left_out: Mapping[str, str]
    volumes: int
    median_spacing: tuple[float, ...]
    spacing: tuple[float, ...]
    median_shape: tuple[float, ...]
    unet: UNetPlan
    mean: float | None
    std: float | None

    def to_tables(self) -> dict[str, Any]:
        """Return the content of the file ``planning.json`` in the run folder, as JSON values."""
        return {
            "sites": list(self.sites),
            "left_out": dict(self.left_out),
            "volumes": self.volumes,
            "median_spacing": list(self.median_spacing),
            "spacing": list(self.spacing),
            "median_shape": list(self.median_shape),
            "model": self.planned_model_keys,
            "training": {"batch_size": self.unet.batch_size},
        }

    @property
    def planned_model_keys(self) -> dict[str, Any]:
        """Key of the table ``[model]`` of the experiment -> planned value."""
        keys: dict[str, Any] = {
            "patch_size": self.unet.patch_size,
            "kernel_sizes": self.unet.levels.kernel_sizes,
            "strides": self.unet.levels.strides,
        }
        if self.mean is not None and self.std is not None:
            keys |= {"mean": (self.mean,), "std": (self.std,)}
        return keys


@dataclass(frozen=True)
class PlanningCallbacks(RunCallbacks):
    """Show for whom the roll call of the plan waits: for a hospital's approval, for instance."""

    watchers: Sequence[SilentRunProgress]

    def on_waiting_for_sites(self, waiting: MissingReplyStatus) -> None:
        """Show which sites the plan waits for."""
        for watcher in self.watchers:
            watcher.show_waiting_sites(waiting)


def plan_network_of_run(
    grid: Grid, experiment: Experiment, run_context: RunContext, watchers: Sequence[SilentRunProgress]
) -> Experiment:
    """Return the experiment with the planned network; a resumed run keeps the network of its first round.

    The plan is written to the run folder.

    Args:
        watchers: Displays that show for whom the plan waits.

    Raises:
        BadInput: If the experiment leaves nothing to plan, or the hospitals' volumes are not sufficient for a plan.
        RunStopped: If too few hospitals reply.
    """
    if run_context.resumed is not None:
        experiment_before = run_context.resumed.experiment
        model = {key: experiment_before["model"].get(key) for key in PLANNED_KEYS}
        return _add_planned_keys(experiment, model, experiment_before["training"]["batch_size"])
    raise_faults(find_planning_faults(experiment))
    sites = _ask_for_fingerprints(grid, experiment, run_context, watchers)
    assert experiment.planning is not None, "checked by the caller"
    planned = plan_network(sites.members, sites.pixels, experiment.model, experiment.planning)
    planned = replace(planned, left_out={**sites.left_out_sites, **planned.left_out})
    tables = planned.to_tables()
    write_atomically(run_context.folder.path / PLANNING_FILE, json.dumps(tables, indent=1).encode())
    run_context.folder.append_event("planned", **tables)
    return _add_planned_keys(experiment, planned.planned_model_keys, planned.unet.batch_size)


def find_planning_faults(experiment: Experiment) -> list[Fault]:
    """Return the faults of an experiment with a table ``[planning]``; none without the table.

    The network must be one that can be planned, and the keys to plan must not be set.
    """
    model = experiment.model
    faults = list[Fault]()
    if experiment.planning is None:
        return []
    if model.architecture != PLANNED_NETWORK or not model.takes_volumes or not is_segmentation(model.task):
        problem = f"plans the levels of {PLANNED_NETWORK} for a segmentation of volumes."
        remedy = f'Set model.architecture = "{PLANNED_NETWORK}" with image_size = [depth, height, width], or leave out '
        faults.append(Fault("[planning]", problem, f"{remedy}[planning]."))
    if model.train != "all" or model.weights is not None:
        problem = "makes a new network, which has no weights yet."
        faults.append(Fault("[planning]", problem, "Leave out model.weights and model.train, or [planning]."))
    set_keys = [f"model.{key}" for key in PLANNED_KEYS if getattr(model, key) is not None]
    if "batch_size" in experiment.training.model_fields_set:
        set_keys.append("training.batch_size")
    faults += [Fault(key, "is what [planning] chooses.", "Leave it out, or leave out [planning].") for key in set_keys]
    return faults


def find_unspaced_volume_faults(experiment: Experiment, base: Path) -> list[Fault]:
    """Return a fault if the network of volumes in files is to be planned that are resized, each to voxels of its own.

    A simulation knows it before it reads a voxel; the spacing to write is that of some headers.

    Args:
        base: Folder to which paths of the experiment are relative.
    """
    data = experiment.data
    if experiment.planning is None or not isinstance(data, FolderDatasetSpec) or data.spacing is not None:
        return []
    try:
        files = open_folder_label_table(data, base).files
    except BadInput:
        return []  # which is refused with more words
    rows = np.unique(np.linspace(0, len(files) - 1, min(len(files), MAX_READ_HEADERS)).round().astype(int)).tolist()
    volumes = survey_volumes([files[row] for row in rows])
    if not volumes:
        return []
    spacing, shape = (np.array([getattr(volume, name) for volume in volumes]) for name in ("spacing", "shape"))
    median, finer = (np.percentile(spacing, each, axis=0).tolist() for each in (50, COARSE_PERCENTILE))
    lengths = np.median(spacing * shape, axis=0).tolist()
    target = choose_target_spacing(median, finer, [mm / side for mm, side in zip(lengths, median, strict=True)])
    return [_make_unspaced_fault(target, lengths)]


def _add_planned_keys(experiment: Experiment, model: Mapping[str, Any], batch_size: int) -> Experiment:
    tables = experiment.model.model_dump(mode="json") | {key: value for key, value in model.items() if value}
    training = experiment.training.model_copy(update={"batch_size": batch_size})
    return experiment.model_copy(update={"model": ModelSpec.model_validate(tables), "training": training})


def _ask_for_fingerprints(
    grid: Grid, experiment: Experiment, run_context: RunContext, watchers: Sequence[SilentRunProgress]
) -> RunMembership:
    """Make the first roll call, which asks for sums over volumes; return the hospitals with their answers."""
    plan = make_hospital_plan(experiment).model_copy(update={"planning": experiment.planning})
    coordinator = make_coordinator(
        build_experiment_strategy(experiment),
        plan,
        experiment.participation,
        f"{run_context.run}{PLANNING_RUN_SUFFIX}",
        callbacks=PlanningCallbacks(watchers),
        registered=run_context.registered,
        claims=run_context.claims,
        processes=run_context.processes,
    )
    coordinator.sites.call_roll(grid, run_context.sites)
    return coordinator.sites


def plan_network(
    members: Mapping[str, RunMember], pixels: PixelForm | None, model: ModelSpec, planning: PlanningSection
) -> PlannedNetwork:
    """Return the network for the volumes of these hospitals.

    Args:
        members: Site -> its answer to the first roll call.
        pixels: Format of the hospitals' pixels.
        model: The experiment's table ``[model]``.

    Raises:
        BadInput: If no hospital sends its sums, or the hospitals do not resample to a common spacing.
    """
    fingerprints = dict[str, VolumeFingerprint]()
    left_out = dict[str, str]()
    for site, member in sorted(members.items()):
        try:
            fingerprints[site] = read_fingerprint(member)
        except ValueError as error:
            left_out[site] = str(error)
    if not fingerprints:
        problem = f"none of the hospitals sends sums over its training volumes: {quote_names(left_out)}."
        remedy = "They leave with label_counts = true, from volumes of a table or arrays, and smallest_count patients."
        raise BadInput([Fault("[planning]", problem, f"{remedy} Or write the keys, and leave out [planning].")])
    total = reduce(add, fingerprints.values())

    # Spacings and lengths are in mm along depth, height and width.
    median_spacing = [compute_percentile(axis, 50) for axis in total.spacing]
    fine_spacing = [compute_percentile(axis, COARSE_PERCENTILE) for axis in total.spacing]
    median_lengths = [compute_percentile(axis, 50) for axis in total.extent]
    voxels = [length / side for length, side in zip(median_lengths, median_spacing, strict=True)]
    target_spacing = choose_target_spacing(median_spacing, fine_spacing, voxels)
    spacing = _find_common_spacing(pixels, target_spacing, median_lengths)
    median_shape = tuple(float(round(length / side)) for length, side in zip(median_lengths, spacing, strict=True))

    assert isinstance(model.image_size, tuple), "find_planning_faults checks this"
    stored_size = pixels.volume_size if pixels is not None else None
    volume_size = model.image_size if stored_size is None else stored_size
    largest_patch = [min(sides) for sides in zip(volume_size, model.image_size, strict=True)]
    classes = {name for member in members.values() for name in member.answer.class_names}
    sides = tuple(round(min(side, most)) for side, most in zip(median_shape, largest_patch, strict=True))
    if min(sides) < FEWEST_VOXELS:
        problem = f"finds volumes of {describe_sides(sides)}. Where an axis has fewer than {FEWEST_VOXELS}, nnU-Net's "
        problem += "own rules plan no network of volumes, but one of single slices."
        remedy = "Leave out [planning], and choose the network yourself; or train on slices, with one number as "
        raise BadInput([Fault("[planning]", problem, f"{remedy}image_size and data.frame.")])
    unet = plan_unet(spacing, median_shape, largest_patch, total.volumes, len(classes), planning.memory_gb)
    if len(unet.levels.strides) < MIN_UNET_LEVELS:
        size = describe_sides(tuple(round(side) for side in median_shape))
        problem = f"finds volumes of {size} too small for a network that halves them twice."
        raise BadInput([Fault("[planning]", problem, "Leave out [planning], and choose the network yourself.")])

    mean = std = None
    if model.channels == 1:
        mean, std = _compute_grey_statistics(np.array(total.grey, np.float64))
    return PlannedNetwork(
        sites=tuple(fingerprints),
        left_out=left_out,
        volumes=total.volumes,
        median_spacing=target_spacing,
        spacing=spacing,
        median_shape=median_shape,
        unet=unet,
        mean=mean,
        std=std,
    )


def read_fingerprint(member: RunMember) -> VolumeFingerprint:
    """Return the sums over a hospital's volumes.

    Raises:
        ValueError: If the hospital sends no sums, or sums that contradict each other or its number of images.
    """
    text = member.answer.fingerprint
    if not text:
        raise ValueError("its policy or its data let out no sums over volumes")
    try:
        fingerprint = VolumeFingerprint.model_validate_json(text)
    except ValidationError:
        raise ValueError("its sums cannot be read") from None
    if len({sum(count for _, count in axis) for axis in (*fingerprint.spacing, *fingerprint.extent)}) > 1:
        raise ValueError("its sums are of unequal numbers of volumes")
    if fingerprint.volumes > MAX_VOLUMES_PER_IMAGE * member.answer.train_samples:
        raise ValueError("its sums are of more volumes than it has")
    return fingerprint


def _find_common_spacing(
    pixels: PixelForm | None, target: Sequence[float], lengths: Sequence[float]
) -> tuple[float, ...]:
    """Return the spacing to which the hospitals resample their volumes, in mm.

    Args:
        pixels: Format of the hospitals' pixels.
        target: Spacing by the rules of nnU-Net, in mm; the message suggests it.
        lengths: Median lengths of volumes, in mm.

    Raises:
        BadInput: If the hospitals resize volumes to a common shape, so that each volume has another spacing.
    """
    if pixels is None or not pixels.decoded:
        return (1.0, 1.0, 1.0)
    if (spacing := pixels.read_setting("spacing")) is not None:
        return tuple(map(float, spacing))
    raise BadInput([_make_unspaced_fault(target, lengths)])


def _make_unspaced_fault(target: Sequence[float], lengths: Sequence[float]) -> Fault:
    """Return the fault of a missing spacing, with the lines to write.

    Args:
        target: The spacing that nnU-Net takes, in mm.
        lengths: Median length of the volumes along each axis, in mm.
    """
    depth, height, width = (max(1, round(mm / side)) for mm, side in zip(lengths, target, strict=True))
    rounded = [float(f"{side:.3g}") for side in target]
    problem = "is missing: volumes are resized, so that each has voxels of its own size, and [planning] plans for one."
    remedy = "The median of the volumes, as nnU-Net takes it; in site.toml, and [data] of a simulation:\n"
    lines = f"    spacing = {rounded}\n    image_size = {format_image_size((depth, height, width))}"
    return Fault("data.spacing", problem, remedy + lines)


def _compute_grey_statistics(counts: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return mean and standard deviation of grey values, both from 0 to 1; None without voxels.

    Args:
        counts: Number of voxels with each grey value of 0 to 255, ``(256,)``.
    """
    total = float(counts.sum())
    if not total:
        return None, None
    values = np.arange(len(counts))
    mean = float(counts @ values) / total
    deviation = float(np.sqrt(counts @ (values - mean) ** 2 / total))
    return mean / 255, max(deviation, MIN_GREY_DEVIATION) / 255
