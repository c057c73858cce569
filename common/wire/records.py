"""The records (typed messages) that coordinator and hospitals exchange: frozen dataclasses that validate their fields.

:mod:`polyclinic.common.wire.codec` translates them to and from Flower's records. ``flwr-client preview`` and
docs/what-leaves.md print the explanations of the attributes in records that a hospital sends, for the hospital's staff
(:mod:`polyclinic.client.preview.data_dictionary`). A name in backquotes and brackets in these explanations is the key
of the site's policy that controls if a number is sent, or how it is rounded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import WireError, quote_names
from polyclinic.common.metrics.benefit import COMPARED_SITE_MODELS
from polyclinic.common.metrics.score_histograms import (
    ScoreCounts,
    ScoreHistogram,
    make_empty_score_counts,
    parse_score_histograms,
)
from polyclinic.common.models.network import Head
from polyclinic.common.models.norms import compute_euclidean_norm
from polyclinic.common.models.state import ModelState
from polyclinic.common.system.plain_names import RunName
from polyclinic.common.volume_fingerprint import LONGEST_FINGERPRINT
from polyclinic.common.wire.bounds import (
    COUNT_BOUND,
    COUNT_OR_UNKNOWN_BOUND,
    EPOCHS_BOUND,
    EPSILON_BOUND,
    MAX_CLASSES,
    MAX_IMAGES,
    MAX_ROUNDS,
    SECONDS_BOUND,
    SHARE_BOUND,
    TRAIN_LOSS_BOUND,
    VALIDATION_LOSS_BOUND,
    ClassNames,
    Count,
    Counts,
    EscapedFreeText,
    Figures,
    ListBound,
    LongTextBound,
    MetricNames,
    NumberRangeBound,
    PlainLineBound,
    RoundNumber,
    RunNameText,
    Shares,
    Text,
)
from polyclinic.common.wire.counts import CountRecord
from polyclinic.common.wire.delivery import DeliveryRequest
from polyclinic.common.wire.evaluation import EvaluationRecord
from polyclinic.common.wire.release_name import MAX_RELEASE_CHARACTERS, parse_release_name
from polyclinic.common.wire.secure_aggregation import MaskingRecord

NumberFormat = Literal["float32", "float16", "int8"]
"""Number formats of a trunk on the wire: four bytes per number, two, or one and a scale for each block."""
NUMBER_FORMATS: tuple[NumberFormat, ...] = ("float32", "float16", "int8")

REFUSAL_KINDS = ("name", "version", "labels", "pixels")

SHOWN_SIGN = "1"
"""Sign in :attr:`RollCallAnswer.shown` for a class that a training image shows."""
NOT_SHOWN_SIGN = "0"
"""Sign for a class that no training image shows."""
HIDDEN_SIGN = "?"
"""Sign for a class about which the policy hides this."""
UNKNOWN_COUNT = -1
"""Value of a count that a site's policy does not release."""
PixelText = Annotated[str, PlainLineBound(2000)]
"""The pixel form of a site as JSON, of some hundred characters."""
FingerprintText = Annotated[str, PlainLineBound(LONGEST_FINGERPRINT)]
"""The fingerprint of a site's training volumes as JSON."""
PlanText = Annotated[str, LongTextBound(2**20)]
"""A plan as JSON, usually of some two thousand characters."""

Arrays = Mapping[str, NDArray[np.float32]]
"""A method's statistics by name: small arrays of any shape, with NaN for undefined values."""

NO_ARRAYS: Arrays = MappingProxyType({})


def make_empty_arrays() -> Arrays:
    """Return :data:`NO_ARRAYS`; used as ``default_factory`` of dataclass fields."""
    return NO_ARRAYS


def have_equal_arrays(first: Arrays, second: Arrays) -> bool:
    """Return True if both mappings have the same names and equal arrays; NaN equals NaN."""
    if first.keys() != second.keys():
        return False
    return all(np.array_equal(array, second[name], equal_nan=True) for name, array in first.items())


