r"""Text for people: formats of numbers and lists, and escaping of text from other machines before it is printed.

Coordinator and hospitals do not trust each other's text at their terminals. Names with invisible characters or too many
characters are rejected. In longer text, such as the reason of a failure, invisible characters are escaped (``\x1b``,
``\u202e``), and text that is too long is cut with a note.
"""

import datetime as dt
import json
import math
import re
import shlex
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

PLAIN_NAME = re.compile(r"\w[\w .()-]{0,99}")
"""Pattern of names of sites, tasks and federations, which are safe in file names and messages."""
MAX_REASON_CHARACTERS = 500
"""Maximum length of a reason, including the note about the cut: two or three sentences."""
MAX_LINES = 40
"""Maximum number of lines of an untrusted text."""
GRPC_TRACE_START = "=== Source Location Trace"
HANGING_INDENT = "    "
"""Indent of all lines after the first, so that a line of untrusted text cannot imitate one of ours."""

_INVISIBLE_CHARACTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks without a glyph, which Unicode classifies as visible."""
_VARIATION_SELECTOR_RANGES = ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
"""Ranges of variation selectors, which change only the look of the character before them."""


def is_plain_text(text: str) -> bool:
    """Return True if every character is visible or a space, so that the text is safe to print as one line.

    Characters that are not plain are controls (C0, C1, escape, line feeds), format characters (bidirectional,
    zero-width), surrogates, private use, unassigned code points, line and paragraph separators.
    """
    # Check each character once: a page of a hundred thousand characters has about a hundred different ones.
    return text.isprintable() if text.isascii() else all(map(_is_plain_character, set(text)))


def _is_plain_character(character: str) -> bool:
    if character in _INVISIBLE_CHARACTERS or any(
        low <= ord(character) <= high for low, high in _VARIATION_SELECTOR_RANGES
    ):
        return False
    return character.isprintable() or unicodedata.category(character) == "Zs"


def escape_unplain_characters(text: str) -> str:
    """Escape every character that is not plain (:func:`is_plain_text`) in Python's notation, such as ``\\x1b``."""
    if is_plain_text(text):
        return text
    pairs = ((letter, letter.encode("unicode_escape").decode("ascii")) for letter in text)
    return "".join(letter if _is_plain_character(letter) else escape for letter, escape in pairs)


def make_printable_line(text: str, limit: int = MAX_REASON_CHARACTERS) -> str:
    """Make untrusted text safe to print as one line: escape it, and cut it to a maximum length with a note.

    A second application does not change the result.

    Args:
        text: The text.
        limit: Maximum number of characters of the result.
    """
    escaped = escape_unplain_characters(text[: limit + 1])  # the rest of a long text is not read
    if len(text) <= limit and len(escaped) <= limit:
        return escaped
    end = 0
    size = 0
    room = limit - len(_make_cut_note(len(text)))
    while end < len(text) and size + len(letter := escape_unplain_characters(text[end])) <= room:
        end = end + 1
        size = size + len(letter)
    return escape_unplain_characters(text[:end]) + _make_cut_note(len(text) - end)


def _make_cut_note(characters: int) -> str:
    return f" ... ({characters:,} characters cut)"


def make_printable_lines(text: str) -> str:
    """Make untrusted text of several lines safe to print: escape each line, and indent all lines but the first.

    Text after :data:`MAX_LINES` lines is cut, with a note of the number of characters.
    """
    lines = text[: MAX_LINES * 2 * MAX_REASON_CHARACTERS].split("\n")[
        : MAX_LINES + 1
    ]  # the rest of a long text is not read
    lines = lines[: MAX_LINES - 1] if len(lines) > MAX_LINES else lines
    left = len(text) - len("\n".join(lines))
    note = [_make_cut_note(left).strip()] if left else []
    return f"\n{HANGING_INDENT}".join(
        make_printable_line(line.removeprefix(HANGING_INDENT) if n else line) for n, line in enumerate(lines + note)
    )


def escape_for_terminal(text: str) -> str:
    """Escape all control characters of a text except line feeds, so that it cannot control the terminal."""
    return text if is_plain_text(text) else "\n".join(map(escape_unplain_characters, text.split("\n")))


