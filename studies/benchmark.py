"""The command ``flwr-sim benchmark``, which runs the missing runs, adds them to the results file and writes a page."""

import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from polyclinic.common.config import ExperimentFile
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import (
    lock_file,
    open_own_file,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_duration, join_as_english_list
from polyclinic.common.system.stopping import remove_output_if_stopped
from polyclinic.server.runs.reader import read_run
from polyclinic.strategies.registry import build_site_method
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan, PlannedRun
from polyclinic.studies.benchmark_report import benchmark_as_markdown, describe_standing, write_benchmark_report
from polyclinic.studies.benchmark_results import (
    BenchmarkResult,
    RunResultLine,
    append_result_line,
    choose_learning_rates,
    evaluate_benchmark,
    find_wider_rate,
    format_runs_as_csv,
    hash_result_code,
    make_benchmark_result_line,
    read_result_lines,
)
from polyclinic.studies.benchmark_scores import write_test_scores
from polyclinic.studies.runner import RunsFailed, run_and_measure_trial, run_in_parallel, start_fork_server
from polyclinic.studies.trial import Trial, check_trials


@dataclass(frozen=True)
class BenchmarkOptions:
    """The options of ``flwr-sim benchmark``.

    Attributes:
        folder: Folder with ``benchmark.toml``.
        form: Name of the variant, such as ``small``.
        results: The file of finished runs.
        out: Folder for the page.
        workers: Number of runs at the same time.
        minutes: Time after which no run is started; None for no limit. 0 only writes the page.
        again: True to repeat finished runs that another version of the code made.
        row: Method to compare with all rows of the variant; empty for none.
        row_settings: Overrides for the runs of ``row``.
        published: File of finished runs that is only read; None for none.
        scores: Folder for each run's scores on its test images; None to write none.
    """

    folder: Path
    form: str
    results: Path
    out: Path
    workers: int
    minutes: float | None
    again: bool
    row: str = ""
    row_settings: tuple[str, ...] = ()
    published: Path | None = None
    scores: Path | None = None

    def read_plan(self) -> BenchmarkVariantPlan:
        """Read the variant from its file, and add the row that the user compares with it.

        Raises:
            BadInput: With the faults of the benchmark's files.
        """
        plan = BenchmarkVariantPlan.read_benchmark_variant(self.folder, self.form)
        return plan.add_method(self.row, self.row_settings)[0] if self.row else plan

    @property
    def row_label(self) -> str:
        """Return the name of the user's row in the tables."""
        plan = BenchmarkVariantPlan.read_benchmark_variant(self.folder, self.form)
        return plan.add_method(self.row, self.row_settings)[1]

    def read_finished_runs(self) -> dict[str, RunResultLine]:
        """Return key -> finished run, from both files; the user's file takes precedence."""
        return {**self.read_published_runs(), **read_result_lines(self.results)}

    def read_published_runs(self) -> dict[str, RunResultLine]:
        """Return key -> finished run, from the file ``published``; empty without such a file."""
        return read_result_lines(self.published) if self.published else {}


def list_benchmark_experiments(options: BenchmarkOptions) -> list[ExperimentFile]:
    """Return an experiment file for each combination of settings in a benchmark; learning rates and seeds are examples.

    They include the runs that choose learning rates, which may belong to another variant with other overrides. A run
    with faults is left out, because its faults are reported elsewhere.
    """
    plan, files = options.read_plan(), list[ExperimentFile]()
    for run in plan.iterate_runs_of_all_settings():
        with suppress(BadInput):
            files.append(run.experiment_file)
    return files


def run_benchmark(options: BenchmarkOptions, console: Console) -> BenchmarkResult:
    """Run missing runs until the time limit; write ``benchmark.md`` and ``report.html`` into ``options.out``.

    Raises:
        BadInput: With the faults of the benchmark's files, or if another process writes the same results file.
        RunsFailed: If a run fails, after the other runs have finished and the page is written.
    """
    until = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    plan, failures = options.read_plan(), list[str]()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.minutes == 0:  # allowed even while another process writes the results file
        result = write_benchmark_pages(plan, options)
    else:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with open_own_file(options.results, "ab") as file:
            problem = "another flwr-sim is at work on this file."
            lock_file(file, Fault(f"--results {options.results}", problem, "Wait for it, or name another."))
            check_planned_runs(plan, options.out)
            try:
                failures = _run_missing_runs(plan, options, until, console)
            finally:
                result = write_benchmark_pages(plan, options)
    standing = describe_standing(result, options.row_label) if options.row else ""
    for text in (benchmark_as_markdown(result), standing, f"Report: {options.out / 'report.html'}"):
        if text:
            _print_plain_line(console, text)
    if failures:
        raise RunsFailed("\n".join(failures))
    return result


def _run_missing_runs(
    plan: BenchmarkVariantPlan, options: BenchmarkOptions, until: float, console: Console
) -> list[str]:
    """Run the runs that have no line in the results file; return the reason for each failure.

    For each data set in turn, first the runs that choose learning rates are run, then block by block, seed by seed.

    Args:
        until: Time on the monotonic clock after which no run is started.
    """
    failures: list[str] = []
    scratch = Path(tempfile.mkdtemp(prefix="polyclinic-benchmark-"))
    remove_scratch = partial(shutil.rmtree, scratch, ignore_errors=True)

    def run_planned_run(run: PlannedRun) -> tuple[str, RunResultLine | None]:
        trial = Trial(run.experiment, scratch / run.results_key, run.overrides, run.method, pages=False)
        try:
            failure, cpu_seconds = run_and_measure_trial(trial)
            if failure:
                return failure, None
            if options.scores and not run.tuning:
                write_test_scores(run, trial.unfinished_folder, options.scores)
            return "", make_benchmark_result_line(run, read_run(trial.unfinished_folder), cpu_seconds)
        finally:
            shutil.rmtree(trial.unfinished_folder, ignore_errors=True)

    def run_unfinished_runs(runs: Iterable[PlannedRun]) -> None:
        lines, code = read_result_lines(options.results), hash_result_code()
        finished = {key for key, line in lines.items() if not options.again or line.code == code}
        finished |= options.read_published_runs().keys()
        todo = [run for run in runs if run.results_key not in finished]
        with closing(run_in_parallel(todo, options.workers, run_planned_run, until=until)) as events:
            for run, end in events:
                if end is None:
                    continue
                failure, line = end
                name = f"{run.data} {run.pattern} {run.method} lr {run.lr:g} seed {run.seed}"
                if line is None:
                    failures.append(f"{name}: {failure}")
                    text = f"{name}: failed: {failure}"
                else:
                    append_result_line(options.results, line)
                    text = (
                        f"{name}: validation AUROC {line.validation_auroc}, {format_duration(line.cpu_seconds)} of CPU "
                        "time"
                    )
                _print_plain_line(console, text)

    try:
        with start_fork_server(), remove_output_if_stopped(remove_scratch):
            for data in plan.list_data_sets():
                tuning = list_tuning_runs(plan, data, {})
                run_unfinished_runs(tuning)
                lines = options.read_finished_runs()
                # While the best rate of a method is the smallest or largest that was tried, try the next one.
                while wider := list_further_runs(tuning, list_tuning_runs(plan, data, lines)):
                    tuning += wider
                    run_unfinished_runs(wider)
                    lines = options.read_finished_runs()
                rates = choose_rates_of_runs(tuning, lines, data)
                for pattern in plan.list_patterns_for_data(data):
                    run_unfinished_runs(plan.iterate_block_runs(data, pattern, rates))
    finally:
        remove_scratch()
    return failures


def check_planned_runs(plan: BenchmarkVariantPlan, out: Path) -> None:
    """Check the settings of all runs before the first one begins.

    Raises:
        BadInput: With all faults of methods, patterns and data sets; also if two methods have the same settings.
    """
    faults, labels, first = list[Fault](), dict[tuple[str, str], str](), dict[str, PlannedRun]()
    for run, where in plan.iterate_representative_runs():
        try:
            build_site_method(run.experiment_file.experiment)
        except BadInput as error:
            faults += [replace(fault, where=f"{where}: {fault.where}") for fault in error.faults]
            continue
        first.setdefault(run.data, run)
        if (other := labels.setdefault((run.data, run.results_key), run.method)) != run.method:
            problem = f'has the same settings as "{other}": their runs would be one.'
            faults.append(Fault(where, problem, "Leave one of them out."))
    raise_faults(faults)
    check_trials([Trial(run.experiment, out / run.results_key, run.overrides, run.method) for run in first.values()])


def write_benchmark_pages(plan: BenchmarkVariantPlan, options: BenchmarkOptions) -> BenchmarkResult:
    """Write the results of the finished runs as Markdown and as HTML, and the figures of each run as csv."""
    finished = options.read_finished_runs()
    lines = group_results_by_block(plan, finished)
    result = evaluate_benchmark(plan, options.form, lines, count_planned_runs(plan, finished))
    write_atomically(options.out / "benchmark.md", f"{benchmark_as_markdown(result)}\n".encode())
    write_atomically(options.out / "runs.csv", format_runs_as_csv(lines.values()).encode())
    write_benchmark_report(result, options.out / "report.html")
    return result


def read_benchmark_result(folder: Path, form: str, results: Path) -> BenchmarkResult:
    """Evaluate the finished runs of one variant in a results file."""
    plan, finished = BenchmarkVariantPlan.read_benchmark_variant(folder, form), read_result_lines(results)
    lines = group_results_by_block(plan, finished)
    return evaluate_benchmark(plan, form, lines, count_planned_runs(plan, finished))


def group_results_by_block(plan: BenchmarkVariantPlan, lines: Mapping[str, RunResultLine]) -> dict[str, RunResultLine]:
    """Return ``"PATTERN KEY"`` -> finished run; the parts are the label pattern and the key in the results file.

    A run appears once for each label pattern that has its settings. Several patterns may have the same settings, for
    example for a method with all labels at all sites.
    """
    return {
        f"{run.pattern} {run.results_key}": lines[run.results_key].model_copy(update={"pattern": run.pattern})
        for run in list_planned_runs(plan, lines)
        if run.results_key in lines
    }


def list_planned_runs(plan: BenchmarkVariantPlan, lines: Mapping[str, RunResultLine]) -> Iterator[PlannedRun]:
    """Yield, for each data set, the runs that choose learning rates, then the runs with the chosen rates.

    A method has no runs of the second kind until finished runs determine its learning rate.

    Args:
        lines: Key -> result of a finished run.
    """
    for data in plan.list_data_sets():
        tuning = list_tuning_runs(plan, data, lines)
        yield from tuning
        rates = choose_rates_of_runs(tuning, lines, data)
        for pattern in plan.list_patterns_for_data(data):
            yield from plan.iterate_block_runs(data, pattern, rates)


def list_tuning_runs(plan: BenchmarkVariantPlan, data: str, lines: Mapping[str, RunResultLine]) -> list[PlannedRun]:
    """Return the runs that choose learning rates on a data set.

    If the variant has ``widen``, they include a further rate for each method whose best rate is the smallest or the
    largest that was tried.

    Args:
        lines: Key -> result of a finished run.
    """
    runs = list(plan.iterate_tuning_runs(data))
    if not plan.form.widen:
        return runs
    candidates = (*plan.benchmark.learning_rates, *plan.benchmark.wider_learning_rates)
    for method in plan.list_methods_for_data(data):
        own = [run for run in runs if run.method == method.label]
        while all(run.results_key in lines for run in own):
            tried = {run.lr: lines[run.results_key].validation_auroc for run in own}
            wider = find_wider_rate({lr: auroc for lr, auroc in tried.items() if auroc is not None}, candidates)
            if wider is None or (data, method.label, wider) in plan.benchmark.failing_rates:
                break
            own.append(plan.make_tuning_run(data, method, wider))
            runs.append(own[-1])
    return runs


def list_further_runs(runs: Iterable[PlannedRun], longer: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs in ``longer`` that are not in ``runs``."""
    keys = {run.results_key for run in runs}
    return [run for run in longer if run.results_key not in keys]


def choose_rates_of_runs(
    tuning: Iterable[PlannedRun], lines: Mapping[str, RunResultLine], data: str
) -> dict[str, float]:
    """Return method -> learning rate for a data set, chosen from the tuning runs that are finished."""
    return choose_learning_rates([lines[run.results_key] for run in tuning if run.results_key in lines], data)


def count_planned_runs(plan: BenchmarkVariantPlan, lines: Mapping[str, RunResultLine] | None = None) -> int:
    """Return the number of all runs, including runs whose learning rate is not chosen yet.

    Args:
        lines: Key -> result of a finished run; they determine if further learning rates are tried.
    """
    runs = sum(times * len(plan.list_methods_for_data(data)) for data, times, _ in _iterate_run_counts(plan))
    if not plan.form.widen or not lines:
        return runs
    tuning = ((list_tuning_runs(plan, data, lines), plan.iterate_tuning_runs(data)) for data in plan.list_data_sets())
    return runs + sum(len(wider) - len(list(given)) for wider, given in tuning)


def _iterate_run_counts(plan: BenchmarkVariantPlan) -> Iterator[tuple[str, int, int]]:
    """Yield tuples of a data set, the number of runs of each method on it, and the rounds of a run.

    The runs that choose learning rates come first, then the runs of each block.
    """
    yield from (
        (data, len(plan.benchmark.learning_rates), plan.rate_tuning_variant.rounds) for data in plan.list_data_sets()
    )
    yield from ((data, plan.form.seeds, plan.form.rounds) for data, _ in plan.form.blocks)


def estimate_benchmark_cost(plan: BenchmarkVariantPlan, lines: Sequence[RunResultLine]) -> list[str]:
    """Estimate the CPU time of the whole variant from finished runs; return the estimate as sentences.

    The time of a round is the mean over the method's finished runs on the data set or, if there are none, over all
    finished runs.
    """
    if not lines:
        return [f"{count_planned_runs(plan)} runs. No run was measured yet: run some, and ask again."]
    costs: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        costs.setdefault((line.data, line.method), []).append(line.cpu_seconds / line.rounds)
    overall = sum(line.cpu_seconds / line.rounds for line in lines) / len(lines)
    seconds, unmeasured = 0.0, 0
    for data, times, rounds in _iterate_run_counts(plan):
        for method in plan.list_methods_for_data(data):
            own = costs.get((data, method.label), [])
            unmeasured += 0 if own else times
            seconds += times * rounds * (sum(own) / len(own) if own else overall)
    hours = seconds / 3600
    sized = [data for data in plan.list_data_sets() if plan.form.sizes.get(data)]
    about = "at least" if sized else "about"
    sentences = [
        f"{count_planned_runs(plan)} runs of {plan.form.rounds} rounds: {about} {hours:.1f} core-hours on this "
        "machine.",
        f"Rates are of {len(lines)} runs; {unmeasured} of the runs have the mean rate of all others.",
    ]
    if sized:
        other = (
            f"This form sets another size of {join_as_english_list(sized)}, and the rates may be of smaller images or "
            "fewer:"
        )
        sentences.append(f"{other} the cost grows with both.")
    return sentences


def print_cost_estimate(options: BenchmarkOptions, console: Console) -> None:
    """Print the estimated cost of the variant, or of only the user's row, from the finished runs in the folder's files.

    Raises:
        BadInput: With the faults of the benchmark's files.
    """
    plan = options.read_plan()
    if options.row:
        plan = replace(plan, form=plan.form.model_copy(update={"methods": (options.row_label,)}))
    files = sorted({options.results, *options.folder.glob("*.jsonl")})
    lines = [line for path in files for line in read_result_lines(path).values()]
    for sentence in estimate_benchmark_cost(plan, lines):
        _print_plain_line(console, sentence)


def _print_plain_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
