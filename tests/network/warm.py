"""Programs without the wait for their imports: one process has imported the modules that it is given, and forks.

``python -m polyclinic.client.cli start`` spends four CPU seconds on imports, and the tests start it some hundred times.
A program that is forked here runs the same module with its own arguments, environment, folder and log, and ends as it
would.

    python -m tests.network.warm SOCKET MODULE...
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

PROGRAMS = ("polyclinic.client.cli", "tests.network.adversary", "tests.network.loose_talker")
"""Modules that may be started so: those that begin with the imports of a hospital's program."""
LEADS = "tests.network.without_pages"
LEADING = ("polyclinic.server.cli", LEADS, "-c")
"""So too with ``--once``: they start no other process then."""
MODULES_TO = "POLYCLINIC_TEST_MODULES"
"""Variable of the environment with a file to which a program writes at its end which modules it had."""
STARTS_WITHIN_S = 240.0


class Forked:
    """A program that was forked; what of :class:`subprocess.Popen` the tests use.

    Attributes:
        pid: Of the program.
        returncode: None as long as it runs; the negative number of the signal that ended it.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._told = b""
        line.settimeout(STARTS_WITHIN_S)
        while b"\n" not in self._told:
            self._told += line.recv(64)
        pid, self._told = self._told.split(b"\n", 1)
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Whether it has ended, and with what."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: If it has not ended by then.
        """
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    terminate = partialmethod(send_signal, signal.SIGTERM)
    kill = partialmethod(send_signal, signal.SIGKILL)

    def _ended(self, within_s: float | None) -> int | None:
        if self.returncode is None and b"\n" not in self._told:
            ready, _, _ = select.select([self._line], [], [], within_s)
            self._told += self._line.recv(64) if ready else b""
        if self.returncode is None and b"\n" in self._told:
            self.returncode = int(self._told)
            self._line.close()
        return self.returncode


class Warm:
    """The process that forks, once it has imported these modules; it ends with this one."""

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._path = Path(self._folder.name) / "socket"
        command = [sys.executable, "-m", __spec__.name if __spec__ else "tests.network.warm", str(self._path), *modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, stdin=subprocess.PIPE)

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> Forked:
        """Start a module as a program, or with ``-c`` the code that is the first argument."""
        request = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        request |= {"folder": str(folder), "log": str(log)}
        line = self._connected()
        line.sendall(json.dumps(request).encode() + b"\n")
        return Forked(line)

    def _connected(self) -> socket.socket:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while True:
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(str(self._path))
                return line
            except OSError:
                line.close()
                assert self._process.poll() is None, "the process that forks has ended"
                assert time.monotonic() < deadline, "the process that forks does not listen"
                time.sleep(0.05)

    def end(self) -> None:
        """End it; programs that it forked go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def main() -> None:
    """Fork a program for each line that comes, until standard input ends."""
    request = _serve(Path(sys.argv[1]))
    if request is not None:  # this is the child: from here on it is the program
        sys.argv = [request["module"], *request["arguments"]]
        begins = [] if request["module"] == "-c" else ["-m"]
        sys.orig_argv = [sys.executable, *begins, *sys.argv]  # a program may execute its command line again
        if request["module"] == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _serve(path: Path) -> dict[str, Any] | None:
    """Listen; return None in the parent at the end, and in each child the request that it is to run."""
    wake, note = os.pipe()
    os.set_blocking(note, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(note)
    lines: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            ready, _, _ = select.select([listener, wake, 0], [], [])
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 1024)
                _tell_who_ended(lines)
            if 0 in ready:
                return None
            if listener in ready:
                line, _ = listener.accept()
                request = json.loads(line.makefile().readline())
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (*lines.values(), line):
                        other.close()
                    os.close(wake)
                    os.close(note)
                    _become(request)
                    return dict(request)
                lines[pid] = line
                line.sendall(f"{pid}\n".encode())


def _tell_who_ended(lines: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        line = lines.pop(pid)
        with contextlib.suppress(OSError):  # a test that waits no more
            line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        line.close()


def _become(request: dict[str, Any]) -> None:
    """Take the environment, the folder and the log of the program."""
    os.environ.clear()
    os.environ.update(request["environment"])
    if modules := os.environ.get(MODULES_TO):
        atexit.register(lambda: Path(modules).write_text("\n".join(sys.modules), encoding="utf-8"))
    for place in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):  # as a Python that starts now would
        if place and place not in sys.path:
            sys.path.insert(1, place)
    os.chdir(str(request["folder"]))
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


if __name__ == "__main__":
    os.environ.update(
        FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1"
    )
    for module in sys.argv[2:]:
        importlib.import_module(module)
    main()
