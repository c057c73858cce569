"""``make reference``: write the blocks of the docs that follow from the code.

Their text comes from docstrings, schemas and defaults of the code and from the experiment files, so that a page cannot
differ from the program (``tests/test_reference.py``).
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.preview.data_dictionary import (
    COMMON_FIELD_MEANINGS,
    FIELD_MEANINGS,
    SENT_RECORD_CLASSES,
    STATISTIC_MEANINGS,
)
from polyclinic.client.site.policy import LEVEL_DEFAULTS, SitePolicy
from polyclinic.common.counts import COUNT_TABLES, TABLE_MENU
from polyclinic.common.system.docstrings import read_attribute_texts
from polyclinic.common.system.stopping import STOPPED_EXIT_CODE
from polyclinic.common.wire.codec import list_record_field_names
from polyclinic.data.images.syntaxes import DECODER_BY_SYNTAX, get_transfer_syntax_name
from polyclinic.server.deployment.supervisor import RunExitCode
from polyclinic.server.reporting.live.files import EVENT_SENTENCES
from polyclinic.server.runs.schema import RunSummary
from supply.blocks import format_table, list_blocks, write_block
from supply.claims import list_blocks_of_claims
from supply.experiment_keys import list_blocks_of_keys
from supply.key_tables import format_key_table, list_key_rows
from supply.method_table import make_method_table
from supply.paper_settings import list_blocks_of_settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOSPITAL_FOLDERS = ("client", "common", "data", "strategies")
IMPORT_NAMES = {"scikit-learn": "sklearn", "pillow": "PIL", "grpcio": "grpc", "protobuf": "google"}
"""Package -> name by which it is imported, where the names differ."""
IMPORTED_BY_OTHERS = ("click", "pylibjpeg", "pylibjpeg-openjpeg")
"""Packages that no code of ours imports, but typer or pydicom does."""
COMMAND = "make reference"


def describe_sent_records() -> str:
    """Return a section for each record that a hospital sends, with a line for each field."""
    sections = list[str]()
    for record in SENT_RECORD_CLASSES:
        meanings = FIELD_MEANINGS[record.__name__]
        names = [name for name in list_record_field_names(record) if name not in COMMON_FIELD_MEANINGS]
        lines = [f"- `{name}`: {meanings[name]}" for name in names]
        lines = lines or ["Nothing else: the site has noted a refusal or a question."]
        sections.append(f"### {record.__name__}\n\n" + "\n".join(lines) + "\n")
    statistics = [f"- `{name}`: {meaning}" for name, meaning in STATISTIC_MEANINGS.items()]
    sections.append("### Statistics\n\n" + "\n".join(statistics) + "\n")
    return "\n".join(sections)


def format_policy_value(key: str, value: Any) -> str:
    """Return a value of the policy as ``site.toml`` has it, and in words where TOML has none."""
    if value is None:
        return "all" if key in ("methods", "statistics") else "none"
    if key == "counts" and value == COUNT_TABLES:
        return "all"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(f"`{name}`" for name in value) or "none"
    if isinstance(value, Mapping):
        return "none"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"{value:,}" if value >= 1 else str(value)


def describe_policy_keys() -> str:
    """Return the table of the keys of ``[policy]``, with their defaults at level ``trusted``."""
    policy = SitePolicy().model_dump()
    rows = [replace(row, default=format_policy_value(row.name, policy[row.name])) for row in list_key_rows(SitePolicy)]
    return format_key_table(rows)


def describe_levels() -> str:
    """Return the table of the keys that a level sets, with their values at each level."""
    policies = {level: SitePolicy(level=level).model_dump() for level in LEVEL_DEFAULTS}
    keys = [key for key in SitePolicy.model_fields if any(key in changed for changed in LEVEL_DEFAULTS.values())]
    rows = [(f"`{key}`", *(format_policy_value(key, policy[key]) for policy in policies.values())) for key in keys]
    return format_table(("key", *(f"`{level}`" for level in LEVEL_DEFAULTS)), rows)


def describe_exit_codes() -> str:
    """Return the table of the exit codes of all programs."""
    rows = [
        ("0", "all", "Done. `start`, `status --web`: stopped on request.", ""),
        (
            "1",
            "all",
            "It cannot go on, and says why. `verify`: something was changed, not signed, or withheld.",
            "the reason",
        ),
        ("2", "all", "A fault in a file, an option or the data, each one listed.", "you"),
        (str(STOPPED_EXIT_CODE), "all", "Stopped on request; nothing half done is left.", "the line that it prints"),
    ]
    rows += _list_exit_codes("`flwr-server run`", set(RunExitCode) - {RunExitCode.DONE, RunExitCode.BAD_INPUT})
    rows += _list_exit_codes("`flwr-client`", set(ClientExitCode) - {ClientExitCode.BAD_INPUT})
    return format_table(("code", "program", "cause", "who or what helps"), rows)


def _list_exit_codes(program: str, codes: Iterable[IntEnum]) -> list[tuple[str, str, str, str]]:
    """Return a row for each exit code of a program."""
    rows = []
    for code in sorted(codes):
        cause, _, remedy = read_attribute_texts(type(code))[code.name].removesuffix(".").partition("; ")
        is_of_check = isinstance(code, ClientExitCode) and code >= ClientExitCode.HOST_UNKNOWN
        rows.append((str(int(code)), "`flwr-client check`" if is_of_check else program, f"{cause}.", remedy))
    return rows


def describe_summary() -> str:
    """Return the table of the entries of ``summary.json``."""
    texts = read_attribute_texts(RunSummary)
    return format_table(("entry", "content"), [(f"`{name}`", texts[name]) for name in RunSummary.model_fields])


def describe_events() -> str:
    """Return the table of the events of ``events.jsonl``, each with its sentence."""
    return format_table(("event", "sentence"), [(f"`{name}`", text) for name, text in EVENT_SENTENCES.items()])


def describe_count_tables() -> str:
    """Return the table of what a coordinator may count."""
    return format_table(("table", "counts"), [(f"`{name}`", text) for name, text in TABLE_MENU.items()])


def describe_transfer_syntaxes() -> str:
    """Return the table of the transfer syntaxes of DICOM that are read."""
    syntaxes = sorted(DECODER_BY_SYNTAX, key=lambda syntax: [int(part) for part in syntax.split(".")])
    rows = [(f"`{syntax}`", get_transfer_syntax_name(syntax)) for syntax in syntaxes]
    return format_table(("transfer syntax", "name"), rows)


def find_package_names(requirements: Iterable[str]) -> list[str]:
    """Return the names of the packages in requirements such as ``numpy>=2.0``."""
    return [re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements]


def find_imported_modules(*folders: str) -> set[str]:
    """Return the top-level modules that the Python files of some folders import."""
    modules = set[str]()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
    return modules


def describe_base_packages() -> str:
    """Return the table of the base's packages: the comment of each in ``pyproject.toml``, and if hospitals need it."""
    text, project = _read_project()
    imported = find_imported_modules(*HOSPITAL_FOLDERS) | set(IMPORTED_BY_OTHERS)
    rows = []
    for requirement in project["dependencies"]:
        (name,) = find_package_names([requirement])
        purpose = re.search(rf'^    "{re.escape(requirement)}",  # (.+)$', text, re.MULTILINE)
        assert purpose, f"pyproject.toml does not say what {name} is for"
        rows.append((name, purpose[1], "yes" if IMPORT_NAMES.get(name, name) in imported else "no"))
    return format_table(("package", "for", "at a hospital"), rows)


