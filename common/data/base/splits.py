"""Splits that keep all images of a patient together.

:func:`patient_split` and :func:`split_patients_over_sites` follow Kulkarni et al., "Surgical Aggregation", ML4H 2024,
step by step. numpy's legacy generator is used on purpose: with it the paper's own patient lists come out, id by id. A
patient is abnormal if any label of any of its images is positive; both groups are split alike. :class:`Patients` and
:class:`Stratified` deal and split patients where other papers deal single images: with one image each it is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import ceil

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import UNKNOWN_PATIENT, ImageSet
from common.data.base.spec import SPLIT_SEED
from common.errors import Fault, quoted, stop_on
from common.system.plain_text import counted

Names = NDArray[np.str_]


@dataclass(frozen=True)
class PatientSplit:
    """Three disjoint lists of patients, in the order they were drawn."""

    train: Names
    validation: Names
    test: Names


def patient_split(
    patients: Names,
    abnormal: NDArray[np.bool_],
    seed: int = SPLIT_SEED,
    fractions: tuple[float, float] = (0.7, 0.1),
) -> PatientSplit:
    """Split patients into train, validation and test; the test part gets what rounding leaves.

    Args:
        patients: ``(n,)`` patient of each image.
        abnormal: ``(n,)`` whether the image has a positive label.
        fractions: Of train and validation, taken of the abnormal and of the other patients alike.
    """
    random = np.random.RandomState(seed)
    groups = abnormal_and_other(patients, abnormal)
    for group in groups:
        random.shuffle(group)
    sizes = [(int(fractions[0] * len(group)), int(fractions[1] * len(group))) for group in groups]
    kept = [group[: train + validation].copy() for group, (train, validation) in zip(groups, sizes, strict=True)]
    for group in kept:
        random.shuffle(group)
    return PatientSplit(
        train=np.concatenate([group[:train] for group, (train, _) in zip(kept, sizes, strict=True)]),
        validation=np.concatenate([group[train:] for group, (train, _) in zip(kept, sizes, strict=True)]),
        test=np.concatenate([group[sum(size) :] for group, size in zip(groups, sizes, strict=True)]),
    )


def split_patients_over_sites(
    patients: Names, abnormal: NDArray[np.bool_], sites: int, random: np.random.RandomState, size_skew: float = 0.0
) -> tuple[Names, ...]:
    """Deal the patients of one part over sites, abnormal ones first; what division leaves is dropped, as in the paper.

    The paper calls it for the train part and then, with the same ``random`` going on, for the validation part.

    Args:
        size_skew: The n-th site gets a share in proportion to ``n ** -size_skew``; in the paper equal ones.
    """
    shares = site_shares(sites, size_skew)
    groups = abnormal_and_other(patients, abnormal)
    for group in groups:
        random.shuffle(group)
    ends = [np.cumsum([0, *(int(share * len(group)) for share in shares)]) for group in groups]
    return tuple(
        np.concatenate([group[end[site] : end[site + 1]] for group, end in zip(groups, ends, strict=True)])
        for site in range(sites)
    )


def site_shares(sites: int, size_skew: float) -> list[float]:
    """Return part of all patients that each site gets; equal parts are exactly one over the number of sites."""
    if not size_skew:
        return [1 / sites] * sites
    sizes = np.arange(1, sites + 1) ** -size_skew
    return [float(size) for size in sizes / sizes.sum()]


def hold_out(
    patients: Names, abnormal: NDArray[np.bool_], fraction: float, seed: int = SPLIT_SEED
) -> NDArray[np.bool_]:
    """Mark the ``(n,)`` images of a ``fraction`` of the patients, for validation where a data set has no such part."""
    held = patient_split(patients, abnormal, seed, (1 - fraction, fraction)).validation
    return np.isin(patients, held)


def abnormal_and_other(patients: Names, abnormal: NDArray[np.bool_]) -> tuple[Names, Names]:
    """Return the distinct patients with and without a positive image, each in ascending order."""
    everyone = ascending(np.unique(patients))
    positive = np.isin(everyone, np.unique(patients[abnormal]))
    return everyone[positive], everyone[~positive]


def ascending(patients: Names) -> Names:
    """Sort patient ids, as numbers where all are numbers (``"9"`` before ``"10"``); unknown ones by theirs."""
    names = [patient.removeprefix(UNKNOWN_PATIENT) for patient in patients]
    if all(name.isdecimal() for name in names):
        return patients[np.argsort([int(name) for name in names], kind="stable")]
    return np.sort(patients)


def parts_of(patients: Names, split: PatientSplit) -> Names:
    """Return ``"train"``, ``"validation"`` or ``"test"`` for each image."""
    parts = np.full(len(patients), "test", dtype="<U10")
    parts[np.isin(patients, split.train)] = "train"
    parts[np.isin(patients, split.validation)] = "validation"
    return parts


def any_positive(labels: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mark the images ``(n,)`` that have a positive label in ``labels`` ``(n, classes)``; unknown is not positive."""
    return np.asarray((labels == 1).any(axis=1), dtype=np.bool_)