MaybeLoss = Annotated[float | None, VALIDATION_LOSS_BOUND]
MaybeShare = Annotated[float | None, SHARE_BOUND]
MaybeCount = Annotated[int | None, COUNT_BOUND]


@dataclass(frozen=True)
class ModelGroups:
    """A model, or an update of a model, as named groups of arrays; None for a group that is not sent.

    Attributes:
        trunk: All parameters before the head except batch normalisation, flat float32 ``(t,)``.
        norm: Parameters and running statistics of batch normalisation, flat float32 ``(m,)``.
        head: The head's rows with their class names.
        form: Number format in which the trunk is sent; its numbers are already rounded to that format.
    """

    trunk: NDArray[np.float32] | None = None
    norm: NDArray[np.float32] | None = None
    head: Head | None = None
    form: NumberFormat = "float32"

    def __post_init__(self) -> None:
        for name, array in (("trunk", self.trunk), ("norm", self.norm)):
            if array is not None and (array.ndim != 1 or array.dtype != np.float32):
                raise WireError(f"{name} must be float32 of one dimension, not {array.dtype} of {array.ndim}.")

    @cached_property
    def trunk_length(self) -> float:
        """Euclidean norm of the trunk, 0 without one; finite if and only if all its numbers are finite."""
        return 0.0 if self.trunk is None else compute_euclidean_norm(self.trunk)

    @cached_property
    def norm_length(self) -> float:
        """Euclidean norm of the group ``norm``, 0 without one; finite if and only if all its numbers are finite."""
        return 0.0 if self.norm is None else compute_euclidean_norm(self.norm)

    @property
    def is_finite(self) -> bool:
        """True if no number is NaN or infinite."""
        heads = (self.head.weight, self.head.bias) if self.head else ()
        flat = math.isfinite(self.trunk_length) and math.isfinite(self.norm_length)
        return flat and all(bool(np.isfinite(array).all()) for array in heads)

    def to_named_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return name -> array of each group, as they are sent and stored on a site's disk."""
        arrays = {}
        if self.trunk is not None:
            arrays["trunk"] = self.trunk
        if self.norm is not None:
            arrays["norm"] = self.norm
        if self.head is not None:
            arrays |= {"head.weight": self.head.weight, "head.bias": self.head.bias}
        return arrays

    def apply_to_arrays(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> "ModelGroups":
        """Return a copy of these groups with ``change`` applied to each array, including the head's."""
        head = self.head
        return replace(
            self,
            trunk=None if self.trunk is None else change(self.trunk),
            norm=None if self.norm is None else change(self.norm),
            head=head and Head(head.class_names, change(head.weight), change(head.bias)),
        )

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, NDArray[np.float32]], class_names: Sequence[str]) -> "ModelGroups":
        """Rebuild the groups from the arrays of :meth:`to_named_arrays`; without class names the head is None."""
        head = Head(tuple(class_names), arrays["head.weight"], arrays["head.bias"]) if class_names else None
        return cls(arrays.get("trunk"), arrays.get("norm"), head)

    @classmethod
    def from_model(cls, model: ModelState) -> "ModelGroups":
        """Return a whole model as three groups of arrays: trunk, batch normalisation and head."""
        return cls(model.trunk, model.norm, model.head)

    def to_model(self) -> ModelState:
        """Return these groups as a complete model.

        Raises:
            WireError: If a group is missing.
        """
        if self.trunk is None or self.norm is None or self.head is None:
            lacking = [name for name in ("trunk", "norm", "head") if getattr(self, name) is None]
            raise WireError(f"a whole model has trunk, norm and head; there is no {quote_names(lacking)}.")
        return ModelState(self.trunk, self.norm, self.head)

    def fill_missing_model_groups(self, others: "ModelGroups") -> "ModelGroups":
        """Return a copy of these groups, with missing groups (trunk, norm or head) taken from ``others``."""
        return ModelGroups(
            others.trunk if self.trunk is None else self.trunk,
            others.norm if self.norm is None else self.norm,
            others.head if self.head is None else self.head,
        )


