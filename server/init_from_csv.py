"""``flwr-sim init``: a commented experiment file for a user's own table and pictures, which runs as it is written."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.data.base.image_set import is_placeholder
from common.data.base.names import normalized
from common.data.base.spec import FolderSpec
from common.data.images.reading import (
    NOT_A_PICTURE,
    decode_picture,
    is_deep_png,
    is_grey,
    is_picture,
    open_png_or_jpeg,
    png_samples,
    read_head,
    unreadable_reason,
)
from common.data.tables.cells import read_label
from common.data.tables.csv import Column, Columns, column_faults, read_columns
from common.data.tables.files import FolderListings
from common.data.tables.labels import LabelTable, open_folder
from common.data.tables.roles import ColumnRoles, guess_roles, image_column, picture_folder
from common.errors import BadInput, Fault, did_you_mean, stop_on
from common.system.files import existing_output_faults, is_file, missing_input_fault, write_atomically
from common.system.plain_text import counted, json_text

if TYPE_CHECKING:
    from common.data.images.headers import DicomHead

MOST_SITES, FEWEST_POSITIVES = 3, 10
USUAL_SIZE, SMALLEST_SIZE = 64, 16
LOOKED_AT = 50
"""Number of pictures, spread over the table, whose heads are read."""
TEMPLATE = """# Made by flwr-sim init from {table}. Every key: docs/experiments.md.
[run]
method = "surgical"             # each class's row of the head is averaged over the sites that annotate it
# name = {name}   # in tables and pages; the method's where left out
rounds = 20

[model]
architecture = "tiny_cnn"       # small and fast; "timm:resnet18" for instance for larger images
channels = {channels}
image_size = {image_size}                 # pixels that the network sees; these pictures have {pixels}

[training]
epochs = 1                      # of each site in each round
batch_size = 32
lr = 1e-3

[augmentation]
rotation = 0.03                 # of a full turn
horizontal_flip = false         # true where left and right mean nothing

[data]
kind = "folder"
images = {images}
labels = {labels}
image_column = {image_column}
{columns}
image_size = {image_size}
color = {color}

# Simulated hospitals: patients are dealt over them, and the classes that each of them annotates.
[partition]
kind = "class_subsets"
sites = {sites}
shared = {shared}                      # classes that all of them annotate
"""
DEPTHS = (8, 10, 12, 14, 16)
YES_AND_NO = {"yes", "no", "y", "n", "true", "false"}


@dataclass(frozen=True)
class Dataset:
    """A table and its pictures.

    Attributes:
        columns: The columns of the table, with only the rows whose picture is present.
        checked: The table as a run reads it, with all its checks made.
        rows: Number of rows of the whole table.
        present: Number of rows whose picture is present.
        color: True if some pictures have colour in them, and are not grey stored as colour.
        sizes: Height and width of some pictures; empty where only their decoder tells them.
        depth: Bits that the 16-bit PNG files among those looked at use, by their brightest sample; None without such.
        display_problems: Sentences on DICOM files that are shown in different ways.
        looked_at: Number of pictures that were read.
        unreadable: Number of these that cannot be read, by the reason.
    """

    table: Path
    images: Path
    columns: Columns
    roles: ColumnRoles
    checked: LabelTable
    rows: int
    present: int
    color: bool
    sizes: tuple[tuple[int, int], ...]
    depth: int | None
    display_problems: tuple[str, ...]
    looked_at: int
    unreadable: Mapping[str, int]

    @property
    def image_size(self) -> int:
        """The pixels a side that the experiment begins with: few, for speed, and not more than the pictures have."""
        largest = max((max(size) for size in self.sizes), default=USUAL_SIZE)
        return min(USUAL_SIZE, max(SMALLEST_SIZE, largest))

    @cached_property
    def patients(self) -> tuple[str, int] | None:
        """The source of the patients' names, and the number of patients; None where there is no source."""
        if self.roles.patient is not None:
            return f"column {self.roles.patient}", len(set(self.columns[self.roles.patient]))
        named = self.checked.patients[~is_placeholder(self.checked.patients)]
        return ("PatientID of the DICOM files", len(set(named))) if len(named) else None


