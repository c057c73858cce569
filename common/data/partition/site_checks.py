"""What can be wrong with the sites of a partition once the data is known."""

from collections.abc import Sequence

import numpy as np

from common.data.base.image_set import ImageSet, Splits
from common.data.partition.division import Rows
from common.data.partition.paper_tables import TABLES
from common.data.partition.spec import ClassListsSpec, ClassPartitionSpec, ClassSubsetsSpec, ClassTableSpec
from common.errors import Fault, quoted


def site_faults(splits: Splits, spec: ClassPartitionSpec, sites: Sequence[str]) -> list[Fault]:
    if spec.images == "source":
        return _source_faults(splits, spec, sites)
    patients = len(np.unique(splits.train.patients))
    if len(sites) > patients:
        problem = f"{len(sites)} sites, but only {patients} patients in the train part."
        return [Fault("partition.sites", problem, "Take fewer sites.")]
    return []


def _source_faults(splits: Splits, spec: ClassPartitionSpec, sources: Sequence[str]) -> list[Fault]:
    if "" in sources:
        problem = "the data does not say which centre each image came from."
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


def _wanted_sites(spec: ClassPartitionSpec) -> int | None:
    match spec:
        case ClassListsSpec():
            return len(spec.lists)
        case ClassTableSpec():
            return len(TABLES[spec.table][spec.row])
        case _:
            return spec.sites


def empty_faults(sites: Sequence[str], hands: Sequence[Rows], part: str, remedy: str) -> list[Fault]:
    """Sites whose hand holds nothing of the part called ``part``."""
    empty = [site for site, hand in zip(sites, hands, strict=True) if not len(hand)]
    problem = f"{quoted(empty)} would get no {part} image."
    return [Fault("partition.sites", problem, remedy)] if empty else []


def several_class_faults(part: str, images: ImageSet) -> list[Fault]:
    """Images that do not have exactly one class."""
    count = int(((images.labels == 1).sum(axis=1) != 1).sum())
    problem = f"deals images by their one class, but {count} of {len(images)} {part} images have none or several."
    return [Fault("partition.kind", problem, 'Take a kind such as "class_subsets".')] if count else []
