"""Find pictures that two parts of a data set share: a model would be tested on what it was trained on.

Pictures are compared by their pixels; those of one even grey do not count. A part that shares more than a few pictures
with another is refused. With ``duplicates = "drop_from_training"`` the copies are dropped instead: a picture of the
test part from training and validation, one of the validation part from training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import GREY_DIGESTS, PARTS, DatasetSplits, SharedPicture
from polyclinic.data.base.spec import Duplicates

_MAX_LISTED = 5
_MOST_SHARED = 0.05
"""Fraction of a part's pictures, that may be in another part too, above which the parts are refused."""
_FEW = 4
"""Shared pictures that two parts may have in any case."""
DROP = 'duplicates = "drop_from_training"'
_REMEDY = (
    f"Give each part images of its own. Or drop the copies from the first: {DROP} in [data], in Python "
    'pc.simulate(..., settings={"data.duplicates": "drop_from_training"}); duplicates.csv in the run folder lists all.'
)


@dataclass(frozen=True)
class NamedPictures:
    """The pictures of one part: their digests (:func:`compute_picture_digest`) and names, ``(n,)`` each."""

    digests: NDArray[np.uint64]
    names: Sequence[str]


def list_shared_pictures(parts: Mapping[str, NamedPictures], first: str, second: str) -> list[SharedPicture]:
    """Return each picture of part ``second`` that is in part ``first`` too, with its first copy there."""
    places: dict[int, int] = {}
    for row, digest in enumerate(parts[first].digests.tolist()):
        places.setdefault(digest, row)
    return [
        SharedPicture(second, parts[second].names[row], first, parts[first].names[places[digest]])
        for row, digest in enumerate(parts[second].digests.tolist())
        if digest >= GREY_DIGESTS and digest in places
    ]


def find_shared_picture_faults(where: str, parts: Mapping[str, NamedPictures]) -> list[Fault]:
    """Return a fault for each pair of parts of which the second shares more than a few of its pictures with the first.

    Args:
        where: The configuration key, or the name of the data set, that the faults name.
        parts: The pictures by the name of the part, the training part first.
    """
    faults = list[Fault]()
    for first, second in combinations(parts, 2):
        shared = list_shared_pictures(parts, first, second)
        distinct = {copy.other_name for copy in shared}
        if len(distinct) > _FEW and len(shared) > max(
            _MOST_SHARED * min(len(parts[part].digests) for part in (first, second)), _FEW
        ):
            counted = f"{len(shared)} of {len(parts[second].digests)} pictures of its {second} part"
            faults.append(Fault(where, f"has {counted} in its {first} part too: {_list_pairs(shared)}.", _REMEDY))
    return faults


def _list_pairs(shared: Sequence[SharedPicture]) -> str:
    return list_first_and_count_rest([f'"{copy.name}" is "{copy.other_name}"' for copy in shared], _MAX_LISTED)


def settle_shared_pictures(
    where: str, splits: DatasetSplits, names: Sequence[Sequence[str]], duplicates: Duplicates, *, refuse: bool = True
) -> DatasetSplits:
    """Refuse, drop or note the pictures that two parts share, as the settings say.

    Args:
        where: The configuration key, or the name of the data set, that a fault names.
        names: The name of each picture, for each part.
        duplicates: "fault" refuses parts that share more than a few pictures, and notes a few; "drop_from_training"
            drops the copies from the earlier part.
        refuse: False notes any number of them, for a table, whose patients decide the parts.

    Returns:
        The parts, with the shared pictures in :attr:`ImageSet.shared`.

    Raises:
        BadInput: If more than a few pictures of a part are in another part, too.
    """
    parts = {
        part: NamedPictures(images.picture_digests, of_part)
        for part, images, of_part in zip(PARTS, splits.parts, names, strict=True)
    }
    if duplicates == "fault" and refuse:
        raise_faults(find_shared_picture_faults(where, parts))
    pairs = [list_shared_pictures(parts, first, second) for first, second in combinations(PARTS, 2)]
    notes = [_describe_shared_pictures(shared, splits, duplicates) for shared in pairs if shared]
    if not notes:
        return splits
    sets = list(splits.parts)
    if duplicates == "drop_from_training":
        for place, part in enumerate(PARTS[:-1]):
            later = np.concatenate([parts[other].digests for other in PARTS[place + 1 :]])
            digests = parts[part].digests
            is_kept = (digests < GREY_DIGESTS) | ~np.isin(digests, later)
            sets[place] = sets[place].select_rows(np.flatnonzero(is_kept))
    shared = tuple(copy for copies in pairs for copy in copies)
    return DatasetSplits(*(replace(images, notes=(*images.notes, *notes), shared=shared) for images in sets))


def _describe_shared_pictures(shared: Sequence[SharedPicture], splits: DatasetSplits, duplicates: Duplicates) -> str:
    first, second = shared[0].other_part, shared[0].part
    total = format_count_with_noun(len(splits.parts[PARTS.index(second)]), f"{second} picture")
    verb = "is" if len(shared) == 1 else "are"
    sentence = f"{len(shared):,} of {total} {verb} in the {first} part too: {_list_pairs(shared)}."
    if duplicates == "drop_from_training":
        return f"{sentence} The copies were dropped from {first}."
    return f"{sentence} {DROP} in [data] drops the copies from {first}."
