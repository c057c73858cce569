r"""Text from the other side, or from a file of somebody else, made harmless before it is kept or shown.

A name is *checked*: it has a largest length, and every character of it can be seen. Words that say why something
failed are *shown*: what cannot be seen is written out (``\x1b``, ``\u202e``), and what is too long is cut with a note.
Both sides go by these functions, because neither trusts the words of the other at its terminal.
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

PLAIN_NAME = re.compile(r"\w[\w .()-]{0,99}")
"""Of sites, tasks and federations: it can stand in files, folders and messages."""
MOST_WORDS = 500
"""Characters of a reason, the note of a cut included: two or three sentences of ours."""
MOST_LINES = 40
"""Of a text of several lines."""
TRACE = "=== Source Location Trace"
HANGING = "    "
"""Before each line but the first, so that no line of somebody else begins where a line of ours does."""

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks that have no picture: Unicode counts them among the visible ones."""
_UNSEEN_RANGES = ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
"""Variation selectors, which change only how the character before them is drawn."""


def is_plain(text: str) -> bool:
    """Return whether every character can be seen and none moves the cursor or turns the direction of writing.

    Controls (C0, C1, escape, line feeds), format characters (bidirectional, zero-width), surrogates, private use,
    unassigned code points, line and paragraph separators are not plain. Spaces of every width are.
    """
    return text.isprintable() if text.isascii() else all(map(_plain, text))


def _plain(character: str) -> bool:
    if character in _UNSEEN or any(low <= ord(character) <= high for low, high in _UNSEEN_RANGES):
        return False
    return character.isprintable() or unicodedata.category(character) == "Zs"


def escaped(text: str) -> str:
    """Write out every character that is not plain, as Python does; the length is not bounded."""
    return (
        text
        if is_plain(text)
        else "".join(letter if _plain(letter) else letter.encode("unicode_escape").decode("ascii") for letter in text)
    )


def printable(text: str, most: int = MOST_WORDS) -> str:
    """Show somebody else's words on one line: escaped, and cut to ``most`` characters with a note of the cut.

    A text that was shown once stays as it is.
    """
    whole = escaped(text[: most + 1])  # no more of it is looked at, however long it is
    if len(text) <= most and len(whole) <= most:
        return whole
    kept, size = 0, 0
    room = most - len(_cut(len(text)))
    while kept < len(text) and size + len(one := escaped(text[kept])) <= room:
        kept, size = kept + 1, size + len(one)
    return escaped(text[:kept]) + _cut(len(text) - kept)


def _cut(characters: int) -> str:
    return f" ... ({characters:,} characters cut)"


def printable_lines(text: str) -> str:
    """Return words of somebody else that may have several lines: each shown, those after the first indented.

    At most :data:`MOST_LINES` lines are kept, with a note of how much was cut.
    """
    lines = text[: MOST_LINES * 2 * MOST_WORDS].split("\n")[: MOST_LINES + 1]  # no more of it is looked at
    lines = lines[: MOST_LINES - 1] if len(lines) > MOST_LINES else lines
    left = len(text) - len("\n".join(lines))
    note = [_cut(left).strip()] if left else []
    return f"\n{HANGING}".join(
        printable(line.removeprefix(HANGING) if n else line) for n, line in enumerate(lines + note)
    )


def indent_following_lines(text: str) -> str:
    """Return the text with each line after the first indented, where it is not already."""
    first, *others = text.split("\n")
    return "\n".join([first, *(one if one.startswith(HANGING) else f"{HANGING}{one}" for one in others)])


def terminal_safe(text: str) -> str:
    """Make any text safe for a terminal, as the last line of defence: no character of it acts on the terminal.

    Line feeds stay, because our own texts have them.
    """
    return text if is_plain(text) else "\n".join(map(escaped, text.split("\n")))


def page_safe(value: object) -> object:
    """Make a value safe for a page, as :func:`terminal_safe` does; for a template's ``finalize``.

    What is markup already (our own style sheet and figures) stays as it is.
    """
    return terminal_safe(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def json_text(value: Any, indent: int | None = None, *, allow_nan: bool = False) -> str:
    r"""Return JSON in which non-ASCII letters stand as they are and every character that is not plain as ``\u....``.

    ``json`` alone leaves C1 controls, bidirectional marks and line separators raw.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan, indent=indent)
    if is_plain(text.replace("\n", "")):
        return text
    # json.dumps writes a character beyond 16 bits as two surrogates, and leaves DEL alone.
    return "".join(
        letter if letter == "\n" or _plain(letter) else "\\u007f" if letter == "\x7f" else json.dumps(letter)[1:-1]
        for letter in text
    )


@cache
def page_environment(*folders: Path) -> "Environment":
    """Read HTML templates from folders; of two templates of one name the first folder's counts."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        finalize=page_safe,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def grpc_words(details: str | None) -> str:
    """Return the details of a gRPC error as one short plain line, without the trace of gRPC's own source files."""
    return printable((details or "").split(TRACE)[0].strip())


# ---------------------------------------------------------------------- amounts

NOT_APPLICABLE = "n/a"


def number(value: float | None, digits: int = 3) -> str:
    """Format with fixed decimals, ``n/a`` for what is undefined."""
    if value is None:
        return NOT_APPLICABLE
    return f"{value:.{digits}f}" if math.isfinite(value) else "not finite"


def signed(value: float | None) -> str:
    """Write a number as :func:`number` does, with a plus or minus sign unless it prints as zero."""
    if value is None:
        return NOT_APPLICABLE
    text = number(abs(value))
    return text if text == number(0.0) else f"{'−' if value < 0 else '+'}{text}"


def span(ends: tuple[float, float] | None) -> str:
    """Return two ends: ``"0.812–0.871"``."""
    return NOT_APPLICABLE if ends is None else "–".join(map(number, ends))


def count(value: int | None) -> str:
    """Format a count with commas between thousands."""
    return NOT_APPLICABLE if value is None else f"{value:,}"


def size(byte_count: int | None) -> str:
    """Return bytes in decimal units: ``"1.5 MB"``."""
    if byte_count is None:
        return NOT_APPLICABLE
    value, units = float(byte_count), ("B", "kB", "MB", "GB", "TB")
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.0f} {units[power]}" if value >= 100 or not power else f"{value:.1f} {units[power]}"


def duration(seconds: float | None) -> str:
    """Format seconds as ``"4.2 s"``, ``"3 min 05 s"`` or ``"2 h 07 min"``."""
    if seconds is None:
        return NOT_APPLICABLE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counted(amount: int, noun: str, plural: str | None = None) -> str:
    """Return an amount with its noun: ``"1 site"``, ``"3 sites"``, ``"2 classes"``."""
    return f"{amount:,} {noun if amount == 1 else plural or noun + 's'}"


def listed(words: Sequence[str]) -> str:
    """Return words in a sentence: ``"a, b and c"``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def shortened(words: Sequence[str], most: int = 3) -> str:
    """Return the first few words, the rest counted: ``"a, b, c, 2 more"``; empty without any."""
    rest = len(words) - most
    return ", ".join([*words[:most], f"{rest} more"] if rest > 0 else words)


def spans(rounds: Iterable[int]) -> str:
    """Return round numbers with runs drawn together: ``"3–5, 9"``."""
    pieces: list[list[int]] = []
    for each in sorted(rounds):
        if pieces and each == pieces[-1][-1] + 1:
            pieces[-1].append(each)
        else:
            pieces.append([each])
    return ", ".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}–{piece[-1]}" for piece in pieces)
