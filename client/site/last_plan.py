"""The plan of the last roll call, kept for ``flwr-client check``: a site is checked for what is asked of it."""

from pathlib import Path

from pydantic import ValidationError

from common.config import Plan
from common.system.files import write_atomically

FILE = "plan.json"


def remember(state: Path, plan: str) -> None:
    """Keep a plan as it came."""
    write_atomically(state / FILE, plan.encode())


def last_plan(state: Path) -> Plan | None:
    """The plan of the last roll call; None where there was none, or it was of another release."""
    try:
        return Plan.model_validate_json((state / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
