"""Signed statements beside every record of the hospital link: who sends it, to whom, in which run and round.

A site signs each record that it sends with the key that it was admitted with; the coordinator signs each record that
it sends with a key that its authority has certified. The statement is one line of JSON and holds the SHA-256 of the
record, so that a record and its statement prove who sent it to anyone who holds the public key: without the SuperLink,
without the other side, years later. A simulation signs nothing.

The signature travels among the record's fields, under names that begin with ``signature.``; a record of its own would
cost a call more.
"""

from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.app import ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.security.identity import SIGNS_REQUESTS, UNREADABLE_CERTIFICATE
from common.wire.canonical_bytes import FIELDS, SIGNATURE, record_sha256, small_fields

SIGNED_WITH = ec.ECDSA(hashes.SHA256())
# The key of a site also signs calls (a time) and statements of secure aggregation (a line of JSON). What is signed
# here begins otherwise, so that none of them can be shown as another.
OF_A_REPLY, OF_A_REQUEST = b"polyclinic reply\n", b"polyclinic request\n"
CHAINED = ("RollCallAnswer", "TrainReply", "EvaluateReply", "BenefitReply")
"""The records that a site counts, each run from 1: a gap shows that one is missing."""

LONGEST_CERTIFICATE = 2_000
_Sha256 = Field(pattern="^[0-9a-f]{64}$")


class SignatureFault(ValueError):
    """A record that is not signed as it should be; says why."""


