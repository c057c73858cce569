"""scikit-learn's handwritten digits (Alpaydin & Kaynak, UCI): comes with the library, no file needed."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet, Splits, own_patients
from common.data.base.spec import DigitsSpec
from common.data.images.reading import resized
from common.data.splits.patient_disjoint import any_positive, parts_of, patient_split


def load_digits(spec: DigitsSpec) -> Splits:
    """Return 1,797 images, ``(n, 8, 8)``, scaled from 0..16 to 0..255, split 70/10/20; each its own patient."""
    images, digits = _images_and_digits(spec.image_size)
    everything = ImageSet(
        stored=images,
        labels=np.asarray(digits[:, None] == np.arange(10), dtype=np.float32),
        class_names=tuple("0123456789"),
        patients=own_patients(len(images)),
        sources=np.full(len(images), ""),
    )
    return split_images(everything, spec.split_seed)


@functools.lru_cache(maxsize=1)
def _images_and_digits(size: int | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All images at one size, and the digit of each; kept, for the next run in this process."""
    table = _table()
    pixels = table[:, :-1].reshape(-1, 8, 8)
    images = resized(np.round(pixels * (255 / 16)).astype(np.uint8), size, "pad")
    images.flags.writeable = False
    return images, table[:, -1].astype(np.int64)


def _table() -> NDArray[np.float64]:
    """64 pixels and the digit, ``(1797, 65)``: from the library's file, for its import takes a second of CPU."""
    found = importlib.util.find_spec("sklearn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits as read_digits  # of a release that keeps the file elsewhere

    digits = read_digits()
    return np.column_stack([digits.data, digits.target])


def split_images(everything: ImageSet, seed: int) -> Splits:
    """Split a whole set 70/10/20 by patient."""
    split = patient_split(everything.patients, any_positive(everything.labels), seed)
    parts = parts_of(everything.patients, split)
    train, validation, test = (
        everything.rows(np.flatnonzero(parts == part)) for part in ("train", "validation", "test")
    )
    return Splits(train, validation, test)
