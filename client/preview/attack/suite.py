"""All attacks, one after the other, each in front of its own copy of the site in a folder that is removed."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from client.preview.attack.kinds.adversary import Adversary, drawn, training_on
from client.preview.attack.kinds.attempt import Attempt
from client.preview.attack.kinds.budget import round_the_budget
from client.preview.attack.kinds.counts import from_digits, from_losses
from client.preview.attack.kinds.counts_of_updates import from_hash, from_head_rows, from_trunk
from client.preview.attack.kinds.failures import failures
from client.preview.attack.kinds.images import imprinted, inverted
from client.preview.attack.kinds.membership import by_gradient, by_likelihood
from client.preview.attack.kinds.persons import persons, sought
from client.site.site import Site
from common.config import Plan
from common.data.base.image_set import ImageSet

MOST_IMAGES = 60
"""Training images that the copy has where pictures are recovered, so that it takes seconds."""
MOST_TESTED = 1000
"""Test images that it has where persons are sought: with fewer, rare classes would be told less of than they are."""
FEW, SMALL = 16, 60
"""Images, and their side in pixels, where each image's own gradient has to be held in memory."""
MOST_PERSONS = 10
"""Pictures of each kind: of the training part, of the test part, and of neither."""
MOST_FAILED = 5
"""Pictures of each kind where each needs four requests."""

Attack = Callable[[Site, Path, Plan], Sequence[Attempt]]


def _on_images(site: Site, folder: Path, plan: Plan) -> Sequence[Attempt]:
    if site.policy.epsilon is not None:
        return [imprinted(Adversary(training_on(site, drawn(site.train, FEW)), folder, plan), SMALL)]
    return [imprinted(Adversary(training_on(site, drawn(site.train, MOST_IMAGES)), folder, plan))]


def _on_gradients(site: Site, folder: Path, plan: Plan) -> Sequence[Attempt]:
    few = training_on(site, drawn(site.train, FEW))
    return [inverted(Adversary(few, folder, plan))]


def _on_members(site: Site, folder: Path, plan: Plan) -> Sequence[Attempt]:
    members, strangers, others = by_patient(site.train, MOST_IMAGES)
    return [
        attack(
            Adversary(training_on(site, members), folder / attack.__name__, plan),
            strangers,
            Adversary(training_on(site, others), folder / attack.__name__ / "elsewhere", plan),
        )
        for attack in (by_gradient, by_likelihood)
    ]


def _on_counts(site: Site, folder: Path, plan: Plan) -> Sequence[Attempt]:
    attacks = from_losses, from_digits, from_head_rows, from_trunk, from_hash
    return [attack(Adversary(site, folder / attack.__name__, plan)) for attack in attacks]


def _on_persons(site: Site, folder: Path, plan: Plan) -> Sequence[Attempt]:
    """The copy lacks some training images: they are the pictures that are in neither part."""
    train, others = _halves(site.train, 2 * MOST_IMAGES)
    apart = ~np.isin(others.patients, train.patients)
    strangers = drawn(others.rows(np.flatnonzero(apart)), MOST_PERSONS)
    test, alike = drawn(site.test, MOST_TESTED), site.validation if len(site.validation) > FEW else others
    wanted = sought(strangers, alike, train=drawn(train, MOST_PERSONS, 1), test=drawn(test, MOST_PERSONS, 1))
    copy = replace(training_on(site, train), test=test, validation=drawn(site.validation, MOST_IMAGES))
    judged = replace(copy, train=drawn(train, FEW), test=drawn(site.test, MOST_IMAGES))
    known = sought(
        drawn(strangers, MOST_FAILED),
        others,
        **{part: drawn(getattr(judged, part), MOST_FAILED, 1) for part in ("validation", "test")},
    )
    return [
        persons(Adversary(copy, folder / "persons", plan), wanted),
        failures(Adversary(judged, folder / "failures", plan), known),
    ]


def _on_budget(site: Site, folder: Path, plan: Plan) -> Sequence[Attempt]:
    return [round_the_budget(Adversary(site, folder, plan))]


ATTACKS: tuple[Attack, ...] = (_on_images, _on_gradients, _on_members, _on_counts, _on_persons, _on_budget)


def attempts(site: Site, plan: Plan) -> Iterator[Attempt]:
    """Attack a copy of the site in every way."""
    for attack in ATTACKS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = attack(site, Path(folder), plan)
        for one in found:
            yield replace(one, seconds=(time.monotonic() - began) / len(found))


def _halves(images: ImageSet, most: int) -> tuple[ImageSet, ImageSet]:
    """Training images that the copy is given, and as many that it is not."""
    chosen = drawn(images, most)
    shuffled = np.random.default_rng(6).permutation(len(chosen))
    half = len(chosen) // 2
    return chosen.rows(np.sort(shuffled[:half])), chosen.rows(np.sort(shuffled[half:]))


def by_patient(images: ImageSet, most: int) -> list[ImageSet]:
    """Draw three sets of at most so many images; no patient is in two of them, and each has as few there as it can."""
    patients, whose = np.unique(images.patients, return_inverse=True)
    order = np.random.default_rng(7).permutation(len(patients))[whose]
    seen, earlier = Counter[int](), []
    for patient in whose.tolist():
        earlier.append(seen[patient])  # images of the same patient before this one
        seen[patient] += 1
    rows = np.lexsort((order, np.array(earlier)))
    return [images.rows(np.sort(rows[order[rows] % 3 == part][:most])) for part in range(3)]
