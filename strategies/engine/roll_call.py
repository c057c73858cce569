"""The roll call, before round 1 and for every late joiner: who is there, what each annotates, how much each has."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from common.contract import Declaration
from common.errors import Fault, quoted, stop_on
from common.security.signatures import Signed, attached_signature
from common.system.timers import REFUSAL_NOTED_S
from common.wire.codec import encode, payload_bytes
from common.wire.fleet_protocol import REFUSAL, ROLL_CALL
from common.wire.records import Refusal, RollCall, RollCallAnswer
from strategies.engine.exchange import NODE_UNAVAILABLE, REVOKED, Patience, Pauses, exchange, pushed
from strategies.engine.replies import decoded
from strategies.engine.round_record import TooFewSites, Waiting

SHOWN_AFTER_S = 1.0
"""Seconds after which the missing sites are shown as waited for."""

Registered = Callable[[], Mapping[int, str]]
"""The names under which nodes are registered; in simulation nobody is, and a site is who it says it is."""


@dataclass(frozen=True)
class Member:
    """A site that answered the roll call; bytes are those of the call and of the answer.

    Attributes:
        signed: What the site signed about its answer; None in simulation.
    """

    node_id: int
    answer: RollCallAnswer
    bytes_down: int
    bytes_up: int
    signed: Signed | None = None

    @property
    def declaration(self) -> Declaration:
        """The site's own names with what they mean."""
        answer = self.answer
        return Declaration(answer.site, answer.names, dict(zip(answer.names, answer.class_names, strict=True)))


