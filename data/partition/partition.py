"""Partition one data set over simulated sites (:func:`partition_dataset`).

This module handles sites that annotate different classes. Patients are distributed independently of the classes, as in
Kulkarni et al., "Surgical Aggregation", ML4H 2024 (see :mod:`polyclinic.data.base.splits`), or each centre of
the data is a site. Each class is annotated by at least one site, and each site annotates at least one class. Other
partitions are in :mod:`by_label` and :mod:`by_task`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.splits import find_positive_images, split_patients_over_sites
from polyclinic.data.partition.by_label import partition_by_label
from polyclinic.data.partition.by_task import partition_by_task
from polyclinic.data.partition.checks import (
    ClassLists,
    find_empty_site_faults,
    find_partition_data_faults,
    find_partition_faults,
    find_unannotated_class_faults,
)
from polyclinic.data.partition.division import PartitionedDataset, SitePartition, make_numbered_site_names
from polyclinic.data.partition.paper_tables import PAPER_TABLES, read_paper_class_lists
from polyclinic.data.partition.spec import (
    ClassListsPartitionSpec,
    ClassPartitionSpec,
    ClassSubsetsPartitionSpec,
    DirichletPartitionSpec,
    LabelSkewPartitionSpec,
    MissingClassesPartitionSpec,
    PaperTablePartitionSpec,
    PartitionSpec,
    RandomOwnersPartitionSpec,
    TaskMixturePartitionSpec,
)

_MAX_DRAWS, _MAX_CLASSES_LISTED = 10_000, 20


def distribute_classes_over_sites(
    shared: NDArray[np.bool_], positives: NDArray[np.intp], minimum: int, random: np.random.Generator
) -> NDArray[np.bool_]:
    """Assign shared classes to all sites, and each other class, in random order, to one site.

    A class is assigned to a site with at least ``minimum`` positive images of it, or to any site if no site has so
    many. If there are several such sites, the site with the fewest classes gets it. At the end, a site without a class
    takes one from the site with the most classes.

    Args:
        shared: ``(classes,)``, True for shared classes.
        positives: ``(sites, classes)`` numbers of positive training images.

    Returns:
        ``(sites, classes)``, True where the site annotates the class.
    """
    owned = np.repeat(shared[None, :], len(positives), axis=0)
    order = random.permutation(len(positives))
    for column in random.permutation(np.flatnonzero(~shared)):
        fewest_first = order[np.argsort(owned[order].sum(axis=1), kind="stable")]
        eligible = fewest_first[positives[fewest_first, column] >= minimum]
        owned[(eligible if len(eligible) else fewest_first)[0], column] = True
    for site in np.flatnonzero(~owned.any(axis=1)):
        richest = int(np.argmax(owned.sum(axis=1)))
        columns = np.flatnonzero(owned[richest])
        column = columns[np.argmax(positives[site, columns])]
        owned[richest, column] = False
        owned[site, column] = True
    return owned


def draw_random_class_owners(sites: int, classes: int, random: np.random.Generator) -> NDArray[np.bool_]:
    """Draw a mask ``(sites, classes)``: 1 to ``sites`` sites annotate each class; a site without a class gets one."""
    owned = np.zeros((sites, classes), dtype=np.bool_)
    for column in range(classes):
        owned[random.permutation(sites)[: random.integers(1, sites + 1)], column] = True
    for site in np.flatnonzero(~owned.any(axis=1)):
        owned[site, random.integers(classes)] = True
    return owned


def draw_site_classes_with_missing(sites: int, classes: int, missing: int, seed: int) -> NDArray[np.bool_]:
    """Draw a mask ``(sites, classes)`` in which each site lacks ``missing`` classes.

    The draw is repeated, at most 10,000 times, until each class is annotated by at least one site. FedMLP's authors
    accept the first draw even if no site annotates a class. If each site has only one class, there is no draw: the
    sites get the classes in turn.
    """
    if classes - missing == 1:
        return np.eye(classes, dtype=np.bool_)[np.arange(sites) % classes]
    random = Random(seed)
    for _ in range(_MAX_DRAWS):
        owned = np.zeros((sites, classes), dtype=np.bool_)
        for site in range(sites):
            owned[site, random.sample(range(classes), classes - missing)] = True
        if owned.any(axis=0).all():
            break
    return owned


def partition_by_class(splits: DatasetSplits, spec: ClassPartitionSpec, seed: int) -> tuple[SitePartition, ...]:
    """Partition the training and validation part over sites; the test part stays common to all sites.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    if spec.images == "source":
        sites = tuple(sorted(set(splits.train.sources.tolist())))
    elif isinstance(spec, ClassListsPartitionSpec):
        sites = tuple(sorted(spec.lists))
    else:
        count = len(PAPER_TABLES[spec.table][spec.row]) if isinstance(spec, PaperTablePartitionSpec) else spec.sites
        assert count is not None, "find_partition_faults has seen to it"
        sites = make_numbered_site_names("site", count)
    raise_faults(find_partition_data_faults(splits, spec, sites))
    if spec.images == "source":
        rows_by_part = [
            [np.flatnonzero(part.sources == site) for site in sites] for part in (splits.train, splits.validation)
        ]
    else:
        random = np.random.RandomState(seed % (1 << 32))
        rows_by_part = []
        for part in (splits.train, splits.validation):  # in this order, with the same generator
            abnormal = find_positive_images(part.labels)
            patients_by_site = split_patients_over_sites(part.patients, abnormal, len(sites), random, spec.size_skew)
            rows_by_part.append([np.flatnonzero(np.isin(part.patients, patients)) for patients in patients_by_site])
    rows = list(zip(*rows_by_part, strict=True))  # for each site, training and validation rows
    remedy = "Take fewer sites: abnormal and other patients are dealt apart."
    raise_faults(find_empty_site_faults(sites, [train for train, _ in rows], "training", remedy))
    positives = np.array([(splits.train.labels[train] == 1).sum(axis=0) for train, _ in rows])  # (sites, classes)
    lists = _choose_site_class_lists(
        splits.class_names, spec, sites, positives, np.random.default_rng((seed, len(sites)))
    )
    where, remedy = "partition.missing", "Take more sites, fewer missing classes, or another lists_seed."
    if isinstance(spec, ClassListsPartitionSpec):
        where = "partition.lists"
        remedy = "A site with training images has to list it; or take it out of [data], in Python out of the labels."
        if spec.images == "source":
            remedy = f"{remedy} {describe_sources_without_training(splits)}".rstrip()
    raise_faults(find_unannotated_class_faults(splits.class_names, lists, where, remedy))
    return tuple(
        SitePartition(site, tuple(sorted(lists[site])), train, validation)
        for site, (train, validation) in zip(sites, rows, strict=True)
    )


