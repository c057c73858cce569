"""Read the size and the device of a picture from its file's header; only counts (``flwr-server count``) use them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.system.resources import READING_THREADS
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB
from polyclinic.data.images.file_kinds import is_dicom_file, read_first_bytes
from polyclinic.data.images.headers import (
    convert_dicom_keywords_to_tags,
    read_dicom_elements,
    refuse_large_dicom_elements,
)
from polyclinic.data.images.reading import open_png_or_jpeg

MAX_DEVICE_CHARACTERS = 64
"""Maximum length of the name of a device; longer names are cut."""
_TAGS = convert_dicom_keywords_to_tags("Manufacturer", "ManufacturerModelName", "Rows", "Columns")


@dataclass(frozen=True)
class PictureHeader:
    """Size and device of a picture from its file's header.

    Attributes:
        shorter_side: Length of the shorter side in pixels; 0 if unknown.
        device: Manufacturer and model from a DICOM header; empty if unknown.
    """

    shorter_side: int = 0
    device: str = ""


UNKNOWN_HEADER = PictureHeader()


def read_picture_headers(files: Sequence[Path | None]) -> list[PictureHeader]:
    """Read the headers of several files in parallel, in the order of the files; None stands for an unknown file."""
    with ThreadPoolExecutor(READING_THREADS) as pool:
        return list(pool.map(read_picture_header, files))


def read_picture_header(file: Path | None) -> PictureHeader:
    """Read the header of a PNG, JPEG or DICOM file, or of the first file of a folder with a DICOM series.

    Other files and damaged files give :data:`UNKNOWN_HEADER`.
    """
    if file is None:
        return UNKNOWN_HEADER
    try:
        if file.is_dir():
            files = (path for path in sorted(file.iterdir()) if path.is_file())
            return next(read_picture_header(path) for path in files if is_dicom_file(read_first_bytes(path)))
        if is_dicom_file(read_first_bytes(file)):
            return _read_dicom_picture_header(file)
        with open_png_or_jpeg(file) as image:
            return PictureHeader(min(image.size))
    except Exception:  # of any reader on a broken file; such a file counts as not stated
        return UNKNOWN_HEADER


def _read_dicom_picture_header(file: Path) -> PictureHeader:
    with file.open("rb") as opened:
        head = read_dicom_elements(opened, _TAGS)
    refuse_large_dicom_elements(head, _TAGS, DEFAULT_LARGEST_MB)
    maker, model = (str(head.get(name) or "").strip() for name in ("Manufacturer", "ManufacturerModelName"))
    device = model if model.casefold().startswith(maker.casefold()) else f"{maker} {model}".strip()
    return PictureHeader(min(int(head.Rows), int(head.Columns)), make_printable_line(device)[:MAX_DEVICE_CHARACTERS])
