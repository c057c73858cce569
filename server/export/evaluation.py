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
    FEWEST_POSITIVES,
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

ALL_OF = "all of "
MAY_BE_TRAINED_ON = (
    "These images may contain images that the model was trained on, and the figures are then too good. A hospital that "
    "took part names its site.toml in place of the table: the test part counts."
)
SpecT = TypeVar("SpecT", NpzDatasetSpec, FolderDatasetSpec)
DataT = TypeVar("DataT", bound=BaseDatasetSpec)


@dataclass(frozen=True)
class SavedModelEvaluation:
    """The metrics of a saved model on labelled images.

    Attributes:
        images, patients: Number of images and of patients; patients is None if the data does not name them.
        decisions: Class -> numbers of right and wrong decisions at probability 0.5.
        source: Description of where the images come from.
        may_be_trained_on: True if the images are a whole table: nobody knows which of them the model was trained on.
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
        """The classes in the mean AUROC, by the rule of a run's report: enough images show them."""
        return tuple(
            name
            for name, result in self.results.items()
            if result.auroc is not None and (result.positives or 0) >= FEWEST_POSITIVES
        )

    @property
    def mean_auroc(self) -> float | None:
        """Return the mean AUROC over the classes that enough images show; None if there is none."""
        return compute_mean_and_sd(self.results[name].auroc for name in self.averaged_classes)[0]

    @property
    def mean_auroc_interval(self) -> Interval | None:
        """Return the 95 % interval of the mean AUROC; None if the mean leaves out a class that has an AUROC."""
        tested = [name for name, result in self.results.items() if result.auroc is not None]
        return self.intervals.mean_auroc if len(tested) == len(self.averaged_classes) else None


