"""The sites of a run: roll call, label contract, sites that join later, and the random sample of sites for a round.

The sample depends only on the run's seed and the round. So a run that is killed and resumed asks the same sites, and
the network and the simulation ask the same sites.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from flwr.serverapp import Grid

from polyclinic.common.config import HospitalPlan, ParticipationSection
from polyclinic.common.contract import LabelContract, LabelDeclaration, merge_label_declarations
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.pixel_contract import PixelTerms, agree_on_pixels
from polyclinic.common.security.signatures import read_signature_or_none
from polyclinic.common.system.timers import JOIN_DEADLINE_S, REFUSAL_CONFIRMATION_S
from polyclinic.common.wire.codec import count_payload_bytes, encode_record
from polyclinic.common.wire.fleet_protocol import QUESTION_TYPE, REFUSAL_TYPE, ROLL_CALL_TYPE
from polyclinic.common.wire.flower_messages import APPROVAL_ERROR_MESSAGE, make_request
from polyclinic.common.wire.records import NO_ARRAYS, Arrays, Question, Refusal, RollCall, RollCallAnswer
from polyclinic.common.wire.versions import WIRE_VERSION, read_version
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.strategies.aggregation.bounds import cap_image_counts
from polyclinic.strategies.engine.admission_limits import (
    ClaimsBySite,
    SiteAdmissionLimits,
    find_admission_place,
    lower_answer_claims,
    lower_image_claims,
)
from polyclinic.strategies.engine.class_words import (
    CoordinatorWords,
    add_distinct_line,
    describe_alike_classes_to_others,
    describe_classes_of_one_site,
    describe_own_classes_to_site,
    find_classes_of_one_site,
)
from polyclinic.strategies.engine.events import MissingReplyStatus, RunCallbacks, TooFewSites
from polyclinic.strategies.engine.exchange import (
    FIRST_POLL_S,
    MAX_MISSING_REPORTED_AT_ONCE,
    NODE_UNAVAILABLE,
    REPORT_INTERVAL_S,
    REVOKED_ERROR_CODE,
    decode_reply,
    push_flower_messages,
    send_and_receive,
    sleep_between_polls,
)
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.engine.site_faults import (
    RollCallTerms,
    find_model_layout_faults,
    list_pixel_forms,
)
from polyclinic.strategies.local.method_faults import find_contract_faults
from polyclinic.strategies.methods.base import Method, RoundContext

REPORT_DELAY_S = 1.0
"""Seconds until the missing sites are reported to the callbacks."""
MIN_EVALUATING_SITES = 100
"""Up to this number all sites evaluate a model; of more sites, this many or as many as train in a round."""
EVALUATION_SEED_PART = 1
"""Part of an evaluation's seed, so that its sample differs from the sample that trains."""


def count_evaluating_sites(configured: int | None, sites_per_round: int) -> int:
    """Return how many sites evaluate a model; 0 means all.

    Args:
        configured: The number in the experiment. If it is None, all sites evaluate if all train in each round;
            otherwise as many as train, and at least :data:`MIN_EVALUATING_SITES`.
        sites_per_round: Number of sites that train in a round; 0 for all.
    """
    if configured is not None:
        return configured
    return max(MIN_EVALUATING_SITES, sites_per_round) if sites_per_round else 0


def draw_random_site_names(names: Collection[str], size: int, seed: Sequence[int]) -> list[str]:
    """Draw ``size`` names uniformly at random and return them sorted; all names if ``size`` is 0 or too large."""
    ordered = sorted(names)
    if not 0 < size < len(ordered):
        return ordered
    return sorted(np.random.default_rng(seed).choice(ordered, size, replace=False).tolist())


