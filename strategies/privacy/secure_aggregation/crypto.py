"""Cryptography of secure aggregation: keys, secret shares, encrypted messages, mask streams, signed statements.

The primitives are those of the library ``cryptography``: key agreement by ECDH on P-256 with HKDF, encryption by
Fernet, masks from AES-256 in counter mode, as Bonawitz et al. require. Secret shares are made in
:mod:`polyclinic.strategies.privacy.secure_aggregation.secret_sharing`.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from pydantic import Base64Bytes, BaseModel, ConfigDict, ValidationError, model_validator

from polyclinic.common.errors import WireError
from polyclinic.common.wire.secure_aggregation import Integers
from polyclinic.strategies.privacy.secure_aggregation.secret_sharing import recover_secret

CURVE = ec.SECP256R1()
SECRET_BYTES = 32
VALUES_PER_BLOCK = 2**18
"""Number of values masked at a time: one megabyte."""


class SecretsError(WireError):
    """Raised when shares, keys or encrypted messages do not fit together; the message gives the reason."""


def make_key_pair() -> ec.EllipticCurvePrivateKey:
    """Make a key pair for one round."""
    return ec.generate_private_key(CURVE)


def encode_public_key_hex(key: ec.EllipticCurvePrivateKey) -> str:
    """Return the public key of a key pair, in hexadecimal, as in a site's statement."""
    return key.public_key().public_bytes(form.Encoding.X962, form.PublicFormat.CompressedPoint).hex()


def serialize_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as bytes, which are split into shares among the sites."""
    return key.private_numbers().private_value.to_bytes(SECRET_BYTES, "big")


def deserialize_private_key(secret: bytes, stated: str) -> ec.EllipticCurvePrivateKey:
    """Return the key that :func:`serialize_private_key` converted to bytes.

    Raises:
        SecretsError: If the bytes are not the private key of the stated public key.
    """
    try:
        key = ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)
    except ValueError:
        raise SecretsError("the shares of a key make no key") from None
    if encode_public_key_hex(key) != stated:
        raise SecretsError("the shares of a key do not make the stated one")
    return key


def compute_shared_secret(key: ec.EllipticCurvePrivateKey, other: str) -> bytes:
    """Return the shared secret of 32 bytes of this key and another site's public key.

    Raises:
        SecretsError: If the other key is not a point of the curve.
    """
    try:
        public = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, bytes.fromhex(other))
    except ValueError:
        raise SecretsError("a stated key is no point of the curve") from None
    agreed = key.exchange(ec.ECDH(), public)
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=None).derive(agreed)


def _make_cipher(key: ec.EllipticCurvePrivateKey, other: str) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(compute_shared_secret(key, other)))


def encrypt_message_for_site(letter: bytes, key: ec.EllipticCurvePrivateKey, recipient: str) -> bytes:
    """Encrypt a message so that only the owner of the public key ``recipient`` can read it.

    Args:
        letter: The message.
        key: The sender's key pair.
        recipient: The recipient's public key, in hexadecimal.
    """
    return _make_cipher(key, recipient).encrypt(letter)


def decrypt_message_from_site(letter: bytes, key: ec.EllipticCurvePrivateKey, sender: str) -> bytes:
    """Decrypt a message of :func:`encrypt_message_for_site`.

    Args:
        letter: The encrypted message.
        key: The recipient's key pair.
        sender: The sender's public key, in hexadecimal.

    Raises:
        SecretsError: If the message was not encrypted by the owner of ``sender`` for this key.
    """
    try:
        return _make_cipher(key, sender).decrypt(letter)
    except InvalidToken:
        raise SecretsError("a letter cannot be opened") from None


def recover_secret_from_shares(shares: Sequence[bytes]) -> bytes:
    """Recover a secret from its shares, at least as many as its threshold.

    Raises:
        SecretsError: If the shares do not fit together.
    """
    try:
        return recover_secret(shares)
    except ValueError as error:
        raise SecretsError(f"shares do not fit together: {error}") from None


def add_mask_to_vector(vector: Integers, places: Iterable[slice], secret: bytes, *, subtract: bool = False) -> None:
    """Add the mask that follows from a secret to slices of a vector, in place and modulo 2**32.

    Args:
        places: Slices of the vector, in the order in which the mask's values are used.
        secret: Key of the stream of random numbers that is the mask.
        subtract: True to subtract the mask instead.
    """
    stream = Cipher(AES256(secret), CTR(bytes(16))).encryptor()  # a secret makes one stream only
    change = np.subtract if subtract else np.add
    for place in places:
        for start in range(place.start, place.stop, VALUES_PER_BLOCK):
            block = vector[start : min(start + VALUES_PER_BLOCK, place.stop)]
            change(block, np.frombuffer(stream.update(bytes(4 * len(block))), "<u4"), out=block)


# ---------------------------------------------------------------------- messages between sites


class SecretShares(BaseModel):
    """Shares of one site's secrets, sent encrypted to another site.

    Attributes:
        key: Share of the sender's masking key, to be revealed if the sender drops out.
        masks: Segment of the vector -> share of the sender's own mask for it, to be revealed if the sender stays.
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