def escape_for_html_page(value: object) -> object:
    """Escape a value for an HTML page, except our markup; used as ``finalize`` of the jinja templates."""
    return escape_for_terminal(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def format_as_json_text(value: Any, indent: int | None = None, *, allow_nan: bool = False) -> str:
    r"""Format a value as JSON, with visible characters unchanged and all others escaped as ``\u....``.

    :func:`json.dumps` alone does not escape C1 controls, bidirectional marks and line separators.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan, indent=indent)
    if is_plain_text(text.replace("\n", "")):
        return text
    # json.dumps writes a character beyond 16 bits as two surrogates, and does not escape DEL.
    pairs = ((letter, "\\u007f" if letter == "\x7f" else json.dumps(letter)[1:-1]) for letter in text)
    return "".join(letter if letter == "\n" or _is_plain_character(letter) else escape for letter, escape in pairs)


@cache
def make_jinja_environment(*folders: Path) -> "Environment":
    """Return a jinja environment for the HTML templates in these folders, which are searched in this order.

    Values are escaped, and an undefined variable in a template raises an error.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        finalize=escape_for_html_page,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def shorten_grpc_details(details: str | None) -> str:
    """Return the details of a gRPC error as one short line, without the trace that gRPC appends."""
    return make_printable_line((details or "").split(GRPC_TRACE_START)[0].strip())


# ---------------------------------------------------------------------- amounts

NOT_APPLICABLE = "n/a"


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number with ``digits`` decimals; ``n/a`` for None."""
    if value is None:
        return NOT_APPLICABLE
    return f"{value:.{digits}f}" if math.isfinite(value) else "not finite"


def format_signed(value: float | None) -> str:
    """Format a number with a plus or minus sign; zero after rounding has no sign."""
    if value is None:
        return NOT_APPLICABLE
    text = format_number(abs(value))
    return text if text == format_number(0.0) else f"{'−' if value < 0 else '+'}{text}"


def format_interval(ends: tuple[float, float] | None) -> str:
    """Format an interval, such as ``"0.812–0.871"``; ``"n/a"`` for None."""
    return NOT_APPLICABLE if ends is None else "–".join(map(format_number, ends))


def format_count(value: int | None) -> str:
    """Format a count with commas between thousands."""
    return NOT_APPLICABLE if value is None else f"{value:,}"


def format_bytes(byte_count: int | None) -> str:
    """Format a number of bytes in decimal units: ``"1.5 MB"``."""
    if byte_count is None:
        return NOT_APPLICABLE
    value = float(byte_count)
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value = value / 1000
        power = power + 1
    return f"{value:.0f} {units[power]}" if value >= 100 or not power else f"{value:.1f} {units[power]}"


def format_duration(seconds: float | None) -> str:
    """Format seconds as ``"4.2 s"``, ``"3 min 05 s"`` or ``"2 h 07 min"``."""
    if seconds is None:
        return NOT_APPLICABLE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count_with_noun(amount: int, noun: str, plural: str | None = None) -> str:
    """Format an amount with its noun: ``"1 site"``, ``"3 sites"``, ``"2 classes"``."""
    return f"{amount:,} {noun if amount == 1 else plural or noun + 's'}"


def join_as_english_list(words: Sequence[str]) -> str:
    """Join words as an English list: ``"a, b and c"``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def join_first_and_count(words: Sequence[str], limit: int = 3) -> str:
    """Join the first ``limit`` words and the number of the others by commas: ``"a, b, c, 2 more"``."""
    rest = len(words) - limit
    return ", ".join([*words[:limit], f"{rest} more"] if rest > 0 else words)


def list_first_and_count_rest(words: Sequence[str], limit: int) -> str:
    """Join the first ``limit`` words and the number of the others as an English list: ``"a, b and 3 more"``."""
    rest = len(words) - limit
    return join_as_english_list([*words[:limit], f"{rest:,} more"] if rest > 0 else words)


def format_utc_now() -> str:
    """Return the present UTC time in ISO 8601, to the second, for files and messages."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def format_rounds(rounds: Iterable[int]) -> str:
    """Format round numbers as a list, with ranges for consecutive numbers: ``"3–5, 9"``."""
    return _join_ranges(rounds, "–")


def format_rounds_in_words(rounds: Collection[int]) -> str:
    """Format round numbers for a sentence: ``"round 3"``, ``"rounds 3 to 5, 9"``."""
    return f"{'round' if len(rounds) == 1 else 'rounds'} {_join_ranges(rounds, ' to ')}"


def _join_ranges(numbers: Iterable[int], between: str) -> str:
    """Join numbers with commas; consecutive numbers become a range, with the text ``between`` its ends."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}{between}{each[-1]}" for each in ranges)


def quote_for_shell(word: object) -> str:
    """Return a path or a name as one word of a shell command, in quotes if necessary."""
    return shlex.quote(str(word))
