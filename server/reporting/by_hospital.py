"""Figures of the final test at each hospital, and what the coordinator cannot know about it."""

from dataclasses import dataclass

from polyclinic.common.metrics.auroc import FEWEST_POSITIVES, ClassMetrics
from polyclinic.common.metrics.calibration import ThresholdDecisions
from polyclinic.server.runs.schema import RunSummary

MAX_HOSPITALS = 12
"""Columns of the table of hospitals and classes."""
NETWORK = "network"
"""The backend of a run with real hospitals. Simulated sites share test images, so that the page has all figures."""

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
    """The figures of the final test at each hospital: a row a class, a column a hospital.

    Attributes:
        rows: Class -> one cell for each site; None where the site does not annotate the class.
        decisions: Class -> pairs of a site and its decisions; without a site that sent no counts by score.
        few: Number of positive images below which the page warns of chance; 0 if no cell has fewer.
        hidden_sites: Number of sites for which the table has no room.
    """

    sites: tuple[str, ...]
    rows: dict[str, tuple[ClassMetrics | None, ...]]
    decisions: dict[str, tuple[tuple[str, ThresholdDecisions], ...]]
    few: int
    hidden_sites: int


def tabulate_hospitals(summary: RunSummary) -> HospitalFigures | None:
    """Return the figures of each hospital; None in simulation, whose sites share the test images, and without any."""
    tested = {site: result for site, result in summary.per_site.items() if result.per_class}
    if summary.backend != NETWORK or not tested:
        return None
    sites = tuple(tested)[:MAX_HOSPITALS]
    names = [name for name in summary.classes if any(name in tested[site].per_class for site in sites)]
    rows = {name: tuple(tested[site].per_class.get(name) for site in sites) for name in names}
    decisions = {
        name: tuple((site, tested[site].decisions[name]) for site in sites if name in tested[site].decisions)
        for name in names
    }
    shown = [cell for cells in rows.values() for cell in cells if cell is not None]
    has_few = any(cell.positives is not None and cell.positives < FEWEST_POSITIVES for cell in shown)
    return HospitalFigures(
        sites,
        rows,
        {name: of_sites for name, of_sites in decisions.items() if of_sites},
        FEWEST_POSITIVES if has_few else 0,
        len(tested) - len(sites),
    )


def describe_unknown_figures(summary: RunSummary) -> str:
    """Return a sentence on the figures that the coordinator cannot know; empty in simulation."""
    if summary.backend != NETWORK:
        return ""
    privacy = summary.experiment.get("privacy") or {}
    if privacy.get("secure_aggregation"):
        return HIDDEN_BY_MASKS
    has_figures = any(result.per_class for result in summary.per_site.values())
    if privacy.get("level", "none") != "none" and not has_figures:
        return HIDDEN_BY_NOISE
    return HIDDEN_BY_POLICIES
