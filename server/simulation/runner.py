"""Run the cells of a grid, each in a process of its own, several at a time, with a live table of progress."""

import fcntl
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

from common.errors import BadInput, CannotGoOn, Fault
from common.system.stopping import removed_if_stopped
from common.system.terminal import ProgressForm
from server.simulation.live_table import UnseenGrid, progress_of_grid
from server.simulation.progress import AtWork, Pace
from server.simulation.trial import Cell
from server.simulation.worker import fork_server, run_apart

LOOK_S = 0.5
RUNS_PER_GPU = 4


class FailedRuns(CannotGoOn):
    """Some runs of a grid failed; names each with its reason."""


def run_cells(
    cells: Sequence[Cell], out: Path, jobs: int, console: Console, progress: ProgressForm = ProgressForm.auto
) -> None:
    """Run what is not there yet, ``jobs`` at a time; a folder that several cells share is run once.

    Raises:
        BadInput: If another process is at work in this folder.
        FailedRuns: If a run fails; the others are finished first.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _alone_in(out):
        runs = list({cell.folder: cell for cell in cells}.values())
        todo = [cell for cell in runs if not cell.is_done()]
        if len(todo) < len(runs):
            console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are there already.")
        failures = _Grid(runs, todo, jobs).run(console, progress)
    if failures:
        raise FailedRuns("\n".join(failures))


def fitting_jobs(cells: Sequence[Cell]) -> int:
    """How many runs go at a time: one where Ray is used, else by cores and threads, and by GPUs where there are any."""
    files = [cell.file.experiment for cell in cells]
    if any(each.simulation.backend == "ray" for each in files):
        return 1
    by_cores = max(1, len(os.sched_getaffinity(0)) // max(each.training.threads for each in files))
    from common.models.gpu import visible_gpus  # here: a wrong call is refused before

    gpus, wanted = visible_gpus(), {each.simulation.gpus_per_site for each in files} - {0.0}
    by_gpus = min((_room(gpus, each) for each in wanted), default=by_cores)
    return max(1, min(by_cores, by_gpus)) if gpus else by_cores


def _room(gpus: int, each_takes: float) -> int:
    """How many runs fit on GPUs; a run without Ray trains one site at a time."""
    if each_takes > 1:
        return gpus // int(each_takes)
    return gpus * (math.floor(1 / each_takes + 1e-6) if each_takes > 0 else RUNS_PER_GPU)


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Two processes would throw each other's unfinished runs away."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = "another flwr-sim is at work in this folder."
            raise BadInput([Fault(f"--out {out}", problem, "Wait for it, or name another folder.")]) from None
        yield


@dataclass
class _Grid:
    cells: Sequence[Cell]
    todo: Sequence[Cell]
    jobs: int
    started: dict[Path, float] = field(default_factory=dict)
    begun: SimpleQueue[Cell] = field(default_factory=SimpleQueue)

    def run(self, console: Console, progress: ProgressForm) -> list[str]:
        """Run; return what went wrong, one text a failed run."""
        totals, left = Counter(cell.label for cell in self.cells), Counter(cell.label for cell in self.todo)
        pace = Pace(totals, {label: totals[label] - left[label] for label in totals})
        failures: list[str] = []
        shown = progress_of_grid(progress, console, pace, self.jobs, self._at_work)
        with fork_server(), shown, ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(self._run_one, cell): cell for cell in self.todo}
            try:
                while waiting:
                    done, _ = wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        failures += _settled(waiting.pop(future), future, pace, shown)
                    self._tell_begun(shown)  # after the ends, which made room for them
                    shown.update()
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)  # those at work got the signal too
                raise
        return failures

    def _tell_begun(self, shown: UnseenGrid) -> None:
        while not self.begun.empty():
            cell = self.begun.get()
            shown.started(cell.folder.name, cell.label, cell.rounds)

    def _at_work(self) -> list[AtWork]:
        now, by_folder = time.monotonic(), {cell.folder: cell for cell in self.todo}
        at_work = [(by_folder[folder], now - since) for folder, since in list(self.started.items())]
        return [
            AtWork(cell.label, seconds, _rounds_in(cell), cell.rounds, cell.folder.name) for cell, seconds in at_work
        ]

    def _run_one(self, cell: Cell) -> tuple[str, float]:
        """Run one cell in its own process; return the reason if it failed, and its seconds."""
        self.started[cell.folder] = began = time.monotonic()
        self.begun.put(cell)
        try:
            failure = _run_process(cell)
        finally:
            del self.started[cell.folder]
        return failure, time.monotonic() - began


def _run_process(cell: Cell) -> str:
    if cell.unfinished.exists():
        shutil.rmtree(cell.unfinished)
    with removed_if_stopped(partial(shutil.rmtree, cell.unfinished, ignore_errors=True)):
        failure = run_apart(cell)
    if failure:
        return failure
    cell.unfinished.rename(cell.folder)
    return ""


def _settled(cell: Cell, future: Future[tuple[str, float]], pace: Pace, shown: UnseenGrid) -> list[str]:
    failure, seconds = future.result()
    if not failure:
        pace.finished(cell.label, seconds)
    shown.ended(cell.folder.name, cell.label, failure, seconds)
    return [f"{cell.folder.name}: {failure}"] if failure else []


def _rounds_in(cell: Cell) -> int:
    try:
        with (cell.unfinished / "rounds.jsonl").open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0
