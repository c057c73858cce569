"""The benchmark: what it plans, that a kill loses no finished run, how it ranks; and paired comparisons."""

import fcntl
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import bootstrap, shapiro, ttest_1samp

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.holm import adjust_by_holm
from polyclinic.strategies.registry import STRATEGIES, build_site_method
from polyclinic.studies.benchmark import (
    BenchmarkOptions,
    count_planned_runs,
    estimate_benchmark_cost,
    group_results_by_block,
    list_planned_runs,
    list_tuning_runs,
    run_benchmark,
)
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan, PlannedRun
from polyclinic.studies.benchmark_report import benchmark_as_markdown, write_benchmark_report
from polyclinic.studies.benchmark_results import (
    BenchmarkResult,
    RunResultLine,
    append_result_line,
    choose_learning_rates,
    evaluate_benchmark,
    find_wider_rate,
    read_result_lines,
)
from polyclinic.studies.statistics import (
    BOOTSTRAP_RESAMPLES,
    PairedTest,
    compare_classes_and_seeds,
    compare_over_classes,
    compute_critical_difference,
    compute_paired_test,
    correct_family_by_holm,
    find_indistinct_method_groups,
    rank_methods,
)
from polyclinic.studies.trial import Trial
from tests.studies.made_lines import a_line
from tests.studies.published_runs import FOLDER

NEEDS_PRETRAINED = {"fedbn_plus"}
SMALL, PUBLISHED = (BenchmarkVariantPlan.read_benchmark_variant(FOLDER, form) for form in ("small", "published"))
QUIET = Console(quiet=True)


def line_for(run: PlannedRun) -> RunResultLine:
    names = ("data", "pattern", "method", "lr", "seed", "tuning")
    return a_line(key=run.results_key, **{name: getattr(run, name) for name in names})


def rates_of(plan: BenchmarkVariantPlan) -> dict[str, float]:
    return {method.label: 1e-3 for method in plan.benchmark.methods}


def test_every_method_but_those_that_need_a_pretrained_network_is_in_every_form() -> None:
    for form in ("small", "published", "full"):
        names = {method.name for method in BenchmarkVariantPlan.read_benchmark_variant(FOLDER, form).benchmark.methods}
        assert names == set(STRATEGIES) - NEEDS_PRETRAINED, form


def test_every_run_of_the_published_form_is_an_experiment_that_its_method_serves() -> None:
    for data, pattern in PUBLISHED.form.blocks:
        for method in PUBLISHED.list_methods_for_data(data):
            run = PUBLISHED.make_planned_run(data, pattern, method, 1e-3, 0)
            experiment = Trial(run.experiment, Path("nowhere"), run.overrides, "").experiment_file.experiment
            assert build_site_method(experiment).name == method.name
            assert experiment.run.rounds == PUBLISHED.form.rounds


def test_rows_of_fednoro_and_of_all_images_in_one_place_have_the_settings_that_their_names_say() -> None:
    def row(label: str) -> dict[str, Any]:
        method = next(method for method in PUBLISHED.benchmark.methods if method.label == label)
        return PUBLISHED.make_planned_run("nih", "drawn7", method, 1e-3, 0).experiment_file.experiment.method

    of_fedmlp = read_experiment(FOLDER.parent / "fedmlp" / "nih_missing7_fednoro.toml", ()).experiment.method
    compared = row("fednoro as in FedMLP")
    assert [compared[key] for key in ("noisy", "missing")] == [of_fedmlp[key] for key in ("noisy", "missing")]
    assert not {"noisy", "missing"} & row("fednoro").keys()
    centralised = [method for method in PUBLISHED.benchmark.methods if method.name == "centralised"]
    labels = [row(method.label).get("missing", "negative") for method in centralised]
    assert labels == ["negative", "masked", "known"]
    assert all(method.beyond for method in centralised)


