"""The kinds of picture files, which their first bytes show: PNG, JPEG, DICOM and NIfTI, and kinds that are not read."""

import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm", ".dicom", ".nii", ".nii.gz")
"""File name extensions of supported pictures. A file is recognised by its content, not by its name."""
UNSUPPORTED_SUFFIXES = (
    ".bmp",
    ".tif",
    ".tiff",
    ".gif",
    ".webp",
    ".jp2",
    ".heic",
    ".nrrd",
    ".mha",
    ".mhd",
    ".hdr",
    ".svs",
)
"""File name extensions of pictures that are not supported."""
_UNSUPPORTED_SIGNATURES = {
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"GIF8": "GIF",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"%PDF": "PDF",
}
"""First bytes of a file -> name of its unsupported format."""
_CONVERT_ADVICE = "convert it to PNG"
NOT_A_PICTURE_MESSAGE = "neither PNG, JPEG, DICOM nor NIfTI"
PNG_SIGNATURE = b"\x89PNG"
PNG_OR_JPEG_SIGNATURES = (PNG_SIGNATURE, b"\xff\xd8")
HEAD_BYTES = 348
"""Number of bytes at the beginning of a file that identify its kind."""
_GZIP_HEAD_BYTES = 4096
"""Number of bytes at the beginning of a gzip file from which the first 348 bytes can be decompressed, after the header
with the file's name."""


def is_dicom_file(data: bytes) -> bool:
    """Return True if the bytes have the DICOM prefix ``DICM`` at position 128."""
    return data[128:132] == b"DICM"


def is_nifti_file(head: bytes) -> bool:
    """Return True for a NIfTI-1 or NIfTI-2 file, given its first bytes from :func:`read_first_bytes`."""
    return head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] in (b"n+2\0", b"ni2\0")


def is_supported_picture_file(head: bytes) -> bool:
    """Return True for a file of a supported image format, given its first bytes from :func:`read_first_bytes`."""
    return head.startswith(PNG_OR_JPEG_SIGNATURES) or is_dicom_file(head) or is_nifti_file(head)


def explain_unsupported_file_type(head: bytes) -> str:
    """Return an error message for a file of an unsupported kind, given its first bytes.

    For formats that Pillow can convert, the message advises to convert the file to PNG.
    """
    kind = next((kind for begin, kind in _UNSUPPORTED_SIGNATURES.items() if head.startswith(begin)), "")
    kind = "BMP" if head.startswith(b"BM") and head[6:10] == bytes(4) else kind
    kind = "WebP" if head.startswith(b"RIFF") and head[8:12] == b"WEBP" else kind
    return f"a {kind} file; {_CONVERT_ADVICE}" if kind else NOT_A_PICTURE_MESSAGE


def describe_png_conversion(reasons: Iterable[str]) -> str:
    """Return advice on how to convert files to PNG; empty if none of the reasons advises a conversion.

    Args:
        reasons: Reasons why files are not read, from :func:`explain_unsupported_file_type`.
    """
    if not any(reason.endswith(_CONVERT_ADVICE) for reason in reasons):
        return ""
    return (
        "To convert, make a copy of the folder, and in it save each such file as PNG under its own name (the ending "
        "does not matter): "
        """python -c "import sys; from PIL import Image; [Image.open(f).save(f, 'PNG') for f in sys.argv[1:]]" """
        "FILE ..."
    )


def read_first_bytes(file: Path) -> bytes:
    """Return the first 348 bytes of a file; a gzip file is decompressed. A short or damaged file gives fewer bytes."""
    with file.open("rb") as opened:
        head = opened.read(_GZIP_HEAD_BYTES)
        if not head.startswith(b"\x1f\x8b"):
            return head[:HEAD_BYTES]
        with suppress(zlib.error):
            return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(head, HEAD_BYTES)
    return b""
