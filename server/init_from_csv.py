"""``flwr-sim init``: write a commented experiment file for a user's own label table and pictures.

Before the file is written, it passes all checks that a run makes before its first round, including decoding of all
pictures.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from common.config import validate_experiment
from common.data.base.image_set import PARTS, SkippedImage, has_known_patients, is_placeholder_patient
from common.data.base.names import is_blank_cell, make_class_spelling_key, normalize_name
from common.data.base.spec import NO_FINDING, FolderDatasetSpec
from common.data.images.reading import (
    PICTURE_SUFFIXES,
    decode_picture,
    decode_png_samples,
    is_16_bit_png,
    is_grey_picture,
    make_conversion_remedy,
    open_png_or_jpeg,
)
from common.data.tables.csv import CsvColumn, CsvColumns, find_missing_column_faults, is_utf_8_table, read_csv_columns
from common.data.tables.files import PictureFileFinder, describe_other_endings, drop_picture_ending
from common.data.tables.judgement import finding_certainty, is_metadata_column_name, names_id, split_diagnosis_code
from common.data.tables.labels import LabelTable, find_blank_cell_faults, open_picture_folder
from common.data.tables.roles import (
    ColumnRoles,
    describe_foreign_cells,
    describe_unnamed_columns,
    find_picture_folder,
    format_findings_options,
    group_by_reader,
    guess_column_roles,
    guess_patients_by_filename,
    labels_of_other_pictures,
    list_possible_hospital_columns,
    list_possible_patient_columns,
    may_be_identifiers,
    picture_columns,
    several_picture_columns_faults,
    shorten,
)
from common.errors import BadInput, Fault, quote_names, raise_faults
from common.system.files import find_existing_output_faults, is_file, make_missing_input_fault, write_atomically
from common.system.plain_text import (
    format_as_json_text,
    format_count_with_noun,
    join_as_english_list,
    list_first_and_count_rest,
)
from common.system.resources import exclude_imports_from_gc
from common.system.toml import parse_toml
from server.init_hospitals import TableHospitals, find_hospitals, has_undecided_synonyms, propose_synonyms

MOST_SITES, FEWEST_POSITIVES = 3, 10
USUAL_SIZE, SMALLEST_SIZE = 64, 16
LOOKED_AT, MOST_NAMED = 50, 10
"""Number of pictures, spread over the table, that are read to guess the settings; of unreadable ones that are named."""
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
{synonyms}
{partition}"""
_SIMULATED = """# Simulated hospitals: patients are dealt over them, and the classes that each of them annotates.
[partition]
kind = "class_subsets"
sites = {sites}
shared = {shared}                      # classes that all of them annotate
"""
_HOSPITALS = """# Each hospital of column {source} is a site.
[partition]
kind = "class_lists"
images = "source"
test_labels = "listed"          # or "all", where every class was looked for in all test images

# The classes that each of them annotates, by its own names: {evidence}.
# In training and in test a class that is not in a hospital's list is unknown in its images.
[partition.lists]
{lists}
"""
DEPTHS = (8, 10, 12, 14, 16)


