"""Compute the results of a study's tables: our numbers and the paper's, tests, and the data of figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.server.runs.schema import RunSummary
from polyclinic.studies.comparison import MeanAndSd, collect_auroc_scores, summarise_over_seeds
from polyclinic.studies.statistics import PairedTest, compare_over_classes, compute_paired_test, correct_family_by_holm
from polyclinic.studies.study_file import Figure, PaperTable, StudyFile

RunGrid = Sequence[Sequence[Sequence[RunFolderContent]]]  # method, setting, seed


@dataclass(frozen=True)
class OurAndPaperNumber:
    """Our mean and SD over the seeds, and the paper's number (may be None)."""

    ours: MeanAndSd
    paper: float | None


@dataclass(frozen=True)
class PairedComparison:
    """The test of the reference against another method; ``setting`` is empty if the pairs are settings."""

    other: str
    setting: str
    result: PairedTest


@dataclass(frozen=True)
class AccuracyCurve:
    """The sites' accuracy with one method in one setting.

    Attributes:
        rounds: Rounds with an accuracy in every run.
        accuracy: Mean over sites and seeds, by round.
        sites: Accuracy of each site in the best round, for each seed.
    """

    method: str
    setting: str
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    sites: tuple[float, ...]


@dataclass(frozen=True)
class TableResult:
    """The results of one table of a study.

    Attributes:
        positions: Positions of the settings on the axis of a sweep.
        entries: Numbers by method, setting and measure.
        scale: Size of our runs, setting by setting.
        untrained: Method, setting, and number of seeds whose initial model was best by validation and is tested.
    """

    title: str
    headings: tuple[str, ...]
    methods: tuple[str, ...]
    settings: tuple[str, ...]
    positions: tuple[float | None, ...]
    entries: tuple[tuple[tuple[OurAndPaperNumber, ...], ...], ...]
    reference: str
    tests: tuple[PairedComparison, ...]
    figures: tuple[Figure, ...]
    curves: tuple[AccuracyCurve, ...]
    differs: tuple[str, ...]
    scale: tuple[str, ...]
    untrained: tuple[tuple[str, str, int], ...] = ()

    @property
    def columns(self) -> list[tuple[int, str, bool]]:
        """Return the index and heading of each measure, and whether the paper gives a number for it."""
        cells = [column for row in self.entries for column in row]
        return [(i, title, any(cell[i].paper is not None for cell in cells)) for i, title in enumerate(self.headings)]


@dataclass(frozen=True)
class StudyResult:
    """The results of a study, and what its page says about the paper."""

    title: str
    paper: str
    seeds: tuple[int, ...]
    differs: tuple[str, ...]
    tables: tuple[TableResult, ...]


def evaluate_study(study: StudyFile, runs: Sequence[RunGrid]) -> StudyResult:
    """Compute the results of a study's tables.

    Args:
        runs: Runs by table, method, setting and seed.
    """
    seeds = tuple(run.summary.seed for run in runs[0][0][0])
    tables = tuple(_evaluate_table(table, grid) for table, grid in zip(study.tables, runs, strict=True))
    differs = (*study.differs, *(str(departure) for departure in study.departures))
    return StudyResult(study.title, study.paper, seeds, differs, tables)


