"""Data sets that a user's package reads (``kind = "plugin"``), with the same checks as built-in kinds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.plugins import (
    DATASETS,
    format_plugin_user_name,
    identify_plugin,
    is_local_plugin_name,
    load_plugin_entry_point,
)
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import (
    PARTS,
    DatasetSplits,
    ImageSet,
    LazyPictures,
    find_placeholder_patients,
    make_placeholder_patient_names,
)
from polyclinic.data.base.masks import MaskSet
from polyclinic.data.base.names import is_anonymous_patient, is_blank_cell, normalize_name, normalize_name_array
from polyclinic.data.base.shared_pictures import NamedPictures, find_shared_picture_faults
from polyclinic.data.base.spec import PluginDatasetSpec
from polyclinic.data.base.splits import (
    VALIDATION_FRACTION,
    StringArray,
    assign_images_to_parts,
    assign_patients_by_name,
    divide_images_into_splits,
    find_patient_name_faults,
    find_positive_images,
    find_shared_patient_faults,
    hold_out_patients,
    hold_out_patients_by_name,
    split_patients,
)
from polyclinic.data.base.vocabulary import PART_WORDS
from polyclinic.data.base.volume_arrays import add_channel_axis, is_image_array
from polyclinic.data.images.reading import resize_images
from polyclinic.data.sources.dataset_items import (
    DatasetItem,
    MapStyleDataset,
    find_class_names_in_labels,
    parse_item_labels,
)
from polyclinic.data.sources.item_notes import NOT_REPRODUCIBLE_NOTE, join_notes_of_parts
from polyclinic.data.sources.label_array import (
    convert_class_numbers,
    convert_labels_to_array,
    has_consecutive_index,
    name_classes_by_number,
)
from polyclinic.data.sources.mask_items import MapStyleItems, ReadMasks, read_item_masks
from polyclinic.data.tables.class_names import find_repeated_name_faults
from polyclinic.data.tables.copies import (
    check_picture_copies,
    find_repeated_picture_faults,
)

if TYPE_CHECKING:
    from polyclinic.data.sources.torch_dataset import TorchDatasetPictures

_MAX_BRIGHTEST_OF_REFUSED = 15
"""A data set is refused as nearly black if its brightest value is at most this, of 255."""


@dataclass(frozen=True)
class LabelledImages:
    """The images and labels that a data set plug-in returns; entry i of each field belongs to image i.

    Attributes:
        images: An array ``(n, height, width)`` for grey or ``(n, height, width, 3)`` for colour; or a map-style torch
            data set or list, whose items are read when a batch needs them
            (:mod:`polyclinic.data.sources.torch_dataset`).
        labels: ``(n, classes)``: 1 present, 0 absent, NaN unknown; or ``(n,)``, the number of each image's only class.
            A pandas table has a column per class, in any order; masked entries of a masked array are unknown. None
            takes the labels from the items of the data set, each of which is then read once at the start.
        class_names: Column names of ``labels``; empty takes the names that the data set, the table or the labels of
            the items define, or else the numbers of the classes, from 0.
        patients: ``(n,)`` names; all images of a patient go into the same part. None takes the patients that the items
            name; if they name none, each image counts as a patient.
        parts: ``(n,)``, each ``"train"``, ``"validation"`` (also ``"val"`` or ``"valid"``) or ``"test"``. None takes
            the entry ``split`` of the items; if they have none, 70/10/20 of the patients are drawn.
        sources: ``(n,)`` names of the centres that the images came from; None if unknown.
        value_range: The values of black and white. None means 0 and 255 for uint8, and 0 and 1 for floats; other types
            of number need it.
        item: Function of an item of the data set that returns ``(image, labels)`` or a dictionary of known keys.
        mask_values: For segmentation, class -> its value in label maps. The items are then ``(image, mask)``
            (:mod:`polyclinic.data.sources.mask_items`), and ``labels`` are left out.
        masks: Label maps ``(n, *spatial)`` in an array, in place of those in the items.
    """

    images: NDArray[np.uint8] | MapStyleDataset
    labels: NDArray[np.float32] | None = None
    class_names: Sequence[str] = ()
    patients: Sequence[str] | NDArray[np.str_] | None = None
    parts: Sequence[str] | NDArray[np.str_] | None = None
    sources: Sequence[str] | NDArray[np.str_] | None = None
    value_range: tuple[float, float] | None = None
    item: Callable[[Any], Any] | None = None
    mask_values: Mapping[str, int] = field(default_factory=dict)
    masks: Any = None


ImageParts = Mapping[str, LabelledImages]
"""Name of a part -> its images: ``"train"``, ``"test"`` and optionally ``"validation"``, or ``"val"``."""
DatasetPlugin = Callable[[Path, Mapping[str, Any]], LabelledImages | ImageParts]
"""A plug-in function; its arguments are the folder of the configuration file, and ``data.options``."""


GIVEN_IMAGES_ATTRIBUTE = "given_images"
"""Name of an attribute of a plug-in function that returns images of this process; it holds these images."""


def read_class_names_before_items(spec: PluginDatasetSpec) -> tuple[str, ...]:
    """Return the class names of a data set that the user passed as an object, without reading an item.

    The result is empty for other data sets, or if the names are only known after reading items.

    Raises:
        BadInput: If the data sets of a ``ConcatDataset`` have different classes.
    """
    if not is_local_plugin_name(spec.name):
        return ()
    given = getattr(load_plugin_entry_point(DATASETS, spec.name), GIVEN_IMAGES_ATTRIBUTE, None)
    images = given.get("train") if isinstance(given, Mapping) else given
    if not isinstance(images, LabelledImages):
        return ()
    names: Any = images.class_names
    if isinstance(names, str) or not isinstance(names, Sequence | np.ndarray):
        return ()  # reported with the other faults
    if len(names):
        return tuple(map(str, names))
    labels: Any = images.labels
    if hasattr(labels, "columns"):
        return tuple(map(str, labels.columns))
    if isinstance(images.images, np.ndarray):
        return ()
    from polyclinic.data.sources.torch_dataset import read_dataset_class_names  # imports torch

    return read_dataset_class_names(images.images, format_plugin_user_name("dataset", spec.name))


def find_plugin_installation_faults(spec: PluginDatasetSpec) -> list[Fault]:
    """Return a fault if the plug-in is not installed, without running its code."""
    try:
        identify_plugin(DATASETS, spec.name)
    except BadInput as bad:
        return list(bad.faults)
    return []


def load_plugin_dataset(
    spec: PluginDatasetSpec, base: Path, tell: Callable[[str], object] = lambda line: None
) -> DatasetSplits:
    """Run a data set plug-in, check its result, and split it into training, validation and test.

    Args:
        tell: Function that prints a progress line while items are read.

    Raises:
        BadInput: If the plug-in is not installed, fails, or does not return :class:`LabelledImages`.
    """
    read: DatasetPlugin = load_plugin_entry_point(DATASETS, spec.name)
    where = ("" if is_local_plugin_name(spec.name) else "data.name: ") + format_plugin_user_name("dataset", spec.name)
    try:
        returned = read(base, spec.options)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # code of the user or of a library may raise anything
        raise BadInput([Fault(where, f"failed: {type(error).__name__}: {error}.")]) from error
    if isinstance(returned, LabelledImages):
        everything, given_parts = _make_plugin_image_set(spec, returned, where, tell)
        raise_faults(find_patient_name_faults(where, everything.patients))
        if given_parts is None:
            part_of_image = _draw_parts(everything, spec.split_seed)
        else:
            part_of_image = np.asarray(given_parts)
            patients_of_parts = {part: everything.patients[part_of_image == part] for part in PARTS}
            raise_faults(find_shared_patient_faults(where, patients_of_parts))
        splits = check_picture_copies(where, divide_images_into_splits(everything, part_of_image), spec.duplicates)
        return join_notes_of_parts(splits, is_local=is_local_plugin_name(spec.name))
    if not isinstance(returned, Mapping) or not all(isinstance(part, LabelledImages) for part in returned.values()):
        problem = f"returned {type(returned).__name__}, not polyclinic.data.LabelledImages."
        raise BadInput([Fault(where, problem)])
    splits = _join_plugin_parts(spec, returned, where, tell)
    return join_notes_of_parts(splits, is_local=is_local_plugin_name(spec.name))


def _draw_parts(images: ImageSet, seed: int) -> StringArray:
    """Draw the part of each image, ``(n,)``: ``"train"``, ``"validation"`` or ``"test"``.

    Known patients are assigned by their names. If all patients are unknown, the images are drawn as the surgical
    aggregation paper draws patients, which balances the parts.
    """
    if not find_placeholder_patients(images.patients).all():
        return assign_patients_by_name(images.patients, seed)
    split = split_patients(images.patients, find_positive_images(images.labels), seed)
    return assign_images_to_parts(images.patients, split)


def _hold_out_images(images: ImageSet, seed: int) -> NDArray[np.bool_]:
    """Draw a mask ``(n,)`` of training images that are held out for validation, in the way of :func:`_draw_parts`."""
    if not find_placeholder_patients(images.patients).all():
        return hold_out_patients_by_name(images.patients, VALIDATION_FRACTION, seed)
    return hold_out_patients(images.patients, find_positive_images(images.labels), VALIDATION_FRACTION, seed)


def _join_plugin_parts(
    spec: PluginDatasetSpec, images: ImageParts, where: str, tell: Callable[[str], object] = lambda line: None
) -> DatasetSplits:
    """Combine parts that a plug-in returned separately; without a validation part, training patients are held out.

    Args:
        images: Name of a part -> the images that the plug-in returned.
        where: Name of the plug-in, for error messages.
        tell: Function that prints a progress line while items are read.

    Raises:
        BadInput: If a part is missing or invalid, or if parts have different classes or sizes, or share images or
            patients.
    """
    names = [PART_WORDS.get(str(name).lower(), str(name)) for name in images]
    if not {"train", "test"} <= set(names) <= set(PARTS) or len(set(names)) < len(names):
        problem = f"has the parts {quote_names(map(str, images))}."
        raise BadInput([Fault(where, problem, 'Give "train" and "test", and "validation" if there is one.')])
    images = dict(zip(names, images.values(), strict=True))
    opened = dict[str, ImageSet]()
    faults = list[Fault]()
    start = 0
    for name, part in sorted(images.items(), key=lambda item: item[0] != "train"):
        # Class names from the labels of the training part are used for all parts: other parts may lack a class.
        others = opened["train"].class_names if "train" in opened else ()
        try:
            opened[name], _ = _make_plugin_image_set(spec, part, f'{where}["{name}"]', tell, start, others)
            start += len(opened[name])
        except BadInput as bad:
            faults += bad.faults
    raise_faults(faults)
    forms = {f"{part.class_names}, {part.stored.shape[1:]}" for part in opened.values()}
    if len(forms) > 1:
        listed = (
            f"{name}: {quote_names(part.class_names)}, images {part.stored.shape[1:]}" for name, part in opened.items()
        )
        problem = f"has parts of different classes or sizes. {'; '.join(listed)}."
        raise BadInput([Fault(where, problem, "All parts have the same classes in the same order, and one size.")])
    if not all(isinstance(part.images, np.ndarray) for part in images.values()):
        from polyclinic.data.sources.shared_items import find_shared_item_faults

        if spec.duplicates == "drop_from_training":
            _drop_items_of_later_parts(where, opened, {name: part.images for name, part in images.items()})
        else:
            raise_faults(find_shared_item_faults(where, {name: part.images for name, part in images.items()}))
    if spec.duplicates == "fault":  # before validation images are held out, so that all copies are counted together
        named = {
            name: NamedPictures(part.picture_digests, [f"{name}[{row}]" for row in range(len(part))])
            for name, part in opened.items()
        }
        raise_faults(find_shared_picture_faults(where, {name: named[name] for name in PARTS if name in named}))
    raise_faults(
        [
            *find_shared_patient_faults(where, {name: part.patients for name, part in opened.items()}),
            *find_patient_name_faults(where, np.concatenate([part.patients for part in opened.values()])),
        ]
    )
    if "validation" not in opened:
        train = opened["train"]
        held_out = _hold_out_images(train, spec.split_seed)
        opened["train"] = train.select_rows(np.flatnonzero(~held_out))
        opened["validation"] = train.select_rows(np.flatnonzero(held_out))
    return check_picture_copies(where, DatasetSplits(*(opened[name] for name in PARTS)), spec.duplicates)


def _drop_items_of_later_parts(where: str, opened: dict[str, ImageSet], datasets: Mapping[str, Any]) -> None:
    """Drop items of a part that a later part has too, and add a note; the test part keeps all items.

    Args:
        where: Name of the data set, for faults.
        opened: Name of a part -> its images; the entries are replaced.
        datasets: Name of a part -> the user's data set, in which equal items are found.

    Raises:
        BadInput: If a part would lose all its items.
    """
    from polyclinic.data.sources.shared_items import find_shared_item_faults, mask_items_of_other_parts

    for index, name in enumerate(PARTS[:-1]):
        if name not in opened:
            continue
        later = [datasets[other] for other in PARTS[index + 1 :] if other in datasets]
        is_shared = mask_items_of_other_parts(datasets[name], later)
        if is_shared.all():
            raise_faults(find_shared_item_faults(where, datasets))
        if dropped := int(is_shared.sum()):
            items = format_count_with_noun(len(is_shared), f"{name} item")
            note = f"{dropped:,} of {items} were dropped, because a part for tests or validation has them too."
            remaining = opened[name].select_rows(np.flatnonzero(~is_shared))
            opened[name] = replace(remaining, notes=(*remaining.notes, note))


def _make_plugin_image_set(
    spec: PluginDatasetSpec,
    pictures: LabelledImages,
    where: str,
    tell: Callable[[str], object],
    start: int = 0,
    other_names: Sequence[str] = (),
) -> tuple[ImageSet, Sequence[str] | NDArray[np.str_] | None]:
    """Check the images and labels of a plug-in, and convert them to an image set.

    Args:
        where: Name of the plug-in or of its part, for error messages.
        tell: Function that prints a progress line while items are read.
        start: Number of the first placeholder patient, if the patients are unknown.
        other_names: Class names of another part, used if neither the user nor the data set names the classes.

    Returns:
        The images, and the part of each image; None if the parts are not given.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    _refuse_odd_class_names(where, pictures.class_names)
    read_masks: ReadMasks | None = None
    if pictures.mask_values or pictures.masks is not None:
        pictures, read_masks = _take_masks(spec, pictures, where)
    stored: Any = pictures.images  # the plug-in may have returned anything
    notes: tuple[str, ...] = ()
    is_plain_array = isinstance(stored, np.ndarray) and stored.dtype == np.uint8 and pictures.value_range is None
    if not is_plain_array or pictures.item is not None:
        stored, pictures, notes = _open_torch_dataset(spec, pictures, where, tell, other_names)
    elif pictures.labels is not None:
        own_names = () if hasattr(pictures.labels, "columns") else other_names
        pictures = _name_given_labels(pictures, own_names, where, tell)
    raise_faults([Fault(where, problem) for problem in _find_plugin_result_problems(pictures, stored)])
    if isinstance(stored, np.ndarray):
        stored = add_channel_axis(stored)
    if stored.ndim == 5 and spec.image_size is not None:
        problem = "resizes pictures, and these images are volumes."
        raise BadInput([Fault("data.image_size", problem, "Leave it out: the network resizes volumes.")])
    count = len(stored)
    given = (pictures.patients, pictures.sources)
    patients, sources = (None if names is None else normalize_name_array(np.asarray(names)) for names in given)
    _refuse_empty_pictures(stored, where, tell, is_range_given=pictures.value_range is not None)
    if read_masks is not None:
        raise_faults(_find_mask_faults(stored, read_masks.masks, where))
    images = ImageSet(
        stored=stored if isinstance(stored, LazyPictures) else resize_images(stored, spec.image_size, spec.resize),
        labels=np.asarray(pictures.labels, np.float32),
        class_names=tuple(pictures.class_names),
        patients=make_placeholder_patient_names(count, start) if patients is None else patients,
        sources=np.full(count, "") if sources is None else sources,
        notes=notes,
        masks=None if read_masks is None else read_masks.masks,
    )
    if patients is None and pictures.parts is None and spec.duplicates == "fault":
        raise_faults(find_repeated_picture_faults(where, images.picture_digests))
    parts = None if pictures.parts is None else [PART_WORDS[str(part).lower()] for part in pictures.parts]
    return images, parts


