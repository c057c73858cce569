"""An experiment file read before torch is imported, so that a wrong one is refused at once."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config import ExperimentFile, read_experiment
from common.errors import BadInput, Fault, stop_on
from common.plugins import PLUGIN
from common.system.files import is_file, missing_file, missing_folder
from strategies.base.names import CLASSES, unknown_method

TABLES = (".csv", ".csv.gz", ".tsv", ".xlsx", ".xls")


def faults_known_early(tree: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Find an unknown method beside other faults of the file.

    What else is wrong with a method's own keys is found with torch, once the rest of the file is right.
    """
    run = tree.get("run")
    name = run.get("method") if isinstance(run, dict) else None
    return (unknown_method(name),) if isinstance(name, str) and _is_unknown(name) else ()


def read_early(path: Path, overrides: Iterable[str] = ()) -> ExperimentFile:
    """Read an experiment and refuse what is wrong in it as far as that is known without torch.

    Raises:
        BadInput: With every such fault: of the file and of the overrides; then an unknown method and missing files.
    """
    if is_file(path) and path.name.lower().endswith(TABLES):
        remedy = f"To write one for this table: flwr-sim init {path}"
        raise BadInput([Fault(str(path), "is a table; an experiment file is wanted.", remedy)])
    file = read_experiment(path, overrides, faults_known_early)
    name = file.experiment.run.method
    found = [unknown_method(name)] if _is_unknown(name) else []
    found += _missing(file)
    stop_on([replace(fault, where=f"{file.path.name}: {fault.where}") for fault in found])
    return file


def _is_unknown(method: str) -> bool:
    return method not in CLASSES and not method.startswith(PLUGIN)


def _missing(file: ExperimentFile) -> list[Fault]:
    """What the experiment's data names and what is not there, as the code that reads it says it."""
    data, found = file.experiment.data, list[Fault]()
    for key, look in (("path", missing_file), ("images", missing_folder), ("labels", missing_file)):
        if isinstance(name := getattr(data, key, None), str):  # of phantoms, images is their number
            found += look(f"data.{key}", file.base / name)
    return found
