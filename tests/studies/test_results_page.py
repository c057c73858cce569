"""Figures in sentences of README and results, and in the claims of papers, that no command prints are of the runs."""

import re
import runpy
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from scipy.stats import ttest_rel

from polyclinic.common.metrics.holm import adjust_by_holm
from polyclinic.common.system.plain_text import format_signed
from polyclinic.studies.benchmark import list_tuning_runs, read_benchmark_result
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.benchmark_ours import EQUAL_STEPS_FORM
from polyclinic.studies.benchmark_report import benchmark_as_markdown, format_mean_cell
from polyclinic.studies.benchmark_results import BenchmarkResult, BlockResult, RunResultLine, read_result_lines
from supply.claims import read_claims
from tests.studies.published_runs import FOLDER, RESULTS, ROOT, find_rows_at_an_end, published_result

README, PAGE_OF_PAPERS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/papers.md"))
PAPERS = "\n".join(f"{' | '.join(claim)} |" for claim in read_claims())
FEDNORO = "fednoro as in FedMLP"
MASKED, KNOWN = "centralised, masked", "centralised, all labels known"
DATA = ("composites", "ham10000", "mednist", "kermany", "nih")
UNEQUAL = ("drawn12", "one3")
"""Patterns with sites of unlike size; with patients of several images (Kermany, NIH) they are so in each pattern."""
FIVE = "five of five data sets (p = {p})"
PAIRS = [
    ("partial_loss", "vanilla", 5, RESULTS, f"(`partial_loss`) 0.872 (0.866): behind on {FIVE}"),
    (MASKED, "centralised", 5, RESULTS, "0.865 (0.855) and 0.891 (0.870): behind on five of five (p = {p})"),
    (MASKED, "centralised", 5, RESULTS, "0.023 over data sets (5 of 5, p = {p}, uncorrected)"),
    ("surgical", "partial_loss", 4, RESULTS, "ahead on four of five data sets (p = {p})"),
    (
        MASKED,
        "surgical",
        4,
        RESULTS,
        "ahead of surgical aggregation (0.875, 0.867) on four of five data sets (p = {p})",
    ),
    (KNOWN, MASKED, 5, RESULTS, "0.913 (0.885), ahead of the former on five of five (p = {p})"),
    ("partial_loss", "individual", 5, RESULTS, f"behind partial loss (0.872, 0.866) on {FIVE}"),
    ("surgical", "vanilla", 4, PAPERS, "five data sets: 0.875 and 0.823, 4 of 5, p = {p} |"),
    ("surgical", "partial_loss", 4, PAPERS, "five data sets: 0.875 and 0.872, 4 of 5, p = {p} |"),
    ("surgical", "centralised", 4, PAPERS, "five data sets: 0.875 and 0.865, 4 of 5, p = {p} |"),
    ("surgical", "pfl", 4, PAPERS, "five data sets, FedAvg: 0.875 and 0.871, 4 of 5, p = {p} |"),
    ("surgical", "individual", 5, PAPERS, "five data sets, FedAvg: 0.875 and 0.857, 5 of 5, p = {p} |"),
    ("fedsld", "fedprox", 1, PAPERS, "five data sets: 0.863 and 0.875, 1 of 5, p = {p};"),
    ("fedmlp", "partial_loss", 1, PAPERS, "five data sets: AUROC 0.857 and 0.872, 1 of 5, p = {p};"),
    ("fedmlp", FEDNORO, 3, PAPERS, "five data sets: AUROC 0.857 and 0.859, 3 of 5, p = {p} |"),
    ("unifed", "server_only", 5, PAPERS, "AUROC 0.889 and 0.862, 5 of 5, p = {p};"),
    ("fedmlp", FEDNORO, 3, RESULTS, "ahead on 3 of 5 (p = {p})"),
    (FEDNORO, "fednoro", 5, RESULTS, "on 5 of 5 (p = {p})"),
    ("unifed", "server_only", 5, RESULTS, "AUROC +0.029, 5 of 5, p = {p};"),
]
"""Two methods, in how many data sets the first is ahead, and the page with the words around p of their paired test."""
MAIN_TESTS = (
    ("partial_loss", "vanilla"),
    (MASKED, "centralised"),
    ("surgical", "partial_loss"),
    (MASKED, "surgical"),
    (KNOWN, MASKED),
    ("partial_loss", "individual"),
)
"""The pairs of methods that the first section of results.md compares."""


