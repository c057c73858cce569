"""The part of the check about the hospital's data: files, pictures, labels, patients and the split."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.check.findings import CheckArea, ClassImageCounts
from polyclinic.client.check.pictures import (
    MIN_DECIDED_PICTURES,
    InvertedPictureCounts,
    PictureFacts,
    describe_pictures,
    read_picture_facts,
)
from polyclinic.client.check.source import SiteImageSource, choose_evenly_spaced_rows, open_site_image_source
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.budget import describe_ledger
from polyclinic.client.site.class_columns import make_label_declaration
from polyclinic.client.site.patient_ledger import PatientLedger, open_site_ledger
from polyclinic.client.site.policy import LEVEL_SENTENCES, SitePolicy
from polyclinic.client.site.settings import find_hospital_data_faults
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.class_columns import list_annotated_columns
from polyclinic.common.errors import BadInput, raise_faults
from polyclinic.common.patients.opt_out import (
    SITE_FILE,
    UNMATCHED_REMEDY,
    OptOutSource,
    find_left_out_patients,
)
from polyclinic.common.system.plain_text import (
    format_count_with_noun,
    join_as_english_list,
    list_first_and_count_rest,
)
from polyclinic.data.base.dark_pictures import describe_dark_pictures
from polyclinic.data.base.image_set import PARTS, describe_blank_pictures, find_placeholder_patients
from polyclinic.data.base.shared_pictures import DROP_COPIES_SETTING
from polyclinic.data.base.spec import ChexpertDatasetSpec, DataSpec, LabelColumnsSpec, MimicDatasetSpec
from polyclinic.data.images.headers import (
    DicomHeader,
    describe_incomparable_dicom_greys,
    describe_mirrored_dicom_slices,
)
from polyclinic.data.images.pixel_cache import hash_image_file
from polyclinic.data.images.reading import is_grey_picture
from polyclinic.data.images.syntaxes import get_transfer_syntax_name, is_transfer_syntax_readable
from polyclinic.data.images.volume_header import VolumeHeader
from polyclinic.data.images.volume_notes import describe_decoded_volumes, list_volume_notes
from polyclinic.data.tables.cells import NO_LABEL_WORDS, count_uncertain_blank_cells
from polyclinic.data.tables.copies import describe_contradicting_copies, group_rows_with_equal_contents

MIN_PRINTED_PATIENTS = 10
"""The check prints no count of fewer patients than this, or than the policy's threshold if that is larger."""
MAX_COMPARED_BYTES = 4 * 2**30
"""Maximum number of bytes that are read to find duplicates; further files are not compared."""
_MISSING_PART_EFFECTS = {
    "validation": "this hospital has no say in which round's model is best",
    "test": "no figure of this hospital's will be told",
}


@dataclass(frozen=True)
class DataCheckResults:
    """The findings of the data check, and the images that the check of training then uses.

    Attributes:
        source: The site's images; None if the data cannot be opened.
        pictures: The pictures that were decoded.
        classes: Numbers of images of each class, for the printed table.
    """

    area: CheckArea
    source: SiteImageSource | None = None
    pictures: tuple[PictureFacts, ...] = ()
    classes: tuple[ClassImageCounts, ...] = ()


