"""Checks at the start of a program: ports, folders, dates of certificates, and Flower's release.

Each check takes milliseconds and needs neither Flower nor torch.
"""

import datetime as dt
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from cryptography import x509

from polyclinic.common.errors import Fault
from polyclinic.common.system.plain_text import quote_for_shell

MIN_FREE_BYTES = 16 * 2**20
"""Minimum number of free bytes on a disk for a program to write its first files."""
MIN_FLOWER_RELEASE = (1, 39)
"""The first supported release of Flower, as in pyproject.toml. There is no last one, because minor releases are
frequent.
"""
MAX_HOLD_S = 900.0
"""Maximum wait after a refusal, of a program that would be restarted at once."""
POLL_INTERVAL_S = 2.0
"""Pause between two checks of the program's folder."""


@contextmanager
def delay_failure_until_change(
    folder: Path, tell: Callable[[str], None], refusals: tuple[type[Exception], ...], *, held: bool
) -> Iterator[None]:
    """After a refusal in the ``with`` block, wait until a file in a folder changes, then start the program again.

    Without the wait, a container that is restarted automatically would fail with the same error again and again. After
    a change, the process executes its command line again instead of ending. A container ends with its first process,
    and would also end the sessions of the people who put files in place.

    Args:
        folder: The folder whose files are watched.
        tell: Prints a line for the user.
        refusals: Types of the exceptions after which the program waits; others are raised at once.
        held: False to raise every exception at once.

    Raises:
        Exception: The refusal, if no file has changed for ``MAX_HOLD_S`` seconds.
    """
    try:
        yield
    except refusals as error:
        if held:
            tell(f"refused: {error}")
            tell(f"starts again when a file in {folder} changes; ends in {MAX_HOLD_S / 60:.0f} min if none does")
            before = _read_file_modification_times(folder)
            until = time.monotonic() + MAX_HOLD_S
            while time.monotonic() < until:
                time.sleep(POLL_INTERVAL_S)
                if _read_file_modification_times(folder) != before:
                    _execute_program_again()
        raise


def _execute_program_again() -> NoReturn:
    """Replace this process by a new one with the same command line and process id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _read_file_modification_times(folder: Path) -> tuple[tuple[str, float], ...]:
    """Return name and modification time of each file in a folder; empty if it cannot be read."""
    try:
        return tuple(sorted((path.name, path.stat().st_mtime) for path in folder.iterdir() if path.is_file()))
    except OSError:
        return ()


def find_port_faults(where: str, host: str, port: int, remedy: str) -> list[Fault]:
    """Return a fault if a server port cannot be opened on a host; else an empty list.

    Args:
        where: Option or config key of the port, for the fault.
        host: Name or address of the host.
        port: The port.
        remedy: Advice for choosing another port, for the fault.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores connections that are closing
        try:
            trial.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            return [Fault(where, f"{port} of {host} cannot be opened: {reason}.", remedy)]
    return []


def find_folder_write_faults(folder: Path) -> list[Fault]:
    """Return a fault if files cannot be written in a folder, which need not exist yet; else an empty list."""
    ancestors = (folder, *folder.absolute().parents)
    place = next((path for path in ancestors if path.exists() or path.is_symlink()), Path("/"))
    if not place.exists():
        remedy = f"Make {place.readlink()}, or name another place."
        return [Fault(str(place), "is a link to a place that is not there.", remedy)]
    if not place.is_dir():
        return [Fault(str(place), "is a file, and no folder can be made there.", "Name another place.")]
    if not os.access(place, os.W_OK | os.X_OK):
        user = os.geteuid()
        remedy = f"Run: chown -R {user} {quote_for_shell(place)}, or name another place."
        return [Fault(str(place), f"user {user} may not write there.", remedy)]
    if (free := shutil.disk_usage(place).free) < MIN_FREE_BYTES:
        problem = f"{free / 1e6:.1f} MB are free on its disk; {MIN_FREE_BYTES / 1e6:.0f} MB are needed to start."
        return [Fault(str(place), problem, "Free some, or name a place on another disk.")]
    return []


_OWNER_BY_FILE = {"events.jsonl": "a run", "site.toml": "a hospital", "coordinator.toml": "a coordinator"}


def find_occupied_folder_faults(out: Path) -> list[Fault]:
    """Return a fault if an ``--out`` folder already belongs to a run, a hospital or a coordinator."""
    owners = [owner for name, owner in _OWNER_BY_FILE.items() if (out / name).exists()]
    problem = "is the folder of {}, and nothing else is written into it."
    return [Fault(f"--out {out}", problem.format(owner), "Name another folder.") for owner in owners[:1]]


def find_certificate_date_faults(where: str, certificate: x509.Certificate, remedy: str) -> list[Fault]:
    """Return a fault if a certificate is expired or not yet valid; else an empty list.

    Args:
        where: Location of the certificate, for the fault.
        certificate: The certificate.
        remedy: Advice for getting a valid certificate, for the fault.
    """
    now = dt.datetime.now(dt.UTC)
    today = f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
    if now > certificate.not_valid_after_utc:
        return [Fault(where, f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; {today}.", remedy)]
    if now < certificate.not_valid_before_utc:
        since = f"is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; {today}."
        return [Fault(where, since, f"Set the clock. If it is right: {remedy[0].lower()}{remedy[1:]}")]
    return []


def find_flower_release_faults() -> list[Fault]:
    """Return a fault if the installed release of Flower is not supported; else an empty list."""
    least = ".".join(map(str, MIN_FLOWER_RELEASE))
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        return [Fault("flwr", "is not installed.", f'Run: pip install "flwr>={least}"')]
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers and (int(numbers[1]), int(numbers[2])) >= MIN_FLOWER_RELEASE:
        return []
    problem = f"{installed} is installed; this release works with {least} and later."
    return [Fault("flwr", problem, f'Run: pip install "flwr>={least}"')]
