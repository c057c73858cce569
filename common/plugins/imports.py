"""Holds every import of a plug-in's file to the hash that was taken of it.

Python runs a module from a cache of byte code that only claims to be of its source. So the three loaders of the
standard library are told to read no cache of a plug-in's file, and to load no file of a plug-in that is new, or another
than it was when its hash was taken; at the load and in any later import, by name or by path. A finder of our own would
not see a file that a package loads by its path, and ``sys.pycache_prefix`` would cost each process the caches of all
packages: 5 s more for ``torch._dynamo`` alone.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from importlib.util import cache_from_source
from types import ModuleType
from typing import Any

from common.errors import BadInput, Fault
from common.plugins.files import PluginFiles

_files: dict[str, PluginFiles] = {}
"""Of the distributions that bring plug-ins, by name."""
_imported: dict[str, str] = {}
"""Real path -> SHA-256 of the content that was imported."""


def hold(package: str, files: PluginFiles) -> None:
    """Have each later import of a package's files compared with these."""
    _files[package] = files
    if not getattr(SourceFileLoader.get_data, "holds_plugins", False):
        for loader in (SourceFileLoader, SourcelessFileLoader):
            loader.get_data = _compared(loader.get_data)  # type: ignore[assignment, method-assign]
        own = _compared_module(ExtensionFileLoader.create_module)
        ExtensionFileLoader.create_module = own  # type: ignore[assignment, method-assign]


def is_held(package: str) -> bool:
    """Return whether a package's imports are compared with its files."""
    return package in _files


def unhashed(files: PluginFiles) -> list[str]:
    """The modules in this process that are a plug-in's, and of which no hashed content was imported."""
    specs = {name: getattr(module, "__dict__", {}).get("__spec__") for name, module in list(sys.modules.items())}
    return [name for name, spec in specs.items() if _is_unhashed(name, spec, files)]


def is_hashed(module: str) -> bool:
    """Return whether a module in this process was made of a file's hashed content."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and os.path.realpath(spec.origin or "") in _imported


def _is_unhashed(name: str, spec: object, files: PluginFiles) -> bool:
    if not isinstance(spec, ModuleSpec) or not spec.has_location or spec.origin is None:
        return False  # a namespace, or a module that a running one made up
    path = os.path.realpath(spec.origin)
    return files.holds(name, path) and _imported.get(path) != files.digests.get(path, "")


def _compared(read: Callable[[Any, str], bytes]) -> Callable[[Any, str], bytes]:
    def get_data(loader: Any, path: str) -> bytes:
        if path != loader.path and path == _cache_of(loader.path) and _holders(loader.name, loader.path):
            raise FileNotFoundError(path)  # there is no cache: compile the source
        content = read(loader, path)
        _compare(loader.name if path == loader.path else "", path, content)
        return content

    get_data.holds_plugins = True  # type: ignore[attr-defined]
    return get_data


def _compared_module(create: Callable[[Any, ModuleSpec], ModuleType]) -> Callable[[Any, ModuleSpec], ModuleType]:
    def create_module(loader: Any, spec: ModuleSpec) -> ModuleType:
        if _holders(loader.name, loader.path):
            with open(loader.path, "rb") as file:
                _compare(loader.name, loader.path, file.read())
        return create(loader, spec)

    return create_module


def _compare(module: str, path: str, content: bytes) -> None:
    """Raise :class:`BadInput` if a file is a plug-in's and its content is not that which was hashed."""
    if not (holders := _holders(module, path)):
        return
    real, sha256 = os.path.realpath(path), hashlib.sha256(content).hexdigest()
    if all(files.digests.get(real) != sha256 for files in holders):
        problem = "was changed, or is new, since the hash of its package was taken in this process."
        raise BadInput([Fault(str(path), problem, "Start the program anew.")])
    _imported[real] = sha256


def _holders(module: str, path: str) -> list[PluginFiles]:
    real = os.path.realpath(path)
    return [files for files in list(_files.values()) if files.holds(module, real)]


def _cache_of(path: str) -> str:
    try:
        return cache_from_source(path)
    except NotImplementedError:  # this Python writes none
        return ""
