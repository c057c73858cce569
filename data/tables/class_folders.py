"""Write a label table for pictures that are sorted into a folder for each class."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import find_existing_output_faults, write_atomically
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.images.file_kinds import PICTURE_SUFFIXES
from polyclinic.data.tables.files import list_paths_below
from polyclinic.data.tables.hospital_folders import (
    HOSPITAL_COLUMN,
    OPTION,
    HospitalFolders,
    are_numbered,
    find_hospital_folders,
    list_folder_names,
    name_hospitals,
    name_parts,
    read_folder_level,
)

IMAGE_COLUMN = "image"
CLASS_COLUMN = "class"
SPLIT_COLUMN = "split"
MIN_CLASSES = 2
_MAX_LISTED = 5


def list_class_folders(folder: Path) -> Mapping[str, list[Path]]:
    """Return class -> paths of the pictures in the folder of this name and its subfolders, relative to ``folder``.

    The result is empty if fewer than two folders have pictures.
    """
    classes = dict[str, list[Path]]()
    try:
        for class_folder in sorted(path for path in folder.iterdir() if path.is_dir()):
            pictures = _list_pictures(class_folder)
            if pictures:
                classes[class_folder.name] = [path.relative_to(folder) for path in pictures]
    except (OSError, BadInput):
        return {}
    return classes if len(classes) >= MIN_CLASSES else {}


def _list_pictures(folder: Path) -> list[Path]:
    """Return the pictures in a folder and its subfolders; a folder with the slices of a DICOM series is one picture."""
    from polyclinic.data.images.dicom_series import is_series_folder  # takes a second

    paths = list_paths_below(folder)
    series = {path for path in paths if path.is_dir() and is_series_folder(path)}
    pictures = (path for path in paths if path.name.lower().endswith(PICTURE_SUFFIXES) and path.is_file())
    return sorted([*series, *(path for path in pictures if path.parent not in series)])


def write_table_of_class_folders(folder: Path, table: Path, statement: str | None = None) -> str:
    """Write a table with the columns ``image`` and ``class`` for pictures in class folders; return a line for the user.

    Folders for parts (``train``, ``test``) and for hospitals above or below those of the classes become columns, too.

    Args:
        statement: The user's word on hospitals: see :func:`find_hospital_folders`.

    Raises:
        BadInput: If the folder has no class folders, the table exists, or the folders may be classes or hospitals.
    """
    pictures = [path.as_posix() for of_class in list_class_folders(folder).values() for path in of_class]
    if not pictures:
        remedy = "Name a table of labels, or a folder that has a folder of pictures for each class."
        raise BadInput([Fault(str(folder), "is a folder, and has no folders of pictures, one for each class.", remedy)])
    if faults := find_existing_output_faults(table):
        raise BadInput(faults)
    levels = _list_levels(pictures)
    part_level = next((level for level, names in levels.items() if name_parts(set(names))), None)
    sources = find_hospital_folders(pictures, statement) if read_folder_level(statement) else None
    others = [level for level in levels if level not in (part_level, sources.level if sources else None)]
    if statement is None and len(others) > 1:
        sources = _find_hospitals_over_classes(folder, pictures, others[0], levels)
        others = others[1:] if sources is not None else others
    if not others:
        problem = "has folders for parts or hospitals, and none for classes."
        raise BadInput([Fault(str(folder), problem, "Name a table of labels, or sort the pictures by class.")])
    columns = {IMAGE_COLUMN: pictures, CLASS_COLUMN: levels[others[0]]}
    line = f"{table}: a table of {format_count_with_noun(len(pictures), 'picture')} in "
    line += f"{format_count_with_noun(len(set(levels[others[0]])), 'class folder')}."
    if sources is not None:
        columns[HOSPITAL_COLUMN] = [sources.hospitals[picture] for picture in pictures]
        line += f" {sources.describe()}"
    if part_level is not None:
        parts = name_parts(set(levels[part_level]))
        columns[SPLIT_COLUMN] = [parts[name] for name in levels[part_level]]
        line += f" Its column {SPLIT_COLUMN}: the folders {', '.join(sorted(parts))}."
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_atomically(table, text.getvalue().encode())
    return f"{line} Add a column of patients if you know them."


def _list_levels(pictures: Sequence[str]) -> dict[int, list[str]]:
    """Return number of a folder in each path -> its name in each; without those that some paths lack."""
    named = {level: list_folder_names(pictures, level) for level in (1, 2, 3)}
    return {level: names for level, names in named.items() if all(names)}


def _find_hospitals_over_classes(
    folder: Path, pictures: Sequence[str], level: int, levels: Mapping[int, Sequence[str]]
) -> HospitalFolders | None:
    """Return the hospitals if the folders of a level are called so, with those of classes below; None if they are not.

    Raises:
        BadInput: If the folders below have the same names in several of them, so that either may be the classes.
    """
    upper, lower = levels[level], levels[min(below for below in levels if below > level)]
    if are_numbered(set(lower)):  # patients of a class
        return None
    if name_hospitals(set(upper)):
        return HospitalFolders(dict(zip(pictures, upper, strict=True)), level, is_assumed=True)
    places = {name: {above for above, below in zip(upper, lower, strict=True) if below == name} for name in lower}
    repeated = sorted(name for name, of_name in places.items() if len(of_name) > 1)
    if len(repeated) < MIN_CLASSES or name_parts(set(lower)):
        return None
    names = list_first_and_count_rest(sorted(set(upper)), _MAX_LISTED)
    classes = list_first_and_count_rest(repeated, _MAX_LISTED)
    problem = f"are the folders {names} hospitals, with classes such as {classes} in "
    problem += (
        f'each? Or are they the classes?\n    {OPTION} /{level}  they are hospitals\n    {OPTION} ""  they are classes'
    )
    raise BadInput([Fault(OPTION, problem)])