def check_site_data(settings: SiteSettings, images: int | None) -> DataCheckResults:
    """Check a site's files, labels and patients, and decode ``images`` of its images (None for all)."""
    area = CheckArea("data")
    try:
        raise_faults(find_hospital_data_faults(settings))
        source = _leave_out_opted_out_images(area, open_site_image_source(settings), settings)
        make_label_declaration(settings, source.class_names)
    except BadInput as bad:
        area.add_input_faults(bad)
        area.add_note("the images were not looked at.", "Fix this first, then run the check again.")
        return DataCheckResults(area)

    empty = [row for row, file in enumerate(source.files) if not file.stat().st_size]
    filled = np.setdiff1d(np.arange(len(source)), empty)
    pictures = read_picture_facts(source, filled[choose_evenly_spaced_rows(len(filled), images)])
    if faults := source.reader_faults():
        area.passed.append(source.archive)
        area.add_input_faults(BadInput(faults))
        return DataCheckResults(area)

    decoded = [facts for facts in pictures if not facts.reason]
    # Not every image of an archive is fetched to find duplicates.
    compared = [facts.row for facts in decoded] if source.archive else filled.tolist()
    duplicates = find_duplicate_images(source, compared)
    heads = [head for head in source.heads or (facts.head for facts in pictures) if head.syntax]
    syntaxes = Counter(head.syntax for head in heads)
    classes = count_images_by_class(source, settings)

    if not (source.parts == "train").any():
        area.add_fault(
            ClientExitCode.BAD_INPUT, f"{SITE_FILE}: data: there is no training image.", "Put some into that part."
        )
    for part in PARTS[1:]:
        if not (source.parts == part).any():
            area.add_note(f"there is no {part} image: {_MISSING_PART_EFFECTS[part]}.")

    _check_unreadable_files(area, source, syntaxes, empty, pictures)
    _check_picture_appearance(area, source, settings.file.data, heads, decoded)
    _check_duplicate_images(area, source, duplicates)
    _note_policy_and_label_effects(area, source, classes, settings.file.policy)
    if settings.file.policy.epsilon is not None:
        _note_privacy_ledger(area, open_site_ledger(settings))
    _add_passed_checks(area, source, decoded, syntaxes)
    if duplicates.compared == len(filled) and not duplicates.groups:
        area.passed.append("no image is there twice")

    area.facts = {
        "images": len(source),
        "parts": dict(Counter(source.parts.tolist())),
        "decoded": len(decoded),
        "looked_at": len(pictures),
        "modes": dict(Counter(f"{facts.kind} {facts.mode}" for facts in decoded)),
        "empty": len(empty),
        "transfer_syntaxes": dict(syntaxes),
        "classes": {row.name: row.as_json() for row in classes},
    }
    return DataCheckResults(area, source, tuple(decoded), tuple(classes))


def _leave_out_opted_out_images(area: CheckArea, source: SiteImageSource, settings: SiteSettings) -> SiteImageSource:
    """Leave out the images of patients who opted out, and return the rest.

    Report the number of images left out, and opt-out identifiers that fit no patient.

    Raises:
        BadInput: If the list of patients who opted out cannot be read.
    """
    opted_out = OptOutSource(settings.folder).require_identifiers()
    if not opted_out:
        return source
    opted_out_patients, left_out = find_left_out_patients(source.patients.tolist(), opted_out)
    remaining = np.flatnonzero(~np.isin(source.patients, sorted(opted_out_patients)))
    images = format_count_with_noun(len(source) - len(remaining), "image")
    area.passed.append(f"{left_out.describe()}, with {images}; the numbers here are without them")
    if warning := left_out.warn_about_unmatched():
        area.add_warning(ClientExitCode.OPT_OUT, warning, UNMATCHED_REMEDY)
    return source.select_rows(remaining)


def _add_passed_checks(
    area: CheckArea, source: SiteImageSource, decoded: Sequence[PictureFacts], syntaxes: Counter[str]
) -> None:
    counts = Counter(source.parts.tolist())
    by_part = ", ".join(f"{counts[part]:,} {part}" for part in PARTS)
    patients = f"of {len(np.unique(source.patients)):,} patients" if source.patients_known else "of unknown patients"
    if source.archive:
        area.passed.append(source.archive)
        area.passed.append(f"sent to it: {'; '.join(source.sent)}")
    area.passed.append(f"{len(source):,} images {patients}: {by_part}")
    if source.patients_from:
        area.passed.append(f"PATIENTS: the table has no patient_column; the split is by {source.patients_from}")
    if syntaxes:
        names = ", ".join(f"{count:,} {get_transfer_syntax_name(syntax)}" for syntax, count in syntaxes.most_common())
        which = f"the {syntaxes.total():,} images looked at" if source.archive else "the DICOM files"
        area.passed.append(f"transfer syntaxes of {which}: {names}")
    if decoded:
        area.passed.append(f"{len(decoded):,} of them decoded: {describe_pictures(decoded)}")


