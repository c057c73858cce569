"""The tables of a comparison at several widths: whole names, whole figures, nothing that says nothing."""

import random
from collections.abc import Collection
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from polyclinic.studies.claims import describe_method_verdicts
from polyclinic.studies.comparison import MethodComparison
from polyclinic.studies.comparison_report import (
    comparison_as_markdown,
    format_comparison_tables,
    make_comparison_tables,
    write_comparison_report,
)
from tests.studies.made_runs import compared, summary

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


def snapshots() -> dict[Path, str]:
    """Return file -> text of each snapshot."""
    return {
        SNAPSHOTS / f"comparison-{seeds}-{width}.txt": printed(format_comparison_tables(long_names(seeds)), width)
        for seeds in (1, 3)
        for width in WIDTHS
    }


def test_the_tables_read_as_in_the_snapshots() -> None:
    """To accept a change: ``python -m tests.studies.test_comparison_tables``, and look at what it wrote."""
    assert {path: path.read_text(encoding="utf-8") for path in SNAPSHOTS.glob("comparison-*.txt")} == snapshots()


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
    for path, text in snapshots().items():
        path.write_text(text, encoding="utf-8")
