"""A trial training step with the run's model on this site's images, and an estimate of a round's time and traffic."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from polyclinic.client.check.findings import CheckArea
from polyclinic.client.check.machine import TrainingResourceNeeds, estimate_training_resource_needs
from polyclinic.client.check.pictures import PictureFacts
from polyclinic.client.check.source import SiteImageSource
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.site_file import SiteSettings, read_last_plan
from polyclinic.client.training.local_round import compute_model_difference
from polyclinic.common.class_columns import select_annotated_classes
from polyclinic.common.config import Experiment, HospitalPlan, RunSection, TrainingSection, make_hospital_plan
from polyclinic.common.models.gpu import count_visible_gpus, move_network_to_device, split_batches_across_gpus
from polyclinic.common.models.network import SplitNetwork, build_network, compute_logits
from polyclinic.common.models.segmenting import iterate_logits
from polyclinic.common.models.state import read_model_state
from polyclinic.common.models.zoo.registry import describe_image_size
from polyclinic.common.models.zoo.spec import ModelSpec, is_segmentation
from polyclinic.common.system.plain_text import format_bytes, make_printable_line
from polyclinic.common.wire.codec import count_payload_bytes, encode_record
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.masks import make_empty_masks
from polyclinic.data.images.pixels import ImageTensors, convert_to_channels_first
from polyclinic.strategies.local.objective import LocalRound, pair_pixels_with_labels, plain, read_in_patches
from polyclinic.strategies.local.optimisation import make_optimizer
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.training import (
    FrozenNetworkParts,
    TrainingTask,
    make_training_reproducible,
    train_epoch,
)
from polyclinic.strategies.local.updates import compress_trunk
from polyclinic.strategies.registry import build_site_method

MAX_REPEATED_STEP_S = 15.0
"""The first training step is repeated for the estimate, unless it took longer than this."""
ASSUMED_LINE_MBIT = 10.0
"""Assumed speed of the network connection, in Mbit/s, for the estimate of the transfer time."""


@dataclass(frozen=True)
class PlannedTraining:
    """The plan (model and training settings of a run) with which the site is checked.

    Attributes:
        origin: Origin of the plan, in words.
        assumed: True if this site knows no run, so that the plan is only an assumption.
    """

    plan: HospitalPlan
    origin: str
    assumed: bool = False


def find_planned_training(
    settings: SiteSettings, experiment: Experiment | None, source: SiteImageSource
) -> PlannedTraining:
    """Return the plan of ``experiment``, or else the plan of the last run that the coordinator announced to this site.

    Without both, return an assumed plan that fits the images.
    """
    if experiment is not None:
        return PlannedTraining(make_hospital_plan(experiment), "the experiment given")
    if plan := read_last_plan(settings.state_folder):
        return PlannedTraining(plan, "the last roll call")
    model = ModelSpec(architecture="resnet18", image_size=max(32, min(224, source.longer_image_side)))
    batch_size = 32
    origin = "no run is known here: ResNet-18 assumed"
    if (size := source.volume_size) is not None:
        model = ModelSpec(architecture="tiny_cnn_3d", channels=1, image_size=size)
        batch_size = 4
        origin = "no run is known here: tiny_cnn_3d assumed"
    guess = Experiment(run=RunSection(method="surgical"), model=model, training=TrainingSection(batch_size=batch_size))
    return PlannedTraining(make_hospital_plan(guess), origin, assumed=True)


@dataclass(frozen=True)
class TrainingTrial:
    """A run's network, and a batch of the site's images for a trial training step.

    Attributes:
        totals: Numbers of all training images and of all validation images of the site.
        gpus: Number of GPUs that share each batch.
        images_on_disk: True if decoded images are kept on disk, and not in memory.
    """

    planned: PlannedTraining
    method: SiteMethod
    network: SplitNetwork
    images: ImageSet
    device: str
    totals: tuple[int, int]
    gpus: int = 1
    images_on_disk: bool = False

    @property
    def estimated_resource_needs(self) -> TrainingResourceNeeds:
        sample = convert_to_channels_first(self.images.images[:1]).to(self.device)
        plan = self.planned.plan
        total = sum(self.totals)
        on_disk = self.images_on_disk
        return estimate_training_resource_needs(self.network, plan, sample, total, self.gpus, images_on_disk=on_disk)


def prepare_training_trial(
    settings: SiteSettings,
    planned: PlannedTraining,
    source: SiteImageSource,
    pictures: tuple[PictureFacts, ...],
    device: str,
) -> TrainingTrial:
    """Build the run's network and choose a batch of images for the trial training step.

    Raises:
        BadInput: If the plan's method is not installed here, or its parameters are wrong.
    """
    plan = planned.plan
    batch = [(facts.row, facts.pixels) for facts in pictures if facts.pixels is not None][: plan.training.batch_size]
    rows = np.array([row for row, _ in batch], dtype=np.intp)
    pixels = np.stack([pixels for _, pixels in batch])
    images = ImageSet(pixels, source.labels[rows], source.class_names, source.patients[rows], np.full(len(rows), ""))
    images = select_annotated_classes(images, settings.labels, settings.synonyms)
    network = move_network_to_device(build_network(plan.model, images.class_names, seed=0), device)
    gpus = settings.file.gpus if settings.file.gpus <= count_visible_gpus() else 1
    split_batches_across_gpus(network.backbone, gpus)
    totals = int((source.parts == "train").sum()), int((source.parts == "validation").sum())
    on_disk = source.form is not None and settings.file.policy.keep_images != "no"
    return TrainingTrial(planned, build_site_method(plan), network, images, device, totals, gpus, on_disk)


@dataclass(frozen=True)
class TrainingStepCost:
    """Measured seconds to train on and to validate one image, and bytes of the received model and the sent update."""

    train_s: float
    validate_s: float
    received: int
    sent: int


def check_trial_training(area: CheckArea, trial: TrainingTrial, needs: TrainingResourceNeeds) -> None:
    """Run a trial training step; add to ``area`` the estimated time and traffic of a round, or the step's fault."""
    try:
        cost = _measure_training_step(trial)
    except torch.cuda.OutOfMemoryError:
        remedy = 'Ask the coordinator for a smaller training.batch_size, or set device = "cpu" in site.toml.'
        area.add_fault(ClientExitCode.GPU, "the GPU's memory does not suffice for a step.", remedy)
        return
    except Exception as error:  # the check is for any error of torch, its drivers or the data
        problem = f"a training step failed: {type(error).__name__}: {error}."
        area.add_fault(ClientExitCode.TRAINING, problem, "Send the coordinator this line.")
        return

    plan = trial.planned.plan
    train, validation = trial.totals
    models = 1 + trial.method.traits.trains_own_model
    seconds = models * plan.training.epochs * train * cost.train_s + validation * cost.validate_s
    down = cost.received / 1e6
    up = cost.sent / 1e6
    transfer = (down + up) * 8 / ASSUMED_LINE_MBIT

    size = describe_image_size(plan.model.input_size)
    unit = "" if plan.model.patch_size is None else " patches"
    model = f"{plan.model.architecture}, {size}, batches of {plan.training.batch_size}{unit}"
    where = trial.device if trial.gpus == 1 else f"{trial.gpus} GPUs"
    name = f'"{make_printable_line(plan.run.name)}": ' if plan.run.name else ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    if plan.run.purpose:
        area.passed.append(f"the purpose of the study: {make_printable_line(plan.run.purpose)}")
    area.passed += [
        f"{name}{plan.run.method}, {model} ({trial.planned.origin}): a step on {where} works",
        f"a round: about {_format_seconds_or_minutes(seconds)} of training, {down:.1f} MB down, {up:.1f} MB up"
        f" ({_format_seconds_or_minutes(transfer)} at {ASSUMED_LINE_MBIT:.0f} Mbit/s)",
        f"a model of {format_bytes(needs.model)}; this check took {format_bytes(peak)} of memory",
    ]

    if trial.planned.assumed:
        area.add_note("what a run will ask for is not known here.", "Name the coordinator's file: --experiment FILE.")
    if not trial.method.loss_is_per_image:
        area.add_note(f"the step is a plain one; {trial.method.name}'s own may take two or three times as long.")

    area.facts = {
        "method": plan.run.method,
        "architecture": plan.model.architecture,
        "known_from": trial.planned.origin,
        "device": trial.device,
        "seconds_a_round": round(seconds, 1),
        "mb_down": round(down, 2),
        "mb_up": round(up, 2),
        "peak_memory": peak,
    }


