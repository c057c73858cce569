"""A hospital's signed statement that it leaves a federation: the file ``NAME.withdrawal``.

The file contains one line of JSON and its signature by the site's admitted key. The coordinator stores it together with
a list of the runs that contain contributions of the hospital.
"""

import json
from collections.abc import Sequence
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyclinic.common.security.signatures import SIGNATURE_ALGORITHM, SignedStatement
from polyclinic.common.system.plain_text import make_printable_line

WITHDRAWAL_SUFFIX = ".withdrawal"
MAX_WITHDRAWAL_BYTES = 1_000_000
MAX_RUNS = 2_000
_SIGNED_PREFIX = b"polyclinic withdrawal\n"
"""Prefix of each signed text, so that the signature of a withdrawal is not valid for another kind of text."""


class WithdrawalFault(ValueError):
    """Raised with a reason for a statement that is altered, or not by this site."""


class RunOfSite(BaseModel):
    """A run in which a site took part, according to the site's audit log.

    Attributes:
        run: The run's identifier.
        title: The run's title.
        rounds: Number of rounds in which the site sent an update.
        first, last: UTC times of the first and the last record.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(max_length=100)
    title: str = Field(max_length=500)
    rounds: int = Field(ge=0)
    first: str = Field(max_length=40)
    last: str = Field(max_length=40)


class WithdrawalStatement(BaseModel):
    """The text that a site signs when it leaves.

    Attributes:
        site: Name of the site.
        coordinator: Name of the coordinator, from the site's kit.
        authority: SHA-256 of the public key of the coordinator's authority, so that no other coordinator can use it.
        time: UTC time (ISO 8601).
        reason: The hospital's reason; may be empty.
        runs: The runs in which the site took part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    site: str = Field(max_length=200)
    coordinator: str = Field(max_length=200)
    authority: str = Field(pattern="^[0-9a-f]{64}$")
    time: str = Field(max_length=40)
    reason: str = Field("", max_length=500)
    runs: tuple[RunOfSite, ...] = Field((), max_length=MAX_RUNS)


class _SignedWithdrawal(SignedStatement):
    statement: str = Field(max_length=MAX_WITHDRAWAL_BYTES)


def sign_withdrawal(statement: WithdrawalStatement, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the content of ``NAME.withdrawal``."""
    text = json.dumps(statement.model_dump(mode="json"), sort_keys=True)
    signature = key.sign(_SIGNED_PREFIX + text.encode(), SIGNATURE_ALGORITHM).hex()
    return _SignedWithdrawal(statement=text, signature=signature).model_dump_json(indent=1).encode() + b"\n"


def verify_withdrawal(content: bytes, site: str, public_keys: Sequence[str], authority: str) -> WithdrawalStatement:
    """Verify a site's statement, and return it.

    Args:
        content: The file's bytes.
        site: Name of the admitted site.
        public_keys: Admitted keys of the site, the present one and earlier ones, as OpenSSH lines.
        authority: SHA-256 of the public key of the coordinator's authority.

    Raises:
        WithdrawalFault: If a byte was changed, another key signed it, or it is for another site or coordinator.
    """
    if len(content) > MAX_WITHDRAWAL_BYTES:
        raise WithdrawalFault("it is too large")
    try:
        signed = _SignedWithdrawal.model_validate_json(content)
    except ValidationError:
        raise WithdrawalFault("it is not what flwr-client withdraw wrote") from None
    if not any(_is_signed_by(signed, line) for line in public_keys):
        raise WithdrawalFault("no admitted key of this site signed it, or it was changed")
    try:
        statement = WithdrawalStatement.model_validate_json(signed.statement)
    except ValidationError:
        raise WithdrawalFault("it is not in the form of this release") from None
    if statement.site != site:
        raise WithdrawalFault(f'it is of the site "{make_printable_line(statement.site)}"')
    if statement.authority != authority:
        raise WithdrawalFault("it is for another coordinator")
    return statement


def _is_signed_by(signed: SignedStatement, public_key: str) -> bool:
    try:
        key = load_ssh_public_key(public_key.encode())
    except (ValueError, UnsupportedAlgorithm):
        return False
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(bytes.fromhex(signed.signature), _SIGNED_PREFIX + signed.statement.encode(), SIGNATURE_ALGORITHM)
    except (InvalidSignature, ValueError):
        return False
    return True
