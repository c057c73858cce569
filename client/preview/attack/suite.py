"""The suite of all attacks, each against its own copy of the site, and the page of their results.

The copy's folder is removed afterwards. The page has figures and patients' pictures, for this hospital only.
"""

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from polyclinic.client.preview.attack import coverage
from polyclinic.client.preview.attack.adversary import (
    Adversary,
    AttackResult,
    copy_site_with_images,
    draw_random_images,
)
from polyclinic.client.preview.attack.counts import (
    bypass_privacy_budget,
    infer_counts_from_hash,
    infer_counts_from_head,
    infer_counts_from_losses,
    infer_counts_from_score_digits,
    infer_counts_from_trunk,
)
from polyclinic.client.preview.attack.images import attack_by_imprinting, invert_gradients
from polyclinic.client.preview.attack.membership import infer_membership_by_lira, infer_membership_by_matched_filter
from polyclinic.client.preview.attack.patients import (
    infer_parts_by_failing_model,
    infer_parts_of_pictures,
    join_pictures_of_parts,
)
from polyclinic.client.site.site import Site
from polyclinic.common import __version__
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import make_jinja_environment
from polyclinic.data.base.image_set import ImageSet

MOST_IMAGES = 60
"""Training images of the copy in attacks that recover pictures, so that an attack takes seconds."""
MOST_TESTED = 1000
"""Test images of the copy in the search for pictures; with fewer images, more rare classes would be hidden."""
FEW = 16
"""Number of images in attacks that hold each image's own gradient in memory."""
MOST_PERSONS = 10
"""Pictures of the training part, of the test part and of neither: this many of each."""
MOST_FAILED = 5
"""Pictures of each part in the attack that needs four requests for each picture."""

Attack = Callable[[Site, Path, HospitalPlan], AttackResult]
"""Function that attacks a copy of the site in a folder of its own, under the plan that the hospital was sent."""


