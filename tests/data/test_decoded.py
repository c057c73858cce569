"""A data set that one process decodes and many read."""

import json
from dataclasses import replace

import numpy as np
import pytest

from polyclinic.data.base.image_set import (
    DatasetSplits,
    SkippedImage,
    deserialize_dataset_splits,
    list_array_dtypes_and_shapes,
    restore_array_from_bytes,
    serialize_dataset_splits,
    view_array_as_bytes,
)
from tests.data.conftest import splits_of


@pytest.fixture
def splits() -> DatasetSplits:
    """Pictures that differ, some of them left out, and a part without any."""
    blank, random = splits_of(20, 3).train, np.random.default_rng(0)
    pictures = random.integers(0, 256, (len(blank), 4, 6, 3), dtype=np.uint8)
    train = replace(blank, stored=pictures, skipped=(SkippedImage("a.png", "is empty"),), missing=2)
    return DatasetSplits(train, train.select_rows(np.array([7, 3, 3])), train.select_rows(np.arange(0)))


def test_a_data_set_comes_back_from_its_layout_and_the_bytes_of_its_arrays(splits: DatasetSplits) -> None:
    layout, arrays = serialize_dataset_splits(splits)
    assert sum(array.dtype == np.uint8 for array in arrays) == 1  # parts share their pictures
    bytes_of = [bytes(view_array_as_bytes(array)) for array in arrays]  # as another process has them
    received = [
        restore_array_from_bytes(data, *form)
        for data, form in zip(bytes_of, list_array_dtypes_and_shapes(arrays), strict=True)
    ]
    again = deserialize_dataset_splits(json.loads(json.dumps(layout)), received)
    for part, same in zip(splits.parts, again.parts, strict=True):
        for name in ("images", "labels", "patients", "sources"):
            np.testing.assert_array_equal(getattr(part, name), getattr(same, name))
        assert (part.class_names, part.skipped, part.missing) == (same.class_names, same.skipped, same.missing)


def test_parts_that_share_their_pictures_share_them_again(splits: DatasetSplits) -> None:
    layout, arrays = serialize_dataset_splits(splits)
    again = deserialize_dataset_splits(layout, arrays)
    assert again.train.stored is again.validation.stored is arrays[layout["train"]["stored"]]
