"""Print docs/results-benchmark.md: every table of the published runs of the benchmark.

PYTHONPATH=. python benchmarks/evidence.py [--write]

With ``--write`` the page is written, and so are the blocks of docs/results.md. Nothing is run:
the figures are those of experiments/benchmark/published.jsonl and partitions.csv.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean

from polyclinic.common.system.plain_text import format_number
from polyclinic.studies.benchmark import group_results_by_block, read_benchmark_result
from polyclinic.studies.benchmark_budgets import (
    EQUAL_ROUNDS,
    EQUAL_TIME,
    compute_block_budgets,
    format_budget_tables,
)
from polyclinic.studies.benchmark_choice import choose_by_rule, format_rule_table, judge_rule, list_candidates
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.benchmark_ours import (
    CEILING,
    EQUAL_STEPS_FORM,
    EQUAL_TIME_FORMS,
    IN_SEQUENCE,
    MANY,
    OURS_AT_EQUAL_STEPS,
    OURS_IN_EQUAL_TIME,
    collect_equal_steps,
    collect_equal_time,
    describe_ours,
    describe_where,
    format_blocks_table,
    format_rows_over_data_sets,
)
from polyclinic.studies.benchmark_partitions import read_partitions
from polyclinic.studies.benchmark_report import benchmark_as_markdown, format_mean_cell
from polyclinic.studies.benchmark_results import BenchmarkResult, read_result_lines
from polyclinic.studies.claims import format_markdown_table
from supply.blocks import write_block

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "benchmark"
RUNS = FOLDER / "published.jsonl"
RUNS_OF_FORM = {"added12": FOLDER / "added.jsonl"}
"""Form -> its own file: rates that it tried on a data set of the published form must not change that form's choice."""
ROUNDS = (12, 24, 48)
"""Rounds of the forms that show what more rounds change."""
OPENING = """# Tables of the benchmark

Every table of the published runs; [results](results.md) says what they mean. The page is printed by
`PYTHONPATH=. .venv/bin/python benchmarks/evidence.py` from
[published.jsonl](../experiments/benchmark/published.jsonl) and
[partitions.csv](../experiments/benchmark/partitions.csv)."""
SINGLE_FORMS = {
    "Passing, and missing labels left out": "passing12",
    "Hospitals whose patients differ": "centres12",
    "Methods that came later": "added12",
    "224 pixels behind a frozen trunk": "frozen60",
}
"""Heading on the page of tables -> form that has it to itself."""
BLOCK = "A block is a data set with a pattern of who labels what."


@cache
def read_form(form: str) -> BenchmarkResult:
    """Return the published results of a form of the benchmark."""
    return read_benchmark_result(FOLDER, form, RUNS_OF_FORM.get(form, RUNS))


def make_page() -> str:
    """Return the page in Markdown."""
    parts = [
        OPENING,
        "## All methods",
        demote_headings(benchmark_as_markdown(read_form("published"))),
        "## FedMLP beside FedNoRo",
        select_section(benchmark_as_markdown(read_form("fednoro")), "Data set by data set"),
        *(
            part
            for heading, form in SINGLE_FORMS.items()
            for part in (
                f"## {heading}",
                describe_single_form(form),
                demote_headings(benchmark_as_markdown(read_form(form))),
            )
        ),
        "## More rounds",
        *describe_more_rounds(),
        "## Equal rounds and equal time",
        *describe_budgets_and_rule(),
        "## Ours",
        *describe_our_methods(),
    ]
    return "\n\n".join(parts) + "\n"


def demote_headings(markdown: str) -> str:
    """Return Markdown without its title, and with its headings one level lower."""
    _, _, body = markdown.partition("\n\n")
    return re.sub(r"^##", "###", body, flags=re.MULTILINE)


def select_section(markdown: str, heading: str) -> str:
    """Return the text below one heading."""
    return markdown.partition(f"## {heading}\n\n")[2].partition("\n\n## ")[0]


def describe_more_rounds() -> Iterator[str]:
    """Yield the tables of the same methods with 12, 24 and 48 rounds."""
    results = [read_form(f"rounds{rounds}") for rounds in ROUNDS]
    data_sets = list(dict.fromkeys(block.data for block in results[0].blocks))
    labels = [method.label for method in results[0].methods]
    head = ["AUROC, mean of four patterns, seed 0"]
    head += [f"{data}, {rounds} rounds" for data in data_sets for rounds in ROUNDS]
    yield format_markdown_table(head, [[label, *list_mean_cells(results, label, data_sets)] for label in labels])

    longest = results[-1]
    yield f"Block by block, with {ROUNDS[-1]} rounds:"
    head = ["AUROC, seed 0", *(f"{block.data}, {block.pattern}" for block in longest.blocks)]
    cells = [[label, *(f"{block.entries[label].auroc:.3f}" for block in longest.blocks)] for label in labels]
    yield format_markdown_table(head, cells)


def list_mean_cells(results: Sequence[BenchmarkResult], label: str, data_sets: Sequence[str]) -> list[str]:
    """Return a method's means with their intervals: for each data set one for each result."""
    methods = [next(method for method in result.methods if method.label == label) for result in results]
    return [format_mean_cell(method.by_data[data]) for data in data_sets for method in methods]


