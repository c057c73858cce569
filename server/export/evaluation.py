"""flwr-sim evaluate: a saved model on labelled images, class by class, with intervals."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from common.data.base.image_set import ImageSet, Skipped, concatenated, patients_known
from common.data.base.spec import FolderSpec, NpzSpec
from common.data.images.reading import IN_MEMORY
from common.data.load import load, refuse_other_classes
from common.data.sources.npz import load_npz_test
from common.data.sources.npz_file import read_headers
from common.data.tables.csv import Columns
from common.data.tables.roles import image_column, patient_column
from common.errors import BadInput, Fault, quoted, stop_on
from common.metrics.auroc import ClassMetrics, mean_and_sd, per_class
from common.metrics.bootstrap import Interval, Intervals, auroc_intervals
from common.metrics.calibration import Decisions, decisions
from common.models.network import SplitNetwork, label_matrix
from common.models.saved import load_model
from common.system.plain_text import counted, listed, number, span
from server.export.prediction import Cell, picture_scores, table_text
from server.export.preflight import (
    LabelledInput,
    class_faults,
    columns_of,
    data_of_experiment,
    naming_options,
    npz_spec,
)
from server.reporting.run_claims import UNKNOWN_PATIENTS, few_images, why_undefined
from server.runs.reader import RunSummary, read_run

SpecT = TypeVar("SpecT", NpzSpec, FolderSpec)


@dataclass(frozen=True)
class Evaluation:
    """What a model gives on labelled images.

    Attributes:
        images, patients: Numbers of them; patients None where nobody told whose the images are.
        decisions: At probability 0.5.
        source: Which images these are, in words.
    """

    images: int
    patients: int | None
    results: Mapping[str, ClassMetrics]
    decisions: Mapping[str, Decisions]
    intervals: Intervals
    skipped: tuple[Skipped, ...]
    source: str

    @property
    def mean_auroc(self) -> float | None:
        """Return the mean AUROC over the classes that have one."""
        return mean_and_sd(result.auroc for result in self.results.values())[0]


def evaluate_on(folder: Path, given: LabelledInput) -> Evaluation:
    """Score a saved model on the classes that the labelled data and the model share.

    Args:
        folder: With ``model.safetensors`` and ``model.json``; where ``summary.json`` is beside them, its experiment
            says what the columns of a csv are.

    Raises:
        BadInput: If something cannot be read, or model and data share no class.
    """
    network = load_model(folder)
    test, source = _labelled(network, folder, given)
    refuse_other_classes(test, network.class_names, str(given.data), "the model knows")
    shared = tuple(name for name in network.class_names if name in test.class_names)
    columns = [network.class_names.index(name) for name in shared]
    scores, labels = picture_scores(network, test.images)[:, columns], label_matrix(test, shared).numpy()
    known = patients_known(test.patients)
    return Evaluation(
        images=len(test),
        patients=len(np.unique(test.patients)) if known else None,
        results=per_class(scores, labels, shared),
        decisions={name: decisions(scores[:, c], labels[:, c]) for c, name in enumerate(shared)},
        intervals=auroc_intervals(scores, labels, test.patients, shared, np.random.default_rng(0)),
        skipped=test.skipped,
        source=source,
    )


def _labelled(network: SplitNetwork, folder: Path, given: LabelledInput) -> tuple[ImageSet, str]:
    data = given.data
    if data.suffix == ".toml":
        spec, base = data_of_experiment(data)
        return load(spec, base).test, f"the test part of {data.name}'s data"
    summary = read_run(folder).summary if (folder / "summary.json").is_file() else None
    if data.suffix == ".npz":
        return _npz_test(given, _spec_of_run(summary, NpzSpec)), f"the test part of {data.name}"
    columns = columns_of(given)
    of_run = _spec_of_run(summary, FolderSpec)
    if summary and of_run and summary.table_sha256 == hashlib.sha256(data.read_bytes()).hexdigest():
        # The model was trained on some of its rows.
        stop_on(_other_columns(given, of_run))
        own = of_run.model_copy(update={"labels": str(data.resolve()), "images": str(_images(of_run, given))})
        return load(own, Path()).test, f"the test part of {data.name}, as the run split it"
    splits = load(_folder_spec(network, of_run, given, columns), Path())
    # All of it is test data, no matter how the loader split it.
    return concatenated([splits.train, splits.validation, splits.test]), f"all of {data.name}"


def _images(of_run: FolderSpec, given: LabelledInput) -> Path:
    """The folder of pictures: as named, else as the run's experiment says, seen from where the table lies."""
    table, said = given.data.resolve(), Path(of_run.labels)
    if given.pictures is not None:
        return given.pictures.resolve()
    beside = table.parts[-len(said.parts) :] == said.parts
    base = table.parents[len(said.parts) - 1] if beside else table.parent
    return base / of_run.images


