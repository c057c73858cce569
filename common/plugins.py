"""Parts that a site or a coordinator installed itself as a Python package, found by name.

A package names them as entry points, for a network in the group ``polyclinic.models``. Code never travels: a plan holds
the name, the package, its version and the hash of its files, and a site runs what it has itself, if that is the same.
"""

import hashlib
import importlib.util
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from common.errors import BadInput, Fault, did_you_mean, quoted
from common.system.toml import Section

MODELS = "polyclinic.models"


class PluginStamp(Section):
    """Which code a name stands for.

    Attributes:
        name: Of the entry point.
        package: That brings it.
        version: Of the package.
        sha256: Over the names and contents of all Python files of the entry point's top module.
    """

    name: str
    package: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} of {self.package} {self.version} (files {self.sha256[:12]})"


def found(group: str, name: str) -> EntryPoint:
    """The installed entry point of this name.

    Raises:
        BadInput: If there is none, or several packages bring one.
    """
    installed = entry_points(group=group)
    same = [point for point in installed if point.name == name]
    if len(same) == 1:
        return same[0]
    if same:
        packages = quoted(sorted(point.dist.name for point in same if point.dist))
        raise BadInput([Fault(f"plugin:{name}", f"several packages bring it: {packages}.", "Remove all but one.")])
    names = sorted({point.name for point in installed})
    there = f"There are {quoted(names)}." if names else "No package with plug-ins is installed."
    problem = f'no installed package has "{name}" among its entry points {group}. {there}'
    raise BadInput([Fault(f"plugin:{name}", problem, did_you_mean(name, names))])


def loaded(group: str, name: str) -> Any:
    """Import the entry point of this name.

    Raises:
        BadInput: If it is not installed, or cannot be imported.
    """
    point = found(group, name)
    try:
        return point.load()
    except Exception as error:  # somebody else's code: it may raise anything
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise BadInput([Fault(f"plugin:{name}", problem, "Its package has to be repaired.")]) from error


def stamp_of(group: str, name: str) -> PluginStamp:
    """What this machine has under a name; nothing of it is imported.

    Raises:
        BadInput: If it is not installed.
    """
    point = found(group, name)
    assert point.dist is not None, "found among installed packages"
    return PluginStamp(
        name=name, package=point.dist.name, version=point.dist.version, sha256=_sha256(point.module.partition(".")[0])
    )


def _sha256(module: str) -> str:
    """Over the Python files of a top-level module."""
    spec = importlib.util.find_spec(module)
    digest = hashlib.sha256()
    for name, path in sorted(_files(spec)) if spec else ():
        digest.update(f"{len(name)}:{name}".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _files(spec: Any) -> Iterator[tuple[str, Path]]:
    if not spec.submodule_search_locations:
        yield Path(spec.origin).name, Path(spec.origin)
        return
    for place in spec.submodule_search_locations:
        for path in Path(place).rglob("*.py"):
            yield path.relative_to(place).as_posix(), path
