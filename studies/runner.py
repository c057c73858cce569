"""Run trials (an experiment with a seed), several at a time, each in its own process.

The processes are forked from a server process that has imported everything, because imports take seconds.
"""

import gc
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from polyclinic.common.errors import BadInput, Fault, ProgramCannotContinue
from polyclinic.common.hosts import HostUse, find_user_secrets_path, list_permitted_uses, permit_hosts
from polyclinic.common.models.gpu import count_visible_gpus
from polyclinic.common.system.files import (
    lock_file,
    make_disk_full_message,
    open_own_file,
)
from polyclinic.common.system.stopping import PROGRAM_VARIABLE, end_process_with_parent, remove_output_if_stopped
from polyclinic.common.system.terminal import ProgressFormat
from polyclinic.server.runs.progress import SilentRunProgress
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.engine.events import RoundRecord, RunStopped
from polyclinic.strategies.engine.state import FederationState
from polyclinic.studies.progress import ActiveRun, TrialsProgressDisplay, TrialsTimeEstimate, make_trials_progress
from polyclinic.studies.trial import Trial

RunT = TypeVar("RunT")
EndT = TypeVar("EndT")
POLL_INTERVAL_S = 0.5
RUNS_PER_GPU = 4
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED_MODULES = (
    "polyclinic.client.simulation",
    "polyclinic.client.app",
    "polyclinic.server.reporting.run_report",
    "polyclinic.server.reporting.model_card",
)
"""Modules that a run imports late; the fork server imports them, so that no run has to."""
CONTEXT.set_forkserver_preload(["polyclinic.studies.parent_watch", __name__, *PRELOADED_MODULES])

_START_LOCK = threading.Lock()
_GPU_LOCK = threading.Lock()
_RUNS_BY_GPU = Counter[int]()
"""GPU number -> number of runs of this program that use it."""


class RunsFailed(ProgramCannotContinue):
    """Raised if runs failed; the message lists them with their reasons."""


