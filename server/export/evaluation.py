"""``flwr-sim evaluate``: test a saved model on labelled images, with metrics per class and confidence intervals."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.console import Group
from rich.text import Text

from polyclinic.common.class_columns import (
    find_foreign_column_faults,
    list_annotated_columns,
    select_annotated_classes,
)
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.metrics.auroc import (
    MIN_POSITIVES,
    ClassMetrics,
    compute_mean_and_sd,
    compute_metrics_per_class,
)
from polyclinic.common.metrics.bootstrap import AurocIntervals, Interval, bootstrap_auroc_intervals
from polyclinic.common.metrics.calibration import DecisionCounts, count_decisions
from polyclinic.common.models.network import SplitNetwork, select_head_row_labels
from polyclinic.common.models.saved import load_model, read_model_description
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.patients.opt_out import OptOutSource, leave_out_patients
from polyclinic.common.patients.parts import PatientPartMemory
from polyclinic.common.prediction.masks import refuse_segmentation
from polyclinic.common.reporting.fitted_table import FittedTable
from polyclinic.common.reporting.limits import UNKNOWN_PATIENTS, warn_about_few_images
from polyclinic.common.system.csv_text import Cell, format_rows_as_csv
from polyclinic.common.system.plain_text import (
    format_count_with_noun,
    format_interval,
    format_number,
    join_as_english_list,
)
from polyclinic.common.vocabulary import Vocabulary, map_words_to_classes, merge_words_of_classes
from polyclinic.data.base.image_set import (
    DatasetSplits,
    ImageSet,
    SkippedImage,
    are_all_patients_known,
    concatenate_image_sets,
    describe_skipped_images,
)
from polyclinic.data.base.pixel_form import read_as_trained
from polyclinic.data.base.spec import BaseDatasetSpec, FolderDatasetSpec, NpzDatasetSpec
from polyclinic.data.images.store import open_user_image_store
from polyclinic.data.load import load_dataset, refuse_test_set_without_model_class
from polyclinic.data.sources.npz import load_npz_test_part
from polyclinic.data.sources.npz_file import read_npz_headers
from polyclinic.data.tables.columns import choose_image_column, choose_patient_column
from polyclinic.data.tables.csv import CsvTable
from polyclinic.server.export.preflight import (
    EvaluationInput,
    LabelledDataset,
    find_class_column_faults,
    make_npz_test_spec,
    name_cli_options_in_faults,
    read_labelled_csv_columns,
    read_labelled_dataset,
)
from polyclinic.server.reporting.run_claims import explain_missing_auroc
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.schema import RunSummary

WHOLE_TABLE_PREFIX = "all of "
"""Beginning of the description of images that are the rows of a whole table, of no test part."""
TRAINED_ON_WARNING = (
    "These images may contain images that the model was trained on, and the figures are then too good. A hospital that "
    "took part names its site.toml in place of the table: the test part counts."
)
SpecT = TypeVar("SpecT", NpzDatasetSpec, FolderDatasetSpec)
DataT = TypeVar("DataT", bound=BaseDatasetSpec)


@dataclass(frozen=True)
class SavedModelEvaluation:
    """The metrics of a saved model on labelled images.

    Attributes:
        images: Number of images.
        patients: Number of patients; None if the data does not name the patient of each image.
        results: Class -> AUROC, average precision and numbers of positive and negative images.
        decisions: Class -> numbers of right and wrong decisions at probability 0.5.
        intervals: 95 % intervals of the AUROCs.
        skipped: Images that could not be read.
        source: Description of the origin of the images.
        may_be_trained_on: True if the images are a whole table, which may contain training images of the model.
    """

    images: int
    patients: int | None
    results: Mapping[str, ClassMetrics]
    decisions: Mapping[str, DecisionCounts]
    intervals: AurocIntervals
    skipped: tuple[SkippedImage, ...]
    source: str
    may_be_trained_on: bool = False

    @property
    def averaged_classes(self) -> tuple[str, ...]:
        """The classes in the mean AUROC, as in a run's report: those with at least ``FEWEST_POSITIVES`` positives."""
        return tuple(
            name
            for name, result in self.results.items()
            if result.auroc is not None and (result.positives or 0) >= MIN_POSITIVES
        )

    @property
    def mean_auroc(self) -> float | None:
        """The mean AUROC over :attr:`averaged_classes`; None if there are none."""
        return compute_mean_and_sd(self.results[name].auroc for name in self.averaged_classes)[0]

    @property
    def mean_auroc_interval(self) -> Interval | None:
        """The 95 % interval of the mean AUROC; None if the mean leaves out a class that has an AUROC."""
        tested = [name for name, result in self.results.items() if result.auroc is not None]
        return self.intervals.mean_auroc if len(tested) == len(self.averaged_classes) else None