def select_arrays_with_prefix(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with ``prefix/``, keyed by the name without that prefix."""
    return {name.removeprefix(f"{prefix}/"): a for name, a in arrays.items() if name.startswith(f"{prefix}/")}


def check_head_row_names(head: Head | None, class_names: Sequence[str]) -> None:
    """Check that a model's head has exactly the rows in ``class_names``, in this order.

    Secure aggregation relies on this check: sites compare the head rows that they received, and these must be the rows
    that they train.

    Raises:
        WireError: If the rows differ.
    """
    if head is not None and tuple(head.class_names) != tuple(class_names):
        raise WireError("the model's head has other rows, or in another order, than the request names.")


def is_valid_run_name(run: str) -> bool:
    """Return True if a text is valid as the name of a run (:class:`RunName`)."""
    return RunName.pattern.fullmatch(run) is not None


def check_run_name(run: str) -> None:
    """Raise :class:`WireError` if a run's name is not valid (:func:`is_valid_run_name`)."""
    if not is_valid_run_name(run):
        raise WireError(f"run must be small letters, digits, dashes and underscores, not {run[:80]!r}.")


# ---------------------------------------------------------------------- roll call


@dataclass(frozen=True)
class RollCall:
    """Request before round 1: asks a site for its name, its labels and its number of images."""

    run: RunNameText
    plan: PlanText

    def __post_init__(self) -> None:
        check_run_name(self.run)


@dataclass(frozen=True)
class RollCallAnswer:
    """A site's answer to a :class:`RollCall`: its name, its labels and its number of images.

    Attributes:
        names: The classes that this site annotates, by the site's own names.
        class_names: The classes that this site annotates, by the federation's names.
        train_samples: The number of training images (`round_counts_to`), without images that show only hidden classes
            if the policy leaves these out (`train_hidden_classes`).
        validation_samples: The number of validation images; -1 if they are of few patients (`smallest_count`).
        patients: The number of patients of the training images (`round_counts_to`).
        layout: A hash of the network's structure, which shows that coordinator and site build the same network.
        version: The release of this program.
        positives: The number of training images that show each class, if the method asks for it and `label_counts`
            allows it; -1 for a class that `smallest_count` hides.
        negatives: The number of training images that do not show each class, by the same rules as `positives`.
        smallest_count: The value of this site's key `smallest_count`.
        holds_frozen: True if the model's frozen part is already on this site's disk and need not be sent.
        pixels: How this site's images become pixels: colour or grey, size, and the keys of `[data]` that change pixels,
            such as `window`, and whether most images are nearly black, as JSON; empty if a release or a data set does
            not say it.
        level: The `level` of this site's policy; empty if a release does not say it.
        shown: A sign for each class: `1` if some training image shows it, `0` if none does, `?` if `smallest_count`
            hides it, which it does to every class with few positive patients or none; empty without `label_counts`,
            and in a run with noise without `metrics_outside_privacy`.
        fingerprint: If the experiment plans its network (`[planning]`): voxel sizes and lengths of the training
            volumes, as means over groups of at least `smallest_count` patients, and the number of outlined voxels by
            grey value, as JSON; empty without `label_counts`, and in a run with noise without
            `metrics_outside_privacy`.
    """

    run: RunNameText
    site: Text
    names: ClassNames
    class_names: ClassNames
    train_samples: Count
    validation_samples: Annotated[int, COUNT_OR_UNKNOWN_BOUND]
    patients: Count
    layout: Text
    version: Annotated[str, PlainLineBound(MAX_RELEASE_CHARACTERS)]
    positives: Counts = ()
    negatives: Counts = ()
    smallest_count: Count = 0
    holds_frozen: bool = False
    pixels: PixelText = ""
    level: Text = ""
    shown: Annotated[str, PlainLineBound(MAX_CLASSES)] = ""
    fingerprint: FingerprintText = ""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.class_names):
            raise WireError("names and class_names must have one entry a label.")
        if self.patients > self.train_samples:  # both are rounded down to one base, which keeps their order
            raise WireError(f"{self.patients:,} patients cannot have {self.train_samples:,} training images.")
        pairs = list(zip(self.positives, self.negatives, strict=False))
        if len(self.positives) != len(self.negatives) or len(pairs) not in (0, len(self.class_names)):
            raise WireError("label counts must be one a class, of both kinds.")
        if set(self.shown) - {SHOWN_SIGN, NOT_SHOWN_SIGN, HIDDEN_SIGN} or len(self.shown) not in (
            0,
            len(self.class_names),
        ):
            raise WireError("shown must have one sign a class.")
        if any(min(pair) < UNKNOWN_COUNT or sum(pair) > self.train_samples for pair in pairs):
            raise WireError("label counts must be from 0 to the training images together, or -1 for unknown.")

    @property
    def shown_classes(self) -> dict[str, bool | None]:
        """Class -> True if a training image shows it, None if the policy hides this; empty if the site does not state
        it.
        """
        meaning = {SHOWN_SIGN: True, NOT_SHOWN_SIGN: False, HIDDEN_SIGN: None}
        return {name: meaning[sign] for name, sign in zip(self.class_names, self.shown, strict=False)}

    @property
    def release(self) -> str:
        """Name of the site's release; ``unknown`` if the site states text that is not such a name."""
        return parse_release_name(self.version)