def shared_patient_faults(where: str, patients: Mapping[str, Names]) -> list[Fault]:
    """Find patients that stand in two parts, given the patients of each part by its name."""
    faults = []
    for (one, of_one), (other, of_other) in combinations(patients.items(), 2):
        both = ascending(np.intersect1d(of_one, of_other))
        if len(both):
            problem = f"{counted(len(both), 'patient')} in both {one} and {other}: {quoted(both, limit=5)}."
            remedy = "Put all images of a patient on one side of the split."
            faults.append(Fault(where, problem, remedy, cause="patients"))
    return faults


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
        """Return rows of all images of these patients, ascending."""
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


Numbers = NDArray[np.intp]
VALIDATION, TEST = 0.1, 0.2
REMEDY = "Take fewer sites_per_task, more images, or a larger server_fraction."


@dataclass(frozen=True)
class Share:
    """Somebody's patients, by number."""

    train: Numbers
    validation: Numbers
    test: Numbers


@dataclass(frozen=True)
class Stratified:
    """Splits patients so that both sides have each class in proportion.

    Attributes:
        classes: ``(patients,)`` column of each patient's class; the number of columns where it has none.
        class_names: Names of the columns.
        seed: Of each split anew.
    """

    classes: Numbers
    class_names: Sequence[str]
    seed: int

    def two(self, numbers: Numbers, fraction: float, holder: str) -> tuple[Numbers, Numbers]:
        """Return what is left and a ``fraction``, both shuffled; ``holder`` begins the sentence of a fault.

        Raises:
            BadInput: If a class has a single patient, or one side has no room for all classes.
        """
        from sklearn.model_selection import train_test_split  # here: its import takes two seconds

        classes, part_size = self.classes[numbers], ceil(fraction * len(numbers))
        present, counts = np.unique(classes, return_counts=True)
        single = [[*self.class_names, "no class"][column] for column in present[counts == 1]]
        problem = ""
        if single:
            problem = f"{holder} has a single patient of {quoted(single)}, which cannot be divided over parts."
        elif min(part_size, len(classes) - part_size) < max(1, len(present)):
            too_few = f"too few for each part to have {len(present)} classes"
            problem = f"{holder} has {len(classes)} patients to divide, {too_few}."
        stop_on([Fault("partition.sites_per_task", problem, REMEDY)] if problem else [])
        left, taken = train_test_split(numbers, test_size=fraction, random_state=self.seed, stratify=classes)
        return left, taken

    def share(self, numbers: Numbers, holder: str) -> Share:
        """Divide 70/10/20, the test part first."""
        left, test = self.two(numbers, TEST, holder)
        train, validation = self.two(left, VALIDATION / (1 - TEST), holder)
        return Share(train, validation, test)
