"""A hospital that attacks itself: what each attack finds under each level, and that no field is left out."""

import json
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client.preview.attack import patients
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
from polyclinic.client.preview.attack.coverage import ATTACKS_BY_FIELD, ATTACKS_BY_STATISTIC
from polyclinic.client.preview.attack.images import attack_by_imprinting
from polyclinic.client.preview.attack.membership import infer_membership_by_lira, infer_membership_by_matched_filter
from polyclinic.client.preview.attack.patients import (
    infer_parts_by_failing_model,
    infer_parts_of_pictures,
    join_pictures_of_parts,
)
from polyclinic.client.preview.attack.suite import (
    ATTACKS,
    attack_results_as_json,
    draw_patient_disjoint_sets,
    run_attacks,
    write_attack_page,
)
from polyclinic.client.preview.data_dictionary import SENT_RECORD_CLASSES
from polyclinic.client.preview.dry_run import choose_preview_experiment, make_first_round_records
from polyclinic.client.site.policy import Level, SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.config import make_hospital_plan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import BadInput
from polyclinic.common.wire.codec import list_record_field_names
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.sources.built_in import PHANTOM_CLASSES, draw_phantom_images
from polyclinic.strategies.registry import list_statistic_meanings

CLASSES = PHANTOM_CLASSES[:3]


def draw_parts() -> tuple[ImageSet, ...]:
    """Phantoms of as many patients: 48 training, 40 validation and 40 test images; each class is in half of them."""
    random = np.random.default_rng(7)
    phantoms = draw_phantom_images(128, 28, random).select_label_columns(CLASSES)
    labels = random.integers(0, 2, (128, len(CLASSES))).astype(np.float32)
    every = replace(phantoms, labels=labels, patients=np.arange(128).astype(str))
    rows = np.arange(128)
    return tuple(every.select_rows(part) for part in (rows[:48], rows[48:88], rows[88:]))


PARTS = draw_parts()


def hospital(folder: Path, level: Level, **policy: Any) -> Site:
    own = SitePolicy.model_validate({"level": level, **policy})
    return Site(LabelDeclaration("north", CLASSES), *PARTS, folder, policy=own, durable=False)


def adversary(site: Site) -> Adversary:
    return Adversary(
        site, Path(tempfile.mkdtemp(dir=site.folder.parent)), make_hospital_plan(choose_preview_experiment(None, site))
    )


def figures(attempt: AttackResult) -> tuple[int, int]:
    return attempt.recovered, attempt.of


def test_every_field_that_can_leave_has_an_attack_or_a_reason() -> None:
    """A new field of a record fails here until coverage.py says who looks at it."""
    assert {name: set(fields) for name, fields in ATTACKS_BY_FIELD.items()} == {
        record.__name__: set(list_record_field_names(record)) for record in SENT_RECORD_CLASSES
    }
    assert set(ATTACKS_BY_STATISTIC) == set(list_statistic_meanings())
    by_field = [by for fields in ATTACKS_BY_FIELD.values() for by in fields.values()]
    for covered in [*ATTACKS_BY_STATISTIC.values(), *by_field]:
        assert set(covered) <= set(ATTACKS) if isinstance(covered, tuple) else len(covered.split()) > 2
    assert {name for by in by_field if isinstance(by, tuple) for name in by} == set(ATTACKS)


def imprinted(site: Site, size: int = 60) -> AttackResult:
    return attack_by_imprinting(
        adversary(copy_site_with_images(site, train=draw_random_images(site.train, 12))), size=size
    )


