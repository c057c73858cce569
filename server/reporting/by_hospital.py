"""Metrics of the final test at each hospital, and a sentence on the metrics that hospitals do not disclose."""

from dataclasses import dataclass

from polyclinic.common.metrics.auroc import MIN_POSITIVES, ClassMetrics
from polyclinic.common.metrics.calibration import ThresholdDecisions
from polyclinic.server.runs.schema import RunSummary

MAX_HOSPITALS = 12
"""Greatest number of hospitals in the table of hospitals and classes."""
NETWORK_BACKEND = "network"
"""Name of the backend of a run with real hospitals. For simulated sites the page has all metrics anyway."""

HIDDEN_BY_NOISE = (
    "Noise covers what leaves a hospital, so that this page has no figure of any hospital’s test images. "
    "It has what the run cost in epsilon."
)
HIDDEN_BY_MASKS = (
    "Masks cover what leaves a hospital, so that this page has figures of all hospitals’ test images together, and "
    "of no hospital alone."
)
HIDDEN_BY_POLICIES = (
    "Hospitals send figures and counts of scores class by class, so that this page cannot know for which class an "
    "image was taken, nor figures of a group of patients such as a sex or an age."
)


@dataclass(frozen=True)
class HospitalFigures:
    """The metrics of the final test at each hospital: a row for each class, a column for each hospital.

    Attributes:
        sites: The hospitals with a column.
        rows: Class -> metrics at each site; None for a site that does not annotate the class.
        decisions: Class -> (site, decisions at the chosen threshold) for each site that sent a score histogram.
        few: Number of positive images below which the page warns that a metric is uncertain; 0 if no cell has fewer.
        hidden_sites: Number of sites without a column.
    """

    sites: tuple[str, ...]
    rows: dict[str, tuple[ClassMetrics | None, ...]]
    decisions: dict[str, tuple[tuple[str, ThresholdDecisions], ...]]
    few: int
    hidden_sites: int


def tabulate_hospitals(summary: RunSummary) -> HospitalFigures | None:
    """Return the metrics at each hospital; None in simulation, where sites share test images, and without metrics."""
    tested = {site: result for site, result in summary.per_site.items() if result.per_class}
    if summary.backend != NETWORK_BACKEND or not tested:
        return None
    sites = tuple(tested)[:MAX_HOSPITALS]
    names = [name for name in summary.classes if any(name in tested[site].per_class for site in sites)]
    rows = {name: tuple(tested[site].per_class.get(name) for site in sites) for name in names}
    decisions = {
        name: tuple((site, tested[site].decisions[name]) for site in sites if name in tested[site].decisions)
        for name in names
    }
    shown = [cell for cells in rows.values() for cell in cells if cell is not None]
    has_few = any(cell.positives is not None and cell.positives < MIN_POSITIVES for cell in shown)
    return HospitalFigures(
        sites,
        rows,
        {name: pairs for name, pairs in decisions.items() if pairs},
        MIN_POSITIVES if has_few else 0,
        len(tested) - len(sites),
    )


def describe_unknown_figures(summary: RunSummary) -> str:
    """Return a sentence on the metrics that the coordinator does not learn from hospitals; empty in simulation."""
    if summary.backend != NETWORK_BACKEND:
        return ""
    privacy = summary.experiment.get("privacy") or {}
    if privacy.get("secure_aggregation"):
        return HIDDEN_BY_MASKS
    has_figures = any(result.per_class for result in summary.per_site.values())
    if privacy.get("level", "none") != "none" and not has_figures:
        return HIDDEN_BY_NOISE
    return HIDDEN_BY_POLICIES
