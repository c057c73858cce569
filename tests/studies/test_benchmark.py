"""The benchmark: what it plans, that a kill loses no finished run, and how it ranks."""

import fcntl
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from common.errors import BadInput
from strategies.registry import STRATEGIES, build_site_method
from studies.benchmark import BenchmarkOptions, all_runs, estimate_cost, lines_by_block, planned_count, run_benchmark
from studies.benchmark_file import FormPlan, PlannedRun
from studies.benchmark_report import as_markdown, write_benchmark_report
from studies.benchmark_results import (
    BenchmarkResult,
    ResultLine,
    append_result_line,
    benchmark_result,
    chosen_rates,
    read_result_lines,
)
from studies.statistics import critical_difference, find_cliques, rank_methods
from studies.trial import Trial

FOLDER = Path(__file__).parents[2] / "experiments" / "benchmark"
NEEDS_PRETRAINED = {"fedbn_plus"}


def a_line(**given: object) -> ResultLine:
    classes = {name: {"positives": count, "negatives": 100, "auroc": 0.8} for name, count in (("a", 40), ("b", 29))}
    whole = {
        name: {"average_precision": 0.3, "balanced_accuracy": 0.7, "interval": (0.7, 0.9), **each}
        for name, each in classes.items()
    }
    facts = {"key": "k", "code": "c", "data": "d", "pattern": "p", "method": "m", "lr": 0.1, "seed": 0, "tuning": False}
    figures = {"validation_auroc": 0.8, "interval": (0.7, 0.9), "best_round": 1, "rounds": 2}
    cost = {"cpu_seconds": 10.0, "megabytes": 1.0}
    return ResultLine.model_validate({**facts, **figures, **cost, "classes": whole, **given})


def line_for(run: PlannedRun) -> ResultLine:
    names = ("key", "data", "pattern", "method", "lr", "seed", "tuning")
    return a_line(**{name: getattr(run, name) for name in names})


# ---------------------------------------------------------------------- what is planned


@pytest.mark.parametrize("form", ["small", "published", "full"])
def test_every_method_but_those_that_need_a_pretrained_network_is_in_every_form(form: str) -> None:
    names = {method.name for method in FormPlan.of(FOLDER, form).benchmark.methods}
    assert names == set(STRATEGIES) - NEEDS_PRETRAINED


def test_every_run_of_the_published_form_is_an_experiment_that_its_method_serves() -> None:
    plan = FormPlan.of(FOLDER, "published")
    for data, pattern in plan.form.blocks:
        for method in plan.methods(data):
            run = plan.run(data, pattern, method, 1e-3, 0)
            experiment = Trial(run.experiment, Path("nowhere"), run.overrides, "").file.experiment
            assert build_site_method(experiment).name == method.name
            assert experiment.run.rounds == plan.form.rounds


def test_no_result_is_of_the_seed_that_chose_its_learning_rate() -> None:
    plan = FormPlan.of(FOLDER, "published")
    rates = {method.label: 1e-3 for method in plan.benchmark.methods}
    results = [run for data, pattern in plan.form.blocks for run in plan.results(data, pattern, rates)]
    assert {run.seed for run in results} == {0, 1, 2}
    assert {run.seed for data in plan.data_sets() for run in plan.tuning(data)} == {1000}


def test_a_run_has_one_key_for_its_settings_and_another_for_others() -> None:
    plan = FormPlan.of(FOLDER, "small")
    runs = list(plan.tuning("digits"))
    assert len({run.key for run in runs}) == len(runs)
    assert [run.key for run in plan.tuning("digits")] == [run.key for run in runs]


def test_the_rate_is_the_one_with_the_best_validation_auroc_of_the_tuning_runs_alone() -> None:
    lines = [
        a_line(tuning=True, lr=0.1, validation_auroc=0.7),
        a_line(tuning=True, lr=0.2, validation_auroc=0.9),
        a_line(tuning=True, lr=0.4, validation_auroc=0.9),
        a_line(tuning=False, lr=0.3, validation_auroc=0.99),
        a_line(tuning=True, lr=0.5, validation_auroc=0.99, data="other"),
    ]
    assert chosen_rates(lines, "d") == {"m": 0.2}


def test_a_form_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="published"):
        FormPlan.of(FOLDER, "publishd")


# ---------------------------------------------------------------------- a kill


def test_half_a_line_that_a_kill_left_is_made_again_and_nothing_else_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_result_line(path, a_line(key="one"))
    append_result_line(path, a_line(key="two"))
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines(keepends=True)[0]) + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert list(read_result_lines(path)) == ["one"]
    append_result_line(path, a_line(key="three"))
    assert list(read_result_lines(path)) == ["one", "three"]


def test_a_damaged_line_before_the_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_result_line(path, a_line())
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(BadInput, match="line 1"):
        read_result_lines(path)


# ---------------------------------------------------------------------- ranks


