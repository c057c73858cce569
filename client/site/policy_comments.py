"""The keys of ``[policy]`` as comments of a new ``site.toml``, with the texts of :class:`SitePolicy`'s docstring."""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.system.docstrings import read_attribute_texts
from polyclinic.common.system.toml import to_toml_text

HEADINGS: Mapping[str, str] = {
    "approval": "Who decides",
    "test_each_round": "What may leave",
    "smallest_count": "Small counts",
    "epsilon": "Noise (differential privacy)",
    "masked_only": "Masks (secure aggregation)",
    "methods": "What runs here",
    "maximum_rounds": "What a run may cost this machine; a run beyond is declined",
    "keep_features": "What stays on this disk",
}
"""Key -> heading of it and of the keys after it in the class, in the order in which they stand in the file."""
EXAMPLES: Mapping[str, Any] = {
    "methods": ("surgical",),
    "statistics": (),
    "maximum_update_norm": 1.0,
    "counts": ("class", "sex"),
    "epsilon": 10.0,
    "ledger": "/srv/polyclinic-ledger",
}
"""Key -> value in its comment, because TOML cannot write the default, or the default says little."""
PEERS = '{ south = "ecdsa-sha2-nistp256 AAAA..." }'
INDENT = "#     "
_LINK = re.compile(r"\[([^]]+)\]\(([^)#]+)(?:#[^)]+)?\)")


def format_policy_comments() -> str:
    """Return a comment for each key of the policy but ``level``: the key with a value, and below it what it does."""
    texts = read_attribute_texts(SitePolicy)
    defaults = SitePolicy()
    groups = dict[str, list[str]]()
    for key in SitePolicy.model_fields:
        if key == "level":
            continue

        if key in HEADINGS:
            lines = groups[key] = [f"# ---- {HEADINGS[key]} ----"]
        value = PEERS if key == "peers" else to_toml_text(EXAMPLES.get(key, getattr(defaults, key)))
        text = _write_without_markdown(texts[key])
        lines.append(f"# {key} = {value}")
        lines += textwrap.wrap(text, 100, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join("".join(f"{line}\n" for line in groups[key]) for key in HEADINGS)


def _write_without_markdown(text: str) -> str:
    """Return a text with pages by name in place of links, TOML's true and false, and no marks of code."""
    named = _LINK.sub(r"\1 (docs/\2)", text).replace("`", "")
    return re.sub(r"\b(?:True|False)\b", lambda match: match[0].lower(), named)
