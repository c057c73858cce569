"""A data set that is decoded once and read by many processes: facts that JSON can hold, and plain arrays."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet, Skipped, Splits

PARTS = ("train", "validation", "test")
_ARRAYS = ("stored", "labels", "patients", "sources", "places")
Facts = dict[str, Any]


def taken_apart(splits: Splits) -> tuple[Facts, list[NDArray[Any]]]:
    """A data set as facts and arrays; an array that several parts share is there once."""
    arrays: list[NDArray[Any]] = []
    places: dict[int, int] = {}
    facts: Facts = {}
    for part in PARTS:
        images: ImageSet = getattr(splits, part)
        facts[part] = {
            "class_names": list(images.class_names),
            "skipped": [asdict(skip) for skip in images.skipped],
            "missing": images.missing,
        }
        for name in _ARRAYS:
            array = getattr(images, name)
            if array is not None and id(array) not in places:
                places[id(array)] = len(arrays)
                arrays.append(array)
            facts[part][name] = None if array is None else places[id(array)]
    return facts, arrays


def put_together(facts: Facts, arrays: Sequence[NDArray[Any]]) -> Splits:
    """The inverse of :func:`taken_apart`; no array is copied."""
    return Splits(*(_images(facts[part], arrays) for part in PARTS))


def _images(facts: Facts, arrays: Sequence[NDArray[Any]]) -> ImageSet:
    given: dict[str, Any] = {name: None if facts[name] is None else arrays[facts[name]] for name in _ARRAYS}
    skipped = tuple(Skipped(**skip) for skip in facts["skipped"])
    return ImageSet(class_names=tuple(facts["class_names"]), skipped=skipped, missing=facts["missing"], **given)


def raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array, one after the other."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def shapes(arrays: Sequence[NDArray[Any]]) -> list[tuple[str, tuple[int, ...]]]:
    """What else :func:`of_raw` needs of each array: type and shape."""
    return [(array.dtype.str, array.shape) for array in arrays]


def of_raw(data: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """The inverse of :func:`raw`, read-only, without a copy."""
    return np.frombuffer(data, dtype).reshape(shape)
