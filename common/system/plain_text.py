r"""Text from the other side, or from a file of somebody else, made harmless before it is kept or shown.

A name is *checked*: it has a largest length, and every character of it can be seen. Words that say why something
failed are *shown*: what cannot be seen is written out (``\x1b``, ``\u202e``), and what is too long is cut with a note.
Both sides go by these functions, because neither trusts the words of the other at its terminal.
"""

import json
import re
import unicodedata
from typing import Any

PLAIN_NAME = re.compile(r"\w[\w .()-]{0,99}")
"""Of sites, tasks and federations: it can stand in files, folders and messages."""
MOST_WORDS = 500
"""Characters of a reason, the note of a cut included: two or three sentences of ours."""
MOST_LINES = 40
"""Of a text of several lines."""
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


def shown(text: str, most: int = MOST_WORDS) -> str:
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


def shown_lines(text: str) -> str:
    """Return words of somebody else that may have several lines: each shown, those after the first indented.

    At most :data:`MOST_LINES` lines are kept, with a note of how much was cut.
    """
    lines = text[: MOST_LINES * 2 * MOST_WORDS].split("\n")[: MOST_LINES + 1]  # no more of it is looked at
    lines = lines[: MOST_LINES - 1] if len(lines) > MOST_LINES else lines
    left = len(text) - len("\n".join(lines))
    note = [_cut(left).strip()] if left else []
    return f"\n{HANGING}".join(shown(line.removeprefix(HANGING) if n else line) for n, line in enumerate(lines + note))


def hanging(text: str) -> str:
    """Return the text with each line after the first indented, where it is not already."""
    first, *others = text.split("\n")
    return "\n".join([first, *(one if one.startswith(HANGING) else f"{HANGING}{one}" for one in others)])


def at_terminal(text: str) -> str:
    """Make any text safe for a terminal, as the last line of defence: no character of it acts on the terminal.

    Line feeds stay, because our own texts have them.
    """
    return text if is_plain(text) else "\n".join(map(escaped, text.split("\n")))


def in_page(value: object) -> object:
    """Make a value safe for a page, as :func:`at_terminal` does; for a template's ``finalize``.

    What is markup already (our own style sheet and figures) stays as it is.
    """
    return at_terminal(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


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