@dataclass(frozen=True)
class InspectedDataset:
    """A label table and its pictures, with everything that was detected about them.

    Attributes:
        whole: All columns of the table, with all rows.
        columns: All columns, with only the rows whose picture exists.
        spec: The data specification that a run would use.
        checked: The table as a run reads it, after all checks.
        hospitals: The hospitals of the table; None if no column names them.
        synonyms: Class names that may mean the same class -> the more frequent name.
        rows: Number of rows in the whole table.
        present: Number of rows whose picture exists.
        absent: Names of missing pictures with their line numbers, as text; empty if none is missing.
        unnamed: Files with an ending of pictures in the folder that no row names.
        other_pictures: Other columns that name pictures, which are not used.
        color: Whether some pictures have real colours, not grey stored as RGB.
        sizes: Height and width of some pictures; empty if only decoding would reveal them.
        depth: Bits used by 16-bit PNG files, guessed from their brightest sample; None without such files.
        display_problems: Sentences on DICOM files with different display settings.
    """

    table: Path
    images: Path
    whole: CsvColumns
    columns: CsvColumns
    roles: ColumnRoles
    spec: FolderDatasetSpec
    checked: LabelTable
    hospitals: TableHospitals | None
    synonyms: Mapping[str, str]
    rows: int
    present: int
    absent: str
    unnamed: tuple[str, ...]
    other_pictures: tuple[str, ...]
    color: bool
    sizes: tuple[tuple[int, int], ...]
    depth: int | None
    display_problems: tuple[str, ...]

    @property
    def image_size(self) -> int:
        """The proposed side length of images in pixels: small for speed, and at most that of the pictures."""
        largest = max((max(size) for size in self.sizes), default=USUAL_SIZE)
        return min(USUAL_SIZE, max(SMALLEST_SIZE, largest))

    @property
    def classes_without_negatives(self) -> list[str]:
        """The classes of label columns that have positives but no negatives (no 0)."""
        shows, lacks = ((self.checked.labels == value).any(axis=0) for value in (1, 0))
        names = zip(self.checked.class_names, shows, lacks, strict=True)
        return [name for name, is_shown, is_lacking in names if is_shown and not is_lacking]

    @property
    def undecided_settings(self) -> list[str]:
        """The settings in the experiment file that a person has to decide on before a run."""
        keys = ["the names after other_findings"] if self.roles.doubtful else []
        keys += ["those after not_assessed"] if self.roles.not_assessed else []
        keys += ["split_column"] if self.roles.possible_splits and self.roles.split is None else []
        are_codes = any(map(split_diagnosis_code, self.synonyms))  # G behind a code means nothing else than the code
        keys += ["synonyms"] if are_codes or has_undecided_synonyms(self.synonyms) else []
        is_only_positive = bool(self.roles.label_columns) and len(self.classes_without_negatives) == len(
            self.checked.class_names
        )
        is_only_positive |= self.shows_always_something
        return keys + (["blank"] if is_only_positive else [])

    @property
    def blank_findings(self) -> int:
        """The number of images whose cell in the column of findings is blank; 0 for label columns."""
        return int(np.isnan(self.checked.labels).all(axis=1).sum()) if self.roles.finding else 0

    @property
    def shows_always_something(self) -> bool:
        """True if cells in the column of findings are blank, and every other image shows a class that is no grade."""
        if all(name.isdecimal() for name in self.roles.classes):
            return False
        labels = self.checked.labels[~np.isnan(self.checked.labels).all(axis=1)]
        return bool(self.blank_findings) and bool((labels == 1).any(axis=1).all())

    @cached_property
    def patient_source_and_count(self) -> tuple[str, int] | None:
        """Where patient names come from, and the number of patients; None if patients are not named."""
        if self.roles.patient is not None:
            return f"column {self.roles.patient}", len(set(self.checked.patients.tolist()))
        named = self.checked.patients[~is_placeholder_patient(self.checked.patients)]
        return ("PatientID of the DICOM files", len(set(named))) if len(named) else None


@dataclass(frozen=True)
class ColumnHints:
    """What the user states about the columns of the table; None for a column to be guessed.

    Attributes:
        source: Name of the column of hospitals; empty text for none.
        join_patients: Whether patients with similar names count as one patient.
        findings: Names of the label columns, or of the one column of findings.
    """

    image: str | None = None
    patient: str | None = None
    source: str | None = None
    join_patients: bool = False
    findings: tuple[str, ...] = ()


