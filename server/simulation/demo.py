"""flwr-sim demo: offline, in under two minutes, on synthetic radiograph phantoms."""

import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from common.config import read_experiment
from common.errors import stop_on
from server.analysis.comparison import compare, write_comparison
from server.analysis.statistics import FEWEST_SEEDS
from server.reporting.pages.comparison import write_comparison_report
from server.reporting.tables import coverage_table
from server.reporting.wording import number
from server.runs.folder import DEMO_MARK, demo_folder_faults
from server.runs.reader import RunSummary, read_run
from server.simulation.simulate import simulate

METHODS = ("surgical", "vanilla")
INTRODUCTION = """\
[bold]Four hospitals, one model.[/] Each annotates two findings that all annotate, and some that nobody else does.
The pictures are procedural phantoms, synthetic and made here: nothing is downloaded.
"""


def run_demo(out: Path, backend: str, console: Console) -> None:
    """Train surgical aggregation and vanilla FL on the same phantoms; print who annotates what and who learned it.

    Raises:
        BadInput: If ``out`` exists and is not a demo's folder.
    """
    stop_on(demo_folder_faults(out))
    _make_room(out)
    console.print(INTRODUCTION)
    for method in METHODS:
        console.print(f"Training [bold]{method}[/] ...")
        overrides = [f'run.method="{method}"', f'run.name="{method}"', f'simulation.backend="{backend}"']
        file = read_experiment(Path(str(files("server.simulation") / "demo.toml")), overrides)
        simulate(file, out / method, console)
    runs = {method: read_run(out / method) for method in METHODS}
    comparison = compare(list(runs.values()))
    write_comparison(comparison, out / "comparison.json")
    report = write_comparison_report(comparison, out / "report.html", list(runs.values()))
    console.print(coverage_table({method: run.summary for method, run in runs.items()}))
    console.print(_verdict({method: run.summary for method, run in runs.items()}))
    console.print(f"Report: {report}", soft_wrap=True)


def _make_room(out: Path) -> None:
    """Remove an earlier demo."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / DEMO_MARK).write_text("flwr-sim demo may remove this folder.\n", encoding="utf-8")


def _verdict(summaries: Mapping[str, RunSummary]) -> str:
    """What the numbers say, in either direction."""
    unique = {name: summary.test.unique_classes.mean_auroc for name, summary in summaries.items()}
    return (
        f"On findings that one hospital alone annotates: mean AUROC {number(unique['surgical'])} with surgical"
        f" aggregation, {number(unique['vanilla'])} with vanilla FL, which takes missing labels as negative. One seed:"
        f" a verdict needs {FEWEST_SEEDS}."
    )