def list_pairs_of_page(page: str) -> list[tuple[str, str]]:
    """Return the pairs of methods that a page compares."""
    return [(first, second) for first, second, _, of_page, _ in PAIRS if of_page is page]


def says(page: str, *sentences: str) -> None:
    """Check that a page has these sentences."""
    assert [sentence for sentence in sentences if sentence not in page] == []


@pytest.fixture(scope="module")
def published() -> BenchmarkResult:
    return published_result("published")


@pytest.fixture(scope="module")
def more_rounds() -> dict[int, BenchmarkResult]:
    return {rounds: published_result(f"rounds{rounds}") for rounds in (12, 24, 48)}


def mean_of(label: str, blocks: Iterable[BlockResult], measure: str = "auroc") -> float:
    return float(np.mean([getattr(block.entries[label], measure) for block in blocks]))


def without_composites(result: BenchmarkResult) -> list[BlockResult]:
    return [block for block in result.blocks if block.data != "composites"]


def data_set(name: str) -> Callable[[BenchmarkResult], list[BlockResult]]:
    return lambda result: [block for block in result.blocks if block.data == name]


def means_by_data(result: BenchmarkResult, label: str, measure: str = "auroc") -> list[float]:
    names = dict.fromkeys(block.data for block in result.blocks)
    return [mean_of(label, data_set(name)(result), measure) for name in names]


def paired_p(first: str, second: str, measure: str = "auroc") -> float:
    result = published_result("fednoro" if FEDNORO in (first, second) else "published")
    both = (means_by_data(result, label, measure) for label in (first, second))
    return float(ttest_rel(*both).pvalue)


def leads(blocks: Iterable[BlockResult], first: str, second: str) -> list[float]:
    """By how much the first method is ahead of the second in each block."""
    return [block.entries[first].auroc - block.entries[second].auroc for block in blocks]


def signed(number: float) -> str:
    return f"{number:.3f}".replace("-", "−")


def test_the_sentences_have_the_paired_t_test_over_the_five_data_sets() -> None:
    for first, second, ahead, page, words in PAIRS:
        result = published_result("fednoro" if FEDNORO in (first, second) else "published")
        ours, theirs = (means_by_data(result, label) for label in (first, second))
        assert sum(a > b for a, b in zip(ours, theirs, strict=True)) == ahead, (first, second)
        says(page, words.format(p=f"{paired_p(first, second):.3f}"))


def test_the_smallest_p_by_holm_and_those_of_other_measures_are_on_the_pages(published: BenchmarkResult) -> None:
    main, papers = ([paired_p(*pair) for pair in pairs] for pairs in (MAIN_TESTS, list_pairs_of_page(PAPERS)))
    assert len(papers) == 9
    says(RESULTS, f"over the six tests makes the smallest {min(adjust_by_holm(main)):.3f}")
    words = "Holm's correction over the nine such tests in AUROC makes the smallest p"
    says(PAGE_OF_PAPERS, f"{words} {min(adjust_by_holm(papers)):.3f}")
    p = [paired_p("unifed", "server_only", measure) for measure in ("average_precision", "balanced_accuracy")]
    says(RESULTS, "mAP +0.041, p = {:.3f}; balanced accuracy +0.043, p = {:.3f}".format(*p))
    says(PAPERS, "mAP 0.693 and 0.650, p = {:.3f}; balanced accuracy 0.821 and 0.775, p = {:.3f}".format(*p))
    says(RESULTS, f"balanced accuracy (p = {paired_p(FEDNORO, 'fednoro', 'balanced_accuracy'):.3f})")
    rows = combinations([method.label for method in published.methods], 2)
    small = [paired_p(*pair) < 0.05 for pair in rows]
    assert sum(small) == 12
    says(RESULTS, f"of the {len(small)} pairs of rows twelve have p below 0.05 in AUROC")