def evaluate_saved_model(folder: Path, labelled: EvaluationInput) -> SavedModelEvaluation:
    """Test a saved model on the classes that the model and the labelled data share.

    Args:
        folder: Folder with ``model.safetensors`` and ``model.json``. If it is a run folder, the experiment in its
            ``summary.json`` names the columns of a csv.

    Raises:
        BadInput: If something cannot be read, or model and data share no class.
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
        decisions={name: count_decisions(scores[:, c], labels[:, c]) for c, name in enumerate(shared)},
        intervals=bootstrap_auroc_intervals(scores, labels, test.patients, shared, np.random.default_rng(0)),
        skipped=test.skipped,
        source=source,
        may_be_trained_on=source.startswith(ALL_OF),
    )


def _read_test_images(network: SplitNetwork, folder: Path, labelled: EvaluationInput) -> tuple[ImageSet, str]:
    """Read the labelled images that the model was not trained on; return the images and a description of them."""
    data, form = labelled.data, read_model_description(folder).pixels
    if data.suffix == ".toml":
        described = read_labelled_dataset(data)
        splits = load_dataset(read_as_trained(described.spec, form), described.base, open_user_image_store())
        vocabulary = read_model_description(folder).vocabulary or {}
        images = merge_words_of_classes(select_hospital_images(splits, described), vocabulary)
        return images, f"the test part of {data.name}'s data"
    summary = read_run(folder).summary if (folder / "summary.json").is_file() else None
    if data.suffix == ".npz":
        npz_of_run = _parse_run_data_spec(summary, NpzDatasetSpec)
        npz, patient_key = make_npz_test_spec(labelled, npz_of_run), labelled.patient_column
        with name_cli_options_in_faults(labelled):
            if patient_key is None and npz_of_run and f"test_{npz_of_run.patient_key}" in read_npz_headers(data):
                patient_key = npz_of_run.patient_key
            npz = read_as_trained(npz.model_copy(update={"patient_key": patient_key}), form)
            return load_npz_test_part(npz, Path(), open_user_image_store()), f"the test part of {data.name}"
    columns = read_labelled_csv_columns(labelled)
    of_run = _parse_run_data_spec(summary, FolderDatasetSpec)
    if summary is None or of_run is None or summary.table_sha256 != hashlib.sha256(data.read_bytes()).hexdigest():
        vocabulary = read_model_description(folder).vocabulary or {}
        table = read_as_trained(_make_csv_spec(network, of_run, labelled, columns, vocabulary), form)
        splits = load_dataset(table, Path(), open_user_image_store())
        # The loader draws parts of its own, which say nothing about the images that the model was trained on.
        return concatenate_image_sets([splits.train, splits.validation, splits.test]), f"{ALL_OF}{data.name}"
    # The model was trained on some rows of this table, which is read as the run read it.
    own, remedy = "this is the run's own table, which the run read by", "Leave it out, or name another table."
    raise_faults(
        [
            Fault(option, f"is {column}; {own} {quote_names([column_of_run or 'none'])}.", remedy)
            for option, column, column_of_run in (
                ("--image-column", labelled.image_column, of_run.image_column),
                ("--patient-column", labelled.patient_column, of_run.patient_column),
            )
            if column is not None and column != column_of_run
        ]
    )
    path, parts = data.resolve(), Path(of_run.labels).parts
    base = path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else path.parent
    pictures = base / of_run.images if labelled.pictures is None else labelled.pictures.resolve()
    spec = of_run.model_copy(update={"labels": str(path), "images": str(pictures)})
    return load_dataset(
        spec, Path(), open_user_image_store()
    ).test, f"the test part of {data.name}, as the run split it"


def select_hospital_images(splits: DatasetSplits, described: LabelledDataset, *, every: bool = False) -> ImageSet:
    """Return the test part; of a hospital's site.toml, as its program has it.

    That is: every patient in the part that the site remembers, no patient who opted out, and the classes that the site
    annotates, by the names that it gives them in the federation.

    Args:
        every: True for the images of all parts.

    Raises:
        BadInput: If the site's memory is damaged, nobody knows who opted out, or ``annotates`` names no class.
    """
    if described.state is None:
        return concatenate_image_sets(splits.parts) if every else splits.test
    # Of parts that the hospital gives itself, none differs from those that are remembered: its program refuses that.
    given = described.spec.kind == "npz" or bool(getattr(described.spec, "split_column", None))
    if not given:
        splits, _ = PatientPartMemory(described.state).keep_known_parts(splits)
    splits, _ = leave_out_patients(splits, OptOutSource(described.base).require_identifiers())
    annotated = list_annotated_columns(splits.class_names, described.annotates, described.synonyms)
    raise_faults(find_foreign_column_faults(annotated, splits.class_names))
    images = concatenate_image_sets(splits.parts) if every else splits.test
    return select_annotated_classes(images, described.annotates, described.synonyms)


def _parse_run_data_spec(summary: RunSummary | None, kind: type[SpecT]) -> SpecT | None:
    """Return ``[data]`` of the run's experiment as a data spec of this kind.

    The result is None if ``summary`` is None, or if ``[data]`` is missing, of another kind or has unknown keys.
    """
    try:
        return TypeAdapter(kind).validate_python(summary and summary.experiment.get("data"))
    except ValidationError:
        return None


def _make_csv_spec(
    network: SplitNetwork,
    of_run: FolderDatasetSpec | None,
    labelled: EvaluationInput,
    columns: CsvTable,
    vocabulary: Vocabulary,
) -> FolderDatasetSpec:
    """Return the data spec by which the labelled images of a csv are read.

    The columns of images and patients are those named by options, else the run's if the csv has them, else those that
    the rules find (:mod:`polyclinic.data.tables.columns`). All other settings that the model does not fix are those of
    the run.

    Args:
        of_run: Data spec of the run that trained the model; None if it is not known.
        labelled: Command-line options, with the path of the csv.
        columns: All columns of the csv.
        vocabulary: The model's vocabulary; empty if it has none.

    Raises:
        BadInput: If no column holds labels of the model's classes.
    """

    def keep_existing_column(name: str | None) -> str | None:
        return name if name in columns else None

    images = labelled.image_column or keep_existing_column(of_run.image_column if of_run else None)
    images = images or keep_existing_column("image") or choose_image_column(columns)
    patients = labelled.patient_column or keep_existing_column(of_run.patient_column if of_run else None)
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
    synonyms = {**map_words_to_classes(columns, vocabulary), **(of_run.synonyms if of_run else {})}
    if own := tuple(name for name in columns if synonyms.get(name, name) in network.class_names):
        spec |= {"label_columns": own, "synonyms": {name: synonyms[name] for name in own if name in synonyms}}
    elif of_run is not None and of_run.finding_column in columns:
        spec["classes"] = tuple(
            name for name in of_run.class_names_in_table if synonyms.get(name, name) in network.class_names
        )
        for key in ("finding_column", "separator", "other_findings", "no_finding", "not_assessed", "synonyms"):
            spec[key] = getattr(of_run, key)
    else:
        finding_column = of_run.finding_column if of_run else None
        raise BadInput(find_class_column_faults(labelled.data, columns, network.class_names, finding_column))
    if of_run is not None:
        keys = ("blank", "resize", "frame", "axis", "window", "similar_patients")
        spec |= {key: getattr(of_run, key) for key in (*keys, *(("uncertain", "present", "absent") if own else ()))}
        if own and of_run.label_columns:
            spec["not_assessed"] = of_run.not_assessed
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
    result, decided = evaluation.results[name], evaluation.decisions[name]
    return {
        "auroc": result.auroc,
        "auroc_interval": evaluation.intervals.per_class.get(name),
        "average_precision": result.average_precision,
        "sensitivity": decided.sensitivity,
        "specificity": decided.specificity,
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
    first = (Text(f"! {MAY_BE_TRAINED_ON}", style="yellow"),) if evaluation.may_be_trained_on else ()
    return Group(*first, table, Text(describe_evaluation_result(evaluation)), *limits)


def describe_evaluation_result(evaluation: SavedModelEvaluation) -> str:
    """Return a sentence with the mean AUROC and the classes and images that it is computed from."""
    patients = "" if evaluation.patients is None else f" of {format_count_with_noun(evaluation.patients, 'patient')}"
    over = f"{format_count_with_noun(evaluation.images, 'image')}{patients} ({evaluation.source})"
    tested = sum(result.auroc is not None for result in evaluation.results.values())
    every = format_count_with_noun(len(evaluation.results), "class", "classes")
    if not tested:
        return f"None of {every} has an AUROC on {over}."
    rule = f"a mean counts the classes that {FEWEST_POSITIVES} images or more show"
    if evaluation.mean_auroc is None:
        return f"No mean AUROC can be given on {over}: {rule}."
    averaged = len(evaluation.averaged_classes)
    classes = every if averaged == len(evaluation.results) else f"{averaged} of {every}"
    interval = f" (95 % interval {format_interval(limits)})" if (limits := evaluation.mean_auroc_interval) else ""
    why = "" if averaged == tested else f": {rule}"
    return f"Mean AUROC {format_number(evaluation.mean_auroc)}{interval} over {classes} on {over}{why}."


def list_evaluation_limitations(evaluation: SavedModelEvaluation) -> Iterator[str]:
    """Yield one sentence for each limitation of the metrics, such as few images of a class."""
    for name, result in evaluation.results.items():
        if reason := explain_missing_auroc(result):
            yield f"“{name}” was not tested: {reason}."
        else:
            yield from warn_about_few_images(name, result.positives or 0, result.negatives or 0, "image")
    if blind := [f"“{name}”" for name, decided in evaluation.decisions.items() if decided.sensitivity == 0]:
        yield (
            f"At a threshold of 0.5 the model finds none of the positive images of {join_as_english_list(blind)} "
            "(sensitivity 0)."
        )
    if evaluation.patients is None:
        yield UNKNOWN_PATIENTS
    if sentence := describe_skipped_images(evaluation.skipped):
        yield sentence
