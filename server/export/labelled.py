"""Labelled images, as ``evaluate`` takes them; what is wrong with them is found before torch is imported."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from common.data.base.spec import DataSpec, NpzSpec
from common.data.sources.npz import key_faults
from common.data.sources.npz_file import Header, read_headers
from common.data.tables.csv import Columns, column_faults, read_columns
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.models.files import DESCRIPTION
from common.system.files import is_file, no_such_file

TESTED = ("test",)
"""The part of an npz file that is scored; it needs no other."""


@dataclass(frozen=True)
class Given:
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


def refuse_unlabelled(folder: Path, given: Given) -> None:
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
        with in_words_of_the_call(given):
            headers = read_headers(given.data)
            stop_on(key_faults(npz_spec(given), given.data, headers, TESTED) or _patient_faults(given, headers))
    else:
        class_names, finding_column = _read_by(folder)
        stop_on(class_faults(given.data, columns_of(given), class_names, finding_column))


@contextmanager
def in_words_of_the_call(given: Given) -> Iterator[None]:
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


def _meaningless(given: Given) -> list[Fault]:
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


def _patient_faults(given: Given, headers: Mapping[str, Header]) -> list[Fault]:
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


def npz_spec(given: Given, of_run: NpzSpec | None = None) -> NpzSpec:
    """How to read the npz file: by what the person names, else as the run read its own."""
    spec = NpzSpec(kind="npz", path=str(given.data.resolve()), classes=tuple(given.class_names))
    if of_run is not None and not given.class_names:
        alike = ("classes", "keep", "image_size", "resize")
        spec = spec.model_copy(update={key: getattr(of_run, key) for key in alike})
    return spec


def columns_of(given: Given) -> Columns:
    """The columns of the csv.

    Raises:
        BadInput: If it is none, or lacks a column that is named.
    """
    if not is_file(given.data):
        raise BadInput([no_such_file(given.data)])
    columns = read_columns(given.data, str(given.data))
    named = {"--image-column": given.image_column, "--patient-column": given.patient_column}
    stop_on(column_faults(str(given.data), columns, named))
    return columns
