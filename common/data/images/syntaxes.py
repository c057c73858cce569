"""Transfer syntaxes: which packed pixels can be read here, and by which library.

Our own decoder reads all JPEG, because pydicom's accept cut frames, and end the process on damaged ones. Baseline JPEG
is Pillow's; imagecodecs holds libjpeg-turbo 3, for lossless JPEG and that of 12 bits, and CharLS, for JPEG-LS.
"""

from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
from PIL import Image
from pydicom import uid
from pydicom.pixels.decoders.base import get_decoder

from common.data.images.jpeg import END_OF_IMAGE, decode_jpeg, parse_jpeg, refuse_filled_in

NAME = "polyclinic"
_LIBRARY = "imagecodecs"
_BASELINE = uid.JPEGBaseline8Bit
JPEG = (uid.JPEGExtended12Bit, uid.JPEGLossless, uid.JPEGLosslessSV1)
JPEG_LS = (uid.JPEGLSLossless, uid.JPEGLSNearLossless)
DECODER_DEPENDENCIES = dict.fromkeys((_BASELINE, *JPEG, *JPEG_LS), (_LIBRARY,))
"""What pydicom names where the library is not there."""


def is_available(syntax: str) -> bool:
    """Return True if this decoder can decode the transfer syntax; pydicom calls it when the decoder is registered."""
    return syntax in DECODER_DEPENDENCIES


@cache
def register() -> None:
    """Make the decoder known to pydicom, once in a process."""
    for syntax in DECODER_DEPENDENCIES:
        get_decoder(syntax).add_plugin(NAME, (__name__, "decode_frame"))


def decode_frame(frame: bytes, runner: Any) -> bytes:
    """Decode one frame, as pydicom's ``DecodeRunner`` asks for it.

    Raises:
        RuntimeError: What the library says of a damaged frame.
    """
    if runner.transfer_syntax == _BASELINE:
        return _decode_baseline(frame, runner)
    codecs = import_module(_LIBRARY)
    if runner.transfer_syntax in JPEG_LS:
        # Without its end marker CharLS goes on to read zeros behind the data, 2^31 of them: seconds for a few bytes.
        pixels = codecs.jpegls_decode(frame + END_OF_IMAGE)
    else:
        # Colours stay what they are in the file: the photometric interpretation says what that is.
        colors = {"colorspace": "rgb", "outcolorspace": "rgb"} if runner.samples_per_pixel == 3 else {}
        decode = partial(codecs.jpeg8_decode, **colors)
        pixels = decode(frame)
        refuse_filled_in(frame, pixels, decode)
    runner.set_option("planar_configuration", 0)
    runner.set_option("bits_allocated", 8 * pixels.itemsize)
    unused = 8 * pixels.itemsize - runner.bits_stored
    if runner.pixel_representation and unused > 0:  # carry the sign into the bits above the stored ones
        pixels = (pixels << unused).view(np.dtype(f"i{pixels.itemsize}")) >> unused
    return bytes(pixels.tobytes())


def _decode_baseline(frame: bytes, runner: Any) -> bytes:
    """Decode a frame of 8 bits; its own markers say what its colours are, and where they are silent, the DICOM file."""
    head, color = parse_jpeg(frame), runner.samples_per_pixel == 3

    def prepare(image: Image.Image) -> None:
        if color and head.converts_to_rgb:
            image.draft("YCbCr", image.size)  # as they are in the file, because pydicom converts them

    if color:
        is_ycbcr = head.is_ycbcr(stated="YBR" in runner.photometric_interpretation)
        runner.set_option("photometric_interpretation", "YBR_FULL" if is_ycbcr else "RGB")
    runner.set_option("planar_configuration", 0)
    return decode_jpeg(frame, prepare).tobytes()


READ_BY: Mapping[str, str] = {
    uid.ImplicitVRLittleEndian: "",
    uid.ExplicitVRLittleEndian: "",
    uid.ExplicitVRBigEndian: "",
    uid.DeflatedExplicitVRLittleEndian: "",
    **dict.fromkeys(DECODER_DEPENDENCIES, NAME),
    uid.JPEG2000Lossless: "pylibjpeg",
    uid.JPEG2000: "pylibjpeg",
    uid.HTJ2KLossless: "pylibjpeg",
    uid.HTJ2KLosslessRPCL: "pylibjpeg",
    uid.HTJ2K: "pylibjpeg",
    uid.RLELossless: "pydicom",
}
"""pydicom's name of the decoder of each transfer syntax, empty where pixels are not packed.

One library each: what a picture looks like must not depend on what else is installed, and gdcm and pylibjpeg-rle are
left out because a damaged frame ends the process in them.
"""


def is_readable(syntax: str) -> bool:
    """Return whether pixels in this transfer syntax can be decoded by what is installed."""
    if syntax not in READ_BY:
        return False
    register()
    return not READ_BY[syntax] or READ_BY[syntax] in get_decoder(syntax).available_plugins


def syntax_name(syntax: str) -> str:
    """Return the name of a transfer syntax in the DICOM standard, or its UID where it has none."""
    return uid.UID(syntax).name
