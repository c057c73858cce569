"""Faults in a call of ``export``, ``predict`` or ``evaluate``, found before torch is imported."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from common.data.base.spec import Axis, DataSpec, Frame, NpzSpec, Rendering, Window
from common.data.sources.npz import key_faults
from common.data.sources.npz_file import Header, read_headers
from common.data.tables.csv import Columns, column_faults, read_columns
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.models.zoo.spec import DESCRIPTION, model_folder_faults
from common.system.files import is_file, missing_input_fault, output_file_faults


class ExportFormat(StrEnum):
    """What ``--to`` names."""

    onnx = "onnx"
    torchscript = "torchscript"


def file_of(folder: Path, form: ExportFormat) -> Path:
    """Return the file that ``export`` writes by default."""
    return folder / ("model.onnx" if form is ExportFormat.onnx else "model.pt")


def form_of(name: str) -> ExportFormat:
    """Return the form of file that ``--to`` names.

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
        folder: Folder of the model.
        data: Images to read.
        out: New file.

    Raises:
        BadInput: With every fault.
    """
    if folder.suffix == ".toml":
        remedy = f"To write its simulated sites' folders: flwr-sim sites {folder}"
        raise BadInput([Fault(str(folder), "is an experiment; the folder of a trained model is needed.", remedy)])
    nothing = [] if data is None or data.exists() else [missing_input_fault(data)]
    stop_on([*model_folder_faults(folder), *nothing, *(output_file_faults(out) if out else [])])


class _Named(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None


_EXPECTED = {
    "frame": 'a number from 1, or "middle"',
    "axis": "axial, coronal or sagittal",
    "window": "CENTRE,WIDTH: two numbers, the second at least 1, such as 40,400",
}


def named_rendering(frame: str | None, axis: str | None, window: str | None) -> Rendering | None:
    """Return what the options name; None where none is given.

    Raises:
        BadInput: With every option that cannot be understood.
    """
    parts = None if window is None else window.split(",")
    given = {"frame": frame, "axis": axis, "window": parts}
    if not any(given.values()):
        return None
    try:
        named = _Named.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = {str(one["loc"][0]) for one in error.errors()}
        said = {"frame": frame, "axis": axis, "window": window}
        faults = [Fault(f"--{key} {said[key]}", f"expected {_EXPECTED[key]}.") for key in _EXPECTED if key in wrong]
        raise BadInput(faults) from None
    return Rendering(named.frame, named.axis, named.window)


TESTED = ("test",)
"""The part of an npz file that is scored; it needs no other."""


@dataclass(frozen=True)
class LabelledInput:
    """What a person names beside the model.

    Attributes:
        data: An experiment file (the test part of its data), an npz file (its test part), or a csv, all of it.
        class_names: Names of the npz file's label columns; those of the run's own npz file where empty.
        pictures: Folder of the csv's pictures; the csv's own folder where None.
        image_column, patient_column: Of the csv; those of the run, or what the names say, where None. For an npz file
            ``"patient"`` means the array ``test_patient``.
    """

    data: Path
    class_names: Sequence[str] = ()
    pictures: Path | None = None
    image_column: str | None = None
    patient_column: str | None = None


def refuse_unlabelled(folder: Path, given: LabelledInput) -> None:
    """Refuse a file without labelled images for a model, as far as its names, headers and columns say.

    Args:
        folder: Of the model.

    Raises:
        BadInput: With what is wrong.
    """
    stop_on(_meaningless(given))
    if given.data.suffix == ".toml":
        data_of_experiment(given.data)
    elif given.data.suffix == ".npz":
        with naming_options(given):
            headers = read_headers(given.data)
            stop_on(key_faults(npz_spec(given), given.data, headers, TESTED) or _patient_faults(given, headers))
    else:
        class_names, finding_column = _read_by(folder)
        stop_on(class_faults(given.data, columns_of(given), class_names, finding_column))


@contextmanager
def naming_options(given: LabelledInput) -> Iterator[None]:
    """Faults that name keys of an experiment's ``[data]`` inside name the file and its options."""
    words = {"data.path": str(given.data), "data.classes": "--classes", "data.patient_key": "--patient-column"}
    try:
        yield
    except BadInput as bad:
        raise BadInput([replace(fault, where=words.get(fault.where, fault.where)) for fault in bad.faults]) from None


