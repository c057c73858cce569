"""Every transfer syntax that can be written here comes back as the pixels it was made of."""

import io
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom import uid
from pydicom.encaps import get_frame
from pydicom.pixels import get_decoder
from pydicom.pixels.utils import pixel_array

from polyclinic.data.images.syntaxes import DECODER_BY_SYNTAX, is_transfer_syntax_readable, register_pydicom_decoder
from tests.data.dicom_files import decode_dicom_pixels
from tests.data.dicom_syntaxes import (
    as_jpeg,
    by_gdcm,
    by_gdcm_pixels,
    by_pydicom,
    in_fragments,
    plain,
    saved,
    source,
    unpacked_as,
)

KINDS = [(8, False), (12, False), (16, False), (12, True), (16, True)]


def as_htj2k(data: bytes, syntax: str) -> bytes:
    pixels = pixel_array(pydicom.dcmread(io.BytesIO(data)))
    return in_fragments(data, imagecodecs.htj2k_encode(pixels, reversible=True), syntax=syntax)


HTJ2K = (uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K)
NOT_PACKED = (uid.ImplicitVRLittleEndian, uid.ExplicitVRLittleEndian, uid.ExplicitVRBigEndian)
LOSSLESS = {
    **dict.fromkeys(HTJ2K, as_htj2k),
    "1.2.840.10008.1.2.4.57": by_gdcm,
    "1.2.840.10008.1.2.4.70": by_gdcm,
    "1.2.840.10008.1.2.4.80": by_gdcm,
    "1.2.840.10008.1.2.4.90": by_pydicom,
    "1.2.840.10008.1.2.5": by_pydicom,
}


def decoded(data: bytes, decoder: str) -> NDArray[Any]:
    register_pydicom_decoder()
    pixels: NDArray[Any] = pixel_array(pydicom.dcmread(io.BytesIO(data)), decoding_plugin=decoder)
    return pixels


def second_pixels(data: bytes, syntax: str) -> dict[str, NDArray[Any]]:
    """The pixels by each decoder that is installed beside ours, at least one."""
    if syntax in HTJ2K:  # ours is OpenJPEG
        frame = get_frame(pydicom.dcmread(io.BytesIO(data)).PixelData, 0, number_of_frames=1)
        return {"OpenJPH": imagecodecs.htj2k_decode(frame)}
    if not DECODER_BY_SYNTAX[syntax] or syntax == uid.RLELossless:
        return {"gdcm": by_gdcm_pixels(data)}
    names = [name for name in get_decoder(uid.UID(syntax)).available_plugins if name != DECODER_BY_SYNTAX[syntax]]
    assert names
    return {name: decoded(data, name) for name in names}


def agree(data: bytes, syntax: str, pixels: NDArray[Any], off: int) -> None:
    """Our decoder is as near to the source as said, and every other one to ours."""
    ours = decoded(data, DECODER_BY_SYNTAX[syntax])
    assert np.abs(ours.astype(int) - pixels).max() <= off
    for name, other in second_pixels(data, syntax).items():
        assert np.abs(other.astype(int) - ours).max() <= (1 if off else 0), name


@pytest.mark.parametrize("syntax", LOSSLESS)
@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_lossless_pixels_come_back_to_the_bit(syntax: str, bits: int, signed: bool) -> None:
    pixels = source(bits, signed=signed)
    data = LOSSLESS[syntax](plain(pixels, bits), syntax)
    agree(data, syntax, pixels, off=0)
    assert (decode_dicom_pixels(data) == decode_dicom_pixels(plain(pixels, bits))).all()


@pytest.mark.parametrize("syntax", [syntax for syntax in LOSSLESS if syntax not in HTJ2K])
def test_lossless_colours_come_back_to_the_bit(syntax: str) -> None:
    pixels = source(8, samples=3)
    data = LOSSLESS[syntax](plain(pixels, 8), syntax)
    assert (decode_dicom_pixels(data) == pixels).all()


@pytest.mark.parametrize(("bits", "signed"), [(8, False), (12, False), (16, False)])
def test_near_lossless_jpeg_ls_is_off_by_no_more_than_it_says(bits: int, signed: bool) -> None:
    syntax, pixels = uid.JPEGLSNearLossless, source(bits, signed=signed)
    data = by_pydicom(plain(pixels, bits), syntax, jls_error=2)
    agree(data, syntax, pixels, off=2)
    assert (decoded(data, DECODER_BY_SYNTAX[syntax]) != pixels).any()


def as_lossy_htj2k(data: bytes, syntax: str) -> bytes:
    pixels = pixel_array(pydicom.dcmread(io.BytesIO(data)))
    return in_fragments(data, imagecodecs.htj2k_encode(pixels, level=0.001, reversible=False), syntax=syntax)