class _Statement(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a statement.

        Raises:
            SignatureFault: If it is none.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SignatureFault(f"its statement cannot be read: {error.errors()[0]['msg']}") from None


class ReplyStatement(_Statement):
    """What a site says of a record that it sends.

    Attributes:
        site: Its name.
        run, round: Of the request that is answered; round 0 at the roll call.
        record: The kind of the record, for instance ``TrainReply``.
        message: Flower's name of the message that is answered: a SHA-256 over a message with a nonce.
        sha256: Of the record, :func:`common.wire.canonical_bytes.record_sha256`.
        number: From 1: one more than the replies of this site to this run that the coordinator had taken; 0 for records
            that are not counted.
        before: The message that the last of those answered; empty where there was none.
    """

    site: str = Field(max_length=200)
    run: str = Field(max_length=64)
    round: int = Field(ge=0, lt=2**31)
    record: str = Field(max_length=40)
    message: str = _Sha256
    sha256: str = _Sha256
    number: int = Field(ge=0, lt=2**31)
    before: str = Field(pattern="^([0-9a-f]{64})?$")


class RequestStatement(_Statement):
    """What the coordinator says of a record that it sends.

    Attributes:
        site: The name of the site that it is for.
        key: That site's public key as :func:`common.security.identity.fingerprint` has it.
        run, round, record, sha256: As in :class:`ReplyStatement`.
        nonce: 128 random bits, in hexadecimal digits: no two messages are alike, and nobody can guess one's name.
    """

    site: str = Field(max_length=200)
    key: str = Field(max_length=100)
    run: str = Field(max_length=64)
    round: int = Field(ge=0, lt=2**31)
    record: str = Field(max_length=40)
    sha256: str = _Sha256
    nonce: str = Field(pattern="^[0-9a-f]{32}$")


class Signed(BaseModel):
    """A statement with its signature, as audits and receipts hold it.

    Attributes:
        statement: As it was signed.
        signature: In hexadecimal digits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    statement: str = Field(max_length=2000)
    signature: str = Field(pattern="^[0-9a-f]{0,300}$")


def sign(content: RecordDict, statement: _Statement, key: ec.EllipticCurvePrivateKey, **more: bytes) -> RecordDict:
    """Return the records with the signature among their fields; ``content`` is not changed.

    Args:
        more: What else a reader needs: the coordinator's certificate.
    """
    text, prefix = statement.model_dump_json(), OF_A_REPLY if isinstance(statement, ReplyStatement) else OF_A_REQUEST
    values = {"statement": text, "signature": key.sign(prefix + text.encode(), SIGNED_WITH), **more}
    fields: dict[str, Any] = {
        name: value for name, value in small_fields(content).items() if not name.startswith(SIGNATURE)
    }
    signed = RecordDict({name: content[name] for name in content})
    signed[FIELDS] = ConfigRecord(fields | {f"{SIGNATURE}{name}": value for name, value in values.items()})
    return signed


def is_signed(content: RecordDict) -> bool:
    """Return whether a signature travels with a record."""
    return any(name.startswith(SIGNATURE) for name in small_fields(content))


def signature_of(content: RecordDict) -> tuple[Signed, bytes]:
    """Return the signature that travels with a record, and the certificate with it, if any. Nothing is verified.

    Raises:
        SignatureFault: If there is none.
    """
    fields = {name: value for name, value in small_fields(content).items() if name.startswith(SIGNATURE)}
    statement, signature, certificate = (
        fields.pop(f"{SIGNATURE}{name}", None) for name in ("statement", "signature", "certificate")
    )
    if not isinstance(statement, str) or not isinstance(signature, bytes) or fields:
        raise SignatureFault("it is not signed")
    if not isinstance(certificate, bytes | None) or len(certificate or b"") > LONGEST_CERTIFICATE:
        raise SignatureFault("its signature is not in the form of this release")
    try:
        return Signed(statement=statement, signature=signature.hex()), certificate or b""
    except ValidationError:
        raise SignatureFault("its signature is not in the form of this release") from None


def attached_signature(content: RecordDict) -> Signed | None:
    """Return the signature that travels with a record, not verified; None where none can be read."""
    try:
        return signature_of(content)[0]
    except SignatureFault:
        return None


def verified_reply(signed: Signed, public_key: str) -> ReplyStatement:
    """Return a site's statement, if this key signed it.

    Args:
        public_key: The site's, as an OpenSSH line.

    Raises:
        SignatureFault: If it did not, or it is no statement.
    """
    try:
        key = load_ssh_public_key(public_key.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise SignatureFault("the site's public key cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureFault("the site's public key is of another kind")
    _verify(key, OF_A_REPLY, signed)
    return ReplyStatement.read(signed.statement)


def verified_request(signed: Signed, certificate: bytes, authority: x509.Certificate) -> RequestStatement:
    """Return the coordinator's statement, if a key signed it that this authority has certified for that.

    Args:
        certificate: Of the key, DER.
        authority: The certificate in the site's kit.

    Raises:
        SignatureFault: If not.
    """
    _verify(signing_key(certificate, authority), OF_A_REQUEST, signed)
    return RequestStatement.read(signed.statement)


def signing_key(certificate: bytes, authority: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate if this authority issued it for signing requests; dates are not checked.

    Raises:
        SignatureFault: If not.
    """
    try:
        read = x509.load_der_x509_certificate(certificate)
        read.verify_directly_issued_by(authority)
        purposes = read.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        key = read.public_key()
    except (*UNREADABLE_CERTIFICATE, InvalidSignature, x509.ExtensionNotFound):
        raise SignatureFault("its certificate is not one of this coordinator") from None
    if SIGNS_REQUESTS not in purposes or ExtendedKeyUsageOID.SERVER_AUTH in purposes:
        raise SignatureFault("its certificate is for another purpose")
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureFault("its certificate has a key of another kind")
    return key


def refuse_another_record(statement: ReplyStatement | RequestStatement, content: RecordDict) -> None:
    """Raise :class:`SignatureFault` unless a statement is about these records."""
    if statement.sha256 != record_sha256(content):
        raise SignatureFault("its statement is about another record")


def record_context(content: RecordDict) -> tuple[str, int, str]:
    """Run, round and kind of one of our records, unchecked; as they are stated."""
    fields = small_fields(content)
    run, number, record = fields.get("run"), fields.get("round", 0), fields.get("wire.record")
    return str(run), number if type(number) is int else -1, str(record)


def _verify(key: ec.EllipticCurvePublicKey, prefix: bytes, signed: Signed) -> None:
    try:
        key.verify(bytes.fromhex(signed.signature), prefix + signed.statement.encode(), SIGNED_WITH)
    except InvalidSignature:
        raise SignatureFault("the signature is not by the key of the one in whose name it came") from None
