"""Detect data sets whose pictures are nearly black, because their values use a small part of 0 to 255.

The rule: if more than half of the pictures have no value of 64 or more, a warning names the brightest value. Causes are
12-bit values that somebody shifted to 8 bits (0 to 15), masks of 0 and 1, and a depth that is too large.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import MIN_HASH_DIGEST, DatasetSplits, ImageSet, LazyPictures
from polyclinic.data.base.spec import DataSpec, NpzDatasetSpec, PictureTableSpec, PluginDatasetSpec

DARK_PICTURE_LIMIT = 64
"""A picture is nearly black if all its values are below this limit; 255 is white."""
_MAX_PICTURES_EXAMINED = 256
"""Number of pictures, evenly spread over a data set, whose values are examined."""


def describe_dark_pictures(brightest: Sequence[float], spec: DataSpec) -> str:
    """Return a warning that most pictures are nearly black, with a setting that may correct it; else an empty string.

    Args:
        brightest: The largest value of each examined picture, 0 to 255.
        spec: The settings of the data set. With a ``value_range`` there is no warning.
    """
    white = find_white_of_dark_pictures(brightest, spec)
    if not white:
        return ""
    dark = sum(value < DARK_PICTURE_LIMIT for value in brightest)
    largest = max(value for value in brightest if value < DARK_PICTURE_LIMIT)
    pictures = f"{dark:,} of {format_count_with_noun(len(brightest), 'picture')} that were examined"
    problem = f"The pictures are nearly black: {pictures} have no value above {largest:.3g}, where 255 is white."
    return f"{problem} {_suggest_range(white, spec)}"


def find_white_of_dark_pictures(brightest: Sequence[float], spec: DataSpec) -> int:
    """Return the value that is probably white if most pictures are nearly black: 1, 3, 7, 15, 31 or 63; else 0.

    Args:
        brightest: The largest value of each examined picture, 0 to 255.
        spec: The settings of the data set. With a ``value_range``, which defines white, the result is 0.
    """
    dark = [value for value in brightest if value < DARK_PICTURE_LIMIT]
    if 2 * len(dark) <= len(brightest) or getattr(spec, "value_range", None) is not None or not max(brightest):
        return 0
    # Round up to a power of two less 1: other pictures may be brighter, and all sites should get the same advice.
    return int((1 << max(1, round(max(dark))).bit_length()) - 1)


def _suggest_range(white: int, spec: DataSpec) -> str:
    """Return a sentence that names the setting with which the value ``white`` is shown as white."""
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
    """If most pictures are nearly black, add a note and the value that is probably white to all parts of the data set.

    Raises:
        BadInput: If all pictures are black or all are white, because a model learns nothing from them.
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
    """Return the largest value of each of a sample of pictures, evenly spread over ``images``.

    Args:
        splits: The data set of which ``images`` is a part. The sample has the part's share of
            :data:`_MAX_PICTURES_EXAMINED` pictures. None if ``images`` is the whole data set.
    """
    total = len(images) if splits is None else sum(map(len, splits.parts))
    count = min(len(images), -(-_MAX_PICTURES_EXAMINED * len(images) // max(total, 1)))
    rows = np.unique(np.linspace(0, len(images) - 1, count).astype(np.intp)) if count else np.empty(0, np.intp)
    places = rows if images.places is None else images.places[rows]
    if isinstance(images.stored, LazyPictures):
        return [float(value) for value in images.stored.read_brightest_values(places)]
    return [float(images.stored[place].max()) for place in places]


def _refuse_one_even_grey(splits: DatasetSplits, value: float, spec: DataSpec) -> None:
    """Raise an error if all pixels of all pictures of a data set have one value.

    Args:
        value: The largest value of the examined pictures.
    """
    digests = set(np.concatenate([images.picture_digests for images in splits.parts]).tolist())
    if len(digests) > 1 or min(digests) >= MIN_HASH_DIGEST:
        return
    problem = f"all {sum(map(len, splits.parts)):,} pictures are one even grey, {value:.3g} of 255: they show nothing."
    remedy = "Look at what wrote or converted them."
    if isinstance(spec, PictureTableSpec):
        remedy += " Of DICOM and NIfTI files, window = [centre, width] in [data] says which values are black and white."
    raise BadInput([Fault("data", problem, remedy)])
