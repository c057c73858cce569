"""Decode PNG, JPEG, DICOM and NIfTI files, and convert the pictures to the size and colour of a data set."""

import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB, refuse_oversized_file
from polyclinic.data.base.image_set import SkippedImage
from polyclinic.data.base.spec import DEFAULT_RENDERING, PictureRenderingOptions, Resize, VolumeSize
from polyclinic.data.images.bands import scale_samples_to_8_bits, scale_values_to_8_bits
from polyclinic.data.images.file_kinds import (
    HEAD_BYTES,
    PNG_OR_JPEG_SIGNATURES,
    PNG_SIGNATURE,
    describe_png_conversion,
    explain_unsupported_file_type,
    is_dicom_file,
    is_nifti_file,
    read_first_bytes,
)
from polyclinic.data.images.jpeg import decode_jpeg
from polyclinic.data.images.middle_slices import show_middle_slices
from polyclinic.data.images.rendered import SQUARE_TOLERANCE, RenderedPicture

_MAX_REASON_CHARACTERS = 150
_MAX_COLOR_NOISE = 8
"""Maximum difference between the channels of a pixel that counts as grey, of 255."""
_MAX_COLORED_SHARE = 0.001
"""Maximum share of coloured pixels in a picture that counts as grey."""
BLANK_KEY = "blank"
"""Key in a Pillow image's ``info``, True if a window misses all values of a DICOM file or a NIfTI slice."""
PIXEL_ASPECT_KEY = "pixel_aspect"
"""Key in a Pillow image's ``info``: height of a pixel divided by its width, for DICOM and NIfTI."""
UNKNOWN_DEPTH_MESSAGE = "a PNG file of 16 bits a sample; data.bit_depth must say how many of them are used, such as 12"
_ORIENTATION_MARKERS = (b"eXIf", b"adobe.xmp", b"Raw profile type")
"""Byte sequences of PNG metadata that may contain an orientation."""
# Our limit, which users can raise, replaces Pillow's: see polyclinic.data.base.decoded_size.
Image.MAX_IMAGE_PIXELS = None
_SAMPLES_PER_PIXEL = {0: 1, 2: 3, 3: 4, 4: 2, 6: 4}
"""Colour type of a PNG file -> samples per pixel after decoding; a palette is decoded to colours."""
_PILLOW_BYTES_PER_PIXEL = 4
"""Bytes per pixel of Pillow's images, except grey images."""


