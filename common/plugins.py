"""Parts that a site or a coordinator installed itself as a Python package, found by name.

A package names them as entry points: a network in the group ``polyclinic.models``, a loss in ``polyclinic.losses``, a
data set in ``polyclinic.datasets``, a metric in ``polyclinic.metrics``, a method in ``polyclinic.methods``, a transform
of training images in ``polyclinic.transforms``, an optimiser in ``polyclinic.optimizers``, a schedule of the learning
rate in ``polyclinic.schedules``. Code never travels: a plan holds the name, the package, its version and the hash of
its files, and a site runs what it has itself, if that is the same.
"""

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from common.errors import BadInput, Fault, did_you_mean, quoted
from common.system.fingerprint import fingerprint
from common.system.toml import Section

MODELS, LOSSES = "polyclinic.models", "polyclinic.losses"
DATASETS, METRICS = "polyclinic.datasets", "polyclinic.metrics"
METHODS = "polyclinic.methods"
TRANSFORMS, OPTIMIZERS, SCHEDULES = "polyclinic.transforms", "polyclinic.optimizers", "polyclinic.schedules"
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
"""Of the name of an entry point, and of others' networks."""
MOST_METRICS = 20
"""Of plug-ins, in one run."""
PLUGIN = "plugin:"
"""Before the name of an entry point, wherever an experiment may name a plug-in or something of ours."""
PluginName = Annotated[str, Field(pattern=f"^{PLUGIN}{NAME_PATTERN}$")]


def _or_plugin(value: Any, ours: ValidatorFunctionWrapHandler) -> Any:
    """Whether there is such a plug-in is checked where it is named in a plan."""
    named = isinstance(value, str) and re.fullmatch(PLUGIN + NAME_PATTERN, value)
    return value if named else ours(value)


OrPlugin = WrapValidator(_or_plugin)
"""Beside a choice of ours; what is neither is told our choices."""


class PluginStamp(Section):
    """Which code a name stands for.

    Attributes:
        group: Of the entry point.
        name: Of the entry point.
        package: That brings it.
        version: Of the package.
        sha256: Over what the entry point names, and the names and contents of all files of its top module.
    """

    group: str
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
    if is_offered(name):
        problem = "was given to polyclinic.simulate in another process."
        raise BadInput([Fault(f"plugin:{name}", problem, "Give it again, or make it a package: docs/experiments.md.")])
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


def offered(group: str, part: Any) -> str:
    """Have this process find a part without a package, under the name that is returned; hospitals never do.

    The name is that of the part with the hash of its code and of the values that it holds, so that the same part has
    the same name in another process and a changed one another. Other processes, such as Ray's workers, do not know it.
    """
    plain = re.sub("[^A-Za-z0-9_]", "", getattr(part, "__name__", type(part).__name__)) or "part"
    name = f"own-{plain[:60]}-{fingerprint(part)[:12]}"
    _offered[group, name] = part
    return name


def is_offered(name: str) -> bool:
    """Whether a name can only be one of :func:`offered`."""
    return re.fullmatch("own-[A-Za-z0-9_]+-[0-9a-f]{12}", name.removeprefix(PLUGIN)) is not None


def loaded(group: str, name: str) -> Any:
    """Import the entry point of this name.

    Raises:
        BadInput: If it is not installed, or cannot be imported.
    """
    if (group, name) in _offered:
        return _offered[group, name]
    point = found(group, name)
    try:
        _at_load.setdefault((group, name), stamp_of(group, name))
        return point.load()
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # somebody else's code: it may raise anything
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise BadInput([Fault(f"plugin:{name}", problem, "Its package has to be repaired.")]) from error


def stamp_of(group: str, name: str) -> PluginStamp:
    """What this machine has under a name, or what this process has imported of it; nothing is imported for it.

    Raises:
        BadInput: If it is not installed.
    """
    if (group, name) in _offered:
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        return PluginStamp(group=group, name=name, package="this program", version="0", sha256=sha256)
    if (group, name) in _at_load:  # files that changed since are not what runs
        return _at_load[group, name]
    point = found(group, name)
    assert point.dist is not None, "found among installed packages"
    sha256 = _sha256(point.value, point.module.partition(".")[0])
    if not sha256:
        problem = f"the files of {point.module} cannot be read: it lies in an archive, or is not there."
        raise BadInput([Fault(f"plugin:{name}", problem, "Install its package with pip.")])
    return PluginStamp(group=group, name=name, package=point.dist.name, version=point.dist.version, sha256=sha256)


_at_load: dict[tuple[str, str], PluginStamp] = {}
"""What this process has imported."""
_offered: dict[tuple[str, str], Any] = {}
"""What this process offers itself."""


def _sha256(value: str, module: str) -> str:
    """Over what an entry point names and the files of its top-level module; empty where there are none to read."""
    files = sorted(_files(importlib.util.find_spec(module)))
    digest = hashlib.sha256(value.encode())
    for name, path in files:
        digest.update(f"{len(name)}:{name}".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest() if files else ""


def _files(spec: Any) -> Iterator[tuple[str, Path]]:
    """Every file beside the code, compiled and data files too; Python's own caches of them are left out."""
    if spec is None or not spec.submodule_search_locations:
        path = Path(spec.origin) if spec and spec.origin else Path()
        if path.is_file():
            yield path.name, path
        return
    for number, place in enumerate(spec.submodule_search_locations):
        for folder, _, names in os.walk(place, followlinks=True):
            for name in names:
                path = Path(folder, name)
                if path.parent.name != "__pycache__" and path.is_file():
                    yield f"{number}/{path.relative_to(place).as_posix()}", path
