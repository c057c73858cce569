"""The benchmark's page."""

from pathlib import Path

from server.analysis.benchmark.results import BenchmarkResult
from server.reporting import benchmark_text
from server.reporting.figures.critical_difference import critical_difference_picture
from server.reporting.pages.page import write_page


def write_benchmark_report(result: BenchmarkResult, destination: Path) -> Path:
    """Write the benchmark as one HTML file; ``destination`` is the file, and is returned."""
    return write_page(
        "benchmark.html.j2",
        destination,
        result=result,
        text=benchmark_text,
        picture=critical_difference_picture(result.ranking, "ranks"),
    )
