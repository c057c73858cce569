"""RSCFed: groups, weights by distance, the teacher."""

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from safetensors.numpy import load_file

from polyclinic.common.contract import LabelContract
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.local.objective import compute_teacher_decay
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.rscfed import (
    RSCFed,
    compute_consensus_weights,
    compute_group_weights_by_distance,
    draw_consensus_group,
)
from tests.federations import federation
from tests.strategies.leading import site_notes
from tests.strategies.states import make_reply

CONTRACT = LabelContract(("a",), MappingProxyType({"east": ("a",), "north": ("a",), "west": ("a",)}))


REPLIES = {
    site: make_reply(site, ModelGroups(np.array(values, np.float32)), images)
    for site, images, values in (("east", 10, [1, 0]), ("north", 30, [-1, 2]), ("west", 20, [0, -3]))
}


def test_one_sub_consensus_of_all_sites_without_distances_is_fedavg() -> None:
    method = RSCFed({"consensus_models": 1, "consensus_sites": 3, "distance_scale": 0})
    context = RoundContext("multi_label", CONTRACT, {}, {}, 3, 0)
    np.testing.assert_allclose(method.site_weights(context, REPLIES, [10.0, 30.0, 20.0]), [10 / 60, 30 / 60, 20 / 60])


def test_a_run_with_one_sub_consensus_of_all_and_no_teacher_is_the_partial_loss(tmp_path: Path) -> None:
    # Up to the last bits: the weights of a sub-consensus sum to 1, those of FedAvg to the number of images.
    ours = ("consensus_models=1", "consensus_sites=3", "distance_scale=0", "consistency_weight=0", "balanced=false")
    once = ("run.rounds=1", "run.seed=4")
    federation(tmp_path, "run.method=rscfed", *once, *(f"method.{setting}" for setting in ours), out="ours")
    federation(tmp_path, "run.method=partial_loss", "method.weighting=samples", *once, out="plain")
    tensors, expected = (load_file(tmp_path / out / "model.safetensors") for out in ("ours", "plain"))
    # The second view draws other augmentation, of which this experiment has none.
    for name, values in tensors.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6)


def test_weights_in_a_sub_consensus_fall_with_the_distance_an_image_and_the_closest_site_stays() -> None:
    # Models at 0 and 4, weights 3 and 1: mean 1, distances 1 and 3. beta 2, images 4 and 2: exp(-1/2), exp(-3).
    group = np.array([[0.0, 0.0], [0.0, 16.0]]), np.array([3.0, 1.0]), np.array([4.0, 2.0])
    raw = np.array([3 * np.exp(-0.5), np.exp(-3.0)])
    np.testing.assert_allclose(compute_group_weights_by_distance(*group, 2.0), raw / raw.sum())
    np.testing.assert_allclose(compute_group_weights_by_distance(*group, 1e9), [1.0, 0.0])


def test_the_sub_consensus_models_are_averaged_plainly() -> None:
    # Groups {0, 1} and {1, 2}, beta 0, weights 1, 3, 2: (1/4, 3/4) and (3/5, 2/5), each by half.
    weights = compute_consensus_weights(np.eye(3), np.array([1.0, 3.0, 2.0]), np.ones(3), [[0, 1], [1, 2]], 0.0)
    np.testing.assert_allclose(weights, [1 / 8, 3 / 8 + 3 / 10, 1 / 5])


SITES = [f"site-{number}" for number in range(8)]


def test_groups_change_with_round_seed_and_number() -> None:
    drawn = {tuple(draw_consensus_group(SITES, 4, seed)) for seed in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]}
    assert len(drawn) == 4


def test_every_site_is_drawn_about_as_often_as_any_other() -> None:
    counts = np.zeros(8)
    for number in range(400):
        counts[draw_consensus_group(SITES, 4, (0, 1, number))] += 1
    assert counts.sum() == 1600
    assert (np.abs(counts - 200) < 50).all()  # five standard deviations


def test_a_lost_site_gives_its_place_to_the_next_in_line_and_moves_nobody_else() -> None:
    left = [site for site in SITES if site != "site-3"]
    for number in range(50):
        before = {SITES[place] for place in draw_consensus_group(SITES, 4, (0, 1, number))}
        after = {left[place] for place in draw_consensus_group(left, 4, (0, 1, number))}
        assert before - {"site-3"} <= after
        assert len(after) == 4
    assert draw_consensus_group(SITES[:3], 6, (0, 1, 0)) == [0, 1, 2]  # more than there are is all


def test_the_teacher_is_the_mean_of_all_students_until_that_would_be_slower_than_its_decay() -> None:
    decays = [compute_teacher_decay(steps, 0.75) for steps in range(6)]
    assert decays == pytest.approx([0.0, 0.5, 2 / 3, 0.75, 0.75, 0.75])


def test_the_teacher_goes_on_and_without_decay_it_is_the_site_as_it_was_after_its_last_step(tmp_path: Path) -> None:
    runs = {"once": ("run.rounds=1",), "lasting": (), "quick": ("method.teacher_decay=0",)}
    for out, choices in runs.items():
        federation(tmp_path, "run.method=rscfed", "training.reset_optimizer=true", *choices, out=out)
    once, lasting, quick = (site_notes(tmp_path / out, "site-1") for out in runs)
    assert quick["steps"] == lasting["steps"] == 2 * once["steps"] > 2
    assert not np.allclose(quick["teacher/trunk"], lasting["teacher/trunk"])
