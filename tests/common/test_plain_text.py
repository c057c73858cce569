"""Words of somebody else become harmless, stay readable, and have an end."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.common.system.plain_text import (
    MAX_LINES,
    MAX_REASON_CHARACTERS,
    escape_for_html_page,
    escape_for_terminal,
    escape_unplain_characters,
    format_as_json_text,
    is_plain_text,
    make_printable_line,
    make_printable_lines,
)
from tests.words import HOSTILE_TEXTS, raw_in

any_text = st.text(st.characters(), max_size=200)
"""Surrogates and controls too."""


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_no_hostile_text_is_a_name_but_for_its_length(text: str) -> None:
    assert not is_plain_text(text) or len(text) > 200


NAMES = (
    "Pleural Effusion", "Stauungszeichen (beidseits), > 2 cm", "胸水", "плеврит", "épanchement\u00a0pleural",
    "ẹ̀jẹ̀", "0",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_language_are_plain(name: str) -> None:
    assert is_plain_text(name)
    assert make_printable_line(name) == name


def test_what_cannot_be_seen_is_written_out_and_what_is_too_long_is_cut_by_a_number_that_is_shown() -> None:
    assert make_printable_line("\x1b[2Ja\nb\u202e\U000e0041") == r"\x1b[2Ja\nb\u202e\U000e0041"
    cut = "x" * 468 + " ... (13,999,532 characters cut)"
    assert (make_printable_line("x" * 14_000_000), len(cut)) == (cut, MAX_REASON_CHARACTERS)


@given(any_text, st.integers(40, 600))
def test_shown_text_is_plain_bounded_and_shown_once_for_all(text: str, most: int) -> None:
    shown = make_printable_line(text, most)
    assert raw_in(shown, allowed="") == set()
    assert len(shown) <= most
    assert make_printable_line(shown, most) == shown


@given(st.lists(any_text, max_size=60).map("\n".join))
def test_lines_are_plain_few_and_none_but_the_first_begins_where_ours_do(text: str) -> None:
    shown = make_printable_lines(text)
    lines = shown.split("\n")
    assert raw_in(shown) == set()
    assert len(lines) <= MAX_LINES
    assert all(line.startswith("    ") for line in lines[1:])
    assert make_printable_lines(shown) == shown


@given(any_text)
@settings(max_examples=50)
def test_at_a_terminal_and_in_a_page_only_line_feeds_stay_and_in_json_no_raw_character(text: str) -> None:
    assert raw_in(escape_for_terminal(text)) == set()
    assert escape_for_html_page(text) == escape_for_terminal(text)
    line = format_as_json_text({"reason": text})
    assert json.loads(line) == {"reason": text}
    assert raw_in(line, allowed="") == set()


@given(any_text.filter(is_plain_text))
def test_plain_text_stays_as_it_is_everywhere(text: str) -> None:
    assert escape_unplain_characters(text) == escape_for_terminal(text) == make_printable_line(text) == text
    assert text in format_as_json_text({"a": text}) or '"' in text or "\\" in text


class Counted(str):
    """Text that notes how many characters are read of it at most."""

    most_read = 0

    def __iter__(self):
        raise AssertionError("all of it is looked at")

    def __getitem__(self, key: object) -> str:
        part = super().__getitem__(key)
        self.most_read = max(self.most_read, len(part))
        return part


@pytest.mark.parametrize("letter", ["x", "\x1b", "\n"])
def test_an_endless_text_costs_no_time(letter: str) -> None:
    """Only as much of it is looked at as is shown: a walk over 14 million characters would take seconds."""
    counted = Counted(letter * 14_000_000)
    assert len(make_printable_line(counted)) <= MAX_REASON_CHARACTERS
    assert len(make_printable_lines(counted)) <= MAX_LINES * (MAX_REASON_CHARACTERS + 4)
    assert counted.most_read <= 2 * MAX_LINES * MAX_REASON_CHARACTERS


NOT_OF_OTHERS = [
    *("common/system/plain_text.py", "common/system/toml.py", "server/export/exported_model.py"),
    "strategies/engine/state.py",
]
"""The function itself; a person's own settings; what goes inside a model's file, or a checkpoint's."""


def test_the_programs_write_no_json_and_open_no_console_in_another_way() -> None:
    """``json.dumps(..., ensure_ascii=False)`` and rich's own console let control characters through."""
    root = Path(__file__).parents[2]
    own = [
        path
        for package in ("common", "data", "strategies", "server", "client")
        for path in (root / package).rglob("*.py")
    ]
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in own}
    raw_json = [name for name, text in texts.items() if "ensure_ascii=False" in text]
    assert sorted(raw_json) == NOT_OF_OTHERS
    assert [name for name, text in texts.items() if " Console(" in text.replace("Console(quiet=True)", "")] == []
