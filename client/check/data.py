"""The hospital's data, as far as a machine can judge it: files, pictures, labels, patients."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from client.check.duplicates import Duplicates, duplicates
from client.check.findings import AreaFindings, Finding, fault, note, of_input, warning
from client.check.labels import ClassCounts, class_counts
from client.check.pictures import FEWEST, PictureFacts, in_words, inverted_by_mode, look_at
from client.check.source import PARTS, Source, chosen_rows, open_source
from client.connection.exit_codes import ExitCode
from client.site.policy import TRUST, Policy
from client.site.settings import data_faults_of, declaration_of
from client.site.site_file import FILE, Settings
from common.data.images.syntaxes import is_readable, syntax_name
from common.errors import BadInput
from common.system.plain_text import counted, listed


@dataclass(frozen=True)
class Data:
    """What the other areas need of it.

    Attributes:
        source, looks: None and nothing where the data cannot be opened.
        classes: Counts for the table.
    """

    checked: AreaFindings
    source: Source | None = None
    looks: tuple[PictureFacts, ...] = ()
    classes: tuple[ClassCounts, ...] = ()


def check_data(settings: Settings, images: int | None) -> Data:
    """Look at a site's data.

    Args:
        images: How many to decode; None for all.
    """
    try:
        if faults := data_faults_of(settings):
            raise BadInput(faults)
        source = open_source(settings)
        declaration_of(settings, source.class_names)
    except BadInput as bad:
        unseen = note("the images were not looked at.", "Fix this first, then run the check again.")
        return Data(AreaFindings("data", (), (*of_input(bad), unseen)))
    empty = [row for row, file in enumerate(source.files) if not file.stat().st_size]
    filled = np.setdiff1d(np.arange(len(source)), empty)
    looks = look_at(source, filled[chosen_rows(len(filled), images)])
    if faults := source.failed():
        return Data(AreaFindings("data", (source.archive,), tuple(of_input(BadInput(faults)))))
    good, classes = [look for look in looks if not look.reason], class_counts(source, settings)
    # An archive is not asked for all that it has to answer a question that only all images answer.
    same = duplicates(source, (look.row for look in good) if source.archive else (int(row) for row in filled))
    packed = source.packed or Counter(filter(None, (look.syntax for look in looks)))
    found = (*_parts(source), *_packed(source, packed, looks), *_lost(source, empty, looks), *_inverted(good))
    findings = (*found, *_twice(source, same), *_notes(source, classes, settings.file.policy))
    passed = _passed(source, good, packed, all_differ=same.compared == len(filled) and not same.groups)
    facts = _facts(source, looks) | {
        "empty": len(empty),
        "transfer_syntaxes": dict(packed),
        "classes": {one.name: one.as_json() for one in classes},
    }
    return Data(AreaFindings("data", tuple(passed), findings, facts), source, tuple(good), tuple(classes))


def _facts(source: Source, looks: Sequence[PictureFacts]) -> dict[str, Any]:
    good = [look for look in looks if not look.reason]
    return {
        "images": len(source),
        "parts": dict(Counter(str(part) for part in source.parts)),
        "decoded": len(good),
        "looked_at": len(looks),
        "modes": dict(Counter(f"{look.kind} {look.mode}" for look in good)),
    }


def _passed(source: Source, good: Sequence[PictureFacts], packed: Counter[str], *, all_differ: bool) -> list[str]:
    """What was found to be in order.

    Args:
        good: The images that were decoded.
        packed: How many DICOM files have which transfer syntax.
        all_differ: Whether all were compared, and no two are the same.
    """
    counts = Counter(str(part) for part in source.parts)
    by_part = ", ".join(f"{counts[part]:,} {part}" for part in PARTS)
    patients = f"of {len(np.unique(source.patients)):,} patients" if source.patients_known else "of unknown patients"
    passed = [f"{len(source):,} images {patients}: {by_part}"]
    if source.patients_from:
        passed.append(f"PATIENTS: the table has no patient_column; the split is by {source.patients_from}")
    if source.archive:
        passed.insert(0, source.archive)
    if packed:
        listed = (f"{count:,} {syntax_name(syntax)}" for syntax, count in packed.most_common())
        which = f"the {packed.total():,} images looked at" if source.archive else "the DICOM files"
        passed.append(f"transfer syntaxes of {which}: {', '.join(listed)}")
    if good:
        passed.append(f"{len(good):,} of them decoded: {in_words(good)}")
    return [*passed, "no image is there twice"] if all_differ else passed


def _parts(source: Source) -> Iterator[Finding]:
    if not (source.parts == "train").any():
        yield fault(ExitCode.BAD_INPUT, f"{FILE}: data: there is no training image.", "Put some into that part.")
    for part in PARTS[1:]:
        if not (source.parts == part).any():
            yield note(f"there is no {part} image: {_WITHOUT[part]}.")


_WITHOUT = {
    "validation": "this hospital has no say in which round's model is best",
    "test": "no figure of this hospital's will be told",
}


def _lost(source: Source, empty: Sequence[int], looks: Sequence[PictureFacts]) -> Iterator[Finding]:
    """Empty files, counted over all; unreadable ones, among those that were looked at."""
    budget, total = source.skip_budget, len(source)
    rules = f"Up to {budget:.0%} of the images may be unreadable (skip_budget in {FILE}): "
    if empty:
        problem = f"{len(empty):,} of {total:,} image files are empty ({len(empty) / total:.1%})."
        over = len(empty) > budget * total
        remedy = rules + ("flwr-client start will end." if over else "they are left out, the rest is used.")
        remedy += " Export them again: an interrupted copy leaves empty files."
        names = (source.names[row] for row in empty)
        yield (fault if over else warning)(ExitCode.EMPTY_FILES, problem, remedy, names)
    broken = [look for look in looks if look.reason]
    lost = [f"{source.names[look.row]}: {look.reason}" for look in broken]
    lost += [f"{skip.name}: {skip.reason}" for skip in source.skipped]
    if lost:
        seen = len(looks) + len(source.skipped)
        problem = f"{len(lost):,} of {seen:,} images that were tried cannot be read ({len(lost) / seen:.1%})."
        over = len(lost) > budget * seen
        remedy = rules + ("with so many flwr-client start will end." if over else "they are left out.")
        yield (fault if over else warning)(ExitCode.UNREADABLE, problem, f"{remedy} Repair or remove them.", lost)


def _packed(source: Source, packed: Counter[str], looks: Sequence[PictureFacts]) -> Iterator[Finding]:
    """Transfer syntaxes that nothing here decodes."""
    seen = len(looks) if source.archive else len(source)
    for syntax, count in packed.items():
        if not is_readable(syntax):
            problem = (
                f"{counted(count, 'DICOM file')} packed as {syntax_name(syntax)} ({syntax}), which cannot be read."
            )
            over = count > source.skip_budget * seen
            remedy = (
                "Export them as Explicit VR Little Endian, or in another transfer syntax that docs/recipes.md lists."
            )
            yield (fault if over else warning)(ExitCode.UNREADABLE, problem, remedy)


def _inverted(looks: Sequence[PictureFacts]) -> Iterator[Finding]:
    found = inverted_by_mode(looks)
    if found.majority:
        counted = f"{found.inverted:,} of the {found.telling:,} images that tell"
        problem = f"black and white look exchanged ({found.sure}): in {counted} the border is white, the middle darker."
        remedy = "In a radiograph air is black. Look with flwr-client preview-data; if so, export them again"
        if set(found.modes) & {"MONOCHROME1", "MONOCHROME2"}:
            remedy += (
                f" with the right PhotometricInterpretation (now {', '.join(found.modes)}; MONOCHROME1 is turned)."
            )
        else:
            remedy += "; a DICOM viewer's export often forgets to turn MONOCHROME1."
        yield warning(ExitCode.INVERTED, problem, remedy)
    elif len(found.modes) and found.inverted >= FEWEST:
        part = f"those of mode {', '.join(found.modes)}"
        problem = f"{found.inverted:,} of {found.telling:,} images look inverted, most of {part}."
        yield warning(ExitCode.INVERTED, problem, "Look at them with flwr-client preview-data.")


def _twice(source: Source, same: Duplicates) -> Iterator[Finding]:
    across = same.across([str(part) for part in source.parts])
    within = [group for group in same.groups if group not in across]

    def named(groups: Sequence[Sequence[int]]) -> list[str]:
        part = {row: f" ({source.parts[row]})" if source.files else "" for group in groups for row in group}
        return [" = ".join(f"{source.names[row]}{part[row]}" for row in group) for group in groups]

    if across:
        problem = f"{_images(len(across))} in two parts of the split under different names."
        remedy = "A model is tested on what it was trained on: remove one of each, or give both the same patient."
        yield warning(ExitCode.DUPLICATES, problem, remedy, named(across))
    if within:
        copies = sum(len(group) - 1 for group in within)
        problem = f"{copies:,} exact {'copy' if copies == 1 else 'copies'} of other images."
        yield warning(ExitCode.DUPLICATES, problem, "Remove the copies; they count twice.", named(within))


def _images(count: int) -> str:
    return "1 image stands" if count == 1 else f"{count:,} images stand"


def _notes(source: Source, classes: Sequence[ClassCounts], policy: Policy) -> Iterator[Finding]:
    if not source.patients_known:
        problem = "no column says whose images they are: one patient's may stand on two sides of a split."
        yield note(problem, f"Name patient_column (of an npz file patient_key) in {FILE}, if there is one.")
    validation = len(np.unique(source.patients[source.parts == "validation"]))
    if 0 < validation < (fewest := policy.smallest_count):
        problem = f"validation images are of {validation} patients, fewer than policy.smallest_count = {fewest}:"
        yield note(f"{problem} no validation figure leaves, and a run can choose no best round by them.")
    yield note(f'level = "{policy.level}" in [policy]: {TRUST[policy.level]}')
    if overridden := [f"{key} = {json.dumps(value)}" for key, value in policy.beside_its_level.items()]:
        problem = f"[policy] overrides that level: {listed(overridden)}."
        yield note(problem, "Leave these keys out, unless you mean them: the sentence above holds without them.")
    trains = policy.train_hidden_classes or policy.epsilon is not None
    if (hidden := [one.name for one in classes if any(one.small)]) and not trains:
        problem = f"{', '.join(hidden)}: fewer patients than policy.smallest_count show it, or are without it. No label"
        lost = "of it is trained on, also where masks cover the update: the model learns none from here."
        remedy = "epsilon, or train_hidden_classes = true, in [policy] trains on them; more patients are better."
        yield note(f"{problem} {lost}", remedy)
    if source.missing:
        yield note(f"{counted(source.missing, 'row')} of the table without an image: left out.")
    for what, names in (
        ("shows", [one.name for one in classes if not one.present]),
        ("is without", [one.name for one in classes if not one.absent]),
    ):
        if names:
            remedy = f"If this hospital does not annotate it, leave it out of data.annotates in {FILE}."
            yield note(f"no image {what} {', '.join(names)}.", remedy)
