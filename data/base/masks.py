"""Masks of an image set: one integer for each pixel (or voxel), in which each bit stands for a class.

This form also holds overlapping classes. If a class is not annotated in an image, its label is NaN, and its bits in the
mask have no meaning.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import quote_names
from polyclinic.data.base.spec import MAX_MASK_CLASSES

_MASK_TYPES = ((8, np.uint8), (15, np.int16), (31, np.int32), (MAX_MASK_CLASSES, np.int64))
"""Maximum number of classes -> the narrowest integer type that has a bit for each and that torch computes with."""


def choose_mask_type(classes: int) -> type[np.unsignedinteger[Any] | np.signedinteger[Any]]:
    """Return the narrowest integer type that has a bit for each class.

    Raises:
        ValueError: If there are too many classes.
    """
    for most, kind in _MASK_TYPES:
        if classes <= most:
            return kind
    raise ValueError(f"masks hold at most {MAX_MASK_CLASSES} classes, got {classes}")


class MaskRows(Protocol):
    """Rows of bytes that are stored on the disk, such as :class:`polyclinic.data.base.image_set.LazyPictures`."""

    def __len__(self) -> int: ...
    def view_picture(self, row: int) -> NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class LazyMasks:
    """Masks that are read from the disk when they are needed; the object behaves like an array ``(m, *spatial)``.

    Attributes:
        rows: One row of bytes for each mask: the mask in C order, perhaps followed by padding.
        sides: The shape of one mask.
        dtype: Integer type of the masks.
        any_bits: ``(m,)``, bitwise OR of all pixels of each mask.
    """

    rows: MaskRows
    sides: tuple[int, ...]
    dtype: np.dtype[Any]
    any_bits: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), *self.sides

    @property
    def ndim(self) -> int:
        return 1 + len(self.sides)

    def __len__(self) -> int:
        return len(self.rows)

    def view_mask(self, place: int) -> NDArray[Any]:
        """Return one mask ``(*spatial)``, which the caller must not change."""
        row = self.rows.view_picture(place)
        mask: NDArray[Any] = row[: math.prod(self.sides) * self.dtype.itemsize].view(self.dtype).reshape(self.sides)
        return mask

    def __getitem__(self, places: NDArray[np.intp] | slice | int) -> NDArray[Any]:
        if isinstance(places, int | np.integer):
            return self.view_mask(int(places))
        chosen = np.arange(len(self))[places]
        masks = np.empty((len(chosen), *self.sides), self.dtype)
        for mask, place in zip(masks, chosen.tolist(), strict=True):
            mask[...] = self.view_mask(place)
        return masks


@dataclass(frozen=True, eq=False)
class MaskSet:
    """The masks of the images of an image set.

    Attributes:
        stored: Integers ``(m, *spatial)`` in memory or on the disk; a bit is set where a class is present.
        places: ``(n,)``, the index of each image's mask in ``stored``.
        bits: Class -> its bits; several bits if several columns of the source mean the class.
        spacing: Size of a pixel or voxel of each image along each axis, ``(n, axes)``, in mm. If None, the size is
            unknown, and distances are measured in pixels.
    """

    stored: NDArray[Any] | LazyMasks
    places: NDArray[np.intp]
    bits: Mapping[str, int]
    spacing: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.places)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one mask: height and width, or depth, height and width."""
        return tuple(self.stored.shape[1:])

    def select_rows(self, index: NDArray[np.intp]) -> "MaskSet":
        """Return the masks of the images with these indices, without copying masks."""
        spacing = None if self.spacing is None else self.spacing[index]
        return replace(self, places=self.places[index], spacing=spacing)

    def merge_classes(self, groups: Mapping[str, Sequence[str]]) -> "MaskSet":
        """Return the same masks with new classes, each of which is the union of some of the old classes.

        Args:
            groups: New class name -> old class names.
        """
        bits = dict[str, int]()
        for name, members in groups.items():
            bits[name] = 0
            for member in members:
                bits[name] |= self.bits[member]
        return replace(self, bits=bits)

    def read_class_areas(self, rows: NDArray[np.intp], class_names: Sequence[str]) -> NDArray[np.bool_]:
        """Return True where a class is present, ``(rows, classes, *spatial)``, in the images with these indices."""
        masks = self.stored[self.places[rows]]
        return np.stack([(masks & self.bits[name]) != 0 for name in class_names], axis=1)

    def find_shown_classes(self, class_names: Sequence[str]) -> NDArray[np.bool_]:
        """Return ``(n, classes)``, True where a class has at least one pixel in an image."""
        if isinstance(self.stored, LazyMasks):
            any_bits = self.stored.any_bits[self.places]
        else:
            axes = tuple(range(1, self.stored.ndim))
            any_bits = np.bitwise_or.reduce(self.stored, axis=axes)[self.places] if axes else self.stored[self.places]
        return np.stack([(any_bits & self.bits[name]) != 0 for name in class_names], axis=1).reshape(len(self), -1)


