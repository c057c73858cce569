"""Check the settings of a partition before the data is loaded, and the data afterwards."""

from collections.abc import Mapping, Sequence

import numpy as np

from polyclinic.common.errors import Fault, quote_names
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.partition.division import IndexArray
from polyclinic.data.partition.paper_tables import PAPER_TABLES
from polyclinic.data.partition.spec import (
    ClassListsPartitionSpec,
    ClassPartitionSpec,
    ClassSubsetsPartitionSpec,
    LabelSkewPartitionSpec,
    MissingClassesPartitionSpec,
    PaperTablePartitionSpec,
    PartitionSpec,
    RandomOwnersPartitionSpec,
)
from polyclinic.data.tables.class_names import NIH_CLASSES, find_numbered_class_faults, find_unknown_class_faults

ClassLists = Mapping[str, tuple[str, ...]]
"""Name of a site -> the classes that it annotates."""
_UNANNOTATED_CLASSES_REMEDY = (
    "Give each class to a site that labels it. A class that no site labels is left out of [data]; {python}."
)


def find_partition_faults(class_names: Sequence[str], spec: PartitionSpec) -> list[Fault]:
    """Check partition settings against the class names of the data set, and return the faults.

    Faults name keys such as ``"partition.shared"``.
    """
    match spec:
        case ClassSubsetsPartitionSpec():
            return _find_class_subset_faults(class_names, spec)
        case ClassListsPartitionSpec():
            where = "partition.lists"
            listed = list(dict.fromkeys(name for names in spec.lists.values() for name in names))
            if faults := find_numbered_class_faults(where, listed, class_names):
                return faults
            for site, names in spec.lists.items():
                faults += find_unknown_class_faults(f"{where}.{site}", names, class_names)
            remedy = _UNANNOTATED_CLASSES_REMEDY.format(python=_suggest_fewer_columns(class_names, listed))
            return faults + find_unannotated_class_faults(class_names, spec.lists, where, remedy)
        case PaperTablePartitionSpec():
            return _find_paper_table_faults(class_names, spec)
        case RandomOwnersPartitionSpec():
            return _find_missing_site_count_faults(spec)
        case MissingClassesPartitionSpec():
            faults = _find_missing_site_count_faults(spec)
            classes_per_site = len(class_names) - spec.missing
            if classes_per_site < 1:
                problem = f"{spec.missing} missing classes leave none of {len(class_names)} to a site."
                faults.append(Fault("partition.missing", problem, f"Take at most {len(class_names) - 1}."))
            elif spec.sites:
                faults += _find_too_few_sites_faults(class_names, spec.sites, classes_per_site)
            return faults
        case LabelSkewPartitionSpec() if spec.shards == "pathological":
            return _find_too_few_sites_faults(class_names, spec.sites, 2)
        case LabelSkewPartitionSpec() if spec.sites > 12:
            shares = "the shares of 80 %, 10 % and 1 % each of the others are more than all images"
            problem = f"with {spec.sites} sites {shares}."
            return [Fault("partition.sites", problem, 'Take at most 12 sites, or kind = "dirichlet".')]
        case _:
            return []


def _find_missing_site_count_faults(
    spec: ClassSubsetsPartitionSpec | RandomOwnersPartitionSpec | MissingClassesPartitionSpec,
) -> list[Fault]:
    if spec.sites is None and spec.images == "patients":
        return [Fault("partition.sites", "the number of sites is missing.", 'Only images = "source" implies it.')]
    return []


def _find_class_subset_faults(class_names: Sequence[str], spec: ClassSubsetsPartitionSpec) -> list[Fault]:
    faults, shared = _find_missing_site_count_faults(spec), spec.shared
    if isinstance(shared, tuple):
        where, numbered = "partition.shared", find_numbered_class_faults("partition.shared", shared, class_names)
        faults += numbered or find_unknown_class_faults(where, shared, class_names)
        shared = len(set(shared))
    if shared > len(class_names):
        faults.append(Fault("partition.shared", f"{shared} shared classes, but the data has {len(class_names)}."))
    elif spec.sites is not None and shared == 0 and len(class_names) < spec.sites:
        problem = f"{len(class_names)} classes cannot be dealt to {spec.sites} sites, at least one each."
        faults.append(Fault("partition.sites", problem, "Take fewer sites, or share a class: shared = 1."))
    return faults


def _find_too_few_sites_faults(class_names: Sequence[str], sites: int, classes_a_site: int) -> list[Fault]:
    """Return a fault if ``sites`` sites with ``classes_a_site`` classes each cannot annotate every class."""
    if sites * classes_a_site >= len(class_names):
        return []
    lists = f"{format_count_with_noun(sites, 'site')} with {format_count_with_noun(classes_a_site, 'class', 'classes')}"
    problem = f"{lists} each cannot have all {len(class_names)}."
    remedy = f"Take at least {-(-len(class_names) // classes_a_site)} sites, or more classes a site."
    return [Fault("partition.sites", problem, remedy)]


def find_unannotated_class_faults(
    class_names: Sequence[str], lists: ClassLists, where: str, remedy: str
) -> list[Fault]:
    """Return a fault that lists the classes that no site annotates; empty if there are none.

    Args:
        lists: Name of a site -> the classes that it annotates.
        where: The configuration key that the fault names.
        remedy: The advice in the fault.
    """
    unannotated = sorted(set(class_names).difference(*lists.values()))
    return [Fault(where, f"no site annotates {quote_names(unannotated)}.", remedy)] if unannotated else []


