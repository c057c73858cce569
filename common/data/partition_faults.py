"""What can be wrong with a partition, before and after the data is known."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.class_tables import TABLES
from common.data.image_set import Splits
from common.data.spec import ClassListsSpec, ClassSubsetsSpec, ClassTableSpec, PartitionSpec, RandomOwnersSpec
from common.data.table_presets import NIH_CLASSES
from common.errors import Fault, did_you_mean, quoted

ClassLists = Mapping[str, tuple[str, ...]]


def partition_faults(class_names: Sequence[str], spec: PartitionSpec) -> list[Fault]:
    """Find what is wrong, knowing only the data set's classes; ``where`` is like ``"partition.shared"``."""
    match spec:
        case ClassSubsetsSpec():
            return _subset_faults(class_names, spec)
        case ClassListsSpec():
            return _list_faults(class_names, spec.lists)
        case ClassTableSpec():
            return _table_faults(class_names, spec)
        case RandomOwnersSpec():
            return _count_faults(spec)


def _count_faults(spec: ClassSubsetsSpec | RandomOwnersSpec) -> list[Fault]:
    if spec.sites is None and spec.images == "patients":
        return [Fault("partition.sites", "The number of sites is missing.", 'Only images = "source" implies it.')]
    return []


def _subset_faults(class_names: Sequence[str], spec: ClassSubsetsSpec) -> list[Fault]:
    faults = _count_faults(spec)
    if isinstance(spec.shared, tuple):
        faults += _unknown_classes("partition.shared", spec.shared, class_names)
        shared = len(set(spec.shared))
    else:
        shared = spec.shared
    if shared > len(class_names):
        faults.append(Fault("partition.shared", f"{shared} shared classes, but the data has {len(class_names)}."))
    elif spec.sites is not None and shared == 0 and len(class_names) < spec.sites:
        problem = f"{len(class_names)} classes cannot be dealt to {spec.sites} sites, at least one each."
        faults.append(Fault("partition.sites", problem, "Take fewer sites, or share a class."))
    return faults


def _unknown_classes(where: str, names: Sequence[str], class_names: Sequence[str]) -> list[Fault]:
    return [
        Fault(
            f"{where}[{place}]",
            f'"{name}" is not a class of the data, whose classes are {quoted(class_names)}.',
            did_you_mean(name, class_names),
        )
        for place, name in enumerate(names)
        if name not in class_names
    ]


def _list_faults(class_names: Sequence[str], lists: ClassLists) -> list[Fault]:
    faults = [
        fault
        for site, names in lists.items()
        for fault in _unknown_classes(f"partition.lists.{site}", names, class_names)
    ]
    orphans = sorted(set(class_names).difference(*lists.values()))
    if orphans:
        problem = f"No site annotates {quoted(orphans)}."
        faults.append(Fault("partition.lists", problem, "Give each class to some site."))
    return faults


def _table_faults(class_names: Sequence[str], spec: ClassTableSpec) -> list[Fault]:
    faults = []
    rows = TABLES[spec.table]
    if spec.row not in rows:
        known = ", ".join(map(str, rows))
        faults.append(Fault("partition.row", f'Table "{spec.table}" has no row {spec.row}; its rows are {known}.'))
    lacking = [name for name in NIH_CLASSES if name not in class_names]
    foreign = sorted(set(class_names).difference(NIH_CLASSES))
    if lacking or foreign:
        problem = f"The paper's tables are about NIH's 14 classes; lacking: {quoted(lacking) or 'none'}; "
        problem += f"not among them: {quoted(foreign) or 'none'}."
        faults.append(Fault("partition.table", problem, _renamings(lacking, foreign)))
    return faults


def _renamings(lacking: Sequence[str], foreign: Sequence[str]) -> str:
    pairs = [(name, other) for name in foreign for other in lacking if name.replace("_", " ") in other]
    renamed = ", ".join(f'"{name}" to "{other}"' for name, other in pairs)
    return f"Rename {renamed}." if pairs else ""


def site_faults(splits: Splits, spec: PartitionSpec, sites: Sequence[str]) -> list[Fault]:
    if spec.images == "source":
        return _source_faults(splits, spec, sites)
    patients = len(np.unique(splits.train.patients))
    if len(sites) > patients:
        problem = f"{len(sites)} sites, but only {patients} patients in the train part."
        return [Fault("partition.sites", problem, "Take fewer sites.")]
    return []


def _source_faults(splits: Splits, spec: PartitionSpec, sources: Sequence[str]) -> list[Fault]:
    if "" in sources:
        problem = "The data does not say which centre each image came from."
        return [Fault("partition.images", problem, "Name source_key or source_column in [data].")]
    wanted = _wanted_sites(spec)
    named = isinstance(spec, ClassListsSpec)
    agree = set(spec.lists) == set(sources) if isinstance(spec, ClassListsSpec) else wanted in (None, len(sources))
    if not agree:
        problem = f"{wanted} sites, but the train part has {len(sources)} sources: {quoted(sources)}."
        where = "partition.lists" if named else "partition.sites"
        return [Fault(where, problem, 'With images = "source" each source is one site, under its name.')]
    if isinstance(spec, ClassSubsetsSpec) and not spec.shared and len(splits.class_names) < len(sources):
        problem = f"{len(splits.class_names)} classes cannot be dealt to {len(sources)} sources, at least one each."
        return [Fault("partition.shared", problem, "Share a class.")]
    return []


def _wanted_sites(spec: PartitionSpec) -> int | None:
    match spec:
        case ClassListsSpec():
            return len(spec.lists)
        case ClassTableSpec():
            return len(TABLES[spec.table][spec.row])
        case _:
            return spec.sites


def empty_faults(sites: Sequence[str], rows: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]]) -> list[Fault]:
    empty = [site for site, (train, _) in zip(sites, rows, strict=True) if not len(train)]
    if not empty:
        return []
    problem = f"{quoted(empty)} would get no training image."
    return [Fault("partition.sites", problem, "Take fewer sites: abnormal and other patients are dealt apart.")]
