"""What a coordinator says of itself to anyone who asks before a run: the time, its release, whether a key is known.

Flower's own calls tell none of it: a site's clock is only ever refused, and another release shows at the roll call.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

WIRE_VERSION = 15
"""Raised whenever a record gains, loses or changes a field, or is hashed otherwise; the two sides must agree."""

SERVICE, METHOD = "polyclinic.Coordinator", "Hello"


class Hello(BaseModel):
    """The answer, as JSON; a later release may say more.

    Attributes:
        time: Unix time on the coordinator's clock.
        release: Of Polyclinic, there.
        wire: Version of the wire records.
        key: Whether the key that signed the question belongs to a site that takes part.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    release: str
    wire: int
    key: Literal["admitted", "unknown"]
