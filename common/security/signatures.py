"""Signed statements beside every record of the hospital link: its sender, its receiver, its run and round.

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
from common.wire.canonical_bytes import FIELDS, SIGNATURE, read_small_fields, record_sha256

SIGNED_WITH = ec.ECDSA(hashes.SHA256())
# The key of a site also signs calls (a time) and statements of secure aggregation (a line of JSON). These prefixes keep
# a signature of one kind from being shown as another.
OF_A_REPLY, OF_A_REQUEST = b"polyclinic reply\n", b"polyclinic request\n"
CHAINED = ("RollCallAnswer", "TrainReply", "EvaluateReply", "BenefitReply")
"""The records that a site numbers, from 1 in each run; a gap shows that a record is missing."""

LONGEST_CERTIFICATE = 2_000
_Sha256 = Field(pattern="^[0-9a-f]{64}$")


class SignatureFault(ValueError):
    """A record whose signature is missing or wrong; the text says why."""


class _SignableStatement(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a statement from its JSON.

        Raises:
            SignatureFault: If the text is no statement.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SignatureFault(f"its statement cannot be read: {error.errors()[0]['msg']}") from None


class ReplyStatement(_SignableStatement):
    """A site's statement about a record that it sends.

    Attributes:
        site: Name of the site.
        run, round: Those of the request that is answered; round 0 at the roll call.
        record: The kind of the record, for instance ``TrainReply``.
        message: Flower's name of the message that is answered: a SHA-256 over a message with a nonce.
        sha256: Hash of the record, by :func:`common.wire.canonical_bytes.record_sha256`.
        number: One more than the number of this site's replies to this run that the coordinator has accepted; 0 for
            records that are not numbered.
        before: The message that the last accepted reply answered; empty where there was none.
    """

    site: str = Field(max_length=200)
    run: str = Field(max_length=64)
    round: int = Field(ge=0, lt=2**31)
    record: str = Field(max_length=40)
    message: str = _Sha256
    sha256: str = _Sha256
    number: int = Field(ge=0, lt=2**31)
    before: str = Field(pattern="^([0-9a-f]{64})?$")


class RequestStatement(_SignableStatement):
    """The coordinator's statement about a record that it sends.

    Attributes:
        site: Name of the site that receives the record.
        key: Fingerprint of that site's public key, by :func:`common.security.identity.public_key_fingerprint`.
        run, round, record, sha256: As in :class:`ReplyStatement`.
        nonce: 128 random bits in hexadecimal digits, which make each message unique and its name unguessable.
    """

    site: str = Field(max_length=200)
    key: str = Field(max_length=100)
    run: str = Field(max_length=64)
    round: int = Field(ge=0, lt=2**31)
    record: str = Field(max_length=40)
    sha256: str = _Sha256
    nonce: str = Field(pattern="^[0-9a-f]{32}$")


class SignedStatement(BaseModel):
    """A statement with its signature, as audits and receipts hold it.

    Attributes:
        statement: The JSON that was signed.
        signature: The signature in hexadecimal digits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    statement: str = Field(max_length=2000)
    signature: str = Field(pattern="^[0-9a-f]{0,300}$")


def sign(
    content: RecordDict, statement: _SignableStatement, key: ec.EllipticCurvePrivateKey, **more: bytes
) -> RecordDict:
    """Return a copy of the records with the signature, and ``more`` such as a certificate, among their fields."""
    text, prefix = statement.model_dump_json(), OF_A_REPLY if isinstance(statement, ReplyStatement) else OF_A_REQUEST
    values = {"statement": text, "signature": key.sign(prefix + text.encode(), SIGNED_WITH), **more}
    fields: dict[str, Any] = {
        name: value for name, value in read_small_fields(content).items() if not name.startswith(SIGNATURE)
    }
    signed = RecordDict({name: content[name] for name in content})
    signed[FIELDS] = ConfigRecord(fields | {f"{SIGNATURE}{name}": value for name, value in values.items()})
    return signed


def is_signed(content: RecordDict) -> bool:
    """Return True if a record carries a signature."""
    return any(name.startswith(SIGNATURE) for name in read_small_fields(content))


def read_unverified_signature(content: RecordDict) -> tuple[SignedStatement, bytes]:
    """Return the unverified signature of a record, and the certificate beside it, empty for a record without one.

    Raises:
        SignatureFault: If there is none.
    """
    fields = {name: value for name, value in read_small_fields(content).items() if name.startswith(SIGNATURE)}
    statement, signature, certificate = (
        fields.pop(f"{SIGNATURE}{name}", None) for name in ("statement", "signature", "certificate")
    )
    if not isinstance(statement, str) or not isinstance(signature, bytes) or fields:
        raise SignatureFault("it is not signed")
    if not isinstance(certificate, bytes | None) or len(certificate or b"") > LONGEST_CERTIFICATE:
        raise SignatureFault("its signature is not in the form of this release")
    try:
        return SignedStatement(statement=statement, signature=signature.hex()), certificate or b""
    except ValidationError:
        raise SignatureFault("its signature is not in the form of this release") from None


def unverified_signature_or_none(content: RecordDict) -> SignedStatement | None:
    """Return the unverified signature of a record; None if it has no readable signature."""
    try:
        return read_unverified_signature(content)[0]
    except SignatureFault:
        return None


def verified_reply(signed: SignedStatement, public_key: str) -> ReplyStatement:
    """Verify a site's signature by its public key, an OpenSSH line, and return its statement.

    Raises:
        SignatureFault: If another key signed, or the text is no statement.
    """
    try:
        key = load_ssh_public_key(public_key.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise SignatureFault("the site's public key cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureFault("the site's public key is of another kind")
    _verify_signature(key, OF_A_REPLY, signed)
    return ReplyStatement.read(signed.statement)


def verified_request(signed: SignedStatement, certificate: bytes, authority: x509.Certificate) -> RequestStatement:
    """Verify the coordinator's signature and return its statement.

    Args:
        certificate: Certificate of the signing key, DER.
        authority: The certificate in the site's kit, which must have issued ``certificate`` for signing requests.

    Raises:
        SignatureFault: If the certificate or the signature is wrong, or the text is no statement.
    """
    _verify_signature(verified_signing_key(certificate, authority), OF_A_REQUEST, signed)
    return RequestStatement.read(signed.statement)


def verified_signing_key(certificate: bytes, authority: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate that this authority issued for signing requests; dates are not checked.

    Raises:
        SignatureFault: If the certificate is of another authority, purpose or kind.
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


def check_statement_matches_record(statement: ReplyStatement | RequestStatement, content: RecordDict) -> None:
    """Raise :class:`SignatureFault` unless a statement is about these records."""
    if statement.sha256 != record_sha256(content):
        raise SignatureFault("its statement is about another record")


def read_run_round_kind(content: RecordDict) -> tuple[str, int, str]:
    """Return run, round and kind of a record from its fields, which are not checked here."""
    fields = read_small_fields(content)
    run, number, record = fields.get("run"), fields.get("round", 0), fields.get("wire.record")
    return str(run), number if type(number) is int else -1, str(record)


def _verify_signature(key: ec.EllipticCurvePublicKey, prefix: bytes, signed: SignedStatement) -> None:
    try:
        key.verify(bytes.fromhex(signed.signature), prefix + signed.statement.encode(), SIGNED_WITH)
    except InvalidSignature:
        raise SignatureFault("the signature is not by the key of the one in whose name it came") from None
