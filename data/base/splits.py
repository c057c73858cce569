"""Splits of a data set into training, validation and test parts that keep all images of a patient together.

:func:`assign_patients_by_name` splits the data of a hospital. The part of a patient depends on the patient's name only,
so that it does not change when other patients are added or removed.

:func:`split_patients` and :func:`split_patients_over_sites` reproduce the splits of Kulkarni et al., "Surgical
Aggregation", ML4H 2024, patient by patient, and therefore use numpy's legacy generator. A patient is abnormal if any
image of the patient has a positive label; abnormal and other patients are split in the same proportions.

:class:`PatientIndex` and :class:`StratifiedPatientSplitter` apply to patients the splits that other papers define for
single images. With one image per patient the result is the same.
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
    PLACEHOLDER_PATIENT_PREFIX,
    DatasetSplits,
    ImageSet,
    concatenate_image_sets,
)
from polyclinic.data.base.names import find_similar_names, is_anonymous_patient, make_name_similarity_key
from polyclinic.data.base.spec import SPLIT_SEED

StringArray = NDArray[np.str_]
IndexArray = NDArray[np.intp]
VALIDATION_FRACTION = 0.1
TEST_FRACTION = 0.2
_REMEDY = "Take fewer sites_per_task, more images, or a larger server_fraction."


@dataclass(frozen=True)
class PatientSplit:
    """Three disjoint lists of patients, as names or numbers, in the order in which they were drawn."""

    train: NDArray[Any]
    validation: NDArray[Any]
    test: NDArray[Any]


def assign_patients_by_name(
    patients: StringArray, seed: int = SPLIT_SEED, fractions: tuple[float, float] = (0.7, 0.1)
) -> StringArray:
    """Return ``"train"``, ``"validation"`` or ``"test"`` for each image, from the patient's name and the seed alone.

    A hash of the name is a number from 0 to 1. Low numbers are the training part, high numbers the test part, so that
    the test part stays the same if only the boundary between training and validation moves. The sizes of the parts vary
    by chance.

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


def hold_out_patients_by_name(patients: StringArray, fraction: float, seed: int = SPLIT_SEED) -> NDArray[np.bool_]:
    """Return a mask ``(n,)`` of the images of a ``fraction`` of the patients, from patient names and the seed alone.

    The choice is independent of :func:`assign_patients_by_name`. It is for data whose test part is already defined.
    """
    return np.asarray(compute_patient_positions(patients, f"validation {seed}") < fraction)


def choose_balanced_split_seed(patients: StringArray, labels: NDArray[np.float32], seeds: int = 200) -> int:
    """Return the seed below ``seeds`` with which :func:`assign_patients_by_name` makes the best balanced parts.

    The criteria, in this order: the fewest classes without a patient in training or test; the fewest classes without a
    patient in validation; the smallest deviation from 70, 10 and 20 %, of all patients and of the patients of each
    class.

    Args:
        patients: ``(n,)`` patient of each image.
        labels: ``(n, classes)``; 1 present.
    """
    names, patient_of_image = np.unique(patients, return_inverse=True)
    # Membership of each patient: column 0 is the group of all patients, column c + 1 that of class c.
    groups = np.ones((len(names), labels.shape[1] + 1))
    groups[:, 1:] = 0
    rows, classes = np.nonzero(labels == 1)
    groups[patient_of_image.reshape(-1)[rows], classes + 1] = 1
    expected = np.array([[0.7], [0.1], [0.2]]) * groups.sum(axis=0)  # (parts, groups)
    penalties = list[tuple[int, int, float]]()
    for seed in range(seeds):
        parts = assign_patients_by_name(names, seed)
        counts = np.stack([groups[parts == part].sum(axis=0) for part in PARTS])
        is_absent = (counts == 0) & (groups.sum(axis=0) > 0)  # (parts, groups)
        # Divide by the standard deviation of a random split, so that large and small groups count alike.
        worst = float((np.abs(counts - expected) / np.sqrt(expected + 1)).max())
        penalties.append((int(is_absent[[0, 2]].sum()), int(is_absent[1].sum()), worst))
    return penalties.index(min(penalties))


