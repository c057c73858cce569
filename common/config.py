"""The experiment file: schema, reading, and every fault of it at once.

An experiment is TOML. ``extends = "other.toml"`` takes over another file's keys, so that a baseline's file says only
what differs; ``--set section.key=value`` overrides any key. The part that a hospital needs travels as a :class:`Plan`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from common.data.base.spec import AugmentationSpec, DataSpec
from common.data.partition.spec import PartitionSpec
from common.errors import BadInput, Fault
from common.models.zoo.spec import ModelSpec, Sha256
from common.plugins import (
    LOSSES,
    METHODS,
    METRICS,
    MODELS,
    MOST_METRICS,
    OPTIMIZERS,
    PLUGIN,
    SCHEDULES,
    TRANSFORMS,
    OrPlugin,
    PluginName,
    PluginStamp,
    stamp_of,
)
from common.system.files import is_file
from common.system.plain_text import listed
from common.system.toml import Section, parsed_toml, read_toml, validation_faults

Exponent = Annotated[float, Field(ge=0, le=20)]


class RunSection(Section):
    """What is run, for how long, from which seed.

    Attributes:
        keep_updates: Whether the coordinator keeps every update that counted, so that ``flwr-server verify`` can add
            them up again; sites are told.
    """

    method: str
    rounds: int = Field(20, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    name: str = ""
    keep_updates: bool = False


class TrainingSection(Section):
    """Local training at each site, one round.

    Attributes:
        optimizer: ``adam``, ``adamw``, ``sgd``, or ``plugin:NAME``.
        reset_optimizer: Start each round with a fresh optimiser state; else a site keeps it on its disk (specs S7).
        schedule: How the learning rate goes over the run's rounds: ``constant``, ``cosine`` down to nearly 0, or
            ``plugin:NAME``.
        schedule_warm_up: Rounds in which it first rises in equal steps.
        loss: What is minimised: the method's plain loss, ``focal``, ``asymmetric``, or ``plugin:NAME``.
        class_weights: Whether the positives of a class, or its images, weigh more where a site has few of them.
        focal_gamma: Exponent of the focal loss.
        asymmetric_gammas: Exponents of the asymmetric loss, for positives and for negatives.
        asymmetric_margin: By how much the asymmetric loss lowers the probability of a negative.
        clip_gradients: Longest Euclidean length of a step's gradient; None for any.
        gradient_accumulation_steps: Batches whose gradients are added up to one step, for batches that memory does not
            hold.
        threads: Threads per site. Part of the experiment, because their number changes float sums.
        precision: ``auto`` is ``bf16`` on a GPU and ``float32`` on a CPU; ``bf16`` on a CPU needs AVX-512 BF16 or AMX,
            else it is ``float32``; ``fp16`` is for GPUs that have no bfloat16; ``fastest`` is chosen at each site, with
            ``memory_format``, by measurement.
        memory_format: The order in which convolutions keep an image's numbers in memory.
    """

    epochs: int = Field(1, ge=1)
    batch_size: int = Field(64, ge=1)
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], OrPlugin] = "adam"
    lr: float = Field(1e-3, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    reset_optimizer: bool = False
    schedule: Annotated[Literal["constant", "cosine"], OrPlugin] = "constant"
    schedule_warm_up: int = Field(0, ge=0)
    loss: Annotated[Literal["plain", "focal", "asymmetric"], OrPlugin] = "plain"
    class_weights: bool = False
    focal_gamma: float = Field(2.0, ge=0, le=20)
    asymmetric_gammas: tuple[Exponent, Exponent] = (1.0, 4.0)
    asymmetric_margin: float = Field(0.05, ge=0, lt=1)
    clip_gradients: float | None = Field(None, gt=0)
    gradient_accumulation_steps: int = Field(1, ge=1, le=4096)
    threads: int = Field(1, ge=1, le=1024)
    precision: Literal["auto", "float32", "bf16", "fp16", "fastest"] = "auto"
    memory_format: Literal["channels_last", "contiguous"] = "channels_last"


class EvaluationSection(Section):
    """What is evaluated when.

    Attributes:
        test_each_round: Every site also counts, each round, how many images of its own test part the model as received
            puts into the right class (multi-class tasks): what FedSLD's paper reports. It chooses nothing.
        pooled: Ask every site, with the test of the model that the run ends with, how scores are spread over its test
            part, so that AUROCs over all sites' images can be told; a hospital's policy decides whether it answers.
        sensitivity: A second threshold of each class is the highest with at least this sensitivity on the sites'
            validation images; the first is Youden's.
        result: The model that a run ends with: the ``best`` one on validation, or that of the ``last`` round.
        criterion: What the best round is chosen by: the ``method``'s own criterion, the sites' mean validation
            ``auroc``, or their mean validation ``loss``.
        sites: Sites that test the model that the run ends with, drawn from (seed, round); 0 stands for all. None asks
            all of up to 100; of more, all where all train in a round, else 100 or as many as train in one.
        metrics: Metrics of plug-ins, computed of each class on test images beside ours.
        sample_grid: Whether the report of a simulation shows some test images; None does where they are nobody's.
        alone: Whether every site, after the run's test, trains once more alone and compares that model with the run's
            on its own test part.
    """

    test_each_round: bool = False
    pooled: bool = True
    sensitivity: float = Field(0.9, gt=0, le=1)
    checkpoint: Literal["best", "last"] = "best"
    criterion: Literal["method", "auroc", "loss"] = "method"
    sites: int | None = Field(None, ge=0)
    metrics: Annotated[tuple[PluginName, ...], Field(max_length=MOST_METRICS)] = ()
    sample_grid: bool | None = None
    compare_local: bool = False


class ParticipationSection(Section):
    """How many sites a round needs, how long it waits for them, and how far one site may move the model.

    Attributes:
        min_sites: Replies that make a round count; 0 stands for all sites.
        sites_per_round: Sites drawn for a round; 0 stands for all.
        round_deadline_s: Seconds after which a round goes on without the missing sites.
        roll_call_deadline_s: Seconds that the run waits for ``min_sites`` sites before round 1.
        clip: The longest update that one site may send, in median lengths of its round; ``off`` for any, and then no
            model that collapses is taken back either.
        largest_share: Of all images that count, at most so many are one site's, where sites weigh by images.
    """

    min_sites: int = Field(0, ge=0)
    sites_per_round: int = Field(0, ge=0)
    round_deadline_s: float = Field(3600.0, gt=0)
    roll_call_deadline_s: float = Field(300.0, gt=0)
    clip: Annotated[float, Field(ge=1)] | Literal["off"] = 3.0
    largest_share: float = Field(1.0, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _no_key_of_earlier_releases(cls, given: Any) -> Any:
        gone = [key for key in ("guard", "far_updates") if isinstance(given, Mapping) and key in given]
        if gone:
            raise ValueError(
                f"{listed(gone)} no longer exists: remove the line; clip bounds what one site can do (3.0, or off)"
            )
        return given

    @model_validator(mode="after")
    def _a_round_can_count(self) -> Self:
        if 0 < self.sites_per_round < self.min_sites:
            raise ValueError(
                f"no round could count: min_sites {self.min_sites}, sites_per_round {self.sites_per_round}"
            )
        return self


BY_STEP: Final = ("sample", "patient")
"""Levels of privacy at which each step of training is noisy."""


class PrivacySection(Section):
    """Differential privacy at the sites and secure aggregation; what they cover and what not: docs/privacy.md.

    Attributes:
        level: What the noise hides: ``sample``, whether one image was trained on (DP-SGD); ``patient``, whether all
            images of one patient were; ``update``, all data that a site has, in what it sends.
        max_grad_norm: Longest Euclidean length of one image's gradient at ``sample``; at ``patient``, of the sum over
            one patient's images. This and the next two are from 1e-6 to 1e6: near the ends of a float32 rounding would
            make what is clipped longer than the bound.
        max_update_norm, max_statistics_norm: At ``update``, longest length of a site's update, and of a method's
            statistics.
        noise_multiplier: Standard deviation of the noise over how far one image, or all of a site's data, can move what
            it is added to.
        epsilon: Instead, what the whole run may cost a site; it finds its own noise for that.
        delta: At which epsilon is told.
        accountant: How epsilon is found: Renyi divergences, or the tighter and slower privacy loss distribution.
        secure_aggregation: The coordinator sees sums of updates, and no single one.
        max_update_value: Under secure aggregation, the largest size of one number of an update: each is clipped to it.
            Where left out,
            ``method.clip_update``, or 16.
        noise: At ``update``: each site adds all noise that hides it (``local``), or under secure aggregation a share,
            so that the sum carries it (``distributed``).
        honest_sites: With distributed noise, how many sites of a sum add their share at least: epsilon holds only
            while so many do. No sum of fewer is opened.
    """

    level: Literal["none", "sample", "patient", "update"] = "none"
    max_grad_norm: float = Field(1.0, ge=1e-6, le=1e6)
    max_update_norm: float = Field(1.0, ge=1e-6, le=1e6)
    max_statistics_norm: float = Field(1.0, ge=1e-6, le=1e6)
    noise_multiplier: float | None = Field(None, ge=0)
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    accountant: Literal["rdp", "prv"] = "prv"
    secure_aggregation: bool = False
    max_update_value: float | None = Field(None, ge=1e-6)
    noise: Literal["local", "distributed"] = "local"
    honest_sites: int | None = Field(None, ge=2)

    @property
    def covers(self) -> bool:
        """Whether an update leaves with noise or under a mask."""
        return self.secure_aggregation or self.level != "none"

    @model_validator(mode="after")
    def _noise_is_shared_only_in_sums(self) -> Self:
        if self.noise == "local":
            if self.honest_sites is not None:
                raise ValueError('honest_sites goes with noise = "distributed"')
            return self
        if self.honest_sites is None:
            raise ValueError('noise = "distributed" needs honest_sites: how many sites of a sum add noise at least')
        if self.level != "update" or not self.secure_aggregation:
            reason = "a share hides nothing by itself, and DP-SGD adds its noise in each local step"
            raise ValueError(f'noise = "distributed" goes with level = "update" and secure_aggregation: {reason}')
        if self.noise_multiplier == 0 or self.max_update_value is not None:
            raise ValueError('noise = "distributed" goes with noise, and with max_update_norm, not max_update_value')
        return self

    @model_validator(mode="after")
    def _noise_is_said_once(self) -> Self:
        said = (self.noise_multiplier is not None) + (self.epsilon is not None)
        if said != (self.level != "none"):
            raise ValueError("noise_multiplier or epsilon, one of them, goes with a level other than none")
        return self


class SimulationSection(Section):
    """Where simulated sites run.

    Attributes:
        workers: Sites trained at a time; 0 chooses by cores, memory and GPUs.
        gpus_per_site: GPUs that a site takes: a share of one, or several, across which each batch is split. ``auto``
            divides the GPUs evenly among the workers, 0 trains on the CPU.
        address: Ray cluster to join, e.g. ``auto`` or ``10.0.0.5:6379``; empty starts one here.
    """

    backend: Literal["ray", "inline"] = "ray"
    workers: int = Field(0, ge=0)
    gpus_per_site: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    address: str = ""

    @field_validator("gpus_per_site")
    @classmethod
    def _a_share_or_whole(cls, gpus: float | Literal["auto"]) -> float | Literal["auto"]:
        if isinstance(gpus, float) and gpus > 1 and not gpus.is_integer():
            raise ValueError("above 1 it is a whole number of GPUs")
        return gpus

    @property
    def gpu_share(self) -> float | None:
        """GPUs that a site takes; None where the machine's GPUs decide."""
        return self.gpus_per_site if isinstance(self.gpus_per_site, float) else None

    @property
    def gpus_a_batch(self) -> int:
        """Number of GPUs across which each batch of a site is split."""
        return max(1, int(self.gpu_share or 0))


