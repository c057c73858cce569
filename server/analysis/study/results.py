"""A study's tables: ours beside the paper's, tests, and what the figures need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.system.formatting import counted
from server.analysis.comparison import Spread, auroc_scores, over_seeds
from server.analysis.statistics import PairedTest, corrected, paired_over_classes, paired_test
from server.analysis.study.spec import Figure, Study, Table
from server.runs.reader import Run

Seeds = Sequence[Run]
Grid = Sequence[Sequence[Seeds]]  # method, setting, seed


@dataclass(frozen=True)
class PublishedNumber:
    """One number: ours over the seeds, and the paper's; None where there is none."""

    ours: Spread
    paper: float | None


@dataclass(frozen=True)
class PairedComparison:
    """The reference against another method; ``setting`` is empty where settings are the pairs."""

    other: str
    setting: str
    result: PairedTest


@dataclass(frozen=True)
class Curves:
    """One method's course in one setting.

    Attributes:
        rounds: Of which there are accuracies.
        accuracy: Mean over sites and seeds, by round.
        sites: Accuracy of every site in the best round of every seed.
    """

    method: str
    setting: str
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    sites: tuple[float, ...]


@dataclass(frozen=True)
class TableResult:
    """One table.

    Attributes:
        positions: The settings along a sweep.
        entries: By method, setting and measure.
        scale: What was run here, setting by setting.
        untrained: Runs that are tested by the initial model, because no round was better by validation: method,
            setting and number of seeds.
    """

    title: str
    headings: tuple[str, ...]
    methods: tuple[str, ...]
    settings: tuple[str, ...]
    positions: tuple[float | None, ...]
    entries: tuple[tuple[tuple[PublishedNumber, ...], ...], ...]
    reference: str
    tests: tuple[PairedComparison, ...]
    figures: tuple[Figure, ...]
    curves: tuple[Curves, ...]
    differs: tuple[str, ...]
    scale: tuple[str, ...]
    untrained: tuple[tuple[str, str, int], ...] = ()

    @property
    def columns(self) -> list[tuple[int, str, bool]]:
        """Index and heading of each measure, and whether the paper gives a number for it."""
        every = [column for row in self.entries for column in row]
        return [(i, title, any(e[i].paper is not None for e in every)) for i, title in enumerate(self.headings)]


@dataclass(frozen=True)
class StudyResult:
    """The whole study."""

    title: str
    paper: str
    seeds: tuple[int, ...]
    differs: tuple[str, ...]
    tables: tuple[TableResult, ...]


def result_of(study: Study, runs: Sequence[Grid]) -> StudyResult:
    """Gather what the runs say.

    Args:
        runs: By table, method, setting and seed.
    """
    seeds = tuple(run.summary.seed for run in runs[0][0][0])
    tables = tuple(_table(table, grid) for table, grid in zip(study.tables, runs, strict=True))
    return StudyResult(study.title, study.paper, seeds, study.differs, tables)


def _table(table: Table, grid: Grid) -> TableResult:
    entries = tuple(
        tuple(_entries(table, method.title, s, column) for s, column in enumerate(row))
        for method, row in zip(table.methods, grid, strict=True)
    )
    return TableResult(
        title=table.title,
        headings=tuple(table.headings),
        methods=tuple(method.title for method in table.methods),
        settings=tuple(setting.title for setting in table.settings),
        positions=tuple(setting.x for setting in table.settings),
        entries=entries,
        reference=table.reference,
        tests=tuple(_tests(table, grid, entries) if table.reference else ()),
        figures=table.figures,
        curves=tuple(_curves(table, grid)) if {"curves", "density"} & set(table.figures) else (),
        differs=table.differs,
        scale=tuple(_scale(column[0]) for column in grid[0]),
        untrained=tuple(_untrained(table, grid)),
    )


def _entries(table: Table, method: str, setting: int, runs: Seeds) -> tuple[PublishedNumber, ...]:
    return tuple(
        PublishedNumber(over_seeds([reading(run) for run in runs]), table.of_paper(method, setting, index))
        for index, reading in enumerate(table.readings)
    )


def _tests(table: Table, grid: Grid, entries: Sequence[Sequence[Sequence[PublishedNumber]]]) -> list[PairedComparison]:
    """Holm's family is all other methods, in one setting or over all of them."""
    generator = np.random.default_rng(0)
    titles = [method.title for method in table.methods]
    reference = titles.index(table.reference)
    others = [index for index in range(len(titles)) if index != reference]
    if table.tests == "settings":
        values = [[column[0].ours.mean for column in row] for row in entries]
        seeds = min(len(runs) for row in grid for runs in row)
        made = [paired_test(_pairs(values[reference], values[other]), generator) for other in others]
        found = corrected([replace(test, seeds=seeds) for test in made])
        return [PairedComparison(titles[other], "", test) for other, test in zip(others, found, strict=True)]
    tested = []
    for s, setting in enumerate(table.settings):
        scores = [auroc_scores(row[s]) for row in grid]
        found = corrected([paired_over_classes(scores[reference], scores[other], generator) for other in others])
        tested += [
            PairedComparison(titles[other], setting.title, test) for other, test in zip(others, found, strict=True)
        ]
    return tested


def _pairs(ours: Sequence[float | None], theirs: Sequence[float | None]) -> NDArray[np.float64]:
    defined = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return np.asarray(defined, dtype=np.float64).reshape(-1, 2)


def _curves(table: Table, grid: Grid) -> list[Curves]:
    return [
        _curve(method.title, setting.title, runs)
        for method, row in zip(table.methods, grid, strict=True)
        for setting, runs in zip(table.settings, row, strict=True)
    ]


def _curve(method: str, setting: str, runs: Seeds) -> Curves:
    by_round: dict[int, list[float]] = {}
    for each in (each for run in runs for each in run.rounds if each.test_accuracy):
        assert each.test_accuracy is not None
        by_round.setdefault(each.round, []).append(each.test_accuracy.mean)
    rounds = tuple(sorted(number for number, values in by_round.items() if len(values) == len(runs)))
    means = tuple(float(np.mean(by_round[number])) for number in rounds)
    best = [run.summary.client_accuracy for run in runs if run.summary.client_accuracy]
    return Curves(method, setting, rounds, means, tuple(value for each in best for value in each.per_site.values()))


def _untrained(table: Table, grid: Grid) -> Iterator[tuple[str, str, int]]:
    for method, row in zip(table.methods, grid, strict=True):
        for setting, runs in zip(table.settings, row, strict=True):
            if count := sum(run.summary.untrained for run in runs):
                yield method.title, setting.title, count


def _scale(run: Run) -> str:
    """What one run had: for the reader who sets our numbers beside the paper's."""
    summary = run.summary
    samples = sum(site.train_samples or 0 for site in summary.sites.values())
    test = next(iter(summary.test.per_class.values()))
    tested = summary.test.multi_class.images if summary.test.multi_class else test.images
    test_images = "test images that no site counts" if tested is None else counted(tested, "test image")
    model = summary.experiment.get("model", {})
    return (
        f"{counted(len(summary.sites), 'site')}, {counted(samples, 'training image')}, {test_images}, "
        f"{counted(summary.rounds, 'round')}, "
        f"{model.get('architecture')} on {model.get('image_size')} pixels"
    )
