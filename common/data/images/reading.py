"""From PNG, JPEG, DICOM and NIfTI files to one uint8 array, on several threads; unreadable files are listed."""

import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from common.data.base.decoded_size import largest_picture, refuse_larger
from common.data.base.image_set import Skipped
from common.data.base.spec import AS_IN_FILE, Rendering, Resize
from common.errors import BadInput, Fault

BAND = 1 << 20
"""Numbers in a band, if a row has no more."""


def bands(pixels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the rows of a picture ``(height, width[, samples])``, some at a time, as views."""
    rows = max(1, BAND // pixels[0].size)
    yield from (pixels[start : start + rows] for start in range(0, len(pixels), rows))


def in_bands(eight_bit: Callable[[NDArray[Any]], NDArray[np.uint8]], pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Bring a picture ``(height, width[, samples])`` to 8 bits, some rows at a time."""
    parts = [eight_bit(band) for band in bands(pixels)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


PICTURES = (".png", ".jpg", ".jpeg", ".dcm", ".dicom", ".nii", ".nii.gz")
"""Endings of picture files; what a file is, its content says."""
_BIT_DEPTHS = (8, 10, 12, 14, 16)
_LONGEST_REASON = 150
NOTHING: AbstractContextManager[object] = nullcontext()
NO_PICTURE = "neither PNG, JPEG, DICOM nor NIfTI"
_PNG_OR_JPEG = (b"\x89PNG", b"\xff\xd8")
_BEGINNING = 348
_HEAD = 4096
"""Bytes of a packed file in which its first 348 are: gzip puts the file's name before them, and may not pack at all."""
# Pillow's own bound, in pixels, could not be raised with ours: see common.data.base.decoded_size.
Image.MAX_IMAGE_PIXELS = None
_BYTES = {"1": 1, "L": 1, "I;16": 2, "I;16B": 2}
"""Bytes of a pixel in Pillow's memory; four in all other modes, and where a palette becomes colours."""


def is_dicom(data: bytes) -> bool:
    """Return whether the bytes carry DICOM's preamble."""
    return data[128:132] == b"DICM"


def is_nifti(head: bytes) -> bool:
    """Return whether a file begins like NIfTI-1 or NIfTI-2, packed by gzip or not: see :func:`head_of`."""
    return head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] in (b"n+2\0", b"ni2\0")


def is_picture(head: bytes) -> bool:
    """Return whether a file that begins so is of a kind that :func:`picture` decodes: see :func:`head_of`."""
    return head.startswith(_PNG_OR_JPEG) or is_dicom(head) or is_nifti(head)


def head_of(file: Path) -> bytes:
    """Return the first 348 bytes of a file, of one that gzip has packed, of what is in it; fewer if damaged."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD)
        if not head.startswith(b"\x1f\x8b"):
            return head[:_BEGINNING]
        with suppress(zlib.error):
            return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(head, _BEGINNING)
    return b""


@dataclass(frozen=True)
class ImageForm:
    """The form every picture of a set is brought into: ``(size, size)``, or ``(size, size, 3)`` in colour."""

    size: int
    color: bool
    resize: Resize
    rendering: Rendering = AS_IN_FILE

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size, self.size, 3) if self.color else (self.size, self.size)


@dataclass(frozen=True)
class ImageStore:
    """Where decoded images live.

    Attributes:
        cache_dir: Arrays above ``memory_budget_bytes`` are mapped from an unnamed file in this folder, gone when the
            program ends; without it everything is held in memory.
        memory_budget_bytes: Of one part of a data set.
        workers: Decoding threads.
    """

    cache_dir: Path | None = None
    memory_budget_bytes: int = 4 << 30
    workers: int = min(8, os.cpu_count() or 1)

    def allocate(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return an array to write images into."""
        if self.cache_dir is None or int(np.prod(shape)) <= self.memory_budget_bytes:
            return np.zeros(shape, dtype=np.uint8)
        with tempfile.TemporaryFile(dir=self.cache_dir) as file:
            return np.memmap(file, dtype=np.uint8, mode="w+", shape=shape)


IN_MEMORY = ImageStore()


@dataclass(frozen=True)
class Decoded:
    """What could be read: ``images[i]`` is the picture at ``kept[i]``."""

    images: NDArray[np.uint8]
    kept: NDArray[np.intp]
    skipped: tuple[Skipped, ...]


def decode_all(
    names: Sequence[str],
    read: Callable[[int], bytes | Path],
    form: ImageForm,
    store: ImageStore = IN_MEMORY,
    within: AbstractContextManager[object] = NOTHING,
) -> Decoded:
    """Decode the pictures of which ``read(i)`` returns the bytes or the file.

    Args:
        names: What a skipped one is called.
        within: Open while pictures are read. It is closed before the threads are waited for, and may so stop them.
    """
    images = store.allocate((len(names), *form.shape))

    def decode_one(index: int) -> str:
        # Any error of a decoder on a broken file ends here: that file is left out, the others go on.
        try:
            images[index] = shaped(picture(read(index), form.rendering), form)
        except Exception as error:
            return why_unreadable(error)
        return ""

    with ThreadPoolExecutor(store.workers) as pool, within:
        reasons = list(pool.map(decode_one, range(len(names))))
    kept = np.flatnonzero([not reason for reason in reasons])
    skipped = tuple(Skipped(name, reason) for name, reason in zip(names, reasons, strict=True) if reason)
    for row, index in enumerate(kept):  # close up in place, because the array may be larger than memory
        if row != index:
            images[row] = images[index]
    return Decoded(images[: len(kept)], kept, skipped)


def why_unreadable(error: Exception) -> str:
    """Return in one line why a file cannot be decoded, for the person who has it."""
    reason = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"the file cannot be opened: {error.strerror}"
    if isinstance(error, ValueError | OSError) and 0 < len(reason) <= _LONGEST_REASON:
        return reason
    return "damaged, or of a kind that cannot be decoded here"


def picture(content: bytes | Path, rendering: Rendering = AS_IN_FILE) -> Image.Image:
    """Decode one file by its content into an 8-bit grey ("L") or colour ("RGB") picture.

    Args:
        content: All of it, or where it lies: of a volume in a file only a slice is read.

    Raises:
        OSError, ValueError, ...: Any error of the decoder; see :func:`decode_all`.
    """
    if isinstance(content, Path) and is_nifti(head_of(content)):
        from common.data.images.nifti import nifti_pixels  # takes a second, like DICOM

        return Image.fromarray(nifti_pixels(content, rendering))
    data = content.read_bytes() if isinstance(content, Path) else content
    if not data:
        raise ValueError("empty")
    if is_dicom(data):
        from common.data.images.dicom import dicom_pixels  # takes a second, and most data sets have none

        return Image.fromarray(dicom_pixels(data, rendering))
    if not data.startswith(_PNG_OR_JPEG):
        raise ValueError(NO_PICTURE)
    with opened_picture(data) as image:
        # A decoder keeps the coefficients of a progressive JPEG, two bytes each, until it has all of them.
        beside = 2 * len(image.getbands()) if image.info.get("progressive") else 0
        claimed = image.width * image.height * (_BYTES.get(image.mode, 4) + beside)
        refuse_larger(claimed, largest_picture(rendering.largest_mb))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # upright, as viewers show it
        if image.mode.startswith("I"):
            return Image.fromarray(_eight_bits(np.asarray(image)))
        return _in_mode(image, "L" if image.mode in ("1", "L", "LA") else "RGB")


def opened_picture(content: bytes | Path) -> Image.Image:
    """Open a PNG or JPEG file; its pixels are not decoded.

    Raises:
        ValueError: If its head is damaged, or it is a file of another kind.
    """
    try:
        return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=("PNG", "JPEG"))
    except UnidentifiedImageError:
        raise ValueError("damaged or cut off") from None


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Return a picture in a mode of Pillow's; the same where it is in it, of which Pillow would make a copy."""
    return image if image.mode == mode else image.convert(mode)