def _make_membership_attack(attack: Callable[[Adversary, ImageSet, Adversary], AttackResult]) -> Attack:
    def attack_patient_disjoint_copies(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
        members, strangers, others = draw_patient_disjoint_sets(site.train, MOST_IMAGES)
        elsewhere = Adversary(copy_site_with_images(site, train=others), folder / "elsewhere", plan)
        return attack(Adversary(copy_site_with_images(site, train=members), folder, plan), strangers, elsewhere)

    return attack_patient_disjoint_copies


def _make_site_attack(
    attack: Callable[[Adversary], AttackResult], most: int | None = None, with_budget: int | None = None
) -> Attack:
    """Make an attack that runs on a copy of the site with at most ``most`` training images; None for all.

    Args:
        with_budget: Most training images at a site with a privacy budget; None for ``most``.
    """

    def attack_site_copy(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
        limit = most if site.policy.epsilon is None else with_budget or most
        copy = site if limit is None else copy_site_with_images(site, train=draw_random_images(site.train, limit))
        return attack(Adversary(copy, folder, plan))

    return attack_site_copy


def _attack_by_locating_pictures(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
    train, others, strangers = _split_training_images_in_halves(site)
    test = draw_random_images(site.test, MOST_TESTED)
    alike = site.validation if len(site.validation) > FEW else others
    parts = {"train": draw_random_images(train, MOST_PERSONS, 1), "test": draw_random_images(test, MOST_PERSONS, 1)}
    copy = copy_site_with_images(
        site, train=train, test=test, validation=draw_random_images(site.validation, MOST_IMAGES)
    )
    return infer_parts_of_pictures(Adversary(copy, folder, plan), join_pictures_of_parts(strangers, alike, **parts))


def _attack_by_failing_models(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
    train, others, strangers = _split_training_images_in_halves(site)
    validation = draw_random_images(site.validation, MOST_IMAGES)
    test = draw_random_images(site.test, MOST_IMAGES)
    parts = {
        "validation": draw_random_images(validation, MOST_FAILED, 1),
        "test": draw_random_images(test, MOST_FAILED, 1),
    }
    copy = copy_site_with_images(site, train=draw_random_images(train, FEW), validation=validation, test=test)
    return infer_parts_by_failing_model(
        Adversary(copy, folder, plan),
        join_pictures_of_parts(draw_random_images(strangers, MOST_FAILED), others, **parts),
    )


ATTACKS: Mapping[str, Attack] = {
    coverage.IMPRINT: _make_site_attack(attack_by_imprinting, MOST_IMAGES, FEW),
    coverage.INVERSION: _make_site_attack(invert_gradients, FEW),
    coverage.MATCHED: _make_membership_attack(infer_membership_by_matched_filter),
    coverage.LIRA: _make_membership_attack(infer_membership_by_lira),
    coverage.LOSSES: _make_site_attack(infer_counts_from_losses),
    coverage.DIGITS: _make_site_attack(infer_counts_from_score_digits),
    coverage.ROWS: _make_site_attack(infer_counts_from_head),
    coverage.TRUNK: _make_site_attack(infer_counts_from_trunk),
    coverage.HASHES: _make_site_attack(infer_counts_from_hash),
    coverage.PERSONS: _attack_by_locating_pictures,
    coverage.FAILURES: _attack_by_failing_models,
    coverage.BUDGET: _make_site_attack(bypass_privacy_budget),
}
"""All attacks by name, in the order of the page."""


def run_attacks(site: Site, plan: HospitalPlan) -> Iterator[AttackResult]:
    """Yield the result of every attack, each against a new copy of the site.

    Raises:
        BadInput: If the site has volumes: the attacks craft networks of pictures.
    """
    if site.train.stored.ndim == 5:
        problem = "the images of this site are volumes, and the attacks craft networks of pictures."
        remedy = "What leaves this site: flwr-client preview without --attack. What noise hides: docs/privacy.md."
        raise BadInput([Fault("--attack", problem, remedy)])
    for attack in ATTACKS.values():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            attempt = attack(site, Path(folder), plan)
        yield replace(attempt, seconds=time.monotonic() - began)


def _split_training_images_in_halves(site: Site) -> tuple[ImageSet, ImageSet, ImageSet]:
    """Divide training images of the site at random into two halves; the attacked copy is to train on the first only.

    Returns:
        The first half, the second half, and images of the second half whose patients have no image in the first.
    """
    chosen = draw_random_images(site.train, 2 * MOST_IMAGES)
    shuffled = np.random.default_rng(6).permutation(len(chosen))
    half = len(chosen) // 2
    train = chosen.select_rows(np.sort(shuffled[:half]))
    others = chosen.select_rows(np.sort(shuffled[half:]))
    apart = ~np.isin(others.patients, train.patients)
    return train, others, draw_random_images(others.select_rows(np.flatnonzero(apart)), MOST_PERSONS)


def draw_patient_disjoint_sets(images: ImageSet, most: int) -> list[ImageSet]:
    """Draw three sets of at most ``most`` images that share no patient, with as few images of a patient as possible."""
    patients, whose = np.unique(images.patients, return_inverse=True)
    order = np.random.default_rng(7).permutation(len(patients))[whose]
    counts = Counter[int]()
    earlier = []
    for patient in whose.tolist():
        earlier.append(counts[patient])  # images of the same patient before this one
        counts[patient] += 1
    rows = np.lexsort((order, np.array(earlier)))
    return [images.select_rows(np.sort(rows[order[rows] % 3 == part][:most])) for part in range(3)]


# ---------------------------------------------------------------------- the page

_FIGURES = ("name", "tried", "recovered", "of", "things", "by_chance", "stops", "declined")


def attack_results_as_json(site: Site, plan: HospitalPlan, attempts: Sequence[AttackResult]) -> dict[str, Any]:
    """Return the results of all attacks for JSON, without pictures."""
    return {
        "site": site.name,
        "version": __version__,
        "level": site.policy.level,
        "policy": site.policy.model_dump(mode="json"),
        "method": plan.run.method,
        "attacks": [
            {
                **{name: getattr(attempt, name) for name in _FIGURES},
                "notes": list(attempt.notes),
                "refusals": list(attempt.response.refusals),
                "seconds": round(attempt.seconds, 1),
            }
            for attempt in attempts
        ],
        "fields": {record: _attack_coverage_as_json(fields) for record, fields in coverage.BY_FIELD.items()},
        "statistics": _attack_coverage_as_json(coverage.BY_STATISTIC),
        "not_tried": list(coverage.UNTRIED_ATTACKS),
    }


def _attack_coverage_as_json(fields: Mapping[str, coverage.Covered]) -> dict[str, Any]:
    return {
        name: {"attacks": list(covered)} if isinstance(covered, tuple) else {"reason": covered}
        for name, covered in fields.items()
    }


def write_attack_page(site: Site, plan: HospitalPlan, attempts: Sequence[AttackResult], out: Path) -> Path:
    """Write the page of results, with read permission for its owner only, because it shows patients' images."""
    environment = make_jinja_environment(Path(__file__).parent)
    # Text in backquotes is marked as code.
    environment.globals.update(code=lambda text: Markup(re.sub("`(.*?)`", r"<code>\1</code>", escape(text))))
    template = environment.get_template("attack.html.j2")
    text = template.render(
        site=site.name, level=site.policy.level, plan=plan, attempts=attempts, not_tried=coverage.UNTRIED_ATTACKS
    )
    write_atomically(out, text.encode(), private=True)
    return out
