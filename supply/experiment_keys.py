"""The tables of keys in docs/experiments.md, made from the schemas of experiment files by ``make reference``."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import BaseModel

from polyclinic.common.config import (
    EvaluationSection,
    ParticipationSection,
    PlanningSection,
    PrivacySection,
    RunSection,
    SimulationSection,
    TrainingSection,
)
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.spec import (
    AugmentationSpec,
    ChexpertDatasetSpec,
    CollectionsDatasetSpec,
    CompositesDatasetSpec,
    DicomwebDatasetSpec,
    DigitsDatasetSpec,
    DrawnOrgansDatasetSpec,
    FolderDatasetSpec,
    LabelColumnsSpec,
    MimicDatasetSpec,
    MixtureDatasetSpec,
    NihDatasetSpec,
    NpzDatasetSpec,
    PhantomDatasetSpec,
    PictureTableSpec,
    PluginDatasetSpec,
)
from polyclinic.data.partition.spec import (
    BaseClassPartitionSpec,
    ClassListsPartitionSpec,
    ClassSubsetsPartitionSpec,
    DirichletPartitionSpec,
    LabelSkewPartitionSpec,
    MissingClassesPartitionSpec,
    PaperTablePartitionSpec,
    RandomOwnersPartitionSpec,
    TaskMixturePartitionSpec,
)
from polyclinic.data.tables import columns
from polyclinic.strategies.aggregation.robust import RobustMeanRule
from polyclinic.strategies.aggregation.server_optimizer import ServerOptimizer
from polyclinic.strategies.local.method_traits import Parameters
from polyclinic.strategies.registry import STRATEGIES
from polyclinic.studies.study_file import PaperTable, StudyFile, StudyQuickScale, StudyRowOrColumn
from supply.blocks import format_table
from supply.key_tables import KeyRow, describe_default, describe_summary, format_key_table, list_key_rows

_OPENING = re.compile(r"^The `\[method\]` table of `?\w+`?(?:\.|, which|;)")
"""The words with which a method's docstring begins."""
SECTIONS: Mapping[str, type[BaseModel]] = {
    "run": RunSection,
    "method": Parameters,
    "method.server_optimizer": ServerOptimizer,
    "method.mean": RobustMeanRule,
    "model": ModelSpec,
    "training": TrainingSection,
    "augmentation": AugmentationSpec,
    "evaluation": EvaluationSection,
    "participation": ParticipationSection,
    "privacy": PrivacySection,
    "planning": PlanningSection,
    "simulation": SimulationSection,
    "study": StudyFile,
    "study.quick": StudyQuickScale,
    "study.tables": PaperTable,
    "study.methods": StudyRowOrColumn,
}
"""Tables of configuration files whose keys are one class, by their names in the blocks of the page."""

DATA_KINDS: Mapping[str, type[BaseModel]] = {
    "npz": NpzDatasetSpec,
    "folder": FolderDatasetSpec,
    "dicomweb": DicomwebDatasetSpec,
    "nih": NihDatasetSpec,
    "chexpert": ChexpertDatasetSpec,
    "mimic": MimicDatasetSpec,
    "mixture": MixtureDatasetSpec,
    "collections": CollectionsDatasetSpec,
    "composites": CompositesDatasetSpec,
    "digits": DigitsDatasetSpec,
    "phantom": PhantomDatasetSpec,
    "organs": DrawnOrgansDatasetSpec,
    "plugin": PluginDatasetSpec,
}
PARTITION_KINDS: Mapping[str, type[BaseModel]] = {
    "class_subsets": ClassSubsetsPartitionSpec,
    "class_lists": ClassListsPartitionSpec,
    "class_table": PaperTablePartitionSpec,
    "random_owners": RandomOwnersPartitionSpec,
    "missing_classes": MissingClassesPartitionSpec,
    "label_skew": LabelSkewPartitionSpec,
    "dirichlet": DirichletPartitionSpec,
    "tasks": TaskMixturePartitionSpec,
}
HEADINGS: Mapping[str, frozenset[str]] = {
    "patients": columns.PATIENT_HEADINGS,
    "hospitals": columns.HOSPITAL_HEADINGS,
    "split": columns.SPLIT_HEADINGS,
    "one column of findings": columns.FINDING_HEADINGS,
    "readers": columns.READER_HEADINGS,
    "never a finding": columns.NO_FINDING_HEADINGS,
}
"""Headings that ``flwr-sim init`` knows, by the role of their columns."""


