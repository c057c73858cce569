"""The tables of a comparison at several widths: whole names, whole figures, nothing that says nothing."""

import random
from collections.abc import Collection
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from polyclinic.common.metrics.auroc import ClassMetrics
from polyclinic.common.metrics.bootstrap import AurocIntervals
from polyclinic.common.metrics.calibration import DecisionCounts
from polyclinic.server.deployment.status import format_server_status
from polyclinic.server.export.evaluation import SavedModelEvaluation, format_model_evaluation
from polyclinic.server.reporting.tables import make_class_auroc_table
from polyclinic.studies.claims import describe_method_verdicts
from polyclinic.studies.comparison import MethodComparison
from polyclinic.studies.comparison_report import (
    comparison_as_markdown,
    format_comparison_tables,
    make_comparison_tables,
    write_comparison_report,
)
from tests.studies.made_runs import compared, metrics, run_of, summary

SNAPSHOTS = Path(__file__).parent / "tables"
METHODS = (
    "surgical aggregation with FedBN+ trunk",
    "FedAvg, missing labels taken as absent",
    "polyclinic-with-a-very-long-name-without-spaces",
)
CLASSES = (
    "Enlarged cardiomediastinum",
    "Pulmonary consolidation",
    "Pleural effusion",
    "Support devices (any)",
    "Atelectasis, subsegmental",
    "Fracture_of_a_rib_or_the_clavicle",
    "Pneumothorax",
    "Lung lesion",
)
WIDTHS = (60, 80, 100, 200)


def long_names(seeds: int, unique: Collection[str] = CLASSES[:3]) -> MethodComparison:
    """Compare three methods, each .04 behind the one before."""
    draw, runs = random.Random(1), []
    for place, method in enumerate(METHODS):
        for seed in range(seeds):
            aurocs = {name: 0.8 - 0.04 * place + draw.random() * 0.05 for name in CLASSES}
            runs.append(summary(method, aurocs, unique, seed=seed))
    return compared(*runs)


def printed(table: RenderableType, width: int) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def without_spaces(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seeds", [1, 3])
def test_names_are_whole_and_figures_are_not_cut_at_any_width(seeds: int, width: int) -> None:
    comparison = long_names(seeds)
    text = printed(format_comparison_tables(comparison), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "n/a" not in text
    figures = [cell for table in make_comparison_tables(comparison) for row in table.rows for cell in row[1:]]
    assert all(cell in text for cell in figures if any(letter.isdigit() for letter in cell))
    assert all(without_spaces(method) in without_spaces("".join(names_of(text))) for method in METHODS)


def names_of(text: str) -> list[str]:
    """Return what stands in the first column: the line up to two spaces."""
    return [line.strip().split("  ")[0] for line in text.splitlines()]


SITES = ("University hospital of the north", "St-Mary-general-hospital", "South clinic", "East")


def by_class(runs: int) -> RenderableType:
    """Make the table of classes of some runs with four sites, of which one annotates everything."""
    contents = {}
    for place, method in enumerate(METHODS[:runs]):
        content = summary(method, dict.fromkeys(CLASSES, 0.8 - 0.04 * place), CLASSES[:3])
        classes = dict.fromkeys(SITES, CLASSES[3:]) | {SITES[0]: CLASSES}
        contents[method] = run_of(content | {"sites": {site: {"classes": names} for site, names in classes.items()}})
    return make_class_auroc_table({method: run.summary for method, run in contents.items()})


def evaluated() -> RenderableType:
    """Make the table of a saved model on labelled images, with a class that could not be tested."""
    results: dict[str, ClassMetrics] = metrics(dict.fromkeys(CLASSES, 0.8123), 120, 3456)
    results["Pneumothorax"] = ClassMetrics(None, None, None, 0, 3576)
    ends = {name: (0.7654, 0.8543) for name in CLASSES if name != "Pneumothorax"}
    return format_model_evaluation(
        SavedModelEvaluation(
            images=3576,
            patients=1200,
            results=results,
            decisions={name: DecisionCounts(90, 30, 456, 3000) for name in CLASSES},
            intervals=AurocIntervals((0.7, 0.9), ends),
            skipped=(),
            source="labels.csv",
        )
    )


def connected() -> RenderableType:
    """Make the table of a coordinator's sites, one of them with a long name without spaces."""
    site = {"state": "online", "release": "0.2.0", "wire": None, "classes": [], "max_images": None}
    names = ("university-hospital-of-the-north-and-the-islands-department-of-radiology", "south")
    return format_server_status(
        {
            "name": "coordinator",
            "address": "coordinator.example:9092",
            "phrase": "",
            "release": "0.2.0",
            "superlink": "up",
            "certificate_days": 300.0,
            "sites": {name: {**site, "fingerprint": "ab" * 8} for name in names},
            "runs": [],
        }
    )


def tables() -> dict[str, RenderableType]:
    return {
        "comparison-1": format_comparison_tables(long_names(1)),
        "comparison-3": format_comparison_tables(long_names(3)),
        "run": by_class(1),
        "demo": by_class(3),
        "evaluate": evaluated(),
        "status": connected(),
    }


def snapshots() -> dict[str, str]:
    """Return name of the file -> text of each snapshot."""
    return {f"{name}-{width}.txt": printed(table, width) for name, table in tables().items() for width in WIDTHS}


def test_the_tables_read_as_in_the_snapshots() -> None:
    """To accept a change: ``python -m tests.studies.test_comparison_tables``, and look at what it wrote."""
    assert {path.name: path.read_text(encoding="utf-8") for path in SNAPSHOTS.glob("*.txt")} == snapshots()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_table_cuts_a_name_or_is_wider_than_the_terminal(width: int) -> None:
    for name, table in tables().items():
        text = printed(table, width)
        assert "…" not in text, name
        lines = [line for line in text.splitlines() if not line.startswith("abab")]  # keys are copied as a whole
        assert max(map(len, lines)) <= width, name


def test_columns_without_a_figure_are_left_out() -> None:
    text = printed(format_comparison_tables(long_names(3, unique=())), 100)
    assert "AUROC, all" in text
    assert "unique" not in text
    assert "n/a" not in text


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_have_no_p_value_anywhere_and_the_reason_stands_instead(seeds: int, tmp_path: Path) -> None:
    comparison = long_names(seeds)
    assert comparison.find_method_contrast(METHODS[1]).result.p_value is not None
    page = write_comparison_report(comparison, tmp_path / "report.html").read_text(encoding="utf-8")
    texts = [printed(format_comparison_tables(comparison), 200), comparison_as_markdown(comparison)]
    for text in (*texts, *describe_method_verdicts(comparison)):
        assert "p = " not in text
        assert "p <" not in text
    assert "p = 0." not in page
    assert "p &lt;" not in page
    word = "1 seed" if seeds == 1 else "2 seeds"
    reason = f"with {word}: one more training could reverse the difference, so a verdict needs 3."
    assert all(reason in text for text in (*texts, page))


def test_a_p_value_is_explained_beside_it(tmp_path: Path) -> None:
    comparison = long_names(3)
    page = write_comparison_report(comparison, tmp_path / "report.html").read_text(encoding="utf-8")
    words = (
        "two-sided paired t-test over the classes, each averaged over the seeds",
        "correction for the 2 comparisons with surgical aggregation with FedBN+ trunk on the same classes.",
    )
    texts = (printed(format_comparison_tables(comparison), 300), comparison_as_markdown(comparison), page)
    assert all(word in text for text in texts for word in words)


if __name__ == "__main__":
    for name, text in snapshots().items():
        (SNAPSHOTS / name).write_text(text, encoding="utf-8")