def _read_by(folder: Path) -> tuple[list[str], str | None]:
    """The classes of a saved model, and the run's own column of classes; a file that is wrong is reported later."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        class_names = [str(name) for name in json.loads((folder / DESCRIPTION).read_bytes())["class_names"]]
        if not (folder / "summary.json").is_file():
            return class_names, None
        data = json.loads((folder / "summary.json").read_bytes())["experiment"]["data"] or {}
        return class_names, data.get("finding_column")
    return [], None


def class_faults(data: Path, columns: Columns, class_names: Sequence[str], finding_column: str | None) -> list[Fault]:
    """Why a csv has no labels for a model of these classes, and a run with this column of classes, if it has one."""
    if not class_names or finding_column in columns or any(name in columns for name in class_names):
        return []
    expected = f"at least one of {quoted(class_names)}"
    if finding_column:
        expected += f', or the run\'s own column "{finding_column}"'
    return [Fault(str(data), f"has columns {quoted(columns)}; expected {expected}.")]


def _meaningless(given: LabelledInput) -> list[Fault]:
    """Options that say nothing of a file of this kind."""
    of_csv: dict[str, object] = {"--images": given.pictures, "--image-column": given.image_column}
    said: dict[str, object] = {"--classes": given.class_names}
    if given.data.suffix == ".toml":
        said |= {**of_csv, "--patient-column": given.patient_column}
        problem = f"{given.data.name} is an experiment, whose [data] says how to read its images."
    elif given.data.suffix == ".npz":
        said, problem = of_csv, f"says how to read a csv, and {given.data.name} is none."
    else:
        problem = f"names the label columns of an npz file, and {given.data.name} is none."
    return [Fault(option, problem, "Leave it out.") for option, value in said.items() if value]


def _patient_faults(given: LabelledInput, headers: Mapping[str, Header]) -> list[Fault]:
    if given.patient_column is None or f"test_{given.patient_column}" in headers:
        return []
    problem = f'{given.data.name} has no array "test_{given.patient_column}"; its arrays are {quoted(headers)}.'
    return [Fault("--patient-column", problem, did_you_mean(f"test_{given.patient_column}", headers))]


def data_of_experiment(path: Path) -> tuple[DataSpec, Path]:
    """The data of an experiment file, and the folder that its paths start from.

    Raises:
        BadInput: If the file has a fault, or no ``[data]``.
    """
    from common.config import read_experiment  # takes as long as all the rest

    file = read_experiment(path)
    if file.experiment.data is None:
        raise BadInput([Fault(f"{path.name}: [data]", "is missing, so there are no images.")])
    return file.experiment.data, file.base


def npz_spec(given: LabelledInput, of_run: NpzSpec | None = None) -> NpzSpec:
    """How to read the npz file: by what the person names, else as the run read its own."""
    spec = NpzSpec(kind="npz", path=str(given.data.resolve()), classes=tuple(given.class_names))
    if of_run is not None and not given.class_names:
        alike = ("classes", "keep", "image_size", "resize")
        spec = spec.model_copy(update={key: getattr(of_run, key) for key in alike})
    return spec


def columns_of(given: LabelledInput) -> Columns:
    """The columns of the csv.

    Raises:
        BadInput: If it is none, or lacks a column that is named.
    """
    if not is_file(given.data):
        raise BadInput([missing_input_fault(given.data)])
    columns = read_columns(given.data, str(given.data))
    named = {"--image-column": given.image_column, "--patient-column": given.patient_column}
    stop_on(column_faults(str(given.data), columns, named))
    return columns
