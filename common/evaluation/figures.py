"""Figures of several models on several sets of labelled images, by class and subgroup, and paired comparisons.

A class that a model lacks, or that a data set does not annotate, has no figures there: it never counts as absent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.evaluation.groups import Grouping
from polyclinic.common.evaluation.thresholds import FixedThreshold
from polyclinic.common.metrics.auroc import FEWEST_POSITIVES, compute_metrics_per_class
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

TOGETHER = "all together"
"""Name of the images of all data sets together."""
NO_SPREAD = 1e-12
DELONG, BY_PATIENT = "DeLong", "bootstrap by patient"
"""Names of the tests of two models."""

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class ScoredImages:
    """The images of one data set or hospital, with labels and the scores of each model.

    Attributes:
        labels: ``(n, classes)``: 1, 0 or NaN for unknown.
        class_names: The class of each column of ``labels``: those that the data annotates.
        patients: Patient of each image, ``(n,)``.
        scores: Model -> class -> probability of each image, ``(n,)``; only classes that the model has.
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
        labels: 1 or 0, ``(n,)``.
        scores: Model -> probabilities, ``(n,)``; only models that have the class.
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
    """Return the images of several data sets together; patients of two data sets are two patients."""
    first = parts[0]
    return ClassScores(
        TOGETHER,
        first.class_name,
        np.concatenate([part.labels for part in parts]),
        np.concatenate([np.array([f"{part.data}\0{patient}" for patient in part.patients]) for part in parts]),
        {model: np.concatenate([part.scores[model] for part in parts]) for model in first.scores},
        {column: np.concatenate([part.groups[column] for part in parts]) for column in first.groups},
    )


# ---------------------------------------------------------------------- figures of a class


@dataclass(frozen=True)
class DecisionsAtThreshold:
    """Decisions at a threshold that was fixed beforehand, with 95 % intervals of the two shares."""

    rule: str
    threshold: float
    decisions: DecisionCounts
    sensitivity_interval: Interval | None
    specificity_interval: Interval | None


@dataclass(frozen=True)
class ClassFigures:
    """Figures of one model for one class on one set of images; None where they are undefined.

    Attributes:
        positives, negatives: Numbers of images.
        positive_patients: Number of patients with a positive image; of images if patients are unknown.
        points: The decisions at thresholds; empty if a hospital does not tell them.
        auroc_error, average_precision_error: Bounds of the errors of the two; above 0 if computed from a histogram.
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
        """The AUROC with the bound of its error."""
        return None if self.auroc is None else ValueWithError(self.auroc, self.auroc_error)

    @property
    def average_precision_with_error(self) -> ValueWithError | None:
        """The average precision with the bound of its error."""
        if self.average_precision is None:
            return None
        return ValueWithError(self.average_precision, self.average_precision_error)

    @property
    def rests_on_few(self) -> bool:
        """True if fewer than 30 images show the class, or fewer than 30 do not."""
        return min(self.positives, self.negatives) < FEWEST_POSITIVES


@dataclass(frozen=True)
class FigureRow:
    """The figures of a model for a class, on a data set or on one of its subgroups.

    Attributes:
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
    """Return the figures of each model that has the class, on these images."""
    if not images.scores:
        return []
    resampled = resample_aurocs(images, column, group)
    rows = []
    for place, (model, scores) in enumerate(images.scores.items()):
        interval = None if resampled is None else resampled.wide[place]
        figures = _compute_class_figures(images, scores, thresholds[model], interval)
        rows.append(FigureRow(images.data, model, images.class_name, figures, column, group))
    return rows


def resample_aurocs(images: ClassScores, column: str = "", group: str = "") -> ResampledAurocs | None:
    """Return the AUROC of each model on the same resamples of the patients; None without positives or negatives."""
    if not (images.labels == 1).any() or not (images.labels == 0).any():
        return None
    ranked = [RankedClassScores.from_scores(scores, images.labels) for scores in images.scores.values()]
    return ResampledAurocs.from_ranked_classes(ranked, images.patients, _make_generator(images, "auroc", column, group))


def _compute_class_figures(
    images: ClassScores, scores: Floats, thresholds: Sequence[FixedThreshold], interval: Interval | None
) -> ClassFigures:
    labels, patients = images.labels, images.patients
    name = images.class_name
    metrics = compute_metrics_per_class(scores[:, None], labels[:, None], (name,))[name]
    positive, negative = labels == 1, labels == 0
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
    """Return a generator that depends on the data set, the class and the purpose alone, so that figures repeat."""
    return np.random.default_rng(derive_seed("evaluate", images.data, images.class_name, *purpose))


