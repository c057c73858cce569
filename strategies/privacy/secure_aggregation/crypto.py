"""Keys, shares, letters and streams of masks. All cryptography is Flower's and ``cryptography``'s; nothing is our own.

Of Flower's ``secure_aggregation`` (1.39): Shamir's sharing, key agreement and sealed letters. Not its generator of
masks, which folds a key into 32 bits for a Mersenne Twister, so that four thousand million trials take any mask off,
and leaves out the largest number; AES-256 in counter mode is what Bonawitz et al. ask for.
"""

import base64
from collections.abc import Iterable, Sequence

import numpy as np
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key

from common.errors import WireError
from common.wire.secure_aggregation import Integers

CURVE = ec.SECP256R1()
SECRET_BYTES = 32
BLOCK = 2**18
"""Numbers masked at a time: one megabyte."""


class SecretsError(WireError):
    """Shares, keys or letters that do not fit together, with the reason."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key pair for one round."""
    return ec.generate_private_key(CURVE)


def public_hex(key: ec.EllipticCurvePrivateKey) -> str:
    """The public half, as it is stated."""
    return key.public_key().public_bytes(form.Encoding.X962, form.PublicFormat.CompressedPoint).hex()


def secret_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private half, as it is shared."""
    return key.private_numbers().private_value.to_bytes(SECRET_BYTES, "big")


def key_of(secret: bytes, stated: str) -> ec.EllipticCurvePrivateKey:
    """The inverse of :func:`secret_of`.

    Raises:
        SecretsError: If it is not the private half of the stated key.
    """
    try:
        key = ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)
    except ValueError:
        raise SecretsError("the shares of a key make no key") from None
    if public_hex(key) != stated:
        raise SecretsError("the shares of a key do not make the stated one")
    return key


def agreed(key: ec.EllipticCurvePrivateKey, other: str) -> bytes:
    """What this key and another site's public half agree on: 32 bytes.

    Raises:
        SecretsError: If the other is no point of the curve.
    """
    return base64.urlsafe_b64decode(_agreed_text(key, other))


def _agreed_text(key: ec.EllipticCurvePrivateKey, other: str) -> bytes:
    try:
        public = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, bytes.fromhex(other))
    except ValueError:
        raise SecretsError("a stated key is no point of the curve") from None
    return generate_shared_key(key, public)


def sealed(letter: bytes, key: ec.EllipticCurvePrivateKey, recipient: str) -> bytes:
    """A letter that only the owner of the public key ``recipient`` can read."""
    return encrypt(_agreed_text(key, recipient), letter)


def opened(letter: bytes, key: ec.EllipticCurvePrivateKey, sender: str) -> bytes:
    """The inverse of :func:`sealed`.

    Raises:
        SecretsError: If it was not written by the owner of ``sender`` for this key.
    """
    try:
        return decrypt(_agreed_text(key, sender), letter)
    except InvalidToken:
        raise SecretsError("a letter cannot be opened") from None


def shared(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """Shares of a secret, one a site, of which ``threshold`` make it again and fewer say nothing."""
    return create_shares(secret, threshold, sites)


def combined(shares: Sequence[bytes]) -> bytes:
    """The inverse of :func:`shared`, from at least as many shares as its threshold.

    Raises:
        SecretsError: If they do not make a secret.
    """
    try:
        secret = combine_shares(list(shares))
    except ValueError:
        raise SecretsError("shares do not fit together") from None
    if len(secret) != SECRET_BYTES:
        raise SecretsError("shares make a secret of another length")
    return secret


def add_mask(vector: Integers, places: Iterable[slice], secret: bytes, *, subtract: bool = False) -> None:
    """Add the stream of masks of a secret to these places, in their order, or take it off; modulo 2**32."""
    stream = Cipher(AES256(secret), CTR(bytes(16))).encryptor()  # a secret makes one stream only
    change = np.subtract if subtract else np.add
    for place in places:
        for start in range(place.start, place.stop, BLOCK):
            block = vector[start : min(start + BLOCK, place.stop)]
            change(block, np.frombuffer(stream.update(bytes(4 * len(block))), "<u4"), out=block)