def _other_columns(given: LabelledInput, of_run: FolderSpec) -> list[Fault]:
    """Columns that a person names and by which the run did not split its table."""
    named = {
        "--image-column": (given.image_column, of_run.image_column),
        "--patient-column": (given.patient_column, of_run.patient_column),
    }
    own = "this is the run's own table, which the run read by"
    return [
        Fault(option, f"is {wanted}; {own} {quoted([used or 'none'])}.", "Leave it out, or name another table.")
        for option, (wanted, used) in named.items()
        if wanted is not None and wanted != used
    ]


def _spec_of_run(summary: RunSummary | None, kind: type[SpecT]) -> SpecT | None:
    """How the run's own experiment reads its data; None without a run, and where its data are of another kind."""
    said = None if summary is None else summary.experiment.get("data")
    try:
        return TypeAdapter(kind).validate_python(said)
    except ValidationError:  # of another kind, or of another version
        return None


def _npz_test(given: LabelledInput, of_run: NpzSpec | None) -> ImageSet:
    """The test part of the npz file; the run's own array of patients is used where the file has it."""
    spec, own = npz_spec(given, of_run), None if of_run is None else of_run.patient_key
    with naming_options(given):
        there = own if f"test_{own}" in read_headers(given.data) else None
        return load_npz_test(spec.model_copy(update={"patient_key": given.patient_column or there}), Path(), IN_MEMORY)


def _folder_spec(
    network: SplitNetwork, of_run: FolderSpec | None, given: LabelledInput, columns: Columns
) -> FolderSpec:
    """How to read the csv: by what the person names, else by the run's column names, else by what its cells show."""
    images = given.image_column or _same(columns, of_run.image_column if of_run else None) or _same(columns, "image")
    images = images or image_column(columns)
    patients = given.patient_column or _same(columns, of_run.patient_column if of_run else None)
    patients = patients or patient_column(columns, (images, *network.class_names))
    spec: dict[str, Any] = {
        "kind": "folder",
        "images": str((given.pictures or given.data.parent).resolve()),
        "labels": str(given.data.resolve()),
        "image_column": images,
        "patient_column": patients,
        "image_size": network.spec.image_size,
        "color": network.spec.channels == 3,
        **_labels(columns, network, of_run, given.data),
    }
    alike = ("uncertain", "blank", "resize", "frame", "axis", "window") if of_run else ()
    return FolderSpec.model_validate({**spec, **{key: getattr(of_run, key) for key in alike}})


def _same(columns: Columns, name: str | None) -> str | None:
    return name if name in columns else None


