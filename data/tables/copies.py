"""Find identical pictures in a data set, and contradictions between their labels or patients."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import MIN_HASH_DIGEST, PARTS, DatasetSplits, are_all_patients_known
from polyclinic.data.base.shared_pictures import settle_shared_pictures
from polyclinic.data.base.spec import Duplicates
from polyclinic.data.base.splits import StringArray

_MAX_LISTED = 5
_MAX_COPY_SHARE = 0.05
"""A data set without patients is refused if more than this fraction of its pictures are copies of others."""


def group_rows_with_equal_contents(contents: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    """Return groups of rows with equal content, given pairs of row and content; groups of one row are left out."""
    rows = defaultdict[Hashable, list[int]](list)
    for row, content in contents:
        rows[content].append(row)
    return [group for group in rows.values() if len(group) > 1]


def describe_contradicting_copies(
    groups: Iterable[Sequence[int]], names: Sequence[str], labels: NDArray[np.float32], patients: StringArray
) -> str:
    """Return a warning about identical images with different patients or labels; empty if there are none.

    Args:
        groups: The rows of each group of identical images.
        names: The name of each image, for the warning.
        labels: ``(n, classes)``; NaN, for unknown, contradicts no label.
        patients: ``(n,)`` patient of each image.
    """
    other_patient = list[str]()
    other_labels = list[str]()
    for first, *copies in groups:
        for row in copies:
            pair = f'"{names[row]}" is "{names[first]}"'
            if patients[row] != patients[first]:
                other_patient.append(pair)
            elif (labels[row] + labels[first] == 1).any():
                other_labels.append(pair)
    sentences = []
    if other_labels:
        sentences.append(
            f"{format_count_with_noun(len(other_labels), 'image')} with the very bytes of an earlier one of the same "
            f"patient, but other labels: {list_first_and_count_rest(other_labels, _MAX_LISTED)}. "
            "Write one line for each picture, with all that it shows."
        )
    if other_patient:
        images = format_count_with_noun(len(other_patient), "image")
        sentences.append(
            f"{images} with the very bytes of an earlier one of another patient: "
            f"{list_first_and_count_rest(other_patient, _MAX_LISTED)}. One may be in training, the other in test. "
            "One of the two patients is wrong, or one person has two names."
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
    if repeated <= _MAX_COPY_SHARE * len(digests):
        return []
    problem = f"holds {repeated} pictures again, and names no patients: a picture would be for training and for tests."
    remedy = "Give each picture once, or patients=[...]. Or drop copies of test pictures from training: "
    return [Fault(where, problem, f'{remedy}settings={{"data.duplicates": "drop_from_training"}}.')]


def check_picture_copies(
    where: str, splits: DatasetSplits, duplicates: Duplicates, *, by_part: bool = False
) -> DatasetSplits:
    """Refuse or drop pictures that are in two parts; add a note on identical pictures with other labels or patients.

    Pictures whose pixels all have one value are not compared.

    Args:
        where: The configuration key, or the name of the data set, for the faults.
        duplicates: Setting for pictures that are in two parts (:func:`settle_shared_pictures`).
        by_part: Form of a picture's name in the note. True gives its index in the part, ``test[3]``. False gives its
            index in the array that all parts share, ``[57]``, if there is such an array.

    Returns:
        The parts, perhaps with fewer pictures and a note.

    Raises:
        BadInput: If two parts share more than a few pictures.
    """
    names = [
        [f"{part}[{row}]" for row in range(len(images))]
        if by_part or images.places is None
        else [f"[{row}]" for row in images.places.tolist()]
        for part, images in zip(PARTS, splits.parts, strict=True)
    ]
    splits = note_contradicting_pictures(splits, list(chain.from_iterable(names)))
    return settle_shared_pictures(where, splits, names, duplicates)


def note_contradicting_pictures(splits: DatasetSplits, names: Sequence[str]) -> DatasetSplits:
    """Add a note to all parts if identical pictures have other labels or patients.

    Args:
        names: The names of all pictures: of the training part, then of validation, then of test.
    """
    labels, patients = (
        np.concatenate([getattr(images, key) for images in splits.parts]) for key in ("labels", "patients")
    )
    if not are_all_patients_known(patients):
        patients = np.full(len(patients), "")
    every = np.concatenate([images.picture_digests for images in splits.parts])
    groups = group_rows_with_equal_contents(
        (row, every[row]) for row in np.flatnonzero(every >= MIN_HASH_DIGEST).tolist()
    )
    if note := describe_contradicting_copies(groups, names, labels, patients):
        splits = DatasetSplits(*(replace(images, notes=(*images.notes, note)) for images in splits.parts))
    return splits


def _drop_uniform_grey_digests(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return digests[digests >= MIN_HASH_DIGEST]