@dataclass(frozen=True)
class Refusal:
    """Message to a site that it cannot take part in this run, with the reason; the run will not ask it again.

    Attributes:
        kind: The part that the site must fix: ``name``, ``version``, ``labels`` or ``pixels``.
        reason: The reason, for people.
    """

    run: RunNameText
    kind: Text
    reason: Annotated[str, EscapedFreeText()]

    def __post_init__(self) -> None:
        if self.kind not in REFUSAL_KINDS:
            raise WireError(f"a refusal is of kind {', '.join(REFUSAL_KINDS)}, not {self.kind!r}.")


@dataclass(frozen=True)
class Question:
    """Message to a site with a question for its staff, before round 1; the site takes part in the run."""

    run: RunNameText
    text: Annotated[str, EscapedFreeText()]


@dataclass(frozen=True)
class RefusalNoted:
    """A site's answer to a :class:`Refusal`, a :class:`Question` or a package, which only confirms receipt."""

    run: RunNameText
    site: Text


# ---------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class Request:
    """Base class with the fields of every request to train or evaluate.

    Attributes:
        class_names: The classes of the site's head rows in this run, in the order of its head.
        counted: Last round in which this site's reply counted; 0 for none. The site continues from the state that it
            stored in that round, and discards the state of later rounds.
        best: Round with the best model so far; -1 for none. The site stores its own parts of that model.
        left_out: The reason why this site's last reply did not count, with the round; empty if it counted.
        frozen: The frozen part of the model, as group ``trunk``, if the site has no copy on its disk; else empty.
    """

    run: RunNameText
    round: RoundNumber
    plan: PlanText
    contract: Text
    class_names: ClassNames
    counted: RoundNumber
    best: Annotated[int, NumberRangeBound(-1, MAX_ROUNDS)]
    left_out: Annotated[str, EscapedFreeText()]
    model: ModelGroups
    frozen: ModelGroups = field(default=ModelGroups(), kw_only=True)

    def __post_init__(self) -> None:
        check_run_name(self.run)
        check_head_row_names(self.model.head, self.class_names)


