"""Check, by the sites' signatures, that a run's receipt lists exactly the replies that the sites sent.

The coordinator writes the receipt ``receipt.json``: for each reply its hash, whether it counted, and the site's signed
statement. The check finds replies that the site did not sign (forged), replies that it signed for another round,
message or run (swapped, replayed), and accepted replies that are missing in the receipt (withheld). It needs only the
receipt, and the sites' public keys from a trusted source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from polyclinic.common.errors import Fault
from polyclinic.common.security.identity import is_same_public_key
from polyclinic.common.security.signatures import (
    NUMBERED_RECORDS,
    ReplyStatement,
    SignatureFault,
    SignedStatement,
    verify_reply_signature,
)
from polyclinic.common.system.plain_text import format_count_with_noun, join_as_english_list, make_printable_line

RECEIPT_FILE = "receipt.json"
TRAIN_REPLY_RECORD = "TrainReply"
MAX_LISTED_REPLIES = 10
"""Maximum number of replies that a fault lists one by one."""
Reply = Mapping[str, Any]
TrustedKeys = Mapping[str, tuple[str, ...]]
"""Site -> its public keys as OpenSSH lines, in any order: the present key, and keys from before a renewal."""


@dataclass
class AuthorshipCheckResult:
    """The result of :func:`check_receipt_authorship`.

    Attributes:
        right: Sentences about the checks that passed.
        notes: Harmless irregularities, and facts that cannot be checked.
        faults: Replies that were forged, swapped, replayed or withheld.
    """

    right: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class SentReply:
    """A reply that a site sent, according to the site's audit log."""

    record: str
    round: int
    sha256: str


@dataclass(frozen=True)
class SiteReplyRecord:
    """The record that a site has of its replies to a run.

    Attributes:
        site: Name of the site.
        accepted: Number of replies that the coordinator accepted, as the site counted them.
        sent: All replies that the site sent, accepted or not.
    """

    site: str = ""
    accepted: int = 0
    sent: Sequence[SentReply] = ()


def check_receipt_authorship(
    receipt: Mapping[str, Any], keys: TrustedKeys, site_record: SiteReplyRecord = SiteReplyRecord()
) -> AuthorshipCheckResult:
    """Check every signature in a receipt, and that no site's reply is missing.

    Args:
        receipt: The content of ``receipt.json``.
        keys: The sites' public keys from a trusted source.
        site_record: The replies of the site that runs the check, from its audit log; empty for another checker.

    Raises:
        ValueError: If ``resumed`` in the receipt is not a count.
    """
    findings = AuthorshipCheckResult()
    if type(receipt["resumed"]) is not int or receipt["resumed"] < 0:
        raise ValueError("resumed is no count")
    if not any(site["public_key"] for site in receipt["sites"].values()) and not receipt["replies"] and not keys:
        findings.notes.append("signatures: none, as in every simulation: the receipt does not prove who sent what")
        return findings
    names: dict[str, str] = {}  # public key -> its site, to find two sites with one key
    for site in receipt["sites"]:
        for line in _list_site_keys(receipt, site):
            key = " ".join(line.split()[:2])
            if key and names.get(key, site) != site:
                sites = f"{make_printable_line(names[key])} and {make_printable_line(site)}"
                findings.faults.append(Fault(f"{RECEIPT_FILE}: sites", f"{sites} have the same public key: forged."))
            names[key] = site
    for site in receipt["sites"]:
        _check_site_signatures(findings, receipt, site, keys.get(site, ()), site_record)
    for site in sorted({reply["site"] for reply in receipt["replies"]} - receipt["sites"].keys()):
        findings.faults.append(
            Fault(f"{RECEIPT_FILE}: replies", f"names {make_printable_line(site)}, which does not take part: forged.")
        )
    for entry in receipt["rounds"]:
        for site in sorted(entry["sites"].keys() - receipt["sites"].keys()):
            problem = f"round {entry['round']} counts {make_printable_line(site)}, which does not take part: forged."
            findings.faults.append(Fault(f"{RECEIPT_FILE}: rounds", problem))
    if not findings.faults:
        replies = format_count_with_noun(len(receipt["replies"]), "reply", "replies")
        findings.right.append(f"signatures: {replies}, each signed by its site")
    return findings


def _list_site_keys(receipt: Mapping[str, Any], site: str) -> list[str]:
    """Return the public keys of a site in a receipt, in the order in which the site used them."""
    entry = receipt["sites"][site]
    # Receipts of older releases have no field for old keys.
    return [*entry.get("old_public_keys", ()), entry["public_key"]]


