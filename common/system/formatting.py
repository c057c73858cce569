"""Amounts as people read them."""

import math
from collections.abc import Iterable, Sequence

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
