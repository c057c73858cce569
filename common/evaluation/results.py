"""Format the results of an evaluation for a terminal, as JSON and as csv."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from polyclinic.common.evaluation.evaluation import Evaluation, ScoredData
from polyclinic.common.evaluation.figures import (
    ALL_DATA,
    ClassFigures,
    DecisionsAtThreshold,
    FigureRow,
    ModelComparison,
)
from polyclinic.common.evaluation.thresholds import DEFAULT_THRESHOLD
from polyclinic.common.metrics.auroc import MIN_POSITIVES
from polyclinic.common.metrics.measured import format_value_with_error
from polyclinic.common.reporting.fitted_table import FittedTable
from polyclinic.common.reporting.limits import UNKNOWN_PATIENTS
from polyclinic.common.system.csv_text import Cell, format_rows_as_csv
from polyclinic.common.system.plain_text import (
    NOT_APPLICABLE,
    format_count_with_noun,
    format_interval,
    format_number,
    format_signed,
    join_as_english_list,
)
from polyclinic.data.base.image_set import describe_skipped_images

MIN_PRINTED_P = 0.001
"""Smallest p-value that is printed as a number."""


def list_main_data(evaluation: Evaluation) -> list[str]:
    """Return the names of the data sets, after the name of all data together if there are several."""
    names = [each.name for each in evaluation.data]
    return [ALL_DATA, *names] if len(names) > 1 else names


def describe_data(data: ScoredData) -> str:
    """Return a sentence about a data set: number of images and patients, and a description of the images."""
    patients = "" if data.patients is None else f" of {format_count_with_noun(data.patients, 'patient')}"
    return f"{data.name}: {format_count_with_noun(data.images, 'image')}{patients}. {data.about}"


def list_limitations(evaluation: Evaluation) -> Iterator[str]:
    """Yield a sentence for each limitation of the results."""
    figures = evaluation.figures
    yield from evaluation.notes
    for model in evaluation.models:
        if model.unlearned:
            reasons = [f"“{name}” ({reason})" for name, reason in model.unlearned.items()]
            yield f"{model.name} has not learned {join_as_english_list(reasons)}: no figures."
    yield from filter(None, (describe_coverage(evaluation, data) for data in evaluation.data))
    for data_name in list_main_data(evaluation):
        few = [
            f"“{row.class_name}” ({row.figures.positives} with, {row.figures.negatives} without)"
            for row in figures.rows
            if row.data == data_name and not row.column and row.figures.rests_on_few
        ]
        if few:
            where = f" in {data_name}" if len(evaluation.data) > 1 else ""
            listed = join_as_english_list(list(dict.fromkeys(few)))
            yield f"Fewer than {MIN_POSITIVES} images with or without the finding{where}: {listed}."
    for each in evaluation.data:
        with_figures = {(row.model, row.class_name) for row in figures.rows if row.data == each.name}
        tested = [(cover.model, name) for cover in figures.coverage if cover.data == each.name for name in cover.tested]
        if unlabelled := list(dict.fromkeys(name for model, name in tested if (model, name) not in with_figures)):
            yield f"{each.name} has no image with a known label of {_quote_classes(unlabelled)}: no figures."
    unfixed = [model.name for model in evaluation.models if _lacks_fixed_threshold(evaluation, model.name)]
    if unfixed:
        yield (
            f"Sensitivity and specificity of {join_as_english_list(unfixed)} are at 0.5 where no threshold was fixed "
            "beforehand, which need not suit the model."
        )
    if not figures.over_patients:
        yield UNKNOWN_PATIENTS
    for each in evaluation.data:
        if sentence := describe_skipped_images(each.skipped):
            yield f"{each.name}: {sentence}"


def _lacks_fixed_threshold(evaluation: Evaluation, model: str) -> bool:
    rows = [row for row in evaluation.figures.rows if row.model == model]
    return any(point.rule == DEFAULT_THRESHOLD.rule for row in rows for point in row.figures.points)


def describe_coverage(evaluation: Evaluation, data: ScoredData) -> str:
    """Return a sentence about the classes without metrics on a data set; empty if there are none."""
    coverages = [coverage for coverage in evaluation.figures.coverage if coverage.data == data.name]
    unannotated = list(dict.fromkeys(name for coverage in coverages for name in coverage.not_annotated))
    parts = []
    if unannotated:
        parts.append(f"does not annotate {_quote_classes(unannotated)}")
    for coverage in coverages:
        if coverage.not_in_model:
            parts.append(f"annotates {_quote_classes(coverage.not_in_model)}, which {coverage.model} lacks")
    if not parts:
        return ""
    return f"{data.name} {', and '.join(parts)}: no figures, and none of these counts as absent."


def _quote_classes(names: Sequence[str]) -> str:
    return join_as_english_list([f"“{name}”" for name in names])


def format_p(value: float | None) -> str:
    """Format a p-value with three decimals; values below 0.001 as ``< 0.001``."""
    if value is None:
        return NOT_APPLICABLE
    return f"< {MIN_PRINTED_P}" if value < MIN_PRINTED_P else f"{value:.3f}"


# ---------------------------------------------------------------------- terminal


def format_for_terminal(evaluation: Evaluation) -> Group:
    """Format the result for a terminal: cautions first, then a table per data set, comparisons, and limitations."""
    parts: list[Any] = [Text(f"! {caution}", style="yellow") for caution in evaluation.cautions]
    parts += [Text(describe_data(data)) for data in evaluation.data]
    for data in list_main_data(evaluation):
        rows = [row for row in evaluation.figures.rows if row.data == data and not row.column]
        if rows:
            parts.append(_make_figure_table(rows, data if len(evaluation.data) > 1 else ""))
    if compared := [each for each in evaluation.figures.comparisons if each.data == list_main_data(evaluation)[0]]:
        parts.append(_make_comparison_table(compared))
    parts += [Text(f"! {limit}", style="yellow") for limit in list_limitations(evaluation)]
    return Group(*parts)


def _make_figure_table(rows: list[FigureRow], title: str) -> FittedTable:
    several = len({row.model for row in rows}) > 1
    first = "class, model" if several else "class"
    headings = (first, "AUROC", "95 % interval", "average precision", "sensi- tivity", "speci- ficity")
    cells = []
    for row in rows:
        figures = row.figures
        shares = _read_first_shares(figures)
        precision = format_value_with_error(figures.average_precision_with_error)
        auroc = format_value_with_error(figures.auroc_with_error), format_interval(figures.auroc_interval)
        counts = str(figures.positives), str(figures.negatives)
        name = f"{row.class_name}, {row.model}" if several else row.class_name
        cells.append((name, *auroc, precision, *map(format_number, shares), *counts))
    return FittedTable(title, (*headings, "with", "without"), tuple(cells)).drop_empty_columns()


def _read_first_shares(figures: ClassFigures) -> tuple[float | None, float | None]:
    """Return sensitivity and specificity at the first fixed threshold; None if there are no decisions."""
    if not figures.points:
        return None, None
    decisions = figures.points[0].decisions
    return decisions.sensitivity, decisions.specificity


def _make_comparison_table(compared: list[ModelComparison]) -> FittedTable:
    headings = ("class: AUROC of one model − another", "difference", "95 % interval", "p", "p (Holm)")
    cells = [
        (
            f"{each.class_name}: {each.first} − {each.second}",
            format_signed(each.difference.value),
            " to ".join(map(format_signed, each.difference.interval)),
            format_p(each.p_value),
            format_p(each.holm_p),
        )
        for each in compared
    ]
    return FittedTable("Models on the same images", headings, tuple(cells), caption=describe_test(compared))


def describe_test(compared: list[ModelComparison]) -> str:
    """Return a sentence that names the test of the p-values and the correction."""
    tests = join_as_english_list(list(dict.fromkeys(each.test for each in compared)))
    return f"p: {tests}; Holm: corrected over the classes of two models on the same images."


# ---------------------------------------------------------------------- JSON and csv


def make_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return all results as a dictionary for JSON, with None for undefined metrics."""
    figures = evaluation.figures
    return {
        "cautions": list(evaluation.cautions),
        "models": [asdict(model) for model in evaluation.models],
        "data": [asdict(data) for data in evaluation.data],
        "classes": list(evaluation.class_names),
        "intervals_over": "patients" if figures.over_patients else "images",
        "figures": [_make_row_json(row) for row in figures.rows],
        "comparisons": [asdict(each) for each in figures.comparisons],
        "coverage": [asdict(each) for each in figures.coverage],
        "limitations": list(list_limitations(evaluation)),
    }