def describe_budgets_and_rule() -> Iterator[str]:
    """Yield what methods reach and cost at equal rounds and in equal time, and the rule with its test."""
    equal_rounds = [read_form(form) for form in EQUAL_ROUNDS]
    equal_time = [read_form(form) for form in EQUAL_TIME]
    rounds = equal_rounds[0].rounds
    lines = [line for line in read_result_lines(RUNS).values() if line.rounds == rounds]
    budgets = compute_block_budgets(lines, read_partitions(FOLDER / "partitions.csv"))
    reached, costs = format_budget_tables(equal_rounds, equal_time, budgets)
    yield f"{BLOCK} At {rounds} rounds, and averaging with as many rounds as equal time allows:"
    yield reached
    yield "Costs, by the [model](results.md#equal-rounds-steps-bytes-and-time) of equal time:"
    yield costs

    ranked = [method.label for method in equal_rounds[0].methods if not method.beyond]
    candidates = list_candidates(
        [block for result in equal_rounds for block in result.blocks],
        [block for result in equal_time for block in result.blocks],
        ranked,
    )
    yield "### The rule and its test"
    yield "What composites and HAM10000 choose for each situation:"
    yield "\n".join(f"- {situation}: `{choose_by_rule(of)}`" for situation, of in candidates.items())
    yield "The choice beside the best method in hindsight, on data sets that did not make the rule:"
    yield format_rule_table(judge_rule(candidates))


def describe_our_methods() -> Iterator[str]:
    """Yield our methods at equal steps and in equal time: over data sets, sentences with leads, and block by block."""
    steps, *longer = (read_form(form) for form in (EQUAL_STEPS_FORM, *EQUAL_TIME_FORMS))
    many_surgical = f"surgical{MANY}"
    at_equal_steps, in_equal_time = collect_equal_steps([steps]), collect_equal_time(steps, longer)
    for title, rows, ours, others, beside in (
        (
            "At equal steps of a hospital",
            at_equal_steps,
            OURS_AT_EQUAL_STEPS,
            ("surgical", "fedseq", "polyclinic", CEILING),
            ("surgical", "fedseq", CEILING),
        ),
        (
            "In equal time",
            in_equal_time,
            OURS_IN_EQUAL_TIME,
            (many_surgical, *IN_SEQUENCE, CEILING),
            (many_surgical, "fedseq", OURS_AT_EQUAL_STEPS, CEILING),
        ),
    ):
        yield f"### {title}"
        yield format_rows_over_data_sets(rows, ours)
        where = "; ".join(describe_where(rows, ours, other) for other in beside)
        yield f"{describe_ours(rows, ours, others)} By data set: {where}."
    for result in (steps, *longer):
        yield f"### Block by block, {result.rounds} rounds"
        yield format_blocks_table(result)


def list_deciding_tables() -> dict[str, str]:
    """Return block -> table, of the tables that docs/results.md has too."""
    parts = benchmark_as_markdown(read_form("published")).split("\n\n")
    ranked, beyond = [part for part in parts if part.startswith("| method")]
    steps, time = (text for text in describe_our_methods() if text.startswith("| AUROC, mean over blocks"))
    reached = next(text for text in describe_budgets_and_rule() if text.startswith("|"))
    return {
        "methods by rank": ranked,
        "methods without rank": beyond,
        "equal time": reached,
        "ours at equal steps": steps,
        "ours in equal time": time,
        **{form: describe_single_form(form) for form in SINGLE_FORMS.values()},
    }


def describe_single_form(form: str) -> str:
    """Return the means of a form by data set with their intervals, and what its runs cost."""
    result = read_form(form)
    data_sets = list(dict.fromkeys(block.data for block in result.blocks))
    methods = [method for method in result.methods if method.auroc is not None]
    ranked = sorted(methods, key=lambda method: (bool(method.beyond), -(method.auroc or 0)))
    head = ["AUROC", *data_sets, *(["mean"] if len(data_sets) > 1 else [])]
    rows = list[list[str]]()
    for method in ranked:
        means = [method.by_data[data] for data in data_sets]
        overall = [format_number(mean(each.auroc for each in means))] if len(data_sets) > 1 else []
        rows.append([f"`{method.label}`", *map(format_mean_cell, means), *overall])
    runs, hours = measure_form_cost(form)
    cost = f"± is half of a 95 % interval over test patients and seeds. {runs} runs, {hours:.1f} core-hours."
    return f"{format_markdown_table(head, rows)}\n\n{cost}"


def measure_form_cost(form: str) -> tuple[int, float]:
    """Return the number of a form's finished runs, those that choose rates included, and their hours of a CPU core."""
    plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, form)
    lines = group_results_by_block(plan, read_result_lines(RUNS_OF_FORM.get(form, RUNS)))
    seconds = {line.key: line.cpu_seconds for line in lines.values()}
    return len(seconds), sum(seconds.values()) / 3600


def write_pages() -> None:
    """Write the page of tables, and the tables of docs/results.md."""
    (ROOT / "docs" / "results-benchmark.md").write_text(make_page(), encoding="utf-8")
    for name, table in list_deciding_tables().items():
        write_block(ROOT / "docs" / "results.md", name, table)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_pages()
    else:
        print(make_page(), end="")