def test_forms_of_more_rounds_differ_from_the_published_one_in_their_rounds_alone() -> None:
    def keys(plan: BenchmarkVariantPlan) -> set[str]:
        return {run.results_key for data in plan.list_data_sets() for run in plan.iterate_tuning_runs(data)}

    block, rates = ("composites", "one7"), rates_of(PUBLISHED)
    plans = {rounds: BenchmarkVariantPlan.read_benchmark_variant(FOLDER, f"rounds{rounds}") for rounds in (12, 24, 48)}
    runs = {rounds: list(plan.iterate_block_runs(*block, rates)) for rounds, plan in plans.items()}
    assert {run.results_key for run in runs[12]} < {
        run.results_key for run in PUBLISHED.iterate_block_runs(*block, rates)
    }
    published, of_twelve = keys(PUBLISHED), [run.experiment_file.experiment for run in runs[12]]
    for rounds, plan in plans.items():
        assert keys(plan) < published, "the learning rates of twelve"
        experiments = [run.experiment_file.experiment for run in runs[rounds]]
        with_rounds = {"update": {"rounds": rounds}}
        changed = [each.model_copy(update={"run": each.run.model_copy(**with_rounds)}) for each in of_twelve]
        assert experiments == changed


def test_no_result_is_of_the_seed_that_chose_its_learning_rate() -> None:
    results = [
        run for block in PUBLISHED.form.blocks for run in PUBLISHED.iterate_block_runs(*block, rates_of(PUBLISHED))
    ]
    assert {run.seed for run in results} == {0, 1, 2}
    assert {run.seed for data in PUBLISHED.list_data_sets() for run in PUBLISHED.iterate_tuning_runs(data)} == {1000}


def test_a_run_has_one_key_for_its_settings_and_another_for_others() -> None:
    keys, again = ([run.results_key for run in SMALL.iterate_tuning_runs("digits")] for _ in range(2))
    assert len(set(keys)) == len(keys)
    assert again == keys


def test_the_rate_is_the_one_with_the_best_validation_auroc_of_the_tuning_runs_alone() -> None:
    lines = [
        a_line(tuning=True, lr=0.1, validation_auroc=0.7),
        a_line(tuning=True, lr=0.2, validation_auroc=0.9),
        a_line(tuning=True, lr=0.4, validation_auroc=0.9),
        a_line(tuning=False, lr=0.3, validation_auroc=0.99),
        a_line(tuning=True, lr=0.5, validation_auroc=0.99, data="other"),
    ]
    assert choose_learning_rates(lines, "d") == {"m": 0.2}


CANDIDATES = (1e-3, 3e-3, 1e-2, 1e-4, 3e-4, 3e-2, 1e-1)


@pytest.mark.parametrize(
    ("auroc", "wider"),
    [
        ({1e-3: 0.9, 3e-3: 0.8, 1e-2: 0.7}, 3e-4),
        ({1e-3: 0.7, 3e-3: 0.8, 1e-2: 0.9}, 3e-2),
        ({1e-3: 0.7, 3e-3: 0.9, 1e-2: 0.8}, None),
        ({1e-3: 1.0, 3e-3: 1.0, 1e-2: 0.9}, None),  # the lowest counts, and its neighbour has as much
        ({1e-3: 0.9, 3e-3: 0.8, 3e-4: 0.85}, None),
        ({1e-4: 0.9, 3e-4: 0.8}, None),  # no candidate is left
        ({3e-2: 0.8, 1e-1: 0.9}, None),
        ({1e-3: 0.9}, None),
    ],
)
def test_a_best_rate_at_an_end_asks_for_the_next_one_outward(auroc: dict[float, float], wider: float | None) -> None:
    assert find_wider_rate(auroc, CANDIDATES) == wider


def test_a_form_that_widens_tries_rates_until_the_best_lies_between_two_and_takes_that() -> None:
    """Of the rates 0.001, 0.003, 0.01 the highest is the best for one method; 0.03 is better still, 0.1 is not."""
    plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "ours12")
    auroc = {1e-3: 0.5, 3e-3: 0.6, 1e-2: 0.7, 3e-2: 0.8, 1e-1: 0.75}
    others = {1e-3: 0.5, 3e-3: 0.6, 1e-2: 0.4}
    lines, tried = dict[str, RunResultLine](), list[float]()
    while runs := [run for run in list_tuning_runs(plan, "busi", lines) if run.results_key not in lines]:
        for run in runs:
            reached = (auroc if run.method == "surgical" else others)[run.lr]
            lines[run.results_key] = line_for(run).model_copy(update={"validation_auroc": reached})
            tried += [run.lr] if run.method == "surgical" else []
    assert tried == [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
    rates = choose_learning_rates(lines.values(), "busi")
    assert (rates["surgical"], rates["partial_loss"]) == (3e-2, 3e-3)
    assert count_planned_runs(plan, lines) == count_planned_runs(plan) + 2
    benchmark = plan.benchmark.model_copy(update={"failing_rates": (("busi", "surgical", 1e-1),)})
    failing = replace(plan, benchmark=benchmark)
    assert len(list_tuning_runs(failing, "busi", lines)) == len(list_tuning_runs(plan, "busi", lines)) - 1
    kept = replace(plan, form=plan.form.model_copy(update={"widen": False}))
    assert list_tuning_runs(kept, "busi", lines) == list(plan.iterate_tuning_runs("busi"))


def test_a_form_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="published"):
        BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "publishd")


