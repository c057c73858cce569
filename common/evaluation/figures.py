"""Metrics of several models on several sets of labelled images, by class and subgroup, and paired comparisons.

If a model lacks a class, or a data set does not annotate it, the class has no metrics there; it never counts as absent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.evaluation.groups import Grouping
from polyclinic.common.evaluation.thresholds import FixedThreshold
from polyclinic.common.metrics.auroc import MIN_POSITIVES, compute_metrics_per_class
from polyclinic.common.metrics.bootstrap import (
    EstimateWithInterval,
    Interval,
    RankedClassScores,
    ResampledAurocs,
    compare_resampled_aurocs,
)
from polyclinic.common.metrics.calibration import Calibration, DecisionCounts, compute_calibration
from polyclinic.common.metrics.delong import compare_by_delong, compute_two_sided_p_value
from polyclinic.common.metrics.holm import adjust_by_holm
from polyclinic.common.metrics.measured import ValueWithError
from polyclinic.common.metrics.patient_intervals import (
    bootstrap_average_precision_interval,
    bootstrap_share_interval,
)
from polyclinic.common.system.hashing import derive_seed
from polyclinic.data.base.image_set import are_all_patients_known
from polyclinic.data.base.splits import StringArray

ALL_DATA = "all together"
"""Name, in tables, of the images of all data sets together."""
MIN_STANDARD_ERROR = 1e-12
"""Standard error of a difference of AUROCs below which only rounding is left, and no p-value is computed."""
DELONG = "DeLong"
"""Name of the test that treats each image as independent."""
PATIENT_BOOTSTRAP = "bootstrap by patient"
"""Name of the test that resamples patients."""

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class ScoredImages:
    """The images of one data set or hospital, with labels and the scores of each model.

    Attributes:
        name: Name of the data set or hospital.
        labels: ``(n, classes)``: 1, 0 or NaN for unknown.
        class_names: The class of each column of ``labels``; the data annotates exactly these classes.
        patients: Patient of each image, ``(n,)``.
        scores: Model -> class -> probability of each image, ``(n,)``; without classes that the model lacks.
        groups: Column -> group of each image, ``(n,)``.
    """

    name: str
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: StringArray
    scores: Mapping[str, Mapping[str, Floats]]
    groups: Mapping[str, StringArray] = field(default_factory=dict)

    def select_class(self, name: str) -> "ClassScores | None":
        """Return the images whose label of a class is known; None if the data does not annotate it."""
        if name not in self.class_names:
            return None
        labels = self.labels[:, self.class_names.index(name)]
        known = ~np.isnan(labels)
        scores = {model: by_class[name][known] for model, by_class in self.scores.items() if name in by_class}
        groups = {column: groups[known] for column, groups in self.groups.items()}
        return ClassScores(self.name, name, labels[known], self.patients[known], scores, groups)


@dataclass(frozen=True)
class ClassScores:
    """The images of a data set with a known label of one class.

    Attributes:
        data: Name of the data set.
        class_name: The class.
        labels: 1 or 0, ``(n,)``.
        patients: Patient of each image, ``(n,)``.
        scores: Model -> probabilities, ``(n,)``; without models that lack the class.
        groups: Column -> group of each image, ``(n,)``.
    """

    data: str
    class_name: str
    labels: NDArray[np.float32]
    patients: StringArray
    scores: Mapping[str, Floats]
    groups: Mapping[str, StringArray] = field(default_factory=dict)

    def select_rows(self, rows: NDArray[np.bool_]) -> "ClassScores":
        """Return the images for which a mask ``(n,)`` is True."""
        return replace(
            self,
            labels=self.labels[rows],
            patients=self.patients[rows],
            scores={model: scores[rows] for model, scores in self.scores.items()},
            groups={column: groups[rows] for column, groups in self.groups.items()},
        )


def join_class_scores(parts: Sequence[ClassScores]) -> ClassScores:
    """Return the images of several data sets as one; equal patient names in two data sets are two patients."""
    first = parts[0]
    return ClassScores(
        ALL_DATA,
        first.class_name,
        np.concatenate([part.labels for part in parts]),
        np.concatenate([np.array([f"{part.data}\0{patient}" for patient in part.patients]) for part in parts]),
        {model: np.concatenate([part.scores[model] for part in parts]) for model in first.scores},
        {column: np.concatenate([part.groups[column] for part in parts]) for column in first.groups},
    )


# ---------------------------------------------------------------------- figures of a class


@dataclass(frozen=True)
class DecisionsAtThreshold:
    """Decision counts at a threshold that was fixed beforehand.

    Attributes:
        rule: Name of the rule that fixed the threshold.
        threshold: A higher probability counts as positive.
        decisions: Numbers of true and false positives and negatives.
        sensitivity_interval, specificity_interval: 95 % intervals; None where undefined.
    """

    rule: str
    threshold: float
    decisions: DecisionCounts
    sensitivity_interval: Interval | None
    specificity_interval: Interval | None


@dataclass(frozen=True)
class ClassFigures:
    """Metrics of one model for one class on one set of images; None where they are undefined.

    Attributes:
        positives, negatives: Numbers of images.
        positive_patients: Number of patients with a positive image; of positive images if patients are unknown.
        points: Decisions at thresholds; empty if a hospital does not send them.
        auroc_error, average_precision_error: Largest possible errors of the two metrics; above 0 if these are computed
            from a histogram.
    """

    positives: int
    negatives: int
    positive_patients: int
    auroc: float | None
    auroc_interval: Interval | None
    average_precision: float | None
    average_precision_interval: Interval | None
    points: tuple[DecisionsAtThreshold, ...]
    calibration: Calibration | None
    auroc_error: float = 0.0
    average_precision_error: float = 0.0

    @property
    def auroc_with_error(self) -> ValueWithError | None:
        """The AUROC with its largest possible error."""
        return None if self.auroc is None else ValueWithError(self.auroc, self.auroc_error)

    @property
    def average_precision_with_error(self) -> ValueWithError | None:
        """The average precision with its largest possible error."""
        if self.average_precision is None:
            return None
        return ValueWithError(self.average_precision, self.average_precision_error)

    @property
    def rests_on_few(self) -> bool:
        """True if the class has fewer than 30 positive or fewer than 30 negative images."""
        return min(self.positives, self.negatives) < MIN_POSITIVES


@dataclass(frozen=True)
class FigureRow:
    """The metrics of a model for a class, on a data set or on one of its subgroups.

    Attributes:
        data: Name of the data set.
        model: Name of the model.
        class_name: The class.
        figures: The metrics.
        column, group: Column and group of a subgroup; both empty for all images.
    """

    data: str
    model: str
    class_name: str
    figures: ClassFigures
    column: str = ""
    group: str = ""


def compute_figure_rows(
    images: ClassScores, thresholds: Mapping[str, Sequence[FixedThreshold]], column: str = "", group: str = ""
) -> list[FigureRow]:
    """Return the metrics of each model that has the class, on these images.

    Args:
        images: The images, with the scores of each model.
        thresholds: Model -> thresholds that were fixed beforehand.
        column, group: Column and group if the images are a subgroup.
    """
    if not images.scores:
        return []
    resampled = resample_aurocs(images, column, group)
    rows = []
    for index, (model, scores) in enumerate(images.scores.items()):
        interval = None if resampled is None else resampled.wide[index]
        figures = _compute_class_figures(images, scores, thresholds[model], interval)
        rows.append(FigureRow(images.data, model, images.class_name, figures, column, group))
    return rows


def resample_aurocs(images: ClassScores, column: str = "", group: str = "") -> ResampledAurocs | None:
    """Bootstrap the AUROC of each model on the same resamples of patients; None without positives or without
    negatives.
    """
    if not (images.labels == 1).any() or not (images.labels == 0).any():
        return None
    ranked = [RankedClassScores.from_scores(scores, images.labels) for scores in images.scores.values()]
    return ResampledAurocs.from_ranked_classes(ranked, images.patients, _make_generator(images, "auroc", column, group))


def _compute_class_figures(
    images: ClassScores, scores: Floats, thresholds: Sequence[FixedThreshold], interval: Interval | None
) -> ClassFigures:
    labels = images.labels
    patients = images.patients
    name = images.class_name
    metrics = compute_metrics_per_class(scores[:, None], labels[:, None], (name,))[name]
    positive = labels == 1
    negative = labels == 0
    points = []
    for fixed in thresholds:
        above = scores > fixed.threshold
        counts = [int((side & kind).sum()) for kind in (positive, negative) for side in (above, ~above)]
        generator = _make_generator(images, fixed.rule)
        sensitivity = bootstrap_share_interval(above[positive], patients[positive], generator)
        specificity = bootstrap_share_interval(~above[negative], patients[negative], generator)
        points.append(
            DecisionsAtThreshold(fixed.rule, fixed.threshold, DecisionCounts(*counts), sensitivity, specificity)
        )
    return ClassFigures(
        positives=int(positive.sum()),
        negatives=int(negative.sum()),
        positive_patients=len(np.unique(patients[positive])),
        auroc=metrics.auroc,
        auroc_interval=interval,
        average_precision=metrics.average_precision,
        average_precision_interval=bootstrap_average_precision_interval(
            scores, labels, patients, _make_generator(images, "average precision")
        ),
        points=tuple(points),
        calibration=compute_calibration(scores, labels),
    )


def _make_generator(images: ClassScores, *purpose: str) -> np.random.Generator:
    """Return a generator seeded by data set, class and purpose alone, so that results can be repeated."""
    return np.random.default_rng(derive_seed("evaluate", images.data, images.class_name, *purpose))


# ---------------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class ModelComparison:
    """The AUROC of one model minus that of another, for one class on the same images.

    Attributes:
        data: Name of the data set.
        first, second: Names of the models.
        images: Number of images.
        difference: AUROC of ``first`` minus AUROC of ``second``, with a 95 % interval by a bootstrap over patients.
        delong_p: P-value of DeLong's test, which treats images as independent; None if it is undefined.
        patient_p: P-value from the standard deviation of the patient bootstrap; None if it is undefined.
        p_value: ``patient_p`` if a patient has several of the images, else ``delong_p``.
        test: Name of the test of ``p_value``.
        holm_p: ``p_value`` after Holm's correction over the classes of these two models on these images.
        standard_error: Standard error of the difference, by the test of ``p_value``; None if it is undefined.
    """

    data: str
    class_name: str
    first: str
    second: str
    images: int
    difference: EstimateWithInterval
    delong_p: float | None
    patient_p: float | None
    p_value: float | None
    test: str
    holm_p: float | None = None
    standard_error: float | None = None


def compare_models(images: ClassScores) -> Iterator[ModelComparison]:
    """Yield a comparison for each pair of models that have the class, on the same images."""
    resampled = resample_aurocs(images)
    if resampled is None:
        return
    has_repeats = len(np.unique(images.patients)) < len(images.patients)
    models = list(images.scores)
    for first_index, second_index in combinations(range(len(models)), 2):
        first, second = (resampled.select_classes(slice(number, number + 1)) for number in (first_index, second_index))
        names = models[first_index], models[second_index]
        delong = compare_by_delong(images.scores[names[0]], images.scores[names[1]], images.labels)
        delong_p = None if delong is None else delong.p_value
        difference = compare_resampled_aurocs(first, second)
        bootstrap_error = float(np.std(first.drawn - second.drawn))
        patient_p = (
            compute_two_sided_p_value(difference.value / bootstrap_error)
            if bootstrap_error > MIN_STANDARD_ERROR
            else None
        )
        delong_error = 0.0 if delong is None else delong.standard_error
        standard_error = bootstrap_error if has_repeats else delong_error
        yield ModelComparison(
            images.data,
            images.class_name,
            *names,
            len(images.labels),
            difference,
            delong_p,
            patient_p,
            patient_p if has_repeats else delong_p,
            PATIENT_BOOTSTRAP if has_repeats else DELONG,
            standard_error=standard_error if standard_error > MIN_STANDARD_ERROR else None,
        )


def correct_over_classes(comparisons: Sequence[ModelComparison]) -> list[ModelComparison]:
    """Return the comparisons with Holm's correction over the classes of each pair of models on each data set."""
    families = dict[tuple[str, str, str], list[int]]()
    for index, comparison in enumerate(comparisons):
        families.setdefault((comparison.data, comparison.first, comparison.second), []).append(index)
    corrected = list(comparisons)
    for indices in families.values():
        adjusted = adjust_by_holm([comparisons[index].p_value for index in indices])
        for index, holm_p in zip(indices, adjusted, strict=True):
            corrected[index] = replace(comparisons[index], holm_p=holm_p)
    return corrected


