from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.data.base.spec import AugmentationSpec
from common.data.images.augmentation import apply_weak_augmentation, augment_weakly

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
    assert augment_weakly(pixels, AugmentationSpec(), seeded()) is pixels


def test_the_same_generator_gives_the_same_images_and_leaves_the_originals_alone() -> None:
    pixels = images()
    before = pixels.clone()
    assert torch.equal(augment_weakly(pixels, SURGICAL, seeded()), augment_weakly(pixels, SURGICAL, seeded()))
    assert not torch.equal(augment_weakly(pixels, SURGICAL, seeded()), augment_weakly(pixels, SURGICAL, seeded(1)))
    assert torch.equal(pixels, before)


def test_a_flip_alone_is_exact_and_takes_about_every_other_image() -> None:
    pixels = images(batch=400)
    flipped = augment_weakly(pixels, AugmentationSpec(horizontal_flip=True), seeded())
    mirrored = (flipped == pixels.flip(3)).flatten(1).all(1)
    same = (flipped == pixels).flatten(1).all(1)
    assert bool((mirrored ^ same).all())
    assert 150 < int(mirrored.sum()) < 250


def test_the_grid_flips_as_the_shortcut_does() -> None:
    shortcut = augment_weakly(images(), AugmentationSpec(horizontal_flip=True), seeded())
    grid = augment_weakly(images(), AugmentationSpec(horizontal_flip=True, translate=1e-9), seeded())
    torch.testing.assert_close(grid, shortcut, rtol=0, atol=0.01)


def test_contrast_keeps_the_mean_of_every_channel_and_scales_by_at_most_its_factor() -> None:
    pixels = images(channels=3)
    result = augment_weakly(pixels, AugmentationSpec(contrast=0.75), seeded())
    torch.testing.assert_close(result.mean((2, 3)), pixels.mean((2, 3)))
    factors = result.std((2, 3)) / pixels.std((2, 3))
    assert bool(((factors > 0.25) & (factors < 1.75)).all())
    torch.testing.assert_close(factors[:, 0], factors[:, 1])  # one factor per image


def test_a_quarter_turn_is_rot90() -> None:
    turned = apply_weak_augmentation(images(), AugmentationSpec(rotation=0.25), every_image(turn=1.0))
    torch.testing.assert_close(turned, images().rot90(1, (2, 3)), rtol=0, atol=0.01)


def test_a_half_turn_of_an_oblong_image_mirrors_both_sides() -> None:
    pixels = images(height=12, width=20)
    turned = apply_weak_augmentation(pixels, AugmentationSpec(rotation=0.5), every_image(turn=1.0))
    torch.testing.assert_close(turned, pixels.flip(2, 3), rtol=0, atol=0.01)


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


def test_turning_one_change_off_leaves_the_others_as_they_were() -> None:
    flip_only = augment_weakly(images(), AugmentationSpec(horizontal_flip=True), seeded())
    with_contrast = augment_weakly(images(), AugmentationSpec(horizontal_flip=True, contrast=1e-7), seeded())
    torch.testing.assert_close(with_contrast, flip_only, rtol=0, atol=0.001)


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
    result = augment_weakly(pixels, AugmentationSpec(**settings), seeded())
    assert result.shape == pixels.shape
    assert bool(result.isfinite().all())


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_moving_pixels_about_makes_no_new_extremes(seed: int) -> None:
    for spec in (FEDMLP_WEAK, SURGICAL.model_copy(update={"contrast": 0.0})):
        result = augment_weakly(images(), spec, seeded(seed))
        assert float(result.min()) >= float(images().min()) - 0.01
        assert float(result.max()) <= float(images().max()) + 0.01
