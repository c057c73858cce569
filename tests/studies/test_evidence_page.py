"""What README, results and methods say on equal rounds, on equal time and on the rule is computed from the runs."""

from collections.abc import Sequence
from functools import cache
from statistics import mean

import pytest

from polyclinic.common.system.plain_text import format_signed, join_as_english_list
from polyclinic.studies.benchmark_budgets import (
    CPU_CORE,
    EQUAL_ROUNDS,
    EQUAL_TIME,
    GPU,
    PASSING,
    Block,
    BlockBudget,
    compute_block_budgets,
    format_budget_tables,
)
from polyclinic.studies.benchmark_choice import (
    GIVE_THE_RULE,
    Candidates,
    RuleTest,
    Situation,
    choose_by_rule,
    format_rule_table,
    judge_rule,
    list_candidates,
)
from polyclinic.studies.benchmark_partitions import read_partitions
from polyclinic.studies.benchmark_results import (
    BenchmarkResult,
    BlockResult,
    compute_interval_half_width,
    read_result_lines,
)
from polyclinic.studies.init.experiment import METHOD_REASON, describe_other_method
from tests.studies.published_runs import FOLDER, RESULTS, ROOT, published_result

README, METHODS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/methods.md"))
WITHIN = 0.005
"""How far the rule may be behind the best method in hindsight."""
SHARED, ONE_OWNER = "rounds, a class at several hospitals", "rounds, each class at one hospital"


def equal_rounds() -> list[BenchmarkResult]:
    return [published_result(form) for form in EQUAL_ROUNDS]


def equal_time() -> list[BenchmarkResult]:
    return [published_result(form) for form in EQUAL_TIME]


@cache
def budgets() -> dict[Block, BlockBudget]:
    rounds = published_result("published").rounds
    lines = [line for line in read_result_lines(FOLDER / "published.jsonl").values() if line.rounds == rounds]
    return compute_block_budgets(lines, read_partitions(FOLDER / "partitions.csv"))


@cache
def candidates() -> dict[Situation, Candidates]:
    ranked = [method.label for method in published_result("published").methods if not method.beyond]
    twelve, longer = (
        [block for result in results for block in result.blocks] for results in (equal_rounds(), equal_time())
    )
    return list_candidates(twelve, longer, ranked)


def by_key(results: Sequence[BenchmarkResult]) -> dict[Block, BlockResult]:
    return {(block.data, block.pattern): block for result in results for block in result.blocks}


def spread(leads: Sequence[float]) -> str:
    """In how many blocks a method is ahead, with the mean lead and its ends."""
    ends = f"{format_signed(min(leads))} to {format_signed(max(leads))}"
    return f"{sum(lead > 0 for lead in leads)} of {len(leads)} blocks ({format_signed(mean(leads))}, {ends})"


def leads_in_equal_time(passing: str) -> list[float]:
    twelve = by_key(equal_rounds())
    longer = by_key(equal_time())
    return [block.entries["surgical"].auroc - twelve[key].entries[passing].auroc for key, block in longer.items()]


def leads_at_equal_rounds(passing: str) -> list[float]:
    twelve = by_key(equal_rounds())
    blocks = [twelve[key] for key in by_key(equal_time())]
    return [block.entries["surgical"].auroc - block.entries[passing].auroc for block in blocks]


def describe_leads() -> str:
    in_time, in_rounds = (
        [f"`{passing}` in {spread(leads(passing))}" for passing in PASSING]
        for leads in (leads_in_equal_time, leads_at_equal_rounds)
    )
    time = f"**In equal time surgical aggregation is ahead of {in_time[0]} and of {in_time[1]}.**"
    return f"{time} At equal rounds it is ahead of {in_rounds[0]} and of {in_rounds[1]}."


def describe_readme_leads() -> str:
    leads = leads_in_equal_time("fedseq")
    ahead = f"{sum(lead > 0 for lead in leads)} of {len(leads)} comparisons, by {mean(leads):.3f} in the mean"
    return f"in equal time it is ahead of passing one model from hospital to hospital (`fedseq`) in {ahead}"


def describe_best_rounds() -> str:
    """The best rounds by validation of surgical aggregation with 84 rounds, on composites and on HAM10000."""
    runs = [line for line in read_result_lines(FOLDER / "published.jsonl").values() if line.rounds == 84]
    of_data = [
        [line.best_round or 0 for line in runs if line.data == data and line.method == "surgical"]
        for data in GIVE_THE_RULE
    ]
    of_composites, of_ham = (f"{min(rounds)} to {max(rounds)}" for rounds in of_data)
    return f"its best round is {of_composites} of 84 on composites and {of_ham} on HAM10000"


def describe_widths() -> str:
    """The widest half of a 95 % interval, over patients and seeds, of surgical aggregation in a block of equal time."""
    widths: dict[str, float] = {}
    for result in equal_time():
        for block in result.blocks:
            width = compute_interval_half_width([(block.data, block.entries["surgical"])])
            widths[block.data] = max(widths.get(block.data, 0.0), width or 0.0)
    parts = [f"±{width:.3f} on {data}" for data, width in widths.items()]
    return f"The 95 % interval of one mean, over patients and seeds, is at most {join_as_english_list(parts)}."


