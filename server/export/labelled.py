"""Labelled images, as ``evaluate`` takes them; what is wrong with them is found before torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.data.base.spec import DataSpec, NpzSpec
from common.data.sources.npz_checks import key_faults, read_headers
from common.data.tables.csv import Columns, column_faults, read_columns
from common.errors import BadInput, Fault, stop_on
from common.system.files import is_file, no_such_file


@dataclass(frozen=True)
class Given:
    """What a person names beside the model.

    Attributes:
        data: An experiment file (the test part of its data), an npz file (its test part), or a csv, all of it.
        class_names: Names of the npz file's label columns.
        pictures: Folder of the csv's pictures; the csv's own folder where None.
        image_column, patient_column: Of the csv; those of the run, or what the names say, where None.
    """

    data: Path
    class_names: Sequence[str] = ()
    pictures: Path | None = None
    image_column: str | None = None
    patient_column: str | None = None


def refuse_unlabelled(given: Given) -> None:
    """Refuse a file that holds no labelled images, as far as its names, headers and columns say.

    Raises:
        BadInput: With what is wrong.
    """
    if given.data.suffix == ".toml":
        data_of_experiment(given.data)
    elif given.data.suffix == ".npz":
        spec = npz_spec(given)
        stop_on(key_faults(spec, given.data, read_headers(given.data)))
    else:
        columns_of(given)


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


def npz_spec(given: Given) -> NpzSpec:
    """How to read the npz file."""
    return NpzSpec(kind="npz", path=str(given.data.resolve()), classes=tuple(given.class_names))


def columns_of(given: Given) -> Columns:
    """The columns of the csv.

    Raises:
        BadInput: If it is none, or lacks a column that is named.
    """
    if not is_file(given.data):
        raise BadInput([no_such_file(given.data)])
    if given.class_names:
        problem = f"names the label columns of an npz file, and {given.data.name} is none."
        raise BadInput([Fault("--classes", problem)])
    columns = read_columns(given.data, str(given.data))
    named = {"--image-column": given.image_column, "--patient-column": given.patient_column}
    stop_on(column_faults(str(given.data), columns, named))
    return columns