def test_an_update_holds_the_images_unless_noise_hides_them_or_the_hospital_declines(tmp_path: Path) -> None:
    bare, noisy = imprinted(hospital(tmp_path / "a", "trusted")), imprinted(hospital(tmp_path / "b", "private"), 44)
    assert (bare.of, bare.recovered >= 10, figures(noisy)) == (12, True, (0, 12))
    assert len(bare.pictures) == bare.recovered or bare.recovered < 12
    assert not bare.response.refusals + noisy.response.refusals  # private takes part, with noise
    site = hospital(tmp_path / "masked", "masked")
    attempt = imprinted(site)
    assert (figures(attempt), attempt.declined) == ((0, 12), True)
    assert "policy.masked_only" in attempt.response.refusals[0]
    page = write_attack_page(site, adversary(site).honest, [attempt], tmp_path / "page.html").read_text()
    assert re.search(r"<td[^>]*>declined</td>", page)


def test_a_trusted_hospital_gives_away_every_count_that_it_hides_and_a_private_one_none(tmp_path: Path) -> None:
    site = hospital(tmp_path / "trusted", "trusted", label_counts=False)
    assert figures(infer_counts_from_losses(adversary(site))) == (6, 6)
    for attack in (infer_counts_from_head, infer_counts_from_trunk, infer_counts_from_hash):
        assert figures(attack(adversary(site))) == (3, 3)
    site = hospital(tmp_path / "private", "private")
    assert figures(infer_counts_from_losses(adversary(site))) == (0, 6)
    assert figures(infer_counts_from_hash(adversary(site))) == (0, 3)
    # Noise: a guess may be right, by chance some three of these 18.
    assert sum(infer_counts_from_head(adversary(site)).recovered for _ in range(6)) <= 10


def test_an_update_without_labels_of_hidden_classes_holds_counts_of_large_classes_only(tmp_path: Path) -> None:
    site = hospital(tmp_path, "trusted", label_counts=False, train_hidden_classes=False)
    few = replace(site, policy=site.policy.model_copy(update={"smallest_count": 45}))
    for attack in (infer_counts_from_head, infer_counts_from_trunk, infer_counts_from_hash):
        assert figures(attack(adversary(few))) == (0, 3)
    labels = site.train.labels.copy()
    labels[8:, 0] = 0
    policy = site.policy.model_copy(update={"smallest_count": 9})
    some = replace(site, train=replace(site.train, labels=labels), policy=policy)
    assert some.hidden_classes("train") == {CLASSES[0]}
    for attack in (infer_counts_from_head, infer_counts_from_trunk):
        assert figures(attack(adversary(some))) == (2, 3)


def test_digits_give_rounded_counts_away_unless_no_score_leaves(tmp_path: Path) -> None:
    rounded = {"smallest_count": 10, "round_counts_to": 5}
    levels: tuple[Level, ...] = ("trusted", "private")
    trusted, private = (
        infer_counts_from_score_digits(adversary(hospital(tmp_path / at, at, **rounded))) for at in levels
    )
    assert trusted.recovered >= 2
    assert (trusted.of, figures(private)) == (3, (0, 3))


def sought_by(attack: Callable[[Adversary, ImageSet, Adversary], AttackResult], site: Site) -> AttackResult:
    """Sixteen images trained on, sixteen others, and an update of sixteen further ones."""
    members, strangers, others = draw_patient_disjoint_sets(site.train, 16)
    attacked, other = (adversary(copy_site_with_images(site, train=train)) for train in (members, others))
    return attack(attacked, strangers, other)


def auroc(attempt: AttackResult) -> float:
    """Of members against strangers, 0 to 1."""
    return float(attempt.notes[0].split()[1].rstrip(";"))


def test_who_has_an_image_sees_its_part_in_an_update_of_one_step(tmp_path: Path) -> None:
    site = hospital(tmp_path, "trusted")
    attempt = sought_by(infer_membership_by_matched_filter, site)
    assert (figures(attempt), auroc(attempt)) == ((16, 16), 1)
    assert attempt.by_chance < 8
    few = replace(site, train=site.train.select_rows(np.arange(1)))  # a hospital with one patient attacks itself too
    assert figures(sought_by(infer_membership_by_matched_filter, few)) == (0, 1)


