"""Splits of a data set into training, validation and test parts that keep all images of a patient together.

:func:`assign_patients_by_name` is the split of a hospital's own data: the part of a patient follows from the patient's
name alone, so that nobody's part changes when other patients come or go.

:func:`split_patients` and :func:`split_patients_over_sites` reproduce the splits of Kulkarni et al., "Surgical
Aggregation", ML4H 2024, patient by patient, and therefore use numpy's legacy generator. A patient is abnormal if any
image of the patient has a positive label; abnormal and other patients are split in the same proportions.
:class:`PatientIndex` and :class:`StratifiedPatientSplitter` apply splits that other papers define for single images to
patients; with one image per patient the result is the same.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import ceil
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import (
    PARTS,
    UNKNOWN_PATIENT,
    DatasetSplits,
    ImageSet,
    concatenate_image_sets,
)
from polyclinic.data.base.names import find_similar_names, is_anonymous_patient, make_name_similarity_key
from polyclinic.data.base.spec import SPLIT_SEED

Names = NDArray[np.str_]
Numbers = NDArray[np.intp]
VALIDATION, TEST = 0.1, 0.2
_REMEDY = "Take fewer sites_per_task, more images, or a larger server_fraction."


@dataclass(frozen=True)
class PatientSplit:
    """Three disjoint lists of patients, as names or numbers, in the order in which they were drawn."""

    train: NDArray[Any]
    validation: NDArray[Any]
    test: NDArray[Any]


def assign_patients_by_name(
    patients: Names, seed: int = SPLIT_SEED, fractions: tuple[float, float] = (0.7, 0.1)
) -> Names:
    """Return ``"train"``, ``"validation"`` or ``"test"`` for each image; the patient's name and the seed alone decide.

    A hash of the name is a number from 0 to 1. The test part is drawn from the upper end, so that a test patient stays
    one when only the fraction for validation changes. The sizes of the parts vary by chance, as those of coin tosses.

    Args:
        patients: ``(n,)`` patient of each image.
        fractions: Fractions for training and validation; the rest is the test part.
    """
    position = compute_patient_positions(patients, f"split {seed}")
    train, validation = fractions
    parts = np.full(len(patients), "test", dtype="<U10")
    parts[position < train + validation] = "validation"
    parts[position < train] = "train"
    return parts


def hold_out_patients_by_name(patients: Names, fraction: float, seed: int = SPLIT_SEED) -> NDArray[np.bool_]:
    """Return a mask ``(n,)`` of the images of a ``fraction`` of the patients, by the patient's name and the seed alone.

    Independent of :func:`assign_patients_by_name`, for data whose test part is chosen by somebody else.
    """
    return np.asarray(compute_patient_positions(patients, f"validation {seed}") < fraction)


def choose_balanced_split_seed(patients: Names, labels: NDArray[np.float32], seeds: int = 200) -> int:
    """Return the seed below ``seeds`` with which :func:`assign_patients_by_name` makes the best balanced parts.

    First, as few classes as possible lack a patient in training or in test, then in validation. Then compared are the
    patients of each part and the patients of each class in each part, with 70, 10 and 20 % of all.
    With this seed stored, the parts are balanced now and do not move later.

    Args:
        patients: ``(n,)`` patient of each image.
        labels: ``(n, classes)``; 1 present.
    """
    names, place = np.unique(patients, return_inverse=True)
    groups = np.ones((len(names), labels.shape[1] + 1))  # (patients, all and each class)
    groups[:, 1:] = 0
    rows, classes = np.nonzero(labels == 1)
    groups[place.reshape(-1)[rows], classes + 1] = 1
    expected = np.array([[0.7], [0.1], [0.2]]) * groups.sum(axis=0)  # (parts, groups)
    faults = list[tuple[int, int, float]]()
    for seed in range(seeds):
        parts = assign_patients_by_name(names, seed)
        counts = np.stack([groups[parts == part].sum(axis=0) for part in PARTS])
        is_absent = (counts == 0) & (groups.sum(axis=0) > 0)  # (parts, groups)
        # A difference of n patients weighs as much as chance makes it likely, in large groups and in small ones.
        worst = float((np.abs(counts - expected) / np.sqrt(expected + 1)).max())
        faults.append((int(is_absent[[0, 2]].sum()), int(is_absent[1].sum()), worst))
    return faults.index(min(faults))


def name_unknown_patients(patients: Names, read_own_names: Callable[[], Names]) -> Names:
    """Return the patient of each image, ``(n,)``, with a lasting name for an image whose patient is unknown.

    The placeholder of such an image is its place in the data, which changes when an image before it is taken out.

    Args:
        patients: ``(n,)`` patient of each image.
        read_own_names: Returns the name of each image itself, ``(n,)``, such as its file; called only if a patient is
            unknown. Of several images with one name, each is a patient of its own.
    """
    is_numbered = [
        name.startswith(UNKNOWN_PATIENT) and name.removeprefix(UNKNOWN_PATIENT).isdecimal()
        for name in patients.tolist()
    ]
    if not any(is_numbered):
        return patients
    counts = Counter[str]()
    distinct = list[str]()
    for name in read_own_names().tolist():
        counts[name] += 1
        distinct.append(f"{name}\0{counts[name]}" if counts[name] > 1 else name)
    return np.where(is_numbered, np.array(distinct, dtype=np.str_), patients)


def compute_patient_positions(patients: Names, draw: str) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each image, ``(n,)``: a hash of the patient's name.

    Names that are alike, such as ``P-007`` and ``p7``, have one number: a table that is exported anew may write a
    patient in another way. Two patients with such names are merely in the same part.

    Args:
        draw: Name of the draw; each draws independent numbers.
    """
    names, place = np.unique(patients, return_inverse=True)
    keys = (make_name_similarity_key(name) for name in names.tolist())
    hashed = b"".join(blake3(f"{draw}\0{key}".encode()).digest(8) for key in keys)
    positions = np.frombuffer(hashed, ">u8") / 2.0**64
    return np.asarray(positions[place.reshape(-1)])


