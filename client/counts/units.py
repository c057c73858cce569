"""The patients and images of a hospital for the count tables: states of classes and values of attributes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.counts import (
    ABSENT,
    AGE_BANDS,
    ALL,
    ATTRIBUTES,
    CLASS_TABLE,
    COMBINATION_SEPARATOR,
    COMBINATIONS_TABLE,
    CROSSED_ATTRIBUTES,
    FIRST_COUNTED_YEAR,
    FIXED_VALUES,
    INTENSITY_BINS,
    LAST_COUNTED_YEAR,
    NO_CLASS,
    NOT_STATED,
    PRESENT,
    SEXES,
    SIZE_LIMITS,
    SIZES,
    UNKNOWN,
)
from polyclinic.data.base.attributes import UNKNOWN_NUMBER, ImageAttributes, concatenate_attributes
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.picture_header import PictureHeader

CellKey = tuple[str, str, str, str]
"""Key of a count: table, class, state and value; a text is empty if it does not apply."""
Column = tuple[str, str, str]
"""Table, class and value. The counts of a column, one for each state, are hidden together."""
STATE_NUMBERS: Mapping[str, int] = {PRESENT: 1, ABSENT: 0, UNKNOWN: -1}
PICTURES_PER_READ = 256

States = NDArray[np.int8]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class CountedUnits:
    """All patients, or all images, of a hospital, with their classes and attributes.

    Attributes:
        states: int8 ``(n, classes)``: 1 present, 0 absent, -1 not annotated.
        value_indices: Attribute -> ``(n,)``, the index of each patient's or image's value.
    """

    states: States
    value_indices: Mapping[str, Indices]

    def __len__(self) -> int:
        return len(self.states)


@dataclass(frozen=True)
class CountedData:
    """The patients and images that a hospital counts.

    Attributes:
        values: Attribute that the hospital's table states -> its values, in order.
        patients: A patient has the attribute value of the earliest image, by year, then by the order of the table. A
            class is present in a patient if it is present in an image, else absent if it is absent in an image.
        images: All images.
        patient_rows: A hash of each patient's images, by which two sheets are compared; it never leaves the program.
    """

    class_names: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    patients: CountedUnits
    images: CountedUnits
    patient_rows: tuple[bytes, ...]

    @property
    def missing_tables(self) -> tuple[str, ...]:
        """Return the names of the tables of counts that cannot be made, because the label table lacks an attribute."""
        tables = list[str]()
        for name in ATTRIBUTES:
            if name not in self.values:
                tables.append(name)
                if name in CROSSED_ATTRIBUTES:
                    tables.append(f"class_by_{name}")
        return tuple(tables)


def count_data_of_images(
    parts: Sequence[ImageSet], *, with_intensity: bool, headers: Sequence[PictureHeader] = ()
) -> CountedData:
    """Return the patients and images of a hospital.

    Args:
        parts: The parts of the data, which have the same classes.
        with_intensity: True to read all pictures for the table of mean grey values.
        headers: The header of each image's file; empty if pictures are not files. They give the device if the
            hospital's table has no column of devices.
    """
    attributes = concatenate_attributes([part.attributes or ImageAttributes.make_unstated(len(part)) for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    devices = [header.device for header in headers]
    if "device" not in attributes.columns and any(devices):
        columns = (*attributes.columns, "device")
        attributes = replace(attributes, device=np.array(devices, np.str_), columns=columns)
    value_indices, values = _find_attribute_values(attributes)
    if headers:
        sides = np.array([header.shorter_side for header in headers])
        value_indices["size"] = np.where(sides > 0, np.digitize(sides, SIZE_LIMITS), len(SIZES) - 1).astype(np.intp)
        values["size"] = SIZES
    if with_intensity:
        means = np.concatenate([compute_mean_grey_values(part) for part in parts])
        value_indices["intensity"] = np.minimum(means // 32, len(INTENSITY_BINS) - 1).astype(np.intp)
        values["intensity"] = INTENSITY_BINS
    states = np.where(np.isnan(labels), -1, labels).astype(np.int8)
    year = np.where(attributes.year == UNKNOWN_NUMBER, np.iinfo(np.int16).max, attributes.year)
    order = np.lexsort((np.arange(len(year)), year))  # the last key is the first to sort by
    names, owners = np.unique(np.concatenate([part.patients for part in parts]), return_inverse=True)
    patient_states = np.full((len(names), states.shape[1]), -1, np.int8)
    np.maximum.at(patient_states, owners, states)
    first_values = {
        name: _find_first_values(indices, owners[order], order, name) for name, indices in value_indices.items()
    }
    patients = CountedUnits(patient_states, first_values)
    rows = _describe_patients(names, owners, CountedUnits(states, value_indices))
    return CountedData(parts[0].class_names, values, patients, CountedUnits(states, value_indices), rows)


def _find_attribute_values(attributes: ImageAttributes) -> tuple[dict[str, Indices], dict[str, tuple[str, ...]]]:
    """Return attribute -> ``(n,)`` index of each image's value, and attribute -> values, for the stated attributes."""
    value_indices = dict[str, Indices]()
    values = dict[str, tuple[str, ...]]()
    if "sex" in attributes.columns:
        sexes = {name: index for index, name in enumerate(SEXES)}
        unstated = len(SEXES) - 1
        value_indices["sex"] = np.array([sexes.get(word, unstated) for word in attributes.sex.tolist()], np.intp)
        values["sex"] = SEXES
    if "age" in attributes.columns:
        age = attributes.age_at_image.astype(np.intp)
        value_indices["age"] = np.where(age == UNKNOWN_NUMBER, len(AGE_BANDS) - 1, np.minimum(age // 10, 9))
        values["age"] = AGE_BANDS
    if "year" in attributes.columns:
        year = attributes.year.astype(np.intp)
        years = FIXED_VALUES["year"]
        counted = np.clip(year, FIRST_COUNTED_YEAR - 1, LAST_COUNTED_YEAR) - FIRST_COUNTED_YEAR + 1
        value_indices["year"] = np.where(year == UNKNOWN_NUMBER, len(years) - 1, counted)
        values["year"] = years
    if "device" in attributes.columns:
        devices = np.where(attributes.device == "", NOT_STATED, attributes.device)
        names, index = np.unique(devices, return_inverse=True)
        value_indices["device"] = index.astype(np.intp)
        values["device"] = tuple(names.tolist())
    return value_indices, values


def _find_first_values(indices: Indices, owners: Indices, order: Indices, name: str) -> Indices:
    """Return each patient's value: that of the first image, or for the sex, of the first image that states it.

    Args:
        indices: ``(n,)``, the index of each image's value.
        owners: Patient of each image, in the order of ``order``.
        order: The images, the first of each patient before the others.
    """
    if name == "sex":  # images that state the sex come first; the stable sort keeps their order
        stated_first = np.argsort(indices[order] == len(SEXES) - 1, kind="stable")
        order = order[stated_first]
        owners = owners[stated_first]
    _, positions = np.unique(owners, return_index=True)
    return indices[order[positions]]


def _describe_patients(names: NDArray[np.str_], owners: Indices, images: CountedUnits) -> tuple[bytes, ...]:
    """Return a hash for each patient that changes with the states or values of any of the patient's images."""
    columns = [
        images.states.astype(np.int64),
        *(indices[:, None] for _, indices in sorted(images.value_indices.items())),
    ]
    table = np.ascontiguousarray(np.concatenate(columns, axis=1))
    contents = [list[bytes]() for _ in names]
    for owner, row in zip(owners.tolist(), table, strict=True):
        contents[owner].append(row.tobytes())
    return tuple(
        hashlib.sha256(str(name).encode() + b"\0" + b"".join(sorted(content))).digest()
        for name, content in zip(names.tolist(), contents, strict=True)
    )


def compute_mean_grey_values(images: ImageSet) -> NDArray[np.float64]:
    """Return the mean grey value of each picture, 0 to 255, float64 ``(n,)``."""
    rows = np.arange(len(images)) if images.places is None else images.places
    different, index = np.unique(rows, return_inverse=True)
    means = np.zeros(len(different))
    for start in range(0, len(different), PICTURES_PER_READ):
        part = different[start : start + PICTURES_PER_READ]
        pictures: NDArray[Any] = images.stored[part]
        means[start : start + len(part)] = pictures.reshape(len(part), -1).mean(axis=1, dtype=np.float64)
    return means[index]


def name_combinations(states: States, class_names: tuple[str, ...]) -> NDArray[np.str_]:
    """Return the names of the classes that each patient or image shows, joined to one text, ``(n,)``.

    Args:
        states: int8 ``(n, classes)``.
        class_names: The classes of the columns.
    """
    names = [
        COMBINATION_SEPARATOR.join(name for name, state in zip(class_names, row, strict=True) if state == 1)
        for row in states
    ]
    return np.array([name or NO_CLASS for name in names], np.str_)


def count_cells(units: CountedUnits, data: CountedData, combined: tuple[str, ...]) -> dict[CellKey, int]:
    """Count all cells of all tables. Empty cells are 0; combinations and devices that do not occur have no cell.

    Args:
        units: The patients or the images of ``data``.
        combined: The classes of the table of combinations.
    """
    cells = dict[CellKey, int]()
    for column, name in enumerate(data.class_names):
        for state, number in STATE_NUMBERS.items():
            is_state = units.states[:, column] == number
            cells[CLASS_TABLE, name, state, ""] = int(is_state.sum())
            for attribute in CROSSED_ATTRIBUTES:
                if attribute in data.values:
                    values = data.values[attribute]
                    counts = np.bincount(units.value_indices[attribute][is_state], minlength=len(values))
                    for value, count in zip(values, counts.tolist(), strict=True):
                        cells[f"class_by_{attribute}", name, state, value] = count
    for name, values in data.values.items():
        counts = np.bincount(units.value_indices[name], minlength=len(values))
        for value, count in zip(values, counts.tolist(), strict=True):
            cells[name, "", ALL, value] = count
    columns = [data.class_names.index(name) for name in combined]
    names, counts = np.unique(name_combinations(units.states[:, columns], combined), return_counts=True)
    for value, count in zip(names.tolist(), counts.tolist(), strict=True):
        cells[COMBINATIONS_TABLE, "", ALL, value] = count
    return cells
