"""Find items that a data set or its parts contain several times, also in ``Subset``, ``ConcatDataset`` and wrappers."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from polyclinic.common.errors import Fault

_SHARED_ITEMS_REMEDY = (
    "Give each part items of its own. Or leave those of tests out of training: "
    'settings={"data.duplicates": "drop_from_training"}.'
)


def is_map_style_dataset(dataset: object) -> bool:
    """Return True if an object has ``__getitem__`` and ``__len__``."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def find_shared_item_faults(where: str, parts: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each pair of parts that contain the same items.

    Args:
        where: Name of the data set, for the faults.
        parts: Name of a part -> its data set.
    """
    items = {name: set(_iterate_innermost_items(dataset)) for name, dataset in parts.items()}
    return [
        Fault(where, f'has {shared} of the items of "{first}" in "{second}" too.', _SHARED_ITEMS_REMEDY)
        for first, second in combinations(items, 2)
        if (shared := len(items[first] & items[second]))
    ]


def mask_items_of_other_parts(dataset: Any, others: Iterable[Any]) -> NDArray[np.bool_]:
    """Return a mask ``(n,)``, True for each item of a data set that other data sets contain too."""
    foreign = {item for other in others for item in _iterate_innermost_items(other)}
    return np.array([item in foreign for item in _iterate_innermost_items(dataset)], dtype=np.bool_)


def find_repeated_item_faults(where: str, dataset: Any) -> list[Fault]:
    """Return a fault if a data set contains an item several times, for instance to oversample rare classes.

    Args:
        where: Name of the data set in the fault.
    """
    items = list(_iterate_innermost_items(dataset))
    if not (repeated := len(items) - len(set(items))):
        return []
    problem = f"holds {repeated} items again, and names no patients: an image would be for training and for tests."
    return [Fault(where, problem, "Give each item once, or patients=[...].")]


def _iterate_innermost_items(dataset: Any, rows: Iterable[int] | None = None) -> Iterator[tuple[int, int]]:
    """Yield the origin of each item: ``id`` of the innermost data set, and index in it.

    The search goes through ``Subset``, ``ConcatDataset`` and wrappers with an attribute ``dataset`` or ``subset``.

    Args:
        rows: Indices of the items; None for all.
    """
    if hasattr(dataset, "__len__"):  # the data set inside a Subset needs no length
        rows = range(len(dataset)) if rows is None else [row % len(dataset) for row in rows]
    assert rows is not None
    if isinstance(dataset, Subset):
        yield from _iterate_innermost_items(dataset.dataset, [int(dataset.indices[row]) for row in rows])
    elif isinstance(dataset, ConcatDataset):
        ends = np.array([0, *dataset.cumulative_sizes])
        for row in rows:
            index = int(np.searchsorted(ends, row, side="right")) - 1
            yield from _iterate_innermost_items(dataset.datasets[index], [row - int(ends[index])])
    else:
        for attribute in ("dataset", "subset"):
            inner: Any = getattr(dataset, attribute, None)
            is_wrapper = isinstance(inner, Dataset) and inner is not dataset and is_map_style_dataset(inner)
            if is_wrapper and is_map_style_dataset(dataset) and len(inner) == len(dataset):  # a wrapper of all items
                yield from _iterate_innermost_items(inner, rows)
                return
        yield from ((id(dataset), row) for row in rows)
