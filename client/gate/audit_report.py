"""A site's audit in words: whether it is whole, and what its entries say."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cryptography import x509

from client.site.statements import FILE as STATEMENTS
from client.site.statements import taken
from common.errors import BadInput, Fault
from common.security.audit import FILE, Audit, Entry, Findings, check
from common.security.authorship import Authorship, OwnCount, OwnReply, check_authorship
from common.security.signatures import CHAINED, SignatureFault, Signed, signing_key, verified_request
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
    faults += _removed(state, found)
    if authority is not None:
        requests = _requests(state, authority)
        notes, faults = notes + requests.notes, faults + list(map(str, requests.faults))
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


def _removed(state: Path, found: Findings) -> list[str]:
    """Say that an audit is not there, although the site has replied to a run."""
    if found.entries or found.faults or not (state / STATEMENTS).exists():
        return []
    return [f"{FILE}: is not there, and this site has replied to a run: removed."]


def _requests(state: Path, authority: x509.Certificate) -> Findings:
    """Count the requests that the coordinator signed, as they are written in the audit; find those that are not its.

    An audit outlives a kit: a request by another authority's certificate may be of an earlier coordinator.
    """
    signed, found = 0, Findings()
    for entry in Audit(state).entries():
        if entry.get("direction") != "in" or entry.get("rule") == "signature" or "statement" not in entry:
            continue
        try:
            what = Signed(statement=entry["statement"], signature=entry["signature"])
            certificate = bytes.fromhex(entry["certificate"])
        except (ValueError, KeyError, TypeError) as error:
            found.faults.append(Fault(f"entry {entry['n']}", f"its signature cannot be read ({error}): changed."))
            continue
        try:
            signing_key(certificate, authority)
        except SignatureFault as fault:
            found.notes.append(f"entry {entry['n']}: not a request that this kit's coordinator signed: {fault}.")
            continue
        try:
            if verified_request(what, certificate, authority).sha256 != entry.get("sha256"):
                raise SignatureFault("its statement is about another record")
            signed += 1
        except SignatureFault as fault:
            found.faults.append(Fault(f"entry {entry['n']}", f"the coordinator did not sign this request: {fault}."))
    if signed:
        found.notes.insert(
            0, f"{counted(signed, 'request')} in this audit, of all runs, each signed by the coordinator."
        )
    return found


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
        found = check_authorship(said, keys, OwnCount(site, taken(state, said["run"]).count, _sent(state, said["run"])))
        found.notes += _not_counted(said, site)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput([Fault("receipt.json", f"is no receipt that can be read: {error!r}.")]) from None
    return found


def _sent(state: Path, run: str) -> list[OwnReply]:
    """The replies to a run that left this site and that it counts."""
    return [
        OwnReply(entry["record"], entry["round"], entry["sha256"])
        for entry in Audit(state).entries()
        if (entry.get("run"), entry.get("direction"), entry.get("decision")) == (run, "out", "allow")
        and entry.get("record") in CHAINED
    ]


def _not_counted(said: Mapping[str, Any], site: str) -> list[str]:
    """What the coordinator received of this site and says did not count."""
    return [
        f"the {reply['record']} of round {reply['round']} of {site} was received and did not count: "
        f"{shown(str(reply['reason']), 200)}"
        for reply in said["replies"]
        if reply["site"] == site and not reply["counts"]
    ]


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
