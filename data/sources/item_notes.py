"""Notes for the user about a data set from Python: entries that are ignored, and parts that are augmented."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polyclinic.common.errors import quote_names
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, LazyPictures
from polyclinic.data.sources.dataset_items import DatasetItem, find_label_mask, keep_letters_and_digits

NOT_REPRODUCIBLE_NOTE = (
    "This run is not reproducible: the same seed gives other pictures, because a random transform of the data set "
    "has a generator that cannot be seeded."
)
_MAX_ENTRIES_LISTED = 10


def describe_unread_entries(item: DatasetItem, classes: int, given: Mapping[str, Any], *, labels_are_read: bool) -> str:
    """Return a sentence with the entries of items that are ignored, and how to use them; empty if there are none.

    An entry that the user also passed as an argument, such as ``patients``, is left out.

    Args:
        item: The first item of the data set.
        classes: Number of classes.
        given: The user's arguments ``patients``, ``sources`` and ``parts``, with a value for each image, or None.
        labels_are_read: False if the user passed the labels as an argument, so that labels in items are ignored.
    """
    mask = find_label_mask(item, classes)
    is_used = item.possible_mask is not None and mask is item.possible_mask
    lists = [np.asarray(values, object) for values in given.values() if values is not None]
    first_values = {str(values.flat[0]) for values in lists if values.size}
    unread = [
        entry
        for entry, value in item.unread.items()
        if not (is_used and keep_letters_and_digits(entry) == "mask") and str(value) not in first_values
    ]
    if not labels_are_read and mask is not None:
        unread.append("label mask")
    if not unread:
        return ""
    verb = "is" if len(unread) == 1 else "are"
    in_items = {"patients": item.patient, "parts": item.split}
    missing = [f"{name}=[...]" for name, values in given.items() if values is None and in_items.get(name) is None]
    arguments = f"pc.LabelledImages(dataset, {', '.join(missing)}), or " if missing else ""
    function = 'item= with a function that returns it as "patient", "label_mask" or "split"'
    return (
        f"{quote_names(unread, _MAX_ENTRIES_LISTED)} of the items {verb} not read. To use one: {arguments}{function}."
    )


def describe_partial_cache(dataset: Any) -> str:
    """Return a sentence about the items that MONAI's ``SmartCacheDataset`` leaves out; empty for other data sets."""
    if not any(kind.__name__ == "SmartCacheDataset" for kind in type(dataset).__mro__):
        return ""
    count = len(dataset)
    total = len(getattr(dataset, "data", ()))
    if total <= count:
        return ""
    used = (
        f"{count:,} of its {total:,} items are used, because others come only with update_cache(), which no run calls"
    )
    return f"SmartCacheDataset: {used}. To use all, give a CacheDataset or a monai.data.Dataset."


def join_notes_of_parts(splits: DatasetSplits, *, is_local: bool) -> DatasetSplits:
    """Give all parts the notes of every part, and add a note if validation or test pictures are augmented.

    Args:
        is_local: True if the data set is an object of this process, given as ``dataset=``.
    """
    notes = dict.fromkeys(note for images in splits.parts for note in images.notes)
    names = [name for name in ("validation", "test") if _is_augmented(getattr(splits, name))]
    if names:
        notes[_describe_augmented_parts(names, is_local=is_local)] = None
    joined = tuple(notes)
    parts = [images if images.notes == joined else replace(images, notes=joined) for images in splits.parts]
    return DatasetSplits(*parts)


def _is_augmented(images: ImageSet) -> bool:
    return len(images) > 0 and isinstance(images.stored, LazyPictures) and images.stored.is_augmented


def _describe_augmented_parts(names: Sequence[str], *, is_local: bool) -> str:
    results = {
        "validation": "the best round is chosen by such pictures",
        "test": "the test figures are of such pictures",
    }
    remedy = '{"train": augmented, "validation": plain, "test": plain}'
    give = f"Give plain ones: dataset={remedy}." if is_local else f"Return plain ones: {remedy}."
    listed = " and ".join(names).capitalize()
    effect = ", and ".join(results[name] for name in names)
    reason = "an item of the data set is another picture with another seed"
    return f"{listed} pictures are augmented ({reason}): {effect}. {give}"