def evaluate_saved_model(folder: Path, labelled: EvaluationInput) -> SavedModelEvaluation:
    """Test a saved model on the classes that the model and the labelled data share.

    Args:
        folder: Folder with ``model.safetensors`` and ``model.json``. If it is a run folder, the experiment in its
            ``summary.json`` names the columns of a csv.

    Raises:
        BadInput: If the model or the data cannot be read, or they share no class.
    """
    network = load_model(folder)
    refuse_segmentation(network, "evaluate")
    test, source = _read_test_images(network, folder, labelled)
    refuse_test_set_without_model_class(test, network.class_names, str(labelled.data), "the model knows")
    shared = tuple(name for name in network.class_names if name in test.class_names)
    columns = [network.class_names.index(name) for name in shared]
    scores = compute_picture_probabilities(network, test)[:, columns]
    labels = select_head_row_labels(test, shared).numpy()
    return SavedModelEvaluation(
        images=len(test),
        patients=len(np.unique(test.patients)) if are_all_patients_known(test.patients) else None,
        results=compute_metrics_per_class(scores, labels, shared),
        decisions={name: count_decisions(scores[:, column], labels[:, column]) for column, name in enumerate(shared)},
        intervals=bootstrap_auroc_intervals(scores, labels, test.patients, shared, np.random.default_rng(0)),
        skipped=test.skipped,
        source=source,
        may_be_trained_on=source.startswith(WHOLE_TABLE_PREFIX),
    )


