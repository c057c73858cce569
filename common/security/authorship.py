"""Who wrote what a receipt names: the sites' signatures, checked without the coordinator's disk, offline.

A receipt holds, of every reply that reached the run, its hash, whether it counted, and what its site signed about it.
From these alone it shows: a reply that the site did not sign (forged), one that was signed for another round, message
or run (swapped, replayed), and a reply that was taken from the site and is not in the receipt (withheld). The one thing
to be known from elsewhere is that the public keys are the sites' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import Fault
from common.security.identity import same_key
from common.security.signatures import CHAINED, ReplyStatement, SignatureFault, Signed, verified_reply
from common.system.formatting import counted
from common.system.plain_text import shown

FILE = "receipt.json"
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


def check_authorship(receipt: Mapping[str, Any], keys: Mapping[str, str]) -> Authorship:
    """Check every signature of a receipt.

    Args:
        receipt: As ``receipt.json`` has it.
        keys: Public keys of sites that are known from elsewhere, as OpenSSH lines.
    """
    found = Authorship()
    if type(receipt["resumed"]) is not int or receipt["resumed"] < 0:
        raise ValueError("resumed is no count")
    if not any(site["public_key"] for site in receipt["sites"].values()) and not receipt["replies"] and not keys:
        found.notes.append("signatures: none, as in every simulation: the receipt does not prove who sent what")
        return found
    _check_keys(found, receipt)
    for site in receipt["sites"]:
        replies = [reply for reply in receipt["replies"] if reply["site"] == site]
        _check_site(found, receipt, site, replies, keys.get(site, ""))
    for site in sorted({reply["site"] for reply in receipt["replies"]} - receipt["sites"].keys()):
        found.faults.append(Fault(f"{FILE}: replies", f"names {shown(site)}, which does not take part: forged."))
    for one in receipt["rounds"]:
        for site in sorted(one["sites"].keys() - receipt["sites"].keys()):
            problem = f"round {one['round']} counts {shown(site)}, which does not take part: forged."
            found.faults.append(Fault(f"{FILE}: rounds", problem))
    if not found.faults:
        found.right.append(
            f"signatures: {counted(len(receipt['replies']), 'reply', 'replies')}, each signed by its site"
        )
    return found


def _check_keys(found: Authorship, receipt: Mapping[str, Any]) -> None:
    """No two sites have one key."""
    names: dict[str, str] = {}
    for site, said in receipt["sites"].items():
        key = " ".join(said["public_key"].split()[:2])
        if key and key in names:
            problem = f"{shown(names[key])} and {shown(site)} have the same public key: forged."
            found.faults.append(Fault(f"{FILE}: sites", problem))
        names[key] = site


def _check_site(
    found: Authorship, receipt: Mapping[str, Any], site: str, replies: Sequence[Reply], known_key: str
) -> None:
    where, key = f"{FILE}: {site}", receipt["sites"][site]["public_key"]
    if not key or (known_key and not same_key(key, known_key)):
        found.faults.append(Fault(where, "the receipt does not name this site's own public key: forged."))
        return
    statements: list[ReplyStatement] = []
    for reply in replies:
        try:
            statements.append(_stated(receipt["run"], reply, key))
        except SignatureFault as fault:
            what = f"{reply['record']} of round {reply['round']} ({reply['sha256'][:12]}...)"
            found.faults.append(Fault(where, f"the {what} is not this site's: {fault}."))
    answers = {one["sha256"] for one in replies if one["record"] == CHAINED[0] and one["counts"]}
    if receipt["sites"][site]["answer_sha256"] not in answers:
        problem = "its answer to the roll call is not among the replies that it signed: forged, or withheld."
        found.faults.append(Fault(where, problem))
    _check_repeated(found, where, statements)
    _check_gaps(found, receipt, site, statements)
    _check_rounds(found, receipt, site, replies)


def _stated(run: str, reply: Reply, key: str) -> ReplyStatement:
    """What the site signed about a reply.

    Raises:
        SignatureFault: If the site did not sign it, or signed it as something else.
    """
    if not reply["statement"]:
        raise SignatureFault("it is not signed")
    statement = verified_reply(Signed(statement=reply["statement"], signature=reply["signature"]), key)
    server_round = 0 if reply["record"] == CHAINED[0] else reply["round"]
    said = (statement.site, statement.run, statement.round, statement.record, statement.sha256)
    if said != (reply["site"], run, server_round, reply["record"], reply["sha256"]):
        raise SignatureFault("its site signed it for another run, round, record or content: swapped")
    return statement


def _check_repeated(found: Authorship, where: str, statements: Sequence[ReplyStatement]) -> None:
    """No message is answered twice."""
    first: dict[str, ReplyStatement] = {}
    for statement in statements:
        if statement.message in first:
            problem = f"the reply to one message is there twice, as {statement.record} of round {statement.round}"
            found.faults.append(Fault(where, f"{problem}: replayed."))
        first[statement.message] = statement


def _check_gaps(found: Authorship, receipt: Mapping[str, Any], site: str, statements: Sequence[ReplyStatement]) -> None:
    """The site's count of replies that were taken has no gap that nothing explains."""
    numbers = sorted({statement.number for statement in statements})
    missing = [n for n in range(1, max(numbers, default=0)) if n not in numbers]
    note_gaps(found, receipt, site, missing)


def note_gaps(found: Authorship, receipt: Mapping[str, Any], site: str, missing: Sequence[int]) -> None:
    """Say of replies that were taken and are not in the receipt whether the receipt explains it.

    A reply that came too late, or while the coordinator's run was away, is missing without anybody's fault: the receipt
    then says that the site was left out, or that the run was resumed, as often.
    """
    if not missing:
        return
    reasons = [absence["reason"] for absence in receipt["absences"] if absence["site"] == site]
    explained = len(reasons) + 2 * receipt["resumed"] >= len(missing)
    numbers = ", ".join(map(str, missing))
    which = f"{counted(len(missing), 'reply', 'replies')} of {site} (number {numbers} by its own count)"
    if explained:
        why = shown(reasons[0], 200) if reasons else "the run was resumed"
        found.notes.append(f"{which}: taken from the site, and not in the receipt: {why}")
    else:
        problem = f"{which}: taken from the site, and not in the receipt: withheld."
        found.faults.append(Fault(f"{FILE}: {site}", problem))


def _check_rounds(found: Authorship, receipt: Mapping[str, Any], site: str, replies: Sequence[Reply]) -> None:
    """What the rounds were made of are replies that are there."""
    there = {(reply["round"], reply["sha256"]) for reply in replies if reply["counts"] and reply["record"] in CHAINED}
    for one in receipt["rounds"]:
        sha256 = one["sites"].get(site)
        if sha256 is not None and site in one.get("left_out", {}):
            problem = f"round {one['round']} counts {site} and leaves it out: changed."
            found.faults.append(Fault(f"{FILE}: rounds", problem))
        if sha256 is not None and (one["round"], sha256) not in there:
            problem = f"round {one['round']} counts {sha256[:12]}... of {site}, no reply of that round: swapped."
            found.faults.append(Fault(f"{FILE}: rounds", problem))
