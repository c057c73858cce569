"""Approval or denial of a stored plan by a person: checks of the form, the signed decision, and a plan's state."""

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

from polyclinic.client.site.approvals import DENIED_RULE, MISSING_RULE, ApprovalVerdict, select_disclosure_policy
from polyclinic.client.site.plans import PlanStore, StoredText
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.security.identity import compute_public_key_fingerprint, is_same_public_key
from polyclinic.common.security.plan_decisions import (
    DecisionFault,
    PlanDecision,
    read_sealed_approver_key,
    sign_decision,
)
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import format_utc_now, is_plain_text

MAX_REASON_CHARACTERS = 500
MAX_DAYS_WITHOUT_NOTICE = 366  # a whole year, also a leap year
APPROVER_KEY_SUFFIX = ".approver"
"""Ending of the file with an approver's private key."""


@dataclass(frozen=True)
class TypedDecision:
    """The text fields that a person fills in to approve or deny a plan.

    Attributes:
        approver: Name of the person, as in ``[approvers]`` of ``site.toml``.
        until: Last day of the approval, ``YYYY-MM-DD``; empty for a denial.
        purpose: The purpose in the person's words; if empty, the purpose that the plan states is used.
        reason: Why the plan is denied; empty for an approval.
    """

    approver: str
    until: str = ""
    purpose: str = ""
    reason: str = ""


def find_key_file(settings: SiteSettings, approver: str, given: Path | None = None) -> Path:
    """Return the path of an approver's private key.

    Without ``given``, the file NAME.approver is looked for in the current folder, then in the site's folder.

    Raises:
        BadInput: If no file exists.
    """
    if given is not None:
        return given
    try:
        name = PlainName(approver)
    except ValueError:
        raise BadInput([Fault("--key", "is missing.", "Name the approver's key: --key FILE.")]) from None
    paths = [join_plain_name(folder, name, APPROVER_KEY_SUFFIX) for folder in (Path(), settings.folder)]
    for path in paths:
        if path.is_file():
            return path
    problem = f"the key of {approver} is not there."
    raise BadInput([Fault(str(paths[0]), problem, "Name its file with --key FILE.")])


def find_decision_faults(settings: SiteSettings, typed: TypedDecision, *, approves: bool) -> list[Fault]:
    """Return the faults of a decision: unknown approver, text that is not one plain line, no reason, or wrong date."""
    faults = list[Fault]()
    approvers = settings.file.approvers
    if typed.approver not in approvers:
        problem = f"{typed.approver or 'nobody'} is not in [approvers] of site.toml"
        names = f": there is {quote_names(approvers)}." if approvers else ", which has nobody."
        faults.append(Fault("--as", problem + names, "flwr-client approvers add NAME makes a key and prints the line."))
    for option, text in (("--purpose", typed.purpose), ("--reason", typed.reason)):
        if len(text) > MAX_REASON_CHARACTERS or not is_plain_text(text):
            faults.append(Fault(option, f"must be one line of at most {MAX_REASON_CHARACTERS} characters."))
    if not approves and not typed.reason.strip():
        faults.append(Fault("--reason", "is missing.", "Say why, for those who read the record later."))
    if approves:
        faults += _find_end_date_faults(typed.until)
    return faults


def _find_end_date_faults(until: str) -> list[Fault]:
    try:
        end = parse_last_day(until)
    except ValueError:
        return [Fault("--until", f'is "{until}", not a date.', "Write year, month and day: 2027-06-30.")]
    if end < dt.datetime.now(dt.UTC):
        return [Fault("--until", f"{until} is over: nothing would be approved.", "Name a later day.")]
    return []


def parse_last_day(text: str) -> dt.datetime:
    """Return the end of a day ``YYYY-MM-DD``, in this machine's time zone, as UTC time.

    Raises:
        ValueError: If the text is no such date.
    """
    day = dt.date.fromisoformat(text)
    return dt.datetime.combine(day, dt.time(23, 59, 59)).astimezone(dt.UTC)


def is_longer_than_a_year(until: str) -> bool:
    """Return True if an approval until the day ``until`` lasts longer than a year; such an approval is valid."""
    return parse_last_day(until) > dt.datetime.now(dt.UTC) + dt.timedelta(days=MAX_DAYS_WITHOUT_NOTICE)


def decide_on_text(
    settings: SiteSettings, stored: StoredText, typed: TypedDecision, key_file: Path, passphrase: str
) -> PlanDecision:
    """Sign a decision with the approver's key, and store it; an approval if ``typed`` has a date, else a denial.

    Raises:
        BadInput: If a field of ``typed``, the key file or the passphrase is wrong; it lists every fault.
    """
    approves = bool(typed.until)
    raise_faults(find_decision_faults(settings, typed, approves=approves))
    sealed = read_sealed_approver_key(key_file)
    line = settings.file.approvers[typed.approver]
    if not is_same_public_key(sealed.public_key, line):
        problem = f"is not the key that [approvers] of site.toml has for {typed.approver}."
        raise BadInput([Fault(str(key_file), problem, "Name the right file with --key FILE.")])
    try:
        key = sealed.open_with(passphrase)
    except DecisionFault as fault:
        raise BadInput([Fault(str(key_file), f"cannot be opened: {fault}.", "Type the passphrase again.")]) from None
    decision = PlanDecision(
        decision="approved" if approves else "denied",
        kind=stored.facts.kind,
        sha256=stored.sha256,
        site=settings.file.name,
        coordinator=stored.facts.coordinator,
        authority=stored.facts.authority,
        title=stored.title,
        purpose=typed.purpose.strip() or stored.purpose,
        approver=typed.approver,
        key=compute_public_key_fingerprint(line),
        time=format_utc_now(),
        until=parse_last_day(typed.until).isoformat() if approves else "",
        reason="" if approves else typed.reason.strip(),
        policy=select_disclosure_policy(settings.file.policy),
    )
    PlanStore(settings.state_folder).add_decision(stored.sha256, sign_decision(decision, key))
    return decision


def describe_state(verdict: ApprovalVerdict) -> str:
    """Return the state of a plan in a few words, such as "waits for approval" or "approved by NAME until DAY"."""
    if not verdict.reason:
        return f"approved by {verdict.facts['approver']} until {format_last_day(verdict.facts['until'])}"
    if verdict.rule == MISSING_RULE:
        return "waits for approval"
    return verdict.reason if verdict.rule == DENIED_RULE else f"not approved: {verdict.reason}"


def format_last_day(until: str) -> str:
    """Return an approval's last day, ``YYYY-MM-DD``, in this machine's time zone.

    Args:
        until: End of the approval, ISO 8601 with a time zone.
    """
    return dt.datetime.fromisoformat(until).astimezone().date().isoformat()
