"""The benchmark's results as Markdown and as an HTML page, with the same sentences and table cells."""

from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from polyclinic.common.reporting.figure import draw_figure
from polyclinic.common.reporting.plot import Axis, Plot
from polyclinic.common.reporting.svg import BLUE, TEXT_COLOR, VERMILION
from polyclinic.common.system.plain_text import (
    format_count_with_noun,
    format_number,
    format_signed,
    join_as_english_list,
)
from polyclinic.server.reporting.page import write_template_page
from polyclinic.studies.benchmark_results import (
    BenchmarkResult,
    MeanAurocWithInterval,
    MethodBlockResult,
    MethodOverallResult,
)
from polyclinic.studies.claims import format_markdown_table, format_p_value
from polyclinic.studies.comparison import NO_BETTER_ROUND_SENTENCE
from polyclinic.studies.comparison_report import TEMPLATES
from polyclinic.studies.statistics import MethodRanking

BEYOND = "each has more than hospitals with unlike labels have"
"""Reason why some methods are not ranked, for the page."""
COLUMNS = ("Mean rank", "AUROC", "mAP", "Balanced accuracy", "Against {reference}", "CPU s a run", "MB a run")


def benchmark_as_markdown(result: BenchmarkResult) -> str:
    """Format the benchmark's results as Markdown: ranks, tables (all, by data set, by block) and conditions."""
    head = ["method", "mean rank", "AUROC", "mAP", "balanced accuracy", f"against {result.reference}", "CPU s", "MB"]
    ranked = [[method.label, *format_method_cells(result, method)] for method in result.methods if not method.beyond]
    beyond = [[method.label, *format_method_cells(result, method)] for method in result.methods if method.beyond]
    done = (
        f"**Partial: {describe_finished_runs(result)}**"
        if result.is_benchmark_incomplete
        else f"Complete: {describe_finished_runs(result)}"
    )
    parts = [
        f"# {result.title}",
        f"{done} {describe_rank_tests(result.ranking, 'block')}",
        format_markdown_table(head, ranked),
    ]
    parts += [f"Not ranked, because {BEYOND}:", format_markdown_table(head, beyond)] if beyond else []
    blocks = [
        [method.label, *(format_block_cell(block.entries.get(method.label)) for block in result.blocks)]
        for method in result.methods
    ]
    titles = [f"{block.data}, {block.pattern}" for block in result.blocks]
    data_sets = select_tested_data_sets(result)
    if len(data_sets) > 1:
        means = [[method.label, *format_data_set_cells(result, method)] for method in result.methods]
        head = ["AUROC", *data_sets, f"against {result.reference}"]
        parts += ["## Data set by data set", explain_data_set_cells(result), format_markdown_table(head, means)]
    parts += ["## Block by block", format_markdown_table(["AUROC, mean ± SD over seeds", *titles], blocks)]
    parts += ["## What the figures rest on", "\n".join(f"- {line}" for line in list_benchmark_condition_notes(result))]
    return "\n\n".join(parts)


def write_benchmark_report(result: BenchmarkResult, destination: Path) -> Path:
    """Write the benchmark's results as an HTML file, and return its path."""
    return write_template_page(
        "benchmark.html.j2",
        destination,
        TEMPLATES,
        result=result,
        columns=[name.format(reference=result.reference) for name in COLUMNS],
        method_cells=format_method_cells,
        block_cell=format_block_cell,
        data_sets=select_tested_data_sets(result),
        data_cells=format_data_set_cells,
        by_data_sentence=explain_data_set_cells(result),
        done=describe_finished_runs(result),
        ranks=describe_rank_tests(result.ranking, "block"),
        beyond_sentence=BEYOND,
        notes=list(list_benchmark_condition_notes(result)),
        picture=draw_critical_difference(result.ranking, "ranks"),
    )


def describe_finished_runs(result: BenchmarkResult) -> str:
    """Return the number of finished and of planned runs as a sentence, such as ``"12 of 40 runs."``."""
    return f"{result.done:,} of {format_count_with_noun(result.planned, 'run')}."


