"""Errors of our programs; faults of a person's input are gathered, explained and raised all together."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Cause = Literal["", "column", "patients", "unreadable"]
"""Kinds of faults that have an exit code of their own."""


@dataclass(frozen=True)
class Fault:
    """One fault of an input, described for the person who has to fix it.

    Attributes:
        where: File and key, e.g. ``"nih.toml: data.path"``.
        problem: The value and what was expected, one sentence with its full stop.
        remedy: How to fix the input; empty where the problem says so.
        site: The site at which the fault has to be fixed; empty where no single site is meant.
        cause: A missing ``column``, ``patients`` in two splits, ``unreadable`` images; empty for any other.
    """

    where: str
    problem: str
    remedy: str = ""
    site: str = ""
    cause: Cause = ""

    def __str__(self) -> str:
        return " ".join(part for part in (f"{self.where}: {self.problem}", self.remedy) if part)


class BadInput(Exception):
    """A person's input has faults; raised once with all of them. The program exits with code 2."""

    exit_code: ClassVar[int] = 2

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        assert self.faults, "BadInput needs at least one fault"
        super().__init__("\n".join(str(fault) for fault in self.faults))

    def __reduce__(self) -> tuple[type["BadInput"], tuple[tuple[Fault, ...]]]:
        """Pickle with the faults, to come whole from a worker process; exceptions are otherwise rebuilt from text."""
        return BadInput, (self.faults,)


class ProgramCannotContinue(RuntimeError):
    """The program has to end; the text explains why. The exit code is 1."""


class ModelDiverged(ProgramCannotContinue):
    """A model gives scores that are not finite."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the model diverged: {what}. A lower training.lr usually helps.")


class WireError(ValueError):
    """A record that this side does not accept, with the reason."""


class WireVersionError(WireError):
    """The other side speaks another version of these records."""


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise :class:`BadInput` if there is any fault."""
    if faults:
        raise BadInput(faults)


SAVE_AS_UTF8 = "Save it as UTF-8 text."
PICTURE = "is not text but a picture."


def explain_not_utf8_line(content: bytes, line: int) -> str:
    """Return why a file is not UTF-8, from its first bytes and the line of the first wrong byte."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is not UTF-8 text but UTF-16."
    if content.startswith(b"PK\x03\x04"):
        return "is not text but a spreadsheet or another zip file."
    if content.startswith((b"\x89PNG", b"\xff\xd8\xff")) or content[128:132] == b"DICM":
        return PICTURE
    return f"is not UTF-8 text: line {line} holds a byte that is none of it."


def suggest_nearest_name(name: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``'Did you mean "Infiltration"?'`` for the nearest option, or an empty string if none is near.

    Args:
        cutoff: The share of letters that a near option has in common with the name.
    """
    by_folded = {option.casefold(): option for option in options}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return f'Did you mean "{by_folded[near[0]]}"?' if near else ""


def quote_names(names: Iterable[str], limit: int = 20) -> str:
    """Return names in double quotes, comma-separated, cut after ``limit`` with a count of the rest."""
    listed = list(names)
    text = ", ".join(f'"{name}"' for name in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"
