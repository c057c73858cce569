"""flwr-sim study: all runs of a study, then its tables, its report and its JSON."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from common.system.terminal import ProgressForm
from server.analysis.study.spec import Study, StudyPart, Table, read_study, slug
from server.simulation.trial import Cell, check, refuse_seed

if TYPE_CHECKING:
    from server.analysis.study.results import StudyResult


def run_study(
    folder: Path,
    out: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    quick: bool = False,
    progress: ProgressForm = ProgressForm.auto,
) -> "StudyResult":
    """Run what is not there yet, and write ``study.md``, ``study.json`` and ``report.html`` into ``out``.

    Args:
        folder: With ``study.toml``.
        seeds: Of every experiment; None for the study's own.
        jobs: Runs at a time; None for what fits.
        quick: Only the part of the study that ends in minutes.
        progress: How it is shown how far the runs are; never on a quiet console.

    Raises:
        BadInput: With the faults of the study or of all its experiments, before anything runs.
        FailedRuns: If a run fails; the others are finished first.
    """
    refuse_seed(overrides, "is settled by --seeds.")
    study = read_study(folder, quick=quick)
    more = ("scale=small", *study.quick.set) if quick and study.quick else ()
    grid = Placed(folder, out / "runs", (*more, *overrides), range(seeds or study.seeds)).cells(study)
    cells = [cell for table in grid for row in table for column in row for cell in column]
    check(cells)
    from server.simulation.runner import fitting_jobs, run_cells  # here: what is wrong is told before torch is imported

    run_cells(cells, out, jobs or fitting_jobs(cells), console, progress)
    return _told(study, grid, out, console)


def _told(study: Study, grid: list[list[list[list[Cell]]]], out: Path, console: Console) -> "StudyResult":
    """Read the runs, and write and print what they say."""
    from common.system.files import write_atomically
    from server.analysis.study.results import result_of
    from server.reporting.pages.study import write_study_report
    from server.reporting.study_text import as_json, as_markdown
    from server.runs.reader import read_run

    paths = (cell.folder for table in grid for row in table for column in row for cell in column)
    read = {path: read_run(path) for path in dict.fromkeys(paths)}
    runs = [[[[read[cell.folder] for cell in column] for column in row] for row in table] for table in grid]
    result = result_of(study, runs)
    write_atomically(out / "study.json", as_json(result).encode())
    write_atomically(out / "study.md", as_markdown(result).encode())
    report = write_study_report(result, out / "report.html")
    console.print(as_markdown(result), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {report}", soft_wrap=True)
    return result


@dataclass(frozen=True)
class Placed:
    """Where a study's experiments are, where their runs go, and what is set in all of them."""

    folder: Path
    out: Path
    overrides: tuple[str, ...]
    seeds: range

    def cells(self, study: Study) -> list[list[list[list[Cell]]]]:
        """Return the cells by table, method, setting and seed; two that are the same run share a folder."""
        known: dict[str, Cell] = {}
        return [
            [
                [
                    [self._cell((number, table, method, setting), seed, known) for seed in self.seeds]
                    for setting in table.settings
                ]
                for method in table.methods
            ]
            for number, table in enumerate(study.tables, start=1)
        ]

    def _cell(self, place: tuple[int, Table, StudyPart, StudyPart], seed: int, known: dict[str, Cell]) -> Cell:
        number, table, method, setting = place
        path = Path(os.path.normpath(self.folder / _filled(table.experiment, method, setting)))
        chosen = tuple(_filled(text, method, setting) for text in (*setting.set, *method.set))
        titles = [title for title in (method.title, setting.title) if title]
        name = "-".join([str(number), *(slug(title) for title in titles), f"seed{seed}"])
        cell = Cell(path, self.out / name, (*chosen, *self.overrides, f"run.seed={seed}"), " ".join(titles))
        return known.setdefault(cell.identity, cell)


def _filled(text: str, method: StudyPart, setting: StudyPart) -> str:
    return text.replace("{method}", method.part).replace("{setting}", setting.part)