def describe_rank_tests(ranking: MethodRanking, kind: str) -> str:
    """Return the result of Friedman's and Nemenyi's tests as a sentence.

    Args:
        kind: Noun for the unit in which methods are ranked, such as ``"block"``.
    """
    if not ranking.blocks:
        return "No block has a seed that every ranked method was run with: there are no ranks yet."
    if ranking.p is None or ranking.critical_difference is None:
        return f"{format_count_with_noun(ranking.blocks, kind)} cannot tell methods apart: a test needs three."
    first = next(iter(ranking.ranks))
    alike = next((group for group in ranking.cliques if group[0] == first), (first,))
    behind = len(ranking.ranks) - len(alike)
    over = f"Over {format_count_with_noun(ranking.blocks, kind)} (Friedman: {format_p_value(ranking.p)})"
    best = f"{first} has the best mean rank, {ranking.ranks[first]:.2f}"
    critical = f"the critical difference is {ranking.critical_difference:.2f} (Nemenyi, 0.05)"
    methods = (
        f"{format_count_with_noun(len(ranking.ranks), 'method')} {'is' if behind == 1 else 'are'} behind by that or "
        "more"
    )
    return f"{over}, {best}; {critical}: {behind} of {methods}."


def describe_standing(result: BenchmarkResult, label: str) -> str:
    """Return sentences with a method's rank, its lead over the reference, and Nemenyi's test.

    Ranks and tests are over data sets, because blocks of one data set share their test part.
    """
    method = next(each for each in result.methods if each.label == label)
    ranking = result.ranking_of_data
    if method.auroc is None:
        return f"{label}: its runs are not finished, so it stands nowhere yet. The same command goes on."
    sentences = [f"{label}: mean AUROC {format_number(method.auroc)}."]
    if label in ranking.ranks:
        place = list(ranking.ranks).index(label) + 1
        over = format_count_with_noun(ranking.blocks, "data set")
        sentences[0] = (
            f"{label}: place {place} of {len(ranking.ranks)} by mean rank over {over} ({ranking.ranks[label]:.2f}), "
            f"mean AUROC {format_number(method.auroc)}."
        )
    if (test := method.test) is not None and test.mean_difference is not None:
        reference = next(each for each in result.methods if each.label == result.reference).by_data
        ahead = sum(mean.auroc > reference[data].auroc for data, mean in method.by_data.items())
        tested = test.reason if test.p_value is None else f"{format_p_value(test.p_value)}, not corrected"
        sentences.append(
            f"Against {result.reference}: {format_signed(test.mean_difference)}, ahead on {ahead} of {test.pairs} data "
            f"sets ({tested})."
        )
    if ranking.critical_difference is not None and label in ranking.ranks:
        own = ranking.ranks[label]
        beaten = [name for name, rank in ranking.ranks.items() if rank - own >= ranking.critical_difference]
        beat = [name for name, rank in ranking.ranks.items() if own - rank >= ranking.critical_difference]
        sentences.append(
            f"By Nemenyi's test at 0.05 it is ahead of {join_as_english_list(beaten) or 'no method'} and behind "
            f"{join_as_english_list(beat) or 'none'}; the other places may be chance."
        )
    return " ".join(sentences)


def list_benchmark_condition_notes(result: BenchmarkResult) -> Iterator[str]:
    """Yield notes on the conditions of the results, such as rounds, seeds and rare classes, for a list."""
    size = f"Form {result.form}: {result.rounds} rounds, {format_count_with_noun(result.seeds, 'seed')}"
    blocks = (
        f"{format_count_with_noun(result.ranking.blocks, 'block')} of {result.blocks_planned} (data set and pattern)"
    )
    yield f"{size}; model, order, partition and owners of classes follow the seed."
    yield "Each method has the learning rate with the best validation AUROC of a run with another seed, by data set."
    yield "The round is the one with the best validation AUROC; no test image chooses anything."
    yield (
        "Intervals are 95 %, over the test part's patients (bootstrap) and over seeds; a method of which each site has "
        "its own model has none."
    )
    if any(entry.seeds == 1 for block in result.blocks for entry in block.entries.values()):
        yield "Where a method has one seed in a block, no spread over seeds is known, and none is in its intervals."
    yield f"Ranks and means are over {blocks}, averaged over classes and seeds."
    if result.ranking_of_data.blocks < result.ranking.blocks:
        once = describe_rank_tests(result.ranking_of_data, "data set")
        shared = "The tests take blocks for independent, but blocks of one data set share its test part."
        yield f"{shared} With the mean over its blocks as a data set's one value: {once[0].lower()}{once[1:]}"
    for block in {block.data: block for block in result.blocks}.values():
        classes = format_count_with_noun(len(block.scored), "class", "classes")
        scored = f"{block.data}: {classes} scored, with {min(block.scored.values())} test positives or more"
        rare = join_as_english_list([f"{name} ({count})" for name, count in block.unscored.items()])
        yield f"{scored}; trained and not scored, for too few: {rare}." if rare else f"{scored}."
    for label, runs in result.untrained.items():
        count = format_count_with_noun(runs, "run")
        yield f"{label}: in {count} {NO_BETTER_ROUND_SENTENCE}; the initial model is tested."
    if len(result.codes) > 1:
        versions = join_as_english_list([f"{count} by {code}" for code, count in result.codes.items()])
        yield f"The runs are of {len(result.codes)} versions of the code: {versions}."
    if result.not_run:
        yield f"Not run yet: {join_as_english_list(result.not_run)}."
    yield from (f"{method.label}: {method.beyond}." for method in result.methods if method.beyond)


