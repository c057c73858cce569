"""One real training step with the run's model on this site's images; from it, minutes and megabytes a round."""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from client.check.findings import AreaFindings, Finding, fault, note
from client.check.needs import Needs, in_words, needs_of
from client.check.pictures import PictureFacts
from client.check.source import Source
from client.connection.exit_codes import ExitCode
from client.site.site_file import Settings, last_plan
from client.training.local_round import difference
from common.config import Experiment, Plan, RunSection, TrainingSection, plan_of
from common.data.base.image_set import ImageSet
from common.data.images.pixels import channels_first
from common.models.gpu import on_device, use_gpus, visible_gpus
from common.models.network import SplitNetwork, build, logits_of
from common.models.state import read_state
from common.models.zoo.spec import ModelSpec
from common.wire.codec import encode, payload_bytes
from common.wire.records import Groups, TrainReply
from strategies.local.objective import LocalRound
from strategies.local.optimisation import optimizer_for
from strategies.local.site_method import SiteMethod
from strategies.local.training import Frozen, TrainingTask, examples_of, plain, reproducible, train_epoch
from strategies.local.updates import compressed
from strategies.registry import method_of

PATIENCE_S = 15.0
"""Where the first step takes longer, it stands for the ones that follow."""
LINE_MBIT = 10.0
"""Of the line for which the time of a transfer is told."""


@dataclass(frozen=True)
class PlannedTraining:
    """What would be trained, and where it says so."""

    plan: Plan
    known_from: str
    assumed: bool = False


def work_of(settings: Settings, experiment: Experiment | None, source: Source) -> PlannedTraining:
    """The plan that is checked: of the experiment given, of the last roll call, or a guess."""
    if experiment is not None:
        return PlannedTraining(plan_of(experiment), "the experiment given")
    if plan := last_plan(settings.state):
        return PlannedTraining(plan, "the last roll call")
    model = ModelSpec(architecture="resnet18", image_size=max(32, min(224, source.side)))
    guess = Experiment(run=RunSection(method="surgical"), model=model, training=TrainingSection(batch_size=32))
    return PlannedTraining(plan_of(guess), "no run is known here: ResNet-18 assumed", assumed=True)


@dataclass(frozen=True)
class TrainingTrial:
    """A network, and some of the site's images to try it on.

    Attributes:
        totals: Images of the training and of the validation part, of which the trial has but some.
    """

    work: PlannedTraining
    method: SiteMethod
    network: SplitNetwork
    images: ImageSet
    device: str
    totals: tuple[int, int]
    gpus: int = 1

    @property
    def needs(self) -> Needs:
        one = channels_first(self.images.images[:1]).to(self.device)
        return needs_of(self.network, self.work.plan, one, sum(self.totals), self.gpus)


def trial_of(
    settings: Settings, work: PlannedTraining, source: Source, looks: tuple[PictureFacts, ...], device: str
) -> TrainingTrial:
    """Build the run's network, and a batch of images to train it on.

    Raises:
        BadInput: If the plan's method does not exist here, or its parameters do not fit.
    """
    names = settings.labels or source.class_names
    canonical = tuple(settings.synonyms.get(name, name) for name in names)
    columns = [source.class_names.index(name) for name in names]
    pixels = [look for look in looks if look.pixels is not None][: work.plan.training.batch_size]
    rows = np.array([look.row for look in pixels], dtype=np.intp)
    images = ImageSet(
        np.stack([look.pixels for look in pixels if look.pixels is not None]),
        np.ascontiguousarray(source.labels[rows][:, columns]),
        canonical,
        source.patients[rows],
        np.full(len(rows), ""),
    )
    network = on_device(build(work.plan.model, canonical, seed=0), device)
    gpus = settings.file.gpus if settings.file.gpus <= visible_gpus() else 1
    use_gpus(network.backbone, gpus)
    totals = int((source.parts == "train").sum()), int((source.parts == "validation").sum())
    return TrainingTrial(work, method_of(work.plan), network, images, device, totals, gpus)


@dataclass(frozen=True)
class Tried:
    """Seconds an image, bytes either way."""

    train_s: float
    validate_s: float
    down: int
    up: int


