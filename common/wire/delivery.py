"""The record of ``flwr-server deliver --send``: a package for one hospital, which answers that it stored it."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from polyclinic.common.errors import WireError
from polyclinic.common.security.delivery import MOST_BYTES
from polyclinic.common.wire.bounds import NumberRangeBound, RunNameText
from polyclinic.common.wire.secure_aggregation import Integers

_WORD_BYTES = 4


@dataclass(frozen=True)
class DeliveryRequest:
    """A package of a finished run for one hospital (:mod:`polyclinic.common.security.delivery`).

    Attributes:
        size: Bytes of the package.
        package: The package's bytes as uint32 in little-endian order, filled up with zeros.
    """

    run: RunNameText
    size: Annotated[int, NumberRangeBound(0, MOST_BYTES)]
    package: Integers

    def __post_init__(self) -> None:
        if len(self.package) != -(-self.size // _WORD_BYTES):
            raise WireError(f"a package of {self.size} bytes cannot have {len(self.package)} numbers.")

    @property
    def content(self) -> bytes:
        """The bytes of the package."""
        return self.package.astype("<u4", copy=False).tobytes()[: self.size]


def make_delivery_request(run: str, content: bytes) -> DeliveryRequest:
    """Return the record with a package."""
    padded = content + bytes(-len(content) % _WORD_BYTES)
    return DeliveryRequest(run, len(content), np.frombuffer(padded, "<u4"))