# ---------------------------------------------------------------------- the whole evaluation


@dataclass(frozen=True)
class Coverage:
    """The classes of a model that a data set tests, and those that it cannot test.

    Attributes:
        data: Name of the data set.
        model: Name of the model.
        tested: Classes that the model has and the data annotates.
        not_annotated: Classes of the model that the data does not annotate.
        not_in_model: Classes that the data annotates and the model lacks.
    """

    data: str
    model: str
    tested: tuple[str, ...]
    not_annotated: tuple[str, ...]
    not_in_model: tuple[str, ...]


@dataclass(frozen=True)
class EvaluationFigures:
    """The metrics of an evaluation.

    Attributes:
        rows: Metrics by data set, subgroup, class and model.
        comparisons: Differences of pairs of models.
        coverage: Tested and untested classes by data set and model.
        over_patients: True if intervals and tests treat all images of a patient as one unit, False if each image is
            one.
    """

    rows: tuple[FigureRow, ...]
    comparisons: tuple[ModelComparison, ...]
    coverage: tuple[Coverage, ...]
    over_patients: bool

    def select_rows(self, data: str, class_name: str, column: str = "", group: str = "") -> list[FigureRow]:
        """Return the rows of all models for one class, on one data set or subgroup."""
        key = data, class_name, column, group
        return [row for row in self.rows if (row.data, row.class_name, row.column, row.group) == key]


