"""The approval that each request needs at a site whose policy says ``approval = "required"``.

A person whose public key stands in ``[approvers]`` of ``site.toml`` approves the text of a run, by its hash, until a
date. The newest decision on a text counts. It is verified again at every request, with the keys that the file has
then. So a request is refused after a byte of the text or of the decision has changed, after the date, after a denial,
and after the approver was removed.

The last time in the audit log is a lower bound of the present time: an approval that has expired stays expired if the
clock is set back.

An account that can write to the site's folder can add an approver of its own. Nothing here protects against it.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polyclinic.client.site.plans import (
    MOST_TEXT_BYTES,
    PlanStore,
    read_authority,
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

MISSING, DENIED = "approval.missing", "approval.denied"
"""Rules of a text on which nobody has decided, and of one that a person has denied."""
ASKS_NOTHING = frozenset({"Refusal", "Question", "DeliveryRequest"})
"""Records for a site's staff, which ask for no work on its images; a delivery is a finished run's package."""
PARTS_OF_ROUND = frozenset({"KeysRequest", "SharesRequest", "MaskedRequest", "RevealRequest"})
"""Records without a text of their own: stages of secure aggregation, in a run whose text came before."""
RUNS, EARLIER_RUNS = "approved-runs", "approved-runs.json"
"""Folder with a small file for each run that was approved: by which text. No release had all of them in one file."""
DISCLOSURE_KEYS = (
    *("level", "parts", "statistics", "maximum_update_norm", "training_figures", "test_metrics", "test_each_round"),
    *("label_counts", "score_histograms", "smallest_count", "round_counts_to", "train_hidden_classes"),
    *("masked_only", "smallest_cohort", "rows_alone", "honest_sites", "metrics"),
    *("epsilon", "delta", "privacy_unit", "metrics_outside_privacy", "counts", "counts_epsilon"),
    "evaluate",
)
"""Keys of the policy that decide what leaves. An approval holds while they have the values that the approver saw."""


@dataclass(frozen=True)
class ApprovalVerdict:
    """The deciding rule, and its reason against a request; the reason is empty if the request is approved.

    Attributes:
        sha256: Hash of the text; empty if the request has none.
        facts: Of an approved request, for the audit: who approved it with which key, until when, by which file.
    """

    rule: str
    reason: str = ""
    sha256: str = ""
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def select_disclosure_policy(policy: "SitePolicy") -> dict[str, Any]:
    """Return the keys of a policy that decide what leaves, as JSON values."""
    return policy.model_dump(mode="json", include=set(DISCLOSURE_KEYS))


class SiteApprovals:
    """Decides whether people at the hospital have approved what a request asks for.

    Args:
        folder: The site's folder, with ``site.toml``.
        state: The site's state folder.
        site: The site's name.
        policy: The policy with which the program runs.
    """

    def __init__(self, folder: Path, state: Path, site: str, policy: "SitePolicy") -> None:
        self._folder, self._state, self._site = folder, state, site
        self._disclosure = select_disclosure_policy(policy)
        # Hash -> kind and deciding rule of the texts that were refused since the program started; the latest is last.
        self._refused_texts: dict[str, tuple[str, str]] = {}
        self._runs = RunEntryFolder(state / RUNS, state / EARLIER_RUNS)
        self.store = PlanStore(state)

    @classmethod
    def from_settings(cls, settings: SiteSettings) -> "SiteApprovals":
        """Return the object that decides about requests at the site of this folder."""
        return cls(settings.folder, settings.state_folder, settings.file.name, settings.file.policy)

    def decide_on_request(self, fields: Mapping[str, Any], site: "Site") -> ApprovalVerdict:
        """Return the verdict on a request, and store its text if it is new.

        Args:
            fields: The small fields of the request's record.
        """
        record, run = str(fields.get("wire.record")), str(fields.get("run", ""))
        if record in ASKS_NOTHING:
            return ApprovalVerdict("approval")
        if record in PARTS_OF_ROUND:
            approved = self._runs.read_entry(run)
            if approved is None:
                return ApprovalVerdict(MISSING, "nothing of this run was approved")
            return self.find_verdict(str(approved.get("kind")), str(approved.get("text")))
        request = read_request_text(fields)
        if request is None:
            return ApprovalVerdict("approval.kind", f"nobody can approve a {record} in this release")
        verdict = self.find_verdict(request.kind, request.sha256)
        if request.is_too_large:
            return ApprovalVerdict("approval.size", f"it has more than {MOST_TEXT_BYTES:,} bytes", request.sha256)
        store_request_text(site, request)
        if verdict.reason:
            self._refused_texts.pop(request.sha256, None)
            self._refused_texts[request.sha256] = (request.kind, verdict.rule)
        else:
            self._record_approved_run(run, {"kind": request.kind, "text": str(request.sha256)})
        return verdict

    def _record_approved_run(self, run: str, approved: dict[str, str]) -> None:
        """Store by which text a run was approved, for its requests that have no text of their own."""
        # The handler of the request refuses a run with another name.
        if RunName.pattern.fullmatch(run) and self._runs.read_entry(run) != approved:
            self._runs.write_entry(run, approved)

    @property
    def latest_refused_text(self) -> str:
        """Hash of the text that was refused last since the program started; empty if there is none."""
        return next(reversed(self._refused_texts), "")

    def find_new_decisions(self) -> dict[str, ApprovalVerdict]:
        """Return the verdicts on refused texts that were approved or denied since their last request, each once."""
        decided = dict[str, ApprovalVerdict]()
        for sha256, (kind, earlier_rule) in self._refused_texts.items():
            verdict = self.find_verdict(kind, sha256)
            # A text that was denied already stays so: the coordinator knows it.
            is_new_denial = verdict.rule == DENIED != earlier_rule
            if is_new_denial or not verdict.reason:
                decided[sha256] = verdict
        for sha256 in decided:
            del self._refused_texts[sha256]
        return decided

    def find_verdict(self, kind: str, sha256: str) -> ApprovalVerdict:
        """Return the verdict on a text: that of the newest decision on it, verified now."""
        decisions = self.store.list_decisions(sha256)
        if not decisions:
            return ApprovalVerdict(MISSING, "nobody here has approved it", sha256)
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
            if _is_denial(content):  # of a person who is no approver any more: it stays one
                return ApprovalVerdict(DENIED, "it was denied", sha256)
            return ApprovalVerdict("approval.signature", str(fault), sha256)
        rule, reason = self._find_fault(decision, kind, sha256)
        facts = {"approver": decision.approver, "key": decision.key, "until": decision.until}
        return ApprovalVerdict(rule, reason, sha256, facts | {"decision": compute_decision_hash(content)})

    def _find_fault(self, decision: PlanDecision, kind: str, sha256: str) -> tuple[str, str]:
        """Return the rule that a signed decision breaks, and the reason; the reason is empty if it is an approval."""
        if not decision.is_approval:
            return DENIED, f"{decision.approver} denied it: {decision.reason or 'no reason given'}"
        if (decision.kind, decision.sha256) != (kind, sha256):
            return "approval.plan", "the approval is of another plan: its file was copied here"
        if decision.site != self._site:
            return "approval.site", f"the approval is of the site {decision.site}"
        if decision.authority != read_authority(self._state)[1]:
            return "approval.coordinator", f"the approval is for another coordinator ({decision.coordinator})"
        if self._read_present_time() > decision.end:
            return "approval.expired", f"{decision.approver} approved it until {decision.until}"
        changed = [key for key, value in decision.policy.items() if self._disclosure.get(key) != value]
        if changed:
            return "approval.policy", f"since the approval, policy.{changed[0]} has changed: more may leave"
        return "approval", ""

    def describe_start(self) -> str:
        """Return a sentence for the log of a starting program: who can approve plans here."""
        names = join_first_and_count(sorted(self._read_approvers()))
        who = f"{names} can give it" if names else "NOBODY can: [approvers] of site.toml is empty, and nothing will run"
        return f"each plan needs an approval; {who}"

    def _read_approvers(self) -> dict[str, str]:
        return read_site_toml_without_data(self._folder).file.approvers

    def _read_present_time(self) -> dt.datetime:
        now = dt.datetime.now(dt.UTC)
        entry = AuditLog(self._state).read_last_entry()
        try:
            last = dt.datetime.fromisoformat(str((entry or {}).get("time")))
            return max(now, last)
        except (ValueError, TypeError):  # no entry, or one of other hands
            return now


def _is_denial(content: bytes) -> bool:
    try:
        return not parse_decision(content)[0].is_approval
    except DecisionFault:
        return False
