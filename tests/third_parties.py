"""The package of ``tests/third_party`` as pip installs it: its module and its metadata on the path."""

import importlib
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from common import plugins

SOURCE = Path(__file__).parent / "third_party"


def install(folder: Path, patched: pytest.MonkeyPatch) -> Path:
    """Install it for this process and for those that it starts; return the module's file."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    text = (SOURCE / "stairs.py").read_text()
    return install_module(folder, patched, "stairs", text, project["entry-points"], project["version"])


def install_module(
    folder: Path,
    patched: pytest.MonkeyPatch,
    name: str,
    text: str,
    points: Mapping[str, Mapping[str, str]],
    version: str = "1.0",
) -> Path:
    """Install a package of one module.

    Args:
        points: Entry points by group, each by name.
    """
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{one} = {at}\n" for one, at in named.items()) for group, named in points.items()
    ]
    (facts / "entry_points.txt").write_text("\n".join(groups))
    module = folder / f"{name}.py"
    module.write_text(text)
    patched.syspath_prepend(str(folder))
    patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])))
    patched.delitem(sys.modules, name, raising=False)
    patched.setattr(plugins, "_at_load", {})
    importlib.invalidate_caches()
    return module


def stairs() -> ModuleType:
    """The installed module."""
    return importlib.import_module("stairs")
