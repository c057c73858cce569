"""The house rules that a machine can hold: arrows one way, our four names."""

import ast
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
