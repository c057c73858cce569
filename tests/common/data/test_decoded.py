"""A data set that one process decodes and many read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.data.base.image_set import ImageSet, Skipped, Splits
from common.data.images import decoded
from common.data.images.decoded import PARTS, is_decoded, read_decoded, write_decoded
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


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    splits = colourful()
    write_decoded(splits, tmp_path / "images")
    again = read_decoded(tmp_path / "images")
    for part in PARTS:
        same(getattr(again, part), getattr(splits, part))


def test_pictures_are_mapped_and_what_a_process_does_to_them_reaches_no_other(tmp_path: Path) -> None:
    write_decoded(colourful(), tmp_path / "images")
    one, other = (read_decoded(tmp_path / "images").train.stored for _ in range(2))
    assert isinstance(one, np.memmap)
    before = other.copy()
    one[0] = 255 - one[0]
    np.testing.assert_array_equal(other, before)


def test_a_new_set_takes_the_place_of_one_that_a_killed_process_left(tmp_path: Path) -> None:
    write_decoded(splits_of(5, 2), tmp_path / "images")
    write_decoded(colourful(), tmp_path / "images")
    assert read_decoded(tmp_path / "images").train.class_names == ("a", "b", "c")


def test_without_room_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decoded.np, "save", full)
    with pytest.raises(OSError, match="No space"):
        write_decoded(colourful(), tmp_path / "images")
    assert not is_decoded(tmp_path / "images")
    assert list(tmp_path.iterdir()) == []
