"""What the lines of the benchmark say: quality with intervals over patients and seeds, ranks, tests, and cost."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from server.analysis.benchmark.lines import ClassResult, ResultLine
from server.analysis.benchmark.ranking import Ranking, ranking
from server.analysis.benchmark.spec import FormPlan
from server.analysis.statistics import PairedTest, corrected, paired_test

NORMAL = 1.96
Measure = Callable[[ClassResult], float | None]
Block = tuple[str, str]


@dataclass(frozen=True)
class Entry:
    """One method in one block.

    Attributes:
        seeds: Of which there are runs.
        auroc: Mean over scored classes and seeds.
        seed_sd: Sample standard deviation over seeds; None with one.
        patient_error: Standard error over the test part's patients; None where sites have models of their own.
        lr: The learning rate that validation chose.
    """

    seeds: int
    auroc: float
    average_precision: float
    balanced_accuracy: float
    seed_sd: float | None
    patient_error: float | None
    lr: float


@dataclass(frozen=True)
class BlockResult:
    """One data set with one pattern.

    Attributes:
        scored: Class -> test positives, of those with enough; the others are in ``unscored``.
        complete: Whether every method has all seeds.
        common_seeds: Seeds that every ranked method has; ranks are of these alone.
        entries: By method's label.
    """

    data: str
    pattern: str
    scored: Mapping[str, int]
    unscored: Mapping[str, int]
    complete: bool
    common_seeds: tuple[int, ...]
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class MethodOverBlocks:
    """One method over the blocks that all ranked methods have.

    Attributes:
        half_width: Of the 95 % interval of the mean AUROC, over patients and seeds; None where either is unknown.
        test: The method against the reference, paired over blocks; None for the reference, and for what is not ranked.
        cpu_seconds, megabytes: Mean of a run.
        beyond: What it has that hospitals do not; empty for ranked methods.
    """

    label: str
    auroc: float | None
    half_width: float | None
    average_precision: float | None
    balanced_accuracy: float | None
    cpu_seconds: float | None
    megabytes: float | None
    beyond: str
    test: PairedTest | None = None


@dataclass(frozen=True)
class BenchmarkResult:
    """The whole page.

    Attributes:
        done, wanted: Runs, those that choose learning rates among them.
        ranking_of_data: The same with one value a data set, the mean over its blocks, which share their test part.
        codes: Version of the code -> runs made with it.
        untrained: Method -> its runs that are tested by the initial model, because no round was better by validation.
    """

    title: str
    form: str
    rounds: int
    seeds: int
    reference: str
    done: int
    wanted: int
    blocks: tuple[BlockResult, ...]
    blocks_wanted: int
    methods: tuple[MethodOverBlocks, ...]
    ranking: Ranking
    ranking_of_data: Ranking
    codes: Mapping[str, int]
    untrained: Mapping[str, int]
    not_run: tuple[str, ...]

    @property
    def partial(self) -> bool:
        """Whether runs are missing."""
        return self.done < self.wanted


def rates_of(lines: Iterable[ResultLine], data: str) -> dict[str, float]:
    """Method -> learning rate with the best validation AUROC on a data set, the lower of equals."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line.tuning and line.data == data and line.validation_auroc is not None:
            found.setdefault(line.method, []).append((-line.validation_auroc, line.lr))
    return {method: min(tried)[1] for method, tried in found.items()}


def result_of(plan: FormPlan, form: str, lines: Mapping[str, ResultLine], wanted: int) -> BenchmarkResult:
    """Everything that the lines say, as far as they go.

    Args:
        lines: Finished runs of this plan, by block and key.
        wanted: Number of runs of the whole plan.
    """
    blocks = [_block(plan, block, lines.values()) for block in plan.form.blocks]
    there = tuple(block for block in blocks if block.entries)
    shared = [block for block in there if block.common_seeds]
    ranked = [method.label for method in plan.benchmark.methods if not method.beyond]
    ranks = _ranking(ranked, [[block] for block in shared])
    labels = [method.label for method in plan.benchmark.methods]
    ordered = [*ranks.ranks, *(label for label in labels if label not in ranks.ranks)]
    methods = _tested(plan, [_method(plan, label, shared, lines.values()) for label in ordered], shared)
    run = {line.method for line in lines.values()}
    return BenchmarkResult(
        title=plan.benchmark.title,
        form=form,
        rounds=plan.form.rounds,
        seeds=plan.form.seeds,
        reference=plan.benchmark.reference,
        done=len(lines),
        wanted=wanted,
        blocks=there,
        blocks_wanted=len(plan.form.blocks),
        methods=tuple(methods),
        ranking=ranks,
        ranking_of_data=_ranking(ranked, [[one for one in shared if one.data == data] for data in plan.data_sets()]),
        codes=dict(Counter(line.code for line in lines.values())),
        untrained=dict(Counter(line.method for line in lines.values() if line.best_round == 0 and not line.tuning)),
        not_run=tuple(label for label in labels if label not in run),
    )


def _ranking(labels: Sequence[str], groups: Sequence[Sequence[BlockResult]]) -> Ranking:
    """Rank methods by their mean over the blocks of each group; a group without blocks does not count."""
    there = [blocks for blocks in groups if blocks]
    means = {
        label: [float(np.mean([block.entries[label].auroc for block in blocks])) for blocks in there]
        for label in labels
    }
    return ranking(means if there else {})