def test_the_sentences_have_the_mean_and_that_without_composites(published: BenchmarkResult) -> None:
    for label in ("vanilla", "partial_loss", "surgical", "fedseq", "centralised", MASKED, KNOWN, "individual"):
        both = f"{mean_of(label, published.blocks):.3f} ({mean_of(label, without_composites(published)):.3f})"
        says(RESULTS, both)


def test_the_ranks_and_what_nemenyis_test_decides_are_on_the_pages(published: BenchmarkResult) -> None:
    data = published.ranking_of_data
    first, critical = data.ranks["fedseq"], data.critical_difference
    assert data.p is not None
    assert data.p < 0.001
    assert critical is not None
    decided = {(a, b) for a in data.ranks for b in data.ranks if data.ranks[b] - data.ranks[a] >= critical}
    last = data.ranks["vanilla"]
    of_fedseq = {("fedseq", other) for other in ("vanilla", "cbafed", "fednoro")}
    assert decided == {*of_fedseq, ("polyclinic", "fednoro")}
    assert min(data.ranks.values()) == first
    says(
        RESULTS,
        f"{first:.2f} among {len(data.ranks)} methods",
        f"it is ahead of `vanilla` ({last:.2f}), `cbafed` ({data.ranks['cbafed']:.2f}) and `fednoro` "
        f"({data.ranks['fednoro']:.2f}) alone",
        f"only `fedseq` ({first:.2f}) against `vanilla`, `cbafed` and `fednoro`, and `polyclinic` "
        f"({data.ranks['polyclinic']:.2f}) against `fednoro`, are decided",
        "(Friedman: p < 0.001)",
        f"Nemenyi's test is {critical:.2f} ranks",
    )


def test_the_gap_of_vanilla_by_pattern_and_a_hospitals_own_model_are_those_of_the_blocks(
    published: BenchmarkResult,
) -> None:
    leads_by_block = leads(published.blocks, "partial_loss", "vanilla")
    gap = {(block.data, block.pattern): lead for block, lead in zip(published.blocks, leads_by_block, strict=True)}
    by_data = [
        mean(lead for (data, _), lead in gap.items() if data == name) for name in dict.fromkeys(data for data, _ in gap)
    ]
    of_two = [mean(leads(data_set(data)(published), "partial_loss", "vanilla")) for data in ("composites", "ham10000")]
    assert sorted(by_data, reverse=True)[:2] == pytest.approx(of_two)
    alone = [gap.pop((data, pattern)) for data in ("composites", "ham10000") for pattern in ("one7", "shared5")]
    kermany = gap.pop(("kermany", "one3"))
    words = f"by {min(alone):.3f} to {max(alone):.3f} on composites and HAM10000 in `one7` and `shared5`, "
    words += f"by {kermany:.3f} on Kermany in `one3`, and by at most {max(gap.values()):.3f} elsewhere; on NIH it "
    words += (
        f"is behind by {gap['nih', 'shared5']:.3f} in `shared5` and ahead by {-gap['nih', 'drawn7']:.3f} in `drawn7`"
    )
    says(RESULTS, words)
    assert sum(lead > 0 for lead in leads(published.blocks, "individual", "partial_loss")) == 4
    says(README, "is ahead of `partial_loss` in four of the fifteen pairs")
    says(RESULTS, "ahead in four of the fifteen pairs")


ROWS: dict[str, Callable[[BenchmarkResult], Iterable[BlockResult]]] = {
    "all five": lambda result: result.blocks,
    "composites (drawn images of digits)": data_set("composites"),
    "HAM10000": data_set("ham10000"),
    "MedNIST": data_set("mednist"),
    "Kermany": data_set("kermany"),
    "NIH": data_set("nih"),
    "all but composites": without_composites,
}


