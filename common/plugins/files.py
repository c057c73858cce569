"""List and hash the files of a plug-in's distribution package, to compare the code that is installed on two machines.

The files are those in the distribution's ``RECORD``, and all others in the same top-level folders. For an editable
installation they are the files from which Python would import the top-level modules. In a namespace package that
several distributions share, files in another distribution's ``RECORD`` do not count.

Some files differ between two installations of the same wheel, and are excluded: files that the installer writes
(:data:`INSTALLER_FILES`, scripts of entry points), and byte code caches of modules with a source file. A cache without
a source file counts as any other file. The first line of other scripts is excluded, and so are the folder names in
``.pth`` files; the modules in these folders count instead.

Python writes byte code by itself, so it is not hashed. To make sure that Python runs the hashed source,
:func:`has_foreign_byte_code` compares each cache that Python would load with the source.

The hash does not protect against a person who can write to a machine's Python packages.
"""

import csv
import hashlib
import inspect
import os
import pkgutil
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SOURCE_SUFFIXES, SourceFileLoader
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INSTALLER_FILES = {"INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "RECORD.p7s", "direct_url.json", "uv_cache.json"}
"""Files in ``.dist-info`` in which an installer records the installation."""
OUTSIDE_PREFIX = "../"
"""Prefix of the name of a file outside the folder of modules, such as ``../share/acme/atlas.txt``."""
SCRIPT_FOLDERS = (f"{OUTSIDE_PREFIX}bin/", f"{OUTSIDE_PREFIX}Scripts/")
_CODE_ATTRIBUTES = (
    *("co_name", "co_qualname", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_stacksize"),
    *("co_code", "co_exceptiontable", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
)
"""Attributes of a code object that determine its behaviour, except its constants, which may contain code objects."""
_BYTE_CODE_CACHE = re.compile(r"((?:.*/)?)__pycache__/([^/.]+)\.(?:cpython|pypy)[\w-]*(?:\.opt-[^/.]+)?\.pyc(?:\.\d+)?")
"""Pattern of the names of byte code caches, also of one that is being written."""


@dataclass(frozen=True)
class PluginFiles:
    """The files of a plug-in with their hashes, at the time of reading.

    Attributes:
        names: Sorted pairs of a file's path, relative to the folder of installed packages, and its content's SHA-256.
        foreign: Name -> path of each source file for which Python would load byte code that another source compiles to.
    """

    names: tuple[tuple[str, str], ...]
    foreign: Mapping[str, Path] = field(default_factory=dict)

    def compute_sha256(self, target: str) -> str:
        """Return the hash of all files together with the entry point's target (``module:object``)."""
        digest = hashlib.sha256(target.encode())
        for name, sha256 in self.names:
            digest.update(f"{len(name)}:{name}".encode() + bytes.fromhex(sha256))
        return digest.hexdigest()

    def list_foreign_places(self) -> list[Path]:
        """Return the top-level folders and modules of the package with byte code that does not match its source."""
        tops = {path.parents[name.count("/") - 1] if "/" in name else path for name, path in self.foreign.items()}
        return sorted(tops)

    def contains_module(self, module: str) -> bool:
        """Return True if a file belongs to the top-level package of ``module``."""
        root = module.partition(".")[0]
        return any(_make_module_name(name).partition(".")[0] == root for name, _ in self.names)


def read_plugin_files(point: EntryPoint) -> PluginFiles:
    """Read and hash the files of a plug-in.

    The files are those of the distribution that declares the entry point. If the entry point's module belongs to
    another distribution, its files are included, too.

    Args:
        point: The entry point.

    Raises:
        OSError: If a file cannot be read.
    """
    assert point.dist is not None, "an installed package has a distribution"
    owners = [point.dist]
    # The module belongs to another distribution.
    if point.module not in map(_make_module_name, _parse_distribution_record(point.dist)):
        own_identity = _identify_distribution(point.dist)
        others = [other for other in distributions() if _identify_distribution(other) != own_identity]
        owners += [
            other for other in others if point.module in map(_make_module_name, _parse_distribution_record(other))
        ]
    listed = [file for owner in owners for file in _list_recorded_files(owner)]
    listed = _leave_out_byte_code(listed, {name for name, _ in listed})
    recorded = {(name, os.path.realpath(path)): path for name, path in listed}
    modules = {module for name, _ in recorded if (module := _make_module_name(name))}
    tops = {name.partition("/")[0] for name, _ in recorded if "/" in name} - {OUTSIDE_PREFIX.rstrip("/"), "__pycache__"}
    roots = {module.partition(".")[0] for module in modules} | {point.module.partition(".")[0]}
    roots |= {name for owner in owners for name in _read_top_level_modules(owner) if name.isidentifier()}
    roots_elsewhere = roots - {module.partition(".")[0] for module in modules}
    other_files = [
        file for owner in owners for top in tops for file in _walk_folder_files(Path(str(owner.locate_file(top))), top)
    ]
    for root in sorted(roots | {name for name in tops if name.isidentifier()}):
        try:
            spec = find_spec(root)
        except ValueError:  # a module without a spec has been put into sys.modules
            spec = None
        if spec is None:
            continue
        other_files += [
            file for place in spec.submodule_search_locations or () for file in _walk_folder_files(Path(place), root)
        ]
        if not spec.submodule_search_locations and (path := Path(spec.origin or "")).is_file():
            other_files.append((path.name, path))
        if root in roots_elsewhere:
            modules.add(root if spec.origin else point.module)
    other_files = _leave_out_byte_code(other_files, {name for name, _ in (*listed, *other_files)})
    more = {
        (name, os.path.realpath(path)): path
        for name, path in other_files
        if not _is_installation_specific(name, owners)
    }
    parts_of = {key: _split_module_path(key[0]) for key in more.keys() - recorded.keys()}
    shared_keys = {
        key
        for key, parts in parts_of.items()
        if not any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))
    }
    foreign_paths = (
        _list_other_distribution_files({name.partition("/")[0] for name, _ in shared_keys}, owners)
        if shared_keys
        else set()
    )
    files = recorded | {
        key: path for key, path in more.items() if key not in shared_keys or key[1] not in foreign_paths
    }
    hashes = []
    foreign = dict[str, Path]()
    for (name, _), path in files.items():
        # Below, parts of the content that depend on the folder of an installation are removed.
        content = path.read_bytes()
        if (
            path.suffix in SOURCE_SUFFIXES
            and not name.startswith(OUTSIDE_PREFIX)
            and has_foreign_byte_code(path, content)
        ):
            foreign[name] = path
        if name.startswith(SCRIPT_FOLDERS) and content.startswith(b"#!"):
            content = content.partition(b"\n")[2]
        elif _is_pth_file(name):
            content = b"\n".join(_parse_pth_lines(content)[0])
            if not content:
                continue
        hashes.append((name, hashlib.sha256(content).hexdigest()))
    return PluginFiles(tuple(sorted(hashes)), foreign)


# ----------------------------------------------------------------------------------------------- what is installed


def _parse_distribution_record(owner: Distribution) -> list[str]:
    """Return the file names in a distribution's RECORD; empty if it has no RECORD."""
    rows = csv.reader((owner.read_text("RECORD") or "").splitlines())
    return [os.path.normpath(row[0]).replace(os.sep, "/") for row in rows if row]


def _list_recorded_files(owner: Distribution) -> Iterator[tuple[str, Path]]:
    for listed in _parse_distribution_record(owner):
        path = Path(str(owner.locate_file(listed)))
        name = listed
        # The number of "../" depends on the folder of Python's packages.
        if listed.startswith((OUTSIDE_PREFIX, "/")):
            name = OUTSIDE_PREFIX + re.sub(r"^((\.\./)+|/)", "", listed)
        if not _is_installation_specific(name, [owner]) and path.is_file():
            yield name, path


def _is_installation_specific(name: str, owners: Iterable[Distribution]) -> bool:
    """Return True for a file, except byte code, that can differ between two installations of the same wheel.

    Args:
        name: Path of the file, relative to the folder of installed packages.
        owners: The distributions of the plug-in.
    """
    folder, _, last = name.rpartition("/")
    if folder.endswith(".dist-info") and "/" not in folder:
        return last in INSTALLER_FILES
    if name.startswith(SCRIPT_FOLDERS):
        points = (point for owner in owners for point in owner.entry_points)
        return any(point.name == last and point.group in ("console_scripts", "gui_scripts") for point in points)
    return False


def _leave_out_byte_code(files: Iterable[tuple[str, Path]], names: Collection[str]) -> list[tuple[str, Path]]:
    """Return the files without byte code caches whose source is one of ``names``, because Python writes these caches.

    A cache without a source counts, because code of the package may read it as data.
    """
    return [(name, path) for name, path in files if not _has_source(name, names)]


def _has_source(name: str, names: Collection[str]) -> bool:
    cache = _BYTE_CODE_CACHE.fullmatch(name)
    return cache is not None and any(f"{cache[1]}{cache[2]}{suffix}" in names for suffix in SOURCE_SUFFIXES)


def _list_other_distribution_files(tops: Collection[str], owners: Iterable[Distribution]) -> set[str]:
    """Return the real paths of the files in the RECORDs of all distributions except the plug-in's.

    Args:
        tops: Top-level folders of installed packages; files outside them are left out.
        owners: The distributions of the plug-in.
    """
    own_identities = set(map(_identify_distribution, owners))
    listed = (
        (other, name)
        for other in distributions()
        if _identify_distribution(other) not in own_identities
        for name in _parse_distribution_record(other)
    )
    return {os.path.realpath(str(other.locate_file(name))) for other, name in listed if name.partition("/")[0] in tops}


def _identify_distribution(owner: Distribution) -> tuple[str, str]:
    return owner.name, os.path.realpath(str(owner.locate_file("")))


def _read_top_level_modules(owner: Distribution) -> Iterator[str]:
    """Yield the top-level modules of a distribution, from ``top_level.txt`` and from folders in ``.pth`` files."""
    yield from (owner.read_text("top_level.txt") or "").split()
    for name in filter(_is_pth_file, _parse_distribution_record(owner)):
        path = Path(str(owner.locate_file(name)))
        folders = _parse_pth_lines(path.read_bytes())[1] if path.is_file() else []
        folders_of_modules = [os.path.join(path.parent, os.fsdecode(folder.strip())) for folder in folders]
        yield from (module.name for module in pkgutil.iter_modules(folders_of_modules))


def _parse_pth_lines(content: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of a ``.pth`` file that Python executes at startup, and the lines that are folders."""
    # Python 3.13 splits lines like str.splitlines, earlier versions at \n; a line that either executes counts.
    text = content.decode("utf-8-sig", "surrogateescape")
    lines = [line for line in text.splitlines() if line.strip()]
    run = [line for line in lines if line.startswith(("import ", "import\t"))]
    folders = [line for line in lines if line not in run and not line.startswith("#")]
    return [os.fsencode(line) for line in run], [os.fsencode(line) for line in folders]


def _is_pth_file(name: str) -> bool:
    return "/" not in name and name.endswith(".pth")


# ----------------------------------------------------------------------------------------------- what Python loads


class _ReadingLoader(SourceFileLoader):
    """Python's loader for source files, which here never writes byte code."""

    def set_data(self, path: str, data: "ReadableBuffer", *, _mode: int = 0o666) -> None:
        """Do nothing instead of writing byte code."""


def has_foreign_byte_code(path: Path, source: bytes) -> bool:
    """Return True if Python would load byte code for a module that differs from what its source compiles to.

    Python loads a cache, with any code in it, if the cache is marked unchecked or has the source's time and size. An
    installer may install such a cache with the package.

    Args:
        path: The module's source file.
        source: Content of the file.
    """
    if not os.path.exists(cache_from_source(path)):
        return False
    loader = _ReadingLoader(path.stem, str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the source are for its author
        try:
            loaded = loader.get_code(path.stem)
        except SyntaxError:  # the cache is not loaded, and the module cannot be
            return False
        except (ImportError, EOFError, ValueError, TypeError):  # the cache is damaged
            return True
        try:
            compiled = loader.source_to_code(source, str(path))
        except (SyntaxError, ValueError):
            return True
    return loaded is None or not _is_same_code(loaded, compiled)


def _is_same_code(left: CodeType, right: CodeType) -> bool:
    """Return True if two code objects behave the same; file names and line numbers may differ."""
    if any(getattr(left, name) != getattr(right, name) for name in _CODE_ATTRIBUTES):
        return False
    return _is_same_constant(left.co_consts, right.co_consts)


def _is_same_constant(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, CodeType) and isinstance(right, CodeType):
        return _is_same_code(left, right)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_is_same_constant, left, right))
    if isinstance(left, frozenset) and isinstance(right, frozenset):
        return left == right and sorted(map(repr, left)) == sorted(map(repr, right))
    if isinstance(left, float | complex):
        return repr(left) == repr(right)  # distinguishes 0.0 from -0.0
    return left == right


# ----------------------------------------------------------------------------------------------- what Python finds


def _walk_folder_files(folder: Path, name: str, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file below a folder; links to a parent folder are not followed.

    Args:
        folder: The folder.
        name: Name of the folder, which becomes the prefix of the names.
        above: Real paths of the parent folders.
    """
    real = os.path.realpath(folder)
    if real in above or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _walk_folder_files(path, f"{name}/{path.name}", above | {real})
        elif path.is_file():
            yield f"{name}/{path.name}", path


def _split_module_path(name: str) -> list[str]:
    """Return the parts of the module name of a file, such as ``["acme"]`` for ``acme/__init__.py``."""
    *folders, last = name.split("/")
    stem = inspect.getmodulename(last) or last
    return folders if stem == "__init__" else [*folders, stem]


def _make_module_name(name: str) -> str:
    """Return the dotted name of the module in a file; empty if the file is not a Python module."""
    parts = _split_module_path(name) if inspect.getmodulename(name) else []
    return ".".join(parts) if all(part.isidentifier() for part in parts) else ""