def _take_masks(spec: PluginDatasetSpec, pictures: LabelledImages, where: str) -> tuple[LabelledImages, ReadMasks]:
    """Read the masks of a data set; return the images with labels from the masks, and the masks.

    Raises:
        BadInput: If labels or class names are given together with masks, or masks cannot be used.
    """
    faults = list[Fault]()
    if not pictures.mask_values:
        problem = "are given without mask_values, which names the classes of their values."
        faults.append(Fault(f"{where}: masks", problem, 'Add mask_values={"Liver": 1}.'))
    if pictures.labels is not None or len(pictures.class_names):
        problem = "labels and class names follow from the masks and mask_values; leave them out."
        faults.append(Fault(where, problem))
    if spec.image_size is not None:
        faults.append(Fault("data.image_size", "cannot resize masks of a data set.", "Leave it out."))
    if pictures.masks is not None and len(pictures.masks) != len(pictures.images):
        problem = f"has {len(pictures.masks)} masks and {len(pictures.images)} images."
        faults.append(Fault(where, problem, "Give one mask for each image, in their order."))
    raise_faults(faults)
    items = pictures.images
    if pictures.masks is not None:
        masks = read_item_masks(pictures.masks, pictures.mask_values, f"{where}: masks")
    else:
        items = MapStyleItems(pictures.images, pictures.item)
        masks = read_item_masks(items, pictures.mask_values, where)
        pictures = replace(pictures, item=None)
    names = tuple(pictures.mask_values)
    return replace(pictures, images=items, labels=masks.labels, class_names=names, mask_values={}, masks=None), masks