def inspect_table(table: Path, images: Path | None, hints: ColumnHints) -> InspectedDataset:
    """Read a label table, find its pictures, and examine some of them.

    Args:
        images: Folder that contains the pictures, directly or in subfolders; None to search beside the table.

    Raises:
        BadInput: If the table is unreadable or lacks pictures or labels, no picture exists, or a run would refuse the
            data, for instance for similar patient names.
    """
    if not is_file(table):
        raise BadInput([make_missing_input_fault(table)])
    if table.suffix == ".npz":
        problem = f"{table.name} holds arrays and is no table, for which init writes experiments."
        remedy = 'Write [data] with kind = "npz" yourself: docs/experiments.md, section [data].'
        raise BadInput([Fault("labels", problem, remedy)])
    columns = whole = read_csv_columns(table, "labels")
    required = {
        "--image-column": hints.image,
        "--patient-column": hints.patient,
        "--source-column": hints.source or None,
    }
    faults = find_missing_column_faults(table.name, columns, required)
    raise_faults(
        faults
        + [
            fault
            for name in hints.findings
            for fault in find_missing_column_faults(table.name, columns, {"--findings": name})
        ]
    )
    given = [None if name is None else normalize_name(name) for name in (hints.image, hints.patient, hints.source)]
    listings, root = PictureFileFinder(), images or table.parent
    below = list(listings.walk_files(root))
    try:
        column, *others = picture_columns(columns, (name for _, name in below), given[0])
    except BadInput as bad:
        hint = _explain_folder_column_remedy(columns, {part for folder, _ in below for part in Path(folder).parts})
        raise BadInput([replace(fault, remedy=hint or fault.remedy) for fault in bad.faults]) from None
    raise_faults([] if given[0] else several_picture_columns_faults((column, *others)))
    names = columns[column]
    folder = find_picture_folder(root, columns.get_column(column).cells, listings)
    on_disk = [None if folder is None else listings.find_file(str(folder), name) for name in names]
    present = np.array([name is not None for name in on_disk])
    if folder is None or not present.any():
        raise_faults(listings.find_unlistable_folder_faults("--images"))
        where = f"in {images}" if images else f"in the folder of {table.name} or below"
        first = next(filter(None, names), "")
        problem = f'none of the {len(names)} pictures of column "{column}" is {where}; the first is "{first}".'
        remedy = "Name the folder that the column's names start from."
        ends, paths = [match.end() for match in re.finditer(r"[/\\]+", first)], set[str]()
        for place, name in below:
            paths |= {"/".join((*Path(place).parts[-depth:], name)) for depth in range(len(ends))}
            paths.add(name)
        stems = list(map(drop_picture_ending, columns.get_column(column).cells))
        if (near := find_picture_folder(root, stems, listings)) is not None:
            remedy = describe_other_endings(str(near), names.tolist(), listings) or remedy
        if end := next((end for end in ends if first[end:].replace("\\", "/") in paths), 0):
            remedy = f'"{first[end:]}" is there: remove the beginning "{first[:end]}" from the names in the table.'
        raise BadInput([Fault("--images", problem, remedy)])
    from common.data.images.headers import (  # once nothing is wrong with the call
        describe_display_problems,
        read_dicom_headers,
    )

    absent = _describe_missing_pictures(columns.get_column(column), present)
    missing = names[~present].tolist()
    absent += f". {hint}" if (hint := describe_other_endings(str(folder), missing, listings).rstrip(".")) else ""
    columns = whole if present.all() else whole.select_rows(present)
    roles = guess_column_roles(columns, column, given[1], given[2], [normalize_name(name) for name in hints.findings])
    settings: dict[str, object] = {
        "kind": "folder",
        "images": str(folder.resolve()),
        "labels": str(table.resolve()),
        "image_column": column,
        "patient_column": roles.patient,
        "source_column": roles.source,
        "split_column": roles.split,
        "missing_files": "ignore",
        "similar_patients": "join" if hints.join_patients else "fault",
        "label_columns": roles.label_columns,
    }
    if roles.finding is not None:
        settings |= {"finding_column": roles.finding, "separator": roles.separator, "classes": tuple(roles.classes)}
        settings |= {"no_finding": (*NO_FINDING, *roles.no_finding), "other_findings": tuple(roles.doubtful)}
        settings["not_assessed"] = tuple(roles.not_assessed)
    spec = FolderDatasetSpec.model_validate(settings)
    checked = _read_checked_table(spec, columns)
    hospitals = find_hospitals(roles, checked)
    raise_faults(hospitals.find_unlabelled_hospital_faults(columns, roles, hints.findings) if hospitals else [])
    spread = np.unique(np.linspace(0, len(checked.files) - 1, LOOKED_AT).round().astype(int))
    files = [checked.files[row] for row in spread]
    looks, heads = [look for file in files if (look := _summarize_picture(file)) is not None], read_dicom_headers(files)
    brightest = max((look.brightest for look in looks if look.brightest is not None), default=None)
    return InspectedDataset(
        table,
        folder,
        whole,
        columns,
        roles,
        spec,
        checked,
        hospitals,
        propose_synonyms(roles, checked, hospitals),
        rows=len(names),
        present=int(present.sum()),
        absent=absent,
        unnamed=_find_unnamed_pictures(folder, filter(None, on_disk), listings),
        other_pictures=tuple(others),
        color=any(look.color for look in looks),
        sizes=tuple(look.size for look in looks),
        depth=None if brightest is None else next(bits for bits in DEPTHS if brightest < 1 << bits),
        display_problems=tuple(describe_display_problems(heads)),
    )


def _explain_folder_column_remedy(columns: CsvColumns, folders: Collection[str]) -> str:
    """Return a remedy for a table of studies, in which a column names folders of pictures; empty for other tables."""
    for name in columns:
        cells = [cell for cell in columns.get_column(name).cells if not is_blank_cell(cell)]
        if cells and sum(cell in folders for cell in cells) > len(cells) / 2:
            return (
                f'Column "{name}" names folders: a line for each picture is needed. Lines of Python that write such a '
                'table: docs/recipes.md, "A folder for each finding, or a table of studies".'
            )
    return ""