@dataclass(frozen=True)
class TrainRequest(Request):
    """Request to train this model for one round; round 0 is one epoch that measures the difficulty of a site's task.

    Attributes:
        statistics: Further arrays that the method sends to this site.
    """

    statistics: Arrays = field(default_factory=make_empty_arrays)

    @property
    def is_ranking_round(self) -> bool:
        """True in round 0, which measures difficulty: the site answers only with statistics and stores nothing."""
        return self.round == 0


@dataclass(frozen=True)
class EvaluateRequest(Request):
    """Request to evaluate the model in this request on the site's validation part.

    Attributes:
        test: The site also evaluates the best model of the run on its test part.
    """

    test: bool


def _check_correct_counts(images: int | None, correct: int | None) -> None:
    if (images is None) != (correct is None) or (images or 0) < (correct or 0) or min(images or 0, correct or 0) < 0:
        counts = ["an unknown number of" if number is None else number for number in (images, correct)]
        raise WireError(f"of {counts[0]} test images {counts[1]} cannot be right.")


@dataclass(frozen=True)
class TrainReply:
    """A site's answer to a :class:`TrainRequest`: the update (new minus received model), and metrics of the round.

    A name in brackets is the key of the site's policy that controls if the value is sent.

    Attributes:
        train_samples: The number of training images (`round_counts_to`), without images that show only hidden classes
            if the policy leaves these out (`train_hidden_classes`).
        train_loss: The mean loss on the training images in the last epoch (`training_figures`); in a run with
            noise, neither this nor any other loss or test result is sent (`metrics_outside_privacy`).
        validation_loss: The loss of the received model on this site's validation images, exact (`training_figures`).
        validation_auroc: The AUROC of the received model on this site's validation images, mean over this site's
            classes, exact (`training_figures`); of a segmentation, its mean Dice.
        seconds: The duration of the round; 0 in a run with privacy and under secure aggregation.
        update: The change of the network's numbers by training: `trunk`, `norm` (with means and variances of features)
            and `head` (a row for each class), as far as the method averages them and `parts` allows it.
        epochs: The number of passes over the training images.
        statistics: The method's statistics, by name; each is explained under "Statistics" in docs/what-leaves.md.
        test_images: The number of test images, if the experiment tests in each round (`test_metrics`).
        test_correct: The number of these test images that the model classifies correctly (`test_metrics`).
        epsilon: The privacy budget that the run has used at this site so far, in a run with privacy.
        arithmetic: The format of numbers and memory, such as `float32, channels_last`, and the number of GPUs if there
            are several.
    """

    run: RunNameText
    round: RoundNumber
    site: Text
    train_samples: Annotated[int, NumberRangeBound(1, MAX_IMAGES)]
    train_loss: Annotated[float | None, TRAIN_LOSS_BOUND]
    validation_loss: MaybeLoss
    validation_auroc: MaybeShare
    seconds: Annotated[float, SECONDS_BOUND]
    update: ModelGroups
    epochs: Annotated[int, EPOCHS_BOUND] = 1
    statistics: Arrays = field(default_factory=make_empty_arrays)
    test_images: MaybeCount = None
    test_correct: MaybeCount = None
    epsilon: Annotated[float | None, EPSILON_BOUND] = None
    arithmetic: Text = ""

    def __post_init__(self) -> None:
        if self.train_samples < 1:
            raise WireError(f"train_samples must be positive, not {self.train_samples}.")
        _check_correct_counts(self.test_images, self.test_correct)


