"""Checks of the arguments of ``export``, ``predict`` and ``evaluate``, made before torch is imported."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, find_model_folder_faults
from polyclinic.common.system.files import find_output_file_faults, is_file, make_missing_input_fault
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.common.system.toml import TomlSection, read_toml, validate_tables
from polyclinic.data.base.names import normalize_name
from polyclinic.data.base.spec import (
    Axis,
    BitDepth,
    DataSpec,
    Frame,
    NpzDatasetSpec,
    PictureRenderingOptions,
    Window,
)
from polyclinic.data.sources.npz import find_npz_array_name_faults
from polyclinic.data.sources.npz_file import read_npz_headers
from polyclinic.data.tables.csv import CsvTable, find_missing_column_faults, read_csv_table


class ExportFormat(StrEnum):
    """A file format of exported models; its values are those of the option ``--to``."""

    onnx = "onnx"
    torchscript = "torchscript"


def choose_default_export_path(folder: Path, export_format: ExportFormat) -> Path:
    """Return the default path of an exported model: ``model.onnx`` or ``model.pt`` in the run's folder."""
    return folder / ("model.onnx" if export_format is ExportFormat.onnx else "model.pt")


def parse_export_format(name: str) -> ExportFormat:
    """Return the export format with this name.

    Raises:
        BadInput: If no format has that name.
    """
    try:
        return ExportFormat(name)
    except ValueError:
        problem = f"is {name}; expected {' or '.join(ExportFormat)}."
        raise BadInput([Fault("--to", problem, suggest_nearest_name(name, ExportFormat))]) from None


def refuse_wrong_model_paths(folder: Path, data: Path | None = None, out: Path | None = None) -> None:
    """Check that ``folder`` holds a model, ``data`` exists, and ``out`` does not exist.

    Raises:
        BadInput: With every fault of the paths.
    """
    if folder.suffix == ".toml":
        remedy = f"To write its simulated sites' folders: flwr-sim sites {quote_for_shell(folder)}"
        raise BadInput([Fault(str(folder), "is an experiment; the folder of a trained model is needed.", remedy)])
    faults = list(find_model_folder_faults(folder))
    if data is not None and not data.exists():
        faults.append(make_missing_input_fault(data))
    if out is not None:
        faults += find_output_file_faults(out)
    raise_faults(faults)


class _RenderingOptions(BaseModel):
    """The types of the rendering options, by which pydantic checks their values."""

    model_config = ConfigDict(allow_inf_nan=False)

    frame: Frame | None = None
    axis: Axis = "axial"
    window: Window | None = None
    bit_depth: BitDepth | None = None


_EXPECTED_VALUES = {
    "frame": 'a number from 1, or "middle"',
    "axis": "axial, coronal or sagittal",
    "bit_depth": "a number from 8 to 16",
    "window": "CENTRE,WIDTH: two numbers, the second at least 1, such as 40,400",
}


def parse_rendering_options(
    frame: str | None, axis: str | None, window: str | None, bit_depth: str | None
) -> PictureRenderingOptions | None:
    """Return the rendering of images by command-line options; None if no option is used.

    Raises:
        BadInput: With every option that has an invalid value.
    """
    texts = {"frame": frame, "axis": axis, "window": window, "bit_depth": bit_depth}
    options = {key: text.split(",") if key == "window" else text for key, text in texts.items() if text is not None}
    if not any(options.values()):
        return None
    try:
        rendering = _RenderingOptions.model_validate(options)
    except ValidationError as error:
        invalid = {str(each["loc"][0]) for each in error.errors()}
        options_by_key = {key: f"--{key.replace('_', '-')} {texts[key]}" for key in _EXPECTED_VALUES if key in invalid}
        faults = [Fault(option, f"expected {_EXPECTED_VALUES[key]}.") for key, option in options_by_key.items()]
        raise BadInput(faults) from None
    return PictureRenderingOptions(rendering.frame, rendering.axis, rendering.window, bit_depth=rendering.bit_depth)


@dataclass(frozen=True)
class EvaluationInput:
    """The command-line arguments of ``evaluate`` that describe labelled images.

    Attributes:
        data: An experiment file, a hospital's ``site.toml``, an npz file or a csv file. Its test part is used; of a csv
            that the run was not trained on, all rows are used.
        class_names: Names of the npz file's label columns; if empty, those of the run's own npz file.
        pictures: Folder of the csv's images; None for the folder of the csv.
        image_column: Column of the csv with file names of images; None for the run's column or, if the csv does not
            have this column, a guess.
        patient_column: Column of the csv with patients, chosen in the same way. For an npz file, ``"patient"`` means
            the array ``test_patient``.
    """

    data: Path
    class_names: Sequence[str] = ()
    pictures: Path | None = None
    image_column: str | None = None
    patient_column: str | None = None