def _find_mask_faults(stored: Any, masks: MaskSet, where: str) -> list[Fault]:
    """Return faults if masks have another size than the images, or if the images have random transforms."""
    spatial = tuple(stored.shape[1:4]) if stored.ndim == 5 else tuple(stored.shape[1:3])
    if masks.shape != spatial:
        problem = f"has masks of shape {masks.shape}, and images of {spatial}."
        return [Fault(where, problem, "A mask has the size of its image.")]
    if isinstance(stored, LazyPictures) and (stored.is_augmented or not stored.reproducible):
        problem = "gives other images at each reading, and masks are read once: they would lie beside the images."
        remedy = "Take random transforms out; [augmentation] of the experiment changes image and mask together."
        return [Fault(where, problem, remedy)]
    return []


def _refuse_odd_class_names(where: str, names: Any) -> None:
    """Refuse class names that are not a list, before an item is read."""
    if isinstance(names, str) or not isinstance(names, Sequence | np.ndarray):
        problem = f"class_names must be a list of texts, not {names!r}."
        raise BadInput([Fault(where, problem, 'Name each column of the labels, in order: class_names=["a", "b"].')])


def _refuse_empty_pictures(stored: Any, where: str, tell: Callable[[str], object], *, is_range_given: bool) -> None:
    """Refuse pictures of one single value, and nearly black pictures; print a line if most pixels are white.

    Args:
        stored: An array of uint8, or an opened torch data set.
        where: Name of the plug-in or of its part, for error messages.
        tell: Function that prints a line for the user.
        is_range_given: True if the user has set the values of black and white.

    Raises:
        BadInput: If a network could learn nothing from the pictures.
    """
    if isinstance(stored, np.ndarray):
        darkest, brightest, white = int(stored.min()), int(stored.max()), float((stored == 255).mean())
    else:
        darkest, brightest, white = stored.darkest, stored.brightest, stored.white_share
    named_range = "name black and white: pc.LabelledImages(..., value_range=(a, b))."
    if darkest == brightest and len(stored) > 1:
        problem = f"shows nothing: every pixel of every picture is {brightest:g}."
        remedy = 'Values that convert("L") has cut off are lost: give the numbers as they are, np.asarray(image), '
        remedy += "and name black and white: pc.LabelledImages(..., value_range=(0, 4095)) for 12 bits."
        raise BadInput([Fault(where, problem, remedy)])
    if not is_range_given and brightest <= _MAX_BRIGHTEST_OF_REFUSED:  # after a wrong division, or a mask of 0 and 1
        problem = f"is nearly black: its brightest value is {brightest:.2g}, where 0 is black and 255 is white."
        raise BadInput([Fault(where, problem, f"Give images that use the range, or {named_range}")])
    if white > 0.5:
        tell(
            f"{where}: {white:.0%} of all pixels are white (255). If your files have more than 8 bits, "
            f'convert("L") has cut them off: {named_range}'
        )


