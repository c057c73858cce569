"""Start, use and end the process that drives Ray, from the coordinator's process."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput, Fault, ProgramCannotContinue
from polyclinic.common.hosts import HostUse, refuse_use_without_permission
from polyclinic.common.system.files import open_own_file
from polyclinic.common.system.packages import refuse_missing_packages
from polyclinic.common.system.stopping import block_thread_if_stopping, remove_output_if_stopped
from polyclinic.server.simulation.backends import transfer
from polyclinic.server.simulation.backends.cluster import (
    RayWorkerSettings,
    find_cluster_host,
    list_uninstalled_import_folders,
    make_cluster_join_fault,
    make_ray_driver_environment,
)

DRIVER_MODULE = "polyclinic.server.simulation.backends.ray_driver"
JOIN_TIMEOUT_S = 120.0
"""Time to join a cluster; Ray itself waits for ever for a cluster that does not answer."""
LEAVE_TIMEOUT_S = 5.0
SCRATCH_PREFIX = "polyclinic-ray-"
"""Prefix of the name of a run's folder for temporary files."""
LOCK_FILE = "lock"
RAY_FOLDER = "r"
"""Ray's own folder inside the folder for temporary files. Ray makes it readable to all accounts."""
MIN_ABANDONED_AGE_S = 60.0
"""Age below which a folder is not removed, because it may not have its lock yet."""
MAX_FOLDER_CHARACTERS = 38
"""Greatest length of the path of a temporary folder: Ray's sockets add 60 characters, and Linux allows 107."""
REASON_PATTERN = re.compile(r"Error\b|terminat|has ended")
"""Matches the lines of the driver's output with a reason why Ray has ended; other lines show Ray's state."""


class RayDriverHandle:
    """The coordinator's handle of the process that starts Ray and passes messages to its workers."""

    def __init__(self, settings: RayWorkerSettings) -> None:
        self.settings = settings
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open until close()
        self._connection, driver_end = transfer.make_private_socket_pair()
        with driver_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", DRIVER_MODULE, json.dumps(asdict(settings)), str(driver_end.fileno())],
                pass_fds=[driver_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=make_ray_driver_environment(settings.address),
                # Workers import from the working folder first, and the user's folder may hold a server.py.
                cwd=os.path.abspath(os.sep),
                # Ctrl-C must reach only the coordinator, which then ends this process.
                start_new_session=True,
            )

    def begin_run(self, about: dict[str, Any], data: Sequence[Any]) -> int:
        """Send the data of a run to the process; return the number of workers.

        Args:
            about: JSON values: experiment, folders, names of sites, and shapes of the arrays in ``data``.
            data: The arrays of the data set, as raw bytes.

        Raises:
            BadInput: If Ray does not meet the experiment's settings, or a cluster does not answer in time.
            RunStopped: If Ray has ended.
        """
        self.send_to_driver(about, data)
        frame = self.receive_from_driver(JOIN_TIMEOUT_S if self.settings.address else None)
        if frame is None:
            reason = f"it did not answer within {JOIN_TIMEOUT_S:.0f} s."
            raise BadInput([make_cluster_join_fault(self.settings.address, reason)])
        workers: int = frame.about["workers"]
        return workers

    def send_to_driver(self, about: dict[str, Any], data: Sequence[Any] = ()) -> None:
        """Send a frame (JSON values and raw bytes) to the process.

        Raises:
            RunStopped: If Ray has ended.
        """
        try:
            transfer.send_frame(self._connection, about, data)
        except OSError:
            raise self._make_ended_process_error() from None

    def receive_from_driver(self, within_s: float | None = None) -> transfer.TransferFrame | None:
        """Wait for the next frame; return None if none comes within this time.

        Raises:
            BadInput: If Ray does not meet the experiment's settings.
            RunStopped: If Ray has ended, or no worker starts.
        """
        if within_s is not None and not wait([self._connection], within_s):
            return None
        try:
            frame = transfer.receive_frame(self._connection)
        except EOFError:
            raise self._make_ended_process_error() from None
        if frame.about["kind"] == "fault":
            raise BadInput(Fault(**fault) for fault in frame.about["faults"])
        if frame.about["kind"] == "stopped":
            raise _make_run_stopped_error(frame.about["reason"])
        return frame

    def close(self) -> None:
        """End the process and everything that it started; a second call does nothing."""
        if self._log.closed:
            return
        with suppress(OSError):
            transfer.send_frame(self._connection, {"kind": "end"})
        if self.settings.address:  # give it time to leave the joined cluster
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_TIMEOUT_S)
        self._connection.close()
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self._process.pid:
                    process.kill()
        self._process.wait()
        self._log.close()

    def _make_ended_process_error(self) -> ProgramCannotContinue:
        """Return the error for a process that has ended, with the last reason in its output or its exit code."""
        block_thread_if_stopping()
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        reasons = [line.strip() for line in lines if REASON_PATTERN.search(line)]
        reason = reasons[-1] if reasons else f"exit code {self._process.returncode}"
        return _make_run_stopped_error(f"the process that drives Ray has ended: {reason}")


def _make_run_stopped_error(reason: str) -> ProgramCannotContinue:
    # Imported here, because it imports torch, which would delay the start of Ray.
    from polyclinic.strategies.engine.events import RunStopped

    return RunStopped(f"{reason.rstrip('.')}; --resume goes on from the last round.")


@contextmanager
def start_ray_driver(experiment: Experiment) -> Iterator[RayDriverHandle | None]:
    """Start Ray early, while this process still imports modules; yield None if the experiment does not use Ray.

    Raises:
        BadInput: If Ray is not installed, or the user has not agreed to the host of the cluster.
    """
    section = experiment.simulation
    if section.backend != "ray":
        yield None
        return
    refuse_missing_packages("simulation.backend", "ray", otherwise="Use --backend inline")
    if host := find_cluster_host(section.address):
        refuse_use_without_permission(HostUse(host), "simulation.address")
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= MAX_FOLDER_CHARACTERS else "/tmp"
    remove_abandoned_folders(Path(parent))
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
    remove = partial(shutil.rmtree, scratch, ignore_errors=True)
    with remove_output_if_stopped(remove), lock_scratch_folder(scratch):
        process = RayDriverHandle(
            RayWorkerSettings(
                workers=section.workers,
                threads=experiment.training.threads,
                gpus_per_site=section.gpus_of_each_site,
                address=section.address,
                scratch="" if section.address else str(scratch / RAY_FOLDER),
                paths=list_uninstalled_import_folders(),
            )
        )
        try:
            yield process
        finally:
            process.close()
            remove()


@contextmanager
def lock_scratch_folder(scratch: Path) -> Iterator[None]:
    """Lock a run's temporary folder; the operating system releases the lock when this process ends."""
    with open_own_file(scratch / LOCK_FILE, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_abandoned_folders(parent: Path) -> None:
    """Remove temporary folders of this user's killed runs, because they hold sites' state and Ray's logs."""
    for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < MIN_ABANDONED_AGE_S:
                continue
            with open_own_file(folder / LOCK_FILE, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