@dataclass
class Roll:
    """The sites that were called, with their answers.

    Attributes:
        members: By node.
        refused: Node -> why; not asked again before it went away and came back.
    """

    grid: Grid
    call: RollCall
    registered: Registered | None = None
    members: dict[int, Member] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _away: set[int] = field(default_factory=set)  # of the refused, those that have left since
    _asked: dict[str, int] = field(default_factory=dict)  # message -> node that has not answered it yet

    def __post_init__(self) -> None:
        self._content = encode(self.call)  # the same for all

    def ask_newcomers(self, timeout_s: float) -> list[Member]:
        """Ask every connected site that has not been asked; return those that are now members."""
        deadline, pauses, new = time.monotonic() + timeout_s, Pauses(), list[Member]()
        self.ask(timeout_s)
        while self._asked and time.monotonic() < deadline:
            if not (members := self.answered()) and self._asked:
                pauses.wait()
            new += members
        self.give_up(timeout_s)
        return new

    def ask(self, timeout_s: float) -> None:
        """Send the call to anyone who has connected since.

        A site that answers with an error will not answer better the second time, unless it went away and came back:
        somebody may have fixed it. While it is away the reason stands: a site of another release leaves at once.
        """
        online = set(self.grid.get_node_ids())
        back = self._away & online
        self.refused = {node: why for node, why in self.refused.items() if node not in back}
        self._away = set(self.refused) - online
        nodes = sorted(online - set(self.members) - set(self.refused) - set(self._asked.values()))
        messages = [Message(self._content, node, ROLL_CALL, group_id="roll call", ttl=timeout_s) for node in nodes]
        self._asked |= {name: message.metadata.dst_node_id for name, message in pushed(self.grid, messages).items()}

    def answered(self) -> list[Member]:
        """Return the sites that have become members since."""
        new = []
        for reply in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            if (node := self._asked.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue
            if reply.has_error() and reply.error.code in (NODE_UNAVAILABLE, REVOKED):
                continue  # it is asked again when it is connected, if it is registered then
            if member := self._member(node, reply):
                self.members[node] = member
                new.append(member)
        return new

    @property
    def awaits(self) -> bool:
        """Return whether a connected site has not answered yet."""
        return bool(self._asked)

    def leave_unanswered(self) -> None:
        """Go on without sites that have not answered; they are asked again as late joiners."""
        self._asked.clear()

    def give_up(self, timeout_s: float) -> None:
        """Stop waiting for sites that have not answered."""
        self.refused |= dict.fromkeys(self._asked.values(), f"no answer within {timeout_s:.0f} s")
        self._asked.clear()

    def name_of(self, node: int) -> str:
        """Return the registered name; in simulation the node's number."""
        names = self.registered() if self.registered else {}
        return names.get(node, f"node {node}")

    def refuse(self, node: int, kind: str, reason: str) -> None:
        """Note why a site cannot take part, and tell it; return when it has noted it too, or is silent."""
        self.members.pop(node, None)
        self.refused[node] = reason
        record = Refusal(self.call.run, kind, reason)
        message = Message(encode(record), node, REFUSAL, group_id="roll call", ttl=REFUSAL_NOTED_S)
        for _ in exchange(self.grid, [message], Patience(REFUSAL_NOTED_S, enough=0), lambda at_work, lost: None):
            pass  # it noted the refusal

    def _member(self, node: int, reply: Message) -> Member | None:
        """Take a site in; or note why not, and tell it where it can be fixed."""
        answer, reason = decoded(reply, RollCallAnswer)
        if answer is None:
            self.refused[node] = reason
        elif answer.run != self.call.run:
            self.refused[node] = f"answer belongs to run {answer.run}, expected {self.call.run}"
        elif self.registered and (name := self.registered().get(node, "")) != answer.site:
            self.refuse(node, "name", f'it calls itself "{answer.site}", but its key is registered for "{name}".')
        else:
            sizes = payload_bytes(self._content), payload_bytes(reply.content)
            return Member(node, answer, *sizes, attached_signature(reply.content))
        return None


def call_the_roll(
    roll: Roll, expected: int, needed: int, deadline_s: float, on_wait: Callable[[Waiting], None]
) -> None:
    """Ask every site who it is and what it annotates.

    Args:
        roll: Is filled.
        expected: Sites to wait for; one that declines is not one of them while a connected site has not answered.
        needed: Sites that suffice after ``deadline_s``.
        on_wait: Told who is missing, whenever that changes.

    Raises:
        TooFewSites: If fewer than ``needed`` answered in time; says why.
        BadInput: If two sites use one name.
    """
    deadline, pauses = time.monotonic() + deadline_s, Pauses()
    shown: tuple[str, ...] | None = None
    while (left := deadline - time.monotonic()) > 0:
        roll.ask(left)
        members = roll.answered()
        heard = len(roll.members) + len(roll.refused)
        if len(roll.members) >= expected or (heard >= expected and not roll.awaits):
            roll.leave_unanswered()
            break
        if deadline_s - left >= SHOWN_AFTER_S and shown != (missing := _missing(roll)):
            on_wait(Waiting("roll call", 0, missing, (), left))
            shown = missing
        if not members:
            pauses.wait()
    roll.give_up(deadline_s)
    if len(roll.members) < needed:
        reasons = "; ".join(f"{roll.name_of(node)}: {why}" for node, why in sorted(roll.refused.items()))
        present = quoted(sorted(member.answer.site for member in roll.members.values())) or "none"
        absent = f" Not there: {quoted(_missing(roll))}." if _missing(roll) else ""
        answered = f"{len(roll.members)} of {needed} sites answered the roll call ({present})."
        raise TooFewSites(f"{answered}{absent} {reasons}".strip())
    names = Counter(member.answer.site for member in roll.members.values())
    remedy = "Give each a name of its own."
    stop_on([Fault(f"site {name}", "two sites use this name.", remedy) for name, n in sorted(names.items()) if n > 1])


def _missing(roll: Roll) -> tuple[str, ...]:
    """Registered sites that are neither members nor refused."""
    names = roll.registered() if roll.registered else {}
    return tuple(sorted(name for node, name in names.items() if node not in roll.members and node not in roll.refused))


def model_faults(members: Iterable[Member], layout: str) -> list[Fault]:
    """Return a fault, with its release, for each site that would train a model of another layout."""
    return [
        Fault(
            f"site {member.answer.site}",
            f"builds another model from this plan (its release is {member.answer.version}).",
            "Install the coordinator's release there.",
            member.answer.site,
        )
        for member in sorted(members, key=lambda member: member.answer.site)
        if member.answer.layout != layout
    ]


def refuse_faulty(roll: Roll, faults: Iterable[Fault], kind: str) -> None:
    """Tell every site that has to fix something what it is."""
    by_site: dict[str, list[str]] = {}
    for fault in faults:
        if fault.site:
            by_site.setdefault(fault.site, []).append(str(fault))
    for node, member in list(roll.members.items()):
        if reasons := by_site.get(member.answer.site):
            roll.refuse(node, kind, "\n".join(reasons))