class Experiment(Section):
    """A whole experiment file.

    Attributes:
        data, partition: Of a simulation.
        server_data: Images of the coordinator's own: to train on where the method does that, to judge by, to test on.
        external_test: Images of another place, which no site has: the finished model is tested on them too.
    """

    run: RunSection
    method: dict[str, Any] = Field(default_factory=dict)
    model: ModelSpec
    training: TrainingSection = TrainingSection()
    augmentation: AugmentationSpec = AugmentationSpec()
    evaluation: EvaluationSection = EvaluationSection()
    participation: ParticipationSection = ParticipationSection()
    privacy: PrivacySection = PrivacySection()
    simulation: SimulationSection = SimulationSection()
    data: DataSpec | None = None
    partition: PartitionSpec | None = None
    server_data: DataSpec | None = None
    external_test: DataSpec | None = None

    @model_validator(mode="after")
    def _nothing_private_chooses(self) -> Self:
        if self.privacy.level != "none" and self.evaluation.checkpoint == "best":
            raise ValueError(
                "with privacy no site need tell its validation loss, and nothing can say which round was best: "
                'set evaluation.checkpoint = "last"'
            )
        return self

    @model_validator(mode="after")
    def _nobody_looks_at_what_is_masked(self) -> Self:
        if self.privacy.secure_aggregation and self.participation.largest_share < 1:
            raise ValueError(
                "under secure aggregation each site weighs its own update: participation.largest_share must be 1"
            )
        return self

    @model_validator(mode="after")
    def _every_site_is_tested_on_one_class_an_image(self) -> Self:
        if self.evaluation.test_each_round and self.model.task != "multi_class":
            raise ValueError('evaluation.test_each_round counts right classes: it needs model.task = "multi_class"')
        if self.evaluation.test_each_round and self.participation.sites_per_round:
            raise ValueError("evaluation.test_each_round is about all sites: it does not go with sites_per_round")
        return self