def test_nemenyis_critical_difference_is_demsars() -> None:
    """Table 5 of Demsar 2006: q is 2.569 for four methods and 3.164 for ten, at 0.05."""
    assert critical_difference(4, 14) == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 14)), rel=1e-3)
    assert critical_difference(10, 20) == pytest.approx(3.164 * np.sqrt(10 * 11 / (6 * 20)), rel=1e-3)


def test_methods_are_ranked_in_each_block_and_equal_ones_share_their_ranks() -> None:
    found = rank_methods({"a": [0.9, 0.8, 0.7], "b": [0.9, 0.9, 0.6], "c": [0.1, 0.2, 0.6]})
    assert dict(found.ranks) == pytest.approx(
        {"a": (1.5 + 2 + 1) / 3, "b": (1.5 + 1 + 2.5) / 3, "c": (3 + 3 + 2.5) / 3}
    )
    assert list(found.ranks) == ["a", "b", "c"]


def test_two_blocks_have_ranks_and_no_test() -> None:
    found = rank_methods({"a": [0.9, 0.8], "b": [0.8, 0.7], "c": [0.1, 0.2]})
    assert (found.p, found.critical_difference, found.cliques) == (None, None, ())


def test_cliques_are_the_largest_groups_within_the_critical_difference() -> None:
    assert find_cliques({"a": 1.0, "b": 1.5, "c": 2.4, "d": 5.0}, 1.0) == (("a", "b"), ("b", "c"))


# ---------------------------------------------------------------------- what the page says


def made_up(without: int = 0) -> tuple[FormPlan, Mapping[str, ResultLine]]:
    """Every run of the small form, methods alike but for ``surgical``, the last ones left out."""
    plan = FormPlan.of(FOLDER, "small")
    rates = {method.label: 1e-3 for method in plan.benchmark.methods}
    runs: list[PlannedRun] = [*plan.tuning("digits"), *plan.results("digits", "shared5", rates)]
    lines = {run.key: line_for(run) for run in runs}
    return plan, dict(list(lines.items())[: len(lines) - without])


def page(without: int = 0) -> BenchmarkResult:
    plan, lines = made_up(without)
    return benchmark_result(plan, "small", lines, planned_count(plan))


def test_a_run_whose_settings_two_patterns_share_stands_in_both() -> None:
    """With all labels at all sites the two patterns of seven sites are one."""
    whole = FormPlan.of(FOLDER, "published")
    methods = [one for one in whole.benchmark.methods if one.label == "fedavg"]
    blocks = [block for block in whole.form.blocks if block[0] == "composites" and block[1].endswith("7")]
    benchmark = whole.benchmark.model_copy(update={"methods": methods})
    plan = replace(whole, benchmark=benchmark, form=whole.form.model_copy(update={"blocks": blocks}))
    lines = dict[str, ResultLine]()
    for _ in range(2):  # the learning rates first
        for run in list(all_runs(plan, lines)):
            lines.setdefault(run.key, line_for(run))
    found = lines_by_block(plan, lines)
    assert [pattern for _, pattern in blocks] == ["one7", "drawn7"]
    assert (len(lines), len(found)) == (planned_count(plan) - 3, planned_count(plan))
    assert {line.pattern for line in found.values() if not line.tuning} == {"one7", "drawn7"}


def test_a_class_with_fewer_than_thirty_test_positives_is_named_and_not_scored() -> None:
    result = page()
    assert dict(result.blocks[0].scored) == {"a": 40}
    assert "too few: b (29)" in as_markdown(result)


def test_figures_of_the_initial_model_are_counted_without_the_runs_that_choose_a_rate() -> None:
    plan, lines = made_up()
    of_method = [line for line in lines.values() if line.method == "surgical"]
    chosen = [line for line in of_method if line.tuning][:1] + [line for line in of_method if not line.tuning][:1]
    changed = {line.key: line.model_copy(update={"best_round": 0}) for line in chosen}
    said = as_markdown(benchmark_result(plan, "small", {**lines, **changed}, planned_count(plan)))
    assert "surgical: in 1 run validation was best before round 1; the initial model is tested." in said
    assert said.count("validation was best before round 1") == 1
    assert "initial model is tested" not in as_markdown(page())


def test_a_page_of_missing_runs_says_that_it_is_partial_in_both_forms(tmp_path: Path) -> None:
    partial, whole = page(without=3), page()
    assert as_markdown(partial).splitlines()[2].startswith("**Partial: ")
    assert "Partial: " in write_benchmark_report(partial, tmp_path / "report.html").read_text()
    assert as_markdown(whole).splitlines()[2].startswith("Complete: ")
    assert "Partial" not in write_benchmark_report(whole, tmp_path / "report.html").read_text()


def test_only_seeds_that_every_ranked_method_has_are_compared() -> None:
    plan, lines = made_up()
    some = {key: line for key, line in lines.items() if (line.method, line.seed) != ("fednoro", 1)}
    block = benchmark_result(plan, "small", some, planned_count(plan)).blocks[0]
    assert block.common_seeds == (0,)
    assert {entry.seeds for entry in block.entries.values()} == {1}


