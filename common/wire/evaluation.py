"""The records of ``flwr-server evaluate``: models to score, and a hospital's figures of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from polyclinic.common.errors import WireError
from polyclinic.common.metrics.score_histograms import SCORE_BINS, ScoreCounts, ScoreHistogram, make_empty_score_counts
from polyclinic.common.wire.bounds import (
    COUNT_BOUND,
    MAX_IMAGES,
    NAME_BOUND,
    SHARE_BOUND,
    ClassNames,
    Count,
    ListBound,
    LongTextBound,
    NumberRangeBound,
    PlainLineBound,
    RunNameText,
    Text,
)
from polyclinic.common.wire.delivery import find_padding_fault, pad_to_integers, read_padded_bytes
from polyclinic.common.wire.secure_aggregation import Integers

MAX_MODEL_BYTES = 4 * 10**9
"""Maximum size of all files of a question, because the hospital keeps them in memory."""
MAX_QUESTION_CHARACTERS = 2**17
"""Maximum length of a question as JSON."""
MAX_ROWS = 20_000
"""Maximum number of rows of an answer: twenty models with some hundred classes and a few groups each."""
CALIBRATION_BINS = 10

RowTexts = Annotated[tuple[str, ...], ListBound(MAX_ROWS, PlainLineBound(300))]
RowCounts = Annotated[tuple[int, ...], ListBound(MAX_ROWS, COUNT_BOUND)]
RowShares = Annotated[tuple[float, ...], ListBound(MAX_ROWS, SHARE_BOUND)]
RowNumbers = Annotated[tuple[int, ...], ListBound(MAX_ROWS, NumberRangeBound(0, MAX_ROWS))]
RowDifferences = Annotated[tuple[float, ...], ListBound(MAX_ROWS, NumberRangeBound(-1.001, 1.001))]
ScoreSums = Annotated[tuple[float, ...], ListBound(CALIBRATION_BINS * MAX_ROWS, NumberRangeBound(0.0, MAX_IMAGES))]
GroupNames = Annotated[tuple[str, ...], ListBound(10, NAME_BOUND)]


@dataclass(frozen=True)
class ScoringRequest:
    """Request to score models on a site's test part.

    Attributes:
        question: The question as JSON (:class:`polyclinic.common.evaluation.question.EvaluationQuestion`).
        size: Size of all files of the models in bytes.
        files: The bytes of the files one after another, as uint32 in little-endian order, padded with zeros.
    """

    run: RunNameText
    question: Annotated[str, LongTextBound(MAX_QUESTION_CHARACTERS)]
    size: Annotated[int, NumberRangeBound(0, MAX_MODEL_BYTES)]
    files: Integers

    def __post_init__(self) -> None:
        if fault := find_padding_fault(self.size, self.files):
            raise WireError(fault)

    @cached_property
    def content(self) -> bytes:
        """The bytes of all files."""
        return read_padded_bytes(self.size, self.files)


def make_scoring_request(run: str, question: str, content: bytes) -> ScoringRequest:
    """Return the request with the files of a question.

    Args:
        run: Name of the run under which the coordinator asks.
        question: The question as JSON.
        content: The bytes of all files, in the order of the question.
    """
    return ScoringRequest(run, question, len(content), pad_to_integers(content))


@dataclass(frozen=True)
class ScoringReply:
    """A site's answer to a :class:`ScoringRequest`: figures of each model and class on its test part.

    Index i of `models` to `calibration_error` belongs to row i. Index i of `point_rows` to `specificity_high` belongs
    to decision i, index i of `pair_classes` to `pair_tests` to comparison i.

    Attributes:
        level: The `level` of this site's policy.
        smallest_count: The value of this site's key `smallest_count`.
        images: The number of test images, without those of patients who opted out (`round_counts_to`).
        patients: The number of their patients (`round_counts_to`).
        class_names: The classes that this site annotates, by the names of the models.
        hidden: Those of them that `smallest_count` hides: there are no figures of them.
        over_patients: True if intervals are over patients, because the data names each image's patient.
        withheld: The subgroups of the question that this site does not tell: `counts` does not allow them, its `[data]`
            names no column, or a group would be of fewer patients than `smallest_count`.
        models: The model of each row.
        classes: The class of each row.
        columns: The column of a subgroup, `sex` or `age`; empty for all images.
        groups: The group of this column; empty for all images.
        positives: The number of test images that show the class (`round_counts_to`).
        negatives: The number of test images that do not show it (`round_counts_to`).
        positive_patients: The number of patients with an image that shows the class (`round_counts_to`).
        negative_patients: The number of patients with an image that does not show it (`round_counts_to`).
        auroc: The exact AUROC.
        auroc_low: The lower end of its 95 % interval.
        auroc_high: The upper end of its 95 % interval.
        average_precision: The exact average precision.
        average_precision_low: The lower end of its 95 % interval.
        average_precision_high: The upper end of its 95 % interval.
        brier: The Brier score.
        calibration_error: The expected calibration error.
        positive_scores: For each row, the number of positive images in each of 1,024 steps of the score
            (`score_histograms`).
        negative_scores: The same of negative images (`score_histograms`).
        score_sums: For each row, the sum of the scores in each tenth of the scale (`score_histograms`).
        point_rows: The row of each decision at a threshold that was fixed beforehand (`score_histograms`).
        point_rules: How the threshold was fixed.
        thresholds: The threshold.
        true_positives: The number of positive images above the threshold.
        false_positives: The number of negative images above the threshold.
        sensitivity_low: The lower end of the 95 % interval of the sensitivity.
        sensitivity_high: The upper end of it.
        specificity_low: The lower end of the 95 % interval of the specificity.
        specificity_high: The upper end of it.
        pair_classes: The class of each comparison of two models on the same images.
        pair_firsts: The first model.
        pair_seconds: The second model.
        differences: The AUROC of the first model minus that of the second.
        difference_lows: The lower end of the 95 % interval of the difference.
        difference_highs: The upper end of the 95 % interval of the difference.
        standard_errors: The standard error of the difference.
        pair_tests: The test that gave the standard error: DeLong's, or a bootstrap by patient where patients have
            several images.
    """

    run: RunNameText
    site: Text
    level: Text
    smallest_count: Count
    images: Count
    patients: Count
    class_names: ClassNames
    hidden: ClassNames = ()
    over_patients: bool = False
    withheld: GroupNames = ()
    models: RowTexts = ()
    classes: RowTexts = ()
    columns: RowTexts = ()
    groups: RowTexts = ()
    positives: RowCounts = ()
    negatives: RowCounts = ()
    positive_patients: RowCounts = ()
    negative_patients: RowCounts = ()
    auroc: RowShares = ()
    auroc_low: RowShares = ()
    auroc_high: RowShares = ()
    average_precision: RowShares = ()
    average_precision_low: RowShares = ()
    average_precision_high: RowShares = ()
    brier: RowShares = ()
    calibration_error: RowShares = ()
    positive_scores: ScoreCounts = field(default_factory=make_empty_score_counts)
    negative_scores: ScoreCounts = field(default_factory=make_empty_score_counts)
    score_sums: ScoreSums = ()
    point_rows: RowNumbers = ()
    point_rules: RowTexts = ()
    thresholds: RowShares = ()
    true_positives: RowCounts = ()
    false_positives: RowCounts = ()
    sensitivity_low: RowShares = ()
    sensitivity_high: RowShares = ()
    specificity_low: RowShares = ()
    specificity_high: RowShares = ()
    pair_classes: RowTexts = ()
    pair_firsts: RowTexts = ()
    pair_seconds: RowTexts = ()
    differences: RowDifferences = ()
    difference_lows: RowDifferences = ()
    difference_highs: RowDifferences = ()
    standard_errors: RowShares = ()
    pair_tests: RowTexts = ()

    def __post_init__(self) -> None:
        rows = len(self.models)
        for names in (ROW_COLUMNS, POINT_COLUMNS, PAIR_COLUMNS):
            if len({len(getattr(self, name)) for name in names}) > 1:
                raise WireError(f"each entry of {names[0]} must have one of {', '.join(names[1:])}.")
        keys = set(zip(self.models, self.classes, self.columns, self.groups, strict=True))
        if len(keys) < rows:
            raise WireError("each row must be stated once.")
        if not {*self.classes, *self.pair_classes} <= set(self.class_names) - set(self.hidden):
            raise WireError("figures must be of classes that the site annotates and does not hide.")
        for counts in (self.positive_scores, self.negative_scores):
            if len(counts) not in (0, SCORE_BINS * rows):
                raise WireError(f"scores must be {SCORE_BINS} counts for each row.")
        lengths = len(self.positive_scores), len(self.negative_scores), len(self.score_sums)
        if lengths[0] != lengths[1] or lengths[0] * CALIBRATION_BINS != lengths[2] * SCORE_BINS:
            raise WireError("each row must have its scores and their sums.")
        if self.has_histograms:
            by_row = (
                counts.reshape(rows, SCORE_BINS).sum(axis=1) for counts in (self.positive_scores, self.negative_scores)
            )
            if any(sums.tolist() != list(own) for sums, own in zip(by_row, self._counts, strict=True)):
                raise WireError("the scores of a row must be of its images.")
        self._check_points()

    @property
    def _counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.positives, self.negatives

    def _check_points(self) -> None:
        for row, true, false in zip(self.point_rows, self.true_positives, self.false_positives, strict=True):
            if not 0 <= row < len(self.models) or true > self.positives[row] or false > self.negatives[row]:
                raise WireError("decisions must be on the images of their row.")

    @property
    def has_histograms(self) -> bool:
        """True if the rows have score histograms."""
        return bool(len(self.positive_scores))

    @cached_property
    def histograms(self) -> Mapping[int, ScoreHistogram]:
        """Row -> histogram of its scores; empty if the site does not send histograms."""
        if not self.has_histograms:
            return {}
        both = (counts.reshape(-1, SCORE_BINS) for counts in (self.positive_scores, self.negative_scores))
        return dict(enumerate(map(ScoreHistogram, *both)))


ROW_COLUMNS = (
    *("models", "classes", "columns", "groups", "positives", "negatives", "positive_patients", "negative_patients"),
    *("auroc", "auroc_low", "auroc_high"),
    *("average_precision", "average_precision_low", "average_precision_high", "brier", "calibration_error"),
)
POINT_COLUMNS = (
    *("point_rows", "point_rules", "thresholds", "true_positives", "false_positives"),
    *("sensitivity_low", "sensitivity_high", "specificity_low", "specificity_high"),
)
PAIR_COLUMNS = (
    *("pair_classes", "pair_firsts", "pair_seconds", "differences", "difference_lows", "difference_highs"),
    *("standard_errors", "pair_tests"),
)
"""Fields of rows (``ROW_COLUMNS``), decisions (``POINT_COLUMNS``) and comparisons; entries of one index belong
together.
"""

EvaluationRecord = ScoringRequest | ScoringReply
