"""What a site states for a round of secure aggregation, signed with the key that it is admitted with."""

import re
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

SIGNED_WITH = ec.ECDSA(hashes.SHA256())


class StatementError(ValueError):
    """A statement that does not count, with the reason."""


class Statement(BaseModel):
    """A site's part in one round.

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

    def written(self) -> bytes:
        """Return the text that is signed."""
        return self.model_dump_json().encode()

    def disagreement(self, other: "Statement") -> str:
        """What the other site was asked that this one was not, in words; empty where they agree.

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


def read_statement(text: bytes) -> Statement:
    """Read a statement.

    Raises:
        StatementError: If it is none.
    """
    try:
        return Statement.model_validate_json(text)
    except ValidationError as error:
        raise StatementError(f"is no statement of a site's keys: {error.errors()[0]['msg']}") from None


def signed(statement: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    """A signature by a site's own key."""
    return key.sign(statement, SIGNED_WITH)


def refuse_unsigned(statement: bytes, signature: bytes, identity: str) -> None:
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
