"""The report of a study: the paper's tables with ours beside them."""

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from server.analysis.study.results import StudyResult, TableResult
from server.reporting import study_text
from server.reporting.figures import study
from server.reporting.pages.page import write_page
from server.reporting.study_claims import study_headline


def write_study_report(result: StudyResult, destination: Path) -> Path:
    """Write the study as one HTML file; ``destination`` is the file, and is returned."""
    return write_page(
        "study.html.j2",
        destination,
        study=result,
        headline=study_headline(result),
        figures=[_figures(table, f"t{index}") for index, table in enumerate(result.tables)],
        text=study_text,
    )


def _figures(table: TableResult, name: str) -> Mapping[str, Markup]:
    """Heading -> figure, as far as the runs have what it shows."""
    drawn: dict[str, Markup] = {}
    if "sweep" in table.figures and len(table.settings) > 1:
        drawn["Along the sweep"] = study.sweep(table, f"{name}-sweep")
    if "curves" in table.figures:
        drawn["Round by round"] = study.curves(table.curves, f"{name}-curves")
    if "density" in table.figures:
        drawn["From site to site"] = study.density(table.curves, f"{name}-density")
    return {title: figure for title, figure in drawn.items() if figure}
