"""What is wrong with a call of ``export``, ``predict`` or ``evaluate``, found before torch is imported."""

from enum import StrEnum
from pathlib import Path

from common.errors import BadInput, Fault, did_you_mean, stop_on
from common.models.files import faults_of_folder
from common.system.files import no_such_file, taken


class ExportFormat(StrEnum):
    """What ``--to`` names."""

    onnx = "onnx"
    torchscript = "torchscript"


def file_of(folder: Path, form: ExportFormat) -> Path:
    """The file that ``export`` writes where nobody names one."""
    return folder / ("model.onnx" if form is ExportFormat.onnx else "model.pt")


def form_of(name: str) -> ExportFormat:
    """The form that a person names.

    Raises:
        BadInput: If there is none of that name.
    """
    try:
        return ExportFormat(name)
    except ValueError:
        problem = f"is {name}; expected {' or '.join(ExportFormat)}."
        raise BadInput([Fault("--to", problem, did_you_mean(name, ExportFormat))]) from None


def refuse_early(folder: Path, data: Path | None = None, out: Path | None = None) -> None:
    """Refuse paths where nothing is, or where something is already.

    Args:
        folder: Of the model.
        data: Images to read.
        out: New file.

    Raises:
        BadInput: With every fault.
    """
    if folder.suffix == ".toml":
        remedy = f"To write its simulated sites' folders: flwr-sim sites {folder}"
        raise BadInput([Fault(str(folder), "is an experiment; the folder of a trained model is needed.", remedy)])
    nothing = [] if data is None or data.exists() else [no_such_file(data)]
    stop_on([*faults_of_folder(folder), *nothing, *(taken(out) if out else [])])
