"""AUROC, average precision and balanced accuracy of each class, where some labels are unknown (NaN).

The metrics of a class ignore images whose label of that class is unknown. A metric is ``None`` for a class without a
positive or without a negative test image.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, ModelDiverged
from polyclinic.common.metrics.bootstrap import AurocIntervals
from polyclinic.common.metrics.calibration import OperatingPoint, ScoreQuality
from polyclinic.common.metrics.measured import ValueWithError, average_values_with_error
from polyclinic.common.metrics.multi_class import MultiClassMetrics
from polyclinic.common.metrics.pooled import PooledMetrics, SiteSampleIntervals
from polyclinic.common.metrics.score_histograms import DECISION_THRESHOLD
from polyclinic.common.metrics.segmentation import ClassOverlap, PatientFigures, SegmentationSummary
from polyclinic.common.models.zoo.spec import DICE_METRIC, HAUSDORFF_METRIC, SEGMENTATION_METRICS
from polyclinic.common.plugins import (
    METRICS,
    PLUGIN_PREFIX,
    is_local_plugin_name,
    load_plugin_entry_point,
    shorten_metric_names,
)

MAX_METRIC_MAGNITUDE = 1e9
"""Largest absolute value that a plug-in's metric may return."""
Metric = Callable[[NDArray[np.floating], NDArray[np.floating]], float | None]
"""A metric of one class, called with scores ``(n,)``, 0 to 1, and labels ``(n,)``, 0 or 1, of the images with a known
label. Both labels occur. It returns NaN or None if it is undefined.
"""


def load_plugin_metrics(names: Iterable[str]) -> Mapping[str, Metric]:
    """Return the metric functions of plug-ins, by their names ``plugin:NAME``.

    Raises:
        BadInput: If a plug-in is not installed.
    """
    return {
        name: adapt_plugin_metric(load_plugin_entry_point(METRICS, name.removeprefix(PLUGIN_PREFIX))) for name in names
    }


def adapt_plugin_metric(metric: Callable[..., Any]) -> Metric:
    """Adapt the function of a plug-in to a metric that is called with scores and labels.

    A function whose first argument is called ``y_true``, as in scikit-learn, gets the labels first. A torch module,
    such as a metric of TorchMetrics, gets tensors, with integer labels.
    """
    try:
        first = next(iter(inspect.signature(metric).parameters), "")
    except (TypeError, ValueError):  # a C function without a signature; or no function, which the first call reports
        return metric
    if first == "y_true":
        return _LabelsFirst(metric)
    if hasattr(metric, "forward"):
        import torch  # imported here because the metrics of most runs do not need it

        return lambda scores, labels: metric(torch.from_numpy(scores), torch.from_numpy(labels).long())
    return metric


@dataclass(frozen=True)
class _LabelsFirst:
    """A metric, called with scores and labels, that calls a function which takes labels first."""

    function: Callable[..., Any]

    def __call__(self, scores: NDArray[np.floating], labels: NDArray[np.floating]) -> Any:
        return self.function(labels, scores)


def compute_plugin_metric(
    name: str, metric: Metric, scores: NDArray[np.floating], labels: NDArray[np.floating]
) -> float | None:
    """Compute a plug-in's metric for one class; return None if the metric is undefined.

    Raises:
        BadInput: If the metric raises an exception, or its magnitude is above :data:`MAX_METRIC_MAGNITUDE`.
    """
    fault = partial(Fault, f"evaluation.metrics: {name}")
    try:
        number = _call_metric(metric, scores, labels)
    except (Exception, SystemExit) as error:  # code of a plug-in may raise anything
        # At a hospital, an installed plug-in could put a patient's score into the text of its error.
        text = f": {' '.join(str(error).split())}".rstrip(". ") if is_local_plugin_name(name) else ""
        remedy = _suggest_other_order(metric, scores, labels)
        raise BadInput([fault(f"failed: {type(error).__name__}{text}.", remedy)]) from error
    if abs(number) > MAX_METRIC_MAGNITUDE:
        raise BadInput([fault(f"returned {number:g}; at most {MAX_METRIC_MAGNITUDE:g} can be told.")])
    return None if np.isnan(number) else number


