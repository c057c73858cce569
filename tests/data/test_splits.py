import csv
import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyclinic.data.base.image_set import (
    PARTS,
    PLACEHOLDER_PATIENT_PREFIX,
    are_all_patients_known,
    make_placeholder_patient_names,
)
from polyclinic.data.base.splits import (
    PatientSplit,
    assign_images_to_parts,
    assign_patients_by_name,
    choose_balanced_split_seed,
    find_shared_patient_faults,
    hold_out_patients,
    hold_out_patients_by_name,
    name_unknown_patients,
    split_patients,
    split_patients_over_sites,
)

Table = tuple[NDArray[np.str_], NDArray[np.bool_]]


@pytest.fixture(scope="module")
def vector(read_vectors: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return read_vectors("surgical_splits")


@pytest.fixture(scope="module")
def toy(vector: dict[str, Any]) -> Table:
    toy = vector["toy"]
    abnormal = (np.array(toy["A"]) == 1) | (np.array(toy["B"]) == 1)
    return np.array(toy["patient_id"]).astype(np.str_), abnormal


@pytest.fixture(scope="module")
def nih(real_data: Path) -> tuple[Table, PatientSplit]:
    with gzip.open(real_data / "nih_cxr14" / "Data_Entry_2017_v2020.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    patients = np.array([row["Patient ID"] for row in rows])
    abnormal = np.array([row["Finding Labels"] != "No Finding" for row in rows])
    return (patients, abnormal), split_patients(patients, abnormal)


def fingerprint(patients: NDArray[np.str_]) -> str:
    joined = ",".join(str(number) for number in sorted(int(patient) for patient in patients))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def test_the_toy_patients_fall_where_the_authors_code_puts_them(vector: dict[str, Any], toy: Table) -> None:
    split = split_patients(*toy)
    numbers = [sorted(map(int, part)) for part in (split.train, split.validation, split.test)]
    assert dict(zip(("train", "val", "test"), numbers, strict=True)) == vector["toy"]["expected"]


def test_the_toy_patients_are_dealt_to_three_sites_in_the_authors_order(vector: dict[str, Any], toy: Table) -> None:
    patients, abnormal = toy
    split = split_patients(patients, abnormal)
    random = np.random.RandomState(1337)
    for part, expected in ((split.train, "K3_train"), (split.validation, "K3_val")):
        rows = np.isin(patients, part)
        hands = split_patients_over_sites(patients[rows], abnormal[rows], 3, random)
        assert [[int(patient) for patient in hand] for hand in hands] == vector["toy"][expected]


def test_nih_splits_into_the_papers_patients_and_counts(
    vector: dict[str, Any], nih: tuple[Table, PatientSplit]
) -> None:
    (patients, _), split = nih
    counts = {
        part: {"images": int(np.isin(patients, ids).sum()), "patients": len(ids), "hash": fingerprint(ids)}
        for part, ids in (("train", split.train), ("val", split.validation), ("test", split.test))
    }
    assert counts == vector["NIH"]


@pytest.mark.parametrize("sites", [2, 3, 4, 5, 6, 8, 10])
def test_nih_is_dealt_to_the_papers_sites(vector: dict[str, Any], nih: tuple[Table, PatientSplit], sites: int) -> None:
    (patients, abnormal), split = nih
    random = np.random.RandomState(1337)
    counts: list[dict[str, Any]] = [{} for _ in range(sites)]
    for part, ids in (("train", split.train), ("val", split.validation)):
        rows = np.isin(patients, ids)
        hands = split_patients_over_sites(patients[rows], abnormal[rows], sites, random)
        for site, hand in zip(counts, hands, strict=True):
            site[f"{part}_patients"] = len(hand)
            site[f"{part}_images"] = int(np.isin(patients, hand).sum())
            site[f"{part}_hash"] = fingerprint(hand)
    assert counts == vector["NIH_K"][str(sites)]


tables = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=80)


@given(tables, st.integers(0, 2**32 - 1))
def test_every_patient_is_in_exactly_one_part(rows: list[tuple[int, bool]], seed: int) -> None:
    patients = np.array([str(patient) for patient, _ in rows])
    split = split_patients(patients, np.array([abnormal for _, abnormal in rows]), seed)
    everyone = [*split.train, *split.validation, *split.test]
    assert sorted(everyone) == sorted(set(patients.tolist()))


@given(tables, st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_no_patient_is_dealt_to_two_sites(rows: list[tuple[int, bool]], sites: int, seed: int) -> None:
    patients = np.array([str(patient) for patient, _ in rows])
    abnormal = np.array([abnormal for _, abnormal in rows])
    hands = split_patients_over_sites(patients, abnormal, sites, np.random.RandomState(seed))
    dealt = [patient for hand in hands for patient in hand]
    assert len(dealt) == len(set(dealt))
    assert len(hands) == sites


def test_a_size_skew_of_one_gives_the_nth_site_an_nth_of_what_the_first_gets() -> None:
    """110 patients over three sites in shares 6/11, 3/11 and 2/11."""
    patients = np.array([str(number) for number in range(110)])
    hands = split_patients_over_sites(patients, np.ones(110, np.bool_), 3, np.random.RandomState(0), size_skew=1.0)
    assert [len(hand) for hand in hands] == [60, 30, 20]
    assert len(set(np.concatenate(hands).tolist())) == 110


def test_images_of_unknown_patients_are_split_as_by_their_running_numbers() -> None:
    abnormal = np.random.default_rng(0).random(500) < 0.3
    unknown, numbers = make_placeholder_patient_names(500), np.arange(500).astype(np.str_)
    split, same = split_patients(unknown, abnormal, 3), split_patients(numbers, abnormal, 3)
    for part in ("train", "validation", "test"):
        assert [name.removeprefix(PLACEHOLDER_PATIENT_PREFIX) for name in getattr(split, part)] == getattr(
            same, part
        ).tolist()
    assert not are_all_patients_known(unknown)
    assert are_all_patients_known(numbers)


def test_ids_that_are_numbers_are_sorted_as_numbers() -> None:
    # 9 before 10, so that both spellings of the same ten patients are drawn alike.
    plain = np.array([str(number) for number in range(1, 11)])
    padded = np.array([f"{number:04}" for number in range(1, 11)])
    nobody = np.zeros(10, dtype=np.bool_)
    assert [int(patient) for patient in split_patients(plain, nobody).train] == [
        int(patient) for patient in split_patients(padded, nobody).train
    ]


def test_a_held_out_part_takes_whole_patients() -> None:
    patients = np.array([str(index // 3) for index in range(90)])
    held = hold_out_patients(patients, np.ones(90, dtype=np.bool_), 0.2)
    assert held.sum() == 18  # 6 of 30 patients, 3 images each
    assert not set(patients[held]) & set(patients[~held])


def test_parts_are_named_for_each_image() -> None:
    patients = np.array([str(index) for index in range(10)])
    parts = assign_images_to_parts(patients, split_patients(patients, np.ones(10, dtype=np.bool_)))
    assert sorted(parts.tolist()) == ["test"] * 2 + ["train"] * 7 + ["validation"]


def test_patients_in_two_parts_are_named() -> None:
    patients = {"train": np.array(["3", "10", "2"]), "test": np.array(["10", "2", "5"])}
    (fault,) = find_shared_patient_faults("data.patient_key", patients)
    assert (fault.where, fault.cause) == ("data.patient_key", "patients")
    assert '2 patients in both train and test: "2", "10".' in fault.problem


# ---------------------------------------------------------------------- a hospital's own patients


def make_patients(count: int) -> NDArray[np.str_]:
    return np.array([f"P-{number:04}" for number in range(count)])


def test_nobody_moves_when_any_patient_opts_out() -> None:
    patients = np.repeat(make_patients(50), 3)
    parts = assign_patients_by_name(patients)
    assert set(parts) == set(PARTS)
    for patient in make_patients(50):
        others = patients != patient
        np.testing.assert_array_equal(assign_patients_by_name(patients[others]), parts[others])
        assert len(set(parts[~others])) == 1


def test_parts_by_name_have_their_fractions_within_three_standard_errors_over_20_seeds() -> None:
    patients = make_patients(2000)
    drawn = [assign_patients_by_name(patients, seed) for seed in range(20)]
    for part, share in zip(PARTS, (0.7, 0.1, 0.2), strict=True):
        mean = np.mean([(parts == part).mean() for parts in drawn])
        assert mean == pytest.approx(share, abs=3 * np.sqrt(share * (1 - share) / 40_000))
    assert len({"".join(part[0] for part in parts) for parts in drawn}) == 20


PINNED = ["test", "test", "train", "train", "test", "train"]
"""The parts of the release that introduced the rule."""


def test_a_patient_has_one_part_in_each_release() -> None:
    """Stored parts of a study would be useless if a release moved its patients."""
    patients = np.array(["P-007", "12345", "MRN 4711", "ÄÖ-3", "1.2.840.113619.2", "a/b/0012.png"])
    assert assign_patients_by_name(patients, 0).tolist() == PINNED
    assert assign_patients_by_name(np.array(["p7", "12345.0", "mrn4711"]), 0).tolist() == PINNED[:3]


def test_test_patients_stay_when_the_fraction_for_validation_changes() -> None:
    patients = make_patients(500)
    with_validation = assign_patients_by_name(patients, 3) == "test"
    np.testing.assert_array_equal(assign_patients_by_name(patients, 3, (0.8, 0.0)) == "test", with_validation)


def test_patients_held_out_of_given_training_patients_stay_held_out() -> None:
    patients = make_patients(1000)
    held_out = hold_out_patients_by_name(patients, 0.1)
    assert held_out.sum() == pytest.approx(100, abs=29)  # three standard deviations of 1,000 tosses
    np.testing.assert_array_equal(hold_out_patients_by_name(patients[5:], 0.1), held_out[5:])
    # Independent of the split: else validation would be drawn from the same side at each hospital.
    assert 0 < (held_out & (assign_patients_by_name(patients) == "test")).sum() < 40


def test_an_image_without_a_patient_is_known_by_its_own_name() -> None:
    patients = np.array(["unknown#0", "P1", "unknown#1.2.3", "unknown#3", "unknown#4"])
    own = np.array(["a", "b", "c", "d", "d"])
    assert name_unknown_patients(patients, lambda: own).tolist() == ["a", "P1", "unknown#1.2.3", "d", "d\0" + "2"]


@pytest.mark.parametrize("count", [20, 100, 900])
def test_the_chosen_seed_is_better_balanced_than_a_stratified_draw(count: int) -> None:
    random = np.random.default_rng(0)
    chosen, drawn = list[float](), list[float]()
    for trial in range(20):
        patients = np.array([f"{trial}-{number}" for number in range(count)])
        labels = (random.random((count, 3)) < (0.3, 0.2, 0.1)).astype(np.float32)
        stratified = split_patients(patients, (labels == 1).any(axis=1), trial).test
        seed = choose_balanced_split_seed(patients, labels)
        for shares, is_test in (
            (chosen, assign_patients_by_name(patients, seed) == "test"),
            (drawn, np.isin(patients, stratified)),
        ):
            shares.append(float(np.abs(labels[is_test].sum(axis=0) / labels.sum(axis=0).clip(1) - 0.2).max()))
    assert np.mean(chosen) < np.mean(drawn)