def count_possible_parallel_runs(trials: Sequence[Trial]) -> int:
    """Return how many runs fit at a time: one with Ray, otherwise as cores, threads and GPUs permit."""
    experiments = [trial.experiment_file.experiment for trial in trials]
    if any(each.simulation.backend == "ray" for each in experiments):
        return 1
    by_cores = max(1, len(os.sched_getaffinity(0)) // max(each.training.threads for each in experiments))
    gpus, shares = count_visible_gpus(), {each.simulation.gpus_of_each_site for each in experiments} - {0.0}
    # A run without Ray trains one site at a time.
    by_gpus = [
        gpus // int(share) if share and share > 1 else gpus * (math.floor(1 / share + 1e-6) if share else RUNS_PER_GPU)
        for share in shares
    ]
    return max(1, min([by_cores, *by_gpus])) if gpus else by_cores


def run_trials(
    trials: Sequence[Trial],
    out: Path,
    jobs: int,
    console: Console,
    progress: ProgressFormat = ProgressFormat.auto,
    *,
    in_this_process: bool = False,
) -> None:
    """Run the unfinished trials, ``jobs`` at a time; run trials with the same folder once.

    Args:
        in_this_process: Run one trial after another in this process, because only it knows their objects.

    Raises:
        BadInput: If another process runs trials in the folder ``out``.
        RunsFailed: If a run fails, after the others have finished.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open_own_file(out / ".lock", "wb") as lock:
        problem = "another flwr-sim is at work in this folder."
        lock_file(lock, Fault(f"--out {out}", problem, "Wait for it, or name another."))
        runs = list({trial.folder: trial for trial in trials}.values())
        todo = [trial for trial in runs if not trial.is_trial_finished()]
        if len(todo) < len(runs):
            console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are there already.")
        started: dict[Path, tuple[Trial, float]] = {}  # active runs

        def active_runs() -> list[ActiveRun]:
            now, runs = time.monotonic(), []
            for trial, since in started.values():
                done = 0
                with suppress(OSError), (trial.unfinished_folder / "rounds.jsonl").open("rb") as file:
                    done = sum(1 for _ in file)
                rounds = trial.experiment_file.experiment.run.rounds
                runs.append(ActiveRun(trial.label, now - since, done, rounds, trial.folder.name))
            return runs

        def run_trial(trial: Trial) -> str:
            if trial.unfinished_folder.exists():
                shutil.rmtree(trial.unfinished_folder)
            with remove_output_if_stopped(partial(shutil.rmtree, trial.unfinished_folder, ignore_errors=True)):
                failure = run_trial_here(trial, shown) if in_this_process else run_and_measure_trial(trial)[0]
            if not failure:
                trial.unfinished_folder.rename(trial.folder)
            return failure

        totals, left = Counter(each.label for each in runs), Counter(each.label for each in todo)
        failures: list[str] = []
        pace = TrialsTimeEstimate(totals, {label: totals[label] - left[label] for label in totals}, jobs, active_runs)
        with (
            nullcontext() if in_this_process else start_fork_server(),
            make_trials_progress(progress, console, pace) as shown,
            closing(
                run_one_after_another(todo, run_trial)
                if in_this_process
                else run_in_parallel(todo, jobs, run_trial, look=shown.show_trials_progress)
            ) as events,
        ):
            for trial, failure in events:
                name, label = trial.folder.name, trial.label
                if failure is None:
                    started[trial.folder] = trial, time.monotonic()
                    shown.show_run_start(name, label, trial.experiment_file.experiment.run.rounds)
                    continue
                seconds = time.monotonic() - started.pop(trial.folder)[1]
                if failure:
                    failures.append(f"{name}: {failure}")
                else:
                    pace.record_finished_run(label, seconds)
                shown.show_run_end(name, label, failure, seconds)
        if failures:
            raise RunsFailed("\n".join(failures))


def run_one_after_another(runs: Iterable[RunT], start: Callable[[RunT], EndT]) -> Generator[tuple[RunT, EndT | None]]:
    """Call ``start`` for each run in this thread; yield as :func:`run_in_parallel` does."""
    for run in runs:
        yield run, None
        yield run, start(run)


def run_in_parallel(
    runs: Iterable[RunT],
    jobs: int,
    start: Callable[[RunT], EndT],
    *,
    look: Callable[[], None] = lambda: None,
    until: float = math.inf,
) -> Generator[tuple[RunT, EndT | None]]:
    """Call ``start`` for each run in ``jobs`` threads; yield (run, None) at its start and (run, result) at its end.

    Args:
        start: Executes a run and returns its result.
        look: Called at the end of each run, and at least every :data:`POLL_INTERVAL_S` seconds.
        until: Time on the monotonic clock after which no run begins.
    """
    waiting, active = iter(runs), dict[Future[EndT], RunT]()
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(active) < jobs and time.monotonic() < until and (run := next(waiting, None)) is not None:
                active[pool.submit(start, run)] = run
                yield run, None
            if not active:
                return
            for future in wait(active, timeout=POLL_INTERVAL_S, return_when=FIRST_COMPLETED).done:
                yield active.pop(future), future.result()
            look()


@contextmanager
def _hide_callers_script() -> Iterator[None]:
    """Hide the main script within the context; a process that is started would execute it again."""
    main = sys.modules["__main__"]
    file, spec = main.__dict__.pop("__file__", None), main.__spec__
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


@contextmanager
def start_fork_server() -> Iterator[None]:
    """Start the process from which runs are forked, so that any thread may start runs within the context.

    The process ends with the thread that starts it; call this in the main thread. Python removes the folder of its
    sockets at the end of a program; if a signal stops the program within the context, this function removes it.
    """
    os.environ[PROGRAM_VARIABLE] = str(os.getpid())
    with _START_LOCK, _hide_callers_script():
        multiprocessing.forkserver.ensure_running()
    with remove_output_if_stopped(partial(shutil.rmtree, multiprocessing.util.get_temp_dir(), ignore_errors=True)):
        yield


def run_and_measure_trial(trial: Trial) -> tuple[str, float]:
    """Run a trial in a process, into its unfinished folder; return the reason of a failure (or "") and the CPU seconds.

    The seconds are 0 if the process ends without a result.
    """
    receiving, sending = CONTEXT.Pipe(duplex=False)
    with assign_gpus(trial) as gpus:
        process = CONTEXT.Process(target=_run_quietly, args=(trial, sending, gpus, list_permitted_uses()))
        with _START_LOCK, _hide_callers_script():
            process.start()
        sending.close()
        try:
            failure, seconds = receiving.recv()
            return str(failure), float(seconds)
        except EOFError:
            process.join()
            return f"the run's process ended with exit code {process.exitcode}", 0.0
        finally:
            process.join()
            receiving.close()


class _RoundsOfOneTrial(SilentRunProgress):
    """Updates the progress of all trials after each round of a trial in this process."""

    def __init__(self, shown: TrialsProgressDisplay) -> None:
        super().__init__()
        self._shown = shown

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        self._shown.show_trials_progress()


def run_trial_here(trial: Trial, shown: TrialsProgressDisplay) -> str:
    """Run a trial in this process, into its unfinished folder; return the reason of a failure, or "".

    Data that an earlier trial loaded are reused.
    """
    file, folder, watcher = trial.experiment_file, trial.unfinished_folder, _RoundsOfOneTrial(shown)
    try:
        simulate(file, folder, Console(quiet=True), trial.track, pages=trial.pages, watcher=watcher, keep_data=True)
    except (BadInput, RunStopped) as error:
        return str(error)
    except Exception as error:  # one run's edge: the others go on
        return make_disk_full_message(error) or traceback.format_exc()
    return ""


@contextmanager
def assign_gpus(trial: Trial) -> Iterator[str | None]:
    """Within the context, assign the least used GPUs to a run; yield the value for ``CUDA_VISIBLE_DEVICES``.

    Otherwise all runs that do not use Ray would take the first GPU. The value is None if the run uses Ray or no GPU, or
    if fewer than two GPUs are visible.
    """
    section, visible = trial.experiment_file.experiment.simulation, count_visible_gpus()
    if visible < 2 or section.backend == "ray" or section.gpus_per_site == 0:
        yield None
        return
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    with _GPU_LOCK:
        chosen = sorted(range(visible), key=lambda gpu: _RUNS_BY_GPU[gpu])[: section.gpus_per_batch]
        _RUNS_BY_GPU.update(chosen)
    try:
        yield ",".join(names[gpu].strip() if len(names) >= visible else str(gpu) for gpu in chosen)
    finally:
        with _GPU_LOCK:
            _RUNS_BY_GPU.subtract(chosen)


def _run_quietly(trial: Trial, sending: Connection, gpus: str | None, uses: Sequence[HostUse]) -> None:
    """Run a trial in the current process without output, which would disturb the progress table.

    Args:
        uses: Hosts that the user agreed to, and what is sent to each.
    """
    end_process_with_parent()
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # nothing has looked for GPUs in this process yet
    gc.freeze()  # a collection would copy every page that is shared with the process it is forked from
    if (program := multiprocessing.parent_process()) is not None and not program.is_alive():
        return  # flwr-sim ended before end_process_with_parent was called
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    failure, began = "", time.process_time()  # a forked process counts from its parent's
    try:
        with permit_hosts(uses, find_user_secrets_path()):
            simulate(
                trial.experiment_file, trial.unfinished_folder, Console(quiet=True), trial.track, pages=trial.pages
            )
    except (BadInput, RunStopped) as error:
        failure = str(error)
    except Exception as error:  # a process's edge
        failure = make_disk_full_message(error) or traceback.format_exc()
    sending.send((failure, time.process_time() - began))
