"""The hospital's half of secure aggregation: one round's secrets, kept in memory, and the answers of its four stages.

A site protects itself against a malicious coordinator. It never masks with fewer than two sites, or with sites that
received another request or divisor. It never helps to unmask two different sums of one round, never reveals both a
site's mask key and the seed of its own mask, never unmasks a row with only one remaining site, and never answers one
stage in two ways.
"""

import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from numpy.typing import NDArray

from polyclinic.common.errors import WireError
from polyclinic.common.wire.records import ModelGroups
from polyclinic.common.wire.secure_aggregation import (
    Integers,
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    MaskingAnswer,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from polyclinic.strategies.privacy.noise import SecretBitStream
from polyclinic.strategies.privacy.secure_aggregation.crypto import (
    SECRET_BYTES,
    MaskingStatement,
    MaskingStatementError,
    SecretShares,
    add_mask_to_vector,
    compute_shared_secret,
    decrypt_message_from_site,
    encode_public_key_hex,
    encrypt_message_for_site,
    make_key_pair,
    read_masking_statement,
    read_secret_shares,
    refuse_unsigned_statement,
    serialize_private_key,
    sign_masking_statement,
)
from polyclinic.strategies.privacy.secure_aggregation.masked_rounds import MaskedRoundStore, count_needed_survivors
from polyclinic.strategies.privacy.secure_aggregation.noise_shares import DistributedNoise
from polyclinic.strategies.privacy.secure_aggregation.secret_sharing import split_secret_into_shares
from polyclinic.strategies.privacy.secure_aggregation.vectors import (
    UpdateVectorSegment,
    compute_share_threshold,
    convert_to_fixed_point,
    count_out_of_range_values,
    flatten_update,
    group_rows_into_segments,
)

Request = KeysRequest | SharesRequest | MaskedRequest | RevealRequest
Answer = TypeVar("Answer", bound=MaskingAnswer)


class MaskingRefused(WireError):
    """Raised when a request of the coordinator would reveal more than a sum, or contradicts an earlier request."""


@dataclass(frozen=True)
class SiteSigningIdentity:
    """The key that the coordinator admitted a site with, and its public key as an OpenSSH line."""

    key: ec.EllipticCurvePrivateKey
    line: str


@dataclass(frozen=True)
class RequestHashes:
    """Hashes of a site's request, which the sites of a round compare; see :class:`MaskingStatement`.

    Attributes:
        start: Hash of the model alone; it stays at the site and detects a model that is sent again.
    """

    plan: str = ""
    model: str = ""
    shared: Mapping[str, str] = field(default_factory=dict)
    start: str = ""


@dataclass(frozen=True)
class MaskingConditions:
    """The conditions on which a site takes part in secure aggregation.

    Attributes:
        largest: Largest absolute value in the site's update; larger values are clipped.
        counts: True if the values are counts, which are summed without division and without rounding.
        alone: True if a head row may be unmasked although fewer than ``cohort`` sites of the round own it.
        identity: The key of the site; None in simulation.
        peers: Site -> OpenSSH line of the key that must sign its statement; empty trusts the coordinator's relay.
        cohort: Smallest number of sites whose sum the site helps to unmask.
        digest: Hashes of the request, which every other site of the round must have received too.
        masked: The rounds that the site has masked so far.
        shares: The noise of which each site adds a share to its update before masking; None for no noise.
        noise: Returns the secret key of a noise share, given a hash of the data that get the noise; a hospital returns
            the same key for the same hash.
    """

    largest: float
    counts: bool = False
    alone: bool = False
    identity: SiteSigningIdentity | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    cohort: int = 2
    digest: RequestHashes = field(default_factory=RequestHashes)
    masked: MaskedRoundStore = field(default_factory=MaskedRoundStore)
    shares: DistributedNoise | None = None
    noise: Callable[[str], bytes] = lambda covered: os.urandom(SECRET_BYTES)


class SiteMaskingRound:
    """One site's part in the secure aggregation of one round: its secrets and its answers.

    Args:
        update: The update to be added to the sum; deleted once it is masked.
        terms: The conditions on which the site takes part.

    Attributes:
        cut: Number of values of the update that are out of range and were clipped.
    """

    def __init__(self, run: str, server_round: int, site: str, update: ModelGroups, terms: MaskingConditions) -> None:
        self.run, self.round, self.site = run, server_round, site
        self._terms = terms
        self._layout, self._rows, vector = flatten_update(update)
        self._update: NDArray[np.float32] | None = vector
        self.cut = count_out_of_range_values(vector, terms.largest)
        self._sealing, self._masking = make_key_pair(), make_key_pair()
        self._done = terms.masked.read_masked_round(run, server_round, terms.digest.start)
        self._members: tuple[str, ...] = ()
        self._divisor = 0
        self._statements: Mapping[str, MaskingStatement] = {}
        self._segments: tuple[UpdateVectorSegment, ...] = ()
        self._own: dict[str, bytes] = {}  # segment -> secret of this site's own mask
        self._letters: dict[str, SecretShares] = {}  # sender -> shares, this site's own too
        self._answered: dict[type, tuple[Request, MaskingAnswer]] = {}

    # ------------------------------------------------------------------ four stages

    def answer_with_keys(self, request: KeysRequest) -> KeysAnswer:
        """Answer with this round's public keys and a signed statement of the request.

        Until the site has sent shares of its secrets, a different request gets a new statement with new keys.

        Raises:
            MaskingRefused: If the site is not among the members, or the members are too few.
        """
        if SharesAnswer not in self._answered and self._answered.get(KeysAnswer, (request,))[0] != request:
            del self._answered[KeysAnswer]
            self._sealing, self._masking = make_key_pair(), make_key_pair()
        if (earlier := self._find_earlier_answer(request, KeysAnswer)) is not None:
            return earlier
        if self.site not in request.members:
            raise MaskingRefused(f"{self.site} is not among the sites that are to mask together.")
        self._members = self._done.members or tuple(sorted(set(request.members)))
        self._divisor = self._done.divisor or request.divisor
        if self._divisor < len(self._members) or compute_share_threshold(self._divisor) > len(self._members):
            raise MaskingRefused(f"of {self._divisor} sites, {len(self._members)} are too few to go on with.")
        self._refuse_too_few_sites(len(self._members))
        statement = self._own_masking_statement.bytes_to_sign()
        identity = self._terms.identity
        signature = sign_masking_statement(statement, identity.key) if identity else b""
        line = identity.line if identity else ""
        answer = KeysAnswer(self.run, self.round, self.site, statement, signature, line)
        self._answered[KeysAnswer] = request, answer
        return answer

    def answer_with_shares(self, request: SharesRequest) -> SharesAnswer:
        """Answer with shares of this site's secrets (mask key, seeds of its own masks), encrypted for each other site.

        Raises:
            MaskingRefused: If the relayed statements are too few, or are not one statement of each site of this round.
        """
        if (earlier := self._find_earlier_answer(request, SharesAnswer)) is not None:
            return earlier
        self._statements = self._check_statements(request)
        sites = sorted(self._statements)
        rows = {site: statement.rows for site, statement in self._statements.items()}
        self._segments = group_rows_into_segments(rows)
        own = [segment.name for segment in self._segments if self.site in segment.owners]
        self._own = {name: os.urandom(SECRET_BYTES) for name in own}
        needed = self._needed_site_count
        keys = split_secret_into_shares(serialize_private_key(self._masking), needed, len(sites))
        masks = {name: split_secret_into_shares(secret, needed, len(sites)) for name, secret in self._own.items()}
        letters = {
            site: SecretShares(
                run=self.run,
                round=self.round,
                sender=self.site,
                recipient=site,
                key=b64encode(keys[place]),
                masks={name: b64encode(parts[place]) for name, parts in masks.items()},
            )
            for place, site in enumerate(sites)
        }
        self._letters[self.site] = letters.pop(self.site)
        written = [
            encrypt_message_for_site(letters[to].to_json_bytes(), self._sealing, self._statements[to].sealing_key)
            for to in letters
        ]
        answer = SharesAnswer(self.run, self.round, self.site, tuple(letters), tuple(written))
        self._answered[SharesAnswer] = request, answer
        return answer

    def answer_with_masked_update(self, request: MaskedRequest) -> MaskedAnswer:
        """Answer with the update, masked with one mask for each other site and with the site's own masks.

        Raises:
            MaskingRefused: If too few sites are left.
            SecretsError: If an encrypted message cannot be read.
        """
        if (earlier := self._find_earlier_answer(request, MaskedAnswer)) is not None:
            return earlier
        others = sorted(request.senders)
        terms = self._terms
        if not set(others) <= set(self._statements) - {self.site} or len(set(others)) < len(others):
            raise MaskingRefused("letters come from sites that stated no keys.")
        self._refuse_too_few_sites(len(others) + 1)
        if self._update is None:
            raise MaskingRefused(f"{self.site} has masked its update and let it go.")
        if request.numbers != len(self._update):
            raise MaskingRefused(f"the update has {len(self._update)} numbers, not {request.numbers}.")
        letters = dict[str, SecretShares]()
        for sender, sealed in zip(request.senders, request.letters, strict=True):
            text = decrypt_message_from_site(sealed, self._sealing, self._statements[sender].sealing_key)
            letters[sender] = read_secret_shares(text, (self.run, self.round, sender, self.site))
            if set(letters[sender].masks) != {segment.name for segment in self._segments if sender in segment.owners}:
                raise MaskingRefused(f"{sender} knows other sites, or other head rows, than this site does.")
        self._letters |= letters
        self._done = replace(self._done.with_masked_members({self.site, *others}), divisor=self._divisor)
        if terms.shares is None:
            vector = convert_to_fixed_point(self._update, 1 if terms.counts else self._divisor, terms.largest)
        else:  # a share of the noise is added; a repeated round gets the same share
            grid = terms.shares.make_noise_share_grid(self._divisor)
            covered = hashlib.sha256(json.dumps([self.run, self.round, self._done.members, vars(grid)]).encode())
            covered.update(self._update.tobytes())
            self._done = self._done.with_noise_hash(covered.hexdigest())
            vector = grid.add_noise_share(self._update, SecretBitStream(terms.noise(covered.hexdigest())))
        self._store_masked_round()
        self._update = None
        self._add_masks(vector, others)
        answer = MaskedAnswer(self.run, self.round, self.site, vector)
        self._answered[MaskedAnswer] = request, answer
        return answer

    def answer_with_revealed_shares(self, request: RevealRequest) -> RevealAnswer:
        """Answer with the shares that remove the masks from the sum of the survivors' updates.

        For each dropped site this is a share of its mask key; for each survivor, shares of the seeds of its own masks.
        A site never reveals both for one site. Only one request in a round is answered; its repetition gets the same
        answer.

        Raises:
            MaskingRefused: If too few sites survive, or this site is not among them.
        """
        if (earlier := self._find_earlier_answer(request, RevealAnswer)) is not None:
            return earlier
        survivors, took_part = set(request.survivors), set(self._done.members)
        if MaskedAnswer not in self._answered or self.site not in survivors or not survivors <= took_part:
            raise MaskingRefused("the survivors are not sites that masked their updates together with this one.")
        self._refuse_too_few_sites(len(survivors))
        self._done = self._done.with_unmasked_survivors(survivors)
        self._store_masked_round()
        openable = [segment for segment in self._segments if may_unmask_segment(segment, survivors, self._statements)]
        shown = [(site, segment.name) for segment in openable for site in segment.owners if site in survivors]
        gone = tuple(sorted(took_part - survivors))
        answer = RevealAnswer(
            self.run,
            self.round,
            self.site,
            owners=tuple(site for site, _ in shown),
            segments=tuple(name for _, name in shown),
            shares=tuple(self._letters[site].masks[name] for site, name in shown),
            gone=gone,
            key_shares=tuple(self._letters[site].key for site in gone),
        )
        # Only the last answer is stored, to repeat it if its request is repeated.
        self._own = {}
        self._letters = {}
        self._answered.pop(MaskedAnswer)
        self._answered[RevealAnswer] = request, answer
        return answer

    @property
    def agreement_hash(self) -> str:
        """Return a hash of all sites' signed keys and of the sites in the unmasked sum, equal at all honest sites."""
        stated = [self._statements[site].bytes_to_sign().decode() for site in sorted(self._statements)]
        return hashlib.sha256(json.dumps([stated, self._done.opened]).encode()).hexdigest()

    @property
    def classes_of_few_sites(self) -> tuple[str, ...]:
        """Return the classes of this site whose head rows fewer sites send than one of these sites requires for a sum.

        The result is complete once the sites' statements are received.
        """
        own = [segment for segment in self._segments if self.site in segment.owners]
        needed = [count_needed_segment_owners(segment.owners, self._statements) for segment in own]
        few = [segment for segment, least in zip(own, needed, strict=True) if len(segment.owners) < least]
        return tuple(name for segment in few for name in segment.classes)

    def _find_earlier_answer(self, request: Request, kind: type[Answer]) -> Answer | None:
        """Return the earlier answer to a repeated request, None at a stage's first request; refuse a different one.

        Each stage ends by storing its answer in ``_answered``, so that it answers once.
        """
        if (request.run, request.round) != (self.run, self.round):
            raise MaskingRefused(f"{self.site} holds an update of round {self.round}, not of {request.round}.")
        if kind not in self._answered:
            return None
        earlier, reply = self._answered[kind]
        if earlier != request:
            raise MaskingRefused(f"{self.site} has answered another {type(request).__name__} in this round.")
        assert isinstance(reply, kind)
        return reply

    @property
    def _own_masking_statement(self) -> MaskingStatement:
        return MaskingStatement(
            run=self.run,
            round=self.round,
            site=self.site,
            members=self._members,
            opened=self._done.opened,
            cohort=self._terms.cohort,
            divisor=self._divisor,
            plan=self._terms.digest.plan,
            model=self._terms.digest.model,
            shared=dict(self._terms.digest.shared),
            rows=self._rows,
            alone=self._terms.alone,
            sealing_key=encode_public_key_hex(self._sealing),
            masking_key=encode_public_key_hex(self._masking),
        )

    def _check_statements(self, request: SharesRequest) -> dict[str, MaskingStatement]:
        """Check that the relayed statements are of different sites of this round; return them by site.

        Raises:
            MaskingRefused: If a statement is not valid, or does not agree with this site's own statement.
        """
        by_site: dict[str, MaskingStatement] = {}
        for text, signature, identity in zip(request.statements, request.signatures, request.identities, strict=True):
            try:
                statement = read_masking_statement(text)
                if self._terms.identity is not None and statement.site != self.site:
                    refuse_unsigned_statement(text, signature, identity)
                    peers = self._terms.peers
                    if peers and peers.get(statement.site, "").split()[:2] != identity.split()[:2]:
                        problem = "is signed with a key that this site's policy does not know"
                        raise MaskingStatementError(f"of {statement.site} {problem}")
            except MaskingStatementError as error:
                raise MaskingRefused(f"a relayed statement {error}.") from None
            if (statement.run, statement.round) != (self.run, self.round) or statement.site in by_site:
                raise MaskingRefused("the relayed statements are not one a site, of this round.")
            if why := self._own_masking_statement.describe_request_disagreement(statement):
                raise MaskingRefused(f"{statement.site} {why}: its update may not hide that of {self.site}.")
            by_site[statement.site] = statement
        keys = [key for statement in by_site.values() for key in (statement.sealing_key, statement.masking_key)]
        if by_site.get(self.site) != self._own_masking_statement or len(set(keys)) < len(keys):
            raise MaskingRefused(f"the relayed statements lack that of {self.site}, or one key is stated twice.")
        if not set(by_site) <= set(self._members):
            raise MaskingRefused("a relayed statement is of a site that was not to mask with the others.")
        if len(by_site) < 2:
            raise MaskingRefused("there is no other site: a sum of one update is that update.")
        self._refuse_too_few_sites(len(by_site))
        return by_site

    def _add_masks(self, vector: Integers, others: list[str]) -> None:
        for segment in self._segments:
            if self.site in segment.owners:
                places = self._layout.iterate_class_slices(self._rows, segment.classes, body=segment.is_body_segment)
                add_mask_to_vector(vector, places, self._own[segment.name])
        for other in others:
            theirs = self._statements[other]
            common = tuple(name for name in self._rows if name in theirs.rows)
            places = self._layout.iterate_class_slices(self._rows, common, body=True)
            secret = compute_shared_secret(self._masking, theirs.masking_key)
            add_mask_to_vector(vector, places, secret, subtract=self.site > other)

    @property
    def _needed_site_count(self) -> int:
        """Return how many sites must answer at every stage; as many shares recover this site's secrets."""
        honest = self._terms.shares.honest if self._terms.shares else 0
        return count_needed_survivors(self._divisor, self._terms.cohort, honest)

    def _store_masked_round(self) -> None:
        self._terms.masked.store_masked_round(self.run, self.round, self._done, self._terms.digest.start)

    def _refuse_too_few_sites(self, sites: int) -> None:
        if sites < (needed := self._needed_site_count):
            raise MaskingRefused(f"{sites} of {len(self._members)} sites are left, {needed} are needed.")


def may_unmask_segment(
    segment: UpdateVectorSegment, survivors: set[str], statements: Mapping[str, MaskingStatement]
) -> bool:
    """Return True if the sum of a segment (values that the same sites send) may be unmasked.

    It may if enough of these sites survive, or if at least one survives and all that survive allow it.

    Args:
        survivors: The sites whose updates are in the sum.
        statements: Site -> its signed statement, which says how many sites it requires.
    """
    left = [site for site in segment.owners if site in survivors]
    if not left:
        return False
    return len(left) >= count_needed_segment_owners(left, statements) or all(statements[site].alone for site in left)


def count_needed_segment_owners(owners: Collection[str], statements: Mapping[str, MaskingStatement]) -> int:
    """Return the largest ``cohort`` (number of sites that a sum must have) that the owners state; at least 2."""
    return max(2, *(statements[site].cohort for site in owners))


def make_restart_refusal(site: str) -> MaskingRefused:
    """Return the error for a site that has no update any more, because its process was restarted after training."""
    return MaskingRefused(f"{site} holds no update of this round: it was restarted since it trained.")
