"""The roll call before round 1: who is there, what each annotates, how much each has."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from common.contract import Declaration
from common.errors import BadInput, Fault, quoted, stop_on
from common.wire import RollCall, RollCallAnswer, encode, payload_bytes
from strategies.records import TooFewSites
from strategies.replies import decoded

ROLL_CALL = f"{MessageType.QUERY}.roll_call"


@dataclass(frozen=True)
class Member:
    """A site that answered the roll call; bytes are those of the call and of the answer."""

    node_id: int
    answer: RollCallAnswer
    bytes_down: int
    bytes_up: int

    @property
    def declaration(self) -> Declaration:
        """The site's own names with what they mean."""
        answer = self.answer
        return Declaration(answer.site, answer.names, dict(zip(answer.names, answer.class_names, strict=True)))


def call_the_roll(grid: Grid, call: RollCall, expected: int, needed: int, deadline_s: float) -> dict[str, Member]:
    """Ask every site who it is and what it annotates.

    A site that answers with an error will not answer better the second time; one that is not there yet may come.

    Args:
        grid: Flower's connection to the sites.
        call: What is asked.
        expected: Sites to wait for.
        needed: Sites that suffice after ``deadline_s``.

    Raises:
        TooFewSites: If fewer than ``needed`` answered in time; says why.
        BadInput: If two sites use one name.
    """
    deadline = time.monotonic() + deadline_s
    members: dict[int, Member] = {}
    refused: dict[int, str] = {}
    while len(members) + len(refused) < expected and time.monotonic() < deadline:
        if asked := sorted(set(grid.get_node_ids()) - set(members) - set(refused)):
            _ask(grid, call, asked, max(deadline - time.monotonic(), 0.1), (members, refused))
        else:
            time.sleep(0.2)
    if len(members) < needed:
        reasons = "; ".join(f"node {node}: {why}" for node, why in sorted(refused.items()))
        present = quoted(sorted(member.answer.site for member in members.values())) or "none"
        raise TooFewSites(f"{len(members)} of {needed} sites answered the roll call ({present}). {reasons}")
    _refuse_shared_names(members.values())
    return {member.answer.site: member for member in members.values()}


def _ask(
    grid: Grid, call: RollCall, nodes: Sequence[int], timeout: float, noted: tuple[dict[int, Member], dict[int, str]]
) -> None:
    """Ask these nodes; note who answered and why the others did not."""
    members, refused = noted
    content = encode(call)
    refused |= dict.fromkeys(nodes, f"no answer within {timeout:.0f} s")
    messages = [Message(content, node, ROLL_CALL, group_id="roll call", ttl=timeout) for node in nodes]
    for reply in grid.send_and_receive(messages, timeout=timeout):
        node = reply.metadata.src_node_id
        answer, reason = decoded(reply, RollCallAnswer)
        if answer is None:
            refused[node] = reason
        elif answer.run != call.run:
            refused[node] = f"answer belongs to run {answer.run}, expected {call.run}"
        else:
            refused.pop(node, None)
            members[node] = Member(node, answer, payload_bytes(content), payload_bytes(reply.content))


def _refuse_shared_names(members: Iterable[Member]) -> None:
    names = Counter(member.answer.site for member in members)
    remedy = "Give each a name of its own."
    stop_on([Fault(f"site {name}", "two sites use this name.", remedy) for name, n in sorted(names.items()) if n > 1])


def refuse_other_models(members: Iterable[Member], layout: str) -> None:
    """Raise if a site would train a model of another layout than the coordinator's.

    Raises:
        BadInput: Naming every such site with its release.
    """
    faults = [
        Fault(
            f"site {member.answer.site}",
            f"builds another model from this plan (its release is {member.answer.version}).",
            "Install the coordinator's release there.",
        )
        for member in members
        if member.answer.layout != layout
    ]
    if faults:
        raise BadInput(faults)
