"""What results.md says of our own methods, at equal steps of a hospital and in equal time, is of the runs."""

from functools import cache
from statistics import mean

import pytest

from polyclinic.common.metrics.holm import adjust_by_holm
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.studies.benchmark import list_tuning_runs
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.benchmark_ours import (
    CEILING,
    EQUAL_STEPS_FORM,
    EQUAL_TIME_FORMS,
    IN_SEQUENCE,
    MANY,
    OURS_AT_EQUAL_STEPS,
    OURS_IN_EQUAL_TIME,
    RowsOverDataSets,
    collect_equal_steps,
    collect_equal_time,
    describe_ours,
    describe_where,
    format_blocks_table,
    format_rows_over_data_sets,
)
from polyclinic.studies.benchmark_results import BenchmarkResult, read_result_lines
from tests.studies.published_runs import FOLDER, RESULTS, find_rows_at_an_end, published_result

FORMS = (EQUAL_STEPS_FORM, *EQUAL_TIME_FORMS)


def longer() -> list[BenchmarkResult]:
    return [published_result(form) for form in EQUAL_TIME_FORMS]


@cache
def at_equal_steps() -> RowsOverDataSets:
    return collect_equal_steps([published_result(EQUAL_STEPS_FORM)])


@cache
def in_equal_time() -> RowsOverDataSets:
    return collect_equal_time(published_result(EQUAL_STEPS_FORM), longer())


@cache
def ends_before_and_after() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Data sets and rows at an end of the grid of three, and after it was widened."""
    plan, lines = (
        BenchmarkVariantPlan.read_benchmark_variant(FOLDER, EQUAL_STEPS_FORM),
        read_result_lines(FOLDER / "published.jsonl"),
    )
    three = [run for data in plan.list_data_sets() for run in plan.iterate_tuning_runs(data)]
    wider = [run for data in plan.list_data_sets() for run in list_tuning_runs(plan, data, lines)]
    return find_rows_at_an_end(three, lines), find_rows_at_an_end(wider, lines)


def describe_ends() -> str:
    plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, EQUAL_STEPS_FORM)
    pairs = sum(len(plan.list_methods_for_data(data)) for data in plan.list_data_sets())
    before, after = ends_before_and_after()
    rates = {
        (block.data, label): entry.lr
        for block in published_result(EQUAL_STEPS_FORM).blocks
        for label, entry in block.entries.items()
    }
    changed = sum(rates[row] not in plan.benchmark.learning_rates for row in before)
    return (
        f"Of the {pairs} pairs of a row and a data set, {len(before)} had the best of three rates at an end, ahead of "
        f"its neighbour; {changed} took a wider rate, and {len(after)} stayed at an end"
    )


def describe_nemenyi(rows: RowsOverDataSets, ours: str) -> str:
    """Which rows ours is ahead of, and behind, by Nemenyi's critical difference."""
    ranking = rows.ranking
    critical = ranking.critical_difference
    assert critical is not None
    ahead = [f"`{row}`" for row, rank in ranking.ranks.items() if rank - ranking.ranks[ours] >= critical]
    names = join_as_english_list(ahead) or "no row"
    return f"Nemenyi's critical difference is {critical:.2f} ranks: by it ours is ahead of {names}"


def describe_holm(rows: RowsOverDataSets, ours: str) -> str:
    others = [row for row in rows.auroc if row != ours]
    p_values = [rows.compare_rows(ours, row).p_value for row in others]
    smallest = min(p for p in adjust_by_holm(p_values) if p is not None)
    return f"Holm's correction over the {len(others)} tests of the table makes the smallest p {smallest:.3f}"


def test_rows_have_the_means_of_their_blocks_ranks_without_the_ceiling_and_paired_leads() -> None:
    """Row a has 0.9 and 0.7, row b 0.8 and 0.8, the ceiling 0.95 and 0.75: a leads b by 0.1 and by -0.1."""
    rows = RowsOverDataSets(("d", "e"), {"a": (0.9, 0.7), "b": (0.8, 0.8), CEILING: (0.95, 0.75)})
    assert rows.ranking.ranks == {"a": 1.5, "b": 1.5}
    assert rows.count_data_sets_ahead("a", "b") == 1
    assert rows.compare_rows(CEILING, "a").mean_difference == pytest.approx(0.05)
    assert "| `a` | 0.900 | 0.700 | 0.800 | 1.50 | – |" in format_rows_over_data_sets(rows, "a")
    assert "−0.050, 0 of 2, not tested" in format_rows_over_data_sets(rows, "a")


@pytest.mark.parametrize("form", FORMS)
def test_no_run_of_the_forms_is_missing(form: str) -> None:
    assert not published_result(form).is_benchmark_incomplete


def test_forms_of_equal_time_have_the_rates_of_equal_steps() -> None:
    for form in EQUAL_TIME_FORMS:
        plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, form)
        assert (plan.form.rates, plan.form.widen) == (EQUAL_STEPS_FORM, True)
    rates = {
        (block.data, label): entry.lr
        for block in published_result(EQUAL_STEPS_FORM).blocks
        for label, entry in block.entries.items()
    }
    for result in longer():
        for block in result.blocks:
            assert all(entry.lr == rates[block.data, label] for label, entry in block.entries.items())


