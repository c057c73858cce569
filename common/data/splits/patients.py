"""Patients as what is dealt and split where a paper deals single images: with one image each it is the same."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet


@dataclass(frozen=True)
class Patients:
    """The patients of some images, numbered in the order of their first images.

    Attributes:
        of_image: ``(n,)`` number of each image's patient.
        first: ``(patients,)`` row of each patient's first image.
        classes: ``(patients,)`` column of that image's first positive label; the number of columns where it has none.
    """

    of_image: NDArray[np.intp]
    first: NDArray[np.intp]
    classes: NDArray[np.intp]

    def rows(self, numbers: NDArray[np.intp]) -> NDArray[np.intp]:
        """Rows of all images of these patients, ascending."""
        return np.flatnonzero(np.isin(self.of_image, numbers))


def patients_of(images: ImageSet) -> Patients:
    _, first, inverse = np.unique(images.patients, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.intp)
    number[np.argsort(first)] = np.arange(len(first))
    positive = images.labels[np.sort(first)] == 1  # (patients, classes)
    classes = np.where(positive.any(axis=1), positive.argmax(axis=1), positive.shape[1])
    return Patients(number[inverse.reshape(-1)], np.sort(first), classes.astype(np.intp))
