"""The record of all work that a hospital did for coordinators: one entry a run, from audit log and stored plans.

The hash chain of the audit log is checked first. Facts that only a stored plan has, such as the purpose, are missing
for runs of an old release that did not store plans.
"""

import csv
import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from polyclinic.client.delivery.manifests import DELIVERY_EVENT, read_stored_manifests
from polyclinic.client.site.plans import PlanStore
from polyclinic.common.contract import CONTRACT_RUN
from polyclinic.common.security.audit import AuditEntry, AuditLog, check_audit_log
from polyclinic.common.security.delivery import DELIVERY_RUN, DeliveryManifest
from polyclinic.common.security.plan_decisions import DecisionFault, parse_decision
from polyclinic.common.system.plain_text import format_bytes, format_count_with_noun, make_printable_line
from polyclinic.common.system.terminal import fold_long_words

RECORDS_WITH_MODEL = frozenset({"TrainRequest", "EvaluateRequest", "BenefitRequest"})
"""Classes of request records that contain a model."""
MEMBERSHIP_EVENTS = {"withdrawn": "This hospital left its federation", "withdrawal_undone": "This hospital came back"}
"""Event of the audit log -> sentence about it."""
ENVELOPE_FIELDS = frozenset({"wire", "signature", "run", "round", "site"})
"""Fields that every record has in addition to its content."""
TABLE_WIDTH = 80
_DATE_CHARACTERS = 10
"""Length of the date in an ISO 8601 time."""
_MINUTE_CHARACTERS = 16
"""Length of date, hour and minute in an ISO 8601 time."""


@dataclass
class SentRecordTotals:
    """Number and size of the records of one class that the site sent in a run.

    Attributes:
        first, last: UTC times of the first and of the last record.
        fields: Names of the fields that were not empty; docs/what-leaves.md explains each.
    """

    count: int = 0
    bytes: int = 0
    first: str = ""
    last: str = ""
    fields: list[str] = field(default_factory=list)


