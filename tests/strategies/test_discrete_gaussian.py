"""The noise of differential privacy: its distribution, exactly and by statistics, and the stream that it is made of."""

import heapq
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from itertools import count

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import stats

from polyclinic.strategies.privacy import noise as noise_module
from polyclinic.strategies.privacy.noise import (
    SCALE_BITS,
    NoiseQuantizationGrid,
    SecretBitStream,
    _draw_exp_bernoulli_events,
    _try_discrete_gaussian,
    draw_discrete_gaussian,
    make_secret_noise_source,
    make_seeded_noise_source,
)

SIGMA = 2**SCALE_BITS


def probabilities(sigma: int, farthest: int) -> dict[int, float]:
    """Canonne, Kamath and Steinke, definition 1."""
    weights = {y: float(np.exp(-(y**2) / (2 * sigma**2))) for y in range(-farthest, farthest + 1)}
    return {y: weight / sum(weights.values()) for y, weight in weights.items()}


class Undecided(Exception):
    """A try asked for one choice more than were given."""


class Choices(SecretBitStream):
    """Bits chosen in advance, of one try.

    Attributes:
        chances: Of the options of the last choice.
    """

    def __init__(self, chosen: tuple[int, ...], top_bits: int) -> None:
        self._chosen, self._top_bits = iter(chosen), top_bits
        self.chances: list[Fraction] = []

    def _next(self, chances: list[Fraction]) -> int:
        self.chances = chances
        option = next(self._chosen, None)
        if option is None:
            raise Undecided
        return option

    def draw_random_integers(self, count: int) -> NDArray[np.uint64]:
        """All that the sampler looks at in a word: its highest bits, and the lowest."""
        assert count == 1
        option = self._next([Fraction(1, 2 << self._top_bits)] * (2 << self._top_bits))
        return np.array([(option >> 1) << (64 - self._top_bits) | (option & 1)], np.uint64)

    def draw_bernoulli_events(self, count: int, divisor: int) -> NDArray[np.bool_]:
        assert count == 1
        return np.array([self._next([Fraction(1, divisor), 1 - Fraction(1, divisor)]) == 0])


def followed(
    sampler: Callable[[SecretBitStream], list[int]], top_bits: int, open_at_most: float
) -> tuple[dict[int, float], float, float]:
    """Probability of each value, of no value, and of the paths not followed; the likeliest paths come first."""
    ended, rejected, remaining, order = defaultdict[int, Fraction](Fraction), Fraction(0), Fraction(1), count()
    waiting: list[tuple[float, int, tuple[int, ...], Fraction]] = [(-1.0, next(order), (), Fraction(1))]
    while remaining > open_at_most:
        _, _, path, likely = heapq.heappop(waiting)
        choices = Choices(path, top_bits)
        try:
            values = sampler(choices)
        except Undecided:
            for option, chance in enumerate(choices.chances):
                together = likely * chance
                heapq.heappush(waiting, (-float(together), next(order), (*path, option), together))
            continue
        remaining -= likely
        if values:
            ended[values[0]] += likely
        else:
            rejected += likely
    return {value: float(chance) for value, chance in ended.items()}, float(rejected), float(remaining)


def test_the_sampler_has_the_published_distribution_exactly() -> None:
    """Every choice that one try can make is followed with its exact probability; no random number takes part."""
    ended, rejected, remaining = followed(lambda bits: _try_discrete_gaussian(1, bits, 0).tolist(), 1, 1e-2)
    accepted = 1 - rejected
    for y, probability in probabilities(1, 40).items():
        low, high = ended.get(y, 0) / accepted, (ended.get(y, 0) + remaining) / (accepted - remaining)
        assert low <= probability <= high
    assert set(ended) >= {-3, -2, -1, 0, 1, 2, 3}


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4])
def test_an_event_has_the_probability_of_its_exponential_exactly(exponent: int) -> None:
    def falls(bits: SecretBitStream) -> list[int]:
        return [int(_draw_exp_bernoulli_events(np.array([exponent], np.uint64), bits, 1)[0])]

    ended, _, remaining = followed(falls, 1, 1e-3)
    assert ended.get(1, 0) - 1e-12 <= np.exp(-exponent / 2) <= ended.get(1, 0) + remaining


@pytest.mark.parametrize("scale_bits", [0, 1, 2, 4])
def test_small_scales_have_the_published_frequencies(scale_bits: int) -> None:
    drawn = draw_discrete_gaussian(400_000, SecretBitStream(bytes([scale_bits]) * 32), scale_bits)
    expected = {y: 400_000 * p for y, p in probabilities(2**scale_bits, 9 * 2**scale_bits).items()}
    likely = [y for y, number in expected.items() if number >= 10]
    counts = [int((drawn == y).sum()) for y in likely]
    whole = np.array([expected[y] for y in likely])
    assert stats.chisquare(counts, whole / whole.sum() * sum(counts)).pvalue > 1e-4
    assert sum(counts) > 399_000


