"""The two pages of ``flwr-client plans serve``: the list of plans, and one plan with the forms to decide about it."""

import base64
import datetime as dt
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from markupsafe import Markup

from polyclinic.client.approval.decide import describe_state
from polyclinic.client.approval.describe import describe_text
from polyclinic.client.approval.overview import list_plan_states
from polyclinic.client.site.approvals import SiteApprovals
from polyclinic.client.site.plans import StoredText
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.system.plain_text import make_jinja_environment

_FOLDER = Path(__file__).parent
DECISION_SENTENCES = {"approved": "The plan is approved.", "denied": "The plan is denied."}
"""Value of ``done`` in the page's address -> sentence that confirms the decision."""
SUGGESTED_APPROVAL_DAYS = 90
"""Duration of an approval that the form suggests, in days."""


def render_list_page(settings: SiteSettings, token: str, done: str = "") -> str:
    """Return the page with all plans.

    Args:
        done: The decision just made, a key of :data:`DECISION_SENTENCES`; any other text shows no sentence.
    """
    return _render(
        "list.html.j2",
        title=f"Plans for {settings.file.name}",
        token=token,
        done=DECISION_SENTENCES.get(done, ""),
        plans=list(reversed(list_plan_states(settings))),
        is_required=settings.file.policy.approval == "required",
    )


def render_plan_page(
    settings: SiteSettings, stored: StoredText, token: str, typed: Mapping[str, str], faults: Sequence[str]
) -> str:
    """Return the page with one plan.

    Args:
        typed: Field -> text that the person typed into the form before, without the passphrase.
        faults: Faults of these texts.
    """
    verdict = SiteApprovals.from_settings(settings).find_verdict(stored.facts.kind, stored.sha256)
    suggested_end = dt.date.today() + dt.timedelta(days=SUGGESTED_APPROVAL_DAYS)
    return _render(
        "plan.html.j2",
        title=stored.title or "Plan",
        token=token,
        sha256=stored.sha256,
        came=f"{stored.facts.time[:16].replace('T', ' ')} UTC",
        state=describe_state(verdict),
        is_approved=not verdict.reason,
        sections=describe_text(stored, settings),
        approvers=sorted(settings.file.approvers),
        typed={"until": suggested_end.isoformat(), "purpose": stored.purpose, "approver": "", "reason": "", **typed},
        faults=faults,
    )


def _render(template: str, **variables: object) -> str:
    style = Markup(_read_style())
    return make_jinja_environment(_FOLDER).get_template(template).render(style=style, **variables)


@cache
def _read_style() -> str:
    return (_FOLDER / "approval.css").read_text(encoding="utf-8")


@cache
def make_content_security_policy() -> str:
    """Return a Content-Security-Policy that allows only this page's style sheet, and forms sent to this server."""
    style = base64.b64encode(hashlib.sha256(_read_style().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
