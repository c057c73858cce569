"""scikit-learn's handwritten digits (Alpaydin & Kaynak, UCI): comes with the library, no file needed."""

import functools

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
    from sklearn.datasets import load_digits as read_digits  # here: its import takes two seconds

    digits = read_digits()
    images = resized(np.round(digits.images * (255 / 16)).astype(np.uint8), size, "pad")
    images.flags.writeable = False
    return images, digits.target


def split_images(everything: ImageSet, seed: int) -> Splits:
    """Split a whole set 70/10/20 by patient."""
    split = patient_split(everything.patients, any_positive(everything.labels), seed)
    parts = parts_of(everything.patients, split)
    train, validation, test = (
        everything.rows(np.flatnonzero(parts == part)) for part in ("train", "validation", "test")
    )
    return Splits(train, validation, test)
