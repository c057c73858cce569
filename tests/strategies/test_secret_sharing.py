"""Secret shares: any threshold of them recovers the secret, and nothing else passes for it."""

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.strategies.privacy.secure_aggregation import secret_sharing
from polyclinic.strategies.privacy.secure_aggregation.crypto import compute_shared_secret, encode_public_key_hex
from polyclinic.strategies.privacy.secure_aggregation.secret_sharing import (
    PRIME,
    recover_secret,
    split_secret_into_shares,
)

SECRETS = st.binary(min_size=32, max_size=32)


@given(SECRETS, st.integers(1, 9), st.data())
def test_any_shares_from_the_threshold_on_recover_the_secret_and_fewer_do_not(
    secret: bytes, threshold: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(threshold, 12))
    shares = split_secret_into_shares(secret, threshold, count)
    chosen = data.draw(st.permutations(shares))[: data.draw(st.integers(threshold, count))]
    assert recover_secret(chosen) == secret
    for some in itertools.islice(itertools.combinations(shares, threshold - 1), 5):
        with pytest.raises(ValueError, match="share"):
            recover_secret(some)


def test_the_polynomial_is_worked_out_and_found_again_as_by_hand() -> None:
    """3 - 2x + 5x**2 is 6 at 1, 19 at 2 and 42 at 3; -2 is the prime less 2."""
    values = {place: secret_sharing._evaluate_polynomial([3, PRIME - 2, 5], place) for place in (1, 2, 3)}
    assert values == {1: 6, 2: 19, 3: 42}
    assert secret_sharing._interpolate_at_zero(values) == 3


def test_the_prime_is_one() -> None:
    """Miller and Rabin's test with 40 bases; and no smaller value above 48 bytes is prime by the same test."""

    def passes(number: int) -> bool:
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 42):
            power = pow(base, odd, number)
            squares = [pow(power, 1 << step, number) for step in range(twos)]
            if power != 1 and number - 1 not in squares:
                return False
        return True

    assert passes(PRIME)
    assert not any(passes(number) for number in range(2**384 + 1, PRIME))


@pytest.mark.parametrize("place", [0, 4, 30, 52])
def test_a_changed_share_is_noticed(place: int) -> None:
    first, second, *_ = split_secret_into_shares(bytes(range(32)), 2, 3)
    changed = bytearray(first)
    changed[place] ^= 1
    with pytest.raises(ValueError, match="share"):
        recover_secret([bytes(changed), second])


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [b"short"],
        [bytes(53)],
        [b"\x01\x00\x00\x00" + b"\xff" * 49],
        [*2 * split_secret_into_shares(bytes(32), 1, 1)],
    ],
)
def test_malformed_and_repeated_shares_are_refused(shares: list[bytes]) -> None:
    with pytest.raises(ValueError, match="share"):
        recover_secret(shares)


@pytest.mark.parametrize(("secret", "threshold", "count"), [(bytes(31), 1, 1), (bytes(32), 0, 3), (bytes(32), 4, 3)])
def test_a_secret_of_another_length_and_an_impossible_threshold_are_refused(
    secret: bytes, threshold: int, count: int
) -> None:
    with pytest.raises(ValueError, match="must"):
        split_secret_into_shares(secret, threshold, count)


def test_one_share_below_the_threshold_may_belong_to_any_secret() -> None:
    """For each secret there is a polynomial of degree 1 through a given share: the share says nothing."""
    share, _ = split_secret_into_shares(bytes(range(32)), 2, 2)
    value = int.from_bytes(share[4:], "big")
    for other in (bytes(32), bytes(range(32, 64))):
        stated = int.from_bytes(other + secret_sharing._compute_check(other), "big")
        slope = (value - stated) % PRIME
        second = secret_sharing._encode_share(2, secret_sharing._evaluate_polynomial([stated, slope], 2))
        assert recover_secret([share, second]) == other


def test_the_agreed_key_is_the_one_of_flower_1_42() -> None:
    """ECDH on P-256 and HKDF with SHA-256: the number was computed with Flower's ``generate_shared_key``."""
    ours = ec.derive_private_key(7**40, ec.SECP256R1())
    theirs = ec.derive_private_key(11**50, ec.SECP256R1())
    agreed = "1b52a1ebaa75e7ccfaccd446350e23b4e47037c3ad8c40177ebe2e328a36a282"
    assert compute_shared_secret(ours, encode_public_key_hex(theirs)).hex() == agreed
    assert compute_shared_secret(theirs, encode_public_key_hex(ours)).hex() == agreed
