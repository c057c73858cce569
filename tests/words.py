"""Hostile texts and numbers, and how to tell that none of them reached a person raw."""

import unicodedata

FORGED = "\n12:00:00  round 9 of 9: 9 of 9 sites, loss 0.000"
"""A line feed, and what looks like a line of our own behind it."""
HOSTILE_TEXTS = {
    "clear screen": "\x1b[2J\x1b[31mred",
    "title": "\x1b]0;PWNED\x07",
    "hyperlink": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "C1": "\x9b31mred\x85",
    "forged line": FORGED,
    "carriage return": "honest\rforged",
    "backspace": "abc\b\b\bxyz",
    "NUL": "a\x00b",
    "DEL": "a\x7fb",
    "right to left": "gnp.\u202eexe",
    "isolate": "\u2066hidden\u2069",
    "zero width": "no\u200brth\ufeff",
    "joiner": "no\u200d\u2060rth",
    "separators": "one\u2028two\u2029three",
    "tag characters": "a\U000e0041\U000e0042",
    "private use": "a\ue000b\U000f0000",
    "variation selector": "a\ufe0fb\U000e0100",
    "filler": "a\u3164b\u115f",
    "noncharacter": "a\ufffe\U0010ffff",
    "interlinear": "a\ufff9b",
    "long": "x" * 2_000_000,
    "long and hostile": "\x1b[2J" * 50_000,
}
FORBIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of what cannot be seen and acts on a terminal or on the order of letters."""


def raw_in(text: str, allowed: str = "\n") -> set[str]:
    """The characters in a text that must not be there; the test's own rule, not the program's."""
    return {letter for letter in set(text) if unicodedata.category(letter) in FORBIDDEN and letter not in allowed}