def test_at_the_scale_in_use_it_is_a_gaussian_on_every_place_of_the_grid() -> None:
    drawn = draw_discrete_gaussian(1_000_000, SecretBitStream(b"\7" * 32))
    assert stats.kstest(drawn / SIGMA, "norm").pvalue > 1e-4
    for bits in (1, 8, 16):  # the lowest bits are uniform: nothing shows what they were added to
        lowest = np.bincount(drawn & ((1 << bits) - 1), minlength=1 << bits)
        assert stats.chisquare(lowest).pvalue > 1e-4
    beyond = [int((np.abs(drawn) > k * SIGMA).sum()) for k in (3, 4)]
    for number, tail in zip(beyond, (2 * stats.norm.sf(3), 2 * stats.norm.sf(4)), strict=True):
        assert stats.binomtest(number, drawn.size, tail).pvalue > 1e-4
    neighbours = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(neighbours) < 5 / drawn.size**0.5


def test_draws_of_images_are_independent_with_their_rate() -> None:
    noise, draws = make_seeded_noise_source(5), np.zeros(1000)
    for _ in range(400):
        draws[noise.draw_poisson_sample(1000, 0.3).numpy()] += 1
    assert stats.binomtest(int(draws.sum()), 400_000, 0.3).pvalue > 1e-4
    assert stats.chisquare(draws).pvalue > 1e-6  # no image is preferred
    assert len(noise.draw_poisson_sample(1000, 1.0)) == 1000
    assert len(noise.draw_poisson_sample(1000, 0.0)) == 0


def test_the_stream_is_aes_256_in_counter_mode() -> None:
    key = bytes(range(32))
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    blocks = b"".join(encryptor.update(number.to_bytes(16, "big")) for number in range(10))
    stream = SecretBitStream(key)
    parts = [stream.draw_random_integers(1), stream.draw_random_integers(5), stream.draw_random_integers(14)]
    assert b"".join(part.astype("<u8").tobytes() for part in parts) == blocks


def test_every_bit_of_the_key_changes_the_noise() -> None:
    """The Mersenne Twister before took 32 of its 63 bits: all of them could be tried in minutes."""
    key = int.from_bytes(b"\x5a" * 32, "big")
    keys = [key, *(key ^ (1 << bit) for bit in range(256))]
    drawn = {draw_discrete_gaussian(4, SecretBitStream(number.to_bytes(32, "big"))).tobytes() for number in keys}
    assert len(drawn) == 257


def test_a_hospitals_key_is_256_bits_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def recorded(number: int) -> bytes:
        lengths.append(number)
        return bytes(number)

    monkeypatch.setattr(noise_module.secrets, "token_bytes", recorded)
    zero = draw_discrete_gaussian(4, SecretBitStream(bytes(32)))
    assert make_secret_noise_source().draw_discrete_gaussian_noise((4,)).tolist() == zero.tolist()
    assert lengths == [32]


@pytest.mark.parametrize("low", [0, 77])
def test_trying_the_seeds_of_the_generator_of_torch_finds_no_noise(low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack of old, made easy: all entropy but its lowest bits is known, and torch's generator gets them."""

    def nearly_known(bits: int) -> int:
        return 1 << (bits - 1) | low

    monkeypatch.setattr(noise_module.secrets, "randbits", nearly_known)
    monkeypatch.setattr(noise_module.secrets, "token_bytes", lambda number: nearly_known(8 * number).to_bytes(number))
    released = NoiseQuantizationGrid(1.0, 1.0).add_noise_to_sum(
        torch.zeros(2000, dtype=torch.float64), make_secret_noise_source()
    )
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        draws = [torch.randn(2000, generator=generator) for _ in range(4)]
        for guess in (draws[0], torch.stack(draws).sum(dim=0) / 2):
            assert abs(float(np.corrcoef(guess, released)[0, 1])) < 0.15


@pytest.mark.parametrize("deviation", [0.5, 3.0, 40.0])
def test_what_is_released_has_the_deviation_asked_for_and_lies_on_the_grid(deviation: float) -> None:
    grid = NoiseQuantizationGrid(deviation, 1.0)
    zeros = torch.zeros(200_000, dtype=torch.float64)
    released = grid.add_noise_to_sum(zeros, make_seeded_noise_source(1)).numpy()
    assert released.std() == pytest.approx(deviation, rel=0.01)
    assert abs(released.mean()) < 5 * deviation / released.size**0.5
    steps = (zeros + make_seeded_noise_source(1).draw_discrete_gaussian_noise(zeros.shape)).numpy()
    np.testing.assert_array_equal(released, (steps * grid.step_size).astype(np.float32))
    assert (steps == np.round(steps)).all()
    faint = NoiseQuantizationGrid(1e-9, 1.0).add_noise_to_sum(zeros[:1000], make_seeded_noise_source(1))
    assert faint.numpy().std() > 1e-9  # no less than asked