def split_patients(
    patients: Names,
    abnormal: NDArray[np.bool_],
    seed: int = SPLIT_SEED,
    fractions: tuple[float, float] = (0.7, 0.1),
) -> PatientSplit:
    """Split patients into training, validation and test; patients left over by rounding go to the test part.

    Args:
        patients: ``(n,)`` patient of each image.
        abnormal: ``(n,)`` True where the image has a positive label.
        fractions: Fractions for training and validation, applied to abnormal and to other patients separately.
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
    """Distribute the patients of one part over sites as Kulkarni et al. do; patients left over by rounding are dropped.

    Abnormal and other patients are distributed separately. To reproduce the paper's split, call this for the training
    part and then, with the same generator ``random``, for the validation part.

    Args:
        patients: ``(n,)`` patient of each image.
        abnormal: ``(n,)`` True where the image has a positive label.
        size_skew: Site n gets a share in proportion to ``n ** -size_skew``; 0, as in the paper, gives equal shares.
    """
    if size_skew:
        sizes = np.arange(1, sites + 1) ** -size_skew
        shares = [float(size) for size in sizes / sizes.sum()]
    else:
        shares = [1 / sites] * sites  # the paper's splits depend on how this number is rounded
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
    """Draw a ``fraction`` of the patients for validation, and return a mask ``(n,)`` of their images."""
    held_out = split_patients(patients, abnormal, seed, (1 - fraction, fraction)).validation
    return np.isin(patients, held_out)


def group_patients_by_abnormality(patients: Names, abnormal: NDArray[np.bool_]) -> tuple[Names, Names]:
    """Return the sorted names of patients with a positive image, and of those without one."""
    everyone = sort_patient_names(np.unique(patients))
    positive = np.isin(everyone, np.unique(patients[abnormal]))
    return everyone[positive], everyone[~positive]


def sort_patient_names(patients: Names) -> Names:
    """Sort patient names numerically if all are numbers (``"9"`` before ``"10"``), else as text.

    A placeholder name, such as ``unknown#7``, counts as its number.
    """
    names = [patient.removeprefix(UNKNOWN_PATIENT) for patient in patients]
    if all(name.isdecimal() for name in names):
        return patients[np.argsort([int(name) for name in names], kind="stable")]
    return np.sort(patients)


def assign_images_to_parts(patients: Names, split: PatientSplit) -> Names:
    """Return ``"train"``, ``"validation"`` or ``"test"`` for each image, given the image's patient and the split."""
    parts = np.full(len(patients), "test", dtype="<U10")
    parts[np.isin(patients, split.train)] = "train"
    parts[np.isin(patients, split.validation)] = "validation"
    return parts


def divide_images_into_splits(images: ImageSet, parts: Names) -> DatasetSplits:
    """Divide images into the three parts; ``parts`` ``(n,)`` names the part of each image."""
    return DatasetSplits(*(images.select_rows(np.flatnonzero(parts == part)) for part in PARTS))


def divide_splits_again(splits: DatasetSplits, parts: Sequence[Names]) -> DatasetSplits:
    """Return the same images divided anew.

    Args:
        parts: For each part of ``splits``, the part into which each of its images goes, ``(n,)``. An image with an
            empty text is left out.
    """
    divided = divide_images_into_splits(concatenate_image_sets(splits.parts), np.concatenate(parts))
    return DatasetSplits(
        *(
            replace(images, skipped=before.skipped, missing=before.missing)
            for images, before in zip(divided.parts, splits.parts, strict=True)
        )
    )


def split_images_by_patient(images: ImageSet, seed: int) -> DatasetSplits:
    """Split a data set 70/10/20 by patient into training, validation and test."""
    split = split_patients(images.patients, find_positive_images(images.labels), seed)
    return divide_images_into_splits(images, assign_images_to_parts(images.patients, split))


