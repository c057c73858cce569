"""The blocks of the docs that programs write: those of ``make reference`` say what the code says."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.system.docstrings import read_attribute_texts
from polyclinic.server.deployment.supervisor import RunExitCode
from polyclinic.server.runs.schema import RunSummary
from supply.blocks import Block, list_blocks, replace_block
from supply.reference import COMMAND, describe_exit_codes, describe_policy_keys, make_blocks

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
EVIDENCE = "PYTHONPATH=. python benchmarks/evidence.py --write"
FIGURES = [
    Block("benchmarks", "make bench"),
    Block("backdoors", "PYTHONPATH=. python benchmarks/backdoors.py"),
    Block("methods by rank", EVIDENCE),
    Block("methods without rank", EVIDENCE),
    Block("equal time", EVIDENCE),
    Block("ours at equal steps", EVIDENCE),
    Block("ours in equal time", EVIDENCE),
    Block("passing12", EVIDENCE),
    Block("centres12", EVIDENCE),
    Block("added12", EVIDENCE),
    Block("frozen60", EVIDENCE),
]
"""Blocks with figures; test_benchmarks.py and test_benchmark_tables_page.py compare them with their sources."""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Block -> text, of the blocks that follow from the code."""
    return make_blocks()


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if COMMAND in text])
def test_the_blocks_of_a_page_are_those_that_the_code_makes(page: str, texts: dict[str, str]) -> None:
    text = PAGES[page]
    stale = [
        name
        for name, command in list_blocks(text)
        if command == COMMAND and replace_block(text, name, texts[name]) != text
    ]
    assert stale == [], "run: make reference"


def test_every_block_stands_on_one_page_and_every_mark_is_of_a_block(texts: dict[str, str]) -> None:
    blocks = [block for text in PAGES.values() for block in list_blocks(text)]
    assert [block for block in blocks if block.command != COMMAND] == FIGURES
    assert sorted(block.name for block in blocks if block.command == COMMAND) == sorted(texts)
    assert sum(text.count("<!-- ") for text in PAGES.values()) == 2 * len(blocks)


@pytest.mark.parametrize(
    ("documented", "names"),
    [
        (SitePolicy, SitePolicy.model_fields),
        (RunSummary, RunSummary.model_fields),
        (ClientExitCode, ClientExitCode.__members__),
        (RunExitCode, RunExitCode.__members__),
    ],
)
def test_a_docstring_explains_every_key_or_code_and_no_other_in_their_order(
    documented: type, names: Iterable[str]
) -> None:
    assert list(read_attribute_texts(documented)) == list(names)


def test_tables_show_defaults_and_codes_of_the_code() -> None:
    keys = describe_policy_keys()
    assert "| `maximum_rounds` | whole number from 1 | 10,000 | Rounds of a run. |" in keys
    assert "| `smallest_count` | whole number from 0 | 10 |" in keys
    assert "| `delta` | number above 0 and below 1 | 1e-05 |" in keys
    codes = describe_exit_codes()
    assert "| 17 | `flwr-client` |" in codes
    assert "| 41 | `flwr-client check` | Image files are empty. | the person who exported them |" in codes
    assert "| 70 | `flwr-server run` |" in codes


def test_an_attribute_over_several_lines_is_one_text_and_several_may_share_one() -> None:
    class Explained:
        """A class.

        Attributes:
            first: One
                line.
            low, high: Both ends.
        """

    texts = {"first": "One line.", "low": "Both ends.", "high": "Both ends."}
    assert read_attribute_texts(Explained) == texts

    class WithoutDocstring(Explained):
        pass

    assert read_attribute_texts(WithoutDocstring) == {}
