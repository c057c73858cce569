"""The file ``state/authority.json``, which records the certificate authority of the site's coordinator."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

AUTHORITY_FILE = "authority.json"


class AuthorityRecord(BaseModel):
    """The content of ``state/authority.json``: the authority to which a site connected, or which a person confirmed.

    Attributes:
        key_hash: SHA-256 of the authority's public key.
        phrase: The phrase of the same key, for people.
        coordinator: Name of the coordinator in the kit.
        since: UTC time (ISO 8601) of the first connection, or of the confirmation if that came first.
        confirmed: UTC time at which a person confirmed the phrase; empty if nobody has.
    """

    model_config = ConfigDict(frozen=True)

    key_hash: str
    phrase: str
    coordinator: str
    since: str
    confirmed: str = ""


def read_authority_record(state: Path) -> AuthorityRecord | None:
    """Return the recorded authority; None if the file is missing or damaged."""
    try:
        return AuthorityRecord.model_validate_json((state / AUTHORITY_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
