"""A type for names that become names of files and folders, and the function that joins such a name to a folder.

A name that another machine sent (run, site, message, plug-in, weights) must never choose a path, such as
``/etc/cron.d/job``, ``../site.toml`` or a name with a line feed. :class:`PlainName` and its subclasses refuse such
names, and :func:`join_plain_name` accepts nothing else. ``tests/test_plain_names.py`` lists all other code that makes a
path.
"""

import re
from pathlib import Path
from typing import ClassVar, Self

from polyclinic.common.system.plain_text import PLAIN_NAME, make_printable_line

MAX_FILE_NAME_BYTES = 255
"""Maximum length of a file name on common file systems, in bytes of UTF-8."""
_MAX_SHOWN_CHARACTERS = 80
_SUFFIXES = re.compile(r"(\.[a-z0-9]+)*")


class PlainName(str):
    """The name of a site, task or federation: letters, digits, spaces, dots, dashes, underscores and brackets.

    It begins with a letter, a digit or an underscore, so it is no path, not ``..`` and not the name of a hidden file.

    Raises:
        ValueError: If the text breaks this rule.
    """

    __slots__ = ()
    pattern: ClassVar[re.Pattern[str]] = PLAIN_NAME
    rule: ClassVar[str] = (
        "1 to 100 letters, digits, spaces, dots, dashes, underscores and brackets, the first one a letter or digit"
    )

    def __new__(cls, text: str) -> Self:
        if isinstance(text, cls):
            return text
        if not isinstance(text, str) or not cls.pattern.fullmatch(text) or len(text.encode()) > MAX_FILE_NAME_BYTES:
            shown = make_printable_line(text, _MAX_SHOWN_CHARACTERS) if isinstance(text, str) else type(text).__name__
            raise ValueError(f"a name must be {cls.rule}, not {shown!r}")
        return super().__new__(cls, text)


class RunName(PlainName):
    """The name of a run; without capital letters, because some file systems ignore case."""

    __slots__ = ()
    pattern = re.compile(r"[a-z0-9_][a-z0-9_-]{0,63}")
    rule = "1 to 64 small letters, digits, dashes and underscores"


class HashName(PlainName):
    """A SHA-256 in hexadecimal digits, used as the name of a file with this hash."""

    __slots__ = ()
    pattern = re.compile(r"[0-9a-f]{64}")
    rule = "a SHA-256 of 64 hexadecimal digits"


def join_plain_name(folder: Path, name: PlainName, ending: str = "") -> Path:
    """Return the path of a file or folder directly in ``folder``, with the name ``name`` plus ``ending``.

    Args:
        folder: The folder.
        name: The checked name.
        ending: Suffix such as ``.txt``; always a constant of our code.

    Raises:
        TypeError: If the name was not checked, which is a programming error.
    """
    if not isinstance(name, PlainName):
        raise TypeError(f"the name of a file must be a PlainName, not {type(name).__name__}")
    if not _SUFFIXES.fullmatch(ending):
        raise TypeError(f"the ending of a file must be like .txt, not {ending!r}")
    return folder / f"{name}{ending}"