def find_positive_images(labels: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask ``(n,)`` of the images with at least one 1 in ``labels`` ``(n, classes)``."""
    return np.asarray((labels == 1).any(axis=1), dtype=np.bool_)


def find_shared_patient_faults(where: str, patients: Mapping[str, Names]) -> list[Fault]:
    """Return a fault for each pair of parts that share patients, given each part's patients by the part's name.

    Args:
        where: The configuration key that the faults name.
    """
    faults = []
    for (first, of_first), (second, of_second) in combinations(patients.items(), 2):
        shared = sort_patient_names(np.intersect1d(of_first, of_second))
        if len(shared):
            problem = f"{format_count_with_noun(len(shared), 'patient')} in both {first} and {second}: "
            problem += f"{quote_names(shared, limit=5)}."
            remedy = "Put all images of a patient on one side of the split."
            faults.append(Fault(where, problem, remedy, cause="patients"))
    return faults


def find_patient_name_faults(where: str, patients: Names) -> list[Fault]:
    """Return faults for unusable patient names, and for similar names that may mean one patient.

    Args:
        where: The configuration key that the faults name.
    """
    names = np.unique(patients).tolist()
    faults = []
    if nameless := [name for name in names if is_anonymous_patient(name)]:
        faults.append(Fault(where, f"{quote_names(nameless)} names no patient.", "Name the patient of every image."))
    if similar := find_similar_names(names):
        pairs = [f'"{earlier}" and "{name}"' for name, earlier in similar.items()]
        problem = f"{format_count_with_noun(len(similar), 'pair')} of patients may be one: "
        problem += f"{list_first_and_count_rest(pairs, 5)}."
        faults.append(Fault(where, problem, "Write each patient in one way.", cause="patients"))
    return faults


@dataclass(frozen=True)
class PatientIndex:
    """The patients of a set of images, numbered in order of first appearance.

    Attributes:
        of_image: ``(n,)`` patient number of each image.
        first: ``(patients,)`` index of each patient's first image.
        classes: ``(patients,)`` index of the first positive class of the patient's first image; the number of classes
            if it has none.
    """

    of_image: Numbers
    first: Numbers
    classes: Numbers

    @classmethod
    def number_patients(cls, images: ImageSet) -> "PatientIndex":
        """Number the patients of a set of images in order of first appearance."""
        _, first, inverse = np.unique(images.patients, return_index=True, return_inverse=True)
        number = np.empty(len(first), dtype=np.intp)
        number[np.argsort(first)] = np.arange(len(first))
        positive = images.labels[np.sort(first)] == 1  # (patients, classes)
        classes = np.where(positive.any(axis=1), positive.argmax(axis=1), positive.shape[1])
        return cls(number[inverse.reshape(-1)], np.sort(first), classes.astype(np.intp))

    def list_rows_of_patients(self, numbers: Numbers) -> Numbers:
        """Return the ascending indices of all images of the patients with these numbers."""
        order, begins = self._rows_by_patient
        patients = np.unique(numbers)
        counts = begins[patients + 1] - begins[patients]
        places = np.arange(counts.sum()) + np.repeat(begins[patients] - (np.cumsum(counts) - counts), counts)
        return np.sort(order[places])

    @cached_property
    def _rows_by_patient(self) -> tuple[Numbers, Numbers]:
        """Image indices ``(n,)`` sorted by patient, and where each patient's indices begin, ``(patients + 1,)``.

        Computed once, because thousands of sites look up their images and none should search all of them.
        """
        counts = np.bincount(self.of_image, minlength=len(self.first))
        return np.argsort(self.of_image, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


@dataclass(frozen=True)
class StratifiedPatientSplitter:
    """Splits patients into two groups in which each class has the same share.

    Attributes:
        classes: ``(patients,)`` index of each patient's class; the number of classes if the patient has none.
        class_names: The names of the classes.
        seed: Seed with which each split starts.
    """

    classes: Numbers
    class_names: Sequence[str]
    seed: int

    def split_off_patient_fraction(self, numbers: Numbers, fraction: float, holder: str) -> tuple[Numbers, Numbers]:
        """Split a ``fraction`` off the patients of a site or task; return the rest and the fraction, both shuffled.

        Args:
            numbers: The numbers of these patients, which index ``classes``.
            holder: Name of the site or task, for the error message.

        Raises:
            BadInput: If a class has a single patient, or either group is too small to have all classes.
        """
        from sklearn.model_selection import train_test_split  # imported here, because it takes two seconds

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

    def split_patients_70_10_20(self, numbers: Numbers, holder: str) -> PatientSplit:
        """Split patients 70/10/20 into training, validation and test; the test part is drawn first.

        Args:
            numbers: The numbers of the patients, which index ``classes``.
            holder: Name of the site or task that has them, for the error message.

        Raises:
            BadInput: If a class has too few patients.
        """
        rest, test = self.split_off_patient_fraction(numbers, TEST, holder)
        train, validation = self.split_off_patient_fraction(rest, VALIDATION / (1 - TEST), holder)
        return PatientSplit(train, validation, test)