def _name_given_labels(
    pictures: LabelledImages, own_names: Sequence[str], where: str, tell: Callable[[str], object]
) -> LabelledImages:
    """Convert the labels that the user passed to an array ``(n, classes)``, and fill in the class names.

    Args:
        own_names: Class names that the data set defines.
        where: Name of the plug-in, for the error message.
        tell: Function that prints a line if the classes have no names.

    Raises:
        BadInput: If the labels are not numeric, or a table lacks a class.
    """
    labels: Any = pictures.labels
    names = pictures.class_names if len(pictures.class_names) else own_names
    if isinstance(names, str) or not isinstance(names, Sequence | np.ndarray):
        return pictures  # reported with the other faults
    if not len(names) and hasattr(labels, "columns"):
        names = tuple(map(str, labels.columns))
    try:
        labels = _convert_column_of_labels(labels)
        if isinstance(labels, Sequence | np.ndarray) and (named := find_class_names_in_labels(labels)):
            names = names if len(names) else named
            rows = [parse_item_labels(DatasetItem(None, label), tuple(map(str, names))) for label in labels]
            return replace(pictures, labels=np.stack(rows), class_names=names)
        values = convert_labels_to_array(labels, names)
        if not len(names):
            names = name_classes_by_number(values, tell)
        values = convert_class_numbers(values, len(names))
    except ValueError as error:
        raise BadInput([Fault(where, str(error))]) from error
    return replace(pictures, labels=values, class_names=names)


