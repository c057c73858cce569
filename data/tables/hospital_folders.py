"""Which folders of images are hospitals: ``north/images/1.png``, ``south/images/7.png``.

The user's own word counts: ``/1`` says that the first folder of each path is the hospital, an empty text that none is.
Without it, the first folders are hospitals if each has two images or more and their names are words, or one of them is
a word for a hospital; patients are mostly numbered, and parts of a data set have names of their own.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.data.base.vocabulary import PART_WORDS
from polyclinic.data.tables.columns import HOSPITAL_HEADINGS, make_heading_key

HOSPITAL_COLUMN = "hospital"
OPTION = "--source-column"
_MAX_HOSPITALS = 50
_MAX_LISTED = 5
_LEVELS = ("first", "second", "third", "fourth")


@dataclass(frozen=True)
class HospitalFolders:
    """The hospital of each image, which a folder of its path names.

    Attributes:
        hospitals: Image -> hospital.
        level: Number of that folder in a path, from 1.
        is_assumed: True if nobody said so.
    """

    hospitals: Mapping[str, str]
    level: int = 1
    is_assumed: bool = False

    def describe(self) -> str:
        """Return a sentence on the column of hospitals for the user, with what to write if they are none."""
        names = list_first_and_count_rest(sorted(set(self.hospitals.values())), _MAX_LISTED)
        sentence = f"Its column {HOSPITAL_COLUMN} is the {_LEVELS[self.level - 1]} folder of each path: {names}."
        return f'{sentence} If these are no hospitals: {OPTION} "".' if self.is_assumed else sentence


def read_folder_level(statement: str | None) -> int | None:
    """Return the number of the folder that a statement such as ``/1`` names; None if it is a column, or empty."""
    match = re.fullmatch(r"/([1-4])", statement or "")
    return int(match[1]) if match else None


def list_folder_names(paths: Sequence[str], level: int) -> list[str]:
    """Return the first, second, ... folder of each path; empty for a path that has fewer."""
    folders = [path.split("/")[:-1] for path in paths]
    return [of_path[level - 1] if len(of_path) >= level else "" for of_path in folders]


def find_hospital_folders(
    images: Sequence[str], statement: str | None, words: Collection[str] = ()
) -> HospitalFolders | None:
    """Return the hospitals of images in folders; None if the folders are none, or the user says so.

    Args:
        images: Paths of the images, relative to the folder that the user names.
        statement: The user's own word: ``/1``, ``/2``, ..., or an empty text for none.
        words: Words that name no hospital, such as those for images and masks.

    Raises:
        BadInput: If the user names a folder that some paths lack.
    """
    level = read_folder_level(statement)
    if level is not None:
        names = list_folder_names(images, level)
        if not all(names):
            problem = f"not every image lies in such a folder: {images[names.index('')]}."
            raise BadInput([Fault(f"{OPTION} {statement}", problem, "Name another folder of the paths, or a column.")])
        return HospitalFolders(dict(zip(images, names, strict=True)), level)
    if statement is not None:
        return None
    names = list_folder_names(images, 1)
    counts = Counter(names)
    if not all(names) or not 1 < len(counts) <= _MAX_HOSPITALS or min(counts.values()) < 2:
        return None
    others = {*PART_WORDS, *words}
    if any(word in others for name in counts for word in _split_into_words(name)) or are_numbered(counts):
        return None
    return HospitalFolders(dict(zip(images, names, strict=True)), is_assumed=True)


def name_hospitals(names: Collection[str]) -> bool:
    """Return True if some names have a word for a hospital in them, such as ``site_1``."""
    return any(make_heading_key(word) in HOSPITAL_HEADINGS for name in names for word in _split_into_words(name))


def are_numbered(names: Collection[str]) -> bool:
    """Return True if names differ in their numbers alone, as those of patients do, and none is called a hospital."""
    return len({re.sub(r"\d+", "", name) for name in names}) == 1 and not name_hospitals(names)


def name_parts(names: Collection[str]) -> dict[str, str]:
    """Return name -> part of the split if all names are words for parts, with training and test; else empty."""
    parts = {name: PART_WORDS[name.casefold()] for name in names if name.casefold() in PART_WORDS}
    return parts if len(parts) == len(set(names)) and {"train", "test"} <= set(parts.values()) else {}


def _split_into_words(name: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", name.casefold())