def _read_test_images(network: SplitNetwork, folder: Path, labelled: EvaluationInput) -> tuple[ImageSet, str]:
    """Read the labelled test images; return them and a description of their origin.

    Images that the model was trained on are left out as far as the run folder or the hospital's folder shows them. For
    another table, all images are returned.
    """
    data = labelled.data
    pixel_form = read_model_description(folder).pixels
    if data.suffix == ".toml":
        described = read_labelled_dataset(data)
        splits = load_dataset(read_as_trained(described.spec, pixel_form), described.base, open_user_image_store())
        vocabulary = read_model_description(folder).vocabulary or {}
        images = merge_words_of_classes(select_hospital_images(splits, described), vocabulary)
        return images, f"the test part of {data.name}'s data"
    summary = read_run(folder).summary if (folder / "summary.json").is_file() else None
    if data.suffix == ".npz":
        run_npz = _parse_run_data_spec(summary, NpzDatasetSpec)
        npz = make_npz_test_spec(labelled, run_npz)
        patient_key = labelled.patient_column
        with name_cli_options_in_faults(labelled):
            if patient_key is None and run_npz and f"test_{run_npz.patient_key}" in read_npz_headers(data):
                patient_key = run_npz.patient_key
            npz = read_as_trained(npz.model_copy(update={"patient_key": patient_key}), pixel_form)
            return load_npz_test_part(npz, Path(), open_user_image_store()), f"the test part of {data.name}"
    columns = read_labelled_csv_columns(labelled)
    run_spec = _parse_run_data_spec(summary, FolderDatasetSpec)
    if summary is None or run_spec is None or summary.table_sha256 != hashlib.sha256(data.read_bytes()).hexdigest():
        vocabulary = read_model_description(folder).vocabulary or {}
        table = read_as_trained(_make_csv_spec(network, run_spec, labelled, columns, vocabulary), pixel_form)
        splits = load_dataset(table, Path(), open_user_image_store())
        # The loader draws a new random split, which is not the split that the model was trained with. So use all parts.
        return concatenate_image_sets(
            [splits.train, splits.validation, splits.test]
        ), f"{WHOLE_TABLE_PREFIX}{data.name}"

    # This is the table that the run used. It is read by the run's settings, so that the same rows are the test part.
    reason = "this is the run's own table, which the run read by"
    remedy = "Leave it out, or name another table."
    faults = [
        Fault(option, f"is {column}; {reason} {quote_names([run_column or 'none'])}.", remedy)
        for option, column, run_column in (
            ("--image-column", labelled.image_column, run_spec.image_column),
            ("--patient-column", labelled.patient_column, run_spec.patient_column),
        )
        if column is not None and column != run_column
    ]
    raise_faults(faults)
    path = data.resolve()
    relative_parts = Path(run_spec.labels).parts
    # The run's relative paths of table and images start from one folder, which may have moved.
    is_same_relative_path = path.parts[-len(relative_parts) :] == relative_parts
    base = path.parents[len(relative_parts) - 1] if is_same_relative_path else path.parent
    pictures = base / run_spec.images if labelled.pictures is None else labelled.pictures.resolve()
    spec = run_spec.model_copy(update={"labels": str(path), "images": str(pictures)})
    splits = load_dataset(spec, Path(), open_user_image_store())
    return splits.test, f"the test part of {data.name}, as the run split it"


def select_hospital_images(splits: DatasetSplits, described: LabelledDataset, *, all_parts: bool = False) -> ImageSet:
    """Return the test part of a data set.

    For a hospital's ``site.toml``, the result has the same images and labels as in ``flwr-client``. Each patient is in
    the part that the site has stored, patients who opted out are left out, and the classes are those that the site
    annotates, under their names in the federation.

    Args:
        splits: The loaded data set.
        described: Where the data set comes from.
        all_parts: True to return the images of all parts, not only of the test part.

    Raises:
        BadInput: If the site's stored parts are damaged, the list of patients who opted out is missing, or
            ``annotates`` names no class of the data.
    """
    if described.state is None:
        return concatenate_image_sets(splits.parts) if all_parts else splits.test
    # If the hospital's data names the parts, they equal the stored parts: flwr-client refuses a difference.
    names_parts = described.spec.kind == "npz" or bool(getattr(described.spec, "split_column", None))
    if not names_parts:
        splits, _ = PatientPartMemory(described.state).keep_known_parts(splits)
    splits, _ = leave_out_patients(splits, OptOutSource(described.base).require_identifiers())
    annotated = list_annotated_columns(splits.class_names, described.annotates, described.synonyms)
    raise_faults(find_foreign_column_faults(annotated, splits.class_names))
    images = concatenate_image_sets(splits.parts) if all_parts else splits.test
    return select_annotated_classes(images, described.annotates, described.synonyms)


def _parse_run_data_spec(summary: RunSummary | None, kind: type[SpecT]) -> SpecT | None:
    """Return the table ``[data]`` of a run's experiment as a data spec of this kind.

    The result is None if ``summary`` is None, or if ``[data]`` is missing, of another kind or has unknown keys.
    """
    try:
        return TypeAdapter(kind).validate_python(summary and summary.experiment.get("data"))
    except ValidationError:
        return None


