"""JPEG and PNG, as files and in DICOM: whole pictures only, true colours, all 16 bits."""

import io
import re
import struct
import zlib
from typing import Any

import imagecodecs
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import uid

from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.jpeg import END_OF_IMAGE
from polyclinic.data.images.reading import DecodedImageFormat, decode_picture, fit_picture_to_format
from tests.data.bombs import png
from tests.data.conftest import long
from tests.data.dicom_files import decode_dicom_pixels
from tests.data.dicom_syntaxes import in_fragments, plain

PHOTO = np.add.outer(np.arange(96), np.arange(72)).astype(np.uint8) + np.random.default_rng(0).integers(0, 60, (96, 72))
GREY = PHOTO.clip(0, 255).astype(np.uint8)
COLOR = np.stack([GREY, GREY[::-1], 255 - GREY], -1)


def jpeg(pixels: NDArray[np.uint8], **settings: Any) -> bytes:
    Image.fromarray(pixels).save(content := io.BytesIO(), "JPEG", **{"quality": 90, **settings})
    return content.getvalue()


KINDS: dict[str, bytes] = {
    "grey": jpeg(GREY),
    "colour": jpeg(COLOR),
    "colour, all samples": jpeg(COLOR, subsampling=0),
    "RGB": jpeg(COLOR, keep_rgb=True),
    "progressive": jpeg(GREY, progressive=True),
    "progressive colour": jpeg(COLOR, progressive=True),
    "restart markers": jpeg(GREY, restart_marker_blocks=3),
    "one colour": jpeg(np.full((64, 64), 90, np.uint8)),
    "odd size": jpeg(GREY[:61, :33]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_jpeg_is_what_pillow_makes_of_it_with_and_without_its_end_marker(kind: str) -> None:
    expected = np.asarray(Image.open(io.BytesIO(KINDS[kind])))
    for content in (KINDS[kind], KINDS[kind][:-2], KINDS[kind] + b"another picture\xff\xd8\xff\xd9"):
        assert (np.asarray(decode_picture(content)) == expected).all()


BASELINE, PROGRESSIVE = ({}, {"subsampling": 0}, {"subsampling": 2}), {"progressive": True}


@pytest.mark.parametrize(
    ("settings", "gone"),
    [*((each, gone) for each in BASELINE for gone in (1, 2, 7, 8, 16)), *((PROGRESSIVE, gone) for gone in (1, 2, 7))],
)
@pytest.mark.parametrize("pixels", [GREY, COLOR, GREY[:61, :33]], ids=["grey", "colour", "odd"])
def test_a_jpeg_without_a_part_between_two_restart_markers_is_refused(
    settings: dict[str, Any], pixels: NDArray[np.uint8], gone: int
) -> None:
    """The eight numbers of the markers begin again, so eight parts that are missing show by their count alone."""
    content = jpeg(pixels, restart_marker_blocks=1, **settings)
    assert (np.asarray(decode_picture(content)) == np.asarray(Image.open(io.BytesIO(content)))).all()
    parts = re.split(rb"(?=\xff[\xd0-\xd7])", content)
    with pytest.raises(ValueError, match="cut off"):
        decode_picture(b"".join(parts[:2] + parts[2 + gone :]))


ENDS = {
    "none": b"",
    "a mark": END_OF_IMAGE,
    "filled up": b"\xff\xff" + END_OF_IMAGE,
    "zeros": bytes(400),
    "zeros and a mark": bytes(40) + END_OF_IMAGE,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.3, 0.97, *long((0.5, 0.7, 0.9))])
@pytest.mark.parametrize("end", ENDS)
def test_a_cut_jpeg_is_refused_also_with_an_end_marker(kind: str, share: float, end: str) -> None:
    """Zeros behind the cut are what a copy leaves that broke off on a disk."""
    data = KINDS[kind]
    first = data.index(b"\xff\xda") + 20
    place = first + int(share * (len(data) - 2 - first))
    with pytest.raises(ValueError, match=r"damaged or cut off|of the picture is missing"):
        decode_picture(data[:place] + ENDS[end])


@pytest.mark.parametrize("settings", [*BASELINE, {"restart_marker_blocks": 40}, {"optimize": True}])
@pytest.mark.parametrize("pixels", [GREY, COLOR], ids=["grey", "colour"])
def test_a_jpeg_with_zeros_over_a_part_of_it_is_refused(settings: dict[str, Any], pixels: NDArray[np.uint8]) -> None:
    """A sector of a disk that was not written; the zeros are code words, and libjpeg decodes them."""
    data = jpeg(np.tile(pixels, (4, 4, 1)[: pixels.ndim]), **settings)
    assert decode_picture(data).size == (4 * 72, 4 * 96)
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    with pytest.raises(ValueError, match="damaged"):
        decode_picture(data[:middle] + bytes(512) + data[middle + 512 :])


@pytest.mark.parametrize("side", [1, 8, 16])
@pytest.mark.parametrize("grey", [3, 97, 255])
def test_a_small_picture_whose_data_are_a_byte_or_two_is_read(side: int, grey: int) -> None:
    content = io.BytesIO()
    Image.fromarray(np.full((side, side), grey, np.uint8)).save(content, "JPEG", quality=10, optimize=True)
    assert len(content.getvalue()) < 210
    shown = np.asarray(Image.open(io.BytesIO(content.getvalue())))
    np.testing.assert_array_equal(np.asarray(decode_picture(content.getvalue())), shown)


@pytest.mark.parametrize("settings", [{}, {"optimize": True}, {"optimize": True, "progressive": True}])
@pytest.mark.parametrize("grey", [0, 90, 255])
def test_an_even_picture_is_read_though_its_packed_data_may_be_zeros(grey: int, settings: dict[str, Any]) -> None:
    picture = np.full((2048, 2048), grey, np.uint8)
    picture[:4] = 255 - picture[:4]  # so that there are several code words
    data = jpeg(picture, **settings)
    assert (np.asarray(decode_picture(data)) == np.asarray(Image.open(io.BytesIO(data)))).all()


def without_markers(data: bytes) -> bytes:
    """The JPEG without its JFIF and Adobe markers."""
    out, place = data[:2], 2
    while data[place + 1] != 0xDA:
        size = struct.unpack_from(">H", data, place + 2)[0] + 2
        out += b"" if data[place + 1] in (0xE0, 0xEE) else data[place : place + size]
        place += size
    return out + data[place:]


FLAT = np.zeros((36, 52, 3), np.uint8)
FLAT[:18], FLAT[18:] = (200, 40, 30), (30, 60, 190)
YCC = jpeg(FLAT, subsampling=0)
RGB_NO_IDS = without_markers(jpeg(FLAT, keep_rgb=True)).replace(b"R\x11\0G\x11\0B\x11\0", b"\1\x11\0\2\x11\0\3\x11\0")
RGB_NO_IDS = RGB_NO_IDS.replace(b"\3R\0G\0B\0", b"\3\1\0\2\0\3\0")
STREAMS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "JFIF": (YCC, ("RGB", "YBR_FULL", "YBR_FULL_422")),
    "JFIF, subsampled": (jpeg(FLAT, subsampling=2), ("RGB", "YBR_FULL_422")),
    "no marker, subsampled": (without_markers(jpeg(FLAT, subsampling=2)), ("RGB", "YBR_FULL_422")),
    "Adobe RGB": (jpeg(FLAT, keep_rgb=True), ("RGB", "YBR_FULL_422")),
    "components R, G, B": (without_markers(jpeg(FLAT, keep_rgb=True)), ("RGB", "YBR_FULL_422")),
    "no marker, YCbCr as the file says": (without_markers(YCC), ("YBR_FULL", "YBR_FULL_422")),
    "no marker, RGB as the file says": (RGB_NO_IDS, ("RGB",)),
}


