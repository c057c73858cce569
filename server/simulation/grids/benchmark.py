"""flwr-sim benchmark: what is not there yet is run, each run ends in a line of the results file, then the page."""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from common.errors import BadInput, Fault, stop_on
from common.system.formatting import duration, listed
from common.system.stopping import removed_if_stopped
from server.analysis.benchmark.lines import ResultLine, append_line, code_version, line_of, read_lines
from server.analysis.benchmark.results import BenchmarkResult, rates_of, result_of
from server.analysis.benchmark.spec import FormPlan, Planned
from server.reporting.benchmark_text import as_markdown
from server.reporting.pages.benchmark import write_benchmark_report
from server.runs.reader import read_run
from server.simulation.runner import FailedRuns
from server.simulation.trial import Cell, check
from server.simulation.worker import fork_server, run_measured
from strategies.registry import method_of


@dataclass(frozen=True)
class Wish:
    """What a person asks of the benchmark.

    Attributes:
        folder: With ``benchmark.toml``.
        results: The file of finished runs.
        out: Folder for the page.
        workers: Runs at a time.
        minutes: No run begins later than this; None for all of them. 0 only writes the page.
        again: Run anew what was made with other code.
    """

    folder: Path
    form: str
    results: Path
    out: Path
    workers: int
    minutes: float | None
    again: bool


