"""Who wrote what a receipt names: the sites' signatures, checked without the coordinator's disk, offline.

A receipt holds, of every reply that reached the run, its hash, whether it counted, and what its site signed about it.
From these alone it shows: a reply that the site did not sign (forged), one that was signed for another round, message
or run (swapped, replayed), and a reply that was taken from the site and is not in the receipt (withheld). The one thing
to be known from elsewhere is that the public keys are the sites' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from common.errors import Fault
from common.security.identity import same_key
from common.security.signatures import CHAINED, ReplyStatement, SignatureFault, Signed, verified_reply
from common.system.plain_text import counted, listed, printable

FILE = "receipt.json"
TRAINED = "TrainReply"
MOST_NUMBERS = 10
"""Replies that are named one by one."""
Reply = Mapping[str, Any]


@dataclass
class Authorship:
    """What was found.

    Attributes:
        right: What is as it should be.
        notes: What is unusual and explained, or cannot be checked.
        faults: What was forged, swapped, replayed or withheld.
    """

    right: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class OwnReply:
    """A reply that left a site, by the site's own audit."""

    record: str
    round: int
    sha256: str


@dataclass(frozen=True)
class OwnCount:
    """What a site itself knows of its replies to a run.

    Attributes:
        taken: How many the coordinator took.
        sent: Those that left, taken or not.
    """

    site: str = ""
    taken: int = 0
    sent: Sequence[OwnReply] = ()


def check_authorship(receipt: Mapping[str, Any], keys: Mapping[str, str], own: OwnCount = OwnCount()) -> Authorship:
    """Check every signature of a receipt.

    Args:
        receipt: As ``receipt.json`` has it.
        keys: Public keys of sites that are known from elsewhere, as OpenSSH lines.
        own: What the site that checks knows of its own replies.
    """
    findings = Authorship()
    if type(receipt["resumed"]) is not int or receipt["resumed"] < 0:
        raise ValueError("resumed is no count")
    if not any(site["public_key"] for site in receipt["sites"].values()) and not receipt["replies"] and not keys:
        findings.notes.append("signatures: none, as in every simulation: the receipt does not prove who sent what")
        return findings
    names: dict[str, str] = {}  # no two sites have one key
    for site, entry in receipt["sites"].items():
        key = " ".join(entry["public_key"].split()[:2])
        if key and key in names:
            problem = f"{printable(names[key])} and {printable(site)} have the same public key: forged."
            findings.faults.append(Fault(f"{FILE}: sites", problem))
        names[key] = site
    for site in receipt["sites"]:
        _check_site(findings, receipt, site, keys.get(site, ""), own)
    for site in sorted({reply["site"] for reply in receipt["replies"]} - receipt["sites"].keys()):
        findings.faults.append(Fault(f"{FILE}: replies", f"names {printable(site)}, which does not take part: forged."))
    for entry in receipt["rounds"]:
        for site in sorted(entry["sites"].keys() - receipt["sites"].keys()):
            problem = f"round {entry['round']} counts {printable(site)}, which does not take part: forged."
            findings.faults.append(Fault(f"{FILE}: rounds", problem))
    if not findings.faults:
        findings.right.append(
            f"signatures: {counted(len(receipt['replies']), 'reply', 'replies')}, each signed by its site"
        )
    return findings


def _check_site(findings: Authorship, receipt: Mapping[str, Any], site: str, known_key: str, own: OwnCount) -> None:
    replies = [reply for reply in receipt["replies"] if reply["site"] == site]
    where, key = f"{FILE}: {site}", receipt["sites"][site]["public_key"]
    if not key or (known_key and not same_key(key, known_key)):
        findings.faults.append(Fault(where, "the receipt does not name this site's own public key: forged."))
        return
    statements: list[ReplyStatement] = []
    for reply in replies:
        try:
            statements.append(_stated(receipt["run"], reply, key))
        except SignatureFault as fault:
            what = f"{reply['record']} of round {reply['round']} ({reply['sha256'][:12]}...)"
            findings.faults.append(Fault(where, f"the {what} is not this site's: {fault}."))
    answers = {reply["sha256"] for reply in replies if reply["record"] == CHAINED[0] and reply["counts"]}
    if receipt["sites"][site]["answer_sha256"] not in answers:
        problem = "its answer to the roll call is not among the replies that it signed: forged, or withheld."
        findings.faults.append(Fault(where, problem))
    first: dict[str, ReplyStatement] = {}  # no message is answered twice
    for statement in statements:
        if statement.message in first:
            problem = f"the reply to one message is there twice, as {statement.record} of round {statement.round}"
            findings.faults.append(Fault(where, f"{problem}: replayed."))
        first[statement.message] = statement
    _check_gaps(findings, receipt, site, statements, own)
    _check_rounds(findings, receipt, site, replies)


def _stated(run: str, reply: Reply, key: str) -> ReplyStatement:
    """Return what the site signed about a reply.

    Raises:
        SignatureFault: If the site did not sign it, or signed it as something else.
    """
    if not reply["statement"]:
        raise SignatureFault("it is not signed")
    statement = verified_reply(Signed(statement=reply["statement"], signature=reply["signature"]), key)
    server_round = 0 if reply["record"] == CHAINED[0] else reply["round"]
    stated = (statement.site, statement.run, statement.round, statement.record, statement.sha256)
    if stated != (reply["site"], run, server_round, reply["record"], reply["sha256"]):
        raise SignatureFault("its site signed it for another run, round, record or content: swapped")
    return statement


