"""Distributed noise: the sum of the shares against the published distribution, and what a site does not open."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy import stats

from polyclinic.common.config import PrivacySection
from polyclinic.common.models.network import Head
from polyclinic.common.wire.codec import AnyRecord
from polyclinic.common.wire.records import ModelGroups, Record
from polyclinic.common.wire.secure_aggregation import KeysRequest, MaskedRequest, RevealRequest, SharesRequest
from polyclinic.strategies.aggregation.means import sum_in_order
from polyclinic.strategies.privacy.mechanism import NoisySteps, SitePrivacySettings, compute_epsilon
from polyclinic.strategies.privacy.noise import KEY_BYTES, SecretBitStream, draw_discrete_gaussian
from polyclinic.strategies.privacy.secure_aggregation.coordinator import (
    MaskedSummation,
    MaskedSumRequest,
    MaskingFailed,
    UnmaskedSum,
)
from polyclinic.strategies.privacy.secure_aggregation.crypto import SecretsError
from polyclinic.strategies.privacy.secure_aggregation.noise_shares import (
    LEAST_SCALE_BITS,
    DistributedNoise,
    NoiseShareGrid,
    bound_log_probability_gap,
)
from polyclinic.strategies.privacy.secure_aggregation.site import MaskingConditions, SiteMaskingRound
from polyclinic.strategies.privacy.secure_aggregation.vectors import UpdateVectorLayout, flatten_update

STAGES = (KeysRequest, SharesRequest, MaskedRequest, RevealRequest)
NUMBERS = 4_000
NAMES = ("ash", "birch", "cedar", "elm", "fir", "oak")


def stream(number: int) -> SecretBitStream:
    return SecretBitStream(number.to_bytes(KEY_BYTES, "big"))


def mass(deviation: float, reach: int) -> NDArray[np.float64]:
    """Probabilities of a discrete Gaussian at -reach, ..., reach."""
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    return np.asarray(weights / weights.sum())


def of_sum(deviation: float, sites: int, reach: int) -> NDArray[np.float64]:
    """Exact probabilities of the sum of so many draws, at -reach, ..., reach."""
    sums = mass(deviation, reach)
    for _ in range(sites - 1):
        sums = np.convolve(sums, mass(deviation, reach))
    middle = len(sums) // 2
    return sums[middle - reach : middle + reach + 1]


@pytest.mark.parametrize("sites", [2, 3, 12])
@pytest.mark.parametrize("deviation", [0.5, 0.75, 1.0])
def test_a_sum_of_shares_lies_within_the_published_bound_of_one_discrete_gaussian(deviation: float, sites: int) -> None:
    """At such small shares the difference can be seen; a share of a round has a deviation of 4,096 at least."""
    whole = math.sqrt(sites) * deviation
    reach = math.ceil(5 * whole)
    sums, single = of_sum(deviation, sites, 8 * reach), mass(whole, 8 * reach)
    near = slice(7 * reach, 9 * reach + 1)
    apart = float(np.abs(np.log(sums[near] / single[near])).max())
    assert 1e-7 < apart <= bound_log_probability_gap(sites, deviation)
    assert sites > 2 or apart > bound_log_probability_gap(sites, deviation) / 10  # for two sites it is a close bound


def test_at_the_least_share_the_bound_is_0() -> None:
    assert bound_log_probability_gap(1_000, 2.0**LEAST_SCALE_BITS) == 0.0


@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0])
def test_at_the_least_share_a_discrete_gaussian_costs_what_the_accountants_say(noise_multiplier: float) -> None:
    """The exact delta of one number that moves as far as it may, against the continuous Gaussian's (Balle, Wang)."""
    deviation = 2.0**LEAST_SCALE_BITS
    moved = round(deviation / noise_multiplier)
    places = np.arange(-round(10 * deviation), round(10 * deviation) + 1)
    here = mass(deviation, len(places) // 2)
    loss, shift = (moved**2 - 2 * moved * places) / (2 * deviation**2), moved / deviation
    for epsilon in (0.5, 2.0, 6.0):
        exact = float((here * np.maximum(0.0, 1 - np.exp(epsilon - loss))).sum())
        first, second = (stats.norm.cdf(sign * shift / 2 - epsilon / shift) for sign in (1, -1))
        assert exact == pytest.approx(first - math.exp(epsilon) * second, rel=1e-5)


def test_shares_of_sites_add_up_to_the_exact_distribution_of_their_sum() -> None:
    """Chi-squared over 60,000 sums of three shares, at a deviation of one step where every value is counted."""
    grid = NoiseShareGrid(0, 1, 1.0, 100)
    zeros = np.zeros(60_000, np.float32)
    total = sum(grid.add_noise_share(zeros, stream(site)) for site in range(3))
    values = np.asarray(total).view(np.int32)
    expected = of_sum(1.0, 3, 60)[54:67] * len(zeros)  # -6 to 6
    counted = np.array([np.count_nonzero(values == value) for value in range(-6, 7)])
    rest = len(zeros) - counted.sum(), len(zeros) - expected.sum()
    assert stats.chisquare([*counted, rest[0]], [*expected, rest[1]]).pvalue > 0.001


def test_as_many_shares_as_are_promised_make_the_promised_noise() -> None:
    """Six sites of equal weight: 1.5 x 2 x 0.8 x 1/6 = 0.4, from the shares of four."""
    grid = DistributedNoise(bound=0.8, noise_multiplier=1.5, honest=4).make_noise_share_grid(6)
    assert 2.0**grid.scale_bits * math.sqrt(4) / grid.steps == pytest.approx(0.4, rel=1e-12)


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.integers(2, 40), st.floats(0.3, 50))
@settings(max_examples=40, deadline=None)
def test_an_update_is_on_the_grid_no_longer_than_its_bound_and_a_sum_stays_in_range(
    seed: int, bound: float, sites: int, noise_multiplier: float
) -> None:
    generator = np.random.default_rng(seed)
    grid = DistributedNoise(bound, noise_multiplier, 2).make_noise_share_grid(sites)
    update = generator.normal(size=50)
    update = (update / np.linalg.norm(update) * bound * (1 - 2.0**-20)).astype(np.float32)
    noise = draw_discrete_gaussian(50, stream(1), grid.scale_bits)
    placed = grid.add_noise_share(update, stream(1)).view(np.int32) - noise
    assert np.linalg.norm(placed) <= bound / sites * grid.steps
    assert np.abs(placed - update.astype(np.float64) * (1 / sites * grid.steps)).max() < 1
    assert grid.limit < 2**31
    assert grid.scale_bits >= LEAST_SCALE_BITS


