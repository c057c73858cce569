"""The SuperLink's process: started, watched, ended; hospitals reach its Fleet API and nothing else."""

import subprocess
import sys
import time
from pathlib import Path

from common.errors import BadInput, Fault, stop_on
from common.system.resources import LARGE_BUFFERS
from common.system.terminal import LogForm, log_form
from server.coordinator.before_start import port_faults_of
from server.coordinator.folder import Coordinator
from server.deployment.processes.child_process import with_this_process
from server.deployment.superlink.control.client import answers
from server.deployment.superlink.local.bounded_log import BoundedLog, pump

OBJECTS, CLOCK = "objects", "clock.json"
"""In the coordinator's ``state``."""
START_TIMEOUT_S, STOP_GRACE_S = 60.0, 3.0


class SuperLink:
    """The process: started, watched, ended."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            BadInput: If it does not, with the end of its log.
        """
        coordinator = self._coordinator
        stop_on(port_faults_of(coordinator))
        coordinator.log.parent.mkdir(parents=True, exist_ok=True)
        coordinator.log.touch(mode=0o600)
        self._process = subprocess.Popen(
            command(coordinator),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**with_this_process(), **LARGE_BUFFERS},
        )
        assert self._process.stdout is not None
        self._log = pump(self._process.stdout, BoundedLog(coordinator.log, as_json=log_form() is LogForm.json))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(coordinator):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                self._log.join(STOP_GRACE_S)  # its last words
                end = "\n    ".join(coordinator.log.read_text(errors="replace").splitlines()[-5:])
                problem = f"the SuperLink did not start. The end of {coordinator.log}:\n    {end}"
                raise BadInput([Fault(str(coordinator.folder), problem)])
            time.sleep(0.1)

    def ended(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """End it: politely, and after a grace (its database stands a kill) at once."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def command(coordinator: Coordinator) -> list[str]:
    """Return the command line that starts the SuperLink."""
    authority = coordinator.authority
    return [
        *(sys.executable, "-P", "-m", "server.deployment.superlink.program"),
        *("--state", str(coordinator.state.resolve())),
        *("--connections", str(coordinator.file.connections)),
        *("--connections-per-address", str(coordinator.file.connections_per_address)),
        *("--fleet", coordinator.fleet_address),
        *("--authority", str(coordinator.ca_certificate.resolve())),
        *("--certificate", str((authority / "server.crt").resolve())),
        *("--key", str((authority / "server.key").resolve())),
    ]


def object_folder(coordinator: Coordinator) -> Path:
    """Where the contents of messages lie."""
    return coordinator.state / OBJECTS


def clock_file(coordinator: Coordinator) -> Path:
    """What :mod:`server.deployment.superlink.local.steady_clock` shares between the SuperLink and its runs."""
    return coordinator.state / CLOCK