def _call_metric(metric: Metric, *arguments: NDArray[np.floating]) -> float:
    """Call a metric with copies of the arrays, because a plug-in may write into its arguments; None becomes NaN."""
    value = metric(*(argument.copy() for argument in arguments))
    return float("nan") if value is None else float(value)


def _suggest_other_order(metric: Metric, scores: NDArray[np.floating], labels: NDArray[np.floating]) -> str:
    """Return a remedy for a metric that failed: write a function, exchange the arguments, or use a threshold;
    else "".
    """
    if hasattr(metric, "aggregate"):
        return (
            "A metric that gathers batches, such as MONAI's, is no function of scores and labels. Write one: "
            "lambda scores, labels: monai.metrics.compute_roc_auc(torch.from_numpy(scores), torch.from_numpy(labels))."
        )
    if _works(metric, labels, scores):
        return (
            "A metric is called as metric(scores, labels), and this one works with the labels first: write "
            "lambda scores, labels: NAME(labels, scores), with the name of your function."
        )
    if not _works(metric, (scores >= DECISION_THRESHOLD).astype(scores.dtype), labels):
        return ""
    arguments = "labels, scores >= 0.5" if isinstance(metric, _LabelsFirst) else "scores >= 0.5, labels"
    return (
        "Scores are probabilities, and this metric works with 0 and 1. Choose a threshold: write "
        f"lambda scores, labels: NAME({arguments}), with the name of your function."
    )


def _works(metric: Metric, *arguments: NDArray[np.floating]) -> bool:
    try:
        _call_metric(metric, *arguments)
    except (Exception, SystemExit):  # somebody else's code: it may raise anything
        return False
    return True


