import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.grey import apply_voi_window
from polyclinic.data.images.reading import (
    DecodedImageFormat,
    decode_picture,
    fit_picture_to_format,
    resize_images,
)
from polyclinic.data.images.store import decode_pictures
from tests.data.dicom_files import decode_dicom_pixels, dicom


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("pixels", "depth", "expected"),
    [
        (np.array([[0, 65535, 32768]], np.uint16), 16, [0, 255, 128]),
        (np.array([[0, 4095, 2048]], np.uint16), 12, [0, 255, 128]),
        (np.array([[0, 200, 100]], np.uint16), 8, [0, 200, 100]),
        (np.array([[[7, 255], [9, 128]]], np.uint8), None, [7, 9]),  # grey with alpha stays grey
        (np.array([[True, False]]), None, [255, 0]),
    ],
)
def test_grey_pictures_of_any_depth_get_8_bits(pixels: NDArray[Any], depth: int | None, expected: list[int]) -> None:
    shown = decode_picture(encoded(Image.fromarray(pixels)), PictureRenderingOptions(bit_depth=depth))
    assert np.asarray(shown).tolist() == [expected]


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_colour_pictures_of_any_mode_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (2, 1), (250, 20, 10)).convert(mode)
    assert decode_picture(encoded(image)).mode == "RGB"
    red, green, blue = np.asarray(decode_picture(encoded(image)))[0, 0].astype(int)
    assert red > green + 150
    assert red > blue + 150


def test_a_jpeg_is_known_by_its_content() -> None:
    assert decode_picture(encoded(Image.new("L", (3, 2), 77), "JPEG")).size == (3, 2)


@pytest.mark.parametrize("size", [(10, 4), (4, 10), (7, 7), (300, 1)])
def test_pictures_keep_their_aspect_ratio_inside_a_square(size: tuple[int, int]) -> None:
    square = fit_picture_to_format(Image.new("L", size, 255), DecodedImageFormat(8, color=False, resize="pad"))
    rows, columns = (square > 0).any(axis=1).sum(), (square > 0).any(axis=0).sum()
    assert max(rows, columns) == 8
    assert (columns, rows) == tuple(max(1, round(side * 8 / max(size))) for side in size)


def test_images_of_the_wanted_size_are_not_copied() -> None:
    images = np.zeros((2, 5, 5), dtype=np.uint8)
    assert resize_images(images, 5, "pad") is images
    assert resize_images(images, None, "pad") is images


def test_skipped_pictures_leave_no_gap(tmp_path: Path) -> None:
    data = [encoded(Image.new("L", (2, 2), value)) for value in (10, 20, 30)]
    data.insert(1, b"")
    decoded = decode_pictures(["a", "b", "c", "d"], data.__getitem__, DecodedImageFormat(2, color=False, resize="pad"))
    assert decoded.images[:, 0, 0].tolist() == [10, 20, 30]
    assert decoded.rows.tolist() == [0, 2, 3]
    assert [skip.name for skip in decoded.skipped] == ["b"]


RAMP = np.array([[0, 1000, 2000, 4000]], dtype=np.uint16)


# Rescaled to -1000, 0, 1000, 3000; the first window is 0 +- 1000: below -1000.0 is black, above 999 is white.
WINDOWS = {"RescaleSlope": 1, "RescaleIntercept": -1000, "WindowCenter": [0, 50], "WindowWidth": [2000, 100]}


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ({}, [0, 64, 128, 255]),
        ({"PhotometricInterpretation": "MONOCHROME1"}, [255, 191, 128, 0]),
        (WINDOWS, [0, 128, 255, 255]),
    ],
)
def test_dicom_is_shown_in_its_first_window_or_its_whole_range(elements: dict[str, Any], expected: list[int]) -> None:
    assert decode_dicom_pixels(dicom(RAMP, **elements)).tolist() == [expected]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # width 4 about 10: LINEAR is (x - 9.5) / 3 + 0.5, LINEAR_EXACT is (x - 10) / 4 + 0.5, both cut at 0 and 1.
        ("LINEAR", [0.0, 1 / 3, 2 / 3, 1.0]),
        ("LINEAR_EXACT", [0.0, 0.25, 0.5, 1.0]),
        ("SIGMOID", [1 / (1 + np.exp(2)), 1 / (1 + np.e), 0.5, 1 / (1 + np.exp(-2))]),
    ],
)
def test_windows_follow_the_standards_functions(function: str, expected: list[float]) -> None:
    np.testing.assert_allclose(apply_voi_window(np.array([8, 9, 10, 12]), 10, 4, function), expected)


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: lambda a: np.rot90(a),
}
"""What EXIF 2.3, section 4.6.4, has a viewer do with the stored rows, by the orientation's number."""


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(("kind", "mode"), [("PNG", "L"), ("PNG", "I;16"), ("JPEG", "L")])
def test_a_camera_that_was_turned_makes_no_turned_picture(orientation: int, kind: str, mode: str) -> None:
    stored = np.add.outer(np.arange(0, 80, 10), np.arange(0, 160, 10)).astype(np.uint8)  # (8, 16)
    image = Image.fromarray(stored if mode == "L" else stored.astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = io.BytesIO()
    image.save(content, kind, exif=exif, **({"quality": 100} if kind == "JPEG" else {}))
    picture = np.asarray(decode_picture(content.getvalue(), PictureRenderingOptions(bit_depth=16)))
    assert np.abs(picture.astype(int) - UPRIGHT[orientation](stored)).max() <= 1
