"""flwr-sim compare: several experiments over the same seeds, each run in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.config import ExperimentFile, read_experiment
from common.errors import BadInput, Fault, quoted, stop_on
from server.comparison import compare, write_comparison
from server.report import write_comparison_report
from server.report.tables import comparison_table, markdown_table
from server.run_files import read_run
from server.simulation import checked


class FailedRuns(RuntimeError):
    """Some runs of a comparison failed; names each with its reason."""


@dataclass(frozen=True)
class Cell:
    """One experiment with one seed."""

    experiment: Path
    seed: int
    folder: Path
    overrides: tuple[str, ...]

    def read(self) -> ExperimentFile:
        """The experiment as this cell runs it."""
        return read_experiment(self.experiment, self.overrides)

    def is_done(self) -> bool:
        """Whether the folder holds this very experiment, finished."""
        summary = self.folder / "summary.json"
        if not summary.is_file():
            return False
        done = json.loads(summary.read_text(encoding="utf-8"))["experiment"]
        return bool(done == self.read().experiment.model_dump(mode="json"))


def run_all(
    experiments: Sequence[Path], out: Path, seeds: Iterable[int], jobs: int, overrides: Sequence[str], console: Console
) -> None:
    """Run every experiment with every seed, ``jobs`` at a time, then compare them.

    A run that is there already, finished and of the same experiment, is kept.

    Raises:
        BadInput: With the faults of all experiments, before anything runs; or if a folder holds another experiment.
        FailedRuns: If a run fails; the others are finished first.
    """
    cells = [
        Cell(path, seed, out / f"{path.stem}-seed{seed}", (*overrides, f"run.seed={seed}"))
        for path in experiments
        for seed in seeds
    ]
    _check(cells)
    todo = [cell for cell in cells if not cell.is_done()]
    if len(todo) < len(cells):
        console.print(f"{len(cells) - len(todo)} of {len(cells)} runs are there already.")
    failures = _run(todo, len(cells), jobs, console)
    if failures:
        raise FailedRuns("\n".join(failures))
    comparison = compare([read_run(cell.folder) for cell in cells])
    write_comparison(comparison, out / "comparison.json")
    report = write_comparison_report(comparison, out / "report.html")
    console.print(comparison_table(comparison))
    (out / "comparison.md").write_text(markdown_table(comparison) + "\n", encoding="utf-8")
    console.print(f"Report: {report}", soft_wrap=True)


def _check(cells: Sequence[Cell]) -> None:
    """Every experiment with every seed, for partitions depend on it; and folders that hold something else."""
    faults = _clashes(cells)
    for cell in cells:
        try:
            checked(cell.read())
            if cell.folder.exists() and any(cell.folder.iterdir()) and not cell.is_done():
                problem = "holds an unfinished run or another experiment, and nothing is written over."
                faults.append(Fault(str(cell.folder), problem, "Remove it, or name another --out."))
        except BadInput as error:
            faults += error.faults
    stop_on(list(dict.fromkeys(faults)))
    stop_on(_same_labels(cells))


def _clashes(cells: Sequence[Cell]) -> list[Fault]:
    """Experiments that could not be told apart, and a seed that --seeds would overrule."""
    faults: list[Fault] = []
    if any(override.partition("=")[0].strip() == "run.seed" for cell in cells for override in cell.overrides[:-1]):
        faults.append(Fault("--set run.seed", "is settled by --seeds.", "Leave it out."))
    if len({cell.folder for cell in cells}) < len(cells):
        names = sorted({cell.experiment.stem for cell in cells})
        faults.append(Fault("experiments", f"two files have one name: {quoted(names)}.", "Rename one of them."))
    return faults


def _same_labels(cells: Sequence[Cell]) -> list[Fault]:
    """Experiments that tables would call by one name."""
    labels: dict[str, set[Path]] = {}
    for cell in cells:
        run = cell.read().experiment.run
        labels.setdefault(run.name or run.method, set()).add(cell.experiment)
    return [
        Fault("run.name", f'"{label}" is the name of {quoted(sorted(p.name for p in paths))}.', "Give each its own.")
        for label, paths in labels.items()
        if len(paths) > 1
    ]


def _run(todo: Sequence[Cell], total: int, jobs: int, console: Console) -> list[str]:
    """Run the cells; return what went wrong, one text a failed run."""
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    failures: list[str] = []
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):
        task = progress.add_task("runs", total=total, completed=total - len(todo))
        waiting: dict[Future[str], Cell] = {pool.submit(_run_cell, cell): cell for cell in todo}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                cell, failure = waiting.pop(future), future.result()
                progress.advance(task)
                progress.console.print(f"{'failed' if failure else 'done'}  {cell.folder}", soft_wrap=True)
                failures += [f"{cell.folder}: {failure}"] if failure else []
    return failures


def _run_cell(cell: Cell) -> str:
    """Run one cell in its own process; return the reason if it failed."""
    command = [sys.executable, "-m", "server.sim_cli", "run", str(cell.experiment), "--out", str(cell.folder)]
    for override in cell.overrides:
        command += ["--set", override]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else (result.stderr.strip() or f"exit code {result.returncode}")