def refuse_unlabelled_input(folder: Path, labelled: EvaluationInput) -> None:
    """Check that a file has labelled images for a model, by its headers and columns, without decoding an image.

    Raises:
        BadInput: If the file has no labelled images, or an option does not fit the kind of file.
    """
    csv_options: dict[str, object] = {"--images": labelled.pictures, "--image-column": labelled.image_column}
    unused_options: dict[str, object] = {"--classes": labelled.class_names}
    if labelled.data.suffix == ".toml":
        unused_options |= {**csv_options, "--patient-column": labelled.patient_column}
        problem = f"{labelled.data.name} is an experiment, whose [data] says how to read its images."
    elif labelled.data.suffix == ".npz":
        unused_options = csv_options
        problem = f"says how to read a csv, and {labelled.data.name} is none."
    else:
        problem = f"names the label columns of an npz file, and {labelled.data.name} is none."
    raise_faults([Fault(option, problem, "Leave it out.") for option, value in unused_options.items() if value])
    if labelled.data.suffix == ".toml":
        read_labelled_dataset(labelled.data)
    elif labelled.data.suffix == ".npz":
        with name_cli_options_in_faults(labelled):
            headers = read_npz_headers(labelled.data)
            column = labelled.patient_column
            raise_faults(find_npz_array_name_faults(make_npz_test_spec(labelled), labelled.data, headers, ("test",)))
            if column is not None and (key := f"test_{column}") not in headers:
                problem = f'{labelled.data.name} has no array "{key}"; its arrays are {quote_names(headers)}.'
                raise BadInput([Fault("--patient-column", problem, suggest_nearest_name(key, headers))])
    else:
        class_names = list[str]()
        finding_column = None
        synonyms = list[str]()
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged file is reported later
            description = json.loads((folder / DESCRIPTION_FILE).read_bytes())
            class_names = [str(name) for name in description["class_names"]]
            for entry in (description.get("vocabulary") or {}).values():
                synonyms += map(str, entry["synonyms"])
            if (folder / "summary.json").is_file():
                data = json.loads((folder / "summary.json").read_bytes())["experiment"]["data"] or {}
                finding_column = data.get("finding_column")
        columns = read_labelled_csv_columns(labelled)
        raise_faults(find_class_column_faults(labelled.data, columns, class_names, finding_column, synonyms))


def find_data_to_score_faults(models: Sequence[Path], data: Sequence[Path], csv_options: Sequence[str]) -> list[Fault]:
    """Return the faults of the arguments of ``evaluate`` with several models or data sets.

    Args:
        models: Paths of models on the command line.
        data: Paths of data on the command line.
        csv_options: Options on the command line that are only for csv and npz files.

    Raises:
        BadInput: If a file that describes data has a fault.
    """
    faults = [Fault(path, "is for a csv or npz file that one run scores.", "Leave it out.") for path in csv_options]
    if not models:
        remedy = "Name a run's folder, an ONNX file of a run, or a MODEL.toml, before the images."
        faults.append(Fault("evaluate", "no model is named.", remedy))
    if not data:
        remedy = "Name an experiment or a hospital's site.toml after the models."
        faults.append(Fault("evaluate", "no labelled images are named.", remedy))
    for path in data:
        if not path.exists():
            faults.append(make_missing_input_fault(path))
        elif path.suffix != ".toml":
            problem = "is scored by one run alone, without --by and --all."
            remedy = (
                "Describe it in a TOML file with a name and [data], as a hospital's site.toml does, and name that one."
            )
            faults.append(Fault(str(path), problem, remedy))
        else:
            read_labelled_dataset(path)
    return faults


@contextmanager
def name_cli_options_in_faults(labelled: EvaluationInput) -> Iterator[None]:
    """Replace ``[data]`` keys by command-line options in the faults that the ``with`` block raises."""
    options = {"data.path": str(labelled.data), "data.classes": "--classes", "data.patient_key": "--patient-column"}
    try:
        yield
    except BadInput as bad:
        raise BadInput([replace(fault, where=options.get(fault.where, fault.where)) for fault in bad.faults]) from None