def draw_sites_covering_classes(
    annotated: Mapping[str, Collection[str]], size: int, seed: Sequence[int], excluded: Collection[str] = ()
) -> list[str]:
    """Draw ``size`` sites at random so that together they annotate every class, if possible; return them sorted.

    A random sample that covers all classes is returned unchanged. Otherwise sites that annotate missing classes replace
    the sites drawn last; sites that annotate most of the missing classes come first. With at least as many sites as
    classes every class is covered; with fewer sites, as many classes as this greedy choice finds.

    Args:
        annotated: Site -> classes that it annotates. It includes excluded sites, so that the exclusion of a site does
            not change the random order of the others.
        size: Number of sites to draw, 1 or more.
        excluded: Sites that are not drawn.
    """
    names = sorted(annotated)
    places = np.random.default_rng(seed).permutation(len(names)).tolist()
    classes = {name: frozenset(annotated[name]) for name in names if name not in set(excluded)}
    random_order = [names[place] for place in places if names[place] in classes]
    all_classes = frozenset[str]().union(*classes.values())
    needed = list[str]()
    while True:
        sample = [*needed, *(site for site in random_order if site not in needed)][:size]
        missing = all_classes.difference(*(classes[site] for site in sample))
        if not missing or len(needed) == len(sample):
            return sorted(sample)
        needed.append(max(random_order, key=lambda site: len(classes[site] & missing)))


# ---------------------------------------------------------------------- the roll call

Registered = Callable[[], Mapping[int, str]]
"""Returns the site name of each registered node; in simulation no node is registered, and names are trusted."""
SiteProcesses = Callable[[], Mapping[int, str]]
"""Returns the identifier of each node's process that connected last; a restarted program is a new process."""