def _block(plan: FormPlan, block: Block, lines: Iterable[ResultLine]) -> BlockResult:
    of_block = [line for line in lines if (line.data, line.pattern) == block and not line.tuning]
    of_method: dict[str, dict[int, ResultLine]] = {}
    for line in of_block:
        of_method.setdefault(line.method, {})[line.seed] = line
    scored, unscored = _scored(of_block, plan.benchmark.fewest_positives)
    methods = plan.methods(block[0])
    ranked = [set(of_method.get(method.label, {})) for method in methods if not method.beyond]
    common = set.intersection(*ranked) if ranked else set()
    complete = all(len(of_method.get(method.label, {})) == plan.form.seeds for method in methods)
    entries = {
        label: _entry([line for seed, line in sorted(runs.items()) if not common or seed in common], tuple(scored))
        for label, runs in of_method.items()
        if not common or common & set(runs)
    }
    return BlockResult(*block, scored, unscored, complete, tuple(sorted(common)), entries if scored else {})


def _scored(lines: Sequence[ResultLine], fewest: int) -> tuple[dict[str, int], dict[str, int]]:
    """Classes with enough test positives and negatives, and the others; the test part is one for all methods."""
    counts: dict[str, tuple[int, int]] = {}
    for line in lines:
        for name, each in line.classes.items():
            before = counts.get(name, (each.positives, each.negatives))
            counts[name] = (min(before[0], each.positives), min(before[1], each.negatives))
    enough = {name for name, kinds in counts.items() if min(kinds) >= fewest}
    positives = {name: kinds[0] for name, kinds in sorted(counts.items())}
    return (
        {name: count for name, count in positives.items() if name in enough},
        {name: count for name, count in positives.items() if name not in enough},
    )


def _entry(lines: Sequence[ResultLine], scored: Sequence[str]) -> Entry:
    means = {
        name: [_mean(line, scored, measure) for line in lines]
        for name, measure in (
            ("auroc", lambda one: one.auroc),
            ("average_precision", lambda one: one.average_precision),
            ("balanced_accuracy", lambda one: one.balanced_accuracy),
        )
    }
    errors = [patient_error(line, scored) for line in lines]
    return Entry(
        seeds=len(lines),
        **{name: float(np.mean(values)) for name, values in means.items()},
        seed_sd=float(np.std(means["auroc"], ddof=1)) if len(lines) > 1 else None,
        patient_error=None if None in errors else float(np.mean([error for error in errors if error is not None])),
        lr=lines[0].lr,
    )


def _mean(line: ResultLine, scored: Sequence[str], measure: Measure) -> float:
    """Mean over the scored classes, of which every one has an owner, so that every model has them."""
    values = [measure(line.classes[name]) for name in scored]
    return float(np.mean([value for value in values if value is not None]))


def patient_error(line: ResultLine, scored: Sequence[str]) -> float | None:
    """Standard error of the mean AUROC over the scored classes, over the test part's patients.

    It comes from the run's bootstrap intervals. Those of single classes would give it if classes were independent; how
    far they are not shows the interval of the mean over all classes, whose ratio is taken over to the scored ones.
    """
    every = {name: each.interval for name, each in line.classes.items() if each.interval is not None}
    if line.interval is None or any(name not in every for name in scored):
        return None
    independent = _independent([_error(interval) for interval in every.values()])
    of_scored = _independent([_error(every[name]) for name in scored])
    return of_scored * _error(line.interval) / independent if independent else 0.0


def _error(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / (2 * NORMAL)


def _independent(errors: Sequence[float]) -> float:
    return float(np.sqrt(np.sum(np.square(errors)))) / len(errors)


def _method(plan: FormPlan, label: str, shared: Sequence[BlockResult], lines: Iterable[ResultLine]) -> MethodOverBlocks:
    entries = [(block.data, block.entries[label]) for block in shared if label in block.entries]
    runs = [line for line in lines if line.method == label]
    means = [
        float(np.mean([getattr(entry, name) for _, entry in entries])) if entries else None
        for name in ("auroc", "average_precision", "balanced_accuracy")
    ]
    return MethodOverBlocks(
        label=label,
        auroc=means[0],
        half_width=half_width(entries),
        average_precision=means[1],
        balanced_accuracy=means[2],
        cpu_seconds=float(np.mean([line.cpu_seconds for line in runs])) if runs else None,
        megabytes=float(np.mean([line.megabytes for line in runs])) if runs else None,
        beyond=next(method.beyond for method in plan.benchmark.methods if method.label == label),
    )


def half_width(entries: Sequence[tuple[str, Entry]]) -> float | None:
    """Half the width of the 95 % interval of a mean over blocks; None where a block has one seed or unknown errors.

    Blocks of one data set are tested on the same patients: their errors add up as they are. Data sets are independent
    of one another, and so are seeds.
    """
    if not entries or any(entry.seed_sd is None or entry.patient_error is None for _, entry in entries):
        return None
    by_data: dict[str, float] = {}
    for data, entry in entries:
        by_data[data] = by_data.get(data, 0.0) + (entry.patient_error or 0.0)
    of_seeds = [(entry.seed_sd or 0.0) ** 2 / entry.seeds for _, entry in entries]
    variance = (np.sum(np.square(list(by_data.values()))) + np.sum(of_seeds)) / len(entries) ** 2
    return float(NORMAL * np.sqrt(variance))


def _tested(
    plan: FormPlan, methods: Sequence[MethodOverBlocks], shared: Sequence[BlockResult]
) -> list[MethodOverBlocks]:
    """Each ranked method against the reference, paired over blocks; Holm's family is all of them."""
    reference, generator = plan.benchmark.reference, np.random.default_rng(0)
    others = [one.label for one in methods if not one.beyond and one.label != reference] if shared else []
    tests = [
        paired_test(
            np.array([[block.entries[label].auroc, block.entries[reference].auroc] for block in shared]), generator
        )
        for label in others
    ]
    found = dict(zip(others, corrected(tests), strict=True))
    return [replace(one, test=found.get(one.label)) for one in methods]
