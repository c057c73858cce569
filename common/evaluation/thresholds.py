"""Decision thresholds that were fixed before images are scored, and those in a run's summary; read without torch."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import is_file

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class FixedThreshold:
    """A threshold that was fixed before the images were scored; an image with a higher score counts as positive.

    Attributes:
        rule: Name, for people, of the rule that fixed it: ``Youden on validation``, ``stated``.
        threshold: The probability.
    """

    rule: str
    threshold: float


DEFAULT_THRESHOLD = FixedThreshold("none fixed", 0.5)
"""The threshold of a class for which none was fixed."""


class _Point(BaseModel):
    rule: str
    target: float | None
    threshold: float


class _Test(BaseModel):
    operating_points: dict[str, tuple[_Point, ...]] = {}


class _Summary(BaseModel):
    test: _Test = _Test()


def read_points_of_run(folder: Path) -> dict[str, tuple[FixedThreshold, ...]]:
    """Return class -> thresholds that the run chose on validation images; empty if the folder has no summary.

    Raises:
        BadInput: If the summary exists but cannot be read.
    """
    return {
        name: tuple(FixedThreshold(_describe_rule(point), point.threshold) for point in points)
        for name, points in _read_summary(folder).test.operating_points.items()
    }


def make_summary_of_thresholds(folder: Path) -> bytes:
    """Return a summary that contains only a run's thresholds, because the full summary has metrics of each hospital.

    Raises:
        BadInput: If the summary exists but cannot be read.
    """
    return _read_summary(folder).model_dump_json().encode()


def _read_summary(folder: Path) -> _Summary:
    path = folder / SUMMARY_FILE
    if not is_file(path):
        return _Summary()
    try:
        return _Summary.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput([Fault(str(path), f"cannot be read: {reason}.", "Copy it again from the run.")]) from None


def _describe_rule(point: _Point) -> str:
    rule = "Youden" if point.target is None else f"sensitivity ≥ {point.target:g}"
    return f"{rule} on validation"
