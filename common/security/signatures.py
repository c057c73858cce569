"""Signatures of the records that coordinator and sites exchange; simulations do not sign.

The sender adds a signed statement to each record: one line of JSON with the record's SHA-256, its site, run and round.
A site signs with the key with which it was admitted; the coordinator, with a key that its authority has certified. So
anyone with the public key can verify years later who sent a record, without the SuperLink.

The statement and its signature are fields of the record whose names begin with ``signature.``, because a separate
record would cost a further call.
"""

from typing import Annotated, Any, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.app import ConfigRecord, RecordDict
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from polyclinic.common.security.identity import REQUEST_SIGNING_PURPOSE, UNREADABLE_CERTIFICATE_ERRORS
from polyclinic.common.system.plain_names import RunName
from polyclinic.common.wire.canonical_bytes import FIELDS_RECORD, SIGNATURE_PREFIX, hash_record, read_small_fields

SIGNATURE_ALGORITHM = ec.ECDSA(hashes.SHA256())
# The key of a site also signs calls (a time) and statements of secure aggregation (a line of JSON). Because of these
# prefixes, a signature of one kind is not valid for another kind.
REPLY_PREFIX = b"polyclinic reply\n"
REQUEST_PREFIX = b"polyclinic request\n"
NUMBERED_RECORDS = ("RollCallAnswer", "TrainReply", "EvaluateReply", "BenefitReply")
"""The records that a site numbers, from 1 in each run; a gap shows that a record is missing."""

MAX_CERTIFICATE_BYTES = 2_000
_Sha256 = Field(pattern="^[0-9a-f]{64}$")


class SignatureFault(ValueError):
    """Raised with a reason for a record whose signature is missing or wrong."""


