"""A site's audit in words: whether it is whole, and what its entries say."""

import json
from pathlib import Path
from typing import Any

from common.amounts import counted
from common.audit import Audit, Entry
from common.audit_check import check
from common.errors import BadInput, Fault


def verified(state: Path, site: str, receipt: Path | None) -> tuple[list[str], bool]:
    """What is to be said of a site's audit, and whether it is right.

    Args:
        receipt: What the coordinator says that it received; None to look at the audit alone.

    Raises:
        BadInput: If the receipt cannot be read.
    """
    found = check(state)
    faults = [str(fault) for fault in found.faults]
    notes = [*found.notes]
    if receipt is not None:
        received = _received(receipt, site)
        faults += (lacking := _lacking(state, site, received, receipt.name))
        if not lacking:
            named = counted(len(received), "record")
            notes.append(f"{receipt.name}: the {named} that it names of {site} left by entries of this audit.")
    if not found.entries and not faults:
        return ["There is no audit: nothing came in and nothing left."], True
    lines = [*notes, *faults]
    if faults:
        return [*lines, f"{len(faults)} faults in {found.entries} entries."], False
    return [*lines, f"{found.entries} entries, unbroken; the last one's SHA-256 is {found.sha256}."], True


def _received(receipt: Path, site: str) -> dict[str, str]:
    """SHA-256 of what the coordinator received of this site, and in which round."""
    try:
        said = json.loads(receipt.read_text(encoding="utf-8"))
        updates = {one["sites"][site]: f"round {one['round']}" for one in said["rounds"] if site in one["sites"]}
        return {said["sites"][site]["answer_sha256"]: "the roll call", **updates} if site in said["sites"] else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput([Fault(str(receipt), f"is no receipt that can be read: {error!r}.")]) from None


def _lacking(state: Path, site: str, received: dict[str, str], where: str) -> list[str]:
    if not received:
        return [f"{where}: knows nothing of {site}."]
    left = {entry.get("sha256") for entry in Audit(state).entries() if entry.get("direction") == "out"}
    return [
        f"{where}: {site}'s reply of {when} ({sha256[:12]}...) left this site by no entry: removed or changed."
        for sha256, when in received.items()
        if sha256 not in left
    ]


def in_words(entry: Entry) -> str:
    """One line for a person."""
    return f"{entry['n']:>6}  {entry.get('time', '')[:19]}  {_event(entry)}"


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