def _measure_training_step(trial: TrainingTrial) -> TrainingStepCost:
    """Measure a training step and its update; a short step is repeated, because a process's first step is slower."""
    plan = trial.planned.plan
    network = trial.network
    pixels = convert_to_channels_first(trial.images.images).to(trial.device)
    images = trial.images
    if is_segmentation(plan.model.task):  # the time of a step does not depend on what the masks show
        masks = make_empty_masks(len(images), pixels.shape[2:], images.class_names)
        images = replace(images, masks=masks)
    inputs = ImageTensors(pixels, None, pixels.device)
    examples = pair_pixels_with_labels(images, inputs, network.class_names)
    examples = read_in_patches(examples, plan.model, plan.training)
    local = LocalRound(plain(trial.method.choose_training_loss(examples, plan.training)))
    task = TrainingTask(examples, local.objective, plan.training, plan.augmentation, FrozenNetworkParts())
    received = read_model_state(network)
    with make_training_reproducible(0, plan.training.threads) as generator:
        optimizer = make_optimizer(network, plan.training, plan.training.lr)

        def train_one_epoch() -> object:
            return train_epoch(network, task, optimizer, generator)

        train_s = _measure_seconds(train_one_epoch)
        train_s = train_s if train_s > MAX_REPEATED_STEP_S else _measure_seconds(train_one_epoch)
        validate_s = _measure_seconds(lambda: _compute_all_logits(network, inputs, plan))
    update = compute_model_difference(read_model_state(network), received, trial.method, trial.images.class_names)
    parameters = trial.method.parameters
    sent, _ = compress_trunk(update, ModelGroups(), parameters.compress_update)
    model, _ = compress_trunk(ModelGroups.from_model(received), ModelGroups(), parameters.compress_model)
    down, up = (
        count_payload_bytes(encode_record(TrainReply("", 0, "", 1, 0.0, None, None, 0.0, groups)))
        for groups in (model, sent)
    )
    return TrainingStepCost(train_s / len(examples), validate_s / len(examples), down, up)


def _compute_all_logits(network: SplitNetwork, inputs: ImageTensors, plan: HospitalPlan) -> None:
    precision = plan.training.precision
    if is_segmentation(plan.model.task):  # the logits of all pixels would not fit into memory
        for _, logits in iterate_logits(network, inputs, precision):
            logits.cpu()
        return
    compute_logits(network, inputs, precision).cpu()


def _measure_seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _format_seconds_or_minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
