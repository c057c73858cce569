"""Patients who opted out: ``data.opt_out`` of ``site.toml``, a list of their identifiers or a command that prints them.

The site reads the key of the file before each request that reads images, so an opt-out counts from the next round on.
The table of labels may stay as it is. An identifier is compared by :func:`make_name_similarity_key`: ``P-007`` and
``p7`` are one. Where these are two patients, both are left out, which harms nobody.
"""

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest, make_printable_line
from polyclinic.common.system.toml import read_toml
from polyclinic.data.base.image_set import PARTS, DatasetSplits
from polyclinic.data.base.names import make_name_similarity_key
from polyclinic.data.base.splits import divide_splits_again

SITE_FILE = "site.toml"
COMMAND_TIMEOUT_S = 60
SAVING_PAUSE_S = 0.2
"""An editor may be writing the file: a new content counts if it is the same after this time."""
_MAX_OUTPUT_CHARACTERS = 200
_MOST_NAMES = 20

Identifiers = Mapping[str, str]
"""Comparison key of a patient who opted out -> the identifier as the hospital wrote it."""


class OptOutsUnknown(Exception):
    """Raised if nobody knows who opted out; the message is for the hospital's staff only."""


def _make_command_failure(problem: str) -> OptOutsUnknown:
    """Make the exception for a command of ``data.opt_out`` that fails."""
    remedy = "It has to print one identifier a line and to end with code 0."
    return OptOutsUnknown(f"data.opt_out: the command {problem}. {remedy}")


class OptOutSource:
    """Where the identifiers of patients who opted out come from: ``data.opt_out`` of a ``site.toml``.

    Args:
        folder: The folder of ``site.toml``, in which a command runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._content: bytes | None = None
        self._listed: tuple[str, ...] | str = ()

    def read_identifiers(self) -> Identifiers:
        """Return the patients who have opted out by now.

        Raises:
            OptOutsUnknown: If the command fails, or the file cannot be read. Then nobody knows who opted out, so
                nothing may be trained.
        """
        self._read_changed_file()
        identifiers = self._run_command(self._listed) if isinstance(self._listed, str) else self._listed
        return {make_name_similarity_key(name): name for name in identifiers if name.strip()}

    def require_identifiers(self) -> Identifiers:
        """Return the patients who have opted out by now, for a program that ends if nobody knows them.

        Raises:
            BadInput: If nobody knows who opted out.
        """
        try:
            return self.read_identifiers()
        except OptOutsUnknown as error:
            raise BadInput([Fault(SITE_FILE, str(error).removeprefix(f"{SITE_FILE}: "))]) from None

    def _read_changed_file(self) -> None:
        """Read ``data.opt_out`` again if ``site.toml`` has another content than before."""
        path = self.folder / SITE_FILE
        try:
            content = path.read_bytes()
            while content != self._content:
                self._content = None
                time.sleep(SAVING_PAUSE_S)
                before = content
                content = path.read_bytes()
                if content == before:
                    self._listed = _parse_opt_outs(path)
                    self._content = content
        except OSError as error:
            raise _make_file_failure(f"cannot be read: {error.strerror}.") from None
        except BadInput as error:
            raise _make_file_failure(" ".join(f"{fault.problem} {fault.remedy}" for fault in error.faults)) from None

    def _run_command(self, command: str) -> Sequence[str]:
        try:
            ended = subprocess.run(
                shlex.split(command),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _make_command_failure(f"did not end within {COMMAND_TIMEOUT_S} s") from None
        except (OSError, ValueError) as error:
            raise _make_command_failure(f"cannot be run: {error}") from None
        if ended.returncode:
            failure = f"ended with code {ended.returncode}"
            words = make_printable_line(ended.stderr.strip(), _MAX_OUTPUT_CHARACTERS)
            raise _make_command_failure(f"{failure}: {words}" if words else failure)
        return [line.strip() for line in ended.stdout.splitlines()]


def read_opt_out_key(data: Mapping[str, Any]) -> tuple[tuple[str, ...] | str, list[Fault]]:
    """Return ``opt_out`` of the table ``[data]``, a list of identifiers or a command, and its faults."""
    opt_out = data.get("opt_out", ())
    if isinstance(opt_out, list):
        # Numbers without quotes are identifiers, too.
        return tuple(map(str, opt_out)), []
    if opt_out and not isinstance(opt_out, str):
        return (), [
            Fault(f"{SITE_FILE}: data.opt_out", "must be a list of identifiers, or a command that prints them.")
        ]
    return opt_out or (), []


def _parse_opt_outs(path: Path) -> tuple[str, ...] | str:
    """Return the value of ``data.opt_out``.

    Raises:
        BadInput: If the file is not valid, or has no ``[data]``. An empty file must not bring everybody back.
    """
    data: Any = read_toml(path).get("data")
    if not isinstance(data, dict):
        raise _make_file_failure("has no table [data].")
    listed, faults = read_opt_out_key(data)
    if faults:
        raise BadInput(faults)
    return listed


def _make_file_failure(problem: str) -> OptOutsUnknown:
    remedy = "Nobody knows who opted out, so this site trains nothing until the file is repaired."
    return OptOutsUnknown(f"{SITE_FILE}: {problem.strip()} {remedy}")


@dataclass(frozen=True)
class LeftOutPatients:
    """The patients who opted out, compared with the data.

    Attributes:
        count: Number of patients of the data who are left out.
        unmatched: Identifiers, as the hospital wrote them, that fit no patient of the data.
    """

    count: int
    unmatched: tuple[str, ...]

    def describe(self) -> str:
        """Return a line for the hospital's staff about the number of patients who are left out."""
        return f"data.opt_out: {format_count_with_noun(self.count, 'patient')} left out"

    def warn_about_unmatched(self) -> str:
        """Return a warning for the hospital's staff, which names the identifiers that fit nobody; empty if all fit."""
        if not self.unmatched:
            return ""
        names = list_first_and_count_rest(self.unmatched, _MOST_NAMES)
        return f"data.opt_out: no patient of the data has the {self._describe_number()} {names}."

    def _describe_number(self) -> str:
        return "identifier" if len(self.unmatched) == 1 else f"{len(self.unmatched)} identifiers"


