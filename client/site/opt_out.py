"""Patients who opted out: ``data.opt_out`` of ``site.toml``, a list of their identifiers or a command that prints them.

The site asks before each request that reads images, so an opt-out counts from the next round on. The table of labels
may stay as it is. An identifier is compared by :func:`make_name_similarity_key`: ``P-007`` and ``p7`` are one.
Where these are two patients, both are left out, which harms nobody.
"""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyclinic.client.site.run_entries import RunEntryFolder
from polyclinic.common.system.plain_text import format_count_with_noun, make_printable_line
from polyclinic.data.base.image_set import PARTS, DatasetSplits
from polyclinic.data.base.names import make_name_similarity_key
from polyclinic.data.base.splits import divide_splits_again

COMMAND_TIMEOUT_S = 60
STATED_COUNTS = "stated-images"
"""Folder in the site's state folder."""
_MAX_OUTPUT_CHARACTERS = 200


class OptOutsUnknown(Exception):
    """Raised if the command of ``data.opt_out`` fails; the message is for the hospital's staff only."""

    def __str__(self) -> str:
        remedy = "It has to print one identifier a line and to end with code 0."
        return f"data.opt_out: the command {self.args[0]}. {remedy}"


@dataclass(frozen=True)
class OptOutSource:
    """Where the identifiers of patients who opted out come from.

    Attributes:
        listed: The value of ``data.opt_out``: a list of identifiers, or a command line.
        folder: The folder of ``site.toml``, in which the command runs.
    """

    listed: tuple[str, ...] | str
    folder: Path

    def read_keys(self) -> frozenset[str]:
        """Return the comparison keys of the patients who have opted out by now.

        Raises:
            OptOutsUnknown: If the command fails. Then nobody knows who opted out, so nothing may be trained.
        """
        identifiers = self._run_command(self.listed) if isinstance(self.listed, str) else self.listed
        return frozenset(make_name_similarity_key(name) for name in identifiers if name.strip())

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
            raise OptOutsUnknown(f"did not end within {COMMAND_TIMEOUT_S} s") from None
        except (OSError, ValueError) as error:
            raise OptOutsUnknown(f"cannot be run: {error}") from None
        if ended.returncode:
            words = make_printable_line(ended.stderr.strip(), _MAX_OUTPUT_CHARACTERS)
            raise OptOutsUnknown(f"ended with code {ended.returncode}{f': {words}' if words else ''}")
        return [line.strip() for line in ended.stdout.splitlines()]


class StatedImageCounts:
    """The number of training images that the site stated at the roll call of each run.

    The coordinator takes only replies with the number of the roll call, as nobody else could check the weight that a
    site claims. So a patient who opts out during a run leaves training, and the number stays until the next roll call.
    That also hides from the coordinator how many images the patient had.

    Args:
        state: The folder ``state`` of the site.
        durable: Flush files to disk.
    """

    def __init__(self, state: Path, *, durable: bool = True) -> None:
        self._entries = RunEntryFolder(state / STATED_COUNTS, state / STATED_COUNTS / "earlier", durable=durable)

    def write_count(self, run: str, images: int) -> None:
        """Store the number of training images of a run's roll call."""
        self._entries.write_entry(run, {"images": images})

    def read_count(self, run: str, present: int) -> int:
        """Return the number of a run's roll call; ``present`` if it is not stored."""
        entry = self._entries.read_entry(run) or {}
        stated = entry.get("images")
        return stated if isinstance(stated, int) else present


def leave_out_patients(splits: DatasetSplits, keys: frozenset[str]) -> tuple[DatasetSplits, int]:
    """Return the data without the patients who opted out, and the number of these in the data.

    Args:
        keys: Result of :meth:`OptOutSource.read_keys`.
    """
    if not keys:
        return splits, 0
    parts, left_out = [], set[str]()
    for name, images in zip(PARTS, splits.parts, strict=True):
        gone = {patient for patient in set(images.patients.tolist()) if make_name_similarity_key(patient) in keys}
        left_out |= gone
        parts.append(np.where(np.isin(images.patients, sorted(gone)), "", name))
    return (divide_splits_again(splits, parts) if left_out else splits), len(left_out)


def describe_opt_outs(count: int) -> str:
    """Return a line for the hospital's staff about the number of patients who are left out."""
    return f"data.opt_out: {format_count_with_noun(count, 'patient')} left out"
