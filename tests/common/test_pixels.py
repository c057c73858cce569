"""Sites that share one store of pictures each see their own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import convert_to_channels_first, load_pixels_on_device
from tests.data.conftest import splits_of

HANDS = (np.array([3, 39, 0, 17, 3]), np.arange(40)[::-1].copy())


def whole(*colour: int) -> ImageSet:
    """Forty pictures that differ."""
    pictures = np.random.default_rng(1).integers(0, 256, (40, 5, 4, *colour), dtype=np.uint8)
    return replace(splits_of(20, 2).train, stored=pictures)


@pytest.mark.parametrize("colour", [(), (3,)], ids=["grey", "colour"])
@pytest.mark.parametrize("hand", HANDS, ids=["some", "all"])
def test_each_site_reads_its_own_rows(hand: np.ndarray, colour: tuple[int, ...]) -> None:
    expected, pixels = (
        convert_to_channels_first(whole(*colour).stored[hand]),
        load_pixels_on_device(whole(*colour).select_rows(hand), "cpu"),
    )
    drawn = torch.randperm(len(expected))
    assert len(pixels) == len(expected)
    assert torch.equal(pixels[drawn], expected[drawn])
    assert pixels[drawn].stride() == expected[drawn].stride()
    assert torch.equal(torch.cat(list(pixels.iterate_batches(3))), expected)


def test_no_picture_is_copied_for_a_site() -> None:
    everything = whole()
    first, second = (load_pixels_on_device(everything.select_rows(hand), "cpu") for hand in HANDS)
    assert first.stored.data_ptr() == second.stored.data_ptr() == everything.stored.ctypes.data


def test_rows_of_rows_are_rows_of_the_store() -> None:
    everything = whole()
    part = everything.select_rows(HANDS[0]).select_rows(np.array([4, 1]))
    assert part.stored is everything.stored
    np.testing.assert_array_equal(part.images, everything.stored[[3, 39]])


def test_no_pictures_are_one_batch_of_none() -> None:
    (batch,) = load_pixels_on_device(whole().select_rows(np.arange(0)), "cpu").iterate_batches(4)
    assert batch.shape == (0, 1, 5, 4)


def test_volumes_have_one_layout_in_memory_however_their_array_lies() -> None:
    whole = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 6), dtype=np.uint8)
    with_axis = np.ascontiguousarray(whole.reshape(3, 4, 5, 6, 1))
    moved = np.moveaxis(np.ascontiguousarray(whole[:, None]), 1, -1)
    for array in (with_axis, whole[..., None], moved):
        tensor = convert_to_channels_first(array)
        assert tensor.shape == (3, 1, 4, 5, 6)
        assert tensor.stride() == (120, 120, 30, 6, 1)
        assert (tensor[:, 0].numpy() == whole).all()
