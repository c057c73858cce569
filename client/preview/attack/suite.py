"""The suite of all attacks, each against a new copy of the site, and the page of their results.

The copy's folder is removed afterwards. The page shows figures and pictures of patients, for this hospital only.
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

MAX_TRAINING_IMAGES = 60
"""Maximum number of training images of the copy in attacks that recover pictures, so that an attack takes seconds."""
MAX_TEST_IMAGES = 1000
"""Maximum number of test images of the copy in the search for pictures; with fewer, more classes would be hidden."""
MAX_GRADIENT_IMAGES = 16
"""Maximum number of images in attacks that keep each image's gradient in memory."""
MAX_LOCATED_PICTURES = 10
"""Number of pictures of the training part, of the test part, and of neither, in the attack on single patients."""
MAX_PROBED_PICTURES = 5
"""Number of pictures of each part in the attack with failing models, which sends four requests for each picture."""

Attack = Callable[[Site, Path, HospitalPlan], AttackResult]
"""Function that attacks a copy of the site; arguments: the site, a temporary folder, and the plan of the real run."""


def _make_membership_attack(attack: Callable[[Adversary, ImageSet, Adversary], AttackResult]) -> Attack:
    def attack_patient_disjoint_copies(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
        members, strangers, others = draw_patient_disjoint_sets(site.train, MAX_TRAINING_IMAGES)
        elsewhere = Adversary(copy_site_with_images(site, train=others), folder / "elsewhere", plan)
        return attack(Adversary(copy_site_with_images(site, train=members), folder, plan), strangers, elsewhere)

    return attack_patient_disjoint_copies


def _make_site_attack(
    attack: Callable[[Adversary], AttackResult], most: int | None = None, with_budget: int | None = None
) -> Attack:
    """Make an attack that runs on a copy of the site with at most ``most`` training images; None for all.

    Args:
        with_budget: Maximum number of training images at a site with a privacy budget; None for ``most``.
    """

    def attack_site_copy(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
        limit = most if site.policy.epsilon is None else with_budget or most
        copy = site if limit is None else copy_site_with_images(site, train=draw_random_images(site.train, limit))
        return attack(Adversary(copy, folder, plan))

    return attack_site_copy


def _attack_by_locating_pictures(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
    train, others, strangers = _split_training_images_in_halves(site)
    test = draw_random_images(site.test, MAX_TEST_IMAGES)
    alike = site.validation if len(site.validation) > MAX_GRADIENT_IMAGES else others
    parts = {
        "train": draw_random_images(train, MAX_LOCATED_PICTURES, 1),
        "test": draw_random_images(test, MAX_LOCATED_PICTURES, 1),
    }
    copy = copy_site_with_images(
        site, train=train, test=test, validation=draw_random_images(site.validation, MAX_TRAINING_IMAGES)
    )
    return infer_parts_of_pictures(Adversary(copy, folder, plan), join_pictures_of_parts(strangers, alike, **parts))


def _attack_by_failing_models(site: Site, folder: Path, plan: HospitalPlan) -> AttackResult:
    train, others, strangers = _split_training_images_in_halves(site)
    validation = draw_random_images(site.validation, MAX_TRAINING_IMAGES)
    test = draw_random_images(site.test, MAX_TRAINING_IMAGES)
    parts = {
        "validation": draw_random_images(validation, MAX_PROBED_PICTURES, 1),
        "test": draw_random_images(test, MAX_PROBED_PICTURES, 1),
    }
    copy = copy_site_with_images(
        site, train=draw_random_images(train, MAX_GRADIENT_IMAGES), validation=validation, test=test
    )
    return infer_parts_by_failing_model(
        Adversary(copy, folder, plan),
        join_pictures_of_parts(draw_random_images(strangers, MAX_PROBED_PICTURES), others, **parts),
    )


ATTACKS: Mapping[str, Attack] = {
    coverage.IMPRINT_ATTACK: _make_site_attack(attack_by_imprinting, MAX_TRAINING_IMAGES, MAX_GRADIENT_IMAGES),
    coverage.INVERSION_ATTACK: _make_site_attack(invert_gradients, MAX_GRADIENT_IMAGES),
    coverage.MATCHED_FILTER_ATTACK: _make_membership_attack(infer_membership_by_matched_filter),
    coverage.LIRA_ATTACK: _make_membership_attack(infer_membership_by_lira),
    coverage.LOSS_ATTACK: _make_site_attack(infer_counts_from_losses),
    coverage.DIGIT_ATTACK: _make_site_attack(infer_counts_from_score_digits),
    coverage.HEAD_ROW_ATTACK: _make_site_attack(infer_counts_from_head),
    coverage.TRUNK_ATTACK: _make_site_attack(infer_counts_from_trunk),
    coverage.HASH_ATTACK: _make_site_attack(infer_counts_from_hash),
    coverage.SINGLE_PATIENT_ATTACK: _attack_by_locating_pictures,
    coverage.FAILING_MODEL_ATTACK: _attack_by_failing_models,
    coverage.BUDGET_ATTACK: _make_site_attack(bypass_privacy_budget),
}
"""All attacks by name, in the order of the page."""


def run_attacks(site: Site, plan: HospitalPlan) -> Iterator[AttackResult]:
    """Yield the result of every attack, each against a new copy of the site.

    Raises:
        BadInput: If the site has volumes, because the attacks craft networks for pictures.
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
    """Divide training images of the site at random into two halves; the attacked copy trains on the first half only.

    Returns:
        The first half, the second half, and images of the second half whose patients have no image in the first.
    """
    chosen = draw_random_images(site.train, 2 * MAX_TRAINING_IMAGES)
    shuffled = np.random.default_rng(6).permutation(len(chosen))
    half = len(chosen) // 2
    train = chosen.select_rows(np.sort(shuffled[:half]))
    others = chosen.select_rows(np.sort(shuffled[half:]))
    is_new_patient = ~np.isin(others.patients, train.patients)
    return train, others, draw_random_images(others.select_rows(np.flatnonzero(is_new_patient)), MAX_LOCATED_PICTURES)


def draw_patient_disjoint_sets(images: ImageSet, most: int) -> list[ImageSet]:
    """Draw three sets of at most ``most`` images that share no patient, with as few images of each as possible."""
    patients, patient_of_image = np.unique(images.patients, return_inverse=True)
    order = np.random.default_rng(7).permutation(len(patients))[patient_of_image]
    counts = Counter[int]()
    earlier_images = []
    for patient in patient_of_image.tolist():
        earlier_images.append(counts[patient])  # images of the same patient before this one
        counts[patient] += 1
    rows = np.lexsort((order, np.array(earlier_images)))
    return [images.select_rows(np.sort(rows[order[rows] % 3 == part][:most])) for part in range(3)]


# ---------------------------------------------------------------------- the page

_JSON_FIELDS = ("name", "tried", "recovered", "of", "things", "by_chance", "stops", "declined")


def attack_results_as_json(site: Site, plan: HospitalPlan, attempts: Sequence[AttackResult]) -> dict[str, Any]:
    """Return the results of all attacks as a dictionary for JSON, without pictures."""
    return {
        "site": site.name,
        "version": __version__,
        "level": site.policy.level,
        "policy": site.policy.model_dump(mode="json"),
        "method": plan.run.method,
        "attacks": [
            {
                **{name: getattr(attempt, name) for name in _JSON_FIELDS},
                "notes": list(attempt.notes),
                "refusals": list(attempt.response.refusals),
                "seconds": round(attempt.seconds, 1),
            }
            for attempt in attempts
        ],
        "fields": {record: _attack_coverage_as_json(fields) for record, fields in coverage.ATTACKS_BY_FIELD.items()},
        "statistics": _attack_coverage_as_json(coverage.ATTACKS_BY_STATISTIC),
        "not_tried": list(coverage.UNTRIED_ATTACKS),
    }


def _attack_coverage_as_json(fields: Mapping[str, coverage.AttacksOrReason]) -> dict[str, Any]:
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