def _check_unreadable_files(
    area: CheckArea,
    source: SiteImageSource,
    syntaxes: Counter[str],
    empty: Sequence[int],
    pictures: Sequence[PictureFacts],
) -> None:
    """Report DICOM transfer syntaxes (compressions) without a decoder, empty files, and images that cannot be read.

    Args:
        syntaxes: UID of a transfer syntax -> number of files.
        empty: Row numbers of the empty files.
        pictures: All pictures that the check tried to decode.
    """
    budget = source.skip_budget
    total = len(source)
    looked_at = len(pictures) if source.archive else total
    for syntax, count in syntaxes.items():
        if not is_transfer_syntax_readable(syntax):
            files = format_count_with_noun(count, "DICOM file")
            problem = f"{files} packed as {get_transfer_syntax_name(syntax)} ({syntax}), which cannot be read."
            remedy = (
                "Export them as Explicit VR Little Endian, or in another transfer syntax that docs/recipes.md lists."
            )
            area.add_warning(ClientExitCode.UNREADABLE, problem, remedy, fatal=count > budget * looked_at)
    rules = f"Up to {budget:.0%} of the images may be unreadable (skip_budget in {SITE_FILE}): "
    if empty:
        problem = f"{len(empty):,} of {total:,} image files are empty ({len(empty) / total:.1%})."
        fatal = len(empty) > budget * total
        remedy = rules + ("flwr-client start will end." if fatal else "they are left out, the rest is used.")
        remedy += " Export them again: an interrupted copy leaves empty files."
        area.add_warning(ClientExitCode.EMPTY_FILES, problem, remedy, (source.names[row] for row in empty), fatal=fatal)
    lost = [f"{source.names[facts.row]}: {facts.reason}" for facts in pictures if facts.reason]
    lost += [f"{skip.name}: {skip.reason}" for skip in source.skipped]
    if lost:
        tried_count = len(pictures) + len(source.skipped)
        problem = (
            f"{len(lost):,} of {tried_count:,} images that were tried cannot be read ({len(lost) / tried_count:.1%})."
        )
        fatal = len(lost) > budget * tried_count
        remedy = rules + ("with so many flwr-client start will end." if fatal else "they are left out.")
        area.add_warning(ClientExitCode.UNREADABLE, problem, f"{remedy} Repair or remove them.", lost, fatal=fatal)


def _check_picture_appearance(
    area: CheckArea,
    source: SiteImageSource,
    spec: DataSpec,
    heads: Sequence[DicomHeader],
    decoded: Sequence[PictureFacts],
) -> None:
    """Report suspicious pictures: uniform, too dark, grey in a data set of colour images, inverted, or incomparable.

    DICOM pictures are incomparable if modalities are mixed, or if the files name no display window.

    Args:
        spec: The settings of the site's data.
        heads: DICOM headers of the pictures.
        decoded: The pictures that could be decoded.
    """
    form = source.form
    if volumes := [facts.volume for facts in decoded if facts.volume is not None]:
        _note_volumes(area, source, volumes)
        heads = ()  # what follows is about single slices

    if source.outside:
        area.add_note(source.outside, "If they are not meant, correct the table, or move the pictures into the folder.")
    for problem in describe_incomparable_dicom_greys(heads if form is None or form.rendering.window is None else []):
        area.add_note(problem, "Look at the images with flwr-client preview-data.")
    if mirrored := describe_mirrored_dicom_slices(heads):
        area.add_note(
            mirrored,
            "Some are mirror images of others, as of a patient who lies the other way round. Is that intended?",
        )
    if blank := describe_blank_pictures([source.names[facts.row] for facts in decoded if facts.blank]):
        area.add_note(blank, "Look at them with flwr-client preview-data.")
    if unequal := sum(facts.unequal_density for facts in decoded):
        files = format_count_with_noun(unequal, "PNG or JPEG file states", "PNG or JPEG files state")
        problem = f"{files} pixels that are not square; they are shown as square, as web browsers do."
        area.add_note(problem, "Look with flwr-client preview-data; if the body is squeezed, resample the files.")

    examined = [float(facts.pixels.max()) for facts in decoded if facts.pixels is not None]
    if examined and (dark := describe_dark_pictures(examined, spec)):
        remedy = f"Look with flwr-client preview-data; the settings are in {SITE_FILE}. "
        remedy += "If other hospitals' files have another range, the coordinator writes "
        area.add_note(dark, f'{remedy}own = ["value_range"] under [pixels].')
    colors = [facts.pixels for facts in decoded if facts.pixels is not None and facts.pixels.ndim == 3]
    if form is not None and colors and all(map(is_grey_picture, colors)):
        problem = f"color = true, and {format_count_with_noun(len(colors), 'image')} that were looked at are all grey."
        area.add_note(
            problem, "With color = false they take a third of the memory, if the run's model has one channel."
        )

    counts = InvertedPictureCounts.from_pictures(decoded)
    modes = ", ".join(counts.modes)
    if counts.is_majority_of_pictures_inverted:
        share = f"{counts.inverted:,} of the {counts.decided:,} images that tell"
        problem = f"black and white look exchanged ({counts.inversion_confidence_in_words}): "
        problem += f"in {share} the border is white, the middle darker."
        if set(counts.modes) & {"MONOCHROME1", "MONOCHROME2"}:
            remedy = "In a radiograph air is black. Look with flwr-client preview-data; if so, export them again"
            remedy += f" with the right PhotometricInterpretation (now {modes}; MONOCHROME1 is turned)."
            area.add_warning(ClientExitCode.INVERTED, problem, remedy)
        else:
            # No header says what the files show: a light background is right in microscopy.
            remedy = "Right for a light background, as in microscopy. In a radiograph air is black: look with "
            remedy += "flwr-client preview-data, and export again; a DICOM viewer's export often forgets to turn "
            area.add_note(problem, f"{remedy}MONOCHROME1.")
    elif modes and counts.inverted >= MIN_DECIDED_PICTURES:
        problem = f"{counts.inverted:,} of {counts.decided:,} images look inverted, most of those of mode {modes}."
        area.add_warning(ClientExitCode.INVERTED, problem, "Look at them with flwr-client preview-data.")


