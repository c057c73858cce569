"""Sentences on the known labels of a simulation's data, for its user before training and for its report."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from polyclinic.common.config import Experiment
from polyclinic.common.errors import quote_names
from polyclinic.common.simulation import SimulatedData
from polyclinic.common.system.plain_text import format_count_with_noun, join_as_english_list
from polyclinic.data.base.spec import LabelColumnsSpec

LabelWord = Literal["present", "absent"]
MOST_NAMED = 8
"""Classes that a sentence names; more are counted."""


def describe_classes_of_one_label(data: SimulatedData, experiment: Experiment) -> Iterator[str]:
    """Yield a sentence on the classes whose known labels are all 1, and one on those whose labels are all 0.

    Such a class has no AUROC, and a model that is trained on it gives every image the same answer.
    """
    known = data.known_labels
    cases: tuple[tuple[int, LabelWord, LabelWord], ...] = ((1, "present", "absent"), (0, "absent", "present"))
    for value, word, other in cases:
        names = [name for name, labels in known.items() if len(labels) and (labels == value).all()]
        if not names:
            continue
        classes = (
            quote_names(names) if len(names) <= MOST_NAMED else format_count_with_noun(len(names), "class", "classes")
        )
        none = "NO CLASS WILL HAVE AN AUROC. " if len(names) == len(known) else ""
        fact = f"Every known label of {classes} says {word}: a model cannot learn to tell images apart."
        yield f"{none}{fact} {suggest_other_label(experiment, other)}"


def suggest_other_label(experiment: Experiment, other: LabelWord) -> str:
    """Return what to write in ``[data]``, so that some images get the other label."""
    spec = experiment.data
    if not isinstance(spec, LabelColumnsSpec):
        return f"Add images with the label {1 if other == 'present' else 0}."
    blank = 'If a blank cell means absent, write blank = "negative" in [data]. '
    blank = blank if other == "absent" and spec.blank == "unknown" else ""
    if spec.label_columns:
        return f'{blank}If a word of the table means {other}, write {other} = ["that word"] in [data].'
    key = "classes" if other == "present" else "no_finding"
    return f"{blank}If a word of the table means {other}, add it to {key} in [data]."


def describe_unlabelled_images(data: SimulatedData) -> str:
    """Return a sentence that counts the images without any known label; empty if there are none."""
    test = data.test_images.labels
    of_parts = [
        (data.unlabelled_training_count, sum(len(part.train) for part in data.parts), "training"),
        (int(np.isnan(test).all(axis=1).sum()), len(test), "test"),
    ]
    counts = [f"{count:,} of {every:,} {part} images" for count, every, part in of_parts if count]
    if not counts:
        return ""
    return f"{join_as_english_list(counts)} have no known label: scores and counts of labels leave them out."
