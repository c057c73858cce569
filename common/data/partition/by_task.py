"""Sites for each task of a mixture, as in Hassani & Rekik, "UniFed", 2024, and its released code.

Task by task a stratified share is taken off for the coordinator and the rest is dealt to the task's sites. "Strongly
non-IID" deals pieces of the shuffled rest, "moderately non-IID" equal numbers of each class. Each share is divided
70/10/20. Departures: we split patients where they split images, a patient by the class of its first image; and
"moderate" takes of each class as many as the scarcest has (theirs all have enough).
"""

import numpy as np

from common.data.base.image_set import Splits
from common.data.base.splits import Numbers, PatientIndex, PatientSplit, StratifiedSplitter
from common.data.partition.division import (
    PartitionedDataset,
    SitePartition,
    gather_site_images,
    site_names,
    without_skipped_list,
)
from common.data.partition.spec import TaskPartitionSpec
from common.errors import BadInput, Fault


def partition_by_task(splits: Splits, spec: TaskPartitionSpec) -> PartitionedDataset:
    """Divide a mixture's train part over the sites and the coordinator; its validation and test part are not used.

    Raises:
        BadInput: If images do not say their task, or a class has too few patients for so many sites.
    """
    pool, patients = splits.train, PatientIndex.of(splits.train)
    if "" in pool.sources:
        problem = "the data does not say which task each image belongs to."
        raise BadInput([Fault("partition.kind", problem, 'Take kind = "mixture" in [data].')])
    splitter = StratifiedSplitter(patients.classes, pool.class_names, spec.seed)
    sites, of_coordinator = dict[str, tuple[tuple[str, ...], PatientSplit]](), list[Numbers]()
    task_of = pool.sources[patients.first]  # (patients,)
    for task in dict.fromkeys(task_of.tolist()):
        members = _limit_patients(np.flatnonzero(task_of == task), splitter, spec)
        rest, taken_off = splitter.split_off(members, spec.server_fraction, f'Task "{task}"')
        of_coordinator.append(taken_off)
        # Classes of which at least one image of the task says whether it has them.
        annotated = ~np.isnan(pool.labels[pool.sources == task]).all(axis=0)  # (classes,)
        class_names = tuple(sorted(np.array(pool.class_names)[annotated].tolist()))
        of_sites = _distribute_task_patients(rest, splitter, spec)
        for site, of_site in zip(site_names(task, len(of_sites)), of_sites, strict=True):
            sites[site] = class_names, splitter.split_in_three(of_site, f'Site "{site}"')
    server, others = (
        splitter.split_in_three(np.concatenate(of_coordinator), "The coordinator"),
        without_skipped_list(pool),
    )
    names = sorted(sites)
    shares = [sites[site][1] for site in names]
    train, train_rows = gather_site_images(pool, [patients.rows_of_patients(share.train) for share in shares])
    validation, validation_rows = gather_site_images(
        others, [patients.rows_of_patients(share.validation) for share in shares]
    )
    test, test_rows = gather_site_images(others, [patients.rows_of_patients(share.test) for share in shares])
    rows = zip(names, train_rows, validation_rows, test_rows, strict=True)
    parts = tuple(SitePartition(site, sites[site][0], *of_site) for site, *of_site in rows)
    server_sets = (
        others.select_rows(patients.rows_of_patients(numbers))
        for numbers in (server.train, server.validation, server.test)
    )
    return PartitionedDataset(Splits(train, validation, test), parts, Splits(*server_sets))


def _limit_patients(members: Numbers, splitter: StratifiedSplitter, spec: TaskPartitionSpec) -> Numbers:
    """Return the first ``limit`` of a task's patients; "moderate": the first of each class, equally many."""
    if spec.split == "strong":
        return members[: spec.limit]
    by_class = _group_by_class(members, splitter)
    fewest = min(map(len, by_class))
    count = fewest if spec.limit is None else min(fewest, spec.limit // len(by_class))
    return np.concatenate([of_class[:count] for of_class in by_class])


def _distribute_task_patients(members: Numbers, splitter: StratifiedSplitter, spec: TaskPartitionSpec) -> list[Numbers]:
    """Deal a task's patients to its sites; "moderate": equally many of each class, and the rest to no site."""
    sites = spec.sites_per_task
    if spec.split == "strong":
        return np.array_split(members, sites)
    by_class = _group_by_class(members, splitter)
    size = len(members) // sites // len(by_class)
    return [np.concatenate([of_class[site * size :][:size] for of_class in by_class]) for site in range(sites)]


def _group_by_class(numbers: Numbers, splitter: StratifiedSplitter) -> list[Numbers]:
    classes = splitter.classes[numbers]
    return [numbers[classes == column] for column in np.unique(classes)]
