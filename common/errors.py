"""Exceptions of our programs. All faults of a user's input are collected and raised together as :class:`BadInput`."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Cause = Literal["", "column", "patients", "unreadable"]
"""Kinds of faults for which the programs have a special exit code."""


@dataclass(frozen=True)
class Fault:
    """One fault of a user's input, with text for the person who has to fix it.

    Attributes:
        where: File and key, e.g. ``"nih.toml: data.path"``.
        problem: The actual and the expected value, one sentence with its full stop.
        remedy: How to fix the input; empty if the problem makes it clear.
        site: The site where the fault has to be fixed; empty if no single site is meant.
        cause: Kind of the fault: ``column``, a column is missing; ``patients``, a patient is in two parts or has two
            similar names; ``unreadable``, images cannot be read; empty for all other faults.
    """

    where: str
    problem: str
    remedy: str = ""
    site: str = ""
    cause: Cause = ""

    def __str__(self) -> str:
        return " ".join(part for part in (f"{self.where}: {self.problem}", self.remedy) if part)


class BadInput(Exception):
    """Raised once with all faults of a user's input; the program then exits with code 2."""

    exit_code: ClassVar[int] = 2

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        assert self.faults, "BadInput needs at least one fault"
        super().__init__("\n".join(str(fault) for fault in self.faults))

    def __reduce__(self) -> tuple[type["BadInput"], tuple[tuple[Fault, ...]]]:
        """Return how to pickle the exception with its faults; by default a worker process would send only its text."""
        return BadInput, (self.faults,)


class ProgramCannotContinue(RuntimeError):
    """Raised with a reason when the program has to end; the exit code is 1."""


class ModelDiverged(ProgramCannotContinue):
    """Raised when a model returns scores that are NaN or infinite."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the model diverged: {what}. A lower training.lr usually helps.")


class WireError(ValueError):
    """Raised with a reason when the coordinator or a site rejects a record that it received."""


class WireVersionError(WireError):
    """Raised when the sender of a record uses another version of the wire format."""


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise :class:`BadInput` with these faults, if there are any."""
    if faults:
        raise BadInput(faults)


UTF8_REMEDY = "Save it as UTF-8 text."
PICTURE_PROBLEM = "is not text but a picture."


def describe_non_utf8_file(content: bytes, line: int) -> str:
    """Return a phrase, for a fault, about a file that is not UTF-8, such as "is not text but a picture.".

    Args:
        content: The bytes of the file, at least its first ones.
        line: Number of the first line that is not UTF-8.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is not UTF-8 text but UTF-16."
    if content.startswith(b"PK\x03\x04"):
        return "is not text but a spreadsheet or another zip file."
    if content.startswith((b"\x89PNG", b"\xff\xd8\xff")) or content[128:132] == b"DICM":
        return PICTURE_PROBLEM
    return f"is not UTF-8 text: line {line} holds a byte that is none of it."


def suggest_nearest_name(name: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``'Did you mean "Infiltration"?'`` for the most similar option; empty if none is similar.

    Args:
        cutoff: Minimum similarity, from 0 to 1, as in :func:`difflib.get_close_matches`.
    """
    by_folded = {option.casefold(): option for option in options}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return f'Did you mean "{by_folded[near[0]]}"?' if near else ""


def quote_names(names: Iterable[str], limit: int = 20) -> str:
    """Return names in double quotes, separated by commas; after ``limit`` names only the number of the others."""
    listed = list(names)
    text = ", ".join(f'"{name}"' for name in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"
