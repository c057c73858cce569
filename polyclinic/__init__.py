"""The public package of Polyclinic. All other packages are internal, and other programs should not import them.

``import polyclinic as pc``: :func:`simulate`, :func:`load`, :func:`predict`, :func:`compare`. :mod:`polyclinic.flower`
has the methods as strategies for any Flower app. :mod:`polyclinic.data` has the types for a data set of your own.
:mod:`polyclinic.testing` has checks for plug-ins.
"""

import importlib
from typing import TYPE_CHECKING, Any

from polyclinic.common import __version__

if TYPE_CHECKING:
    from polyclinic.common.errors import BadInput
    from polyclinic.comparisons import ComparedRuns, compare
    from polyclinic.data.sources.plugin import LabelledImages
    from polyclinic.prediction import FileReadingWarning, UnlearnedClassWarning
    from polyclinic.runs import FinishedRun, load, predict, simulate
    from polyclinic.saved_network import OtherNetworkWarning

__all__ = [
    "BadInput",
    "ComparedRuns",
    "FileReadingWarning",
    "FinishedRun",
    "LabelledImages",
    "OtherNetworkWarning",
    "UnlearnedClassWarning",
    "__version__",
    "compare",
    "load",
    "predict",
    "simulate",
]

_MODULE_BY_NAME = {
    "BadInput": "polyclinic.common.errors",
    "ComparedRuns": "polyclinic.comparisons",
    "FileReadingWarning": "polyclinic.prediction",
    "LabelledImages": "polyclinic.data",
    "OtherNetworkWarning": "polyclinic.saved_network",
    "UnlearnedClassWarning": "polyclinic.prediction",
    "compare": "polyclinic.comparisons",
}


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name only at its first use, because the import loads numpy and perhaps torch."""
    if name not in __all__:
        raise AttributeError(f"module 'polyclinic' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_BY_NAME.get(name, "polyclinic.runs")), name)