def _convert_column_of_labels(labels: Any) -> Any:
    """Convert a pandas column with a label for each image to an array or list; other labels are returned unchanged.

    Raises:
        ValueError: If the index of the column is not 0, 1, 2, ...
    """
    if not hasattr(labels, "iloc") or labels.ndim != 1:
        return labels
    if not has_consecutive_index(labels):
        raise ValueError(
            "has labels in a column whose index is not 0, 1, 2, ... Give its rows in the order of the images, and "
            "labels.reset_index(drop=True)."
        )
    is_text = labels.dtype.kind not in "biufc" and all(isinstance(label, str) for label in labels)
    return labels.tolist() if is_text else labels.to_numpy(dtype=np.float64, na_value=np.nan)


def _open_torch_dataset(
    spec: PluginDatasetSpec,
    pictures: LabelledImages,
    where: str,
    tell: Callable[[str], object],
    other_names: Sequence[str],
) -> tuple[LazyPictures, LabelledImages, tuple[str, ...]]:
    """Open the torch data set in ``pictures.images``.

    Args:
        where: Name of the plug-in, for error messages.
        tell: Function that prints a progress line while items are read.
        other_names: Class names that are used if neither the user nor the data set names the classes.

    Returns:
        The images of the data set; ``pictures``, in which missing labels, class names, patients and parts are filled in
        from the items; notes for the user.

    Raises:
        BadInput: If the data set is not map-style, or its items cannot be used.
    """
    from polyclinic.data.sources.shared_items import find_repeated_item_faults
    from polyclinic.data.sources.torch_dataset import (  # imports torch
        open_torch_dataset,
        read_all_items,
        read_dataset_class_names,
    )

    if spec.image_size is not None:
        problem = "cannot resize the images of a torch data set."
        raise BadInput([Fault("data.image_size", problem, "Leave it out, and resize them in its transform.")])
    stored = open_torch_dataset(pictures.images, where, pictures.value_range, pictures.item)
    reads_labels = pictures.labels is None
    own_names = read_dataset_class_names(pictures.images, where)
    if reads_labels:
        raise_faults(_find_moved_name_faults(where, pictures.class_names, own_names, stored))
    if not hasattr(pictures.labels, "columns"):
        own_names = own_names or tuple(other_names)
    if not reads_labels:
        pictures = _name_given_labels(pictures, own_names, where, tell)
    elif not len(pictures.class_names):
        pictures = replace(pictures, class_names=own_names)
    stored.class_names = tuple(map(str, pictures.class_names))
    given = {"patients": pictures.patients, "sources": pictures.sources, "parts": pictures.parts}
    items = read_all_items(stored, tell, given, labels=reads_labels)
    if reads_labels:
        names = pictures.class_names if len(pictures.class_names) else stored.class_names
        pictures = replace(pictures, labels=items.labels, class_names=names)
    if pictures.patients is None:
        pictures = replace(pictures, patients=items.patients)
        if items.patients is None:
            raise_faults(find_repeated_item_faults(where, pictures.images))
    if pictures.parts is None:
        pictures = replace(pictures, parts=items.parts)
    return stored, pictures, items.notes if stored.reproducible else (NOT_REPRODUCIBLE_NOTE, *items.notes)