def name_unknown_patients(patients: StringArray, read_image_names: Callable[[], StringArray]) -> StringArray:
    """Return the patient of each image, ``(n,)``; an image whose patient is unknown gets its image name as patient.

    The placeholder name of an unknown patient contains the index of the image, which changes when an image before it is
    removed. The name of the image does not change.

    Args:
        patients: ``(n,)`` patient of each image.
        read_image_names: Returns the name of each image, ``(n,)``, such as its file name; called only if a patient is
            unknown. Images with equal names become different patients.
    """
    is_numbered = [
        name.startswith(PLACEHOLDER_PATIENT_PREFIX) and name.removeprefix(PLACEHOLDER_PATIENT_PREFIX).isdecimal()
        for name in patients.tolist()
    ]
    if not any(is_numbered):
        return patients
    counts = Counter[str]()
    distinct = list[str]()
    for name in read_image_names().tolist():
        counts[name] += 1
        distinct.append(f"{name}\0{counts[name]}" if counts[name] > 1 else name)
    return np.where(is_numbered, np.array(distinct, dtype=np.str_), patients)


def compute_patient_positions(patients: StringArray, draw: str) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each image, ``(n,)``: a hash of the patient's name.

    Similar names, such as ``P-007`` and ``p7``, have the same number, because a new export of a table may spell a
    patient differently. Two different patients with similar names are then in the same part, which does no harm.

    Args:
        draw: Name of the random draw; the numbers of two draws are independent.
    """
    names, patient_of_image = np.unique(patients, return_inverse=True)
    keys = (make_name_similarity_key(name) for name in names.tolist())
    hashed = b"".join(blake3(f"{draw}\0{key}".encode()).digest(8) for key in keys)
    positions = np.frombuffer(hashed, ">u8") / 2.0**64
    return np.asarray(positions[patient_of_image.reshape(-1)])


def split_patients(
    patients: StringArray,
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
    patients: StringArray,
    abnormal: NDArray[np.bool_],
    sites: int,
    random: np.random.RandomState,
    size_skew: float = 0.0,
) -> tuple[StringArray, ...]:
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
    patients: StringArray, abnormal: NDArray[np.bool_], fraction: float, seed: int = SPLIT_SEED
) -> NDArray[np.bool_]:
    """Draw a ``fraction`` of the patients for validation, and return a mask ``(n,)`` of their images."""
    held_out = split_patients(patients, abnormal, seed, (1 - fraction, fraction)).validation
    return np.isin(patients, held_out)


def group_patients_by_abnormality(
    patients: StringArray, abnormal: NDArray[np.bool_]
) -> tuple[StringArray, StringArray]:
    """Return the sorted names of patients with a positive image, and of those without one."""
    everyone = sort_patient_names(np.unique(patients))
    positive = np.isin(everyone, np.unique(patients[abnormal]))
    return everyone[positive], everyone[~positive]


def sort_patient_names(patients: StringArray) -> StringArray:
    """Sort patient names numerically if all are numbers (``"9"`` before ``"10"``), else as text.

    A placeholder name, such as ``unknown#7``, counts as its number.
    """
    names = [patient.removeprefix(PLACEHOLDER_PATIENT_PREFIX) for patient in patients]
    if all(name.isdecimal() for name in names):
        return patients[np.argsort([int(name) for name in names], kind="stable")]
    return np.sort(patients)


def assign_images_to_parts(patients: StringArray, split: PatientSplit) -> StringArray:
    """Return ``"train"``, ``"validation"`` or ``"test"`` for each image, given the image's patient and the split."""
    parts = np.full(len(patients), "test", dtype="<U10")
    parts[np.isin(patients, split.train)] = "train"
    parts[np.isin(patients, split.validation)] = "validation"
    return parts


def divide_images_into_splits(images: ImageSet, parts: StringArray) -> DatasetSplits:
    """Divide images into the three parts; ``parts`` ``(n,)`` names the part of each image."""
    return DatasetSplits(*(images.select_rows(np.flatnonzero(parts == part)) for part in PARTS))


