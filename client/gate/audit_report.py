"""A site's audit in words: whether it is whole, and what its entries say."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cryptography import x509

from client.site.statements import taken
from common.errors import BadInput, Fault
from common.security.audit import Audit, Entry
from common.security.audit_check import check
from common.security.authorship import Authorship, check_authorship, note_gaps
from common.security.signatures import ReplyStatement, SignatureFault, Signed, verified_request
from common.system.formatting import counted
from common.system.plain_text import shown

FORMAT = 2
"""Of the coordinator's receipts."""


def verified(
    state: Path,
    site: str,
    receipt: Path | None,
    keys: Mapping[str, str] = MappingProxyType({}),
    authority: x509.Certificate | None = None,
) -> tuple[list[str], bool]:
    """What is to be said of a site's audit, and whether it is right.

    Args:
        receipt: What the coordinator says that it received; None to look at the audit alone.
        keys: Public keys of this site and of those that it knows, as OpenSSH lines.
        authority: The certificate in the site's kit, by which it knows its coordinator's signatures; None without one.

    Raises:
        BadInput: If the receipt cannot be read.
    """
    found = check(state)
    faults = [str(fault) for fault in found.faults]
    notes = [*found.notes]
    if authority is not None:
        notes += _requests(state, authority)
    if receipt is not None:
        said = _read(receipt)
        received = _received(said, site)
        faults += (lacking := _lacking(state, site, received, receipt.name))
        if not lacking:
            named = counted(len(received), "record")
            notes.append(f"{receipt.name}: the {named} that it names of {site} left by entries of this audit.")
        authorship = _authorship(said, site, keys, state)
        notes += [f"{receipt.name}: {line}" for line in (*authorship.right, *authorship.notes)]
        faults += [str(fault) for fault in authorship.faults]
    if not found.entries and not faults:
        return ["There is no audit: nothing came in and nothing left."], True
    lines = [*notes, *faults]
    if faults:
        return [*lines, f"{counted(len(faults), 'fault')} in {found.entries} entries."], False
    return [*lines, f"{found.entries} entries, unbroken; the last one's SHA-256 is {found.sha256}."], True


def _requests(state: Path, authority: x509.Certificate) -> list[str]:
    """How many requests the coordinator signed, as they are written in the audit; and which ones it did not.

    An audit outlives a kit: requests of an earlier coordinator are among those that this one did not sign.
    """
    signed, others = 0, list[str]()
    for entry in Audit(state).entries():
        if entry.get("direction") != "in" or entry.get("rule") == "signature" or "statement" not in entry:
            continue
        try:
            what = Signed(statement=entry["statement"], signature=entry["signature"])
            statement = verified_request(what, bytes.fromhex(entry["certificate"]), authority)
            if statement.sha256 != entry["sha256"]:
                raise SignatureFault("its statement is about another record")
            signed += 1
        except (ValueError, KeyError, TypeError) as error:
            others.append(f"entry {entry['n']}: not a request that this kit's coordinator signed: {error}.")
    if signed:
        others.insert(0, f"{counted(signed, 'request')} in this audit, of all runs, each signed by the coordinator.")
    return others


def _read(receipt: Path) -> Mapping[str, Any]:
    try:
        said = json.loads(receipt.read_text(encoding="utf-8"))
        _received(said, "")
        if said["format_version"] != FORMAT:
            raise ValueError(f"it has format {said['format_version']}, this release reads {FORMAT}")
        return dict(said)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput([Fault(str(receipt), f"is no receipt that can be read: {error!r}.")]) from None


def _received(said: Mapping[str, Any], site: str) -> dict[str, str]:
    """SHA-256 of what the coordinator received of a site, and in which round."""
    updates = {one["sites"][site]: f"round {one['round']}" for one in said["rounds"] if site in one["sites"]}
    return {said["sites"][site]["answer_sha256"]: "the roll call", **updates} if site in said["sites"] else {}


def _authorship(said: Mapping[str, Any], site: str, keys: Mapping[str, str], state: Path) -> Authorship:
    """Whether each site signed what the receipt names, and whether all that this site sent is in it."""
    try:
        found = check_authorship(said, keys)
        numbers = [_number(reply) for reply in said["replies"] if reply["site"] == site]
        count = taken(state, said["run"]).count
        last = max(numbers, default=0)
        if count > last:  # what is missing in between was found with the signatures
            note_gaps(found, said, site, range(last + 1, count + 1))
        found.notes += _not_counted(said, site)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput([Fault("receipt.json", f"is no receipt that can be read: {error!r}.")]) from None
    return found


def _not_counted(said: Mapping[str, Any], site: str) -> list[str]:
    """What the coordinator received of this site and says did not count."""
    return [
        f"the {reply['record']} of round {reply['round']} of {site} was received and did not count: "
        f"{shown(str(reply['reason']), 200)}"
        for reply in said["replies"]
        if reply["site"] == site and not reply["counts"]
    ]


def _number(reply: Mapping[str, Any]) -> int:
    try:
        return ReplyStatement.read(reply["statement"]).number
    except SignatureFault:
        return 0


def _lacking(state: Path, site: str, received: dict[str, str], where: str) -> list[str]:
    if not received:
        return [f"{where}: knows nothing of {site}."]
    left = {entry.get("sha256") for entry in Audit(state).entries() if entry.get("direction") == "out"}
    return [
        f"{where}: it names a reply of {site} of {when} ({sha256[:12]}...) that this audit does not have: "
        "somebody else sent it, or the audit was changed."
        for sha256, when in received.items()
        if sha256 not in left
    ]


def in_words(entry: Entry) -> str:
    """One line for a person; audits of earlier releases hold words as they came."""
    return shown(f"{entry['n']:>6}  {str(entry.get('time', ''))[:19]}  {_event(entry)}")


def _event(entry: Entry) -> str:
    if entry.get("event") == "start":
        return f"flwr-client {entry.get('version')} started"
    direction = {"in": "came", "out": "left"}.get(entry.get("direction", ""), "?")
    where = f"run {str(entry.get('run', ''))[:8]} round {entry.get('round', 0)}"
    if entry.get("record") == "Error":
        return f"{direction}  Error ({entry.get('kind')})  {where}"
    denied = f"  {entry['rule']}: {entry['reason']}" if entry.get("decision") == "deny" else ""
    stayed = direction == "left" and entry.get("decision") == "deny"
    size: Any = entry.get("bytes", 0)
    return f"{'stayed' if stayed else direction}  {entry.get('record')}  {where}  {size:,} bytes{denied}"
