"""Make one evaluation from the hospitals' answers: the figures of each hospital, and pooled figures of all images.

Pooled figures come from sums of score histograms. The order of images inside a histogram bin is not known, so the
pooled AUROC and average precision have an error bound. Pooled decisions, calibration error and Brier score are exact.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from polyclinic.common.evaluation.evaluation import (
    Evaluation,
    ScoredData,
    ScoredModel,
    name_classes_of_models,
    warn_about_origin,
)
from polyclinic.common.evaluation.figures import (
    ALL_DATA,
    DELONG,
    PATIENT_BOOTSTRAP,
    ClassFigures,
    Coverage,
    DecisionsAtThreshold,
    EvaluationFigures,
    FigureRow,
    ModelComparison,
    correct_over_classes,
)
from polyclinic.common.evaluation.question import GROUPINGS
from polyclinic.common.metrics.bootstrap import EstimateWithInterval, Interval, compute_pooled_auroc_interval
from polyclinic.common.metrics.calibration import Calibration, DecisionCounts, ReliabilityBin
from polyclinic.common.metrics.delong import compute_two_sided_p_value
from polyclinic.common.metrics.score_histograms import (
    TENTH_EDGES,
    ScoreHistogram,
    compute_pooled_auroc,
    compute_pooled_average_precision,
    find_score_bins,
)
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.system.plain_text import join_as_english_list, make_printable_line
from polyclinic.common.wire.evaluation import ScoringReply
from polyclinic.server.evaluation.collect import QuestionWithModels

Z_95 = 1.959964
"""0.975 quantile of the standard normal distribution."""
POOLED_TEST_NAME = "inverse variance over hospitals"
"""Name of the statistical test that compares two models on the images of all hospitals."""
TEST_PART_NOTE = "The test part: patients on whom no run trains at this site."
RowKey = tuple[str, str, str, str]
"""Key of a row of figures: model, class, column of a subgroup, subgroup; the last two are empty for all images."""


@dataclass(frozen=True)
class SiteRow:
    """The figures of one model and class at one hospital.

    Attributes:
        histogram: Histogram of the scores of positive and negative images; None if the hospital does not send it.
        score_sums: Sum of the scores in each tenth of [0, 1], shape (10,).
    """

    figures: ClassFigures
    histogram: ScoreHistogram | None
    score_sums: tuple[float, ...]


def pool_answers(
    question: QuestionWithModels, answers: Mapping[str, ScoringReply], silent: Mapping[str, str]
) -> Evaluation:
    """Return the evaluation of the models, with figures of each hospital and pooled figures.

    Args:
        answers: Site -> its answer.
        silent: Site -> reason for its missing answer.
    """
    classes_of_models = name_classes_of_models(question.models)
    model_classes = [name for classes in classes_of_models.values() for name in classes]
    annotated = {name for reply in answers.values() for name in reply.class_names}
    tested = tuple(name for name in dict.fromkeys(model_classes) if name in annotated)

    by_site = {site: dict(_read_rows(reply)) for site, reply in answers.items()}
    rows = [
        FigureRow(site, model, name, row.figures)
        for site, site_rows in by_site.items()
        for (model, name, column, _), row in site_rows.items()
        if not column
    ]
    comparisons = [comparison for site, reply in answers.items() for comparison in _read_comparisons(site, reply)]
    pooled = list(_pool_rows(by_site))
    subgroup_rows = [row for row in pooled if row.column]
    if len(answers) > 1:
        pooled_rows = [row for row in pooled if not row.column]
        rows = [*pooled_rows, *rows, *subgroup_rows]
        comparisons = [*_pool_comparisons(comparisons), *comparisons]
    else:
        # With one hospital, its own figures are those of all images.
        rows += [replace(row, data=site) for row in subgroup_rows for site in answers]
    over_patients = bool(answers) and all(reply.over_patients for reply in answers.values())
    coverage = [
        _describe_coverage(site, model.name, classes_of_models[model.name], reply)
        for site, reply in answers.items()
        for model in question.models
    ]
    class_order = {name: index for index, name in enumerate(tested)}
    model_order = {model.name: index for index, model in enumerate(question.models)}
    rows.sort(key=lambda row: (class_order[row.class_name], model_order[row.model]))
    return Evaluation(
        models=tuple(
            ScoredModel(model.name, model.kind, sent.sha256, classes_of_models[model.name], model.unlearned)
            for model, sent in zip(question.models, question.question.models, strict=True)
        ),
        data=tuple(
            ScoredData(site, TEST_PART_NOTE, reply.images, reply.patients if over_patients else None, reply.class_names)
            for site, reply in answers.items()
        ),
        figures=EvaluationFigures(
            tuple(rows), tuple(correct_over_classes(comparisons)), tuple(coverage), over_patients
        ),
        class_names=tested,
        cautions=(
            *(f"{site} did not answer: {make_printable_line(reason)}" for site, reason in silent.items()),
            *warn_about_origin(question.models),
        ),
        columns=tuple(dict.fromkeys(row.column for row in rows if row.column)),
        notes=tuple(_list_notes(question, answers)),
    )


def _describe_coverage(site: str, model: str, classes: Sequence[str], reply: ScoringReply) -> Coverage:
    return Coverage(
        site,
        model,
        tested=tuple(name for name in reply.class_names if name in classes and name not in reply.hidden),
        not_annotated=tuple(name for name in classes if name not in reply.class_names),
        not_in_model=tuple(name for name in reply.class_names if name not in classes),
    )


def _list_notes(question: QuestionWithModels, answers: Mapping[str, ScoringReply]) -> Iterator[str]:
    """Yield a sentence for each kind of figures that a hospital withholds, and for a hospital without test images."""
    classes = {name for model in question.models for name in model.class_names}
    for site, reply in answers.items():
        if hidden := [f"“{name}”" for name in reply.hidden if name in classes]:
            least = reply.smallest_count
            yield f"{site} hides {join_as_english_list(hidden)}: fewer than {least} patients show it or do not."
        if reply.models and not reply.has_histograms:
            yield f"{site} does not tell how scores are spread: it is not in the figures of all together."
        if reply.withheld:
            yield f"{site} tells no subgroups by {join_as_english_list(list(reply.withheld))}."
        if not reply.images:
            yield f"{site} has no test images."


# ---------------------------------------------------------------------- rows of one hospital


def _read_rows(reply: ScoringReply) -> Iterator[tuple[RowKey, SiteRow]]:
    """Yield key and figures of each row of a hospital's answer."""
    points = dict[int, list[DecisionsAtThreshold]]()
    for index, row in enumerate(reply.point_rows):
        points.setdefault(row, []).append(_read_point(reply, index))
    tenths = len(TENTH_EDGES) + 1
    for row, key in enumerate(zip(reply.models, reply.classes, reply.columns, reply.groups, strict=True)):
        histogram = reply.histograms.get(row)
        sums = reply.score_sums[row * tenths : (row + 1) * tenths]
        brier = reply.brier[row]
        error = reply.calibration_error[row]
        bins = () if histogram is None else _make_bins(histogram, sums)
        figures = ClassFigures(
            positives=reply.positives[row],
            negatives=reply.negatives[row],
            positive_patients=reply.positive_patients[row],
            auroc=_read_number(reply.auroc[row]),
            auroc_interval=_read_interval(reply.auroc_low[row], reply.auroc_high[row]),
            average_precision=_read_number(reply.average_precision[row]),
            average_precision_interval=_read_interval(
                reply.average_precision_low[row], reply.average_precision_high[row]
            ),
            points=tuple(points.get(row, ())),
            calibration=None if math.isnan(brier) else Calibration(bins, error, brier),
        )
        yield key, SiteRow(figures, histogram, sums)