def list_blocks_of_keys() -> dict[str, str]:
    """Return block -> text of docs/experiments.md."""
    blocks = {f"keys of {name}": format_key_table(list_key_rows(model)) for name, model in SECTIONS.items()}
    blocks["keys of method"] = format_key_table(list(iterate_common_method_rows()))
    blocks["keys of methods"] = format_method_tables()
    blocks["keys of tables with pictures"] = format_key_table(list_key_rows(PictureTableSpec))
    blocks["keys of your own tables"] = format_key_table(list_own_rows(LabelColumnsSpec, PictureTableSpec))
    blocks["kinds of data"] = format_kinds(DATA_KINDS, (LabelColumnsSpec, PictureTableSpec))
    blocks["keys of partition"] = format_key_table(list_key_rows(BaseClassPartitionSpec))
    blocks["kinds of partition"] = format_kinds(PARTITION_KINDS, (BaseClassPartitionSpec,))
    blocks["headings of tables"] = format_headings()
    return blocks


# ---------------------------------------------------------------------- methods


def iterate_common_method_rows() -> Iterator[KeyRow]:
    """Yield the keys of ``[method]`` that many methods share, with the methods that have another default."""
    for row in list_key_rows(Parameters):
        others = dict[str, list[str]]()
        for name, method in STRATEGIES.items():
            default = describe_default(method.site_class.traits.parameters_class.model_fields[row.name])
            if default != row.default:
                others.setdefault(default, []).append(f"`{name}`")
        default = "; ".join((row.default, *(f"{value} for {', '.join(names)}" for value, names in others.items())))
        yield KeyRow(row.name, row.values, default, row.meaning)


def format_method_tables() -> str:
    """Return the keys of ``[method]`` that belong to single methods, in a table for each method."""
    parts, without = list[str](), list[str]()
    for name, method in STRATEGIES.items():
        table = method.site_class.traits.parameters_class
        rows = list_key_rows(table, skip=tuple(Parameters.model_fields))
        if not rows:
            without.append(f"`{name}`")
            continue
        by_rounds = {key: default.rule for key, default in table.round_defaults.items()}
        rows = [replace(row, default=by_rounds.get(row.name, row.default)) for row in rows]
        summary = _OPENING.sub("", describe_summary(table)).strip()
        parts += [f"**`{name}`**" + (f": {summary}" if summary else ""), format_key_table(rows)]
    return "\n\n".join((f"No keys of their own: {', '.join(without)}.", *parts))


# ---------------------------------------------------------------------- kinds of data and of partitions


def list_own_rows(model: type[BaseModel], *bases: type[BaseModel]) -> list[KeyRow]:
    """Return the keys that a class adds to those of its base classes, or for which it has another default."""
    rows = list[KeyRow]()
    for row in list_key_rows(model):
        inherited = [base.model_fields[row.name] for base in bases if row.name in base.model_fields]
        if not (issubclass(model, bases) and inherited and describe_default(inherited[0]) == row.default):
            rows.append(row)
    return rows


def format_kinds(kinds: Mapping[str, type[BaseModel]], bases: tuple[type[BaseModel], ...]) -> str:
    """Return each kind of a table with its summary and its own keys.

    Args:
        bases: Classes whose keys another table of the page has.
    """
    parts = list[str]()
    for kind, model in kinds.items():
        shared = [base for base in bases if issubclass(model, base)]
        rows = list_own_rows(model, *shared) if shared else list_key_rows(model)
        parts.append(f"**`{kind}`**: {describe_summary(model)}")
        if rows:
            parts.append(format_key_table(rows))
    return "\n\n".join(parts)


# ---------------------------------------------------------------------- headings of tables


def format_headings() -> str:
    """Return the headings that ``flwr-sim init`` knows as a table."""
    return format_table(("role", "headings"), [(role, ", ".join(sorted(names))) for role, names in HEADINGS.items()])