def test_too_little_noise_leaves_no_room_and_is_refused() -> None:
    with pytest.raises(SecretsError, match="no room"):
        DistributedNoise(1.0, 1e-6, 2).make_noise_share_grid(3)


def opened(
    shares: DistributedNoise, rows: Mapping[str, str], lost_at: Mapping[str, int], *, cohort: int = 2
) -> tuple[UnmaskedSum, dict[str, NDArray[np.float64]]]:
    """A round of sites, each lost at a stage or never; the sum, and each site's own update."""
    updates = {site: update_of(seed, rows[site], shares.bound) for seed, site in enumerate(rows)}
    sites = {}
    for site, update in updates.items():
        terms = MaskingConditions(shares.bound, cohort=max(cohort, shares.honest), shares=shares)
        sites[site] = SiteMaskingRound("run", 3, site, update, terms)

    def ask(requests: Mapping[str, Record], expected: type[AnyRecord], enough: int) -> Iterator[tuple[str, AnyRecord]]:
        for site, request in requests.items():
            stage = STAGES.index(type(request))
            if lost_at.get(site, len(STAGES)) > stage:
                state = sites[site]
                yield (
                    site,
                    (
                        state.answer_with_keys,
                        state.answer_with_shares,
                        state.answer_with_masked_update,
                        state.answer_with_revealed_shares,
                    )[stage](request),
                )

    classes = tuple(sorted({name for names in rows.values() for name in names}))
    layout = UpdateVectorLayout(NUMBERS, 0, 3)
    request = MaskedSumRequest("run", 3, {k: tuple(v) for k, v in rows.items()}, classes, layout, shares.bound, shares)
    vectors = {site: flatten_update(update)[2].astype(np.float64) for site, update in updates.items()}
    return MaskedSummation(request, ask).unmask_sum(), vectors