def test_half_a_line_that_a_kill_left_is_made_again_and_nothing_else_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for key in ("first", "second"):
        append_result_line(path, a_line(key=key))
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines(keepends=True)[0]) + 1, len(whole) - 1, 5):
        path.write_bytes(whole[:cut])
        assert list(read_result_lines(path)) == ["first"]
    append_result_line(path, a_line(key="third"))
    assert list(read_result_lines(path)) == ["first", "third"]
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(BadInput, match="line 1"):  # a damaged line before the end is named
        read_result_lines(path)


def test_nemenyis_critical_difference_is_demsars() -> None:
    """Table 5 of Demsar 2006: q is 2.569 for four methods and 3.164 for ten, at 0.05."""
    assert compute_critical_difference(4, 14) == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 14)), rel=1e-3)
    assert compute_critical_difference(10, 20) == pytest.approx(3.164 * np.sqrt(10 * 11 / (6 * 20)), rel=1e-3)


def test_methods_are_ranked_in_each_block_and_equal_ones_share_their_ranks() -> None:
    ranks = rank_methods({"a": [0.9, 0.8, 0.7], "b": [0.9, 0.9, 0.6], "c": [0.1, 0.2, 0.6]}).ranks
    assert dict(ranks) == pytest.approx({"a": (1.5 + 2 + 1) / 3, "b": (1.5 + 1 + 2.5) / 3, "c": (3 + 3 + 2.5) / 3})
    assert list(ranks) == ["a", "b", "c"]
    of_two_blocks = rank_methods({"a": [0.9, 0.8], "b": [0.8, 0.7], "c": [0.1, 0.2]})
    assert (of_two_blocks.p, of_two_blocks.critical_difference, of_two_blocks.cliques) == (None, None, ())


def test_cliques_are_the_largest_groups_within_the_critical_difference() -> None:
    assert find_indistinct_method_groups({"a": 1.0, "b": 1.5, "c": 2.4, "d": 5.0}, 1.0) == (("a", "b"), ("b", "c"))


@cache
def small_lines() -> dict[str, RunResultLine]:
    """Every run of the small form, all methods alike."""
    tuning, results = (
        SMALL.iterate_tuning_runs("digits"),
        SMALL.iterate_block_runs("digits", "shared5", rates_of(SMALL)),
    )
    return {run.results_key: line_for(run) for run in (*tuning, *results)}


def result_of(
    lines: Mapping[str, RunResultLine], plan: BenchmarkVariantPlan = SMALL, blocks: int = 1
) -> BenchmarkResult:
    return evaluate_benchmark(plan, "small", lines, blocks * count_planned_runs(SMALL))


def test_a_run_whose_settings_two_patterns_share_stands_in_both() -> None:
    """With all labels at all sites the two patterns of seven sites are one."""
    methods = [method for method in PUBLISHED.benchmark.methods if method.label == "fedavg"]
    blocks = [block for block in PUBLISHED.form.blocks if block[0] == "composites" and block[1].endswith("7")]
    benchmark = PUBLISHED.benchmark.model_copy(update={"methods": methods})
    plan = replace(PUBLISHED, benchmark=benchmark, form=PUBLISHED.form.model_copy(update={"blocks": blocks}))
    lines = dict[str, RunResultLine]()
    for _ in range(2):  # the learning rates first
        for run in list(list_planned_runs(plan, lines)):
            lines.setdefault(run.results_key, line_for(run))
    by_block = group_results_by_block(plan, lines)
    assert [pattern for _, pattern in blocks] == ["one7", "drawn7"]
    assert (len(lines), len(by_block)) == (count_planned_runs(plan) - 3, count_planned_runs(plan))
    assert {line.pattern for line in by_block.values() if not line.tuning} == {"one7", "drawn7"}


