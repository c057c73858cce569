"""Hide installed packages, as if pip had not installed them, or as if they did not fit the others."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _WithoutPackages:
    """A finder that finds what another one finds, but none of the hidden packages."""

    def __init__(self, finder: Any, hidden: tuple[str, ...]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self.hidden:
            return None
        spec: ModuleSpec | None = self.finder.find_spec(fullname, path, target)
        return spec

    def __getattr__(self, name: str) -> Any:
        """Return what else the finder has, such as its search for metadata."""
        return getattr(self.finder, name)


class _FailingLoader(Loader):
    """Fails as torchvision does whose operators were built for another torch."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")


class _FailingFinder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _FailingLoader()) if fullname == self.package else None


def hide_packages(patched: pytest.MonkeyPatch, *packages: str) -> None:
    """Let this process find none of these packages."""
    _forget_packages(patched, packages)
    patched.setattr(sys, "meta_path", [_WithoutPackages(finder, packages) for finder in sys.meta_path])


def break_package(patched: pytest.MonkeyPatch, package: str) -> None:
    """Let the import of a package fail as torchvision's does beside another build of torch."""
    _forget_packages(patched, (package,))
    patched.setattr(sys, "meta_path", [_FailingFinder(package), *sys.meta_path])


def _forget_packages(patched: pytest.MonkeyPatch, packages: tuple[str, ...]) -> None:
    """Remove the packages from the imported modules, until the end of the test."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            patched.delitem(sys.modules, name)
