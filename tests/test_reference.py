"""The blocks of the docs that ``make reference`` writes say what the code says."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.system.docstrings import read_attribute_texts
from polyclinic.server.deployment.supervisor import RunExitCode
from polyclinic.server.runs.reader import RunSummary
from supply.reference import BLOCKS, describe_exit_codes, describe_policy_keys, fill_blocks, list_blocks

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_are_those_that_the_code_makes(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert fill_blocks(text) == text, "run: make reference"


def test_every_block_stands_on_one_page() -> None:
    names = [name for page in PAGES for name in list_blocks((DOCS / page).read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(BLOCKS)


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
    assert "| `maximum_rounds` | 10,000 | Rounds of a run. |" in keys
    assert "| `smallest_count` | 10 |" in keys
    assert "| `delta` | 1e-05 |" in keys
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
