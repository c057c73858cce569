"""Sites that annotate the same classes and hold different numbers of images of each.

After Luo & Wu, "FedSLD", 2021; where it is silent (the seed, each site's test images, what is held out), after the
same authors' APPLE code of the same two settings. Train and test part are dealt by the same shares. We deal patients
where they deal images, a patient by the class of its first image.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import Splits
from common.data.base.splits import patients_of
from common.data.partition.checks import empty_faults, several_class_faults
from common.data.partition.division import Division, SitePart, gathered, numbered, without_notes
from common.data.partition.spec import DirichletSpec, LabelPartitionSpec
from common.errors import stop_on

Shares = NDArray[np.float64]
Ends = Callable[[Shares, int], NDArray[np.intp]]
Random = np.random.RandomState | np.random.Generator


def practical_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Give of each class 80 % to one site, 10 % to another, 1 % to each other; one list is shuffled on and on."""
    share = np.array([0.01] * (sites - 2) + [0.1, 0.8])
    rows = []
    for _ in range(classes):
        random.shuffle(share)
        rows.append(share.copy())
    return np.stack(rows)


def pathological_shares(classes: int, sites: int, random: np.random.RandomState) -> Shares:
    """Give each site two classes from shuffled decks of all classes, and each class in random shares to its owners.

    Where a site's two come from different decks they may be the same class; then it has one.
    """
    decks = [random.permutation(classes) for _ in range(2 * sites // classes + 1)]
    pairs = np.concatenate(decks)[: 2 * sites].reshape(sites, 2)
    shares = np.zeros((classes, sites))
    for column in range(classes):
        owners = np.flatnonzero((pairs == column).any(axis=1))
        drawn = random.rand(len(owners))
        shares[column, owners] = drawn / drawn.sum()
    return shares


def rest_dropped(share: Shares, count: int) -> NDArray[np.intp]:
    """Return where each site's hand of ``count`` ends; each is rounded down, and what that leaves is nobody's."""
    return np.cumsum((share * count).astype(np.intp))


def all_dealt(share: Shares, count: int) -> NDArray[np.intp]:
    """Return where each site's hand of ``count`` ends; the last ends with the last."""
    ends = (np.cumsum(share) * count).astype(np.intp)
    ends[-1] = count
    return ends


def dealt(classes: NDArray[np.intp], shares: Shares, ends: Ends, random: Random) -> list[NDArray[np.intp]]:
    """Deal what is of the given classes ``(n,)``, class after class, each shuffled; return numbers at each site."""
    hands = []
    for column, share in enumerate(shares):
        members = random.permutation(np.flatnonzero(classes == column))
        hands.append(np.split(members, ends(share, len(members)))[:-1])
    return [np.concatenate(hand) for hand in zip(*hands, strict=True)]


def by_labels(splits: Splits, spec: LabelPartitionSpec, seed: int) -> Division:
    """Deal the train and the test part; the validation part becomes what is held out of the sites' training images.

    Raises:
        BadInput: If images have several classes, or a site would have no image to train or to test on.
    """
    stop_on([*several_class_faults("training", splits.train), *several_class_faults("test", splits.test)])
    classes = len(splits.class_names)
    random: Random
    if isinstance(spec, DirichletSpec):
        random = generator = np.random.default_rng(seed)
        shares, ends = generator.dirichlet(np.full(spec.sites, spec.alpha), classes), all_dealt
    else:
        random = legacy = np.random.RandomState(seed % (1 << 32))
        draw = practical_shares if spec.shards == "practical" else pathological_shares
        shares, ends = draw(classes, spec.sites, legacy), rest_dropped
    patients = (patients_of(splits.train), patients_of(splits.test))
    hands, tests = (dealt(part.classes, shares, ends, random) for part in patients)
    sites, remedy = numbered("site", spec.sites), "Take fewer sites, more images, another seed, or more even shares."
    stop_on([*empty_faults(sites, hands, "training", remedy), *empty_faults(sites, tests, "test", remedy)])
    held = [random.permutation(hand)[: int(spec.validation_fraction * len(hand))] for hand in hands]
    kept = [patients[0].rows(np.setdiff1d(hand, out)) for hand, out in zip(hands, held, strict=True)]
    train, train_rows = gathered(splits.train, kept)
    validation, validation_rows = gathered(without_notes(splits.train), [patients[0].rows(out) for out in held])
    # The test part stays whole, also where rounding leaves some of it to no site.
    test_rows = [patients[1].rows(test) for test in tests]
    names = tuple(sorted(splits.class_names))
    rows = zip(sites, train_rows, validation_rows, test_rows, strict=True)
    return Division(Splits(train, validation, splits.test), tuple(SitePart(site, names, *own) for site, *own in rows))
