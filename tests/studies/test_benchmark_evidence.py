"""Costs of methods in the benchmark, the rule that says which one to take, and a method beside the published rows."""

import csv
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from polyclinic.common.errors import BadInput
from polyclinic.strategies.registry import build_site_method
from polyclinic.studies.benchmark import BenchmarkOptions, print_cost_estimate, run_benchmark
from polyclinic.studies.benchmark_budgets import BlockBudget, FederationSpeed, compute_block_budgets
from polyclinic.studies.benchmark_choice import (
    MASKABLE,
    NO_FEDERATION,
    Candidates,
    choose_by_rule,
    judge_rule,
    list_candidates,
)
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.benchmark_partitions import SiteShare, read_partitions
from polyclinic.studies.benchmark_report import describe_standing
from polyclinic.studies.benchmark_results import (
    BlockResult,
    MethodBlockResult,
    RunResultLine,
    format_runs_as_csv,
    read_result_lines,
)
from tests.studies.made_lines import a_line
from tests.studies.published_runs import FOLDER, published_result

PUBLISHED = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "published")
OWN_MODELS = {"pfl", NO_FEDERATION}
"""Ranked methods of which each site has its own model."""


def test_a_round_of_passing_takes_as_long_as_all_visits_and_a_round_of_averaging_as_the_longest() -> None:
    """Two sites with 3 and 5 steps of a second; a model of 1 MB takes 0.5 s each way at 16 Mbit/s.

    Averaging: 1 + 5 = 6 s. Passing: 2 visits of 1 s, and 8 steps: 10 s. In the time of 12 rounds of passing, averaging
    has 12 * 10 / 6 = 20 rounds. Passing sends 30 MB, averaging (20 + 40) / 2 = 30: equal bytes are 12 rounds.
    """
    megabytes = {"fedseq": 20.0, "polyclinic": 40.0, "surgical": 29.0, "partial_loss": 31.0}
    budget = BlockBudget(2, 5.0, 8.0, 1.0, megabytes, rounds=12)
    speed = FederationSpeed(step_s=1.0, megabits_per_s=16.0)
    assert [budget.compute_round_seconds(speed, passing=passing) for passing in (False, True)] == [6.0, 10.0]
    assert budget.count_rounds_in_equal_time(speed) == pytest.approx(20)
    assert budget.count_rounds_of_equal_bytes() == pytest.approx(12)


def test_a_models_bytes_are_those_of_the_run_that_sends_nothing_else() -> None:
    """Two sites, two rounds: 16 MB are 8 messages of 2 MB; the other run also sends models for a further test."""
    shares = [SiteShare("a", 64, 9, 2, ("x",)), SiteShare("b", 99, 9, 4, ("y",))]
    lines = [a_line(method="surgical", megabytes=16.0), a_line(method="fedseq", megabytes=24.0)]
    tuning = a_line(method="fedseq", megabytes=1.0, tuning=True)
    (budget,) = compute_block_budgets([*lines, tuning], {("d", "p", 0): shares}).values()
    assert (budget.model_megabytes, budget.steps, budget.steps_in_sequence) == (2.0, 4.0, 6.0)


def block(data: str, pattern: str, **auroc: float) -> BlockResult:
    entries = {label: MethodBlockResult(1, value, 0.1, 0.5, None, None, 1e-3) for label, value in auroc.items()}
    return BlockResult(data, pattern, {"a": 30}, {}, (0,), entries)


def test_the_rule_takes_the_best_mean_of_two_data_sets_and_is_judged_on_the_others() -> None:
    """Surgical: (0.9 + 0.6) / 2 = 0.75, fedseq: (0.8 + 0.8) / 2 = 0.8; on the third data set surgical is 0.03 ahead."""
    blocks = [
        block("composites", "drawn7", surgical=0.9, fedseq=0.8, individual=0.99),
        block("ham10000", "drawn7", surgical=0.6, fedseq=0.8, individual=0.99),
        block("nih", "drawn7", surgical=0.65, fedseq=0.62, individual=0.99),
    ]
    longer = [replace(each, entries={"surgical": each.entries["fedseq"]}) for each in blocks]
    candidates = list_candidates(blocks, longer, ["surgical", "fedseq", NO_FEDERATION])
    situation = candidates["rounds, a class at several hospitals"]
    assert choose_by_rule(situation) == "fedseq"
    (test,) = judge_rule({"rounds, a class at several hospitals": situation})
    assert (test.data, test.method, test.best) == ("nih", "fedseq", "surgical")
    assert test.loss == pytest.approx(0.03)
    assert set(candidates["time"].auroc["nih", "drawn7"]) == {"surgical", "fedseq", "surgical, many rounds"}
    assert set(candidates["masks"].auroc["nih", "drawn7"]) == {"surgical"}


def test_a_data_set_has_the_means_of_the_methods_that_all_of_its_blocks_have() -> None:
    candidates = Candidates({("d", "p"): {"a": 0.5, "b": 0.9}, ("d", "q"): {"a": 0.7}, ("e", "p"): {"b": 0.1}})
    assert candidates.average_over_blocks("d") == pytest.approx({"a": 0.6})


def test_methods_for_masked_updates_are_the_ranked_ones_that_secure_aggregation_serves() -> None:
    served = list[str]()
    for method in PUBLISHED.variant_methods:
        if method.beyond or method.label in OWN_MODELS:
            continue
        file = PUBLISHED.make_planned_run("nih", "drawn7", method, 1e-3, 0).experiment_file
        privacy = file.experiment.privacy.model_copy(update={"secure_aggregation": True})
        try:
            build_site_method(file.experiment.model_copy(update={"privacy": privacy}))
        except BadInput:
            continue
        served.append(method.label)
    assert sorted(served) == sorted(MASKABLE)


