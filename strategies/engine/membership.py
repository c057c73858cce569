"""The sites of a run: roll call, label contract, sites that join later, and the random sample of sites for a round.

The sample depends only on the run's seed and the round. So a run that is killed and resumed asks the same sites, and
the network and the simulation ask the same sites.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from flwr.serverapp import Grid
from pydantic import ValidationError

from polyclinic.common import __version__
from polyclinic.common.config import HospitalPlan, ParticipationSection
from polyclinic.common.contract import (
    LabelContract,
    LabelDeclaration,
    find_label_declaration_faults,
    make_foreign_class_fault,
    merge_label_declarations,
)
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.pixel_contract import (
    PixelTerms,
    agree_on_pixels,
    find_pixel_faults,
    find_pixel_faults_of_simulation,
)
from polyclinic.common.security.signatures import SignedStatement, read_signature_or_none
from polyclinic.common.system.timers import JOIN_DEADLINE_S, REFUSAL_NOTED_S
from polyclinic.common.vocabulary import find_vocabulary_faults
from polyclinic.common.wire.codec import count_payload_bytes, encode_record
from polyclinic.common.wire.fleet_protocol import QUESTION, REFUSAL, ROLL_CALL
from polyclinic.common.wire.flower_messages import WAITING_FOR_APPROVAL, make_request
from polyclinic.common.wire.records import NO_ARRAYS, Arrays, Question, Refusal, RollCall, RollCallAnswer
from polyclinic.common.wire.versions import WIRE_VERSION, find_lacking_feature, read_version
from polyclinic.data.base.names import make_class_spelling_key
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.strategies.aggregation.bounds import cap_image_counts
from polyclinic.strategies.engine.claims import (
    ClaimsBySite,
    SiteAdmissionLimits,
    find_admission_place,
    find_contradictory_count_faults,
    lower_answer_claims,
    lower_image_claims,
)
from polyclinic.strategies.engine.class_words import (
    CoordinatorWords,
    describe_classes_of_one_site,
    describe_own_classes_to_site,
    find_alike_class_faults,
    find_classes_of_one_site,
)
from polyclinic.strategies.engine.events import MissingReplyStatus, RunCallbacks, TooFewSites
from polyclinic.strategies.engine.exchange import (
    FIRST_POLL_S,
    NODE_UNAVAILABLE,
    REVOKED,
    decode_reply,
    push_flower_messages,
    send_and_receive,
    sleep_between_polls,
)
from polyclinic.strategies.methods.base import Method, RoundContext

SHOWN_AFTER_S = 1.0
"""Seconds until the missing sites are reported to the callbacks."""
FEWEST_EVALUATING_SITES = 100
"""Up to this number all sites evaluate a model; of more sites, this many or as many as train in a round."""
EVALUATION = 1
"""Part of an evaluation's seed, so that its sample differs from the sample that trains."""


def count_evaluating_sites(configured: int | None, sites_per_round: int) -> int:
    """Return how many sites evaluate a model; 0 means all.

    Args:
        configured: The number in the experiment. If it is None, all sites evaluate if all train in each round;
            otherwise as many as train, and at least :data:`FEWEST_EVALUATING_SITES`.
        sites_per_round: Number of sites that train in a round; 0 for all.
    """
    if configured is not None:
        return configured
    return max(FEWEST_EVALUATING_SITES, sites_per_round) if sites_per_round else 0


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


@dataclass(frozen=True)
class RunMember:
    """A site that takes part in the run: its answer to the roll call, and the bytes of the request and the answer.

    Attributes:
        signed: The signature of the site's answer; None in simulation.
        wire: The wire version of the answer, which is the one that was agreed on with the site.
    """

    node_id: int
    answer: RollCallAnswer
    bytes_down: int
    bytes_up: int
    signed: SignedStatement | None = None
    wire: int = WIRE_VERSION

    @property
    def label_declaration(self) -> LabelDeclaration:
        """Return the labels that the site annotates, by the site's own names and by canonical names."""
        answer = self.answer
        return LabelDeclaration(answer.site, answer.names, dict(zip(answer.names, answer.class_names, strict=True)))


