"""For ``flwr-sim init``: columns of a table that name masks, the values in them, and the classes that these mean."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.file_kinds import is_nifti_file, read_first_bytes
from polyclinic.data.images.masks import read_grid, read_mask_values, refuse_other_grid
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.tables.mask_folders import remove_mask_words
from polyclinic.studies.init.questions import PLACEHOLDER, Question

MOST_MASKS_READ = 20
"""Number of masks of a column, spread over the table, that are read to recognise it."""
MOST_VALUES = 64
"""Most different values, 0 among them, of a file that counts as a mask; photographs have more."""
MASK_OPTION, CLASS_OPTION = "--mask-column", "--mask-class"
_NAMED_VALUE = re.compile(r"\s*(\d{1,5})\s*=\s*(.+?)\s*", re.DOTALL)


@dataclass(frozen=True)
class MaskColumn:
    """A column of masks.

    Attributes:
        name: Heading of the column.
        values: Value above 0 -> number of masks that show it, of those that were read.
        masks: Number of masks that were read.
    """

    name: str
    values: Mapping[int, int] = field(default_factory=dict)
    masks: int = 0


@dataclass(frozen=True)
class MaskClasses:
    """The classes of a table's masks: a value of label maps each, or a column of masks each.

    Attributes:
        values: Class -> its value, of one column of label maps; empty for a column for each class.
        columns: Class -> the column of its masks; empty for label maps.
        rule: The rule by which the classes were found, for the user.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    rule: str = ""

    @property
    def are_exclusive(self) -> bool:
        """True if each pixel has one class at most, because a label map has one value there."""
        return bool(self.values)

    @property
    def task(self) -> str:
        """The task of a model of these masks."""
        return "exclusive_segmentation" if self.are_exclusive else "segmentation"

    def describe_task(self) -> str:
        """Return why the task is this one."""
        if self.are_exclusive:
            return "a label map gives each pixel or voxel one class, or background"
        return "each class has masks of its own, which may overlap"


def survey_mask_column(name: str, pairs: Sequence[tuple[Path, Path]]) -> MaskColumn | None:
    """Return the values in a column's files; None if one of them is no mask of the picture in its line.

    A mask lies on the grid of its picture, and has at most :data:`MOST_VALUES` values, all of them whole numbers; in
    more than half of the masks 0, the background, is one of them. A picture is no mask of itself.

    Args:
        name: Heading of the column.
        pairs: Some pictures, each with the file of the column.
    """
    values, with_background = Counter[int](), 0
    for picture, file in pairs:
        if picture.resolve() == file.resolve():
            return None
        try:
            shown = _read_values(picture, file)
        except (OSError, ValueError):
            return None
        if shown is None:
            return None
        values.update(value for value in shown if value)
        with_background += 0 in shown
    is_mask = with_background > len(pairs) / 2 and len(values) < MOST_VALUES
    return MaskColumn(name, dict(sorted(values.items())), len(pairs)) if is_mask else None


def has_few_values(file: Path) -> bool:
    """Return True if a file has at most :data:`MOST_VALUES` values, all of them whole numbers."""
    try:
        return _read_values(file, file) is not None
    except (OSError, ValueError):
        return False


def _read_values(picture: Path, file: Path) -> list[int] | None:
    """Return the values of a mask; None if it has too many, or one that is no whole number or below 0.

    Raises:
        ValueError: If it cannot be read, or lies on another grid than its picture.
    """
    form = _make_form(is_volume=picture.is_dir() or is_nifti_file(read_first_bytes(file)))
    refuse_other_grid(file, read_grid(picture, form), form)
    status = file.stat()
    return _list_values_of_file(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _list_values_of_file(file: Path, modified: int, size: int) -> list[int] | None:
    """Return the values of a mask, as :func:`_read_values`; each file is read once, though two questions ask for it.

    Args:
        modified, size: Of the file, which is read again if they change.
    """
    form = _make_form(is_volume=is_nifti_file(read_first_bytes(file)))
    present = np.unique(read_mask_values(file, read_grid(file, form), form))
    is_whole = bool(np.isfinite(present).all()) and bool((present == np.floor(present)).all())
    if len(present) > MOST_VALUES or not is_whole or present.min() < 0:
        return None
    return [int(value) for value in present.tolist()]


def _make_form(*, is_volume: bool) -> DecodedImageFormat:
    return DecodedImageFormat((8, 8, 8) if is_volume else 8, False, "pad", PictureRenderingOptions())


def parse_named_values(texts: Sequence[str]) -> dict[int, str]:
    """Read options such as ``1=Liver``; return value -> class.

    Raises:
        BadInput: If an option does not have this form, or two name the same value or class.
    """
    named, faults = dict[int, str](), list[Fault]()
    for text in texts:
        match = _NAMED_VALUE.fullmatch(text)
        if match is None or match[2] == PLACEHOLDER:
            problem = f'"{text}" is no value with the name of its class.'
            faults.append(Fault(CLASS_OPTION, problem, "Such as 1=Liver."))
        elif int(match[1]) in named or match[2] in named.values():
            faults.append(Fault(CLASS_OPTION, f'"{text}" names a value or a class that another one names.'))
        else:
            named[int(match[1])] = match[2]
    raise_faults(faults)
    return named


def name_mask_classes(columns: Sequence[MaskColumn], named: Mapping[int, str]) -> tuple[MaskClasses, list[Question]]:
    """Return the classes of the masks of a table, and a question for each value of which nothing says the class.

    Args:
        named: Value -> class, by the user or by a description beside the images.
    """
    if len(columns) > 1:
        classes = {remove_mask_words(column.name) or column.name: column.name for column in columns}
        if len(classes) < len(columns):
            classes = {column.name: column.name for column in columns}
        return MaskClasses(columns=classes, rule="each column has the masks of one class, by its heading"), []
    (column,) = columns
    values, questions = dict(named), list[Question]()
    unnamed = [value for value in column.values if value not in named]
    own = remove_mask_words(column.name)
    if len(unnamed) == 1 and not named and own:
        values, unnamed = {unnamed[0]: own}, []
    for value in unnamed:
        shown = f"{column.values[value]} of {format_count_with_noun(column.masks, 'mask')} that were read"
        text = f"What does {value} mean in the masks of column {column.name} (in {shown})? An organ, or a finding."
        questions.append(Question(CLASS_OPTION, text, prefix=f"{value}="))
    if not values and not questions:
        problem = f"shows nothing but 0 in {format_count_with_noun(column.masks, 'mask')} that were read."
        raise BadInput([Fault(f'column "{column.name}"', problem, f"Name the values: {CLASS_OPTION} 1=Liver.")])
    rule = f"values of the label maps, {', '.join(f'{value} {name}' for value, name in sorted(values.items()))}"
    return MaskClasses({name: value for value, name in sorted(values.items())}, rule=rule), questions


def describe_mask_columns(names: Sequence[str]) -> str:
    """Return the rule by which columns were taken for masks."""
    files = "its files lie" if len(names) == 1 else "their files lie"
    return f"{', '.join(names)}: {files} on the grid of the pictures, with few whole values"
