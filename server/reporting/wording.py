"""Numbers as people read them, and the groups in which they read classes; for templates and sentences."""

from dataclasses import dataclass

import numpy as np

from common.metrics.auroc import Summary
from common.metrics.benefit import WORDS as SITE_MODELS
from common.metrics.calibration import wilson
from common.metrics.measured import figure
from common.system.plain_text import (
    NOT_APPLICABLE,
    count,
    counted,
    duration,
    listed,
    number,
    shortened,
    signed,
    size,
    span,
    spans,
)
from server.runs.reader import RunSummary

__all__ = (
    "NOT_APPLICABLE",
    "SITE_MODELS",
    "ClassGroup",
    "class_groups",
    "classes_averaged",
    "count",
    "count_or_hidden",
    "counted",
    "duration",
    "figure",
    "listed",
    "number",
    "share",
    "shortened",
    "signed",
    "size",
    "span",
    "spans",
    "threshold",
)

GROUP_TITLES = {
    "shared": "annotated by every site",
    "some": "annotated by some sites",
    "unique": "annotated by one site only",
    "varies": "shared or unique depending on the seed",
}


@dataclass(frozen=True)
class ClassGroup:
    """Classes that are annotated by every site, by some sites, or by one.

    Attributes:
        kind: A key of ``GROUP_TITLES``.
        classes: Class names, in the order of the run's classes.
    """

    kind: str
    classes: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return what the classes have in common."""
        return GROUP_TITLES[self.kind]


def class_groups(summary: RunSummary) -> list[ClassGroup]:
    """Return shared, partly shared and unique classes, empty groups left out; every class stands in exactly one.

    Taken from the test results, as a method that pools all data has one site but is judged on the hospitals' classes.
    """
    shared, unique = summary.test.shared_classes.classes, summary.test.unique_classes.classes
    kinds = {name: "shared" if name in shared else "unique" if name in unique else "some" for name in summary.classes}
    groups = {kind: tuple(name for name in summary.classes if kinds[name] == kind) for kind in GROUP_TITLES}
    return [ClassGroup(kind, names) for kind, names in groups.items() if names]


def count_or_hidden(value: int | None, smallest: int | None) -> str:
    """Format a site's count; where its policy hides it, say below which number: a hidden count is never 0."""
    return f"hidden (fewer than {smallest} patients)" if value is None and smallest else count(value)


def classes_averaged(test: Summary) -> str:
    """Return which classes a mean is over: ``"all classes"``, ``"4 of 8 classes"`` where the others have no AUROC."""
    scored = sum(result.auroc is not None for result in test.per_class.values())
    return "all classes" if scored == len(test.per_class) else f"{scored} of {len(test.per_class)} classes"


def share(part: int, whole: int) -> str:
    """Format a share of images in per cent with its 95 % score interval: ``"91 % (87–94)"``."""
    if not whole:
        return NOT_APPLICABLE
    (low,), (high,) = wilson(np.array([part]), np.array([whole]))
    return f"{part / whole:.0%} ({100 * low:.0f}–{100 * high:.0f})".replace("%", "\N{NO-BREAK SPACE}%")


def threshold(value: float) -> str:
    """Format a threshold with as many digits as one near 0 needs: ``"0.4312"``, ``"0.002104"``."""
    return f"{value:.4g}"