def test_noise_hides_an_image_in_an_update_of_one_step(tmp_path: Path) -> None:
    """An epsilon of 8 bounds it. In 18 tries the AUROC was 0.61 on average and moved by 0.12, so three are averaged."""
    for name in "abc":
        (tmp_path / name).mkdir()
    sites = [hospital(tmp_path / name, "private") for name in "abc"]
    assert np.mean([auroc(sought_by(infer_membership_by_matched_filter, site)) for site in sites]) < 0.9


def test_shadow_models_tell_members_of_a_model_that_memorised_them(tmp_path: Path) -> None:
    assert auroc(sought_by(infer_membership_by_lira, hospital(tmp_path, "trusted"))) > 0.7


def test_labels_that_a_site_hides_do_not_hide_its_images(tmp_path: Path) -> None:
    """The roll call tells of which classes nothing is said, so an attacker leaves them out too."""
    site = hospital(tmp_path, "trusted", train_hidden_classes=False)
    labels = site.train.labels.copy()
    labels[4:, 2] = 0
    labels[(labels[:, :2] == 0).all(axis=1), 0] = 1  # images that show hidden classes alone are not trained on
    site = replace(site, train=replace(site.train, labels=labels))
    assert figures(sought_by(infer_membership_by_matched_filter, site)) == (16, 16)


def test_members_and_strangers_are_other_patients() -> None:
    few = replace(PARTS[0], patients=np.array(["a"] * 20 + ["b"] * 9 + ["c"] * 9 + list("defghijklm")))
    sets = draw_patient_disjoint_sets(few, 12)
    assert not set(sets[0].patients) & set(sets[1].patients)
    assert not (set(sets[0].patients) | set(sets[1].patients)) & set(sets[2].patients)
    assert [len(set(images.patients)) for images in sets] == [5, 4, 4]
    assert max(map(len, sets)) == 12
    assert min(map(len, sets)) >= 4