def _find_moved_name_faults(
    where: str, class_names: Sequence[str], own_names: Sequence[str], stored: "TorchDatasetPictures"
) -> list[Fault]:
    """Return a fault if a class has another number in the user's list of class names than in the data set.

    There is no fault if labels name their classes, because then the order does not matter.

    Args:
        class_names: The names that the user gave.
        own_names: The names that the data set defines.
        stored: The opened data set.
    """
    from polyclinic.data.sources.dataset_items import list_label_names

    given = list(map(str, class_names))
    moved = [name for number, name in enumerate(own_names) if name in given and given.index(name) != number]
    if not moved:
        return []
    labels = stored.read_item(0).labels
    if isinstance(labels, Mapping) or list_label_names(labels) is not None:
        return []
    number, name = own_names.index(moved[0]), moved[0]
    problem = f'class_names has "{name}" as number {given.index(name)}, and the data set itself has it as number '
    problem += f"{number}: its classes are {quote_names(own_names)}."
    remedy = f"Leave class_names out, or name the classes in that order: class_names={list(own_names)}."
    return [Fault(where, problem, remedy)]


def _find_plugin_result_problems(pictures: LabelledImages, images: NDArray[np.uint8] | LazyPictures) -> Iterator[str]:
    """Yield an error message for each problem with the result of a plug-in.

    Args:
        images: The images of ``pictures``, opened for reading.
    """
    labels = np.asarray(pictures.labels)
    names = list(pictures.class_names)
    if not isinstance(images, np.ndarray | LazyPictures) or images.dtype != np.uint8:
        yield f"images must be a uint8 array, not {getattr(images, 'dtype', type(images).__name__)}."
        return
    if not is_image_array(images.shape) or not images.nbytes:
        yield f"images must have the shape (n, height, width) or (n, height, width, 3), not {images.shape}."
        return
    if not names or not all(isinstance(name, str) and name for name in names):
        yield "class_names must be non-empty texts, at least one."
        return
    yield from (fault.problem for fault in find_repeated_name_faults("class_names", names))
    if pictures.labels is None:
        yield "labels are missing; only a torch data set brings its own."
    elif labels.shape != (len(images), len(names)):
        yield f"labels must have the shape {(len(images), len(names))} (images, classes), not {labels.shape}."
    elif labels.dtype.kind not in "biuf" or not (np.isnan(labels.astype(float)) | np.isin(labels, (0, 1))).all():
        yield "labels must be 1 (present), 0 (absent) or NaN (unknown)."
    for name in ("patients", "parts", "sources"):
        if (entries := getattr(pictures, name)) is not None:
            yield from _find_name_list_problems(name, entries, len(images))
    parts = () if pictures.parts is None else pictures.parts
    if other := sorted({str(part) for part in parts if str(part).lower() not in PART_WORDS}):
        yield f"parts must be {quote_names(PARTS)}, not {quote_names(other, limit=3)}."


def _find_name_list_problems(name: str, entries: Any, count: int) -> Iterator[str]:
    if not has_consecutive_index(entries):
        yield f"{name} must be in the order of the images; its index is not 0, 1, 2, ... Give {name}.to_numpy()."
    if np.shape(entries) != (count,):
        yield f"{name} must have one entry an image, {count}, not the shape {np.shape(entries)}."
        return
    texts = [entry for entry in entries if isinstance(entry, str)]
    others = (entry for entry in entries if not isinstance(entry, str))  # None, NaN, NaT and masked entries
    is_incomplete = any(entry is None or entry is np.ma.masked or is_blank_cell(str(entry)) for entry in others)
    if is_incomplete or (name == "patients" and any(is_anonymous_patient(normalize_name(text)) for text in texts)):
        yield f"{name} must be a name for each image, or None for all of them together."
