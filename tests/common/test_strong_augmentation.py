"""RandAugment and Cutout by batch: each change by hand, and what holds for all of them."""

import pytest
import torch

from common.data.images.augmentation import CHANGES, GREY, apply_strong_augmentation, augment_strongly

NAMES = list(CHANGES)


def drawn(name: str, strength: float, images: int = 1) -> torch.Tensor:
    """Draws of one change, then of none; the square's middle in the upper left corner."""
    which, nothing = ((NAMES.index(change) + 0.5) / len(NAMES) for change in (name, "identity"))
    return torch.tensor([which, strength, nothing, 0.5, 0.0, 0.0])[:, None].repeat(1, images)


def corner(name: str, strength: float, pixels: list[list[float]]) -> torch.Tensor:
    """What becomes of a 16 x 16 image whose lower right 2 x 2 are these pixels, there; all else is 10."""
    image = torch.full((1, 1, 16, 16), 10.0)
    image[..., -2:, -2:] = torch.tensor(pixels)
    return apply_strong_augmentation(image, drawn(name, strength))[0, 0, -2:, -2:]


def noise(channels: int = 1) -> torch.Tensor:
    return torch.rand((6, channels, 16, 20), generator=torch.Generator().manual_seed(1)) * 255


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
    assert (changed[:, :, *square] == GREY).all()
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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_change_stays_within_the_range(name: str, channels: int) -> None:
    changed = apply_strong_augmentation(noise(channels), drawn(name, 0.8, 6))
    assert changed.shape == (6, channels, 16, 20)
    assert float(changed.min()) >= 0
    assert float(changed.max()) <= 255


def test_an_images_changes_do_not_depend_on_its_neighbours() -> None:
    images, draws = noise(3), torch.rand((6, 6), generator=torch.Generator().manual_seed(4))
    together = apply_strong_augmentation(images, draws)
    alone = [apply_strong_augmentation(images[i : i + 1], draws[:, i : i + 1]) for i in range(6)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_the_generator_alone_decides() -> None:
    first, other = (augment_strongly(noise(), torch.Generator().manual_seed(seed)) for seed in (5, 6))
    torch.testing.assert_close(first, augment_strongly(noise(), torch.Generator().manual_seed(5)))
    assert not torch.equal(first, other)
