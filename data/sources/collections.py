"""Several collections that share classes, joined by a label map (``kind = "collections"``).

For example, the label map says that CheXpert's "Pleural Effusion" is NIH's "Effusion", and both become one class. A
class that a collection lacks is unknown in its images, as in Kulkarni et al., "Surgical Aggregation", ML4H 2024, where
each site is a collection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, concatenate_image_sets
from polyclinic.data.base.masks import MaskSet, choose_mask_type, make_class_bits
from polyclinic.data.base.spec import CollectionsDatasetSpec, CollectionSpec
from polyclinic.data.images.reading import convert_image_colors, resize_images

LoadCollection = Callable[[CollectionSpec], DatasetSplits]


def find_collection_faults(
    spec: CollectionsDatasetSpec, find_faults: Callable[[CollectionSpec], Sequence[Fault]]
) -> list[Fault]:
    """Check all collections without reading pictures; faults name keys like ``"data.collections.nih.labels"``.

    Args:
        find_faults: Returns the faults of one collection, with keys like ``"data.labels"``.
    """
    return [
        _prefix_fault_with_collection(name, fault)
        for name, own in spec.collections.items()
        for fault in find_faults(_set_image_size(own, spec))
    ]


def load_collections(spec: CollectionsDatasetSpec, read: LoadCollection) -> DatasetSplits:
    """Load all collections, and join their training, validation and test parts under the classes of the label map.

    Args:
        read: Loads one collection.

    Raises:
        BadInput: If a collection has a fault, or the label map or ``classes`` has a name that is not a label.
    """
    loaded = dict[str, DatasetSplits]()
    for name, own in spec.collections.items():
        try:
            loaded[name] = read(_set_image_size(own, spec))
        except BadInput as bad:
            raise BadInput(_prefix_fault_with_collection(name, fault) for fault in bad.faults) from None
    raise_faults(_find_unmasked_collection_faults(loaded))
    labels = {name: splits.class_names for name, splits in loaded.items()}
    raise_faults(find_label_map_faults(labels, spec.names, spec.classes))
    meanings = {name: [spec.names.get(name, {}).get(own, own) for own in labels[name]] for name in loaded}
    classes = spec.classes or tuple(
        dict.fromkeys(each for of_collection in meanings.values() for each in of_collection)
    )
    omissions = tuple(_describe_left_out_labels(labels, meanings, classes))
    joined = list[ImageSet]()
    for parts in zip(*(splits.parts for splits in loaded.values()), strict=True):
        images = [
            replace(
                _bring_to_one_form(part, spec),
                labels=merge_labels(part.labels, meanings[name], classes),
                masks=None if part.masks is None else merge_masks(part.masks, labels[name], meanings[name], classes),
                class_names=classes,
                patients=np.array([f"{name}/{patient}" for patient in part.patients], dtype=np.str_),
                sources=np.full(len(part), name),
                drops_color=part.channels == 3 and not spec.color,
                lines=None,  # of different tables
            )
            for name, part in zip(loaded, parts, strict=True)
        ]
        part = concatenate_image_sets(images)
        joined.append(replace(part, omissions=(*part.omissions, *omissions)))
    return DatasetSplits(*joined)


def merge_labels(labels: NDArray[np.float32], meanings: Sequence[str], classes: Sequence[str]) -> NDArray[np.float32]:
    """Return the labels of the joined classes, ``(images, classes)``.

    A class is present if one of its labels is present, absent if all its labels are absent, and otherwise unknown.

    Args:
        labels: ``(images, labels of the collection)``: 1 present, 0 absent, NaN unknown.
        meanings: The class of each label of the collection.
        classes: Classes of the joined data set.
    """
    merged = np.full((len(labels), len(classes)), np.nan, dtype=np.float32)
    for column, name in enumerate(classes):
        labels_of_class = labels[:, [meaning == name for meaning in meanings]]
        if labels_of_class.shape[1]:
            unknown_or_absent = np.where(np.isnan(labels_of_class).any(axis=1), np.nan, 0)
            merged[:, column] = np.where((labels_of_class == 1).any(axis=1), 1, unknown_or_absent)
    return merged


def find_label_map_faults(
    labels: Mapping[str, Sequence[str]], names: Mapping[str, Mapping[str, str]], classes: Sequence[str]
) -> list[Fault]:
    """Return a fault for each name in the label map that is not a label, and for each class without a label.

    Otherwise a spelling error would leave a class without labels, and the model would not learn it.

    Args:
        labels: Collection -> its labels.
        names: The label map, as in :class:`CollectionsDatasetSpec`.
        classes: The classes to learn; empty for all.
    """
    faults = list[Fault]()
    for collection, meanings in names.items():
        for own in meanings:
            if own not in labels[collection]:
                problem = f'"{own}" is no label of {collection}, which has {quote_names(labels[collection])}.'
                hint = suggest_nearest_name(own, labels[collection]) or "Write one of these on the left."
                faults.append(Fault(f"data.names.{collection}", problem, hint))
    every = {names.get(collection, {}).get(own, own) for collection, of in labels.items() for own in of}
    for name in classes:
        if name not in every:
            problem = f'"{name}" is no label of a collection, and no label means it.'
            hint = suggest_nearest_name(name, sorted(every)) or "Name the label that means it in [data.names]."
            faults.append(Fault("data.classes", problem, hint))
    return faults


def _describe_left_out_labels(
    labels: Mapping[str, Sequence[str]], meanings: Mapping[str, Sequence[str]], classes: Sequence[str]
) -> list[str]:
    """Return a sentence for each collection with labels that ``data.classes`` leaves out."""
    sentences = list[str]()
    for collection, own_labels in labels.items():
        out = [own for own, name in zip(own_labels, meanings[collection], strict=True) if name not in classes]
        if out:
            count = format_count_with_noun(len(out), "label")
            sentences.append(f"data.classes leaves out {count} of {collection}: {quote_names(out)}.")
    return sentences


def _bring_to_one_form(images: ImageSet, spec: CollectionsDatasetSpec) -> ImageSet:
    """Convert images to the size and colour of the joined data set, in memory."""
    if not isinstance(spec.image_size, int):
        return replace(images, stored=images.images, places=None)
    pixels = resize_images(convert_image_colors(images.images, spec.color), spec.image_size, "pad")
    return replace(images, stored=pixels, places=None)


def merge_masks(masks: MaskSet, labels: Sequence[str], meanings: Sequence[str], classes: Sequence[str]) -> MaskSet:
    """Return the masks of the joined classes; the area of a class is the union of the areas of its labels.

    Args:
        labels: Labels of the collection.
        meanings: The class of each label.
        classes: Classes of the joined data set; a class has the same bit in the masks of all collections.
    """
    kind = choose_mask_type(len(classes))
    bits = [
        sum(masks.bits[own] for own, meaning in zip(labels, meanings, strict=True) if meaning == name)
        for name in classes
    ]
    stored = np.zeros((len(masks), *masks.shape), kind)
    for row, mask_index in enumerate(masks.places.tolist()):
        for column, class_bits in enumerate(bits):
            stored[row] |= ((masks.stored[mask_index] & class_bits) != 0).astype(kind) << kind(column)
    return replace(masks, stored=stored, places=np.arange(len(masks)), bits=make_class_bits(classes))


def _find_unmasked_collection_faults(loaded: Mapping[str, DatasetSplits]) -> list[Fault]:
    """Return a fault if some collections have masks, and others have only labels."""
    with_masks = [name for name, splits in loaded.items() if splits.train.masks is not None]
    without = [name for name in loaded if name not in with_masks]
    if not with_masks or not without:
        return []
    problem = f"has masks in {quote_names(with_masks)}, and labels alone in {quote_names(without)}."
    return [Fault("data.collections", problem, "Name the masks of all of them, or leave these out.")]


def _set_image_size(own: CollectionSpec, spec: CollectionsDatasetSpec) -> CollectionSpec:
    """Return the settings of a collection, with the image size (and for volumes spacing, window) of the joined data."""
    update: dict[str, object] = {"image_size": spec.image_size}
    if not isinstance(spec.image_size, int):
        update |= {"spacing": spec.spacing, "window": spec.window}
    return own.model_copy(update=update)


def _prefix_fault_with_collection(name: str, fault: Fault) -> Fault:
    """Return the fault with the collection's name in its key; for a fault in a file, before the name of the file."""
    section = f"data.collections.{name}"
    is_key = fault.where == "data" or fault.where.startswith("data.")
    where = f"{section}{fault.where.removeprefix('data')}" if is_key else f"{section}: {fault.where}"
    return replace(fault, where=where)
