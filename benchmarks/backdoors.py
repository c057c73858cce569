"""How often a model falls for a backdoor of one or two hospitals, over several triggers and seeds, by each rule.

PYTHONPATH=. python benchmarks/backdoors.py [--minutes 60]   # measures what is missing, and draws the page
PYTHONPATH=. python benchmarks/backdoors.py --draw           # measures nothing: the tables from backdoors.json

scikit-learn's digits, all 1,797 of them, six rounds in this process. Attackers add marked copies of their images with
a target label (tests/backdoors.py). Success is the share of marked test images of other classes whose score for the
target is above the cut with a specificity of 95 % on the images without the mark (chance: 0.05). Each seed has its own
division of the images, first weights and target. Beside it the AUROC, less that of the honest run of that seed by the
same rule.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harm import RULES, choices_of, name_of, run

from supply.blocks import write_block
from tests.backdoors import TRIGGERS, Schedule, backdoor, measure_success

ROOT = Path(__file__).parents[1]
PAGE, MEASURED = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "backdoors.json"
RAW = ROOT / "runs" / "bench" / "backdoors.jsonl"
"""A line a run, so that a measurement that is stopped goes on where it stopped."""
BLOCK = "backdoors"
"""Block of the page."""
ROUNDS, SEEDS = 6, (0, 1, 2)
TARGETS = ("3", "7", "1")
"""Of each seed, the class that a model with the backdoor gives a marked image."""
HONEST = "no attack"
SCHEDULES: Mapping[str, Schedule] = {
    "as trained": Schedule(),
    "3.5 times": Schedule(times=3.5),
    "3.5 times in the last": Schedule(times=3.5, longer_from_round=ROUNDS),
    "last round only": Schedule(from_round=ROUNDS),
    "last round only, 3.5 times": Schedule(times=3.5, from_round=ROUNDS),
    "last round only, 10 times": Schedule(times=10, from_round=ROUNDS),
}
AS_TRAINED = ("as trained",)
WITH_BOUND = tuple(name for name in SCHEDULES if name != "last round only, 10 times")
"""With a bound, 10 times is the same as 3.5 times."""
DEFAULT = "clip 3.0"
WORDS = {DEFAULT: "**`clip` 3, the default**"} | {f"clip {each}": f"`clip` {each}" for each in ("1.0", "1.5", "2.0")}


class Population(NamedTuple):
    """How many of how many sites attack."""

    attackers: int
    sites: int


class TrialKey(NamedTuple):
    """All that determines a run; an honest run has no trigger."""

    population: Population
    rule: str
    schedule: str
    seed: int
    trigger: str = ""


@dataclass(frozen=True)
class Trial:
    """What is measured of a run's last model.

    Attributes:
        successes: By trigger: that of the attack, or all of them for an honest run.
        excluded: The sites that were left out.
    """

    auroc: float
    successes: Mapping[str, float]
    excluded: tuple[str, ...] = ()


ONE_OF_5, ONE_OF_10, TWO_OF_5, TWO_OF_10 = (Population(*each) for each in ((1, 5), (1, 10), (2, 5), (2, 10)))
ROWS: Sequence[tuple[Population, str, Sequence[str]]] = (
    (ONE_OF_5, DEFAULT, WITH_BOUND),
    (ONE_OF_10, DEFAULT, WITH_BOUND),
    (ONE_OF_5, "nothing", tuple(SCHEDULES)),
    (ONE_OF_5, "median", AS_TRAINED),
    (ONE_OF_5, "multi-Krum", AS_TRAINED),
    (ONE_OF_10, "nothing", ("as trained", "3.5 times in the last", "last round only, 3.5 times")),
    (TWO_OF_5, DEFAULT, AS_TRAINED),
    (TWO_OF_5, "median", AS_TRAINED),
    (ONE_OF_5, "trimmed mean", AS_TRAINED),
    (ONE_OF_5, "Krum", AS_TRAINED),
    (ONE_OF_5, "clip 1.0", AS_TRAINED),
    (ONE_OF_10, "median", AS_TRAINED),
    (TWO_OF_5, "multi-Krum", AS_TRAINED),
    (TWO_OF_10, DEFAULT, AS_TRAINED),
    (ONE_OF_10, "multi-Krum", AS_TRAINED),
    (TWO_OF_10, "median", AS_TRAINED),
    (TWO_OF_10, "multi-Krum", AS_TRAINED),
)
"""What is measured, the most important first: who attacks, by which rule, with which schedules."""


def list_planned_trials() -> Iterator[TrialKey]:
    """Keys of all runs, in the order in which they are run."""
    for population, rule, schedules in ROWS:
        for seed in SEEDS:
            yield TrialKey(population, rule, HONEST, seed)
        for seed, schedule, trigger in itertools.product(SEEDS, schedules, TRIGGERS):
            yield TrialKey(population, rule, schedule, seed, trigger)


def run_trial(key: TrialKey) -> Trial:
    """Run one federation and measure its last model."""
    attacking, sites = key.population
    settings = [
        *("run.method=surgical", f"run.rounds={ROUNDS}", f"run.seed={key.seed}", "evaluation.checkpoint=last"),
        *(f"partition.sites={sites}", "partition.shared=10", "participation.min_sites=3"),
        *choices_of(key.rule, sites, attacking),
    ]
    target, answers = TARGETS[key.seed], {}
    if key.trigger:
        attack = backdoor(SCHEDULES[key.schedule], TRIGGERS[key.trigger], target)
        answers = {name_of(2 + number, sites): attack for number in range(attacking)}
    successes: dict[str, float] = {}

    def measure(folder: Path, choices: tuple[str, ...]) -> None:
        for name in [key.trigger] if key.trigger else TRIGGERS:
            successes[name] = round(measure_success(folder, choices, TRIGGERS[name], target), 4)

    result = run(settings, answers, measure)
    return Trial(round(result.auroc, 4), successes, result.excluded)


def read_trials() -> dict[TrialKey, Trial]:
    """Return the runs of the raw file; none if it does not exist."""
    trials = {}
    for line in RAW.read_text(encoding="utf-8").splitlines() if RAW.exists() else ():
        key, trial = json.loads(line)
        trials[TrialKey(Population(*key[0]), *key[1:])] = Trial(**trial)
    return trials


def run_missing_trials(minutes: float) -> None:
    """Run what the raw file lacks, and add a line for each; begin no run after so many minutes."""
    end = time.monotonic() + 60 * minutes
    RAW.parent.mkdir(parents=True, exist_ok=True)
    present = read_trials()
    for key in list_planned_trials():
        if key not in present and time.monotonic() < end:
            trial = run_trial(key)
            print(*key, trial, flush=True)
            with RAW.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, asdict(trial)]) + "\n")


# ---------------------------------------------------------------------- figures


class Cell(NamedTuple):
    """What one trigger reaches in one row of the table: a figure for each seed."""

    attackers: int
    sites: int
    rule: str
    schedule: str
    trigger: str
    successes: list[float]
    aurocs: list[float]
    excluded: list[str]


def collect_cells(trials: Mapping[TrialKey, Trial]) -> list[Cell]:
    """Put the runs of all seeds together; a row of which a run is missing is left out."""
    cells = []
    for population, rule, schedules in ROWS:
        for schedule, trigger in itertools.product((HONEST, *schedules), TRIGGERS):
            own = "" if schedule == HONEST else trigger
            keys = [TrialKey(population, rule, schedule, seed, own) for seed in SEEDS]
            of_seeds = [trials[key] for key in keys if key in trials]
            if len(of_seeds) == len(SEEDS):
                successes = [trial.successes[trigger] for trial in of_seeds]
                excluded = sorted({site for trial in of_seeds for site in trial.excluded})
                aurocs = [trial.auroc for trial in of_seeds]
                cells.append(Cell(*population, rule, schedule, trigger, successes, aurocs, excluded))
    return [cell for cell in cells if _is_whole_row(cells, cell)]


def _is_whole_row(cells: Sequence[Cell], cell: Cell) -> bool:
    schedules = next(row[2] for row in ROWS if (*row[0], row[1]) == cell[:3])
    return sum(each[:3] == cell[:3] for each in cells) == (1 + len(schedules)) * len(TRIGGERS)


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Lowest, mean and highest."""
    values = list(values)
    low, middle, high = (format(each, form) for each in (min(values), statistics.mean(values), max(values)))
    return f"{low}, **{middle}**, {high}"