def test_the_page_names_a_class_with_few_positives_initial_models_and_missing_runs(tmp_path: Path) -> None:
    whole = result_of(small_lines())
    markdown = benchmark_as_markdown(whole)
    assert dict(whole.blocks[0].scored) == {"a": 40}
    assert "too few: b (29)" in markdown
    assert markdown.splitlines()[2].startswith("Complete: ")
    assert "Partial" not in write_benchmark_report(whole, tmp_path / "report.html").read_text()
    of_method = [line for line in small_lines().values() if line.method == "surgical"]
    chosen = [next(line for line in of_method if line.tuning is tuning) for tuning in (True, False)]
    changed = {line.key: line.model_copy(update={"best_round": 0}) for line in chosen}
    initial = benchmark_as_markdown(result_of({**small_lines(), **changed}))
    assert (
        "surgical: in 1 run no round was better on validation than before round 1" in initial
    )  # not the run that chooses a rate
    assert [text.count("initial model is tested") for text in (initial, markdown)] == [1, 0]
    partial = result_of(dict(list(small_lines().items())[:-3]))
    assert benchmark_as_markdown(partial).splitlines()[2].startswith("**Partial: ")
    assert "Partial: " in write_benchmark_report(partial, tmp_path / "report.html").read_text()


def test_only_seeds_that_every_ranked_method_has_are_compared() -> None:
    some = {key: line for key, line in small_lines().items() if (line.method, line.seed) != ("fednoro", 1)}
    block = result_of(some).blocks[0]
    assert block.common_seeds == (0,)
    assert {entry.seeds for entry in block.entries.values()} == {1}


def test_the_estimate_is_the_measured_rate_times_the_runs_and_says_where_sizes_were_not_measured() -> None:
    """Ten CPU seconds for two rounds; the small form has four rounds, so 20 s a run."""
    hours = count_planned_runs(SMALL) * 20 / 3600
    assert f"about {hours:.1f} core-hours" in estimate_benchmark_cost(SMALL, list(small_lines().values()))[0]
    first, _, last = estimate_benchmark_cost(
        BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "full"), list(small_lines().values())
    )
    assert "at least" in first
    assert "composites, ham10000, mednist and kermany" in last


def markdown_of_blocks(figures: Mapping[tuple[str, str], float]) -> tuple[BenchmarkResult, str]:
    """The result of blocks in which surgical aggregation has these AUROCs and all others have 0.5, and its page."""
    lines, plan = {}, replace(SMALL, form=SMALL.form.model_copy(update={"blocks": tuple(figures)}))
    for (data, pattern), auroc in figures.items():
        for key, line in small_lines().items():
            own = {"auroc": auroc if line.method == "surgical" else 0.5}
            classes = {name: result.model_copy(update=own) for name, result in line.classes.items()}
            update = {"data": data, "pattern": pattern, "classes": classes}
            lines[f"{data} {pattern} {key}"] = line.model_copy(update=update)
    result = result_of(lines, plan, blocks=len(figures))
    return result, benchmark_as_markdown(result)


def test_each_data_set_has_the_mean_over_its_own_blocks_and_counts_once() -> None:
    """Surgical: 0.8 on the digits; 0.8 and 0.6 in the two patterns of the other data set, whose mean is 0.7."""
    digits = {("digits", "shared5"): 0.8}
    result, page = markdown_of_blocks({**digits, ("composites", "shared5"): 0.8, ("composites", "one7"): 0.6})
    surgical = next(method for method in result.methods if method.label == "surgical")
    by_data = {data: mean.auroc for data, mean in surgical.by_data.items()}
    assert by_data == pytest.approx({"digits": 0.8, "composites": 0.7})
    table = page.partition("## Data set by data set")[2].partition("## Block by block")[0]
    row = r"^\| surgical \| 0\.800 ± [\d.]+ \| 0\.700 ± [\d.]+ \| \+0\.250, 2 of 2, not tested \|$"
    assert re.search(row, table, re.MULTILINE)
    _, of_one_block = markdown_of_blocks(digits)
    _, of_one_data_set = markdown_of_blocks({**digits, ("digits", "one7"): 0.8})
    assert "Data set by data set" not in of_one_block
    assert "a data set's one value" not in of_one_block
    assert "a data set's one value: 1 data set cannot" in of_one_data_set


def options_of(tmp_path: Path, folder: Path, minutes: float | None = None) -> BenchmarkOptions:
    return BenchmarkOptions(folder, "small", tmp_path / "lines.jsonl", tmp_path / "out", 1, minutes, again=False)