AdmissionRule = Callable[[Iterable[RunMember]], list[Fault]]
"""Returns a fault for each site whose answer to the roll call does not permit it to take part."""


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
        nodes = [node for node, reason in self.refused.items() if reason == WAITING_FOR_APPROVAL]
        return tuple(sorted(map(self.get_registered_site_name, nodes)))

    def ask_new_sites_for_labels(self, timeout_s: float) -> list[RunMember]:
        """Make the roll call for sites that were not asked yet; return the sites that became members."""
        deadline, pause_s, new = time.monotonic() + timeout_s, FIRST_POLL_S, list[RunMember]()
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
        messages = [make_request(self._content, node, ROLL_CALL, group_id="roll call", ttl=timeout_s) for node in nodes]
        for name, message in push_flower_messages(self.grid, messages).items():
            self._asked[name] = message.metadata.dst_node_id

    def _find_restarted_nodes(self) -> set[int]:
        """Return the refused nodes whose program was restarted since it was asked.

        A program restarts within seconds, and this class looks for connected sites only once a round: that a site was
        away in between is seen by its new process alone.
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
        new = []
        for reply in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            if (node := self._asked.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue
            if reply.has_error() and reply.error.code in (NODE_UNAVAILABLE, REVOKED):
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
                signed, wire = read_signature_or_none(reply.content), read_version(reply.content)
                self.members[node] = RunMember(node, answer, *sizes, signed, wire)
                new.append(self.members[node])
        return new

    def _remove_replaced_member(self, site: str) -> None:
        """Remove the member of this name whose node is no longer registered, because its key was revoked and renewed.

        Without this, a hospital with a renewed key would be a second site of the same name.
        """
        registered = self.registered() if self.registered else self.members
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
            kind: Name of what the site has to fix: ``name``, ``version`` or ``labels``.
            reason: Sentence for people at the site.
        """
        self.members.pop(node, None)
        self.refused[node] = reason
        self._send_and_await_note({node: Refusal(self.call.run, kind, reason)}, REFUSAL)

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
            self._send_and_await_note(records, QUESTION)

    def _send_and_await_note(self, records: Mapping[int, Refusal | Question], kind: str) -> None:
        messages = [
            make_request(encode_record(record), node, kind, group_id="roll call", ttl=REFUSAL_NOTED_S)
            for node, record in records.items()
        ]
        noted = send_and_receive(self.grid, messages, lambda at_work, lost: None, deadline_s=REFUSAL_NOTED_S, enough=0)
        list(noted)

    def refuse_faulty_sites(self, faults: Iterable[Fault], kind: str) -> None:
        """Refuse every site that has a fault, and send each site its faults.

        Args:
            faults: Faults of any sites.
            kind: Name of what the sites have to fix: ``name``, ``version`` or ``labels``.
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
        deadline, pause_s = time.monotonic() + deadline_s, FIRST_POLL_S
        reported: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        while (remaining_s := deadline - time.monotonic()) > 0:
            self.send_roll_call(remaining_s)
            new_members = self.receive_roll_call_answers()
            awaiting = self.site_names_awaiting_approval
            answers = len(self.members) + len(self.refused) - len(awaiting)
            if len(self.members) >= expected or (answers >= expected and not self._asked):
                self._asked.clear()  # the others are asked again as late joiners
                break
            if deadline_s - remaining_s >= SHOWN_AFTER_S:
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
            sentences.append("; ".join(reasons))
        if awaiting := self.site_names_awaiting_approval:
            names = quote_names(awaiting)
            sentences.append(
                f"Once {names} has approved the plan, give the same command again; or let it wait longer: "
                "participation.roll_call_deadline_s."
            )
        return " ".join(sentences)


def find_model_layout_faults(members: Iterable[RunMember], layout: str) -> list[Fault]:
    """Return a fault for each site whose software release builds a model of another layout from the same plan.

    Args:
        members: The sites, which stated the hash of their layout at the roll call.
        layout: Hash of the layout of the coordinator's model: names, shapes and order of its tensors.
    """
    return [
        Fault(
            f"site {member.answer.site}",
            f"builds another model from this plan (its release is {member.answer.release}).",
            "Install the coordinator's release there.",
            member.answer.site,
        )
        for member in sorted(members, key=lambda member: member.answer.site)
        if member.answer.layout != layout
    ]


def find_wire_version_faults(plan: HospitalPlan, members: Iterable[RunMember]) -> list[Fault]:
    """Return a fault for each site whose wire version lacks something that the run needs."""
    return [
        Fault(
            f"site {member.answer.site}",
            f"has release {member.answer.release}: {reason}",
            f"Install release {__version__} there.",
            member.answer.site,
        )
        for member in sorted(members, key=lambda member: member.answer.site)
        if (reason := find_lacking_feature(member.wire, plan))
    ]


# ---------------------------------------------------------------------- the form of the sites' pixels


def read_pixel_form(member: RunMember) -> PixelForm | None:
    """Return the form of a site's pixels; None if the site does not state it, or this release cannot read it."""
    try:
        return PixelForm.model_validate_json(member.answer.pixels)
    except ValidationError:
        return None