@pytest.mark.parametrize("row", ROWS)
def test_the_table_of_what_is_lost_has_means_and_parts_of_the_way(published: BenchmarkResult, row: str) -> None:
    blocks = list(ROWS[row](published))
    surgical, *others, masked, known = (
        mean_of(label, blocks) for label in ("surgical", "fedseq", "polyclinic", MASKED, KNOWN)
    )
    parts = [part_of_way(surgical, other, end) for other in others for end in (masked, known)]
    figures = [f"{mean:.3f}" for mean in (surgical, *others, masked, known)]
    says(RESULTS, f"| {' | '.join([row, *figures, *parts])} |")


def part_of_way(start: float, reached: float, end: float) -> str:
    """How far a mean is on the way from another to a third; no figure for a way shorter than 0.01."""
    return "–" if end - start < 0.01 else f"{100 * (reached - start) / (end - start):.0f} %".replace("-", "−")


def test_the_parts_due_to_images_kept_apart_are_those_of_the_means(published: BenchmarkResult) -> None:
    words = []
    for name in ("composites", "ham10000"):
        blocks = data_set(name)(published)
        percents = [percent_kept_apart([block]) for block in blocks]
        words.append((percent_kept_apart(blocks), min(percents), max(percents)))
    (composites, *of_composites), (ham, *of_ham) = words
    both = "{} % on composites (blocks: {} to {} %) and {} % on HAM10000 ({} to {} %)"
    says(RESULTS, both.format(composites, *of_composites, ham, *of_ham))
    for name in ("nih", "kermany"):
        assert any(not 0 <= percent_kept_apart([block]) <= 100 for block in data_set(name)(published))


def percent_kept_apart(blocks: Sequence[BlockResult]) -> int:
    """How much of what surgical aggregation lacks all images in one place have, with the same labels."""
    surgical, masked, known = (mean_of(label, blocks) for label in ("surgical", MASKED, KNOWN))
    return round(100 * (masked - surgical) / (known - surgical))


def test_composites_carry_the_parts_of_the_way_that_the_page_has(published: BenchmarkResult) -> None:
    def shares(name: str) -> list[str]:
        """The parts of a data set in the ways from surgical aggregation to both ends, over all blocks."""
        way = {end: sum(leads(published.blocks, end, "surgical")) for end in (MASKED, KNOWN)}
        own = {end: sum(leads(data_set(name)(published), end, "surgical")) for end in way}
        return [f"{100 * own[end] / way[end]:.0f} %" for end in way]

    sentence = "carry {} of the way from surgical aggregation to `centralised, masked` and {} of that to all labels**"
    rest = without_composites(published)
    fedseq, polyclinic = (mean(leads(rest, label, "surgical")) for label in ("fedseq", "polyclinic"))
    says(
        RESULTS,
        sentence.format(*shares("composites")),
        "HAM10000 carries {} and {}".format(*shares("ham10000")),
        "NIH {} and {}".format(*(share.removeprefix("-") for share in shares("nih"))),
        f"`fedseq` is ahead of surgical aggregation by {fedseq:.3f}, and `polyclinic` behind by {-polyclinic:.3f}",
    )


def test_what_counting_as_absent_costs_in_one_place_is_on_the_page(published: BenchmarkResult) -> None:
    over_blocks = mean(leads(published.blocks, MASKED, "centralised"))
    ours, theirs = (means_by_data(published, label) for label in (MASKED, "centralised"))
    says(RESULTS, f"costs {over_blocks:.3f} over blocks, {mean(ours) - mean(theirs):.3f} over data sets")


