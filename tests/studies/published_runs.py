"""The published runs of the benchmark, and the page of results that shows them."""

from functools import cache
from pathlib import Path

from polyclinic.studies.benchmark import read_benchmark_result
from polyclinic.studies.benchmark_results import BenchmarkResult

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "benchmark"
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@cache
def published_result(form: str) -> BenchmarkResult:
    return read_benchmark_result(FOLDER, form, FOLDER / "published.jsonl")
