"""The package of ``tests/third_party`` as pip installs it: its module and its metadata on the path."""

import importlib
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polyclinic.common import plugins

SOURCE = Path(__file__).parent / "third_party"


def install(folder: Path, patched: pytest.MonkeyPatch) -> Path:
    """Install it for this process and for those that it starts; return the module's file."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    text = (SOURCE / "stairs.py").read_text()
    return install_module(folder, patched, "stairs", text, project["entry-points"], project["version"])


def install_files(
    folder: Path,
    name: str,
    files: Mapping[str, str | bytes],
    points: Mapping[str, Mapping[str, str]],
    version: str = "1.0",
) -> None:
    """Write the files of a distribution, its metadata and its RECORD, as pip does.

    Args:
        files: Contents by path below ``folder``.
        points: Entry points by group, each by name.
    """
    info = f"{name}-{version}.dist-info"
    groups = [
        f"[{group}]\n" + "".join(f"{key} = {at}\n" for key, at in named.items()) for group, named in points.items()
    ]
    contents: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/entry_points.txt": "\n".join(groups),
        f"{info}/INSTALLER": "pip\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())


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
    install_files(folder, name, {f"{name}.py": text}, points, version)
    module = folder / f"{name}.py"
    patched.syspath_prepend(str(folder))
    patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])))
    patched.delitem(sys.modules, name, raising=False)
    forget(patched)
    importlib.invalidate_caches()
    return module


def forget(patched: pytest.MonkeyPatch) -> None:
    """Have this process know nothing of plug-ins, as a new one."""
    for name in ("_loaded_plugins", "_latest_identities"):
        patched.setattr(plugins, name, {})


def put_in(patched: pytest.MonkeyPatch, name: str, part: Any) -> None:
    """Have the installed module hold another part under this name, as if its author had written that."""
    patched.setattr(stairs(), name, part)
    forget(patched)


def stairs() -> ModuleType:
    """The installed module."""
    plugins.load_plugin_entry_point(plugins.MODELS, "stairs")
    return sys.modules["stairs"]
