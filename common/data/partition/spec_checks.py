"""What can be wrong with a partition before the data is known; the rest: ``site_checks``."""

from collections.abc import Mapping, Sequence

from common.data.partition.paper_tables import TABLES
from common.data.partition.spec import (
    ClassListsSpec,
    ClassSubsetsSpec,
    ClassTableSpec,
    LabelSkewSpec,
    MissingClassesSpec,
    PartitionSpec,
    RandomOwnersSpec,
)
from common.data.tables.class_names import unknown_faults
from common.data.tables.presets import NIH_CLASSES
from common.errors import Fault, quoted
from common.system.formatting import counted

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
        case MissingClassesSpec():
            return _missing_faults(class_names, spec)
        case LabelSkewSpec():
            return _skew_faults(class_names, spec)
        case _:
            return []


def _count_faults(spec: ClassSubsetsSpec | RandomOwnersSpec | MissingClassesSpec) -> list[Fault]:
    if spec.sites is None and spec.images == "patients":
        return [Fault("partition.sites", "the number of sites is missing.", 'Only images = "source" implies it.')]
    return []


def _subset_faults(class_names: Sequence[str], spec: ClassSubsetsSpec) -> list[Fault]:
    faults = _count_faults(spec)
    if isinstance(spec.shared, tuple):
        faults += unknown_faults("partition.shared", spec.shared, class_names)
        shared = len(set(spec.shared))
    else:
        shared = spec.shared
    if shared > len(class_names):
        faults.append(Fault("partition.shared", f"{shared} shared classes, but the data has {len(class_names)}."))
    elif spec.sites is not None and shared == 0 and len(class_names) < spec.sites:
        problem = f"{len(class_names)} classes cannot be dealt to {spec.sites} sites, at least one each."
        faults.append(Fault("partition.sites", problem, "Take fewer sites, or share a class."))
    return faults


def _missing_faults(class_names: Sequence[str], spec: MissingClassesSpec) -> list[Fault]:
    left = len(class_names) - spec.missing
    if left < 1:
        problem = f"{spec.missing} missing classes leave none of {len(class_names)} to a site."
        return [*_count_faults(spec), Fault("partition.missing", problem, f"Take at most {len(class_names) - 1}.")]
    return [*_count_faults(spec), *(_coverage_faults(class_names, spec.sites, left) if spec.sites else [])]


def _coverage_faults(class_names: Sequence[str], sites: int, classes_of_one: int) -> list[Fault]:
    """Too few sites for every class to be somebody's."""
    if sites * classes_of_one >= len(class_names):
        return []
    dealt = f"{counted(sites, 'site')} with {counted(classes_of_one, 'class', 'classes')} each"
    problem = f"{dealt} cannot have all {len(class_names)}."
    remedy = f"Take at least {-(-len(class_names) // classes_of_one)} sites, or more classes a site."
    return [Fault("partition.sites", problem, remedy)]


def _skew_faults(class_names: Sequence[str], spec: LabelSkewSpec) -> list[Fault]:
    if spec.shards == "pathological":
        return _coverage_faults(class_names, spec.sites, 2)
    if spec.sites <= 12:
        return []
    problem = f"with {spec.sites} sites the shares of 80 %, 10 % and 1 % each of the others are more than all images."
    return [Fault("partition.sites", problem, 'Take at most 12 sites, or kind = "dirichlet".')]


def _list_faults(class_names: Sequence[str], lists: ClassLists) -> list[Fault]:
    faults = [
        fault
        for site, names in lists.items()
        for fault in unknown_faults(f"partition.lists.{site}", names, class_names)
    ]
    return faults + orphan_faults(class_names, lists, "partition.lists", "Give each class to some site.")


def orphan_faults(class_names: Sequence[str], lists: ClassLists, where: str, remedy: str) -> list[Fault]:
    orphans = sorted(set(class_names).difference(*lists.values()))
    return [Fault(where, f"no site annotates {quoted(orphans)}.", remedy)] if orphans else []


def _table_faults(class_names: Sequence[str], spec: ClassTableSpec) -> list[Fault]:
    faults = []
    rows = TABLES[spec.table]
    if spec.row not in rows:
        known = ", ".join(map(str, rows))
        faults.append(Fault("partition.row", f'table "{spec.table}" has no row {spec.row}; its rows are {known}.'))
    lacking = [name for name in NIH_CLASSES if name not in class_names]
    foreign = sorted(set(class_names).difference(NIH_CLASSES))
    if lacking or foreign:
        problem = f"the paper's tables are about NIH's 14 classes; lacking: {quoted(lacking) or 'none'}; "
        problem += f"not among them: {quoted(foreign) or 'none'}."
        faults.append(Fault("partition.table", problem, _renamings(lacking, foreign)))
    return faults


def _renamings(lacking: Sequence[str], foreign: Sequence[str]) -> str:
    pairs = [(name, other) for name in foreign for other in lacking if name.replace("_", " ") in other]
    renamed = ", ".join(f'"{name}" to "{other}"' for name, other in pairs)
    return f"Rename {renamed}." if pairs else ""
