"""Sites that annotate the same classes and hold different numbers of images of each.

After Luo & Wu, "FedSLD", 2021; where it is silent (the seed, each site's test images, what is held out), after the
same authors' APPLE code of the same two settings. Train and test part are dealt by the same shares. We deal patients
where they deal images, a patient by the class of its first image.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import Splits
from common.data.base.splits import PatientIndex
from common.data.partition.checks import empty_site_faults, several_class_faults
from common.data.partition.division import (
    PartitionedDataset,
    SitePartition,
    gather_site_images,
    site_names,
    without_skipped_list,
)
from common.data.partition.spec import DirichletSpec, LabelPartitionSpec
from common.errors import raise_faults

Shares = NDArray[np.float64]
Ends = Callable[[Shares, int], NDArray[np.intp]]
Random = np.random.RandomState | np.random.Generator


def practical_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Draw shares ``(classes, sites)``: of each class one site has 80 %, another 10 %, each other 1 %."""
    share = np.array([0.01] * (sites - 2) + [0.1, 0.8])
    rows = []
    for _ in range(classes):  # as the authors do: the list that was shuffled is shuffled again
        random.shuffle(share)
        rows.append(share.copy())
    return np.stack(rows)


def pathological_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Draw shares ``(classes, sites)``: each site has two classes, and each class is in random shares at its owners.

    The classes are dealt like cards, two a site, from a shuffled list of all classes that begins anew at its end. A
    site whose two classes come from two lists may get the same class twice, and then has one.
    """
    decks = [random.permutation(classes) for _ in range(2 * sites // classes + 1)]
    pairs = np.concatenate(decks)[: 2 * sites].reshape(sites, 2)
    shares = np.zeros((classes, sites))
    for column in range(classes):
        owners = np.flatnonzero((pairs == column).any(axis=1))
        drawn = random.rand(len(owners))
        shares[column, owners] = drawn / drawn.sum()
    return shares


def ends_rounded_down(share: Shares, count: int) -> NDArray[np.intp]:
    """Return where each site's part of ``count`` patients ends, with parts rounded down; no site gets the remainder."""
    return np.cumsum((share * count).astype(np.intp))


def part_ends_without_remainder(share: Shares, count: int) -> NDArray[np.intp]:
    """Return where each site's part of ``count`` patients ends; the last part ends at ``count``: no patient remains."""
    ends = (np.cumsum(share) * count).astype(np.intp)
    ends[-1] = count
    return ends


def distribute_patients(
    classes: NDArray[np.intp], shares: Shares, ends: Ends, random: Random
) -> list[NDArray[np.intp]]:
    """Deal patients to sites, class after class, each class shuffled.

    Args:
        classes: ``(n,)`` class of each patient.
        shares: ``(classes, sites)``.
        ends: :func:`ends_rounded_down` or :func:`part_ends_without_remainder`.

    Returns:
        The numbers of the patients of each site.
    """
    of_classes = []
    for column, share in enumerate(shares):
        members = random.permutation(np.flatnonzero(classes == column))
        of_classes.append(np.split(members, ends(share, len(members)))[:-1])
    return [np.concatenate(of_site) for of_site in zip(*of_classes, strict=True)]


def partition_by_label(splits: Splits, spec: LabelPartitionSpec, seed: int) -> PartitionedDataset:
    """Deal the train and the test part; the validation part is held out of the sites' training images.

    A Dirichlet deal may give a site nothing: without training images it is no site of the division, and without test
    images it is not tested.

    Raises:
        BadInput: If images have several classes, or a site of another deal would have no image to train or to test on.
    """
    raise_faults([*several_class_faults("training", splits.train), *several_class_faults("test", splits.test)])
    classes = len(splits.class_names)
    random: Random
    if isinstance(spec, DirichletSpec):
        random = generator = np.random.default_rng(seed)
        shares, ends = generator.dirichlet(np.full(spec.sites, spec.alpha), classes), part_ends_without_remainder
    else:
        random = legacy = np.random.RandomState(seed % (1 << 32))
        draw = practical_shares if spec.shards == "practical" else pathological_shares
        shares, ends = draw(classes, spec.sites, legacy), ends_rounded_down
    train_patients, test_patients = PatientIndex.of(splits.train), PatientIndex.of(splits.test)
    trains, tests = (
        distribute_patients(part.classes, shares, ends, random) for part in (train_patients, test_patients)
    )
    sites, remedy = site_names("site", spec.sites), "Take fewer sites, more images, another seed, or more even shares."
    empty_sites = tuple(site for site, of_site in zip(sites, trains, strict=True) if not len(of_site))
    if isinstance(spec, DirichletSpec) and len(empty_sites) < len(sites):
        dealt = [place for place, of_site in enumerate(trains) if len(of_site)]
        sites = tuple(sites[place] for place in dealt)
        trains, tests = [trains[place] for place in dealt], [tests[place] for place in dealt]
    else:
        faults = empty_site_faults(sites, trains, "training", remedy)
        raise_faults(faults + empty_site_faults(sites, tests, "test", remedy))
    held_out = [random.permutation(of_site)[: int(spec.validation_fraction * len(of_site))] for of_site in trains]
    rest = [np.setdiff1d(of_site, out) for of_site, out in zip(trains, held_out, strict=True)]
    train, train_rows = gather_site_images(splits.train, [train_patients.rows_of_patients(of_site) for of_site in rest])
    validation_rows = [train_patients.rows_of_patients(of_site) for of_site in held_out]
    validation, validation_rows = gather_site_images(without_skipped_list(splits.train), validation_rows)
    # The test part stays whole, also where rounding leaves some of it to no site.
    test_rows = [test_patients.rows_of_patients(of_site) for of_site in tests]
    names = tuple(sorted(splits.class_names))
    rows = zip(sites, train_rows, validation_rows, test_rows, strict=True)
    parts = tuple(SitePartition(site, names, *of_site) for site, *of_site in rows)
    return PartitionedDataset(Splits(train, validation, splits.test), parts, empty_sites=empty_sites)
