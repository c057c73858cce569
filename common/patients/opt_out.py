"""Patients who opted out: ``data.opt_out`` of ``site.toml``, a list of identifiers or a command that prints them.

The site reads this key before each request that reads images, so an opt-out counts from the next round on. The table of
labels can stay unchanged. Identifiers are compared by :func:`make_name_similarity_key`, for which ``P-007`` and ``p7``
are the same. If these are two patients, both are left out, which harms nobody.
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
"""A changed file is read again after this time, because an editor may still be writing it."""
_MAX_OUTPUT_CHARACTERS = 200
_MAX_LISTED_NAMES = 20

Identifiers = Mapping[str, str]
"""Similarity key of a patient who opted out -> the identifier as the hospital wrote it."""


class OptOutsUnknown(Exception):
    """Raised if the opt-outs cannot be read; the message is for the hospital's staff only."""


def _make_command_failure(problem: str) -> OptOutsUnknown:
    """Return the exception for a command of ``data.opt_out`` that fails."""
    remedy = "It has to print one identifier a line and to end with code 0."
    return OptOutsUnknown(f"data.opt_out: the command {problem}. {remedy}")


class OptOutSource:
    """Reads the identifiers of patients who opted out from ``data.opt_out`` of a ``site.toml``.

    Args:
        folder: The folder of ``site.toml``; a command runs in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._content: bytes | None = None
        self._opt_outs: tuple[str, ...] | str = ()

    def read_identifiers(self) -> Identifiers:
        """Return the patients who have opted out so far.

        Raises:
            OptOutsUnknown: If the command fails, or the file cannot be read. The site must then train nothing.
        """
        self._read_changed_file()
        identifiers = self._run_command(self._opt_outs) if isinstance(self._opt_outs, str) else self._opt_outs
        return {make_name_similarity_key(name): name for name in identifiers if name.strip()}

    def require_identifiers(self) -> Identifiers:
        """Return the patients who have opted out so far, for a program that ends if this is unknown.

        Raises:
            BadInput: If the command fails, or the file cannot be read.
        """
        try:
            return self.read_identifiers()
        except OptOutsUnknown as error:
            raise BadInput([Fault(SITE_FILE, str(error).removeprefix(f"{SITE_FILE}: "))]) from None

    def _read_changed_file(self) -> None:
        """Read ``data.opt_out`` again if the content of ``site.toml`` has changed."""
        path = self.folder / SITE_FILE
        try:
            content = path.read_bytes()
            while content != self._content:
                self._content = None
                time.sleep(SAVING_PAUSE_S)
                before = content
                content = path.read_bytes()
                if content == before:
                    self._opt_outs = _parse_opt_outs(path)
                    self._content = content
        except OSError as error:
            raise _make_file_failure(f"cannot be read: {error.strerror}.") from None
        except BadInput as error:
            raise _make_file_failure(" ".join(f"{fault.problem} {fault.remedy}" for fault in error.faults)) from None

    def _run_command(self, command: str) -> Sequence[str]:
        try:
            process = subprocess.run(
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
        if process.returncode:
            failure = f"ended with code {process.returncode}"
            words = make_printable_line(process.stderr.strip(), _MAX_OUTPUT_CHARACTERS)
            raise _make_command_failure(f"{failure}: {words}" if words else failure)
        return [line.strip() for line in process.stdout.splitlines()]


def read_opt_out_key(data: Mapping[str, Any]) -> tuple[tuple[str, ...] | str, list[Fault]]:
    """Return ``opt_out`` of the table ``[data]`` (a tuple of identifiers, or a command) and its faults."""
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
    """Return the value of ``data.opt_out``: a tuple of identifiers, or a command.

    Raises:
        BadInput: If the file is not valid.
        OptOutsUnknown: If the file has no ``[data]``, because an empty file must not cancel all opt-outs.
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
    """The result of comparing the patients who opted out with the data.

    Attributes:
        count: Number of patients of the data who are left out.
        unmatched: Identifiers, as the hospital wrote them, that match no patient of the data.
    """

    count: int
    unmatched: tuple[str, ...]

    def describe(self) -> str:
        """Return a line for the hospital's staff with the number of patients who are left out."""
        return f"data.opt_out: {format_count_with_noun(self.count, 'patient')} left out"

    def warn_about_unmatched(self) -> str:
        """Return a warning for the hospital's staff with the unmatched identifiers; empty if there are none."""
        if not self.unmatched:
            return ""
        names = list_first_and_count_rest(self.unmatched, _MAX_LISTED_NAMES)
        return f"data.opt_out: no patient of the data has the {self._describe_number()} {names}."

    def _describe_number(self) -> str:
        return "identifier" if len(self.unmatched) == 1 else f"{len(self.unmatched)} identifiers"


UNMATCHED_REMEDY = (
    "If it is a typing error, the patient whom you mean is trained on: correct it. "
    "If the patient has gone from the table, nothing is to be done."
)


def find_left_out_patients(patients: Sequence[str], opted_out: Identifiers) -> tuple[frozenset[str], LeftOutPatients]:
    """Return the patients of the data who opted out, by the data's names, and a summary of the comparison.

    Args:
        patients: The patients of the data, with the data's names.
        opted_out: Result of :meth:`OptOutSource.read_identifiers`.
    """
    keys = {patient: make_name_similarity_key(patient) for patient in set(patients)} if opted_out else {}
    left_out = frozenset(patient for patient, key in keys.items() if key in opted_out)
    matched = {keys[patient] for patient in left_out}
    unmatched = tuple(name for key, name in opted_out.items() if key not in matched)
    return left_out, LeftOutPatients(len(left_out), unmatched)


def leave_out_patients(splits: DatasetSplits, opted_out: Identifiers) -> tuple[DatasetSplits, LeftOutPatients]:
    """Return the data without the patients who opted out, and a summary of the comparison.

    Args:
        splits: The data.
        opted_out: Result of :meth:`OptOutSource.read_identifiers`.
    """
    patients = [patient for images in splits.parts for patient in images.patients.tolist()]
    left_out, summary = find_left_out_patients(patients, opted_out)
    if not left_out:
        return splits, summary
    parts = [
        np.where(np.isin(images.patients, sorted(left_out)), "", name)
        for name, images in zip(PARTS, splits.parts, strict=True)
    ]
    return divide_splits_again(splits, parts), summary
