"""An experiment file read before torch is imported, so that a wrong one is refused at once."""

from collections.abc import Iterable
from pathlib import Path

from common.config import ExperimentFile
from common.errors import Fault, stop_on
from common.system.files import missing_file, missing_folder
from strategies.method_list import prefix_with_file, read_with_method_fault


def read_experiment_early(path: Path, overrides: Iterable[str] = ()) -> ExperimentFile:
    """Read an experiment and refuse what is wrong in it as far as that is known without torch.

    Raises:
        BadInput: With every such fault: of the file and of the overrides; then an unknown method and missing files.
    """
    file, faults = read_with_method_fault(path, overrides)
    stop_on([*faults, *(prefix_with_file(file, fault) for fault in _missing_file_faults(file))])
    return file


def _missing_file_faults(file: ExperimentFile) -> list[Fault]:
    """Return a fault for each file of the experiment's data that is not there."""
    faults = list[Fault]()
    for section, data in (("data", file.experiment.data), ("external_test", file.experiment.external_test)):
        for key, look in (("path", missing_file), ("images", missing_folder), ("labels", missing_file)):
            if isinstance(name := getattr(data, key, None), str):  # of phantoms, images is their number
                faults += look(f"{section}.{key}", file.base / name)
    return faults
