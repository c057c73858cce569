"""The records of secure aggregation: four requests in each round after training, each with its answer.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, figure 4; the names
here are those of its rounds 0 (advertise keys), 1 (share keys), 2 (masked input) and 4 (unmasking).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import WireError
from polyclinic.common.wire.bounds import (
    MAX_SITES,
    ListBound,
    NumberRangeBound,
    PlainLineBound,
    RoundNumber,
    RunNameText,
    SiteNames,
    Text,
)

Integers = NDArray[np.uint32]
"""A flat vector of integers modulo 2**32."""

KEY_LINE_BOUND = PlainLineBound(1_000)
"""Bound of a line with a public key and its comment."""
SegmentNames = Annotated[tuple[str, ...], ListBound(10**6, PlainLineBound())]
"""A list of site names, one for each site and segment."""
Numbers = Annotated[int, NumberRangeBound(0, 2**40)]
TEST_ROUND = 0
"""Round number under which a run's test metrics are summed; no update is masked in this round."""


@dataclass(frozen=True)
class _MaskingStepRecord:
    run: RunNameText
    round: RoundNumber


@dataclass(frozen=True)
class KeysRequest(_MaskingStepRecord):
    """Request 1: asks a site for new public keys, by which the sites agree on masks in this round.

    Attributes:
        members: The sites that take part, sorted.
        divisor: The number by which each site divides its update: the number of sites in the round's first attempt.
    """

    members: SiteNames
    divisor: Annotated[int, NumberRangeBound(1, MAX_SITES)]


@dataclass(frozen=True)
class KeysAnswer(_MaskingStepRecord):
    """Answer 1: a site's public keys, in a statement that the site signed.

    Besides cryptographic keys, the statement has two settings of the site's policy: ``rows_alone`` and
    ``smallest_cohort``.

    Attributes:
        statement: A text that the other sites receive too: two public keys made for this round, the classes
            whose head rows this site sends, the divisor of its update, the keys `rows_alone` and `smallest_cohort`,
            the sites that mask together, the sites whose sum it unmasked before, and hashes of the request.
        signature: The signature of this statement by the site's own key.
        identity: The public key of this signature, with which the site was admitted.
    """

    site: Text
    statement: bytes
    signature: bytes
    identity: Annotated[str, KEY_LINE_BOUND]


@dataclass(frozen=True)
class SharesRequest(_MaskingStepRecord):
    """Request 2: relays all sites' public keys, and asks a site to secret-share its private keys and mask seeds."""

    statements: tuple[bytes, ...]
    signatures: tuple[bytes, ...]
    identities: Annotated[tuple[str, ...], ListBound(MAX_SITES, KEY_LINE_BOUND)]

    def __post_init__(self) -> None:
        if not len(self.statements) == len(self.signatures) == len(self.identities):
            raise WireError("statements, signatures and identities must have one entry a site.")


@dataclass(frozen=True)
class SharesAnswer(_MaskingStepRecord):
    """Answer 2: for each other site an encrypted letter, with its shares of the secrets of the answering site.

    Attributes:
        recipients: The other sites of the round.
        letters: An encrypted letter to each of them, which only the recipient can decrypt, with its shares of this
            site's secrets of the round.
    """

    site: Text
    recipients: SiteNames
    letters: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_entry_count("letters", self.recipients, self.letters)


@dataclass(frozen=True)
class MaskedRequest(_MaskingStepRecord):
    """Request 3: relays other sites' encrypted letters to a site, and asks for the site's masked update.

    Attributes:
        senders: The other sites that still take part.
        numbers: Length of the masked update, so that programs between site and coordinator know its size.
    """

    senders: SiteNames
    letters: tuple[bytes, ...]
    numbers: Numbers

    def __post_init__(self) -> None:
        _check_entry_count("letters", self.senders, self.letters)


@dataclass(frozen=True)
class MaskedAnswer(_MaskingStepRecord):
    """Answer 3: the masked update as one vector: trunk, batch normalisation, then head rows by class name.

    Attributes:
        vector: The change of the network's numbers, or the counts of test scores, plus masks: random numbers to anyone
            without the masked vectors of all sites of the round.
    """

    site: Text
    vector: Integers


@dataclass(frozen=True)
class RevealRequest(_MaskingStepRecord):
    """Request 4: asks a site for its shares of the secrets that remove the masks from the sum of the updates."""

    survivors: SiteNames


@dataclass(frozen=True)
class RevealAnswer(_MaskingStepRecord):
    """Answer 4: shares of the mask seeds of sites whose updates arrived, and of the mask keys of the other sites.

    Attributes:
        owners: For each of `shares`, the site whose masks it can remove; the masked update of that site arrived.
        segments: For each of `shares`, the part of that site's own masks that it can remove.
        shares: This site's shares of the seeds of these masks.
        gone: Sites whose masked updates did not arrive.
        key_shares: This site's shares of the mask keys of the sites in `gone`; never for a site in `owners`.
    """

    site: Text
    owners: SegmentNames
    segments: SegmentNames
    shares: tuple[bytes, ...]
    gone: SiteNames
    key_shares: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_entry_count("segments", self.owners, self.segments)
        _check_entry_count("shares", self.owners, self.shares)
        _check_entry_count("key_shares", self.gone, self.key_shares)


def _check_entry_count(what: str, sites: tuple[str, ...], entries: tuple[object, ...]) -> None:
    if len(sites) != len(entries):
        raise WireError(f"{what} must have one entry a site.")


MaskingRequest = KeysRequest | SharesRequest | MaskedRequest | RevealRequest
MaskingAnswer = KeysAnswer | SharesAnswer | MaskedAnswer | RevealAnswer
MaskingRecord = MaskingRequest | MaskingAnswer

STAGE_BY_REQUEST: Mapping[type, str] = {
    KeysRequest: "masking_keys",
    SharesRequest: "masking_shares",
    MaskedRequest: "masked_update",
    RevealRequest: "unmasking",
}
"""Request -> name of its stage; a site's app has a function for each."""
