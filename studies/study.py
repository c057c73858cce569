"""The command ``flwr-sim study``: run the experiments of a paper, and write our numbers beside the paper's."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from polyclinic.common.config import ExperimentFile
from polyclinic.common.errors import BadInput
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.system.terminal import ProgressFormat
from polyclinic.server.runs.reader import read_run
from polyclinic.studies.study_file import PaperTable, StudyFile, StudyRowOrColumn, read_study, title_to_slug
from polyclinic.studies.trial import Trial, check_trials, refuse_seed_override

if TYPE_CHECKING:
    from polyclinic.studies.study_results import StudyResult

TrialGrid = list[list[list[Trial]]]  # method, setting, seed


def run_study(
    folder: Path,
    out: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    quick: bool = False,
    progress: ProgressFormat = ProgressFormat.auto,
) -> "StudyResult":
    """Run the study's unfinished runs; write ``study.md``, ``study.json`` and ``report.html`` into ``out``.

    Args:
        folder: Folder with ``study.toml``.
        seeds: Number of seeds of each experiment; None for that of the study.
        jobs: Number of runs at a time; None for as many as fit.
        quick: Run only the part of the study that finishes in minutes.
        progress: Format of the progress; a quiet console shows none.

    Raises:
        BadInput: With the faults of the study or of all its experiments, before anything runs.
        RunsFailed: If a run fails, after the others have finished.
    """
    refuse_seed_override(overrides)
    study = read_study(folder, quick=quick)
    settings = _add_quick_settings(study, overrides, quick=quick)
    grids = list_study_trials(study, folder, out / "runs", settings, range(seeds or study.seeds))
    trials = [trial for grid in grids for row in grid for column in row for trial in column]
    check_trials(trials)
    from polyclinic.studies.runner import (  # here: a wrong call is refused before torch is imported
        count_possible_parallel_runs,
        run_trials,
    )

    run_trials(trials, out, jobs or count_possible_parallel_runs(trials), console, progress)
    from polyclinic.studies.study_report import study_as_markdown, write_study_report
    from polyclinic.studies.study_results import (
        evaluate_study,  # here: a wrong call is refused before scipy is imported
    )

    runs = {path: read_run(path) for path in dict.fromkeys(trial.folder for trial in trials)}
    result = evaluate_study(
        study, [[[[runs[trial.folder] for trial in column] for column in row] for row in grid] for grid in grids]
    )
    write_atomically(
        out / "study.json", (format_as_json_text(asdict(result), indent=1, allow_nan=True) + "\n").encode()
    )
    write_atomically(out / "study.md", study_as_markdown(result).encode())
    report = write_study_report(result, out / "report.html")
    console.print(study_as_markdown(result), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {report}", soft_wrap=True)
    return result


def list_study_experiments(folder: Path, overrides: Sequence[str], *, quick: bool) -> list[ExperimentFile]:
    """Return the experiments of a study without those with faults, which the run reports.

    Args:
        folder: Folder with ``study.toml``.
        quick: Only the part of the study that finishes in minutes.
    """
    study, files = read_study(folder, quick=quick), list[ExperimentFile]()
    settings = _add_quick_settings(study, overrides, quick=quick)
    for grid in list_study_trials(study, folder, Path(), settings, range(1)):
        for row in grid:
            for column in row:
                with suppress(BadInput):
                    files += [trial.experiment_file for trial in column]
    return files


def _add_quick_settings(study: StudyFile, overrides: Sequence[str], *, quick: bool) -> tuple[str, ...]:
    return (*(("scale=small", *study.quick.set) if quick and study.quick else ()), *overrides)


def list_study_trials(
    study: StudyFile, folder: Path, out: Path, overrides: Sequence[str], seeds: range
) -> list[TrialGrid]:
    """Return the trials by table, method, setting and seed; trials with equal settings share a folder.

    Args:
        folder: Folder from which the study's experiment paths start.
        out: Folder of the runs.
        overrides: Overrides for all experiments.
    """
    first: dict[str, Trial] = {}

    def make_trial(
        number: int, table: PaperTable, method: StudyRowOrColumn, setting: StudyRowOrColumn, seed: int
    ) -> Trial:
        def fill_placeholders(text: str) -> str:
            return text.replace("{method}", method.part).replace("{setting}", setting.part)

        path = Path(os.path.normpath(folder / fill_placeholders(table.experiment)))
        chosen = tuple(fill_placeholders(text) for text in (*setting.set, *method.set))
        titles = [title for title in (method.title, setting.title) if title]
        name = "-".join([str(number), *(title_to_slug(title) for title in titles), f"seed{seed}"])
        made = Trial(path, out / name, (*chosen, *overrides, f"run.seed={seed}"), " ".join(titles))
        return first.setdefault(made.settings_text, made)

    return [
        [
            [[make_trial(number, table, method, setting, seed) for seed in seeds] for setting in table.settings]
            for method in table.methods
        ]
        for number, table in enumerate(study.tables, start=1)
    ]
