"""Names that become names of files and folders: one type that only a plain name can be, and the one way to join it.

A name that another machine sent (run, site, message, plug-in, weights) must never choose a path: ``/etc/cron.d/job``,
``../site.toml`` and a name with a line feed are such names. :class:`PlainName` and its subclasses refuse them, and
:func:`join_plain_name` takes nothing else. ``tests/test_plain_names.py`` lists every other place where a path is made.
"""

import re
from pathlib import Path
from typing import ClassVar, Self

from polyclinic.common.system.plain_text import PLAIN_NAME, make_printable_line

MOST_BYTES = 255
"""Longest name of a file that common file systems take, in bytes of UTF-8."""
_MAX_SHOWN_CHARACTERS = 80
_ENDING = re.compile(r"(\.[a-z0-9]+)*")


class PlainName(str):
    """The name of a site, task or federation: letters, digits, spaces, dots, dashes, underscores and brackets.

    It begins with a letter, a digit or an underscore, so it is neither a path nor ``..`` nor a hidden file.

    Raises:
        ValueError: If the text is no such name.
    """

    __slots__ = ()
    pattern: ClassVar[re.Pattern[str]] = PLAIN_NAME
    rule: ClassVar[str] = (
        "1 to 100 letters, digits, spaces, dots, dashes, underscores and brackets, the first one a letter or digit"
    )

    def __new__(cls, text: str) -> Self:
        if isinstance(text, cls):
            return text
        if not isinstance(text, str) or not cls.pattern.fullmatch(text) or len(text.encode()) > MOST_BYTES:
            shown = make_printable_line(text, _MAX_SHOWN_CHARACTERS) if isinstance(text, str) else type(text).__name__
            raise ValueError(f"a name must be {cls.rule}, not {shown!r}")
        return super().__new__(cls, text)


class RunName(PlainName):
    """The name of a run; no capital letters, because some file systems ignore case."""

    __slots__ = ()
    pattern = re.compile(r"[a-z0-9_][a-z0-9_-]{0,63}")
    rule = "1 to 64 small letters, digits, dashes and underscores"


class HashName(PlainName):
    """A SHA-256 in hexadecimal digits, as the name of a file with that hash."""

    __slots__ = ()
    pattern = re.compile(r"[0-9a-f]{64}")
    rule = "a SHA-256 of 64 hexadecimal digits"


def join_plain_name(folder: Path, name: PlainName, ending: str = "") -> Path:
    """Return the path of a file or folder that lies directly in ``folder`` and is called ``name`` plus ``ending``.

    Args:
        ending: Ending such as ``.txt``, written in our code.

    Raises:
        TypeError: If the name was not checked, which is a fault of the calling code.
    """
    if not isinstance(name, PlainName):
        raise TypeError(f"the name of a file must be a PlainName, not {type(name).__name__}")
    if not _ENDING.fullmatch(ending):
        raise TypeError(f"the ending of a file must be like .txt, not {ending!r}")
    return folder / f"{name}{ending}"