def test_the_learning_rates_at_an_end_of_the_grid_are_counted(published: BenchmarkResult) -> None:
    plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "published")
    lines = read_result_lines(FOLDER / "published.jsonl")
    ranked = [method.label for method in plan.variant_methods if not method.beyond]
    data_sets = plan.list_data_sets()
    three = [run for data in data_sets for run in plan.iterate_tuning_runs(data) if run.method in ranked]
    wider = [run for data in data_sets for run in list_tuning_runs(plan, data, lines) if run.method in ranked]
    rates = {(block.data, label): block.entries[label].lr for block in published.blocks for label in ranked}
    widened = sum(rate not in plan.benchmark.learning_rates for rate in rates.values())
    before, after = find_rows_at_an_end(three, lines), find_rows_at_an_end(wider, lines)
    assert after == {("composites", "fedseq")}
    says(
        RESULTS,
        f"of the {len(rates)} pairs of a ranked method and a data set, {len(before)} had the best of three rates at an "
        f"end; {widened} took a wider rate, and {len(after)} stayed at an end",
    )


def test_rates_that_validation_chose_are_compared_with_others_on_the_test_part(published: BenchmarkResult) -> None:
    """Some methods have test runs at a second rate: the page says how often, and where most, that rate is better."""
    final = [
        line for line in read_result_lines(FOLDER / "published.jsonl").values() if line.rounds == 12 and not line.tuning
    ]
    gains = dict[tuple[str, str], float]()
    for result in (published, published_result(EQUAL_STEPS_FORM)):
        for data in {block.data for block in result.blocks}:
            blocks = data_set(data)(result)
            for label, entry in blocks[0].entries.items():
                runs = [line for line in final if (line.data, line.method) == (data, label)]
                for rate in {line.lr for line in runs} - {entry.lr}:
                    gains[label, data] = mean_test_auroc(runs, blocks, rate) - mean_of(label, blocks)
    ordered = sorted(gains, key=lambda pair: gains[pair], reverse=True)
    better = sum(gain > 0 for gain in gains.values())
    words = [f"`{label}` on {data} {gains[label, data]:.3f}" for label, data in ordered[:3]]
    says(
        RESULTS,
        f"Of {len(gains)} pairs with test runs at a second rate, {better} have a higher mean there: {words[0]}, "
        f"{words[1]}, {words[2]}, all others less",
    )


def mean_test_auroc(runs: Iterable[RunResultLine], blocks: Sequence[BlockResult], rate: float) -> float:
    """Return the mean AUROC over blocks, seeds and scored classes of the runs at one rate."""
    of_blocks = list[float]()
    for block in blocks:
        at_rate = [run for run in runs if (run.pattern, run.lr) == (block.pattern, rate)]
        assert sorted(run.seed for run in at_rate) == [0, 1, 2]
        of_blocks.append(mean(mean(run.classes[name].auroc or 0 for name in block.scored) for run in at_rate))
    return mean(of_blocks)


def test_what_it_says_has_the_blocks_in_which_a_method_is_ahead(published: BenchmarkResult) -> None:
    for other, ahead_equal_behind, words in (
        ("partial_loss", [9, 3, 3], "in 9 of 15 blocks, equal to three digits in three and behind in three, by {:.3f}"),
        ("vanilla", [11, 1, 3], "in 11, equal in one and behind in three, by {:.3f}"),
    ):
        rounded = [
            (round(block.entries["surgical"].auroc, 3), round(block.entries[other].auroc, 3))
            for block in published.blocks
        ]
        signs = [(ours > theirs) - (ours < theirs) for ours, theirs in rounded]
        assert [signs.count(sign) for sign in (1, 0, -1)] == ahead_equal_behind
        says(RESULTS, f"{words.format(mean(leads(published.blocks, 'surgical', other)))} over all")
    nih = sorted(leads(data_set("nih")(published), "surgical", "partial_loss"))
    fedsld = {name: leads(data_set(name)(published), "fedsld", "partial_loss") for name in DATA}
    assert max(*fedsld["composites"], *fedsld["kermany"], *fedsld["nih"]) < 0
    ham = fedsld["ham10000"]
    unifed = {name: leads(data_set(name)(published), "unifed", "server_only") for name in DATA}
    assert all(lead > 0 for of_data in unifed.values() for lead in of_data)
    no_mednist = [lead for name in DATA if name != "mednist" for lead in unifed[name]]
    says(
        RESULTS,
        f"on NIH it is behind by {-nih[0]:.3f} in one pattern and ahead by {nih[1]:.3f} in the other",
        f"({mean(leads(without_composites(published), 'surgical', 'vanilla')):.3f} without composites)",
        f"ahead in each of HAM10000, by {min(ham):.3f} to {max(ham):.3f}; on MedNIST it is behind by at most "
        f"{-min(fedsld['mednist']):.3f}",
        f"by {min(no_mednist):.3f} to {max(no_mednist):.3f} but on MedNIST (below 0.001)",
    )


