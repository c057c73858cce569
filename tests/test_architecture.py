"""The house rules that a machine can hold: arrows one way, our four names, one class a name, whole docstrings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "common": {"common"},
    "strategies": {"common", "strategies"},
    "server": {"common", "strategies", "server"},
    "client": {"common", "strategies", "client"},
}
FILES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Level and module of every import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way_and_imports_are_absolute(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    found = list(imports(path))
    ours = {module.split(".")[0] for _, module in found} & set(MAY_IMPORT)
    assert ours <= MAY_IMPORT[package]
    assert all(level == 0 for level, _ in found)


def test_no_other_installed_distribution_claims_our_package_names() -> None:
    owners = packages_distributions()
    for name in MAY_IMPORT:
        assert set(owners.get(name, ["polyclinic"])) == {"polyclinic"}


def test_no_two_modules_define_classes_of_one_name() -> None:
    places = defaultdict[str, set[str]](set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


FRAGMENT = re.compile(
    r"(Of|One of|The same|Those|Likewise|By|As|In|On|From|At|Nobody|Nothing|Whoever|Its|Also|And|Or) ?\b"
)
"""How docstrings begin whose subject stands elsewhere."""


def test_every_docstring_has_its_own_subject() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                said = ast.get_docstring(node) or ""
                if FRAGMENT.match(said):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {said.splitlines()[0]}")
    assert found == []