def inspect_table(
    table: Path, images: Path | None, image_column_name: str | None, patient_column_name: str | None
) -> Dataset:
    """Read a table, find its pictures, and read some of them.

    Args:
        images: The folder of the pictures; searched beside the table where None.
        image_column_name: The column of the pictures' names; searched where None.

    Raises:
        BadInput: If the table cannot be read, names no pictures or no labels, none of its pictures is found, or a run
            would refuse it: for patients whose names are alike, for instance.
    """
    if not is_file(table):
        raise BadInput([missing_input_fault(table)])
    columns = read_columns(table, "labels")
    image_column_name, patient_column_name = (
        None if name is None else normalized(name) for name in (image_column_name, patient_column_name)
    )
    required = {"--image-column": image_column_name, "--patient-column": patient_column_name}
    stop_on(column_faults(table.name, columns, required))
    column = image_column_name or image_column(columns)
    names = columns[column]
    listings = FolderListings()
    folder = images or picture_folder(table, names.tolist(), listings)
    present = np.array([folder is not None and listings.find(str(folder), name) is not None for name in names])
    if folder is None or not present.any():
        stop_on(listings.faults("--images"))
        where = f"in {images}" if images else f"in the folder of {table.name} or below"
        problem = f'none of the {len(names)} pictures of column "{column}" is {where}; the first is "{names[0]}".'
        raise BadInput([Fault("--images", problem, "Name the folder that the column's names start from.")])
    from common.data.images.headers import display_problems, read_dicom_heads  # once nothing is wrong with the call

    columns = columns.rows(present)
    roles = guess_roles(columns, column, patient_column_name)
    labels: dict[str, object] = {"label_columns": roles.label_columns}
    if roles.finding is not None:
        labels = {"finding_column": roles.finding, "separator": roles.separator, "classes": tuple(roles.classes)}
    spec = FolderSpec.model_validate(
        {"kind": "folder", "images": str(folder.resolve()), "labels": str(table.resolve()), "image_column": column}
        | {"patient_column": roles.patient, "split_column": roles.split, "missing_files": "ignore", **labels}
    )
    checked = open_folder(spec, Path())
    spread = np.unique(np.linspace(0, len(checked.files) - 1, LOOKED_AT).round().astype(int))
    files = [checked.files[row] for row in spread]
    looks, heads = [look for file in files if (look := _look_at(file)) is not None], read_dicom_heads(files)
    brightest = max((look.brightest for look in looks if look.brightest is not None), default=None)
    return Dataset(
        table,
        folder,
        columns,
        roles,
        checked,
        rows=len(names),
        present=int(present.sum()),
        color=any(look.color for look in looks),
        sizes=tuple(look.size for look in looks),
        depth=None if brightest is None else next(bits for bits in DEPTHS if brightest < 1 << bits),
        display_problems=tuple(display_problems(heads)),
        looked_at=len(files),
        unreadable=Counter(filter(None, map(_unreadable_reason, files, heads))),
    )


def _unreadable_reason(picture: Path, head: "DicomHead") -> str:
    """Return the reason, from its first bytes, why a picture cannot be read; empty where they show none."""
    try:
        if not is_picture(read_head(picture)):
            return NOT_A_PICTURE if picture.stat().st_size else "empty"
    except OSError as error:
        return unreadable_reason(error)
    if not head.syntax:
        return ""
    from common.data.images.syntaxes import is_readable, syntax_name  # takes a second, and most tables have no DICOM

    return "" if is_readable(head.syntax) else f"packed as {syntax_name(head.syntax)}"


@dataclass(frozen=True)
class _Look:
    """What a PNG or JPEG file shows.

    Attributes:
        size: Height and width.
        color: True if there is colour in it, and not grey stored as colour.
        brightest: The brightest sample of a file of 16 bits; None for other files.
    """

    size: tuple[int, int]
    color: bool
    brightest: int | None


def _look_at(picture: Path) -> _Look | None:
    """Decode a PNG or JPEG file; return None for a file of another kind, or a damaged one."""
    try:
        with open_png_or_jpeg(picture) as image:
            size = image.height, image.width
        data, brightest = picture.read_bytes(), None
        if is_deep_png(data):
            samples = png_samples(data)
            brightest = int(samples.max())
            shown = (samples / max(brightest, 1) * 255).astype(np.uint8)
        else:
            shown = np.asarray(decode_picture(data))
        return _Look(size, not is_grey(shown), brightest)
    except (ValueError, OSError):
        return None


def write_experiment(data: Dataset, out: Path) -> list[str]:
    """Write the experiment file.

    Returns:
        Lines for the user: the contents of the data, and their limits.

    Raises:
        BadInput: If the file is there already.
    """
    stop_on(existing_output_faults(out))
    write_atomically(out, _experiment_text(data, out.resolve()).encode())
    return [f"{out}: an experiment on {counted(data.present, 'image')}.", *_describe_data(data)]


def _describe_pictures(data: Dataset) -> list[str]:
    lines = [f"images: column {data.roles.image}, in {data.images}"]
    if data.present < data.rows:
        lines.append(f"    {data.rows - data.present} of {data.rows} rows have no picture there; they are left out.")
    if data.checked.repeated:
        lines.append(f"    {counted(data.checked.repeated, 'row')} said the same as an earlier one; each counts once.")
    for reason, count in data.unreadable.items():
        lines.append(f"    {count} of the {data.looked_at} that were looked at cannot be read: {reason}.")
    if data.depth is not None:
        lines.append(
            f"    PNG files of 16 bits a sample: bit_depth = {data.depth} is a guess by the brightest of those"
        )
        lines.append("    that were looked at. Ask who exported them: a wrong one makes pictures dark, or unreadable.")
    lines += [f"    {problem}" for problem in data.display_problems]
    return lines


