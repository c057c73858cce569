"""The files of a plug-in: the code of its distribution, and the data that this code can read.

They are the files that the distribution's ``RECORD`` lists, and every file beside them: in the same top-level folders,
and where Python finds its top-level modules now, which is all there is of an editable installation. In a namespace that
several distributions share, the files that another one lists are that one's. Left out is what differs between two
installations of one wheel: what the installer writes (:data:`INSTALLERS`, the scripts of entry points), the first line
of other scripts, the folders that a ``.pth`` names (the modules in them count instead), and Python's caches of byte
code, from which nothing is taken.

The hash tells apart what two machines have installed. Anyone who may write into a machine's Python packages can run any
code there, with or without a plug-in: against that no hash helps.
"""

import csv
import hashlib
import inspect
import os
import pkgutil
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path

INSTALLERS = {"INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "RECORD.p7s", "direct_url.json", "uv_cache.json"}
"""Files in ``.dist-info`` that an installer writes about its own work."""
OUTSIDE = "../"
"""Prefix of the name of a file outside the folder of modules, such as ``../share/acme/atlas.txt``."""
SCRIPTS = (f"{OUTSIDE}bin/", f"{OUTSIDE}Scripts/")
_CACHE = re.compile(r"(^|.*/)__pycache__/[^/.]+\.(cpython|pypy)[\w-]*(\.opt-[^/.]+)?\.pyc(\.\d+)?")
"""The name of a cache of byte code, also of one that is being written."""


@dataclass(frozen=True)
class PluginFiles:
    """The files of a plug-in at one time.

    Attributes:
        names: Names below the folder that modules are in, sorted, each with the SHA-256 of the content that counts.
    """

    names: tuple[tuple[str, str], ...]

    def sha256(self, target: str) -> str:
        """Return the hash of all files and of the entry point's target in them."""
        digest = hashlib.sha256(target.encode())
        for name, sha256 in self.names:
            digest.update(f"{len(name)}:{name}".encode() + bytes.fromhex(sha256))
        return digest.hexdigest()

    def has_file_of(self, module: str) -> bool:
        """Return True if one of these files belongs to the same top-level module as ``module``."""
        root = module.partition(".")[0]
        return any(_module_name(name).partition(".")[0] == root for name, _ in self.names)


def read_plugin_files(point: EntryPoint) -> PluginFiles:
    """Read the files of the distribution of an entry point, and of the one that its module belongs to.

    Raises:
        OSError: If a file cannot be read.
    """
    assert point.dist is not None, "installed packages have one"
    owners = [point.dist]
    if point.module not in map(_module_name, _parse_record(point.dist)):  # another distribution brings the module
        mine = _identify_distribution(point.dist)
        strangers = [other for other in distributions() if _identify_distribution(other) != mine]
        owners += [other for other in strangers if point.module in map(_module_name, _parse_record(other))]
    recorded = {(name, os.path.realpath(path)): path for owner in owners for name, path in _list_recorded_files(owner)}
    modules = {module for name, _ in recorded if (module := _module_name(name))}
    tops = {name.partition("/")[0] for name, _ in recorded if "/" in name} - {OUTSIDE.rstrip("/")}
    roots = {module.partition(".")[0] for module in modules} | {point.module.partition(".")[0]}
    roots |= {name for owner in owners for name in _top_level_module_names(owner) if name.isidentifier()}
    elsewhere = roots - {module.partition(".")[0] for module in modules}
    beside = [file for owner in owners for top in tops for file in _walk_files(Path(str(owner.locate_file(top))), top)]
    for root in sorted(roots | {name for name in tops if name.isidentifier()}):
        try:
            spec = find_spec(root)
        except ValueError:  # a module without a spec has been put into sys.modules
            spec = None
        if spec is None:
            continue
        beside += [file for place in spec.submodule_search_locations or () for file in _walk_files(Path(place), root)]
        if not spec.submodule_search_locations and (path := Path(spec.origin or "")).is_file():
            beside.append((path.name, path))
        if root in elsewhere:
            modules.add(root if spec.origin else point.module)
    more = {(name, os.path.realpath(path)): path for name, path in beside if not _is_excluded_from_hash(name, owners)}
    parts_of = {key: _module_parts(key[0]) for key in more.keys() - recorded.keys()}
    unsure = {
        key
        for key, parts in parts_of.items()
        if not any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))
    }
    theirs = _listed_by_others({name.partition("/")[0] for name, _ in unsure}, owners) if unsure else set()
    files = recorded | {key: path for key, path in more.items() if key not in unsure or key[1] not in theirs}
    hashes = []
    for (name, _), path in files.items():
        content = path.read_bytes()  # of it counts what does not depend on the folder of an installation
        if name.startswith(SCRIPTS) and content.startswith(b"#!"):
            content = content.partition(b"\n")[2]
        elif _is_pth_file(name):
            content = b"\n".join(_parse_pth_lines(content)[0])
            if not content:
                continue
        hashes.append((name, hashlib.sha256(content).hexdigest()))
    return PluginFiles(tuple(sorted(hashes)))