LOSSY = {uid.JPEG2000: partial(by_pydicom, j2k_psnr=[60]), uid.HTJ2K: as_lossy_htj2k}


@pytest.mark.parametrize("syntax", LOSSY)
@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_lossy_jpeg_2000_is_near_its_source(syntax: uid.UID, bits: int, signed: bool) -> None:
    pixels = source(bits, signed=signed)
    agree(LOSSY[syntax](plain(pixels, bits), syntax), syntax, pixels, off=(1 << bits) // 100 + 2)


@pytest.mark.parametrize("syntax", [uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit])
@pytest.mark.parametrize("samples", [1, 3])
def test_jpeg_of_8_bits_is_near_its_source(syntax: str, samples: int) -> None:
    pixels = source(8, samples=samples)
    data = as_jpeg(plain(pixels, 8), pixels, syntax)
    span = {"WindowCenter": 128, "WindowWidth": 256}
    shown = decode_dicom_pixels(as_jpeg(plain(pixels, 8, **span), pixels, syntax)).astype(int)
    assert np.abs(shown - pixels).max() <= 16
    agree(data, syntax, pixels, off=16)


def test_a_deflated_file_is_what_was_deflated() -> None:
    pixels = source(12)
    dataset = pydicom.dcmread(io.BytesIO(plain(pixels, 12)))
    dataset.file_meta.TransferSyntaxUID = uid.DeflatedExplicitVRLittleEndian
    assert (decode_dicom_pixels(saved(dataset)) == decode_dicom_pixels(plain(pixels, 12))).all()


def test_every_syntax_of_the_table_has_its_decoder_installed() -> None:
    assert [syntax for syntax in DECODER_BY_SYNTAX if not is_transfer_syntax_readable(syntax)] == []


EVERY_LOSSLESS = {**LOSSLESS, **dict.fromkeys((*NOT_PACKED, uid.DeflatedExplicitVRLittleEndian), unpacked_as)}


@pytest.mark.parametrize("syntax", EVERY_LOSSLESS)
@pytest.mark.parametrize(("bits", "signed"), [(16, False), (16, True), (12, False)])
def test_a_window_shows_the_same_of_two_decoders_pixels(syntax: str, bits: int, signed: bool) -> None:
    shown = {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": 3000, "WindowWidth": 4000}
    pixels = source(bits, signed=signed)
    data = EVERY_LOSSLESS[syntax](plain(pixels, bits, **shown), syntax)
    ours = decode_dicom_pixels(data)
    assert len(np.unique(ours)) > 50
    for name, other in second_pixels(data, syntax).items():
        assert (decode_dicom_pixels(plain(other.astype(pixels.dtype), bits, **shown)) == ours).all(), name
        # PS3.3 C.11.2.1.2.1, by hand
        values = (2 * other.astype(float) - 1024 - 2999.5) / 3999 + 0.5
        assert np.abs(np.clip(values, 0, 1) * 255 - ours).max() <= 0.51, name


def test_every_syntax_of_the_table_is_held_to_a_second_decoder() -> None:
    lossy = {uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit, uid.JPEGLSNearLossless, uid.JPEG2000}
    assert {*EVERY_LOSSLESS, *lossy} == DECODER_BY_SYNTAX.keys()


def test_lossy_jpeg_of_12_bits_is_near_its_source() -> None:
    pixels = source(12)
    ours = decoded(jpeg_of_12_bits(pixels), DECODER_BY_SYNTAX[uid.JPEGExtended12Bit])
    assert np.abs(ours.astype(int) - pixels).max() <= 64


def jpeg_of_12_bits(pixels: NDArray[Any]) -> bytes:
    frame = imagecodecs.jpeg8_encode(pixels, level=98, bitspersample=12)
    return in_fragments(plain(pixels, 12), frame, syntax=uid.JPEGExtended12Bit)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("dcmdjpeg") is None, reason="needs DCMTK: apt-get install dcmtk")
def test_lossy_jpeg_of_12_bits_is_what_dcmtk_makes_of_it(tmp_path: Path) -> None:
    """Neither Pillow nor gdcm reads these."""
    data = jpeg_of_12_bits(source(12))
    (tmp_path / "packed.dcm").write_bytes(data)
    subprocess.run(["dcmdjpeg", "packed.dcm", "plain.dcm"], cwd=tmp_path, check=True)
    theirs = pixel_array(tmp_path / "plain.dcm")
    assert np.abs(theirs.astype(int) - decoded(data, DECODER_BY_SYNTAX[uid.JPEGExtended12Bit])).max() <= 1
