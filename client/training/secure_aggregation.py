"""The site's part of secure aggregation: updates and test score histograms stay in memory until they are masked."""

import hashlib
import hmac
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from polyclinic.client.gate.policy_rules import RequestedWork, decide_if_reply_may_leave
from polyclinic.client.site.site import Site
from polyclinic.client.training.figures import compute_test_histograms_for_sum
from polyclinic.client.training.task import EvaluateStep, LocalTask, SiteRoundLayer
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import quote_names
from polyclinic.common.metrics.score_histograms import convert_histograms_to_rows
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import hash_arrays
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.wire.records import (
    NO_ARRAYS,
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    Request,
    TrainReply,
    TrainRequest,
)
from polyclinic.common.wire.secure_aggregation import (
    TEST_ROUND,
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.privacy.noise import KEY_BYTES
from polyclinic.strategies.privacy.secure_aggregation.masked_rounds import MaskedRoundStore
from polyclinic.strategies.privacy.secure_aggregation.noise_shares import DistributedNoise, make_distributed_noise
from polyclinic.strategies.privacy.secure_aggregation.site import (
    MaskingConditions,
    MaskingRefused,
    RequestHashes,
    SiteMaskingRound,
    make_restart_refusal,
)
from polyclinic.strategies.privacy.secure_aggregation.vectors import FIXED_POINT_ONE, choose_max_update_value

MIN_PROTECTED_COHORT = 2
"""If the policy's ``smallest_cohort`` is below this, the site may be unmasked alone, so no record protects it."""


@dataclass(frozen=True)
class HeldUpdate:
    """An update, or counts of test scores, that a site keeps in memory until it is masked.

    Attributes:
        round: The site's part in this round of secure aggregation.
        state_hash: Hash of the site's stored state after training
            (:meth:`SiteRoundStateFolder.read_round_state_hash`); None for test scores.
    """

    round: SiteMaskingRound
    state_hash: bytes | None


class HeldUpdateStore:
    """Store in memory for the updates of this process's sites, one for each site, until they are masked."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._updates: dict[str, HeldUpdate] = {}
        self.tell = tell

    def drop_held_update(self, site: Site) -> None:
        """Remove a site's held update, because a new training may overwrite the stored state that belongs to it."""
        self._updates.pop(site.name, None)

    def hold_update(self, site: Site, update: HeldUpdate) -> None:
        """Hold a site's update in memory until the coordinator asks for the masked update."""
        self._updates[site.name] = update

    def answer_with_keys(self, site: Site, request: KeysRequest) -> KeysAnswer:
        """Return this site's public keys for a round of secure aggregation."""
        return self._require_held_update(site).round.answer_with_keys(request)

    def answer_with_shares(self, site: Site, request: SharesRequest) -> SharesAnswer:
        """Return shares of the secrets behind this site's masks, one set for each other site, encrypted for it.

        Also print a line about this site's classes that too few sites annotate. The sum of the head rows of so few
        sites would not hide the row of a single site, so the policy decides if the coordinator may unmask that sum.
        """
        masking = self._require_held_update(site).round
        answer = masking.answer_with_shares(request)
        if masking.classes_of_few_sites:
            effect = "can be seen by the coordinator" if site.policy.rows_alone else "stay masked and are not used"
            where, rows = ("test", "counts") if request.round == TEST_ROUND else (f"round {request.round}", "rows")
            names = quote_names(masking.classes_of_few_sites)
            self.tell(f"{where}: too few sites annotate {names}: its {rows} {effect}")
        return answer

    def answer_with_masked_update(self, site: Site, request: MaskedRequest) -> MaskedAnswer:
        """Return the held update of this site with its masks added."""
        return self._require_held_update(site).round.answer_with_masked_update(request)

    def answer_with_revealed_shares(self, site: Site, request: RevealRequest) -> RevealAnswer:
        """Return the secret shares with which the coordinator unmasks the sum of the surviving sites' updates.

        Surviving sites are the sites that did not drop out. The state that the site stored after this training is
        marked as settled only now, and later rounds may then start from it.
        """
        update = self._require_held_update(site)
        answer = update.round.answer_with_revealed_shares(request)
        if update.state_hash is not None:
            site.open_run_state_folder(request.run).mark_round_settled(
                request.round, update.state_hash, update.round.agreement_hash
            )
        return answer

    def _require_held_update(self, site: Site) -> HeldUpdate:
        if site.name not in self._updates:
            raise make_restart_refusal(site.name)
        return self._updates[site.name]


@dataclass(frozen=True)
class SiteMaskingLayer(SiteRoundLayer):
    """Holds updates and test score histograms until they are masked."""

    held_updates: HeldUpdateStore
    site: Site
    plan: HospitalPlan
    method: SiteMethod

    def wrap_answer(self, answer: Callable[[TrainRequest], TrainReply], request: TrainRequest) -> TrainReply:
        """Train, hold the update for masking, and return the reply without it.

        Raises:
            MaskingRefused: If the policy does not allow the reply; it is checked before masking, because the gate sees
                only the masked update.
        """
        site = self.site
        plan = self.plan
        method = self.method
        self.held_updates.drop_held_update(site)
        reply = replace(answer(request), seconds=0.0)
        verdict = decide_if_reply_may_leave(site.policy, RequestedWork(plan, method, request.round), reply)
        if not verdict.is_allowed:  # the gate later sees only masked numbers
            raise MaskingRefused(f"does not send this: {verdict}")
        shares = make_distributed_noise(plan, method)
        terms = replace(
            _make_masking_conditions(site, request, method, shares),
            largest=choose_max_update_value(plan, method),
            shares=shares,
        )
        if shares is not None:
            terms = replace(terms, noise=make_noise_key_function(site, plan, request.round))
        masking = SiteMaskingRound(request.run, request.round, site.name, reply.update, terms)
        self.held_updates.hold_update(
            site, HeldUpdate(masking, site.open_run_state_folder(request.run).read_round_state_hash(request.round))
        )
        if masking.cut:
            self.held_updates.tell(
                f"round {request.round}: {masking.cut} numbers of the update were cut to {terms.largest:g}"
            )
        return replace(reply, update=ModelGroups())

    def adapt_task(self, task: LocalTask, request: Request) -> LocalTask:
        """Return a task with warm-up epochs only in round 1, so that all sites of a masked round do the same work."""
        return replace(task, warms_up=request.round == 1)

    def wrap_evaluation(self, evaluate: EvaluateStep, task: LocalTask, request: EvaluateRequest) -> EvaluateReply:
        """Evaluate, and return the reply without the test part's score histograms, which are held for masking.

        The histograms are held as one row of counts for each class. They leave only in a sum over sites, at every
        policy level. If some sites sent exact values, the values of the other sites could be computed from the sum.
        """
        reply = evaluate(task, request)
        if not request.test:
            return reply
        self.held_updates.drop_held_update(self.site)
        if not (histograms := compute_test_histograms_for_sum(task)):
            return reply
        names, counts = convert_histograms_to_rows(histograms)
        terms = replace(_make_masking_conditions(self.site, request, self.method, None), counts=True)
        update = ModelGroups(head=Head(names, counts[:, :-1], counts[:, -1]))
        masking = SiteMaskingRound(request.run, TEST_ROUND, self.site.name, update, terms)
        self.held_updates.hold_update(self.site, HeldUpdate(masking, None))
        return replace(reply, masked_classes=names)


def _make_masking_conditions(
    site: Site, request: TrainRequest | EvaluateRequest, method: SiteMethod, shares: DistributedNoise | None
) -> MaskingConditions:
    """Return this site's conditions for masking counts or an update, such as the minimum number of sites in a sum.

    Args:
        shares: The noise of which each site adds a share; None without such noise.
    """
    return MaskingConditions(
        largest=float(FIXED_POINT_ONE),
        alone=site.policy.rows_alone and shares is None,
        identity=site.identity,
        peers=site.policy.peers,
        cohort=max(site.policy.smallest_cohort, shares.honest if shares else 0),
        digest=hash_request_parts(site, request, method),
        masked=open_masked_round_store(site, shares),
    )


def make_noise_key_function(site: Site, plan: HospitalPlan, server_round: int) -> Callable[[str], bytes]:
    """Return a function that computes the key of this site's noise share from a hash of the data to be noised.

    The key also depends on a secret of the site. So a round that is masked again after a kill of the process gets the
    same noise, and two sums disclose no more than one. In simulation the key depends only on the run's seed, the round
    and the site.
    """
    if site.simulated:
        seed = derive_seed(plan.run.seed, server_round, site.name, "noise shares")
        return lambda data_hash: seed.to_bytes(KEY_BYTES, "big")
    path = site.folder / "noise.key"
    if not path.exists():
        write_atomically(path, os.urandom(KEY_BYTES), durable=site.durable, private=True)
    secret = path.read_bytes()
    return lambda data_hash: hmac.digest(secret, data_hash.encode(), hashlib.sha256)


def open_masked_round_store(site: Site, shares: DistributedNoise | None = None) -> MaskedRoundStore:
    """Return the store that records the masked rounds of a site, for each run.

    With this record the site refuses to help unmask two sums that differ by a few sites. If the site's policy allows
    the sum of a single site, the returned store records nothing. In a run with distributed noise, the store of a
    hospital (not of a simulated site) always records rounds.

    Args:
        shares: The run's noise, if each site adds a share of it; None for other runs.
    """
    if site.policy.smallest_cohort < MIN_PROTECTED_COHORT and (shares is None or site.simulated):
        return MaskedRoundStore()
    return MaskedRoundStore(site.folder / "masked", durable=site.durable)


def hash_request_parts(site: Site, request: TrainRequest | EvaluateRequest, method: SiteMethod) -> RequestHashes:
    """Return hashes of a request's parts, which the sites of a round compare before they mask their updates.

    The trunk must be the same at all sites. Head rows and statistics by class are compared for classes that two sites
    both receive; a row that only one site receives cannot be compared.
    """
    rows = request.class_names if method.payload.rows == "all" else ()
    statistics = request.statistics if isinstance(request, TrainRequest) else NO_ARRAYS
    test = [] if isinstance(request, TrainRequest) else ["test"]
    # Sites whose local parts are of different rounds must not be summed. The round's number does not suffice: two
    # attempts at one round can be unmasked by different sites.
    agreed_hash = site.open_run_state_folder(request.run).read_settled_request_hash(request.counted)
    before = "" if agreed_hash is None else f"round {request.counted}: {agreed_hash}"

    # Names are hashed too: without a statistic under its expected name, a method could return a zero update.
    plan = json.dumps([request.plan, request.contract, rows, before, sorted(statistics), *test])

    annotated = request.class_names if rows else site.declaration.canonical_names
    own_rows = [(row, name) for row, name in enumerate(request.class_names) if name in annotated]
    groups = [array for array in (request.model.trunk, request.model.norm) if array is not None]
    by_class = {name: array for name, array in statistics.items() if array.shape[:1] == (len(request.class_names),)}
    other_statistics = {name: array for name, array in sorted(statistics.items()) if name not in by_class}

    shared: dict[str, str] = {}
    if (head := request.model.head) is not None:
        shared = {f'head row of "{name}"': hash_arrays(head.weight[row], head.bias[row]) for row, name in own_rows}
    # Statistics of exclusive classes depend on all classes, so they are compared between sites with equal classes.
    among = quote_names([name for _, name in own_rows]) if method.task == "multi_class" else ""
    for row, name in own_rows:
        values = [array[row] for _, array in sorted(by_class.items())]
        if values:
            shared[f'statistics of "{name}"' + (f" among {among}" if among else "")] = hash_arrays(*values)

    rows_of_site = [row for row, _ in own_rows]
    start = [] if head is None else [head.weight[rows_of_site], head.bias[rows_of_site]]
    return RequestHashes(
        plan=hashlib.sha256(plan.encode()).hexdigest(),
        model=hash_arrays(*groups, *other_statistics.values()),
        shared=shared,
        start="".join(test) + hash_arrays(*groups, *start),
    )