@dataclass
class RunRecord:
    """One run in a hospital's record.

    Attributes:
        kind: ``training``; ``comparison`` for a comparison of the sites' settings before a run; ``delivery`` of a
            finished model; or the kind of another stored text, such as ``count``.
        plan: SHA-256 of the plan's text at the last roll call; empty for a run of a release that stored none.
        authority: SHA-256 of the public key of the coordinator's authority.
        images: Numbers of images at the last roll call that the hospital answered: ``train``, ``validation``, ``test``,
            and ``unreadable`` for images that were left out.
        patients_opted_out: Patients who had opted out at the last work for the run.
        rounds: Numbers of the rounds in which the hospital sent an update.
        left: Record class -> number and size of the records that the site sent.
        received_bytes, sent_bytes: Sizes of all records that the policy allowed to come in and to leave.
        model: Record class, round, time, bytes and SHA-256 of the last request with a model, as in the audit log and
            in the coordinator's signature; empty if none came. For a delivery: the run and SHA-256 of the model.
        epsilon: The privacy budget that the run used; None without noise.
        approvals: Each approval under which the site worked for the run: approver, key, until, decision.
        denials: Each denial of the plan, oldest first: approver, key, time, reason.
        refused: Rule of the policy -> number of requests that it refused.
    """

    run: str
    title: str = ""
    purpose: str = ""
    kind: str = "training"
    coordinator: str = ""
    authority: str = ""
    first: str = ""
    last: str = ""
    plan: str = ""
    images: dict[str, int] = field(default_factory=dict)
    patients_opted_out: int = 0
    rounds: list[int] = field(default_factory=list)
    left: dict[str, SentRecordTotals] = field(default_factory=dict)
    received_bytes: int = 0
    sent_bytes: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    approvals: list[dict[str, str]] = field(default_factory=list)
    denials: list[dict[str, str]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def approvers(self) -> str:
        return ", ".join(dict.fromkeys(approval["approver"] for approval in self.approvals))


@dataclass(frozen=True)
class HospitalRecord:
    """All runs of a hospital, and the result of the check of the audit log's hash chain.

    Attributes:
        check: A sentence with the result of the check.
        faults: Faults of the chain; empty if the chain is unbroken.
        departures: Event, time and reason of each withdrawal from the federation and of each return.
        models: Run, title, coordinator, time of the coordinator's signature and SHA-256 of each finished model that the
            site stores.
    """

    runs: tuple[RunRecord, ...]
    check: str
    faults: tuple[str, ...]
    departures: tuple[dict[str, str], ...] = ()
    models: tuple[dict[str, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "audit": self.check,
            "faults": list(self.faults),
            "runs": [asdict(run) for run in self.runs],
            "departures": list(self.departures),
            "models": list(self.models),
        }


def read_hospital_record(state: Path, study: str = "") -> HospitalRecord:
    """Read the record of a hospital, after a check of its audit log.

    Args:
        state: The site's state folder.
        study: Text that the title of a run must contain, in any case of letters; empty for all runs.
    """
    findings = check_audit_log(state)
    faults = tuple(map(str, findings.faults))
    counted = format_count_with_noun(findings.entries, "entry", "entries")
    check = f"The audit log has {counted}, unbroken; the last one's SHA-256 is {findings.sha256}."
    if faults:
        check = f"The audit log is NOT whole: {format_count_with_noun(len(faults), 'fault')} in {counted}."
    entries = list(AuditLog(state).read_entries())
    runs = _collect_runs(entries)
    store = PlanStore(state)
    for run in runs.values():
        _add_facts_of_plan(run, store)
    runs_of_study = tuple(run for run in runs.values() if study.casefold() in run.title.casefold())
    models = tuple(_describe_model(manifest) for manifest in read_stored_manifests(state))
    models_of_study = tuple(model for model in models if study.casefold() in model["title"].casefold())
    return HospitalRecord(runs_of_study, check, faults, tuple(_list_departures(entries)), models_of_study)


def _describe_model(manifest: DeliveryManifest) -> dict[str, str]:
    return {
        "run": manifest.run,
        "title": manifest.title,
        "coordinator": make_printable_line(manifest.coordinator),
        "signed": manifest.time,
        "sha256": manifest.model_sha256,
    }


def _list_departures(entries: Iterable[AuditEntry]) -> Iterator[dict[str, str]]:
    for entry in entries:
        if (event := entry.get("event")) in MEMBERSHIP_EVENTS:
            yield {"event": str(event), "time": str(entry.get("time", "")), "reason": str(entry.get("reason", ""))}


def _collect_runs(entries: Iterable[AuditEntry]) -> dict[str, RunRecord]:
    runs = dict[str, RunRecord]()
    opted_out = 0
    for entry in entries:
        if entry.get("event") == "patients":
            opted_out = int(entry.get("opted_out", opted_out))
        name = str(entry.get("run", ""))
        if entry.get("event") == DELIVERY_EVENT and name in runs:
            _add_delivered_model(runs[name], entry)
        if not name or "direction" not in entry:
            continue
        run = runs.setdefault(name, RunRecord(name, first=str(entry.get("time", ""))))
        run.last = str(entry.get("time", ""))
        if name.startswith(CONTRACT_RUN):
            run.kind = "comparison"
        if name.startswith(DELIVERY_RUN):
            run.kind = "delivery"
        if entry.get("decision") != "allow":
            rule = str(entry.get("rule", ""))
            run.refused[rule] = run.refused.get(rule, 0) + 1
            run.title = run.title or str(entry.get("name", ""))
            run.plan = run.plan or str(entry.get("plan", ""))
        elif entry["direction"] == "in":
            _add_received_record(run, entry)
            run.patients_opted_out = opted_out
        else:
            _add_sent_record(run, entry)
    return runs


def _add_delivered_model(run: RunRecord, entry: AuditEntry) -> None:
    run.title = str(entry.get("name", ""))
    run.coordinator = str(entry.get("coordinator", ""))
    run.model = dict(entry.get("model", {}))


def _add_received_record(run: RunRecord, entry: AuditEntry) -> None:
    run.received_bytes += int(entry.get("bytes", 0))
    run.title = str(entry.get("name", "")) or run.title
    run.plan = str(entry.get("plan", "")) or run.plan
    run.images = dict(entry.get("images", run.images))
    approval = entry.get("approval")
    if isinstance(approval, Mapping) and dict(approval) not in run.approvals:
        run.approvals.append(dict(approval))
    if entry.get("record") in RECORDS_WITH_MODEL:
        run.model = {key: entry.get(key) for key in ("record", "round", "time", "bytes", "sha256")}


def _add_sent_record(run: RunRecord, entry: AuditEntry) -> None:
    record = str(entry.get("record", ""))
    size = int(entry.get("bytes", 0))
    totals = run.left.setdefault(record, SentRecordTotals(first=str(entry.get("time", ""))))
    totals.count += 1
    totals.bytes += size
    totals.last = str(entry.get("time", ""))
    named = [_strip_part_name(str(name)) for name, _, length in entry.get("fields", ()) if length]
    totals.fields = list(dict.fromkeys([*totals.fields, *(name for name in named if name not in ENVELOPE_FIELDS)]))
    run.sent_bytes += size
    if record == "TrainReply" and entry.get("round"):
        run.rounds.append(int(entry["round"]))
    run.epsilon = entry.get("epsilon", run.epsilon)


def _strip_part_name(name: str) -> str:
    """Return the name of a record's field without the part of it: ``update.trunk/0`` gives ``update``."""
    return name.partition("/")[0].partition(".")[0]


def _add_facts_of_plan(run: RunRecord, store: PlanStore) -> None:
    stored = store.read_text(run.plan) if run.plan else None
    if stored is None:
        return
    run.coordinator = stored.facts.coordinator
    run.authority = stored.facts.authority
    if run.kind != "comparison":
        run.kind = stored.facts.kind
    run.title = run.title or stored.title
    run.purpose = stored.purpose
    run.denials = list(_list_denials(run.plan, store))


def _list_denials(sha256: str, store: PlanStore) -> Iterator[dict[str, str]]:
    for path in store.list_decisions(sha256):
        try:
            decision, _ = parse_decision(path.read_bytes())
        except (OSError, DecisionFault):  # "flwr-client plans show" names the file and its fault
            continue
        if not decision.is_approval:
            yield decision.model_dump(include={"approver", "key", "time", "reason"})


# ---------------------------------------------------------------------- for people


def format_record_table(record: HospitalRecord) -> Table:
    """Format the record as a table of at most 80 columns, one row for each run."""
    table = fold_long_words(
        Table("from", "study", "asked by", "images", "rounds", "sent", "approved by", width=TABLE_WIDTH)
    )
    for run in record.runs:
        images = str(run.images.get("train", "")) if run.left.keys() - {"Error"} else "none"
        table.add_row(
            run.first[:_DATE_CHARACTERS],
            Text(make_printable_line(run.title or run.run[:8])),
            Text(make_printable_line(run.coordinator)),
            images,
            str(len(run.rounds)) if run.kind == "training" else run.kind,
            format_bytes(run.sent_bytes),
            Text(make_printable_line(run.approvers or "–")),
        )
    return table


def describe_run(run: RunRecord) -> list[str]:
    """Return lines about one run: coordinator, plan, images, approvals, sent records, and the last received model."""
    title = make_printable_line(run.title or "no title")
    kind = "run" if run.kind == "training" else run.kind
    period = f"{_format_minute(run.first)} to {_format_minute(run.last)} UTC"
    lines = [f"{title} ({kind} {run.run.rpartition('-')[2][:8]}), {period}"]
    if run.kind == "training":
        lines.append(f"  purpose: {run.purpose or 'not stated'}")
    lines.append(f"  coordinator: {make_printable_line(run.coordinator) or 'not recorded'}")
    lines += [f"    key SHA256 {run.authority}"] if run.authority else []
    lines += [f"  plan: {run.plan}"] if run.plan else []

    if run.images:
        used = ", ".join(f"{run.images.get(part, 0):,} {part}" for part in ("train", "validation", "test"))
        left_out = f"{run.images.get('unreadable', 0):,} unreadable, {run.patients_opted_out:,} patients opted out"
        lines.append(f"  images: {used}")
        lines.append(f"  left out: {left_out}")

    for approval in run.approvals:
        lines.append(
            f"  approved by {make_printable_line(approval['approver'])} until {approval['until'][:_DATE_CHARACTERS]},"
        )
        lines.append(f"    key {approval['key']}")
    for denial in run.denials:
        reason = make_printable_line(denial["reason"] or "no reason given", 500)
        lines.append(f"  denied by {make_printable_line(denial['approver'])}, {_format_minute(denial['time'])} UTC,")
        lines.append(f"    key {denial['key']}")
        lines += textwrap.wrap(f"reason: {reason}", TABLE_WIDTH, initial_indent="    ", subsequent_indent="    ")

    trained = f"trained: {format_count_with_noun(len(run.rounds), 'round')}; " if run.kind == "training" else ""
    lines.append(f"  {trained}received {run.received_bytes:,} bytes, sent {run.sent_bytes:,}")
    for name, left in run.left.items():
        lines.append(f"  left: {left.count} x {name}, {left.bytes:,} bytes, last {_format_minute(left.last)}")
        fields = ", ".join(map(make_printable_line, left.fields))
        lines += textwrap.wrap(fields, TABLE_WIDTH, initial_indent="    ", subsequent_indent="    ")

    if run.model and run.kind == "delivery":
        lines.append(f"  model received: that of run {run.model.get('run')}, SHA-256")
        lines.append(f"    {run.model.get('sha256')}")
    elif run.model:
        lines.append(f"  last model received: round {run.model['round']}, in the record with SHA-256")
        lines.append(f"    {run.model['sha256']}")
    if run.epsilon is not None:
        lines.append(f"  privacy budget used: epsilon {run.epsilon:.2f}")
    lines += [f"  refused: {count} x {rule}" for rule, count in run.refused.items()]
    return lines


def describe_departures_and_models(record: HospitalRecord) -> list[str]:
    """Return lines about each withdrawal from the federation, each return, and each finished model stored here."""
    lines = []
    for departure in record.departures:
        reason = f": {make_printable_line(departure['reason'])}" if departure["reason"] else ""
        lines.append(f"{MEMBERSHIP_EVENTS[departure['event']]}, {_format_minute(departure['time'])} UTC{reason}")
    for model in record.models:
        lines.append(f"A model lies here: {model['title']}, of the coordinator {model['coordinator']},")
        lines.append(f"  signed {_format_minute(model['signed'])} UTC; run {model['run']}")
        lines.append(f"  SHA-256 {model['sha256']}")
    return lines


def _format_minute(time: str) -> str:
    return time[:_MINUTE_CHARACTERS].replace("T", " ")


CSV_COLUMNS = (
    *("run", "kind", "title", "purpose", "coordinator", "authority", "first", "last", "plan"),
    *("train_images", "validation_images", "test_images", "unreadable_images", "patients_opted_out"),
    *("rounds", "received_bytes", "sent_bytes", "records_left", "model_sha256", "epsilon"),
    *("approved_by", "approved_until", "approver_keys", "denied_by", "refused"),
)


def format_record_csv(record: HospitalRecord) -> str:
    """Format the record as csv, one line for each run."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in record.runs:
        row: dict[str, Any] = {name: getattr(run, name) for name in CSV_COLUMNS if hasattr(run, name)}
        row |= {f"{part}_images": run.images.get(part, "") for part in ("train", "validation", "test", "unreadable")}
        row |= {
            "rounds": len(run.rounds),
            "records_left": "; ".join(f"{name} {left.count}" for name, left in run.left.items()),
            "model_sha256": run.model.get("sha256", ""),
            "epsilon": "" if run.epsilon is None else run.epsilon,
            "approved_by": run.approvers,
            "approved_until": "; ".join(approval["until"] for approval in run.approvals),
            "approver_keys": "; ".join(dict.fromkeys(approval["key"] for approval in run.approvals)),
            "denied_by": "; ".join(f"{denial['approver']}: {denial['reason']}" for denial in run.denials),
            "refused": "; ".join(f"{rule} {count}" for rule, count in run.refused.items()),
        }
        writer.writerow({name: _escape_for_spreadsheet(value) for name, value in row.items()})
    return file.getvalue()


def _escape_for_spreadsheet(value: Any) -> Any:
    """Return ``value``; put an apostrophe before a text that a spreadsheet would evaluate as a formula."""
    if isinstance(value, str):
        value = make_printable_line(value, 2000)
        return f"'{value}" if value[:1] in ("=", "+", "-", "@") else value
    return value
