"""Start, stop and log the SuperLink's process; open the clock that it shares with runs."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.system.resources import BUFFER_REUSE_ENVIRONMENT
from polyclinic.common.system.stopping import STARTER_VARIABLE
from polyclinic.common.system.terminal import LogOutputFormat, get_log_format
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.coordinator.preflight import find_hospital_port_faults
from polyclinic.server.deployment.superlink.control_client import is_superlink_answering

OBJECTS_FOLDER = "objects"
"""Folder for the contents of messages, in the coordinator's folder ``state``."""
CLOCK_FILE = "clock.json"
"""File with the offset of the steady clock, in the coordinator's folder ``state``."""
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 3.0
MAX_LOG_FILE_BYTES = 2 * 2**20
MAX_LOG_FILES = 3
MAX_LINES_PER_MINUTE = 300
"""More lines are only counted, so that a flood of lines does not rotate older lines out of the log."""
MAX_LINE_CHARACTERS = 2000
_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class SuperLinkProcess:
    """The SuperLink's child process, with a log of its output."""

    def __init__(self, coordinator: CoordinatorFolder) -> None:
        self._coordinator = coordinator
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it answers health checks.

        Raises:
            BadInput: If the hospitals' port is in use. Also if the process ends or does not answer in time; the message
                shows the last lines of the process's log.
        """
        coordinator = self._coordinator
        raise_faults(find_hospital_port_faults(coordinator))
        coordinator.log_path.parent.mkdir(parents=True, exist_ok=True)
        coordinator.log_path.touch(mode=0o600)
        self._process = subprocess.Popen(
            make_superlink_command(coordinator),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # STARTER makes the SuperLink end when this process ends.
            env={
                **os.environ,
                STARTER_VARIABLE: str(os.getpid()),
                **BUFFER_REUSE_ENVIRONMENT,
            },
        )
        assert self._process.stdout is not None
        self._log = copy_lines_to_log(
            self._process.stdout,
            RotatingLogFile(coordinator.log_path, as_json=get_log_format() is LogOutputFormat.json),
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_superlink_answering(coordinator):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                self._log.join(STOP_TIMEOUT_S)  # so that its last lines are in the file
                last_lines = "\n    ".join(coordinator.log_path.read_text(errors="replace").splitlines()[-5:])
                problem = f"the SuperLink did not start. The end of {coordinator.log_path}:\n    {last_lines}"
                raise BadInput([Fault(str(coordinator.folder), problem)])
            time.sleep(0.1)

    def get_exit_code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """End the process by SIGTERM, after :data:`STOP_TIMEOUT_S` by SIGKILL, which does not damage the database."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def make_superlink_command(coordinator: CoordinatorFolder) -> list[str]:
    """Return the command line that starts the SuperLink."""
    authority = coordinator.authority_path
    return [
        *(sys.executable, "-P", "-m", "polyclinic.server.deployment.superlink.program"),
        *("--state", str(coordinator.state_path.resolve())),
        *("--connections", str(coordinator.file.connections)),
        *("--fleet", coordinator.hospital_listen_address),
        *("--authority", str(coordinator.ca_certificate_path.resolve())),
        *("--certificate", str((authority / "server.crt").resolve())),
        *("--key", str((authority / "server.key").resolve())),
    ]


# ---------------------------------------------------------------------- log


@dataclass
class RotatingLogFile:
    """A log of at most :data:`MAX_LOG_FILES` files of :data:`MAX_LOG_FILE_BYTES` each, readable only by their owner.

    The files are PATH, PATH.1 and PATH.2, newest first.

    Attributes:
        clock: Returns monotonic time in seconds.
        as_json: True to write each line as a JSON object with ``time`` and ``message``.
        _minute: Time at which the current minute began.
        _lines: Number of lines in the current minute, also lines that were not written.
    """

    path: Path
    clock: Callable[[], float] = time.monotonic
    as_json: bool = False
    _minute: float = float("-inf")
    _lines: int = 0

    def write_log_line(self, line: str) -> None:
        """Add a line with its time; drop it if the current minute already has :data:`MAX_LINES_PER_MINUTE` lines."""
        now = self.clock()
        if now - self._minute >= 60:
            dropped = self._lines - MAX_LINES_PER_MINUTE
            self._minute = now
            self._lines = 0
            if dropped > 0:
                self._append_and_rotate_log(f"{dropped} more lines in that minute")
        self._lines += 1
        if self._lines <= MAX_LINES_PER_MINUTE:
            self._append_and_rotate_log(escape_control_characters(line)[:MAX_LINE_CHARACTERS])

    def _append_and_rotate_log(self, line: str) -> None:
        if self.path.exists() and self.path.stat().st_size >= MAX_LOG_FILE_BYTES:
            names = [
                self.path,
                *(self.path.with_name(f"{self.path.name}.{number}") for number in range(1, MAX_LOG_FILES)),
            ]
            for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
                if newer.exists():
                    newer.replace(older)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # an earlier release made the file readable to others
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = format_as_json_text({"time": now, "message": line}) if self.as_json else f"{now} {line}"
            file.write(f"{text}\n")


def escape_control_characters(line: str) -> str:
    """Return a line without terminal colour codes, and with other control characters escaped."""
    plain = _COLOUR_CODES.sub("", line).rstrip("\r\n")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in plain)


def copy_lines_to_log(source: IO[bytes], log: RotatingLogFile) -> threading.Thread:
    """Copy the output lines of a process to a log, in a thread that ends with the process."""

    def copy_output_lines() -> None:
        while line := source.readline(4 * MAX_LINE_CHARACTERS):
            try:
                log.write_log_line(line.decode(errors="replace"))
            except OSError:  # the disk is full: go on reading, because a full pipe would block the process
                continue
        source.close()

    thread = threading.Thread(target=copy_output_lines, name="log", daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------------- clock


def open_shared_steady_clock(file: Path) -> Callable[[], float]:
    """Return a clock of Unix time in seconds that does not jump when the machine's clock is set.

    The SuperLink and runs share it, for the expiry of messages and the heartbeats of sites. With the machine's clock,
    setting the time forward by an hour would make every site an hour late. Signatures of calls use the machine's clock.

    Args:
        file: File with the offset between Unix time and the time since boot. It is created if it is missing or from an
            earlier boot.
    """
    boot = _BOOT_ID_FILE.read_text(encoding="ascii").strip()
    try:
        stored = json.loads(file.read_bytes())
        offset = float(stored["offset_s"]) if stored["boot"] == boot else None
    except (OSError, ValueError, KeyError, TypeError):
        offset = None
    if offset is None:
        offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        write_atomically(file, json.dumps({"boot": boot, "offset_s": offset}).encode())
    return lambda: offset + time.clock_gettime(time.CLOCK_BOOTTIME)