def write_benchmark(folder: Path, text: str) -> None:
    (folder / "benchmark.toml").write_text(text)
    (folder / "digits.toml").write_text((FOLDER / "digits.toml").read_text())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '[[methods]]\nname = "rscfed"',
            '[[methods]]\ntitle = "rscfed"\nname = "rscfedd"',
            "rscfed on digits, shared5: ",
        ),
        ('"method.passes=3"', '"method.pases=3"', "fedirm on digits, shared5: "),
        ('name = "fedfixmatch"', 'name = "rscfed"\ntitle = "fedfixmatch"', "the same settings as"),
        ('[[methods]]\nname = "fedfixmatch"', '[[methods]]\nname = "rscfed"', "methods are called"),
        ('name = "one7"', 'name = "one3"', "patterns are called"),
        ('name = "mednist"', 'name = "nih"', "data sets are called"),
        ('"surgical", "partial_loss", "fedseq"', '"surgicall", "partial_loss"', '"surgicall" in form "rounds12"'),
        ('"partial_loss", "fedseq", ', '"fedseq", ', '"partial_loss" is missing in the methods of form "rounds12"'),
        ('rates = "published"', 'rates = "publishd"', '"publishd" of form "rounds12"'),
        ('rates = "published"', 'rates = "small"', 'chooses no rates for "composites"'),
    ],
)
def test_a_fault_of_any_row_is_found_before_the_first_run(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (FOLDER / "benchmark.toml").read_text()
    assert old in text
    write_benchmark(tmp_path, text.replace(old, new))
    with pytest.raises(BadInput) as error:
        run_benchmark(options_of(tmp_path, tmp_path), QUIET)
    assert words in str(error.value)
    assert not read_result_lines(tmp_path / "lines.jsonl")


def test_two_processes_do_not_run_one_file_and_a_page_is_written_all_the_same(tmp_path: Path) -> None:
    with (tmp_path / "lines.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run_benchmark(options_of(tmp_path, FOLDER, minutes=0.0), QUIET)
        with pytest.raises(BadInput, match="another flwr-sim is at work"):
            run_benchmark(options_of(tmp_path, FOLDER), QUIET)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_finished_run_is_a_line_and_is_not_run_again(tmp_path: Path) -> None:
    """One method with one rate and one seed, in processes as a user's; then the same lines with no time at all."""
    text = (FOLDER / "benchmark.toml").read_text()
    text = text.replace("[1e-3, 3e-3, 1e-2]", "[3e-3]").replace("seeds = 2", "seeds = 1")
    head, *methods = text.partition("[[patterns]]")[0].split("[[methods]]\n")
    (method,) = (part for part in methods if part.startswith('name = "partial_loss"'))
    rest = "".join(text.partition("[[patterns]]")[1:])
    rest = rest.partition("[forms.published]")[0]  # other forms name methods that are left out here
    write_benchmark(tmp_path, f"{head}[[methods]]\n{method}{rest}")
    options = options_of(tmp_path, tmp_path)
    result = run_benchmark(options, QUIET)
    assert (result.done, result.planned, result.is_benchmark_incomplete) == (2, 2, False)
    before = (tmp_path / "lines.jsonl").read_bytes()
    assert all(0.5 < json.loads(line)["validation_auroc"] <= 1 for line in before.splitlines())
    assert run_benchmark(options, QUIET).done == 2
    assert (tmp_path / "lines.jsonl").read_bytes() == before
    lines = read_result_lines(tmp_path / "lines.jsonl")
    planned = list_planned_runs(BenchmarkVariantPlan.read_benchmark_variant(tmp_path, "small"), lines)
    assert {run.results_key for run in planned} == set(lines)


def paired_result(pairs: Any) -> PairedTest:
    return compute_paired_test(np.asarray(pairs, dtype=float).reshape(-1, 2), np.random.default_rng(5))


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([], "0 pairs are too few"),
        ([[0.8, 0.7], [0.7, 0.75]], "2 pairs are too few"),
        ([[0.8, 0.7], [0.7, 0.6], [0.6, 0.5]], "all 3 differences are equal"),
        ([[0.8, 0.8]] * 5, "all 5 differences are equal"),
    ],
)
def test_what_cannot_be_tested_says_why(pairs: list[list[float]], reason: str) -> None:
    result = paired_result(pairs)
    assert result.reason.startswith(reason)
    assert (result.p_value, result.normality_p, result.interval) == (None, None, None)


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        paired_result([[0.8, np.nan]] * 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=12))
@settings(max_examples=60)
def test_ties_and_zeros_give_a_p_value_or_a_reason_but_no_warning(rows: list[tuple[int, int]]) -> None:
    result = paired_result(np.array(rows) / 10)
    assert (result.p_value is None) == bool(result.reason)
    assert result.p_value is None or 0 <= result.p_value <= 1