@dataclass(frozen=True)
class EvaluateReply:
    """A site's answer to an :class:`EvaluateRequest`; each metric has one entry per class, NaN if undefined.

    A name in brackets is the key of the site's policy that controls if the value is sent.

    Attributes:
        validation_loss: The loss of the received model on this site's validation images, exact (`training_figures`).
        validation_auroc: The AUROC of the received model on this site's validation images, mean over this site's
            classes, exact (`training_figures`); of a segmentation, its mean Dice.
        class_names: The classes that were tested; empty unless this is the run's final test (`test_metrics`).
        auroc: The exact AUROC of each class on the test images.
        average_precision: The exact average precision of each class on the test images.
        balanced_accuracy: The exact balanced accuracy of each class on the test images.
        positives: The number of test images that show each class; of a segmentation, of test patients in whom it is
            outlined; -1, and no metrics, if `smallest_count` hides it.
        negatives: The number of test images that do not show each class; of a segmentation, `positives` again; -1 if
            `smallest_count` hides it.
        model_sha256: A hash of the network that was tested; empty unless this is the final test of a run whose models
            have parts that stay at the sites.
        test_images: The number of test images, if the experiment tests in each round (`test_metrics`).
        test_correct: The number of these test images that the model classifies correctly (`test_metrics`).
        histogram_classes: The classes with score histograms, if the experiment asks for them and `score_histograms`
            allows it; without classes that `smallest_count` hides.
        positive_scores: A histogram, for each of `histogram_classes`, of the scores of test images that show it, in
            1,024 bins; of a segmentation, of test patients by Dice.
        negative_scores: A histogram, for each of `histogram_classes`, of the scores of test images that do not show it;
            of a segmentation, of test patients by 95 % Hausdorff distance.
        validation_classes: Like `histogram_classes`, to choose thresholds; `training_figures` must allow it, too.
        validation_positive_scores: Like `positive_scores`, but of the validation images.
        validation_negative_scores: Like `negative_scores`, but of the validation images.
        metric_names: Names of plug-in metrics, if the experiment asks for them and `metrics` allows them; of a
            segmentation, `dice` and `hd95`.
        metric_values: The value of each of these metrics for each class, on the test images; none for a class that
            `smallest_count` hides.
        masked_classes: Under secure aggregation, the classes whose score histograms of test images leave the site only
            in a sum over sites, by the same rules as `histogram_classes`.
    """

    run: RunNameText
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
    histogram_classes: ClassNames = ()
    positive_scores: ScoreCounts = field(default_factory=make_empty_score_counts)
    negative_scores: ScoreCounts = field(default_factory=make_empty_score_counts)
    validation_classes: ClassNames = ()
    validation_positive_scores: ScoreCounts = field(default_factory=make_empty_score_counts)
    validation_negative_scores: ScoreCounts = field(default_factory=make_empty_score_counts)
    metric_names: MetricNames = ()
    metric_values: Figures = ()
    masked_classes: ClassNames = ()

    def __post_init__(self) -> None:
        _check_correct_counts(self.test_images, self.test_correct)
        columns = (self.auroc, self.average_precision, self.balanced_accuracy, self.positives, self.negatives)
        if any(len(column) != len(self.class_names) for column in columns):
            raise WireError("each metric must have one entry a class.")
        if len(set(self.class_names)) < len(self.class_names):
            raise WireError("a class must be tested once.")
        if list(self.masked_classes) != sorted(set(self.masked_classes)):
            raise WireError("masked_classes must be sorted, once each.")
        names = self.metric_names
        if len(set(names)) < len(names) or len(self.metric_values) != len(names) * len(self.class_names):
            raise WireError("each plug-in's metric must be named once, and have one value a class.")
        try:
            tested = self.histograms
            validated = self.validation_histograms
        except ValueError as error:
            raise WireError(str(error)) from error
        for histogram in (*tested.values(), *validated.values()):
            if max(map(int, (histogram.positives.sum(), histogram.negatives.sum()))) > MAX_IMAGES:
                raise WireError(f"a class has at most {MAX_IMAGES:,} images that show it, and as many that do not.")
        if not set(tested) <= set(self.class_names):
            raise WireError("scores must be of tested classes, once each.")
        for kind in ("positives", "negatives"):
            counts = dict(zip(self.class_names, getattr(self, kind), strict=True))
            if any(int(getattr(histogram, kind).sum()) != counts[name] for name, histogram in tested.items()):
                raise WireError(f"scores of {kind} must be as many as there are {kind}.")

    @property
    def histograms(self) -> dict[str, ScoreHistogram]:
        """Class -> score histogram of the site's test part, for the classes that the site reports."""
        return parse_score_histograms(self.histogram_classes, self.positive_scores, self.negative_scores)

    @property
    def validation_histograms(self) -> dict[str, ScoreHistogram]:
        """Class -> score histogram of the site's validation part, for the classes that the site reports."""
        return parse_score_histograms(
            self.validation_classes, self.validation_positive_scores, self.validation_negative_scores
        )


