"""Partition with label skew: all sites annotate the same classes, but hold different numbers of images of each.

After Luo & Wu, "FedSLD", 2021. What the paper does not say (the seed, each site's test images, the validation part)
follows the same authors' APPLE code. The training and test parts use the same proportions. Departure: we distribute
patients instead of images, and the first image of a patient decides the patient's class.
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
Ends = Callable[[Shares, int], NDArray[np.intp]]
Random = np.random.RandomState | np.random.Generator


def draw_practical_label_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Draw proportions ``(classes, sites)``: of each class one site gets 80 %, another 10 %, and the rest 1 % each."""
    share = np.array([0.01] * (sites - 2) + [0.1, 0.8])
    rows = []
    for _ in range(classes):  # as in the authors' code, the shuffled list is shuffled again
        random.shuffle(share)
        rows.append(share.copy())
    return np.stack(rows)


def draw_pathological_label_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Draw proportions ``(classes, sites)`` in which each site has two classes, with random shares per class.

    The classes come from shuffled lists of all classes, one list after the other, two classes per site. A site whose
    two classes come from different lists may get the same class twice, and then has only one.
    """
    decks = [random.permutation(classes) for _ in range(2 * sites // classes + 1)]
    pairs = np.concatenate(decks)[: 2 * sites].reshape(sites, 2)
    shares = np.zeros((classes, sites))
    for column in range(classes):
        owners = np.flatnonzero((pairs == column).any(axis=1))
        drawn = random.rand(len(owners))
        shares[column, owners] = drawn / drawn.sum()
    return shares


def compute_rounded_down_share_ends(share: Shares, count: int) -> NDArray[np.intp]:
    """Return where each site's slice of ``count`` patients ends; sizes are rounded down, so some may be left over.

    Args:
        share: ``(sites,)``, the proportion of each site.
    """
    return np.cumsum((share * count).astype(np.intp))


def compute_share_ends_without_rest(share: Shares, count: int) -> NDArray[np.intp]:
    """Return where each site's slice of ``count`` patients ends; the last ends at ``count``, so none is left over.

    Args:
        share: ``(sites,)``, the proportion of each site.
    """
    ends = (np.cumsum(share) * count).astype(np.intp)
    ends[-1] = count
    return ends


def distribute_patients_by_class(
    classes: NDArray[np.intp], shares: Shares, ends: Ends, random: Random
) -> list[NDArray[np.intp]]:
    """Distribute the shuffled patients of each class over sites, in the proportions ``shares`` ``(classes, sites)``.

    Args:
        classes: ``(n,)`` class of each patient.
        ends: Computes where each site's slice of a class ends: :func:`compute_rounded_down_share_ends` or
            :func:`compute_share_ends_without_rest`.

    Returns:
        The patient numbers of each site.
    """
    of_classes = []
    for column, share in enumerate(shares):
        members = random.permutation(np.flatnonzero(classes == column))
        of_classes.append(np.split(members, ends(share, len(members)))[:-1])
    return [np.concatenate(of_site) for of_site in zip(*of_classes, strict=True)]


def partition_by_label(splits: DatasetSplits, spec: LabelPartitionSpec, seed: int) -> PartitionedDataset:
    """Partition the training and test part over sites; validation images are held out of each site's training images.

    With Dirichlet proportions a site may get nothing: without training images it is left out, and without test images
    it is not tested.

    Raises:
        BadInput: If an image does not have exactly one class; or if, with other proportions, a site gets no training or
            no test image.
    """
    raise_faults(
        [*find_multi_class_image_faults("training", splits.train), *find_multi_class_image_faults("test", splits.test)]
    )
    classes = len(splits.class_names)
    random: Random
    if isinstance(spec, DirichletPartitionSpec):
        random = generator = np.random.default_rng(seed)
        shares, ends = generator.dirichlet(np.full(spec.sites, spec.alpha), classes), compute_share_ends_without_rest
    else:
        random = legacy = np.random.RandomState(seed % (1 << 32))
        draw = draw_practical_label_shares if spec.shards == "practical" else draw_pathological_label_shares
        shares, ends = draw(classes, spec.sites, legacy), compute_rounded_down_share_ends
    train_patients, test_patients = (
        PatientIndex.number_patients(splits.train),
        PatientIndex.number_patients(splits.test),
    )
    trains, tests = (
        distribute_patients_by_class(part.classes, shares, ends, random) for part in (train_patients, test_patients)
    )
    sites = make_numbered_site_names("site", spec.sites)
    remedy = "Take fewer sites, more images, another seed, or more even shares."
    empty_sites = tuple(site for site, of_site in zip(sites, trains, strict=True) if not len(of_site))
    if isinstance(spec, DirichletPartitionSpec) and len(empty_sites) < len(sites):
        dealt = [place for place, of_site in enumerate(trains) if len(of_site)]
        sites = tuple(sites[place] for place in dealt)
        trains, tests = [trains[place] for place in dealt], [tests[place] for place in dealt]
    else:
        faults = find_empty_site_faults(sites, trains, "training", remedy)
        raise_faults(faults + find_empty_site_faults(sites, tests, "test", remedy))
    held_out = [random.permutation(of_site)[: int(spec.validation_fraction * len(of_site))] for of_site in trains]
    rest = [np.setdiff1d(of_site, out) for of_site, out in zip(trains, held_out, strict=True)]
    train, train_rows = gather_site_images(splits.train, list(map(train_patients.list_rows_of_patients, rest)))
    validation, validation_rows = gather_site_images(
        drop_skipped_images_list(splits.train), list(map(train_patients.list_rows_of_patients, held_out))
    )
    # The test part stays complete, even if rounding gives some images to no site.
    test_rows = map(test_patients.list_rows_of_patients, tests)
    names = tuple(sorted(splits.class_names))
    rows = zip(sites, train_rows, validation_rows, test_rows, strict=True)
    parts = tuple(SitePartition(site, names, *of_site) for site, *of_site in rows)
    if empty_sites:
        empty = list_first_and_count_rest(empty_sites, _MOST_NAMED)
        sentence = f"Without training images, and not in the run: {empty}. The drawn proportions gave them none."
        train, validation, test = (
            replace(images, omissions=(*images.omissions, sentence)) for images in (train, validation, splits.test)
        )
        return PartitionedDataset(DatasetSplits(train, validation, test), parts, empty_sites=empty_sites)
    return PartitionedDataset(DatasetSplits(train, validation, splits.test), parts)