def test_the_file_of_partitions_has_every_block_and_seed_and_each_class_an_owner() -> None:
    partitions = read_partitions(FOLDER / "partitions.csv")
    plans = [
        PUBLISHED,
        *(BenchmarkVariantPlan.read_benchmark_variant(FOLDER, form) for form in ("busi", "centres12", "frozen60")),
    ]
    blocks = {(*block, seed) for plan in plans for block in plan.form.blocks for seed in range(plan.form.seeds)}
    assert partitions.keys() == blocks
    for (data, pattern, _), shares in partitions.items():
        plan = next(each for each in plans if (data, pattern) in each.form.blocks)
        assert len(shares) == next(each.sites for each in plan.benchmark.patterns if each.name == pattern)
        owners = [name for share in shares for name in share.class_names]
        images = data.removesuffix("_centres")
        trained = next(line.classes for line in read_lines() if line.data == images)
        assert set(owners) == set(trained)
        assert (len(owners) == len(set(owners))) == pattern.startswith("one")


def read_lines() -> list[RunResultLine]:
    return list(read_result_lines(FOLDER / "published.jsonl").values())


def test_a_file_with_another_heading_is_no_file_of_partitions(tmp_path: Path) -> None:
    path = tmp_path / "partitions.csv"
    path.write_text("data,pattern\nnih,drawn7\n")
    with pytest.raises(BadInput, match="the heading is not"):
        read_partitions(path)


def test_a_new_method_gets_a_row_with_its_settings_and_the_learning_rates_of_its_form() -> None:
    plan, label = PUBLISHED.add_method("condistfl")
    assert label == "condistfl"
    assert [method.label for method in plan.variant_methods].count("condistfl") == 1
    assert not {method.label for method in PUBLISHED.variant_methods} & {"condistfl"}
    plan, label = PUBLISHED.add_method("fedprox", ("method.proximal_mu=0.5",))
    row = next(method for method in plan.variant_methods if method.label == label)
    assert (row.name, row.set) == ("fedprox", ("training.class_weights=true", "method.proximal_mu=0.5"))
    longer = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "rounds24").add_method("condistfl")[0]
    assert "condistfl" in {run.method for run in longer.iterate_tuning_runs("composites")}


def test_the_estimate_of_a_new_method_is_that_of_its_own_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rates on each of five data sets, and fifteen blocks with three seeds."""
    published = FOLDER / "published.jsonl"
    options = BenchmarkOptions(FOLDER, "published", published, tmp_path, 1, None, again=False, row="condistfl")
    print_cost_estimate(options, Console(width=200))
    assert capsys.readouterr().out.startswith("60 runs of 12 rounds: about ")


def test_a_method_beside_the_published_rows_runs_alone_and_is_told_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rate, one seed, one published row: two runs of the new method, and none of the row."""
    text = (FOLDER / "benchmark.toml").read_text().replace("[1e-3, 3e-3, 1e-2]", "[3e-3]")
    head, *methods = text.partition("[[patterns]]")[0].split("[[methods]]\n")
    (method,) = (part for part in methods if part.startswith('name = "partial_loss"'))
    rest = (
        "".join(text.partition("[[patterns]]")[1:]).partition("[forms.published]")[0].replace("seeds = 2", "seeds = 1")
    )
    (tmp_path / "benchmark.toml").write_text(f"{head}[[methods]]\n{method}{rest}")
    (tmp_path / "digits.toml").write_text((FOLDER / "digits.toml").read_text())
    published = tmp_path / "published.jsonl"
    options = BenchmarkOptions(tmp_path, "small", published, tmp_path / "out", 1, None, again=False)
    run_benchmark(options, Console(quiet=True))
    before = published.read_bytes()
    own = replace(options, results=tmp_path / "own.jsonl", row="surgical", published=published)
    result = run_benchmark(own, Console(width=200))
    assert published.read_bytes() == before
    assert {line.method for line in read_result_lines(own.results).values()} == {"surgical"}
    assert (len(read_result_lines(own.results)), result.done, result.planned) == (2, 4, 4)
    assert "surgical: place " in capsys.readouterr().out
    rows = list(csv.DictReader(StringIO((tmp_path / "out" / "runs.csv").read_text())))
    assert {row["method"] for row in rows} == {"surgical", "partial_loss"}


def test_a_line_of_the_csv_is_a_class_of_a_run_and_a_missing_figure_is_blank() -> None:
    line = a_line(seed=4)
    classes = {**line.classes, "b": line.classes["b"].model_copy(update={"auroc": None, "interval": None})}
    first, second = csv.DictReader(StringIO(format_runs_as_csv([line.model_copy(update={"classes": classes})])))
    assert [first[name] for name in ("seed", "class", "positives", "auroc", "auroc_low")] == [
        "4",
        "a",
        "40",
        "0.8",
        "0.7",
    ]
    assert [second[name] for name in ("class", "auroc", "auroc_low", "chooses_rate")] == ["b", "", "", "0"]


def test_where_a_method_stands_is_its_rank_its_lead_and_what_nemenyis_test_decides() -> None:
    sentence = describe_standing(published_result("published"), "fedseq")
    assert sentence.startswith("fedseq: place 1 of 17 by mean rank over 5 data sets (2.60), mean AUROC 0.884.")
    assert "+0.009, ahead on 4 of 5 data sets (p = 0.222, not corrected)" in sentence
    assert "it is ahead of vanilla, cbafed and fednoro and behind none" in sentence
