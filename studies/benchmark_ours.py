"""Compare Polyclinic's methods with the most important other methods, at equal training steps and at equal time.

Blocks of one data set share its test part. So each data set has one value, the mean over its blocks. Methods are
compared by mean ranks and by paired t-tests over data sets. The ceiling, training with all images in one place and with
the labels that the hospitals have, is compared too but not ranked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from polyclinic.common.system.plain_text import format_number, format_signed, join_as_english_list
from polyclinic.studies.benchmark_choice import Candidates
from polyclinic.studies.benchmark_report import format_block_cell
from polyclinic.studies.benchmark_results import BenchmarkResult
from polyclinic.studies.claims import format_markdown_table, format_p_value
from polyclinic.studies.statistics import MethodRanking, PairedTest, compute_paired_test, rank_methods

EQUAL_STEPS_FORM, EQUAL_TIME_FORMS = "ours12", ("ours84", "ours60", "ours48", "ours36")
"""Variants of the benchmark: with 12 rounds for all methods, and with more rounds of averaging, at equal time."""
CEILING = "centralised, masked"
"""Label of the row whose model is trained with all images in one place."""
IN_SEQUENCE = ("fedseq", "polyclinic", "polyclinic_passing")
"""Rows whose model is passed on from site to site."""
MANY = ", many rounds"
OURS_AT_EQUAL_STEPS, OURS_IN_EQUAL_TIME = "polyclinic_passing", f"polyclinic_parallel{MANY}"


@dataclass(frozen=True)
class RowsOverDataSets:
    """The mean AUROC of each row on each data set.

    Attributes:
        data_sets: Names of the data sets.
        auroc: Row -> its mean AUROC on each data set, in the order of ``data_sets``.
    """

    data_sets: tuple[str, ...]
    auroc: Mapping[str, tuple[float, ...]]

    @property
    def ranking(self) -> MethodRanking:
        """Mean ranks over data sets of all rows except the ceiling; the best is the first."""
        return rank_methods({row: values for row, values in self.auroc.items() if row != CEILING})

    def compare_rows(self, row: str, other: str) -> PairedTest:
        """Run a paired test over data sets of the AUROCs of two rows."""
        pairs = np.stack([self.auroc[row], self.auroc[other]], axis=1)  # (data sets, 2)
        return compute_paired_test(pairs, np.random.default_rng(0))

    def count_data_sets_ahead(self, row: str, other: str) -> int:
        """Return the number of data sets in which ``row`` has a higher AUROC than ``other``."""
        return sum(own > theirs for own, theirs in zip(self.auroc[row], self.auroc[other], strict=True))


def collect_equal_steps(results: Iterable[BenchmarkResult]) -> RowsOverDataSets:
    """Return the results of variants with equally many rounds for all rows; only rows that are in every block."""
    blocks = (block for result in results for block in result.blocks)
    return _average_over_data_sets(
        Candidates(
            {
                (block.data, block.pattern): {label: entry.auroc for label, entry in block.entries.items()}
                for block in blocks
            }
        )
    )


def collect_equal_time(twelve: BenchmarkResult, longer: Iterable[BenchmarkResult]) -> RowsOverDataSets:
    """Return the results of passing with few rounds together with those of averaging with many rounds.

    Args:
        twelve: A variant with few rounds, which also has the ceiling.
        longer: Variants in which averaging has about as many rounds as fit into the time of a run of passing.
    """
    few = {(block.data, block.pattern): block.entries for block in twelve.blocks}
    by_block = dict[tuple[str, str], Mapping[str, float]]()
    for result in longer:
        for block in result.blocks:
            entries = few[block.data, block.pattern]
            passed_on = {label: entries[label].auroc for label in (*IN_SEQUENCE, CEILING) if label in entries}
            many = {f"{label}{MANY}": entry.auroc for label, entry in block.entries.items()}
            by_block[block.data, block.pattern] = {**passed_on, **many}
    return _average_over_data_sets(Candidates(by_block))


def _average_over_data_sets(blocks: Candidates) -> RowsOverDataSets:
    data_sets = blocks.list_data_sets()
    of_data = [blocks.average_over_blocks(data) for data in data_sets]
    rows = [row for row in of_data[0] if all(row in means for means in of_data)] if of_data else []
    return RowsOverDataSets(tuple(data_sets), {row: tuple(means[row] for means in of_data) for row in rows})


def format_rows_over_data_sets(rows: RowsOverDataSets, ours: str) -> str:
    """Format the rows as a Markdown table: AUROC on each data set, mean, mean rank, and lead of ``ours`` with its test.

    Args:
        ours: The row of our method.
    """
    ranks = rows.ranking.ranks
    lines = list[list[str]]()
    for row in (*ranks, *(row for row in rows.auroc if row not in ranks)):
        means = rows.auroc[row]
        rank = f"{ranks[row]:.2f}" if row in ranks else "–"
        cells = [*map(format_number, means), format_number(float(np.mean(means))), rank]
        lines.append([f"`{row}`", *cells, "–" if row == ours else _format_lead_cell(rows, ours, row)])
    head = ["AUROC, mean over blocks", *rows.data_sets, "mean", "mean rank", f"lead of `{ours}`"]
    return format_markdown_table(head, lines)


def _format_lead_cell(rows: RowsOverDataSets, ours: str, row: str) -> str:
    test = rows.compare_rows(ours, row)
    tested = "not tested" if test.p_value is None else format_p_value(test.p_value)
    ahead = rows.count_data_sets_ahead(ours, row)
    return f"{format_signed(test.mean_difference)}, {ahead} of {test.pairs}, {tested}"


def describe_ours(rows: RowsOverDataSets, ours: str, others: Iterable[str]) -> str:
    """Return a sentence with the mean rank of our row, and its lead over each of the other rows."""
    ranking = rows.ranking
    place = list(ranking.ranks).index(ours) + 1
    leads = "; ".join(f"`{other}` {_format_lead_cell(rows, ours, other)}" for other in others)
    rank = f"place {place} of {len(ranking.ranks)} by mean rank ({ranking.ranks[ours]:.2f})"
    return f"`{ours}`: {rank}; its lead over {leads}."


def describe_where(rows: RowsOverDataSets, ours: str, other: str) -> str:
    """Return a clause with the data sets on which our row has a higher, and a lower, AUROC than another row."""
    leads = dict(zip(rows.data_sets, np.subtract(rows.auroc[ours], rows.auroc[other]), strict=True))
    parts = [
        f"{word} on {join_as_english_list(names)}"
        for word, names in (
            ("ahead", [f"{data} ({format_signed(lead)})" for data, lead in leads.items() if lead > 0]),
            ("behind", [f"{data} ({format_signed(lead)})" for data, lead in leads.items() if lead < 0]),
        )
        if names
    ]
    return f"beside `{other}` it is {' and '.join(parts)}"


def format_blocks_table(result: BenchmarkResult) -> str:
    """Format the results of a variant as a Markdown table with a column for each block: mean ± SD over seeds."""
    head = ["AUROC, mean ± SD over seeds", *(f"{block.data}, {block.pattern}" for block in result.blocks)]
    rows = [
        [f"`{method.label}`", *(format_block_cell(block.entries.get(method.label)) for block in result.blocks)]
        for method in result.methods
    ]
    return format_markdown_table(head, rows)
