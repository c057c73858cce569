"""The records of a round, typed, frozen and checked when built: what is asked to train or evaluate, and the replies.

:mod:`common.wire.codec` writes them into Flower's records and reads them back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from common.errors import quoted
from common.metrics.score_histograms import ScoreHistogram, histograms_of
from common.models.state import Head, ModelState
from common.wire.bounds import (
    COUNT,
    EPOCHS,
    EPSILON,
    MOST_IMAGES,
    MOST_ROUNDS,
    SECONDS,
    SHARE,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    ClassNames,
    Counts,
    Figures,
    MetricNames,
    Range,
    RoundNumber,
    Shares,
    Text,
    Words,
)
from common.wire.errors import WireError
from common.wire.quantization import Form
from common.wire.roll_call import PlanText, check_rows, check_run

Arrays = Mapping[str, NDArray[np.float32]]
"""A method's statistics by name, small arrays of any shape; NaN where there is nothing to say."""

NO_ARRAYS: Arrays = MappingProxyType({})


def no_arrays() -> Arrays:
    """:data:`NO_ARRAYS`, for dataclass fields."""
    return NO_ARRAYS


MaybeLoss = Annotated[float | None, VALIDATION_LOSS]
MaybeShare = Annotated[float | None, SHARE]
MaybeCount = Annotated[int | None, COUNT]
ScoreCounts = NDArray[np.int64]
"""Counts by score, flat: ``BINS`` of each class, one class after the other."""


