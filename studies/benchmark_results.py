"""Read and write the benchmark's results file, with a JSON line for each finished run, and evaluate the runs."""

import ast
import csv
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import open_own_file
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan, PlannedRun
from polyclinic.studies.statistics import MethodRanking, PairedTest, compute_paired_test, rank_methods

Z_95 = 1.96
"""97.5th percentile of the standard normal distribution, for 95 % intervals."""
Interval = tuple[float, float]
_ROOT = Path(__file__).parents[1]
DECIDE = ("data", "common/metrics", "common/models", "strategies", "client/training")
"""Folders whose code determines the result of a run."""
BENCHMARK_METRICS = ("auroc", "average_precision", "balanced_accuracy")


class BenchmarkClassResult(BaseModel):
    """The metrics of one class on the test part of one run."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    positives: int
    negatives: int
    auroc: float | None
    average_precision: float | None
    balanced_accuracy: float | None
    interval: Interval | None = None


class RunResultLine(BaseModel):
    """The line of one finished run in the results file.

    Attributes:
        key: Hash of the run's settings.
        code: Hash of the code on which the result depends (:func:`hash_result_code`).
        commit: Git commit of the checkout that ran it; empty in an installed package and in earlier files.
        validation_auroc: Highest validation AUROC of all rounds, by which a learning rate is chosen; None if there is
            no validation AUROC.
        interval: 95 % interval of the mean AUROC of all classes, by a bootstrap over the patients of the test part;
            None if each site has a personal model.
        cpu_seconds: CPU time of the run's process.
        megabytes: Megabytes that all sites sent and received.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    key: str
    code: str
    commit: str = ""
    data: str
    pattern: str
    method: str
    lr: float
    seed: int
    tuning: bool
    validation_auroc: float | None
    classes: dict[str, BenchmarkClassResult]
    interval: Interval | None
    best_round: int | None
    rounds: int
    cpu_seconds: float
    megabytes: float


def make_benchmark_result_line(planned: PlannedRun, run: RunFolderContent, cpu_seconds: float) -> RunResultLine:
    """Make the results file's line for a finished run."""
    test = run.summary.test
    intervals = test.intervals.per_class if test.intervals else {}
    validated = [each.validation_auroc for each in run.rounds if each.validation_auroc is not None]
    classes = {
        name: BenchmarkClassResult(
            positives=result.positives or 0,
            negatives=result.negatives or 0,
            auroc=_round_to_five_decimals(result.auroc),
            average_precision=_round_to_five_decimals(result.average_precision),
            balanced_accuracy=_round_to_five_decimals(result.balanced_accuracy),
            interval=_round_interval(intervals.get(name)),
        )
        for name, result in test.per_class.items()
    }
    return RunResultLine(
        key=planned.results_key,
        code=hash_result_code(),
        commit=find_git_commit(),
        data=planned.data,
        pattern=planned.pattern,
        method=planned.method,
        lr=planned.lr,
        seed=planned.seed,
        tuning=planned.tuning,
        validation_auroc=_round_to_five_decimals(max(validated, default=None)),
        classes=classes,
        interval=_round_interval(test.intervals.mean_auroc if test.intervals else None),
        best_round=run.summary.best_round,
        rounds=run.summary.rounds,
        cpu_seconds=round(cpu_seconds, 2),
        megabytes=round(run.summary.total_traffic_bytes / 1e6, 3),
    )