def run_benchmark(wish: Wish, console: Console) -> BenchmarkResult:
    """Run what is missing, as far as the time goes, and write ``benchmark.md`` and ``report.html`` into the folder.

    Raises:
        BadInput: With the faults of the benchmark's files; or if another process is at work on the results.
        FailedRuns: If a run fails; the others are finished and the page is written first.
    """
    plan = FormPlan.of(wish.folder, wish.form)
    wish.out.mkdir(parents=True, exist_ok=True)
    work = _Work(plan, wish, console)
    if wish.minutes == 0:  # also while another process is at work
        result = write_pages(plan, wish)
    else:
        with _alone_with(wish.results):
            refuse_unfit(plan, wish.out)
            try:
                work.run()
            finally:
                result = write_pages(plan, wish)
    for line in (as_markdown(result), f"Report: {wish.out / 'report.html'}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if work.failures:
        raise FailedRuns("\n".join(work.failures))
    return result


def refuse_unfit(plan: FormPlan, out: Path) -> None:
    """Refuse what is wrong with a row, a pattern or a data set before the first run, not hours later.

    Raises:
        BadInput: With the faults of all of them, and with rows of the same settings, whose runs would be the same.
    """
    faults, labels, first = list[Fault](), dict[tuple[str, str], str](), dict[str, Planned]()
    for run, where in plan.rows():
        try:
            method_of(run.file.experiment)
        except BadInput as error:
            faults += [replace(fault, where=f"{where}: {fault.where}") for fault in error.faults]
            continue
        first.setdefault(run.data, run)
        if (other := labels.setdefault((run.data, run.key), run.method)) != run.method:
            problem = f'has the same settings as "{other}": their runs would be one.'
            faults.append(Fault(where, problem, "Leave one of them out."))
    stop_on(faults)
    check([Cell(run.experiment, out / run.key, run.overrides, run.method) for run in first.values()])


def write_pages(plan: FormPlan, wish: Wish) -> BenchmarkResult:
    """Write the page of what is there, in both forms."""
    lines = read_lines(wish.results)
    found = lines_by_block(plan, lines)
    result = result_of(plan, wish.form, found, wanted_runs(plan))
    (wish.out / "benchmark.md").write_text(as_markdown(result) + "\n", encoding="utf-8")
    write_benchmark_report(result, wish.out / "report.html")
    return result


def lines_by_block(plan: FormPlan, lines: Mapping[str, ResultLine]) -> dict[str, ResultLine]:
    """The finished runs of the plan, by block and key.

    One run stands in every block that has its settings: with all labels at all sites some patterns are the same.
    """
    return {
        f"{run.pattern} {run.key}": lines[run.key].model_copy(update={"pattern": run.pattern})
        for run in all_runs(plan, lines.values())
        if run.key in lines
    }


def all_runs(plan: FormPlan, lines: Iterable[ResultLine]) -> Iterator[Planned]:
    """The runs of the plan, as far as they are known: results need the learning rates that the lines choose."""
    known = list(lines)
    for data in plan.data_sets():
        tuning = list(plan.tuning(data))
        yield from tuning
        keys = {run.key for run in tuning}
        rates = rates_of([line for line in known if line.key in keys], data)
        for pattern in (pattern for one, pattern in plan.form.blocks if one == data):
            yield from plan.results(data, pattern, rates)


def wanted_runs(plan: FormPlan) -> int:
    """The number of all runs, those whose learning rate is not known yet among them."""
    tuning = sum(len(plan.methods(data)) for data in plan.data_sets()) * len(plan.benchmark.learning_rates)
    return tuning + sum(len(plan.methods(data)) * plan.form.seeds for data, _ in plan.form.blocks)


def estimate(plan: FormPlan, lines: Sequence[ResultLine]) -> list[str]:
    """What the whole form costs by the CPU seconds of the runs that are there, method by method.

    A run is taken to cost what the method's runs on the same data set cost on average; where there is none, the mean
    of all runs.
    """
    if not lines:
        return [f"{wanted_runs(plan)} runs. No run was measured yet: run some, and ask again."]
    costs: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        costs.setdefault((line.data, line.method), []).append(line.cpu_seconds / line.rounds)
    overall = sum(line.cpu_seconds / line.rounds for line in lines) / len(lines)
    rounds, unmeasured = 0.0, 0
    for data, times in _times(plan):
        for method in plan.methods(data):
            own = costs.get((data, method.label), [])
            unmeasured += 0 if own else times
            rounds += times * (sum(own) / len(own) if own else overall)
    hours = rounds * plan.form.rounds / 3600
    sized = [data for data in plan.data_sets() if plan.form.sizes.get(data)]
    about = "at least" if sized else "about"
    found = [
        f"{wanted_runs(plan)} runs of {plan.form.rounds} rounds: {about} {hours:.1f} core-hours on this machine.",
        f"Rates are of {len(lines)} runs; {unmeasured} of the runs have the mean rate of all others.",
    ]
    if sized:
        told = f"This form sets another size of {listed(sized)}, and the rates may be of smaller images or fewer:"
        found.append(f"{told} the cost grows with both.")
    return found


def _times(plan: FormPlan) -> Iterator[tuple[str, int]]:
    """How often each method is run on a data set: to choose its learning rate, then block by block."""
    yield from ((data, len(plan.benchmark.learning_rates)) for data in plan.data_sets())
    yield from ((data, plan.form.seeds) for data, _ in plan.form.blocks)


def tell_estimate(wish: Wish, console: Console) -> None:
    """Say what the form costs, by the rates of finished runs in the results files beside each other.

    Raises:
        BadInput: With the faults of the benchmark's files.
    """
    plan = FormPlan.of(wish.folder, wish.form)
    beside = sorted({wish.results, *wish.folder.glob("*.jsonl")})
    lines = [line for path in beside for line in read_lines(path).values()]
    for sentence in estimate(plan, lines):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _alone_with(results: Path) -> Iterator[None]:
    """Two processes would make each run twice."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = "another flwr-sim is at work on this file."
            raise BadInput([Fault(f"--results {results}", problem, "Wait for it, or name another.")]) from None
        yield


@dataclass
class _Work:
    """The runs that are missing, some at a time."""

    plan: FormPlan
    wish: Wish
    console: Console
    failures: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Go through the data sets: first the runs that choose learning rates, then block by block, seed by seed."""
        with fork_server(), _scratch() as scratch:
            for data in self.plan.data_sets():
                tuning = list(self.plan.tuning(data))
                self._all(tuning, Path(scratch))
                lines, keys = read_lines(self.wish.results), {run.key for run in tuning}
                rates = rates_of([line for key, line in lines.items() if key in keys], data)
                for pattern in (pattern for one, pattern in self.plan.form.blocks if one == data):
                    self._all(list(self.plan.results(data, pattern, rates)), Path(scratch))

    def _all(self, runs: Sequence[Planned], scratch: Path) -> None:
        lines, code = read_lines(self.wish.results), code_version()
        kept = {key for key, line in lines.items() if not self.wish.again or line.code == code}
        todo = iter([run for run in runs if run.key not in kept])
        with ThreadPoolExecutor(self.wish.workers) as pool:
            going: dict[Future[tuple[str, ResultLine | None]], Planned] = {}
            while True:
                while len(going) < self.wish.workers and self._time_left() and (run := next(todo, None)) is not None:
                    going[pool.submit(_finished, run, scratch / run.key)] = run
                if not going:
                    return
                for future in wait(going, return_when=FIRST_COMPLETED).done:
                    self._settle(going.pop(future), *future.result())

    def _time_left(self) -> bool:
        return self.wish.minutes is None or time.monotonic() - self.began < 60 * self.wish.minutes

    def _settle(self, run: Planned, failure: str, line: ResultLine | None) -> None:
        what = f"{run.data} {run.pattern} {run.method} lr {run.lr:g} seed {run.seed}"
        if line is None:
            self.failures.append(f"{what}: {failure}")
            self.console.print(f"{what}: failed: {failure}", markup=False, highlight=False, soft_wrap=True)
            return
        append_line(self.wish.results, line)
        told = f"{what}: validation AUROC {line.validation_auroc}, {duration(line.cpu_seconds)} of CPU time"
        self.console.print(told, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _scratch() -> Iterator[str]:
    """A folder for runs under way, removed also where the program is stopped."""
    folder = tempfile.mkdtemp(prefix="polyclinic-benchmark-")
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        with removed_if_stopped(remove):
            yield folder
    finally:
        remove()


def _finished(run: Planned, folder: Path) -> tuple[str, ResultLine | None]:
    """Run one in a process of its own; return why it failed, or its line. Its folder is not kept."""
    cell = Cell(run.experiment, folder, run.overrides, run.method, pages=False)
    try:
        failure, seconds = run_measured(cell)
        return (failure, None) if failure else ("", line_of(run, read_run(cell.unfinished), seconds))
    finally:
        shutil.rmtree(cell.unfinished, ignore_errors=True)