def _read_point(reply: ScoringReply, index: int) -> DecisionsAtThreshold:
    """Return the decisions at the threshold with this index in a hospital's answer."""
    row = reply.point_rows[index]
    true_positives = reply.true_positives[index]
    false_positives = reply.false_positives[index]
    decisions = DecisionCounts(
        true_positives,
        reply.positives[row] - true_positives,
        false_positives,
        reply.negatives[row] - false_positives,
    )
    return DecisionsAtThreshold(
        reply.point_rules[index],
        reply.thresholds[index],
        decisions,
        _read_interval(reply.sensitivity_low[index], reply.sensitivity_high[index]),
        _read_interval(reply.specificity_low[index], reply.specificity_high[index]),
    )


def _read_number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _read_interval(low: float, high: float) -> Interval | None:
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def _make_bins(histogram: ScoreHistogram, score_sums: Sequence[float]) -> tuple[ReliabilityBin, ...]:
    """Return the ten bins of a reliability diagram.

    The bins are exact, because a histogram bin ends at each edge of a tenth.
    """
    borders = find_score_bins(TENTH_EDGES) + 1
    images = [int(part.sum()) for part in np.split(histogram.positives + histogram.negatives, borders)]
    positives = [int(part.sum()) for part in np.split(histogram.positives, borders)]
    return tuple(
        ReliabilityBin(image_count, positive_count, score_sum / image_count if image_count else None)
        for image_count, positive_count, score_sum in zip(images, positives, score_sums, strict=True)
    )


# ---------------------------------------------------------------------- all hospitals together


def _pool_rows(by_site: Mapping[str, Mapping[RowKey, SiteRow]]) -> Iterator[FigureRow]:
    """Yield the pooled figures over the hospitals that send histograms, in the order of columns and groups."""
    keys = list(dict.fromkeys(key for rows in by_site.values() for key in rows))
    for column, grouping in (("", None), *GROUPINGS.items()):
        column_keys = [key for key in keys if key[2] == column]
        groups = [""] if grouping is None else grouping.order_groups([key[3] for key in column_keys])
        for group in groups:
            group_keys = [key for key in column_keys if key[3] == group]
            for key in group_keys:
                model, class_name, _, _ = key
                parts = [rows[key] for rows in by_site.values() if key in rows and rows[key].histogram is not None]
                if parts:
                    yield FigureRow(ALL_DATA, model, class_name, _pool_figures(key, parts), column, group)


