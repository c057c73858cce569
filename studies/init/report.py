"""For ``flwr-sim init``: lines for the user on what a label table holds, what is left out, and what to decide."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from polyclinic.common.errors import quote_names
from polyclinic.common.system.plain_text import (
    format_as_json_text,
    format_count_with_noun,
    list_first_and_count_rest,
)
from polyclinic.data.base.image_set import (
    PARTS,
    DatasetSplits,
    SkippedImage,
    are_all_patients_known,
    concatenate_image_sets,
)
from polyclinic.data.images.file_kinds import describe_png_conversion
from polyclinic.data.images.volume_notes import (
    describe_decoded_volumes,
    describe_grids,
    find_median_spacing,
    list_volume_notes,
)
from polyclinic.data.tables.columns import describe_some_cells, shorten_cell
from polyclinic.data.tables.csv import is_utf_8_table
from polyclinic.studies.init.hospitals import describe_simulated_hospitals, detect_hospitals_in_table
from polyclinic.studies.init.pictures import LOOKED_AT
from polyclinic.studies.init.roles import is_exclusive, list_columns_of_zeros, list_possible_hospital_columns
from polyclinic.studies.init.table import InspectedDataset

FEWEST_POSITIVES = 10
MOST_NAMED = 10
"""Number of unreadable pictures that are named."""


def describe_pictures(data: InspectedDataset, splits: DatasetSplits) -> list[str]:
    """Return lines for the user on the pictures, and on all that is left out, with counts."""
    skipped = [skip for part in splits.parts for skip in part.skipped]
    lines = [f"images: column {data.roles.image}, in {data.images}"]
    if data.table != data.own_table:
        lines.append(
            f"    {data.table} is a new table, made from {data.own_table.name}. It has one line for each picture."
        )
    if data.folders:
        folders = list_first_and_count_rest(data.folders, 3)
        lines.append(f"    They lie in {format_count_with_noun(len(data.folders), 'folder')}: {folders}.")
    if data.joining_rule:
        lines.append(f"    Several lines of one picture became one: {data.joining_rule}.")
    if not is_utf_8_table(data.own_table):
        columns = data.own_columns
        cells = chain(columns, *(columns.get_column(name).cells for name in columns))
        texts = quote_names([shorten_cell(cell) for cell in cells if not cell.isascii()], 3)
        lines.append(
            f"    {data.own_table.name} is not UTF-8, and read as Windows-1252: {texts}. If letters are wrong, "
            "save it as CSV UTF-8."
        )
    if data.volumes:
        lines += _describe_volumes(data, splits)
    elif isinstance(data.image_size, int) and max(map(max, data.sizes), default=0) > data.image_size:
        lines.append(
            f"    larger than {data.image_size} pixels: reduced to image_size, which stands twice in the file."
        )
    lines += _describe_what_is_left_out(data, skipped)
    if copies := count_identical_pictures(splits):
        lines.append(f"    {format_count_with_noun(copies, 'image has', 'images have')} the very bytes of another one.")
    if remedy := describe_png_conversion(skip.reason for skip in skipped):
        lines.append(f"    {remedy}")
    if data.depth is not None:
        lines.append(
            f"    PNG files of 16 bits a sample: bit_depth = {data.depth} is a guess by the brightest of those "
            "that were looked at. Ask who exported them: a wrong one makes pictures dark, or unreadable."
        )
    lines += [f"    {problem}" for problem in data.display_problems]
    if data.display_problems and (count := len(data.checked.files)) > LOOKED_AT:
        lines.append(
            f"    That is of {LOOKED_AT} of the {count} images, spread over the table; no others were looked at."
        )
    return lines


def _describe_volumes(data: InspectedDataset, splits: DatasetSplits) -> list[str]:
    """Return lines on the grids of volumes, the memory that they take, and what the settings make of them."""
    assert isinstance(data.image_size, tuple)
    count = sum(map(len, splits.parts))
    notes = list_volume_notes(data.volumes, data.image_size, data.spec.rendering_options)
    resampled = list[str]()
    if data.spec.spacing is not None:
        steps, median = (
            ", ".join(f"{step:g}" for step in spacing)
            for spacing in (data.spec.spacing, find_median_spacing(data.volumes))
        )
        resampled.append(
            f"    voxels of the files are unlike in size: spacing = [{steps}] resamples all. Their median is "
            f"[{median}] mm; finer voxels take a larger image_size."
        )
    return [
        f"    {describe_grids(data.volumes)}",
        *resampled,
        f"    {describe_decoded_volumes(count, data.image_size)}; image_size stands twice in the file.",
        *(f"    {problem} {remedy}" for problem, remedy in notes),
    ]


def count_identical_pictures(splits: DatasetSplits) -> int:
    """Return how many images have the file of another one, under another name or copied."""
    places = [part.places for part in splits.parts if part.places is not None]
    every = np.concatenate(places) if places else np.zeros(0)
    return len(every) - len(np.unique(every))


def _describe_what_is_left_out(data: InspectedDataset, skipped: Sequence[SkippedImage]) -> list[str]:
    """Return lines for the user on rows without a picture, pictures without a row, and pictures that cannot be read."""
    lines = list[str]()
    if data.left_out:
        nouns = "line names a picture that is not there; it is", "lines name pictures that are not there; they are"
        lost = format_count_with_noun(data.left_out, *nouns)
        lines.append(f"    of {data.rows} lines, {lost} left out: {data.absent}.")
    if data.unnamed:
        lines.append(
            f"    {format_count_with_noun(len(data.unnamed), 'picture')} of the folder that no line names: "
            f"{list_first_and_count_rest(data.unnamed, 3)}."
        )
    if data.checked.repeated:
        lines.append(
            f"    {format_count_with_noun(data.checked.repeated, 'line')} said the same as an earlier one; "
            "each counts once."
        )
    for skip in skipped[:MOST_NAMED]:
        lines.append(f"    {skip.name} cannot be read, and is left out: {skip.reason}.")
    if len(skipped) > MOST_NAMED:
        lines.append(f"    and {len(skipped) - MOST_NAMED} more.")
    return lines


def _describe_patients(data: InspectedDataset) -> list[str]:
    if data.patient_source_and_count is None:
        return [
            "patients: each image counts as a patient of its own, as you said. If one patient has several, scores come "
            "out too high, and intervals too narrow."
        ]
    source, count = data.patient_source_and_count
    whose = "no patient" if are_all_patients_known(data.checked.patients) else "none of these"
    return [f"patients: {source}, {count} of them; {whose} is split over two parts."]


def read_labels_of_masks(data: InspectedDataset, splits: DatasetSplits) -> InspectedDataset:
    """Return a table of masks with the labels that its masks give: whether each class has a pixel in each image."""
    if data.masks is None or data.checked.lines is None:
        return data
    images = concatenate_image_sets(splits.parts)
    assert images.lines is not None, "a table has lines"
    by_line = dict(zip(images.lines.tolist(), images.labels, strict=True))
    unread = np.full(len(data.checked.class_names), np.nan, np.float32)
    labels = np.stack([by_line.get(line, unread) for line in data.checked.lines.tolist()])
    checked = replace(data.checked, labels=labels)
    return replace(data, checked=checked, hospitals=detect_hospitals_in_table(data.roles, checked, data.masks))


def describe_label_data(data: InspectedDataset) -> list[str]:
    """Return lines for the user on patients, hospitals and classes, with the limits of the data."""
    roles, labels = data.roles, data.checked.labels
    lines = _describe_patients(data)
    if roles.split:
        parts = (f"{part} {int((data.checked.parts == part).sum())}" for part in PARTS)
        lines.append(f"split: column {roles.split}, {', '.join(parts)}.")
    for name in () if roles.split else roles.unread_splits:
        cells = describe_some_cells(data.own_columns.get_column(name))
        lines.append(
            f"split: {name} is NOT USED, because its cells ({cells}) are not train, val and test. Write these words in "
            "its cells and remove the # before split_column; else remove that line."
        )
    counts = dict(zip(data.checked.class_names, (labels == 1).sum(axis=0).tolist(), strict=True))
    lines.append("classes: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    looks = np.ones_like(labels, dtype=np.bool_)  # (images, classes), whether the image's hospital looks for the class
    if data.hospitals is not None:
        looks = data.hospitals.annotated[np.searchsorted(data.hospitals.names, data.checked.sources)]
    blank = dict(zip(counts, (np.isnan(labels) & looks).sum(axis=0).tolist(), strict=True))
    if unlabelled := [f"{name} {count}" for name, count in blank.items() if count]:
        lines.append(f"    without a label (blank or -1), of {len(labels)}: {', '.join(unlabelled)}.")
    if data.unlabelled_count:
        lines.append(f"    {format_count_with_noun(data.unlabelled_count, 'image')} without any label.")
    if rare := [name for name, count in counts.items() if count < FEWEST_POSITIVES]:
        few = ", ".join(rare)
        lines.append(f"    fewer than {FEWEST_POSITIVES} images show {few}: no score of these means anything.")
    lines += _describe_class_names(data) if data.masks is None else _describe_unused_columns(data)
    if is_exclusive(labels) and data.masks is None:
        lines.append("    Each image shows exactly one of them; each is asked by itself, yes or no.")
    if data.hospitals is None:
        return [
            *lines,
            *describe_simulated_hospitals(data.class_count),
            *_describe_possible_hospitals(data),
        ]
    return [*lines, *data.hospitals.describe_hospitals()]


def _describe_possible_hospitals(data: InspectedDataset) -> list[str]:
    possible = list_possible_hospital_columns(data.own_columns, data.roles.unused)
    if not possible:
        return []
    columns = list_first_and_count_rest(possible, 5)
    return [f"    If a column names them, delete the new file, and add --source-column. It may be: {columns}."]


def _describe_unused_columns(data: InspectedDataset) -> list[str]:
    return [f"    not used: {', '.join(data.roles.unused)}."] if data.roles.unused else []


def _describe_class_names(data: InspectedDataset) -> list[str]:
    """Return lines for the user on what the classes are, on blank cells, and on columns that are not used."""
    roles, lines = data.roles, list[str]()
    is_open = data.spec.blank == "unknown"
    if data.own_names is None:
        lines.append(
            "    These are columns of labels. Remove from label_columns what is no finding (smoker, contrast agent)."
        )
        if roles.words.present:
            lines.append(f"    words: {roles.words.describe()}")
    else:
        lines.append(f'    These are the words of column "{data.own_finding}".')
        if data.own_names.normal:
            words = ", ".join(f"{name} {count}" for name, count in data.own_names.normal.items())
            lines.append(f"    no finding: {words}. Such a line shows no class.")
        lines.append(f"    {_describe_options_for_names(data)}")
    if data.names_in_names:
        pairs = (f'"{longer}" contains "{shorter}"' for longer, shorter in data.names_in_names.items())
        lines.append(
            f"    names in names: {list_first_and_count_rest(list(pairs), 5)}. An image of the longer name counts as "
            "without the shorter. If that is wrong, say what the longer name is, as above."
        )
    if data.own_names is not None and data.own_names.not_assessed:
        words = ", ".join(f"{name} {count}" for name, count in data.own_names.not_assessed.items())
        lines.append(f"    not assessed: {words}. The labels of such an image are unknown.")
    never = data.classes_without_negatives if is_open and roles.label_columns else []
    if never:
        lines += [
            f"    No image is without it: {', '.join(never)}, whose labels are 1 or blank. A class that is never "
            "absent has no score.",
            '    If a blank cell means that it is absent, remove the # before blank = "negative". If it means that '
            "nobody looked, write 0 where somebody looked and found nothing.",
        ]
    if is_open and data.has_only_findings_or_blanks:
        lines += [
            "    EVERY IMAGE THAT COUNTS SHOWS A FINDING. The others have a cell that counts as blank, so their "
            f"labels are unknown: {data.describe_blank_findings()}.",
            '    If it says that nothing was found, remove the # before blank = "negative".',
        ]
    if zeros := list_columns_of_zeros(data.own_columns, roles):
        lines.append(f"    no image shows it: {', '.join(zeros)}; not used.")
    if unused := [name for name in roles.unused if name not in zeros]:
        lines.append(f"    not used: {', '.join(unused)}. To use one of these as labels: --findings, each class.")
    if data.own_columns.unnamed:
        count = format_count_with_noun(data.own_columns.unnamed, "column has", "columns have")
        lines.append(f"    {count} no name in the first line, and cannot be used.")
    return lines


def _describe_options_for_names(data: InspectedDataset) -> str:
    """Return how the user calls a word no class: in the file, or in a new call where the table is a new one."""
    if data.names is not None:
        text = (
            "Move a word that says that nothing was found from classes to no_finding, a doubtful one to not_assessed, "
        )
        return text + "and one that only excludes a finding to other_findings."
    text = "If a word is no class, delete the two new files, and call init again: --no-finding WORD for nothing found, "
    return text + "--not-assessed WORD for a doubtful one, --other-finding WORD for one that only excludes a finding."


def describe_spelling_synonyms(data: InspectedDataset, out: Path) -> list[str]:
    """Return lines for the user on class names that differ only in spelling."""
    if not data.synonyms:
        return []
    pairs = ", ".join(f'"{own}" = "{name}"' for own, name in data.synonyms.items())
    own = next(iter(data.synonyms))
    return [
        f"one class or two? {pairs}",
        f"    A run refuses names that differ only in spelling. Remove the # before synonyms. in {out}, and they are "
        "one. To keep both, give one a name of its own there, such as "
        f"synonyms.{format_as_json_text(own)} = {format_as_json_text(f'{own} of one hospital')}.",
    ]


def describe_drawn_parts(splits: DatasetSplits) -> list[str]:
    """Return lines on the parts that a run draws by patient: their sizes, and the classes that the test part lacks."""
    named = zip(PARTS, splits.parts, strict=True)
    lines = [f"parts: {', '.join(f'{name} {len(images):,}' for name, images in named)} images, drawn by patient."]
    tested = (splits.test.labels == 1).any(axis=0)
    untested = [name for name, is_tested in zip(splits.class_names, tested, strict=True) if not is_tested]
    if untested:
        lines.append(f"    No test image shows {quote_names(untested, 5)}: how good the model is there stays unknown.")
    return lines
