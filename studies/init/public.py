"""For ``flwr-sim init``: experiments for the label tables that a ``kind`` of ``[data]`` reads as they are shipped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import find_existing_output_faults, is_file, write_atomically
from polyclinic.common.system.plain_text import format_as_json_text, format_count_with_noun
from polyclinic.data.base.image_set import PARTS
from polyclinic.data.base.spec import ChexpertDatasetSpec, MimicDatasetSpec, NihDatasetSpec
from polyclinic.data.load import open_label_table
from polyclinic.data.tables.class_names import CHEXPERT_CLASSES, MIMIC_CLASSES
from polyclinic.data.tables.csv import read_first_rows
from polyclinic.data.tables.labels import LabelTable
from polyclinic.studies.init.experiment import (
    check_experiment_text,
    describe_method,
    format_experiment_text,
    format_simulated_partition,
    make_relative_path,
)
from polyclinic.studies.init.hospitals import choose_simulated_hospitals, describe_simulated_hospitals
from polyclinic.studies.init.questions import ColumnHints, Question, describe_head
from polyclinic.studies.init.report import count_identical_pictures
from polyclinic.studies.init.table import HEAD_ROWS, USUAL_SIZE

PublicSpec = NihDatasetSpec | ChexpertDatasetSpec | MimicDatasetSpec
_NIH_LISTS = ("train_val_list", "test_list")


@dataclass(frozen=True)
class PublicKind:
    """A public data set that a kind of ``[data]`` reads.

    Attributes:
        name: Name of the data set.
        spec: The settings of this kind.
        headings: The headings by which its table is recognised.
        settings: Keys of ``[data]`` beside the paths, written out so that the user sees them.
        rules: What the kind takes for each role.
    """

    name: str
    spec: type[PublicSpec]
    headings: frozenset[str]
    settings: Mapping[str, str]
    rules: Mapping[str, str] = field(default_factory=dict)


_UNCERTAIN = {"uncertain": "negative", "blank": "negative"}
_KINDS = (
    PublicKind(
        name="NIH ChestX-ray14",
        spec=NihDatasetSpec,
        headings=frozenset(("Image Index", "Finding Labels", "Follow-up #", "Patient ID", "View Position")),
        settings={},
        rules={
            "images": "Image Index: in the folder or any below it",
            "patients": "Patient ID",
            "findings": "Finding Labels: the 14 findings of the data set; No Finding shows none",
        },
    ),
    PublicKind(
        name="CheXpert",
        spec=ChexpertDatasetSpec,
        headings=frozenset(("Path", "Frontal/Lateral", "AP/PA", *CHEXPERT_CLASSES)),
        settings=_UNCERTAIN,
        rules={
            "images": "Path: frontal images only",
            "patients": "the folder patient00042 in Path",
            "findings": "the 13 columns of findings; -1 and blank count as absent, as in the papers",
        },
    ),
    PublicKind(
        name="MIMIC-CXR with the labels of CXR-LT",
        spec=MimicDatasetSpec,
        headings=frozenset(("dicom_id", "subject_id", "study_id", "ViewPosition", *MIMIC_CLASSES)),
        settings={**_UNCERTAIN, "split": "patients"},
        rules={
            "images": "subject_id, study_id and dicom_id, as files/p10/p10000032/s50414267/NAME.jpg; AP and PA only",
            "patients": "subject_id",
            "findings": "the columns of NIH's and CheXpert's findings; -1 and blank count as absent",
        },
    ),
)


@dataclass(frozen=True)
class PublicDataset:
    """A public data set on this disk.

    Attributes:
        table: Its label table.
        kind: Which data set it is.
        head: The first rows of the table.
        spec: The data settings of the experiment.
        checked: The rows whose picture exists.
        questions: What the user must say before an experiment can be written.
    """

    table: Path
    kind: PublicKind
    head: Sequence[Sequence[str]]
    spec: PublicSpec
    checked: LabelTable
    questions: tuple[Question, ...]

    def describe_rules(self, width: int) -> list[str]:
        """Return lines for the user: the head of the table, and what was taken for which role by which rule."""
        lines = [f"{self.table.name}, the first lines:", *describe_head(self.head, width)]
        lines.append(f"The headings are those of {self.kind.name}, which [data] reads as it is.")
        lines += [f"{role + ':':<11}{rule}" for role, rule in self.kind.rules.items()]
        lines.append("hospitals: no column: patients are divided over simulated hospitals")
        return lines


def recognise_public_dataset(table: Path, hints: ColumnHints) -> PublicDataset | None:
    """Return the public data set whose exact headings a table has; None for any other table.

    It is None, too, if the user names columns: then the table is read by the rules for all tables.

    Raises:
        BadInput: If the table or the folder cannot be read, or no picture exists.
    """
    head = read_first_rows(table, HEAD_ROWS) if is_file(table) else []
    headings = set(head[0]) if head else set()
    kind = next((kind for kind in _KINDS if kind.headings <= headings), None)
    names_columns = any(value is not None for value in (hints.image, hints.patient, hints.source, hints.reader))
    if kind is None or names_columns or hints.findings or hints.separator or hints.no_finding:
        return None
    folder = hints.images or table.parent
    settings: dict[str, object] = {"images": str(folder.resolve()), "labels": str(table.resolve())}
    settings |= {"kind": kind.spec.model_fields["kind"].annotation.__args__[0], "missing_files": "ignore"}  # type: ignore[union-attr]
    settings |= kind.settings
    lists = {key: table.parent / f"{key}.txt" for key in _NIH_LISTS}
    if kind.spec is NihDatasetSpec and all(map(is_file, lists.values())):
        settings |= {key: str(path.resolve()) for key, path in lists.items()}
    spec = kind.spec.model_validate(settings)
    try:
        checked = open_label_table(spec, Path())
    except BadInput as bad:
        raise BadInput([_name_option(fault) for fault in bad.faults]) from None
    questions = []
    if checked.missing and not hints.ignore_missing:
        count = format_count_with_noun(checked.missing, "line names", "lines name")
        total = checked.missing + len(checked.files)
        text = f"Of {total:,} lines, {count} a picture that is not in {folder} or below. Leave these lines out?"
        questions.append(Question("--ignore-missing-files", text, is_yes_or_no=True))
    return PublicDataset(table, kind, head, spec, checked, tuple(questions))


def _name_option(fault: Fault) -> Fault:
    """Return a fault of the folder in terms of the command's option."""
    if fault.where != "data.images":
        return fault
    return Fault("--images", fault.problem, "Name the folder of the pictures.")


