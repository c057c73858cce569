"""Sites for each task of a mixture, as in Hassani & Rekik, "UniFed", 2024, and its released code.

Task by task a stratified share is taken off for the coordinator and the rest is dealt to the task's sites. "Strongly
non-IID" deals pieces of the shuffled rest, "moderately non-IID" equal numbers of each class. Each share is divided
70/10/20. Departures: we split patients where they split images, a patient by the class of its first image; and
"moderate" takes of each class as many as the scarcest has (theirs all have enough).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.data.base.image_set import ImageSet, Splits
from common.data.partition.division import Division, SitePart, gathered, numbered, without_notes
from common.data.partition.spec import TasksSpec
from common.data.splits.patients import Patients, patients_of
from common.data.splits.stratified import Numbers, Share, Stratified
from common.errors import Fault, stop_on


@dataclass(frozen=True)
class TaskSite:
    """One site, its images as numbers of patients of the mixture's train part."""

    site: str
    class_names: tuple[str, ...]
    share: Share


def by_tasks(splits: Splits, spec: TasksSpec) -> Division:
    """Divide the train part alone; new parts for the sites and for the coordinator are cut from it.

    Raises:
        BadInput: If images do not say their task, or a class has too few patients for so many sites.
    """
    pool, patients = splits.train, patients_of(splits.train)
    stop_on(_source_faults(pool))
    split = Stratified(patients.classes, pool.class_names, spec.seed)
    sites, kept = [], []
    task_of = pool.sources[patients.first]  # (patients,)
    for task in dict.fromkeys(task_of.tolist()):
        members = np.flatnonzero(task_of == task)
        left, taken = split.two(_used(members, split, spec), spec.server_fraction, f'Task "{task}"')
        kept.append(taken)
        sites += _task_sites(task, _classes_of(pool, task), _chunks(left, split, spec), split)
    server = split.share(np.concatenate(kept), "The coordinator")
    return _division(pool, patients, sorted(sites, key=lambda site: site.site), server)


def _source_faults(pool: ImageSet) -> list[Fault]:
    problem = "the data does not say which task each image belongs to."
    return [Fault("partition.kind", problem, 'Take kind = "mixture" in [data].')] if "" in pool.sources else []


def _used(members: Numbers, split: Stratified, spec: TasksSpec) -> Numbers:
    """The first ``limit`` of a task's patients; "moderate": the first of each class, equally many."""
    if spec.split == "strong":
        return members[: spec.limit]
    by_class = _by_class(members, split)
    fewest = min(map(len, by_class))
    count = fewest if spec.limit is None else min(fewest, spec.limit // len(by_class))
    return np.concatenate([of_one[:count] for of_one in by_class])


def _chunks(left: Numbers, split: Stratified, spec: TasksSpec) -> list[Numbers]:
    """Deal a task's patients to its sites; "moderate": equally many of each class, and the rest is nobody's."""
    sites = spec.sites_per_task
    if spec.split == "strong":
        return np.array_split(left, sites)
    by_class = _by_class(left, split)
    size = len(left) // sites // len(by_class)
    return [np.concatenate([of_one[site * size :][:size] for of_one in by_class]) for site in range(sites)]


def _by_class(numbers: Numbers, split: Stratified) -> list[Numbers]:
    classes = split.classes[numbers]
    return [numbers[classes == column] for column in np.unique(classes)]


def _classes_of(pool: ImageSet, task: str) -> tuple[str, ...]:
    """Classes of which at least one image of the task says whether it has them; sorted."""
    known = ~np.isnan(pool.labels[pool.sources == task]).all(axis=0)  # (classes,)
    return tuple(sorted(np.array(pool.class_names)[known].tolist()))


def _task_sites(task: str, class_names: tuple[str, ...], chunks: list[Numbers], split: Stratified) -> list[TaskSite]:
    return [
        TaskSite(site, class_names, split.share(chunk, f'Site "{site}"'))
        for site, chunk in zip(numbered(task, len(chunks)), chunks, strict=True)
    ]


def _division(pool: ImageSet, patients: Patients, sites: Sequence[TaskSite], server: Share) -> Division:
    rest = without_notes(pool)
    train, train_rows = gathered(pool, [patients.rows(site.share.train) for site in sites])
    validation, validation_rows = gathered(rest, [patients.rows(site.share.validation) for site in sites])
    test, test_rows = gathered(rest, [patients.rows(site.share.test) for site in sites])
    rows = zip(sites, train_rows, validation_rows, test_rows, strict=True)
    parts = tuple(SitePart(site.site, site.class_names, *own) for site, *own in rows)
    kept = (rest.rows(patients.rows(numbers)) for numbers in (server.train, server.validation, server.test))
    return Division(Splits(train, validation, test), parts, Splits(*kept))
