"""Find images with identical files in a data set, and contradictions between their labels or patients."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.base.splits import Names
from common.system.plain_text import count_with_noun, list_first_and_count_rest

_LISTED = 5


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
