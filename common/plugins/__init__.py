"""Plug-ins: networks, losses, methods and others from Python packages that a site or the coordinator has installed.

A package declares entry points: a network in the group ``polyclinic.models``, a loss in ``polyclinic.losses``, a
data set in ``polyclinic.datasets``, a metric in ``polyclinic.metrics``, a method in ``polyclinic.methods``, a transform
of training images in ``polyclinic.transforms``, an optimiser in ``polyclinic.optimizers``, a schedule of the learning
rate in ``polyclinic.schedules``. The coordinator never sends code: a plan contains the plug-in's name, package, version
and the hash of the package's files. A site runs the package that it installed, if the hash of its files is the same.
"""

import contextlib
import hashlib
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from polyclinic.common.errors import BadInput, Fault, quote_names, suggest_nearest_name
from polyclinic.common.plugins.files import read_plugin_files
from polyclinic.common.system.hashing import hash_python_object
from polyclinic.common.system.toml import TomlSection

MODELS = "polyclinic.models"
LOSSES = "polyclinic.losses"
DATASETS = "polyclinic.datasets"
METRICS = "polyclinic.metrics"
METHODS = "polyclinic.methods"
TRANSFORMS = "polyclinic.transforms"
OPTIMIZERS = "polyclinic.optimizers"
SCHEDULES = "polyclinic.schedules"
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
"""Regular expression for names of entry points and of external networks."""
MAX_PLUGIN_METRICS = 20
"""Maximum number of plug-in metrics in one run."""
TABLE_COLUMNS = frozenset(
    {
        *("class", "owners", "auroc", "average_precision", "positives", "negatives", "low", "high", "error", "note"),
        *("experiment", "seed", "all", "shared", "unique", "model_sha256"),
        *("method", "seeds", "sd", "balanced_accuracy", "difference", "p", "verdict"),
    }
)
"""Columns of the tables of classes, runs and methods in Python; a metric of a plug-in cannot have these names."""
PLUGIN_PREFIX = "plugin:"
"""Prefix with which an experiment names a plug-in in place of a built-in part."""
PluginName = Annotated[str, Field(pattern=f"^{PLUGIN_PREFIX}{NAME_PATTERN}$")]


def accept_names_matching(pattern: str) -> WrapValidator:
    """Return a pydantic validator that accepts strings matching a pattern besides the field's ``Literal`` values."""

    def accept_matching_name(value: Any, validate_literal: ValidatorFunctionWrapHandler) -> Any:
        return value if isinstance(value, str) and re.fullmatch(pattern, value) else validate_literal(value)

    return WrapValidator(accept_matching_name)


OrPlugin = accept_names_matching(PLUGIN_PREFIX + NAME_PATTERN)
"""Validator that accepts ``plugin:NAME`` besides the field's values; a plan checks that the plug-in is installed."""


class PluginIdentity(TomlSection):
    """Identifies the exact code of a plug-in; plans contain it.

    Attributes:
        group: Group of the entry point.
        name: Name of the entry point.
        package: Distribution package that declares the entry point.
        version: Version of the package.
        sha256: Hash of the entry point's target and of the names and contents of all files of the package.
    """

    group: str
    name: str
    package: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} of {self.package} {self.version} (files {self.sha256[:12]})"


def find_plugin_entry_point(group: str, name: str) -> EntryPoint:
    """Return the installed entry point of this group and name.

    Raises:
        BadInput: If no package, or more than one package, declares it.
    """
    if is_local_plugin_name(name):
        problem = "was given to polyclinic.simulate in another process."
        remedy = "Give it again, or make it a package: docs/experiments.md."
        if group == MODELS:
            remedy = (
                "Give the network again as you gave it there: pc.load(FOLDER, model=...) or "
                "pc.predict(FOLDER, images, model=...). Or make it a package: docs/experiments.md."
            )
        raise BadInput([Fault(f"plugin:{name}", problem, remedy)])
    installed = entry_points(group=group)
    same = [point for point in installed if point.name == name]
    if len(same) == 1:
        return same[0]
    if same:
        packages = quote_names(sorted(point.dist.name for point in same if point.dist))
        raise BadInput([Fault(f"plugin:{name}", f"several packages bring it: {packages}.", "Remove all but one.")])
    names = sorted({point.name for point in installed})
    there = f"There are {quote_names(names)}." if names else "No package with plug-ins is installed."
    problem = f'no installed package has "{name}" among its entry points {group}. {there}'
    raise BadInput([Fault(f"plugin:{name}", problem, suggest_nearest_name(name, names))])


def register_local_plugin(group: str, part: Any) -> str:
    """Register a Python object as a plug-in without a package, for simulations only; return the plug-in's name.

    The name contains a hash of the object's code and values, so the same object has the same name in every process. The
    registration is limited to this process; other processes, such as Ray's workers, must register it again.

    Args:
        group: Entry-point group of the plug-in, such as :data:`MODELS`.
        part: The object to register.
    """
    name = make_local_plugin_name(part)
    _registered_parts[group, name] = part
    return name


def make_local_plugin_name(part: Any) -> str:
    """Return the name that :func:`register_local_plugin` gives to an object."""
    plain = re.sub("[^A-Za-z0-9_]", "", getattr(part, "__name__", type(part).__name__)) or "part"
    return f"own-{plain[:60]}-{hash_python_object(part)[:12]}"


@contextlib.contextmanager
def register_local_plugin_as(group: str, name: str, part: Any) -> Iterator[None]:
    """Register an object under the name that another process gave to its plug-in, inside the ``with`` block.

    Args:
        group: Entry-point group of the plug-in, such as :data:`MODELS`.
        name: The name that :func:`register_local_plugin` returned in the other process.
        part: The object.
    """
    before = _registered_parts.get((group, name))
    _registered_parts[group, name] = part
    try:
        yield
    finally:
        if before is None:
            del _registered_parts[group, name]
        else:
            _registered_parts[group, name] = before


