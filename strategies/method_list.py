"""The list of built-in methods, and checks of a method's name in experiment files before torch is imported."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyclinic.common.config import ExperimentFile, read_experiment
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.plugins import PLUGIN_PREFIX, is_simulate_argument
from polyclinic.common.system.files import find_missing_file_faults, find_missing_folder_faults, is_file
from polyclinic.common.system.plain_text import quote_for_shell

METHOD_CLASS_PATHS: Mapping[str, str] = {
    "polyclinic": "polyclinic.strategies.methods.polyclinic:Polyclinic",
    "polyclinic_passing": "polyclinic.strategies.methods.polyclinic_passing:PolyclinicPassing",
    "polyclinic_parallel": "polyclinic.strategies.methods.polyclinic_parallel:PolyclinicParallel",
    "surgical": "polyclinic.strategies.methods.surgical:SurgicalAggregation",
    "fedsld": "polyclinic.strategies.methods.fedsld:FedSLD",
    "fedmlp": "polyclinic.strategies.methods.fedmlp:FedMLP",
    "rscfed": "polyclinic.strategies.methods.rscfed:RSCFed",
    "cbafed": "polyclinic.strategies.methods.cbafed:CBAFed",
    "fednoro": "polyclinic.strategies.methods.fednoro:FedNoRo",
    "unifed": "polyclinic.strategies.methods.unifed:UniFed",
    "vanilla": "polyclinic.strategies.methods.baselines:VanillaFedAvg",
    "partial_loss": "polyclinic.strategies.methods.baselines:PartialLoss",
    "pfl": "polyclinic.strategies.methods.baselines:PersonalisedHeads",
    "individual": "polyclinic.strategies.methods.baselines:IndividualTraining",
    "centralised": "polyclinic.strategies.methods.baselines:CentralisedTraining",
    "fedrep": "polyclinic.strategies.methods.fedrep:FedRep",
    "ditto": "polyclinic.strategies.methods.ditto:Ditto",
    "fedavg": "polyclinic.strategies.methods.baselines:FedAvg",
    "fedbn": "polyclinic.strategies.methods.baselines:FedBN",
    "fedbn_plus": "polyclinic.strategies.methods.baselines:FedBNPlus",
    "fedprox": "polyclinic.strategies.methods.baselines:FedProx",
    "moon": "polyclinic.strategies.methods.moon:Moon",
    "scaffold": "polyclinic.strategies.methods.scaffold:Scaffold",
    "fedavg_scaled": "polyclinic.strategies.methods.fedsld:ScaledFedAvg",
    "fedseq": "polyclinic.strategies.methods.unifed:SequentialTraining",
    "sfedkd": "polyclinic.strategies.methods.sfedkd:SFedKD",
    "server_only": "polyclinic.strategies.methods.unifed:ServerOnlyTraining",
    "fedlsr": "polyclinic.strategies.methods.fedlsr:FedLSR",
    "fedfixmatch": "polyclinic.strategies.methods.fedfixmatch:FedFixMatch",
    "condistfl": "polyclinic.strategies.methods.condistfl:ConDistFL",
    "fedirm": "polyclinic.strategies.methods.fedirm:FedIRM",
    "fedlsm": "polyclinic.strategies.methods.fedlsm:FedLSM",
}
"""Method -> module and class; :data:`polyclinic.strategies.registry.STRATEGIES` imports them, and torch, which takes
seconds.
"""

TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".xlsx", ".xls")


def find_unknown_method_fault(name: str) -> Fault:
    """Return the fault that a method's name is not in :data:`METHOD_CLASS_PATHS`."""
    remedy = (
        suggest_nearest_name(name, METHOD_CLASS_PATHS)
        or f"Methods: {quote_names(METHOD_CLASS_PATHS, limit=len(METHOD_CLASS_PATHS))}."
    )
    return Fault("run.method", f'"{name}" is not a method.', remedy)


def find_unknown_method_faults(tree: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Return the fault if an experiment file names an unknown method, to report it with the file's other faults.

    Faults in the method's own keys are found later, by code that imports torch.

    Args:
        tree: The experiment file, parsed from TOML.
    """
    run = tree.get("run")
    name = run.get("method") if isinstance(run, dict) else None
    return (find_unknown_method_fault(name),) if isinstance(name, str) and _is_unknown_method(name) else ()


def read_experiment_and_fault(path: Path, overrides: Iterable[str] = ()) -> tuple[ExperimentFile, list[Fault]]:
    """Read an experiment file; return it, and the fault of an unknown method if there is one.

    Raises:
        BadInput: With every fault of the file and of the overrides.
    """
    if is_file(path) and path.name.lower().endswith(TABLE_SUFFIXES):
        remedy = f"To write one for this table: flwr-sim init {quote_for_shell(path)}"
        raise BadInput([Fault(str(path), "is a table; an experiment file is wanted.", remedy)])
    file = read_experiment(path, overrides, find_unknown_method_faults)
    name = file.experiment.run.method
    return file, [prefix_fault_with_file(file, find_unknown_method_fault(name))] if _is_unknown_method(name) else []


def read_experiment_without_torch(path: Path, overrides: Iterable[str] = ()) -> ExperimentFile:
    """Read an experiment file, and report all faults that can be found without torch.

    Raises:
        BadInput: With every fault of the file and of the overrides; if they have none, with an unknown method and
            missing files.
    """
    file, faults = read_experiment_and_fault(path, overrides)
    for section, data in (("data", file.experiment.data), ("external_test", file.experiment.external_test)):
        for key, look in (
            ("path", find_missing_file_faults),
            ("images", find_missing_folder_faults),
            ("labels", find_missing_file_faults),
        ):
            if isinstance(name := getattr(data, key, None), str):  # of phantoms, images is their number
                missing = look(f"{section}.{key}", file.base_folder / name)
                faults += [prefix_fault_with_file(file, fault) for fault in missing]
    raise_faults(faults)
    return file


def read_experiment_without_data(path: Path) -> ExperimentFile:
    """Read an experiment that will run on another machine, without a check for its data files.

    Raises:
        BadInput: With every fault that can be found without torch.
    """
    file, faults = read_experiment_and_fault(path)
    raise_faults(faults)
    return file


def prefix_fault_with_file(file: ExperimentFile, fault: Fault) -> Fault:
    """Return a fault with the file's name before its TOML key; a fault of a Python argument is unchanged."""
    if is_simulate_argument(fault.where):
        return fault
    return replace(fault, where=f"{file.path.name}: {fault.where}")


def _is_unknown_method(method: str) -> bool:
    return method not in METHOD_CLASS_PATHS and not method.startswith(PLUGIN_PREFIX)