def _make_row_json(row: FigureRow) -> dict[str, Any]:
    figures = row.figures
    points = [
        {
            **asdict(point),
            "sensitivity": point.decisions.sensitivity,
            "specificity": point.decisions.specificity,
        }
        for point in figures.points
    ]
    subgroup: Mapping[str, Any] = {"column": row.column, "group": row.group} if row.column else {}
    return {
        "data": row.data,
        "model": row.model,
        "class": row.class_name,
        **subgroup,
        **{**asdict(figures), "points": points},
    }


FIGURE_HEADINGS = (
    *("data", "column", "group", "class", "model", "positives", "negatives", "positive_patients"),
    *("auroc", "auroc_low", "auroc_high"),
    *("average_precision", "average_precision_low", "average_precision_high"),
    *("threshold_rule", "threshold", "sensitivity", "sensitivity_low", "sensitivity_high"),
    *("specificity", "specificity_low", "specificity_high", "calibration_error", "brier"),
    *("auroc_error", "average_precision_error"),
)


def make_figures_csv(evaluation: Evaluation) -> bytes:
    """Return a csv file, as bytes, with a row for each data set, subgroup, class, model and threshold."""
    rows: list[tuple[Cell, ...]] = [FIGURE_HEADINGS]
    for row in evaluation.figures.rows:
        rows += _list_csv_rows(row, row.figures)
    return format_rows_as_csv(rows)


