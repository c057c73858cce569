"""The report of several methods side by side."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from server.analysis.comparison import Comparison
from server.reporting.comparison_claims import headline, large_effects, verdicts
from server.reporting.coverage import ClassesOfGroup
from server.reporting.figures import auroc
from server.reporting.figures.subsets import shared_and_unique
from server.reporting.pages.gains import gain_rows, gain_sentences, gains_figure
from server.reporting.pages.page import write_page
from server.runs.reader import Run

SITES_SHOWN = 60


def write_comparison_report(comparison: Comparison, destination: Path, runs: Sequence[Run] = ()) -> Path:
    """Write the comparison as one HTML file; ``destination`` is the file, and is returned.

    Args:
        runs: Those compared, whose own reports are linked where they lie below the file's folder.
    """
    groups = [ClassesOfGroup(kind, classes) for kind, classes in comparison.class_groups.items()]
    deciding = [each for each in comparison.contrasts if each.pairing == "classes"]
    return write_page(
        "comparison.html.j2",
        destination,
        comparison=comparison,
        reports=_reports(runs, destination.parent),
        groups=groups,
        headline=headline(comparison),
        sentences=verdicts(comparison) + large_effects(comparison),
        best=best_per_class(comparison),
        deciding=deciding,
        by_seed=[each for each in comparison.contrasts if each.pairing == "classes x seeds"],
        by_method=auroc.auroc_by_method(comparison.methods, groups),
        differences=auroc.differences(deciding) if deciding else "",
        gain_rows=gain_rows(comparison)[:SITES_SHOWN],
        gain_sentences=gain_sentences(comparison),
        gains=gains_figure(comparison),
        subsets=shared_and_unique(comparison.methods),
        elsewhere=_elsewhere(comparison),
    )


def _elsewhere(comparison: Comparison) -> dict[str, object] | None:
    """What the page says of the external test set; None where the runs have none."""
    if (found := comparison.external) is None:
        return None
    deciding = [each for each in found.contrasts if each.pairing == "classes"]
    return {"comparison": found, "headline": headline(found), "deciding": deciding, "best": best_per_class(found)}


def _reports(runs: Sequence[Run], folder: Path) -> dict[tuple[str, int], str]:
    """Label and seed -> the page of the run, as a link from this folder."""
    pages = {(run.summary.label, run.summary.seed): run.folder / "report.html" for run in runs}
    return {
        key: quote(page.relative_to(folder).as_posix()) for key, page in pages.items() if page.is_relative_to(folder)
    }


def best_per_class(comparison: Comparison) -> dict[str, str]:
    """Class -> its best AUROC as printed, so that methods equal to three decimals share the mark."""
    names = [name for group in comparison.class_groups.values() for name in group]
    values = {name: [method.per_class.get(name) for method in comparison.methods] for name in names}
    defined = {name: [value for value in of_class if value is not None] for name, of_class in values.items()}
    return {name: f"{max(of_class):.3f}" for name, of_class in defined.items() if len(of_class) > 1}