def test_the_estimate_is_the_measured_rate_times_the_runs() -> None:
    """Ten CPU seconds for two rounds; the small form has four rounds, so 20 s a run."""
    plan, lines = made_up()
    hours = planned_count(plan) * 20 / 3600
    assert f"about {hours:.1f} core-hours" in estimate_cost(plan, list(lines.values()))[0]


def test_the_estimate_says_where_sizes_were_not_measured() -> None:
    _, lines = made_up()
    whole = FormPlan.of(FOLDER, "full")
    first, _, last = estimate_cost(whole, list(lines.values()))
    assert "at least" in first
    assert "composites, ham10000, mednist and kermany" in last


def test_the_page_says_how_far_methods_are_told_apart_where_each_data_set_counts_once() -> None:
    plan, lines = made_up()
    block = plan.form.blocks[0]
    blocks = [block, (block[0], "one7")]
    both = {
        f"{name} {key}": line.model_copy(update={"pattern": name}) for _, name in blocks for key, line in lines.items()
    }
    twice = replace(plan, form=plan.form.model_copy(update={"blocks": blocks}))
    assert "With the mean over its blocks as a data set's one value: 1 data set cannot" in as_markdown(
        benchmark_result(twice, "small", both, 2 * planned_count(plan))
    )
    assert "a data set's one value" not in as_markdown(benchmark_result(plan, "small", lines, planned_count(plan)))


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ('[[methods]]\nname = "rscfed"', '[[methods]]\nname = "rscfedd"', "rscfedd on digits, shared5: "),
        ('"method.passes=3"', '"method.pases=3"', "fedirm on digits, shared5: "),
        ('[[methods]]\nname = "fedfixmatch"', '[[methods]]\nname = "rscfed"\ntitle = "again"', "the same settings as"),
        ('[[methods]]\nname = "fedfixmatch"', '[[methods]]\nname = "rscfed"', "methods are called"),
        ('name = "one7"', 'name = "one3"', "patterns are called"),
        ('name = "mednist"', 'name = "nih"', "data sets are called"),
    ],
)
def test_a_fault_of_any_row_is_told_before_the_first_run(tmp_path: Path, was: str, now: str, told: str) -> None:
    text = (FOLDER / "benchmark.toml").read_text()
    assert was in text
    (tmp_path / "benchmark.toml").write_text(text.replace(was, now))
    (tmp_path / "digits.toml").write_text((FOLDER / "digits.toml").read_text())
    with pytest.raises(BadInput) as refused:
        run_benchmark(
            BenchmarkOptions(tmp_path, "small", tmp_path / "lines.jsonl", tmp_path / "out", 1, None, again=False),
            Console(quiet=True),
        )
    assert told in str(refused.value)
    assert not read_result_lines(tmp_path / "lines.jsonl")


def test_two_processes_do_not_run_one_file_and_a_page_is_written_all_the_same(tmp_path: Path) -> None:
    options = BenchmarkOptions(FOLDER, "small", tmp_path / "lines.jsonl", tmp_path / "out", 1, 0.0, again=False)
    with (tmp_path / "lines.jsonl").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run_benchmark(options, Console(quiet=True))
        with pytest.raises(BadInput, match="another flwr-sim is at work"):
            run_benchmark(replace(options, minutes=None), Console(quiet=True))
    assert (tmp_path / "out" / "report.html").is_file()


# ---------------------------------------------------------------------- one run


def test_a_finished_run_is_a_line_and_is_not_run_again(tmp_path: Path) -> None:
    """One method on one block of four rounds, in processes as a user's; then the same line with no time at all."""
    text = (FOLDER / "benchmark.toml").read_text()
    kept = [
        part
        for part in text.split("[[methods]]\n")
        if not part.startswith("name") or part.startswith('name = "partial_loss"')
    ]
    rest = text[text.index("[[patterns]]") :]
    whole = "[[methods]]\n".join(kept)
    (tmp_path / "benchmark.toml").write_text(whole if "[[patterns]]" in whole else whole + rest)
    (tmp_path / "digits.toml").write_text((FOLDER / "digits.toml").read_text())
    results = tmp_path / "results.jsonl"
    quiet = Console(quiet=True)
    options = BenchmarkOptions(tmp_path, "small", results, tmp_path / "out", 1, None, again=False)
    made = run_benchmark(options, quiet)
    assert (made.done, made.planned, made.partial) == (5, 5, False)
    before = results.read_bytes()
    assert all(0.5 < json.loads(line)["validation_auroc"] <= 1 for line in before.splitlines())
    assert run_benchmark(options, quiet).done == 5
    assert results.read_bytes() == before
    plan = FormPlan.of(tmp_path, "small")
    assert {run.key for run in all_runs(plan, read_result_lines(results))} == set(read_result_lines(results))
