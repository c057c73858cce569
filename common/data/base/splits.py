"""Splits that keep all images of a patient together.

:func:`patient_split` and :func:`split_patients_over_sites` follow Kulkarni et al., "Surgical Aggregation", ML4H 2024,
step by step. numpy's legacy generator is used on purpose: with it the splits have the same patients as theirs, id by
id. A patient is abnormal if any label of any of its images is positive; abnormal and other patients are split alike.
:class:`PatientIndex` and :class:`StratifiedSplitter` handle patients where other papers handle single images; with one
image for each patient the result is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import PARTS, UNKNOWN_PATIENT, ImageSet, Splits
from common.data.base.names import find_similar, is_nobody
from common.data.base.spec import SPLIT_SEED
from common.errors import Fault, quote_names, raise_faults
from common.system.plain_text import count_with_noun, list_first_and_count_rest

Names = NDArray[np.str_]
Numbers = NDArray[np.intp]
VALIDATION, TEST = 0.1, 0.2
_REMEDY = "Take fewer sites_per_task, more images, or a larger server_fraction."


@dataclass(frozen=True)
class PatientSplit:
    """Three disjoint lists of patients, by name or by number, in the order they were drawn."""

    train: NDArray[Any]
    validation: NDArray[Any]
    test: NDArray[Any]


def patient_split(
    patients: Names,
    abnormal: NDArray[np.bool_],
    seed: int = SPLIT_SEED,
    fractions: tuple[float, float] = (0.7, 0.1),
) -> PatientSplit:
    """Split patients into train, validation and test; the test part gets what rounding leaves.

    Args:
        patients: ``(n,)`` patient of each image.
        abnormal: ``(n,)`` True where the image has a positive label.
        fractions: Fractions of the patients for train and validation, the same among abnormal and other patients.
    """
    random = np.random.RandomState(seed)
    groups = group_patients_by_abnormality(patients, abnormal)
    for group in groups:
        random.shuffle(group)
    sizes = [(int(fractions[0] * len(group)), int(fractions[1] * len(group))) for group in groups]
    not_test = [group[: train + validation].copy() for group, (train, validation) in zip(groups, sizes, strict=True)]
    for group in not_test:
        random.shuffle(group)
    return PatientSplit(
        train=np.concatenate([group[:train] for group, (train, _) in zip(not_test, sizes, strict=True)]),
        validation=np.concatenate([group[train:] for group, (train, _) in zip(not_test, sizes, strict=True)]),
        test=np.concatenate([group[sum(size) :] for group, size in zip(groups, sizes, strict=True)]),
    )


def split_patients_over_sites(
    patients: Names, abnormal: NDArray[np.bool_], sites: int, random: np.random.RandomState, size_skew: float = 0.0
) -> tuple[Names, ...]:
    """Deal the patients of one part over sites, as Kulkarni et al. do: abnormal ones first, the remainder dropped.

    To repeat their split, call this for the train part and then, with the same generator ``random``, for the
    validation part.

    Args:
        size_skew: The n-th site gets a share of the patients in proportion to ``n ** -size_skew``; 0, as in Kulkarni
            et al., gives all sites equal shares.
    """
    if size_skew:
        sizes = np.arange(1, sites + 1) ** -size_skew
        shares = [float(size) for size in sizes / sizes.sum()]
    else:
        shares = [1 / sites] * sites  # exactly: Kulkarni's numbers depend on how a product with it is rounded
    groups = group_patients_by_abnormality(patients, abnormal)
    for group in groups:
        random.shuffle(group)
    ends = [np.cumsum([0, *(int(share * len(group)) for share in shares)]) for group in groups]
    return tuple(
        np.concatenate([group[end[site] : end[site + 1]] for group, end in zip(groups, ends, strict=True)])
        for site in range(sites)
    )


def hold_out_patients(
    patients: Names, abnormal: NDArray[np.bool_], fraction: float, seed: int = SPLIT_SEED
) -> NDArray[np.bool_]:
    """Draw a ``fraction`` of the patients for validation; return ``(n,)``, True for their images."""
    held_out = patient_split(patients, abnormal, seed, (1 - fraction, fraction)).validation
    return np.isin(patients, held_out)


def group_patients_by_abnormality(patients: Names, abnormal: NDArray[np.bool_]) -> tuple[Names, Names]:
    """Return the distinct patients with and without a positive image, each in ascending order."""
    everyone = sort_patients(np.unique(patients))
    positive = np.isin(everyone, np.unique(patients[abnormal]))
    return everyone[positive], everyone[~positive]


def sort_patients(patients: Names) -> Names:
    """Sort patient ids: as numbers where every id is one (``"9"`` before ``"10"``), else as text.

    A placeholder, :data:`UNKNOWN_PATIENT` followed by the image's running number, counts as that number.
    """
    names = [patient.removeprefix(UNKNOWN_PATIENT) for patient in patients]
    if all(name.isdecimal() for name in names):
        return patients[np.argsort([int(name) for name in names], kind="stable")]
    return np.sort(patients)


def part_of_each_image(patients: Names, split: PatientSplit) -> Names:
    """Return ``"train"``, ``"validation"`` or ``"test"`` for each image, given the patient of each."""
    parts = np.full(len(patients), "test", dtype="<U10")
    parts[np.isin(patients, split.train)] = "train"
    parts[np.isin(patients, split.validation)] = "validation"
    return parts


def divide_into_splits(images: ImageSet, parts: Names) -> Splits:
    """Divide images into train, validation and test; ``parts`` ``(n,)`` names the part of each image."""
    return Splits(*(images.select_rows(np.flatnonzero(parts == part)) for part in PARTS))


def split_by_patient(images: ImageSet, seed: int) -> Splits:
    """Split a whole set 70/10/20 by patient."""
    split = patient_split(images.patients, has_positive_label(images.labels), seed)
    return divide_into_splits(images, part_of_each_image(images.patients, split))


def has_positive_label(labels: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mark the images ``(n,)`` that have a positive label in ``labels`` ``(n, classes)``; unknown is not positive."""
    return np.asarray((labels == 1).any(axis=1), dtype=np.bool_)


