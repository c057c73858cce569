"""The coordinator's half: relays messages between sites, adds masked updates, and removes the masks from the sum."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import quote_names
from polyclinic.common.wire.codec import AnyRecord
from polyclinic.common.wire.records import Record
from polyclinic.common.wire.secure_aggregation import (
    Integers,
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from polyclinic.strategies.privacy.secure_aggregation.crypto import (
    MaskingStatement,
    MaskingStatementError,
    SecretsError,
    add_mask_to_vector,
    compute_shared_secret,
    deserialize_private_key,
    read_masking_statement,
    recover_secret_from_shares,
)
from polyclinic.strategies.privacy.secure_aggregation.masked_rounds import count_needed_survivors
from polyclinic.strategies.privacy.secure_aggregation.noise_shares import DistributedNoise
from polyclinic.strategies.privacy.secure_aggregation.site import may_unmask_segment
from polyclinic.strategies.privacy.secure_aggregation.vectors import (
    FIXED_POINT_ONE,
    UpdateVectorLayout,
    UpdateVectorSegment,
    convert_from_fixed_point,
    group_rows_into_segments,
    is_plausible_sum,
)


class MaskingFailed(Exception):
    """Raised when the sum of a round cannot be unmasked; no single update is revealed."""


class SiteQueryFunction(Protocol):
    """A function that sends each site its request and yields (site, answer) for each valid answer, on arrival.

    Args:
        requests: Site -> its request.
        expected: Record class of a valid answer.
        enough: Number of valid answers after which disconnected sites are not waited for.
    """

    def __call__(
        self, requests: Mapping[str, Record], expected: type[AnyRecord], enough: int
    ) -> Iterator[tuple[str, AnyRecord]]: ...


@dataclass(frozen=True)
class MaskedSumRequest:
    """One sum of masked updates that the coordinator requests from the sites.

    Attributes:
        rows: Site -> classes whose head rows it must send, sorted.
        classes: Classes of all head rows of the sum, sorted.
        layout: Positions of an update's values in the masked vector.
        largest: Largest absolute value in an update; larger values are clipped.
        shares: The noise of which each site adds a share to its update before masking; None for no noise.
    """

    run: str
    round: int
    rows: Mapping[str, tuple[str, ...]]
    classes: tuple[str, ...]
    layout: UpdateVectorLayout
    largest: float
    shares: DistributedNoise | None = None


@dataclass(frozen=True)
class UnmaskedSum:
    """A sum of updates without masks.

    Attributes:
        vector: Sum of updates divided by ``divisor``: trunk, batch normalisation and all head rows; 0 in rows that stay
            masked.
        survivors: The sites whose updates are in the sum, sorted.
        divisor: Number of sites in the round's first attempt.
        rows: Class -> survivors that own it, for the unmasked head rows.
        closed: Classes whose head rows stay masked: too few of their sites survived, and not all allow unmasking.
        integers: The unmasked sum before its conversion to floats.
    """

    request: MaskedSumRequest
    vector: NDArray[np.float64]
    survivors: tuple[str, ...]
    divisor: int
    rows: Mapping[str, tuple[str, ...]]
    closed: tuple[str, ...]
    integers: Integers


@dataclass
class MaskedSummation:
    """Requests and unmasks the sum of one round's updates, stage by stage."""

    request: MaskedSumRequest
    ask: SiteQueryFunction
    _statements: dict[str, MaskingStatement] = field(default_factory=dict)
    _members: tuple[str, ...] = ()
    _divisor: int = 0

    def unmask_sum(self) -> UnmaskedSum:
        """Run all stages of masking, and return the unmasked sum.

        Raises:
            MaskingFailed: If too few sites answer at any stage, or their answers do not fit together.
        """
        letters = self._collect_encrypted_shares(self._collect_site_keys())
        total, survivors = self._collect_masked_updates(letters)
        segments = group_rows_into_segments({site: statement.rows for site, statement in self._statements.items()})
        try:
            self._remove_masks(total, sorted(letters), survivors, segments)
        except SecretsError as error:
            raise MaskingFailed(f"{error}.") from None
        sum_request = self.request
        left = set(survivors)
        rows = dict[str, tuple[str, ...]]()
        closed = list[str]()
        for segment in segments:
            owners = tuple(site for site in segment.owners if site in left)
            if may_unmask_segment(segment, left, self._statements):
                rows |= dict.fromkeys(segment.classes, owners)
            elif owners:
                closed += segment.classes
        unopened = [name for name in sum_request.classes if name not in rows]
        for place in sum_request.layout.iterate_class_slices(sum_request.classes, unopened, body=False):
            total[place] = 0
        grid = sum_request.shares.make_noise_share_grid(self._divisor) if sum_request.shares else None
        if not is_plausible_sum(total, grid.limit if grid else FIXED_POINT_ONE + self._divisor):
            raise MaskingFailed("the sum is not one of updates: a site's masks do not fit what it stated.")
        largest = sum_request.largest
        still_masked = tuple(sorted(closed))
        vector = grid.convert_integers_to_values(total) if grid else convert_from_fixed_point(total, largest)
        return UnmaskedSum(sum_request, vector, tuple(sorted(survivors)), self._divisor, rows, still_masked, total)

    # ------------------------------------------------------------------ stages

    def _collect_site_keys(self) -> SharesRequest:
        """Collect the sites' signed keys, and return the request that relays them to all sites.

        After an earlier attempt at this round, only that attempt's sites are asked.
        """
        sum_request = self.request
        self._members = tuple(sorted(sum_request.rows))
        self._divisor = len(self._members)
        answers = self._request_site_keys()
        now = self._members, self._divisor
        earlier = {(statement.members, statement.divisor) for statement in self._statements.values()} - {now}
        if earlier:
            self._members, self._divisor = min(earlier)
            if missing := sorted(set(self._members) - set(sum_request.rows)):
                members, lacking = quote_names(self._members), quote_names(missing)
                problem = f"this round, or one from the same model, was masked before, among {members}"
                raise MaskingFailed(f"{problem}: it can be done again with the same sites, and lacks {lacking}.")
            answers = self._request_site_keys()
        self._leave_out_unsatisfiable_sites(answers)
        self._refuse_too_few_sites(answers, max(self._needed_site_count, 2), "stated their keys")
        ordered = [answers[site] for site in sorted(answers)]
        return SharesRequest(
            sum_request.run,
            sum_request.round,
            tuple(answer.statement for answer in ordered),
            tuple(answer.signature for answer in ordered),
            tuple(answer.identity for answer in ordered),
        )

    def _request_site_keys(self) -> dict[str, KeysAnswer]:
        """Request the keys of the sites that mask together, and store their statements; return the answers by site.

        A site is omitted if its statement does not fit the request.
        """
        sum_request = self.request
        answers = dict[str, KeysAnswer]()
        request = KeysRequest(sum_request.run, sum_request.round, self._members, self._divisor)
        self._statements = {}
        for site, answer in self.ask(dict.fromkeys(self._members, request), KeysAnswer, 2):
            try:
                statement = read_masking_statement(answer.statement)
            except MaskingStatementError:
                continue
            if (statement.run, statement.round, statement.site) != (sum_request.run, sum_request.round, site):
                continue
            if statement.rows == sum_request.rows[site]:
                self._statements[site], answers[site] = statement, answer
        return answers

    def _leave_out_unsatisfiable_sites(self, answers: dict[str, KeysAnswer]) -> None:
        """Leave out the sites whose policy asks for a sum of more sites than there are.

        An unmodified site declines in this case and states no such number, so a number that is too large must not make
        the sum of the other sites fail. If too few sites would be left, all stay, and the sum fails with the needed
        number.

        Args:
            answers: The sites' keys by site, from which these sites are removed.
        """
        fitting = sorted(self._statements, key=lambda site: self._statements[site].cohort)
        while fitting and self._statements[fitting[-1]].cohort > len(fitting):
            fitting.pop()
        if len(fitting) >= max(count_needed_survivors(self._divisor, 0), 2):
            for site in set(answers) - set(fitting):
                del self._statements[site], answers[site]

    def _collect_encrypted_shares(self, request: SharesRequest) -> dict[str, dict[str, bytes]]:
        """Request encrypted shares of the sites' secrets; return sender -> recipient -> encrypted shares."""
        others = {site: set(self._statements) - {site} for site in self._statements}
        requests = dict.fromkeys(self._statements, request)
        by_sender = dict[str, dict[str, bytes]]()
        for site, answer in self.ask(requests, SharesAnswer, self._needed_site_count):
            if set(answer.recipients) == others[site]:
                by_sender[site] = dict(zip(answer.recipients, answer.letters, strict=True))
        self._refuse_too_few_sites(by_sender, self._needed_site_count, "shared their secrets")
        return by_sender

    def _collect_masked_updates(self, letters: Mapping[str, Mapping[str, bytes]]) -> tuple[Integers, list[str]]:
        """Request masked updates; return their sum, and the sorted names of the sites that are in the sum.

        Args:
            letters: Sender -> recipient -> encrypted shares of the sender's secrets, which the requests pass on.
        """
        sum_request = self.request
        layout = self.request.layout
        total = np.zeros(layout.compute_vector_size(sum_request.classes), np.uint32)
        opened = {site for statement in self._statements.values() for site in statement.opened}  # by an earlier attempt
        requests = dict[str, MaskedRequest]()
        recipients = [site for site in letters if site in opened] if opened else list(letters)
        for site in recipients:
            senders = tuple(sorted(set(letters) - {site}))
            written = tuple(letters[sender][site] for sender in senders)
            numbers = layout.compute_vector_size(sum_request.rows[site])
            requests[site] = MaskedRequest(sum_request.run, sum_request.round, senders, written, numbers)
        self._refuse_too_few_sites(requests, self._needed_site_count, "are those whose sum was opened before")
        survivors = list[str]()
        for site, answer in self.ask(requests, MaskedAnswer, self._needed_site_count):
            rows = sum_request.rows[site]
            if answer.vector.shape == (layout.compute_vector_size(rows),):
                places = layout.iterate_class_slices(sum_request.classes, rows, body=True)
                for place, own in zip(places, layout.iterate_class_slices(rows, rows, body=True), strict=True):
                    total[place] += answer.vector[own]
                survivors.append(site)
        self._refuse_too_few_sites(survivors, self._needed_site_count, "sent a masked update")
        return total, sorted(survivors)

    # ------------------------------------------------------------------ unmasking

    def _remove_masks(
        self, total: Integers, taking_part: list[str], survivors: list[str], segments: Iterable[UpdateVectorSegment]
    ) -> None:
        """Request shares of secrets, and subtract the masks from the sum.

        These are the survivors' own masks, and the masks that survivors share with sites that dropped out.

        Args:
            total: The masked sum, which is changed in place.
            taking_part: The sites that sent shares of their secrets.
            survivors: The sites whose updates are in the sum.
            segments: Parts of the vector; the values of a segment are sent by the same sites.
        """
        sum_request = self.request
        layout = self.request.layout
        reveal = RevealRequest(sum_request.run, sum_request.round, tuple(survivors))
        masks = dict[tuple[str, str], list[bytes]]()  # (survivor, segment) -> shares of its own mask's secret
        keys = dict[str, list[bytes]]()  # dropped site -> shares of its mask key
        answered = set[str]()
        for site, answer in self.ask(dict.fromkeys(survivors, reveal), RevealAnswer, self._needed_site_count):
            answered.add(site)
            for owner, name, share in zip(answer.owners, answer.segments, answer.shares, strict=True):
                masks.setdefault((owner, name), []).append(share)
            for gone, share in zip(answer.gone, answer.key_shares, strict=True):
                keys.setdefault(gone, []).append(share)
        self._refuse_too_few_sites(answered, self._needed_site_count, "gave their shares")
        for segment in segments:
            if may_unmask_segment(segment, set(survivors), self._statements):
                for site in sorted(set(segment.owners) & set(survivors)):
                    secret = recover_secret_from_shares(masks.get((site, segment.name), [])[: self._needed_site_count])
                    body = segment.is_body_segment
                    places = layout.iterate_class_slices(sum_request.classes, segment.classes, body=body)
                    add_mask_to_vector(total, places, secret, subtract=True)
        for gone in sorted(set(taking_part) - set(survivors)):
            stated = self._statements[gone]
            secret = recover_secret_from_shares(keys.get(gone, [])[: self._needed_site_count])
            key = deserialize_private_key(secret, stated.masking_key)
            for site in survivors:
                theirs = self._statements[site]
                common = tuple(name for name in theirs.rows if name in stated.rows)
                places = layout.iterate_class_slices(sum_request.classes, common, body=True)
                # A survivor whose name is the later of the two subtracted the mask.
                add_mask_to_vector(total, places, compute_shared_secret(key, theirs.masking_key), subtract=site < gone)

    @property
    def _needed_site_count(self) -> int:
        """Return how many sites must answer at every stage; as many shares recover a site's secrets."""
        honest = self.request.shares.honest if self.request.shares else 0
        cohort = max((statement.cohort for statement in self._statements.values()), default=0)
        return count_needed_survivors(self._divisor, cohort, honest)

    def _refuse_too_few_sites(self, sites: Iterable[str], needed: int, what: str) -> None:
        names = sorted(sites)
        if len(names) < needed:
            who = quote_names(names) or "nobody"
            raise MaskingFailed(f"{len(names)} sites {what} ({who}), {needed} are needed.")