def find_unreadable_form_faults(members: Iterable[RunMember]) -> list[Fault]:
    """Return a fault for each site that states a form of its pixels which this release cannot read."""
    return [
        Fault(
            f"site {member.answer.site}",
            f"states how its images become pixels in words that this release does not know (its release is "
            f"{member.answer.release}).",
            f"Install release {__version__} there.",
            member.answer.site,
        )
        for member in sorted(members, key=lambda member: member.answer.site)
        if member.answer.pixels and read_pixel_form(member) is None
    ]


# ---------------------------------------------------------------------- faults in the sites' labels

Choice = TypeVar("Choice")


def find_label_faults(declarations: Iterable[LabelDeclaration]) -> list[Fault]:
    """Return the faults in each site's own labels: no label, a repeated label, or two spellings of one class."""
    faults = list[Fault]()
    for declaration in declarations:
        faults += [replace(fault, site=declaration.site) for fault in find_label_declaration_faults(declaration)]
        for spellings in _count_class_spellings([declaration]).values():
            if len(spellings) > 1:
                problem = f"{quote_names(sorted(spellings))} look like one class."
                where = f"site.toml of {declaration.site}: data.annotates"
                faults.append(Fault(where, problem, "Keep one of them.", declaration.site))
    return faults


@dataclass(frozen=True)
class _RunSpelling:
    """The spelling of a class that counts in the run.

    Attributes:
        names: The spelling; several only if the coordinator itself names the class in several ways.
        author: Who spells it like the first one, for the message to a site with another spelling.
        reason: Clause that says why this spelling counts.
    """

    names: tuple[str, ...]
    author: str
    reason: str


def find_class_spelling_faults(declarations: Sequence[LabelDeclaration], listed: Collection[str] = ()) -> list[Fault]:
    """Return a fault for each site that spells a class otherwise than the run does.

    The run's spelling is that of the coordinator's lists of classes. Without one it is that of most sites that
    annotate the class. On a tie it is that of the site that was admitted first, because no site can choose this.
    A site that is left out by one of these rules has no say in the next ones.

    Args:
        declarations: The sites' labels, in the order in which the sites were admitted.
        listed: The class names that the coordinator has written for any site (``flwr-server admit --classes``).
    """
    by_list = dict[str, _RunSpelling]()
    for key, names in _group_class_spellings(sorted(listed)).items():
        by_list[key] = _RunSpelling(names, "the coordinator's list of classes", "the list counts")
    fitting, faults = _separate_unlike_spellings(declarations, by_list)
    authors = dict[str, str]()  # spelling -> the first site that has it
    for declaration in fitting:
        for name in declaration.canonical_names:
            authors.setdefault(name, f"site {declaration.site}")
    by_majority = dict[str, _RunSpelling]()
    for key, spellings in _count_class_spellings(fitting).items():
        if name_of_most := _find_strict_majority(spellings):
            by_majority[key] = _RunSpelling((name_of_most,), authors[name_of_most], "most sites write the first")
    fitting, faults_of_minority = _separate_unlike_spellings(fitting, by_majority)
    faults += faults_of_minority
    by_admission = dict[str, _RunSpelling]()
    for declaration in fitting:
        _, faults_of_site = _separate_unlike_spellings([declaration], by_admission)
        faults += faults_of_site
        if not faults_of_site:
            first = declaration.site
            for key, names in _group_class_spellings(declaration.canonical_names).items():
                spelling = _RunSpelling(names, f"site {first}", f"{first} was admitted first")
                by_admission.setdefault(key, spelling)
    return faults