# ---------------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class ModelComparison:
    """The AUROC of one model minus that of another, for one class on the same images.

    Attributes:
        difference: With its 95 % interval, by a paired bootstrap over patients.
        delong_p: P-value of DeLong's test, for which each image is independent; None if it is undefined.
        patient_p: P-value by the spread of the bootstrap over patients; None if it is undefined.
        p_value: ``patient_p`` if some patient has several of the images, else ``delong_p``.
        test: Which of the two ``p_value`` is.
        holm_p: ``p_value`` after Holm's correction over the classes of these two models on these images.
        standard_error: Of the difference, by the test that gave ``p_value``; None if it is undefined.
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
    """Yield a comparison of each two models that have the class, on the same images."""
    resampled = resample_aurocs(images)
    if resampled is None:
        return
    has_repeats = len(np.unique(images.patients)) < len(images.patients)
    models = list(images.scores)
    for place, other in combinations(range(len(models)), 2):
        first, second = (resampled.select_classes(slice(number, number + 1)) for number in (place, other))
        names = models[place], models[other]
        delong = compare_by_delong(images.scores[names[0]], images.scores[names[1]], images.labels)
        delong_p = None if delong is None else delong.p_value
        difference = compare_resampled_aurocs(first, second)
        spread = float(np.std(first.drawn - second.drawn))
        patient_p = compute_two_sided_p_value(difference.value / spread) if spread > NO_SPREAD else None
        delong_error = 0.0 if delong is None else delong.standard_error
        standard_error = spread if has_repeats else delong_error
        yield ModelComparison(
            images.data,
            images.class_name,
            *names,
            len(images.labels),
            difference,
            delong_p,
            patient_p,
            patient_p if has_repeats else delong_p,
            BY_PATIENT if has_repeats else DELONG,
            standard_error=standard_error if standard_error > NO_SPREAD else None,
        )


def correct_over_classes(comparisons: Sequence[ModelComparison]) -> list[ModelComparison]:
    """Return the comparisons with Holm's correction over the classes of each pair of models on each data set."""
    families = dict[tuple[str, str, str], list[int]]()
    for place, each in enumerate(comparisons):
        families.setdefault((each.data, each.first, each.second), []).append(place)
    corrected = list(comparisons)
    for places in families.values():
        adjusted = adjust_by_holm([comparisons[place].p_value for place in places])
        for place, holm_p in zip(places, adjusted, strict=True):
            corrected[place] = replace(comparisons[place], holm_p=holm_p)
    return corrected


# ---------------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Coverage:
    """Which classes were tested of a model on a data set, and why others were not.

    Attributes:
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
    """The figures of an evaluation: of each class and model, of two models compared, and which classes have none.

    Attributes:
        over_patients: True if intervals and tests treat a patient's images as one unit, not each image.
    """

    rows: tuple[FigureRow, ...]
    comparisons: tuple[ModelComparison, ...]
    coverage: tuple[Coverage, ...]
    over_patients: bool

    def select_rows(self, data: str, class_name: str, column: str = "", group: str = "") -> list[FigureRow]:
        """Return the rows of all models for a class on a data set or subgroup."""
        key = data, class_name, column, group
        return [row for row in self.rows if (row.data, row.class_name, row.column, row.group) == key]


def compute_evaluation_figures(
    scored: Sequence[ScoredImages],
    class_names: Sequence[str],
    thresholds: Mapping[str, Mapping[str, Sequence[FixedThreshold]]],
    groupings: Sequence[Grouping] = (),
) -> EvaluationFigures:
    """Compute the figures of each model on each data set, on all together, and on subgroups.

    Args:
        class_names: The classes to test, in order.
        thresholds: Model -> class -> thresholds that were fixed beforehand.
        groupings: The columns by which there are subgroups; all data sets have their groups.
    """
    rows, comparisons = list[FigureRow](), list[ModelComparison]()
    for name in class_names:
        of_class = {model: by_class[name] for model, by_class in thresholds.items() if name in by_class}
        of_data = [each.select_class(name) for each in scored]
        parts = [part for part in of_data if part is not None and len(part.labels)]
        joined = [join_class_scores(parts)] if len(parts) > 1 else []
        for images in [*joined, *parts]:
            rows += compute_figure_rows(images, of_class)
            comparisons += compare_models(images) if len(images.scores) > 1 else []
        # Subgroups of all images together; of one data set alone if there is one.
        for images in joined or parts:
            for grouping in groupings:
                groups = images.groups[grouping.column]
                for group in grouping.order_groups(groups.tolist()):
                    members = images.select_rows(groups == group)
                    rows += compute_figure_rows(members, of_class, grouping.column, group)
    coverage = []
    for each in scored:
        for model, by_class in each.scores.items():
            tested = tuple(name for name in each.class_names if name in by_class)
            others = tuple(name for name in thresholds[model] if name not in each.class_names)
            lacking = tuple(name for name in each.class_names if name not in by_class)
            coverage.append(Coverage(each.name, model, tested, others, lacking))
    over_patients = all(are_all_patients_known(images.patients) for images in scored)
    return EvaluationFigures(tuple(rows), tuple(correct_over_classes(comparisons)), tuple(coverage), over_patients)