class Plan(Section):
    """The part of an experiment that hospitals get: what to train and how, nothing about anybody's data.

    Attributes:
        weights_sha256: Hash of the weights file that the first model is built from; None where it is of the seed.
    """

    run: RunSection
    method: dict[str, Any]
    model: ModelSpec
    training: TrainingSection
    augmentation: AugmentationSpec
    evaluation: EvaluationSection = EvaluationSection()
    privacy: PrivacySection = PrivacySection()
    plugins: tuple[PluginStamp, ...] = ()
    weights_sha256: Sha256 | None = None

    @property
    def keeps_optimizer(self) -> bool:
        """Whether a site goes on with its optimiser's state; under masks it could make all updates but one vanish."""
        has_state = self.training.optimizer != "sgd" or self.training.momentum > 0
        return has_state and not self.training.reset_optimizer and not self.privacy.secure_aggregation


LONGEST_KEPT = 2**20
"""Characters of a plan that is read once for all requests of a run; an honest one has some thousand."""


def plan_of_text(text: str) -> Plan:
    """Read a plan as it travels, JSON; every request of a run holds the same.

    Raises:
        ValidationError: If it is none.
    """
    if len(text) > LONGEST_KEPT:
        return Plan.model_validate_json(text)
    plan = _plan_of_text(text)
    return plan.model_copy(update={"method": copy.deepcopy(plan.method)})  # a plug-in may write into its parameters