def test_seeds_are_averaged_before_classes_are_paired() -> None:
    # Class a: (.9 + .7)/2 - (.6 + .6)/2 = .2;  b: .8 - .9 = -.1 (seed 1 has no value for the other);  c: .5 - .4 = .1.
    reference = {(0, "a"): 0.9, (1, "a"): 0.7, (0, "b"): 0.8, (1, "b"): 0.1, (0, "c"): 0.5, (2, "c"): 0.9}
    other = {(0, "a"): 0.6, (1, "a"): 0.6, (0, "b"): 0.9, (1, "b"): None, (0, "c"): 0.4}
    by_class = compare_over_classes(reference, other, np.random.default_rng(5))
    by_pair = compare_classes_and_seeds(reference, other, np.random.default_rng(5))
    assert (by_class.pairs, by_pair.pairs) == (3, 4)
    assert by_class.mean_difference == pytest.approx(0.2 / 3)
    assert by_pair.mean_difference == pytest.approx((0.3 + 0.1 - 0.1 + 0.1) / 4)


def test_holm_multiplies_from_the_smallest_on_and_never_falls() -> None:
    # Sorted .01 .03 .04 times 3 2 1 -> .03 .06 .04, the last lifted to .06; None does not count.
    assert adjust_by_holm([0.04, None, 0.01, 0.03]) == pytest.approx([0.06, None, 0.03, 0.06])
    assert adjust_by_holm([0.7, 0.9]) == [1.0, 1.0]
    assert adjust_by_holm([]) == []
    tests = [PairedTest(9, p_value=0.02), PairedTest(2, reason="few"), PairedTest(9, p_value=0.3)]
    assert [each.holm_p for each in correct_family_by_holm(tests)] == [0.04, None, 0.3]


def random_pairs(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """AUROCs of two methods; differences are normal, or skewed so that normality is rejected."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 40))
    draw = rng.normal if rng.random() < 0.5 else rng.pareto
    other = rng.uniform(0.5, 0.9, count)
    return np.stack([other + 0.02 * draw(1.5, size=count) - 0.01, other], axis=1)


@given(st.integers(0, 10_000))
@settings(max_examples=40)
def test_each_p_value_is_that_of_scipy_on_the_differences(seed: int) -> None:
    pairs = random_pairs(seed)
    differences, result = pairs[:, 0] - pairs[:, 1], paired_result(pairs)
    assert result.mean_difference == pytest.approx(np.mean(differences))
    assert result.p_value == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert result.normality_p == pytest.approx(shapiro(differences).pvalue)


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_is_close_to_the_percentile_bootstrap_of_scipy_and_always_the_same(seed: int) -> None:
    pairs = random_pairs(seed)
    differences, (low, high) = pairs[:, 0] - pairs[:, 1], paired_result(pairs).interval or (0, 0)
    options: dict[str, Any] = {
        "n_resamples": BOOTSTRAP_RESAMPLES,
        "method": "percentile",
        "rng": np.random.default_rng(seed),
    }
    expected = bootstrap((differences,), np.mean, **options).confidence_interval
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.05 * (high - low))
    assert paired_result(pairs).interval == (low, high)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8, unique=True), st.floats(0.001, 0.999))
def test_a_corrected_p_is_at_most_alpha_just_where_holms_procedure_rejects(p_values: list[float], alpha: float) -> None:
    """Holm states it in steps: the smallest first, against alpha / m, alpha / (m - 1), ... until one fails."""
    adjusted = [p for p in adjust_by_holm(p_values) if p is not None]
    rejected = set[int]()
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (len(p_values) - step):
            break
        rejected.add(index)
    clear = [index for index, p in enumerate(adjusted) if abs(p - alpha) > 1e-9]  # but for rounding
    assert [index in rejected for index in clear] == [adjusted[index] <= alpha for index in clear]
