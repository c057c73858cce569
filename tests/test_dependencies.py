"""The packages of pyproject.toml: each is used, and says what it is for (docs/dependencies.md prints that)."""

import tomllib
from pathlib import Path

from supply.reference import (
    IMPORT_NAMES,
    IMPORTED_BY_OTHERS,
    describe_base_packages,
    describe_extras,
    find_imported_modules,
    find_package_names,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = find_package_names(PROJECT["dependencies"])


def rows_of(table: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_the_table_lists_every_package_of_the_base_in_the_order_of_the_project() -> None:
    rows = rows_of(describe_base_packages())
    assert [row[0] for row in rows] == BASE
    assert all(len(row) == 3 and all(row) for row in rows)
    at_a_hospital = {row[0]: row[2] for row in rows}
    assert at_a_hospital["torch"] == at_a_hospital["pydicom"] == at_a_hospital["click"] == "yes"
    assert at_a_hospital["matplotlib"] == at_a_hospital["tensorboardX"] == "no"


def test_the_table_lists_every_extra_with_its_packages() -> None:
    listed = {row[0].strip("`"): row[2].split(", ") for row in rows_of(describe_extras())}
    extras = PROJECT["optional-dependencies"]
    assert listed == {extra: find_package_names(requirements) for extra, requirements in extras.items()}


def test_no_package_of_the_base_is_without_use() -> None:
    imported = find_imported_modules("client", "common", "data", "strategies", "server", "studies", "polyclinic")
    names = [name for name in BASE if name not in IMPORTED_BY_OTHERS]
    assert [name for name in names if IMPORT_NAMES.get(name, name) not in imported] == []