def concatenate_masks(sets: Iterable[MaskSet]) -> MaskSet:
    """Join the masks of several image sets of the same classes; no mask is copied if all use the same store."""
    parts = list(sets)
    shared = all(masks.stored is parts[0].stored for masks in parts)
    starts = [0] * len(parts) if shared else np.cumsum([0, *(len(masks.stored) for masks in parts[:-1])]).tolist()
    spacings = [masks.spacing for masks in parts if masks.spacing is not None]
    return replace(
        parts[0],
        stored=parts[0].stored if shared else np.concatenate([masks.stored[:] for masks in parts]),
        places=np.concatenate([masks.places + start for masks, start in zip(parts, starts, strict=True)]),
        spacing=np.concatenate(spacings) if len(spacings) == len(parts) else None,
    )


def make_empty_masks(count: int, shape: Sequence[int], class_names: Sequence[str]) -> MaskSet:
    """Return masks ``(count, *shape)`` in which no class is present; all of them share one array of zeros."""
    stored = np.zeros((1, *shape), choose_mask_type(len(class_names)))
    return MaskSet(stored, np.zeros(count, np.intp), make_class_bits(class_names))


def pack_class_areas(areas: NDArray[np.bool_]) -> NDArray[Any]:
    """Pack the areas of classes ``(classes, *spatial)`` into integers ``(*spatial)``: bit c is set within class c."""
    kind = choose_mask_type(len(areas))
    packed = np.zeros(areas.shape[1:], kind)
    for column, area in enumerate(areas):
        packed |= area.astype(kind) << kind(column)
    return packed


def pack_label_map(values: NDArray[Any], mask_values: Sequence[int]) -> NDArray[Any]:
    """Pack a label map into integers: bit c is set where the map has the value ``mask_values[c]``; 0 is background.

    Args:
        values: Whole numbers, as integers or floats, ``(*spatial)``.

    Raises:
        ValueError: If a value is not a whole number, or is neither 0 nor in ``mask_values``.
    """
    allowed = np.array([0, *mask_values])
    present = np.unique(values)
    if not np.isfinite(present.astype(np.float64)).all() or (present != np.floor(present)).any():
        broken = next(value for value in present.tolist() if not np.isfinite(value) or value != np.floor(value))
        raise ValueError(f"the mask has the value {broken:g}: a label map holds whole numbers, one for each class")
    foreign = np.setdiff1d(present, allowed)
    if foreign.size:
        quoted = quote_names([f"{value:g}" for value in foreign.tolist()], limit=5)
        names = quote_names(map(str, allowed))
        raise ValueError(f"the mask has {quoted}, which data.mask_values does not name; it names {names}")
    order = np.argsort(allowed)
    kind = choose_mask_type(len(mask_values))
    bits = np.array([0, *(1 << column for column in range(len(mask_values)))], kind)
    return bits[order][np.searchsorted(allowed[order], values)]


def make_class_bits(class_names: Sequence[str]) -> dict[str, int]:
    """Return class -> bit; class c has bit c, as in :func:`pack_class_areas` and :func:`pack_label_map`."""
    return {name: 1 << column for column, name in enumerate(class_names)}
