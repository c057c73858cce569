"""The table of docs/dependencies.md is that of pyproject.toml, and true of the imports."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
EXTRAS, BASE = PAGE.partition("\n## Extras")[2].split("\n## The base")
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL", "grpcio": "grpc", "protobuf": "google"}
"""Import names that differ from the package's."""
NOT_IMPORTED = {"click", "pylibjpeg", "pylibjpeg-openjpeg"}
"""Packages that another one imports: typer, pydicom."""


def names_of(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=!~\[; ]", line)[0] for line in requirements]


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def imported_by(*folders: str) -> set[str]:
    modules = set[str]()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
    return modules


def test_the_page_lists_every_package_of_the_base_in_the_order_of_the_project() -> None:
    assert [row[0] for row in rows_of(BASE)] == names_of(PROJECT["dependencies"])
    assert all(len(row) == 4 and all(row) for row in rows_of(BASE))


def test_the_page_lists_every_extra_with_its_packages() -> None:
    listed = {row[0].strip("`"): re.sub(r" \([^)]*\)", "", row[2]).split(", ") for row in rows_of(EXTRAS)}
    extras = PROJECT["optional-dependencies"]
    assert listed == {extra: names_of(requirements) for extra, requirements in extras.items()}


def test_the_page_names_a_hospital_where_a_hospitals_code_imports_the_package_and_nowhere_else() -> None:
    imported = imported_by("client", "common", "data", "strategies")
    for name, _, who, _ in rows_of(BASE):
        if name not in NOT_IMPORTED:
            assert ("hospital" in who) is (MODULES.get(name, name) in imported), name


def test_no_package_of_the_base_is_without_use() -> None:
    imported = imported_by("client", "common", "data", "strategies", "server", "studies", "polyclinic")
    names = names_of(PROJECT["dependencies"])
    assert [name for name in names if name not in NOT_IMPORTED and MODULES.get(name, name) not in imported] == []
