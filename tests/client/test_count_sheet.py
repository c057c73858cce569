"""A hospital's count sheet: what it tells is true, of enough patients, and the same at each question."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyclinic.client.counts.noise import add_noise_to_counts
from polyclinic.client.counts.sheet import COUNTS_FOLDER, SHEET_FILE
from polyclinic.client.preview.dry_run import answer_question_for_all_counts
from polyclinic.client.training.privacy import open_privacy_ledger
from polyclinic.common.counts import CountQuestion
from polyclinic.common.vocabulary import VocabularyEntry
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.counts import CountReply
from polyclinic.strategies.privacy.mechanism import compute_epsilon
from polyclinic.strategies.privacy.noise import make_seeded_noise_source
from tests.client.counted import CLASSES, asked, counting_site, made_images, random_question, true_cells
from tests.client.rounds import log

NOT_WORKED_OUT = ("combinations", "intensity")


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(60, 160),
    smallest=st.integers(2, 12),
    named=st.sampled_from([("sex",), ("sex", "device"), ()]),
    one_class_each=st.booleans(),
)
def test_each_told_count_is_true_and_of_enough_patients(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    smallest: int,
    named: tuple[str, ...],
    one_class_each: bool,
) -> None:
    images = made_images(seed, count, CLASSES[:2], one_class_each=one_class_each, named=named)
    site = counting_site(tmp_path_factory.mktemp("site"), images, smallest_count=smallest)
    reply, truth = asked(site), true_cells(images)
    for key, place in reply.cells.items():
        numbers = reply.patients[place], reply.images[place]
        assert key[0] in NOT_WORKED_OUT or numbers == truth.get(key, (0, 0))
        is_nothing = key[2] == "not annotated" or (key[3] == "not stated" and numbers == (0, 0))
        assert is_nothing or reply.patients[place] >= smallest
    lines = {key[:2] + key[3:] for key in reply.cells}
    for table, name, value in lines:  # a line is told as a whole
        states = ("present", "absent", "not annotated") if name else ("all",)
        assert all((table, name, state, value) in reply.cells for state in states)


def test_without_a_smallest_count_every_count_is_told(tmp_path: Path) -> None:
    images = made_images(3, 120)
    reply = asked(counting_site(tmp_path, images, smallest_count=0))
    told = {key: (reply.patients[place], reply.images[place]) for key, place in reply.cells.items()}
    truth = true_cells(images)
    assert {key: told[key] for key in truth} == truth
    rest = {key: numbers for key, numbers in told.items() if key not in truth and key[0] not in NOT_WORKED_OUT}
    assert set(rest.values()) <= {(0, 0)}
    for table in NOT_WORKED_OUT:
        sums = np.array([numbers for key, numbers in told.items() if key[0] == table]).sum(axis=0)
        assert sums.tolist() == [len(np.unique(images.patients)), 120]


def test_a_question_gets_tables_and_classes_that_it_asks_for_and_the_policy_allows(tmp_path: Path) -> None:
    site = counting_site(tmp_path, made_images(3, 120), smallest_count=0, counts=("class", "sex"))
    vocabulary = {"Fluid": VocabularyEntry(synonyms=("Effusion",)), "Mass": VocabularyEntry()}
    question = CountQuestion(tables=("class", "age", "sex"), classes=("Fluid",), vocabulary=vocabulary)
    reply = asked(site, question)
    assert (reply.allowed, reply.refused, reply.class_names) == (("class", "sex"), ("age",), ("Effusion",))
    assert set(reply.tables) == {"class", "sex"}
    assert set(reply.classes) == {"", "Effusion"}
    nothing = counting_site(tmp_path, made_images(3, 120), counts=())
    with pytest.raises(AssertionError, match=r"policy\.counts: it is empty"):
        asked(nothing)


def test_a_repeated_question_and_a_new_process_get_the_same_numbers_from_a_private_file(tmp_path: Path) -> None:
    images = made_images(3, 120, named=("sex",))
    first = asked(counting_site(tmp_path, images))
    path = tmp_path / COUNTS_FOLDER / SHEET_FILE
    content = path.read_bytes()
    assert asked(counting_site(tmp_path, images)) == first
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(name in path.read_text(encoding="utf-8") for name in ("P1", "P22"))


def test_the_old_sheet_answers_until_enough_patients_have_changed(tmp_path: Path) -> None:
    images = made_images(1, 160, CLASSES[:1], named=("sex",))
    first = asked(counting_site(tmp_path, images))
    showing = images.patients[images.labels[:, 0] == 1]
    without = np.setdiff1d(images.patients, showing)

    def with_changes(patients: int) -> int:
        changed = images.labels.copy()
        changed[np.isin(images.patients, without[:patients])] = 1
        reply = asked(counting_site(tmp_path, replace(images, labels=changed)))
        place = reply.cells["class", "Effusion", "present", ""]
        return reply.patients[place] - first.patients[first.cells["class", "Effusion", "present", ""]]

    assert with_changes(9) == 0
    assert with_changes(10) == 10


def test_noise_is_drawn_once_and_charged_once_and_questions_after_that_are_free(tmp_path: Path) -> None:
    images = made_images(3, 400)
    tables = ("class", "class_by_sex", "sex", "combinations", "device")
    site = counting_site(tmp_path, images, level="private", counts=tables, counts_epsilon=2.0)
    first = asked(site)
    # 3 classes in two tables, and one line of sex: 7 cells of each patient.
    assert first.noise > 0
    assert (first.allowed, first.refused[-3:]) == (
        ("class", "class_by_sex", "sex"),
        ("device", "intensity", "size"),
    )
    assert first.images == ()
    random = np.random.default_rng(0)
    for number in range(20):
        again = asked(site, random_question(random, tables[:3], CLASSES), f"count-{number}")
        known = {key: first.patients[place] for key, place in first.cells.items()}
        assert {key: again.patients[place] for key, place in again.cells.items()}.items() <= known.items()
    (cost,) = open_privacy_ledger(site).entries
    assert compute_epsilon([cost.noisy_steps], site.policy.delta, "prv") <= 2.0
    assert first.noise == pytest.approx(cost.noise_multiplier * 7**0.5, rel=1e-5)


def test_a_sheet_beyond_the_budget_is_not_made_and_costs_nothing(tmp_path: Path) -> None:
    site = counting_site(tmp_path, made_images(3, 120), level="private", counts=("class",), counts_epsilon=9.0)
    with pytest.raises(Exception, match="epsilon"):
        asked(site)
    assert open_privacy_ledger(site).entries == ()
    assert not (tmp_path / COUNTS_FOLDER / SHEET_FILE).exists()


def test_a_hospital_that_is_never_asked_makes_no_sheet_and_pays_nothing(tmp_path: Path) -> None:
    site = counting_site(tmp_path, made_images(3, 120), level="private", counts=("class",))
    assert open_privacy_ledger(site).entries == ()
    assert not (tmp_path / COUNTS_FOLDER).exists()


@pytest.mark.parametrize("level", ["trusted", "private"])
def test_a_preview_shows_the_counts_and_leaves_nothing_behind(level: str, tmp_path: Path) -> None:
    site = counting_site(
        tmp_path, made_images(3, 120, CLASSES[:1], named=("sex",)), level=level, counts=("class", "sex")
    )
    (content,), reasons = answer_question_for_all_counts(site)
    assert decode_record(content, CountReply).allowed == ("class", "sex")
    assert reasons == []
    assert list(tmp_path.iterdir()) == []
    nothing = counting_site(tmp_path, made_images(3, 120), counts=())
    assert "policy.counts" in answer_question_for_all_counts(nothing)[1][0]


def test_noise_has_the_stated_deviation_and_no_bias() -> None:
    bits = make_seeded_noise_source(5).bits
    noisy, deviation = add_noise_to_counts(np.full(20_000, 100, np.int64), 7.5, bits)
    assert deviation == pytest.approx(7.5, rel=1e-5)
    assert noisy.std() == pytest.approx(7.5, rel=0.03)
    assert noisy.mean() == pytest.approx(100, abs=0.2)


def test_question_and_answer_are_lines_of_the_audit(tmp_path: Path) -> None:
    site = counting_site(tmp_path, made_images(3, 120), smallest_count=0)
    asked(site)
    lines = [(line["direction"], line["record"], line["decision"]) for line in log(site) if "direction" in line]
    assert lines == [("in", "CountRequest", "allow"), ("out", "CountReply", "allow")]
