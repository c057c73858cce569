"""Data sets that a package of the user's reads: ``kind = "plugin"``; checked as closely as our own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import PARTS, ImageSet, Splits, unknown_patients
from common.data.base.spec import PluginSpec
from common.data.base.splits import divide, shared_patient_faults, split_by_patient
from common.data.images.reading import resize_images
from common.data.tables.class_names import repeated_name_faults
from common.errors import BadInput, Fault, quoted, stop_on
from common.plugins import DATASETS, load_entry_point, stamp_of


@dataclass(frozen=True)
class LabelledImages:
    """The images and labels that a data set's plug-in returns; rows of all arrays belong together.

    Attributes:
        images: uint8, ``(n, height, width)`` for grey or ``(n, height, width, 3)`` for colour.
        labels: ``(n, classes)``: 1 present, 0 absent, NaN unknown.
        class_names: Column names of ``labels``.
        patients: ``(n,)`` names; images of one patient never stand on two sides of a split. None where nobody knows:
            then each image counts as a patient.
        parts: ``(n,)``, each ``"train"``, ``"validation"`` or ``"test"``. None for a split 70/10/20 by patient.
        sources: ``(n,)`` names of the centres that the images came from; None where nobody knows.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.float32]
    class_names: Sequence[str]
    patients: Sequence[str] | NDArray[np.str_] | None = None
    parts: Sequence[str] | NDArray[np.str_] | None = None
    sources: Sequence[str] | NDArray[np.str_] | None = None


DatasetPlugin = Callable[[Path, Mapping[str, Any]], LabelledImages]
"""Called with the folder of the file that names the data set, and with ``data.options``."""


def plugin_faults(spec: PluginSpec) -> list[Fault]:
    """Return a fault if the plug-in is not installed; its code is not run for this."""
    try:
        stamp_of(DATASETS, spec.name)
    except BadInput as bad:
        return list(bad.faults)
    return []


def load_plugin(spec: PluginSpec, base: Path) -> Splits:
    """Run the plug-in, check what it returns, and split it.

    Raises:
        BadInput: If the plug-in is not installed, fails, or returns something else than :class:`LabelledImages`.
    """
    read: DatasetPlugin = load_entry_point(DATASETS, spec.name)
    where = f"data.name: plugin:{spec.name}"
    try:
        pictures = read(base, spec.options)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # somebody else's code: it may raise anything
        raise BadInput([Fault(where, f"failed: {type(error).__name__}: {error}.")]) from error
    if not isinstance(pictures, LabelledImages):
        problem = f"returned {type(pictures).__name__}, not polyclinic.data.LabelledImages."
        raise BadInput([Fault(where, problem)])
    stop_on([Fault(where, problem) for problem in _find_problems(pictures)])
    count = len(pictures.images)
    everything = ImageSet(
        stored=resize_images(pictures.images, spec.image_size, spec.resize),
        labels=np.asarray(pictures.labels, np.float32),
        class_names=tuple(pictures.class_names),
        patients=unknown_patients(count) if pictures.patients is None else np.asarray(pictures.patients, np.str_),
        sources=np.full(count, "") if pictures.sources is None else np.asarray(pictures.sources, np.str_),
    )
    if pictures.parts is None:
        return split_by_patient(everything, spec.split_seed)
    parts = np.asarray(pictures.parts)
    stop_on(shared_patient_faults(where, {part: everything.patients[parts == part] for part in PARTS}))
    return divide(everything, parts)


def _find_problems(pictures: LabelledImages) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with the result of a plug-in."""
    images, labels = pictures.images, np.asarray(pictures.labels)
    if isinstance(pictures.class_names, str) or not isinstance(pictures.class_names, Sequence | np.ndarray):
        yield f"class_names must be a list of texts, not {pictures.class_names!r}."
        return
    names = list(pictures.class_names)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        yield f"images must be a uint8 array, not {getattr(images, 'dtype', type(images).__name__)}."
        return
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3) or not images.size:
        yield f"images must have the shape (n, height, width) or (n, height, width, 3), not {images.shape}."
        return
    if not names or not all(isinstance(name, str) and name for name in names):
        yield "class_names must be non-empty texts, at least one."
        return
    yield from (fault.problem for fault in repeated_name_faults("class_names", names))
    if labels.shape != (len(images), len(names)):
        yield f"labels must have the shape {(len(images), len(names))} (images, classes), not {labels.shape}."
    elif labels.dtype.kind not in "biuf" or not (np.isnan(labels.astype(float)) | np.isin(labels, (0, 1))).all():
        yield "labels must be 1 (present), 0 (absent) or NaN (unknown)."
    for name in ("patients", "parts", "sources"):
        entries = getattr(pictures, name)
        if entries is not None and np.shape(entries) != (len(images),):
            yield f"{name} must have one entry an image, {len(images)}, not the shape {np.shape(entries)}."
        elif entries is not None and any(entry is None for entry in entries):
            yield f"{name} must be a name for each image, or None for all of them together."
    if pictures.parts is not None and (other := sorted(set(map(str, pictures.parts)) - set(PARTS))):
        yield f"parts must be {quoted(PARTS)}, not {quoted(other, limit=3)}."