def _find_unnamed_pictures(folder: Path, named: Iterable[str], listings: PictureFileFinder) -> tuple[str, ...]:
    """Return the files in a folder that no row names, with an ending of pictures or, as some named files, without."""
    known = {os.path.normpath(name) for name in named}
    endings = {Path(name).suffix.lower() for name in known}.union(PICTURE_SUFFIXES)
    below = (os.path.normpath(os.path.join(*place)) for place in listings.walk_files(folder))
    return tuple(sorted(name for name in below if name not in known and Path(name).suffix.lower() in endings))


def _describe_missing_pictures(column: CsvColumn, present: NDArray[np.bool_]) -> str:
    """Name the missing pictures, those of rows that are False in ``present`` ``(rows,)``."""
    absent = [place for place in dict.fromkeys(column.places[~present].tolist()) if column.cells[place]]
    return column.describe_cell_lines(absent, 3)


def _read_checked_table(spec: FolderDatasetSpec, columns: CsvColumns) -> LabelTable:
    """Read and check the table as a run does, with remedies in terms of the command's options.

    Raises:
        BadInput: With all faults.
    """
    faults = []
    if spec.source_column is not None:
        for fault in find_blank_cell_faults(columns.get_column(spec.source_column), "--source-column", "hospital"):
            remedy = 'Fill them, name another column, or add --source-column "" to deal patients over invented sites.'
            faults.append(replace(fault, remedy=remedy))
    try:
        table = open_picture_folder(spec, Path())
    except BadInput as bad:
        join = (
            "Write each patient in one way. Or add --join-patients: each pair counts as one patient and stays on one "
        )
        join += "side of the split, which is right for the split also if they are two."
        for fault in bad.faults:
            faults.append(replace(fault, remedy=join) if "similar_patients" in fault.remedy else fault)
    raise_faults(faults)
    return table


@dataclass(frozen=True)
class _PictureSummary:
    """Properties of one PNG or JPEG file.

    Attributes:
        size: Height and width.
        color: Whether the picture has real colours, not grey stored as RGB.
        brightest: Brightest sample of a 16-bit file; None for other files.
    """

    size: tuple[int, int]
    color: bool
    brightest: int | None


def _summarize_picture(picture: Path) -> _PictureSummary | None:
    """Decode a PNG or JPEG file and return its properties; None for another format or a damaged file."""
    try:
        with open_png_or_jpeg(picture) as image:
            size = image.height, image.width
        data, brightest = picture.read_bytes(), None
        if is_16_bit_png(data):
            samples = decode_png_samples(data)
            brightest = int(samples.max())
            shown = (samples / max(brightest, 1) * 255).astype(np.uint8)
        else:
            shown = np.asarray(decode_picture(data))
        return _PictureSummary(size, not is_grey_picture(shown), brightest)
    except (ValueError, OSError):
        return None


def check_and_write_experiment(
    data: InspectedDataset, out: Path, tell: Callable[[str], object] = lambda line: None
) -> list[str]:
    """Check an experiment in the same way as a run does, then write its file.

    Args:
        tell: Function that prints a progress line while images are decoded.

    Returns:
        Lines for the user on the contents and limits of the data.

    Raises:
        BadInput: If the file exists already, or a run would refuse the experiment.
    """
    raise_faults(find_existing_output_faults(out))
    with exclude_imports_from_gc():  # torch takes seconds, and most faults are found before
        from common.simulation import clear_data_cache
        from server.simulation.simulate import check_simulation_experiment

    tree = parse_toml(_format_experiment_file(data, out.resolve(), confirmed=True))
    clear_data_cache()
    _, checked = check_simulation_experiment(validate_experiment(tree, out.resolve(), name=out.name), tell)
    write_atomically(out, _format_experiment_file(data, out.resolve()).encode())
    skipped = [skip for part in checked.splits.parts for skip in part.skipped]
    lines = [f"{out}: an experiment on {format_count_with_noun(len(data.checked.files) - len(skipped), 'image')}."]
    notes = [note for note in checked.splits.train.notes if note != data.checked.other_findings_note]  # not decided yet
    lines += [*_describe_pictures(data, skipped), *(f"    {note}" for note in notes)]
    return [*lines, *_describe_data(data), *_describe_synonyms(data, out)]


