"""Attributes of each image beside its findings, from a hospital's table: the patient's sex and age, year and device.

Only counts use them (``flwr-server count``); no method trains on them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Sex = Literal["female", "male"]
SEX_WORDS: Mapping[str, Sex] = {
    **dict.fromkeys(("f", "female", "woman", "w", "weiblich", "frau", "femme", "féminin", "mujer"), "female"),
    **dict.fromkeys(("m", "male", "man", "männlich", "maennlich", "mann", "homme", "masculin", "hombre"), "male"),
}
"""Lower-case word of a table -> the sex that it means. Any other word counts as not stated."""
UNKNOWN_NUMBER = -1
"""Value for an age or a year that a table does not state."""
MAX_AGE_YEARS = 130
MIN_YEAR = 1900
"""A number from this on is a year, such as a year of birth in a column of ages."""

_AGE = re.compile(r"0*(\d{1,3})(?:[.,]0+)?\s*(y|years?|j|jahre)?", re.IGNORECASE)
_DAYS_WEEKS_MONTHS = re.compile(r"\d{1,3}[DWM]", re.IGNORECASE)
_PLAIN_DATE = re.compile(r"((?:19|20)\d\d)\d{4}")
_YEAR = re.compile(r"(?<!\d)((?:19|20)\d\d)(?!\d)")


@dataclass(frozen=True)
class ImageAttributes:
    """Attributes of images; index i of each array belongs to image i.

    Attributes:
        sex: ``(n,)`` ``female``, ``male``, or empty where not stated.
        age: int16 ``(n,)``, age in years, or the year of birth (from 1900); :data:`UNKNOWN_NUMBER` where not stated.
        year: int16 ``(n,)``, year of the image; :data:`UNKNOWN_NUMBER` where not stated.
        device: ``(n,)``, name of the device; empty where not stated.
        columns: The attributes for which the table has a column.
    """

    sex: NDArray[np.str_]
    age: NDArray[np.int16]
    year: NDArray[np.int16]
    device: NDArray[np.str_]
    columns: tuple[str, ...] = ()

    @classmethod
    def make_unstated(cls, count: int) -> "ImageAttributes":
        """Return the attributes of images about which nothing is stated."""
        unknown = np.full(count, UNKNOWN_NUMBER, np.int16)
        return cls(np.full(count, ""), unknown, unknown, np.full(count, ""))

    def select_rows(self, index: NDArray[np.intp]) -> "ImageAttributes":
        """Return the attributes of the images with these indices, in the given order."""
        return ImageAttributes(self.sex[index], self.age[index], self.year[index], self.device[index], self.columns)

    @property
    def age_at_image(self) -> NDArray[np.int16]:
        """Return the age in years at the time of each image, ``(n,)``; :data:`UNKNOWN_NUMBER` where it is unknown.

        A year of birth is subtracted from the year of the image.
        """
        is_birth_year = self.age >= MIN_YEAR
        is_dated = self.year != UNKNOWN_NUMBER
        since_birth = np.where(is_dated, self.year - self.age, UNKNOWN_NUMBER)
        age = np.where(is_birth_year, since_birth, self.age)
        valid = (age >= 0) & (age <= MAX_AGE_YEARS)
        return np.where(valid, age, UNKNOWN_NUMBER).astype(np.int16)


def concatenate_attributes(parts: Sequence[ImageAttributes]) -> ImageAttributes:
    """Join the attributes of several image sets into one."""
    return ImageAttributes(
        np.concatenate([part.sex for part in parts]),
        np.concatenate([part.age for part in parts]),
        np.concatenate([part.year for part in parts]),
        np.concatenate([part.device for part in parts]),
        parts[0].columns,
    )


def parse_sex_cell(cell: str, words: Mapping[str, Sex]) -> str:
    """Return ``female`` or ``male``, or an empty string if the cell has another word.

    Args:
        words: The user's lower-case words, which take precedence over :data:`SEX_WORDS`.
    """
    word = cell.strip().casefold()
    if word in words:
        return words[word]
    return SEX_WORDS.get(word, "")


def parse_age_cell(cell: str) -> int:
    """Return an age in years, or a year of birth; :data:`UNKNOWN_NUMBER` for any other text.

    An age as DICOM writes it, ``045Y``, is 45; an age in days, weeks or months (``010M``) is 0.
    """
    text = cell.strip()
    if _DAYS_WEEKS_MONTHS.fullmatch(text):
        return 0
    if (match := _AGE.fullmatch(text)) and int(match[1]) <= MAX_AGE_YEARS:
        return int(match[1])
    return parse_year_cell(text)


def parse_year_cell(cell: str) -> int:
    """Return the year of a date, such as ``20190301``, ``2019-03-01``, ``01.03.2019`` or ``2019``.

    A text without a year, or with several years, gives :data:`UNKNOWN_NUMBER`.
    """
    text = cell.strip()
    if match := _PLAIN_DATE.fullmatch(text):
        return int(match[1])
    years = set(_YEAR.findall(text))
    return int(years.pop()) if len(years) == 1 else UNKNOWN_NUMBER
