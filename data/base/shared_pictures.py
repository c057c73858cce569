"""Find pictures that are in two parts of a data set, so that a model would be tested on pictures of its training.

Pictures are compared by their pixels; pictures whose pixels all have one value do not count. A part that shares more
than a few pictures with another is refused. With ``duplicates = "drop_from_training"`` the copies are dropped instead:
copies of test pictures from training and validation, copies of validation pictures from training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import MIN_HASH_DIGEST, PARTS, DatasetSplits, SharedPicture
from polyclinic.data.base.spec import Duplicates

_MAX_PAIRS_LISTED = 5
_MAX_SHARED_FRACTION = 0.05
"""Fraction of the smaller part's pictures that may also be in the other part; above it, the parts are refused."""
_TOLERATED_SHARED_PICTURES = 4
"""Number of shared pictures that is always tolerated, even above :data:`_MAX_SHARED_FRACTION`."""
DROP_COPIES_SETTING = 'duplicates = "drop_from_training"'
_REMEDY = (
    f"Give each part images of its own. Or drop the copies from the first: {DROP_COPIES_SETTING} in [data], in Python "
    'pc.simulate(..., settings={"data.duplicates": "drop_from_training"}); duplicates.csv in the run folder lists all.'
)


@dataclass(frozen=True)
class NamedPictures:
    """The pictures of one part: the digest (:func:`compute_picture_digest`) and the name of each, ``(n,)``."""

    digests: NDArray[np.uint64]
    names: Sequence[str]


def list_shared_pictures(parts: Mapping[str, NamedPictures], first: str, second: str) -> list[SharedPicture]:
    """Return each picture of part ``second`` that is also in part ``first``, with its first copy in ``first``."""
    first_rows: dict[int, int] = {}
    for row, digest in enumerate(parts[first].digests.tolist()):
        first_rows.setdefault(digest, row)
    return [
        SharedPicture(second, parts[second].names[row], first, parts[first].names[first_rows[digest]])
        for row, digest in enumerate(parts[second].digests.tolist())
        if digest >= MIN_HASH_DIGEST and digest in first_rows
    ]


def find_shared_picture_faults(where: str, parts: Mapping[str, NamedPictures]) -> list[Fault]:
    """Return a fault for each pair of parts that share more than a few pictures.

    Args:
        where: The configuration key, or the name of the data set, for the faults.
        parts: Name of a part -> its pictures; the training part is the first.
    """
    faults = list[Fault]()
    for first, second in combinations(parts, 2):
        shared = list_shared_pictures(parts, first, second)
        distinct = {copy.other_name for copy in shared}
        smaller = min(len(parts[first].digests), len(parts[second].digests))
        limit = max(_MAX_SHARED_FRACTION * smaller, _TOLERATED_SHARED_PICTURES)
        if len(distinct) > _TOLERATED_SHARED_PICTURES and len(shared) > limit:
            counted = f"{len(shared)} of {len(parts[second].digests)} pictures of its {second} part"
            faults.append(Fault(where, f"has {counted} in its {first} part too: {_list_pairs(shared)}.", _REMEDY))
    return faults


def _list_pairs(shared: Sequence[SharedPicture]) -> str:
    return list_first_and_count_rest([f'"{copy.name}" is "{copy.other_name}"' for copy in shared], _MAX_PAIRS_LISTED)


def settle_shared_pictures(
    where: str, splits: DatasetSplits, names: Sequence[Sequence[str]], duplicates: Duplicates, *, refuse: bool = True
) -> DatasetSplits:
    """Refuse, drop or note pictures that are in two parts, as the setting ``duplicates`` says.

    Args:
        where: The configuration key, or the name of the data set, for the fault.
        names: For each part, the name of each of its pictures.
        duplicates: "fault" refuses parts that share more than a few pictures, and adds a note about a few;
            "drop_from_training" drops the copies from the earlier part.
        refuse: False never refuses, and adds a note about any number of shared pictures. It is for tables, in which the
            patients decide the parts.

    Returns:
        The parts, with the shared pictures in :attr:`ImageSet.shared`.

    Raises:
        BadInput: If two parts share more than a few pictures.
    """
    parts = {
        part: NamedPictures(images.picture_digests, part_names)
        for part, images, part_names in zip(PARTS, splits.parts, names, strict=True)
    }
    if duplicates == "fault" and refuse:
        raise_faults(find_shared_picture_faults(where, parts))
    pairs = [list_shared_pictures(parts, first, second) for first, second in combinations(PARTS, 2)]
    notes = [_describe_shared_pictures(shared, splits, duplicates) for shared in pairs if shared]
    if not notes:
        return splits
    sets = list(splits.parts)
    if duplicates == "drop_from_training":
        for index, part in enumerate(PARTS[:-1]):
            later = np.concatenate([parts[other].digests for other in PARTS[index + 1 :]])
            digests = parts[part].digests
            is_kept = (digests < MIN_HASH_DIGEST) | ~np.isin(digests, later)
            sets[index] = sets[index].select_rows(np.flatnonzero(is_kept))
    shared = tuple(copy for copies in pairs for copy in copies)
    return DatasetSplits(*(replace(images, notes=(*images.notes, *notes), shared=shared) for images in sets))


def _describe_shared_pictures(shared: Sequence[SharedPicture], splits: DatasetSplits, duplicates: Duplicates) -> str:
    first, second = shared[0].other_part, shared[0].part
    total = format_count_with_noun(len(splits.parts[PARTS.index(second)]), f"{second} picture")
    verb = "is" if len(shared) == 1 else "are"
    sentence = f"{len(shared):,} of {total} {verb} in the {first} part too: {_list_pairs(shared)}."
    if duplicates == "drop_from_training":
        return f"{sentence} The copies were dropped from {first}."
    return f"{sentence} {DROP_COPIES_SETTING} in [data] drops the copies from {first}."
