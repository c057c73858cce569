"""The approval that each request needs at a site whose policy says ``approval = "required"``.

A person whose public key is in ``[approvers]`` of ``site.toml`` approves the text of a run, by its hash, until a date.
The newest decision on a text counts. It is verified again at every request, with the keys that the file has then. So a
request is refused if a byte of the text or of the decision has changed, if the date is over, if the text was denied, or
if the approver was removed.

The last time in the audit log is a lower bound of the present time: an approval that has expired stays expired if the
clock is set back.

An account that can write to the site's folder can add another approver. This module does not protect against that.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polyclinic.client.site.plans import (
    MAX_TEXT_BYTES,
    PlanStore,
    read_coordinator_identity,
    read_request_text,
    store_request_text,
)
from polyclinic.client.site.run_entries import RunEntryFolder
from polyclinic.client.site.site_file import SiteSettings, read_site_toml_without_data
from polyclinic.common.errors import BadInput
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.security.plan_decisions import (
    DecisionFault,
    PlanDecision,
    compute_decision_hash,
    parse_decision,
    verify_decision,
)
from polyclinic.common.system.plain_names import RunName
from polyclinic.common.system.plain_text import join_first_and_count

if TYPE_CHECKING:
    from polyclinic.client.site.policy import SitePolicy
    from polyclinic.client.site.site import Site

MISSING_RULE = "approval.missing"
"""Rule for a text on which nobody has decided."""
DENIED_RULE = "approval.denied"
"""Rule for a text that a person has denied."""
RECORDS_WITHOUT_WORK = frozenset({"Refusal", "Question", "DeliveryRequest"})
"""Classes of records that ask for no work on images; a delivery is the package of a finished run."""
SECURE_AGGREGATION_RECORDS = frozenset({"KeysRequest", "SharesRequest", "MaskedRequest", "RevealRequest"})
"""Classes of secure aggregation's records: they have no text, and belong to a run whose text came before."""
APPROVED_RUNS_FOLDER = "approved-runs"
"""Folder with a small file for each approved run, which names the text by which it was approved."""
OLD_APPROVED_RUNS_FILE = "approved-runs.json"
"""File that no release wrote; :class:`RunEntryFolder` wants the name of a file of an earlier release."""
DISCLOSURE_KEYS = (
    *("level", "parts", "statistics", "maximum_update_norm", "training_figures", "test_metrics", "test_each_round"),
    *("label_counts", "score_histograms", "smallest_count", "round_counts_to", "train_hidden_classes"),
    *("masked_only", "smallest_cohort", "rows_alone", "honest_sites", "metrics"),
    *("epsilon", "delta", "privacy_unit", "metrics_outside_privacy", "counts", "counts_epsilon"),
    "evaluate",
)
"""Keys of the policy that decide what leaves. An approval ends if one of their values changes."""


@dataclass(frozen=True)
class ApprovalVerdict:
    """The deciding rule, and its reason against a request; the reason is empty if the request is approved.

    Attributes:
        sha256: Hash of the text; empty if the request has none.
        facts: Facts of an approval for the audit log: approver, key, last day, and hash of the decision's file.
    """

    rule: str
    reason: str = ""
    sha256: str = ""
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def select_disclosure_policy(policy: "SitePolicy") -> dict[str, Any]:
    """Return the keys of a policy that decide what leaves, as JSON values."""
    return policy.model_dump(mode="json", include=set(DISCLOSURE_KEYS))


