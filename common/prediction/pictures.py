"""Read images without labels for ``predict`` and ``export --check``: npz files, pictures, folders of pictures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.system.files import is_file
from polyclinic.data.base.volume_arrays import add_channel_axis, is_image_array
from polyclinic.data.images.bands import scale_values_to_8_bits
from polyclinic.data.images.file_kinds import (
    PICTURE_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    explain_unsupported_file_type,
    is_supported_picture_file,
    read_first_bytes,
)
from polyclinic.data.images.reading import DecodedImageFormat, explain_decoding_error
from polyclinic.data.images.store import decode_pictures
from polyclinic.data.sources.npz import find_oversized_content_faults
from polyclinic.data.sources.npz_file import open_npz_arrays, read_npz_headers
from polyclinic.data.tables.files import PictureFileFinder

NPZ_PART_PREFIXES = ("test", "val", "train")
_FILE_KINDS = "PNG, JPEG, DICOM, NIfTI"
MAX_EXAMINED_FILES = 100
"""Maximum number of files whose first bytes are read before the model is loaded; larger folders are not examined."""


@dataclass(frozen=True)
class UnlabelledPictures:
    """Images without labels, and the names of files that could not be used.

    Attributes:
        names: Name of each image in ``images``.
        images: uint8 ``(n, height, width[, 3])``.
        unreadable: Name of each unreadable image -> reason.
        others: Names of files in the folder that are not pictures.
        without_segmentation: Name of each image without a DICOM segmentation, if these were requested -> reason.
    """

    names: tuple[str, ...]
    images: NDArray[np.uint8]
    unreadable: Mapping[str, str]
    others: tuple[str, ...] = ()
    without_segmentation: Mapping[str, str] = field(default_factory=dict)


def refuse_data_without_pictures(data: Path) -> None:
    """Check that data may contain images, by file names, first bytes and headers, without decoding an image.

    Raises:
        BadInput: If :func:`read_unlabelled_pictures` would certainly find no image.
    """
    if _is_npz_file(data):
        _find_npz_images_key(data)
        return
    files, _ = _list_picture_files(data)
    if len(files) <= MAX_EXAMINED_FILES and not any(map(_may_be_picture, files)):
        name = str(files[0].relative_to(data)) if data.is_dir() else data.name
        try:
            reason = explain_unsupported_file_type(read_first_bytes(files[0])) if files[0].stat().st_size else "empty"
        except OSError as error:
            reason = explain_decoding_error(error)
        raise_faults([make_unreadable_images_fault(data, name, reason)])


def _may_be_picture(file: Path) -> bool:
    try:
        return is_supported_picture_file(read_first_bytes(file))
    except OSError:
        return False


def make_unreadable_images_fault(data: Path, name: str, reason: str) -> Fault:
    """Return the fault of data whose images are all unreadable, with one image and the reason."""
    problem = f"holds no image that can be read ({name}: {reason})."
    return Fault(str(data), problem, f"Name an npz file, a picture, or a folder of pictures ({_FILE_KINDS}).")


def read_unlabelled_pictures(data: Path, form: DecodedImageFormat) -> UnlabelledPictures:
    """Read the images of an npz file, the pictures in a folder, or one picture.

    For a model of volumes, all slices of a DICOM series in a folder become one image with the name of the folder.

    Raises:
        BadInput: If there is no image.
    """
    if _is_npz_file(data):
        key = _find_npz_images_key(data)
        size = read_npz_headers(data, str(data))[key].byte_size
        raise_faults(find_oversized_content_faults(data, size, form.rendering.largest_mb, str(data)))
        with open_npz_arrays(data, str(data)) as arrays:
            images = arrays[key]
        value_range = form.rendering.value_range
        if images.dtype != np.uint8 and value_range is None:
            problem = f"{key} is {images.dtype}: which values are black and white is unknown."
            raise BadInput([Fault(str(data), problem, "Give images of the run's own kind, or uint8.")])
        if value_range is not None:
            images = scale_values_to_8_bits(images, value_range)
        images = add_channel_axis(images)
        return UnlabelledPictures(tuple(f"{key}[{row}]" for row in range(len(images))), images, {})
    files, others = _list_picture_files(data)
    if form.is_volume:
        from polyclinic.data.images.dicom_series import merge_series_files  # takes a second

        files = merge_series_files(files)
    names = [file.name if file == data else str(file.relative_to(data)) for file in files]
    decoded = decode_pictures(names, lambda row: files[row], form)
    unreadable = {skip.name: skip.reason for skip in decoded.skipped}
    return UnlabelledPictures(tuple(names[row] for row in decoded.rows), decoded.images, unreadable, tuple(others))


def locate_picture(data: Path, name: str) -> Path:
    """Return the path of a picture of :func:`read_unlabelled_pictures`: a file, or the folder of a DICOM series.

    Args:
        data: The folder of the pictures, or a single picture, which may also be a folder, of a series.
        name: Name of the picture.
    """
    inside = data / name
    return inside if data.is_dir() and inside.exists() else data


def _is_npz_file(data: Path) -> bool:
    return data.suffix == ".npz" and is_file(data)


def _list_picture_files(data: Path) -> tuple[list[Path], list[str]]:
    """Return the picture files of a folder (or the single picture), sorted by name, and the names of the other files.

    Pictures in unsupported formats are included, so that they are reported as unreadable.
    """
    pictures = [data] if is_file(data) else list[Path]()
    others = list[str]()
    listings = PictureFileFinder()
    if data.is_dir():
        paths = (
            data / below / name for below, name in listings.list_files_recursively(data) if not name.startswith(".")
        )
        for file in (path for path in paths if path.is_file()):
            if (
                not file.suffix
                or file.name.lower().endswith(PICTURE_SUFFIXES + UNSUPPORTED_SUFFIXES)
                or _may_be_picture(file)
            ):
                pictures.append(file)
            else:
                others.append(str(file.relative_to(data)))
        raise_faults(listings.find_unlistable_folder_faults(str(data)))
    if not pictures:
        raise BadInput([Fault(str(data), f"is no npz file, no picture and no folder of pictures ({_FILE_KINDS}).")])
    return sorted(pictures), sorted(others)


def _find_npz_images_key(data: Path) -> str:
    """Return the key of an npz file's images: ``images``, or else the key of the first split, such as
    ``train_images``.
    """
    headers = read_npz_headers(data, str(data))
    keys = ["images", *(f"{part}_images" for part in NPZ_PART_PREFIXES)]
    key = next((key for key in keys if key in headers), None)
    if key is None:
        problem = f"has no images. Keys: {quote_names(headers)}."
        raise BadInput([Fault(str(data), problem, f"Expected one of {quote_names(keys)}.")])
    images = headers[key]
    if images.dtype.kind not in "biuf" or not is_image_array(images.shape):
        expected = "expected uint8 (n, height, width) or (n, height, width, 3)"
        raise BadInput([Fault(str(data), f"{key} is {images.dtype} of shape {images.shape}, {expected}.")])
    return key