def describe_extras() -> str:
    """Return the table of the extras: the comment of each in ``pyproject.toml``, and its packages."""
    text, project = _read_project()
    rows = []
    for extra, requirements in project["optional-dependencies"].items():
        purpose = re.search(rf"^{extra} = \[.*\]  # (.+)$", text, re.MULTILINE)
        assert purpose, f"pyproject.toml does not say what the extra {extra} is for"
        rows.append((f"`{extra}`", purpose[1], ", ".join(find_package_names(requirements))))
    return format_table(("extra", "for (licence)", "packages"), rows)


def _read_project() -> tuple[str, dict[str, Any]]:
    """Return the text of ``pyproject.toml`` and its table ``[project]``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return text, tomllib.loads(text)["project"]


BLOCKS: Mapping[str, Callable[[], str]] = {
    "records": describe_sent_records,
    "policy keys": describe_policy_keys,
    "policy levels": describe_levels,
    "exit codes": describe_exit_codes,
    "summary.json": describe_summary,
    "events": describe_events,
    "count tables": describe_count_tables,
    "transfer syntaxes": describe_transfer_syntaxes,
    "base packages": describe_base_packages,
    "extras": describe_extras,
    "what goes with what": make_method_table,
}
"""Block -> function that makes its text, of the blocks that stand alone."""


def make_blocks() -> dict[str, str]:
    """Return block -> text of all blocks that follow from the code."""
    alone = {name: make() for name, make in BLOCKS.items()}
    return alone | list_blocks_of_claims() | list_blocks_of_keys() | list_blocks_of_settings()


def main() -> None:
    """Write the blocks of all pages."""
    texts = make_blocks()
    for page in sorted(DOCS.glob("*.md")):
        for name, command in list_blocks(page.read_text(encoding="utf-8")):
            if command == COMMAND:
                write_block(page, name, texts[name])


if __name__ == "__main__":
    main()
