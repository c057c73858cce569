"""Texts, codes and UIDs of the DICOM objects that are written of a model's predictions."""

from polyclinic.common.system.plain_text import make_printable_line

PRODUCT = "Polyclinic"
SCHEME = "99POLYCLINIC"
"""Our private coding scheme, for classes, which each study names itself."""
LONGEST_TEXT_BYTES = 64
"""DICOM allows 64 characters of the kind LO; some readers count bytes."""
UTF_8 = "ISO_IR 192"
"""DICOM's name of UTF-8."""


def shorten_to_dicom_text(text: str) -> str:
    """Return a text as one value of DICOM's kind LO: on one line, of 64 bytes at most, without the separator."""
    line = make_printable_line(text).replace("\\", "/")
    return line.encode()[:LONGEST_TEXT_BYTES].decode(errors="ignore")


def make_model_uid(sha256: str) -> str:
    """Return the UID of a model: a UUID of 128 bits of its hash, in the root 2.25 of ISO 9834-8."""
    return f"2.25.{int(sha256[:32], 16)}"
