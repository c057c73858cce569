"""The file ``state/authority.json``: which coordinator a site belongs to, by the key of its authority."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

AUTHORITY_FILE = "authority.json"


class AuthorityRecord(BaseModel):
    """The authority that a site connected to, or whose phrase a person has confirmed: ``state/authority.json``.

    Attributes:
        key_hash: SHA-256 of the authority's public key.
        phrase: The phrase of the same key, for people.
        coordinator: Name of the coordinator in the kit.
        since: UTC time (ISO 8601) of the first connection, or of the confirmation if that was before.
        confirmed: UTC time at which a person typed the phrase; empty if nobody has.
    """

    model_config = ConfigDict(frozen=True)

    key_hash: str
    phrase: str
    coordinator: str
    since: str
    confirmed: str = ""


def read_authority_record(state: Path) -> AuthorityRecord | None:
    """Return the authority that this site knows from before; None if it knows none, or the file is damaged."""
    try:
        return AuthorityRecord.model_validate_json((state / AUTHORITY_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
