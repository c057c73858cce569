"""docs/what-leaves.md says what leaves: every field of every record, every statistic, every key of the policy."""

import re
from pathlib import Path

from client.gate.gate import ANSWERS
from client.preview.data_dictionary import MEANING, SENT, STATISTICS, fields_in_markdown
from client.site.policy import Policy
from client.site.site_file import make_site_folder
from common.wire.codec import field_names
from strategies.registry import describe_statistics

PAGE = Path(__file__).parents[2] / "docs" / "what-leaves.md"


def test_every_field_that_can_leave_is_explained_and_no_other() -> None:
    assert set(SENT) == set(ANSWERS.values())
    assert {name: set(fields) for name, fields in MEANING.items()} == {
        record.__name__: set(field_names(record)) for record in SENT
    }
    assert set(STATISTICS) == set(describe_statistics())


def test_the_page_says_the_same() -> None:
    assert fields_in_markdown() in PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_key_of_the_policy_and_a_new_site_toml_too(tmp_path: Path) -> None:
    policy = PAGE.read_text(encoding="utf-8").partition("## The policy")[2].partition("\n## ")[0]
    first_cells = "".join(re.findall(r"^\|([^|]+)\|", policy, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(Policy.model_fields)
    make_site_folder(tmp_path, "north")
    table = (tmp_path / "site.toml").read_text(encoding="utf-8").partition("\n[policy]\n")[2]
    table = table.partition("\n# Where this")[0]
    assert set(re.findall(r"^(?:# )?(\w+) = ", table, re.MULTILINE)) == set(Policy.model_fields)
