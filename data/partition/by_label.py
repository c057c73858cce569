"""Partition with label skew: all sites annotate the same classes, but have different numbers of images of each class.

After Luo & Wu, "FedSLD", 2021. Details that the paper does not give (the seed, each site's test images, the validation
part) follow the APPLE code of the same authors. The training and test parts use the same proportions. Departure: we
distribute patients instead of images, and the class of a patient is that of the patient's first image.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import raise_faults
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.splits import PatientIndex
from polyclinic.data.partition.checks import find_empty_site_faults, find_multi_class_image_faults
from polyclinic.data.partition.division import (
    PartitionedDataset,
    SitePartition,
    drop_skipped_images_list,
    gather_site_images,
    make_numbered_site_names,
)
from polyclinic.data.partition.spec import DirichletPartitionSpec, LabelPartitionSpec

_MOST_NAMED = 5
Shares = NDArray[np.float64]
ComputeShareEnds = Callable[[Shares, int], NDArray[np.intp]]
RandomGenerator = np.random.RandomState | np.random.Generator


def draw_practical_label_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Draw proportions ``(classes, sites)``: for each class, one site gets 80 %, one 10 %, and all others 1 %."""
    shares = np.array([0.01] * (sites - 2) + [0.1, 0.8])
    rows = []
    for _ in range(classes):  # as in the authors' code, the shuffled list is shuffled again
        random.shuffle(shares)
        rows.append(shares.copy())
    return np.stack(rows)


def draw_pathological_label_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Draw proportions ``(classes, sites)`` in which each site has two classes, with random shares per class.

    Shuffled lists of all classes are concatenated, and each site takes the next two entries. A site whose entries come
    from two lists may get the same class twice, and then has only one class.
    """
    shuffled_lists = [random.permutation(classes) for _ in range(2 * sites // classes + 1)]
    pairs = np.concatenate(shuffled_lists)[: 2 * sites].reshape(sites, 2)
    shares = np.zeros((classes, sites))
    for column in range(classes):
        owners = np.flatnonzero((pairs == column).any(axis=1))
        drawn = random.rand(len(owners))
        shares[column, owners] = drawn / drawn.sum()
    return shares


def compute_rounded_down_share_ends(share: Shares, count: int) -> NDArray[np.intp]:
    """Return the end index of each site's slice of ``count`` patients, ``(sites,)``.

    The sizes of the slices are rounded down, so that a few patients may be left over.

    Args:
        share: ``(sites,)``, the proportion of each site.
    """
    return np.cumsum((share * count).astype(np.intp))


def compute_share_ends_without_rest(share: Shares, count: int) -> NDArray[np.intp]:
    """Return the end index of each site's slice of ``count`` patients, ``(sites,)``.

    The last slice ends at ``count``, so that no patient is left over.

    Args:
        share: ``(sites,)``, the proportion of each site.
    """
    ends = (np.cumsum(share) * count).astype(np.intp)
    ends[-1] = count
    return ends


def distribute_patients_by_class(
    classes: NDArray[np.intp], shares: Shares, compute_ends: ComputeShareEnds, random: RandomGenerator
) -> list[NDArray[np.intp]]:
    """Distribute the shuffled patients of each class over sites, in the proportions ``shares`` ``(classes, sites)``.

    Args:
        classes: ``(n,)`` class of each patient.
        compute_ends: :func:`compute_rounded_down_share_ends` or :func:`compute_share_ends_without_rest`.

    Returns:
        The patient numbers of each site.
    """
    slices_by_class = []
    for column, share in enumerate(shares):
        members = random.permutation(np.flatnonzero(classes == column))
        slices_by_class.append(np.split(members, compute_ends(share, len(members)))[:-1])
    return [np.concatenate(slices) for slices in zip(*slices_by_class, strict=True)]


def partition_by_label(splits: DatasetSplits, spec: LabelPartitionSpec, seed: int) -> PartitionedDataset:
    """Partition the training and test part over sites; validation images are held out of each site's training images.

    With Dirichlet proportions, a site may get no images. A site without training images is left out. A site without
    test images is not tested.

    Raises:
        BadInput: If an image does not have exactly one class; or if, with other proportions, a site gets no training or
            no test image.
    """
    raise_faults(
        [*find_multi_class_image_faults("training", splits.train), *find_multi_class_image_faults("test", splits.test)]
    )
    classes = len(splits.class_names)
    random: RandomGenerator
    if isinstance(spec, DirichletPartitionSpec):
        random = generator = np.random.default_rng(seed)
        shares = generator.dirichlet(np.full(spec.sites, spec.alpha), classes)
        compute_ends = compute_share_ends_without_rest
    else:
        random = legacy = np.random.RandomState(seed % (1 << 32))
        draw_shares = draw_practical_label_shares if spec.shards == "practical" else draw_pathological_label_shares
        shares = draw_shares(classes, spec.sites, legacy)
        compute_ends = compute_rounded_down_share_ends

    # Patient numbers of each site.
    train_patients = PatientIndex.number_patients(splits.train)
    test_patients = PatientIndex.number_patients(splits.test)
    train_by_site = distribute_patients_by_class(train_patients.classes, shares, compute_ends, random)
    test_by_site = distribute_patients_by_class(test_patients.classes, shares, compute_ends, random)

    sites = make_numbered_site_names("site", spec.sites)
    remedy = "Take fewer sites, more images, another seed, or more even shares."
    empty_sites = tuple(site for site, numbers in zip(sites, train_by_site, strict=True) if not len(numbers))
    if isinstance(spec, DirichletPartitionSpec) and len(empty_sites) < len(sites):
        indices = [index for index, numbers in enumerate(train_by_site) if len(numbers)]
        sites = tuple(sites[index] for index in indices)
        train_by_site = [train_by_site[index] for index in indices]
        test_by_site = [test_by_site[index] for index in indices]
    else:
        faults = find_empty_site_faults(sites, train_by_site, "training", remedy)
        raise_faults(faults + find_empty_site_faults(sites, test_by_site, "test", remedy))

    held_out = [
        random.permutation(numbers)[: int(spec.validation_fraction * len(numbers))] for numbers in train_by_site
    ]
    rest = [np.setdiff1d(numbers, out) for numbers, out in zip(train_by_site, held_out, strict=True)]
    train, train_rows = gather_site_images(splits.train, list(map(train_patients.list_rows_of_patients, rest)))
    validation, validation_rows = gather_site_images(
        drop_skipped_images_list(splits.train), list(map(train_patients.list_rows_of_patients, held_out))
    )
    # The test part stays complete, even if rounding gives some images to no site.
    test_rows = map(test_patients.list_rows_of_patients, test_by_site)
    names = tuple(sorted(splits.class_names))
    rows = zip(sites, train_rows, validation_rows, test_rows, strict=True)
    parts = tuple(SitePartition(site, names, *site_rows) for site, *site_rows in rows)
    if empty_sites:
        empty = list_first_and_count_rest(empty_sites, _MOST_NAMED)
        sentence = f"Without training images, and not in the run: {empty}. The drawn proportions gave them none."
        train, validation, test = (
            replace(images, omissions=(*images.omissions, sentence)) for images in (train, validation, splits.test)
        )
        return PartitionedDataset(DatasetSplits(train, validation, test), parts, empty_sites=empty_sites)
    return PartitionedDataset(DatasetSplits(train, validation, splits.test), parts)
