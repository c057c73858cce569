"""What a run's report says of calibration, decisions and pooled values, ready for ``quality.html.j2``."""

from dataclasses import dataclass

from common.metrics.auroc import Summary, mean_and_sd
from common.metrics.calibration import Calibration, Decisions, OperatingPoint
from server.reporting.coverage import ClassesOfGroup
from server.reporting.figures import curves, quality
from server.reporting.figures.panels import MOST
from server.reporting.run_claims import FEW


@dataclass(frozen=True)
class QualitySection:
    """Figures as markup, empty where there is none.

    Attributes:
        pooled_only: Whether the figures come from the sites' histograms, for want of images of the coordinator's own.
        calibrations, decisions: In the order in which the report lists classes.
        within: How far calibration error and Brier score may be off, at most.
        untested: Classes of the run without a known label.
        points: Class -> thresholds chosen on validation images, with what they come to on the test images.
        chosen_on_few: Of those, classes with fewer than ``few`` validation images with or without the finding.
        without_points: Classes with test images and no threshold.
        left_out: Classes for which there was no room in the figure.
    """

    pooled_only: bool
    calibrations: dict[str, Calibration]
    decisions: dict[str, Decisions]
    reliability: str
    decided: str
    confusion: str
    roc: str
    precision_recall: str
    within: float
    untested: tuple[str, ...]
    points: dict[str, tuple[OperatingPoint, ...]]
    few: int
    chosen_on_few: tuple[str, ...]
    without_points: tuple[str, ...]
    left_out: int


def mean_of_sites(test: Summary) -> tuple[float | None, float | None]:
    """Mean AUROC and average precision of the sites over the classes that have a pooled value, to stand beside it."""
    pooled = test.pooled.per_class if test.pooled else {}
    both = [test.per_class[name] for name, each in pooled.items() if each.auroc is not None and name in test.per_class]
    return mean_and_sd(one.auroc for one in both)[0], mean_and_sd(one.average_precision for one in both)[0]


def quality_section(test: Summary, groups: list[ClassesOfGroup]) -> QualitySection | None:
    """Build the section from the coordinator's test images, else from the sites' histograms; None without both."""
    own = test.quality
    of_class = test.pooled.per_class if test.pooled else {}
    calibrations = own.calibration if own else {name: each.calibration for name, each in of_class.items()}
    decisions = own.decisions if own else {name: each.decisions for name, each in of_class.items()}
    order = [name for group in groups for name in group.classes]
    calibrated = {name: found for name in order if (found := calibrations.get(name)) is not None}
    if not calibrated:
        return None
    drawn = own.curves if own else {name: each.curve for name, each in of_class.items()}
    curves_of = {name: curve for name in order if (curve := drawn.get(name)) is not None}
    decided = {name: decisions[name] for name in calibrated}
    points = {name: chosen for name in order if (chosen := test.operating_points.get(name))}
    table = own.confusion if own else None
    return QualitySection(
        pooled_only=own is None,
        calibrations=calibrated,
        decisions=decided,
        reliability=quality.reliability(calibrated),
        decided=quality.decided(decided),
        confusion=quality.confusion_matrix(table, list(test.per_class)) if table else "",
        roc=curves.roc(curves_of),
        precision_recall=curves.precision_recall(curves_of),
        within=max(one.within for one in calibrated.values()),
        untested=tuple(name for name in order if name not in calibrated),
        points=points,
        few=FEW,
        chosen_on_few=tuple(name for name, (point, *_) in points.items() if min(point.chosen_on) < FEW),
        without_points=tuple(name for name in calibrated if name not in points),
        left_out=max(0, len(calibrated) - MOST),
    )
