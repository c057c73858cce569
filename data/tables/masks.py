"""The mask files that a hospital's table names, in a column of label maps or in a column for each class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.masks import MaskSet, make_class_bits
from polyclinic.data.base.names import is_blank_cell
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.images.mask_store import MaskReading, MaskSource, PackedMask, read_masks
from polyclinic.data.images.masks import (
    PictureGrid,
    measure_fitted_spacing,
    read_grid,
    read_mask_palette,
    read_packed_mask,
)
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.store import DecodedImageStore
from polyclinic.data.tables.csv import CsvTable
from polyclinic.data.tables.files import LazyPicturePaths, PictureFileFinder

_MAX_LISTED = 5


@dataclass(frozen=True)
class MaskFiles:
    """The mask files of a label table; entry i of ``names`` belongs to row i.

    Attributes:
        folder: The folder to which the names are relative.
        names: File names of label maps, ``(n, 1)``, or of masks of one class, ``(n, classes)``; empty where a cell is
            blank, which means that the class is not annotated.
        class_names: The classes.
        values: The value of each class in a label map; empty if each class has its own file.
        key: The configuration key of the files, for faults.
    """

    folder: Path
    names: NDArray[np.object_]
    class_names: tuple[str, ...]
    values: tuple[int, ...]
    key: str

    @property
    def labels(self) -> NDArray[np.float32]:
        """Labels ``(n, classes)`` before masks are read: 1 where a class is annotated, NaN where it is not."""
        labels = np.where(self.names == "", np.nan, 1.0).astype(np.float32)
        return np.repeat(labels, len(self.class_names), axis=1) if self.values else labels

    @property
    def cells(self) -> NDArray[np.str_]:
        """One text for each row with all its mask files, ``(n,)``, to compare rows."""
        return np.array(["\0".join(row) for row in self.names.tolist()], dtype=np.str_)

    def select_rows(self, index: NDArray[np.intp]) -> "MaskFiles":
        """Return the files of the rows with these indices, in the given order."""
        return replace(self, names=self.names[index])


def list_mask_columns(spec: FolderDatasetSpec) -> dict[str, str]:
    """Return configuration key -> column of mask files; empty for a table of labels."""
    if spec.mask_column is not None:
        return {"data.mask_column": spec.mask_column}
    return {f"data.mask_columns.{name}": column for name, column in spec.mask_columns.items()}


def find_mask_files(spec: FolderDatasetSpec, columns: CsvTable, base: Path, images: Path) -> MaskFiles:
    """Find the mask files that a table names.

    Args:
        base: The folder to which paths in ``spec`` are relative.
        images: The folder of the pictures, which is also that of the masks if ``data.masks`` is not set.

    Raises:
        BadInput: With a fault for each column with missing files.
    """
    finder = PictureFileFinder()
    folder = images if spec.masks is None else finder.find_folder_ignoring_spelling(base, spec.masks)
    column_by_key = list_mask_columns(spec)
    names = np.empty((len(columns.lines), len(column_by_key)), dtype=object)
    faults = list[Fault]()
    for index, (key, column) in enumerate(column_by_key.items()):
        cells = columns.get_column(column).expand_to_row_cells().tolist()
        row_names = ["" if is_blank_cell(cell) else cell for cell in cells]
        files = finder.find_files_in_order(str(folder), [name for name in row_names if name])
        absent = [name for name, file in zip(filter(None, row_names), files, strict=True) if file is None]
        if absent:
            problem = f"{format_count_with_noun(len(absent), 'mask')} named in {spec.labels} not in {folder.name}: "
            problem += f"{quote_names(absent, _MAX_LISTED)}."
            remedy = "Add them. A blank cell says that nothing is annotated in the image."
            faults.append(Fault(key, problem, remedy))
        on_disk = iter(files)
        names[:, index] = [name and (next(on_disk) or name) for name in row_names]
    faults += finder.find_unlistable_folder_faults()
    if faults:
        raise BadInput(faults)
    values = tuple(spec.mask_values.values())
    return MaskFiles(folder, names, spec.class_names_in_table, values, next(iter(column_by_key)))


def read_table_masks(
    masks: MaskFiles, pictures: LazyPicturePaths, form: DecodedImageFormat, store: DecodedImageStore
) -> tuple[MaskSet, NDArray[np.float32]]:
    """Read the masks of a table's pictures; return them with labels ``(n, classes)``.

    A label is 1 if the class has a pixel, 0 if it has none, and NaN if it is not annotated.

    Raises:
        BadInput: With the masks that cannot be used, and the reasons.
    """
    sources = list[MaskSource | None]()
    for row, cells in enumerate(masks.names.tolist()):
        files = tuple(Path(masks.folder, name) if name else None for name in cells)
        sources.append(MaskSource(pictures[row], files) if any(files) else None)
    reading = MaskReading(
        form, masks.values, len(masks.class_names), partial(_describe_grid, form), partial(_read_mask, masks, form)
    )
    read = read_masks(sources, reading, store)
    if read.reasons:
        listed = [f'"{pictures.names[row]}": {reason}' for row, reason in sorted(read.reasons.items())]
        problem = f"{format_count_with_noun(len(read.reasons), 'mask')} of {len(sources)} cannot be used: "
        problem += f"{list_first_and_count_rest(listed, _MAX_LISTED)}."
        remedy = "Repair them, or leave their cells blank: a class of a blank cell is not annotated."
        raise BadInput([Fault(masks.key, problem, remedy)])
    mask_set = MaskSet(read.stored, read.places, make_class_bits(masks.class_names))
    shown = mask_set.find_shown_classes(masks.class_names)
    if unlike := _find_unlike_palettes(masks, shown, read.palettes):
        remedy = (
            "Save all masks with one palette, or without a palette: of a palette the indices count, not the colours."
        )
        raise BadInput([Fault(masks.key, unlike, remedy)])
    if form.is_volume:  # the spacing of an image without a mask is not used: no distance is measured in it
        mask_set = replace(mask_set, spacing=np.where(np.isnan(read.spacings), 1.0, read.spacings))
    return mask_set, np.where(np.isnan(masks.labels), np.nan, shown).astype(np.float32)


def _describe_grid(form: DecodedImageFormat, source: MaskSource) -> str:
    """Return a text that identifies the grid of an image; its masks must have the same grid."""
    grid = read_grid(source.picture, form)
    if isinstance(grid, PictureGrid):
        return repr((grid.height, grid.width, grid.aspect))
    return repr((grid.voxels.shape, grid.affine.tolist()))


def _read_mask(masks: MaskFiles, form: DecodedImageFormat, source: MaskSource) -> PackedMask:
    """Read the masks of one image.

    Raises:
        ValueError: As :func:`read_packed_mask`.
    """
    grid = read_grid(source.picture, form)
    values = read_packed_mask(source.files, masks.values, grid, form)
    spacing, palette = measure_fitted_spacing(grid, form), dict[int, tuple[int, int, int]]()
    if spacing is None and masks.values and source.files[0] is not None:
        palette = read_mask_palette(source.files[0])
    return PackedMask(values, spacing, palette)


def _find_unlike_palettes(
    masks: MaskFiles, shown: NDArray[np.bool_], palettes: Sequence[Mapping[int, tuple[int, int, int]]]
) -> str:
    """Return a sentence about two masks whose palettes give one value different colours; empty if there are none.

    Some programs make a new palette for each picture. A value then means one organ in one mask, and another organ in
    the next.

    Args:
        shown: ``(n, classes)``, True if a mask has a pixel of a class.
    """
    first = dict[int, tuple[int, tuple[int, int, int]]]()
    for row, palette in enumerate(palettes):
        for column, value in enumerate(masks.values):
            if value not in palette or not shown[row, column]:
                continue
            before, color = first.setdefault(value, (row, palette[value]))
            if color != palette[value]:
                files = [f'"{masks.names[index, 0]}"' for index in (before, row)]
                problem = f"{files[0]} shows {value} in the colour {color}, and {files[1]} in {palette[value]}"
                return f"{problem}: one number may mean two classes."
    return ""


def describe_empty_masks(labels: Sequence[Sequence[float]] | NDArray[np.float32]) -> str:
    """Return a sentence with the number of images whose masks show no class; empty if there are none."""
    matrix = np.asarray(labels)
    empty = int(((matrix == 0).any(axis=1) & ~(matrix == 1).any(axis=1)).sum())
    if not empty:
        return ""
    images = format_count_with_noun(empty, "image has an empty mask", "images have empty masks")
    return f"{images}: the classes named there count as absent, not as not annotated."
