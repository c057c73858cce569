from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.data.images.augmentation import (
    HOLE_VALUE,
    RANDOM_CHANGES,
    apply_strong_augmentation,
    apply_weak_augmentation,
    augment_images_strongly,
    augment_images_weakly,
)

SURGICAL = AugmentationSpec(rotation=0.2, horizontal_flip=True, zoom=0.5, contrast=0.75)
FEDMLP_WEAK = AugmentationSpec(rotation=10 / 360, translate=0.02, horizontal_flip=True)


def images(batch: int = 6, channels: int = 1, height: int = 16, width: int = 16) -> Tensor:
    return torch.rand(batch, channels, height, width, generator=torch.Generator().manual_seed(7)) * 255


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_image(
    turn: float = 0.5, down: float = 0.5, right: float = 0.5, height: float = 0.5, width: float = 0.5
) -> Tensor:
    """The same random numbers for six images; no contrast, no mirror."""
    return torch.tensor([turn, down, right, height, width, 0.5, 0.9])[:, None].expand(7, 6)


def test_all_off_returns_the_very_same_tensor() -> None:
    pixels = images()
    assert augment_images_weakly(pixels, AugmentationSpec(), seeded()) is pixels


def test_the_same_generator_gives_the_same_images_and_leaves_the_originals_alone() -> None:
    pixels = images()
    before = pixels.clone()
    assert torch.equal(
        augment_images_weakly(pixels, SURGICAL, seeded()), augment_images_weakly(pixels, SURGICAL, seeded())
    )
    assert not torch.equal(
        augment_images_weakly(pixels, SURGICAL, seeded()), augment_images_weakly(pixels, SURGICAL, seeded(1))
    )
    assert torch.equal(pixels, before)


def test_a_flip_alone_is_exact_and_takes_about_every_other_image() -> None:
    pixels = images(batch=400)
    flipped = augment_images_weakly(pixels, AugmentationSpec(horizontal_flip=True), seeded())
    mirrored = (flipped == pixels.flip(3)).flatten(1).all(1)
    same = (flipped == pixels).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert 150 < int(mirrored.sum()) < 250


@pytest.mark.parametrize("change", [{"translate": 1e-9}, {"contrast": 1e-7}])
def test_the_flips_are_the_same_beside_other_changes(change: dict[str, float]) -> None:
    shortcut = augment_images_weakly(images(), AugmentationSpec(horizontal_flip=True), seeded())
    beside = augment_images_weakly(images(), AugmentationSpec(horizontal_flip=True, **change), seeded())
    torch.testing.assert_close(beside, shortcut, rtol=0, atol=0.01)


def test_contrast_keeps_the_mean_of_every_channel_and_scales_by_at_most_its_factor() -> None:
    pixels = images(channels=3)
    result = augment_images_weakly(pixels, AugmentationSpec(contrast=0.75), seeded())
    torch.testing.assert_close(result.mean((2, 3)), pixels.mean((2, 3)))
    factors = result.std((2, 3)) / pixels.std((2, 3))
    assert bool(((factors > 0.25) & (factors < 1.75)).all())
    torch.testing.assert_close(factors[:, 0], factors[:, 1])  # one factor per image


@pytest.mark.parametrize(("quarters", "height", "width"), [(1, 16, 16), (2, 12, 20)])
def test_quarter_turns_are_rot90(quarters: int, height: int, width: int) -> None:
    pixels = images(height=height, width=width)
    turned = apply_weak_augmentation(pixels, AugmentationSpec(rotation=quarters / 4), every_image(turn=1.0))
    torch.testing.assert_close(turned, pixels.rot90(quarters, (2, 3)), rtol=0, atol=0.01)


def test_an_oblong_image_is_turned_without_being_sheared() -> None:
    pixels = images(height=12, width=20)
    turned = apply_weak_augmentation(pixels, AugmentationSpec(rotation=0.25), every_image(turn=1.0))
    inner = pixels[..., 4:16].rot90(1, (2, 3))  # the middle square, as wide as the image is high
    torch.testing.assert_close(turned[..., 4:16], inner, rtol=0, atol=0.01)