def format_method_cells(result: BenchmarkResult, method: MethodOverallResult) -> list[str]:
    """Return a method's cells for the table over all blocks, in the order of :data:`COLUMNS`."""
    rank = result.ranking.ranks.get(method.label)
    return [
        "–" if rank is None else f"{rank:.2f}",
        format_number(method.auroc)
        if method.auroc is None
        else format_mean_cell(MeanAurocWithInterval(method.auroc, method.half_width)),
        format_number(method.average_precision),
        format_number(method.balanced_accuracy),
        "reference" if method.label == result.reference else format_signed(method.lead),
        *("–" if amount is None else f"{amount:.0f}" for amount in (method.cpu_seconds, method.megabytes)),
    ]


def select_tested_data_sets(result: BenchmarkResult) -> list[str]:
    """Return the data sets with results, in the order of their blocks."""
    return list(dict.fromkeys(block.data for block in result.blocks))


def explain_data_set_cells(result: BenchmarkResult) -> str:
    """Return a sentence that explains the cells of the table of data sets."""
    of_data = "AUROC, mean over the blocks of a data set, with a 95 % interval over patients and seeds"
    last = f"the data sets in which the method is ahead of {result.reference}, and p of a paired t-test over data sets"
    return f"{of_data}; in the last column the mean difference, {last}, not corrected for the number of methods."


def format_data_set_cells(result: BenchmarkResult, method: MethodOverallResult) -> list[str]:
    """Return a method's cells for the table of data sets: AUROC on each, and the test against the reference."""
    means, test = [method.by_data.get(data) for data in select_tested_data_sets(result)], method.test
    if method.label == result.reference:
        return [*map(format_mean_cell, means), "reference"]
    if test is None or test.mean_difference is None:
        return [*map(format_mean_cell, means), "–"]
    reference = next(each for each in result.methods if each.label == result.reference).by_data
    ahead = sum(mean.auroc > reference[data].auroc for data, mean in method.by_data.items())
    tested = "not tested" if test.p_value is None else format_p_value(test.p_value)
    against = f"{format_signed(test.mean_difference)}, {ahead} of {test.pairs}, {tested}"
    return [*map(format_mean_cell, means), against]


def format_mean_cell(mean: MeanAurocWithInterval | None) -> str:
    """Format a mean AUROC with its 95 % interval for a table."""
    if mean is None:
        return "–"
    return format_number(mean.auroc) + ("" if mean.half_width is None else f" ± {format_number(mean.half_width)}")


def format_block_cell(entry: MethodBlockResult | None) -> str:
    """Format a method's AUROC in one block, with its SD over seeds, for a table."""
    if entry is None:
        return "–"
    return format_number(entry.auroc) + ("" if entry.seed_sd is None else f" ± {format_number(entry.seed_sd)}")


def draw_critical_difference(ranking: MethodRanking, name: str) -> Markup:
    """Draw the critical-difference diagram (Demsar, JMLR 2006, figure 1).

    It shows the mean rank of each method. Bars connect methods that the test does not distinguish. The picture is empty
    if the ranks have no critical difference.
    """
    if (critical := ranking.critical_difference) is None:
        return Markup("")
    ranks = ranking.ranks
    rows = len(ranks) + len(ranking.cliques)
    x_axis = Axis("mean rank, 1 is best", (0.5, len(ranks) + 2.5), grid=True)
    plot = Plot(x_axis, Axis(limits=(rows + 0.6, -0.6), ticks=()))
    for row, (method, rank) in enumerate(ranks.items(), start=1):
        plot.add_markers([rank], [row], "circle", BLUE, 7)
        plot.add_text(f"{method}  {rank:.2f}", rank, row, shift=(8, 0))
    for row, group in enumerate(ranking.cliques, start=len(ranks) + 1):
        plot.add_interval(ranks[group[0]], ranks[group[-1]], row, VERMILION, 4)
    plot.add_interval(1, 1 + critical, 0, TEXT_COLOR, 2, ends=8)
    plot.add_text(f"critical difference {critical:.2f}", 1 + critical, 0, shift=(8, 0))
    about = "Critical-difference picture: mean rank of every method, best first."
    return draw_figure([plot], name, about, height=19.0 * (rows + 1))
