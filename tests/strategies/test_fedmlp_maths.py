"""FedMLP's priors, losses, prototypes and tags: the authors' numbers, and facts that hold for any."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.methods.fedmlp import (
    Rounding,
    average_without_nan,
    compute_class_difficulty,
    compute_class_prototypes,
    compute_first_stage_loss,
    compute_logit_adjustment,
    compute_pairwise_cosines,
    compute_positive_class_shares,
    compute_prototype_margins,
    compute_second_stage_loss,
    compute_share_of_images_to_tag,
    compute_squared_probability_differences,
    compute_supervised_loss,
    compute_teacher_consistency_loss,
    cross_entropy_per_entry,
    tag_surest_images,
)
from tests.federations import read_vectors
from tests.strategies.folds import weighted_mean

VECTOR = read_vectors("fedmlp.json")
authors = pytest.mark.skipif(not VECTOR, reason="../shared/vectors/fedmlp.json is absent")
ROUNDED = 5e-7
"""The vectors hold six or seven decimals."""
NAN = math.nan
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0, 1)


# --- prior and losses ---


def wpc() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The vector's logits and targets, both of the active classes only, and their adjustment."""
    vector = VECTOR["wpc"]
    active = vector["active"]
    prior = compute_positive_class_shares(np.array(vector["class_pos_counts_local"])[active], vector["N_k"])
    np.testing.assert_allclose(prior, np.array(vector["pi_pos"])[active])
    logits = torch.logit(torch.tensor(vector["prob"], dtype=torch.float64)[:, active])
    return (
        logits,
        torch.tensor(vector["y"], dtype=torch.float64)[:, active],
        torch.from_numpy(compute_logit_adjustment(prior)),
    )


def expected(name: str) -> np.ndarray:
    """A table of the vector ``wpc``, active classes."""
    return np.array(VECTOR["wpc"][name])[:, VECTOR["wpc"]["active"]]


@authors
def test_adjusted_probabilities_and_both_cross_entropies_are_the_authors() -> None:
    logits, targets, adjusting = wpc()
    plain, adjusted = (
        cross_entropy_per_entry(logits, targets, None),
        cross_entropy_per_entry(logits, targets, adjusting),
    )
    np.testing.assert_allclose((logits + adjusting).sigmoid(), expected("adjusted_prob"), rtol=1e-5)
    np.testing.assert_allclose(plain, expected("bce_released_no_LA"), rtol=1e-5)
    np.testing.assert_allclose(adjusted, expected("bce_with_LA"), rtol=1e-5)


@authors
def test_the_supervised_loss_is_the_authors_and_the_papers_is_it_by_annotated_over_all_classes() -> None:
    logits, targets, adjusting = wpc()
    vector = VECTOR["wpc"]
    loss = float(compute_supervised_loss([logits], targets, adjusting))
    paper = loss * len(vector["active"]) / len(vector["y"][0])
    assert loss == pytest.approx(vector["loss_code_1_over_AC_mean_over_batch"], rel=1e-5)
    assert paper == pytest.approx(vector["loss_paper_1_over_C_mean_over_batch"], rel=1e-5)


@given(st.floats(-20, 20), st.floats(0.001, 0.999))
def test_adding_to_the_logit_is_the_papers_adjusted_probability(logit: float, prior: float) -> None:
    p = 1 / (1 + math.exp(-logit))
    paper = p * prior / (p * prior + (1 - p) * (1 - prior))
    adjusted = torch.sigmoid(logit + torch.from_numpy(compute_logit_adjustment(np.array([prior]))))
    assert float(adjusted) == pytest.approx(paper, rel=1e-6)


