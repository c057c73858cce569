"""Read mask files and resample them to the image size of the data set.

A picture has one label map, or one mask file for each class.

The mask of a picture is a PNG file of the picture's size. JPEG is refused because it changes values, and colours are
refused because they have no class. :mod:`polyclinic.data.images.volume_masks` reads masks of volumes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyclinic.data.base.masks import pack_class_areas, pack_label_map
from polyclinic.data.images.file_kinds import explain_unsupported_file_type, read_first_bytes
from polyclinic.data.images.reading import (
    PIXEL_ASPECT_KEY,
    DecodedImageFormat,
    decode_picture,
    find_filled_part,
    open_png_or_jpeg,
)

if TYPE_CHECKING:
    from polyclinic.data.images.volumes import Volume

_PNG, _JPEG = b"\x89PNG", b"\xff\xd8"
_ORIENTATION = 0x0112
"""EXIF tag that tells viewers to rotate or mirror a picture."""


@dataclass(frozen=True)
class PictureGrid:
    """The size of a picture before it is resized.

    Attributes:
        aspect: Height of a pixel divided by its width.
    """

    height: int
    width: int
    aspect: float = 1.0


Grid: TypeAlias = "PictureGrid | Volume"
"""The grid of an image before resizing: size of a picture, or voxels of a volume and their position in the patient."""


def read_picture_grid(file: Path, form: DecodedImageFormat) -> PictureGrid:
    """Return the size of a picture file.

    Raises:
        ValueError: If the picture has an EXIF orientation, because it is unknown if its mask is rotated too.
    """
    if read_first_bytes(file).startswith((_PNG, _JPEG)):
        with open_png_or_jpeg(file) as image:
            if image.getexif().get(_ORIENTATION, 1) != 1:
                problem = "the picture has an EXIF orientation, by which it is turned, and the mask has none"
                raise ValueError(f"{problem}: save the picture upright")
            return PictureGrid(image.height, image.width)
    shown = decode_picture(file, form.rendering)
    return PictureGrid(shown.height, shown.width, shown.info.get(PIXEL_ASPECT_KEY, 1.0))


def read_grid(file: Path, form: DecodedImageFormat) -> Grid:
    """Return the grid of a picture or volume; its masks must have the same grid.

    Raises:
        ValueError: If the file cannot be read.
    """
    if not form.is_volume:
        return read_picture_grid(file, form)
    from polyclinic.data.images.volumes import read_volume_grid  # takes a second

    return read_volume_grid(file, form.rendering.largest_mb)


def measure_fitted_spacing(grid: Grid, form: DecodedImageFormat) -> tuple[float, ...] | None:
    """Return the size of a voxel along each axis in mm, after the volume is resampled; None for pictures."""
    if isinstance(grid, PictureGrid):
        return None
    from polyclinic.data.images import volume_masks  # takes a second

    return volume_masks.measure_fitted_spacing(grid, form)


def read_packed_mask(
    files: Sequence[Path | None], mask_values: Sequence[int], grid: Grid, form: DecodedImageFormat
) -> NDArray[Any]:
    """Read the masks of one image into integers ``(*spatial)`` with a bit for each class.

    Args:
        files: The label map; or the file of each class, None for a class that is not annotated.
        mask_values: The value of each class in a label map; empty if each class has its own file.
        grid: Grid of the picture or volume.

    Raises:
        ValueError: If a mask cannot be read, has another grid than its image, or has a value without a class.
    """
    if mask_values:
        (file,) = files
        assert file is not None, "a picture without a mask has no file to read"
        return pack_label_map(_fit(read_mask_values(file, grid, form), grid, form), mask_values)
    areas = np.zeros((len(files), *list_mask_sides(form)), bool)
    for column, file in enumerate(files):
        if file is None:
            continue
        values = read_mask_values(file, grid, form)
        if (others := np.setdiff1d(values, [0])).size > 1:
            problem = f"{file.name} has {len(others)} values beside 0, and a mask of one class has one"
            raise ValueError(f"{problem}: name a label map in data.mask_column")
        areas[column] = _fit(values, grid, form) != 0
    return pack_class_areas(areas)


def list_mask_sides(form: DecodedImageFormat) -> tuple[int, ...]:
    """Return the shape of a resampled mask: height and width, or depth, height and width."""
    return form.size if isinstance(form.size, tuple) else form.shape[:2]


def _fit(values: NDArray[Any], grid: Grid, form: DecodedImageFormat) -> NDArray[Any]:
    if isinstance(grid, PictureGrid):
        return fit_mask_to_format(values, grid, form)
    from polyclinic.data.images.volume_masks import fit_volume_mask  # takes a second

    return fit_volume_mask(values, grid, form)


def read_mask_values(file: Path, grid: Grid, form: DecodedImageFormat) -> NDArray[Any]:
    """Return the numbers of a mask file before resampling, ``(*spatial)``."""
    if isinstance(grid, PictureGrid):
        return _read_picture_mask(file, grid)
    from polyclinic.data.images.volume_masks import read_volume_mask  # takes a second

    return read_volume_mask(file, grid, form)


def refuse_other_grid(file: Path, grid: Grid, form: DecodedImageFormat) -> None:
    """Refuse a mask file whose grid differs from the grid of its image.

    Of a volume's mask only the header is read; a picture's mask is decoded.

    Raises:
        ValueError: If the file cannot be read, or has another grid than its image.
    """
    if isinstance(grid, PictureGrid):
        _read_picture_mask(file, grid)
        return
    from polyclinic.data.images import volume_masks  # takes a second
    from polyclinic.data.images.volumes import read_volume_grid

    volume_masks.refuse_other_grid(file.name, read_volume_grid(file, form.rendering.largest_mb), grid)


def _read_picture_mask(file: Path, grid: PictureGrid) -> NDArray[Any]:
    """Return the numbers of a mask file, ``(height, width)``; for a file with a palette, the indices of the colours.

    Raises:
        ValueError: If the file is not a grey or palette PNG file of the picture's size.
    """
    head = read_first_bytes(file)
    if head.startswith(_JPEG):
        raise ValueError(f"{file.name} is a JPEG file, which changes values: save the mask as PNG")
    if not head.startswith(_PNG):
        raise ValueError(f"{file.name} is no mask that can be read: {explain_unsupported_file_type(head)}")
    with open_png_or_jpeg(file) as image:
        image.load()
        if image.getexif().get(_ORIENTATION, 1) != 1:
            problem = f"{file.name} has an EXIF orientation, by which it is turned, and its picture has none"
            raise ValueError(f"{problem}: save the mask upright")
        values = _take_one_channel(image, file.name)
    if values.shape != (grid.height, grid.width):
        sizes = f"{values.shape[1]} x {values.shape[0]} pixels, and its picture {grid.width} x {grid.height}"
        raise ValueError(f"{file.name} has {sizes}: a mask has its picture's size")
    return values


def read_mask_palette(file: Path) -> dict[int, tuple[int, int, int]]:
    """Return the palette of a mask file, index -> colour; empty if the file has none."""
    with open_png_or_jpeg(file) as image:
        numbers = image.getpalette("RGB") if image.mode == "P" else None
    channels = iter(numbers or ())
    # Three steps of one iterator are red, green and blue of a colour.
    return dict(enumerate(zip(channels, channels, channels, strict=False)))


def _take_one_channel(image: Image.Image, name: str) -> NDArray[Any]:
    values = np.asarray(image)
    if values.ndim == 2:
        return values
    colors = values[..., : 1 if image.mode == "LA" else 3]
    if (colors != colors[..., :1]).any():
        raise ValueError(f"{name} is in colour: a label map has one number a pixel, and data.mask_values names them")
    return np.ascontiguousarray(colors[..., 0])


def fit_mask_to_format(values: NDArray[Any], grid: PictureGrid, form: DecodedImageFormat) -> NDArray[Any]:
    """Resize a mask in the same way as its picture, by the nearest pixel; padding is 0, the background."""
    filled = find_filled_part(grid.width, grid.height * grid.aspect, form)
    height, width = (part.stop - part.start for part in filled)
    canvas = np.zeros(form.shape[:2], values.dtype)
    canvas[filled] = values[np.ix_(_find_nearest(grid.height, height), _find_nearest(grid.width, width))]
    return canvas


def restore_mask_to_grid(values: NDArray[Any], grid: PictureGrid, form: DecodedImageFormat) -> NDArray[Any]:
    """Resize a mask from the image size of the data set back to the size of its picture, by the nearest pixel."""
    shown = values[find_filled_part(grid.width, grid.height * grid.aspect, form)]
    height, width = shown.shape
    restored: NDArray[Any] = shown[np.ix_(_find_nearest(height, grid.height), _find_nearest(width, grid.width))]
    return restored


def _find_nearest(old: int, new: int) -> NDArray[np.intp]:
    """Return, for each new pixel along an axis, the index of the nearest old pixel; ``old`` and ``new`` are counts."""
    return np.minimum(((np.arange(new) + 0.5) * old / new).astype(np.intp), old - 1)
