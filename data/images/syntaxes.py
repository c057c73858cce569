"""List the DICOM transfer syntaxes that can be decoded, with their libraries; register our JPEG decoder in pydicom.

Our decoder handles all JPEG variants, because pydicom's decoders accept truncated frames and crash on damaged ones. It
uses Pillow for JPEG of 8 bits, libjpeg-turbo 3 (in imagecodecs) for 12-bit and lossless JPEG, and CharLS (in
imagecodecs) for JPEG-LS. The variant is taken from the frame's header, because devices write wrong transfer syntaxes.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from PIL import Image
from pydicom import uid
from pydicom.pixels.decoders.base import get_decoder

from polyclinic.data.images.jpeg import (
    END_OF_IMAGE,
    LOSSLESS,
    decode_jpeg,
    parse_jpeg_header,
    refuse_incomplete_lossless_jpeg,
)

DECODER_NAME = "polyclinic"
_JPEG_LIBRARY = "imagecodecs"
_BASELINE_SYNTAX = uid.JPEGBaseline8Bit
JPEG_SYNTAXES = (uid.JPEGExtended12Bit, uid.JPEGLossless, uid.JPEGLosslessSV1)
JPEG_LS_SYNTAXES = (uid.JPEGLSLossless, uid.JPEGLSNearLossless)
LOSSY_SYNTAXES = (_BASELINE_SYNTAX, uid.JPEGExtended12Bit, uid.JPEGLSNearLossless, uid.JPEG2000, uid.HTJ2K)
"""Transfer syntaxes with lossy compression."""
DECODER_DEPENDENCIES = dict.fromkeys((_BASELINE_SYNTAX, *JPEG_SYNTAXES, *JPEG_LS_SYNTAXES), (_JPEG_LIBRARY,))
"""Transfer syntax -> libraries that pydicom names in an error message if they are missing."""


def is_available(syntax: str) -> bool:
    """Return True if our decoder handles the transfer syntax; pydicom calls this function under this name."""
    return syntax in DECODER_DEPENDENCIES


@cache
def register_pydicom_decoder() -> None:
    """Register our decoder with pydicom, once per process."""
    for syntax in DECODER_DEPENDENCIES:
        get_decoder(syntax).add_plugin(DECODER_NAME, (__name__, "decode_jpeg_frame_for_pydicom"))


def decode_jpeg_frame_for_pydicom(frame: bytes, runner: Any) -> bytes:
    """Decode one JPEG or JPEG-LS frame to the bytes of its pixels; pydicom calls this with its ``DecodeRunner``.

    The colour space is that of the DICOM header, except for lossy 8-bit JPEG frames whose markers state one.

    Raises:
        RuntimeError: If the frame is damaged.
    """
    color = runner.samples_per_pixel == 3
    if runner.transfer_syntax in JPEG_LS_SYNTAXES:
        # Without an end marker CharLS reads 2^31 zeros after the data, which takes seconds.
        pixels = import_module(_JPEG_LIBRARY).jpegls_decode(frame + END_OF_IMAGE)
    elif (head := parse_jpeg_header(frame)).process == LOSSLESS or head.precision != 8:
        # Colours are not converted: the photometric interpretation describes them.
        colors = {"colorspace": "rgb", "outcolorspace": "rgb"} if color else {}
        pixels = import_module(_JPEG_LIBRARY).jpeg8_decode(frame, **colors)
        if head.process == LOSSLESS:
            refuse_incomplete_lossless_jpeg(frame, pixels)
        else:  # at 8 bits the code words are the same, and Pillow sees where they end
            decode_jpeg(frame[: head.precision_place] + b"\x08" + frame[head.precision_place + 1 :])
    else:

        def keep_file_colors(image: Image.Image) -> None:
            if color and head.converts_ycbcr_to_rgb:
                image.draft("YCbCr", image.size)  # keep the file's colour space, because pydicom converts it

        if color:
            is_ycbcr = head.has_ycbcr_colors(stated="YBR" in runner.photometric_interpretation)
            runner.set_option("photometric_interpretation", "YBR_FULL" if is_ycbcr else "RGB")
        pixels = np.asarray(decode_jpeg(frame, keep_file_colors))
    runner.set_option("planar_configuration", 0)
    runner.set_option("bits_allocated", 8 * pixels.itemsize)
    unused = 8 * pixels.itemsize - runner.bits_stored
    if runner.pixel_representation and unused > 0:  # sign extension
        pixels = (pixels << unused).view(np.dtype(f"i{pixels.itemsize}")) >> unused
    return bytes(pixels.tobytes())


DECODER_BY_SYNTAX: Mapping[str, str] = {
    uid.ImplicitVRLittleEndian: "",
    uid.ExplicitVRLittleEndian: "",
    uid.ExplicitVRBigEndian: "",
    uid.DeflatedExplicitVRLittleEndian: "",
    **dict.fromkeys(DECODER_DEPENDENCIES, DECODER_NAME),
    uid.JPEG2000Lossless: "pylibjpeg",
    uid.JPEG2000: "pylibjpeg",
    uid.HTJ2KLossless: "pylibjpeg",
    uid.HTJ2KLosslessRPCL: "pylibjpeg",
    uid.HTJ2K: "pylibjpeg",
    uid.RLELossless: "pydicom",
}
"""Transfer syntax -> pydicom's name of the decoder; empty for uncompressed pixels.

Each has exactly one decoder, so that pixels do not depend on the installed packages. gdcm and pylibjpeg-rle are not
used, because damaged frames crash them.
"""


def is_transfer_syntax_readable(syntax: str) -> bool:
    """Return True if the installed libraries can decode pixels in this transfer syntax."""
    if syntax not in DECODER_BY_SYNTAX:
        return False
    register_pydicom_decoder()
    return not DECODER_BY_SYNTAX[syntax] or DECODER_BY_SYNTAX[syntax] in get_decoder(syntax).available_plugins


def get_transfer_syntax_name(syntax: str) -> str:
    """Return the DICOM name of a transfer syntax, or its UID if it has none."""
    return uid.UID(syntax).name
