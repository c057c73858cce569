"""For ``flwr-sim init``: lines for the user on what a label table holds, what is not used, and what to decide."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from shlex import quote

import numpy as np

from polyclinic.common.errors import quote_names
from polyclinic.common.system.plain_text import format_as_json_text, format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import PARTS, SkippedImage, are_all_patients_known
from polyclinic.data.base.names import make_class_spelling_key
from polyclinic.data.base.spec import NO_FINDING
from polyclinic.data.images.reading import describe_png_conversion
from polyclinic.data.tables.csv import is_utf_8_table
from polyclinic.data.tables.judgement import (
    contains_id_word,
    get_finding_certainty,
    is_metadata_column_name,
    split_diagnosis_code,
)
from polyclinic.data.tables.patient_columns import (
    compute_mean_images_per_value,
    guess_patients_by_filename,
    list_possible_patient_columns,
    may_be_identifier_column,
)
from polyclinic.data.tables.roles import (
    ColumnRoles,
    describe_non_label_cells,
    describe_unnamed_columns,
    find_label_columns_of_other_images,
    format_findings_options,
    group_label_columns_by_reader,
    list_possible_finding_columns,
    list_possible_hospital_columns,
    shorten_report_text,
)
from polyclinic.studies.init.hospitals import has_spelling_variants
from polyclinic.studies.init.table import LOOKED_AT, InspectedDataset

MOST_OFFERED, FEWEST_POSITIVES = 3, 10
MOST_NAMED = 10
"""Number of unreadable pictures that are named."""


def describe_pictures(data: InspectedDataset, skipped: Sequence[SkippedImage]) -> list[str]:
    lines = [f"images: column {data.roles.image}, in {data.images}"]
    if not is_utf_8_table(data.table):
        cells = chain(data.columns, *(data.columns.get_column(name).cells for name in data.columns))
        texts = quote_names([shorten_report_text(cell) for cell in cells if not cell.isascii()], 3)
        lines.append(f"    {data.table.name} is not UTF-8, and read as Windows-1252: {texts}. If letters are wrong,")
        lines.append("    save it as CSV UTF-8.")
    if max(map(max, data.sizes), default=0) > data.image_size:
        lines.append(
            f"    larger than {data.image_size} pixels: reduced to image_size, which stands twice in the file."
        )
    if data.present < data.rows:
        nouns = "row names a picture that is", "rows name pictures that are"
        lost = format_count_with_noun(data.rows - data.present, *nouns)
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
            f"    {format_count_with_noun(data.checked.repeated, 'row')} said the same as an earlier one; "
            "each counts once."
        )
    for skip in skipped[:MOST_NAMED]:
        lines.append(f"    {skip.name} cannot be read, and is left out: {skip.reason}.")
    if len(skipped) > MOST_NAMED:
        lines.append(f"    and {len(skipped) - MOST_NAMED} more.")
    if remedy := describe_png_conversion(skip.reason for skip in skipped):
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
    if foreign := find_label_columns_of_other_images(data.roles.image, names, labels, data.images.name):
        lines.append(f"    WRONG PICTURE, by their names: {', '.join(foreign)} say what {', '.join(names)} shows.")
        if right := [name for name in labels if name not in foreign]:
            options = f"--image-column {quote(data.roles.image)} {format_findings_options(right)}"
            lines.append(f"    To leave them out, begin again with: {options}")
    return lines


def _describe_patients(data: InspectedDataset) -> list[str]:
    if data.patient_source_and_count is None:
        lines = [
            "patients: UNKNOWN. Each image counts as a patient of its own: the same patient may stand in training",
            "    and test, scores come out too high, and intervals too narrow. Name the column: --patient-column",
        ]
        for name in list_possible_patient_columns(data.columns, data.roles.unused):
            is_single = compute_mean_images_per_value(data.columns, name, data.roles.image) == 1
            lines += [f"    {name} has another value for each image, as an examination has."] if is_single else []
            lines.append(f"    If each patient has one number in it: --patient-column {quote(name)}")
        if groups := guess_patients_by_filename(data.checked.files.names.tolist()):
            lines += [
                f'    The names of the pictures have {groups[0]} parts such as "{groups[1]}". If each is a patient,',
                '    make a column of them: docs/recipes.md, "Patients in the names of pictures".',
            ]
        return lines
    source, count = data.patient_source_and_count
    whose = "no patient" if are_all_patients_known(data.checked.patients) else "none of these"
    lines = [f"patients: {source}, {count} of them; {whose} is split over two parts."]
    patient = data.roles.patient
    others = list_possible_patient_columns(data.columns, [name for name in (patient, *data.roles.unused) if name])
    if patient in others and len(others) > 1:
        lines.append(f"    Left out, though it may name patients too: {', '.join(set(others) - {patient})}.")
    if data.roles.patient is not None and not may_be_identifier_column(data.columns, data.roles.patient):
        lines.append("    They look like dates, ages or counts. If they are no patients, the split is wrong.")
    return lines


def describe_label_data(data: InspectedDataset) -> list[str]:
    """Return lines for the user on patients, hospitals and classes, with the limits of the data."""
    roles, labels = data.roles, data.checked.labels
    lines = _describe_patients(data)
    if roles.split:
        parts = (f"{part} {int((data.checked.parts == part).sum())}" for part in PARTS)
        lines.append(f"split: column {roles.split}, {', '.join(parts)}.")
    for name in () if roles.split else roles.possible_splits:
        lines += [
            f"split: is it {name} ({quote_names(data.columns.get_column(name).cells, 3)})? It is NOT USED: its images",
            "    are dealt over training, validation and test. If it is one, write train, val or test in its cells",
            "    and remove the # before split_column; else remove that line.",
        ]
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
    for group in group_label_columns_by_reader(roles.label_columns):
        lines += [
            f"    one finding of several readers? {', '.join(group)}. Each is a class of its own. To use one,",
            f"    name it and the other findings: {format_findings_options([group[-1]])}",
        ]
    lines += _describe_ambiguous_names(data) + _describe_unused_columns(data)
    if roles.exclusive:
        lines.append("    Each image shows exactly one of them; each is asked by itself, yes or no.")
    if data.hospitals is None:
        return [
            *lines,
            "hospitals: no column names them; patients are dealt over invented sites. Name it: --source-column",
            *(
                f"    Is it {name} ({quote_names(map(shorten_report_text, data.columns.get_column(name).cells), 3)})? "
                f"--source-column {quote(name)}"
                for name in list_possible_hospital_columns(data.columns, roles.unused)[:MOST_OFFERED]
            ),
        ]
    return [*lines, *data.hospitals.describe_hospitals()]


def _describe_ambiguous_names(data: InspectedDataset) -> list[str]:
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
    lines += _describe_doubtful_names(roles) if roles.doubtful else []
    for name, count in roles.alone.items():
        key, write = "label_columns.", ""
        if roles.finding is not None:
            names = format_as_json_text([*NO_FINDING, *roles.no_finding, name])
            key, write = "classes,", f" and write: no_finding = {names}"
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
    if roles.finding is not None:
        cells = data.columns.get_column(roles.finding).cells
        if none := [cell for cell in cells if cell.casefold() == "none"]:  # of Python, or a person's "no finding"
            meaning = "If it says that nothing was found, add it to no_finding."
            lines.append(f"    {quote_names(none)} counts as a blank cell. {meaning}")
    if data.has_only_findings_or_blanks:
        lines += [
            "    EVERY IMAGE THAT COUNTS SHOWS A FINDING. The others "
            f"({data.blank_finding_count} of {len(data.checked.labels)}) have a blank cell, which says that",
            '    nobody looked. If it says that nothing was found, remove the # before blank = "negative".',
        ]
    return lines


def _describe_doubtful_names(roles: ColumnRoles) -> list[str]:
    """Return report lines that list the doubtful names in the finding column, and the user's options for them.

    Doubtful are names that deny or doubt a finding, mean a past one, or name none.
    """
    names = ", ".join(f"{name} {count}" for name, count in roles.doubtful.items())
    lines = [f"    denied, doubted, past or nothing: {names}. A run refuses these until you decide:"]
    if any(code and code[1] for code in map(split_diagnosis_code, roles.doubtful)):
        lines.append("    (behind a code of ICD-10-GM, A means excluded, V suspected, Z status after, and G confirmed)")
    lines += [
        "    remove the # before other_findings, and such an image counts as one without the class;",
        "    or leave the cell blank in the table, where nobody looked; or move to classes what is a finding.",
    ]
    for name in roles.doubtful:
        label = next((label for label in roles.classes if label.casefold() in name.casefold()), None)
        if label and get_finding_certainty(name) != "denied":
            lines += [
                f"    Or join it, such as synonyms.{format_as_json_text(name)} = "
                f"{format_as_json_text(label)} in [data],",
                "    and it counts as one that shows the class.",
            ]
            break
    return lines


def _describe_unused_columns(data: InspectedDataset) -> list[str]:
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
    if word_columns := list_possible_finding_columns(data.columns, data.roles):
        lines.append(
            f"    If the findings are the words of {', '.join(word_columns)}, name the column: "
            f"{format_findings_options(word_columns[:1])}"
        )
    if suspicious := {name: of for name, of in unused.items() if of.may_be_labels and not contains_id_word(name)}:
        lines += [
            f"    NOT USED, for cells that are no label: {describe_non_label_cells(data.columns, suspicious)}.",
            "    If these are findings, write 1 (shows it), 0 (does not), -1 (doubtful) or nothing, and try again.",
        ]
    return lines + ([f"    {describe_unnamed_columns(data.columns)}"] if data.columns.unnamed else [])


def describe_class_synonyms(data: InspectedDataset, out: Path) -> list[str]:
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
    if has_spelling_variants(data.synonyms):
        keys = {name: tuple(map(make_class_spelling_key, (name, usual))) for name, usual in data.synonyms.items()}
        spelling = next(name for name, (key, usual_key) in keys.items() if key == usual_key)
        lines += [
            "    A run refuses two names that differ in nothing but spelling. To keep both, give one a name of its own",
            f"    there, such as synonyms.{format_as_json_text(spelling)} = "
            f"{format_as_json_text(f'{spelling} of one hospital')}.",
        ]
    return lines
