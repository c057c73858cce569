"""Recognise a data set whose pictures are nearly black, because their values use a small part of 0 to 255.

The rule: if more than half of the pictures have no value of 64 or more, a warning names the brightest value. Causes are
12-bit values that somebody shifted to 8 bits (0 to 15), masks of 0 and 1, and a depth that is too large.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import GREY_DIGESTS, DatasetSplits, ImageSet, LazyPictures
from polyclinic.data.base.spec import DataSpec, NpzDatasetSpec, PictureTableSpec, PluginDatasetSpec

DARK = 64
"""A picture without a value of at least this, of 255, is nearly black."""
_MOST_EXAMINED = 256
"""Number of pictures, evenly spread over a data set, whose values are examined."""


def describe_dark_pictures(brightest: Sequence[float], spec: DataSpec) -> str:
    """Return a warning that most pictures are nearly black, with the line to write; empty if they are not.

    Args:
        brightest: The largest value of each examined picture, 0 to 255.
        spec: The settings of the data set. With a ``value_range`` the user has said which value is white.
    """
    white = find_white_of_dark_pictures(brightest, spec)
    if not white:
        return ""
    dark = sum(value < DARK for value in brightest)
    largest = max(value for value in brightest if value < DARK)
    pictures = f"{dark:,} of {format_count_with_noun(len(brightest), 'picture')} that were examined"
    problem = f"The pictures are nearly black: {pictures} have no value above {largest:.3g}, where 255 is white."
    return f"{problem} {_suggest_range(white, spec)}"


def find_white_of_dark_pictures(brightest: Sequence[float], spec: DataSpec) -> int:
    """Return the value that is probably white in nearly black pictures: 1, 3, 7, 15, 31 or 63; 0 if they are not.

    Args:
        brightest: The largest value of each examined picture, 0 to 255.
        spec: The settings of the data set. With a ``value_range`` the user has said which value is white.
    """
    dark = [value for value in brightest if value < DARK]
    if 2 * len(dark) <= len(brightest) or getattr(spec, "value_range", None) is not None or not max(brightest):
        return 0
    # The next power of two, less 1: other pictures may be brighter, and every site is told the same.
    return int((1 << max(1, round(max(dark))).bit_length()) - 1)


def _suggest_range(white: int, spec: DataSpec) -> str:
    """Return a sentence with the setting that makes this value white."""
    line = f"value_range = [0, {white}]"
    why = "If that is the range of the values, write"
    match spec:
        case PluginDatasetSpec():
            return f"{why} pc.LabelledImages(..., value_range=(a, b)), with the values of black and white."
        case PictureTableSpec() if spec.bit_depth is not None:
            return f"Is bit_depth = {spec.bit_depth} right? Pictures are brighter with a smaller one."
        case PictureTableSpec():
            other = "of DICOM and NIfTI files window = [centre, width] does that"
            return f"{why} {line} into [data], for PNG and JPEG files; {other}."
        case NpzDatasetSpec():
            return f"{why} {line} into [data]."
        case _:
            return f"{why} {line} beside the path of the npz file."


def note_dark_pictures(splits: DatasetSplits, spec: DataSpec) -> DatasetSplits:
    """Add a note, and the value that is probably white, to all parts of a data set of nearly black pictures.

    Raises:
        BadInput: If all pictures are black, or all are white, from which a model learns nothing.
    """
    brightest = [value for images in splits.parts for value in _measure_brightest_values(images, splits)]
    if len(brightest) > 1 and min(brightest) == max(brightest) and max(brightest) in (0, 255):
        _refuse_one_even_grey(splits, max(brightest), spec)
    note = describe_dark_pictures(brightest, spec)
    if not note:
        return splits
    white = find_white_of_dark_pictures(brightest, spec)
    return DatasetSplits(
        *(replace(images, notes=(*images.notes, note), white_of_dark=white) for images in splits.parts)
    )


def note_dark_test_pictures(images: ImageSet, spec: DataSpec) -> ImageSet:
    """Add a note to a test set if most of its pictures are nearly black."""
    note = describe_dark_pictures(_measure_brightest_values(images, None), spec)
    return replace(images, notes=(*images.notes, note)) if note else images


def _measure_brightest_values(images: ImageSet, splits: DatasetSplits | None) -> list[float]:
    """Return the largest value of some of a part's pictures, in proportion to its size."""
    total = len(images) if splits is None else sum(map(len, splits.parts))
    count = min(len(images), -(-_MOST_EXAMINED * len(images) // max(total, 1)))
    rows = np.unique(np.linspace(0, len(images) - 1, count).astype(np.intp)) if count else np.empty(0, np.intp)
    places = rows if images.places is None else images.places[rows]
    if isinstance(images.stored, LazyPictures):
        return [float(value) for value in images.stored.read_brightest_values(places)]
    return [float(images.stored[place].max()) for place in places]


def _refuse_one_even_grey(splits: DatasetSplits, value: float, spec: DataSpec) -> None:
    """Raise an error if all pictures of a data set are the same even grey.

    Args:
        value: The largest value of the examined pictures.
    """
    digests = set(np.concatenate([images.picture_digests for images in splits.parts]).tolist())
    if len(digests) > 1 or min(digests) >= GREY_DIGESTS:
        return
    problem = f"all {sum(map(len, splits.parts)):,} pictures are one even grey, {value:.3g} of 255: they show nothing."
    remedy = "Look at what wrote or converted them."
    if isinstance(spec, PictureTableSpec):
        remedy += " Of DICOM and NIfTI files, window = [centre, width] in [data] says which values are black and white."
    raise BadInput([Fault("data", problem, remedy)])