def divide_splits_again(splits: DatasetSplits, parts: Sequence[StringArray]) -> DatasetSplits:
    """Return a data set with the same images in other parts.

    Args:
        parts: For each part of ``splits``, the new part of each of its images, ``(n,)``. An image whose new part is an
            empty string is left out.
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


def find_shared_patient_faults(where: str, patients: Mapping[str, StringArray]) -> list[Fault]:
    """Return a fault for each pair of parts that share patients.

    Args:
        where: The configuration key that the faults name.
        patients: Name of a part -> its patients.
    """
    faults = []
    for (first, first_patients), (second, second_patients) in combinations(patients.items(), 2):
        shared = sort_patient_names(np.intersect1d(first_patients, second_patients))
        if len(shared):
            problem = f"{format_count_with_noun(len(shared), 'patient')} in both {first} and {second}: "
            problem += f"{quote_names(shared, limit=5)}."
            remedy = "Put all images of a patient on one side of the split."
            faults.append(Fault(where, problem, remedy, cause="patients"))
    return faults


def find_patient_name_faults(where: str, patients: StringArray) -> list[Fault]:
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

    of_image: IndexArray
    first: IndexArray
    classes: IndexArray

    @classmethod
    def number_patients(cls, images: ImageSet) -> "PatientIndex":
        """Number the patients of a set of images in order of first appearance."""
        _, first, inverse = np.unique(images.patients, return_index=True, return_inverse=True)
        number = np.empty(len(first), dtype=np.intp)
        number[np.argsort(first)] = np.arange(len(first))
        positive = images.labels[np.sort(first)] == 1  # (patients, classes)
        classes = np.where(positive.any(axis=1), positive.argmax(axis=1), positive.shape[1])
        return cls(number[inverse.reshape(-1)], np.sort(first), classes.astype(np.intp))

    def list_rows_of_patients(self, numbers: IndexArray) -> IndexArray:
        """Return the ascending indices of all images of the patients with these numbers."""
        order, begins = self._rows_by_patient
        patients = np.unique(numbers)
        counts = begins[patients + 1] - begins[patients]
        positions = np.arange(counts.sum()) + np.repeat(begins[patients] - (np.cumsum(counts) - counts), counts)
        return np.sort(order[positions])

    @cached_property
    def _rows_by_patient(self) -> tuple[IndexArray, IndexArray]:
        """Image indices ``(n,)`` sorted by patient, and the start of each patient's indices, ``(patients + 1,)``.

        The result is cached, because thousands of sites look up their images.
        """
        counts = np.bincount(self.of_image, minlength=len(self.first))
        return np.argsort(self.of_image, kind="stable"), np.concatenate([[0], np.cumsum(counts)])


@dataclass(frozen=True)
class StratifiedPatientSplitter:
    """Splits patients into two groups that have the same proportions of the classes.

    Attributes:
        classes: ``(patients,)`` index of each patient's class; the number of classes if the patient has none.
        class_names: The names of the classes.
        seed: Random seed of each split.
    """

    classes: IndexArray
    class_names: Sequence[str]
    seed: int

    def split_off_patient_fraction(
        self, numbers: IndexArray, fraction: float, holder: str
    ) -> tuple[IndexArray, IndexArray]:
        """Split a ``fraction`` of the patients of a site or task off; return the remaining and the split-off patients.

        Both lists are shuffled.

        Args:
            numbers: The numbers of the patients, which index ``classes``.
            holder: Name of the site or task, for the error message.

        Raises:
            BadInput: If a class has a single patient, or either group is too small to have all classes.
        """
        from sklearn.model_selection import train_test_split  # imported here, because it takes two seconds

        classes = self.classes[numbers]
        part_size = ceil(fraction * len(numbers))
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

    def split_patients_70_10_20(self, numbers: IndexArray, holder: str) -> PatientSplit:
        """Split patients 70/10/20 into training, validation and test; the test part is drawn first.

        Args:
            numbers: The numbers of the patients, which index ``classes``.
            holder: Name of the site or task, for the error message.

        Raises:
            BadInput: If a class has too few patients.
        """
        rest, test = self.split_off_patient_fraction(numbers, TEST_FRACTION, holder)
        train, validation = self.split_off_patient_fraction(rest, VALIDATION_FRACTION / (1 - TEST_FRACTION), holder)
        return PatientSplit(train, validation, test)