def describe_next_command(data: InspectedDataset, out: Path) -> str:
    """Return a line for the user with the next command, and the decisions to make before it."""
    first = (
        f"first decide on {join_as_english_list(data.undecided_settings)} in {out}, then: "
        if data.undecided_settings
        else ""
    )
    return f"Next: {first}flwr-sim run {quote(str(out))} --out {quote(f'runs/{out.stem}')} --backend inline"


def _describe_pictures(data: InspectedDataset, skipped: Sequence[SkippedImage]) -> list[str]:
    lines = [f"images: column {data.roles.image}, in {data.images}"]
    if not is_utf_8_table(data.table):
        cells = chain(data.columns, *(data.columns.get_column(name).cells for name in data.columns))
        texts = quote_names([shorten(cell) for cell in cells if not cell.isascii()], 3)
        lines.append(f"    {data.table.name} is not UTF-8, and read as Windows-1252: {texts}. If letters are wrong,")
        lines.append("    save it as CSV UTF-8.")
    if max(map(max, data.sizes), default=0) > data.image_size:
        lines.append(
            f"    larger than {data.image_size} pixels: reduced to image_size, which stands twice in the file."
        )
    if data.present < data.rows:
        lost = format_count_with_noun(
            data.rows - data.present, "row names a picture that is", "rows name pictures that are"
        )
        lines.append(f"    of {data.rows}, {lost} not there, and left out: {data.absent}.")
    if data.unnamed:
        lines.append(
            f"    {format_count_with_noun(len(data.unnamed), 'picture')} of the folder that no line names: "
            f"{list_first_and_count_rest(data.unnamed, 3)}."
        )
    if data.other_pictures:
        lines += _describe_other_pictures(data)
    if data.checked.repeated:
        lines.append(
            f"    {format_count_with_noun(data.checked.repeated, 'row')} said the same as an earlier one; each counts "
            "once."
        )
    for skip in skipped[:MOST_NAMED]:
        lines.append(f"    {skip.name} cannot be read, and is left out: {skip.reason}.")
    if len(skipped) > MOST_NAMED:
        lines.append(f"    and {len(skipped) - MOST_NAMED} more.")
    if remedy := make_conversion_remedy(skip.reason for skip in skipped):
        lines.append(f"    {remedy}")
    if data.depth is not None:
        lines.append(
            f"    PNG files of 16 bits a sample: bit_depth = {data.depth} is a guess by the brightest of those"
        )
        lines.append("    that were looked at. Ask who exported them: a wrong one makes pictures dark, or unreadable.")
    lines += [f"    {problem}" for problem in data.display_problems]
    if data.display_problems and (count := len(data.checked.files)) > LOOKED_AT:
        lines.append(
            f"    That is of {LOOKED_AT} of the {count} images, spread over the table; no others were looked at."
        )
    return lines


def _describe_other_pictures(data: InspectedDataset) -> list[str]:
    """Return lines for the user on a table whose rows name several pictures, of which only one is used."""
    labels, names = data.roles.label_columns or (data.roles.finding or "",), data.other_pictures
    lines = [
        f"    NOT USED, though they name pictures too: {', '.join(names)}. A line's labels are learned for that of",
        f'    {data.roles.image} alone. A line for each picture: docs/recipes.md, "Two pictures in a line".',
    ]
    if foreign := labels_of_other_pictures(data.roles.image, names, labels):
        lines.append(f"    WRONG PICTURE, by their names: {', '.join(foreign)} say what {', '.join(names)} shows.")
        if own := [name for name in labels if name not in foreign]:
            options = f"--image-column {quote(data.roles.image)} {format_findings_options(own)}"
            lines.append(f"    To leave them out, begin again with: {options}")
    return lines


def _describe_patients(data: InspectedDataset) -> list[str]:
    if data.patient_source_and_count is None:
        lines = [
            "patients: UNKNOWN. Each image counts as a patient of its own: the same patient may stand in training",
            "    and test, scores come out too high, and intervals too narrow. Name the column: --patient-column",
        ]
        for name in list_possible_patient_columns(data.columns, data.roles.unused):
            lines.append(f"    If each patient has one number in it: --patient-column {quote(name)}")
        if groups := guess_patients_by_filename(data.checked.files.names.tolist()):
            lines += [
                f'    The names of the pictures have {groups[0]} parts such as "{groups[1]}". If each is a patient,',
                '    make a column of them: docs/recipes.md, "Patients in the names of pictures".',
            ]
        return lines
    source, count = data.patient_source_and_count
    whose = "no patient" if has_known_patients(data.checked.patients) else "none of these"
    lines = [f"patients: {source}, {count} of them; {whose} is split over two parts."]
    patient = data.roles.patient
    others = list_possible_patient_columns(data.columns, [name for name in (patient, *data.roles.unused) if name])
    if patient in others and len(others) > 1:
        lines.append(f"    Left out, though it may name patients too: {', '.join(set(others) - {patient})}.")
    if data.roles.patient is not None and not may_be_identifiers(data.columns, data.roles.patient):
        lines.append("    They look like dates, ages or counts. If they are no patients, the split is wrong.")
    return lines


