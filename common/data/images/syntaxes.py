"""Transfer syntaxes: which packed pixels can be read here, and by which library."""

from collections.abc import Mapping

from pydicom import uid
from pydicom.pixels.decoders.base import get_decoder

from common.data.images import jpeg

READ_BY: Mapping[str, str] = {
    uid.ImplicitVRLittleEndian: "",
    uid.ExplicitVRLittleEndian: "",
    uid.ExplicitVRBigEndian: "",
    uid.DeflatedExplicitVRLittleEndian: "",
    uid.JPEGBaseline8Bit: "pillow",
    **dict.fromkeys(jpeg.DECODER_DEPENDENCIES, jpeg.NAME),
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
    """Whether pixels in this transfer syntax can be decoded by what is installed."""
    if syntax not in READ_BY:
        return False
    jpeg.register()
    return not READ_BY[syntax] or READ_BY[syntax] in get_decoder(syntax).available_plugins


def in_words(syntax: str) -> str:
    """The standard's name, or the number where it has none."""
    return uid.UID(syntax).name
