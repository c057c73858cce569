"""One run in a process of its own, forked from one that has everything imported: that takes seconds, once."""

import gc
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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

from rich.console import Console

from common.config import read_experiment
from common.errors import BadInput
from common.models.gpu import visible_gpus
from common.system.files import disk_full_message
from common.system.stopping import PROGRAM, end_with_parent, removed_if_stopped
from server.simulation.simulate import simulate
from strategies.engine.events import RunStopped
from studies.trial import Trial

CONTEXT = multiprocessing.get_context("forkserver")
FIRST_USED_IN_A_RUN = (
    *("client.simulation", "client.app", "server.reporting.run_report", "server.reporting.model_card"),
)
"""Modules that a run imports when it needs them, which each run would pay again."""
CONTEXT.set_forkserver_preload(["studies.parent_watch", __name__, *FIRST_USED_IN_A_RUN])

_STARTING = threading.Lock()
_DEALING = threading.Lock()
_RUNS = Counter[int]()
"""GPU -> runs of this process that are at work on it."""


@contextmanager
def _callers_script_hidden() -> Iterator[None]:
    """Start a process that does not import the caller's script: it would run everything in it once more."""
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
def fork_server() -> Iterator[None]:
    """Within it runs may be started by other threads than the main one, which enters it.

    What runs are forked from ends with the thread that starts it. Its sockets lie in a folder that Python removes at
    the end of a program, and that a program that is stopped has to remove itself.
    """
    os.environ[PROGRAM] = str(os.getpid())
    with _STARTING, _callers_script_hidden():
        multiprocessing.forkserver.ensure_running()
    with removed_if_stopped(partial(shutil.rmtree, multiprocessing.util.get_temp_dir(), ignore_errors=True)):
        yield


def run_measured(trial: Trial) -> tuple[str, float]:
    """Run a trial into its folder for the unfinished; return why it failed, or an empty string, and its CPU seconds.

    The seconds are 0 where the run's process ended before it could tell them.
    """
    receiving, sending = CONTEXT.Pipe(duplex=False)
    with gpus_of(trial) as gpus:
        process = CONTEXT.Process(target=_run, args=(trial, sending, gpus))
        with _STARTING, _callers_script_hidden():
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


@contextmanager
def gpus_of(trial: Trial) -> Iterator[str | None]:
    """Yield the GPUs on which the fewest runs are at work, as ``CUDA_VISIBLE_DEVICES`` names them; None for any.

    A run without Ray takes the first that it sees: of several runs at a time all would take the same.
    """
    section, seen = trial.file.experiment.simulation, visible_gpus()
    if seen < 2 or section.backend == "ray" or section.gpus_per_site == 0:
        yield None
        return
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    with _DEALING:
        chosen = sorted(range(seen), key=lambda gpu: _RUNS[gpu])[: section.gpus_a_batch]
        _RUNS.update(chosen)
    try:
        yield ",".join(names[gpu].strip() if len(names) >= seen else str(gpu) for gpu in chosen)
    finally:
        with _DEALING:
            _RUNS.subtract(chosen)


def _run(trial: Trial, sending: Connection, gpus: str | None) -> None:
    """Run in a process of its own: what libraries print would break the table of progress."""
    end_with_parent()
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # nothing has looked for GPUs in this process yet
    gc.freeze()  # what it shares with the process it is forked from: to look through that would copy every page
    if (program := multiprocessing.parent_process()) is not None and not program.is_alive():
        return  # it was gone before we asked
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    failure, began = "", time.process_time()  # a forked process counts from its parent's
    try:
        file, quiet = read_experiment(trial.experiment, trial.overrides), Console(quiet=True)
        simulate(file, trial.unfinished, quiet, trial.track, pages=trial.pages)
    except (BadInput, RunStopped) as error:
        failure = str(error)
    except Exception as error:  # a process's edge
        failure = disk_full_message(error) or traceback.format_exc()
    sending.send((failure, time.process_time() - began))
