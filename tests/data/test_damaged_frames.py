"""Compressed pixels with a part missing are refused by what the codec says, and complete ones are read to the bit."""

import io
from collections.abc import Callable
from typing import Any

import imagecodecs
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread, uid
from pydicom.encaps import get_frame

from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.jpeg import END_OF_IMAGE
from polyclinic.data.images.reading import decode_picture
from tests.data.conftest import long
from tests.data.dicom_files import decode_dicom_pixels, dicom
from tests.data.dicom_syntaxes import by_gdcm, by_pydicom, in_fragments

VALUES = np.add.outer(np.arange(96), np.arange(80)) + np.random.default_rng(0).integers(0, 60, (96, 80))
DEEP = (VALUES * 16).astype(np.uint16)
SHALLOW = VALUES.clip(0, 255).astype(np.uint8)
WINDOW = PictureRenderingOptions(window=(2048, 4096))


def lossless(pixels: NDArray[Any], **settings: Any) -> bytes:
    if pixels.ndim == 3:
        settings |= {"colorspace": "rgb", "outcolorspace": "rgb"}
    frame = imagecodecs.jpeg8_encode(pixels, lossless=True, bitspersample=12 if pixels.ndim == 2 else 8, **settings)
    return bytes(frame)


def in_dicom(frame: bytes, syntax: str = uid.JPEGLosslessSV1, pixels: NDArray[Any] = DEEP, **elements: Any) -> bytes:
    return in_fragments(dicom(pixels, **elements), frame, syntax=syntax)


@pytest.mark.parametrize("predictor", range(1, 8))
@pytest.mark.parametrize("columns", [64, 67, *long((65, 66, 68, 69, 70, 71))])
def test_a_lossless_jpeg_with_a_black_lower_part_is_read_to_the_bit(predictor: int, columns: int) -> None:
    pixels = np.vstack([np.random.default_rng(columns).integers(0, 4096, (40, columns)), np.zeros((40, columns))])
    pixels = pixels.astype(np.uint16)
    data = in_dicom(lossless(pixels, predictor=predictor), uid.JPEGLossless, pixels)
    assert (decode_dicom_pixels(data, WINDOW) == decode_dicom_pixels(dicom(pixels), WINDOW)).all()


@pytest.mark.parametrize("columns", [*range(60, 80, 3), *long({*range(60, 80)} - {*range(60, 80, 3)})])
def test_a_lossless_jpeg_by_gdcm_with_a_black_lower_part_is_read_to_the_bit(columns: int) -> None:
    pixels = np.vstack([np.random.default_rng(columns).integers(0, 4096, (40, columns)), np.zeros((40, columns))])
    data = dicom(pixels.astype(np.uint16))
    assert (decode_dicom_pixels(by_gdcm(data, uid.JPEGLosslessSV1), WINDOW) == decode_dicom_pixels(data, WINDOW)).all()


COLORS = np.stack([VALUES, VALUES[::-1], 255 - VALUES], -1).clip(0, 255).astype(np.uint8)
RGB: dict[str, Any] = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}
RGB |= {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7, "Rows": 96, "Columns": 80}


def test_lossless_colours_are_read_to_the_bit_and_refused_with_a_part_missing() -> None:
    frame = lossless(COLORS)
    assert (decode_dicom_pixels(in_dicom(frame, pixels=COLORS, **RGB)) == COLORS).all()
    middle = len(frame) // 2
    with pytest.raises(ValueError, match="damaged or cut off"):
        decode_dicom_pixels(in_dicom(frame[:middle] + frame[middle + 100 :], pixels=COLORS, **RGB))


def run_lengths() -> bytes:
    packed = dcmread(io.BytesIO(by_pydicom(dicom(DEEP), uid.RLELossless)))
    return get_frame(packed.PixelData, 0, number_of_frames=1)


FRAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "8 bits": (lambda: imagecodecs.jpeg8_encode(SHALLOW, level=95), uid.JPEGBaseline8Bit),
    "lossless": (lambda: lossless(DEEP), uid.JPEGLosslessSV1),
    "lossless, predictor 7": (lambda: lossless(DEEP, predictor=7), uid.JPEGLossless),
    "12 bits": (lambda: imagecodecs.jpeg8_encode(DEEP, level=95, bitspersample=12), uid.JPEGExtended12Bit),
    "JPEG 2000": (
        lambda: imagecodecs.jpeg2k_encode(DEEP, level=0, codecformat="j2k", bitspersample=12),
        uid.JPEG2000Lossless,
    ),
    "HTJ2K": (lambda: imagecodecs.htj2k_encode(DEEP, reversible=True), uid.HTJ2KLossless),
    "JPEG-LS": (lambda: imagecodecs.jpegls_encode(DEEP), uid.JPEGLSLossless),
    "RLE": (run_lengths, uid.RLELossless),
}
DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda frame, at: frame[:at],
    "cut, end marker": lambda frame, at: frame[:at] + END_OF_IMAGE,
    "cut, zeros": lambda frame, at: frame[:at] + bytes(len(frame) - at),
    "cut, zeros, end marker": lambda frame, at: frame[:at] + bytes(40) + END_OF_IMAGE,
    "600 bytes missing": lambda frame, at: frame[:at] + frame[at + 600 :],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("share", [0.05, 0.4, 0.75, *long([0.6])])
