"""A data set that one process decodes and many read."""

import json
from dataclasses import replace

import numpy as np

from common.data.base.image_set import (
    PARTS,
    ImageSet,
    Skipped,
    Splits,
    array_bytes,
    array_forms,
    array_from_bytes,
    flatten,
    unflatten,
)
from tests.common.data.conftest import splits_of


def colourful() -> Splits:
    """Pictures that differ, some of them left out, and a part without any."""
    splits, random = splits_of(20, 3), np.random.default_rng(0)
    pictures = random.integers(0, 256, (len(splits.train), 4, 6, 3), dtype=np.uint8)
    left_out = (Skipped("a.png", "is empty"),)
    train = replace(splits.train, stored=pictures, skipped=left_out, missing=2)
    return Splits(train, train.rows(np.array([7, 3, 3])), train.rows(np.arange(0)))


def same(one: ImageSet, other: ImageSet) -> None:
    for name in ("images", "labels", "patients", "sources"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.class_names, one.skipped, one.missing) == (other.class_names, other.skipped, other.missing)


def test_what_is_put_together_is_what_was_taken_apart() -> None:
    splits = colourful()
    facts, arrays = flatten(splits)
    bytes_of = [bytes(array_bytes(array)) for array in arrays]  # as another process has them
    received = [array_from_bytes(data, *shape) for data, shape in zip(bytes_of, array_forms(arrays), strict=True)]
    again = unflatten(json.loads(json.dumps(facts)), received)
    for part in PARTS:
        same(getattr(again, part), getattr(splits, part))


def test_parts_that_share_their_pictures_share_them_again() -> None:
    facts, arrays = flatten(colourful())
    assert sum(array.dtype == np.uint8 for array in arrays) == 1
    again = unflatten(facts, arrays)
    assert again.train.stored is again.validation.stored is arrays[facts["train"]["stored"]]
