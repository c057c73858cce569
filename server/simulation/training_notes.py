"""Sentences for the user, before training, about the task, the loss and the transform of an experiment."""

import numpy as np

from polyclinic.common.config import Experiment
from polyclinic.common.plugins import format_plugin_user_name
from polyclinic.common.simulation import SimulatedData
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.plugin_calls import describe_softmax_like_loss, is_transform_repeatable

_GENERATED = ("digits", "phantom", "composites")
"""Kinds of data that the product generates; their experiments choose the task."""


def list_training_notes(experiment: Experiment, data: SimulatedData, missing: Missing) -> tuple[str, ...]:
    """Return the notes on an experiment whose data and plug-ins were checked.

    Args:
        missing: How the loss treats classes that a site does not annotate.
    """
    notes = (
        describe_exclusive_labels(experiment, data),
        describe_softmax_like_loss(experiment, len(data.label_contract.class_names), missing),
        "" if is_transform_repeatable(experiment) else _describe_unrepeatable_transform(experiment),
    )
    return tuple(filter(None, notes))


def describe_exclusive_labels(experiment: Experiment, data: SimulatedData) -> str:
    """Return a note if each training image shows exactly one class, and nobody chose the task; else an empty text."""
    labels = data.splits.train.labels
    kind = experiment.data.kind if experiment.data else ""
    if kind in _GENERATED or "task" in experiment.model.model_fields_set or labels.shape[1] < 2 or not len(labels):
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