@pytest.mark.filterwarnings("ignore:.*Photometric Interpretation.*:UserWarning")
@pytest.mark.parametrize(("kind", "tag"), [(kind, tag) for kind in STREAMS for tag in STREAMS[kind][1]])
def test_colours_of_a_jpeg_are_true_whatever_the_dicom_file_calls_them(kind: str, tag: str) -> None:
    data = in_fragments(plain(FLAT, 8), STREAMS[kind][0], syntax=uid.JPEGBaseline8Bit, PhotometricInterpretation=tag)
    assert np.abs(decode_dicom_pixels(data).astype(int) - FLAT)[[4, 30]].max() <= 6


DEEP = (np.arange(64, dtype=np.uint16) * 64).reshape(8, 8)  # 12 bits


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
@pytest.mark.parametrize("depth", [12, 14, 16])
def test_16_bit_pngs_of_every_colour_type_are_read_by_the_one_depth_of_the_data_set(samples: int, depth: int) -> None:
    pixels = DEEP if samples == 1 else np.stack([DEEP] * samples, -1)
    shown = np.asarray(decode_picture(imagecodecs.png_encode(pixels), PictureRenderingOptions(bit_depth=depth)))
    expected = np.round(DEEP * (255 / ((1 << depth) - 1)))
    assert shown.shape == ((8, 8) if samples <= 2 else (8, 8, 3))
    assert (shown.reshape(8, 8, -1) == expected[..., None]).all()