def _round_to_five_decimals(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _round_interval(interval: Interval | None) -> Interval | None:
    return None if interval is None else (round(interval[0], 5), round(interval[1], 5))


def read_result_lines(path: Path) -> dict[str, RunResultLine]:
    """Return key -> latest finished run of a results file; an incomplete last line is ignored.

    Raises:
        BadInput: If another line is not a result.
    """
    if not path.exists():
        return {}
    texts = path.read_text(encoding="utf-8").split("\n")
    lines: dict[str, RunResultLine] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = RunResultLine.model_validate_json(text)
        except ValidationError:
            if number == len(texts):
                break
            problem = f"line {number} is no result of a run."
            raise BadInput([Fault(str(path), problem, "Remove that line; its run is made again.")]) from None
        lines[line.key] = line
    return lines


def append_result_line(path: Path, line: RunResultLine) -> None:
    """Append a line to the results file; an incomplete last line, from a killed program, is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own_file(path, "ab+") as file:
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(line.model_dump(mode="json"), sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


RUNS_HEADING = (
    "data", "pattern", "method", "learning_rate", "seed", "chooses_rate", "rounds", "best_round", "class", "positives",
    "negatives", *BENCHMARK_METRICS, "auroc_low", "auroc_high", "validation_auroc", "cpu_seconds", "megabytes", "code",
    "commit", "key",
)  # fmt: skip


def format_runs_as_csv(lines: Iterable[RunResultLine]) -> str:
    """Return the metrics of finished runs as CSV, with a line for each class of each run; unknown values are blank.

    ``auroc_low`` and ``auroc_high`` are the ends of the class's 95 % interval over patients.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(RUNS_HEADING)
    for line in lines:
        run_cells = (
            line.data,
            line.pattern,
            line.method,
            line.lr,
            line.seed,
            int(line.tuning),
            line.rounds,
            line.best_round,
        )
        cost = (line.validation_auroc, line.cpu_seconds, line.megabytes, line.code, line.commit, line.key)
        for name, result in line.classes.items():
            measures = [getattr(result, measure) for measure in BENCHMARK_METRICS]
            low, high = result.interval or (None, None)
            writer.writerow([*run_cells, name, result.positives, result.negatives, *measures, low, high, *cost])
    return text.getvalue()


@cache
def hash_result_code() -> str:
    """Return a hash of the code that determines a run's result, without comments and docstrings."""
    digest = hashlib.sha256()
    paths = [path for folder in DECIDE for path in sorted((_ROOT / folder).rglob("*.py"))]
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [
                    statement
                    for statement in node.body
                    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                ]
        digest.update(f"{path.relative_to(_ROOT)}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:12]


@cache
def find_git_commit(checkout: Path = _ROOT.parent) -> str:
    """Return the commit that is checked out in a folder; empty if the folder is no checkout of git.

    Changes that are not committed do not show here; :func:`hash_result_code` sees them.
    """
    folder = checkout / ".git"
    if folder.is_file():  # a further work tree names the folder of its own state
        folder = checkout / folder.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    head = folder / "HEAD"
    if not head.is_file():
        return ""
    kind, _, reference = head.read_text(encoding="utf-8").strip().partition(" ")
    if kind != "ref:":
        return kind
    shared = folder / "commondir"
    common = folder / shared.read_text(encoding="utf-8").strip() if shared.is_file() else folder
    if (common / reference).is_file():
        return (common / reference).read_text(encoding="utf-8").strip()
    packed = common / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {reference}")), "")


@dataclass(frozen=True)
class MethodBlockResult:
    """The metrics of one method in one block (a data set with a label pattern).

    Attributes:
        seeds: Number of runs, each with its own seed.
        auroc: Mean over scored classes and seeds.
        seed_sd: Sample standard deviation over seeds; None with one seed.
        patient_error: Standard error over the patients of the test part; None if each site has a personal model.
        lr: Learning rate chosen by validation.
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
    """The results of all methods in one block (a data set with a label pattern).

    Attributes:
        scored: Class -> number of test positives, for classes with enough positives and negatives to be scored.
        unscored: Class -> number of test positives, for the other classes.
        common_seeds: Seeds with which every ranked method was run; if empty, the block is not used for ranks.
        entries: Label of a method -> its metrics, over the common seeds if there are any, else over all its seeds.
    """

    data: str
    pattern: str
    scored: Mapping[str, int]
    unscored: Mapping[str, int]
    common_seeds: tuple[int, ...]
    entries: Mapping[str, MethodBlockResult]


@dataclass(frozen=True)
class MeanAurocWithInterval:
    """A mean AUROC over blocks, and half the width of its 95 % interval over patients and seeds (None if unknown)."""

    auroc: float
    half_width: float | None


@dataclass(frozen=True)
class MethodOverallResult:
    """The results of one method over all blocks in which every ranked method has results.

    Attributes:
        half_width: Half the width of the 95 % interval of the mean AUROC, over patients and seeds; None if unknown.
        cpu_seconds, megabytes: Means over the runs.
        beyond: Reason why the method is not ranked: an advantage that hospitals do not have; empty if it is ranked.
        by_data: Data set -> mean AUROC over its blocks.
        lead: Mean difference to the AUROC of the reference over the method's blocks; None for the reference.
        test: Test against the reference, paired over data sets and not corrected for the number of methods; None for
            the reference. Blocks are not the pairs, because blocks of one data set share its test part.
    """

    label: str
    auroc: float | None
    half_width: float | None
    average_precision: float | None
    balanced_accuracy: float | None
    cpu_seconds: float | None
    megabytes: float | None
    beyond: str
    by_data: Mapping[str, MeanAurocWithInterval]
    lead: float | None = None
    test: PairedTest | None = None


@dataclass(frozen=True)
class BenchmarkResult:
    """The content of the benchmark's page.

    Attributes:
        done, planned: Number of finished and of all runs, including runs that choose learning rates.
        ranking_of_data: Ranking with one value for each data set, the mean over its blocks. Blocks of one data set
            share their test part and are not independent.
        codes: Version of the code -> number of runs made with it.
        untrained: Method -> number of its runs that tested the initial model, because it was best by validation.
        not_run: Methods without a run.
    """

    title: str
    form: str
    rounds: int
    seeds: int
    reference: str
    done: int
    planned: int
    blocks: tuple[BlockResult, ...]
    blocks_planned: int
    methods: tuple[MethodOverallResult, ...]
    ranking: MethodRanking
    ranking_of_data: MethodRanking
    codes: Mapping[str, int]
    untrained: Mapping[str, int]
    not_run: tuple[str, ...]

    @property
    def is_benchmark_incomplete(self) -> bool:
        """Return True if runs are missing."""
        return self.done < self.planned


def choose_learning_rates(lines: Iterable[RunResultLine], data: str) -> dict[str, float]:
    """Return method -> learning rate with the best validation AUROC on a data set; among equals, the lowest rate."""
    tried: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line.tuning and line.data == data and line.validation_auroc is not None:
            tried.setdefault(line.method, []).append((-line.validation_auroc, line.lr))
    return {method: min(rates)[1] for method, rates in tried.items()}


def find_wider_rate(auroc_by_rate: Mapping[float, float], candidates: Iterable[float]) -> float | None:
    """Return the next learning rate to try if the best rate is the lowest or the highest that was tried.

    No further rate is tried if the neighbour of the best rate has the same AUROC, for example 1.000.

    Args:
        auroc_by_rate: Learning rate -> validation AUROC.
        candidates: All rates that may be tried.

    Returns:
        The nearest lower or higher candidate. None if the best rate is between others, or there is no such candidate.
    """
    rates = sorted(auroc_by_rate)
    if len(rates) < 2:
        return None
    best = min(rates, key=lambda rate: (-auroc_by_rate[rate], rate))
    if best == rates[0] and auroc_by_rate[best] > auroc_by_rate[rates[1]]:
        return max((rate for rate in candidates if rate < best), default=None)
    if best == rates[-1]:  # of equal rates the lowest is the best, so its neighbour has less
        return min((rate for rate in candidates if rate > best), default=None)
    return None


def evaluate_benchmark(
    plan: BenchmarkVariantPlan, form: str, by_block: Mapping[str, RunResultLine], planned: int
) -> BenchmarkResult:
    """Evaluate the finished runs; return the content of the benchmark's page.

    Args:
        by_block: The finished runs as :func:`polyclinic.studies.benchmark.group_results_by_block` returns them.
        planned: Number of runs of the whole plan.
    """
    lines, benchmark = list(by_block.values()), plan.benchmark
    blocks = [_compute_block_result(plan, data, pattern, lines) for data, pattern in plan.form.blocks]
    shared = [block for block in blocks if block.entries and block.common_seeds]
    labels = [method.label for method in plan.variant_methods]
    ranked = [method.label for method in plan.variant_methods if not method.beyond]
    ranks = _rank_methods(ranked, [[block] for block in shared])
    of_data = [[block for block in shared if block.data == data] for data in plan.list_data_sets()]
    ordered = [*ranks.ranks, *(label for label in labels if label not in ranks.ranks)]
    run = {line.method for line in lines}
    methods = [_collect_method_over_blocks(plan, label, shared, lines) for label in ordered]
    return BenchmarkResult(
        title=benchmark.title,
        form=form,
        rounds=plan.form.rounds,
        seeds=plan.form.seeds,
        reference=benchmark.reference,
        done=len(lines),
        planned=planned,
        blocks=tuple(block for block in blocks if block.entries),
        blocks_planned=len(plan.form.blocks),
        methods=tuple(_compare_with_reference(method, benchmark.reference, shared) for method in methods),
        ranking=ranks,
        ranking_of_data=_rank_methods(ranked, [group for group in of_data if group]),
        codes=dict(Counter(line.code for line in lines)),
        untrained=dict(Counter(line.method for line in lines if line.best_round == 0 and not line.tuning)),
        not_run=tuple(label for label in labels if label not in run),
    )


def _compare_with_reference(
    method: MethodOverallResult, reference: str, shared: Sequence[BlockResult]
) -> MethodOverallResult:
    """Add to a method its mean lead over the reference, and a paired test with one pair for each data set.

    Args:
        reference: Label of the reference, which is returned unchanged.
        shared: Blocks in which every ranked method has results; blocks without results of this method are skipped.
    """
    if method.label == reference:
        return method
    by_data: dict[str, list[tuple[float, float]]] = {}
    blocks = [block for block in shared if method.label in block.entries]
    for block in blocks:
        pair = (block.entries[method.label].auroc, block.entries[reference].auroc)
        by_data.setdefault(block.data, []).append(pair)
    means = np.array([np.mean(pairs, axis=0) for pairs in by_data.values()]).reshape(-1, 2)
    leads = [own - other for pairs in by_data.values() for own, other in pairs]
    test = compute_paired_test(means, np.random.default_rng(0))
    return replace(method, lead=float(np.mean(leads)) if leads else None, test=test)


def _rank_methods(labels: Sequence[str], groups: Sequence[Sequence[BlockResult]]) -> MethodRanking:
    """Rank methods by their mean AUROC over the blocks of each group."""
    if not groups:
        return rank_methods({})
    aurocs = {label: [[block.entries[label].auroc for block in group] for group in groups] for label in labels}
    return rank_methods({label: [float(np.mean(group)) for group in of_method] for label, of_method in aurocs.items()})


def _compute_block_result(
    plan: BenchmarkVariantPlan, data: str, pattern: str, lines: Iterable[RunResultLine]
) -> BlockResult:
    by_method: dict[str, dict[int, RunResultLine]] = {}
    counts: dict[str, tuple[int, int]] = {}  # class -> fewest test positives and negatives; one test part for all
    for line in lines:
        if (line.data, line.pattern) == (data, pattern) and not line.tuning:
            by_method.setdefault(line.method, {})[line.seed] = line
            for name, result in line.classes.items():
                before = counts.get(name, (result.positives, result.negatives))
                counts[name] = (min(before[0], result.positives), min(before[1], result.negatives))
    fewest = plan.benchmark.fewest_positives
    scored = {name: kinds[0] for name, kinds in sorted(counts.items()) if min(kinds) >= fewest}
    unscored = {name: kinds[0] for name, kinds in sorted(counts.items()) if name not in scored}
    ranked = [set(by_method.get(method.label, {})) for method in plan.list_methods_for_data(data) if not method.beyond]
    common = set.intersection(*ranked) if ranked else set()
    entries = {
        label: _average_method_runs(
            [line for seed, line in sorted(runs.items()) if not common or seed in common], tuple(scored)
        )
        for label, runs in by_method.items()
        if scored and (not common or common & set(runs))
    }
    return BlockResult(data, pattern, scored, unscored, tuple(sorted(common)), entries)


def _average_method_runs(lines: Sequence[RunResultLine], scored: Sequence[str]) -> MethodBlockResult:
    """Average a method's metrics in one block over the scored classes, then over its runs (seeds)."""
    means: dict[str, list[float]] = {name: [] for name in BENCHMARK_METRICS}
    for line in lines:
        for name, of_lines in means.items():
            values = [getattr(line.classes[scored_name], name) for scored_name in scored]
            of_lines.append(float(np.mean([value for value in values if value is not None])))
    errors = [error for line in lines if (error := estimate_patient_standard_error(line, scored)) is not None]
    return MethodBlockResult(
        seeds=len(lines),
        **{name: float(np.mean(values)) for name, values in means.items()},
        seed_sd=float(np.std(means["auroc"], ddof=1)) if len(lines) > 1 else None,
        patient_error=float(np.mean(errors)) if len(errors) == len(lines) else None,
        lr=lines[0].lr,
    )


def estimate_patient_standard_error(line: RunResultLine, scored: Sequence[str]) -> float | None:
    """Estimate the standard error, over the patients of the test part, of the mean AUROC of the scored classes.

    The bootstrap gives the error of each class and of the mean of all classes, but not of the mean of the scored
    classes. Therefore the errors of the scored classes are combined as if classes were independent. The result is
    multiplied by a correction for dependence: the bootstrap error of the mean of all classes, divided by the error that
    the same combination gives for all classes.

    Returns:
        The standard error; None if the run has no interval of the mean or of a scored class.
    """

    def compute_interval_error(interval: Interval) -> float:
        return (interval[1] - interval[0]) / (2 * Z_95)

    def compute_independent_mean_error(errors: Sequence[float]) -> float:
        return float(np.sqrt(np.sum(np.square(errors)))) / len(errors)

    class_errors = {
        name: compute_interval_error(result.interval)
        for name, result in line.classes.items()
        if result.interval is not None
    }
    if line.interval is None or any(name not in class_errors for name in scored):
        return None
    independent_error = compute_independent_mean_error(list(class_errors.values()))
    if not independent_error:
        return 0.0
    scored_error = compute_independent_mean_error([class_errors[name] for name in scored])
    return scored_error * compute_interval_error(line.interval) / independent_error


def _collect_method_over_blocks(
    plan: BenchmarkVariantPlan, label: str, shared: Sequence[BlockResult], lines: Iterable[RunResultLine]
) -> MethodOverallResult:
    entries = [(block.data, block.entries[label]) for block in shared if label in block.entries]
    of_data: dict[str, list[tuple[str, MethodBlockResult]]] = {}
    for data, entry in entries:
        of_data.setdefault(data, []).append((data, entry))
    runs = [line for line in lines if line.method == label]
    means = {
        name: float(np.mean([getattr(entry, name) for _, entry in entries])) if entries else None
        for name in BENCHMARK_METRICS
    }
    return MethodOverallResult(
        label=label,
        auroc=means["auroc"],
        half_width=compute_interval_half_width(entries),
        average_precision=means["average_precision"],
        balanced_accuracy=means["balanced_accuracy"],
        cpu_seconds=float(np.mean([line.cpu_seconds for line in runs])) if runs else None,
        megabytes=float(np.mean([line.megabytes for line in runs])) if runs else None,
        beyond=next(method.beyond for method in plan.benchmark.methods if method.label == label),
        by_data={
            data: MeanAurocWithInterval(
                float(np.mean([entry.auroc for _, entry in own])), compute_interval_half_width(own)
            )
            for data, own in of_data.items()
        },
    )


def compute_interval_half_width(entries: Sequence[tuple[str, MethodBlockResult]]) -> float | None:
    """Return half the width of the 95 % interval of a mean AUROC over blocks; None if a patient error is missing.

    In a block with one seed, the interval is only over patients. Blocks of one data set share their test patients, so
    that their errors add up linearly. The errors of different data sets, and of different seeds, are independent.
    """
    if not entries or any(entry.patient_error is None for _, entry in entries):
        return None
    by_data: dict[str, float] = {}
    for data, entry in entries:
        by_data[data] = by_data.get(data, 0.0) + (entry.patient_error or 0.0)
    of_seeds = [(entry.seed_sd or 0.0) ** 2 / entry.seeds for _, entry in entries]
    variance = (np.sum(np.square(list(by_data.values()))) + np.sum(of_seeds)) / len(entries) ** 2
    return float(Z_95 * np.sqrt(variance))
