"""Texts, codes and UIDs for DICOM objects that contain a model's predictions."""

from polyclinic.common.system.plain_text import make_printable_line

MANUFACTURER = "Polyclinic"
PRIVATE_CODING_SCHEME = "99POLYCLINIC"
"""Private coding scheme for classes, because each study has its own class names."""
MAX_TEXT_BYTES = 64
"""Maximum length of a text: DICOM allows 64 characters in an LO value, and some readers count bytes."""
UTF_8_CHARACTER_SET = "ISO_IR 192"
"""DICOM's name for UTF-8."""


def shorten_to_dicom_text(text: str) -> str:
    """Return a text as one DICOM value of type LO: one line, at most 64 bytes, without backslashes."""
    line = make_printable_line(text).replace("\\", "/")
    return line.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def make_model_uid(sha256: str) -> str:
    """Return the UID of a model: the first 128 bits of its hash as a UUID under the root 2.25 (ISO 9834-8)."""
    return f"2.25.{int(sha256[:32], 16)}"