def _make_csv_spec(
    network: SplitNetwork,
    run_spec: FolderDatasetSpec | None,
    labelled: EvaluationInput,
    columns: CsvTable,
    vocabulary: Vocabulary,
) -> FolderDatasetSpec:
    """Return the data spec by which the labelled images of a csv are read.

    The columns of images and patients are named by command-line options. Without options they are the run's columns, or
    if the csv does not have these, a guess (:mod:`polyclinic.data.tables.columns`). All other settings that the model
    does not fix are those of the run.

    Args:
        network: The model, which fixes classes, image size and channels.
        run_spec: Data spec of the run that trained the model; None if it is not known.
        labelled: Command-line options, with the path of the csv.
        columns: All columns of the csv.
        vocabulary: The model's vocabulary; empty if it has none.

    Raises:
        BadInput: If no column holds labels of the model's classes.
    """

    def keep_existing_column(name: str | None) -> str | None:
        return name if name in columns else None

    images = labelled.image_column or keep_existing_column(run_spec.image_column if run_spec else None)
    images = images or keep_existing_column("image") or choose_image_column(columns)
    patients = labelled.patient_column or keep_existing_column(run_spec.patient_column if run_spec else None)
    patients = patients or choose_patient_column(columns)
    spec: dict[str, Any] = {
        "kind": "folder",
        "images": str((labelled.pictures or labelled.data.parent).resolve()),
        "labels": str(labelled.data.resolve()),
        "image_column": images,
        "patient_column": patients,
        "image_size": network.spec.image_size,
        "color": network.spec.channels == 3 and not network.spec.takes_volumes,
    }
    synonyms = {**map_words_to_classes(columns, vocabulary), **(run_spec.synonyms if run_spec else {})}
    label_columns = tuple(name for name in columns if synonyms.get(name, name) in network.class_names)
    if label_columns:
        used_synonyms = {name: synonyms[name] for name in label_columns if name in synonyms}
        spec |= {"label_columns": label_columns, "synonyms": used_synonyms}
    elif run_spec is not None and run_spec.finding_column in columns:
        spec["classes"] = tuple(
            name for name in run_spec.class_names_in_table if synonyms.get(name, name) in network.class_names
        )
        for key in ("finding_column", "separator", "other_findings", "no_finding", "not_assessed", "synonyms"):
            spec[key] = getattr(run_spec, key)
    else:
        finding_column = run_spec.finding_column if run_spec else None
        raise BadInput(find_class_column_faults(labelled.data, columns, network.class_names, finding_column))
    if run_spec is not None:
        keys = ["blank", "resize", "frame", "axis", "window", "similar_patients"]
        if label_columns:
            keys += ["uncertain", "present", "absent"]
        spec |= {key: getattr(run_spec, key) for key in keys}
        if label_columns and run_spec.label_columns:
            spec["not_assessed"] = run_spec.not_assessed
    return FolderDatasetSpec.model_validate(spec)


def evaluation_as_json(evaluation: SavedModelEvaluation) -> dict[str, Any]:
    """Return the evaluation as a dictionary for JSON, with None for undefined figures."""
    return {
        "data": evaluation.source,
        "may_be_trained_on": evaluation.may_be_trained_on,
        "images": evaluation.images,
        "patients": evaluation.patients,
        "unreadable": {skip.name: skip.reason for skip in evaluation.skipped},
        "threshold": 0.5,
        "mean_auroc": evaluation.mean_auroc,
        "mean_auroc_interval": evaluation.mean_auroc_interval,
        "intervals_over": "images" if evaluation.patients is None else "patients",
        "classes": {name: _class_metrics_as_json(evaluation, name) for name in evaluation.results},
    }


def _class_metrics_as_json(evaluation: SavedModelEvaluation, name: str) -> dict[str, Any]:
    result = evaluation.results[name]
    decisions = evaluation.decisions[name]
    return {
        "auroc": result.auroc,
        "auroc_interval": evaluation.intervals.per_class.get(name),
        "average_precision": result.average_precision,
        "sensitivity": decisions.sensitivity,
        "specificity": decisions.specificity,
        "positives": result.positives,
        "negatives": result.negatives,
    }


