"""Notes for the user, before training and in the report, about labels, task, loss and transform."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from polyclinic.common.config import Experiment
from polyclinic.common.errors import quote_names
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.plugins import format_plugin_user_name
from polyclinic.common.simulation import SimulatedData
from polyclinic.common.system.plain_text import format_count_with_noun, join_as_english_list
from polyclinic.data.base.spec import LabelColumnsSpec
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.plugin_calls import describe_softmax_like_loss

LabelWord = Literal["present", "absent"]
MAX_NAMES = 8
"""Greatest number of classes that a sentence names; a sentence with more classes only has their number."""
_GENERATED_KINDS = ("digits", "phantom", "organs", "composites")
"""Kinds of data sets that Polyclinic generates; their experiments set the task."""


def list_training_notes(
    experiment: Experiment, data: SimulatedData, missing: Missing, *, is_transform_repeatable: bool
) -> list[str]:
    """Return the notes on an experiment whose data and plug-ins were checked.

    Args:
        missing: Treatment of classes that a site does not annotate, in the loss.
        is_transform_repeatable: False if the transform gives different results for the same images and seed.
    """
    # A segmentation model also learns an organ that every image shows, from the pixels around it.
    if is_segmentation(experiment.model.task):
        label_notes = describe_organs_never_shown(data)
    else:
        label_notes = describe_classes_of_one_label(experiment, data)
    notes = (
        *label_notes,
        describe_exclusive_labels(experiment, data),
        describe_softmax_like_loss(experiment, len(data.label_contract.class_names), missing),
        "" if is_transform_repeatable else _describe_unrepeatable_transform(experiment),
    )
    return [note for note in notes if note]


def describe_classes_of_one_label(experiment: Experiment, data: SimulatedData) -> Iterator[str]:
    """Yield a sentence on the classes whose known labels are all 1, and on the classes whose known labels are all 0.

    Such a class has no AUROC, and a model that is trained on it gives every image the same answer.
    """
    labels_by_class = data.known_labels
    cases: tuple[tuple[int, LabelWord, LabelWord], ...] = ((1, "present", "absent"), (0, "absent", "present"))
    for value, word, other in cases:
        names = [name for name, labels in labels_by_class.items() if len(labels) and (labels == value).all()]
        if not names:
            continue
        classes = (
            quote_names(names) if len(names) <= MAX_NAMES else format_count_with_noun(len(names), "class", "classes")
        )
        warning = "NO CLASS WILL HAVE AN AUROC. " if len(names) == len(labels_by_class) else ""
        fact = f"Every known label of {classes} says {word}: a model cannot learn to tell images apart."
        yield f"{warning}{fact} {suggest_other_label(experiment, other)}"


def describe_organs_never_shown(data: SimulatedData) -> Iterator[str]:
    """Yield a sentence on each site that annotates organs which none of its training masks show.

    Training at such a site teaches the model that the organ is absent, which is wrong if nobody outlined it there. An
    organ that no mask of the run shows is left out here; the report has a sentence on it.
    """
    counts = data.positive_training_counts
    for site, site_counts in counts.items():
        names = [
            name
            for name, count in site_counts.items()
            if not count and any(other_counts.get(name) for other_counts in counts.values())
        ]
        if names:
            fact = f"{site} annotates {quote_names(names, MAX_NAMES)}, and none of its training masks show it"
            remedy = "If nobody outlined it there, take it from the classes of this site, or leave the cells blank."
            yield f"{fact}: the site teaches that it is absent in every image. {remedy}"


def suggest_other_label(experiment: Experiment, other: LabelWord) -> str:
    """Return a remedy for a class with only one label: a change of ``[data]`` that gives images the other label."""
    spec = experiment.data
    if not isinstance(spec, LabelColumnsSpec):
        return f"Add images with the label {1 if other == 'present' else 0}."
    blank = ""
    if other == "absent" and spec.blank == "unknown":
        blank = 'If a blank cell means absent, write blank = "negative" in [data]. '
    if spec.label_columns:
        return f'{blank}If a word of the table means {other}, write {other} = ["that word"] in [data].'
    key = "classes" if other == "present" else "no_finding"
    return f"{blank}If a word of the table means {other}, add it to {key} in [data]."


def describe_exclusive_labels(experiment: Experiment, data: SimulatedData) -> str:
    """Return a note if each training image shows exactly one class but the task is not set; empty otherwise."""
    labels = data.splits.train.labels
    kind = experiment.data.kind if experiment.data else ""
    if (
        kind in _GENERATED_KINDS
        or "task" in experiment.model.model_fields_set
        or labels.shape[1] < 2
        or not len(labels)
    ):
        return ""
    if experiment.model.task != "multi_label" or not bool(np.isin(labels, (0, 1)).all()):
        return ""
    if not bool((labels.sum(axis=1) == 1).all()):
        return ""
    return (
        'Each training image shows exactly one class, and model.task is "multi_label" by default: a yes or no for each '
        'class. If the classes exclude one another, model.task = "multi_class" (in Python '
        'settings={"model.task": "multi_class"}) trains a softmax over them. model.task = "multi_label" ends this note.'
    )


def _describe_unrepeatable_transform(experiment: Experiment) -> str:
    name = format_plugin_user_name("transform", experiment.augmentation.transform or "")
    return (
        f"This run is not reproducible: {name} changes the same images in another way with the same seed, because it "
        "draws from a generator that cannot be seeded."
    )


def describe_unlabelled_images(data: SimulatedData) -> str:
    """Return a sentence that counts the images without any known label; empty if there are none."""
    test = data.test_images.labels
    counts_by_part = [
        (data.unlabelled_training_count, sum(len(part.train) for part in data.parts), "training"),
        (int(np.isnan(test).all(axis=1).sum()), len(test), "test"),
    ]
    counts = [f"{count:,} of {total:,} {part} images" for count, total, part in counts_by_part if count]
    if not counts:
        return ""
    return f"{join_as_english_list(counts)} have no known label: scores and counts of labels leave them out."