def test_the_tables_are_those_of_the_runs() -> None:
    assert format_rows_over_data_sets(at_equal_steps(), OURS_AT_EQUAL_STEPS) in RESULTS
    assert format_rows_over_data_sets(in_equal_time(), OURS_IN_EQUAL_TIME) in RESULTS
    for form in FORMS:
        assert format_blocks_table(published_result(form)) in RESULTS, form


def test_the_sentences_on_ours_have_ranks_and_leads() -> None:
    steps = describe_ours(at_equal_steps(), OURS_AT_EQUAL_STEPS, ("surgical", "fedseq", "polyclinic", CEILING))
    others = (f"surgical{MANY}", *IN_SEQUENCE, CEILING)
    time = describe_ours(in_equal_time(), OURS_IN_EQUAL_TIME, others)
    assert steps in RESULTS
    assert time in RESULTS
    for rows, ours in ((at_equal_steps(), OURS_AT_EQUAL_STEPS), (in_equal_time(), OURS_IN_EQUAL_TIME)):
        assert describe_nemenyi(rows, ours) in RESULTS
        assert describe_holm(rows, ours) in RESULTS
    for other in ("surgical", "fedseq", CEILING):
        assert describe_where(at_equal_steps(), OURS_AT_EQUAL_STEPS, other) in RESULTS
    for other in (f"surgical{MANY}", "fedseq", OURS_AT_EQUAL_STEPS, CEILING):
        assert describe_where(in_equal_time(), OURS_IN_EQUAL_TIME, other) in RESULTS


def describe_other_rate() -> str:
    """AUROC of polyclinic_parallel on composites at a rate that the rule does not take, beside its own."""
    lines = read_result_lines(FOLDER / "published.jsonl").values()

    def mean_auroc(pattern: str, rounds: int, rate: float) -> str:
        runs = [
            line
            for line in lines
            if (line.data, line.pattern, line.method) == ("composites", pattern, "polyclinic_parallel")
            and (line.rounds, line.lr, line.tuning) == (rounds, rate, False)
            and (rounds == 12 or line.seed == 0)
        ]
        assert len(runs) == (3 if rounds == 12 else 1)
        return f"{mean(result.auroc or 0 for line in runs for result in line.classes.values()):.3f}"

    twelve, many = (
        [f"{mean_auroc(pattern, rounds, 3e-3)} ({mean_auroc(pattern, rounds, 1e-3)})" for pattern in ("one7", "drawn7")]
        for rounds in (12, 84)
    )
    return (
        f"At 0.003 it has {twelve[0]} in `one7` and {twelve[1]} in `drawn7` with 12 rounds, and with 84 rounds, at "
        f"seed 0, {many[0]} and {many[1]}; in brackets at 0.001"
    )


def list_data_sets_ahead(rows: RowsOverDataSets, row: str, other: str) -> set[str]:
    pairs = zip(rows.auroc[row], rows.auroc[other], strict=True)
    return {data for data, (own, theirs) in zip(rows.data_sets, pairs, strict=True) if own > theirs}


def test_what_the_page_says_of_ours_without_figures_is_so() -> None:
    """At equal steps ours is behind on breast ultrasound and the centres; in equal time it leads on Kermany alone."""
    steps, time = at_equal_steps(), in_equal_time()
    for other in ("surgical", "fedseq"):
        behind = set(steps.data_sets) - list_data_sets_ahead(steps, OURS_AT_EQUAL_STEPS, other)
        assert behind == {"busi", "ham10000_centres"}, other
    behind = set(steps.data_sets) - list_data_sets_ahead(steps, OURS_AT_EQUAL_STEPS, CEILING)
    assert behind == {"busi", "mednist", "ham10000_centres"}
    many_surgical = f"surgical{MANY}"
    assert list_data_sets_ahead(time, OURS_IN_EQUAL_TIME, many_surgical) - {"mednist"} == {"kermany"}
    place = time.data_sets.index("mednist")
    assert min(values[place] for values in time.auroc.values()) > 0.999
    assert (time.compare_rows(OURS_IN_EQUAL_TIME, many_surgical).mean_difference or 0) < 0
    for other in IN_SEQUENCE:
        assert list_data_sets_ahead(time, many_surgical, other) >= set(time.data_sets) - {"mednist"}, other
    assert next(iter(steps.ranking.ranks)) == OURS_AT_EQUAL_STEPS
    assert next(iter(time.ranking.ranks)) == many_surgical
    assert abs(steps.compare_rows(OURS_AT_EQUAL_STEPS, "surgical").mean_difference or 0) < 0.001
    for rows, ours, other in (
        (steps, OURS_AT_EQUAL_STEPS, "surgical"),
        (steps, OURS_AT_EQUAL_STEPS, "fedseq"),
        (steps, OURS_AT_EQUAL_STEPS, CEILING),
        (time, OURS_IN_EQUAL_TIME, many_surgical),
    ):
        assert (rows.compare_rows(ours, other).p_value or 0) > 0.05, other


def test_the_rate_that_the_rule_does_not_take_is_on_the_page() -> None:
    assert describe_other_rate() in RESULTS


def test_the_rates_at_an_end_are_counted_before_and_after_the_grid_was_widened() -> None:
    assert describe_ends() in RESULTS
    plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, EQUAL_STEPS_FORM)
    failing = {(data, method) for data, method, _ in plan.benchmark.failing_rates}
    assert ends_before_and_after()[1] <= failing
