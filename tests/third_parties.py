"""The package of ``tests/third_party`` as pip installs it: its module and its metadata on the path."""

import importlib
import os
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from common import plugins

SOURCE = Path(__file__).parent / "third_party"


def install(folder: Path, patched: pytest.MonkeyPatch) -> Path:
    """Install it for this process and for those that it starts; return the module's file."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    facts = folder / f"{project['name']}-{project['version']}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    points = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in named.items()) for group, named in groups]
    (facts / "entry_points.txt").write_text("\n".join(points))
    module = shutil.copy(SOURCE / "stairs.py", folder)
    patched.syspath_prepend(str(folder))
    patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])))
    patched.delitem(sys.modules, "stairs", raising=False)
    patched.setattr(plugins, "_at_load", {})
    importlib.invalidate_caches()
    return Path(module)


def stairs() -> ModuleType:
    """The installed module."""
    return importlib.import_module("stairs")