def _explain_untrusted_keys(stated: Sequence[str], trusted: Sequence[str]) -> str:
    """Return the reason why a receipt's keys of a site cannot be trusted; empty if they can.

    Without trusted keys only the presence of the keys is checked.

    Args:
        stated: The site's keys in the receipt, oldest first.
        trusted: The site's keys from another source; empty if there are none.
    """
    is_own = [bool(key) and (not trusted or any(is_same_public_key(key, own) for own in trusted)) for key in stated]
    if not is_own[-1]:
        return "the receipt does not name this site's own public key: forged."
    if not all(is_own):
        return (
            "the receipt names a public key that this site had earlier in the run, and that key is not among the keys "
            "of this site that this check was given: forged, or the site renewed its key. To tell: flwr-server verify "
            "RECEIPT, with --request for its request file of before the renewal and for the one of after it."
        )
    return ""


def _check_site_signatures(
    findings: AuthorshipCheckResult,
    receipt: Mapping[str, Any],
    site: str,
    trusted_keys: Sequence[str],
    site_record: SiteReplyRecord,
) -> None:
    replies = [reply for reply in receipt["replies"] if reply["site"] == site]
    where = f"{RECEIPT_FILE}: {site}"
    keys = _list_site_keys(receipt, site)
    if problem := _explain_untrusted_keys(keys, trusted_keys):
        findings.faults.append(Fault(where, problem))
        return
    statements: list[ReplyStatement] = []
    for reply in replies:
        try:
            statement, index = _verify_reply_signature(receipt["run"], reply, keys)
            statements.append(statement)
            # Earlier keys were revoked, so the coordinator could not accept later replies that they sign.
            keys = keys[index:]
        except SignatureFault as fault:
            what = f"{reply['record']} of round {reply['round']} ({reply['sha256'][:12]}...)"
            findings.faults.append(Fault(where, f"the {what} is not this site's: {fault}."))
    answers = {reply["sha256"] for reply in replies if reply["record"] == NUMBERED_RECORDS[0] and reply["counts"]}
    if receipt["sites"][site]["answer_sha256"] not in answers:
        problem = "its answer to the roll call is not among the replies that it signed: forged, or withheld."
        findings.faults.append(Fault(where, problem))
    reply_by_message: dict[str, ReplyStatement] = {}  # message id -> its reply, to find a message with two replies
    for statement in statements:
        if statement.message in reply_by_message:
            problem = f"the reply to one message is there twice, as {statement.record} of round {statement.round}"
            findings.faults.append(Fault(where, f"{problem}: replayed."))
        reply_by_message[statement.message] = statement
    _check_reply_gaps(findings, receipt, site, statements, site_record)
    counting = {
        (reply["round"], reply["sha256"])
        for reply in replies
        if reply["counts"] and reply["record"] in NUMBERED_RECORDS
    }
    # Each reply of the site that a round counts must be in the receipt.
    for entry in receipt["rounds"]:
        sha256 = entry["sites"].get(site)
        if sha256 is not None and site in entry.get("left_out", {}):
            problem = f"round {entry['round']} counts {site} and leaves it out: changed."
            findings.faults.append(Fault(f"{RECEIPT_FILE}: rounds", problem))
        if sha256 is not None and (entry["round"], sha256) not in counting:
            problem = f"round {entry['round']} counts {sha256[:12]}... of {site}, no reply of that round: swapped."
            findings.faults.append(Fault(f"{RECEIPT_FILE}: rounds", problem))


def _verify_reply_signature(run: str, reply: Reply, keys: Sequence[str]) -> tuple[ReplyStatement, int]:
    """Verify the signature of a reply in a receipt; return the site's statement, and the index of the signing key.

    Args:
        run: Name of the run.
        reply: The reply in the receipt.
        keys: The public keys with which the site may have signed: the key in use before this reply, and later ones.

    Raises:
        SignatureFault: If the site did not sign this reply, or signed it for another run, round, record or content.
    """
    if not reply["statement"]:
        raise SignatureFault("it is not signed")
    signed = SignedStatement(statement=reply["statement"], signature=reply["signature"])
    statement, index = _find_signing_key(signed, keys)
    server_round = 0 if reply["record"] == NUMBERED_RECORDS[0] else reply["round"]
    stated = (statement.site, statement.run, statement.round, statement.record, statement.sha256)
    if stated != (reply["site"], run, server_round, reply["record"], reply["sha256"]):
        raise SignatureFault("its site signed it for another run, round, record or content: swapped")
    return statement, index


