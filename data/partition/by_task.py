"""Partition a mixture of tasks: several sites for each task, as in Hassani & Rekik, "UniFed", 2024, and its code.

A stratified share of each task goes to the coordinator, and the rest to the sites of that task. In the "strongly
non-IID" setting, the shuffled rest is cut into pieces. In the "moderately non-IID" setting, each site gets equal
numbers of each class. Each share is then split 70/10/20.

Departures: we split patients instead of images, and the class of a patient is that of the patient's first image. With
"moderate", each class is limited to the number of patients of the rarest class; in the paper all classes are large
enough.
"""

import numpy as np

from polyclinic.common.errors import BadInput, Fault
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.splits import IndexArray, PatientIndex, PatientSplit, StratifiedPatientSplitter
from polyclinic.data.partition.division import (
    PartitionedDataset,
    SitePartition,
    drop_skipped_images_list,
    gather_site_images,
    make_numbered_site_names,
)
from polyclinic.data.partition.spec import TaskMixturePartitionSpec


def partition_by_task(splits: DatasetSplits, spec: TaskMixturePartitionSpec) -> PartitionedDataset:
    """Partition the training part of a mixture over the sites and the coordinator; the other parts are not used.

    A mixture is a data set that combines several data sets, called tasks.

    Raises:
        BadInput: If the data set is not a mixture, or a class has too few patients for the number of sites.
    """
    pool = splits.train
    patients = PatientIndex.number_patients(pool)
    if "" in pool.sources:
        problem = "the data does not say which task each image belongs to."
        raise BadInput([Fault("partition.kind", problem, 'Take kind = "mixture" in [data].')])
    splitter = StratifiedPatientSplitter(patients.classes, pool.class_names, spec.seed)
    sites = dict[str, tuple[tuple[str, ...], PatientSplit]]()  # site -> classes, patients
    coordinator_patients = list[IndexArray]()
    task_of_patient = pool.sources[patients.first]  # (patients,)
    count = spec.sites_per_task
    for task in dict.fromkeys(task_of_patient.tolist()):
        members = np.flatnonzero(task_of_patient == task)
        if spec.split == "strong":
            members = members[: spec.limit]
        else:  # equally many of each class
            by_class = _group_patients_by_class(members, splitter)
            size = min(map(len, by_class))
            if spec.limit is not None:
                size = min(size, spec.limit // len(by_class))
            members = np.concatenate([class_members[:size] for class_members in by_class])
        rest, held_back = splitter.split_off_patient_fraction(members, spec.server_fraction, f'Task "{task}"')
        coordinator_patients.append(held_back)
        # Classes that are labelled in at least one image of the task.
        annotated = ~np.isnan(pool.labels[pool.sources == task]).all(axis=0)  # (classes,)
        class_names = tuple(sorted(np.array(pool.class_names)[annotated].tolist()))
        patients_by_site = np.array_split(rest, count)
        if spec.split == "moderate":  # equally many of each class to each site; a few patients are left over
            by_class = _group_patients_by_class(rest, splitter)
            size = len(rest) // count // len(by_class)
            patients_by_site = [
                np.concatenate([members[site * size :][:size] for members in by_class]) for site in range(count)
            ]
        for site, numbers in zip(make_numbered_site_names(task, count), patients_by_site, strict=True):
            sites[site] = class_names, splitter.split_patients_70_10_20(numbers, f'Site "{site}"')

    server = splitter.split_patients_70_10_20(np.concatenate(coordinator_patients), "The coordinator")
    names = sorted(sites)
    others = drop_skipped_images_list(pool)
    rows_of = patients.list_rows_of_patients
    shares = [sites[site][1] for site in names]
    train, train_rows = gather_site_images(pool, [rows_of(share.train) for share in shares])
    validation, validation_rows = gather_site_images(others, [rows_of(share.validation) for share in shares])
    test, test_rows = gather_site_images(others, [rows_of(share.test) for share in shares])
    rows = zip(names, train_rows, validation_rows, test_rows, strict=True)
    parts = tuple(SitePartition(site, sites[site][0], *site_rows) for site, *site_rows in rows)
    server_sets = (others.select_rows(rows_of(part)) for part in (server.train, server.validation, server.test))
    return PartitionedDataset(DatasetSplits(train, validation, test), parts, DatasetSplits(*server_sets))


def _group_patients_by_class(numbers: IndexArray, splitter: StratifiedPatientSplitter) -> list[IndexArray]:
    classes = splitter.classes[numbers]
    return [numbers[classes == column] for column in np.unique(classes)]