def _pool_figures(key: RowKey, parts: Sequence[SiteRow]) -> ClassFigures:
    histogram = reduce(add, (part.histogram for part in parts if part.histogram is not None))
    auroc = compute_pooled_auroc(histogram)
    precision = compute_pooled_average_precision(histogram)
    generator = np.random.default_rng(derive_seed("evaluate", *key))
    return ClassFigures(
        positives=int(histogram.positives.sum()),
        negatives=int(histogram.negatives.sum()),
        positive_patients=sum(part.figures.positive_patients for part in parts),
        auroc=auroc.value if auroc else None,
        auroc_interval=compute_pooled_auroc_interval(histogram, generator),
        average_precision=precision.value if precision else None,
        average_precision_interval=None,
        points=tuple(_pool_points(parts)),
        calibration=_pool_calibration(histogram, parts),
        auroc_error=auroc.error if auroc else 0.0,
        average_precision_error=precision.error if precision else 0.0,
    )


def _pool_points(parts: Sequence[SiteRow]) -> Iterator[DecisionsAtThreshold]:
    """Yield the summed decisions at each threshold that all hospitals used; without confidence intervals."""
    by_site = [{(point.rule, point.threshold): point.decisions for point in part.figures.points} for part in parts]
    for rule, threshold in by_site[0]:
        counts = [points[rule, threshold] for points in by_site if (rule, threshold) in points]
        if len(counts) == len(by_site):
            yield DecisionsAtThreshold(
                rule,
                threshold,
                DecisionCounts(
                    sum(each.true_positives for each in counts),
                    sum(each.false_negatives for each in counts),
                    sum(each.false_positives for each in counts),
                    sum(each.true_negatives for each in counts),
                ),
                None,
                None,
            )


def _pool_calibration(histogram: ScoreHistogram, parts: Sequence[SiteRow]) -> Calibration | None:
    """Return expected calibration error, Brier score and reliability bins of all images; None without images."""
    total = int((histogram.positives + histogram.negatives).sum())
    if not total:
        return None
    score_sums = np.sum([part.score_sums for part in parts], axis=0).tolist()  # (10,)
    bins = _make_bins(histogram, score_sums)
    errors = [abs(score_sum - each.positives) for score_sum, each in zip(score_sums, bins, strict=True)]
    # A hospital's Brier score is the mean of its squared errors.
    squared_errors = sum(
        part.figures.calibration.brier * (part.figures.positives + part.figures.negatives)
        for part in parts
        if part.figures.calibration is not None
    )
    return Calibration(bins, sum(errors) / total, squared_errors / total)


# ---------------------------------------------------------------------- comparisons of two models


def _read_comparisons(site: str, reply: ScoringReply) -> Iterator[ModelComparison]:
    images = {
        name: reply.positives[row] + reply.negatives[row]
        for row, name in enumerate(reply.classes)
        if not reply.columns[row]
    }
    for index, name in enumerate(reply.pair_classes):
        difference = reply.differences[index]
        interval = (reply.difference_lows[index], reply.difference_highs[index])
        error = _read_number(reply.standard_errors[index])
        p_value = compute_two_sided_p_value(difference / error) if error else None
        test = DELONG if reply.pair_tests[index] == DELONG else PATIENT_BOOTSTRAP
        yield ModelComparison(
            site,
            name,
            reply.pair_firsts[index],
            reply.pair_seconds[index],
            images.get(name, 0),
            EstimateWithInterval(difference, interval),
            delong_p=p_value if test == DELONG else None,
            patient_p=p_value if test == PATIENT_BOOTSTRAP else None,
            p_value=p_value,
            test=test,
            standard_error=error,
        )


def _pool_comparisons(comparisons: Sequence[ModelComparison]) -> Iterator[ModelComparison]:
    """Yield the pooled comparison of each class and pair of models: the hospitals' inverse-variance weighted mean."""
    families = dict[tuple[str, str, str], list[ModelComparison]]()
    for each in comparisons:
        if each.standard_error:
            families.setdefault((each.class_name, each.first, each.second), []).append(each)
    for (name, first, second), members in families.items():
        weights = [1 / each.standard_error**2 for each in members if each.standard_error]
        values = [each.difference.value for each in members]
        difference = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
        error = 1 / math.sqrt(sum(weights))
        interval = difference - Z_95 * error, difference + Z_95 * error
        p_value = compute_two_sided_p_value(difference / error)
        yield ModelComparison(
            ALL_DATA,
            name,
            first,
            second,
            sum(each.images for each in members),
            EstimateWithInterval(difference, interval),
            delong_p=None,
            patient_p=None,
            p_value=p_value,
            test=POOLED_TEST_NAME,
            standard_error=error,
        )