def draw_tables(measured: Mapping[str, Any]) -> str:
    """Both tables of the page: by attackers and rule, and by trigger for the default."""
    cells = [Cell(*fields) for fields in measured["cells"]]
    lines = [f"| attackers | rule | {' | '.join(SCHEDULES)} | no attack | change of AUROC |"]
    lines.append("| --- " * (len(SCHEDULES) + 4) + "|")
    for population, rule, _ in sorted(
        ROWS, key=lambda row: (row[0].sites, row[0].attackers, list(RULES).index(row[1]))
    ):
        row = [cell for cell in cells if cell[:3] == (*population, rule)]
        if row:
            lines.append(
                f"| {population.attackers} of {population.sites} | {WORDS.get(rule, rule)} | {_draw_row(row)} |"
            )
    lines += ["", f"| 1 of 5, `clip` 3: trigger | {' | '.join((HONEST, *WITH_BOUND))} |"]
    lines.append("| --- " * (len(WITH_BOUND) + 2) + "|")
    for trigger in TRIGGERS:
        of_trigger = {cell.schedule: cell for cell in cells if cell[:3] == (1, 5, DEFAULT) and cell.trigger == trigger}
        figures = [spread(of_trigger[schedule].successes) for schedule in (HONEST, *WITH_BOUND)]
        lines.append(f"| {trigger} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def _draw_row(row: Sequence[Cell]) -> str:
    honest = row[0].aurocs
    changes = [auroc - own for cell in row for auroc, own in zip(cell.aurocs, honest, strict=True)]
    figures = []
    for schedule in (*SCHEDULES, HONEST):
        successes = [value for cell in row if cell.schedule == schedule for value in cell.successes]
        figures.append(spread(successes) if successes else "")
    return " | ".join([*figures, f"{min(changes):+.3f} to {max(changes):+.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run begins after that")
    options = parser.parse_args()
    np.seterr(all="ignore")
    if not options.draw:
        run_missing_trials(options.minutes)
        cells = ",\n".join(json.dumps(cell) for cell in collect_cells(read_trials()))
        MEASURED.write_text(f'{{"date": "{date.today()}", "cells": [\n{cells}\n]}}\n', encoding="utf-8")
    write_block(PAGE, BLOCK, draw_tables(json.loads(MEASURED.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
