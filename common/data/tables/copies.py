"""Find identical pictures in a data set, and contradictions between their labels or patients."""

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import PARTS, Splits, patients_known
from common.data.base.splits import Names
from common.errors import Fault, raise_faults
from common.system.plain_text import count_with_noun, list_first_and_count_rest

_LISTED = 5
_COPIES = 0.05
"""Fraction of equal pictures above which two parts are refused."""
_FEW = 4
"""Equal pictures that two parts may have in any case."""


def equal_groups(contents: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    """Group rows with equal content, given pairs of row and content; groups of a single row are left out."""
    rows = defaultdict[Hashable, list[int]](list)
    for row, content in contents:
        rows[content].append(row)
    return [group for group in rows.values() if len(group) > 1]


def contradicting_copies(
    groups: Iterable[Sequence[int]], names: Sequence[str], labels: NDArray[np.float32], patients: Names
) -> str:
    """Return a warning about identical images with different patients or labels; empty if there are none.

    Args:
        groups: For each group of identical images, their rows.
        labels: ``(n, classes)``; NaN, for unknown, contradicts no label.
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
            f"{count_with_noun(len(changed), 'image')} with the very bytes of an earlier one of the same patient, but "
            f"other labels: {list_first_and_count_rest(changed, _LISTED)}. Write one line for each picture, with all "
            "that it shows."
        )
    if others:
        sentences.append(
            f"{count_with_noun(len(others), 'image')} with the very bytes of an earlier one of another patient: "
            f"{list_first_and_count_rest(others, _LISTED)}. One may be in training, the other in test. One of the two "
            "patients is wrong, or one person has two names."
        )
    return " ".join(sentences)


# ---------------------------------------------------------------------- pictures in memory


def picture_digest(pixels: NDArray[Any]) -> int:
    """Return a hash of a picture's pixels, from 0 to 2^64 - 1."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=8).digest())


def repeated_picture_faults(where: str, digests: NDArray[np.uint64]) -> list[Fault]:
    """Return a fault if a data set without patients contains more than a few identical pictures.

    Args:
        digests: ``(n,)``, hashes of its pictures.
    """
    repeated = len(digests) - len(np.unique(digests))
    if repeated <= _COPIES * len(digests):
        return []
    problem = f"holds {repeated} pictures again, and names no patients: a picture would be for training and for tests."
    return [Fault(where, problem, "Give each picture once, or patients=[...].")]


def shared_picture_faults(where: str, digests: Mapping[str, NDArray[np.uint64]]) -> list[Fault]:
    """Return a fault for each pair of parts that have more than a few identical pictures.

    Args:
        digests: Hashes of the pictures of each part, by the part's name.
    """
    return [
        Fault(where, f'has {shared} equal pictures in "{first}" and "{second}".', "Give each part images of its own.")
        for first, second in combinations(digests, 2)
        if (shared := len(np.intersect1d(digests[first], digests[second])))
        > max(_COPIES * min(len(digests[first]), len(digests[second])), _FEW)
    ]


def check_array_copies(where: str, splits: Splits) -> Splits:
    """Refuse parts that share pictures; return the parts with a note on copies whose rows contradict one another.

    Pictures of one grey, and those that are not in memory, are not compared.

    Raises:
        BadInput: If more than a few pictures of a part are in another part, too.
    """

    digests, names = dict[str, NDArray[np.uint64]](), list[str]()
    for part, images in zip(PARTS, splits.parts, strict=True):
        stored = images.stored
        if not isinstance(stored, np.ndarray):
            return splits
        rows = list(range(len(images))) if images.places is None else images.places.tolist()
        some = [picture_digest(stored[row]) if stored[row].min() < stored[row].max() else 0 for row in rows]
        digests[part] = np.array(some, np.uint64)
        names += [f"{part if images.places is None else ''}[{row}]" for row in rows]
    raise_faults(shared_picture_faults(where, {part: some[some > 0] for part, some in digests.items()}))
    labels, patients = (
        np.concatenate([getattr(images, key) for images in splits.parts]) for key in ("labels", "patients")
    )
    if not patients_known(patients):
        patients = np.full(len(patients), "")
    every = np.concatenate(list(digests.values()))
    groups = equal_groups((row, every[row]) for row in np.flatnonzero(every).tolist())
    if note := contradicting_copies(groups, names, labels, patients):
        splits = Splits(*(replace(images, notes=(*images.notes, note)) for images in splits.parts))
    return splits