def find_class_column_faults(
    data: Path,
    columns: CsvTable,
    class_names: Sequence[str],
    finding_column: str | None,
    synonyms: Sequence[str] = (),
) -> list[Fault]:
    """Return a fault if a csv file has no column that holds labels of the run's classes.

    Either a column has the name of a class, such as ``Edema``, or the csv has the run's column that lists all classes
    of an image, such as ``Finding Labels``.

    Args:
        class_names: Classes of the run; if empty, nothing is checked.
        finding_column: The run's ``data.finding_column``; None if it is not set.
        synonyms: Synonyms of the classes in the model's vocabulary.
    """
    if not class_names or finding_column in columns or any(name in columns for name in (*class_names, *synonyms)):
        return []
    expected = f"at least one of {quote_names(class_names)}"
    if synonyms:
        expected += f" or of their synonyms {quote_names(synonyms)}"
    if finding_column:
        expected += f', or the run\'s own column "{finding_column}"'
    return [Fault(str(data), f"has columns {quote_names(columns)}; expected {expected}.")]


@dataclass(frozen=True)
class LabelledDataset:
    """A data set that an experiment or a hospital's ``site.toml`` describes.

    Attributes:
        base: The folder from which relative paths start.
        annotates: The classes that the hospital annotates, by their names in the data; empty for all.
        synonyms: The hospital's class name -> the federation's class name.
        state: The hospital's folder ``state``, which stores the patients of the test part; None for an experiment.
    """

    spec: DataSpec
    base: Path
    annotates: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    state: Path | None = None


class _SiteToml(TomlSection):
    """The part of a hospital's ``site.toml`` that is read here; its other keys are for ``flwr-client``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    data: DataSpec = Field(discriminator="kind")


def is_site_toml(path: Path) -> bool:
    """Return True if a TOML file is a hospital's ``site.toml``, not an experiment: it has name and data, and no run."""
    tree = read_toml(path)
    return "name" in tree and "run" not in tree and isinstance(tree.get("data"), dict)


def read_labelled_dataset(path: Path) -> LabelledDataset:
    """Read ``[data]`` of an experiment file or of a hospital's ``site.toml``.

    Raises:
        BadInput: If the file has a fault, or no ``[data]``.
    """
    if not is_site_toml(path):
        return LabelledDataset(*read_experiment_data_spec(path))
    tree = read_toml(path)
    data = tree["data"]
    # These keys are no settings of a data set.
    annotates = data.pop("annotates", ())
    synonyms = data.pop("synonyms", {})
    data.pop("opt_out", None)
    spec = validate_tables(_SiteToml, {"data": data}, path.name).data
    return LabelledDataset(
        spec,
        path.parent,
        annotates=tuple(normalize_name(str(name)) for name in annotates),
        synonyms={normalize_name(str(word)): normalize_name(str(name)) for word, name in dict(synonyms).items()},
        state=path.parent / "state",
    )


def read_experiment_data_spec(path: Path) -> tuple[DataSpec, Path]:
    """Return ``[data]`` of an experiment file, and the folder from which its relative paths start.

    Raises:
        BadInput: If the file has a fault, or no ``[data]``.
    """
    from polyclinic.common.config import read_experiment  # imported here, because this import is slow

    file = read_experiment(path)
    if file.experiment.data is None:
        raise BadInput([Fault(f"{path.name}: [data]", "is missing, so there are no images.")])
    return file.experiment.data, file.base_folder


def make_npz_test_spec(labelled: EvaluationInput, run_spec: NpzDatasetSpec | None = None) -> NpzDatasetSpec:
    """Return the data spec by which the labelled npz file is read.

    If the options name no classes, class names and image size are those of the run.

    Args:
        run_spec: Data spec of the npz file that the run was trained on; None if it is not known.
    """
    spec = NpzDatasetSpec(kind="npz", path=str(labelled.data.resolve()), classes=tuple(labelled.class_names))
    if run_spec is None or labelled.class_names:
        return spec
    return spec.model_copy(update={key: getattr(run_spec, key) for key in ("classes", "keep", "image_size", "resize")})


def read_labelled_csv_columns(labelled: EvaluationInput) -> CsvTable:
    """Return the columns of the csv; check that columns named by options exist.

    Raises:
        BadInput: If the file is no csv, or lacks a column that an option names.
    """
    if not is_file(labelled.data):
        raise BadInput([make_missing_input_fault(labelled.data)])
    columns = read_csv_table(labelled.data, str(labelled.data))
    options = {"--image-column": labelled.image_column, "--patient-column": labelled.patient_column}
    raise_faults(find_missing_column_faults(str(labelled.data), columns, options))
    return columns
