"""Keys, shares, encrypted messages and streams of masks; signed statements of sites.

All cryptography is Flower's and ``cryptography``'s; nothing is our own.

Of Flower's ``secure_aggregation`` (1.39): Shamir's sharing, key agreement and sealed letters. Not its generator of
masks, which folds a key into 32 bits for a Mersenne Twister, so that four thousand million trials take any mask off,
and leaves out the largest number; AES-256 in counter mode is what Bonawitz et al. ask for.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from pydantic import Base64Bytes, BaseModel, ConfigDict, ValidationError, model_validator

from common.errors import WireError
from common.wire.secure_aggregation import Integers

CURVE = ec.SECP256R1()
SECRET_BYTES = 32
BLOCK = 2**18
"""Numbers masked at a time: one megabyte."""


class SecretsError(WireError):
    """Shares, keys or letters that do not fit together, with the reason."""


def make_key_pair() -> ec.EllipticCurvePrivateKey:
    """Make a key pair for one round."""
    return ec.generate_private_key(CURVE)


def public_key_hex(key: ec.EllipticCurvePrivateKey) -> str:
    """Return the public half of a key, as a statement has it."""
    return key.public_key().public_bytes(form.Encoding.X962, form.PublicFormat.CompressedPoint).hex()


def private_key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the private half of a key, as it is shared among sites."""
    return key.private_numbers().private_value.to_bytes(SECRET_BYTES, "big")


def private_key_from_bytes(secret: bytes, stated: str) -> ec.EllipticCurvePrivateKey:
    """Return a key from its :func:`private_key_bytes`.

    Raises:
        SecretsError: If the bytes are not the private half of the stated key.
    """
    try:
        key = ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)
    except ValueError:
        raise SecretsError("the shares of a key make no key") from None
    if public_key_hex(key) != stated:
        raise SecretsError("the shares of a key do not make the stated one")
    return key


def agree_secret(key: ec.EllipticCurvePrivateKey, other: str) -> bytes:
    """Return the 32 bytes that this key and another site's public key agree on.

    Raises:
        SecretsError: If the other key is no point of the curve.
    """
    return base64.urlsafe_b64decode(_agreed_text(key, other))


def _agreed_text(key: ec.EllipticCurvePrivateKey, other: str) -> bytes:
    try:
        public = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, bytes.fromhex(other))
    except ValueError:
        raise SecretsError("a stated key is no point of the curve") from None
    return generate_shared_key(key, public)


def encrypt_for(letter: bytes, key: ec.EllipticCurvePrivateKey, recipient: str) -> bytes:
    """Encrypt a message so that only the owner of the public key ``recipient`` can read it."""
    return encrypt(_agreed_text(key, recipient), letter)


def decrypt_from(letter: bytes, key: ec.EllipticCurvePrivateKey, sender: str) -> bytes:
    """Decrypt a message of :func:`encrypt_for`.

    Raises:
        SecretsError: If the message was not written by the owner of ``sender`` for this key.
    """
    try:
        return decrypt(_agreed_text(key, sender), letter)
    except InvalidToken:
        raise SecretsError("a letter cannot be opened") from None


