"""flwr-sim compare: several experiments over the same seeds, side by side."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from common.errors import BadInput, Fault, quoted, stop_on
from common.system.terminal import ProgressForm
from server.runs.scalars import Track
from server.simulation.trial import Cell, check, refuse_seed


def run_comparison(
    experiments: Sequence[Path],
    out: Path,
    seeds: Iterable[int],
    jobs: int | None,
    overrides: Sequence[str],
    console: Console,
    track: Track | None = None,
    progress: ProgressForm = ProgressForm.auto,
) -> None:
    """Run every experiment with every seed, then compare them.

    A run that is there already, finished and of the same experiment, is kept.

    Args:
        jobs: Runs at a time; None for what fits.
        track: Where figures go beside the run folders.
        progress: How it is shown how far the runs are; never on a quiet console.

    Raises:
        BadInput: With the faults of all experiments, before anything runs; or if a folder holds another experiment.
        FailedRuns: If a run fails; the others are finished first.
    """
    refuse_seed(overrides, "is settled by --seeds.")
    cells = [
        Cell(path, out / f"{path.stem}-seed{seed}", (*overrides, f"run.seed={seed}"), path.stem, track)
        for path in experiments
        for seed in seeds
    ]
    _refuse_clashes(cells)
    stop_on(_same_labels(cells))  # before torch is imported and the data is looked at, which takes long
    from server.runs.tracking.trackers import store_for
    from server.simulation.runner import fitting_jobs, run_cells

    store_for(track)  # made here once, not by several runs at a time
    check(cells)
    run_cells(cells, out, jobs or fitting_jobs(cells), console, progress)
    _compare(cells, out, console)


def _compare(cells: Sequence[Cell], out: Path, console: Console) -> None:
    """Read the runs, and write and print what they say."""
    from server.analysis.comparison import compare, write_comparison
    from server.reporting.comparison_claims import headline
    from server.reporting.pages.comparison import write_comparison_report
    from server.reporting.tables import comparison_table, markdown_table
    from server.runs.reader import read_run

    runs = [read_run(cell.folder) for cell in cells]
    comparison = compare(runs)
    write_comparison(comparison, out / "comparison.json")
    report = write_comparison_report(comparison, out / "report.html", runs)
    console.print(comparison_table(comparison))
    for sentence in (headline(comparison), *comparison.cautions):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    (out / "comparison.md").write_text(markdown_table(comparison) + "\n", encoding="utf-8")
    console.print(f"Report: {report}", soft_wrap=True)


def _refuse_clashes(cells: Sequence[Cell]) -> None:
    if len({cell.folder for cell in cells}) < len(cells):
        names = sorted({cell.experiment.stem for cell in cells})
        raise BadInput([Fault("experiments", f"two files have one name: {quoted(names)}.", "Rename one of them.")])


def _same_labels(cells: Sequence[Cell]) -> list[Fault]:
    """Experiments that tables would call by one name."""
    labels: dict[str, set[Path]] = {}
    for cell in cells:
        try:
            run = cell.file.experiment.run
        except BadInput:
            continue  # the check says all that is wrong with it
        labels.setdefault(run.name or run.method, set()).add(cell.experiment)
    return [
        Fault(
            "run.name",
            f'"{label}" is the name of {quoted(sorted(p.name for p in paths))}.',
            "Give each its own [run] name.",
        )
        for label, paths in labels.items()
        if len(paths) > 1
    ]
