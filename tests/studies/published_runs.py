"""The published runs of the benchmark, and the pages of results that show them."""

from functools import cache
from pathlib import Path

from polyclinic.studies.benchmark import read_benchmark_result
from polyclinic.studies.benchmark_results import BenchmarkResult

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