def _describe_split(data: InspectedDataset) -> list[str]:
    """Return lines for the user on a column of training and test, which is used or may be one."""
    if data.roles.split:
        counts = (f"{part} {int((data.checked.parts == part).sum())}" for part in PARTS)
        return [f"split: column {data.roles.split}, {', '.join(counts)}."]
    return [
        line
        for name in data.roles.possible_splits
        for line in (
            f"split: is it {name} ({quote_names(data.columns.get_column(name).cells, 3)})? It is NOT USED: its images",
            "    are dealt over training, validation and test. If it is one, write train, val or test in its cells",
            "    and remove the # before split_column; else remove that line.",
        )
    ]


def _describe_data(data: InspectedDataset) -> list[str]:
    """Return lines for the user on patients, hospitals and classes, with the limits of the data."""
    roles, labels = data.roles, data.checked.labels
    lines = _describe_patients(data) + _describe_split(data)
    counts = dict(zip(data.checked.class_names, (labels == 1).sum(axis=0).tolist(), strict=True))
    lines.append("classes: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    looks = np.ones_like(labels, dtype=np.bool_)  # (images, classes), whether the image's hospital looks for the class
    if data.hospitals is not None:
        looks = data.hospitals.annotated[np.searchsorted(data.hospitals.names, data.checked.sources)]
    blank = dict(zip(counts, (np.isnan(labels) & looks).sum(axis=0).tolist(), strict=True))
    if unlabelled := [f"{name} {count}" for name, count in blank.items() if count]:
        lines.append(f"    without a label (blank or -1), of {len(labels)}: {', '.join(unlabelled)}.")
    if rare := [name for name, count in counts.items() if count < FEWEST_POSITIVES]:
        few = ", ".join(rare)
        lines.append(f"    fewer than {FEWEST_POSITIVES} images show {few}: no score of these means anything.")
    if roles.label_columns:
        lines.append(
            "    These are columns of 0 and 1. Remove from label_columns what is no finding (smoker, contrast agent)."
        )
    elif (labels == 1).sum(axis=1).max(initial=0) <= 1:
        lines.append(f"    These are the words of column {roles.finding}. Words for yes and no are no findings.")
    for group in group_by_reader(roles.label_columns):
        lines += [
            f"    one finding of several readers? {', '.join(group)}. Each is a class of its own. To use one,",
            f"    name it and the other findings: {format_findings_options([group[-1]])}",
        ]
    lines += _describe_names(data) + _describe_unused(data)
    if roles.exclusive:
        lines.append("    Each image shows exactly one of them; each is asked by itself, yes or no.")
    if data.hospitals is None:
        return [
            *lines,
            "hospitals: no column names them; patients are dealt over invented sites. Name it: --source-column",
            *(
                f"    Is it {name} ({quote_names(map(shorten, data.columns.get_column(name).cells), 3)})? "
                f"--source-column {quote(name)}"
                for name in list_possible_hospital_columns(data.columns, roles.unused)[:MOST_SITES]
            ),
        ]
    return [*lines, *data.hospitals.describe_hospitals()]


def _describe_names(data: InspectedDataset) -> list[str]:
    """Return lines for the user on ambiguous class names and on blank cells."""
    roles, lines = data.roles, []
    if roles.no_finding:
        names = quote_names(roles.no_finding)
        lines.append(f"    no finding: {names}. Such an image shows no class. If that is wrong, edit no_finding.")
    if roles.not_assessed:
        names = ", ".join(f"{name} {count}" for name, count in roles.not_assessed.items())
        lines += [
            f"    not assessed, by the word or the code: {names}. A run refuses these until you decide:",
            "    remove the # before not_assessed, and the labels of such an image are unknown. If it is a finding or",
            "    a grade, move it to classes.",
        ]
    lines += _describe_doubtful(roles) if roles.doubtful else []
    for name, count in roles.alone.items():
        key, write = "label_columns.", ""
        if roles.finding is not None:
            key, write = (
                "classes,",
                f" and write: no_finding = {format_as_json_text([*NO_FINDING, *roles.no_finding, name])}",
            )
        lines += [
            f"    {name} ({count}) never stands beside another finding. If it says that nothing was found, take it",
            f"    out of {key}{write}",
        ]
    if never := data.classes_without_negatives if roles.label_columns else []:
        lines += [
            f"    only 1 and blank, no 0: {', '.join(never)}. A class that is never absent has no score.",
            '    If a blank cell means that it is absent, remove the # before blank = "negative". If it means that',
            "    nobody looked, write 0 where somebody looked and found nothing.",
        ]
    if data.shows_always_something:
        lines += [
            "    EVERY IMAGE THAT COUNTS SHOWS A FINDING. The others "
            f"({data.blank_findings} of {len(data.checked.labels)}) have a blank cell, which says that",
            '    nobody looked. If it says that nothing was found, remove the # before blank = "negative".',
        ]
    return lines


def _describe_doubtful(roles: ColumnRoles) -> list[str]:
    """Return lines for the user on names that deny or doubt a finding, or name nothing, with the ways to decide."""
    names = ", ".join(f"{name} {count}" for name, count in roles.doubtful.items())
    lines = [f"    denied, doubted, past or nothing: {names}. A run refuses these until you decide:"]
    if any(code and code[1] for code in map(split_diagnosis_code, roles.doubtful)):
        lines.append("    (behind a code of ICD-10-GM, A means excluded, V suspected, Z status after, and G confirmed)")
    lines += [
        "    remove the # before other_findings, and such an image counts as one without the class;",
        "    or leave the cell blank in the table, where nobody looked.",
    ]
    for name in roles.doubtful:
        label = next((label for label in roles.classes if label.casefold() in name.casefold()), None)
        if label and finding_certainty(name) != "denied":
            lines += [
                f"    Or join it, such as synonyms.{format_as_json_text(name)} = {format_as_json_text(label)} in "
                "[data],",
                "    and it counts as one that shows the class.",
            ]
            break
    return lines


def _describe_unused(data: InspectedDataset) -> list[str]:
    """Return lines for the user on unused columns, especially those that may hold findings."""
    unused, lines = data.roles.unused, []
    labels = [name for name, of in unused.items() if of.kind == "labels"]
    unlikely = list(filter(is_metadata_column_name, labels))
    if unlikely:
        lines.append(
            f"    0 and 1, but no findings by their names: {', '.join(unlikely)}. To use them: --findings, each class."
        )
    if others := [name for name in labels if name not in unlikely]:
        lines.append(f"    0 and 1, and not named with --findings: {', '.join(others)}.")
    if plain := [name for name, of in unused.items() if not of.may_be_labels and name not in labels]:
        lines.append(f"    not used: {', '.join(plain)}.")
    if suspicious := {name: of for name, of in unused.items() if of.may_be_labels and not names_id(name)}:
        lines += [
            f"    NOT USED, for cells that are no label: {describe_foreign_cells(data.columns, suspicious)}.",
            "    If these are findings, write 1 (shows it), 0 (does not), -1 (doubtful) or nothing, and try again.",
        ]
    return lines + ([f"    {describe_unnamed_columns(data.columns)}"] if data.columns.unnamed else [])


def _describe_synonyms(data: InspectedDataset, out: Path) -> list[str]:
    if not data.synonyms:
        return []
    pairs = ", ".join(f'"{own}" = "{name}"' for own, name in data.synonyms.items())
    apart = "each is learned from its own column alone"
    if data.roles.finding is not None:
        apart = "at a hospital that uses both, an image with the one name counts as an image without the other"
    lines = [
        f"one class or two? {pairs}",
        f"    Two, until you remove the # before them in {out}, lines synonyms.: {apart}.",
    ]
    if has_undecided_synonyms(data.synonyms):
        pairs_of_names = data.synonyms.items()
        spelling = next(
            name for name, usual in pairs_of_names if make_class_spelling_key(name) == make_class_spelling_key(usual)
        )
        lines += [
            "    A run refuses two names that differ in nothing but spelling. To keep both, give one a name of its own",
            f"    there, such as synonyms.{format_as_json_text(spelling)} = "
            f"{format_as_json_text(f'{spelling} of one hospital')}.",
        ]
    return lines


def _format_experiment_file(data: InspectedDataset, out: Path, *, confirmed: bool = False) -> str:
    """Return the text of the experiment file.

    Args:
        confirmed: True to fill in all decisions that a person has to make, so that the file can be checked: synonyms
            are accepted, and doubtful names are listed in ``other_findings``.
    """
    roles, folder, columns = data.roles, out.parent, _column_lines(data, confirmed=confirmed)
    pixels = "sizes of their own"
    if data.sizes:
        low, high = (f"{height} x {width}" for height, width in (min(data.sizes), max(data.sizes)))
        pixels = low if low == high else f"{low} to {high}"
    count, hospitals = len(roles.classes) - len(data.synonyms), data.hospitals
    sites = min(MOST_SITES, count)
    if hospitals is None:
        partition = _SIMULATED.format(sites=sites, shared=int(count > sites))
    else:
        evidence = "those of which not all of its cells are blank"
        evidence = evidence if hospitals.by_label else "those that its findings name; all where they name none"
        partition = _HOSPITALS.format(
            source=format_as_json_text(roles.source), evidence=evidence, lists=hospitals.format_partition_lists()
        )
    return TEMPLATE.format(
        table=data.table.name,
        name=format_as_json_text(out.stem),
        image_size=data.image_size,
        pixels=pixels,
        channels=3 if data.color else 1,
        images=format_as_json_text(_make_relative_path(data.images, folder)),
        labels=format_as_json_text(_make_relative_path(data.table, folder)),
        image_column=format_as_json_text(roles.image),
        columns="\n".join(columns),
        color=str(data.color).lower(),
        synonyms=_format_synonym_lines(
            data.synonyms, "" if confirmed and has_undecided_synonyms(data.synonyms) else "# "
        ),
        partition=partition,
    )


def _column_lines(data: InspectedDataset, *, confirmed: bool) -> list[str]:
    """Return the lines of ``[data]`` that name columns and say how their cells are read."""
    roles = data.roles
    if roles.patient:
        columns = [f"patient_column = {format_as_json_text(roles.patient)}"]
    elif data.patient_source_and_count:
        columns = ["# patient_column = ...          # left out: PatientID of the DICOM files is taken"]
    else:
        columns = ["# patient_column = ...          # UNKNOWN: without it one patient may stand in training and test"]
    columns += _label_lines(data, confirmed=confirmed)
    if data.spec.similar_patients == "join":
        columns.append('similar_patients = "join"       # patients whose names are alike count as one')
    if roles.source:
        columns.append(f"source_column = {format_as_json_text(roles.source)}")
    if roles.split:
        columns.append(f"split_column = {format_as_json_text(roles.split)}")
    for name in () if roles.split else roles.possible_splits:
        columns.append(f"# split_column = {format_as_json_text(name)}   # once its cells are train, val or test")
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
    return columns


def _label_lines(data: InspectedDataset, *, confirmed: bool) -> list[str]:
    """Return the lines of ``[data]`` on the label columns, or on the column of findings and the names in it."""
    roles, columns = data.roles, list[str]()
    if roles.label_columns:
        columns.append(f"label_columns = {format_as_json_text(list(roles.label_columns))}")
        columns.append('uncertain = "unknown"           # what -1 means')
        columns.append('# blank = "negative"            # a blank cell means: absent; without this line: nobody looked')
    else:
        columns.append(f"finding_column = {format_as_json_text(roles.finding)}")
        columns.append(f"separator = {format_as_json_text(roles.separator)}")
        columns.append(
            f"classes = {format_as_json_text(list(roles.classes))}   # move what is no finding to the next lines"
        )
        mark = "" if roles.no_finding else "# "
        names = format_as_json_text([*NO_FINDING, *roles.no_finding])
        columns.append(f"{mark}no_finding = {names}   # such an image shows no class")
        mark = "" if roles.doubtful and confirmed else "# "
        columns.append(f"{mark}other_findings = {format_as_json_text(list(roles.doubtful))}   # count as no class")
        if roles.not_assessed:
            names = format_as_json_text(list(roles.not_assessed))
            columns.append(
                f"{'' if confirmed else '# '}not_assessed = {names}   # the labels of such an image are unknown"
            )
        if data.blank_findings:
            columns.append(
                '# blank = "negative"            # a blank cell means: no finding; without this line: unknown'
            )
    return columns


def _format_synonym_lines(synonyms: Mapping[str, str], mark: str) -> str:
    if not synonyms:
        return ""
    lines = [
        f"{mark}synonyms.{format_as_json_text(own)} = {format_as_json_text(name)}" for own, name in synonyms.items()
    ]
    return "\n".join(
        (
            "# Names that may mean one class. Remove the # of a line to make them one: left name = right name.",
            *lines,
            "",
        )
    )


def _make_relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to ``folder`` if it lies below the folder, else an absolute path."""
    absolute = path.resolve()
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else absolute.as_posix()