class _SignableStatement(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def parse_statement(cls, text: str) -> Self:
        """Parse a statement from its JSON.

        Raises:
            SignatureFault: If the text is not a valid statement.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SignatureFault(f"its statement cannot be read: {error.errors()[0]['msg']}") from None


class ReplyStatement(_SignableStatement):
    """The statement that a site signs for each record that it sends as a reply.

    Attributes:
        site: Name of the site.
        run, round: Run and round of the request; round 0 at the roll call.
        record: Class name of the record, for instance ``TrainReply``.
        message: Flower's id of the request's message, a SHA-256.
        sha256: Hash of the record, by :func:`polyclinic.common.wire.canonical_bytes.hash_record`.
        number: Number of the reply: 1 plus the number of this site's earlier replies in this run that the coordinator
            accepted; 0 for records that are not numbered.
        before: Message id of the request that the last accepted reply answered; empty for the first reply.
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
    """The statement that the coordinator signs for each record that it sends as a request.

    Attributes:
        site: Name of the site that receives the record.
        key: Fingerprint of the site's public key, by
            :func:`polyclinic.common.security.identity.compute_public_key_fingerprint`.
        run, round, record, sha256: As in :class:`ReplyStatement`.
        nonce: 128 random bits in hexadecimal digits, which make the message and its id unique and unpredictable.
    """

    site: str = Field(max_length=200)
    key: str = Field(max_length=100)
    run: Annotated[str, AfterValidator(RunName)]
    round: int = Field(ge=0, lt=2**31)
    record: str = Field(max_length=40)
    sha256: str = _Sha256
    nonce: str = Field(pattern="^[0-9a-f]{32}$")


class SignedStatement(BaseModel):
    """A statement with its signature, in the form that audit logs and receipts store.

    Attributes:
        statement: The signed JSON text.
        signature: The signature in hexadecimal digits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    statement: str = Field(max_length=2000)
    signature: str = Field(pattern="^[0-9a-f]{0,300}$")


def sign_record(
    content: RecordDict, statement: _SignableStatement, key: ec.EllipticCurvePrivateKey, **more: bytes
) -> RecordDict:
    """Return a copy of a record with a statement, its signature, and ``more`` (a certificate) as additional fields."""
    text = statement.model_dump_json()
    prefix = REPLY_PREFIX if isinstance(statement, ReplyStatement) else REQUEST_PREFIX
    values = {"statement": text, "signature": key.sign(prefix + text.encode(), SIGNATURE_ALGORITHM), **more}
    fields: dict[str, Any] = {
        name: value for name, value in read_small_fields(content).items() if not name.startswith(SIGNATURE_PREFIX)
    }
    signed = RecordDict({name: content[name] for name in content})
    signed[FIELDS_RECORD] = ConfigRecord(
        fields | {f"{SIGNATURE_PREFIX}{name}": value for name, value in values.items()}
    )
    return signed


def is_record_signed(content: RecordDict) -> bool:
    """Return True if a record has signature fields; they are not verified."""
    return any(name.startswith(SIGNATURE_PREFIX) for name in read_small_fields(content))


def read_unverified_signature(content: RecordDict) -> tuple[SignedStatement, bytes]:
    """Return the signed statement of a record and its certificate, without verification.

    The certificate is empty in records of sites.

    Raises:
        SignatureFault: If the record is not signed, or the signature cannot be read.
    """
    fields = {name: value for name, value in read_small_fields(content).items() if name.startswith(SIGNATURE_PREFIX)}
    statement, signature, certificate = (
        fields.pop(f"{SIGNATURE_PREFIX}{name}", None) for name in ("statement", "signature", "certificate")
    )
    if not isinstance(statement, str) or not isinstance(signature, bytes) or fields:
        raise SignatureFault("it is not signed")
    if not isinstance(certificate, bytes | None) or len(certificate or b"") > MAX_CERTIFICATE_BYTES:
        raise SignatureFault("its signature is not in the form of this release")
    try:
        return SignedStatement(statement=statement, signature=signature.hex()), certificate or b""
    except ValidationError:
        raise SignatureFault("its signature is not in the form of this release") from None


def read_signature_or_none(content: RecordDict) -> SignedStatement | None:
    """Return the signed statement of a record, without verification; None if there is no readable signature."""
    try:
        return read_unverified_signature(content)[0]
    except SignatureFault:
        return None


def verify_reply_signature(signed: SignedStatement, public_key: str) -> ReplyStatement:
    """Verify a site's signature with its public key (an OpenSSH line); return the statement.

    Raises:
        SignatureFault: If another key made the signature, or the text is not a valid statement.
    """
    try:
        key = load_ssh_public_key(public_key.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise SignatureFault("the site's public key cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureFault("the site's public key is of another kind")
    _verify_signature(key, REPLY_PREFIX, signed)
    return ReplyStatement.parse_statement(signed.statement)


def verify_request_signature(
    signed: SignedStatement, certificate: bytes, authority: x509.Certificate
) -> RequestStatement:
    """Verify the coordinator's signature; return the statement.

    Args:
        signed: The statement with its signature.
        certificate: Certificate of the signing key, DER.
        authority: Certificate of the coordinator's authority, from the site's kit; it must have issued ``certificate``.

    Raises:
        SignatureFault: If the certificate or the signature is wrong, or the text is not a valid statement.
    """
    _verify_signature(verify_signing_certificate(certificate, authority), REQUEST_PREFIX, signed)
    return RequestStatement.parse_statement(signed.statement)


def verify_signing_certificate(certificate: bytes, authority: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Verify that an authority issued a certificate for signing requests; return the certificate's public key.

    Dates are not checked, so that old records can be verified.

    Raises:
        SignatureFault: If the certificate has another authority, purpose or kind of key.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        parsed.verify_directly_issued_by(authority)
        purposes = parsed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        key = parsed.public_key()
    except (*UNREADABLE_CERTIFICATE_ERRORS, InvalidSignature, x509.ExtensionNotFound):
        raise SignatureFault("its certificate is not one of this coordinator") from None
    if REQUEST_SIGNING_PURPOSE not in purposes or ExtendedKeyUsageOID.SERVER_AUTH in purposes:
        raise SignatureFault("its certificate is for another purpose")
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureFault("its certificate has a key of another kind")
    return key


def check_statement_matches_record(statement: ReplyStatement | RequestStatement, content: RecordDict) -> None:
    """Raise :class:`SignatureFault` if a statement contains another hash than that of the record."""
    if statement.sha256 != hash_record(content):
        raise SignatureFault("its statement is about another record")


def read_run_round_class(content: RecordDict) -> tuple[str, int, str]:
    """Return run, round and class name of a record from its fields, without checking the record."""
    fields = read_small_fields(content)
    run = fields.get("run")
    number = fields.get("round", 0)
    record = fields.get("wire.record")
    return str(run), number if type(number) is int else -1, str(record)


def _verify_signature(key: ec.EllipticCurvePublicKey, prefix: bytes, signed: SignedStatement) -> None:
    try:
        key.verify(bytes.fromhex(signed.signature), prefix + signed.statement.encode(), SIGNATURE_ALGORITHM)
    except InvalidSignature:
        raise SignatureFault("the signature is not by the key of the one in whose name it came") from None
