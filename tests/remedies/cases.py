"""What a refusal is, how its message is taken apart, and how its remedy is tried."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image

import polyclinic as pc
from polyclinic.common.errors import BadInput

NAMES = {"np": np, "numpy": np, "PIL": __import__("PIL"), "Image": Image, "torch": torch, "pc": pc}
NAMES |= {"torchvision": torchvision}
"""What a line of code in a message may use."""


@dataclass(frozen=True)
class Case:
    """One refusal.

    Attributes:
        site: File and function that make the fault, such as ``data/sources/npz.py find_npz_label_faults``.
        refused: Does in a folder what is refused with a :class:`BadInput`.
        remedy: Given the folder and the message, does what the message says, and checks what comes of it.
    """

    site: str
    refused: Callable[[Path], object]
    remedy: Callable[[Path, str], object]


def read_message(case: Case, folder: Path) -> str:
    """Return the message of a refusal; AssertionError if nothing is refused."""
    try:
        case.refused(folder)
    except BadInput as bad:
        return str(bad)
    raise AssertionError(f"{case.site}: nothing is refused")


def take(message: str, pattern: str) -> str:
    """Return the part of a message that the user would copy; it must be there."""
    found = re.search(pattern, message)
    assert found, f"{pattern!r} is not in {message!r}"
    return found.group(found.lastindex or 0)


def evaluate(message: str, pattern: str, **values: Any) -> Any:
    """Return the value of the expression in a message that the user would copy into a program."""
    return eval(take(message, pattern), {**NAMES, **values})


def read_setting(message: str, pattern: str) -> dict[str, Any]:
    """Return the setting in a message that the user would copy into ``[data]``."""
    return tomllib.loads(take(message, pattern))