@dataclass(frozen=True)
class DecodedImageFormat:
    """The format to which all pictures or volumes of a data set are converted.

    Attributes:
        size: Side of the square pictures in pixels; for volumes depth, height and width in voxels.
        color: True for pictures in colour.
        resize: How a picture of another aspect ratio is made square.
        rendering: The options for rendering a file as a picture.
    """

    size: int | VolumeSize
    color: bool
    resize: Resize
    rendering: PictureRenderingOptions = DEFAULT_RENDERING

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one picture, ``(size, size[, 3])``, or of one volume, ``(depth, height, width, 1)``."""
        if isinstance(self.size, tuple):
            return (*self.size, 1)
        return (self.size, self.size, 3) if self.color else (self.size, self.size)

    @property
    def is_volume(self) -> bool:
        """True if the data set consists of volumes."""
        return isinstance(self.size, tuple)

    @property
    def side(self) -> int:
        """Side of the pictures in pixels; 0 for volumes."""
        return 0 if isinstance(self.size, tuple) else self.size


def explain_decoding_error(error: Exception) -> str:
    """Return a one-line reason for the user why a file cannot be decoded, given the exception."""
    reason = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"the file cannot be opened: {error.strerror}"
    if isinstance(error, ValueError | OSError) and 0 < len(reason) <= _MAX_REASON_CHARACTERS:
        return reason
    return "damaged, or of a kind that cannot be decoded here"


def decode_picture(
    content: bytes | Path, rendering: PictureRenderingOptions = DEFAULT_RENDERING, side: int = 0
) -> Image.Image:
    """Decode an image file into an 8-bit grey ("L") or colour ("RGB") picture; its content decides the file type.

    Args:
        content: The bytes of the file, or its path. From a NIfTI volume at a path only one slice is read.
        side: Size in pixels to which the picture is shrunk later. With ``rendering.jpeg_draft`` a JPEG file is decoded
            at a half, a quarter or an eighth of its size, but not below ``side``. 0 decodes in full size.

    Raises:
        OSError, ValueError, ...: Any error of the decoders; see
        :func:`polyclinic.data.images.store.decode_pictures`.
    """
    if isinstance(content, Path) and is_nifti_file(read_first_bytes(content)):
        from polyclinic.data.images.nifti import render_nifti_slice  # takes a second, like DICOM

        return _make_pillow_image(render_nifti_slice(content, rendering))
    data = content.read_bytes() if isinstance(content, Path) else content
    if not data:
        raise ValueError("empty")
    if is_dicom_file(data):
        from polyclinic.data.images.dicom import render_dicom_file  # takes a second, and most data sets have none

        return _make_pillow_image(render_dicom_file(data, rendering))
    if not data.startswith(PNG_OR_JPEG_SIGNATURES):
        raise ValueError(explain_unsupported_file_type(data[:HEAD_BYTES]))

    image = _decode_png(data, rendering) if data.startswith(PNG_SIGNATURE) else _decode_jpeg(data, rendering, side)
    ImageOps.exif_transpose(image, in_place=True)  # upright, as viewers show it
    return _convert_pillow_mode(image, "L" if image.mode in ("1", "L", "LA") else "RGB")


def _decode_png(data: bytes, rendering: PictureRenderingOptions) -> Image.Image:
    is_deep = is_16_bit_png(data) and rendering.value_range is None
    if is_deep and rendering.bit_depth is None:
        raise ValueError(UNKNOWN_DEPTH_MESSAGE)
    if is_deep and rendering.bit_depth != 16 and data.find(b"sBIT", 0, data.find(b"IDAT")) >= 0:
        raise ValueError("a PNG file with an sBIT chunk, so its samples fill 16 bits; data.bit_depth must be 16")
    samples = decode_png_samples(data, rendering.largest_mb)
    if rendering.value_range is not None:
        samples = scale_values_to_8_bits(samples, rendering.value_range)
    elif samples.dtype == np.uint16:
        samples = scale_samples_to_8_bits(samples, rendering.bit_depth or 16, "data.bit_depth")
    image = Image.fromarray(samples)
    if any(mark in data for mark in _ORIENTATION_MARKERS):
        with open_png_or_jpeg(data) as head:
            image.getexif().update(head.getexif())
    return image


def _decode_jpeg(data: bytes, rendering: PictureRenderingOptions, side: int) -> Image.Image:
    def check_size_and_set_scale(opened: Image.Image) -> None:
        pixel_bytes = 1 if opened.mode == "L" else _PILLOW_BYTES_PER_PIXEL
        if opened.info.get("progressive"):
            # The decoder keeps the coefficients of a progressive JPEG, two bytes each, until it has all of them.
            pixel_bytes += 2 * len(opened.getbands())
        size = opened.width * opened.height * pixel_bytes
        refuse_oversized_file(size, rendering.largest_mb << 20)
        if side and rendering.jpeg_draft:
            opened.draft(None, (side, side))

    image = decode_jpeg(data, check_size_and_set_scale)
    if rendering.value_range is None:
        return image
    image = _convert_pillow_mode(image, "L" if image.mode == "L" else "RGB")
    table = scale_values_to_8_bits(np.arange(256, dtype=np.uint8), rendering.value_range)
    return image.point(table.tolist() * len(image.getbands()))


def _make_pillow_image(picture: RenderedPicture) -> Image.Image:
    image = Image.fromarray(picture.pixels)
    image.info |= {BLANK_KEY: picture.is_blank, PIXEL_ASPECT_KEY: picture.pixel_aspect}
    return image


def decode_png_samples(data: bytes, largest_mb: int = DEFAULT_LARGEST_MB) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Decode a PNG file to ``(height, width[, 3])``, without its alpha channel.

    This uses libpng instead of Pillow, which keeps only 8 of 16 bits and accepts a truncated file.

    Raises:
        ValueError: If the file is damaged, cut off or too large.
    """
    from imagecodecs import png_decode

    with open_png_or_jpeg(data) as head:
        pixels = head.width * head.height
    samples = _SAMPLES_PER_PIXEL.get(data[25], 4)
    pixel_bytes = samples * (2 if is_16_bit_png(data) else 1)
    if samples > 1:
        pixel_bytes = max(pixel_bytes, _PILLOW_BYTES_PER_PIXEL)
    refuse_oversized_file(pixels * pixel_bytes, largest_mb << 20)
    try:
        decoded = png_decode(data)
    except RuntimeError:
        raise ValueError("damaged or cut off") from None
    if decoded.ndim == 3:
        decoded = decoded[..., 0] if decoded.shape[2] <= 2 else decoded[..., :3]
    return np.ascontiguousarray(decoded)


def is_16_bit_png(head: bytes) -> bool:
    """Return True for a PNG file with 16-bit samples, given its first bytes from :func:`read_first_bytes`."""
    return head.startswith(PNG_SIGNATURE) and head[24:25] == b"\x10"


def open_png_or_jpeg(content: bytes | Path) -> Image.Image:
    """Open a PNG or JPEG file with Pillow, without decoding its pixels.

    Raises:
        ValueError: If the header is damaged, or the file is of another kind.
    """
    try:
        return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=("PNG", "JPEG"))
    except UnidentifiedImageError:
        raise ValueError("damaged or cut off") from None


def has_unequal_density(image: Image.Image) -> bool:
    """Return True if a PNG or JPEG file says that its pixels are not square (pHYs, JFIF density).

    The pixels are treated as square nevertheless, as in web browsers, because many programs write wrong numbers.
    """
    density = image.info.get("dpi") or image.info.get("aspect") or image.info.get("jfif_density") or (1, 1)
    across, down = (float(number) for number in density)
    return across > 0 and down > 0 and abs(across / down - 1) > SQUARE_TOLERANCE