def _evaluate_table(table: PaperTable, grid: RunGrid) -> TableResult:
    entries = tuple(
        tuple(
            tuple(
                OurAndPaperNumber(
                    summarise_over_seeds([read(run) for run in runs]),
                    table.get_paper_value(method.title, column, index),
                )
                for index, read in enumerate(table.measure_readers)
            )
            for column, runs in enumerate(row)
        )
        for method, row in zip(table.methods, grid, strict=True)
    )
    titles = [(method.title, setting.title) for method in table.methods for setting in table.settings]
    every = [(*pair, runs) for pair, runs in zip(titles, (runs for row in grid for runs in row), strict=True)]
    untrained = (
        (method, setting, sum(run.summary.is_initial_model_tested for run in runs)) for method, setting, runs in every
    )
    drawn = {"curves", "density"} & set(table.figures)
    return TableResult(
        title=table.title,
        headings=tuple(table.measure_headings),
        methods=tuple(method.title for method in table.methods),
        settings=tuple(setting.title for setting in table.settings),
        positions=tuple(setting.x for setting in table.settings),
        entries=entries,
        reference=table.reference,
        tests=tuple(_compute_paired_tests(table, grid, entries)) if table.reference else (),
        figures=table.figures,
        curves=tuple(_collect_accuracy_curves(method, setting, runs) for method, setting, runs in every)
        if drawn
        else (),
        differs=table.differs,
        scale=tuple(_describe_run_size(column[0].summary) for column in grid[0]),
        untrained=tuple(each for each in untrained if each[2]),
    )


def _compute_paired_tests(
    table: PaperTable, grid: RunGrid, entries: Sequence[Sequence[Sequence[OurAndPaperNumber]]]
) -> Iterator[PairedComparison]:
    """Yield the test of each other method against the reference, in each setting or over settings (``table.tests``).

    Holm's correction is over the methods of a setting, or over those of the table if the pairs are settings.
    """
    generator = np.random.default_rng(0)
    titles = [method.title for method in table.methods]
    reference = titles.index(table.reference)
    others = [index for index in range(len(titles)) if index != reference]
    families = dict[str, list[PairedTest]]()  # by setting
    if table.tests == "settings":
        means = [[column[0].ours.mean for column in row] for row in entries]
        seeds = min(len(runs) for row in grid for runs in row)
        for other in others:
            pairs = [pair for pair in zip(means[reference], means[other], strict=True) if None not in pair]
            test = compute_paired_test(np.array(pairs, np.float64).reshape(-1, 2), generator)
            families.setdefault("", []).append(replace(test, seeds=seeds))
    for index, setting in enumerate(table.settings if table.tests == "classes" else ()):
        scores = [collect_auroc_scores(row[index]) for row in grid]
        tests = [compare_over_classes(scores[reference], scores[other], generator) for other in others]
        families[setting.title] = tests
    for title, tests in families.items():
        for other, test in zip(others, correct_family_by_holm(tests), strict=True):
            yield PairedComparison(titles[other], title, test)


def _collect_accuracy_curves(method: str, setting: str, runs: Sequence[RunFolderContent]) -> AccuracyCurve:
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for each in run.rounds:
            if each.test_accuracy:
                by_round.setdefault(each.round, []).append(each.test_accuracy.mean)
    rounds = tuple(sorted(number for number, values in by_round.items() if len(values) == len(runs)))
    means = tuple(float(np.mean(by_round[number])) for number in rounds)
    best = [run.summary.client_accuracy for run in runs if run.summary.client_accuracy]
    return AccuracyCurve(
        method, setting, rounds, means, tuple(value for each in best for value in each.per_site.values())
    )


def _describe_run_size(summary: RunSummary) -> str:
    """Describe the size of a run in words, for comparison with the paper."""
    samples = sum(site.train_samples or 0 for site in summary.sites.values())
    test = next(iter(summary.test.per_class.values()))
    tested = summary.test.multi_class.images if summary.test.multi_class else test.images
    test_images = "test images that no site counts" if tested is None else format_count_with_noun(tested, "test image")
    model, rounds = summary.experiment.get("model", {}), format_count_with_noun(summary.rounds, "round")
    size = (
        f"{format_count_with_noun(len(summary.sites), 'site')}, {format_count_with_noun(samples, 'training image')}, "
        f"{test_images}, "
        f"{rounds}"
    )
    unit = "voxels" if isinstance(model.get("image_size"), list | tuple) else "pixels"
    return f"{size}, {model.get('architecture')} on {model.get('image_size')} {unit}"
