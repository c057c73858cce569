"""Blocks of pages that programs write: between two marks, each once."""

import pytest

from supply.blocks import Block, list_blocks, replace_block

MARKS = ("<!-- begin: keys of run, written by make reference -->\n", "<!-- end: keys of run -->\n")
OTHER = "<!-- begin: keys of run.x, written by make bench -->\n\nkept\n\n<!-- end: keys of run.x -->\n"


def test_a_block_gets_its_text_and_the_rest_of_the_page_stays() -> None:
    page = f"before\n{MARKS[0]}old\n{MARKS[1]}{OTHER}after\n"
    new = f"before\n{MARKS[0]}\n| \\1 | new |\n\n{MARKS[1]}{OTHER}after\n"
    assert replace_block(page, "keys of run", "| \\1 | new |\n") == new
    assert list_blocks(new) == [Block("keys of run", "make reference"), Block("keys of run.x", "make bench")]


@pytest.mark.parametrize(
    "page",
    [
        OTHER,
        MARKS[0],
        MARKS[1],
        MARKS[1] + MARKS[0],
        MARKS[0] + MARKS[0],
        MARKS[0] + MARKS[1] + MARKS[0] + MARKS[1],
        MARKS[0] + MARKS[1].replace("run", "runs"),
    ],
)
def test_a_page_without_both_marks_of_a_block_once_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match='"begin: keys of run, written by COMMAND" and "end: keys of run" once'):
        replace_block(page, "keys of run", "new")