def _separate_unlike_spellings(
    declarations: Iterable[LabelDeclaration], run_spellings: Mapping[str, _RunSpelling]
) -> tuple[list[LabelDeclaration], list[Fault]]:
    """Return the declarations that spell each class as the run does, and the faults of the others.

    Args:
        run_spellings: Comparison key of a class (:func:`make_class_spelling_key`) -> its spelling in the run.
    """
    fitting, faults = list[LabelDeclaration](), list[Fault]()
    for declaration in declarations:
        site, faults_of_site = declaration.site, list[Fault]()
        for local, name in zip(declaration.names, declaration.canonical_names, strict=True):
            spelling = run_spellings.get(make_class_spelling_key(name))
            if spelling is None or name in spelling.names:
                continue
            run_name = spelling.names[0]
            both = f'"{run_name}" ({spelling.author}) and "{name}" (site {site})'
            problem = f"{both} look like one class; {spelling.reason}."
            remedy = f"This line under [data.synonyms] in site.toml of {site} settles it:\n"
            remedy += f'    "{local}" = "{run_name}"\n'
            remedy += f'If they are two classes, give this one a name of its own there: "{local}" = "{name} of {site}"'
            faults_of_site.append(Fault("label contract", problem, remedy, site))
        faults += faults_of_site
        if not faults_of_site:
            fitting.append(declaration)
    return fitting, faults


def find_class_coverage_faults(
    method: Method, declarations: Sequence[LabelDeclaration], listed: Collection[str] = ()
) -> list[Fault]:
    """Return a fault for each site that annotates other classes than the run's, if the method needs equal classes.

    The run's classes are those of the coordinator's lists, if any site annotates exactly these; else the choice of most
    sites; on a tie that of the site that was admitted first.

    Args:
        declarations: The sites' labels, in the order in which the sites were admitted.
        listed: The class names in the coordinator's lists, if each site has one; else empty.
    """
    if not method.site.full_coverage or not declarations:
        return []
    choices = [frozenset(declaration.canonical_names) for declaration in declarations]
    choice_of_most = _find_strict_majority(Counter(choices))
    if frozenset(listed) in choices:
        run_classes, reason = frozenset(listed), "the coordinator's list has"
    elif choice_of_most is not None:
        run_classes, reason = choice_of_most, "most sites annotate"
    else:
        run_classes, reason = choices[0], f"{declarations[0].site}, which was admitted first, annotates"
    return [
        Fault(
            f"site.toml of {declaration.site}: data.annotates",
            f"{method.site.name} needs the same classes at every site: {reason} {quote_names(sorted(run_classes))}, "
            f"this one {quote_names(sorted(declaration.canonical_names))}.",
            "",
            declaration.site,
        )
        for declaration, choice in zip(declarations, choices, strict=True)
        if choice != run_classes
    ]


def find_foreign_class_faults(declarations: Iterable[LabelDeclaration], class_names: Collection[str]) -> list[Fault]:
    """Return a fault for each class that a site annotates and that is not among the classes of a run under way."""
    return [
        make_foreign_class_fault(declaration, local, name, class_names)
        for declaration in declarations
        for local, name in zip(declaration.names, declaration.canonical_names, strict=True)
        if name not in class_names
    ]