def catch_metric_failures(name: str, metric: Metric, print_line: Callable[[str], None]) -> Metric:
    """Wrap a plug-in's metric so that a failure counts as undefined: it returns None and passes the reason to
    ``print_line``.
    """

    def compute_metric_or_none(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float | None:
        try:
            return compute_plugin_metric(name, metric, scores, labels)
        except BadInput as error:
            print_line(str(error))
            return None

    return compute_metric_or_none


Floats = NDArray[np.floating]

NO_METRICS: Mapping[str, Metric] = MappingProxyType({})

GLOBAL_MODEL_NOTE = "global model"
"""The note of a test of the final global model."""
SUMMED_HISTOGRAMS_NOTE = "test images of all sites together, from the sum of the sites' counts by score"
"""The note of a test under secure aggregation, in which the coordinator receives only a sum over sites."""
MIN_POSITIVES = 30
"""Minimum number of positive test images of a class for its AUROC to count in the headline.

With 30, the standard error of an AUROC of 0.8 is 0.05 to 0.06 (Hanley and McNeil, Radiology 1982, equation 1, with 300
or 30 negatives).
"""

MAX_PAIR_COMPARISONS = 50_000
"""Maximum number of score comparisons, over all classes, for which AUROCs compare all pairs instead of sorting."""

Figure = Literal["auroc", "average_precision", "balanced_accuracy"]
FIGURES: tuple[Figure, ...] = get_args(Figure)


@dataclass(frozen=True)
class ClassMetrics:
    """The metrics of one class on one set of images; None for an undefined metric.

    Attributes:
        positives, negatives: Numbers of images; None if the site does not release them.
        more: Metrics of plug-ins by name.
        errors: Metric name -> its largest possible error; no entry for an exact metric. A metric with an error above
            :data:`~polyclinic.common.metrics.measured.MAX_METRIC_ERROR` is None.
    """

    auroc: float | None
    average_precision: float | None
    balanced_accuracy: float | None
    positives: int | None
    negatives: int | None
    more: Mapping[str, float | None] = field(default_factory=dict)
    errors: Mapping[Figure, float] = field(default_factory=dict)

    @property
    def main_figure(self) -> float | None:
        """The metric that tables compare: Dice in a segmentation, else AUROC; None if it is undefined."""
        return self.more.get(DICE_METRIC, self.auroc)

    @property
    def main_figure_with_error(self) -> ValueWithError | None:
        """:attr:`main_figure` with its largest possible error."""
        if DICE_METRIC not in self.more:
            return self.metric_with_error("auroc")
        value = self.more[DICE_METRIC]
        return None if value is None else ValueWithError(value)

    def metric_with_error(self, name: Figure) -> ValueWithError | None:
        """Return a metric with its largest possible error; None if it is undefined, or its error is too large."""
        value: float | None = getattr(self, name)
        return None if value is None else ValueWithError(value, self.errors.get(name, 0.0))

    def exact_metric_or_none(self, name: Figure) -> float | None:
        """Return a metric by name; None if it is not exact."""
        value: float | None = getattr(self, name)
        return None if name in self.errors else value

    @property
    def images(self) -> int | None:
        """Number of images with a known label of the class; None if the site does not release it."""
        return None if self.positives is None or self.negatives is None else self.positives + self.negatives


@dataclass(frozen=True)
class ClassGroupAuroc:
    """Mean and population SD of the AUROC over a group of classes; classes without an AUROC are ignored.

    Attributes:
        classes: All classes of the group.
        error: Largest possible error of the mean; 0 if it is exact.
    """

    mean_auroc: float | None
    sd_auroc: float | None
    classes: tuple[str, ...]
    error: float = 0.0


@dataclass(frozen=True)
class HeadlineAuroc:
    """The headline of a report: mean AUROC over the classes with at least :data:`MIN_POSITIVES` positive test images.

    Attributes:
        mean: The mean; None without any such class.
        classes: The classes in the mean.
        left_out: Class with too few positive test images -> their number.
    """

    mean: ValueWithError | None
    classes: tuple[str, ...]
    left_out: Mapping[str, int]


@dataclass(frozen=True)
class FinalTestSummary:
    """The results of a run's final test, written as the ``test`` part of ``summary.json``.

    Attributes:
        mean_more: Metric of a plug-in -> its mean over the classes for which it is defined.
        shared_classes: AUROC of the classes that every site annotates.
        unique_classes: AUROC of the classes that exactly one of several sites annotates.
        note: The models or images of the test, such as ``"global model"``, ``"mean over the owning sites' own models"``
            or, under secure aggregation, :data:`SUMMED_HISTOGRAMS_NOTE`.
        multi_class: Metrics of a multi-class task, such as macro F1; else None.
        intervals: Intervals of the AUROCs, if the model was tested on the coordinator's own images.
        quality: Calibration and decisions, if the model was tested on the coordinator's own images.
        pooled: Metrics over all sites' test parts together, from their score histograms.
        operating_points: Class -> thresholds chosen on the sites' validation images, from their score histograms.
        sampled: Intervals from a sample of sites; None if all sites tested the model.
        errors: Metric name -> largest possible error of its mean over the classes; no entry for an exact mean.
        withheld: The reason if a run with differential privacy releases no metrics; else empty.
        segmentation: Dice and distances over all patients, in a segmentation; else None.
    """

    mean_auroc: float | None
    sd_auroc: float | None
    mean_average_precision: float | None
    mean_balanced_accuracy: float | None
    per_class: Mapping[str, ClassMetrics]
    shared_classes: ClassGroupAuroc
    unique_classes: ClassGroupAuroc
    note: str = "global model"
    mean_more: Mapping[str, float | None] = field(default_factory=dict)
    multi_class: MultiClassMetrics | None = None
    intervals: AurocIntervals | None = None
    quality: ScoreQuality | None = None
    pooled: PooledMetrics | None = None
    operating_points: Mapping[str, tuple[OperatingPoint, ...]] = field(default_factory=dict)
    sampled: SiteSampleIntervals | None = None
    errors: Mapping[Figure, float] = field(default_factory=dict)
    withheld: str = ""
    segmentation: SegmentationSummary | None = None

    @property
    def own_metrics(self) -> dict[str, str]:
        """Metric of a plug-in -> its short name for tables."""
        return shorten_metric_names(self.mean_more)

    @property
    def figure_name(self) -> str:
        """Name of the metric that tables compare: ``Dice`` in a segmentation, else ``AUROC``."""
        return "Dice" if DICE_METRIC in self.mean_more or self.segmentation is not None else "AUROC"

    @property
    def main_mean(self) -> float | None:
        """Mean over all classes of the metric that tables compare; None if no class has it."""
        return self.mean_more.get(DICE_METRIC) if self.figure_name == "Dice" else self.mean_auroc

    def compute_mean_with_error(self, name: Figure) -> ValueWithError | None:
        """Return the mean of a metric over all classes with its largest possible error; None if undefined.

        The exact mean lies within ``value`` ± ``error``.
        """
        value: float | None = getattr(self, f"mean_{name}")
        return None if value is None else ValueWithError(value, self.errors.get(name, 0.0))

    def compute_headline_auroc(self, members: Collection[str] | None = None) -> HeadlineAuroc:
        """Return the mean AUROC over the classes with enough positive test images.

        In a segmentation it is the mean Dice over all classes that have one, because each tested patient shows the
        class.

        Args:
            members: Classes to choose from; None for all classes of the test.
        """
        names = [name for name, metrics in self.per_class.items() if metrics.main_figure is not None]
        if self.figure_name == "Dice":
            segmented = tuple(name for name in names if members is None or name in members)
            values = (self.per_class[name].main_figure_with_error for name in segmented)
            return HeadlineAuroc(average_values_with_error(values), segmented, {})
        all_positives = {
            name: self.get_class_image_counts(name)[0] or 0 for name in names if members is None or name in members
        }
        classes = tuple(name for name, positives in all_positives.items() if positives >= MIN_POSITIVES)
        left_out = {name: positives for name, positives in all_positives.items() if positives < MIN_POSITIVES}
        return HeadlineAuroc(
            average_values_with_error(self.per_class[name].metric_with_error("auroc") for name in classes),
            classes,
            left_out,
        )

    def get_class_image_counts(self, name: str) -> tuple[int | None, int | None]:
        """Return the numbers of positive and negative test images of a class; None if no site reports them.

        Where metrics are means over sites, the numbers are sums over the sites if histograms were pooled; otherwise
        they are the largest numbers of a single site.
        """
        added_up = self.pooled.per_class.get(name) if self.pooled and self.note != GLOBAL_MODEL_NOTE else None
        result = added_up or self.per_class[name]
        return result.positives, result.negatives


def compute_metrics_per_class(
    scores: Floats, labels: Floats, class_names: Sequence[str], more: Mapping[str, Metric] = NO_METRICS
) -> dict[str, ClassMetrics]:
    """Compute the metrics of each class separately.

    Args:
        scores: Probabilities, ``(n, classes)``; ignored where the label is unknown.
        labels: 1, 0 or NaN for unknown, ``(n, classes)``.
        class_names: Names of the columns.
        more: Metrics of plug-ins by name.

    Raises:
        BadInput: If a plug-in's metric fails.
        ModelDiverged: If a score is not finite.
        ValueError: If a label is not 0, 1 or NaN, or the shapes differ.
    """
    if not scores.shape == labels.shape == (len(scores), len(class_names)):
        expected = f"two arrays of (n, {len(class_names)})"
        raise ValueError(f"Expected {expected} for {len(class_names)} classes, got {scores.shape} and {labels.shape}.")
    results = dict[str, ClassMetrics]()
    for name, all_scores, all_labels in zip(class_names, scores.T, labels.T, strict=True):
        is_known = ~np.isnan(all_labels)
        known_scores = all_scores[is_known]
        known_labels = all_labels[is_known]
        if not (valid := np.isin(known_labels, (0, 1))).all():
            raise ValueError(
                f'Labels of class "{name}" hold {known_labels[~valid][0]}; expected 0, 1 or NaN for unknown.'
            )
        if not (finite := np.isfinite(known_scores)).all():
            raise ModelDiverged(
                f'{int(np.sum(~finite))} of {len(known_scores)} scores of class "{name}" are NaN or infinite'
            )
        positives = int(np.sum(known_labels == 1))
        negatives = len(known_labels) - positives
        if not positives or not negatives:
            results[name] = ClassMetrics(None, None, None, positives, negatives, dict.fromkeys(more))
            continue
        sensitivity = float(np.mean(known_scores[known_labels == 1] > DECISION_THRESHOLD))
        specificity = float(np.mean(known_scores[known_labels == 0] <= DECISION_THRESHOLD))
        results[name] = ClassMetrics(
            auroc=_compute_auroc(known_scores, known_labels),
            average_precision=_compute_average_precision(known_scores, known_labels),
            balanced_accuracy=(sensitivity + specificity) / 2,
            positives=positives,
            negatives=negatives,
            more={key: compute_plugin_metric(key, metric, known_scores, known_labels) for key, metric in more.items()},
        )
    return results


def make_segmentation_metrics(figures: PatientFigures) -> ClassMetrics:
    """Return the metrics of a segmented class: mean Dice, and mean distance over the patients with a prediction.

    ``positives`` and ``negatives`` are both the number of patients in whom the class is outlined, because both parts of
    a patient histogram have this sum.
    """
    finite = figures.distances[np.isfinite(figures.distances)]
    more = {
        DICE_METRIC: float(figures.dice.mean()) if len(figures.dice) else None,
        HAUSDORFF_METRIC: float(finite.mean()) if len(finite) else None,
    }
    patients = len(figures.dice)
    return ClassMetrics(None, None, None, patients, patients, more)


def make_metrics_of_overlap(overlap: ClassOverlap | None) -> ClassMetrics:
    """Return the metrics of a segmented class over the patients of all hospitals; None values if no hospital
    sends it.
    """
    if overlap is None:
        return ClassMetrics(None, None, None, None, None, dict.fromkeys(SEGMENTATION_METRICS))
    more = {DICE_METRIC: overlap.dice, HAUSDORFF_METRIC: overlap.hd95}
    return ClassMetrics(None, None, None, overlap.patients, overlap.patients, more)


def compute_mean_auroc(scores: Floats, labels: Floats) -> float | None:
    """Return the mean AUROC over the classes that have one; None if no class has an AUROC.

    Args:
        scores: Finite scores, ``(n, classes)``.
        labels: 1, 0 or NaN for unknown, ``(n, classes)``.
    """
    images, classes = scores.shape
    aurocs = list[float]()
    if images * images * classes <= MAX_PAIR_COMPARISONS:
        aurocs = _compute_aurocs_by_comparisons(scores, labels).tolist()
    else:
        for class_scores, class_labels in zip(scores.T, labels.T, strict=True):
            is_known = ~np.isnan(class_labels)
            if (auroc := _compute_auroc(class_scores[is_known], class_labels[is_known])) is not None:
                aurocs.append(auroc)
    return float(np.mean(aurocs)) if aurocs else None


def compute_mean_and_sd(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return mean and population SD (ddof 0, as in Kulkarni et al. 2024) of the values that are not None."""
    defined = [value for value in values if value is not None]
    return (float(np.mean(defined)), float(np.std(defined))) if defined else (None, None)


def summarise_test_results(
    results: Mapping[str, ClassMetrics], shared: Collection[str], unique: Collection[str], note: str = "global model"
) -> FinalTestSummary:
    """Return the summary of the final test, with means over classes, from the metrics of each class.

    Args:
        results: Class name -> its metrics, in the order of the run's classes.
        shared: Classes that every site annotates.
        unique: Classes that exactly one site annotates.
        note: The models that were tested.
    """
    everything = average_group_auroc(results, results)
    return FinalTestSummary(
        mean_auroc=everything.mean_auroc,
        sd_auroc=everything.sd_auroc,
        mean_average_precision=compute_mean_and_sd(result.average_precision for result in results.values())[0],
        mean_balanced_accuracy=compute_mean_and_sd(result.balanced_accuracy for result in results.values())[0],
        per_class=dict(results),
        shared_classes=average_group_auroc(results, shared),
        unique_classes=average_group_auroc(results, unique),
        note=note,
        mean_more=average_plugin_metrics(results.values()),
        errors={name: error for name in FIGURES if (error := compute_mean_metric_error(results.values(), name))},
    )


def average_metrics_over_models(metrics: Sequence[ClassMetrics]) -> ClassMetrics:
    """Average the metrics of one class over several models; the image counts are the largest of any model."""
    return ClassMetrics(
        auroc=compute_mean_and_sd(model.auroc for model in metrics)[0],
        average_precision=compute_mean_and_sd(model.average_precision for model in metrics)[0],
        balanced_accuracy=compute_mean_and_sd(model.balanced_accuracy for model in metrics)[0],
        positives=max((model.positives for model in metrics if model.positives is not None), default=None),
        negatives=max((model.negatives for model in metrics if model.negatives is not None), default=None),
        more=average_plugin_metrics(metrics),
    )


def average_group_auroc(results: Mapping[str, ClassMetrics], members: Collection[str]) -> ClassGroupAuroc:
    """Average the AUROC over the classes in ``members``; the result lists them in the order of ``results``."""
    classes = tuple(name for name in results if name in members)
    error = compute_mean_metric_error((results[name] for name in classes), "auroc")
    return ClassGroupAuroc(*compute_mean_and_sd(results[name].auroc for name in classes), classes, error)


def compute_mean_metric_error(results: Iterable[ClassMetrics], name: Figure) -> float:
    """Return the largest possible error of a metric's mean over the classes for which it is defined."""
    mean = average_values_with_error(result.metric_with_error(name) for result in results)
    return 0.0 if mean is None else mean.error


def average_plugin_metrics(results: Iterable[ClassMetrics]) -> dict[str, float | None]:
    """Return metric of a plug-in -> its mean over those results in which it is defined."""
    all_results = list(results)
    names = {name: None for result in all_results for name in result.more}
    return {name: compute_mean_and_sd(result.more.get(name) for result in all_results)[0] for name in names}


def _compute_auroc(scores: Floats, labels: Floats) -> float | None:
    """Compute the AUROC as the Mann-Whitney U divided by its maximum; ties count half.

    Return None without positives or without negatives.
    """
    positives = scores[labels == 1]
    negatives = scores[labels != 1]
    if not len(positives) or not len(negatives):
        return None
    ordered = np.sort(negatives)
    smaller = np.searchsorted(ordered, positives, "left") + np.searchsorted(ordered, positives, "right")
    return float(smaller.sum() / 2 / (len(positives) * len(negatives)))


def _compute_aurocs_by_comparisons(scores: Floats, labels: Floats) -> NDArray[np.float64]:
    """Return the AUROCs of the classes that have one; bit for bit equal to :func:`_compute_auroc`.

    All positives are compared with all negatives of their class, for all classes at once. With few images this is
    faster than sorting the images of each class.

    Args:
        scores: ``(n, classes)``.
        labels: 1, 0 or NaN for unknown, ``(n, classes)``.
    """
    is_positive = labels == 1
    is_negative = labels == 0
    pairs = is_positive.sum(axis=0) * is_negative.sum(axis=0)  # (classes,)
    is_pair = is_positive[:, np.newaxis] & is_negative  # (positives, negatives, classes)
    positives = scores[:, np.newaxis]
    not_smaller = ((positives >= scores) & is_pair).sum(axis=(0, 1))
    larger = ((positives > scores) & is_pair).sum(axis=(0, 1))
    has_auroc = pairs > 0
    return np.asarray((not_smaller + larger)[has_auroc] / 2 / pairs[has_auroc])


def _compute_average_precision(scores: Floats, labels: Floats) -> float:
    """Compute the average precision, bit for bit equal to scikit-learn's, without its input checks.

    Args:
        scores: ``(n,)``.
        labels: 0 or 1, at least one of them 1, ``(n,)``.
    """
    order = np.argsort(scores)[::-1]
    ordered = scores[order]
    ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)  # the last image of each score
    detected = np.cumsum(labels[order] == 1)[ends]
    recall = detected / detected[-1]
    return float(np.sum((np.diff(recall, prepend=0.0) * (detected / (ends + 1)))[::-1]))
