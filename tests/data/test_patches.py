"""Patches of images: where they lie, what is read of a file, and that labels are those of the patch's own pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic.data.base.spec import DrawnOrgansDatasetSpec
from polyclinic.data.images.patches import PatchPositions, PatchSampling, draw_patch_positions
from polyclinic.data.images.pixel_cache import MemoryMappedPictures, PixelCache
from polyclinic.data.images.pixels import ImageTensors, load_pixels_on_device, make_mask_tensors
from polyclinic.data.sources.drawn_organs import load_drawn_organs
from polyclinic.strategies.local.objective import LabelledExamples, pair_pixels_with_labels

SIDES = (6, 10, 8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(sampling: PatchSampling, shows: np.ndarray, pixels: np.ndarray, seed: int = 0) -> PatchPositions:
    return draw_patch_positions(sampling, SIDES, shows, lambda row, column: pixels, generator(seed))


def test_patches_anywhere_fill_the_image_and_never_leave_it() -> None:
    sampling = PatchSampling((2, 3, 8), 400, 0.0)
    places = draw(sampling, np.ones((1, 1), bool), np.array([0]))
    assert len(places) == 400
    last = np.array(SIDES) - np.array(sampling.sides)
    for axis in range(3):
        assert sorted(set(places.corners[:, axis].tolist())) == list(range(last[axis] + 1))


def test_a_patch_of_the_foreground_lies_around_a_pixel_of_the_class() -> None:
    # The pixel (3, 9, 0) has the index 3 * 80 + 9 * 8; its patch of (2, 4, 4) is moved into the image at two borders.
    places = draw(PatchSampling((2, 4, 4), 5, 1.0), np.array([[False, True]]), np.array([3 * 80 + 9 * 8]))
    assert places.corners.tolist() == [[2, 6, 0]] * 5
    assert places.make_slices(0) == (slice(2, 4), slice(6, 10), slice(0, 4))


def test_the_share_of_the_foreground_is_that_of_the_sampling() -> None:
    corner = np.array([0])
    places = draw(PatchSampling((1, 1, 1), 4000, 0.3), np.array([[True]]), corner)
    share = float((places.corners == 0).all(1).mean())
    # One in 480 patches that lie anywhere is there, too.
    assert share == pytest.approx(0.3 + 0.7 / 480, abs=0.02)


def test_each_class_that_an_image_shows_is_drawn_as_often() -> None:
    pixels = {0: np.array([0]), 2: np.arange(240, 480)}
    sampling = PatchSampling((1, 1, 1), 3000, 1.0)
    shows = np.array([[True, False, True]])
    places = draw_patch_positions(sampling, SIDES, shows, lambda row, column: pixels[column], generator())
    assert float((places.corners[:, 0] < 3).mean()) == pytest.approx(0.5, abs=0.03)


def test_an_image_that_shows_no_class_has_patches_anywhere() -> None:
    sampling = PatchSampling((1, 1, 1), 50, 1.0)
    drawn = draw(sampling, np.zeros((1, 3), bool), np.array([0]))
    assert len({tuple(corner) for corner in drawn.corners.tolist()}) > 30


def test_a_class_that_a_label_states_and_no_pixel_shows_has_patches_anywhere() -> None:
    drawn = draw(PatchSampling((1, 1, 1), 50, 1.0), np.ones((1, 1), bool), np.zeros(0, np.intp))
    assert len({tuple(corner) for corner in drawn.corners.tolist()}) > 30


def test_an_images_patches_do_not_depend_on_what_others_show() -> None:
    sampling = PatchSampling((2, 2, 2), 3, 0.5)
    one = draw(sampling, np.array([[True], [True]]), np.array([77]))
    other = draw(sampling, np.array([[False], [True]]), np.array([77]))
    assert one.rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(one.corners[3:], other.corners[3:])
    assert not np.array_equal(one.corners[:3], other.corners[:3])


# ---------------------------------------------------------------------- examples

ORGANS = load_drawn_organs(DrawnOrgansDatasetSpec(kind="organs", images=24, image_size=16, depth=8)).train


def examples(images: ImageTensors | None = None) -> LabelledExamples:
    pixels = images or load_pixels_on_device(ORGANS, "cpu")
    paired = pair_pixels_with_labels(ORGANS, pixels, ("Liver", "Absent here", "Kidney"))
    sampling = PatchSampling((4, 8, 6), 3, 0.7)
    return LabelledExamples(
        paired.images, paired.labels, paired.annotated, None, paired.masks, paired.patients, sampling
    )


def test_the_patches_of_an_epoch_are_parts_of_images_with_their_own_labels() -> None:
    whole = examples()
    patches = whole.draw_patches(generator(3))
    assert len(patches) == 3 * len(whole) == whole.examples_per_epoch
    rows = torch.tensor([7, 1, 4])
    (pixels,) = patches.prefetch_images([rows])
    labels = patches.get_labels(rows)
    assert patches.find_images(rows).tolist() == [2, 0, 1]
    assert isinstance(patches.images, ImageTensors)
    assert patches.images.patches is not None
    every_image, every_label = whole.images[torch.arange(3)], whole.get_labels(torch.arange(3))
    for place, (row, image) in enumerate(zip(rows.tolist(), (2, 0, 1), strict=True)):
        part = (slice(None), *patches.images.patches.make_slices(row))
        assert torch.equal(pixels[place], every_image[image][part])
        torch.testing.assert_close(labels[place], every_label[image][part], rtol=0, atol=0, equal_nan=True)
    assert bool(labels[:, 1].isnan().all())
    assert set(labels[:, [0, 2]].unique().tolist()) == {0.0, 1.0}


def test_patches_follow_from_the_generator_alone() -> None:
    first, same, other = (examples().draw_patches(generator(seed)).images for seed in (3, 3, 4))
    assert isinstance(first, ImageTensors)
    assert isinstance(same, ImageTensors)
    assert isinstance(other, ImageTensors)
    rows = torch.arange(len(first))
    assert torch.equal(first[rows], same[rows])
    assert not torch.equal(first[rows], other[rows])


@pytest.mark.parametrize("secret", [None, bytes(range(32))], ids=["plain", "encrypted"])
def test_patches_of_a_file_are_those_of_memory(tmp_path: Path, secret: bytes | None) -> None:
    cache = PixelCache(tmp_path / "cache", ORGANS.stored.shape[1:], secret)
    with cache.open_cache_writer() as out:
        for number, picture in enumerate(ORGANS.images):
            out.add_picture_to_cache(bytes([number]) * 32, picture)
    on_disk = ImageTensors(cache.open_cached_pictures(), None, torch.device("cpu"), on_disk=True)
    rows = [torch.tensor([5, 2]), torch.tensor([0])]
    in_memory = examples().draw_patches(generator(1)).prefetch_images(rows)
    from_file = examples(on_disk).draw_patches(generator(1)).prefetch_images(rows)
    for ours, theirs in zip(in_memory, from_file, strict=True):
        assert torch.equal(ours, theirs)


def test_a_picture_of_an_open_file_is_seen_without_a_copy(tmp_path: Path) -> None:
    cache = PixelCache(tmp_path / "cache", (4, 4, 4, 1))
    with cache.open_cache_writer() as out:
        out.add_picture_to_cache(bytes(32), np.arange(64, dtype=np.uint8).reshape(4, 4, 4, 1))
    pictures = cache.open_cached_pictures()
    assert isinstance(pictures, MemoryMappedPictures)
    assert np.shares_memory(pictures.view_picture(0), pictures.array)


def test_a_class_without_a_bit_is_never_drawn_around() -> None:
    masks = make_mask_tensors(ORGANS, ("Absent here",), torch.device("cpu"))
    assert masks is not None
    labels = torch.ones(len(ORGANS), 1)
    places = masks.draw_patches(labels, PatchSampling((1, 1, 1), 2, 1.0), generator())
    assert len(places) == 2 * len(ORGANS)