@lru_cache(maxsize=4)
def _plan_of_text(text: str) -> Plan:
    return Plan.model_validate_json(text)


def plan_of(experiment: Experiment) -> Plan:
    """Cut an experiment down to what travels; of the weights file its hash, for sites start from what they get.

    Raises:
        BadInput: If it names a plug-in that is not installed.
    """
    model = experiment.model.model_copy(update={"weights": None, "weights_sha256": None})
    return Plan(
        run=experiment.run,
        method=experiment.method,
        model=model,
        training=experiment.training,
        augmentation=experiment.augmentation,
        evaluation=experiment.evaluation,
        privacy=experiment.privacy,
        plugins=plugins_of(experiment),
        weights_sha256=experiment.model.weights_sha256,
    )


def plugins_of(experiment: Experiment) -> tuple[PluginStamp, ...]:
    """The stamps of the plug-ins that an experiment names, as this machine has them.

    Raises:
        BadInput: If one is not installed.
    """
    named = [(METHODS, experiment.run.method), (MODELS, experiment.model.architecture)]
    named += [(LOSSES, experiment.training.loss), (OPTIMIZERS, experiment.training.optimizer)]
    named += [(SCHEDULES, experiment.training.schedule), (TRANSFORMS, experiment.augmentation.transform or "")]
    named += [(METRICS, metric) for metric in dict.fromkeys(experiment.evaluation.metrics)]
    return tuple(stamp_of(group, name.removeprefix(PLUGIN)) for group, name in named if name.startswith(PLUGIN))


@dataclass(frozen=True)
class ExperimentFile:
    """An experiment with the folder that its relative paths start from."""

    experiment: Experiment
    path: Path

    @property
    def base(self) -> Path:
        return self.path.parent


def read_experiment(
    path: Path, overrides: Iterable[str] = (), also: Callable[[Mapping[str, Any]], Sequence[Fault]] = lambda tree: ()
) -> ExperimentFile:
    """Read an experiment file, its ancestors and ``key=value`` overrides.

    Args:
        also: What else is wrong with a file that has faults: with its method, of which nothing is known here.

    Raises:
        BadInput: With every fault of the file and the overrides.
    """
    tree, base_of_paths = read_tables(path)
    return experiment_of(tree, base_of_paths, overrides, also, path.name)


