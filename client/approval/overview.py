"""The list of a site's stored plans with the state of each, for the terminal and the approval page."""

from dataclasses import asdict, dataclass
from typing import Any

from polyclinic.client.approval.decide import describe_state
from polyclinic.client.site.approvals import MISSING_RULE, SiteApprovals
from polyclinic.client.site.plans import PlanStore
from polyclinic.client.site.site_file import SiteSettings


@dataclass(frozen=True)
class PlanState:
    """A stored plan with its state, as one row of the list of plans.

    Attributes:
        time: UTC time (ISO 8601) at which the plan first came.
        state: The decision about the plan, in words.
        is_approved: True if the site would work on a request of this plan now.
        is_waiting: True if the plan needs a decision and has none.
    """

    sha256: str
    kind: str
    time: str
    title: str
    purpose: str
    coordinator: str
    state: str
    is_approved: bool
    is_waiting: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_plan_states(settings: SiteSettings) -> list[PlanState]:
    """Return the stored plans of a site, oldest first."""
    approvals = SiteApprovals.from_settings(settings)
    states = list[PlanState]()
    is_required = settings.file.policy.approval == "required"
    for stored in PlanStore(settings.state_folder).list_texts():
        verdict = approvals.find_verdict(stored.facts.kind, stored.sha256)
        facts = stored.facts
        states.append(
            PlanState(
                sha256=stored.sha256,
                kind=facts.kind,
                time=facts.time,
                title=stored.title,
                purpose=stored.purpose,
                coordinator=facts.coordinator,
                state=describe_state(verdict)
                if is_required or verdict.rule != MISSING_RULE
                else "needs no approval here",
                is_approved=not verdict.reason,
                is_waiting=is_required and verdict.rule == MISSING_RULE,
            )
        )
    return states
