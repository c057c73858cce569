"""Masks of an image set: for each pixel (or voxel), the classes that are there, as bits of one whole number.

Bits take overlapping classes, one file for each class, and label maps alike. A class that is not annotated in an image
has the label NaN there; its bits then have no meaning.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import quote_names
from polyclinic.data.base.spec import MOST_MASK_CLASSES

_TYPES = ((8, np.uint8), (15, np.int16), (31, np.int32), (MOST_MASK_CLASSES, np.int64))
"""Number of classes -> the narrowest type with as many bits that torch computes with."""


def choose_mask_type(classes: int) -> type[np.unsignedinteger[Any] | np.signedinteger[Any]]:
    """Return the type of the whole numbers that hold a bit for each class.

    Raises:
        ValueError: If there are too many classes.
    """
    for most, kind in _TYPES:
        if classes <= most:
            return kind
    raise ValueError(f"masks hold at most {MOST_MASK_CLASSES} classes, got {classes}")


class MaskRows(Protocol):
    """Rows of bytes on the disk, such as :class:`polyclinic.data.base.image_set.LazyPictures`."""

    def __len__(self) -> int: ...
    def view_picture(self, row: int) -> NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class LazyMasks:
    """Masks that are read from the disk when they are needed; they behave as an array ``(m, *spatial)``.

    Attributes:
        rows: Each mask's bytes, in the order of memory, at the beginning of a row; more bytes may follow.
        sides: The shape of one mask.
        dtype: Type of the whole numbers.
        any_bits: ``(m,)``, the bits that each mask has anywhere.
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
        """Return one mask ``(*spatial)``, which the caller only reads."""
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
        stored: Whole numbers ``(m, *spatial)``, in which a bit says that a class is there; in memory or on the disk.
        places: ``(n,)``, the index of each image's mask in ``stored``.
        bits: Class -> the bits that mean it; a class has several if several columns of the source mean it.
        spacing: Side of a pixel or voxel of each image along each axis, ``(n, axes)``, in mm; None if unknown, then
            distances are in pixels.
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
        """Return the same masks with these classes; each is where one of its old classes is.

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
        """Return where each class is in the images with these indices, ``(rows, classes, *spatial)``."""
        masks = self.stored[self.places[rows]]
        return np.stack([(masks & self.bits[name]) != 0 for name in class_names], axis=1)

    def find_shown_classes(self, class_names: Sequence[str]) -> NDArray[np.bool_]:
        """Return ``(n, classes)``, True where a class has a pixel in an image."""
        if isinstance(self.stored, LazyMasks):
            any_bits = self.stored.any_bits[self.places]
        else:
            axes = tuple(range(1, self.stored.ndim))
            any_bits = np.bitwise_or.reduce(self.stored, axis=axes)[self.places] if axes else self.stored[self.places]
        return np.stack([(any_bits & self.bits[name]) != 0 for name in class_names], axis=1).reshape(len(self), -1)


def concatenate_masks(sets: Iterable[MaskSet]) -> MaskSet:
    """Join the masks of several image sets of the same classes; no mask is copied if all use the same store."""
    every = list(sets)
    shared = all(masks.stored is every[0].stored for masks in every)
    starts = [0] * len(every) if shared else np.cumsum([0, *(len(masks.stored) for masks in every[:-1])]).tolist()
    spacings = [masks.spacing for masks in every if masks.spacing is not None]
    return replace(
        every[0],
        stored=every[0].stored if shared else np.concatenate([masks.stored[:] for masks in every]),
        places=np.concatenate([masks.places + start for masks, start in zip(every, starts, strict=True)]),
        spacing=np.concatenate(spacings) if len(spacings) == len(every) else None,
    )


def make_empty_masks(count: int, shape: Sequence[int], class_names: Sequence[str]) -> MaskSet:
    """Return masks of this shape that show no class, all of them one in memory."""
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
        values: Whole numbers, also as floats, ``(*spatial)``.

    Raises:
        ValueError: If a value is no whole number, or is neither 0 nor in ``mask_values``.
    """
    known = np.array([0, *mask_values])
    present = np.unique(values)
    if not np.isfinite(present.astype(np.float64)).all() or (present != np.floor(present)).any():
        broken = next(value for value in present.tolist() if not np.isfinite(value) or value != np.floor(value))
        raise ValueError(f"the mask has the value {broken:g}: a label map holds whole numbers, one for each class")
    if (foreign := np.setdiff1d(present, known)).size:
        named = quote_names([f"{value:g}" for value in foreign.tolist()], limit=5)
        problem = f"the mask has {named}, which data.mask_values does not name; it names {quote_names(map(str, known))}"
        raise ValueError(problem)
    order = np.argsort(known)
    kind = choose_mask_type(len(mask_values))
    bits = np.array([0, *(1 << column for column in range(len(mask_values)))], kind)
    return bits[order][np.searchsorted(known[order], values)]


def make_class_bits(class_names: Sequence[str]) -> dict[str, int]:
    """Return class -> bit, in the order in which :func:`pack_class_areas` and :func:`pack_label_map` use them."""
    return {name: 1 << column for column, name in enumerate(class_names)}
