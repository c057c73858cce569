"""Sites that annotate different classes; patients are dealt apart from them, or centres are sites.

Patients are dealt as in Kulkarni et al., "Surgical Aggregation", ML4H 2024 (see
:mod:`common.data.splits.patient_disjoint`). Class lists are drawn so that each class is annotated at least once in the
network and each site annotates at least one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import Splits
from common.data.partition.class_draws import deal_classes, lists_without_missing, random_owners
from common.data.partition.division import SitePart, numbered
from common.data.partition.paper_tables import TABLES, class_names_of
from common.data.partition.site_checks import empty_faults, site_faults
from common.data.partition.spec import (
    ClassListsSpec,
    ClassPartitionSpec,
    ClassSubsetsSpec,
    ClassTableSpec,
    MissingClassesSpec,
    RandomOwnersSpec,
)
from common.data.partition.spec_checks import ClassLists, orphan_faults
from common.data.splits.patient_disjoint import any_positive, split_patients_over_sites
from common.errors import stop_on


def by_classes(splits: Splits, spec: ClassPartitionSpec, seed: int) -> tuple[SitePart, ...]:
    """Divide the train and validation parts over sites; the test part belongs to none of them.

    Raises:
        BadInput: With all faults.
    """
    sites = _site_names(splits, spec)
    stop_on(site_faults(splits, spec, sites))
    by_source = spec.images == "source"
    rows = _rows_by_source(splits, sites) if by_source else _rows_by_patient(splits, sites, seed, spec.size_skew)
    remedy = "Take fewer sites: abnormal and other patients are dealt apart."
    stop_on(empty_faults(sites, [train for train, _ in rows], "training", remedy))
    positives = np.array([(splits.train.labels[train] == 1).sum(axis=0) for train, _ in rows])  # (sites, classes)
    lists = _class_lists(splits.class_names, spec, sites, positives, np.random.default_rng((seed, len(sites))))
    remedy = "Take more sites, fewer missing classes, or another lists_seed."
    stop_on(orphan_faults(splits.class_names, lists, "partition.missing", remedy))
    return tuple(
        SitePart(site, tuple(sorted(lists[site])), train, validation)
        for site, (train, validation) in zip(sites, rows, strict=True)
    )


def _site_names(splits: Splits, spec: ClassPartitionSpec) -> tuple[str, ...]:
    if spec.images == "source":
        return tuple(sorted(set(splits.train.sources.tolist())))
    if isinstance(spec, ClassListsSpec):
        return tuple(sorted(spec.lists))
    count = len(TABLES[spec.table][spec.row]) if isinstance(spec, ClassTableSpec) else spec.sites
    assert count is not None, "partition_faults has seen to it"
    return numbered("site", count)


def _rows_by_patient(
    splits: Splits, sites: Sequence[str], seed: int, size_skew: float
) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Deal the train part, then, with the same generator going on, the validation part."""
    random = np.random.RandomState(seed % (1 << 32))
    dealt = []
    for part in (splits.train, splits.validation):
        hands = split_patients_over_sites(part.patients, any_positive(part.labels), len(sites), random, size_skew)
        dealt.append([np.flatnonzero(np.isin(part.patients, hand)) for hand in hands])
    return list(zip(*dealt, strict=True))


def _rows_by_source(splits: Splits, sites: Sequence[str]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    return [
        (np.flatnonzero(splits.train.sources == site), np.flatnonzero(splits.validation.sources == site))
        for site in sites
    ]


def _class_lists(
    class_names: tuple[str, ...],
    spec: ClassPartitionSpec,
    sites: tuple[str, ...],
    positives: NDArray[np.intp],
    random: np.random.Generator,
) -> ClassLists:
    match spec:
        case ClassListsSpec():
            return spec.lists
        case ClassTableSpec():
            return dict(zip(sites, class_names_of(spec.table, spec.row), strict=True))
        case RandomOwnersSpec():
            owned = random_owners(len(sites), len(class_names), random)
        case MissingClassesSpec():
            owned = lists_without_missing(len(sites), len(class_names), spec.missing, spec.lists_seed)
        case ClassSubsetsSpec():
            shared = _shared_columns(class_names, spec.shared, random)
            owned = deal_classes(shared, positives, spec.minimum_positives, random)
    return {
        site: tuple(name for name, has in zip(class_names, row, strict=True) if has)
        for site, row in zip(sites, owned, strict=True)
    }


def _shared_columns(
    class_names: tuple[str, ...], shared: int | tuple[str, ...], random: np.random.Generator
) -> NDArray[np.bool_]:
    if isinstance(shared, tuple):
        return np.isin(class_names, shared)
    columns = np.zeros(len(class_names), dtype=np.bool_)
    columns[random.permutation(len(class_names))[:shared]] = True
    return columns
