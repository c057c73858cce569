"""Write a label table for pictures that are sorted into a folder for each class."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import find_existing_output_faults, write_atomically
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.images.file_kinds import PICTURE_SUFFIXES

IMAGE_COLUMN = "image"
CLASS_COLUMN = "class"
MIN_CLASSES = 2


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
    except OSError:
        return {}
    return classes if len(classes) >= MIN_CLASSES else {}


def _list_pictures(folder: Path) -> list[Path]:
    """Return the pictures in a folder and its subfolders; a folder with the slices of a DICOM series is one picture."""
    from polyclinic.data.images.dicom_series import is_series_folder  # takes a second

    paths = sorted(folder.rglob("*"))
    series = {path for path in paths if path.is_dir() and is_series_folder(path)}
    pictures = (path for path in paths if path.name.lower().endswith(PICTURE_SUFFIXES) and path.is_file())
    return sorted([*series, *(path for path in pictures if path.parent not in series)])


def write_table_of_class_folders(folder: Path, table: Path) -> str:
    """Write a table with the columns ``image`` and ``class`` for pictures in class folders; return a line for the user.

    Raises:
        BadInput: If the folder has no class folders, or the table exists.
    """
    classes = list_class_folders(folder)
    if not classes:
        remedy = "Name a table of labels, or a folder that has a folder of pictures for each class."
        raise BadInput([Fault(str(folder), "is a folder, and has no folders of pictures, one for each class.", remedy)])
    if faults := find_existing_output_faults(table):
        raise BadInput(faults)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((IMAGE_COLUMN, CLASS_COLUMN))
    for name, pictures in classes.items():
        writer.writerows((picture.as_posix(), name) for picture in pictures)
    write_atomically(table, text.getvalue().encode())
    images = format_count_with_noun(sum(map(len, classes.values())), "picture")
    return f"{table}: a table of {images} in {len(classes)} class folders. Add a column of patients if you know them."