@pytest.mark.parametrize(
    ("level", "least", "most", "size"), [("trusted", 12, 12, 60), ("masked", 0, 0, 60), ("private", 0, 3, 36)]
)
def test_single_persons(
    level: Level, least: int, most: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pictures each of the training part, the test part and neither.

    Noise for an epsilon of 8 leaves lucky guesses: most tries find nobody, others one or two of 12.
    """
    monkeypatch.setattr(patients, "INPUT_SIDE", size)  # noise for a small network takes a quarter of the time
    monkeypatch.setattr(patients, "DENSE_INPUT_SIDE", (size - 12) // 4)
    site = hospital(tmp_path, level)
    train, strangers = site.train.select_rows(np.arange(20)), site.train.select_rows(np.arange(20, 24))
    parts = {"train": train.select_rows(np.arange(4)), "test": site.test.select_rows(np.arange(4))}
    pictures = join_pictures_of_parts(strangers, site.validation, **parts)
    attempt = infer_parts_of_pictures(adversary(copy_site_with_images(site, train=train)), pictures)
    assert attempt.of == 12
    assert least <= attempt.recovered <= most


@pytest.mark.parametrize(("level", "expected"), [("trusted", 1), ("masked", 0), ("private", 0)])
def test_models_that_fail_on_one_picture(level: Level, expected: int, tmp_path: Path) -> None:
    """A picture each of the validation part, the test part and neither; scores tell of none at any level."""
    site = hospital(tmp_path, level, smallest_count=4)
    few, others = np.arange(10), site.train.select_rows(np.arange(20, 48))
    parts = {part: getattr(site, part).select_rows(few) for part in ("train", "validation", "test")}
    pictures = {part: parts[part].select_rows(few[:1]) for part in ("validation", "test")}
    sought = join_pictures_of_parts(others.select_rows(few[:1]), others, **pictures)
    attempt = infer_parts_by_failing_model(adversary(replace(site, **parts)), sought)
    assert (figures(attempt), attempt.by_chance) == ((expected, 2), 0)


def test_no_request_walks_round_a_budget(tmp_path: Path) -> None:
    attempt = bypass_privacy_budget(adversary(hospital(tmp_path, "private")))
    assert figures(attempt) == (0, 1)
    assert "policy.epsilon" in attempt.response.refusals[0]


def test_a_copy_hides_labels_of_the_same_images(tmp_path: Path) -> None:
    """A site that was opened from a folder knows of each image whether its labels may be known."""
    undisclosable_images = np.arange(48) % 5 == 0
    site = replace(hospital(tmp_path, "masked"), undisclosable_images={"train": undisclosable_images})
    chosen = draw_random_images(draw_random_images(site.train, 20), 9)
    assert (
        copy_site_with_images(site, train=chosen).undisclosable_images["train"].tolist()
        == undisclosable_images[chosen.places].tolist()
    )
    elsewhere = copy_site_with_images(site, train=site.test)  # by the site's rule
    assert len(elsewhere.undisclosable_images["train"]) == 40


@pytest.mark.long
def test_all_attacks_make_a_page_and_are_in_the_json(tmp_path: Path) -> None:
    site = hospital(tmp_path, "trusted")
    plan = make_hospital_plan(choose_preview_experiment(None, site))
    results = list(run_attacks(site, plan))
    assert {attempt.name for attempt in results} == set(ATTACKS)
    write_attack_page(site, plan, results, tmp_path / "attack.html")
    tree = json.loads(json.dumps(attack_results_as_json(site, plan, results)))
    assert [row["name"] for row in tree["attacks"]] == [attempt.name for attempt in results]


def test_the_page_says_on_top_whom_it_is_for_and_shows_originals_beside_what_was_recovered(tmp_path: Path) -> None:
    site = hospital(tmp_path, "trusted")
    attempt = AttackResult("imprint", "<b>", "tried", 1, 2, "images", "noise", pictures=[("AAAA", "BBBB")])
    page = write_attack_page(
        site, make_hospital_plan(choose_preview_experiment(None, site)), [attempt], tmp_path / "attack.html"
    )
    text = page.read_text(encoding="utf-8")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert text.split("<body>")[1].lstrip().startswith('<div class="private">For this hospital only')
    assert all(part in text for part in ("base64,AAAA", "base64,BBBB", "&lt;b&gt;"))
    assert "<script" not in text


@pytest.mark.parametrize(
    ("recovered", "of", "by_chance", "succeeds"),
    [(0, 0, 0.0, False), (0, 60, 0.0, False), (1, 60, 0.0, True), (6, 60, 3.0, False), (7, 60, 3.0, True)],
)
def test_an_attack_succeeds_if_it_beats_guessing(recovered: int, of: int, by_chance: float, succeeds: bool) -> None:
    """Chance explains up to 3 + 2 x 1.73 where guessing finds 3."""
    attempt = AttackResult("any", "Any", "tried", recovered, of, "images", "nothing", by_chance=by_chance)
    assert attempt.succeeds == succeeds


def test_of_a_site_with_volumes_the_attacks_say_that_they_are_for_pictures_and_its_records_are_shown(
    tmp_path: Path,
) -> None:
    volumes = np.random.default_rng(0).integers(0, 256, (128, 8, 8, 8, 1), dtype=np.uint8)
    parts = [replace(part, stored=volumes, places=np.arange(len(part))) for part in PARTS]
    site = replace(hospital(tmp_path, "trusted"), train=parts[0], validation=parts[1], test=parts[2])
    experiment = choose_preview_experiment(None, site)
    assert experiment.model.image_size == (8, 8, 8)
    records, refusals = make_first_round_records(site, experiment)
    assert records
    assert not refusals
    with pytest.raises(BadInput, match="are volumes, and the attacks craft networks of pictures"):
        next(run_attacks(site, make_hospital_plan(experiment)))
