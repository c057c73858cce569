"""What a coordinator says of itself to anyone who asks outside a run: the time, its release, whether a key is known.

Flower's own calls tell none of it: a site's clock is only ever refused, and a release shows at the roll call alone.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from common.system.plain_text import shown

WIRE_VERSION = 16
"""Raised whenever a record gains, loses or changes a field, or is hashed otherwise. The two sides must agree on it, and
on nothing else: releases of one wire version work together."""
LONGEST_RELEASE = 64
"""Characters of the name of a release."""

SERVICE, METHOD = "polyclinic.Coordinator", "Hello"


class Hello(BaseModel):
    """The answer, as JSON; a later release may say more.

    Attributes:
        time: Unix time on the coordinator's clock.
        release: Of Polyclinic, there; made harmless, because a person reads it.
        wire: Version of the wire records.
        key: Whether the key that signed the question belongs to a site that takes part.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    release: Annotated[str, AfterValidator(lambda text: shown(text, LONGEST_RELEASE))]
    wire: Annotated[int, Field(ge=0, lt=2**31)]
    key: Literal["admitted", "unknown"]
