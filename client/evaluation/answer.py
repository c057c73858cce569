"""The answer to ``flwr-server evaluate``: figures of the coordinator's models on this site's test part."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.disclosure import count_patients, find_classes_hidden_by_policy, round_count_down
from polyclinic.client.site.plans import EVALUATION_KIND, RequestText, store_request_text
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.evaluation.evaluation import (
    DataToScore,
    join_vocabularies,
    list_thresholds_of_models,
    score_images,
)
from polyclinic.common.evaluation.figures import (
    ClassFigures,
    ClassScores,
    FigureRow,
    ModelComparison,
    ScoredImages,
    compute_evaluation_figures,
)
from polyclinic.common.evaluation.foreign import ModelFile
from polyclinic.common.evaluation.models import ModelToScore, open_model
from polyclinic.common.evaluation.question import GROUPINGS, EvaluationQuestion, parse_evaluation_question
from polyclinic.common.metrics.bootstrap import Interval
from polyclinic.common.metrics.score_histograms import TENTH_EDGES, compute_score_histogram
from polyclinic.common.system.files import make_private_folder, write_atomically
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.common.wire.evaluation import PAIR_COLUMNS, POINT_COLUMNS, ROW_COLUMNS, ScoringReply, ScoringRequest
from polyclinic.data.base.image_set import ImageSet, are_all_patients_known
from polyclinic.data.base.pixel_form import PIXEL_KEYS, PixelForm
from polyclinic.data.base.splits import StringArray

SCORING_FOLDER = "scoring"
UNDEFINED_FIGURE = float("nan")
NO_INTERVAL = (UNDEFINED_FIGURE, UNDEFINED_FIGURE)


def answer_scoring_request(site: Site, request: ScoringRequest) -> ScoringReply:
    """Score the models of a request on this site's test part, and return the figures that the policy allows.

    The policy gate has already checked the hashes of the model files.

    Raises:
        BadInput: If a model cannot be loaded or fails, or the test part has too few patients.
        ValueError: If the request's text is not a question for figures of models.
    """
    question = parse_evaluation_question(request.question)
    if not site.may_report_metrics("test"):
        problem = f"has images of fewer than {site.policy.smallest_count} patients, and no figure leaves of so few."
        raise BadInput([Fault("the test part", problem)])
    if site.durable:
        store_request_text(site, RequestText(EVALUATION_KIND, request.question))
    folder = site.folder / SCORING_FOLDER
    try:
        models = _open_sent_models(question, request.content, folder, site.device)
        site.tell(f"scores {format_count_with_noun(len(models), 'model')} that the coordinator sent")
        return _score_models(site, request.run, question, models)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_sent_models(question: EvaluationQuestion, content: bytes, folder: Path, device: str) -> list[ModelToScore]:
    """Write each model's files into a separate folder, and load the models."""
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    parts = question.split_content(content)
    models = list[ModelToScore]()
    for number, model in enumerate(question.models):
        model_folder = join_plain_name(folder, PlainName(f"model-{number}"))
        make_private_folder(model_folder)
        for _ in model.files:
            file, part = next(parts)
            write_atomically(join_plain_name(model_folder, PlainName(file.name)), bytes(part), private=True)
        path = model_folder if model.is_run else join_plain_name(model_folder, PlainName(model.files[0].name))
        models.append(open_model(ModelFile(path, model.described), model.name, device))
    return models


# ---------------------------------------------------------------------- scoring


def _score_models(site: Site, run: str, question: EvaluationQuestion, models: Sequence[ModelToScore]) -> ScoringReply:
    named = site.name_classes_by(join_vocabularies(models))
    policy = site.policy
    hidden = named.hidden_classes("test")
    allowed = _find_allowed_groupings(named.test, question, hidden, policy)
    groupings = [GROUPINGS[column] for column in question.groups if column in allowed]
    data = DataToScore(site.name, site.test, PartInModelForm(site), GroupCells(site.test), about="")
    (scored,) = score_images(models, [data], groupings)
    thresholds = list_thresholds_of_models(models)
    model_classes = dict.fromkeys(name for by_class in thresholds.values() for name in by_class)
    tested = [name for name in model_classes if name in scored.class_names and name not in hidden]
    figures = compute_evaluation_figures([scored], tested, thresholds, groupings)
    columns = _Columns(spread=policy.score_histograms)
    for row in figures.rows:
        columns.add_row(row, scored, policy)
    for comparison in figures.comparisons:
        columns.add_comparison(comparison)
    return ScoringReply(
        run=run,
        site=site.name,
        level=policy.level,
        smallest_count=policy.smallest_count,
        images=round_count_down(len(site.test), policy),
        patients=round_count_down(count_patients(site.test), policy),
        class_names=scored.class_names,
        hidden=tuple(sorted(hidden)),
        over_patients=are_all_patients_known(site.test.patients),
        withheld=tuple(column for column in question.groups if column not in allowed),
        **columns.make_fields(),
    )


@dataclass(frozen=True)
class PartInModelForm:
    """Callable that returns the test part with a model's pixel settings; it reads each setting once."""

    site: Site
    cache: dict[str, ImageSet] = field(default_factory=dict)

    def __call__(self, form: PixelForm) -> ImageSet:
        site_form = self.site.pixel_form
        read = self.site.read_test_part
        is_same = site_form is not None and all(
            form.read_setting(key) == site_form.read_setting(key) for key in PIXEL_KEYS
        )
        if read is None or is_same:
            return self.site.test
        key = form.to_json()
        if key not in self.cache:
            self.cache[key] = read(form)
        return self.cache[key]