def read_secret_shares(text: bytes, expected: tuple[str, int, str, str]) -> SecretShares:
    """Read shares of a site's secrets, and check for whom and for which round they are.

    Args:
        text: The decrypted message.
        expected: Run, round, sender and recipient that the message must name.

    Raises:
        SecretsError: If the text holds no shares, or names others than the expected ones.
    """
    try:
        letter = SecretShares.model_validate_json(text)
    except ValidationError:
        raise SecretsError("a letter does not hold shares") from None
    if (letter.run, letter.round, letter.sender, letter.recipient) != expected:
        raise SecretsError("a letter is of another run or round, or for another site")
    return letter


# ---------------------------------------------------------------------- signed statements

SIGNATURE_ALGORITHM = ec.ECDSA(hashes.SHA256())


class MaskingStatementError(ValueError):
    """Raised when a site's statement is invalid; the message gives the reason."""


class MaskingStatement(BaseModel):
    """A site's signed statement of the request that it received in one round of secure aggregation.

    Attributes:
        members: The sites that were requested to mask together, sorted; if the site has masked this round before, those
            of the earlier attempt.
        opened: The sites whose sum the site helped to unmask in an earlier attempt; empty for none.
        cohort: Smallest number of sites whose sum the site helps to unmask.
        divisor: Divisor of the site's update: the number of members in the round's first attempt.
        plan: SHA-256 of plan, label contract and names of statistics, of the classes of the head rows if all sites have
            the same, and of the earlier round that the site continues from.
        model: SHA-256 of the trunk and batch normalisation that the site started from, and of statistics not given by
            class.
        shared: Name -> SHA-256 of values that only some sites share: by class, the head row that the site started from
            and the received statistics.
        rows: Classes whose head rows the site sends, sorted.
        alone: True if the site allows the unmasking of a head row that fewer sites send than ``cohort``.
        sealing_key, masking_key: Public keys made for this round: for messages to other sites, and for masks.
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
    def _check_statement_fields(self) -> Self:
        if list(self.rows) != sorted(set(self.rows)):
            raise ValueError("rows must be sorted, once each")
        if not len(self.members) <= self.divisor:
            raise ValueError("the divisor must be the number of members or more")
        if not all(re.fullmatch("[0-9a-f]{66}", key) for key in (self.sealing_key, self.masking_key)):
            raise ValueError("keys must be points of NIST P-256, compressed, in hexadecimal digits")
        return self

    def bytes_to_sign(self) -> bytes:
        """Return the statement as the bytes that are signed."""
        return self.model_dump_json().encode()

    def describe_request_disagreement(self, other: "MaskingStatement") -> str:
        """Return a phrase on how another site's request differs from this site's; empty if they agree.

        With different requests, a malicious coordinator could make another site add nothing to the sum, or find this
        site's update by subtraction.
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
    """Read a site's statement from JSON.

    Raises:
        MaskingStatementError: If the text is not a statement.
    """
    try:
        return MaskingStatement.model_validate_json(text)
    except ValidationError as error:
        raise MaskingStatementError(f"is no statement of a site's keys: {error.errors()[0]['msg']}") from None


def sign_masking_statement(statement: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Sign a statement with the site's own key."""
    return key.sign(statement, SIGNATURE_ALGORITHM)


def refuse_unsigned_statement(statement: bytes, signature: bytes, identity: str) -> None:
    """Check that a statement is signed by a site's key.

    Args:
        statement: The bytes that were signed.
        identity: The site's public key as an OpenSSH line.

    Raises:
        MaskingStatementError: If the signature is not by this key, or the key cannot be read.
    """
    try:
        key = load_ssh_public_key(identity.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise MaskingStatementError("the site's key is not on an elliptic curve")
        key.verify(signature, statement, SIGNATURE_ALGORITHM)
    except InvalidSignature:
        raise MaskingStatementError("is not signed by the site's key") from None
    except ValueError as error:
        raise MaskingStatementError(f"has a key that cannot be read: {error}") from None
