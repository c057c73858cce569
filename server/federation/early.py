"""An experiment file read before torch is imported, so that a wrong one is refused at once."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config import Experiment, ExperimentFile, read_experiment
from common.errors import BadInput, Fault
from common.plugins import PLUGIN
from strategies.base.names import CLASSES, unknown_method


def faults_known_early(tree: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Find what is wrong with the method of an experiment file; torch is imported only where its name does not tell."""
    run = tree.get("run")
    name = run.get("method") if isinstance(run, dict) else None
    if isinstance(name, str) and name not in CLASSES and not name.startswith(PLUGIN):
        return (unknown_method(name),)
    model = tree.get("model")
    one_class_an_image = isinstance(model, dict) and model.get("task") == "multi_class"  # not every method can
    if not tree.get("method") and not one_class_an_image:
        return ()
    from strategies.registry import method_faults

    return method_faults(tree)


def read_early(path: Path, overrides: Iterable[str] = ()) -> ExperimentFile:
    """Read an experiment and refuse what is wrong in it as far as that is known without torch.

    An unknown method is refused here beside other faults of the file, and where the file names no other file that could
    have a fault. Else the data is looked at first, which takes torch: a person is told all faults at once.

    Raises:
        BadInput: With every fault of the file and of the overrides.
    """
    file = read_experiment(path, overrides, faults_known_early)
    name = file.experiment.run.method
    if name not in CLASSES and not name.startswith(PLUGIN) and _names_no_file(file.experiment):
        raise BadInput([replace(fault := unknown_method(name), where=f"{file.path.name}: {fault.where}")])
    return file


def _names_no_file(experiment: Experiment) -> bool:
    """Whether all that a simulation reads is made by Polyclinic itself, so that nothing else can be wrong with it."""
    data = experiment.data
    made = data is not None and data.kind in ("digits", "phantom") and not getattr(data, "keep", ())
    return made and experiment.partition is not None and not experiment.model.weights and not experiment.server_data
