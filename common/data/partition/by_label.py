"""Sites that annotate the same classes and hold different numbers of images of each.

After Luo & Wu, "FedSLD", 2021; where it is silent (the seed, each site's test images, what is held out), after the
same authors' APPLE code of the same two settings. Train and test part are dealt by the same shares. We deal patients
where they deal images, a patient by the class of its first image.
"""

import numpy as np

from common.data.base.image_set import Splits
from common.data.partition.division import Division, Rows, SitePart, gathered, numbered, without_notes
from common.data.partition.label_shares import (
    Ends,
    Random,
    Shares,
    all_dealt,
    dealt,
    pathological_shares,
    practical_shares,
    rest_dropped,
)
from common.data.partition.site_checks import empty_faults, several_class_faults
from common.data.partition.spec import DirichletSpec, LabelPartitionSpec
from common.data.splits.patients import patients_of
from common.errors import stop_on


def by_labels(splits: Splits, spec: LabelPartitionSpec, seed: int) -> Division:
    """Deal the train and the test part; the validation part becomes what is held out of the sites' training images.

    Raises:
        BadInput: If images have several classes, or a site would have no image to train or to test on.
    """
    stop_on([*several_class_faults("training", splits.train), *several_class_faults("test", splits.test)])
    random, shares, ends = _rule(spec, len(splits.class_names), seed)
    patients = (patients_of(splits.train), patients_of(splits.test))
    hands, tests = (dealt(part.classes, shares, ends, random) for part in patients)
    sites, remedy = numbered("site", spec.sites), "Take fewer sites, more images, another seed, or more even shares."
    stop_on([*empty_faults(sites, hands, "training", remedy), *empty_faults(sites, tests, "test", remedy)])
    held = [random.permutation(hand)[: int(spec.validation_fraction * len(hand))] for hand in hands]
    train = [patients[0].rows(np.setdiff1d(hand, out)) for hand, out in zip(hands, held, strict=True)]
    validation = [patients[0].rows(out) for out in held]
    return _division(splits, sites, (train, validation, [patients[1].rows(test) for test in tests]))


def _rule(spec: LabelPartitionSpec, classes: int, seed: int) -> tuple[Random, Shares, Ends]:
    if isinstance(spec, DirichletSpec):
        generator = np.random.default_rng(seed)
        return generator, generator.dirichlet(np.full(spec.sites, spec.alpha), classes), all_dealt
    random = np.random.RandomState(seed % (1 << 32))
    draw = practical_shares if spec.shards == "practical" else pathological_shares
    return random, draw(classes, spec.sites, random), rest_dropped


def _division(splits: Splits, sites: tuple[str, ...], hands: tuple[list[Rows], list[Rows], list[Rows]]) -> Division:
    """Cut the train part anew; the test part stays whole, also where rounding leaves some of it to no site."""
    train, train_rows = gathered(splits.train, hands[0])
    validation, validation_rows = gathered(without_notes(splits.train), hands[1])
    names = tuple(sorted(splits.class_names))
    rows = zip(sites, train_rows, validation_rows, hands[2], strict=True)
    return Division(Splits(train, validation, splits.test), tuple(SitePart(site, names, *own) for site, *own in rows))