def _find_signing_key(signed: SignedStatement, keys: Sequence[str]) -> tuple[ReplyStatement, int]:
    """Return a signed statement, and the index of the key that signed it.

    Raises:
        SignatureFault: If none of the keys signed it.
    """
    for index, key in enumerate(keys):
        try:
            return verify_reply_signature(signed, key), index
        except SignatureFault:
            if index == len(keys) - 1:
                raise
    raise SignatureFault("no key of its site is known")


def _check_reply_gaps(
    findings: AuthorshipCheckResult,
    receipt: Mapping[str, Any],
    site: str,
    statements: Sequence[ReplyStatement],
    site_record: SiteReplyRecord,
) -> None:
    """Add a fault for each gap in the numbers with which a site signs its accepted replies.

    A reply can be missing without intent, if it arrived at the deadline or while the coordinator's run was down. A gap
    is still a fault, because only the coordinator can state this reason, and it could also state it for a withheld
    reply.
    """
    numbered = {statement.number: statement for statement in statements if statement.number > 0}
    sent = site_record.sent if site_record.site == site else ()
    end = max([*numbered, site_record.accepted if site_record.site == site else 0]) + 1
    for before, after in pairwise([0, *sorted(numbered), end]):
        if after - before > 1:
            missing = range(before + 1, after)
            names = (
                [str(n) for n in missing] if len(missing) <= MAX_LISTED_REPLIES else [f"{missing[0]} to {missing[-1]}"]
            )
            which = f"{format_count_with_noun(len(missing), 'reply', 'replies')} of {site} "
            which += f"(number {', '.join(names)} by its own count)"
            where = _describe_reply_gap(receipt, site, numbered, before, after, sent)
            problem = f"{which}: taken from the site, and not in the receipt: withheld. {where}"
            absences = [absence for absence in receipt["absences"] if absence["site"] == site]
            reasons = [make_printable_line(f"{absence['where']}: {absence['reason']}", 100) for absence in absences[:3]]
            if receipt["resumed"]:
                reasons.append(f"the run was resumed {format_count_with_noun(receipt['resumed'], 'time')}")
            stated = "; ".join(reasons) or "no reason"  # the coordinator does not sign its reasons
            stated = f"The coordinator states{':' if reasons else ''} {stated}."
            findings.faults.append(Fault(f"{RECEIPT_FILE}: {site}", problem, stated, site=site))


def _describe_reply_gap(
    receipt: Mapping[str, Any],
    site: str,
    numbered: Mapping[int, ReplyStatement],
    before: int,
    after: int,
    sent: Sequence[SentReply],
) -> str:
    """Describe a gap for a fault: its rounds, the replies before and after it, and the replies that may be missing.

    Args:
        receipt: The content of ``receipt.json``.
        site: Name of the site.
        numbered: Number of a reply, as the site counted -> the site's statement.
        before, after: Numbers of the replies before and after the gap.
        sent: Replies that the site sent, from its audit log; empty if this is not available.
    """
    replies = [reply for reply in receipt["replies"] if reply["site"] == site]
    first = max((statement.round for number, statement in numbered.items() if number <= before), default=0)
    later = [numbered[number].round for number in sorted(numbered) if number >= after and numbered[number].round]
    ends = [entry["round"] for entry in receipt["rounds"]] + [reply.round for reply in sent]
    last = max(first, later[0]) if later else max([first, *ends])
    when = f"round {first}" if first == last else f"a round from {first} to {last}"
    neighbours = []
    for statement in (numbered[number] for number in (before, after) if number in numbered):
        at = "" if statement.record == NUMBERED_RECORDS[0] else f" of round {statement.round}"
        neighbours.append(f"{statement.record}{at}")
    if len(neighbours) == 2:
        place = f", sent between its {neighbours[0]} and its {neighbours[1]}"
    else:
        place = "".join(f", sent {'after' if before in numbered else 'before'} its {name}" for name in neighbours)
    text = f"Of {when}{place}."
    trained = {reply["round"] for reply in replies if reply["record"] == TRAIN_REPLY_RECORD}
    numbers = [entry["round"] for entry in receipt["rounds"] if entry["round"] not in trained]
    if lacking := [f"{TRAIN_REPLY_RECORD} of round {number}" for number in numbers if first <= number <= last]:
        text += f" The receipt has no {join_as_english_list(lacking[:MAX_LISTED_REPLIES])} of it."
    named = {reply["sha256"] for reply in replies}
    unnamed = [reply for reply in sent if reply.sha256 not in named and first <= reply.round <= last]
    if unnamed:
        names = [f"{reply.record} of round {reply.round}" for reply in unnamed[-MAX_LISTED_REPLIES:]]
        text += f" The site's audit has, and the receipt has not: {join_as_english_list(names)}."
    return text
