"""Several npz data sets as the tasks of one: images alike, classes side by side."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from common.data.base.image_set import ImageSet, Splits, joined
from common.data.base.spec import MixtureSpec
from common.data.images.reading import ImageStore, recolored
from common.data.sources.npz import load_npz, open_npz
from common.data.tables.class_names import repeated_faults
from common.errors import BadInput, Fault, stop_on


def mixture_faults(spec: MixtureSpec, base: Path) -> list[Fault]:
    """Find what is wrong with any task, without reading images; ``where`` is like ``"data.tasks.busi.path"``."""
    faults: list[Fault] = []
    names: list[str] = []
    for task, one in spec.tasks.items():
        try:
            names += _names(task, open_npz(one, base).class_names)
        except BadInput as bad:
            faults += [_of_task(task, fault) for fault in bad.faults]
    return faults + repeated_faults("data.tasks", names)


def load_mixture(spec: MixtureSpec, base: Path, store: ImageStore) -> Splits:
    """Read all tasks; their train, validation and test parts stand one task after the other.

    Raises:
        BadInput: With all faults.
    """
    stop_on(mixture_faults(spec, base))
    tasks = {task: _load_task(spec, task, base, store) for task in spec.tasks}
    class_names = tuple(name for splits in tasks.values() for name in splits.class_names)
    return Splits(
        joined([_widened(splits.train, class_names) for splits in tasks.values()]),
        joined([_widened(splits.validation, class_names) for splits in tasks.values()]),
        joined([_widened(splits.test, class_names) for splits in tasks.values()]),
    )


def _load_task(spec: MixtureSpec, task: str, base: Path, store: ImageStore) -> Splits:
    one = spec.tasks[task].model_copy(update={"image_size": spec.image_size})
    try:
        splits = load_npz(one, base, store)
    except BadInput as bad:
        raise BadInput(_of_task(task, fault) for fault in bad.faults) from None
    return Splits(*(_marked(part, task, spec.color) for part in (splits.train, splits.validation, splits.test)))


def _marked(images: ImageSet, task: str, color: bool) -> ImageSet:
    """The task's name in front of its classes and patients, and as the source."""
    return replace(
        images,
        stored=recolored(images.images, color),
        places=None,
        class_names=_names(task, images.class_names),
        patients=np.array([f"{task}/{patient}" for patient in images.patients], dtype=np.str_),
        sources=np.full(len(images), task),
    )


def _widened(images: ImageSet, class_names: tuple[str, ...]) -> ImageSet:
    """Return the images with the columns of all tasks; those of other tasks are unknown."""
    labels = np.full((len(images), len(class_names)), np.nan, dtype=np.float32)
    labels[:, [class_names.index(name) for name in images.class_names]] = images.labels
    return replace(images, labels=labels, class_names=class_names)


def _names(task: str, class_names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{task} {name}" for name in class_names)


def _of_task(task: str, fault: Fault) -> Fault:
    return replace(fault, where=fault.where.replace("data", f"data.tasks.{task}", 1))