def test_a_frame_with_a_part_missing_is_refused(kind: str, damage: str, share: float) -> None:
    make, syntax = FRAMES[kind]
    frame, pixels = make(), SHALLOW if kind == "8 bits" else DEEP
    bits: dict[str, Any] = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7} if kind == "8 bits" else {}
    assert decode_dicom_pixels(in_dicom(frame, syntax, pixels, **bits), WINDOW).shape == (96, 80)
    broken = DAMAGE[damage](frame, int(share * len(frame)))
    with pytest.raises(ValueError, match=r"damaged|cut off|packed pixels"):
        decode_dicom_pixels(in_dicom(broken + bytes(len(broken) % 2), syntax, pixels, **bits), WINDOW)


def jpeg(**settings: Any) -> bytes:
    Image.fromarray(np.tile(COLORS, (3, 3, 1))).save(content := io.BytesIO(), "JPEG", **{"quality": 90, **settings})
    return content.getvalue()


@pytest.mark.parametrize("filling", [b"\0", b" ", b"\x55", b"\xaa"])
@pytest.mark.parametrize("settings", [{}, {"subsampling": 0}, {"optimize": True}])
def test_the_rest_of_a_jpeg_overwritten_with_one_byte_is_refused(settings: dict[str, Any], filling: bytes) -> None:
    data = jpeg(**settings)
    for share in (0.5, 0.6, 0.7):
        at = int(share * len(data))
        with pytest.raises(ValueError, match="a part of the picture is missing"):
            decode_picture(data[:at] + filling * (len(data) - at - 2) + END_OF_IMAGE)


@pytest.mark.parametrize("step", [2100, *long([700])])
@pytest.mark.parametrize("settings", [{}, {"subsampling": 0}, {"optimize": True}])
def test_a_sector_of_a_disk_that_is_missing_in_a_jpeg_is_refused(step: int, settings: dict[str, Any]) -> None:
    data = jpeg(**settings)
    for at in range(800, len(data) - 1000, step):
        with pytest.raises(ValueError, match="a part of the picture is missing"):
            decode_picture(data[:at] + data[at + 512 :])


def test_a_jpeg_of_12_bits_names_its_depth() -> None:
    with pytest.raises(ValueError, match="JPEG file of 12 bits a sample, which is read only inside a DICOM file"):
        decode_picture(FRAMES["12 bits"][0]())
    with pytest.raises(ValueError, match="lossless JPEG file, which is read only inside a DICOM file"):
        decode_picture(lossless(DEEP))


@pytest.mark.parametrize("syntax", [uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit])
def test_subsampled_colours_are_ycbcr_under_either_syntax(syntax: str) -> None:
    """Without a JFIF marker, and called RGB in the DICOM file."""
    Image.fromarray(COLORS).save(content := io.BytesIO(), "JPEG", quality=95, subsampling=2)
    whole = content.getvalue()
    bare = whole[:2] + whole[20:]
    assert b"JFIF" not in bare
    shown = decode_dicom_pixels(in_dicom(bare, syntax, COLORS, **RGB)).astype(int)
    assert np.abs(shown - np.asarray(Image.open(content))).max() <= 2


SIGNED = np.random.default_rng(1).integers(-2048, 2048, (96, 80))
LOSSLESS_CODECS: dict[str, Callable[[NDArray[Any]], Any]] = {
    uid.JPEG2000Lossless: lambda cells: imagecodecs.jpeg2k_encode(cells, level=0, codecformat="j2k", bitspersample=16),
    uid.HTJ2KLossless: lambda cells: imagecodecs.htj2k_encode(cells, reversible=True),
    uid.JPEGLSLossless: imagecodecs.jpegls_encode,
    uid.JPEGLosslessSV1: lambda cells: imagecodecs.jpeg8_encode(cells, lossless=True, bitspersample=16),
}


@pytest.mark.parametrize("signed", [0, 1])
@pytest.mark.parametrize("syntax", LOSSLESS_CODECS)
def test_bits_above_bits_stored_are_no_part_of_a_value_packed_or_not(syntax: str, signed: int) -> None:
    """An overlay in bit 13 of a stream of 16 bits; PS3.5 8.1.1."""
    values = SIGNED if signed else SIGNED + 2048
    overlay = np.random.default_rng(2).integers(0, 2, values.shape) << 13
    cells = ((values & 4095) | overlay).astype(np.uint16)
    window = PictureRenderingOptions(window=(0 if signed else 2048, 4096))
    data = in_dicom(LOSSLESS_CODECS[syntax](cells), syntax, cells, PixelRepresentation=signed)
    expected = np.clip((values - (window.window or (0, 0))[0] + 0.5) / 4095 + 0.5, 0, 1) * 255
    assert np.abs(decode_dicom_pixels(data, window) - expected).max() <= 0.51


def test_a_signed_jpeg_2000_in_a_file_that_says_unsigned_is_refused() -> None:
    data = by_pydicom(dicom(SIGNED.astype(np.int16), PixelRepresentation=1), uid.JPEG2000Lossless)
    assert decode_dicom_pixels(data, WINDOW).shape == (96, 80)
    dataset = dcmread(io.BytesIO(data))
    frame = get_frame(dataset.PixelData, 0, number_of_frames=1)
    with pytest.raises(ValueError, match="PixelRepresentation says unsigned, its packed pixels say signed"):
        decode_dicom_pixels(in_dicom(frame, uid.JPEG2000Lossless), WINDOW)
