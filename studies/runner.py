"""Run trials, each in a process of its own, several at a time."""

import fcntl
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from rich.console import Console

from common.errors import BadInput, CannotGoOn, Fault
from common.models.gpu import visible_gpus
from common.system.stopping import removed_if_stopped
from common.system.terminal import ProgressForm
from studies.progress import ActiveRun, Pace, progress_of_grid
from studies.trial import Trial
from studies.worker import fork_server, run_measured

LOOK_S = 0.5
RUNS_PER_GPU = 4


class FailedRuns(CannotGoOn):
    """Some runs failed; names each with its reason."""


def fitting_jobs(trials: Sequence[Trial]) -> int:
    """Return how many runs fit at a time: one with Ray, else by cores and threads, and by GPUs where there are any."""
    experiments = [trial.file.experiment for trial in trials]
    if any(each.simulation.backend == "ray" for each in experiments):
        return 1
    by_cores = max(1, len(os.sched_getaffinity(0)) // max(each.training.threads for each in experiments))
    gpus, shares = visible_gpus(), {each.simulation.gpu_share for each in experiments} - {0.0}
    # A run without Ray trains one site at a time.
    room = [
        gpus // int(share) if share and share > 1 else gpus * (math.floor(1 / share + 1e-6) if share else RUNS_PER_GPU)
        for share in shares
    ]
    return max(1, min([by_cores, *room])) if gpus else by_cores


@contextmanager
def held(file: BinaryIO, option: str, what: str) -> Iterator[None]:
    """Keep other processes from a file that this one has open: two would make each run twice.

    Raises:
        BadInput: If another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        problem = f"another flwr-sim is at work {what}."
        raise BadInput([Fault(option, problem, "Wait for it, or name another.")]) from None
    yield


def run_trials(
    trials: Sequence[Trial], out: Path, jobs: int, console: Console, progress: ProgressForm = ProgressForm.auto
) -> None:
    """Run what is not there yet, ``jobs`` at a time; a folder that several trials share is run once.

    Raises:
        BadInput: If another process is at work in this folder.
        FailedRuns: If a run fails; the others are finished first.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("wb") as lock, held(lock, f"--out {out}", "in this folder"):
        runs = list({trial.folder: trial for trial in trials}.values())
        todo = [trial for trial in runs if not trial.is_done()]
        if len(todo) < len(runs):
            console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are there already.")
        if failures := _failures(runs, todo, jobs, console, progress):
            raise FailedRuns("\n".join(failures))


def _failures(
    runs: Sequence[Trial], todo: Sequence[Trial], jobs: int, console: Console, progress: ProgressForm
) -> list[str]:
    """Run what is to do; return a text for each failed run."""
    started, begun = dict[Path, tuple[Trial, float]](), SimpleQueue[Trial]()

    def active() -> list[ActiveRun]:
        now = time.monotonic()
        return [
            ActiveRun(trial.label, now - since, _rounds_in(trial), _rounds_of(trial), trial.folder.name)
            for trial, since in list(started.values())
        ]

    def run(trial: Trial) -> tuple[str, float]:
        since = time.monotonic()
        started[trial.folder] = trial, since
        begun.put(trial)
        try:
            return _run_process(trial), time.monotonic() - since
        finally:
            del started[trial.folder]

    totals, left = Counter(trial.label for trial in runs), Counter(trial.label for trial in todo)
    pace = Pace(totals, {label: totals[label] - left[label] for label in totals}, jobs, active)
    failures: list[str] = []
    with fork_server(), progress_of_grid(progress, console, pace) as shown, ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run, trial): trial for trial in todo}
        try:
            while waiting:
                for future in wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED).done:
                    trial, (failure, seconds) = waiting.pop(future), future.result()
                    if failure:
                        failures.append(f"{trial.folder.name}: {failure}")
                    else:
                        pace.finished(trial.label, seconds)
                    shown.ended(trial.folder.name, trial.label, failure, seconds)
                while not begun.empty():  # after the ends, which made room for them
                    trial = begun.get()
                    shown.started(trial.folder.name, trial.label, _rounds_of(trial))
                shown.update()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # those at work got the signal too
            raise
    return failures


def _run_process(trial: Trial) -> str:
    """Run one trial in its own process; return the reason if it failed."""
    if trial.unfinished.exists():
        shutil.rmtree(trial.unfinished)
    with removed_if_stopped(partial(shutil.rmtree, trial.unfinished, ignore_errors=True)):
        failure, _ = run_measured(trial)
    if not failure:
        trial.unfinished.rename(trial.folder)
    return failure


def _rounds_of(trial: Trial) -> int:
    return trial.file.experiment.run.rounds


def _rounds_in(trial: Trial) -> int:
    """Count the rounds that a run at work has done."""
    try:
        with (trial.unfinished / "rounds.jsonl").open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0