def test_a_class_never_or_always_seen_is_taken_as_half_an_image_away() -> None:
    # 10 images: 0 -> 1/20, 10 -> 19/20, whose odds are 1 to 19 and 19 to 1
    prior = compute_positive_class_shares([0, 10, 4], 10)
    np.testing.assert_allclose(prior, [0.05, 0.95, 0.4])
    np.testing.assert_allclose(compute_logit_adjustment(prior), [-math.log(19), math.log(19), math.log(2 / 3)])


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student's and teacher's logits, targets a third of them unknown, and who is annotated; 5 images, 4 classes."""
    rng = np.random.default_rng(seed)
    annotated = torch.tensor([True, False, True, False])
    targets = torch.from_numpy(rng.choice([0.0, 1.0, NAN], (5, 4)))
    student, teacher = torch.from_numpy(rng.normal(size=(2, 5, 4)))
    return student, teacher, targets, annotated


@given(seeds)
def test_without_adjustment_and_teacher_both_stages_are_the_partial_loss(seed: int) -> None:
    student, _, targets, annotated = batch(seed)
    partial = pytest.approx(float(partial_loss(student, targets, annotated)), rel=1e-12)
    assert float(compute_first_stage_loss([student], None, targets, annotated, None)) == partial
    assert float(compute_second_stage_loss(student, None, targets, annotated, None)) == partial


@given(seeds)
def test_two_equal_views_count_as_one_and_the_order_of_views_does_not_matter(seed: int) -> None:
    student, teacher, targets, annotated = batch(seed)

    def loss(students: list[torch.Tensor], teachers: list[torch.Tensor]) -> torch.Tensor:
        return compute_first_stage_loss(students, teachers, targets, annotated, None)

    torch.testing.assert_close(loss([student] * 2, [teacher] * 2), loss([student], [teacher]))
    forth, back = [student, teacher], [teacher, student * 2]
    torch.testing.assert_close(loss(forth[::-1], back[::-1]), loss(forth, back))


def test_consistency_is_the_mean_square_over_classes_without_labels() -> None:
    # Probabilities; class a annotated. b: (.9 - .4)^2 = .25, (.2 - .3)^2 = .01; mean .13
    student = torch.tensor([[0.1, 0.9], [0.6, 0.2]], dtype=torch.float64).logit()
    teacher = torch.tensor([[0.8, 0.4], [0.5, 0.3]], dtype=torch.float64).logit()
    assert float(compute_teacher_consistency_loss([student], [teacher], torch.tensor([True, False]))) == pytest.approx(
        0.13
    )
    assert float(compute_teacher_consistency_loss([student], [teacher], torch.tensor([True, True]))) == 0.0


def test_the_second_stage_weighs_every_entry_the_same_and_leaves_the_unknown_out_of_its_sum() -> None:
    # a annotated: positive at .8, -ln .8; unknown, nothing. b: tagged 0 at .5, -ln .5; untagged, (.7 - .4)^2 = .09
    student = torch.tensor([[0.8, 0.5], [0.3, 0.7]], dtype=torch.float64).logit()
    teacher = torch.tensor([[0.1, 0.2], [0.9, 0.4]], dtype=torch.float64).logit()
    targets = torch.tensor([[1.0, 0.0], [NAN, NAN]], dtype=torch.float64)
    annotated = torch.tensor([True, False])
    full = compute_second_stage_loss(student, teacher, targets, annotated, torch.zeros(2))
    assert float(full) == pytest.approx((-math.log(0.8) - math.log(0.5) + 0.09) / 4)
    alone = compute_second_stage_loss(student, None, targets, annotated, None)
    assert float(alone) == pytest.approx((-math.log(0.8) - math.log(0.5)) / 2)


@given(seeds)
def test_the_teacher_gets_no_gradient_and_unknown_entries_give_none(seed: int) -> None:
    student, teacher, targets, annotated = batch(seed)
    student.requires_grad_(), teacher.requires_grad_()
    loss = compute_first_stage_loss([student], [teacher], targets, annotated, None)
    loss = loss + compute_second_stage_loss(student, teacher, targets, annotated, None)
    loss.backward()
    assert teacher.grad is None
    assert student.grad.isfinite().all()
    assert (student.grad[targets.isnan() & annotated] == 0).all()


@given(seeds)
def test_a_student_that_is_its_teacher_is_consistent(seed: int) -> None:
    student, _, targets, annotated = batch(seed)
    assert float(compute_squared_probability_differences(student, student).sum()) == 0.0
    loss = compute_first_stage_loss([student], [student], targets, annotated, None)
    torch.testing.assert_close(loss, compute_supervised_loss([student], targets, None))


# --- prototypes and difficulty ---


@authors
def test_local_prototypes_and_difficulty_are_the_authors() -> None:
    vector = VECTOR["local_prototypes_and_difficulty"]
    labels = np.array(vector["y_true"], float)
    labels[:, vector["negative"]] = NAN
    prototypes = compute_class_prototypes(np.array(vector["features"]), labels)
    expected = np.array(vector["expected_prototypes_rows_2c_and_2c+1"]).reshape(3, 2, 4)
    expected[vector["negative"]] = NAN  # the authors' zeros
    np.testing.assert_allclose(prototypes, expected, rtol=1e-5, atol=ROUNDED)
    sure = compute_class_difficulty(np.array(vector["prob"]), vector["L"], vector["R"])
    sure[vector["active"]] = 0.0
    np.testing.assert_allclose(sure, vector["expected_d_local"], rtol=1e-5)


def by_site(rows: np.ndarray, speakers: list[list[int]]) -> dict[str, np.ndarray]:
    """Site -> its rows, NaN for each class of whose speakers it is none."""
    sites = {f"site {k}": row.copy() for k, row in enumerate(rows)}
    for c, own in enumerate(speakers):
        for k in set(range(len(rows))) - set(own):
            sites[f"site {k}"][c] = NAN
    return sites


def sizes(vector: dict[str, Any]) -> dict[str, float]:
    return {f"site {k}": float(images) for k, images in enumerate(vector["N_k"])}


@authors
def test_global_prototypes_are_the_authors_weighted_and_the_papers_uniform() -> None:
    vector = VECTOR["proto_aggregation"]
    local = by_site(np.array(vector["local"]).reshape(4, 3, 2, 2), vector["owners_S"])
    weighted = average_without_nan(local, sizes(vector)).reshape(6, 2)
    uniform = average_without_nan(local, dict.fromkeys(local, 1.0)).reshape(6, 2)
    np.testing.assert_allclose(weighted, vector["expected_code_sample_weighted"], rtol=1e-5)
    np.testing.assert_allclose(uniform, vector["expected_paper_uniform_eq6"], rtol=1e-5)


@authors
def test_global_difficulty_is_the_authors_over_the_sites_that_lack_the_class() -> None:
    vector = VECTOR["difficulty_aggregation"]
    local = by_site(np.array(vector["d_local"]), vector["clients_missing_class"])
    assert vector["expected_code"][2] == 1.0  # every site labels it: the authors' code counts no difficulty there
    expected = [*vector["expected_code"][:2], NAN]
    np.testing.assert_allclose(average_without_nan(local, sizes(vector)), expected, rtol=1e-5)


def test_unknown_labels_belong_to_neither_prototype_and_a_sign_never_seen_has_none() -> None:
    # Class a: negative (1, 2), positives (3, -4) and (-5, 0) -> (-1, -2); class b: positive (1, 2) alone.
    features = np.array([[1, 2], [3, -4], [-5, 0], [9, 9]], np.float32)
    labels = np.array([[0, 1], [1, NAN], [1, NAN], [NAN, NAN]])
    prototypes = compute_class_prototypes(features, labels)
    np.testing.assert_array_equal(prototypes, [[[1, 2], [-1, -2]], [[NAN, NAN], [1, 2]]])


def test_an_empty_prototype_is_left_out_of_the_mean_and_nobodys_stays_empty() -> None:
    # Negative: (10 * 2 + 30 * -6) / 40 = -4; positive: north alone; class b: nobody
    north = np.array([[[2.0], [5.0]], [[NAN], [NAN]]])
    south = np.array([[[-6.0], [NAN]], [[NAN], [NAN]]])
    mean = average_without_nan({"north": north, "south": south}, {"north": 10, "south": 30})
    np.testing.assert_array_equal(mean, [[[-4], [5]], [[NAN], [NAN]]])


@given(seeds)
def test_prototypes_do_not_depend_on_the_order_of_images(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features, labels = rng.normal(size=(30, 3)), rng.choice([0.0, 1.0, NAN], (30, 4))
    shuffled = rng.permutation(30)
    again = compute_class_prototypes(features[shuffled], labels[shuffled])
    np.testing.assert_allclose(again, compute_class_prototypes(features, labels), rtol=1e-12, atol=1e-12)


@given(seeds)
def test_means_over_sites_do_not_depend_on_who_answered_first_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    local = {f"site {k}": rng.choice([NAN, *rng.normal(size=4)], (3, 2, 2)) for k in range(5)}
    weights = {site: float(rng.integers(1, 99)) for site in local}
    backwards = dict(reversed(local.items()))
    np.testing.assert_array_equal(average_without_nan(backwards, weights), average_without_nan(local, weights))


@given(seeds)
def test_two_sites_equal_prototypes_are_the_global_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(3, 2, 4))
    weights = {"north": float(rng.integers(1, 99)), "south": float(rng.integers(1, 99))}
    np.testing.assert_allclose(average_without_nan({"north": own, "south": own}, weights), own, rtol=1e-12)


def test_difficulty_is_the_share_of_images_outside_the_bounds_which_themselves_are_inside() -> None:
    probabilities = np.array([[0.3, 0.29], [0.7, 0.71], [0.9, 0.5], [0.5, 0.1]])
    np.testing.assert_array_equal(compute_class_difficulty(probabilities), [0.25, 0.75])


# --- detection ---


def scored() -> np.ndarray:
    vector = VECTOR["z_and_selection"]
    return compute_prototype_margins(*(np.array(vector[name]) for name in ("features", "P0", "P1")))


@authors
def test_scores_are_the_authors() -> None:
    vector, z = VECTOR["z_and_selection"], scored()
    np.testing.assert_allclose(z, vector["Z"], rtol=1e-5)
    assert [(z >= 0).sum(), (z < 0).sum()] == [vector["n_Z_ge_0"], vector["n_Z_lt_0"]]


@pytest.mark.parametrize("rates", sorted(VECTOR.get("z_and_selection", {}).get("expected", {})))
def test_tags_are_the_authors_the_surest_first(rates: str) -> None:
    expected, z = VECTOR["z_and_selection"]["expected"][rates], scored()
    tau_negative, tau_positive = (float(rate.split("=")[1]) for rate in rates.split(","))
    tags = tag_surest_images(z, np.ones(len(z), bool), tau_negative, tau_positive, "floor")
    negatives, positives = np.flatnonzero(tags == 0), np.flatnonzero(tags == 1)
    assert [len(negatives), len(positives)] == [expected["m_neg"], expected["m_pos"]]
    assert negatives[np.argsort(-z[negatives])].tolist() == expected["tagged_0"]
    assert positives[np.argsort(z[positives])].tolist() == expected["tagged_1"]


def test_ties_go_to_the_lower_index_and_tagged_images_are_not_counted() -> None:
    # Untagged: 1 2 3 (Z >= 0) and 5 6 (Z < 0). Half of 3 rounds to 1 or 2, half of 2 is 1.
    z = np.array([9.0, 0.5, 0.5, 0.5, -9.0, -0.5, -0.5])
    untagged = np.array([False, True, True, True, False, True, True])
    np.testing.assert_array_equal(tag_surest_images(z, untagged, 0.5, 0.5, "floor"), [-1, 0, -1, -1, -1, 1, -1])
    np.testing.assert_array_equal(tag_surest_images(z, untagged, 0.5, 0.5, "ceil"), [-1, 0, 0, -1, -1, 1, -1])


def test_among_many_ties_the_lower_indices_go_first() -> None:
    # Of 400 images 200 tie at .5; a share of 1/4 is 100 of them: the odd indices up to 199
    z = np.tile([0.25, 0.5], 200)
    tags = tag_surest_images(z, np.ones(400, bool), 0.25, 0.25, "floor")
    np.testing.assert_array_equal(np.flatnonzero(tags == 0), np.arange(1, 200, 2))


def test_positives_are_tagged_in_a_round_without_negatives_unlike_the_authors() -> None:
    # floor(.1 * 2) = 0 negatives, floor(.5 * 2) = 1 positive
    z = np.array([0.5, 0.25, -0.25, -0.5])
    np.testing.assert_array_equal(tag_surest_images(z, np.ones(4, bool), 0.1, 0.5, "floor"), [-1, -1, -1, 1])


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_without_a_prototype_nothing_is_tagged(rounding: Rounding) -> None:
    features, present, none = np.array([[1.0, -2.0], [0.5, 3.0]]), np.array([1.0, 1.0]), np.array([NAN, NAN])
    for negative, positive in ((present, none), (none, present), (none, none)):
        z = compute_prototype_margins(features, negative, positive)
        np.testing.assert_array_equal(tag_surest_images(z, np.ones(2, bool), 1.0, 1.0, rounding), [-1, -1])


def test_a_feature_of_zeros_is_like_neither_prototype() -> None:
    scores = compute_prototype_margins(np.zeros((1, 2)), np.array([1.0, 2.0]), np.array([-3.0, 1.0]))
    np.testing.assert_array_equal(scores, [0.0])


@given(seeds, shares, shares, st.sampled_from(["floor", "ceil"]))
def test_each_tag_is_of_its_sign_and_surer_than_all_that_wait(
    seed: int, tau_negative: float, tau_positive: float, rounding: Rounding
) -> None:
    rng = np.random.default_rng(seed)
    z, untagged = rng.integers(-5, 5, 30) / 4, rng.random(30) < 0.7
    tags = tag_surest_images(z, untagged, tau_negative, tau_positive, rounding)
    waiting = z[untagged & (tags < 0)]
    assert (tags[~untagged] == -1).all()
    assert z[tags == 0].min(initial=9) >= waiting[waiting >= 0].max(initial=0)
    assert z[tags == 1].max(initial=-9) <= waiting[waiting < 0].min(initial=0)


@given(st.integers(1, 500), st.floats(1e-3, 1))
def test_rounding_up_tags_at_least_one_and_never_more_than_there_are(images: int, share: float) -> None:
    z = np.linspace(0, 1, images)
    floor, ceil = (int((tag_surest_images(z, z >= 0, share, 1.0, how) == 0).sum()) for how in ("floor", "ceil"))
    assert 1 <= ceil <= images
    assert floor <= share * images <= ceil


@pytest.mark.parametrize(
    ("difficulty", "rate", "share"),
    [(0.6, 0.005, 0.003), (0.8, 2.0, 1.0), (-0.5, 0.2, 0.0), (0.25, 0.2, 0.05), (1e30, 0.2, 1.0)],
)
def test_the_share_tagged_is_difficulty_times_rate(difficulty: float, rate: float, share: float) -> None:
    assert compute_share_of_images_to_tag(difficulty, rate) == pytest.approx(share)


@authors
def test_models_are_averaged_by_images() -> None:
    vector = VECTOR["fedavg"]
    mean = weighted_mean([np.array(model["a"], np.float32) for model in vector["in"]], vector["N_k"])
    np.testing.assert_allclose(mean, vector["expected"]["a"], rtol=1e-5)


def test_cosines_are_worked_by_hand_and_a_vector_nobody_knows_has_none() -> None:
    vectors = np.array([[3.0, 4.0], [-4.0, 3.0], [6.0, 8.0], [np.nan, 1.0], [0.0, 0.0], [4.0, 3.0]])
    cosines = compute_pairwise_cosines(vectors)
    # (3, 4) with (4, 3): (12 + 12) / 25
    np.testing.assert_allclose(cosines[0], [1, 0, 1, np.nan, np.nan, 0.96], atol=1e-12)
    np.testing.assert_allclose(cosines, cosines.T)