def _list_csv_rows(row: FigureRow, figures: ClassFigures) -> Iterator[tuple[Cell, ...]]:
    calibration = figures.calibration
    quality = (None, None) if calibration is None else (calibration.expected_error, calibration.brier)
    for at_threshold in [_list_point_cells(point) for point in figures.points] or [(None,) * THRESHOLD_CELLS]:
        yield (
            *(row.data, row.column, row.group, row.class_name, row.model),
            *(figures.positives, figures.negatives, figures.positive_patients),
            *(figures.auroc, *(figures.auroc_interval or (None, None))),
            *(figures.average_precision, *(figures.average_precision_interval or (None, None))),
            *at_threshold,
            *quality,
            *(figures.auroc_error, figures.average_precision_error),
        )


THRESHOLD_CELLS = 8
"""Number of cells about one threshold in a row of the csv."""


def _list_point_cells(point: DecisionsAtThreshold) -> tuple[Cell, ...]:
    decided = point.decisions
    return (
        *(point.rule, point.threshold),
        *(decided.sensitivity, *(point.sensitivity_interval or (None, None))),
        *(decided.specificity, *(point.specificity_interval or (None, None))),
    )


COMPARISON_HEADINGS = (
    *("data", "class", "first", "second", "images", "difference", "low", "high"),
    *("delong_p", "patient_p", "test", "p", "holm_p"),
)


def make_comparisons_csv(evaluation: Evaluation) -> bytes:
    """Return a csv file, as bytes, with a row for each data set, class and pair of models."""
    rows: list[tuple[Cell, ...]] = [COMPARISON_HEADINGS]
    for each in evaluation.figures.comparisons:
        difference = each.difference
        rows.append(
            (
                *(each.data, each.class_name, each.first, each.second, each.images),
                *(difference.value, *difference.interval),
                *(each.delong_p, each.patient_p, each.test, each.p_value, each.holm_p),
            )
        )
    return format_rows_as_csv(rows)