def test_a_shift_by_whole_pixels_moves_them_and_mirrors_the_edge_in() -> None:
    moved = apply_weak_augmentation(images(), AugmentationSpec(translate=0.125), every_image(down=1.0))  # 2 of 16 rows
    expected = torch.cat((images()[:, :, 2:], images()[:, :, 14:].flip(2)), 2)
    torch.testing.assert_close(moved, expected, rtol=0, atol=0.01)


def test_height_and_width_are_zoomed_independently() -> None:
    ramp = torch.arange(16.0).expand(6, 1, 16, 16)
    narrower = every_image(width=0.0)  # 1 - 0.5 of the width: the middle half fills the image
    expected = 7.5 + (torch.arange(16.0) - 7.5) / 2
    zoomed = apply_weak_augmentation(ramp, AugmentationSpec(zoom=0.5), narrower)
    torch.testing.assert_close(zoomed, expected.expand(6, 1, 16, 16))
    torch.testing.assert_close(apply_weak_augmentation(ramp.mT, AugmentationSpec(zoom=0.5), narrower), ramp.mT)


@settings(max_examples=40)
@given(
    rotation=st.floats(0, 0.5),
    horizontal_flip=st.booleans(),
    zoom=st.floats(0, 0.99),
    contrast=st.floats(0, 1),
    translate=st.floats(0, 1),
    channels=st.sampled_from([1, 3]),
)
def test_every_setting_keeps_shape_and_finite_values(channels: int, **settings: Any) -> None:
    pixels = images(channels=channels, height=9, width=14)
    result = augment_images_weakly(pixels, AugmentationSpec(**settings), seeded())
    assert result.shape == pixels.shape
    assert bool(result.isfinite().all())


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_moving_pixels_about_makes_no_new_extremes(seed: int) -> None:
    for spec in (FEDMLP_WEAK, SURGICAL.model_copy(update={"contrast": 0.0})):
        result = augment_images_weakly(images(), spec, seeded(seed))
        assert float(result.min()) >= float(images().min()) - 0.01
        assert float(result.max()) <= float(images().max()) + 0.01


# ---------------------------------------------------------------------- RandAugment and Cutout by batch

NAMES = list(RANDOM_CHANGES)


def drawn(name: str, strength: float, images: int = 1) -> Tensor:
    """Draws of one change, then of none; the square's middle in the upper left corner."""
    which, nothing = ((NAMES.index(change) + 0.5) / len(NAMES) for change in (name, "identity"))
    return torch.tensor([which, strength, nothing, 0.5, 0.0, 0.0])[:, None].repeat(1, images)


def corner(name: str, strength: float, pixels: list[list[float]]) -> Tensor:
    """What becomes of a 16 x 16 image whose lower right 2 x 2 are these pixels, there; all else is 10."""
    image = torch.full((1, 1, 16, 16), 10.0)
    image[..., -2:, -2:] = torch.tensor(pixels)
    return apply_strong_augmentation(image, drawn(name, strength))[0, 0, -2:, -2:]


def noise(channels: int = 1) -> Tensor:
    return images(channels=channels, width=20)


@pytest.mark.parametrize(
    ("middle", "square"),
    [(0.5, (slice(4, 12), slice(6, 14))), (0.0, (slice(4), slice(4)))],
    ids=["whole", "cut_off_at_the_edge"],
)
def test_a_square_of_half_the_shorter_side_becomes_grey_and_nothing_else_changes(
    middle: float, square: tuple[slice, slice]
) -> None:
    images, draws = noise(), drawn("identity", 0.5, 6)
    draws[-2:] = middle
    changed = apply_strong_augmentation(images, draws)
    assert (changed[:, :, *square] == HOLE_VALUE).all()
    assert int((changed != images).sum()) == changed[:, :, *square].numel()


LEVELS = [[200.0, 17], [15, 255]]