def _group_class_spellings(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return comparison key -> the different names that have it, in the order of ``names``."""
    groups = dict[str, tuple[str, ...]]()
    for name in dict.fromkeys(names):
        key = make_class_spelling_key(name)
        groups[key] = (*groups.get(key, ()), name)
    return groups


def _count_class_spellings(declarations: Iterable[LabelDeclaration]) -> dict[str, Counter[str]]:
    """Count the sites that use each spelling of a class name, grouped by the normalised class name."""
    spellings: dict[str, Counter[str]] = {}
    for declaration in declarations:
        for name in set(declaration.canonical_names):
            spellings.setdefault(make_class_spelling_key(name), Counter())[name] += 1
    return spellings


def _find_strict_majority(votes: Counter[Choice]) -> Choice | None:
    """Return the choice with more than half of all votes; None if there is no such choice."""
    return next((choice for choice, count in votes.items() if 2 * count > votes.total()), None)


# ---------------------------------------------------------------------- the members of a run


@dataclass(eq=False)
class RunMembership:
    """The sites that take part in one run.

    Attributes:
        registered: Returns the site name of each registered node; None in simulation.
        admission: Further rules that a site must satisfy to take part, in addition to those for labels and model.
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
    admission: Sequence[AdmissionRule] = ()
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

    def __post_init__(self) -> None:
        counts = partial(find_contradictory_count_faults, self.plan.model.task)
        self.admission = (partial(find_wire_version_faults, self.plan), *self.admission, counts)
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

        A site that is left out must not cost the run one that is connected and fits: while too few are left, the sites
        that have not been asked yet are asked.

        Args:
            faults: Faults of the sites that were left out before.

        Raises:
            TooFewSites: If too few sites answered in time.
            BadInput: With all faults, if too few sites are left; with ``min_sites = 0``, if any site has a fault.
        """
        roll, needed = self._roll, self.participation.min_sites or self._expected
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
        """Refuse the sites whose claims or labels do not fit; return their faults.

        The labels of a site that one rule leaves out do not count in the next rule.
        """
        roll, faults = self._roll, list[Fault]()
        for rule in self.admission:
            faults += self._refuse_faulty_sites(rule(roll.members.values()))
        faults += self._refuse_faulty_sites(find_label_faults(roll.label_declarations))
        faults += self._refuse_faulty_sites(find_vocabulary_faults(roll.label_declarations, self.plan.vocabulary or {}))
        if self._begun_classes:
            foreign = find_foreign_class_faults(roll.label_declarations, self._begun_classes)
            faults += self._refuse_faulty_sites(foreign)
        faults += self._refuse_sites_with_other_pixels()
        limits = self._read_admission_limits()
        words = CoordinatorWords.from_limits(limits, self.participation.distinct_classes)
        spelling_faults = find_class_spelling_faults(self._order_declarations_by_admission(limits), words.listed)
        faults += self._refuse_faulty_sites(spelling_faults)
        if self.compares_words:
            faults += self._refuse_sites_with_alike_classes(self._order_declarations_by_admission(limits), words)
        if self.participation.min_sites:  # else the method's own fault says it, which names what else could be done
            ordered = self._order_declarations_by_admission(limits)
            # A list for a single site may be meant as its limit; lists for all of them say what the run's classes are.
            lists = [limits[each.site].classes if each.site in limits else frozenset() for each in ordered]
            agreed = frozenset[str]().union(*lists) if all(lists) else frozenset[str]()
            faults += self._refuse_faulty_sites(find_class_coverage_faults(self.method, ordered, agreed))
        return faults

    def _refuse_sites_with_alike_classes(
        self, declarations: Sequence[LabelDeclaration], words: CoordinatorWords
    ) -> list[Fault]:
        """Refuse the sites whose words may mean other sites' classes, and ask those sites too; return the faults."""
        faults, texts = find_alike_class_faults(declarations, words)
        self._refuse_faulty_sites(faults)
        self._roll.ask_sites(texts)
        return faults

    @property
    def compares_words(self) -> bool:
        """True if the sites choose their own words: not in a simulation, which has one table, nor by a vocabulary."""
        return self.registered is not None and not self.plan.vocabulary

    @property
    def coordinator_words(self) -> CoordinatorWords:
        """Return what the coordinator has said about class names."""
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
        classes, texts = self.classes_of_one_site, dict[str, str]()
        for site in set(classes.values()):
            declaration = self.members[site].label_declaration
            own_words = dict(zip(declaration.canonical_names, declaration.names, strict=True))
            own_names = {name: own_words[name] for name, owner in classes.items() if owner == site}
            texts[site] = describe_own_classes_to_site(own_names, self.contract.class_names)
        self._roll.ask_sites(texts)
        return describe_classes_of_one_site(classes, self.coordinator_words) if classes else ""

    def _refuse_sites_with_other_pixels(self) -> list[Fault]:
        """Refuse the sites whose images become other pixels than the run's; return their faults."""
        members = list(self._roll.members.values())
        faults = find_unreadable_form_faults(members)
        forms = self._list_pixel_forms(members)
        is_simulated = self.registered is None
        find_faults = find_pixel_faults_of_simulation if is_simulated else find_pixel_faults
        faults += find_faults(forms, self.pixel_terms)
        self._roll.refuse_faulty_sites(faults, "pixels")
        return list({str(fault): fault for fault in faults}.values())  # simulated sites have one text in common

    def _agree_on_pixels(self) -> None:
        """Fix the form of the run's pixels, once a member states its own."""
        self.pixels = agree_on_pixels(self._list_pixel_forms(self.members.values()), self.pixel_terms) or self.pixels

    def _list_pixel_forms(self, members: Iterable[RunMember]) -> list[tuple[str, PixelForm]]:
        """Return the sites that state the form of their pixels, in the order in which they were admitted."""
        limits = self._read_admission_limits()
        forms = [(member.answer.site, form) for member in members if (form := read_pixel_form(member)) is not None]
        return sorted(forms, key=lambda entry: find_admission_place(entry[0], limits))

    @property
    def pixel_terms(self) -> PixelTerms:
        """Return what this run says about pixels, with the form on which its sites have agreed."""
        terms = PixelTerms.from_plan(self.plan)
        return replace(terms, begun=self.pixels, model_decides_color=self.registered is not None)

    @property
    def sites_without_stated_pixels(self) -> tuple[str, ...]:
        """Return the members that do not say how their images become pixels, because of their release."""
        return tuple(sorted(site for site, member in self.members.items() if not member.answer.pixels))

    def _order_declarations_by_admission(self, limits: Mapping[str, SiteAdmissionLimits]) -> list[LabelDeclaration]:
        """Return the members' label declarations in the order in which the sites were admitted."""
        declarations = self._roll.label_declarations
        return sorted(declarations, key=lambda declaration: find_admission_place(declaration.site, limits))

    def _refuse_faulty_sites(self, faults: list[Fault]) -> list[Fault]:
        """Refuse the sites with these faults of their labels or claims; return the faults."""
        self._roll.refuse_faulty_sites(faults, "labels")
        return faults

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
            raise_faults(self.method.site.find_contract_faults(self.contract))
            on_roll = {member.answer.site: member for member in self._roll.members.values()}
            for site in self.members.keys() - on_roll.keys():
                del self.members[site]
            for site in on_roll.keys() - self.members.keys():
                self._add_run_member(on_roll[site])
            context = self.make_round_context(0, NO_ARRAYS)
            new = self.method.find_roll_call_faults(context)
            if not new:
                self._agree_on_pixels()
                return faults
            self._refuse_faulty_sites(new)
            faults += {str(fault): fault for fault in new}.values()  # one text may be about several sites
            if not self.participation.min_sites or not all(fault.site for fault in new):
                raise_faults(faults)
            if len(self._roll.members) < self.participation.min_sites:
                return faults

    def _add_run_member(self, member: RunMember) -> None:
        site = member.answer.site
        self.members[site] = member
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
    def answers(self) -> dict[str, RollCallAnswer]:
        """Return the members' answers to the roll call, sorted by site name."""
        return {site: member.answer for site, member in sorted(self.members.items())}

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
        lowered, answers = self.lower_image_claims(uncounted), self.answers
        for site in answers.keys() & set(uncounted):
            del answers[site]
        images = {site: lowered.get(site, answer.train_samples) for site, answer in answers.items()}
        for site, count in cap_image_counts(images, self.participation.largest_share).items():
            if count < answers[site].train_samples:
                answers[site] = lower_answer_claims(answers[site], count)
        task, seed = self.plan.model.task, self.plan.run.seed
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
            if faults := find_model_layout_faults([member], self._layout):
                self._roll.refuse_faulty_sites(faults, "version")
                continue
            others = [other for other in self.members.values() if not self._is_replaced(other, member)]
            declarations = [other.label_declaration for other in (*others, member)]
            if faults := self._find_pixel_faults_of_late_joiner(member):
                self._roll.refuse_faulty_sites(faults, "pixels")
                continue
            try:
                raise_faults([fault for rule in self.admission for fault in rule([member])])
                raise_faults(find_vocabulary_faults([member.label_declaration], self.plan.vocabulary or {}))
                contract = merge_label_declarations(declarations, self.contract.class_names)
                raise_faults(self.method.site.find_contract_faults(contract))
            except BadInput as error:
                faults = [replace(fault, site=member.answer.site) for fault in error.faults]
                self._roll.refuse_faulty_sites(faults, "labels")
                continue
            self.contract = contract
            self._add_run_member(member)
            self._agree_on_pixels()
            self.callbacks.on_late_join(server_round, member.answer.site)

    def _find_pixel_faults_of_late_joiner(self, member: RunMember) -> list[Fault]:
        faults = find_unreadable_form_faults([member])
        return faults + find_pixel_faults(self._list_pixel_forms([member]), self.pixel_terms)

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
        seed = [self.plan.run.seed, server_round, EVALUATION]
        return draw_sites_covering_classes(annotated, self._evaluated, seed, excluded)