def experiment_of(
    tree: dict[str, Any],
    base_of_paths: Path,
    overrides: Iterable[str] = (),
    also: Callable[[Mapping[str, Any]], Sequence[Fault]] = lambda tree: (),
    name: str = "experiment",
) -> ExperimentFile:
    """Check the tables of an experiment, with ``key=value`` overrides.

    Args:
        base_of_paths: The file beside which relative paths start; it need not exist.
        also: What else is wrong with an experiment that has faults.
        name: Of the experiment, for its faults.

    Raises:
        BadInput: With every fault.
    """
    tree, overrides, faults = _scaled(tree, overrides, name)
    faults += [fault for text in overrides for fault in _override(tree, text)]
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        faults += validation_faults(error, Experiment, name, extra=("extends",))
        faults += [replace(fault, where=f"{name}: {fault.where}") for fault in also(tree)]
        raise BadInput(faults) from None
    if faults:
        raise BadInput(faults)
    return ExperimentFile(experiment, base_of_paths)


def _scaled(tree: dict[str, Any], overrides: Iterable[str], name: str) -> tuple[dict[str, Any], list[str], list[Fault]]:
    """Take the file's [small] table over the rest where ``--set scale=small`` asks for it."""
    small, scale, rest = tree.pop("small", None), "full", list[str]()
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() == "scale":
            scale = value.strip().strip("\"'")
        else:
            rest.append(text)
    if scale == "full" or (scale == "small" and isinstance(small, dict)):
        return (_merged(tree, small) if scale == "small" else tree), rest, []
    problem = "has no [small] table." if scale == "small" else f'there is no scale "{scale}"; there are full and small.'
    return tree, rest, [Fault(f"{name}: scale", problem)]


def read_tables(path: Path, children: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Path]:
    """Read an experiment file over the file it extends, as written; paths inside count from the file that is read.

    This needs no torch: a command that calls it first refuses a wrong path at once.

    Args:
        children: Files that extend this one.

    Returns:
        The tables, and the file beside which relative paths start.

    Raises:
        BadInput: If a file is not there, is no TOML, or extends itself.
    """
    if is_file(path) and path.resolve() in children:  # a loop of links has no end to resolve
        raise BadInput([Fault(f"{path.name}: extends", "the files extend one another in a circle.")])
    tree = read_toml(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree, path
    if not isinstance(parent, str) or not parent or Path(parent).name != parent or "\0" in parent:
        raise BadInput([Fault(f"{path.name}: extends", "must name a file in the same folder.", "")])
    if not is_file(path.parent / parent):
        raise BadInput([Fault(f"{path.name}: extends", f'names "{parent}", and there is no such file beside it.')])
    inherited, _ = read_tables(path.parent / parent, (*children, path.resolve()))
    if isinstance(small := inherited.get("small"), dict):
        if _method_of(tree) not in (None, _method_of(inherited)):
            small.pop("method", None)  # sized for another method
        for table in ("data", "partition"):
            if _kind_of(tree, table) not in (None, _kind_of(inherited, table)):
                small.pop(table, None)  # keys of another kind
    return _merged(inherited, tree), path


def _kind_of(tree: Mapping[str, Any], table: str) -> object:
    found = tree.get(table)
    return found.get("kind") if isinstance(found, Mapping) else None


def _method_of(tree: Mapping[str, Any]) -> object:
    run = tree.get("run")
    return run.get("method") if isinstance(run, Mapping) else None


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; a table that changes its ``kind`` replaces the one below."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        keeps_kind = both and value.get("kind", old.get("kind")) == old.get("kind")  # type: ignore[union-attr]
        merged[key] = _merged(old, value) if keeps_kind else value  # type: ignore[arg-type]
    return merged


def _override(tree: dict[str, Any], text: str) -> list[Fault]:
    """Apply one ``section.key=value``: TOML, or a bare word as a string; ``none`` takes the key out."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        return [Fault(f"--set {text}", "must be section.key=value, for instance run.rounds=3.")]
    *sections, last = key.strip().split(".")
    table = tree
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            return [Fault(f"--set {text}", f'"{section}" is not a table.')]
    if value.strip() == "none":
        table.pop(last, None)
    else:
        table[last] = _toml_value(value.strip())
    return []


def _toml_value(text: str) -> Any:
    try:
        return parsed_toml(f"value = {text}")["value"]
    except ValueError:
        return text
