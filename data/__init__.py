"""Load image data sets, split them by patient, partition them over simulated sites; knows no federation.

Public here are the types for a data set plug-in: a package with a function that loads images, registered as an entry
point of the group ``polyclinic.datasets``. The function has two parameters, the folder of the experiment (or of a
hospital's ``site.toml``) and ``data.options``. It returns :class:`LabelledImages`, or a dictionary of these by part
(``train``, ``test`` and, if there is one, ``validation``).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyclinic.data.sources.plugin import DatasetPlugin, LabelledImages

__all__ = ["DatasetPlugin", "LabelledImages"]


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name only at its first use, because the import loads numpy and pandas."""
    if name not in __all__:
        raise AttributeError(f"module 'polyclinic.data' has no attribute {name!r}")
    return getattr(importlib.import_module("polyclinic.data.sources.plugin"), name)
