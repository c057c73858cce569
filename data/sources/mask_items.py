"""Read masks from the items of a user's data set, ``(image, mask)`` or dictionaries with both, or from an array.

A mask has one of three forms: a label map with the values of ``mask_values`` in
:class:`polyclinic.data.sources.plugin.LabelledImages`; an array of 0 and 1 for each class, ``(classes, *spatial)``; a
dictionary from class to array or None. None means that the class, or the whole image, is not annotated. Masks are read
once, so that an item must not have random transforms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.data.base.masks import MaskSet, choose_mask_type, make_class_bits, pack_class_areas, pack_label_map
from polyclinic.data.sources.dataset_items import ITEM_FUNCTION_REMEDY, keep_letters_and_digits
from polyclinic.data.sources.label_array import convert_to_numpy_array

MASK_KEYS = ("mask", "masks", "seg", "segmentation", "label", "labels", "target", "targets")
"""Keys of a dictionary item that may hold its mask, reduced to lower-case letters and digits."""
_MAX_FAILED_ITEMS = 5


class MapStyleItems:
    """A view of a user's data set that returns items without their masks.

    Args:
        dataset: The data set.
        convert: The user's function that converts an item to a supported form; None if it is not needed.
    """

    def __init__(self, dataset: Any, convert: Callable[[Any], Any] | None) -> None:
        self.dataset, self.convert = dataset, convert

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.split_item(row)[0]

    def split_item(self, row: int) -> tuple[Any, Any]:
        """Return an item without its mask, and the mask.

        Raises:
            ValueError: If the item has no mask, or several.
        """
        item = self.dataset[row] if self.convert is None else self.convert(self.dataset[row])
        if isinstance(item, Mapping):
            names = [key for key in item if keep_letters_and_digits(key) in MASK_KEYS]
            if len(names) != 1:
                held = quote_names(map(str, names)) if names else f"none among {quote_names(map(str, item))}"
                raise ValueError(
                    f'must have one entry with its mask, such as "mask"; it has {held}. {ITEM_FUNCTION_REMEDY}'
                )
            return {key: value for key, value in item.items() if key != names[0]}, item[names[0]]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise ValueError(
                f"is no (image, mask) and no dictionary with both: {type(item).__name__}. {ITEM_FUNCTION_REMEDY}"
            )
        return item[0], item[1]


@dataclass(frozen=True)
class ReadMasks:
    """The masks of a data set, and the labels that follow from them.

    Attributes:
        labels: float32 ``(n, classes)``: 1 if a class has a pixel in an image, 0 if not, NaN if it is not annotated.
    """

    masks: MaskSet
    labels: NDArray[np.float32]


def read_item_masks(items: Sequence[Any] | MapStyleItems, values: Mapping[str, int], where: str) -> ReadMasks:
    """Read all masks of a data set, or of an array ``(n, *spatial)``.

    Args:
        values: Class -> its value in label maps.
        where: Name of the data set, for error messages.

    Raises:
        BadInput: With the first items whose masks cannot be used.
    """
    names = tuple(values)
    faults = list[Fault]()
    packed = list[NDArray[Any] | None]()
    is_annotated = np.ones((len(items), len(names)), dtype=np.bool_)
    for row in range(len(items)):
        try:
            mask = items.split_item(row)[1] if isinstance(items, MapStyleItems) else items[row]
            bits, is_annotated[row] = _pack_mask(mask, values)
            first = next((earlier for earlier in packed if earlier is not None), bits)
            if bits is not None and first is not None and bits.shape != first.shape:
                raise ValueError(f"has a mask of shape {bits.shape}, and others have {first.shape}")
            packed.append(bits)
        except Exception as error:  # code of the user or of a library may raise anything
            text = str(error) if type(error) is ValueError else f"failed: {type(error).__name__}: {error}"
            faults.append(Fault(f"{where}[{row}]", f"{text.rstrip('.')}."))
            packed.append(None)
        if len(faults) >= _MAX_FAILED_ITEMS:
            break
    if not faults and all(mask is None for mask in packed):
        faults.append(Fault(where, "has no mask in any item."))
    if faults:
        raise BadInput(faults)
    shape = next(mask.shape for mask in packed if mask is not None)
    empty = np.zeros(shape, choose_mask_type(len(names)))
    stored = np.stack([empty if mask is None else mask for mask in packed])
    masks = MaskSet(stored, np.arange(len(stored)), make_class_bits(names))
    labels = np.where(is_annotated, masks.find_shown_classes(names), np.nan).astype(np.float32)
    return ReadMasks(masks, labels)


def _pack_mask(mask: Any, values: Mapping[str, int]) -> tuple[NDArray[Any] | None, NDArray[np.bool_]]:
    """Return one mask as integers with a bit for each class, and a mask ``(classes,)`` of the annotated classes.

    The integers are None if no class is annotated.

    Raises:
        ValueError: If ``mask`` does not have a supported form.
    """
    nothing = np.zeros(len(values), dtype=np.bool_)
    if mask is None:
        return None, nothing
    if isinstance(mask, Mapping):
        return _pack_areas_by_name(mask, values)
    array = convert_to_numpy_array(mask)
    if array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim > 2 and array.shape[0] == len(values) and len(values) > 1 and np.isin(array, (0, 1)).all():
        return pack_class_areas(array.astype(np.bool_)), ~nothing
    if array.ndim not in (2, 3):
        raise ValueError(f"has a mask of shape {array.shape}: a label map is (height, width) or (depth, height, width)")
    return pack_label_map(array, tuple(values.values())), ~nothing


def _pack_areas_by_name(
    areas: Mapping[Any, Any], values: Mapping[str, int]
) -> tuple[NDArray[Any] | None, NDArray[np.bool_]]:
    if unknown := sorted(set(map(str, areas)) - set(values)):
        raise ValueError(f"has a mask of {quote_names(unknown)}, and the classes are {quote_names(values)}")
    arrays = {
        str(name): _drop_channel(convert_to_numpy_array(area)) for name, area in areas.items() if area is not None
    }
    if not arrays:
        return None, np.zeros(len(values), dtype=np.bool_)
    for name, array in arrays.items():
        if not np.isin(array, (0, 1)).all():
            raise ValueError(f"has an area of {quote_names([name])} that is not 0 and 1")
    shape = next(iter(arrays.values())).shape
    class_areas = [arrays.get(name, np.zeros(shape)).astype(np.bool_) for name in values]
    return pack_class_areas(np.stack(class_areas)), np.array([name in arrays for name in values])


def _drop_channel(array: NDArray[Any]) -> NDArray[Any]:
    return array[0] if array.ndim > 2 and array.shape[0] == 1 else array
