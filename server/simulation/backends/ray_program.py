"""The process that drives Ray, as the coordinator sees it: started early, ended in any case."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from common.config import Experiment
from common.errors import BadInput, Fault
from common.system.stopping import removed_if_stopped
from server.simulation.backends import frames
from server.simulation.backends.cluster import Wanted, environment, own_paths

DRIVER = "server.simulation.backends.ray_driver"
START_FORK_SERVER = "server.simulation.backends.own_ray.start_fork_server"
FORK_SERVER = "fork"
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where a machine has one of these, workers are not forked: not tested with a GPU."""
FORKED_WITHIN_S = 90.0
"""For the first forked worker to be ready, from when it gets its images, before Ray is started as it does by itself."""
WORKER_READY = "worker_ready"
"""Event of a run: a worker has received what all sites share."""
ENDING_S = 5.0
PREFIX, LOCK, OPEN = "polyclinic-ray-", "lock", "r"
"""Names of a run's folder of temporary files, of the lock in it, and of Ray's own folder, which Ray opens to all."""
YOUNG_S = 60.0
"""A folder younger than this may not have its lock yet."""
LONGEST_PLACE = 38
"""Ray's sockets lie some 60 characters deeper, and Linux allows 107."""


REASON = re.compile(r"Error\b|terminated|has ended")
"""What a line says that tells why Ray ended; the others are Ray's own state."""


class RayLost(Exception):
    """The process that drives Ray has ended; says what it printed last."""


class RayProgram:
    """One process that drives Ray.

    Attributes:
        wanted: What it was started for.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._has_worked, self._given_up = False, ""
        # Ray holds Python's lock while it waits for its first worker, so that its own process cannot give up.
        self._timer = threading.Timer(FORKED_WITHIN_S, self._give_up)
        self._timer.daemon = True
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._connection, theirs = frames.pair()
        with theirs:
            program = [DRIVER, json.dumps(asdict(wanted)), str(theirs.fileno())]
            if wanted.fork_server:
                program = [START_FORK_SERVER, wanted.fork_server, str(wanted.threads), *program]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment(wanted.address),
                cwd=os.path.abspath(os.sep),  # first on the workers' path: the user's folder may hold a server.py
                start_new_session=True,  # a signal to the coordinator's group is the coordinator's to act on
            )

    def send(self, about: dict[str, Any], data: Sequence[Any] = ()) -> None:
        """Send a frame.

        Raises:
            RayLost: If the process is gone.
        """
        if about["kind"] == "begin" and self.wanted.fork_server:
            self._timer.start()
        try:
            frames.send(self._connection, about, data)
        except OSError:
            raise RayLost(self._last_words()) from None

    def receive(self, within_s: float | None = None) -> frames.Frame | None:
        """The next frame; None if none comes within this time.

        Raises:
            RayLost: If the process is gone.
            BadInput: If it says that Ray cannot be used as the experiment wants.
        """
        if within_s is not None and not wait([self._connection], within_s):
            return None
        try:
            frame = frames.receive(self._connection)
        except EOFError:
            raise RayLost(self._last_words()) from None
        if frame.about["kind"] == "fault":
            raise BadInput(Fault(**fault) for fault in frame.about["faults"])
        if frame.about.get("event") == WORKER_READY:
            self._has_worked = True
            self._timer.cancel()
        return frame

    def again(self) -> "RayProgram":
        """Another one in its place; where no worker has ever been ready, one that starts Ray as it does by itself."""
        self.close()
        return RayProgram(self.wanted if self._has_worked else replace(self.wanted, fork_server=""))

    def close(self) -> None:
        """End it, and all that it started, also what outlived it."""
        self._timer.cancel()
        with suppress(OSError):
            frames.send(self._connection, {"kind": "end"})
        if self.wanted.address:  # it leaves a cluster that goes on
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
        self._connection.close()
        _end_session(self._process.pid)
        self._process.wait()
        self._log.close()

    def _give_up(self) -> None:
        self._given_up = f"no forked worker was ready within {FORKED_WITHIN_S:.0f} s"
        _end_session(self._process.pid)

    def _last_words(self) -> str:
        self._process.wait()
        if self._given_up:
            return self._given_up
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        words = [line.strip() for line in lines if REASON.search(line)]
        return words[-1] if words else f"it ended with exit code {self._process.returncode}"


def _end_session(session: int) -> None:
    """Kill the processes of a session: Ray's stay in that of the driver, also where their parent has ended."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session:
                process.kill()


@contextmanager
def begun(experiment: Experiment) -> Iterator[RayProgram | None]:
    """Start Ray for an experiment that runs on it, so that it starts while this process imports and prepares.

    Raises:
        BadInput: If Ray is not installed.
    """
    if experiment.simulation.backend != "ray":
        yield None
        return
    if find_spec("ray") is None:
        remedy = "Install polyclinic[sim], or use --backend inline."
        raise BadInput([Fault("simulation.backend", "Ray is not installed.", remedy)])
    remove_abandoned(Path(_place()))
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place()))
    remove = partial(shutil.rmtree, scratch, ignore_errors=True)
    with removed_if_stopped(remove), in_use(scratch):
        program = RayProgram(wanted_of(experiment, scratch))
        try:
            yield program
        finally:
            program.close()
            remove()


def wanted_of(experiment: Experiment, scratch: Path) -> Wanted:
    """What the experiment says about workers."""
    section = experiment.simulation
    forks = sys.platform == "linux" and not section.address and not any(map(os.path.exists, GPUS))
    sites = getattr(experiment.partition, "sites", 0)
    return Wanted(
        workers=section.workers,
        threads=experiment.training.threads,
        gpus_per_site=-1.0 if section.gpu_share is None else section.gpu_share,
        address=section.address,
        sites=sites if isinstance(sites, int) and sites else len(sites) if sites else 1_000,
        scratch="" if section.address else str(scratch / OPEN),
        paths=own_paths(),
        fork_server=str(scratch / FORK_SERVER) if forks else "",
    )


def _place() -> str:
    return found if len(found := tempfile.gettempdir()) <= LONGEST_PLACE else "/tmp"


@contextmanager
def in_use(scratch: Path) -> Iterator[None]:
    """Hold a folder: its lock goes with this process, however that ends."""
    with (scratch / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_abandoned(place: Path) -> None:
    """Remove what this user's runs left there that were killed: sites' memory and Ray's logs."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG_S:
                continue
            with (folder / LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
