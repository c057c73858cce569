"""The records by which a site compares the run's model with one that it trains alone, after the run's test."""

from dataclasses import dataclass
from typing import Annotated

from common.metrics.benefit import MODELS
from common.wire.bounds import EPOCHS, MOST_CLASSES, SHARE, ClassNames, Each, Range, RoundNumber, Shares, Text
from common.wire.errors import WireError
from common.wire.records import Groups, Request

Differences = Annotated[tuple[float, ...], Each(len(MODELS), Range(-1.0 - 1e-9, 1.0 + 1e-9))]
"""Of two mean AUROCs."""


@dataclass(frozen=True)
class BenefitRequest(Request):
    """Compare this model with one that the site trains alone, on the site's own test part.

    Attributes:
        initial: The model that the run began with, with head rows of the site's own classes.
        epochs: Local epochs that the site trained in the run: it trains alone for as many.
    """

    initial: Groups
    epochs: Annotated[int, EPOCHS]


@dataclass(frozen=True)
class BenefitReply:
    """AUROCs of the four models of :data:`common.metrics.benefit.MODELS`, in that order; empty where none are told.

    Attributes:
        class_names: The classes that the figures are about.
        auroc: Of each model the AUROC of each class, one model after the other.
        mean, mean_low, mean_high: Of each model the mean over these classes, and the ends of its 95 % interval.
        gain, gain_low, gain_high: By how much the mean of each model but the first is above that of the first, and the
            ends of the 95 % interval of this difference, from the same resamples for both.
        over_patients: Whether patients were resampled, or images where nobody told whose they are.
    """

    run: Text
    round: RoundNumber
    site: Text
    class_names: ClassNames = ()
    auroc: Annotated[tuple[float, ...], Each(len(MODELS) * MOST_CLASSES, SHARE)] = ()
    mean: Shares = ()
    mean_low: Shares = ()
    mean_high: Shares = ()
    gain: Differences = ()
    gain_low: Differences = ()
    gain_high: Differences = ()
    over_patients: bool = False

    def __post_init__(self) -> None:
        names, models = self.class_names, len(MODELS) if self.class_names else 0
        if len(set(names)) < len(names) or len(self.auroc) != models * len(names):
            raise WireError("each class must be compared once, and have one AUROC a model.")
        means, gains = (self.mean, self.mean_low, self.mean_high), (self.gain, self.gain_low, self.gain_high)
        if any(len(one) != models for one in means) or any(len(one) != max(models - 1, 0) for one in gains):
            raise WireError("each model must have a mean, and each but the first a difference, with both ends.")
        if any(not low <= value <= high for low, value, high in [*_triples(means), *_triples(gains)]):
            raise WireError("a mean or a difference must lie within its interval.")


def _triples(columns: tuple[tuple[float, ...], ...]) -> list[tuple[float, ...]]:
    """Return low, value and high of each entry, from columns of value, low and high."""
    return [(low, value, high) for value, low, high in zip(*columns, strict=True)]