def test_the_differences_at_equal_sizes_and_in_the_other_blocks_are_those_of_the_page(
    published: BenchmarkResult,
) -> None:
    with_equal_sites = ("composites", "ham10000", "mednist")
    equal = [b for b in published.blocks if b.data in with_equal_sites and b.pattern not in UNEQUAL]
    others = [block for block in published.blocks if block not in equal]
    assert (len(equal), len(others)) == (8, 7)
    reference = mean_of("partial_loss", equal)
    for label in ("fedsld", "rscfed", "fedmlp", "fedfixmatch", "fedirm", "fedlsr", "cbafed", "fednoro"):
        says(RESULTS, f"`{label}` −{reference - mean_of(label, equal):.3f}")
    for label in ("fedprox", "fedavg_scaled"):
        assert abs(mean_of(label, equal) - reference) < 0.0005
        says(RESULTS, f"`{label}` 0.000")
    fedprox, scaled = (mean(leads(others, label, "partial_loss")) for label in ("fedprox", "fedavg_scaled"))
    says(RESULTS, f"of the seven other blocks ({format_signed(fedprox)}, {format_signed(scaled)})")


def test_what_changes_with_more_rounds_has_the_leads(more_rounds: dict[int, BenchmarkResult]) -> None:
    def by_rounds(first: str, second: str, data: str) -> str:
        blocks = (data_set(data)(result) for result in more_rounds.values())
        return "{}, {} and {}".format(*(signed(mean(leads(each, first, second))) for each in blocks))

    (fedseq, of_fedseq), (ours, of_ours), (apart, of_apart), (partial, of_partial), (absent, of_absent) = (
        [by_rounds(*pair, data) for data in ("composites", "ham10000")]
        for pair in (
            ("fedseq", "surgical"),
            ("polyclinic", "surgical"),
            (MASKED, "surgical"),
            ("surgical", "partial_loss"),
            (MASKED, "centralised"),
        )
    )
    says(
        RESULTS,
        f"over surgical aggregation is {fedseq} with 12, 24 and 48 rounds, of `polyclinic` {ours}",
        f"On HAM10000 the lead of `fedseq` is {of_fedseq}, of `polyclinic` {of_ours}.",
        f"by {apart} on composites, and by {of_apart} on HAM10000",
        f"its lead is {partial} on composites, {of_partial} on HAM10000",
        f"by {absent} on composites, by {of_absent} on HAM10000",
    )


def test_the_tables_of_more_rounds_have_the_aurocs_of_each_pattern_and_the_means(
    more_rounds: dict[int, BenchmarkResult],
) -> None:
    assert [result.done for result in more_rounds.values()] == [result.planned for result in more_rounds.values()]
    for label in more_rounds[12].blocks[0].entries:
        methods = [next(each for each in result.methods if each.label == label) for result in more_rounds.values()]
        means = [method.by_data[data] for data in ("composites", "ham10000") for method in methods]
        cells = [f"{block.entries[label].auroc:.3f}" for block in more_rounds[48].blocks]
        rows = (map(format_mean_cell, means), cells)
        says(RESULTS, *(f"| {label} | {' | '.join(row)} |" for row in rows))


