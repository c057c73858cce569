"""What one site writes to another: its shares of the writer's secrets."""

from pydantic import Base64Bytes, BaseModel, ConfigDict, ValidationError

from strategies.privacy.secure_aggregation.crypto import SecretsError


class Letter(BaseModel):
    """Shares for one site.

    Attributes:
        key: Of the writer's masking key, to be given away if the writer is lost.
        masks: Segment -> of the writer's own mask, to be given away if it is not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    round: int
    sender: str
    recipient: str
    key: Base64Bytes
    masks: dict[str, Base64Bytes]

    def written(self) -> bytes:
        return self.model_dump_json().encode()


def read_letter(text: bytes, expected: tuple[str, int, str, str]) -> Letter:
    """Read a letter of this run and round, from and to these sites.

    Raises:
        SecretsError: If it is not.
    """
    try:
        letter = Letter.model_validate_json(text)
    except ValidationError:
        raise SecretsError("a letter does not hold shares") from None
    if (letter.run, letter.round, letter.sender, letter.recipient) != expected:
        raise SecretsError("a letter is of another run or round, or for another site")
    return letter
