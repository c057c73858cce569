"""Federations from Python: simulate a run, read its folder, use its model, compare experiments.

The functions use the same code and run folders as ``flwr-sim``.
"""

from __future__ import annotations

import os

# Before flwr or ray is imported: they send no telemetry.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_worker_niceness="0",
)

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.config import ExperimentFile, read_experiment, validate_experiment
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.metrics.measured import ValueWithError, format_value_with_error
from polyclinic.common.plugins import (
    DATASETS,
    LOSSES,
    METRICS,
    MODELS,
    OPTIMIZERS,
    PLUGIN,
    SCHEDULES,
    TRANSFORMS,
    is_local_plugin_name,
    register_local_plugin,
)
from polyclinic.common.system.packages import refuse_missing_packages
from polyclinic.data.sources.plugin import DatasetPlugin, LabelledImages, MapStyleDataset

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.axes import Axes
    from torch import Tensor, nn


Network = Callable[[int, int], "nn.Module"]
"""``network(channels, image_size)``: images ``(batch, channels, size, size)`` in, features ``(batch, width)`` out."""
TrainingLoss = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""``loss(logits, labels, annotated)`` returns a scalar; see docs/experiments.md."""
ImageTransform = Callable[["Tensor", "torch.Generator"], "Tensor"]
"""``transform(images, generator)`` returns changed images: float pixels 0..255 ``(batch, channels, height, width)``."""
OptimizerFactory = Callable[..., "torch.optim.Optimizer"]
"""``optimizer(parameters, lr=..., weight_decay=...)`` returns a ``torch.optim.Optimizer``."""
RateSchedule = Callable[[int, int], float]
"""``schedule(server_round, rounds)`` returns a factor of 0 or more; rounds count from 1."""
OwnImages = LabelledImages | MapStyleDataset
"""Images of your own with their labels."""
ClassMetric = Callable[[NDArray[Any], NDArray[Any]], float]
"""``metric(scores, labels)`` returns the value of one class."""


def simulate(
    experiment: str | Path | Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    model: nn.Module | Network | None = None,
    head: str | None = None,
    dataset: OwnImages | Mapping[str, OwnImages] | DatasetPlugin | None = None,
    loss: TrainingLoss | None = None,
    transform: ImageTransform | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: RateSchedule | None = None,
    metrics: Sequence[ClassMetric] = (),
    out: str | Path | None = None,
    resume: bool = False,
    allow_hosts: Sequence[str] = (),
    quiet: bool = True,
) -> FinishedRun:
    """Simulate a federation on this machine; return the finished run.

    Args:
        experiment: Path of a TOML file, name of an example (``"digits_surgical"``), or its tables as a dictionary.
        settings: Settings to override, such as ``{"run.rounds": 3}``.
        model: A network of your own instead of ``[model] architecture``: a module, whose weights are used in round 1,
            or a function of channels and image size that returns a module.
        head: Name of the model's last dense layer, such as ``"fc"``, which the run replaces by its own head. For a
            model that returns features: None, or ``"new"`` if its last layer is a dense layer.
        dataset: Images of your own instead of ``[data]``: a map-style torch data set, or :class:`LabelledImages` of
            arrays or of such a data set. To give parts, pass a dictionary of these (``{"train": ..., "test": ...}``). A
            data set plug-in's function is also possible.
        loss: A loss function of your own instead of ``[training] loss``.
        transform: A function that augments training images, instead of ``[augmentation] transform``.
        optimizer: An optimiser of your own instead of ``[training] optimizer``.
        schedule: A learning rate schedule of your own instead of ``[training] schedule``.
        metrics: Metrics of your own instead of ``[evaluation] metrics``.
        out: New folder for the run; None for ``runs/NAME``, with a number appended if that exists.
        resume: Continue the run in ``out`` from its last checkpoint; a finished run is only read.
        allow_hosts: The other machines that the run may talk to, such as ``"https://pacs.hospital.example"``. An
            experiment that names another one is refused, with what would be sent there.
        quiet: Do not show a progress bar.

    With an object of your own, the run uses the ``inline`` backend, because the object exists only in this process.

    Raises:
        BadInput: With every fault of the experiment and its data, before training starts.
        TooFewSites: If sites fail during the run.
    """
    from rich.console import Console

    from polyclinic.client.training.task import get_cached_networks
    from polyclinic.server.outbound_hosts import permit_listed_hosts
    from polyclinic.server.simulation.simulate import simulate as run

    own = {
        "model.architecture": (MODELS, model),
        "training.loss": (LOSSES, loss),
        "augmentation.transform": (TRANSFORMS, transform),
        "training.optimizer": (OPTIMIZERS, optimizer),
        "training.schedule": (SCHEDULES, schedule),
    }
    _refuse_wrong_parts({"loss": loss, "transform": transform, "optimizer": optimizer, "schedule": schedule}, metrics)
    given = {key: group_and_part for key, group_and_part in own.items() if group_and_part[1] is not None}
    replaced: dict[str, Any] = {key: PLUGIN + register_local_plugin(*pair) for key, pair in given.items()}
    if dataset is not None:
        replaced["data"] = {"kind": "plugin", "name": register_local_plugin(DATASETS, _wrap_as_dataset_plugin(dataset))}
    changed = {**(settings or {}), **replaced, **({} if head is None else {"model.head": head})}
    file = _read_experiment(experiment, changed, dataset is not None, metrics)
    if (replaced or metrics) and file.experiment.simulation.backend == "ray":
        problem = "ray: its workers are other processes, which do not know what was given to this one."
        raise BadInput([Fault("simulation.backend", problem, 'Set "inline", or make a package of it.')])
    if out is None:
        section = file.experiment.run
        name = "".join(letter if letter.isalnum() else "-" for letter in section.name or section.method)
        paths = (Path("runs", name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
        out = next(path for path in paths if not path.exists())
    folder = Path(out)
    if model is not None:
        # An object of an earlier call may have the same name, if they differ only in the code of an installed package.
        get_cached_networks.cache_clear()
    with permit_listed_hosts([file], allow_hosts, settings or {}):
        run(file, folder, Console(quiet=quiet, emoji=False), resume=resume)
    return load(folder)


def load(folder: str | Path) -> FinishedRun:
    """Read the folder of a finished run that ``simulate``, ``flwr-sim`` or ``flwr-server`` wrote.

    Raises:
        BadInput: If a file is missing or invalid.
    """
    from polyclinic.server.runs.reader import read_run

    read_run(Path(folder))  # every fault at once
    return FinishedRun(Path(folder))


@dataclass(frozen=True)
class FinishedRun:
    """A finished run in its folder.

    Tables are pandas DataFrames (``pip install 'polyclinic[notebook]'``), plots are matplotlib axes.
    """

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        return dict(json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))

    @property
    def model_sha256(self) -> str:
        """The hash of the model's weights; equal experiments give equal hashes on CPUs of the same kind."""
        return str(self.summary["model_sha256"])

    @property
    def mean_auroc(self) -> float | None:
        """The mean test AUROC over the classes; None if no class has one."""
        value: float | None = self.summary["test"]["mean_auroc"]
        return value

    @property
    def report(self) -> Path:
        """The path of the HTML report of the run."""
        return self.folder / "report.html"

    @property
    def rounds(self) -> pd.DataFrame:
        """A table with a row per round: losses, validation AUROC, sites, seconds, bytes."""
        lines = (self.folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        columns = ("round", "train_loss", "validation_loss", "validation_auroc", "seconds")
        rows = [
            {key: line[key] for key in columns}
            | {"sites": len(line["sites"]), "absent": len(line["absent"])}
            | {way: line[way] for way in ("bytes_up", "bytes_down")}
            for line in map(json.loads, lines)
        ]
        return _import_pandas().DataFrame(rows).set_index("round")

    @property
    def classes(self) -> pd.DataFrame:
        """A table with a row per tested class: AUROC with 95 % interval, average precision, positives, owning sites."""
        test, sites = self.summary["test"], self.summary["sites"]
        between = (test["intervals"] or {}).get("per_class", {})
        rows = [
            {
                "class": name,
                "owners": sum(name in site["classes"] for site in sites.values()),
                **{key: result[key] for key in ("auroc", "average_precision", "positives", "negatives")},
                "low": between.get(name, (None, None))[0],
                "high": between.get(name, (None, None))[1],
            }
            for name, result in test["per_class"].items()
        ]
        return _import_pandas().DataFrame(rows).set_index("class")

    @property
    def sites(self) -> pd.DataFrame:
        """A table with a row per site: classes, images, bytes, seconds, and AUROC on the site's own test images."""
        results = self.summary["per_site"]
        columns = ("classes", "train_samples", "bytes_up", "bytes_down", "seconds")
        rows = [
            {"site": name, **{key: site[key] for key in columns}, "mean_auroc": results.get(name, {}).get("mean_auroc")}
            for name, site in self.summary["sites"].items()
        ]
        return _import_pandas().DataFrame(rows).set_index("site")

    def network(self) -> nn.Module:
        """Return the trained model, which maps pixels 0..255 ``(batch, channels, height, width)`` to logits.

        Raises:
            BadInput: If the run has no global model, or its files are damaged.
        """
        from polyclinic.common.models.saved import load_model

        return load_model(self.folder)

    def predict(self, images: NDArray[np.uint8] | str | Path | Sequence[str | Path]) -> pd.DataFrame:
        """Return probabilities with a row per image and a column per class; NaN for an unreadable picture.

        Args:
            images: uint8 ``(n, height, width[, 3])``; or paths of an npz file, a folder of pictures, or one or more
                pictures.

        Raises:
            BadInput: If no image is found or readable, or the run has no global model.
        """
        from polyclinic.common.models.saved import load_model
        from polyclinic.data.images.bands import scale_values_to_8_bits
        from polyclinic.server.export.prediction import (
            choose_model_image_format,
            compute_picture_probabilities,
            predict_from_files,
        )

        network, pandas = load_model(self.folder), _import_pandas()
        columns = list(network.class_names)
        if isinstance(images, np.ndarray):
            if not images.size:
                raise BadInput([Fault("images", f"of shape {images.shape} hold no pixel.")])
            if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
                shapes = "(n, height, width) or (n, height, width, 3)"
                problem = f"must be uint8 of shape {shapes}, not {images.dtype} {images.shape}."
                raise BadInput([Fault("images", problem)])
            if (value_range := choose_model_image_format(self.folder, network).rendering.value_range) is not None:
                images = scale_values_to_8_bits(images, value_range)
            index = pandas.RangeIndex(len(images), name="image")
            return pandas.DataFrame(compute_picture_probabilities(network, images), index=index, columns=columns)
        files: Sequence[str | Path] = [images] if isinstance(images, str | Path) else images
        if not (isinstance(files, Sequence) and files and all(isinstance(file, str | Path) for file in files)):
            paths = "the path of a file or folder, or several paths"
            raise BadInput([Fault("images", f"must be a uint8 array, or {paths}, not {type(images).__name__}.")])
        form = choose_model_image_format(self.folder, network)
        results = [predict_from_files(network, Path(file), form) for file in files]
        names = [name for pictures, _ in results for name in (*pictures.names, *pictures.unreadable)]
        unknown = np.full((1, len(columns)), np.nan, np.float32)
        rows = [part for pictures, scores in results for part in (scores, *[unknown] * len(pictures.unreadable))]
        return pandas.DataFrame(np.concatenate(rows), index=pandas.Index(names, name="image"), columns=columns)

    def plot_rounds(self, axes: Axes | None = None) -> Axes:
        """Plot the validation AUROC by round; return the axes."""
        axes = axes if axes is not None else _make_axes()
        rounds = self.rounds
        axes.plot(rounds.index, rounds["validation_auroc"], marker="o", label=self.summary["name"])
        axes.set(xlabel="round", ylabel="mean validation AUROC")
        axes.locator_params(axis="x", integer=True)
        axes.legend()
        return axes

    def plot_classes(self, axes: Axes | None = None) -> Axes:
        """Plot the test AUROC of every class with its interval; return the axes."""
        axes = axes if axes is not None else _make_axes()
        defined = self.classes.dropna(subset=["auroc"])
        places = np.arange(len(defined))
        if defined["low"].notna().all():
            axes.hlines(places, defined["low"], defined["high"], alpha=0.5)
        axes.plot(defined["auroc"], places, "o")
        axes.set_yticks(places, list(defined.index))
        axes.axvline(0.5, linestyle=":", color="grey")
        axes.set(xlabel="AUROC (test)", ylim=(len(defined) - 0.5, -0.5))
        return axes

    def __repr__(self) -> str:
        summary, auroc = self.summary, self.mean_auroc
        error = (summary["test"].get("errors") or {}).get("auroc", 0.0)
        shown = None if auroc is None else format_value_with_error(ValueWithError(auroc, error))
        result = "no AUROC" if shown is None else f"mean AUROC {shown} on the test images (one seed)"
        return (
            f"<{summary['name']}: {summary['rounds']} rounds, {len(summary['sites'])} sites, {result}; {self.folder}>"
        )


def predict(folder: str | Path, images: NDArray[np.uint8] | str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Return the probabilities of a saved model for images, like :meth:`FinishedRun.predict`.

    Args:
        folder: Folder of a run or of a site, with ``model.safetensors`` and ``model.json``.
        images: Images as for :meth:`FinishedRun.predict`.
    """
    return FinishedRun(Path(folder)).predict(images)


def compare(
    experiments: Sequence[str | Path],
    *,
    seeds: int = 3,
    out: str | Path,
    settings: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    allow_hosts: Sequence[str] = (),
    quiet: bool = True,
) -> pd.DataFrame:
    """Run several experiments with the same seeds; return a table with a row per run.

    Args:
        experiments: Paths of experiment files, or names of examples. The first is the reference of the paired tests in
            ``out/report.html``.
        seeds: Number of seeds (0, 1, ...) for every experiment; a statistical verdict needs at least three.
        out: Folder for all runs and the report; runs that exist there are not repeated.
        settings: Settings to override in every experiment, such as ``{"run.rounds": 3}``.
        jobs: Number of runs at the same time; None for as many as fit.
        allow_hosts: The other machines that the runs may talk to, as for :func:`simulate`.
        quiet: Do not show progress.

    Raises:
        BadInput: With the faults of all experiments, before any of them runs.
        RunsFailed: If a run fails, after the others have finished.
    """
    from rich.console import Console

    from polyclinic.server.outbound_hosts import permit_listed_hosts
    from polyclinic.studies.compare import run_comparison

    if isinstance(experiments, str | Path) or not experiments:
        raise BadInput([Fault("experiments", "must be a list with at least one file, or name of an example.")])
    if seeds < 1:
        raise BadInput([Fault("seeds", f"must be at least 1, not {seeds}.")])
    pandas = _import_pandas()  # before hours of training
    files = [Path(experiment) for experiment in experiments]
    overrides, console = _convert_settings_to_overrides(settings or {}), Console(quiet=quiet, emoji=False)
    readable = list[ExperimentFile]()
    for path in files:
        with suppress(BadInput):  # the comparison reports the faults of all experiments
            readable.append(read_experiment(path, overrides))
    with permit_listed_hosts(readable, allow_hosts, settings or {}):
        run_comparison(files, Path(out), range(seeds), jobs, overrides, console)
    rows = []
    for stem, seed in itertools.product([path.stem for path in files], range(seeds)):
        run = load(Path(out) / f"{stem}-seed{seed}")
        test = run.summary["test"]
        groups = {"all": test, "shared": test["shared_classes"], "unique": test["unique_classes"]}
        means = {key: group and group["mean_auroc"] for key, group in groups.items()}
        rows.append({"experiment": stem, "seed": seed, **means, "model_sha256": run.model_sha256})
    return pandas.DataFrame(rows).set_index(["experiment", "seed"])


def _wrap_as_dataset_plugin(images: OwnImages | Mapping[str, OwnImages] | DatasetPlugin) -> DatasetPlugin:
    """Wrap images as a data set plug-in with a name derived from the images; return a function unchanged."""
    if not isinstance(images, Mapping | LabelledImages) and callable(images) and not hasattr(images, "__getitem__"):
        return images

    def wrap_images(part: Any) -> LabelledImages:
        return part if isinstance(part, LabelledImages) else LabelledImages(part)

    wrapped = (
        {name: wrap_images(part) for name, part in images.items()}
        if isinstance(images, Mapping)
        else wrap_images(images)
    )

    def dataset(folder: Path, options: Mapping[str, Any]) -> LabelledImages | Mapping[str, LabelledImages]:
        return wrapped

    named = wrapped if isinstance(wrapped, Mapping) or isinstance(wrapped.images, np.ndarray) else wrapped.images
    dataset.__name__ = "parts" if isinstance(wrapped, Mapping) else type(named).__name__  # by which faults call it
    return dataset


def _refuse_wrong_parts(functions: Mapping[str, Any], metrics: Any) -> None:
    """Raise an error for each argument of :func:`simulate` that is no function, or no list of functions.

    Raises:
        BadInput: With every such argument.
    """
    faults = [
        Fault(name, f"is {type(part).__name__}, not a function.", f"Pass the function itself: {name}=my_{name}.")
        for name, part in functions.items()
        if part is not None and not callable(part)
    ]
    is_list = isinstance(metrics, Sequence) and not isinstance(metrics, str)
    if not is_list or not all(map(callable, metrics)):
        problem = f"is {type(metrics).__name__}, not a list of functions."
        remedy = "Pass a list: metrics=[my_metric]; the function's name is the metric's name."
        faults.append(Fault("metrics", problem, remedy))
    raise_faults(faults)


def _read_experiment(
    experiment: str | Path | Mapping[str, Any],
    settings: Mapping[str, Any],
    own_data: bool,
    metrics: Sequence[ClassMetric],
) -> ExperimentFile:
    from polyclinic.strategies.registry import find_method_faults

    added = dict(settings)
    if metrics:
        added["evaluation.metrics"] = [PLUGIN + register_local_plugin(METRICS, metric) for metric in metrics]
    plugins = [value for value in added.values() if isinstance(value, str) and value.startswith(PLUGIN)]
    if own_data or metrics or any(map(is_local_plugin_name, plugins)):
        added.setdefault("simulation.backend", "inline")
    data = added.pop("data", None)
    overrides = [*(["data=none"] if data else []), *_convert_settings_to_overrides(added)]
    overrides += [f"data.{key}={_format_toml_value(value)}" for key, value in (data or {}).items()]
    if isinstance(experiment, Mapping):
        tree = json.loads(json.dumps(dict(experiment)))  # a copy that may be changed
        return validate_experiment(tree, Path("experiment"), overrides, find_method_faults)
    return read_experiment(Path(experiment), overrides, find_method_faults)


def _convert_settings_to_overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_format_toml_value(value)}" for key, value in settings.items()]


def _format_toml_value(value: Any) -> str:
    """Format a value as TOML on one line; numpy numbers are allowed."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_format_toml_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_format_toml_value, value)) + "]"
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value)
    except TypeError:
        problem = f"{value!r} is a {type(value).__name__}, which no experiment file can hold."
        raise BadInput([Fault("settings", problem)]) from None


def _import_pandas() -> Any:
    refuse_missing_packages("tables", "pandas")
    import pandas

    return pandas


def _make_axes() -> Axes:
    """Return the axes of a new figure, which a notebook displays automatically."""
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]
