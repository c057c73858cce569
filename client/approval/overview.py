"""The stored plans of a site with the state of each, for the list in the terminal and on the page."""

from dataclasses import asdict, dataclass
from typing import Any

from polyclinic.client.approval.decide import describe_state
from polyclinic.client.site.approvals import MISSING, SiteApprovals
from polyclinic.client.site.plans import PlanStore
from polyclinic.client.site.site_file import SiteSettings


@dataclass(frozen=True)
class PlanState:
    """A stored plan in a list.

    Attributes:
        time: UTC time (ISO 8601) at which it came first.
        state: What was decided, in words.
        is_approved: True if a request by this plan would be carried out now.
        is_waiting: True if nobody has decided about it, and somebody has to.
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
                state=describe_state(verdict) if is_required or verdict.rule != MISSING else "needs no approval here",
                is_approved=not verdict.reason,
                is_waiting=is_required and verdict.rule == MISSING,
            )
        )
    return states