def check_training(trial: TrainingTrial, needs: Needs) -> AreaFindings:
    """Train a step or two, and reckon what a round takes."""
    try:
        tried = _tried(trial)
    except torch.cuda.OutOfMemoryError:
        remedy = 'Ask the coordinator for a smaller training.batch_size, or set device = "cpu" in site.toml.'
        return AreaFindings(
            "training", (), (fault(ExitCode.GPU, "the GPU's memory does not suffice for a step.", remedy),)
        )
    except Exception as error:  # any error of torch, its drivers or the data is what is looked for
        problem = f"a training step failed: {type(error).__name__}: {error}."
        return AreaFindings("training", (), (fault(ExitCode.TRAINING, problem, "Send the coordinator this line."),))
    return AreaFindings("training", *_estimate(trial, tried, needs))


def _estimate(
    trial: TrainingTrial, tried: Tried, needs: Needs
) -> tuple[tuple[str, ...], tuple[Finding, ...], dict[str, object]]:
    """What a round takes, in words, with the doubts, and as figures."""
    plan, (train, validation) = trial.work.plan, trial.totals
    seconds = plan.training.epochs * train * tried.train_s + validation * tried.validate_s
    down, up = tried.down / 1e6, tried.up / 1e6
    transfer = (down + up) * 8 / LINE_MBIT
    model = f"{plan.model.architecture}, {plan.model.image_size} pixels, batches of {plan.training.batch_size}"
    where = trial.device if trial.gpus == 1 else f"{trial.gpus} GPUs"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    passed = (
        f"{plan.run.method}, {model} ({trial.work.known_from}): a step on {where} works",
        f"a round: about {_minutes(seconds)} of training, {down:.1f} MB down, {up:.1f} MB up"
        f" ({_minutes(transfer)} at {LINE_MBIT:.0f} Mbit/s)",
        f"a model of {in_words(needs.model)}; this check took {in_words(peak)} of memory",
    )
    facts: dict[str, object] = {
        "method": plan.run.method,
        "architecture": plan.model.architecture,
        "known_from": trial.work.known_from,
        "device": trial.device,
        "seconds_a_round": round(seconds, 1),
        "mb_down": round(down, 2),
        "mb_up": round(up, 2),
        "peak_memory": peak,
    }
    return passed, tuple(_unsure(trial)), facts


def _unsure(trial: TrainingTrial) -> Iterator[Finding]:
    if trial.work.assumed:
        yield note("what a run will ask for is not known here.", "Name the coordinator's file: --experiment FILE.")
    if not trial.method.plain_client:
        problem = f"the step is a plain one; {trial.method.name}'s own may take two or three times as long."
        yield note(problem)


def _tried(trial: TrainingTrial) -> Tried:
    """Train a batch, and once more if that was quick: the first step of a process is slow."""
    plan, network = trial.work.plan, trial.network
    pixels = channels_first(trial.images.images).to(trial.device)
    examples = examples_of(trial.images, pixels, network.class_names)
    local = LocalRound(plain(trial.method.training_loss(examples, plan.training)))
    exercise = TrainingTask(examples, local.objective, plan.training, plan.augmentation, Frozen())
    received = read_state(network)
    with reproducible(0, plan.training.threads) as generator:
        optimizer = optimizer_for(network, plan.training, plan.training.lr)

        def step() -> object:
            return train_epoch(network, exercise, optimizer, generator)

        train_s = _timed(step)
        train_s = train_s if train_s > PATIENCE_S else _timed(step)
        validate_s = _timed(lambda: logits_of(network, pixels, plan.training.precision).cpu())
    update = difference(read_state(network), received, trial.method, trial.images.class_names)
    sent, _ = compressed(update, Groups(), trial.method.parameters.compress_update)
    count = len(examples)
    return Tried(train_s / count, validate_s / count, _wire_bytes(Groups.of_model(received)), _wire_bytes(sent))


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _wire_bytes(groups: Groups) -> int:
    """Count the bytes of a reply that holds these arrays."""
    return payload_bytes(encode(TrainReply("", 0, "", 1, 0.0, None, None, 0.0, groups)))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
