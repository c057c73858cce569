"""All attacks, one after the other, each in front of its own copy of the site, and the page of what they found.

The copy lies in a folder that is removed. The page has figures and pictures, for this hospital only.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from client.preview.attack.adversary import Adversary, Attempt, drawn, training_on
from client.preview.attack.counts import bypass_budget, from_digits, from_hash, from_head_rows, from_losses, from_trunk
from client.preview.attack.coverage import BY_FIELD, BY_STATISTIC, NOT_TRIED, Covered
from client.preview.attack.images import imprinted, inverted
from client.preview.attack.membership import by_gradient, by_likelihood
from client.preview.attack.patients import failures, persons, sought
from client.site.site import Site
from common import __version__
from common.config import Plan
from common.data.base.image_set import ImageSet
from common.system.files import write_atomically
from common.system.plain_text import page_environment

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
    """Attack a copy that lacks some training images: they are the pictures that are in neither part."""
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
    return [bypass_budget(Adversary(site, folder, plan))]


ATTACKS: tuple[Attack, ...] = (_on_images, _on_gradients, _on_members, _on_counts, _on_persons, _on_budget)


def attempts(site: Site, plan: Plan) -> Iterator[Attempt]:
    """Attack a copy of the site in every way."""
    for attack in ATTACKS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            made = attack(site, Path(folder), plan)
        for attempt in made:
            yield replace(attempt, seconds=(time.monotonic() - began) / len(made))


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


# ---------------------------------------------------------------------- the page


def _row(attempt: Attempt) -> dict[str, Any]:
    """Return one attack's figures."""
    names = ("name", "tried", "recovered", "of", "things", "by_chance", "stops", "declined")
    return {
        **{name: getattr(attempt, name) for name in names},
        "notes": list(attempt.notes),
        "refusals": list(attempt.response.refusals),
        "seconds": round(attempt.seconds, 1),
    }


def as_json(site: Site, plan: Plan, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return all figures; no picture."""
    return {
        "site": site.name,
        "version": __version__,
        "level": site.policy.level,
        "policy": site.policy.model_dump(mode="json"),
        "method": plan.run.method,
        "attacks": [_row(attempt) for attempt in attempts],
        "fields": {record: _covered(fields) for record, fields in BY_FIELD.items()},
        "statistics": _covered(BY_STATISTIC),
        "not_tried": list(NOT_TRIED),
    }


def _covered(fields: Mapping[str, Covered]) -> dict[str, Any]:
    return {
        name: {"attacks": list(covered)} if isinstance(covered, tuple) else {"reason": covered}
        for name, covered in fields.items()
    }


def _code(text: str) -> Markup:
    """Show what stands in backquotes as code."""
    parts = text.split("`")
    shown = (Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts))
    return Markup("").join(shown)


def write_page(site: Site, plan: Plan, attempts: Sequence[Attempt], out: Path) -> Path:
    """Write the page, readable by its owner only: it shows patients' images."""
    environment = page_environment(Path(__file__).parent)
    environment.globals.update(code=_code)
    template = environment.get_template("attack.html.j2")
    text = template.render(site=site.name, level=site.policy.level, plan=plan, attempts=attempts, not_tried=NOT_TRIED)
    write_atomically(out, text.encode(), private=True)
    return out