# ---------------------------------------------------------------------- subgroups


@dataclass(frozen=True)
class GroupCells:
    """Callable that returns a subgroup column's text for each image, ``(n,)``; empty if the table has no value."""

    images: ImageSet

    def __call__(self, column: str) -> StringArray:
        attributes = self.images.attributes
        assert attributes is not None, "called for columns that the data has"
        if column == "sex":
            return attributes.sex
        ages = attributes.age_at_image.tolist()
        return np.array([str(age) if age >= 0 else "" for age in ages], dtype=np.str_)


def _find_allowed_groupings(
    images: ImageSet, question: EvaluationQuestion, hidden: Collection[str], policy: SitePolicy
) -> set[str]:
    """Return the columns of the question whose subgroups may leave.

    All groups of a column leave, or none, because a single hidden group could be computed from the others and the
    total. A column is withheld if the policy hides a class in one of its groups that it does not hide in all images.
    """
    columns = images.attributes.columns if images.attributes is not None else ()
    allowed = set[str]()
    for column in question.groups:
        if f"class_by_{column}" not in policy.counts or column not in columns:
            continue
        groups = GROUPINGS[column].assign_groups(GroupCells(images)(column))
        parts = [images.select_rows(np.flatnonzero(groups == group)) for group in np.unique(groups).tolist()]
        if all(find_classes_hidden_by_policy(part, policy.smallest_count) <= set(hidden) for part in parts):
            allowed.add(column)
    return allowed


# ---------------------------------------------------------------------- the reply's lists


@dataclass
class _Columns:
    """The lists of a :class:`ScoringReply` while rows are added to them.

    Attributes:
        spread: True if score histograms and decisions of each row leave too.
    """

    spread: bool
    lists: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in (*ROW_COLUMNS, *POINT_COLUMNS, *PAIR_COLUMNS, "score_sums")}
    )
    positive_scores: list[NDArray[np.int64]] = field(default_factory=list)
    negative_scores: list[NDArray[np.int64]] = field(default_factory=list)

    def _add(self, names: Sequence[str], values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            number = UNDEFINED_FIGURE if value is None else value
            # np.float64 is a subclass of float, but a record accepts only float itself.
            self.lists[name].append(float(number) if isinstance(number, float) else number)

    def add_row(self, row: FigureRow, scored: ScoredImages, policy: SitePolicy) -> None:
        """Add the figures of one model, class and subgroup."""
        images = _select_row_images(row, scored)
        patients = [len(np.unique(images.patients[images.labels == kind])) for kind in (1, 0)]
        number = len(self.lists["models"])
        figures = row.figures
        exact = (figures.positives, figures.negatives, *patients)
        counts = [round_count_down(count, policy) for count in exact]
        self._add(
            ROW_COLUMNS,
            (
                *(row.model, row.class_name, row.column, row.group, *counts),
                *_list_with_interval(figures.auroc, figures.auroc_interval),
                *_list_with_interval(figures.average_precision, figures.average_precision_interval),
                *_list_quality(figures),
            ),
        )
        if self.spread:
            self._add_spread(row, images, number)

    def _add_spread(self, row: FigureRow, images: ClassScores, number: int) -> None:
        """Add a row's score histograms, sums of scores, and decisions at fixed thresholds."""
        scores = images.scores[row.model]
        histogram = compute_score_histogram(scores, images.labels)
        self.positive_scores.append(histogram.positives)
        self.negative_scores.append(histogram.negatives)
        exact = scores.astype(np.float64)
        tenth = np.searchsorted(TENTH_EDGES, exact, side="left")
        self.lists["score_sums"] += np.bincount(tenth, exact, minlength=len(TENTH_EDGES) + 1).tolist()
        for point in row.figures.points:
            ends = (point.sensitivity_interval or NO_INTERVAL), (point.specificity_interval or NO_INTERVAL)
            decided = (point.decisions.true_positives, point.decisions.false_positives)
            self._add(POINT_COLUMNS, (number, point.rule, point.threshold, *decided, *ends[0], *ends[1]))

    def add_comparison(self, each: ModelComparison) -> None:
        """Add a comparison of two models."""
        difference = each.difference
        self._add(
            PAIR_COLUMNS,
            (
                *(each.class_name, each.first, each.second, difference.value, *difference.interval),
                *(each.standard_error, each.test),
            ),
        )

    def make_fields(self) -> Mapping[str, Any]:
        """Return the lists as fields of a :class:`ScoringReply`, tuples and arrays."""
        fields: dict[str, Any] = {name: tuple(values) for name, values in self.lists.items()}
        if self.positive_scores:
            fields["positive_scores"] = np.concatenate(self.positive_scores)
            fields["negative_scores"] = np.concatenate(self.negative_scores)
        return fields


def _select_row_images(row: FigureRow, scored: ScoredImages) -> ClassScores:
    images = scored.select_class(row.class_name)
    assert images is not None, "a row is of a class that the data annotates"
    return images.select_rows(images.groups[row.column] == row.group) if row.column else images


def _list_with_interval(value: float | None, interval: Interval | None) -> tuple[float | None, ...]:
    return value, *(interval or NO_INTERVAL)


def _list_quality(figures: ClassFigures) -> tuple[float | None, float | None]:
    if figures.calibration is None:
        return None, None
    return figures.calibration.brier, figures.calibration.expected_error
