"""Texts about the patients' privacy budget for the hospital's staff; this module does not import torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyclinic.common.system.plain_text import format_count_with_noun

UNCOUNTED_COSTS = (
    "Not counted: the same patients under other names with other pictures, in the ledger of another machine or "
    "account, and runs without noise."
)
"""Sentence that is printed wherever the spent budget is shown."""


def describe_costs_by_federation(rows: Sequence[Mapping[str, Any]], patients: int) -> list[str]:
    """Return one line for each federation about the cost of its runs for the patients of this folder.

    Args:
        rows: Federations as in :func:`polyclinic.client.training.privacy.make_privacy_status`.
        patients: Number of patients of this folder.
    """
    lines = []
    for row in rows:
        runs = format_count_with_noun(row["runs"], "run")
        label = f"{row['federation'] or 'a federation without a name'}, as {row['site']}"
        shared = f"{row['patients']:,} of the {patients:,} patients here"
        if row.get("by_picture"):
            shared += f" ({row['by_picture']:,} by a picture alone)"
        lines.append(f"{label}: epsilon {format_epsilon(row['epsilon'])} in {runs}, with {shared}")
    return lines


def format_epsilon(epsilon: float | None) -> str:
    """Format an epsilon with two decimals; None stands for a reply without noise."""
    return "without bound" if epsilon is None else f"{epsilon:.2f}"


def describe_ledger(path: str, *, shared: bool) -> str:
    """Return sentences about the ledger that counts costs, and about costs that it cannot count.

    Args:
        path: The ledger's file.
        shared: True if other folders of this account use the same ledger.
    """
    if shared:
        return f"counted in {path}. {UNCOUNTED_COSTS}"
    alone = "which is this folder's own: another folder with the same patients has another ledger and begins at 0"
    return f"counted in {path}, {alone}. Name a common one: policy.ledger in site.toml. {UNCOUNTED_COSTS}"


def describe_privacy_status(privacy: Mapping[str, Any]) -> list[str]:
    """Return the lines of ``flwr-client status`` about the spent and the remaining budget.

    Args:
        privacy: The dictionary of :func:`polyclinic.client.training.privacy.make_privacy_status`, not empty.
    """
    spent = format_epsilon(privacy["epsilon"])
    budget = "" if privacy["budget"] is None else f" of {privacy['budget']:g}"
    summary = f"privacy spent, over all runs: epsilon {spent}{budget} at delta {privacy['delta']:g}"
    if "patients" not in privacy:  # a simulated site
        return [summary]
    left = "" if privacy.get("left") is None else f", {privacy['left']:.2f} left"
    summary += f"{left}, for the patient of whom most is spent ({privacy['patients']:,} patients here)"
    rows = describe_costs_by_federation(privacy["federations"], privacy["patients"])
    ledger_text = describe_ledger(privacy["ledger"], shared=privacy["shared"])
    return [summary, *(f"  {row}" for row in rows), f"  {ledger_text}"]
