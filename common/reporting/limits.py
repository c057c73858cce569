"""Sentences about limitations of results that several pages and programs share."""

from collections.abc import Iterator

from polyclinic.common.metrics.auroc import MIN_POSITIVES
from polyclinic.common.system.plain_text import format_count_with_noun

UNKNOWN_PATIENTS = (
    "The data does not say which images belong to one patient: images of one patient may be in training and in test "
    "data, so that figures may be too good, and intervals are over images."
)


def warn_about_few_images(name: str, positives: int, negatives: int, images: str) -> Iterator[str]:
    """Yield a sentence if a class has few positive or few negative images.

    Args:
        name: The class.
        positives, negatives: Numbers of images.
        images: Singular noun phrase for the kind of image, such as ``"test image"``.
    """
    least = min(positives, negatives)
    if least < MIN_POSITIVES:
        kind = "positive" if positives == least else "negative"
        yield f"The figures for “{name}” rest on {format_count_with_noun(least, f'{kind} {images}')}."
