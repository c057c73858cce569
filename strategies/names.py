"""The methods by name: one line each; a wrong name is refused before torch is imported."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config import ExperimentFile, read_experiment
from common.errors import BadInput, Fault, did_you_mean, quoted
from common.plugins import PLUGIN

CLASSES: Mapping[str, str] = {
    "surgical": "strategies.surgical:SurgicalAggregation",
    "fedsld": "strategies.fedsld.method:FedSLD",
    "fedmlp": "strategies.fedmlp.method:FedMLP",
    "rscfed": "strategies.comparators.rscfed:RSCFed",
    "cbafed": "strategies.comparators.cbafed:CBAFed",
    "fednoro": "strategies.comparators.fednoro.method:FedNoRo",
    "unifed": "strategies.unifed.method:UniFed",
    "vanilla": "strategies.comparators.baselines:Vanilla",
    "partial_loss": "strategies.comparators.baselines:PartialLoss",
    "pfl": "strategies.comparators.baselines:PersonalisedHeads",
    "individual": "strategies.comparators.baselines:Individual",
    "centralised": "strategies.comparators.baselines:Centralised",
    "fedavg": "strategies.comparators.baselines:FedAvg",
    "fedbn": "strategies.comparators.baselines:FedBN",
    "fedbn_plus": "strategies.comparators.baselines:FedBNPlus",
    "fedprox": "strategies.comparators.baselines:FedProx",
    "fedavg_scaled": "strategies.fedsld.method:ScaledFedAvg",
    "fedseq": "strategies.unifed.method:SequentialTraining",
    "server_only": "strategies.unifed.method:ServerOnly",
    "fedlsr": "strategies.comparators.fedlsr:FedLSR",
    "fedfixmatch": "strategies.comparators.fedfixmatch:FedFixMatch",
    "fedirm": "strategies.comparators.fedirm.method:FedIRM",
}
"""Method -> module and class; :data:`strategies.registry.STRATEGIES` imports them, which takes torch and seconds."""


def unknown_method(name: str) -> Fault:
    """The fault of a name that is not among :data:`CLASSES`."""
    remedy = did_you_mean(name, CLASSES) or f"Methods: {quoted(CLASSES, limit=len(CLASSES))}."
    return Fault("run.method", f'"{name}" is not a method.', remedy)


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

    Raises:
        BadInput: With every fault of the file, the overrides and the method's name.
    """
    file = read_experiment(path, overrides, faults_known_early)
    name = file.experiment.run.method
    if name not in CLASSES and not name.startswith(PLUGIN):
        fault = unknown_method(name)
        raise BadInput([replace(fault, where=f"{file.path.name}: {fault.where}")])
    return file
