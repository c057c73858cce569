"""Transfer syntaxes: which packed pixels can be read here, and by which library.

imagecodecs decodes the JPEG that pydicom's own decoders do not read, or end the process on when it is damaged. It holds
libjpeg-turbo 3, for lossless JPEG and that of 12 bits, and CharLS, for JPEG-LS.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from pydicom import uid
from pydicom.pixels.decoders.base import get_decoder

NAME = "imagecodecs"
END_OF_IMAGE = b"\xff\xd9"
JPEG = (uid.JPEGExtended12Bit, uid.JPEGLossless, uid.JPEGLosslessSV1)
JPEG_LS = (uid.JPEGLSLossless, uid.JPEGLSNearLossless)
DECODER_DEPENDENCIES = dict.fromkeys((*JPEG, *JPEG_LS), (NAME,))
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
    codecs = import_module(NAME)
    if runner.transfer_syntax in JPEG_LS:
        # Without its end marker CharLS goes on to read zeros behind the data, 2^31 of them: seconds for a few bytes.
        pixels = codecs.jpegls_decode(frame + END_OF_IMAGE)
    else:
        # Colours stay what they are in the file: the photometric interpretation says what that is.
        colors = {"colorspace": "rgb", "outcolorspace": "rgb"} if runner.samples_per_pixel == 3 else {}
        pixels = codecs.jpeg8_decode(frame, **colors)
    runner.set_option("planar_configuration", 0)
    runner.set_option("bits_allocated", 8 * pixels.itemsize)
    unused = 8 * pixels.itemsize - runner.bits_stored
    if runner.pixel_representation and unused > 0:  # carry the sign into the bits above the stored ones
        pixels = (pixels << unused).view(np.dtype(f"i{pixels.itemsize}")) >> unused
    return bytes(pixels.tobytes())


READ_BY: Mapping[str, str] = {
    uid.ImplicitVRLittleEndian: "",
    uid.ExplicitVRLittleEndian: "",
    uid.ExplicitVRBigEndian: "",
    uid.DeflatedExplicitVRLittleEndian: "",
    uid.JPEGBaseline8Bit: "pillow",
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