class SiteApprovals:
    """Decides if people at the hospital have approved a request.

    Args:
        folder: The site's folder, with ``site.toml``.
        state: The site's state folder.
        site: The site's name.
        policy: The policy that the running program uses.
    """

    def __init__(self, folder: Path, state: Path, site: str, policy: "SitePolicy") -> None:
        self._folder = folder
        self._state = state
        self._site = site
        self._disclosure = select_disclosure_policy(policy)
        # Hash -> kind and deciding rule of the texts that were refused since the program started; the latest is last.
        self._refused_texts: dict[str, tuple[str, str]] = {}
        self._runs = RunEntryFolder(state / APPROVED_RUNS_FOLDER, state / OLD_APPROVED_RUNS_FILE)
        self.store = PlanStore(state)

    @classmethod
    def from_settings(cls, settings: SiteSettings) -> "SiteApprovals":
        """Make the object for a site with these settings."""
        return cls(settings.folder, settings.state_folder, settings.file.name, settings.file.policy)

    def decide_on_request(self, fields: Mapping[str, Any], site: "Site") -> ApprovalVerdict:
        """Return the verdict on a request, and store its text if it is new.

        Args:
            fields: The small fields of the request's record.
        """
        record = str(fields.get("wire.record"))
        run = str(fields.get("run", ""))
        if record in RECORDS_WITHOUT_WORK:
            return ApprovalVerdict("approval")
        if record in SECURE_AGGREGATION_RECORDS:
            approved = self._runs.read_entry(run)
            if approved is None:
                return ApprovalVerdict(MISSING_RULE, "nothing of this run was approved")
            return self.find_verdict(str(approved.get("kind")), str(approved.get("text")))
        request = read_request_text(fields)
        if request is None:
            return ApprovalVerdict("approval.kind", f"nobody can approve a {record} in this release")
        verdict = self.find_verdict(request.kind, request.sha256)
        if request.is_too_large:
            return ApprovalVerdict("approval.size", f"it has more than {MAX_TEXT_BYTES:,} bytes", request.sha256)
        store_request_text(site, request)
        if verdict.reason:
            self._refused_texts.pop(request.sha256, None)
            self._refused_texts[request.sha256] = (request.kind, verdict.rule)
        else:
            self._record_approved_run(run, {"kind": request.kind, "text": str(request.sha256)})
        return verdict

    def _record_approved_run(self, run: str, approved: dict[str, str]) -> None:
        """Store the text by which a run was approved, for requests of the run that have no text."""
        # The request's handler refuses a run with another kind of name.
        if RunName.pattern.fullmatch(run) and self._runs.read_entry(run) != approved:
            self._runs.write_entry(run, approved)

    @property
    def latest_refused_text(self) -> str:
        """Hash of the last text that was refused since the program started; empty if there is none."""
        return next(reversed(self._refused_texts), "")

    def find_new_decisions(self) -> dict[str, ApprovalVerdict]:
        """Return the verdicts on refused texts that were approved or denied since their last request, each once."""
        new_verdicts = dict[str, ApprovalVerdict]()
        for sha256, (kind, earlier_rule) in self._refused_texts.items():
            verdict = self.find_verdict(kind, sha256)
            # An older denial is not new: the coordinator knows it already.
            is_new_denial = verdict.rule == DENIED_RULE and earlier_rule != DENIED_RULE
            if is_new_denial or not verdict.reason:
                new_verdicts[sha256] = verdict
        for sha256 in new_verdicts:
            del self._refused_texts[sha256]
        return new_verdicts

    def find_verdict(self, kind: str, sha256: str) -> ApprovalVerdict:
        """Verify the newest decision on a text, and return its verdict."""
        decisions = self.store.list_decisions(sha256)
        if not decisions:
            return ApprovalVerdict(MISSING_RULE, "nobody here has approved it", sha256)
        try:
            content = decisions[-1].read_bytes()
            approvers = self._read_approvers()
        except OSError as error:
            return ApprovalVerdict("approval.file", f"a file cannot be read: {error.strerror}", sha256)
        except BadInput as bad:
            return ApprovalVerdict("approval.file", f"site.toml cannot be read: {bad.faults[0].where}", sha256)
        try:
            decision = verify_decision(content, approvers)
        except DecisionFault as fault:
            if _is_denial(content):  # a denial stays valid if the person is no approver any more
                return ApprovalVerdict(DENIED_RULE, "it was denied", sha256)
            return ApprovalVerdict("approval.signature", str(fault), sha256)
        rule, reason = self._find_fault(decision, kind, sha256)
        facts = {"approver": decision.approver, "key": decision.key, "until": decision.until}
        return ApprovalVerdict(rule, reason, sha256, facts | {"decision": compute_decision_hash(content)})

    def _find_fault(self, decision: PlanDecision, kind: str, sha256: str) -> tuple[str, str]:
        """Return the rule that a signed decision breaks, and the reason, which is empty for a valid approval."""
        if not decision.is_approval:
            return DENIED_RULE, f"{decision.approver} denied it: {decision.reason or 'no reason given'}"
        if (decision.kind, decision.sha256) != (kind, sha256):
            return "approval.plan", "the approval is of another plan: its file was copied here"
        if decision.site != self._site:
            return "approval.site", f"the approval is of the site {decision.site}"
        if decision.authority != read_coordinator_identity(self._state)[1]:
            return "approval.coordinator", f"the approval is for another coordinator ({decision.coordinator})"
        if self._read_present_time() > decision.end:
            return "approval.expired", f"{decision.approver} approved it until {decision.until}"
        changed = [key for key, value in decision.policy.items() if self._disclosure.get(key) != value]
        if changed:
            return "approval.policy", f"since the approval, policy.{changed[0]} has changed: more may leave"
        return "approval", ""

    def describe_start(self) -> str:
        """Return a sentence that names the approvers, for the log at the program's start."""
        names = join_first_and_count(sorted(self._read_approvers()))
        sentence = (
            f"{names} can give it" if names else "NOBODY can: [approvers] of site.toml is empty, and nothing will run"
        )
        return f"each plan needs an approval; {sentence}"

    def _read_approvers(self) -> dict[str, str]:
        return read_site_toml_without_data(self._folder).file.approvers

    def _read_present_time(self) -> dt.datetime:
        now = dt.datetime.now(dt.UTC)
        entry = AuditLog(self._state).read_last_entry()
        try:
            last = dt.datetime.fromisoformat(str((entry or {}).get("time")))
            return max(now, last)
        except (ValueError, TypeError):  # the log has no entry, or its last entry has no valid time
            return now


def _is_denial(content: bytes) -> bool:
    try:
        return not parse_decision(content)[0].is_approval
    except DecisionFault:
        return False
