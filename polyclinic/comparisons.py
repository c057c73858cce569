"""Run several experiments from Python with the same seeds, and compare them with paired tests."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyclinic.common.config import Experiment, ExperimentFile
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.custom_parts import (
    ClassMetric,
    CustomDataset,
    CustomParts,
    ImageTransform,
    Network,
    OptimizerFactory,
    RateSchedule,
    TrainingLoss,
    convert_settings_to_overrides,
    copy_tables,
    read_python_experiment,
)
from polyclinic.python_words import use_python_words
from polyclinic.runs import FinishedRun, choose_new_folder, import_pandas, load, make_python_console, make_table
from polyclinic.studies.trial import Trial, refuse_seed_override

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from polyclinic.studies.comparison import MethodComparison

PythonExperiment = str | Path | Mapping[str, Any]
"""A path, the name of an example or of a method, or a dictionary of tables; a key with a dot, such as ``"run.method"``,
is one setting.
"""
REPORT_TEXT_COLUMNS = 100
"""Width of a comparison that is printed as text, in characters."""


@use_python_words()
def compare(
    experiments: Sequence[PythonExperiment] | Mapping[str, PythonExperiment],
    *,
    seeds: int = 3,
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
    jobs: int | None = None,
    allow_hosts: Sequence[str] = (),
    quiet: bool | None = None,
) -> ComparedRuns:
    """Run several experiments with the same seeds, and compare them with paired tests.

    Args:
        experiments: A list of experiments as for :func:`polyclinic.simulate`, or a dictionary name -> experiment;
            tables and report show the names. A method's name is short for the setting ``run.method``.
            The paired tests compare the first experiment with each other one.
        seeds: Number of seeds (0, 1, ...) for every experiment; a statistical verdict needs at least three.
        settings: Settings to override in every experiment, such as ``{"run.rounds": 3}``.
        model, head, dataset, loss, transform, optimizer, schedule, metrics: Custom objects for every experiment, as
            for :func:`polyclinic.simulate`.
        out: Folder for all runs and the report; runs that exist there are not repeated. None for a new folder in
            ``runs``.
        jobs: Number of runs at the same time; None for as many as fit. With a custom object it is always 1, because
            the object exists only in this process.
        allow_hosts: The other machines that the runs may talk to, as for :func:`polyclinic.simulate`.
        quiet: True shows no progress, False shows it; None shows it in a notebook only.

    Raises:
        BadInput: With the faults of all experiments, before any of them runs.
        RunsFailed: If a run fails, after the others have finished.
    """
    from polyclinic.client.training.task import get_cached_networks
    from polyclinic.common.simulation import clear_simulated_data_cache
    from polyclinic.server.outbound_hosts import permit_listed_hosts
    from polyclinic.studies.compare import compare_trials

    import_pandas()  # before hours of training
    named_experiments = _name_experiments(experiments)
    if seeds < 1:
        raise BadInput([Fault("seeds", f"must be at least 1, not {seeds}.")])
    custom_parts = CustomParts(model, head, dataset, loss, transform, optimizer, schedule, metrics)
    if custom_parts and jobs is not None and jobs > 1:
        sentence = "other processes do not know the objects of this one, so the runs are made one after another."
        warnings.warn(f"jobs={jobs}: {sentence}", stacklevel=3)
    shared_overrides = custom_parts.make_overrides(settings or {})
    folder = choose_new_folder("compared") if out is None else Path(out)
    trials = list[Trial]()
    files = _read_experiment_files(named_experiments, shared_overrides, custom_parts)
    for experiment in named_experiments:
        overrides = (*shared_overrides, *experiment.overrides)
        refuse_seed_override(overrides)
        trials += [
            Trial(
                experiment.path,
                folder / f"{experiment.stem}-seed{seed}",
                (*overrides, f"run.seed={seed}"),
                experiment.label,
                tables=experiment.tables,
            )
            for seed in range(seeds)
        ]
    clear_simulated_data_cache()  # files may have changed since an earlier call
    if model is not None:
        # An object of an earlier call may have the same name, if they differ only in the code of an installed package.
        get_cached_networks.cache_clear()
    with permit_listed_hosts(files, allow_hosts, settings or {}):
        console = make_python_console(quiet)
        comparison, run_contents = compare_trials(
            trials,
            folder,
            jobs,
            console,
            in_this_process=bool(custom_parts),
            cautions=_describe_equal_starts(model, seeds),
        )
    content_by_run = {(trial.label, run.summary.seed): run for trial, run in zip(trials, run_contents, strict=True)}
    labels = {trial.label: run.summary.table_label for trial, run in zip(trials, run_contents, strict=True)}
    finished_runs = {key: load(run.folder) for key, run in content_by_run.items()}
    return ComparedRuns(folder, comparison, finished_runs, labels)


@dataclass(frozen=True)
class ComparedRuns:
    """Finished runs of several experiments over the same seeds, and their paired tests.

    Tables are pandas DataFrames (``pip install 'polyclinic[notebook]'``).

    Attributes:
        folder: The folder of all runs and of the report.
        runs: (name of the experiment, seed) -> finished run.
        labels: Name of the experiment -> its label in the report.
    """

    folder: Path
    comparison: MethodComparison = field(repr=False)
    runs: Mapping[tuple[str, int], FinishedRun] = field(repr=False)
    labels: Mapping[str, str] = field(repr=False)

    @property
    def report(self) -> Path:
        """The path of the HTML report of the comparison."""
        return self.folder / "report.html"

    @property
    def result(self) -> str:
        """The result in one sentence, as at the top of the report."""
        from polyclinic.studies.claims import describe_headline_result

        return describe_headline_result(self.comparison)

    @property
    def notes(self) -> tuple[str, ...]:
        """The sentences of the report about each method, and the reasons why the comparison may be uneven."""
        from polyclinic.studies.claims import describe_large_differences, describe_method_verdicts

        verdicts = (*describe_method_verdicts(self.comparison), *describe_large_differences(self.comparison))
        return (*verdicts, *self.comparison.cautions)

    @property
    def table(self) -> pd.DataFrame:
        """A table with a row per run: mean AUROC over all, shared and unique classes; custom metrics; hash of the
        model.
        """
        methods = {method.label: method for method in self.comparison.methods}
        rows = [
            {
                "experiment": name,
                "seed": seed,
                **{subset: by_seed[seed] for subset, by_seed in methods[self.labels[name]].auroc_by_seed.items()},
                **run.own_metrics,
                "model_sha256": run.model_sha256,
            }
            for (name, seed), run in self.runs.items()
        ]
        return make_table(rows).set_index(["experiment", "seed"])

    @property
    def methods(self) -> pd.DataFrame:
        """A table with a row per method: means over seeds, and the paired test of the reference against the method.

        The test is over all classes. ``difference`` is the reference's mean minus the method's mean. ``p`` is missing
        with fewer than three seeds.
        """
        tests = self.tests
        own_metrics = self.comparison.own_metrics
        rows = []
        for method in self.comparison.methods:
            row = {"method": method.label, "seeds": len(method.seeds)}
            row |= {subset: figure.mean for subset, figure in method.auroc.items()}
            row |= {"sd": method.auroc["all"].sd, "average_precision": method.average_precision.mean}
            row |= {"balanced_accuracy": method.balanced_accuracy.mean}
            row |= {short: method.more[name].mean for name, short in own_metrics.items() if name in method.more}
            rows.append(row)
        table = make_table(rows).set_index("method")
        if tests.empty:
            return table
        deciding = tests[(tests["classes"] == "all") & (tests["pairing"] == "classes")].set_index("against")
        return table.join(deciding[["difference", "low", "high", "p", "verdict"]])

    @property
    def tests(self) -> pd.DataFrame:
        """A table with a row per paired test of the reference against another method.

        ``p`` is corrected by Holm's method over all tests with the same classes and pairing. It is missing with fewer
        than three seeds; ``note`` then says why.
        """
        from polyclinic.studies.claims import explain_missing_p, get_reported_p, judge_test_outcome

        columns = [
            "against",
            "classes",
            "pairing",
            "difference",
            "low",
            "high",
            "p",
            "pairs",
            "seeds",
            "verdict",
            "note",
        ]
        rows = []
        for each in self.comparison.contrasts:
            test = each.result
            low, high = test.interval or (None, None)
            row = [each.other, each.subset, each.pairing, test.mean_difference, low, high, get_reported_p(test)]
            rows.append([*row, test.pairs, test.seeds, judge_test_outcome(test), explain_missing_p(test)])
        return make_table(rows, columns)

    def __repr__(self) -> str:
        return f"<{len(self.runs)} runs compared: {self.result} {self.folder}>"

    def __str__(self) -> str:
        """Return tables and sentences of the report as text."""
        from rich.console import Console

        from polyclinic.studies.comparison_report import format_comparison_tables

        console = Console(
            width=REPORT_TEXT_COLUMNS, no_color=True, emoji=False, force_jupyter=False, force_terminal=False
        )
        with console.capture() as capture:
            console.print(format_comparison_tables(self.comparison))
        tables = "\n".join(line.rstrip() for line in capture.get().splitlines())
        return "\n".join([tables, self.result, *(f"- {note}" for note in self.notes), f"Report: {self.report}"])

    def _repr_html_(self) -> str:
        """Return the tables and sentences of the report as HTML, for notebooks."""
        from polyclinic.studies.comparison_report import make_comparison_tables

        parts = []
        for table in make_comparison_tables(self.comparison):
            heading = "".join(f"<th>{escape(cell)}</th>" for cell in table.headings)
            body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in table.rows)
            parts.append(f"<p><b>{escape(table.title)}</b></p><table><tr>{heading}</tr>{body}</table>")
            parts += [f"<p><small>{escape(table.caption)}</small></p>"] if table.caption else []
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        page = f"<p>Report: <code>{escape(str(self.report))}</code></p>"
        return f"{''.join(parts)}<p>{escape(self.result)}</p><ul>{notes}</ul>{page}"


@dataclass(frozen=True)
class _NamedExperiment:
    """An experiment of a comparison.

    Attributes:
        label: Name in tables and report.
        stem: First part of the names of its run folders.
        path: The experiment file; with ``tables`` only a name.
        tables: The experiment as a dictionary; None if it is a file.
        overrides: Settings ``key=value`` of this experiment alone.
    """

    label: str
    stem: str
    path: Path
    tables: dict[str, Any] | None
    overrides: tuple[str, ...]


def _describe_equal_starts(model: nn.Module | Network | None, seeds: int) -> tuple[str, ...]:
    """Return a warning if all seeds start from the weights of the same module; otherwise an empty tuple."""
    # A function, or a class, makes new weights for each seed.
    if seeds == 1 or isinstance(model, type) or not hasattr(model, "state_dict"):
        return ()
    return (
        f"All seeds begin with the weights of model={type(model).__name__}: SD over seeds, intervals and p do not "
        "contain how far figures move with other initial weights. A function that makes the network, "
        "model=lambda channels, size: ..., gives each seed its own.",
    )


def _name_experiments(
    experiments: Sequence[PythonExperiment] | Mapping[str, PythonExperiment],
) -> list[_NamedExperiment]:
    """Return the experiments with a label and a folder name for each.

    Raises:
        BadInput: If there is no experiment, or an entry is not one.
    """
    from polyclinic.strategies.registry import STRATEGIES

    if isinstance(experiments, str | Path) or not experiments:
        raise BadInput([Fault("experiments", "must be a list with at least one file, or name of an example.")])
    if isinstance(experiments, Mapping) and experiments.keys() <= Experiment.model_fields.keys():
        problem = "is one experiment, with nothing to compare."
        raise BadInput([Fault("experiments", problem, "Give a list of several, or a dictionary name -> experiment.")])
    named = list[_NamedExperiment]()
    named_entries: list[tuple[str | None, PythonExperiment]] = [(None, each) for each in experiments]
    if isinstance(experiments, Mapping):
        named_entries = [(str(name), each) for name, each in experiments.items()]
    for name, entry in named_entries:
        is_method = isinstance(entry, str) and entry in STRATEGIES and not Path(entry).is_file()
        experiment: PythonExperiment = {"run.method": entry} if is_method else entry
        settings = {} if name is None else {"run.name": name}
        if not isinstance(experiment, Mapping):
            path = Path(experiment)
            tables = None
            label = name or path.stem
        else:
            settings = {**{key: value for key, value in experiment.items() if "." in key}, **settings}
            tables = copy_tables({key: value for key, value in experiment.items() if "." not in key})
            section = tables.get("run")
            run = section if isinstance(section, dict) else {}
            label = name or str(run.get("name") or settings.get("run.method") or run.get("method") or "experiment")
            path = Path(_make_stem(label, {each.stem for each in named}))
        stem = label if tables is None and name is None else _make_stem(label, {each.stem for each in named})
        named.append(_NamedExperiment(label, stem, path, tables, tuple(convert_settings_to_overrides(settings))))
    return named


def _make_stem(label: str, others: Collection[str]) -> str:
    """Return a folder name that is not among the others; characters other than letters and digits become ``-``."""
    plain = "".join(letter if letter.isalnum() or letter == "_" else "-" for letter in label)
    numbered = (plain if number == 1 else f"{plain}-{number}" for number in itertools.count(1))
    return next(name for name in numbered if name not in others)


def _read_experiment_files(
    experiments: Sequence[_NamedExperiment], shared_overrides: Sequence[str], custom_parts: CustomParts
) -> list[ExperimentFile]:
    """Read all experiments.

    Raises:
        BadInput: With the faults of all experiments.
    """
    files = list[ExperimentFile]()
    faults = list[Fault]()
    for experiment in experiments:
        try:
            source = experiment.path if experiment.tables is None else experiment.tables
            file = read_python_experiment(source, (*shared_overrides, *experiment.overrides), experiment.label)
            custom_parts.refuse_other_processes(file)
            files.append(file)
        except BadInput as error:
            faults += error.faults
    raise_faults(list(dict.fromkeys(faults)))
    return files