def update_of(seed: int, rows: str, bound: float) -> ModelGroups:
    numbers = np.random.default_rng(seed).normal(size=NUMBERS + 4 * len(rows))
    numbers = (numbers / np.linalg.norm(numbers) * bound * 0.999).astype(np.float32)
    head = numbers[NUMBERS:].reshape(len(rows), 4)
    return ModelGroups(numbers[:NUMBERS], None, Head(tuple(rows), head[:, :3], head[:, 3]) if rows else None)


@pytest.mark.parametrize("lost", [{}, {"ash": 2}, {"ash": 3, "oak": 2}, {"ash": 2, "oak": 2}], ids=str)
def test_the_noise_of_the_sum_is_at_least_what_is_promised_whoever_of_two_in_nine_is_lost(lost: dict[str, int]) -> None:
    """Promised: 1.5 x 2 x 1 x 1/9 = 1/3, by six of nine. By s survivors: 1/3 x sqrt(s / 6)."""
    shares, names = DistributedNoise(bound=1.0, noise_multiplier=1.5, honest=6), (*NAMES, "rowan", "willow", "yew")
    result, updates = opened(shares, dict.fromkeys(names, ""), lost)
    survivors = [site for site in names if lost.get(site, 4) > 2]
    assert list(result.survivors) == survivors
    noise = result.vector - sum_in_order(updates[site] / 9 for site in survivors)
    expected = 1 / 3 * math.sqrt(len(survivors) / 6)
    # The sample variance of 4,000 numbers is within a tenth of the true one but for one time in 100,000.
    assert float(noise.var()) == pytest.approx(expected**2, rel=0.1)
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(NUMBERS)


def test_no_sum_of_fewer_sites_than_must_add_their_share_is_opened() -> None:
    with pytest.raises(MaskingFailed, match="5 are needed"):
        opened(DistributedNoise(1.0, 1.5, 5), dict.fromkeys(NAMES, ""), {"ash": 2, "oak": 2})


def test_a_row_of_fewer_sites_than_must_add_their_share_stays_masked() -> None:
    rows = {site: "ab" if site in NAMES[:3] else "a" for site in NAMES}
    result, _ = opened(DistributedNoise(1.0, 1.5, 4), rows, {})
    assert result.closed == ("b",)
    assert sorted(result.rows) == ["a"]


FACTS = {"level": "update", "secure_aggregation": True, "noise": "distributed", "honest_sites": 3}


def protection(honest_sites: int) -> SitePrivacySettings:
    section = PrivacySection.model_validate({**FACTS, "honest_sites": honest_sites, "noise_multiplier": 4.0})
    return SitePrivacySettings(section, 4.0, 1.0, 1, 1, 40)


def test_sites_that_side_with_the_coordinator_take_their_shares_off_and_it_is_counted() -> None:
    """Of four shares one is left: half the deviation."""
    alone = protection(4).noisy_steps_with_honest_sites(1)
    assert alone == NoisySteps(2.0, 1.0, 1)
    assert (
        protection(4).noisy_steps_with_honest_sites(4)
        == protection(4).noisy_steps_with_honest_sites(9)
        == NoisySteps(4.0, 1.0, 1)
    )
    assert compute_epsilon([alone], 1e-5, "rdp") > 2 * compute_epsilon(
        [protection(4).noisy_steps_per_round], 1e-5, "rdp"
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"honest_sites": None}, "needs honest_sites"),
        ({"noise": "local"}, "honest_sites goes with"),
        ({"secure_aggregation": False}, "a share hides nothing by itself"),
        ({"level": "patient"}, "adds its noise in each local step"),
        ({"noise_multiplier": 0.0}, "goes with noise"),
        ({"max_update_value": 3.0}, "max_update_norm, not max_update_value"),
        ({"honest_sites": 1}, "greater than or equal to 2"),
    ],
)
def test_what_makes_no_sense_with_distributed_noise_is_refused(changed: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        PrivacySection.model_validate({**FACTS, "noise_multiplier": 1.0, **changed})