# ----------------------------------------------------------------------------------------------- what is installed


def _parse_record(owner: Distribution) -> list[str]:
    """Return the files that a distribution's RECORD lists, as it names them; empty where it has none."""
    rows = csv.reader((owner.read_text("RECORD") or "").splitlines())
    return [os.path.normpath(row[0]).replace(os.sep, "/") for row in rows if row]


def _list_recorded_files(owner: Distribution) -> Iterator[tuple[str, Path]]:
    for listed in _parse_record(owner):
        path, name = Path(str(owner.locate_file(listed))), listed
        if listed.startswith((OUTSIDE, "/")):  # how far up depends on where Python keeps its packages
            name = OUTSIDE + re.sub(r"^((\.\./)+|/)", "", listed)
        if not _is_excluded_from_hash(name, [owner]) and path.is_file():
            yield name, path


def _is_excluded_from_hash(name: str, owners: Iterable[Distribution]) -> bool:
    """Return True for a file that differs between two installations of one wheel and runs nothing."""
    folder, _, last = name.rpartition("/")
    if folder.endswith(".dist-info") and "/" not in folder:
        return last in INSTALLERS
    if name.startswith(SCRIPTS):
        points = (point for owner in owners for point in owner.entry_points)
        return any(point.name == last and point.group in ("console_scripts", "gui_scripts") for point in points)
    return _CACHE.fullmatch(name) is not None


def _listed_by_others(tops: Collection[str], owners: Iterable[Distribution]) -> set[str]:
    """Return real paths of the files under these top-level names that other distributions list."""
    mine = set(map(_identify_distribution, owners))
    listed = (
        (other, name)
        for other in distributions()
        if _identify_distribution(other) not in mine
        for name in _parse_record(other)
    )
    return {os.path.realpath(str(other.locate_file(name))) for other, name in listed if name.partition("/")[0] in tops}


def _identify_distribution(owner: Distribution) -> tuple[str, str]:
    return owner.name, os.path.realpath(str(owner.locate_file("")))


def _top_level_module_names(owner: Distribution) -> Iterator[str]:
    """Return top-level modules that a distribution brings from other folders, by top_level.txt and .pth files."""
    yield from (owner.read_text("top_level.txt") or "").split()
    for name in filter(_is_pth_file, _parse_record(owner)):
        path = Path(str(owner.locate_file(name)))
        folders = _parse_pth_lines(path.read_bytes())[1] if path.is_file() else []
        places = [os.path.join(path.parent, os.fsdecode(folder.strip())) for folder in folders]
        yield from (module.name for module in pkgutil.iter_modules(places))


def _parse_pth_lines(content: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of a .pth that Python runs at its start, and those that name a folder."""
    # Python 3.13 ends a line where str.splitlines does, earlier ones at \n; a line that either runs counts.
    text = content.decode("utf-8-sig", "surrogateescape")
    lines = [line for line in text.splitlines() if line.strip()]
    run = [line for line in lines if line.startswith(("import ", "import\t"))]
    folders = [line for line in lines if line not in run and not line.startswith("#")]
    return [os.fsencode(line) for line in run], [os.fsencode(line) for line in folders]


def _is_pth_file(name: str) -> bool:
    return "/" not in name and name.endswith(".pth")


# ----------------------------------------------------------------------------------------------- what Python finds


def _walk_files(folder: Path, name: str, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Yield every file below a folder; a link to a folder that it lies in is not followed."""
    real = os.path.realpath(folder)
    if real in above or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _walk_files(path, f"{name}/{path.name}", above | {real})
        elif path.is_file():
            yield f"{name}/{path.name}", path


def _module_parts(name: str) -> list[str]:
    """Return a file's name as the parts of a module's name: ``acme/__init__.py`` is acme."""
    *folders, last = name.split("/")
    stem = inspect.getmodulename(last) or last
    return folders if stem == "__init__" else [*folders, stem]


def _module_name(name: str) -> str:
    """Return the module that a file is, by its dotted name; empty for a file that is none."""
    parts = _module_parts(name) if inspect.getmodulename(name) else []
    return ".".join(parts) if all(part.isidentifier() for part in parts) else ""