@pytest.mark.parametrize(
    ("name", "strength", "pixels", "expected"),
    [
        ("solarized", 0.5, [[127, 128], [200, 0]], [[127, 127], [55, 0]]),  # turned from 256 * 0.5 = 128 on
        ("posterized", 0.0, LEVELS, [[192, 16], [0, 240]]),  # four bits at least
        ("posterized", 0.99, LEVELS, LEVELS),  # all eight at most
        ("brightness", 0.0, [[100, 40], [0, 255]], [[5, 2], [0, 12.75]]),  # a twentieth at least
        ("brightness", 0.5, [[100, 40], [0, 255]], [[50, 20], [0, 127.5]]),  # 0.05 + 0.9 * 0.5 = 0.5
        # half the distance from the mean (252 * 10 + 4 * 74) / 256 = 11; 74 -> 11 + 63 / 2
        ("contrast", 0.5, [[74, 74], [74, 74]], [[42.5, 42.5], [42.5, 42.5]]),
        # 10 -> 0, 61 -> 255: five times the distance from 10
        ("autocontrast", 0.3, [[61, 20], [10, 30]], [[255, 50], [0, 100]]),
        ("autocontrast", 0.3, [[10, 10], [10, 10]], [[10, 10], [10, 10]]),  # a flat image stays
    ],
)
def test_a_change_by_hand(name: str, strength: float, pixels: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(corner(name, strength, pixels), torch.tensor(expected, dtype=torch.float32))


def test_sharpness_blends_with_the_smoothed_image() -> None:
    # Last pixel, edges repeated: itself 4 times, each neighbour twice and once: (5 * 23 + 3 * 23 + 5 * 10) / 13 = 18
    assert float(corner("sharpness", 0.5, [[10, 10], [10, 23]])[1, 1]) == pytest.approx((23 + 18) / 2)


def test_translation_moves_the_image_by_up_to_three_tenths() -> None:
    image = torch.zeros(1, 1, 20, 20)
    image[0, 0, :, 10] = 200
    left = apply_strong_augmentation(image, drawn("translated_x", 1.0))[0, 0, -1]
    right = apply_strong_augmentation(image, drawn("translated_x", 0.0))[0, 0, -1]
    assert (int(left.argmax()), int(right.argmax())) == (4, 16)


@pytest.mark.parametrize("name", ["rotated", "sheared_x", "sheared_y", "translated_x", "translated_y"])
def test_half_the_strength_of_a_movement_is_none(name: str) -> None:
    images = noise()
    still = apply_strong_augmentation(images, drawn("identity", 0.5, 6))
    torch.testing.assert_close(apply_strong_augmentation(images, drawn(name, 0.5, 6)), still, atol=1e-2, rtol=0)
    assert not torch.allclose(apply_strong_augmentation(images, drawn(name, 0.9, 6)), still, atol=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_change_stays_within_the_range(name: str) -> None:
    for channels in (1, 3):
        changed = apply_strong_augmentation(noise(channels), drawn(name, 0.8, 6))
        assert changed.shape == (6, channels, 16, 20)
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 255


def test_an_images_changes_do_not_depend_on_its_neighbours() -> None:
    images, draws = noise(3), torch.rand((6, 6), generator=torch.Generator().manual_seed(4))
    together = apply_strong_augmentation(images, draws)
    alone = [apply_strong_augmentation(images[i : i + 1], draws[:, i : i + 1]) for i in range(6)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_the_generator_alone_decides() -> None:
    first, other = (augment_images_strongly(noise(), seeded(seed)) for seed in (5, 6))
    torch.testing.assert_close(first, augment_images_strongly(noise(), seeded(5)))
    assert not torch.equal(first, other)


@pytest.mark.parametrize("shape", [(3, 1, 16, 16), (2, 3, 7, 5), (1, 1, 1, 1), (2, 3, 90, 64)])
def test_equalized_images_are_those_of_torchvision(shape: tuple[int, int, int, int]) -> None:
    from torchvision.transforms.v2.functional import equalize  # here: the import takes seconds

    generator = seeded(5)
    evenly = torch.rand(shape, generator=generator) * 255
    few_values = torch.randint(0, 3, shape, generator=generator).float() * 100
    mostly_black = (torch.rand(shape, generator=generator) < 0.05) * 255.0
    for pixels in (evenly, few_values, mostly_black, torch.full(shape, 9.0)):
        ours = RANDOM_CHANGES["equalized"](pixels, torch.zeros(len(pixels)))
        assert torch.equal(ours, equalize(pixels.round().to(torch.uint8)).to(pixels))


# ---------------------------------------------------------------------- volumes


def every_volume(**changed: float) -> Tensor:
    """The same random numbers for two volumes; no change but those that are named."""
    order = ("turn", "down", "right", "height", "width", "contrast", "mirror", "depth_shift", "depth")
    draws = {**dict.fromkeys(order, 0.5), "mirror": 0.9, **changed}
    return torch.tensor([draws[name] for name in order])[:, None].expand(9, 2)


def volumes(depth: int = 6, height: int = 8, width: int = 8) -> Tensor:
    return torch.rand(2, 1, depth, height, width, generator=torch.Generator().manual_seed(7)) * 255


def test_volumes_whose_random_numbers_are_in_the_middle_stay_as_they_are() -> None:
    pixels = volumes()
    spec = AugmentationSpec(rotation=0.25, zoom=0.5, translate=0.25, contrast=0.5)
    torch.testing.assert_close(apply_weak_augmentation(pixels, spec, every_volume()), pixels, atol=1e-2, rtol=1e-3)


def test_a_volume_is_mirrored_from_right_to_left_alone_or_with_other_changes() -> None:
    pixels = volumes()
    flipped = apply_weak_augmentation(pixels, AugmentationSpec(horizontal_flip=True), every_volume(mirror=0.1))
    assert torch.equal(flipped, pixels.flip(4))
    spec = AugmentationSpec(horizontal_flip=True, zoom=0.5)
    moved = apply_weak_augmentation(pixels, spec, every_volume(mirror=0.1))
    torch.testing.assert_close(moved, pixels.flip(4), atol=1e-2, rtol=1e-3)


def test_a_quarter_turn_of_a_volume_turns_each_axial_slice_as_a_picture() -> None:
    pixels = volumes()
    spec = AugmentationSpec(rotation=0.25)
    turned = apply_weak_augmentation(pixels, spec, every_volume(turn=1))
    as_pictures = apply_weak_augmentation(pixels[0].transpose(0, 1), spec, every_image(turn=1))
    torch.testing.assert_close(turned[0].transpose(0, 1), as_pictures, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(("name", "axis"), [("depth_shift", 2), ("down", 3), ("right", 4)])
def test_a_shift_moves_a_volume_by_a_share_of_its_side(name: str, axis: int) -> None:
    pixels = volumes(8, 8, 8)
    moved = apply_weak_augmentation(pixels, AugmentationSpec(translate=0.25), every_volume(**{name: 1}))
    # By 2 of 8 voxels, from where the grid is read: the front moves out of sight.
    inside = moved.narrow(axis, 0, 6), pixels.narrow(axis, 2, 6)
    torch.testing.assert_close(*inside, atol=1e-2, rtol=1e-3)


def test_contrast_of_a_volume_is_around_its_own_mean_worked_by_hand() -> None:
    pixels = torch.tensor([0.0, 40.0, 80.0, 120.0]).reshape(1, 1, 1, 2, 2).repeat(2, 1, 1, 1, 1)  # mean 60
    changed = apply_weak_augmentation(pixels, AugmentationSpec(contrast=0.5), every_volume(contrast=0.0))
    assert changed[0].flatten().tolist() == [30, 50, 70, 90]  # half the distance from 60


def test_turning_one_change_of_volumes_off_does_not_alter_the_others() -> None:
    pixels = volumes()
    both = augment_images_weakly(pixels, AugmentationSpec(horizontal_flip=True, contrast=0.5), seeded())
    flip = augment_images_weakly(pixels, AugmentationSpec(horizontal_flip=True), seeded())
    lifted = [
        bool((one - one.mean()).sign().equal((other - other.mean()).sign()))
        for one, other in zip(both, flip, strict=True)
    ]
    assert lifted == [True, True]