def _note_volumes(area: CheckArea, source: SiteImageSource, volumes: Sequence[VolumeHeader]) -> None:
    """Report how the settings change volumes of these grids: memory, cropped voxels, and grey values."""
    form = source.form
    size = source.volume_size
    assert form is not None, "volumes are files"
    assert size is not None
    area.passed.append(describe_decoded_volumes(len(source), size))
    for problem, remedy in list_volume_notes(volumes, size, form.rendering):
        area.add_note(problem, remedy)


def _note_policy_and_label_effects(
    area: CheckArea, source: SiteImageSource, classes: Sequence[ClassImageCounts], policy: SitePolicy
) -> None:
    """Add notes on effects of the policy and the labels on a run, for instance on classes that the policy hides."""
    if not source.patients_known:
        problem = "no column says whose images they are: one patient's may stand on two sides of a split."
        if source.patients_from:
            nameless = int(find_placeholder_patients(source.patients).sum())
            problem = f"{format_count_with_noun(nameless, 'image')} without a PatientID: each study of these counts as "
            problem += "a patient of its own, and may be of one who stands on the other side of the split."
        area.add_note(problem, f"Name patient_column (of an npz file patient_key) in {SITE_FILE}, if there is one.")

    validation = len(np.unique(source.patients[source.parts == "validation"]))
    if 0 < validation < policy.smallest_count:
        problem = (
            f"validation images are of {validation} patients, fewer than policy.smallest_count = "
            f"{policy.smallest_count}: no validation figure leaves, and a run can choose no best round by them."
        )
        area.add_note(problem)

    area.add_note(f'level = "{policy.level}" in [policy]: {LEVEL_SENTENCES[policy.level]}')
    if overridden := [f"{key} = {json.dumps(value)}" for key, value in policy.keys_changed_from_level.items()]:
        problem = f"[policy] overrides that level: {join_as_english_list(overridden)}."
        area.add_note(problem, "Leave these keys out, unless you mean them: the sentence above holds without them.")
    trains = policy.train_hidden_classes or policy.epsilon is not None
    if (hidden := [row.name for row in classes if any(row.few)]) and not trains:
        problem = (
            f"{', '.join(hidden)}: fewer patients than policy.smallest_count show it, or are without it. No label of "
            "it is trained on, also where masks cover the update: the model learns none from here."
        )
        remedy = "epsilon, or train_hidden_classes = true, in [policy] trains on them; more patients are better."
        area.add_note(problem, remedy)

    if source.missing:
        area.add_note(f"{format_count_with_noun(source.missing, 'line')} of the table without an image: left out.")
    if source.repeated:
        area.add_note(
            f"{format_count_with_noun(source.repeated, 'line')} of the table said the same as an earlier one: each "
            "counts once."
        )
    if source.other_findings:
        others = [f"{name} {count:,}" for name, count in source.other_findings.items()]
        area.add_note(
            f"findings that are no class here, with the lines of each: {list_first_and_count_rest(others, 20)}."
        )

    # An organ that every image shows is learned all the same, from its pixels.
    sides = (("shows", "present"),) if source.has_masks else (("shows", "present"), ("is without", "absent"))
    for verb, count in sides:
        if names := [row.name for row in classes if not getattr(row, count)]:
            remedy = f"If this hospital does not annotate it, leave it out of data.annotates in {SITE_FILE}."
            area.add_note(f"no image {verb} {', '.join(names)}.", remedy)


def _note_privacy_ledger(area: CheckArea, ledger: PatientLedger) -> None:
    """Report the place of the privacy ledger, and its limits; the check does not open the ledger."""
    if not ledger.is_writable:
        problem = f"{SITE_FILE}: policy.ledger: this account cannot write to {ledger.folder}."
        area.add_fault(ClientExitCode.BAD_INPUT, problem, "Make the folder, or give this account the right to write.")
        return
    ledger_text = describe_ledger(str(ledger.path), shared=ledger.shared)
    area.add_note(
        f"policy.epsilon is {ledger_text}", "What is spent and left: the log of flwr-client start, and status."
    )


