"""The kinds of picture files, which their first bytes show: PNG, JPEG, DICOM and NIfTI, and kinds that are not read."""

import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm", ".dicom", ".nii", ".nii.gz")
"""File name extensions of supported pictures; the content alone decides the kind of a file."""
UNREAD_SUFFIXES = (".bmp", ".tif", ".tiff", ".gif", ".webp", ".jp2", ".heic", ".nrrd", ".mha", ".mhd", ".hdr", ".svs")
"""File name extensions of pictures that are not supported."""
_UNREAD_KINDS = {
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"GIF8": "GIF",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"%PDF": "PDF",
}
"""First bytes of unsupported file formats."""
_CONVERT = "convert it to PNG"
NOT_A_PICTURE = "neither PNG, JPEG, DICOM nor NIfTI"
PNG_SIGNATURE = b"\x89PNG"
PNG_OR_JPEG_SIGNATURES = (PNG_SIGNATURE, b"\xff\xd8")
HEAD_BYTES = 348
"""Number of first bytes that identify the kind of a file."""
_PACKED_HEAD_BYTES = 4096
"""Bytes of a gzip file that contain the first 348 decompressed ones: the file's name comes first, and data may be
stored uncompressed."""


def is_dicom_file(data: bytes) -> bool:
    """Return True if the bytes have the DICOM prefix ``DICM`` at position 128."""
    return data[128:132] == b"DICM"


def is_nifti_file(head: bytes) -> bool:
    """Return True if a file's first bytes, from :func:`read_first_bytes`, are those of a NIfTI-1 or NIfTI-2 file."""
    return head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] in (b"n+2\0", b"ni2\0")


def is_supported_picture_file(head: bytes) -> bool:
    """Return True if a file's first bytes, from :func:`read_first_bytes`, are those of a supported image format."""
    return head.startswith(PNG_OR_JPEG_SIGNATURES) or is_dicom_file(head) or is_nifti_file(head)


def explain_unsupported_file_type(head: bytes) -> str:
    """Return an error message for a file of an unsupported kind, given its first bytes; known formats get a remedy."""
    kind = next((kind for begin, kind in _UNREAD_KINDS.items() if head.startswith(begin)), "")
    kind = "BMP" if head.startswith(b"BM") and head[6:10] == bytes(4) else kind
    kind = "WebP" if head.startswith(b"RIFF") and head[8:12] == b"WEBP" else kind
    return f"a {kind} file; {_CONVERT}" if kind else NOT_A_PICTURE


def describe_png_conversion(reasons: Iterable[str]) -> str:
    """Return advice on how to convert files to PNG, or an empty text if no reason calls for it.

    Args:
        reasons: Reasons why files are not read, from :func:`explain_unsupported_file_type`.
    """
    if not any(reason.endswith(_CONVERT) for reason in reasons):
        return ""
    return (
        "To convert, make a copy of the folder, and in it save each such file as PNG under its own name (the ending "
        "does not matter): "
        """python -c "import sys; from PIL import Image; [Image.open(f).save(f, 'PNG') for f in sys.argv[1:]]" """
        "FILE ..."
    )


def read_first_bytes(file: Path) -> bytes:
    """Return the first 348 bytes of a file, decompressed if it is a gzip file; fewer if it is short or damaged."""
    with file.open("rb") as opened:
        head = opened.read(_PACKED_HEAD_BYTES)
        if not head.startswith(b"\x1f\x8b"):
            return head[:HEAD_BYTES]
        with suppress(zlib.error):
            return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(head, HEAD_BYTES)
    return b""
