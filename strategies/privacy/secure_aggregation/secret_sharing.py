"""Shamir's secret sharing over a prime field (Shamir, "How to share a secret", Communications of the ACM, 1979).

A secret becomes the value at 0 of a random polynomial. Each site gets the value at its own place 1, 2, ... As many
shares as the polynomial has coefficients determine it; fewer leave every secret equally likely.

The first bytes of the secret's SHA-256 are shared together with the secret. So shares that do not belong together are
noticed.
"""

import hashlib
import secrets
from collections.abc import Sequence

PRIME = 2**384 + 231
"""The smallest prime above all values of 48 bytes: a secret of 32 bytes and its 16 bytes of SHA-256."""
CHECK_BYTES = 16
VALUE_BYTES = 48
SHARED_VALUE_BYTES = 49  # a value of the polynomial may be as large as the prime
PLACE_BYTES = 4


def split_secret_into_shares(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Split a secret of 32 bytes; any ``threshold`` of the shares recover it, fewer reveal nothing.

    Returns:
        The shares, each of 53 bytes: the share's place (1, 2, ...), and the polynomial's value there.

    Raises:
        ValueError: If the secret has another length, or the threshold is not between 1 and the number of shares.
    """
    if len(secret) != VALUE_BYTES - CHECK_BYTES:
        raise ValueError(f"the secret must have {VALUE_BYTES - CHECK_BYTES} bytes, it has {len(secret)}")
    if not 1 <= threshold <= shares:
        raise ValueError(f"the threshold must be between 1 and {shares}, it is {threshold}")

    value = int.from_bytes(secret + _compute_check(secret), "big")
    coefficients = [value, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_encode_share(place, _evaluate_polynomial(coefficients, place)) for place in range(1, shares + 1)]


def recover_secret(shares: Sequence[bytes]) -> bytes:
    """Recover a secret of 32 bytes from at least as many of its shares as the threshold.

    Raises:
        ValueError: If a share is malformed, two have one place, they are too few, or they do not belong together.
    """
    points = dict(_decode_share(share) for share in shares)
    if not points or len(points) < len(shares):
        raise ValueError("each share must have a place of its own")

    value = _interpolate_at_zero(points)
    if value >= 1 << 8 * VALUE_BYTES:
        raise ValueError("the shares do not belong together")
    content = value.to_bytes(VALUE_BYTES, "big")
    secret = content[:-CHECK_BYTES]
    if content[-CHECK_BYTES:] != _compute_check(secret):
        raise ValueError("the shares do not belong together, or are too few")
    return secret


def _compute_check(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()[:CHECK_BYTES]


def _evaluate_polynomial(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


def _interpolate_at_zero(points: dict[int, int]) -> int:
    """Return the value at 0 of the polynomial through all points (Lagrange)."""
    total = 0
    for place, value in points.items():
        numerator, denominator = 1, 1
        for other in points:
            if other != place:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - place) % PRIME
        total += value * numerator * pow(denominator, -1, PRIME)
    return total % PRIME


def _encode_share(place: int, value: int) -> bytes:
    return place.to_bytes(PLACE_BYTES, "little") + value.to_bytes(SHARED_VALUE_BYTES, "big")


def _decode_share(share: bytes) -> tuple[int, int]:
    if len(share) != PLACE_BYTES + SHARED_VALUE_BYTES:
        raise ValueError("a share has another length")
    place = int.from_bytes(share[:PLACE_BYTES], "little")
    value = int.from_bytes(share[PLACE_BYTES:], "big")
    if not place or value >= PRIME:
        raise ValueError("a share is out of range")
    return place, value
