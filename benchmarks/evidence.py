"""Print tables of docs/results.md: equal rounds and equal time, the rule that says which method to take, and ours.

PYTHONPATH=. python benchmarks/evidence.py

Nothing is run: the figures are those of experiments/benchmark/published.jsonl and partitions.csv.
"""

from pathlib import Path

from polyclinic.studies.benchmark import read_benchmark_result
from polyclinic.studies.benchmark_budgets import (
    EQUAL_ROUNDS,
    EQUAL_TIME,
    compute_block_budgets,
    format_budget_tables,
)
from polyclinic.studies.benchmark_choice import choose_by_rule, format_rule_table, judge_rule, list_candidates
from polyclinic.studies.benchmark_ours import (
    EQUAL_STEPS_FORM,
    EQUAL_TIME_FORMS,
    OURS_AT_EQUAL_STEPS,
    OURS_IN_EQUAL_TIME,
    collect_equal_steps,
    collect_equal_time,
    format_blocks_table,
    format_rows_over_data_sets,
)
from polyclinic.studies.benchmark_partitions import read_partitions
from polyclinic.studies.benchmark_results import read_result_lines

FOLDER = Path("experiments/benchmark")
RESULTS = FOLDER / "published.jsonl"


def main() -> None:
    """Print the tables."""
    equal_rounds, equal_time = (
        [read_benchmark_result(FOLDER, form, RESULTS) for form in forms] for forms in (EQUAL_ROUNDS, EQUAL_TIME)
    )
    rounds = equal_rounds[0].rounds
    lines = [line for line in read_result_lines(RESULTS).values() if line.rounds == rounds]
    budgets = compute_block_budgets(lines, read_partitions(FOLDER / "partitions.csv"))
    ranked = [method.label for method in equal_rounds[0].methods if not method.beyond]
    candidates = list_candidates(
        [block for result in equal_rounds for block in result.blocks],
        [block for result in equal_time for block in result.blocks],
        ranked,
    )
    rule = [f"{situation}: {choose_by_rule(of_situation)}" for situation, of_situation in candidates.items()]
    tables = format_budget_tables(equal_rounds, equal_time, budgets)
    print(*tables, "\n".join(rule), format_rule_table(judge_rule(candidates)), sep="\n\n")
    steps, *longer = (read_benchmark_result(FOLDER, form, RESULTS) for form in (EQUAL_STEPS_FORM, *EQUAL_TIME_FORMS))
    ours = [
        format_rows_over_data_sets(collect_equal_steps([steps]), OURS_AT_EQUAL_STEPS),
        format_rows_over_data_sets(collect_equal_time(steps, longer), OURS_IN_EQUAL_TIME),
    ]
    print("", *ours, *map(format_blocks_table, (steps, *longer)), sep="\n\n")


if __name__ == "__main__":
    main()