def _eight_bits(pixels: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Scale by the smallest usual bit depth that holds the brightest pixel: 12-bit images are often saved as 16-bit."""
    brightest = int(pixels.max())
    depth = next((depth for depth in _BIT_DEPTHS if brightest < 1 << depth), None)
    if depth is None or int(pixels.min()) < 0:
        raise ValueError(f"pixel values from {pixels.min()} to {brightest} do not fit 16 bits")
    scaled = np.round(np.arange(1 << depth) * (255 / ((1 << depth) - 1))).astype(np.uint8)
    return in_bands(lambda band: scaled[band], pixels)


def shaped(image: Image.Image, form: ImageForm) -> NDArray[np.uint8]:
    """Bring a picture into ``form``, bilinear (averaging when it shrinks), padded with black or stretched."""
    mode = "RGB" if form.color else "L"
    image = image if image.mode == "L" else _in_mode(image, mode)  # grey becomes colour once it is small
    longer = max(image.size)
    width, height = (
        (form.size, form.size)
        if form.resize == "stretch"
        else (max(1, round(side * form.size / longer)) for side in image.size)
    )
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    image = _in_mode(image, mode)
    canvas = np.zeros(form.shape, dtype=np.uint8)
    top, left = (form.size - height) // 2, (form.size - width) // 2
    canvas[top : top + height, left : left + width] = np.asarray(image)
    return canvas


def resized(images: NDArray[np.uint8], size: int | None, resize: Resize) -> NDArray[np.uint8]:
    """Bring decoded images ``(n, h, w[, 3])`` to ``size``; the same array where nothing changes."""
    if size is None or images.shape[1:3] == (size, size):
        return images
    form = ImageForm(size, images.ndim == 4, resize)
    result = np.empty((len(images), *form.shape), dtype=np.uint8)
    for row, image in enumerate(images):
        result[row] = shaped(Image.fromarray(image), form)
    return result


def recolored(images: NDArray[np.uint8], color: bool) -> NDArray[np.uint8]:
    """Bring decoded images ``(n, h, w[, 3])`` to grey or to colour; the same array where nothing changes."""
    if color == (images.ndim == 4):
        return images
    if color:
        return np.repeat(images[..., None], 3, axis=3)
    grey = np.empty(images.shape[:3], dtype=np.uint8)
    for row, image in enumerate(images):
        grey[row] = np.asarray(Image.fromarray(image).convert("L"))
    return grey


def stop_over_budget(where: str, skipped: Sequence[Skipped], total: int, budget: float) -> None:
    """Raise if too many images could not be read.

    Raises:
        BadInput: Naming the first 20 files with their reasons.
    """
    if len(skipped) <= budget * total:
        return
    listed = "; ".join(f'"{skip.name}" ({skip.reason})' for skip in skipped[:20])
    more = f" and {len(skipped) - 20} more" if len(skipped) > 20 else ""
    problem = f"{len(skipped)} of {total} images cannot be read, more than skip_budget = {budget:g} allows: "
    problem += f"{listed}{more}."
    raise BadInput([Fault(where, problem, "Repair or remove them, or raise skip_budget.", cause="unreadable")])


def png(image: NDArray[np.uint8], side: int) -> bytes:
    """Return a PNG file of an image ``(height, width[, 3])``, shrunk to at most ``side`` pixels a side."""
    picture, file = Image.fromarray(image), io.BytesIO()
    picture.thumbnail((side, side))
    picture.save(file, format="PNG", optimize=True)
    return file.getvalue()