def _labels(columns: Columns, network: SplitNetwork, of_run: FolderSpec | None, data: Path) -> dict[str, Any]:
    """One column a class that the model knows, or the run's one column with names of classes."""
    if own := tuple(name for name in columns if name in network.class_names):
        return {"label_columns": own}
    if of_run is not None and of_run.finding_column in columns:
        kept = tuple(name for name in of_run.classes if name in network.class_names)
        return {"finding_column": of_run.finding_column, "separator": of_run.separator, "classes": kept}
    raise BadInput(class_faults(data, columns, network.class_names, of_run.finding_column if of_run else None))


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return everything as a dictionary for JSON; what is undefined is None."""
    return {
        "data": evaluation.source,
        "images": evaluation.images,
        "patients": evaluation.patients,
        "unreadable": {skip.name: skip.reason for skip in evaluation.skipped},
        "threshold": 0.5,
        "mean_auroc": evaluation.mean_auroc,
        "mean_auroc_interval": evaluation.intervals.mean_auroc,
        "intervals_over": "images" if evaluation.patients is None else "patients",
        "classes": {name: _of_class(evaluation, name) for name in evaluation.results},
    }


def _of_class(evaluation: Evaluation, name: str) -> dict[str, Any]:
    result, made = evaluation.results[name], evaluation.decisions[name]
    return {
        "auroc": result.auroc,
        "auroc_interval": evaluation.intervals.per_class.get(name),
        "average_precision": result.average_precision,
        "sensitivity": made.sensitivity,
        "specificity": made.specificity,
        "positives": result.positives,
        "negatives": result.negatives,
    }


def as_csv(evaluation: Evaluation) -> bytes:
    """Return a csv file with one row a class; the ends of the interval have a column each."""
    names = ("class", "auroc", "auroc_low", "auroc_high", "average_precision", "sensitivity", "specificity")
    rows: list[list[Cell]] = [[*names, "positives", "negatives"]]
    for name in evaluation.results:
        row = _of_class(evaluation, name)
        low, high = row.pop("auroc_interval") or (None, None)
        rows.append([name, row.pop("auroc"), low, high, *row.values()])
    return table_text(rows)


def shown(evaluation: Evaluation) -> Group:
    """Return the table by class, the result in a sentence, and what limits it."""
    table = Table("class", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("AUROC", "95 % interval", "average precision", "sensitivity", "specificity", "with", "without"):
        table.add_column(heading, justify="right")
    for name in evaluation.results:
        row = _of_class(evaluation, name)
        table.add_row(
            Text(name),
            number(row["auroc"]),
            span(row["auroc_interval"]),
            *(number(row[key]) for key in ("average_precision", "sensitivity", "specificity")),
            str(row["positives"]),
            str(row["negatives"]),
        )
    return Group(table, Text(result(evaluation)), *(Text(f"! {each}", style="yellow") for each in limits(evaluation)))


def result(evaluation: Evaluation) -> str:
    """Say the mean AUROC in a sentence, and over what."""
    patients = "" if evaluation.patients is None else f" of {counted(evaluation.patients, 'patient')}"
    over = f"{counted(evaluation.images, 'image')}{patients} ({evaluation.source})"
    tested = sum(each.auroc is not None for each in evaluation.results.values())
    every = counted(len(evaluation.results), "class", "classes")
    if evaluation.mean_auroc is None:
        return f"None of {every} has an AUROC on {over}."
    classes = every if tested == len(evaluation.results) else f"{tested} of {every}"
    interval: Interval | None = evaluation.intervals.mean_auroc
    return f"Mean AUROC {number(evaluation.mean_auroc)} (95 % interval {span(interval)}) over {classes} on {over}."


def limits(evaluation: Evaluation) -> Iterator[str]:
    """Yield what these figures do not show, one sentence each."""
    for name, result in evaluation.results.items():
        if reason := why_undefined(result):
            yield f"“{name}” was not tested: {reason}."
        else:
            yield from few_images(name, result.positives or 0, result.negatives or 0, "image")
    if blind := [f"“{name}”" for name, made in evaluation.decisions.items() if made.sensitivity == 0]:
        yield f"At a threshold of 0.5 the model finds none of the positive images of {listed(blind)} (sensitivity 0)."
    if evaluation.patients is None:
        yield UNKNOWN_PATIENTS
    if evaluation.skipped:
        images, first = counted(len(evaluation.skipped), "image"), evaluation.skipped[0]
        yield f"{images} could not be read; the first is {first.name}: {first.reason}."
