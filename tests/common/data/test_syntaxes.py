"""Every transfer syntax that can be written here comes back as the pixels it was made of."""

import io
from typing import Any

import imagecodecs
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom import uid
from pydicom.pixels import get_decoder
from pydicom.pixels.utils import pixel_array

from common.data.images.dicom import dicom_pixels
from common.data.images.jpeg import register
from common.data.images.syntaxes import READ_BY, is_readable
from tests.common.data.dicom_syntaxes import as_jpeg, by_gdcm, by_pydicom, in_fragments, plain, saved, source

KINDS = [(8, False), (12, False), (16, False), (12, True), (16, True)]
LOSSLESS = {
    "1.2.840.10008.1.2.4.57": by_gdcm,
    "1.2.840.10008.1.2.4.70": by_gdcm,
    "1.2.840.10008.1.2.4.80": by_gdcm,
    "1.2.840.10008.1.2.4.90": by_pydicom,
    "1.2.840.10008.1.2.5": by_pydicom,
}


def decoded(data: bytes, decoder: str) -> NDArray[Any]:
    register()
    pixels: NDArray[Any] = pixel_array(pydicom.dcmread(io.BytesIO(data)), decoding_plugin=decoder)
    return pixels


def others(syntax: str) -> list[str]:
    """Decoders that are installed beside ours."""
    return [name for name in get_decoder(uid.UID(syntax)).available_plugins if name != READ_BY[syntax]]


def agree(data: bytes, syntax: str, pixels: NDArray[Any], off: int) -> None:
    """Our decoder is as near to the source as said, and every other one to ours."""
    ours = decoded(data, READ_BY[syntax])
    assert np.abs(ours.astype(int) - pixels).max() <= off
    twelve = syntax == uid.JPEGExtended12Bit and pixels.itemsize > 1  # neither Pillow nor gdcm reads these
    for other in () if twelve else others(syntax):
        assert np.abs(decoded(data, other).astype(int) - ours).max() <= (1 if off else 0), other


@pytest.mark.parametrize("syntax", LOSSLESS)
@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_lossless_pixels_come_back_to_the_bit(syntax: str, bits: int, signed: bool) -> None:
    pixels = source(bits, signed=signed)
    data = LOSSLESS[syntax](plain(pixels, bits), syntax)
    agree(data, syntax, pixels, off=0)
    assert (dicom_pixels(data) == dicom_pixels(plain(pixels, bits))).all()


@pytest.mark.parametrize("syntax", LOSSLESS)
def test_lossless_colours_come_back_to_the_bit(syntax: str) -> None:
    pixels = source(8, samples=3)
    data = LOSSLESS[syntax](plain(pixels, 8), syntax)
    assert (dicom_pixels(data) == pixels).all()


@pytest.mark.parametrize(("bits", "signed"), [(8, False), (12, False), (16, False)])
def test_near_lossless_jpeg_ls_is_off_by_no_more_than_it_says(bits: int, signed: bool) -> None:
    syntax, pixels = uid.JPEGLSNearLossless, source(bits, signed=signed)
    data = by_pydicom(plain(pixels, bits), syntax, jls_error=2)
    agree(data, syntax, pixels, off=2)
    assert (decoded(data, READ_BY[syntax]) != pixels).any()


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_lossy_jpeg_2000_is_near_its_source(bits: int, signed: bool) -> None:
    syntax, pixels = uid.JPEG2000, source(bits, signed=signed)
    data = by_pydicom(plain(pixels, bits), syntax, j2k_psnr=[60])
    agree(data, syntax, pixels, off=(1 << bits) // 100 + 2)


@pytest.mark.parametrize("syntax", [uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit])
@pytest.mark.parametrize("samples", [1, 3])
def test_jpeg_of_8_bits_is_near_its_source(syntax: str, samples: int) -> None:
    pixels = source(8, samples=samples)
    data = as_jpeg(plain(pixels, 8), pixels, syntax)
    span = {"WindowCenter": 128, "WindowWidth": 256}
    shown = dicom_pixels(as_jpeg(plain(pixels, 8, **span), pixels, syntax)).astype(int)
    assert np.abs(shown - pixels).max() <= 16
    agree(data, syntax, pixels, off=16)


def test_a_deflated_file_is_what_was_deflated() -> None:
    pixels = source(12)
    dataset = pydicom.dcmread(io.BytesIO(plain(pixels, 12)))
    dataset.file_meta.TransferSyntaxUID = uid.DeflatedExplicitVRLittleEndian
    assert (dicom_pixels(saved(dataset)) == dicom_pixels(plain(pixels, 12))).all()


def test_every_syntax_of_the_table_has_its_decoder_installed() -> None:
    assert [syntax for syntax in READ_BY if not is_readable(syntax)] == []


@pytest.mark.parametrize("syntax", [uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K])
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_high_throughput_jpeg_2000_comes_back_to_the_bit(syntax: str, bits: int) -> None:
    pixels = source(bits)
    frame = imagecodecs.htj2k_encode(pixels, reversible=True)
    agree(in_fragments(plain(pixels, bits), frame, syntax=syntax), syntax, pixels, off=0)


def test_lossy_jpeg_of_12_bits_is_near_its_source() -> None:
    pixels = source(12)
    frame = imagecodecs.jpeg8_encode(pixels, level=98, bitspersample=12)
    agree(in_fragments(plain(pixels, 12), frame, syntax=uid.JPEGExtended12Bit), uid.JPEGExtended12Bit, pixels, off=64)
