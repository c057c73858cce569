"""Partition a mixture of tasks: several sites for each task, as in Hassani & Rekik, "UniFed", 2024, and its code.

Of each task a stratified share goes to the coordinator, and the rest to the sites of that task. In the "strongly
non-IID" setting the shuffled rest is cut into pieces; in the "moderately non-IID" setting each site gets equal numbers
of each class. Each share is then split 70/10/20. Departures: we split patients where they split images, and the first
image of a patient decides the patient's class; "moderate" limits each class to the number of patients of the rarest one
(in the paper all classes have enough).
"""

import numpy as np

from polyclinic.common.errors import BadInput, Fault
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.splits import Numbers, PatientIndex, PatientSplit, StratifiedPatientSplitter
from polyclinic.data.partition.division import (
    PartitionedDataset,
    SitePartition,
    drop_skipped_images_list,
    gather_site_images,
    make_numbered_site_names,
)
from polyclinic.data.partition.spec import TaskMixturePartitionSpec


def partition_by_task(splits: DatasetSplits, spec: TaskMixturePartitionSpec) -> PartitionedDataset:
    """Partition a mixture's training part over the sites and the coordinator; its other parts are not used.

    A mixture is a data set that combines several data sets, called tasks.

    Raises:
        BadInput: If the data is no mixture, or a class has too few patients for so many sites.
    """
    pool, patients = splits.train, PatientIndex.number_patients(splits.train)
    if "" in pool.sources:
        problem = "the data does not say which task each image belongs to."
        raise BadInput([Fault("partition.kind", problem, 'Take kind = "mixture" in [data].')])
    splitter = StratifiedPatientSplitter(patients.classes, pool.class_names, spec.seed)
    sites, of_coordinator = dict[str, tuple[tuple[str, ...], PatientSplit]](), list[Numbers]()
    task_of, count = pool.sources[patients.first], spec.sites_per_task  # (patients,)
    for task in dict.fromkeys(task_of.tolist()):
        members = np.flatnonzero(task_of == task)
        if spec.split == "strong":
            members = members[: spec.limit]
        else:  # equally many of each class
            by_class = _group_patients_by_class(members, splitter)
            most = min(map(len, by_class))
            most = most if spec.limit is None else min(most, spec.limit // len(by_class))
            members = np.concatenate([of_class[:most] for of_class in by_class])
        rest, taken_off = splitter.split_off_patient_fraction(members, spec.server_fraction, f'Task "{task}"')
        of_coordinator.append(taken_off)
        # Classes that are labelled in at least one image of the task.
        annotated = ~np.isnan(pool.labels[pool.sources == task]).all(axis=0)  # (classes,)
        class_names = tuple(sorted(np.array(pool.class_names)[annotated].tolist()))
        of_sites = np.array_split(rest, count)
        if spec.split == "moderate":  # equally many of each class to each site, and some to no site
            by_class = _group_patients_by_class(rest, splitter)
            size = len(rest) // count // len(by_class)
            of_sites = [
                np.concatenate([members[site * size :][:size] for members in by_class]) for site in range(count)
            ]
        for site, of_site in zip(make_numbered_site_names(task, count), of_sites, strict=True):
            sites[site] = class_names, splitter.split_patients_70_10_20(of_site, f'Site "{site}"')
    server = splitter.split_patients_70_10_20(np.concatenate(of_coordinator), "The coordinator")
    names, others, rows_of = sorted(sites), drop_skipped_images_list(pool), patients.list_rows_of_patients
    shares = [sites[site][1] for site in names]
    train, train_rows = gather_site_images(pool, [rows_of(share.train) for share in shares])
    validation, validation_rows = gather_site_images(others, [rows_of(share.validation) for share in shares])
    test, test_rows = gather_site_images(others, [rows_of(share.test) for share in shares])
    rows = zip(names, train_rows, validation_rows, test_rows, strict=True)
    parts = tuple(SitePartition(site, sites[site][0], *of_site) for site, *of_site in rows)
    server_sets = (others.select_rows(rows_of(part)) for part in (server.train, server.validation, server.test))
    return PartitionedDataset(DatasetSplits(train, validation, test), parts, DatasetSplits(*server_sets))


def _group_patients_by_class(numbers: Numbers, splitter: StratifiedPatientSplitter) -> list[Numbers]:
    classes = splitter.classes[numbers]
    return [numbers[classes == column] for column in np.unique(classes)]
