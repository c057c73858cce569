"""``flwr-client recalibrate``: fit a model's probabilities to this hospital, and use the fit in ``predict``.

Platt scaling (Platt, Advances in Large Margin Classifiers, 1999) replaces a probability p of a class by
``sigmoid(slope * logit(p) + offset)``; temperature scaling (Guo et al., ICML 2017) has no offset. Both are fitted on
the site's validation part alone, by the logistic loss. The calibration errors on the test part show the effect.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from scipy.optimize import minimize

from polyclinic.client.prediction.model import UsableModel
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.metrics.calibration import compute_calibration
from polyclinic.common.system.files import write_atomically

CALIBRATION_FILE = "calibration.json"
MIN_CLASS_IMAGES = 20
"""Minimum number of validation images that show a class, and of those that do not, for a fit of two parameters."""
_MIN_PROBABILITY = 1e-6
"""Probabilities are clipped to at least this, and at most 1 minus this, because the logits of 0 and 1 are infinite."""
ScalingMethod = Literal["platt", "temperature"]
Floats = NDArray[np.floating]


class ClassCalibration(BaseModel):
    """The calibration of one class: ``sigmoid(slope * logit + offset)``, with its errors before and after.

    Attributes:
        slope, offset: The parameters; 1 and 0 do not change a probability.
        positives, negatives: Validation images that show the class, and that do not.
        reason: The reason why the class has no fit; empty if it has one.
        error_before, error_after: Expected calibration error on the test part; None without test images.
        test_positives, test_negatives: Test images that show the class, and that do not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    slope: float = 1.0
    offset: float = 0.0
    positives: int
    negatives: int
    reason: str = ""
    error_before: float | None = None
    error_after: float | None = None
    test_positives: int = 0
    test_negatives: int = 0

    @property
    def is_fitted(self) -> bool:
        return not self.reason


class SiteCalibration(BaseModel):
    """The content of ``calibration.json``.

    Attributes:
        model_sha256: SHA-256 of the model to which the calibration belongs.
        time: UTC time (ISO 8601) of the fit.
        classes: Class that the model has learned -> its fit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    model_sha256: str
    method: ScalingMethod
    time: str
    classes: dict[str, ClassCalibration]


def fit_scaling(scores: Floats, labels: Floats, method: ScalingMethod) -> tuple[float, float]:
    """Return the slope and offset that minimise the logistic loss; temperature scaling has offset 0.

    Args:
        scores: Probabilities ``(n,)``.
        labels: 1 or 0, ``(n,)``; both values must occur.
    """
    logits = compute_logits(scores)

    def compute_loss(parameters: Floats) -> tuple[float, Floats]:
        slope = parameters[0]
        offset = parameters[1] if method == "platt" else 0.0
        scaled = slope * logits + offset
        loss = np.mean(np.logaddexp(0.0, scaled) - labels * scaled)
        residual = _sigmoid(scaled) - labels
        gradient = np.array([np.mean(residual * logits), np.mean(residual)])
        return float(loss), gradient[: len(parameters)]

    start = np.array([1.0, 0.0])[: 2 if method == "platt" else 1]
    result = minimize(compute_loss, start, jac=True, method="BFGS")
    slope = float(result.x[0])
    return slope, float(result.x[1]) if method == "platt" else 0.0


def calibrate_class(
    validation: tuple[Floats, Floats], test: tuple[Floats, Floats], method: ScalingMethod
) -> ClassCalibration:
    """Fit one class on validation images, and measure its calibration error on test images before and after the fit.

    Args:
        validation, test: Probabilities and labels ``(n,)``, NaN for an unknown label.
    """
    scores, labels = _select_labelled(*validation)
    test_scores, test_labels = _select_labelled(*test)
    counts = {
        "positives": int(np.sum(labels == 1)),
        "negatives": int(np.sum(labels == 0)),
        "test_positives": int(np.sum(test_labels == 1)),
        "test_negatives": int(np.sum(test_labels == 0)),
    }

    before = compute_calibration(test_scores, test_labels)
    error_before = None if before is None else before.expected_error

    fewest = min(counts["positives"], counts["negatives"])
    reason = ""
    slope = 1.0
    offset = 0.0
    if fewest < MIN_CLASS_IMAGES:
        kind = "show" if counts["positives"] == fewest else "do not show"
        reason = f"{fewest} validation images {kind} it, and a fit needs {MIN_CLASS_IMAGES}"
    else:
        slope, offset = fit_scaling(scores, labels, method)
        if slope <= 0:
            reason = "the fit would turn the order of the images round: here the model does not tell this class"
            slope = 1.0
            offset = 0.0

    after = compute_calibration(scale_probabilities(test_scores, slope, offset), test_labels)
    return ClassCalibration(
        slope=slope,
        offset=offset,
        reason=reason,
        error_before=error_before,
        error_after=None if after is None else after.expected_error,
        **counts,
    )


def scale_probabilities(scores: Floats, slope: float, offset: float) -> NDArray[np.float64]:
    """Return the probabilities ``(n,)`` after scaling; slope 1 and offset 0 return them unchanged."""
    if (slope, offset) == (1.0, 0.0):
        return np.asarray(scores, np.float64)
    return _sigmoid(slope * compute_logits(scores) + offset)


def calibrate_probabilities(
    probabilities: Floats, class_names: Sequence[str], calibration: SiteCalibration
) -> NDArray[np.float64]:
    """Return the probabilities ``(n, classes)`` after the scaling of each class."""
    fits: Mapping[str, ClassCalibration] = calibration.classes
    columns = [
        scale_probabilities(probabilities[:, column], fits[name].slope, fits[name].offset)
        for column, name in enumerate(class_names)
    ]
    return np.stack(columns, axis=1)


def compute_logits(scores: Floats) -> NDArray[np.float64]:
    """Return the logits of probabilities; 0 and 1 are clipped first."""
    inside = np.clip(np.asarray(scores, np.float64), _MIN_PROBABILITY, 1 - _MIN_PROBABILITY)
    return np.asarray(np.log(inside) - np.log1p(-inside), np.float64)


def write_calibration(model: UsableModel, calibration: SiteCalibration) -> None:
    """Write the calibration beside the model."""
    content = calibration.model_dump_json(indent=1) + "\n"
    write_atomically(model.folder / CALIBRATION_FILE, content.encode(), private=True)


def read_calibration(model: UsableModel) -> SiteCalibration:
    """Read the calibration of a model.

    Raises:
        BadInput: If there is no calibration, or it belongs to another model.
    """
    path = model.folder / CALIBRATION_FILE
    remedy = "Make it with flwr-client recalibrate, or leave --calibrated out."
    try:
        calibration = SiteCalibration.model_validate_json(path.read_bytes())
    except OSError:
        raise BadInput([Fault("--calibrated", f"there is no {CALIBRATION_FILE} in {model.folder}.", remedy)]) from None
    except ValidationError:
        raise BadInput([Fault(str(path), "is not what flwr-client recalibrate wrote.", remedy)]) from None
    is_whole = set(calibration.classes) == set(model.learned_classes)
    if calibration.model_sha256 != model.description.model_sha256 or not is_whole:
        raise BadInput([Fault(str(path), "is of another model.", remedy)])
    return calibration


def _select_labelled(scores: Floats, labels: Floats) -> tuple[Floats, Floats]:
    known = ~np.isnan(labels)
    return scores[known], labels[known]


def _sigmoid(values: Floats) -> NDArray[np.float64]:
    return np.asarray(np.exp(-np.logaddexp(0.0, -values)), np.float64)