def test_the_page_has_the_tables_that_the_benchmark_writes(published: BenchmarkResult) -> None:
    of_published = benchmark_as_markdown(published).splitlines()
    fednoro = benchmark_as_markdown(published_result("fednoro"))
    of_fednoro = fednoro.partition("## Data set by data set")[2].partition("## Block by block")[0].splitlines()
    tables = [[line for line in lines if line.startswith("|")] for lines in (of_published, of_fednoro)]
    assert not published.is_benchmark_incomplete
    assert not published_result("fednoro").is_benchmark_incomplete
    assert len(tables[0]) > 3 * len(published.methods)
    assert len(tables[1]) == 6
    says(RESULTS, *tables[0], *tables[1])


def test_the_chart_of_the_readme_is_drawn_from_the_published_runs(published: BenchmarkResult) -> None:
    chart = runpy.run_path(str(ROOT / "benchmarks" / "benefit_chart.py"))
    assert (ROOT / "docs" / "benefit.svg").read_text(encoding="utf-8") == chart["draw_benefit_chart"](published)
    words = re.search(r"!\[([^\]]*)\]\(docs/benefit\.svg\)", README)
    assert words is not None
    means = [f"{mean_of(label, published.blocks):.3f}" for label in (*chart["BARS"], MASKED)]
    assert re.findall(r"0\.\d{3}", words[1]) == means


def test_the_readme_says_which_bars_differ_on_all_data_sets_and_which_cannot_be_ordered(
    published: BenchmarkResult,
) -> None:
    says(README, "(`vanilla`) is behind leaving it out (`partial_loss`) on all five data sets")
    both = (means_by_data(published, label) for label in ("vanilla", "partial_loss"))
    assert all(vanilla < partial for vanilla, partial in zip(*both, strict=True))
    says(README, "Partial loss, surgical aggregation and ours lie too close together for five data sets to order them")
    assert min(paired_p(*pair) for pair in combinations(("partial_loss", "surgical", "polyclinic"), 2)) > 0.05


def test_what_passing_and_masking_add_alone_and_together_is_on_the_page() -> None:
    result = published_result("passing12")
    assert not result.is_benchmark_incomplete
    absent = "fedseq, missing as absent"
    means = {label: mean(means_by_data(result, label)) for label in ("vanilla", "partial_loss", "fedseq", absent)}
    masking, both = means["partial_loss"] - means["vanilla"], means["fedseq"] - means[absent]
    passing, alone = means["fedseq"] - means["partial_loss"], means[absent] - means["vanilla"]
    assert min(means, key=lambda label: means[label]) == absent
    says(
        RESULTS,
        f"Leaving missing labels out adds {masking:.3f} with averaging and {both:.3f} with passing.",
        f"Passing adds {passing:.3f} where missing labels are left out, and takes {-alone:.3f} where they count as "
        "absent",
    )


def test_sentences_below_single_forms_follow_from_their_runs() -> None:
    def ordered(form: str, runs: str = "published.jsonl") -> list[str]:
        block = read_benchmark_result(FOLDER, form, FOLDER / runs).blocks[0]
        return sorted(block.entries, key=lambda label: -block.entries[label].auroc)

    says(
        RESULTS,
        "`surgical` is first, passing one model on (`polyclinic_passing`) is last, and all are behind all images",
    )
    centres = ordered("centres12")
    assert (centres[0], centres[1], centres[-1]) == ("centralised, masked", "surgical", "polyclinic_passing")
    says(RESULTS, "in twelve rounds both are far behind")
    assert ordered("added12", "added.jsonl")[-2:] == ["scaffold", "fedlsm"]
    says(RESULTS, "are level with all images in one place; counting missing labels as absent is behind")
    frozen = published_result("frozen60").blocks[0].entries
    ceiling = frozen["centralised, masked"].auroc
    assert max(abs(frozen[label].auroc - ceiling) for label in ("surgical", "partial_loss")) < 0.005
    assert ordered("frozen60")[-1] == "vanilla"