@dataclass
class RollCaller:
    """Makes the roll call: asks connected sites for their names and classes, and stores the answers.

    Attributes:
        processes: Returns the process of each node; None in simulation.
        members: Node -> the site that answered there and takes part.
        refused: Node -> why its site cannot take part; the site is asked again only after it reconnects.
    """

    grid: Grid
    call: RollCall
    registered: Registered | None = None
    processes: SiteProcesses | None = None
    members: dict[int, RunMember] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _away: set[int] = field(default_factory=set)  # refused nodes that have disconnected since they were refused
    _process: dict[int, str] = field(default_factory=dict)  # node -> its process when it was asked last
    _asked: dict[str, int] = field(default_factory=dict)  # message -> node that has not answered it yet

    def __post_init__(self) -> None:
        self._content = encode_record(self.call)  # the same for all

    @property
    def label_declarations(self) -> list[LabelDeclaration]:
        """Return the label declarations of all members."""
        return [member.label_declaration for member in self.members.values()]

    @property
    def missing_site_names(self) -> tuple[str, ...]:
        """Return the names of the registered sites that have neither become members nor been refused."""
        names = self.registered() if self.registered else {}
        known_nodes = self.members.keys() | self.refused.keys()
        return tuple(sorted(name for node, name in names.items() if node not in known_nodes))

    @property
    def site_names_awaiting_approval(self) -> tuple[str, ...]:
        """Return the names of the sites at which a person has to approve the plan first.

        Such a site connects as a new process once the plan is approved there, and so is asked again.
        """
        nodes = [node for node, reason in self.refused.items() if reason == APPROVAL_ERROR_MESSAGE]
        return tuple(sorted(map(self.get_registered_site_name, nodes)))

    def ask_new_sites_for_labels(self, timeout_s: float) -> list[RunMember]:
        """Make the roll call for sites that were not asked yet; return the sites that became members."""
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_POLL_S
        new = list[RunMember]()
        self.send_roll_call(timeout_s)
        while self._asked and time.monotonic() < deadline:
            if not (members := self.receive_roll_call_answers()) and self._asked:
                pause_s = sleep_between_polls(pause_s)
            new += members
        self.stop_waiting_for_answers(timeout_s)
        return new

    def send_roll_call(self, timeout_s: float) -> None:
        """Send the roll call to sites that have connected since the last call.

        A site that was refused, or answered with an error, is asked again only after it disconnects and reconnects,
        because somebody may have fixed the fault by then. Until then the reason stays in :attr:`refused`.
        """
        online = set(self.grid.get_node_ids())
        for node in (self._away | self._find_restarted_nodes()) & online:
            self.refused.pop(node, None)
        self._away = set(self.refused) - online
        nodes = sorted(online - set(self.members) - set(self.refused) - set(self._asked.values()))
        if nodes and self.processes is not None:
            present = self.processes()
            self._process |= {node: present.get(node, "") for node in nodes}
        messages = [
            make_request(self._content, node, ROLL_CALL_TYPE, group_id="roll call", ttl=timeout_s) for node in nodes
        ]
        for name, message in push_flower_messages(self.grid, messages).items():
            self._asked[name] = message.metadata.dst_node_id

    def _find_restarted_nodes(self) -> set[int]:
        """Return the refused nodes whose program was restarted since it was asked.

        A program restarts within seconds, but connected sites are listed only once a round. So only the identifier of
        the new process shows that the site was away in between.
        """
        if self.processes is None or not self.refused:
            return set()
        present = self.processes()
        return {node for node in self.refused if present.get(node, "") not in ("", self._process.get(node))}

    @property
    def has_sites_to_ask(self) -> bool:
        """Return True if a site is connected that has neither become a member nor been refused."""
        return bool(set(self.grid.get_node_ids()) - self.members.keys() - self.refused.keys())

    def receive_roll_call_answers(self) -> list[RunMember]:
        """Receive the answers that have arrived since the last call; return the sites that became members."""
        new = list[RunMember]()
        for reply in self.grid.pull_messages(self._asked.keys()) if self._asked else ():
            if (node := self._asked.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue
            if reply.has_error() and reply.error.code in (NODE_UNAVAILABLE, REVOKED_ERROR_CODE):
                continue  # it is asked again when it is connected, if it is registered then
            answer, reason = decode_reply(reply, RollCallAnswer)
            if answer is None:
                self.refused[node] = reason
            elif answer.run != self.call.run:
                self.refused[node] = f"answer belongs to run {answer.run}, expected {self.call.run}"
            elif self.registered and (name := self.registered().get(node, "")) != answer.site:
                reason = f'it calls itself "{answer.site}", but its key is registered for "{name}".'
                self.refuse_site(node, "name", reason)
            else:
                self._remove_replaced_member(answer.site)
                sizes = count_payload_bytes(self._content), count_payload_bytes(reply.content)
                signed = read_signature_or_none(reply.content)
                wire = read_version(reply.content)
                self.members[node] = RunMember(node, answer, *sizes, signed, wire)
                new.append(self.members[node])
        return new

    def _remove_replaced_member(self, site: str) -> None:
        """Remove the member of this name whose node is no longer registered, because its key was revoked and renewed.

        Without this, a hospital with a renewed key would be a second site of the same name.
        """
        if self.registered is None:
            return
        registered = self.registered()
        for node, member in list(self.members.items()):
            if member.answer.site == site and node not in registered:
                del self.members[node]

    def stop_waiting_for_answers(self, timeout_s: float) -> None:
        """Stop waiting for the sites that have not answered, and record that they did not.

        Args:
            timeout_s: Seconds that the roll call lasted, for the recorded reason.
        """
        self.refused |= dict.fromkeys(self._asked.values(), f"no answer within {timeout_s:.0f} s")
        self._asked.clear()

    def get_registered_site_name(self, node: int) -> str:
        """Return the registered name of a node's site; ``node ID`` if it has none, as in simulation."""
        names = self.registered() if self.registered else {}
        return names.get(node, f"node {node}")

    def refuse_site(self, node: int, kind: str, reason: str) -> None:
        """Record why a site cannot take part, send the reason to the site, and wait for its confirmation.

        Args:
            node: The site's Flower node.
            kind: Name of what the site has to fix: ``name``, ``version``, ``labels`` or ``pixels``.
            reason: Sentence for people at the site.
        """
        self.members.pop(node, None)
        self.refused[node] = reason
        self._send_and_await_note({node: Refusal(self.call.run, kind, reason)}, REFUSAL_TYPE)

    def ask_sites(self, texts: Mapping[str, str]) -> None:
        """Send members a question for their staff, and wait for their confirmation.

        A site of an earlier wire version gets none.

        Args:
            texts: Site -> question.
        """
        members = self.members.values()
        asked = [member for member in members if member.answer.site in texts and member.wire >= WIRE_VERSION]
        records = {member.node_id: Question(self.call.run, texts[member.answer.site]) for member in asked}
        if records:
            self._send_and_await_note(records, QUESTION_TYPE)

    def _send_and_await_note(self, records: Mapping[int, Refusal | Question], kind: str) -> None:
        messages = [
            make_request(encode_record(record), node, kind, group_id="roll call", ttl=REFUSAL_CONFIRMATION_S)
            for node, record in records.items()
        ]
        noted = send_and_receive(
            self.grid, messages, lambda at_work, lost: None, deadline_s=REFUSAL_CONFIRMATION_S, enough=0
        )
        list(noted)  # the exchange happens while its replies are read

    def refuse_faulty_sites(self, faults: Iterable[Fault], kind: str) -> None:
        """Refuse every site that has a fault, and send each site its faults.

        Args:
            faults: Faults of any sites.
            kind: Name of what the sites have to fix: ``name``, ``version``, ``labels`` or ``pixels``.
        """
        by_site: dict[str, list[str]] = {}
        for fault in faults:
            if fault.site:
                by_site.setdefault(fault.site, []).append(str(fault))
        for node, member in list(self.members.items()):
            if reasons := by_site.get(member.answer.site):
                self.refuse_site(node, kind, "\n".join(reasons))

    def wait_for_sites(
        self, expected: int, needed: int, deadline_s: float, on_wait: Callable[[MissingReplyStatus], None]
    ) -> None:
        """Make the roll call: ask every site for its name and the classes that it annotates.

        Args:
            expected: Number of sites to wait for. Refused sites count, too, as soon as all sites that were asked have
                answered.
            needed: Number of sites that are enough after ``deadline_s``.
            deadline_s: Seconds to wait for ``expected`` sites.
            on_wait: Receives the missing sites whenever these change.

        Raises:
            TooFewSites: If fewer than ``needed`` sites answered in time; the message has the reasons.
            BadInput: If two sites use the same name.
        """
        deadline = time.monotonic() + deadline_s
        pause_s = FIRST_POLL_S
        reported: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        looked_at = -math.inf
        while (remaining_s := deadline - time.monotonic()) > 0:
            # A look goes over all sites: one after each of n answers would take n squared steps.
            looks = len(self._asked) <= MAX_MISSING_REPORTED_AT_ONCE
            if looks or time.monotonic() - looked_at >= REPORT_INTERVAL_S:
                self.send_roll_call(remaining_s)
                looks = True
                looked_at = time.monotonic()
            new_members = self.receive_roll_call_answers()
            if len(self.members) >= expected:
                self._asked.clear()  # the others are asked again as late joiners
                break
            if looks or not self._asked:
                awaiting = self.site_names_awaiting_approval
                if not self._asked and len(self.members) + len(self.refused) - len(awaiting) >= expected:
                    break
                if deadline_s - remaining_s >= REPORT_DELAY_S:
                    missing = self.missing_site_names
                    if (missing, awaiting) != reported:
                        on_wait(MissingReplyStatus("roll call", 0, missing, (), remaining_s, awaiting))
                    reported = missing, awaiting
            if not new_members:
                pause_s = sleep_between_polls(pause_s)
        self.stop_waiting_for_answers(deadline_s)
        if len(self.members) < needed:
            raise TooFewSites(self._describe_missing_answers(needed))
        counts = Counter(member.answer.site for member in self.members.values())
        raise_faults(
            [
                Fault(f"site {name}", "two sites use this name.", "Give each a name of its own.")
                for name, count in sorted(counts.items())
                if count > 1
            ]
        )

    def _describe_missing_answers(self, needed: int) -> str:
        """Return sentences that say which sites answered, which are not there, and why others were refused."""
        present = quote_names(sorted(member.answer.site for member in self.members.values())) or "none"
        sentences = [f"{len(self.members)} of {needed} sites answered the roll call ({present})."]
        if self.missing_site_names:
            sentences.append(f"Not there: {quote_names(self.missing_site_names)}.")
        if self.refused:
            reasons = [f"{self.get_registered_site_name(node)}: {why}" for node, why in sorted(self.refused.items())]
            listed = "; ".join(reasons)
            sentences.append(listed if listed.endswith((".", "!", "?")) else f"{listed}.")
        if awaiting := self.site_names_awaiting_approval:
            names = quote_names(awaiting)
            sentences.append(
                f"Once {names} has approved the plan, give the same command again; or let it wait longer: "
                "participation.roll_call_deadline_s."
            )
        return " ".join(sentences)


# ---------------------------------------------------------------------- the members of a run


@dataclass(eq=False)
class RunMembership:
    """The sites that take part in one run.

    Attributes:
        registered: Returns the site name of each registered node; None in simulation.
        claims: Returns the sites' limits, the order in which they were admitted, and the coordinator's lists of
            classes, which settle contradictions between sites. None if nobody admits sites; then the order of their
            names counts.
        processes: Returns the process of each node, which shows that a refused site was restarted; None in simulation.
        contract: The classes that each site annotates, and the list of all classes, which the roll call fixes.
        pixels: The form of all sites' pixels, which the roll call fixes, or that of a run that is resumed; None if no
            site states it.
        members: Site -> its answer to the roll call.
        bytes_down, bytes_up: Bytes by site, from the roll call to the test.
    """

    method: Method
    plan: HospitalPlan
    participation: ParticipationSection
    run: str
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)
    registered: Registered | None = None
    claims: ClaimsBySite | None = None
    processes: SiteProcesses | None = None
    contract: LabelContract = field(default_factory=lambda: LabelContract((), MappingProxyType({})))
    pixels: PixelForm | None = None
    members: dict[str, RunMember] = field(default_factory=dict)
    bytes_down: Counter[str] = field(default_factory=Counter)
    bytes_up: Counter[str] = field(default_factory=Counter)
    _roll: RollCaller = field(init=False)
    _layout: str = ""
    _roll_call_end: float = 0.0  # on the monotonic clock, in seconds
    _expected: int = 0
    _begun_classes: tuple[str, ...] = ()  # of a run that is resumed
    _sorted_answers: Mapping[str, RollCallAnswer] | None = None  # of all members; made once for thousands of them

    def __post_init__(self) -> None:
        self._evaluated = count_evaluating_sites(self.plan.evaluation.sites, self.participation.sites_per_round)

    def count_needed_replies(self, requests: int) -> int:
        """Return how many replies to ``requests`` requests are needed: ``min_sites``, or all if ``min_sites`` is 0."""
        return self.participation.min_sites or requests

    def call_roll(self, grid: Grid, expected: int, begun_classes: tuple[str, ...] = ()) -> LabelContract:
        """Ask every site for its name and the classes that it annotates, and make the label contract from the answers.

        Sites whose answers contradict those of others are left out; the run goes on while ``min_sites`` are left.

        Args:
            expected: Number of sites to wait for. After the deadline ``min_sites`` are enough; if ``min_sites`` is 0,
                all are needed.
            begun_classes: The classes of a run that is resumed, which no site can add to; empty for a new run.

        Returns:
            The label contract: the run's classes, and the classes that each site annotates.

        Raises:
            TooFewSites: If too few sites answered in time.
            BadInput: If too few sites are left, or the method does not fit their labels.
        """
        call = RollCall(self.run, self.plan.model_dump_json())
        self._roll = RollCaller(grid, call, self.registered, self.processes)
        self._roll_call_end = time.monotonic() + self.participation.roll_call_deadline_s
        self._expected, self._begun_classes = expected, begun_classes
        self._gather_fitting_sites([])
        return self.contract

    def _gather_fitting_sites(self, faults: list[Fault]) -> None:
        """Wait until enough sites have answered that fit together, and leave out the others.

        While too few sites are left, connected sites that have not been asked yet are asked. So a site that is left out
        does not take the place of one that fits.

        Args:
            faults: Faults of the sites that were left out before.

        Raises:
            TooFewSites: If too few sites answered in time.
            BadInput: With all faults, if too few sites are left; with ``min_sites = 0``, if any site has a fault.
        """
        roll = self._roll
        needed = self.participation.min_sites or self._expected
        while len(roll.members) < needed:
            if faults and not (self.participation.min_sites and roll.has_sites_to_ask):
                raise_faults(faults)
            seconds = max(self._roll_call_end - time.monotonic(), 0.0)
            roll.wait_for_sites(self._expected, needed, seconds, self.callbacks.on_waiting_for_sites)
            faults = faults + self._leave_out_unlike_sites()
        if not self.participation.min_sites:  # every site is needed
            raise_faults(faults)
        faults = faults + self._make_label_contract()
        if len(roll.members) < needed:
            self._gather_fitting_sites(faults)

    def _leave_out_unlike_sites(self) -> list[Fault]:
        """Refuse each site whose claims, labels or pixels do not fit, once and with all its faults; return the faults.

        If two class names may mean one class, the sites with the other name are asked about it, too.
        """
        members = self._order_by_admission(self._roll.members.values())
        site_faults = self._terms.collect_faults(members)
        faults = add_distinct_line([each.fault for each in site_faults], self.coordinator_words)
        with_other_faults = {each.fault.site for each in site_faults if each.point != "pixels"}
        only_pixels = [fault for fault in faults if fault.site not in with_other_faults]
        self._roll.refuse_faulty_sites(only_pixels, "pixels")
        self._roll.refuse_faulty_sites(faults, "labels")
        self._roll.ask_sites(describe_alike_classes_to_others(faults))
        return list({str(fault): fault for fault in faults}.values())  # simulated sites have one text in common

    @property
    def is_simulated(self) -> bool:
        """True if no site is registered, because all of them are simulated."""
        return self.registered is None

    @property
    def _terms(self) -> RollCallTerms:
        """Return the requirements of this run on its sites."""
        return RollCallTerms(
            self.plan,
            self.method,
            self._read_admission_limits(),
            self.coordinator_words,
            self.pixel_terms,
            self._begun_classes,
            self.is_simulated,
            leaves_sites_out=bool(self.participation.min_sites),
        )

    @property
    def compares_words(self) -> bool:
        """True if the sites choose their own class names: not in a simulation (one table), nor with a vocabulary."""
        return not self.is_simulated and not self.plan.vocabulary

    @property
    def coordinator_words(self) -> CoordinatorWords:
        """Return the coordinator's statements about class names."""
        return CoordinatorWords.from_limits(self._read_admission_limits(), self.participation.distinct_classes)

    def _read_admission_limits(self) -> Mapping[str, SiteAdmissionLimits]:
        return self.claims() if self.claims else {}

    @property
    def classes_of_one_site(self) -> dict[str, str]:
        """Return class -> site for the classes that one site alone annotates, and the coordinator has not confirmed."""
        return find_classes_of_one_site(self.contract, self.coordinator_words) if self.compares_words else {}

    def ask_about_classes_of_one_site(self) -> str:
        """Ask each site about the classes that it alone annotates.

        Returns:
            The question to the coordinator; empty if there is none.
        """
        classes = self.classes_of_one_site
        texts = dict[str, str]()
        for site in set(classes.values()):
            declaration = self.members[site].label_declaration
            own_words = dict(zip(declaration.canonical_names, declaration.names, strict=True))
            own_names = {name: own_words[name] for name, owner in classes.items() if owner == site}
            texts[site] = describe_own_classes_to_site(own_names, self.contract.class_names)
        self._roll.ask_sites(texts)
        return describe_classes_of_one_site(classes, self.coordinator_words) if classes else ""

    def _agree_on_pixels(self) -> None:
        """Fix the form of the run's pixels, once a member states its own."""
        forms = list_pixel_forms(self._order_by_admission(self.members.values()))
        self.pixels = agree_on_pixels(forms, self.pixel_terms) or self.pixels

    def _order_by_admission(self, members: Iterable[RunMember]) -> list[RunMember]:
        """Return members in the order in which their sites were admitted."""
        limits = self._read_admission_limits()
        return sorted(members, key=lambda member: find_admission_place(member.answer.site, limits))

    @property
    def pixel_terms(self) -> PixelTerms:
        """Return the run's requirements on pixels, with the form on which its sites have agreed."""
        terms = PixelTerms.from_plan(self.plan)
        return replace(terms, begun=self.pixels, model_decides_color=not self.is_simulated)

    @property
    def sites_without_stated_pixels(self) -> tuple[str, ...]:
        """Return the members whose release does not state how images become pixels."""
        return tuple(sorted(site for site, member in self.members.items() if not member.answer.pixels))

    def _make_label_contract(self) -> list[Fault]:
        """Make the run's label contract and list of members from the answers to the roll call.

        Returns:
            The faults of sites that were refused because of the method's rules for answers to the roll call; if any,
            enough sites may no longer be left.

        Raises:
            BadInput: If the method does not fit the labels.
        """
        faults = list[Fault]()
        while True:
            self.contract = merge_label_declarations(self._roll.label_declarations)
            raise_faults(find_contract_faults(self.method.site, self.contract))
            on_roll = {member.answer.site: member for member in self._roll.members.values()}
            for site in self.members.keys() - on_roll.keys():
                del self.members[site]
                self._sorted_answers = None
            for site in on_roll.keys() - self.members.keys():
                self._add_run_member(on_roll[site])
            context = self.make_round_context(0, NO_ARRAYS)
            new = self.method.find_roll_call_faults(context)
            if not new:
                self._agree_on_pixels()
                return faults
            self._roll.refuse_faulty_sites(new, "labels")
            faults += {str(fault): fault for fault in new}.values()  # one text may be about several sites
            if not self.participation.min_sites or not all(fault.site for fault in new):
                raise_faults(faults)
            if len(self._roll.members) < self.participation.min_sites:
                return faults

    def _add_run_member(self, member: RunMember) -> None:
        site = member.answer.site
        self.members[site] = member
        self._sorted_answers = None
        self.bytes_down[site] += member.bytes_down
        self.bytes_up[site] += member.bytes_up

    @property
    def left_out_sites(self) -> dict[str, str]:
        """Return the sites that were refused or did not answer the roll call, with the reasons."""
        refused = sorted(self._roll.refused.items())
        return {self._roll.get_registered_site_name(node): reason for node, reason in refused}

    @property
    def absent_sites(self) -> tuple[str, ...]:
        """Return the admitted sites that have not answered this run's roll call; empty in simulation."""
        # A member with a renewed key that is not back yet has answered with its old key.
        return tuple(site for site in self._roll.missing_site_names if site not in self.members)

    @property
    def sites_awaiting_approval(self) -> tuple[str, ...]:
        """Return the sites at which a person has to approve the plan first; each is one of the left out sites."""
        return self._roll.site_names_awaiting_approval

    @property
    def answers(self) -> Mapping[str, RollCallAnswer]:
        """Return the members' answers to the roll call, sorted by site name."""
        if self._sorted_answers is None:
            ordered = {site: self.members[site].answer for site in sorted(self.members)}
            self._sorted_answers = MappingProxyType(ordered)
        return self._sorted_answers

    def lower_image_claims(self, uncounted: Collection[str] = ()) -> dict[str, int]:
        """Return site -> the number of images that counts for it, for the members that claim too many.

        Args:
            uncounted: Members whose statistics do not count.
        """
        limits = {} if self.claims is None else self.claims()
        admitted = {site for site, limit in limits.items() if limit.images > 0}
        images = {site: answer.train_samples for site, answer in self.answers.items()}
        return lower_image_claims(images, images.keys() - set(uncounted), admitted)

    def make_round_context(
        self, server_round: int, statistics: Arrays, uncounted: Collection[str] = ()
    ) -> RoundContext:
        """Return the data for the method's rules in a round: label contract, roll call answers and statistics.

        Args:
            uncounted: Sites whose statistics do not count; their answers are left out.
        """
        lowered = self.lower_image_claims(uncounted)
        answers = self.answers
        if lowered or uncounted or self.participation.largest_share < 1:
            answers = {site: answer for site, answer in answers.items() if site not in uncounted}
            images = {site: lowered.get(site, answer.train_samples) for site, answer in answers.items()}
            for site, count in cap_image_counts(images, self.participation.largest_share).items():
                if count < answers[site].train_samples:
                    answers[site] = lower_answer_claims(answers[site], count)
        task = self.plan.model.task
        seed = self.plan.run.seed
        return RoundContext(task, self.contract, answers, statistics, server_round, seed, frozenset(uncounted))

    def fix_run_model_layout(self, layout: str) -> LabelContract:
        """Fix the model's layout; refuse sites whose software release would build a model of another layout.

        Args:
            layout: Hash of the names, shapes and order of the model's tensors.

        Returns:
            The label contract of the remaining sites, which may have fewer classes.

        Raises:
            BadInput: Naming every refused site with its release, if too few sites are left.
        """
        self._layout = layout
        if faults := find_model_layout_faults(self.members.values(), layout):
            self._roll.refuse_faulty_sites(faults, "version")
            self._gather_fitting_sites(faults)
        return self.contract

    def admit_late_joiners(self, server_round: int) -> None:
        """Make the roll call for newly connected sites, and admit those that fit the run's classes and model.

        A site whose key was revoked and renewed joins again, in the place of the member with its old key.
        """
        for member in self._roll.ask_new_sites_for_labels(JOIN_DEADLINE_S):
            others = [other for other in self.members.values() if not self._is_replaced(other, member)]
            declarations = [other.label_declaration for other in (*others, member)]
            other_layout = find_model_layout_faults([member], self._layout)
            terms = replace(self._terms, begun_classes=self.contract.class_names)
            site_faults = terms.collect_faults([member])
            if faults := [*other_layout, *(each.fault for each in site_faults)]:
                only_pixels = all(each.point == "pixels" for each in site_faults)
                kind = "version" if other_layout else "pixels" if only_pixels else "labels"
                self._roll.refuse_faulty_sites(faults, kind)
                continue
            try:
                contract = merge_label_declarations(declarations, self.contract.class_names)
                raise_faults(find_contract_faults(self.method.site, contract))
            except BadInput as error:
                faults = [replace(fault, site=member.answer.site) for fault in error.faults]
                self._roll.refuse_faulty_sites(faults, "labels")
                continue
            self.contract = contract
            self._add_run_member(member)
            self._agree_on_pixels()
            self.callbacks.on_late_join(server_round, member.answer.site)

    def _is_replaced(self, earlier: RunMember, member: RunMember) -> bool:
        """Return True if a member of the run is the same site as ``member``, by a key that was revoked since."""
        return earlier.answer.site == member.answer.site and earlier.node_id not in self._roll.members

    def draw_training_sites(self, server_round: int, excluded: Collection[str] = ()) -> list[str]:
        """Return the sites of a round: all but the excluded ones, or ``sites_per_round`` of these drawn at random."""
        names = set(self.members) - set(excluded)
        return draw_random_site_names(names, self.participation.sites_per_round, [self.plan.run.seed, server_round])

    @property
    def evaluates_site_sample(self) -> bool:
        """Return True if only a random sample of the sites evaluates models, False if all do."""
        return 0 < self._evaluated < len(self.members)

    def draw_evaluating_sites(self, server_round: int, excluded: Collection[str] = ()) -> list[str]:
        """Return the sites that evaluate a model in a round, except the excluded ones.

        These are all sites, or a sample that is drawn by the run's seed and the round, and covers the run's classes if
        possible.
        """
        if not self.evaluates_site_sample:
            return sorted(set(self.members) - set(excluded))
        annotated = {site: self.contract.sites[site] for site in self.members}
        seed = [self.plan.run.seed, server_round, EVALUATION_SEED_PART]
        return draw_sites_covering_classes(annotated, self._evaluated, seed, excluded)
