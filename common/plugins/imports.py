"""Compares what Python imports of a plug-in with the files that were hashed.

Python runs a module from its cache of byte code, which only claims to be of its source. So the byte code that Python
would run is compared with the compiled source before a plug-in is imported. Afterwards each of its modules must have
come from a hashed file.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

from common.plugins.files import PluginFiles

_NOT_OF_THE_SOURCE = {"co_filename", "co_lines", "co_positions", "co_branches", "co_lnotab", "co_firsttraceable"}
"""The path at which the cache was written, and what Python works out of the other parts."""


def forged_caches(files: PluginFiles) -> list[str]:
    """Return the paths of sources of which Python would run other byte code: that of a cache in ``__pycache__``."""
    return [path for path in files.digests if path.endswith(".py") and _runs_other_code(path)]


def _runs_other_code(path: str) -> bool:
    loader = SourceFileLoader("module", path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the source; its import shows them
        try:
            source = loader.source_to_code(Path(path).read_bytes(), path)
        except (SyntaxError, ValueError):  # a template, say: Python can import it only from a cache
            source = None
        try:
            code = loader.get_code("module")
        except (SyntaxError, ValueError):  # neither source nor cache can be imported
            return False
        except (EOFError, TypeError, ImportError):  # the cache holds no code
            return True
    return code is None or source is None or _parts(code) != _parts(source)


def _parts(value: object) -> object:
    """Return what makes up code, to be compared: two constants that are NaN are not equal to themselves."""
    if isinstance(value, CodeType):
        names = [name for name in dir(value) if name.startswith("co_") and name not in _NOT_OF_THE_SOURCE]
        return [(name, _parts(getattr(value, name))) for name in names]
    if isinstance(value, tuple):
        return [_parts(part) for part in value]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return value if isinstance(value, bytes | str) else (type(value).__name__, repr(value))


def unhashed_modules(files: PluginFiles) -> list[str]:
    """Return the plug-in's modules in this process that did not come from a hashed file."""
    return sorted(name for name, path in _imported() if files.holds(name, path) and path not in files.digests)


def is_hashed(module: str, files: PluginFiles) -> bool:
    """Return whether a module in this process came from a hashed file."""
    return files.digests.keys() & {path for name, path in _imported() if name == module} != set()


def _imported() -> Iterator[tuple[str, str]]:
    """The modules of this process that have a file, each with its real path."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__dict__", {}).get("__spec__")
        if isinstance(spec, ModuleSpec) and spec.has_location and spec.origin is not None:
            yield name, os.path.realpath(spec.origin)