# ---------------------------------------------------------------------- comparison with training alone


Differences = Annotated[
    tuple[float, ...], ListBound(len(COMPARED_SITE_MODELS), NumberRangeBound(-1.0 - 1e-9, 1.0 + 1e-9))
]
"""Differences of two mean AUROCs."""


@dataclass(frozen=True)
class BenefitRequest(Request):
    """Request to compare the federated model, on the site's test part, with a model that the site trains alone.

    Attributes:
        initial: The initial model of the run, with head rows for the site's own classes.
        epochs: Number of epochs to train alone: as many as the site trained in the run.
    """

    initial: ModelGroups
    epochs: Annotated[int, EPOCHS_BOUND]


@dataclass(frozen=True)
class BenefitReply:
    """Answer to a :class:`BenefitRequest`: metrics of the four compared models, in the order of
    :data:`polyclinic.common.metrics.benefit.COMPARED_SITE_MODELS`.

    Attributes:
        class_names: The classes on which four models were compared (trained here alone, federated, federated and
            fine-tuned here, ensemble of the first two), if the experiment sets `evaluation.compare_local`; without
            classes that `smallest_count` hides, and empty without `test_metrics`.
        auroc: The exact AUROC of each model and class on the test images.
        mean: The mean of these AUROCs for each model.
        mean_low: The lower end of the 95 % interval of each mean.
        mean_high: The upper end of the 95 % interval of each mean.
        gain: The mean AUROC of each other model minus that of the model trained here alone.
        gain_low: The lower end of the 95 % interval of each difference in `gain`.
        gain_high: The upper end of the 95 % interval of each difference in `gain`.
        over_patients: True if the intervals are over patients, because the data names each image's patient.
    """

    run: RunNameText
    round: RoundNumber
    site: Text
    class_names: ClassNames = ()
    auroc: Annotated[tuple[float, ...], ListBound(len(COMPARED_SITE_MODELS) * MAX_CLASSES, SHARE_BOUND)] = ()
    mean: Shares = ()
    mean_low: Shares = ()
    mean_high: Shares = ()
    gain: Differences = ()
    gain_low: Differences = ()
    gain_high: Differences = ()
    over_patients: bool = False

    def __post_init__(self) -> None:
        names = self.class_names
        models = len(COMPARED_SITE_MODELS) if self.class_names else 0
        if len(set(names)) < len(names) or len(self.auroc) != models * len(names):
            raise WireError("each class must be compared once, and have one AUROC a model.")
        means = (self.mean, self.mean_low, self.mean_high)
        gains = (self.gain, self.gain_low, self.gain_high)
        if any(len(column) != models for column in means) or any(len(column) != max(models - 1, 0) for column in gains):
            raise WireError("each model must have a mean, and each but the first a difference, with both ends.")
        for value, low, high in (*zip(*means, strict=True), *zip(*gains, strict=True)):
            if not low <= value <= high:
                raise WireError("a mean or a difference must lie within its interval.")


Record = (
    RollCall
    | RollCallAnswer
    | Refusal
    | Question
    | RefusalNoted
    | TrainRequest
    | TrainReply
    | EvaluateRequest
    | EvaluateReply
    | BenefitRequest
    | BenefitReply
    | CountRecord
    | DeliveryRequest
    | EvaluationRecord
    | MaskingRecord
)
"""Any record that coordinator and hospital exchange."""
