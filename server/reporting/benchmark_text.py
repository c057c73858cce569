"""The benchmark's page as Markdown, and the sentences that both forms of it share."""

from common.system.formatting import counted, listed
from server.analysis.benchmark.ranking import Ranking
from server.analysis.benchmark.results import BenchmarkResult, BlockResult, Entry, MethodOverBlocks
from server.reporting.wording import number, probability, signed


def as_markdown(result: BenchmarkResult) -> str:
    """Headline, ranks, the table over all blocks, the table of each block, and what the figures rest on."""
    head = ["method", "mean rank", "AUROC", "mAP", "balanced accuracy", f"against {result.reference}", "CPU s", "MB"]
    rows = [_row(result, method) for method in result.methods if not method.beyond]
    beyond = [_row(result, method) for method in result.methods if method.beyond]
    parts = [f"# {result.title}", headline(result), _table(head, rows)]
    parts += [f"Not ranked, because {beyond_sentence()}:", _table(head, beyond)] if beyond else []
    parts += ["## Block by block", _blocks(result), "## What the figures rest on", *_listing(notes(result))]
    return "\n\n".join(parts)


def headline(result: BenchmarkResult) -> str:
    """How far the benchmark is, and what the ranks say."""
    far = done_sentence(result)
    far = f"**Partial: {far}** " if result.partial else f"Complete: {far} "
    return far + ranks_sentence(result)


def done_sentence(result: BenchmarkResult) -> str:
    """How many of the form's runs are done."""
    return f"{result.done:,} of {counted(result.wanted, 'run')}."


def ranks_sentence(result: BenchmarkResult) -> str:
    """What Friedman's and Nemenyi's tests say."""
    return _ranks_sentence(result.ranking, "block")


def of_data_sentence(result: BenchmarkResult) -> str:
    """What the tests say where each data set counts once."""
    once = _ranks_sentence(result.ranking_of_data, "data set")
    shared = "The tests take blocks for independent, but blocks of one data set share its test part."
    return f"{shared} With the mean over its blocks as a data set's one value: {once[0].lower()}{once[1:]}"


def _ranks_sentence(ranking: Ranking, kind: str) -> str:
    if not ranking.blocks:
        return "No block has a seed that every ranked method was run with: there are no ranks yet."
    if ranking.p is None or ranking.critical_difference is None:
        return f"{counted(ranking.blocks, kind)} cannot tell methods apart: a test needs three."
    first = next(iter(ranking.ranks))
    alike = next((group for group in ranking.cliques if group[0] == first), (first,))
    behind = len(ranking.ranks) - len(alike)
    over = f"Over {counted(ranking.blocks, kind)} (Friedman: {probability(ranking.p)})"
    best = f"{first} has the best mean rank, {ranking.ranks[first]:.2f}"
    critical = f"the critical difference is {ranking.critical_difference:.2f} (Nemenyi, 0.05)"
    worse = (
        f"{behind} of {counted(len(ranking.ranks), 'method')} {'is' if behind == 1 else 'are'} behind by that or more"
    )
    return f"{over}, {best}; {critical}: {worse}."


def beyond_sentence() -> str:
    """Why some methods are not ranked."""
    return "each has more than hospitals with unlike labels have"


def notes(result: BenchmarkResult) -> list[str]:
    """What the figures rest on, one sentence a line."""
    size = f"Form {result.form}: {result.rounds} rounds, {counted(result.seeds, 'seed')}"
    blocks = f"{counted(result.ranking.blocks, 'block')} of {result.blocks_wanted} (data set and pattern)"
    found = [
        f"{size}; model, order, partition and owners of classes follow the seed.",
        "Each method has the learning rate with the best validation AUROC of a run with another seed, by data set.",
        "The round is the one with the best validation AUROC; no test image chooses anything.",
        "Intervals are 95 %, over the test part's patients (bootstrap) and over seeds; a method of which each site has "
        "its own model has none.",
        f"Ranks and means are over {blocks}, averaged over classes and seeds.",
    ]
    found += [of_data_sentence(result)] if result.ranking_of_data.blocks < result.ranking.blocks else []
    found += [_scored_sentence(block) for block in _of_each_data_set(result)]
    found += [_untrained_sentence(label, runs) for label, runs in result.untrained.items()]
    if len(result.codes) > 1:
        told = listed([f"{count} by {code}" for code, count in result.codes.items()])
        found.append(f"The runs are of {len(result.codes)} versions of the code: {told}.")
    if result.not_run:
        found.append(f"Not run yet: {listed(result.not_run)}.")
    found += [f"{method.label}: {method.beyond}." for method in result.methods if method.beyond]
    return found


def _untrained_sentence(label: str, runs: int) -> str:
    return f"{label}: in {counted(runs, 'run')} validation was best before round 1; the initial model is tested."


def _of_each_data_set(result: BenchmarkResult) -> list[BlockResult]:
    return list({block.data: block for block in result.blocks}.values())


def _scored_sentence(block: BlockResult) -> str:
    fewest = min(block.scored.values())
    classes = counted(len(block.scored), "class", "classes")
    scored = f"{block.data}: {classes} scored, with {fewest} test positives or more"
    if not block.unscored:
        return f"{scored}."
    rare = listed([f"{name} ({count})" for name, count in block.unscored.items()])
    return f"{scored}; trained and not scored, for too few: {rare}."


def interval(method: MethodOverBlocks) -> str:
    """Mean AUROC with the half width of its interval, where that is known."""
    width = "" if method.half_width is None else f" ± {number(method.half_width)}"
    return number(method.auroc) + width


def against(result: BenchmarkResult, method: MethodOverBlocks) -> str:
    """The paired test against the reference."""
    if method.label == result.reference:
        return "reference"
    if method.test is None:
        return "–"
    if method.test.holm_p is None:
        return f"{signed(method.test.mean_difference)}, not tested"
    return f"{signed(method.test.mean_difference)}, {probability(method.test.holm_p)}"


def rank(result: BenchmarkResult, method: MethodOverBlocks) -> str:
    """The mean rank, where the method is ranked."""
    return f"{result.ranking.ranks[method.label]:.2f}" if method.label in result.ranking.ranks else "–"


def cell(entry: Entry | None) -> str:
    """One method in one block."""
    if entry is None:
        return "–"
    return number(entry.auroc) + ("" if entry.seed_sd is None else f" ± {number(entry.seed_sd)}")


def amount(value: float | None) -> str:
    """Seconds or megabytes of a run."""
    return "–" if value is None else f"{value:.0f}"


def _row(result: BenchmarkResult, method: MethodOverBlocks) -> list[str]:
    return [
        method.label,
        rank(result, method),
        interval(method),
        number(method.average_precision),
        number(method.balanced_accuracy),
        against(result, method),
        amount(method.cpu_seconds),
        amount(method.megabytes),
    ]


def _blocks(result: BenchmarkResult) -> str:
    head = ["AUROC, mean ± SD over seeds", *(f"{block.data}, {block.pattern}" for block in result.blocks)]
    rows = [
        [method.label, *(cell(block.entries.get(method.label)) for block in result.blocks)] for method in result.methods
    ]
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(part.replace('|', '&#124;') for part in line)} |" for line in lines)


def _listing(lines: list[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)]