def compute_evaluation_figures(
    scored: Sequence[ScoredImages],
    class_names: Sequence[str],
    thresholds: Mapping[str, Mapping[str, Sequence[FixedThreshold]]],
    groupings: Sequence[Grouping] = (),
) -> EvaluationFigures:
    """Compute the metrics of each model on each data set, on all data sets together, and on subgroups.

    Args:
        scored: The images of each data set, with the scores of each model.
        class_names: The classes to test, in order.
        thresholds: Model -> class -> thresholds that were fixed beforehand.
        groupings: The columns that define subgroups; each data set has a group for each image.
    """
    rows = list[FigureRow]()
    comparisons = list[ModelComparison]()
    for name in class_names:
        class_thresholds = {model: by_class[name] for model, by_class in thresholds.items() if name in by_class}
        selected = [data_set.select_class(name) for data_set in scored]
        parts = [part for part in selected if part is not None and len(part.labels)]
        joined = [join_class_scores(parts)] if len(parts) > 1 else []
        for images in [*joined, *parts]:
            rows += compute_figure_rows(images, class_thresholds)
            comparisons += compare_models(images) if len(images.scores) > 1 else []
        # Subgroups are those of all data sets together, or of the only data set.
        for images in joined or parts:
            for grouping in groupings:
                groups = images.groups[grouping.column]
                for group in grouping.order_groups(groups.tolist()):
                    members = images.select_rows(groups == group)
                    rows += compute_figure_rows(members, class_thresholds, grouping.column, group)
    coverage = []
    for data_set in scored:
        for model, by_class in data_set.scores.items():
            tested = tuple(name for name in data_set.class_names if name in by_class)
            not_annotated = tuple(name for name in thresholds[model] if name not in data_set.class_names)
            not_in_model = tuple(name for name in data_set.class_names if name not in by_class)
            coverage.append(Coverage(data_set.name, model, tested, not_annotated, not_in_model))
    over_patients = all(are_all_patients_known(images.patients) for images in scored)
    return EvaluationFigures(tuple(rows), tuple(correct_over_classes(comparisons)), tuple(coverage), over_patients)