def write_public_experiment(
    data: PublicDataset, out: Path, hints: ColumnHints, tell: Callable[[str], object] = lambda line: None
) -> list[str]:
    """Check the experiment of a public data set as a run does, write its file, and return lines on its contents.

    Raises:
        BadInput: If the file exists already, or a run would refuse the experiment.
    """
    raise_faults(find_existing_output_faults(out))
    text = _format_text(data, out.resolve(), ignore_missing=hints.ignore_missing)
    splits, hosts = check_experiment_text(text, out, tell)
    write_atomically(out, text.encode())
    skipped = sum(len(part.skipped) for part in splits.parts)
    checked = data.checked
    lines = [f"{out}: an experiment on {format_count_with_noun(len(checked.files) - skipped, 'image')}."]
    lines.append(f"images: {data.spec.images}")
    if checked.missing:
        lines.append(f"    {format_count_with_noun(checked.missing, 'line')} without a picture, left out.")
    if skipped:
        lines.append(f"    {format_count_with_noun(skipped, 'picture')} that cannot be read, left out.")
    if copies := count_identical_pictures(splits):
        lines.append(f"    {format_count_with_noun(copies, 'image has', 'images have')} the very bytes of another one.")
    omissions = [sentence for sentence in splits.train.omissions if sentence != checked.missing_sentence]
    lines += [f"    {sentence}" for sentence in (*splits.train.notes, *omissions)]
    lines.append(f"patients: {len(np.unique(checked.patients))} of them; no patient is split over two parts.")
    parts = (f"{part} {int((checked.parts == part).sum())}" for part in PARTS)
    lines.append(f"split: {', '.join(parts)}.")
    counts = zip(checked.class_names, (checked.labels == 1).sum(axis=0).tolist(), strict=True)
    lines.append("classes: " + ", ".join(f"{name} {count}" for name, count in counts))
    unlabelled = int(np.isnan(checked.labels).all(axis=1).sum())
    if unlabelled:
        lines.append(f"    {format_count_with_noun(unlabelled, 'image')} without any label.")
    class_count = len(data.checked.class_names)
    lines += describe_simulated_hospitals(class_count)
    lines += describe_method(has_shared_class=choose_simulated_hospitals(class_count)[1] > 0)
    return [*lines, *hosts]


def _format_text(data: PublicDataset, out: Path, *, ignore_missing: bool) -> str:
    spec = data.spec
    settings = dict(data.kind.settings)
    if isinstance(spec, NihDatasetSpec) and spec.train_val_list and spec.test_list:
        settings["train_val_list"] = make_relative_path(Path(spec.train_val_list), out.parent)
        settings["test_list"] = make_relative_path(Path(spec.test_list), out.parent)
    lines = [
        f"kind = {format_as_json_text(spec.kind)}",
        f"images = {format_as_json_text(make_relative_path(Path(spec.images), out.parent))}",
        f"labels = {format_as_json_text(make_relative_path(Path(spec.labels), out.parent))}",
        *(f"{key} = {format_as_json_text(value)}" for key, value in settings.items()),
        f'missing_files = "{"ignore" if ignore_missing else "fault"}"',
    ]
    return format_experiment_text(
        table=data.table,
        out=out,
        data="\n".join(lines),
        partition=format_simulated_partition(len(data.checked.class_names)),
        image_size=USUAL_SIZE,
        color=False,
        sizes=(),
        has_shared_class=choose_simulated_hospitals(len(data.checked.class_names))[1] > 0,
    )
