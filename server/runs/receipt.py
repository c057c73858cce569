"""The receipt of a run, ``receipt.json``: software versions, and hashes of all replies and models by round.

The receipt is made from the run's audit log and has the hash of the log. The next entry of the log has the hash of the
receipt. So each of the two files proves that the other is unchanged.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.plugins import PluginIdentity
from polyclinic.common.security.audit import AuditEntry, AuditLog, check_audit_log
from polyclinic.common.security.signatures import NUMBERED_RECORDS
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_names import PlainName
from polyclinic.common.wire.records import RollCallAnswer, TrainReply

RECEIPT_FILE = "receipt.json"


class _StrictReceiptModel(BaseModel):
    """The base class of a receipt's parts, which refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SiteFileName = Annotated[str, AfterValidator(PlainName)]
"""Name of a site in a receipt, which may come from another machine; files in ``updates/`` are named after it."""


class ReceiptSite(_StrictReceiptModel):
    """A site that took part in the run.

    Attributes:
        answer_sha256: Hash of the site's answer to the roll call.
        joined: First round of the site; 0 if it took part from the start.
        public_key: Public key of the admitted site, as an OpenSSH line; empty in simulation.
        old_public_keys: Revoked keys with which the site signed earlier in the run, oldest first.
        release: The site's Polyclinic release in its last answer to the roll call; empty if unknown.
    """

    answer_sha256: str
    joined: int
    public_key: str = ""
    old_public_keys: tuple[str, ...] = ()
    release: str = ""

    @model_serializer(mode="wrap")
    def _leave_out_empty_old_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the field out if it is empty, because hospitals of an earlier release refuse unknown fields."""
        fields: dict[str, Any] = write(self)
        if not self.old_public_keys:
            del fields["old_public_keys"]
        return fields


class ReceivedReplyRecord(_StrictReceiptModel):
    """A reply that arrived, whether it was accepted or not.

    Attributes:
        round: Round of the reply; for an answer to the roll call, the site's first round.
        counts: True for an accepted reply.
        reason: Reason for rejecting the reply; empty for an accepted reply.
        statement: The text that the site signed (:mod:`polyclinic.common.security.signatures`); empty in simulation.
        signature: The site's signature of this text; empty in simulation.
    """

    site: str
    record: str
    round: int
    sha256: str
    counts: bool
    reason: str = ""
    statement: str = ""
    signature: str = ""


class ReceiptAbsence(_StrictReceiptModel):
    """A site that contributed no accepted reply to a round or another exchange, with the reason."""

    site: str
    where: str
    reason: str


class ReceiptRound(_StrictReceiptModel):
    """A round with the updates that were aggregated and the resulting model.

    Attributes:
        sites: Site -> SHA-256 of its update, in the order of aggregation (or of passing the model on).
        left_out: Site -> reason for rejecting its reply.
        contract_sha256: Hash of the label contract (which site annotates which classes) in this round.
        model_sha256: Hash of the coordinator's model after the round.
        images: Site whose claimed number of images was lowered -> number of images that counted.
        uncounted: Sites whose statistics did not count when the round began.
    """

    round: int
    sites: dict[SiteFileName, str]
    left_out: dict[str, str]
    contract_sha256: str
    model_sha256: str
    images: dict[str, int] = Field(default_factory=dict)
    uncounted: tuple[str, ...] = ()


class AuditLogEnd(_StrictReceiptModel):
    """The end of the audit log when the receipt was made: number of entries, and hash of the last entry."""

    entries: int
    sha256: str


class RunReceipt(_StrictReceiptModel):
    """The content of ``receipt.json``.

    Attributes:
        plugins: Package, version and file hash of every plug-in used by the run.
        initial_model_sha256: Hash of the coordinator's model before round 1.
        replies: All replies of the record classes that sites sign, in order of arrival.
        absences: Sites without an accepted reply, by exchange.
        resumed: Number of times that the run was resumed; replies that arrived during an interruption may be missing.
        result_round: Round of the run's final model.
        model_sha256: Hash of the final model, as in ``summary.json``.
    """

    format_version: Literal[2] = 2
    run: str
    name: str
    method: str
    versions: dict[str, str]
    experiment_sha256: str
    contract_sha256: str
    classes: tuple[str, ...]
    plugins: tuple[PluginIdentity, ...] = ()
    updates_kept: bool
    sites: dict[SiteFileName, ReceiptSite]
    initial_model_sha256: str
    rounds: tuple[ReceiptRound, ...]
    replies: tuple[ReceivedReplyRecord, ...]
    absences: tuple[ReceiptAbsence, ...]
    resumed: int
    result_round: int
    model_sha256: str
    audit: AuditLogEnd = Field(default=AuditLogEnd(entries=0, sha256=""))


def hash_experiment_settings(experiment: Experiment) -> str:
    """Return the SHA-256 of an experiment's values, which does not depend on the layout of its file."""
    return hashlib.sha256(json.dumps(experiment.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def make_run_receipt(entries: Iterable[AuditEntry]) -> RunReceipt:
    """Return the receipt of the last run in an audit log; a round that was repeated after a resume counts once."""
    draft = ReceiptDraft()
    for entry in entries:
        if entry.get("event") == "run":
            draft = ReceiptDraft(_select_entry_specific_fields(entry))
        else:
            draft.add_audit_entry(entry)
    return RunReceipt(
        **draft.fields,
        sites=draft.sites,
        rounds=tuple(draft.rounds[number] for number in sorted(draft.rounds)),
        replies=tuple(draft.replies),
        absences=tuple(draft.absences),
        resumed=draft.resumed,
    )


@dataclass
class ReceiptDraft:
    """A receipt under construction, to which the entries of the audit log are added in order.

    Attributes:
        fields: Fields of the receipt that are copied from audit entries.
        updates: (Round, site) -> hash of the site's update.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    sites: dict[str, ReceiptSite] = field(default_factory=dict)
    rounds: dict[int, ReceiptRound] = field(default_factory=dict)
    updates: dict[tuple[int, str], str] = field(default_factory=dict)
    replies: list[ReceivedReplyRecord] = field(default_factory=list)
    absences: list[ReceiptAbsence] = field(default_factory=list)
    resumed: int = 0

    def add_audit_entry(self, entry: AuditEntry) -> None:
        """Add the content of the next audit entry to the receipt."""
        match entry.get("event"):
            case "resumed" | "rolled_back" as event:
                self.rounds = {number: facts for number, facts in self.rounds.items() if number <= entry["round"]}
                if event == "resumed":
                    self.fields["experiment_sha256"] = entry["experiment_sha256"]  # it may have more rounds now
                    self.resumed += 1
            case "enrolled":
                self._enrol_site(entry)
                self._add_receipt_reply({**entry, "record": RollCallAnswer.__name__, "counts": True})
            case "received":
                self._add_receipt_reply(entry)
                if "sha256" not in entry:
                    self._add_receipt_absence(entry["site"], entry["round"], entry.get("reason", ""))
                elif entry["counts"] and entry["record"] == TrainReply.__name__:
                    self.updates[entry["round"], entry["site"]] = entry["sha256"]
            case "left_out":
                self._add_receipt_absence(entry["site"], entry["round"], entry.get("reason", ""))
            case "aggregated":
                updates = {site: self.updates[entry["round"], site] for site in entry["sites"]}
                facts = {**_select_entry_specific_fields(entry), "sites": updates}
                self.rounds[entry["round"]] = ReceiptRound.model_validate(facts)
                for site, reason in entry["left_out"].items():
                    self._add_receipt_absence(site, entry["round"], reason)
            case "result":
                self.fields |= _select_entry_specific_fields(entry)

    def _enrol_site(self, entry: AuditEntry) -> None:
        """Add a site that answered a roll call, or answered again: after a resume, or with a renewed key."""
        before = self.sites.get(entry["site"])
        key = entry.get("public_key", "")
        old_keys = before.old_public_keys if before else ()
        if before and before.public_key != key:
            old_keys = (*old_keys, before.public_key)
        self.sites[entry["site"]] = ReceiptSite(
            answer_sha256=entry["sha256"],
            joined=min(entry["round"], before.joined) if before else entry["round"],
            public_key=key,
            old_public_keys=old_keys,
            release=entry.get("release", ""),
        )

    def _add_receipt_reply(self, entry: AuditEntry) -> None:
        """Add a reply to the receipt if sites sign this class of record, even if its signature is missing."""
        if entry.get("of_a_hospital") and "sha256" in entry and entry["record"] in NUMBERED_RECORDS:
            values = {name: entry[name] for name in ("site", "record", "round", "sha256", "counts")}
            texts = {name: entry.get(name, "") for name in ("reason", "statement", "signature")}
            self.replies.append(ReceivedReplyRecord(**values, **texts))

    def _add_receipt_absence(self, site: str, exchange: int | str, reason: str) -> None:
        where = f"round {exchange}" if isinstance(exchange, int) else str(exchange)
        self.absences.append(ReceiptAbsence(site=site, where=where, reason=reason))


def write_run_receipt(audit: AuditLog) -> str:
    """Write the receipt of a finished run into its folder.

    Returns:
        The reason why no receipt can be made of the audit log; empty after success.
    """
    log_check = check_audit_log(audit.folder)
    log_end = AuditLogEnd(entries=log_check.entries, sha256=log_check.sha256)
    try:
        receipt = make_run_receipt(audit.read_entries()).model_copy(update={"audit": log_end})
    except (ValidationError, KeyError) as error:
        return f"the audit does not describe a whole run ({type(error).__name__})"
    content = (receipt.model_dump_json(indent=1) + "\n").encode()
    write_atomically(audit.folder / RECEIPT_FILE, content, durable=audit.durable)
    audit.append(event="receipt", sha256=hashlib.sha256(content).hexdigest())
    return ""


def read_run_receipt(path: Path) -> RunReceipt:
    """Return the receipt of a run; its signatures and hashes are not checked.

    Raises:
        BadInput: If the file cannot be read or is not a receipt.
    """
    try:
        return RunReceipt.model_validate_json(path.read_bytes())
    except OSError as error:
        problem = f"cannot be read ({error.strerror})."
        raise BadInput([Fault(str(path), problem, "A run writes it when it is done.")]) from None
    except ValidationError as error:
        raise BadInput(
            Fault(f"{path.name}: {'.'.join(map(str, fault['loc'])) or 'the whole file'}", f"{fault['msg']}: changed.")
            for fault in error.errors()
        ) from None


def _select_entry_specific_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an audit entry, except the fields that every entry has."""
    return {name: value for name, value in entry.items() if name not in ("n", "time", "before", "torn", "event")}
