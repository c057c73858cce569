"""The record of ``flwr-server deliver --send``: a package for one hospital, which answers that it stored it."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from polyclinic.common.errors import WireError
from polyclinic.common.wire.bounds import NumberRangeBound, RunNameText
from polyclinic.common.wire.secure_aggregation import Integers

MAX_PACKAGE_BYTES = 4 * 10**9
"""Maximum size of a package; the hospital verifies it in memory before it writes anything."""
_WORD_BYTES = 4


@dataclass(frozen=True)
class DeliveryRequest:
    """A package of a finished run for one hospital (:mod:`polyclinic.common.security.delivery`).

    Attributes:
        size: Size of the package in bytes.
        package: The package's bytes as uint32 in little-endian order, padded with zeros.
    """

    run: RunNameText
    size: Annotated[int, NumberRangeBound(0, MAX_PACKAGE_BYTES)]
    package: Integers

    def __post_init__(self) -> None:
        if fault := find_padding_fault(self.size, self.package):
            raise WireError(fault)

    @property
    def content(self) -> bytes:
        """The bytes of the package."""
        return read_padded_bytes(self.size, self.package)


def make_delivery_request(run: str, content: bytes) -> DeliveryRequest:
    """Return the request that sends the bytes of a package."""
    return DeliveryRequest(run, len(content), pad_to_integers(content))


# ---------------------------------------------------------------------- bytes as an array, which is sent in chunks


def pad_to_integers(content: bytes) -> Integers:
    """Return bytes as uint32 in little-endian order, padded with zeros."""
    return np.frombuffer(content + bytes(-len(content) % _WORD_BYTES), "<u4")


def read_padded_bytes(size: int, numbers: Integers) -> bytes:
    """Return the ``size`` bytes that :func:`pad_to_integers` padded."""
    return numbers.astype("<u4", copy=False).tobytes()[:size]


def find_padding_fault(size: int, numbers: Integers) -> str:
    """Return the reason why these numbers cannot contain exactly ``size`` bytes; empty if they can."""
    if len(numbers) == -(-size // _WORD_BYTES):
        return ""
    return f"{size} bytes cannot have {len(numbers)} numbers."
