"""Check and load the data set of a configuration file; faults that are cheap to find are reported first."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyclinic.common.errors import BadInput, Fault, quote_names, suggest_nearest_name
from polyclinic.data.base.dark_pictures import note_dark_pictures, note_dark_test_pictures
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, concatenate_image_sets
from polyclinic.data.base.spec import (
    ChexpertDatasetSpec,
    CollectionsDatasetSpec,
    CompositesDatasetSpec,
    DataSpec,
    DicomwebDatasetSpec,
    DigitsDatasetSpec,
    DrawnOrgansDatasetSpec,
    FolderDatasetSpec,
    MimicDatasetSpec,
    MixtureDatasetSpec,
    NihDatasetSpec,
    NpzDatasetSpec,
    PhantomDatasetSpec,
    PluginDatasetSpec,
)
from polyclinic.data.images.store import MEMORY_STORE, DecodedImageStore
from polyclinic.data.sources.built_in import load_digits_dataset, load_phantom_dataset
from polyclinic.data.sources.collections import find_collection_faults, load_collections
from polyclinic.data.sources.composed import (
    find_composite_faults,
    find_mixture_faults,
    load_composites,
    load_mixture,
)
from polyclinic.data.sources.drawn_organs import load_drawn_organs
from polyclinic.data.sources.npz import load_npz_dataset, load_npz_test_part, open_npz_parts
from polyclinic.data.sources.plugin import find_plugin_installation_faults, load_plugin_dataset
from polyclinic.data.tables.labels import LabelTable, decode_table_pictures, open_folder_label_table
from polyclinic.data.tables.presets import open_chexpert_table, open_mimic_table, open_nih_table

_checked_data: dict[tuple[str, Path], Any] = {}
"""The last label table, or npz file without images, that :func:`find_dataset_faults` has read; :func:`load_dataset`
reuses it."""


def find_dataset_faults(spec: DataSpec, base: Path) -> list[Fault]:
    """Check a data set without reading its pictures, and return all faults.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Returns:
        Faults whose ``where`` is a key such as ``"data.path"``; the caller prefixes the file's name.
    """
    try:
        match spec:
            case NpzDatasetSpec():
                opened: Any = open_npz_parts(spec, base)
            case CompositesDatasetSpec():
                return find_composite_faults(spec, base)
            case MixtureDatasetSpec():
                return find_mixture_faults(spec, base)
            case CollectionsDatasetSpec():
                return find_collection_faults(spec, lambda own: find_dataset_faults(own, base))
            case PluginDatasetSpec():
                return find_plugin_installation_faults(spec)
            case DigitsDatasetSpec() | PhantomDatasetSpec() | DrawnOrgansDatasetSpec():
                return []
            case _:
                opened = open_label_table(spec, base)
    except BadInput as bad:
        return list(bad.faults)
    _checked_data.clear()
    _checked_data[spec.model_dump_json(), base] = opened
    return []


def load_dataset(spec: DataSpec, base: Path, store: DecodedImageStore = MEMORY_STORE) -> DatasetSplits:
    """Check and load a data set, and split it into training, validation and test.

    Args:
        base: The folder to which paths in ``spec`` are relative.
        store: Settings for storing decoded pictures.

    Raises:
        BadInput: If a check fails, or too many images are unreadable.
    """
    return note_dark_pictures(_load_dataset_of_kind(spec, base, store), spec)


def _load_dataset_of_kind(spec: DataSpec, base: Path, store: DecodedImageStore) -> DatasetSplits:
    opened = _checked_data.pop((spec.model_dump_json(), base), None)
    match spec:
        case NpzDatasetSpec():
            return load_npz_dataset(spec, base, store, opened)
        case CompositesDatasetSpec():
            return load_composites(spec, base, store)
        case MixtureDatasetSpec():
            return load_mixture(spec, base, store)
        case CollectionsDatasetSpec():
            return load_collections(spec, lambda own: _load_dataset_of_kind(own, base, store))
        case DigitsDatasetSpec():
            return load_digits_dataset(spec)
        case PhantomDatasetSpec():
            return load_phantom_dataset(spec)
        case DrawnOrgansDatasetSpec():
            return load_drawn_organs(spec)
        case PluginDatasetSpec():
            return load_plugin_dataset(spec, base, store.tell)
        case _:
            return decode_table_pictures(opened or open_label_table(spec, base), spec, store)


def open_label_table(
    spec: FolderDatasetSpec | DicomwebDatasetSpec | NihDatasetSpec | ChexpertDatasetSpec | MimicDatasetSpec, base: Path
) -> LabelTable:
    """Read and check the label table of a data set whose pictures are in a folder or a PACS, without reading pictures.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    match spec:
        case FolderDatasetSpec():
            return open_folder_label_table(spec, base)
        case DicomwebDatasetSpec():
            from polyclinic.data.sources.dicomweb import open_dicomweb_table  # takes a second

            return open_dicomweb_table(spec, base).table
        case NihDatasetSpec():
            return open_nih_table(spec, base)
        case ChexpertDatasetSpec():
            return open_chexpert_table(spec, base)
        case MimicDatasetSpec():
            return open_mimic_table(spec, base)