def _choose_site_class_lists(
    class_names: tuple[str, ...],
    spec: ClassPartitionSpec,
    sites: tuple[str, ...],
    positives: NDArray[np.intp],
    random: np.random.Generator,
) -> ClassLists:
    match spec:
        case ClassListsPartitionSpec():
            return {site: spec.lists[site] for site in sites}
        case PaperTablePartitionSpec():
            return dict(zip(sites, read_paper_class_lists(spec.table, spec.row), strict=True))
        case RandomOwnersPartitionSpec():
            owned = draw_random_class_owners(len(sites), len(class_names), random)
        case MissingClassesPartitionSpec():
            owned = draw_site_classes_with_missing(len(sites), len(class_names), spec.missing, spec.lists_seed)
        case ClassSubsetsPartitionSpec():
            if isinstance(spec.shared, tuple):
                shared = np.isin(class_names, spec.shared)
            else:
                shared = np.zeros(len(class_names), dtype=np.bool_)
                shared[random.permutation(len(class_names))[: spec.shared]] = True
            owned = distribute_classes_over_sites(shared, positives, spec.minimum_positives, random)
    return {
        site: tuple(name for name, has in zip(class_names, row, strict=True) if has)
        for site, row in zip(sites, owned, strict=True)
    }


def partition_dataset(splits: DatasetSplits, spec: PartitionSpec, seed: int) -> PartitionedDataset:
    """Partition a data set over simulated sites, according to its settings.

    Args:
        seed: The seed if ``spec.seed`` is None.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    seed = seed if spec.seed is None else spec.seed
    raise_faults(find_partition_faults(splits.class_names, spec))
    match spec:
        case LabelSkewPartitionSpec() | DirichletPartitionSpec():
            return partition_by_label(splits, spec, seed)
        case TaskMixturePartitionSpec():
            return partition_by_task(splits, spec)
        case _:
            parts = partition_by_class(splits, spec, seed)
            if isinstance(spec, ClassListsPartitionSpec) and spec.images == "source" and spec.test_labels == "listed":
                splits = mask_unlisted_test_labels(splits, spec.lists)
            if sentence := describe_patients_of_several_sites(splits, parts):
                splits = DatasetSplits(*(replace(images, notes=(*images.notes, sentence)) for images in splits.parts))
            empty_sites = find_sources_without_training(splits) if spec.images == "source" else ()
            undealt = describe_undealt_images(splits, parts)
            if sentence := describe_sources_without_training(splits) if empty_sites else undealt:
                sets = (replace(images, omissions=(*images.omissions, sentence)) for images in splits.parts)
                splits = DatasetSplits(*sets)
            return PartitionedDataset(splits, parts, empty_sites=empty_sites)


def find_sources_without_training(splits: DatasetSplits) -> tuple[str, ...]:
    """Return the hospitals with images of which none is for training, sorted by name."""
    trained, *others = (set(images.sources.tolist()) for images in splits.parts)
    return tuple(sorted(set().union(*others) - trained))


def describe_sources_without_training(splits: DatasetSplits) -> str:
    """Return a sentence on such hospitals: where their patients are, and what lets them train; empty without any."""
    described = list[str]()
    for site in find_sources_without_training(splits):
        parts = [
            f"{format_count_with_noun(len(np.unique(images.patients[rows])), 'patient')} for {purpose}"
            for images, purpose in ((splits.validation, "validation"), (splits.test, "the test"))
            if (rows := images.sources == site).any()
        ]
        described.append(f"{site} ({', '.join(parts)})")
    if not described:
        return ""
    return (
        "Without training images, and not in the training: "
        f"{list_first_and_count_rest(described, _MAX_CLASSES_LISTED)}. The split took all of their patients for other "
        "parts. To let them train, take another data.split_seed, or name a data.split_column that says who trains."
    )


def describe_patients_of_several_sites(splits: DatasetSplits, parts: Sequence[SitePartition]) -> str:
    """Return a warning with the number of patients who have images at several sites; empty if there are none.

    Two patients of different centres count as one patient if both centres use the same patient number.
    """
    sites = Counter[str]()
    for part in parts:
        patients_of_site = [splits.train.patients[part.train], splits.validation.patients[part.validation]]
        sites.update(np.unique(np.concatenate(patients_of_site)).tolist())
    several = [name for name, count in sites.items() if count > 1]
    if not several:
        return ""
    patients = format_count_with_noun(len(several), "patient has images", "patients have images")
    return (
        f"{patients} at several hospitals, which all train on them. If every hospital gives numbers of its own, write "
        "the hospital in front of them."
    )


def describe_undealt_images(splits: DatasetSplits, parts: Sequence[SitePartition]) -> str:
    """Return a sentence with the number of training and validation images that no site has; empty if there are none."""
    unused = [
        images.select_rows(np.setdiff1d(np.arange(len(images)), np.concatenate(rows_by_site)))
        for images, rows_by_site in (
            (splits.train, [part.train for part in parts]),
            (splits.validation, [part.validation for part in parts]),
        )
    ]
    count = sum(map(len, unused))
    if not count:
        return ""
    patients = len(np.unique(np.concatenate([images.patients for images in unused])))
    total = len(splits.train) + len(splits.validation)
    images = format_count_with_noun(count, "image")
    whose = format_count_with_noun(patients, "patient")
    verb = "falls" if count == 1 else "fall"
    return (
        f"Of {total:,} training and validation images, {images} of {whose} {verb} to no simulated hospital, and no "
        "site uses them."
    )


def mask_unlisted_test_labels(splits: DatasetSplits, lists: ClassLists) -> DatasetSplits:
    """Set the test labels of a class to unknown for images from centres whose list lacks the class.

    A centre that does not look for a class does not record it, so that its negative labels mean nothing. A note with
    the number of remaining labels is added to the images.

    Args:
        lists: Name of a centre -> the classes that it looks for.
    """
    names = splits.class_names
    test = splits.test
    sources, source_of_image = np.unique(test.sources, return_inverse=True)
    is_listed = np.array(
        [[name in lists.get(source, ()) for name in names] for source in sources.tolist()], dtype=np.bool_
    )
    is_listed = is_listed.reshape(-1, len(names))[source_of_image.reshape(-1)]  # (images, classes)
    labels = np.where(is_listed, test.labels, np.float32(np.nan))
    before = (~np.isnan(test.labels)).sum(axis=0).tolist()
    after = (~np.isnan(labels)).sum(axis=0).tolist()
    fewer = [f"{name} {count:,}" for name, count, total in zip(names, after, before, strict=True) if count < total]
    if fewer:
        note = "A class that a hospital does not list in partition.lists is unknown in its test images. Of "
        note += (
            f"{len(test):,} test images these have a label: {list_first_and_count_rest(fewer, _MAX_CLASSES_LISTED)}."
        )
        splits = DatasetSplits(*(replace(part, notes=(*part.notes, note)) for part in splits.parts))
    return replace(splits, test=replace(splits.test, labels=labels))