def shared_patient_faults(where: str, patients: Mapping[str, Names]) -> list[Fault]:
    """Return a fault for each two parts that share patients, given the patients of each part by the part's name."""
    faults = []
    for (first, of_first), (second, of_second) in combinations(patients.items(), 2):
        shared = sort_patients(np.intersect1d(of_first, of_second))
        if len(shared):
            problem = (
                f"{count_with_noun(len(shared), 'patient')} in both {first} and {second}: "
                f"{quote_names(shared, limit=5)}."
            )
            remedy = "Put all images of a patient on one side of the split."
            faults.append(Fault(where, problem, remedy, cause="patients"))
    return faults


def patient_name_faults(where: str, patients: Names) -> list[Fault]:
    """Find names of no patient, and names so alike that they may be one patient's, who could stand in two parts."""
    names = np.unique(patients).tolist()
    faults = []
    if nameless := [name for name in names if is_nobody(name)]:
        faults.append(Fault(where, f"{quote_names(nameless)} names no patient.", "Name the patient of every image."))
    if similar := find_similar(names):
        pairs = [f'"{earlier}" and "{name}"' for name, earlier in similar.items()]
        problem = (
            f"{count_with_noun(len(similar), 'pair')} of patients may be one: {list_first_and_count_rest(pairs, 5)}."
        )
        faults.append(Fault(where, problem, "Write each patient in one way.", cause="patients"))
    return faults


@dataclass(frozen=True)
class PatientIndex:
    """The patients of some images, numbered in the order of their first images.

    Attributes:
        of_image: ``(n,)`` number of each image's patient.
        first: ``(patients,)`` row of each patient's first image.
        classes: ``(patients,)`` column of that image's first positive label; the number of columns where it has none.
    """

    of_image: Numbers
    first: Numbers
    classes: Numbers

    @classmethod
    def of(cls, images: ImageSet) -> "PatientIndex":
        """Number the patients of a set of images, in the order of their first images."""
        _, first, inverse = np.unique(images.patients, return_index=True, return_inverse=True)
        number = np.empty(len(first), dtype=np.intp)
        number[np.argsort(first)] = np.arange(len(first))
        positive = images.labels[np.sort(first)] == 1  # (patients, classes)
        classes = np.where(positive.any(axis=1), positive.argmax(axis=1), positive.shape[1])
        return cls(number[inverse.reshape(-1)], np.sort(first), classes.astype(np.intp))

    def rows_of_patients(self, numbers: Numbers) -> Numbers:
        """Return the rows of all images of the patients with these numbers, ascending."""
        order, begins = self._rows_by_patient
        patients = np.unique(numbers)
        counts = begins[patients + 1] - begins[patients]
        places = np.arange(counts.sum()) + np.repeat(begins[patients] - (np.cumsum(counts) - counts), counts)
        return np.sort(order[places])

    @cached_property
    def _rows_by_patient(self) -> tuple[Numbers, Numbers]:
        """Rows patient by patient ``(n,)``, and where each patient's begin in them, ``(patients + 1,)``.

        Thousands of sites ask for theirs, and none of them should have to look through all images.
        """
        counts = np.bincount(self.of_image, minlength=len(self.first))
        return np.argsort(self.of_image, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


@dataclass(frozen=True)
class StratifiedSplitter:
    """Splits patients in two groups so that each class has the same share in both groups.

    Attributes:
        classes: ``(patients,)`` column of each patient's class; the number of columns where it has none.
        class_names: Names of the columns.
        seed: Seed of every split; each begins with it anew.
    """

    classes: Numbers
    class_names: Sequence[str]
    seed: int

    def split_off(self, numbers: Numbers, fraction: float, holder: str) -> tuple[Numbers, Numbers]:
        """Split a ``fraction`` off the patients; return the rest and that fraction, both shuffled.

        Raises:
            BadInput: If a class has a single patient, or one side has no room for all classes.
        """
        from sklearn.model_selection import train_test_split  # here: its import takes two seconds

        classes, part_size = self.classes[numbers], ceil(fraction * len(numbers))
        present, counts = np.unique(classes, return_counts=True)
        single = [[*self.class_names, "no class"][column] for column in present[counts == 1]]
        problem = ""
        if single:
            problem = f"{holder} has a single patient of {quote_names(single)}, which cannot be divided over parts."
        elif min(part_size, len(classes) - part_size) < max(1, len(present)):
            too_few = f"too few for each part to have {len(present)} classes"
            problem = f"{holder} has {len(classes)} patients to divide, {too_few}."
        raise_faults([Fault("partition.sites_per_task", problem, _REMEDY)] if problem else [])
        rest, part = train_test_split(numbers, test_size=fraction, random_state=self.seed, stratify=classes)
        return rest, part

    def split_in_three(self, numbers: Numbers, holder: str) -> PatientSplit:
        """Divide patients 70/10/20 into train, validation and test, the test part first."""
        rest, test = self.split_off(numbers, TEST, holder)
        train, validation = self.split_off(rest, VALIDATION / (1 - TEST), holder)
        return PatientSplit(train, validation, test)