def is_local_plugin_name(name: str) -> bool:
    """Return True if a plug-in's name has the form that :func:`register_local_plugin` gives."""
    return re.fullmatch("own-[A-Za-z0-9_]+-[0-9a-f]{12}", name.removeprefix(PLUGIN_PREFIX)) is not None


def format_plugin_user_name(argument: str, name: str) -> str:
    """Return a plug-in's name as the user wrote it: ``plugin:NAME``, or ``argument=OBJECT`` of ``polyclinic.simulate``.

    Args:
        argument: Argument of ``polyclinic.simulate`` for this kind of plug-in, such as ``model``.
        name: The plug-in's name in the experiment.
    """
    name = name.removeprefix(PLUGIN_PREFIX)
    return f"{argument}={name.split('-')[1]}" if is_local_plugin_name(name) else PLUGIN_PREFIX + name


def shorten_metric_names(names: Iterable[str]) -> dict[str, str]:
    """Return metric of a plug-in -> short name for tables: the name of the entry point or of the user's function.

    A name that would be short for two metrics, or equal to one of :data:`TABLE_COLUMNS`, stays unchanged.

    Args:
        names: Names of metrics, ``plugin:NAME``.
    """
    plain = {name: name.removeprefix(PLUGIN_PREFIX) for name in names}
    short = {name: text.split("-")[1] if is_local_plugin_name(name) else text for name, text in plain.items()}
    counts = Counter(short.values())
    return {name: text if counts[text] == 1 and text not in TABLE_COLUMNS else name for name, text in short.items()}


def is_simulate_argument(where: str) -> bool:
    """Return True if a fault's ``where`` is an argument of ``polyclinic.simulate`` (``model=Net``), not a TOML key."""
    return re.match("[a-z]+=", where) is not None


def load_plugin_entry_point(group: str, name: str) -> Any:
    """Import a plug-in, and check that the package's files have not changed since :func:`identify_plugin` hashed them.

    Raises:
        BadInput: If the plug-in is not installed or cannot be imported, or its files have changed.
    """
    if (group, name) in _registered_parts:
        return _registered_parts[group, name]
    if (group, name) in _loaded_plugins:  # searching the entry points would take milliseconds
        return _loaded_plugins[group, name].part
    point = find_plugin_entry_point(group, name)
    identity = _identify_plugin_package(point)
    if _latest_identities.get((group, name), identity) != identity:
        problem = "its files were changed after their hash was taken."
        raise BadInput([Fault(f"plugin:{name}", problem, "Start the program anew.")])
    try:
        part = point.load()
    except (Exception, SystemExit) as error:  # code of a plug-in may raise anything
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise BadInput([Fault(f"plugin:{name}", problem, "Its package has to be repaired.")]) from error
    _loaded_plugins[group, name] = _LoadedPlugin(identity, part)
    return part


def identify_plugin(group: str, name: str) -> PluginIdentity:
    """Return package, version and hash of a plug-in without importing it.

    If this process has already imported the plug-in, the result describes the imported code.

    Raises:
        BadInput: If the plug-in is not installed, or its files cannot be read.
    """
    if (group, name) in _registered_parts:
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        return PluginIdentity(group=group, name=name, package="this program", version="0", sha256=sha256)
    if (group, name) in _loaded_plugins:  # the imported code runs, even if its files have changed since
        return _loaded_plugins[group, name].identity
    identity = _identify_plugin_package(find_plugin_entry_point(group, name))
    _latest_identities[group, name] = identity
    return identity


def _identify_plugin_package(point: EntryPoint) -> PluginIdentity:
    """Return package, version and hash of an entry point, from the present files of the package.

    Raises:
        BadInput: If the files cannot be read.
    """
    assert point.dist is not None, "found among installed packages"
    try:
        files = read_plugin_files(point)
    except OSError as error:
        problem = f"a file of its package cannot be read: {error}."
        raise BadInput([Fault(f"plugin:{point.name}", problem, "Install its package anew with pip.")]) from None
    if places := files.list_foreign_places():
        problem = (
            f"{point.dist.name} {point.dist.version} has byte code that is not compiled from its source, for "
            f"{quote_names(sorted(files.foreign), limit=3)}. Python would run other code than that of its hash."
        )
        command = " ".join(shlex.quote(str(part)) for part in (sys.executable, "-m", "compileall", "-q", "-f", *places))
        raise BadInput([Fault(f"plugin:{point.name}", problem, f"Compile its source anew: {command}")])
    if not files.contains_module(point.module):
        problem = f"the files of {point.module} cannot be read: it lies in an archive, or is not there."
        raise BadInput([Fault(f"plugin:{point.name}", problem, "Install its package with pip.")])
    return PluginIdentity(
        group=point.group,
        name=point.name,
        package=point.dist.name,
        version=point.dist.version,
        sha256=files.compute_sha256(point.value),
    )


class _LoadedPlugin(NamedTuple):
    identity: PluginIdentity
    part: Any


_loaded_plugins: dict[tuple[str, str], _LoadedPlugin] = {}
"""(group, name) -> plug-in that this process has imported."""
_registered_parts: dict[tuple[str, str], Any] = {}
"""(group, name) -> object that this process registered as a plug-in."""
_latest_identities: dict[tuple[str, str], PluginIdentity] = {}
"""(group, name) -> last computed identity of a plug-in that is not imported yet."""
