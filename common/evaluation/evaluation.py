"""Score several models on several sets of labelled images, and compute their metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.evaluation.figures import EvaluationFigures, ScoredImages, compute_evaluation_figures
from polyclinic.common.evaluation.groups import UNSTATED_GROUP, Grouping
from polyclinic.common.evaluation.models import ModelToScore, Scores, find_missing_classes_fault
from polyclinic.common.evaluation.thresholds import FixedThreshold
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.common.vocabulary import (
    Vocabulary,
    VocabularyEntry,
    check_vocabulary,
    map_words_to_classes,
    merge_words_of_classes,
)
from polyclinic.data.base.image_set import ImageSet, SkippedImage
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.data.base.splits import StringArray

PrintLine = Callable[[str], None]
"""A function that prints a line about progress for the user."""


@dataclass(frozen=True)
class DataToScore:
    """A set of labelled images, of one hospital or of one file.

    Attributes:
        name: Name of the data in tables.
        images: The images, read with the data's settings.
        read: Returns the same images, read in another pixel form.
        read_cells: Returns the cell of each image in a column of the label table, ``(n,)``.
        about: A sentence that describes the images.
        caution: A sentence for the top of the page if a model may have been trained on some of the images; empty if
            not.
    """

    name: str
    images: ImageSet
    read: Callable[[PixelForm], ImageSet]
    read_cells: Callable[[str], StringArray]
    about: str
    caution: str = ""

    def read_for(self, model: ModelToScore) -> ImageSet:
        """Return the images in the pixel form on which a model was trained.

        Raises:
            BadInput: If reading in that form gives other images or other labels.
        """
        if model.form is None:
            return self.images
        images = self.read(model.form)
        is_same = (
            len(images) == len(self.images)
            and np.array_equal(images.labels, self.images.labels, equal_nan=True)
            and np.array_equal(images.patients, self.images.patients)
        )
        if is_same:
            return images
        problem = f"has other test images where pictures are read as {model.name} needs them: {model.form.describe()}. "
        problem += "Images that were trained on could be scored."
        raise BadInput([Fault(self.name, problem, "Name the column of patients, so that parts follow from it.")])


@dataclass(frozen=True)
class ScoredModel:
    """The facts about a model that results state.

    Attributes:
        name: Name in tables.
        kind: Kind of the model's file.
        sha256: Hash of the model.
        class_names: Class of each output.
        unlearned: Class that the model has not learned -> reason.
    """

    name: str
    kind: str
    sha256: str
    class_names: tuple[str, ...]
    unlearned: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredData:
    """The facts about a data set that results state.

    Attributes:
        name: Name in tables.
        about: A sentence that describes the images.
        images: Number of images.
        patients: Number of patients; None if patients are unknown.
        class_names: The classes that the data annotates.
        skipped: Images that could not be read.
    """

    name: str
    about: str
    images: int
    patients: int | None
    class_names: tuple[str, ...]
    skipped: tuple[SkippedImage, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        class_names: The tested classes.
        cautions: Sentences at the top of the terminal output and of the page.
        columns: Columns that define the subgroups.
        scored: The scores of each data set's images, which no page and no file contains.
        notes: Further sentences about limits of the results.
    """

    models: tuple[ScoredModel, ...]
    data: tuple[ScoredData, ...]
    figures: EvaluationFigures
    class_names: tuple[str, ...]
    cautions: tuple[str, ...]
    columns: tuple[str, ...] = ()
    scored: tuple[ScoredImages, ...] = ()
    notes: tuple[str, ...] = ()


def evaluate_models(
    models: Sequence[ModelToScore],
    data: Sequence[DataToScore],
    groupings: Sequence[Grouping] = (),
    print_line: PrintLine = lambda line: None,
) -> Evaluation:
    """Score each model on each data set, and compute their metrics.

    Raises:
        BadInput: If a model shares no class with any data set, a column is missing, or a model fails.
    """
    classes_of_models = name_classes_of_models(models)
    vocabulary = join_vocabularies(models)
    classes_of_data = [merge_words_of_classes(data_set.images, vocabulary).class_names for data_set in data]
    annotated = tuple(dict.fromkeys(name for names in classes_of_data for name in names))
    raise_faults(
        [
            find_missing_classes_fault(model, annotated, model.name)
            for model in models
            if not set(classes_of_models[model.name]) & set(annotated)
        ]
    )
    scored = score_images(models, data, groupings, print_line)
    model_classes = [name for classes in classes_of_models.values() for name in classes]
    tested_classes = tuple(dict.fromkeys(name for name in model_classes if name in annotated))
    figures = compute_evaluation_figures(scored, tested_classes, list_thresholds_of_models(models), groupings)
    return Evaluation(
        models=tuple(
            ScoredModel(model.name, model.kind, model.sha256, classes_of_models[model.name], model.unlearned)
            for model in models
        ),
        data=tuple(
            ScoredData(
                data_set.name,
                data_set.about,
                len(images.labels),
                len(np.unique(images.patients)) if figures.over_patients else None,
                images.class_names,
                data_set.images.skipped,
            )
            for data_set, images in zip(data, scored, strict=True)
        ),
        figures=figures,
        class_names=tested_classes,
        cautions=(
            *dict.fromkeys(data_set.caution for data_set in data if data_set.caution),
            *warn_about_origin(models),
        ),
        columns=tuple(grouping.column for grouping in groupings),
        scored=tuple(scored),
    )


