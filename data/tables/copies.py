"""Find identical pictures in a data set, and contradictions between their labels or patients."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import GREY_DIGESTS, PARTS, DatasetSplits, are_all_patients_known
from polyclinic.data.base.splits import Names

_LISTED = 5
_COPIES = 0.05
"""Fraction of equal pictures above which two parts are refused."""
_FEW = 4
"""Equal pictures that two parts may have in any case."""


def group_rows_with_equal_contents(contents: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    """Group rows with equal content, given pairs of row and content; groups of a single row are left out."""
    rows = defaultdict[Hashable, list[int]](list)
    for row, content in contents:
        rows[content].append(row)
    return [group for group in rows.values() if len(group) > 1]


def describe_contradicting_copies(
    groups: Iterable[Sequence[int]], names: Sequence[str], labels: NDArray[np.float32], patients: Names
) -> str:
    """Return a warning about identical images with different patients or labels; empty if there are none.

    Args:
        groups: For each group of identical images, their rows.
        names: The name of each image, for the warning.
        labels: ``(n, classes)``; NaN, for unknown, contradicts no label.
        patients: ``(n,)`` patient of each image.
    """
    others, changed = list[str](), list[str]()
    for first, *copies in groups:
        for row in copies:
            pair = f'"{names[row]}" is "{names[first]}"'
            if patients[row] != patients[first]:
                others.append(pair)
            elif (labels[row] + labels[first] == 1).any():
                changed.append(pair)
    sentences = []
    if changed:
        sentences.append(
            f"{format_count_with_noun(len(changed), 'image')} with the very bytes of an earlier one of the same "
            f"patient, but other labels: {list_first_and_count_rest(changed, _LISTED)}. Write one line for each "
            "picture, with all that it shows."
        )
    if others:
        sentences.append(
            f"{format_count_with_noun(len(others), 'image')} with the very bytes of an earlier one of another patient: "
            f"{list_first_and_count_rest(others, _LISTED)}. One may be in training, the other in test. One of the two "
            "patients is wrong, or one person has two names."
        )
    return " ".join(sentences)


# ---------------------------------------------------------------------- equal pixels


def find_repeated_picture_faults(where: str, digests: NDArray[np.uint64]) -> list[Fault]:
    """Return a fault if a data set without patients contains more than a few identical pictures.

    Args:
        where: The configuration key, or the name of the data set, that the fault names.
        digests: ``(n,)``, the :func:`compute_picture_digest` of each picture.
    """
    digests = _drop_uniform_grey_digests(digests)
    repeated = len(digests) - len(np.unique(digests))
    if repeated <= _COPIES * len(digests):
        return []
    problem = f"holds {repeated} pictures again, and names no patients: a picture would be for training and for tests."
    return [Fault(where, problem, "Give each picture once, or patients=[...].")]


def find_shared_picture_faults(where: str, digests: Mapping[str, NDArray[np.uint64]]) -> list[Fault]:
    """Return a fault for each pair of parts that share more than a few pictures; uniformly grey ones do not count.

    Args:
        where: The configuration key, or the name of the data set, that the faults name.
        digests: The :func:`compute_picture_digest` of each picture, by the name of the part.
    """
    distinct = {part: np.unique(_drop_uniform_grey_digests(of_part)) for part, of_part in digests.items()}
    return [
        Fault(where, f'has {shared} equal pictures in "{first}" and "{second}".', "Give each part images of its own.")
        for first, second in combinations(digests, 2)
        if (shared := len(np.intersect1d(distinct[first], distinct[second], assume_unique=True)))
        > max(_COPIES * min(len(digests[first]), len(digests[second])), _FEW)
    ]


def check_picture_copies(where: str, splits: DatasetSplits, *, by_part: bool = False) -> DatasetSplits:
    """Refuse parts that share pictures; add a note to the parts on identical pictures with other labels or patients.

    Pictures of one grey are not compared.

    Args:
        where: The configuration key, or the name of the data set, that the faults name.
        by_part: True names a picture in the note by its number in the part, ``test[3]``. False names it by its number
            in the array that all parts share, ``[57]``; if the parts share none, as with True.

    Returns:
        The parts, with the note if there is one.

    Raises:
        BadInput: If more than a few pictures of a part are in another part, too.
    """
    digests = {part: images.picture_digests for part, images in zip(PARTS, splits.parts, strict=True)}
    raise_faults(find_shared_picture_faults(where, digests))
    names = list[str]()
    for part, images in zip(PARTS, splits.parts, strict=True):
        if by_part or images.places is None:
            names += [f"{part}[{row}]" for row in range(len(images))]
        else:
            names += [f"[{row}]" for row in images.places.tolist()]
    labels, patients = (
        np.concatenate([getattr(images, key) for images in splits.parts]) for key in ("labels", "patients")
    )
    if not are_all_patients_known(patients):
        patients = np.full(len(patients), "")
    every = np.concatenate(list(digests.values()))
    groups = group_rows_with_equal_contents((row, every[row]) for row in np.flatnonzero(every >= GREY_DIGESTS).tolist())
    if note := describe_contradicting_copies(groups, names, labels, patients):
        splits = DatasetSplits(*(replace(images, notes=(*images.notes, note)) for images in splits.parts))
    return splits


def _drop_uniform_grey_digests(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return digests[digests >= GREY_DIGESTS]