REMEDY_FOR_UNMATCHED = (
    "If it is a typing error, the patient whom you mean is trained on: correct it. "
    "If the patient has gone from the table, nothing is to be done."
)


def find_left_out_patients(patients: Sequence[str], opted_out: Identifiers) -> tuple[frozenset[str], LeftOutPatients]:
    """Return the names of the patients in the data who opted out, and what is said of them.

    Args:
        patients: The patients of the data, as the data names them.
        opted_out: Result of :meth:`OptOutSource.read_identifiers`.
    """
    keys = {patient: make_name_similarity_key(patient) for patient in set(patients)} if opted_out else {}
    gone = frozenset(patient for patient, key in keys.items() if key in opted_out)
    matched = {keys[patient] for patient in gone}
    unmatched = tuple(name for key, name in opted_out.items() if key not in matched)
    return gone, LeftOutPatients(len(gone), unmatched)


def leave_out_patients(splits: DatasetSplits, opted_out: Identifiers) -> tuple[DatasetSplits, LeftOutPatients]:
    """Return the data without the patients who opted out, and the comparison of these with the data.

    Args:
        opted_out: Result of :meth:`OptOutSource.read_identifiers`.
    """
    patients = [patient for images in splits.parts for patient in images.patients.tolist()]
    gone, left_out = find_left_out_patients(patients, opted_out)
    if not gone:
        return splits, left_out
    parts = [
        np.where(np.isin(images.patients, sorted(gone)), "", name)
        for name, images in zip(PARTS, splits.parts, strict=True)
    ]
    return divide_splits_again(splits, parts), left_out