def _describe_patients(data: Dataset) -> list[str]:
    if data.patients is None:
        return [
            "patients: UNKNOWN. Each image counts as a patient of its own: the same patient may stand in training",
            "    and test, scores come out too high, and intervals too narrow. Name the column: --patient-column",
        ]
    source, count = data.patients
    if nameless := int(is_placeholder(data.checked.patients).sum()):
        return [
            f"patients: {source}, {count} of them. {counted(nameless, 'image')} without a PatientID: each study of",
            "    these counts as a patient of its own, and may be of one who stands in another part.",
        ]
    return [f"patients: {source}, {count} of them; no patient is split over two parts."]


def _describe_data(data: Dataset) -> list[str]:
    """Return the lines for the user, which name the columns, the patients and the classes with their limits."""
    roles = data.roles
    lines = [*_describe_pictures(data), *_describe_patients(data)]
    lines.append("classes: " + ", ".join(f"{name} {count}" for name, count in roles.classes.items()))
    blank = {name: _count_unlabelled(data.columns.column(name)) for name in roles.label_columns}
    if unlabelled := [f"{name} {count}" for name, count in blank.items() if count]:
        lines.append(f"    without a label (blank or -1), of {data.present}: {', '.join(unlabelled)}.")
    if rare := [name for name, count in roles.classes.items() if count < FEWEST_POSITIVES]:
        few = ", ".join(rare)
        lines.append(f"    fewer than {FEWEST_POSITIVES} images show {few}: no score of these means anything.")
    names = list(roles.classes)
    for place, name in enumerate(names):
        if near := did_you_mean(name, names[:place], 0.8):
            lines.append(f"    {name}: is it a class of its own? {near} Correct the table, or leave it.")
    if roles.label_columns:
        lines.append("    Remove what is no finding (sex, for instance) from label_columns.")
    used = {roles.image, roles.patient, roles.split, roles.finding, *roles.label_columns}
    unused = [name for name in data.columns if name not in used]
    if unused:
        lines.append(f"    not used: {', '.join(unused)}.")
    cells = {name: {cell.lower() for cell in data.columns.column(name).cells} - {"", "-1"} for name in unused}
    if words := [name for name, values in cells.items() if values and values <= YES_AND_NO]:
        lines.append(f"    If these are findings, write 1 for yes and 0 for no, and try again: {', '.join(words)}.")
    if roles.exclusive:
        lines.append("    Each image shows exactly one of them; each is asked by itself, yes or no.")
    return lines


def _count_unlabelled(column: Column) -> int:
    unlabelled = [read_label(cell) not in ("present", "absent") for cell in column.cells]
    return int(column.counts()[unlabelled].sum())


def _experiment_text(data: Dataset, out: Path) -> str:
    """Return the experiment file, with paths relative to its folder where they lie below it."""
    roles, folder = data.roles, out.parent
    if roles.patient:
        columns = [f"patient_column = {json_text(roles.patient)}"]
    elif data.patients:
        columns = ["# patient_column = ...          # left out: PatientID of the DICOM files is taken"]
    else:
        columns = ["# patient_column = ...          # UNKNOWN: without it one patient may stand in training and test"]
    if roles.label_columns:
        columns.append(f"label_columns = {json_text(list(roles.label_columns))}")
        columns.append('uncertain = "unknown"           # what -1 means; blank cells: nobody looked')
    else:
        columns.append(f"finding_column = {json_text(roles.finding)}")
        columns.append(f"separator = {json_text(roles.separator)}")
        columns.append(f"classes = {json_text(list(roles.classes))}   # remove what is no finding")
    if roles.split:
        columns.append(f"split_column = {json_text(roles.split)}")
    if data.depth is not None:
        columns.append(
            f"bit_depth = {data.depth}                  # of 16-bit PNG files; a guess, ask who exported them"
        )
    if data.display_problems:
        columns.append(
            "# window = [40, 400]            # centre and width of grey values, the same for all files; here CT"
        )
    if data.present < data.rows:
        columns.append('missing_files = "ignore"        # rows without a picture are left out')
    pixels = "sizes of their own"
    if data.sizes:
        low, high = (f"{height} x {width}" for height, width in (min(data.sizes), max(data.sizes)))
        pixels = low if low == high else f"{low} to {high}"
    sites = min(MOST_SITES, len(roles.classes))
    return TEMPLATE.format(
        table=data.table.name,
        name=json_text(out.stem),
        image_size=data.image_size,
        pixels=pixels,
        channels=3 if data.color else 1,
        images=json_text(_relative_path(data.images, folder)),
        labels=json_text(_relative_path(data.table, folder)),
        image_column=json_text(roles.image),
        columns="\n".join(columns),
        color=str(data.color).lower(),
        sites=sites,
        shared=int(len(roles.classes) > sites),
    )


def _relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to ``folder`` where it lies below it, else an absolute one."""
    absolute = path.resolve()
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else absolute.as_posix()
