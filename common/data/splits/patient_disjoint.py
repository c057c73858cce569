"""Patient-disjoint splits, as in Kulkarni et al., "Surgical Aggregation", ML4H 2024 (their procedure, step by step).

numpy's legacy generator is used on purpose: with it the paper's own patient lists come out, id by id.
A patient is abnormal if any label of any of its images is positive; both groups are split alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import UNKNOWN_PATIENT
from common.data.base.spec_base import SPLIT_SEED
from common.errors import Fault, quoted
from common.system.formatting import counted

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
    """Part of all patients that each site gets; equal parts are exactly one over the number of sites."""
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
    """Whether each image ``(n,)`` of ``labels`` ``(n, classes)`` has a positive label; unknown is not positive."""
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
