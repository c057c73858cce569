"""The published runs of the benchmark, and the page of results that shows them."""

from functools import cache
from pathlib import Path

from polyclinic.studies.benchmark import count_planned_runs, group_results_by_block
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.benchmark_results import BenchmarkResult, evaluate_benchmark, read_result_lines

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "benchmark"
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@cache
def published_result(form: str) -> BenchmarkResult:
    plan, lines = (
        BenchmarkVariantPlan.read_benchmark_variant(FOLDER, form),
        read_result_lines(FOLDER / "published.jsonl"),
    )
    return evaluate_benchmark(plan, form, group_results_by_block(plan, lines), count_planned_runs(plan))