def name_classes_of_models(models: Sequence[ModelToScore]) -> dict[str, tuple[str, ...]]:
    """Return model -> class of each output, after replacing synonyms by the vocabulary of all models together.

    Raises:
        BadInput: If two outputs of a model are one class, or one word means two classes.
    """
    vocabulary = join_vocabularies(models)
    return {model.name: _name_classes(model, vocabulary) for model in models}


def list_thresholds_of_models(models: Sequence[ModelToScore]) -> dict[str, dict[str, tuple[FixedThreshold, ...]]]:
    """Return model -> class -> thresholds that were fixed beforehand."""
    return {
        model.name: {
            name: model.list_thresholds(output_name)
            for output_name, name in zip(model.class_names, name_classes_of_models(models)[model.name], strict=True)
        }
        for model in models
    }


def score_images(
    models: Sequence[ModelToScore],
    data: Sequence[DataToScore],
    groupings: Sequence[Grouping] = (),
    print_line: PrintLine = lambda line: None,
) -> list[ScoredImages]:
    """Score each model on each data set.

    Raises:
        BadInput: If a column is missing, or a model fails.
    """
    vocabulary = join_vocabularies(models)
    classes_of_models = name_classes_of_models(models)
    scored = []
    for data_set in data:
        images = merge_words_of_classes(data_set.images, vocabulary)
        groups = {
            grouping.column: grouping.assign_groups(data_set.read_cells(grouping.column)) for grouping in groupings
        }
        scores = dict[str, Mapping[str, Scores]]()
        for model in models:
            print_line(f"{model.name} scores {len(images):,} images of {data_set.name}")
            columns = _compute_scores(model, data_set)
            scores[model.name] = dict(zip(classes_of_models[model.name], columns.T, strict=True))
        scored.append(ScoredImages(data_set.name, images.labels, images.class_names, images.patients, scores, groups))
    return scored


def warn_about_origin(models: Sequence[ModelToScore]) -> list[str]:
    """Return a warning about models whose training images are unknown; empty if all models are from runs."""
    names = [model.name for model in models if not model.is_of_run]
    if not names:
        return []
    them, were = ("it", "was") if len(names) == 1 else ("they", "were")
    sentence = f"Nobody knows here on which images {join_as_english_list(names)} {were} trained. If {them} {were} "
    return [f"{sentence}trained on some of these, the figures are too good."]


def _compute_scores(model: ModelToScore, data: DataToScore) -> Scores:
    if not len(data.images):
        return np.zeros((0, len(model.class_names)), np.float32)
    scores = model.compute_scores(data.read_for(model))
    if not np.isfinite(scores).all():
        raise BadInput([Fault(model.name, f"has scores that are NaN or infinite on images of {data.name}.")])
    return scores


def join_vocabularies(models: Sequence[ModelToScore]) -> Vocabulary:
    """Return the classes and synonyms of all models together.

    Raises:
        BadInput: If one word means two classes.
    """
    joined = dict[str, VocabularyEntry]()
    for model in models:
        for name, entry in model.vocabulary.items():
            earlier = joined.get(name, VocabularyEntry())
            synonyms = tuple(dict.fromkeys((*earlier.synonyms, *entry.synonyms)))
            joined[name] = entry.model_copy(update={"synonyms": synonyms})
    try:
        return check_vocabulary(joined) if joined else {}
    except ValueError as error:
        remedy = "The models mean different classes by one word: leave one of them out, or correct its vocabulary."
        raise BadInput([Fault("[vocabulary] of the models", f"{error}.", remedy)]) from None


def _name_classes(model: ModelToScore, vocabulary: Vocabulary) -> tuple[str, ...]:
    """Return the class of each output of a model, after replacing synonyms by a vocabulary.

    Raises:
        BadInput: If two outputs are one class.
    """
    meanings = map_words_to_classes(model.class_names, vocabulary)
    names = tuple(meanings.get(name, name) for name in model.class_names)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        problem = f"has two outputs that mean {quote_names(twice)} by the vocabulary of the models."
        raise BadInput([Fault(model.name, problem, "Leave one of them out of classes, by an empty name.")])
    return names


def split_by_source(data: DataToScore) -> list[DataToScore]:
    """Return one data set per hospital, from the table's column of hospitals; the data itself if it has at most one."""
    sources = [name for name in dict.fromkeys(data.images.sources.tolist()) if name]
    if len(sources) < 2:
        return [data]

    def select(source: str) -> DataToScore:
        rows = np.flatnonzero(data.images.sources == source)
        return replace(
            data,
            name=source or UNSTATED_GROUP,
            images=data.images.select_rows(rows),
            read=lambda form: data.read(form).select_rows(rows),
            read_cells=lambda column: data.read_cells(column)[rows],
        )

    return [select(source) for source in [*sources, *({""} & set(data.images.sources.tolist()))]]
