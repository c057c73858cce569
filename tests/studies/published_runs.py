"""The published runs of the benchmark, and the pages of results that show them."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from polyclinic.studies.benchmark import read_benchmark_result
from polyclinic.studies.benchmark_file import PlannedRun
from polyclinic.studies.benchmark_results import BenchmarkResult, RunResultLine, find_wider_rate

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "benchmark"
SENTENCES, TABLES = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "results-benchmark")
)
RESULTS = f"{SENTENCES}\n{TABLES}"
"""What the two pages say: sentences with the tables that decide, and all tables, which a program writes."""


@cache
def published_result(form: str) -> BenchmarkResult:
    return read_benchmark_result(FOLDER, form, FOLDER / "published.jsonl")


def find_rows_at_an_end(runs: Iterable[PlannedRun], lines: Mapping[str, RunResultLine]) -> set[tuple[str, str]]:
    """Data sets and rows whose best rate of these runs lies at an end, so that a further one could be tried."""
    by_row: dict[tuple[str, str], dict[float, float]] = {}
    for run in runs:
        if run.results_key in lines and (auroc := lines[run.results_key].validation_auroc) is not None:
            by_row.setdefault((run.data, run.method), {})[run.lr] = auroc
    return {row for row, tried in by_row.items() if find_wider_rate(tried, (1e-9, 1e9)) is not None}