def no_scores() -> ScoreCounts:
    """No counts, for dataclass fields."""
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Groups:
    """A model, or an update of one, as named groups; None where a group does not travel.

    Attributes:
        trunk: float32 ``(t,)``, everything before the head but batch normalisation, flat.
        norm: float32 ``(m,)``, batch normalisation's four tensors per layer, flat.
        head: The head's rows with their class names.
        form: How the trunk travels; its numbers have been rounded to what that form can hold.
    """

    trunk: NDArray[np.float32] | None = None
    norm: NDArray[np.float32] | None = None
    head: Head | None = None
    form: Form = "float32"

    def __post_init__(self) -> None:
        for name, array in (("trunk", self.trunk), ("norm", self.norm)):
            if array is not None and (array.ndim != 1 or array.dtype != np.float32):
                raise WireError(f"{name} must be float32 of one dimension, not {array.dtype} of {array.ndim}.")

    def named(self) -> dict[str, NDArray[np.float32]]:
        """The arrays that are there, by the names they have on the wire and on a site's disk."""
        arrays = {"trunk": self.trunk, "norm": self.norm}
        if self.head:
            arrays |= {"head.weight": self.head.weight, "head.bias": self.head.bias}
        return {name: array for name, array in arrays.items() if array is not None}

    def changed(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> "Groups":
        """Return these groups with each array changed, head rows included."""
        head = self.head
        return replace(
            self,
            trunk=None if self.trunk is None else change(self.trunk),
            norm=None if self.norm is None else change(self.norm),
            head=head and Head(head.class_names, change(head.weight), change(head.bias)),
        )

    @classmethod
    def of_named(cls, arrays: Mapping[str, NDArray[np.float32]], class_names: Sequence[str]) -> "Groups":
        """The inverse of :meth:`named`; without class names there is no head."""
        head = Head(tuple(class_names), arrays["head.weight"], arrays["head.bias"]) if class_names else None
        return cls(arrays.get("trunk"), arrays.get("norm"), head)

    @classmethod
    def of_model(cls, model: ModelState) -> "Groups":
        """All three groups of a whole model."""
        return cls(model.trunk, model.norm, model.head)

    def model(self) -> ModelState:
        """The inverse of :meth:`of_model`.

        Raises:
            WireError: If a group is missing.
        """
        if self.trunk is None or self.norm is None or self.head is None:
            lacking = [name for name in ("trunk", "norm", "head") if getattr(self, name) is None]
            raise WireError(f"a whole model has trunk, norm and head; there is no {quoted(lacking)}.")
        return ModelState(self.trunk, self.norm, self.head)

    def over(self, others: "Groups") -> "Groups":
        """These groups, and those of ``others`` in the place of missing ones."""
        pairs = ((getattr(self, name), getattr(others, name)) for name in ("trunk", "norm", "head"))
        return Groups(*(theirs if own is None else own for own, theirs in pairs))


def below(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays called ``prefix/name``, by that name: groups of arrays lie so on disk."""
    return {name.removeprefix(f"{prefix}/"): a for name, a in arrays.items() if name.startswith(f"{prefix}/")}


@dataclass(frozen=True)
class Request:
    """What every request to a site says.

    Attributes:
        class_names: The head rows the site holds in this run, in the order its head has them.
        counted: Last round in which this site's reply counted, 0 for none: its memory of that round becomes final.
        best: Round after which the model was best so far, -1 for none yet: the site keeps its own parts of that model.
        left_out: Why this site's last reply did not count, with the round; empty where it did.
        frozen: The frozen part of the model as its trunk, for a site that does not have it; empty else.
    """

    run: Text
    round: RoundNumber
    plan: PlanText
    contract: Text
    class_names: ClassNames
    counted: RoundNumber
    best: Annotated[int, Range(-1, MOST_ROUNDS)]
    left_out: Annotated[str, Words()]
    model: Groups
    frozen: Groups = field(default=Groups(), kw_only=True)

    def __post_init__(self) -> None:
        check_run(self.run)
        check_rows(self.model.head, self.class_names)


@dataclass(frozen=True)
class TrainRequest(Request):
    """Train one round from this model; round 0 is one epoch that only shows how hard the site's task is.

    Attributes:
        statistics: What the method's coordinator tells this site besides.
    """

    statistics: Arrays = field(default_factory=no_arrays)

    @property
    def ranks(self) -> bool:
        """Whether the site answers with statistics only, and remembers nothing of it."""
        return self.round == 0


@dataclass(frozen=True)
class EvaluateRequest(Request):
    """Evaluate this model on the site's validation part and, for a ``test``, the best model on its test part too."""

    test: bool


def _check_correct(images: int | None, correct: int | None) -> None:
    if (images is None) != (correct is None) or (images or 0) < (correct or 0) or min(images or 0, correct or 0) < 0:
        told = ["an unknown number of" if number is None else number for number in (images, correct)]
        raise WireError(f"of {told[0]} test images {told[1]} cannot be right.")


@dataclass(frozen=True)
class TrainReply:
    """New minus received, and what the round was like.

    Attributes:
        validation_loss: Of the model as received, on the site's validation part; None without validation images.
        validation_auroc: As above, the mean over the site's classes for which it is defined.
        train_loss: Mean over the batches of the last local epoch; None where the run's privacy does not cover it.
        epochs: Local epochs trained.
        statistics: What the method sends for this site besides.
        test_images, test_correct: Images of the site's test part, and how many of them the model as received puts into
            the right class; None unless the plan asks for it every round.
        epsilon: What the run has cost this site so far, where the plan asks for privacy.
        arithmetic: How the site computed, as ``precision, memory format``, and on how many GPUs if on several.
    """

    run: Text
    round: RoundNumber
    site: Text
    train_samples: Annotated[int, Range(1, MOST_IMAGES)]
    train_loss: Annotated[float | None, TRAIN_LOSS]
    validation_loss: MaybeLoss
    validation_auroc: MaybeShare
    seconds: Annotated[float, SECONDS]
    update: Groups
    epochs: Annotated[int, EPOCHS] = 1
    statistics: Arrays = field(default_factory=no_arrays)
    test_images: MaybeCount = None
    test_correct: MaybeCount = None
    epsilon: Annotated[float | None, EPSILON] = None
    arithmetic: Text = ""

    def __post_init__(self) -> None:
        if self.train_samples < 1:
            raise WireError(f"train_samples must be positive, not {self.train_samples}.")
        _check_correct(self.test_images, self.test_correct)


@dataclass(frozen=True)
class EvaluateReply:
    """Losses and, for a test, one entry a class the site annotates; NaN stands for "not defined".

    Attributes:
        positives, negatives: :data:`UNKNOWN_COUNT` for a class of which the site tells nothing.
        told_classes: Those whose scores the site reports, where the plan asks for it and the site's policy allows it.
        positive_scores, negative_scores: Of each of these ``BINS`` counts, one class after the other.
        validation_classes, validation_positive_scores, validation_negative_scores: The same on the site's validation
            part, for choosing thresholds.
        metric_names: Of plug-ins' metrics.
        metric_values: Of each class as many, one class after the other.
        masked_classes: Those whose scores on the test part the site holds until it masks them, where the plan has
            secure aggregation; sorted.
    """

    run: Text
    round: RoundNumber
    site: Text
    validation_loss: MaybeLoss
    validation_auroc: MaybeShare
    class_names: ClassNames
    auroc: Shares
    average_precision: Shares
    balanced_accuracy: Shares
    positives: Counts
    negatives: Counts
    model_sha256: Text
    test_images: MaybeCount = None
    test_correct: MaybeCount = None
    told_classes: ClassNames = ()
    positive_scores: ScoreCounts = field(default_factory=no_scores)
    negative_scores: ScoreCounts = field(default_factory=no_scores)
    validation_classes: ClassNames = ()
    validation_positive_scores: ScoreCounts = field(default_factory=no_scores)
    validation_negative_scores: ScoreCounts = field(default_factory=no_scores)
    metric_names: MetricNames = ()
    metric_values: Figures = ()
    masked_classes: ClassNames = ()

    def __post_init__(self) -> None:
        _check_correct(self.test_images, self.test_correct)
        self._check_columns()
        self._check_metrics()
        self._check_scores()

    @property
    def histograms(self) -> dict[str, ScoreHistogram]:
        """Return the histograms of the classes that the site reports, of its test part."""
        return histograms_of(self.told_classes, self.positive_scores, self.negative_scores)

    @property
    def validation_histograms(self) -> dict[str, ScoreHistogram]:
        """Return the same of its validation part."""
        return histograms_of(self.validation_classes, self.validation_positive_scores, self.validation_negative_scores)

    def _check_columns(self) -> None:
        columns = (self.auroc, self.average_precision, self.balanced_accuracy, self.positives, self.negatives)
        if any(len(column) != len(self.class_names) for column in columns):
            raise WireError("each metric must have one entry a class.")
        if len(set(self.class_names)) < len(self.class_names):
            raise WireError("a class must be tested once.")
        if list(self.masked_classes) != sorted(set(self.masked_classes)):
            raise WireError("masked_classes must be sorted, once each.")

    def _check_metrics(self) -> None:
        names = self.metric_names
        if len(set(names)) < len(names) or len(self.metric_values) != len(names) * len(self.class_names):
            raise WireError("each plug-in's metric must be named once, and have one value a class.")

    def _check_scores(self) -> None:
        try:
            tested, _ = self.histograms, self.validation_histograms
        except ValueError as error:
            raise WireError(str(error)) from error
        if not set(tested) <= set(self.class_names):
            raise WireError("scores must be of tested classes, once each.")
        for kind in ("positives", "negatives"):
            counts = dict(zip(self.class_names, getattr(self, kind), strict=True))
            if any(int(getattr(one, kind).sum()) != counts[name] for name, one in tested.items()):
                raise WireError(f"scores of {kind} must be as many as there are {kind}.")