def evaluation_as_csv(evaluation: SavedModelEvaluation) -> bytes:
    """Return the evaluation as a csv with one row per class."""
    names = ("class", "auroc", "auroc_low", "auroc_high", "average_precision", "sensitivity", "specificity")
    rows: list[list[Cell]] = [[*names, "positives", "negatives"]]
    for name in evaluation.results:
        row = _class_metrics_as_json(evaluation, name)
        low, high = row.pop("auroc_interval") or (None, None)
        rows.append([name, row.pop("auroc"), low, high, *row.values()])
    return format_rows_as_csv(rows)


def format_model_evaluation(evaluation: SavedModelEvaluation) -> Group:
    """Format the evaluation for a terminal: a table by class, the result in one sentence, and its limits."""
    headings = ("AUROC", "95 % interval", "average precision", "sensi- tivity", "speci- ficity", "with", "without")
    rows = []
    for name in evaluation.results:
        auroc, interval, *measures, positives, negatives = _class_metrics_as_json(evaluation, name).values()
        figures = (format_number(auroc), format_interval(interval), *map(format_number, measures))
        rows.append((name, *figures, str(positives), str(negatives)))
    table = FittedTable("", ("class", *headings), tuple(rows)).drop_empty_columns()
    limits = (Text(f"! {limit}", style="yellow") for limit in list_evaluation_limitations(evaluation))
    warnings = (Text(f"! {TRAINED_ON_WARNING}", style="yellow"),) if evaluation.may_be_trained_on else ()
    return Group(*warnings, table, Text(describe_evaluation_result(evaluation)), *limits)


def describe_evaluation_result(evaluation: SavedModelEvaluation) -> str:
    """Return a sentence with the mean AUROC and the classes and images that it is computed from."""
    patients = "" if evaluation.patients is None else f" of {format_count_with_noun(evaluation.patients, 'patient')}"
    data = f"{format_count_with_noun(evaluation.images, 'image')}{patients} ({evaluation.source})"
    tested = sum(result.auroc is not None for result in evaluation.results.values())
    all_classes = format_count_with_noun(len(evaluation.results), "class", "classes")
    if not tested:
        return f"None of {all_classes} has an AUROC on {data}."
    rule = f"a mean counts the classes that {MIN_POSITIVES} images or more show"
    if evaluation.mean_auroc is None:
        return f"No mean AUROC can be given on {data}: {rule}."
    averaged = len(evaluation.averaged_classes)
    classes = all_classes if averaged == len(evaluation.results) else f"{averaged} of {all_classes}"
    limits = evaluation.mean_auroc_interval
    interval = f" (95 % interval {format_interval(limits)})" if limits else ""
    explanation = "" if averaged == tested else f": {rule}"
    return f"Mean AUROC {format_number(evaluation.mean_auroc)}{interval} over {classes} on {data}{explanation}."


def list_evaluation_limitations(evaluation: SavedModelEvaluation) -> Iterator[str]:
    """Yield one sentence for each limitation of the metrics, such as few images of a class."""
    for name, result in evaluation.results.items():
        if reason := explain_missing_auroc(result):
            yield f"“{name}” was not tested: {reason}."
        else:
            yield from warn_about_few_images(name, result.positives or 0, result.negatives or 0, "image")
    undetected = [f"“{name}”" for name, counts in evaluation.decisions.items() if counts.sensitivity == 0]
    if undetected:
        yield (
            f"At a threshold of 0.5 the model finds none of the positive images of {join_as_english_list(undetected)} "
            "(sensitivity 0)."
        )
    if evaluation.patients is None:
        yield UNKNOWN_PATIENTS
    if sentence := describe_skipped_images(evaluation.skipped):
        yield sentence
