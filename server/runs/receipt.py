"""The receipt of a run, ``receipt.json``: versions, hashes of what went in and came out, round by round.

It says nothing that the run's audit does not say: it is made of the audit's entries, holds the hash that the audit had
then, and its own hash is the audit's last entry. So either can be checked by the other.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.config import Experiment
from common.errors import BadInput, Fault
from common.plugins import PluginStamp
from common.security.audit import Audit, AuditEntry, check_audit
from common.security.signatures import CHAINED
from common.system.files import write_atomically
from common.wire.records import RollCallAnswer, TrainReply

FILE = "receipt.json"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReceiptSite(_Part):
    """A site that took part.

    Attributes:
        answer_sha256: Of its answer to the roll call.
        joined: The round from which on it took part; 0 from the start.
        public_key: That it was admitted with, as an OpenSSH line; empty in simulation.
        release: Of Polyclinic at the site, when it last answered the roll call; empty where the audit has none.
    """

    answer_sha256: str
    joined: int
    public_key: str = ""
    release: str = ""


class ReceiptReply(_Part):
    """A reply that reached the run, whether it counted or not.

    Attributes:
        round: Of the run; of an answer to the roll call, that from which on the site takes part.
        reason: Why it does not count; empty where it does.
        statement, signature: What its site signed about it, see :mod:`common.security.signatures`; empty in simulation.
    """

    site: str
    record: str
    round: int
    sha256: str
    counts: bool
    reason: str = ""
    statement: str = ""
    signature: str = ""


class ReceiptAbsence(_Part):
    """A time that no reply of a site counted: the exchange, and why."""

    site: str
    where: str
    reason: str


class ReceiptRound(_Part):
    """A round that counted.

    Attributes:
        sites: SHA-256 of what each sent, in the order in which it was added up or passed on.
        left_out: Why the others do not count.
        contract_sha256: Of the label contract then.
        model_sha256: Of the coordinator's model after it.
    """

    round: int
    sites: dict[str, str]
    left_out: dict[str, str]
    contract_sha256: str
    model_sha256: str


class AuditHead(_Part):
    """Where the audit ended when the receipt was made of it."""

    entries: int
    sha256: str


class Receipt(_Part):
    """``receipt.json``.

    Attributes:
        plugins: Package, version and hash of the files of every plug-in that the run named.
        initial_model_sha256: Of the coordinator's model before round 1.
        replies: Every reply of a site that is signed, in the order in which they came.
        absences: Whose reply did not come, and why.
        resumed: How often the run was resumed; a reply that came meanwhile is lost.
        result_round: The round whose model the run ended with.
        model_sha256: As in ``summary.json``.
    """

    format_version: Literal[2] = 2
    run: str
    name: str
    method: str
    versions: dict[str, str]
    experiment_sha256: str
    contract_sha256: str
    classes: tuple[str, ...]
    plugins: tuple[PluginStamp, ...] = ()
    updates_kept: bool
    sites: dict[str, ReceiptSite]
    initial_model_sha256: str
    rounds: tuple[ReceiptRound, ...]
    replies: tuple[ReceiptReply, ...]
    absences: tuple[ReceiptAbsence, ...]
    resumed: int
    result_round: int
    model_sha256: str
    audit: AuditHead = Field(default=AuditHead(entries=0, sha256=""))


def experiment_sha256(experiment: Experiment) -> str:
    """Hash an experiment's values; the layout of its file does not count."""
    return hashlib.sha256(json.dumps(experiment.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def receipt_of(entries: Iterable[AuditEntry]) -> Receipt:
    """What an audit's entries say of the run that they end with; what a resumed run did again counts once."""
    draft = Draft()
    for entry in entries:
        if entry.get("event") == "run":
            draft = Draft(_facts(entry))
        else:
            draft.add(entry)
    return draft.receipt


@dataclass
class Draft:
    """A receipt that is being made from an audit's entries, one after the other.

    Attributes:
        facts: Fields of the receipt that one entry has whole.
        updates: (Round, site) -> hash of the reply with the update.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    sites: dict[str, ReceiptSite] = field(default_factory=dict)
    rounds: dict[int, ReceiptRound] = field(default_factory=dict)
    updates: dict[tuple[int, str], str] = field(default_factory=dict)
    replies: list[ReceiptReply] = field(default_factory=list)
    absences: list[ReceiptAbsence] = field(default_factory=list)
    resumed: int = 0

    def add(self, entry: AuditEntry) -> None:
        """Take note of the next entry."""
        match entry.get("event"):
            case "resumed":
                self._forget_after(entry["round"])
                self.facts["experiment_sha256"] = entry["experiment_sha256"]  # it may have more rounds now
                self.resumed += 1
            case "rolled_back":
                self._forget_after(entry["round"])
            case "enrolled":
                self.sites[entry["site"]] = _enrolled(entry, self.sites.get(entry["site"]))
                self.replies += _signed({**entry, "record": RollCallAnswer.__name__, "counts": True})
            case "received":
                self._add_received(entry)
            case "left_out":
                self.absences.append(_absence(entry))
            case "aggregated":
                self._add_round(entry)
            case "result":
                self.facts |= _facts(entry)

    def _forget_after(self, server_round: int) -> None:
        self.rounds = {number: one for number, one in self.rounds.items() if number <= server_round}

    def _add_received(self, entry: AuditEntry) -> None:
        self.replies += _signed(entry)
        if "sha256" not in entry:
            self.absences.append(_absence(entry))
        elif entry["counts"] and entry["record"] == TrainReply.__name__:
            self.updates[entry["round"], entry["site"]] = entry["sha256"]

    def _add_round(self, entry: AuditEntry) -> None:
        sent = {site: self.updates[entry["round"], site] for site in entry["sites"]}
        self.rounds[entry["round"]] = ReceiptRound.model_validate({**_facts(entry), "sites": sent})
        self.absences += [
            ReceiptAbsence(site=site, where=f"round {entry['round']}", reason=reason)
            for site, reason in entry["left_out"].items()
        ]

    @property
    def receipt(self) -> Receipt:
        """The receipt of the run."""
        return Receipt(
            **self.facts,
            sites=self.sites,
            rounds=tuple(self.rounds[number] for number in sorted(self.rounds)),
            replies=tuple(self.replies),
            absences=tuple(self.absences),
            resumed=self.resumed,
        )


def _enrolled(entry: AuditEntry, before: ReceiptSite | None) -> ReceiptSite:
    joined = min(entry["round"], before.joined) if before else entry["round"]
    facts = {name: entry.get(name, "") for name in ("public_key", "release")}
    return ReceiptSite(answer_sha256=entry["sha256"], joined=joined, **facts)


def _signed(entry: AuditEntry) -> list[ReceiptReply]:
    """The reply of an entry, if it is one that a site signs: then it must be in the receipt, signed or not."""
    if not entry.get("of_a_hospital") or "sha256" not in entry or entry["record"] not in CHAINED:
        return []
    facts = {name: entry[name] for name in ("site", "record", "round", "sha256", "counts")}
    also = {name: entry.get(name, "") for name in ("reason", "statement", "signature")}
    return [ReceiptReply(**facts, **also)]


def _absence(entry: AuditEntry) -> ReceiptAbsence:
    where = entry["round"]
    exchange = f"round {where}" if isinstance(where, int) else str(where)
    return ReceiptAbsence(site=entry["site"], where=exchange, reason=entry.get("reason", ""))


def write_receipt(audit: Audit) -> str:
    """Make the receipt of a run that is done, beside its audit; or say why there is none."""
    checked = check_audit(audit.folder)
    head = AuditHead(entries=checked.entries, sha256=checked.sha256)
    try:
        receipt = receipt_of(audit.entries()).model_copy(update={"audit": head})
    except (ValidationError, KeyError) as error:
        return f"the audit does not describe a whole run ({type(error).__name__})"
    content = (receipt.model_dump_json(indent=1) + "\n").encode()
    write_atomically(audit.folder / FILE, content, durable=audit.durable)
    audit.append(event="receipt", sha256=hashlib.sha256(content).hexdigest())
    return ""


def read_receipt(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        BadInput: If there is none, or it is none.
    """
    try:
        return Receipt.model_validate_json(path.read_bytes())
    except OSError as error:
        problem = f"cannot be read ({error.strerror})."
        raise BadInput([Fault(str(path), problem, "A run writes it when it is done.")]) from None
    except ValidationError as error:
        places = [(".".join(map(str, one["loc"])) or "the whole file", one["msg"]) for one in error.errors()]
        raise BadInput(Fault(f"{path.name}: {place}", f"{message}: changed.") for place, message in places) from None


def _facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without what every entry has."""
    return {name: value for name, value in entry.items() if name not in ("n", "time", "before", "torn", "event")}
