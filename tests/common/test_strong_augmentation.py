"""RandAugment and Cutout by batch: each change by hand, and what holds for all of them."""

import pytest
import torch

from common.data.images.augmentation import CHANGES, GREY, apply_strong_changes, augment_strongly

NAMES = list(CHANGES)


def drawn(name: str, strength: float, images: int = 1) -> torch.Tensor:
    """Draws of one change, then of none; the square's middle in the upper left corner."""
    which, nothing = ((NAMES.index(one) + 0.5) / len(NAMES) for one in (name, "identity"))
    return torch.tensor([which, strength, nothing, 0.5, 0.0, 0.0])[:, None].repeat(1, images)


def corner(name: str, strength: float, pixels: list[list[float]]) -> torch.Tensor:
    """What becomes of a 16 x 16 image whose lower right 2 x 2 are these pixels, there; all else is 10."""
    image = torch.full((1, 1, 16, 16), 10.0)
    image[..., -2:, -2:] = torch.tensor(pixels)
    return apply_strong_changes(image, drawn(name, strength))[0, 0, -2:, -2:]


def noise(channels: int = 1) -> torch.Tensor:
    return torch.rand((6, channels, 16, 20), generator=torch.Generator().manual_seed(1)) * 255


def test_a_square_of_half_the_shorter_side_becomes_grey_and_nothing_else_changes() -> None:
    images, draws = noise(), drawn("identity", 0.5, 6)
    draws[-2:] = 0.5
    changed = apply_strong_changes(images, draws)
    assert (changed[:, :, 4:12, 6:14] == GREY).all()
    assert int((changed != images).sum()) == 6 * 8 * 8


def test_a_square_at_the_edge_is_cut_off() -> None:
    images = noise()
    changed = apply_strong_changes(images, drawn("identity", 0.5, 6))
    assert (changed[:, :, :4, :4] == GREY).all()
    assert int((changed != images).sum()) == 6 * 4 * 4


def test_solarizing_turns_pixels_from_the_threshold_on() -> None:
    # 256 * 0.5 = 128
    torch.testing.assert_close(corner("solarized", 0.5, [[127, 128], [200, 0]]), torch.tensor([[127.0, 127], [55, 0]]))


def test_posterizing_keeps_four_bits_at_least_and_all_eight_at_most() -> None:
    pixels = [[200.0, 17], [15, 255]]
    torch.testing.assert_close(corner("posterized", 0.0, pixels), torch.tensor([[192.0, 16], [0, 240]]))
    torch.testing.assert_close(corner("posterized", 0.99, pixels), torch.tensor(pixels))


def test_brightness_keeps_a_twentieth_at_least() -> None:
    torch.testing.assert_close(corner("brightness", 0.0, [[100, 40], [0, 255]]), torch.tensor([[5, 2], [0, 12.75]]))
    # 0.05 + 0.9 * 0.5 = 0.5
    torch.testing.assert_close(corner("brightness", 0.5, [[100, 40], [0, 255]]), torch.tensor([[50, 20], [0, 127.5]]))


def test_contrast_keeps_half_the_distance_from_the_mean_at_strength_a_half() -> None:
    # mean (252 * 10 + 4 * 74) / 256 = 11; 74 -> 11 + 63 / 2
    torch.testing.assert_close(corner("contrast", 0.5, [[74, 74], [74, 74]]), torch.full((2, 2), 42.5))


def test_autocontrast_stretches_to_all_of_the_range_and_leaves_a_flat_image() -> None:
    # 10 -> 0, 61 -> 255: five times the distance from 10
    torch.testing.assert_close(corner("autocontrast", 0.3, [[61, 20], [10, 30]]), torch.tensor([[255.0, 50], [0, 100]]))
    torch.testing.assert_close(corner("autocontrast", 0.3, [[10, 10], [10, 10]]), torch.full((2, 2), 10.0))


def test_sharpness_blends_with_the_smoothed_image() -> None:
    # Last pixel, edges repeated: itself 4 times, each neighbour twice and once: (5 * 23 + 3 * 23 + 5 * 10) / 13 = 18
    assert float(corner("sharpness", 0.5, [[10, 10], [10, 23]])[1, 1]) == pytest.approx((23 + 18) / 2)


def test_translation_moves_the_image_by_up_to_three_tenths() -> None:
    image = torch.zeros(1, 1, 20, 20)
    image[0, 0, :, 10] = 200
    left = apply_strong_changes(image, drawn("translated_x", 1.0))[0, 0, -1]
    right = apply_strong_changes(image, drawn("translated_x", 0.0))[0, 0, -1]
    assert (int(left.argmax()), int(right.argmax())) == (4, 16)


@pytest.mark.parametrize("name", ["rotated", "sheared_x", "sheared_y", "translated_x", "translated_y"])
def test_half_the_strength_of_a_movement_is_none(name: str) -> None:
    images = noise()
    still = apply_strong_changes(images, drawn("identity", 0.5, 6))
    torch.testing.assert_close(apply_strong_changes(images, drawn(name, 0.5, 6)), still, atol=1e-2, rtol=0)
    assert not torch.allclose(apply_strong_changes(images, drawn(name, 0.9, 6)), still, atol=1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_change_stays_within_the_range(name: str, channels: int) -> None:
    changed = apply_strong_changes(noise(channels), drawn(name, 0.8, 6))
    assert changed.shape == (6, channels, 16, 20)
    assert float(changed.min()) >= 0
    assert float(changed.max()) <= 255


def test_an_images_changes_do_not_depend_on_its_neighbours() -> None:
    images, draws = noise(3), torch.rand((6, 6), generator=torch.Generator().manual_seed(4))
    together = apply_strong_changes(images, draws)
    alone = [apply_strong_changes(images[i : i + 1], draws[:, i : i + 1]) for i in range(6)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_the_generator_alone_decides() -> None:
    one, two = (augment_strongly(noise(), torch.Generator().manual_seed(seed)) for seed in (5, 6))
    torch.testing.assert_close(one, augment_strongly(noise(), torch.Generator().manual_seed(5)))
    assert not torch.equal(one, two)