def describe_equal_bytes() -> str:
    rounds = sorted(round(budgets()[key].count_rounds_of_equal_bytes()) for key in by_key(equal_time()))
    return f"{rounds[0]} to {rounds[-1]} rounds of averaging"


def describe_rule_test() -> str:
    tests = judge_rule(candidates())
    within = sum(test.loss <= WITHIN for test in tests)
    worst = max(tests, key=lambda test: test.loss)
    lost = mean(test.loss for test in tests)
    return (
        f"within 0.005 of the best in hindsight in {within} of {len(tests)} rows, behind by {lost:.3f} in the mean and "
        f"by {worst.loss:.3f} at most ({worst.data})"
    )


def rule_cells() -> list[str]:
    """The cells of the table of methods.md: the means that give the rule, over composites and HAM10000."""

    def means(situation: Situation, *methods: str) -> list[str]:
        of_data = [candidates()[situation].average_over_blocks(data) for data in GIVE_THE_RULE]
        return [f"{mean(each[method] for each in of_data):.3f}" for method in methods]

    time = means("time", "surgical, many rounds", "fedseq", "polyclinic")
    shared = means(SHARED, "fedseq", "polyclinic", "surgical")
    one = means(ONE_OWNER, "polyclinic", "surgical", "fedseq")
    return [
        f"{time[0]} with 84 rounds; `fedseq` {time[1]} and `polyclinic` {time[2]} in the same time",
        f"{shared[0]}; `polyclinic` {shared[1]}, `surgical` {shared[2]}",
        f"{one[0]}; `surgical` {one[1]}, `fedseq` {one[2]}",
    ]


def test_the_tables_of_equal_rounds_and_equal_time_are_those_of_the_runs() -> None:
    assert [result.form for result in equal_time() if result.is_benchmark_incomplete] == []
    assert not published_result("busi").is_benchmark_incomplete
    for table in format_budget_tables(equal_rounds(), equal_time(), budgets()):
        assert table in RESULTS


def test_rounds_of_equal_time_are_those_of_the_model_for_sites_of_one_size() -> None:
    for result in equal_time():
        for block in result.blocks:
            budget = budgets()[block.data, block.pattern]
            rounds = [budget.count_rounds_in_equal_time(speed) for speed in (GPU, CPU_CORE)]
            assert max(rounds) <= result.rounds + 0.5, "averaging has no less time than passing"
            assert budget.sites < 7 or block.data == "nih" or min(rounds) == pytest.approx(84)


def test_the_sentences_on_equal_time_have_the_leads() -> None:
    for words in (describe_leads(), describe_best_rounds(), describe_equal_bytes(), describe_widths()):
        assert words in RESULTS
    assert describe_readme_leads() in README


def test_more_rounds_are_ahead_in_each_block_as_init_writes() -> None:
    twelve = by_key(equal_rounds())
    for key, block in by_key(equal_time()).items():
        assert block.entries["surgical"].auroc > twelve[key].entries["surgical"].auroc, key


def test_the_rule_is_what_the_two_data_sets_give() -> None:
    chosen = {situation: choose_by_rule(of_situation) for situation, of_situation in candidates().items()}
    assert chosen == {"time": "surgical, many rounds", SHARED: "fedseq", ONE_OWNER: "polyclinic", "masks": "surgical"}
    for row in rule_cells():
        assert f"| {row} |" in METHODS
    assert "masked" in METHOD_REASON
    assert "fedseq" in describe_other_method(has_shared_class=True)
    assert "polyclinic" in describe_other_method(has_shared_class=False)


def test_with_each_number_of_hospitals_fedseq_is_ahead_at_equal_rounds_where_a_class_has_several() -> None:
    blocks = [each for each in published_result("published").blocks if each.data in GIVE_THE_RULE]
    shared = [each for each in blocks if each.pattern != "one7"]
    assert [each.pattern for each in shared if each.data == "composites"] == ["drawn7", "shared5", "drawn12"]
    assert [each for each in shared if each.entries["fedseq"].auroc <= each.entries["surgical"].auroc] == []
    assert "ahead of `surgical` with 5, 7 and 12 hospitals" in METHODS


def test_the_test_of_the_rule_is_on_the_pages() -> None:
    tests: list[RuleTest] = judge_rule(candidates())
    assert {test.data for test in tests} == {"mednist", "kermany", "nih", "busi"}
    assert format_rule_table(tests) in RESULTS
    for page in (RESULTS, METHODS):
        assert describe_rule_test() in page


def test_the_coordinators_own_images_help_on_one_data_set_and_not_on_another() -> None:
    methods = {method.label: method.by_data for method in published_result("published").methods}
    leads = {data: methods["unifed"][data].auroc - methods["fedseq"][data].auroc for data in ("composites", "nih")}
    words = "ahead of `fedseq` on composites by {:.3f}, behind on NIH by {:.3f}"
    assert words.format(leads["composites"], -leads["nih"]) in METHODS
