"""The text output of ``flwr-client audit``: the faults of a site's audit log, and one line for each entry."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cryptography import x509

from polyclinic.client.site.statements import has_accepted_replies, read_accepted_reply_count
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.audit import AUDIT_FILE, AuditCheckResult, AuditEntry, AuditLog, check_audit_log
from polyclinic.common.security.authorship import (
    AuthorshipCheckResult,
    SentReply,
    SiteReplyRecord,
    TrustedKeys,
    check_receipt_authorship,
)
from polyclinic.common.security.signatures import (
    NUMBERED_RECORDS,
    SignatureFault,
    SignedStatement,
    verify_request_signature,
    verify_signing_certificate,
)
from polyclinic.common.system.plain_text import format_count_with_noun, make_printable_line

RECEIPT_FORMAT = 2


def make_audit_report(
    state: Path,
    site: str,
    receipt: Path | None,
    keys: TrustedKeys = MappingProxyType({}),
    authority: x509.Certificate | None = None,
) -> tuple[list[str], bool]:
    """Verify a site's audit log; return lines for a person, and True if there is no fault.

    Args:
        receipt: The coordinator's file with the replies that it received; None to verify only the audit log.
        keys: The public keys of this site and of the sites listed in its policy.
        authority: The coordinator's certificate in the site's kit, to verify its signatures; None without a kit.

    Raises:
        BadInput: If the receipt cannot be read.
    """
    findings = check_audit_log(state)
    faults = [str(fault) for fault in findings.faults]
    notes = [*findings.notes]
    if not findings.entries and not faults and has_accepted_replies(state):
        faults.append(f"{AUDIT_FILE}: is not there, and this site has replied to a run: removed.")

    if authority is not None:
        requests = _check_request_signatures(state, authority)
        notes += requests.notes
        faults += map(str, requests.faults)

    if receipt is not None:
        try:
            content = dict(json.loads(receipt.read_text(encoding="utf-8")))
            _list_replies_in_receipt(content, "")
            if content["format_version"] != RECEIPT_FORMAT:
                raise ValueError(f"it has format {content['format_version']}, this release reads {RECEIPT_FORMAT}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadInput([Fault(str(receipt), f"is no receipt that can be read: {error!r}.")]) from None
        received = _list_replies_in_receipt(content, site)
        sent_hashes = {
            entry.get("sha256") for entry in AuditLog(state).read_entries() if entry.get("direction") == "out"
        }
        missing = [
            f"{receipt.name}: it names a reply of {site} of {when} ({sha256[:12]}...) that this audit does not have: "
            "somebody else sent it, or the audit was changed."
            for sha256, when in received.items()
            if sha256 not in sent_hashes
        ]
        faults += missing if received else [f"{receipt.name}: knows nothing of {site}."]
        if received and not missing:
            records = format_count_with_noun(len(received), "record")
            notes.append(f"{receipt.name}: the {records} that it names of {site} left by entries of this audit.")
        authorship = _check_receipt_authorship(content, site, keys, state)
        notes += [f"{receipt.name}: {line}" for line in (*authorship.right, *authorship.notes)]
        faults += map(str, authorship.faults)

    if not findings.entries and not faults:
        return ["There is no audit: nothing came in and nothing left."], True
    if faults:
        return [
            *notes,
            *faults,
            f"{format_count_with_noun(len(faults), 'fault')} in {findings.entries} entries.",
        ], False
    return [*notes, f"{findings.entries} entries, unbroken; the last one's SHA-256 is {findings.sha256}."], True


def _check_request_signatures(state: Path, authority: x509.Certificate) -> AuditCheckResult:
    """Count the requests in the audit log that the coordinator signed, with a fault for each false signature.

    A request signed under another authority is only noted, because it may come from an earlier coordinator.
    """
    signed = 0
    findings = AuditCheckResult()
    for entry in AuditLog(state).read_entries():
        if entry.get("direction") != "in" or entry.get("rule") == "signature" or "statement" not in entry:
            continue
        where = f"entry {entry['n']}"
        try:
            statement = SignedStatement(statement=entry["statement"], signature=entry["signature"])
            certificate = bytes.fromhex(entry["certificate"])
        except (ValueError, KeyError, TypeError) as error:
            findings.faults.append(Fault(where, f"its signature cannot be read ({error}): changed."))
            continue
        try:
            verify_signing_certificate(certificate, authority)
        except SignatureFault as fault:
            findings.notes.append(f"{where}: not a request that this kit's coordinator signed: {fault}.")
            continue
        try:
            if verify_request_signature(statement, certificate, authority).sha256 != entry.get("sha256"):
                raise SignatureFault("its statement is about another record")
            signed += 1
        except SignatureFault as fault:
            findings.faults.append(Fault(where, f"the coordinator did not sign this request: {fault}."))
    if signed:
        requests = format_count_with_noun(signed, "request")
        findings.notes.insert(0, f"{requests} in this audit, of all runs, each signed by the coordinator.")
    return findings


def _list_replies_in_receipt(content: Mapping[str, Any], site: str) -> dict[str, str]:
    """Return the replies that a receipt lists for a site: SHA-256 -> round; empty if it does not list the site."""
    updates = {row["sites"][site]: f"round {row['round']}" for row in content["rounds"] if site in row["sites"]}
    answers = content["sites"]
    return {answers[site]["answer_sha256"]: "the roll call", **updates} if site in answers else {}


def _check_receipt_authorship(
    content: Mapping[str, Any], site: str, keys: TrustedKeys, state: Path
) -> AuthorshipCheckResult:
    """Check that sites signed the replies in the receipt, and that it has all accepted replies of this site."""
    try:
        run = content["run"]
        sent = [
            SentReply(entry["record"], entry["round"], entry["sha256"])
            for entry in AuditLog(state).read_entries()
            if (entry.get("run"), entry.get("direction"), entry.get("decision")) == (run, "out", "allow")
            and entry.get("record") in NUMBERED_RECORDS
        ]
        authorship = check_receipt_authorship(
            content, keys, SiteReplyRecord(site, read_accepted_reply_count(state, run).count, sent)
        )
        authorship.notes += [
            f"the {reply['record']} of round {reply['round']} of {site} was received and did not count: "
            f"{make_printable_line(str(reply['reason']), 200)}"
            for reply in content["replies"]
            if reply["site"] == site and not reply["counts"]
        ]
        return authorship
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput([Fault("receipt.json", f"is no receipt that can be read: {error!r}.")]) from None


def describe_audit_entry(entry: AuditEntry) -> str:
    """Format an audit entry as one line for a person, without control characters."""
    if entry.get("event") == "start":
        event = f"flwr-client {entry.get('version')} started"
    elif entry.get("event") == "key":
        event = f"the key was renewed: {entry.get('new')} in the place of {entry.get('old', 'a lost one')}"
    elif entry.get("event") == "patients":
        words = {"new": "new", "gone": "gone", "kept": "kept in the part of earlier runs", "opted_out": "opted out"}
        words["opted_out_unmatched"] = "opted out and not in the data"
        event = f"patients: {', '.join(f'{entry[key]} {word}' for key, word in words.items() if key in entry)}"
    elif entry.get("event") == "delivered":
        event = f'stored the model of "{entry.get("name")}" of the coordinator {entry.get("coordinator")}'
    elif entry.get("event") == "withdrawn":
        event = f"this hospital left its federation: {entry.get('reason') or 'no reason was given'}"
    elif entry.get("event") == "withdrawal_undone":
        event = "this hospital takes part again"
    else:
        direction = {"in": "came", "out": "left"}.get(entry.get("direction", ""), "?")
        name = f' "{entry["name"]}"' if "name" in entry else ""
        where = f"run {str(entry.get('run', ''))[:8]}{name} round {entry.get('round', 0)}"
        denied = f"  {entry['rule']}: {entry['reason']}" if entry.get("decision") == "deny" else ""
        size: Any = entry.get("bytes", 0)
        passed = "stayed" if direction == "left" and denied else direction
        event = f"{passed}  {entry.get('record')}  {where}  {size:,} bytes{denied}"
        if entry.get("record") == "Error":
            event = f"{direction}  Error ({entry.get('kind')})  {where}"
    return make_printable_line(f"{entry['n']:>6}  {str(entry.get('time', ''))[:19]}  {event}")