def _convert_pillow_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert a picture to a Pillow mode; return the picture itself, not a copy, if it already has that mode."""
    return image if image.mode == mode else image.convert(mode)


def fit_picture_to_format(image: Image.Image, form: DecodedImageFormat) -> NDArray[np.uint8]:
    """Convert a picture to the size and colour of a data set, with bilinear resizing.

    A picture that is not square is padded with black, unless ``form.resize`` is "stretch". If the pixels of a DICOM or
    NIfTI file are not square, they become square in the same step.
    """
    mode = "RGB" if form.color else "L"
    # Grey is converted to colour after resizing.
    image = image if image.mode == "L" else _convert_pillow_mode(image, mode)
    rows, columns = find_filled_part(image.width, image.height * image.info.get(PIXEL_ASPECT_KEY, 1), form)
    size = (columns.stop - columns.start, rows.stop - rows.start)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    image = _convert_pillow_mode(image, mode)
    canvas = np.zeros(form.shape, dtype=np.uint8)
    canvas[rows, columns] = np.asarray(image)
    return canvas


def find_filled_part(width: float, height: float, form: DecodedImageFormat) -> tuple[slice, slice]:
    """Return the rows and columns of a converted picture that show the original picture; the rest is padding.

    Args:
        width: Width of the original picture, in any unit of length.
        height: Height of the original picture, in the same unit.
    """
    filled_width, filled_height = form.side, form.side
    if form.resize == "pad":
        filled_width, filled_height = (max(1, round(side * form.side / max(width, height))) for side in (width, height))
    top, left = (form.side - filled_height) // 2, (form.side - filled_width) // 2
    return slice(top, top + filled_height), slice(left, left + filled_width)


def has_color(image: Image.Image) -> bool:
    """Return True if a decoded picture, of mode "L" or "RGB", has a pixel with unequal channels."""
    if image.mode == "L":
        return False
    red, green, blue = image.split()
    return any(ImageChops.difference(red, other).getbbox() is not None for other in (green, blue))


def resize_images(images: NDArray[np.uint8], size: int | None, resize: Resize) -> NDArray[np.uint8]:
    """Resize images ``(n, height, width[, 3])`` to squares of side ``size``; return the same array if they are."""
    if size is None or images.shape[1:3] == (size, size):
        return images
    form = DecodedImageFormat(size, images.ndim == 4, resize)
    result = np.empty((len(images), *form.shape), dtype=np.uint8)
    for row, image in enumerate(images):
        result[row] = fit_picture_to_format(Image.fromarray(image), form)
    return result


def convert_image_colors(images: NDArray[np.uint8], color: bool) -> NDArray[np.uint8]:
    """Convert images ``(n, height, width[, 3])`` to grey or colour; return the same array if nothing changes."""
    if color == (images.ndim == 4):
        return images
    if color:
        return np.repeat(images[..., None], 3, axis=3)
    grey = np.empty(images.shape[:3], dtype=np.uint8)
    for row, image in enumerate(images):
        grey[row] = np.asarray(Image.fromarray(image).convert("L"))
    return grey


def refuse_too_many_skipped_images(where: str, skipped: Sequence[SkippedImage], total: int, budget: float) -> None:
    """Raise an error if more than the fraction ``budget`` of a data set's images is unreadable.

    Args:
        where: The configuration key that the error message names.
        total: Number of all images, including unreadable images.

    Raises:
        BadInput: With the first five file names for each reason.
    """
    if len(skipped) <= budget * total:
        return
    names_by_reason = defaultdict[str, list[str]](list)
    for image in skipped:
        names_by_reason[image.reason].append(image.name)
    listed = [f"{quote_names(names, 5)} ({reason})" for reason, names in names_by_reason.items()]
    more = f"; and of {len(listed) - 20} other reasons" if len(listed) > 20 else ""
    problem = f"{len(skipped)} of {total} images cannot be read, more than skip_budget = {budget:g} allows: "
    problem += f"{'; '.join(listed[:20])}{more}."
    remedy = " ".join(
        filter(None, ("Repair or remove them, or raise skip_budget.", describe_png_conversion(names_by_reason)))
    )
    raise BadInput([Fault(where, problem, remedy, cause="unreadable")])


def is_grey_picture(image: NDArray[np.uint8]) -> bool:
    """Return True if a picture ``(height, width[, 3])`` is grey, apart from a few pixels and small differences."""
    if image.ndim == 2:
        return True
    spread = image.max(axis=2).astype(np.int16) - image.min(axis=2)
    return bool((spread > _MAX_COLOR_NOISE).mean() <= _MAX_COLORED_SHARE)


def encode_png_thumbnail(image: NDArray[np.uint8], side: int) -> bytes:
    """Encode an image ``(height, width[, 3])`` as PNG, shrunk so that no side exceeds ``side`` pixels.

    For a volume ``(depth, height, width, channels)``, the thumbnail shows its three middle slices.
    """
    shown = show_middle_slices(image) if image.ndim == 4 else image
    thumbnail, file = Image.fromarray(shown), io.BytesIO()
    thumbnail.thumbnail((side, side))
    thumbnail.save(file, format="PNG", optimize=True)
    return file.getvalue()
