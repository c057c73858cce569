"""UniFed's slopes, order, stopping and mixing: the authors' numbers, and facts that hold for any."""

import math
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.strategies.aggregation.means import mix_tensors
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.methods.unifed import SlopeRule, loss_slope, sort_sites_easiest_first
from tests.federations import read_vectors

VECTOR = read_vectors("unifed.json")
authors = pytest.mark.skipif(not VECTOR, reason="../shared/vectors/unifed.json is absent")

LEAST_SQUARES = ("least_squares", "expected_paper_OLS_eq2", "order_paper_OLS_ascending")
ENDPOINTS = ("endpoints", "expected_code_mean_diff", "order_code_ascending")
BUFFERS = {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
numbers = st.floats(-1e3, 1e3, width=32)
slopes = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(-3, 3), max_size=8)


def settled(losses: list[float], patience: int, cap: int = 200) -> EarlyStopping:
    """The state at the epoch at which training stops, or after the last loss."""
    return reduce(
        lambda state, loss: state if state.stopped else state.after(loss), losses, EarlyStopping(patience, cap=cap)
    )


@authors
@pytest.mark.parametrize(("rule", "values", "order"), [LEAST_SQUARES, ENDPOINTS])
def test_slopes_and_the_order_of_sites_are_the_authors(rule: SlopeRule, values: str, order: str) -> None:
    # By least squares sites 5 and 6 are 5e-17 apart: equal on paper, and in that order either way.
    vector = VECTOR["slope"]
    slopes = {site: loss_slope(losses, rule) for site, losses in vector["loss_per_batch"].items()}
    assert slopes == pytest.approx(vector[values], rel=1e-5)
    assert list(map(int, sort_sites_easiest_first(slopes))) == vector[order]
    assert list(map(int, sort_sites_easiest_first(vector["tie_break"]["slopes"]))) == vector["tie_break"]["order"]


@pytest.mark.parametrize("rule", ["least_squares", "endpoints"])
@pytest.mark.parametrize("losses", [[], [2.5]])
def test_one_batch_or_none_has_no_slope(losses: list[float], rule: SlopeRule) -> None:
    assert loss_slope(losses, rule) == 0.0


@given(numbers, numbers, st.integers(2, 60), st.sampled_from(["least_squares", "endpoints"]))
def test_the_slope_of_a_line_is_its_gradient(start: float, gradient: float, batches: int, rule: SlopeRule) -> None:
    line = [start + gradient * batch for batch in range(batches)]
    assert loss_slope(line, rule) == pytest.approx(gradient, rel=1e-9, abs=1e-9)


def test_the_two_slopes_differ_where_the_last_batch_is_an_outlier() -> None:
    # Least squares, steps from the mean -1.5 -.5 .5 1.5: (-4.5 - .5 + 0 + 4.5) / 5; ends: (3 - 3) / 3
    losses = [3.0, 1.0, 0.0, 3.0]
    assert loss_slope(losses, "least_squares") == pytest.approx(-0.1)
    assert loss_slope(losses, "endpoints") == 0.0


@given(slopes, st.randoms())
def test_the_order_of_sites_does_not_depend_on_who_answered_first(slopes: dict[str, float], random: Any) -> None:
    shuffled = {site: slopes[site] for site in random.sample(sorted(slopes), len(slopes))}
    order = sort_sites_easiest_first(shuffled)
    assert order == sort_sites_easiest_first(slopes)
    assert [slopes[site] for site in order] == sorted(slopes.values())
    diverged = {"no number": math.nan}
    assert (
        sort_sites_easiest_first(diverged | slopes)
        == sort_sites_easiest_first(slopes | diverged)
        == (*order, *diverged)
    )


@pytest.mark.parametrize("case", VECTOR.get("local_stopping", {}).get("cases", []))
def test_local_training_stops_where_and_why_the_authors_does(case: dict[str, Any]) -> None:
    losses = case["val_loss_per_epoch"]
    state = settled(losses, case["z"], cap=len(losses))
    assert (state.epochs, state.stopped) == (case["epochs_run"], case["reason"])
    assert state.best_epoch == case["best_epoch_index"] == case["epoch_index_to_return_paper"]
    assert state.epochs - 1 == case["epoch_index_of_returned_weights_code"]


def test_of_equal_validation_losses_the_last_is_kept_and_counts_as_slight_but_a_fall_of_just_the_tolerance_not() -> (
    None
):
    state = settled([0.5, 0.25, 0.25, 0.75], patience=7)
    assert (state.best_epoch, state.slight, state.worse) == (2, 1, 1)
    state = reduce(EarlyStopping.after, [1.0, 0.75, 0.625], EarlyStopping(patience=7, tolerance=0.25))
    assert state.slight == 1  # 1 - .75 is .25, .75 - .625 is .125


def test_a_validation_loss_that_is_not_a_number_is_worse_than_any() -> None:
    state = settled([0.5, math.nan, math.nan, 0.1], patience=2)
    assert (state.stopped, state.epochs, state.best_epoch) == ("early_stop", 3, 0)
    assert settled([math.nan], patience=2).best_epoch == -1


@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 30))
def test_the_epoch_returned_has_the_lowest_loss_of_those_trained(losses: list[float], patience: int, cap: int) -> None:
    state = settled(losses, patience, cap)
    trained = losses[: state.epochs]
    assert losses[state.best_epoch] == min(trained)
    assert min(trained) not in trained[state.best_epoch + 1 :]
    assert state.epochs == min(len(losses), cap) or state.stopped in ("slight", "early_stop")


def tensors(side: str) -> dict[str, np.ndarray]:
    return {name: np.array(values, np.float32) for name, values in VECTOR["mixing"][side].items()}


@authors
def test_every_tensor_is_mixed_as_in_the_paper_and_parameters_by_three_tenths_as_in_the_authors_code() -> None:
    clients, server = tensors("clients_last"), tensors("server")
    everything = {name: mix_tensors(clients[name], server[name], 0.7) for name in clients}
    parameters = server | {name: mix_tensors(clients[name], server[name], 0.3) for name in clients.keys() - BUFFERS}
    assert parameters.keys() == VECTOR["mixing"]["expected_code"].keys()
    for mixed, expected in ((everything, "expected_paper_all_tensors"), (parameters, "expected_code")):
        for name, values in VECTOR["mixing"][expected].items():
            np.testing.assert_allclose(mixed[name], values, rtol=1e-5)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20), st.floats(0, 1))
def test_a_share_of_none_or_all_is_one_side_and_sides_and_share_exchanged_the_same(
    pairs: list[tuple[float, float]], alpha: float
) -> None:
    clients, server = np.array(pairs, np.float32).T
    np.testing.assert_array_equal(mix_tensors(clients, server, 0.0), server)
    np.testing.assert_array_equal(mix_tensors(clients, server, 1.0), clients)
    mixed = mix_tensors(clients, server, alpha)
    assert mixed.dtype == np.float32
    np.testing.assert_allclose(mixed, mix_tensors(server, clients, 1 - alpha), rtol=1e-6, atol=1e-9)
