"""A decoder of pydicom's for JPEG that its own ones do not read, or die of when it is damaged: by imagecodecs.

imagecodecs holds libjpeg-turbo 3, for lossless JPEG and that of 12 bits, and CharLS, for JPEG-LS.
"""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import uid
from pydicom.pixels.decoders.base import get_decoder

NAME = "imagecodecs"
END_OF_IMAGE = b"\xff\xd9"
JPEG = (uid.JPEGExtended12Bit, uid.JPEGLossless, uid.JPEGLosslessSV1)
JPEG_LS = (uid.JPEGLSLossless, uid.JPEGLSNearLossless)
DECODER_DEPENDENCIES = dict.fromkeys((*JPEG, *JPEG_LS), (NAME,))
"""What pydicom names where the library is not there."""


def is_available(syntax: str) -> bool:
    """Whether this decoder serves the transfer syntax; pydicom asks as it is added."""
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
    return _signed(pixels, runner).tobytes()


def _signed(pixels: NDArray[Any], runner: Any) -> NDArray[Any]:
    """Carry the sign of two's complement of fewer bits into the bits above it."""
    unused = 8 * pixels.itemsize - runner.bits_stored
    if not runner.pixel_representation or unused <= 0:
        return pixels
    shifted: NDArray[Any] = (pixels << unused).view(np.dtype(f"i{pixels.itemsize}")) >> unused
    return shifted
