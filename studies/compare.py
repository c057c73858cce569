"""The commands ``flwr-sim compare``, which runs experiments over the same seeds, and ``flwr-sim demo``."""

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.terminal import ProgressFormat
from polyclinic.server.runs.folder import DEMO_MARK_FILE, find_demo_folder_faults
from polyclinic.server.runs.tracking import TrackingService, open_mlflow_store
from polyclinic.studies.trial import Trial, check_trials, refuse_seed_override

if TYPE_CHECKING:
    from polyclinic.server.runs.reader import RunFolderContent
    from polyclinic.studies.comparison import MethodComparison

REPORT_FILE = "report.html"
DEMO_EXPERIMENT = Path(__file__).parent / "demo.toml"
DEMO_METHODS = ("surgical", "vanilla")
DEMO_INTRODUCTION = """\
[bold]Four hospitals, one model.[/] Each annotates two findings that all annotate, and some that nobody else does.
The pictures are procedural phantoms, synthetic and made here: nothing is downloaded.
"""


def run_comparison(
    experiments: Sequence[Path],
    out: Path,
    seeds: Iterable[int],
    jobs: int | None,
    overrides: Sequence[str],
    console: Console,
    track: TrackingService | None = None,
    progress: ProgressFormat = ProgressFormat.auto,
) -> None:
    """Run every experiment with every seed, compare the runs, and write tables and a report.

    A finished run of the same experiment in the folder is reused.

    Args:
        jobs: Number of runs at the same time; None for as many as cores and GPUs allow.
        track: Service to which the metrics are logged, in addition to the run folders.
        progress: Format in which progress is printed.

    Raises:
        BadInput: With the faults of all experiments, before a run starts; also if a folder has another experiment.
        RunsFailed: If a run fails, after the others have finished.
    """
    refuse_seed_override(overrides)
    trials = [
        Trial(path, out / f"{path.stem}-seed{seed}", (*overrides, f"run.seed={seed}"), path.stem, track)
        for path in experiments
        for seed in seeds
    ]
    comparison, _ = compare_trials(trials, out, jobs, console, progress)
    from polyclinic.studies.claims import describe_headline_result
    from polyclinic.studies.comparison_report import format_comparison_tables

    console.print(format_comparison_tables(comparison))
    for sentence in (describe_headline_result(comparison), *comparison.cautions):
        console.print(sentence, markup=False, highlight=False)
    console.print(f"Report: {out / REPORT_FILE}", soft_wrap=True)


def compare_trials(
    trials: Sequence[Trial],
    out: Path,
    jobs: int | None,
    console: Console,
    progress: ProgressFormat = ProgressFormat.auto,
    *,
    in_this_process: bool = False,
    cautions: Sequence[str] = (),
) -> "tuple[MethodComparison, list[RunFolderContent]]":
    """Run trials, compare them, and write the report, ``comparison.json`` and ``comparison.md``.

    Args:
        in_this_process: As for :func:`polyclinic.studies.runner.run_trials`.
        cautions: Sentences that are put before the cautions of the comparison.

    Returns:
        The comparison, and the run of each trial.

    Raises:
        BadInput: With the faults of all experiments, before a run starts; also if a folder has another experiment.
        RunsFailed: If a run fails, after the others have finished.
    """
    if len({trial.folder for trial in trials}) < len(trials):
        names = sorted({trial.label for trial in trials})
        raise BadInput([Fault("experiments", f"two files have one name: {quote_names(names)}.", "Rename one of them.")])
    labels: dict[str, set[str]] = {}
    for trial in trials:
        with suppress(BadInput):  # the check below reports its faults
            run = trial.experiment_file.experiment.run
            labels.setdefault(run.name or run.method, set()).add(trial.experiment.name)
    same = {label: sorted(names) for label, names in labels.items() if len(names) > 1}
    remedy = "Give each its own [run] name."
    raise_faults(
        [Fault("run.name", f'"{label}" is the name of {quote_names(names)}.', remedy) for label, names in same.items()]
    )
    from polyclinic.studies.runner import (  # imported here, so that a wrong call is refused before torch is imported
        count_possible_parallel_runs,
        run_trials,
    )

    open_mlflow_store(trials[0].track)  # create it once, before several runs open it at the same time
    check_trials(trials)
    jobs = 1 if in_this_process else jobs or count_possible_parallel_runs(trials)
    run_trials(trials, out, jobs, console, progress, in_this_process=in_this_process)
    from polyclinic.server.runs.reader import read_run
    from polyclinic.studies.comparison import compare_methods, write_comparison
    from polyclinic.studies.comparison_report import comparison_as_markdown, write_comparison_report

    runs = [read_run(trial.folder) for trial in trials]
    comparison = compare_methods(runs)
    comparison = replace(comparison, cautions=(*cautions, *comparison.cautions))
    write_comparison(comparison, out / "comparison.json")
    write_comparison_report(comparison, out / REPORT_FILE, runs)
    write_atomically(out / "comparison.md", f"{comparison_as_markdown(comparison)}\n".encode())
    return comparison, runs


def run_demo(out: Path, backend: str | None, console: Console) -> None:
    """Train surgical aggregation and vanilla federated learning on synthetic radiographs, and print both results.

    Args:
        backend: ``ray`` or ``inline``; None for the default.

    Raises:
        BadInput: If ``out`` exists and is not a folder of the demo.
    """
    from polyclinic.common.metrics.measured import format_value_with_error
    from polyclinic.server.reporting.tables import make_class_auroc_table
    from polyclinic.server.runs.reader import read_run
    from polyclinic.server.simulation.simulate import simulate
    from polyclinic.studies.comparison import compare_methods, write_comparison
    from polyclinic.studies.comparison_report import write_comparison_report
    from polyclinic.studies.statistics import MIN_SEEDS

    raise_faults(find_demo_folder_faults(out))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_atomically(out / DEMO_MARK_FILE, b"flwr-sim demo may remove this folder.\n")
    console.print(DEMO_INTRODUCTION)
    for method in DEMO_METHODS:
        console.print(f"Training [bold]{method}[/] ...")
        overrides = [f'run.method="{method}"', f'run.name="{method}"']
        overrides += [f'simulation.backend="{backend}"'] if backend else []
        simulate(read_experiment(DEMO_EXPERIMENT, overrides), out / method, console)
    runs = {method: read_run(out / method) for method in DEMO_METHODS}
    comparison = compare_methods(list(runs.values()))
    write_comparison(comparison, out / "comparison.json")
    report = write_comparison_report(comparison, out / "report.html", list(runs.values()))
    console.print(make_class_auroc_table({method: run.summary for method, run in runs.items()}))
    tests = [runs[method].summary.test for method in DEMO_METHODS]
    headlines = [test.compute_headline_auroc(test.unique_classes.classes) for test in tests]
    surgical, vanilla = (format_value_with_error(headline.mean) for headline in headlines)
    console.print(
        f"On findings that one hospital alone annotates: mean AUROC {surgical} with surgical aggregation, {vanilla}"
        f" with vanilla FL, which takes missing labels as negative. One seed: a verdict needs {MIN_SEEDS}."
    )
    console.print(f"Report: {report}", soft_wrap=True)