def split_secret(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """Split a secret into shares, one a site, of which ``threshold`` make it again and fewer say nothing."""
    return create_shares(secret, threshold, sites)


def join_shares(shares: Sequence[bytes]) -> bytes:
    """Join at least as many shares of :func:`split_secret` as its threshold.

    Raises:
        SecretsError: If the shares do not make a secret.
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


# ---------------------------------------------------------------------- what a site writes to another


class SecretShares(BaseModel):
    """Shares of one site's secrets, for another site.

    Attributes:
        key: Share of the writer's masking key, to be given away if the writer is lost.
        masks: Segment -> share of the writer's own mask, to be given away if the writer is not lost.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    round: int
    sender: str
    recipient: str
    key: Base64Bytes
    masks: dict[str, Base64Bytes]

    def to_json_bytes(self) -> bytes:
        return self.model_dump_json().encode()


def read_shares(text: bytes, expected: tuple[str, int, str, str]) -> SecretShares:
    """Read shares of this run and round, from and to these sites.

    Raises:
        SecretsError: If the text is anything else.
    """
    try:
        letter = SecretShares.model_validate_json(text)
    except ValidationError:
        raise SecretsError("a letter does not hold shares") from None
    if (letter.run, letter.round, letter.sender, letter.recipient) != expected:
        raise SecretsError("a letter is of another run or round, or for another site")
    return letter


# ---------------------------------------------------------------------- what a site states, signed

SIGNED_WITH = ec.ECDSA(hashes.SHA256())


class StatementError(ValueError):
    """A statement that does not count, with the reason."""


class MaskingStatement(BaseModel):
    """A site's signed statement of what it was asked to do in one round of secure aggregation.

    Attributes:
        members: The sites that the coordinator asked to mask together, sorted; those of an earlier attempt at this
            round where the site has masked it before.
        opened: The sites whose sum it helped to open in an earlier attempt; empty for none.
        cohort: Fewest sites whose sum it helps to open.
        divisor: What it divides its update by: how many sites were asked to mask together in the round's first attempt.
        plan: SHA-256 of what it was asked to do: plan, contract, and head rows where all sites have the same.
        model: SHA-256 of the trunk and batch normalisation that it started from.
        shared: SHA-256 by name of what it has in common with some sites only: the head rows that it started from.
        rows: Classes whose head rows it sends, sorted.
        alone: Whether a row that fewer sites own than a cohort may be opened.
        sealing_key, masking_key: Public halves, made for this round: for letters to other sites, and for masks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: str
    round: int
    site: str
    members: tuple[str, ...]
    opened: tuple[str, ...]
    cohort: int
    divisor: int
    plan: str
    model: str
    shared: dict[str, str]
    rows: tuple[str, ...]
    alone: bool
    sealing_key: str
    masking_key: str

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if list(self.rows) != sorted(set(self.rows)):
            raise ValueError("rows must be sorted, once each")
        if not len(self.members) <= self.divisor:
            raise ValueError("the divisor must be the number of members or more")
        if not all(re.fullmatch("[0-9a-f]{66}", key) for key in (self.sealing_key, self.masking_key)):
            raise ValueError("keys must be points of NIST P-256, compressed, in hexadecimal digits")
        return self

    def signed_text(self) -> bytes:
        """Return the text that is signed."""
        return self.model_dump_json().encode()

    def describe_disagreement(self, other: "MaskingStatement") -> str:
        """Return a phrase on what the other site was asked that this site was not; empty where they agree.

        The coordinator asks; a site that it asks otherwise could add nothing to the sum, or another site's update
        could be found by subtraction.
        """
        if other.members != self.members:
            return "was asked to mask together with other sites"
        if other.plan != self.plan:
            return "trained by another plan"
        if other.model != self.model:
            return "trained from another model"
        if other.divisor != self.divisor:
            return "was asked to divide its update by another number"
        common = sorted(self.shared.keys() & other.shared.keys())
        return next((f"received another {name}" for name in common if self.shared[name] != other.shared[name]), "")


def read_masking_statement(text: bytes) -> MaskingStatement:
    """Read a statement.

    Raises:
        StatementError: If the text is no statement.
    """
    try:
        return MaskingStatement.model_validate_json(text)
    except ValidationError as error:
        raise StatementError(f"is no statement of a site's keys: {error.errors()[0]['msg']}") from None


def sign_masking_statement(statement: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Sign a statement with a site's own key."""
    return key.sign(statement, SIGNED_WITH)


def refuse_unsigned_statement(statement: bytes, signature: bytes, identity: str) -> None:
    """Raise :class:`StatementError` if this key did not sign this statement."""
    try:
        key = load_ssh_public_key(identity.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise StatementError("the site's key is not on an elliptic curve")
        key.verify(signature, statement, SIGNED_WITH)
    except InvalidSignature:
        raise StatementError("is not signed by the site's key") from None
    except ValueError as error:
        raise StatementError(f"has a key that cannot be read: {error}") from None