def _check_gaps(
    findings: Authorship, receipt: Mapping[str, Any], site: str, statements: Sequence[ReplyStatement], own: OwnCount
) -> None:
    """The site's count of replies that were taken has no gap.

    A reply may be missing without anybody's intent: it was taken at the end of its time, or while the coordinator's run
    was away. Who says so is the coordinator alone, as it would of a reply that it keeps back.
    """
    numbered = {statement.number: statement for statement in statements if statement.number > 0}
    end = max([*numbered, own.taken if own.site == site else 0]) + 1
    for before, after in pairwise([0, *sorted(numbered), end]):
        if after - before > 1:
            missing = range(before + 1, after)
            names = (
                [str(number) for number in missing]
                if len(missing) <= MOST_NUMBERS
                else [f"{missing[0]} to {missing[-1]}"]
            )
            which = (
                f"{counted(len(missing), 'reply', 'replies')} of {site} (number {', '.join(names)} by its own count)"
            )
            rounds = _rounds_between(receipt, numbered, before, after, own.sent if own.site == site else ())
            where = _around(receipt, site, numbered.get(before), numbered.get(after), rounds, own)
            problem = f"{which}: taken from the site, and not in the receipt: withheld. {where}"
            findings.faults.append(Fault(f"{FILE}: {site}", problem, _reasons(receipt, site), site=site))


def _around(
    receipt: Mapping[str, Any],
    site: str,
    before: ReplyStatement | None,
    after: ReplyStatement | None,
    rounds: tuple[int, int],
    own: OwnCount,
) -> str:
    """Name the replies around missing ones, and what the receipt lacks of these rounds as far as it can be known."""
    replies = [reply for reply in receipt["replies"] if reply["site"] == site]
    trained = {reply["round"] for reply in replies if reply["record"] == TRAINED}
    first, last = rounds
    numbers = [entry["round"] for entry in receipt["rounds"] if entry["round"] not in trained]
    lacking = [f"{TRAINED} of round {number}" for number in numbers if first <= number <= last]
    places = [f", sent after its {_name(before)}"] if before else []
    places += [f", sent before its {_name(after)}"] if after else []
    if before and after:
        places = [f", sent between its {_name(before)} and its {_name(after)}"]
    when = f"round {first}" if first == last else f"a round from {first} to {last}"
    text = f"Of {when}{''.join(places)}."
    if lacking:
        text += f" The receipt has no {listed(lacking[:MOST_NUMBERS])} of it."
    named = {reply["sha256"] for reply in replies}
    unnamed = [reply for reply in own.sent if own.site == site and reply.sha256 not in named]
    if sent := [f"{reply.record} of round {reply.round}" for reply in unnamed if first <= reply.round <= last]:
        text += f" The site's audit has, and the receipt has not: {listed(sent[-MOST_NUMBERS:])}."
    return text


def _rounds_between(
    receipt: Mapping[str, Any],
    numbered: Mapping[int, ReplyStatement],
    before: int,
    after: int,
    sent: Sequence[OwnReply],
) -> tuple[int, int]:
    """Return the first and the last round of which replies between two numbers of a site can be; 0 is the roll call."""
    first = max((numbered[number].round for number in numbered if number <= before), default=0)
    later = [numbered[number].round for number in sorted(numbered) if number >= after and numbered[number].round]
    if later:
        return first, max(later[0], first)
    return first, max([first, *(entry["round"] for entry in receipt["rounds"]), *(reply.round for reply in sent)])


def _name(statement: ReplyStatement) -> str:
    is_answer = statement.record == CHAINED[0]
    return statement.record if is_answer else f"{statement.record} of round {statement.round}"


def _reasons(receipt: Mapping[str, Any], site: str) -> str:
    """Return what the coordinator says about the site's absence, which nobody else has signed."""
    reasons = [f"{absence['where']}: {absence['reason']}" for absence in receipt["absences"] if absence["site"] == site]
    reasons = [printable(reason, 100) for reason in reasons[:3]]
    reasons += [f"the run was resumed {counted(receipt['resumed'], 'time')}"] if receipt["resumed"] else []
    return f"The coordinator states: {'; '.join(reasons)}." if reasons else "The coordinator states no reason."


def _check_rounds(findings: Authorship, receipt: Mapping[str, Any], site: str, replies: Sequence[Reply]) -> None:
    """What the rounds were made of are replies that are there."""
    there = {(reply["round"], reply["sha256"]) for reply in replies if reply["counts"] and reply["record"] in CHAINED}
    for entry in receipt["rounds"]:
        sha256 = entry["sites"].get(site)
        if sha256 is not None and site in entry.get("left_out", {}):
            problem = f"round {entry['round']} counts {site} and leaves it out: changed."
            findings.faults.append(Fault(f"{FILE}: rounds", problem))
        if sha256 is not None and (entry["round"], sha256) not in there:
            problem = f"round {entry['round']} counts {sha256[:12]}... of {site}, no reply of that round: swapped."
            findings.faults.append(Fault(f"{FILE}: rounds", problem))