def count_images_by_class(source: SiteImageSource, settings: SiteSettings) -> list[ClassImageCounts]:
    """Count the present, absent and unknown images of each class that the site annotates."""
    smallest = max(MIN_PRINTED_PATIENTS, settings.file.policy.smallest_count)
    spec = settings.file.data
    cells: dict[str, tuple[int, int]] = {}
    if isinstance(spec, LabelColumnsSpec | ChexpertDatasetSpec | MimicDatasetSpec):  # tables with one column a class
        words = spec.label_words if isinstance(spec, LabelColumnsSpec) else NO_LABEL_WORDS
        cells = count_uncertain_blank_cells(settings.folder / spec.labels, source.class_names, words, spec.largest_mb)
    rows = []
    for name in list_annotated_columns(source.class_names, settings.labels, settings.synonyms):
        column = source.labels[:, source.class_names.index(name)]
        with_class, without = (0 < len(np.unique(source.patients[column == kind])) < smallest for kind in (1, 0))
        counts = int((column == 1).sum()), int((column == 0).sum()), int(np.isnan(column).sum())
        rows.append(ClassImageCounts(name, *counts, (with_class, without), smallest, *cells.get(name, (None, None))))
    return rows


# ---------------------------------------------------------------------- duplicates


@dataclass(frozen=True)
class DuplicateImages:
    """Groups of row numbers of equal images, and the number of images that were compared, which may not be all."""

    groups: Sequence[Sequence[int]]
    compared: int


def find_duplicate_images(source: SiteImageSource, rows: Sequence[int]) -> DuplicateImages:
    """Find equal images by hashes of their files or, without files, of their content.

    A file is read only if another has the same size. At most :data:`MAX_COMPARED_BYTES` are read; further files are not
    compared.

    Args:
        rows: Row numbers of the images to compare.
    """
    if not source.files:
        with source.opened():
            groups = group_rows_with_equal_contents((row, _hash_image_content(source.read(row))) for row in rows)
        return DuplicateImages(groups, len(rows))
    by_size = defaultdict[int, list[int]](list)
    for row in rows:
        by_size[source.files[row].stat().st_size].append(row)
    bytes_left = MAX_COMPARED_BYTES
    to_read = list[int]()
    compared = 0
    for size, same_size in by_size.items():
        if len(same_size) == 1:
            compared += 1
        elif size * len(same_size) <= bytes_left:
            bytes_left -= size * len(same_size)
            compared += len(same_size)
            to_read += same_size
    return DuplicateImages(
        group_rows_with_equal_contents((row, _hash_image_content(source.read(row))) for row in to_read), compared
    )


def _hash_image_content(content: bytes | Path | NDArray[np.uint8]) -> bytes:
    return hash_image_file(content.tobytes() if isinstance(content, np.ndarray) else content)


def _check_duplicate_images(area: CheckArea, source: SiteImageSource, duplicates: DuplicateImages) -> None:
    across = [group for group in duplicates.groups if len(set(source.parts[list(group)])) > 1]
    within = [group for group in duplicates.groups if group not in across]

    def format_duplicate_groups(groups: Sequence[Sequence[int]]) -> list[str]:
        part = {row: f" ({source.parts[row]})" if source.files else "" for group in groups for row in group}
        return [" = ".join(f"{source.names[row]}{part[row]}" for row in group) for group in groups]

    if copies := describe_contradicting_copies(duplicates.groups, source.names, source.labels, source.patients):
        area.add_note(copies, "Correct the table, or remove the copies.")
    if across:
        images = "1 image stands" if len(across) == 1 else f"{len(across):,} images stand"
        problem = f"{images} in two parts of the split under different names."
        remedy = "A model is tested on what it was trained on: remove one of each, or give both the same patient. "
        remedy += f"{DROP_COPIES_SETTING} in [data] leaves them out of the earlier part."
        area.add_warning(ClientExitCode.DUPLICATES, problem, remedy, format_duplicate_groups(across))
    if within:
        copies = format_count_with_noun(sum(len(group) - 1 for group in within), "exact copy", "exact copies")
        area.add_warning(
            ClientExitCode.DUPLICATES,
            f"{copies} of other images.",
            "Remove the copies; they count twice.",
            format_duplicate_groups(within),
        )
