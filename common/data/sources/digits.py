"""scikit-learn's handwritten digits (Alpaydin & Kaynak, UCI): comes with the library, no file needed."""

import numpy as np

from common.data.base.image_set import ImageSet, Splits
from common.data.base.spec import DigitsSpec
from common.data.images.reading import resized
from common.data.splits.patient_disjoint import any_positive, parts_of, patient_split
from common.data.tables.labels import own_patients


def load_digits(spec: DigitsSpec) -> Splits:
    """Return 1,797 images, ``(n, 8, 8)``, scaled from 0..16 to 0..255, split 70/10/20; each its own patient."""
    from sklearn.datasets import load_digits as read_digits  # here: its import takes two seconds

    digits = read_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    everything = ImageSet(
        stored=resized(images, spec.image_size, "pad"),
        labels=np.asarray(digits.target[:, None] == np.arange(10), dtype=np.float32),
        class_names=tuple("0123456789"),
        patients=own_patients(len(images)),
        sources=np.full(len(images), ""),
    )
    return split_images(everything, spec.split_seed)


def split_images(everything: ImageSet, seed: int) -> Splits:
    """Split a whole set 70/10/20 by patient."""
    split = patient_split(everything.patients, any_positive(everything.labels), seed)
    parts = parts_of(everything.patients, split)
    train, validation, test = (
        everything.rows(np.flatnonzero(parts == part)) for part in ("train", "validation", "test")
    )
    return Splits(train, validation, test)
