"""Patients as what is dealt and split where a paper deals single images: with one image each it is the same."""

from dataclasses import dataclass
from functools import cached_property

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
        order, begins = self._by_patient
        found = np.unique(numbers)
        counts = begins[found + 1] - begins[found]
        places = np.arange(counts.sum()) + np.repeat(begins[found] - (np.cumsum(counts) - counts), counts)
        return np.sort(order[places])

    @cached_property
    def _by_patient(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows patient by patient ``(n,)``, and where each one's begin in them, ``(patients + 1,)``.

        Thousands of sites ask for theirs, and none of them should have to look through all images.
        """
        counts = np.bincount(self.of_image, minlength=len(self.first))
        return np.argsort(self.of_image, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


def patients_of(images: ImageSet) -> Patients:
    _, first, inverse = np.unique(images.patients, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.intp)
    number[np.argsort(first)] = np.arange(len(first))
    positive = images.labels[np.sort(first)] == 1  # (patients, classes)
    classes = np.where(positive.any(axis=1), positive.argmax(axis=1), positive.shape[1])
    return Patients(number[inverse.reshape(-1)], np.sort(first), classes.astype(np.intp))