def test_a_16_bit_png_is_never_read_by_its_own_brightest_pixel() -> None:
    for brightest in (300, 1008, 1024, 4095):
        dark = np.full((8, 8), 100, np.uint16)
        dark[7, 7] = brightest
        assert decode_picture(imagecodecs.png_encode(dark), PictureRenderingOptions(bit_depth=12)).getpixel((0, 0)) == 6
        with pytest.raises(ValueError, match=r"data.bit_depth must say"):
            decode_picture(imagecodecs.png_encode(dark))
    with pytest.raises(ValueError, match=r"a sample is 4096, which does not fit into the 12 bits that data.bit_depth"):
        decode_picture(imagecodecs.png_encode(DEEP + 64), PictureRenderingOptions(bit_depth=12))


def test_a_png_that_says_that_its_samples_fill_16_bits_is_not_read_as_12() -> None:
    """The sBIT chunk of the PNG standard: 12 significant bits, scaled up to 16."""
    data, chunk = imagecodecs.png_encode(DEEP), b"sBIT\x0c"
    chunk = struct.pack(">I", 1) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data = data[:33] + chunk + data[33:]
    assert decode_picture(data, PictureRenderingOptions(bit_depth=16)).getpixel((7, 7)) == round(4032 * 255 / 65535)
    with pytest.raises(ValueError, match=r"sBIT chunk, so its samples fill 16 bits; data.bit_depth must be 16"):
        decode_picture(data, PictureRenderingOptions(bit_depth=12))


@pytest.mark.parametrize("rows", [0, 4, 7])
def test_a_png_with_rows_missing_is_refused_also_where_its_chunks_are_whole(rows: int) -> None:
    packed = zlib.compress(bytes(9 * rows))
    with pytest.raises(ValueError, match="damaged or cut off"):
        decode_picture(png(8, 8, (b"IDAT", packed)))
    assert decode_picture(png(8, 8, (b"IDAT", zlib.compress(bytes(9 * 8))))).size == (8, 8)


@pytest.mark.parametrize("size", [(640, 480), (480, 640), (300, 260), (224, 224)])
def test_draft_decodes_a_jpeg_smaller_with_nearly_the_same_picture(size: tuple[int, int]) -> None:
    y, x = np.mgrid[: size[1], : size[0]]
    data = jpeg((127 + 100 * np.sin(x / 40) * np.cos(y / 30)).astype(np.uint8))
    form = DecodedImageFormat(64, False, "pad")
    full, draft = (
        fit_picture_to_format(decode_picture(data, PictureRenderingOptions(jpeg_draft=draft), 64), form).astype(int)
        for draft in (False, True)
    )
    assert np.abs(full - draft).mean() < 2
    with pytest.raises(ValueError, match="of the picture is missing"):
        decode_picture(data[:-900] + END_OF_IMAGE, PictureRenderingOptions(jpeg_draft=True), 64)