def _suggest_fewer_columns(class_names: Sequence[str], listed: Sequence[str]) -> str:
    """Return advice with the Python code that keeps only the label columns of the listed classes."""
    columns = [column for column, name in enumerate(class_names) if name in listed]
    names = [class_names[column] for column in columns]
    for_tuples = f"item=lambda x: (x[0], x[1][{columns}])"
    for_dictionaries = f'item=lambda x: {{**x, "label": x["label"][{columns}]}}'
    return (
        f"in Python pc.LabelledImages(dataset, class_names={names}, {for_tuples}), "
        f"or for dictionaries {for_dictionaries}"
    )


def _find_paper_table_faults(class_names: Sequence[str], spec: PaperTablePartitionSpec) -> list[Fault]:
    faults = []
    rows = PAPER_TABLES[spec.table]
    if spec.row not in rows:
        numbers = ", ".join(map(str, rows))
        faults.append(Fault("partition.row", f'table "{spec.table}" has no row {spec.row}; its rows are {numbers}.'))
    lacking = [name for name in NIH_CLASSES if name not in class_names]
    foreign = sorted(set(class_names).difference(NIH_CLASSES))
    if lacking or foreign:
        problem = f"the paper's tables are about NIH's 14 classes; lacking: {quote_names(lacking) or 'none'}; "
        problem += f"not among them: {quote_names(foreign) or 'none'}."
        pairs = [(name, other) for name in foreign for other in lacking if name.replace("_", " ") in other]
        renamed = ", ".join(f'"{name}" to "{other}"' for name, other in pairs)
        faults.append(Fault("partition.table", problem, f"Rename {renamed}." if pairs else ""))
    return faults


def find_partition_data_faults(splits: DatasetSplits, spec: ClassPartitionSpec, sites: Sequence[str]) -> list[Fault]:
    """Check the loaded data against the partition settings, and return the faults.

    If patients are distributed, each site needs at least one. If each centre of the data is a site, the settings must
    name these centres, or state their number, correctly.

    Args:
        sites: The names of the sites.
    """
    if spec.images != "source":
        patients = len(np.unique(splits.train.patients))
        if len(sites) <= patients:
            return []
        problem = f"{len(sites)} sites, but only {patients} patients in the train part."
        return [Fault("partition.sites", problem, "Take fewer sites.")]
    if "" in sites:
        problem = "the data does not say which centre each image came from."
        remedy = 'Name the column of the hospitals in [data]: source_column = "...", or source_key of an npz file. '
        remedy += "In Python: pc.LabelledImages(..., sources=[...]), a name for each image."
        return [Fault("partition.images", problem, remedy)]
    count: int | None
    if isinstance(spec, ClassListsPartitionSpec):
        test_sources = set(splits.test.sources[~np.isnan(splits.test.labels).all(axis=1)].tolist())
        where, count = "partition.lists", len(spec.lists)
        agree = set(sites) <= set(spec.lists) <= {name for part in splits.parts for name in part.sources.tolist()}
        if agree and spec.test_labels == "listed" and (unlisted := sorted(test_sources.difference(spec.lists))):
            problem = f"says nothing of {quote_names(unlisted)}, where test images come from."
            remedy = "List the classes that are looked for there. Without training images it becomes no site."
            return [Fault(where, problem, remedy)]
    else:
        count = len(PAPER_TABLES[spec.table][spec.row]) if isinstance(spec, PaperTablePartitionSpec) else spec.sites
        where, agree = "partition.sites", count in (None, len(sites))
    if not agree:
        problem = f"{count} sites, but the train part has {len(sites)} sources: {quote_names(sites)}."
        return [Fault(where, problem, 'With images = "source" each source is one site, under its name.')]
    if isinstance(spec, ClassSubsetsPartitionSpec) and not spec.shared and len(splits.class_names) < len(sites):
        problem = f"{len(splits.class_names)} classes cannot be dealt to {len(sites)} sources, at least one each."
        return [Fault("partition.shared", problem, "Share a class: shared = 1.")]
    return []


def find_empty_site_faults(sites: Sequence[str], rows: Sequence[IndexArray], part: str, remedy: str) -> list[Fault]:
    """Return a fault that lists the sites without images in a part; empty if every site has images.

    Args:
        rows: The image indices of each site, in the order of ``sites``.
        part: Name of the part, for the message.
        remedy: The advice in the fault.
    """
    empty = [site for site, of_site in zip(sites, rows, strict=True) if not len(of_site)]
    problem = f"{quote_names(empty)} would get no {part} image."
    return [Fault("partition.sites", problem, remedy)] if empty else []


def find_multi_class_image_faults(part: str, images: ImageSet) -> list[Fault]:
    """Return a fault if some images do not have exactly one class.

    Args:
        part: Name of the part that the images are from, for the message.
    """
    count = int(((images.labels == 1).sum(axis=1) != 1).sum())
    problem = f"deals images by their one class, but {count} of {len(images)} {part} images have none or several."
    return [Fault("partition.kind", problem, 'Take a kind such as "class_subsets".')] if count else []