_DATA_KEYS_PATTERN = "|".join(
    sorted({*FolderDatasetSpec.model_fields, *DicomwebDatasetSpec.model_fields, *NpzDatasetSpec.model_fields})
)
_DATA_SECTION_PREFIX = re.compile(rf"\bdata\.(?=(?:{_DATA_KEYS_PATTERN})\b(?!\.))")
"""Matches ``data.`` at the beginning of a key such as ``data.labels``, but not in a file name such as ``data.csv``."""
EXTERNAL_TEST_SECTION = "external_test"
"""Section of an experiment with test images that belong to no site; no decision is based on them."""


def find_external_test_faults(spec: DataSpec | None, base: Path) -> list[Fault]:
    """Check the external test set without reading its pictures, and return all faults.

    The result is empty without a ``spec``, and for an npz file, which is checked only when it is loaded.

    Args:
        base: The folder to which paths in ``spec`` are relative.
    """
    if spec is None or isinstance(spec, NpzDatasetSpec):
        return []
    return _rename_data_section_in_faults(find_dataset_faults(spec, base))


def load_external_test_images(
    spec: DataSpec | None, base: Path, store: DecodedImageStore = MEMORY_STORE
) -> ImageSet | None:
    """Load the external test set: only the test part of an npz file, or all images of any other data set.

    Args:
        spec: Settings of the test set; None if there is none.
        base: The folder to which paths in ``spec`` are relative.

    Returns:
        The images; None without a ``spec``.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    if spec is None:
        return None
    try:
        if isinstance(spec, NpzDatasetSpec):
            images = note_dark_test_pictures(load_npz_test_part(spec, base, store), spec)
        else:
            images = concatenate_image_sets(load_dataset(spec, base, store).parts)
        return replace(images, notes=tuple(f"External test set: {note}" for note in images.notes))
    except BadInput as error:
        raise BadInput(_rename_data_section_in_faults(error.faults)) from None


def refuse_test_set_without_model_class(
    images: ImageSet, class_names: Sequence[str], where: str = EXTERNAL_TEST_SECTION, whose: str = "the sites label"
) -> None:
    """Raise an error if the test images have no class in common with the model.

    Args:
        where: The configuration key of the images, for the error message.
        whose: Describes who labels ``class_names``, for the error message.

    Raises:
        BadInput: With the classes of the images and of the model.
    """
    if not set(images.class_names) & set(class_names):
        near = [hint for name in images.class_names if (hint := suggest_nearest_name(name, class_names))]
        problem = f"labels {quote_names(images.class_names)}, {whose} {quote_names(class_names)}: no class in common."
        raise BadInput([Fault(where, problem, " ".join(near))])


def _rename_data_section_in_faults(faults: Iterable[Fault]) -> list[Fault]:
    """Return the faults with section ``data`` renamed to ``external_test`` in their keys, problems and remedies."""
    renamed = list[Fault]()
    for fault in faults:
        problem, remedy = (
            _DATA_SECTION_PREFIX.sub(f"{EXTERNAL_TEST_SECTION}.", text) for text in (fault.problem, fault.remedy)
        )
        where = f"{EXTERNAL_TEST_SECTION}.{fault.where.removeprefix('data.')}"
        renamed.append(replace(fault, where=where, problem=problem, remedy=remedy))
    return renamed
