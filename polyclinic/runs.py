"""Run federations from Python: simulate a run, read its folder, and use its model.

The functions use the same code and run folders as ``flwr-sim``.
"""

from __future__ import annotations

import os

# Set before flwr or ray is imported, so that they send no telemetry.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_worker_niceness="0",
)

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polyclinic.common.metrics.measured import ValueWithError, format_value_with_error
from polyclinic.common.system.packages import refuse_missing_packages
from polyclinic.common.system.plain_text import format_count_with_noun, format_number
from polyclinic.custom_parts import (
    ClassMetric,
    CustomDataset,
    CustomParts,
    ImageTransform,
    Network,
    OptimizerFactory,
    RateSchedule,
    TrainingLoss,
    read_python_experiment,
)
from polyclinic.prediction import ImagesToPredict
from polyclinic.python_words import use_python_words
from polyclinic.saved_network import GivenNetwork

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from rich.console import Console
    from torch import nn

    from polyclinic.common.models.network import SplitNetwork
    from polyclinic.server.runs.reader import RunFolderContent
    from polyclinic.server.runs.schema import RunClaims


@use_python_words()
def simulate(
    experiment: str | Path | Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    model: nn.Module | Network | None = None,
    head: str | None = None,
    dataset: CustomDataset | None = None,
    loss: TrainingLoss | None = None,
    transform: ImageTransform | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: RateSchedule | None = None,
    metrics: Sequence[ClassMetric] = (),
    out: str | Path | None = None,
    resume: bool = False,
    allow_hosts: Sequence[str] = (),
    quiet: bool | None = None,
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
        quiet: True shows no progress, False shows it; None shows it in a notebook only.

    With an object of your own, the run uses the ``inline`` backend, because the object exists only in this process.

    Raises:
        BadInput: With every fault of the experiment and its data, before training starts.
        TooFewSites: If sites fail during the run.
    """
    from polyclinic.client.training.task import get_cached_networks
    from polyclinic.server.outbound_hosts import permit_listed_hosts
    from polyclinic.server.simulation.simulate import simulate as run_simulation

    custom_parts = CustomParts(model, head, dataset, loss, transform, optimizer, schedule, metrics)
    file = read_python_experiment(experiment, custom_parts.make_overrides(settings or {}))
    custom_parts.refuse_other_processes(file)
    if out is None:
        out = choose_new_folder(file.experiment.run.name or file.experiment.run.method)
    folder = Path(out)
    if model is not None:
        # An object of an earlier call may have the same name, if they differ only in the code of an installed package.
        get_cached_networks.cache_clear()
    with permit_listed_hosts([file], allow_hosts, settings or {}):
        run_simulation(file, folder, make_python_console(quiet), resume=resume)
    return load(folder)


def choose_new_folder(name: str) -> Path:
    """Return ``runs/NAME``, with a number appended if that exists; characters other than letters and digits become
    ``-``.
    """
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    paths = (Path("runs", plain if number == 1 else f"{plain}-{number}") for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def make_python_console(quiet: bool | None) -> Console:
    """Return the console for a call from Python; with ``quiet=None`` it prints in notebooks only."""
    from rich.console import Console

    console = Console(emoji=False)
    console.quiet = not console.is_jupyter if quiet is None else quiet
    return console


def load(folder: str | Path, *, model: nn.Module | Network | None = None, head: str | None = None) -> FinishedRun:
    """Read the folder of a finished run that ``simulate``, ``flwr-sim`` or ``flwr-server`` wrote.

    Args:
        folder: Folder of the run.
        model: The network of your own that the run was trained with, if another process trained it. Its weights are
            replaced by those of the run.
        head: As in :func:`simulate`; the run knows it, so it may be left out.

    Warns:
        OtherNetworkWarning: If the network is not known to be the one that was trained.

    Raises:
        BadInput: If a file is missing or invalid, or the network does not fit the weights.
    """
    from polyclinic.server.runs.reader import read_run

    read_run(Path(folder))  # reports every fault of the folder at once
    run = FinishedRun(Path(folder), GivenNetwork(model, head))
    if model is not None:
        run.network()  # refuses a network that does not fit the weights
    return run


@dataclass(frozen=True)
class FinishedRun:
    """A finished run in its folder.

    Tables are pandas DataFrames (``pip install 'polyclinic[notebook]'``), plots are matplotlib axes.
    """

    folder: Path
    _given: GivenNetwork = field(default=GivenNetwork(), repr=False, compare=False)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        return dict(json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))

    @property
    def model_sha256(self) -> str:
        """The hash of the model's weights; equal experiments give equal hashes on CPUs of the same kind."""
        return str(self.summary["model_sha256"])

    @cached_property
    def _content(self) -> RunFolderContent:
        from polyclinic.server.runs.reader import read_run

        return read_run(self.folder)

    @cached_property
    def _claims(self) -> RunClaims:
        from polyclinic.server.reporting.run_claims import make_run_claims

        return make_run_claims(self._content)

    @property
    def result(self) -> str:
        """The result in one sentence, as at the top of the report; without a mean AUROC, the sentence says why."""
        return self._claims.result

    @property
    def notes(self) -> tuple[str, ...]:
        """All limitations of the result that the report shows, the most severe first."""
        return (*self._claims.cautions, *self._claims.limits)

    @property
    def mean_auroc(self) -> float | None:
        """The mean test AUROC of the report, over the classes with enough positive and negative test images.

        None if the report gives none; :attr:`result` then says why.
        """
        return self._claims.mean_auroc

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
        return make_table(rows).set_index("round")

    @property
    def classes(self) -> pd.DataFrame:
        """A table with a row per class: AUROC with 95 % interval, average precision, positives, owning sites.

        As in the report, a class that was not tested has no values, and ``note`` says why. ``error`` is the largest
        possible error of the AUROC; it is 0 if the AUROC is exact. A custom metric has a column with the function's
        name.
        """
        from polyclinic.server.reporting.run_claims import explain_untested_class

        summary = self._content.summary
        test = summary.test
        intervals = test.intervals or test.sampled
        rows = []
        for name in dict.fromkeys((*test.per_class, *summary.classes)):
            note = explain_untested_class(summary, name)
            result = test.per_class.get(name)
            shown = None if note else result
            positives, negatives = (None, None) if result is None else test.get_class_image_counts(name)
            low, high = (intervals.per_class if intervals and shown else {}).get(name, (None, None))
            rows.append(
                {
                    "class": name,
                    "owners": len(summary.annotating_sites_by_class.get(name, ())),
                    "auroc": shown and shown.auroc,
                    "average_precision": shown and shown.average_precision,
                    **{short: shown and shown.more.get(metric) for metric, short in test.own_metrics.items()},
                    "positives": positives,
                    "negatives": negatives,
                    "low": low,
                    "high": high,
                    "error": shown and shown.errors.get("auroc", 0.0),
                    "note": note,
                }
            )
        return make_table(rows).set_index("class")

    @property
    def own_metrics(self) -> dict[str, float | None]:
        """Name of each custom metric -> its mean over the classes for which it is defined."""
        test = self._content.summary.test
        return {short: test.mean_more[metric] for metric, short in test.own_metrics.items()}

    @property
    def sites(self) -> pd.DataFrame:
        """A table with a row per site: classes, images, bytes, seconds, and AUROC on the site's own test images."""
        results = self.summary["per_site"]
        columns = ("classes", "train_samples", "bytes_up", "bytes_down", "seconds")
        rows = [
            {"site": name, **{key: site[key] for key in columns}, "mean_auroc": results.get(name, {}).get("mean_auroc")}
            for name, site in self.summary["sites"].items()
        ]
        return make_table(rows).set_index("site")

    def network(self) -> nn.Module:
        """Return the trained model, which maps pixels 0..255 ``(batch, channels, height, width)`` to logits.

        Raises:
            BadInput: If the run has no global model, or its files are damaged.
        """
        return self._load_network()

    def _load_network(self) -> SplitNetwork:
        from polyclinic.saved_network import load_given_network

        return load_given_network(self.folder, self._given)

    def predict(self, images: ImagesToPredict) -> pd.DataFrame:
        """Return probabilities with a row per image and a column per class; NaN for an unreadable picture.

        A class that the model has not learned has no column.

        Args:
            images: A map-style data set or :class:`LabelledImages`, as for :func:`simulate`, read as in tests; or uint8
                ``(n, height, width[, 3])``; or paths of an npz file, a folder of pictures, or one or more pictures.

        Warns:
            FileReadingWarning: If files are read, and the run was trained on a data set of the user's own.
            UnlearnedClassWarning: If the model has not learned a class.

        Raises:
            BadInput: If no image is found or readable, or the run has no global model.
        """
        from polyclinic.common.prediction.files import select_learned_classes
        from polyclinic.prediction import UnlearnedClassWarning, predict_images
        from polyclinic.server.runs.unlearned import describe_unlearned_classes, read_unlearned_classes

        network = self._load_network()
        pandas = import_pandas()
        names, probabilities = predict_images(self.folder, network, images)
        index = (
            pandas.RangeIndex(len(probabilities), name="image") if names is None else pandas.Index(names, name="image")
        )
        table = pandas.DataFrame(probabilities, index=index, columns=list(network.class_names))
        if unlearned := read_unlearned_classes(self.folder):
            table = table[select_learned_classes(network.class_names, unlearned)]
            warnings.warn(describe_unlearned_classes(unlearned), UnlearnedClassWarning, stacklevel=2)
        return table

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
        tested_classes = self.classes.dropna(subset=["auroc"])
        positions = np.arange(len(tested_classes))
        if tested_classes["low"].notna().all():
            axes.hlines(positions, tested_classes["low"], tested_classes["high"], alpha=0.5)
        axes.plot(tested_classes["auroc"], positions, "o")
        axes.set_yticks(positions, list(tested_classes.index))
        axes.axvline(0.5, linestyle=":", color="grey")
        axes.set(xlabel="AUROC (test)", ylim=(len(tested_classes) - 0.5, -0.5))
        return axes

    def _describe_own_metrics(self) -> str:
        """Return a sentence with the means of the custom metrics; empty if there is none."""
        means = [f"{name} {format_number(mean)}" for name, mean in self.own_metrics.items()]
        return f"Metrics of your own, mean over the classes: {', '.join(means)}." if means else ""

    def __repr__(self) -> str:
        summary = self._content.summary
        claims = self._claims
        counts = format_count_with_noun(summary.rounds, "round"), format_count_with_noun(len(summary.sites), "site")
        facts = f"{summary.table_label}: {', '.join(counts)}"
        result = claims.no_mean_because
        if claims.mean_auroc is not None:
            mean = format_value_with_error(ValueWithError(claims.mean_auroc, claims.mean_auroc_error))
            model = " of the initial model" if summary.is_initial_model_tested else ""
            result = f"mean AUROC {mean}{model} on the test images (one seed)"
        notes = format_count_with_noun(len(self.notes), "note")
        return f"<{facts}, {result}; {notes}, which print(run) shows; {self.folder}>"

    def __str__(self) -> str:
        """Return the result and all limitations, with the sentences of the report."""
        claims = self._claims
        lines = [claims.result]
        own_metrics = self._describe_own_metrics()
        lines += [own_metrics] if own_metrics else []
        lines += [f"! {caution}" for caution in claims.cautions]
        lines += ["What this run does not show:"] if claims.limits else []
        lines += [f"- {limit}" for limit in claims.limits]
        return "\n".join([*lines, f"Report: {self.report}"])

    def _repr_html_(self) -> str:
        """Return the text of :meth:`__str__` as HTML, for notebooks."""
        claims = self._claims
        cautions = "".join(f"<li>{escape(caution)}</li>" for caution in claims.cautions)
        caution_list = f"<ul>{cautions}</ul>" if cautions else ""
        limits = "".join(f"<li>{escape(limit)}</li>" for limit in claims.limits)
        limit_list = (
            f"<details><summary>What this run does not show</summary><ul>{limits}</ul></details>" if limits else ""
        )
        result = " ".join(filter(None, (claims.result, self._describe_own_metrics())))
        headline = f"<p><b>{escape(self._content.summary.table_label)}</b>: {escape(result)}</p>"
        report_link = f"<p>Report: <code>{escape(str(self.report))}</code></p>"
        return f"{headline}{caution_list}{limit_list}{report_link}"


def predict(
    folder: str | Path,
    images: ImagesToPredict,
    *,
    model: nn.Module | Network | None = None,
    head: str | None = None,
) -> pd.DataFrame:
    """Return the class probabilities of a saved model for images, like :meth:`FinishedRun.predict`.

    Args:
        folder: Folder of a run or of a site, with ``model.safetensors`` and ``model.json``.
        images: Images as for :meth:`FinishedRun.predict`.
        model: The custom network that was trained, as for :func:`load`.
        head: As for :func:`load`.
    """
    run = FinishedRun(Path(folder), GivenNetwork(model, head))
    return run.predict(images)


def import_pandas() -> Any:
    refuse_missing_packages("tables", "pandas")
    import pandas

    return pandas


def make_table(rows: Sequence[Mapping[str, Any] | Sequence[Any]], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return a pandas DataFrame that prints all its columns, in several blocks if they do not fit on one line."""
    import_pandas()
    from polyclinic.whole_table import WholeTable

    return WholeTable(rows, columns=columns)


def _make_axes() -> Axes:
    """Return the axes of a new figure, which a notebook displays automatically."""
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]
