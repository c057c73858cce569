"""Figures in the sentences of README, results and papers that no command prints are those of the published runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from scipy.stats import ttest_rel

from studies.benchmark_file import BenchmarkVariantPlan
from studies.benchmark_results import BenchmarkResult, BlockResult, choose_learning_rates, read_result_lines
from studies.statistics import adjust_by_holm
from tests.studies.published_runs import FOLDER, RESULTS, ROOT, published_result

README, PAPERS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/papers.md"))
FEDNORO = "fednoro as in FedMLP"
MASKED, KNOWN = "centralised, masked", "centralised, all labels known"
UNEQUAL = ("drawn12", "one3")
"""Patterns with sites of unlike size; with patients of several images (Kermany, NIH) they are so in each pattern."""
FIVE = "five of five data sets (p = {p})"
AHEAD = [
    ("partial_loss", "vanilla", 5, "0.089", README, f"(`partial_loss`) 0.874 (0.867): behind on {FIVE}"),
    ("partial_loss", "vanilla", 5, "0.089", RESULTS, f"(`partial_loss`) 0.874 (0.867): behind on {FIVE}"),
    (MASKED, "centralised", 5, "0.031", README, "0.876 (0.859) and 0.894 (0.873), five of five (p = {p})"),
    (MASKED, "centralised", 5, "0.031", RESULTS, "0.876 (0.859) and 0.894 (0.873): behind on five of five (p = {p})"),
    (MASKED, "centralised", 5, "0.031", RESULTS, "0.016 over data sets (5 of 5, p = {p}, uncorrected)"),
    ("surgical", "partial_loss", 4, "0.739", README, "ahead on four of five data sets (p = {p})"),
    ("surgical", "partial_loss", 4, "0.739", RESULTS, "ahead on four of five data sets (p = {p})"),
    (MASKED, "surgical", 5, "0.185", README, f"own labels, ahead of surgical aggregation on {FIVE}"),
    (MASKED, "surgical", 5, "0.185", RESULTS, f"ahead of surgical aggregation (0.876, 0.867) on {FIVE}"),
    (KNOWN, MASKED, 5, "0.082", README, "0.912 (0.883), ahead of that on five of five (p = {p})"),
    (KNOWN, MASKED, 5, "0.082", RESULTS, "0.912 (0.883), ahead of the former on five of five (p = {p})"),
    ("partial_loss", "individual", 5, "0.110", README, f"behind `partial_loss` on {FIVE}"),
    ("partial_loss", "individual", 5, "0.110", RESULTS, f"behind partial loss (0.874, 0.867) on {FIVE}"),
    ("surgical", "vanilla", 5, "0.110", PAPERS, "five data sets: 0.876 and 0.822, 5 of 5, p = {p} |"),
    ("surgical", "partial_loss", 4, "0.739", PAPERS, "five data sets: 0.876 and 0.874, 4 of 5, p = {p} |"),
    ("surgical", "centralised", 3, "0.851", PAPERS, "five data sets: 0.876 and 0.876, 3 of 5, p = {p} |"),
    ("surgical", "pfl", 4, "0.115", PAPERS, "five data sets, FedAvg: 0.876 and 0.871, 4 of 5, p = {p} |"),
    ("surgical", "individual", 5, "0.090", PAPERS, "five data sets, FedAvg: 0.876 and 0.857, 5 of 5, p = {p} |"),
    ("fedsld", "fedprox", 1, "0.186", PAPERS, "five data sets: 0.863 and 0.875, 1 of 5, p = {p};"),
    ("fedmlp", "partial_loss", 1, "0.134", PAPERS, "five data sets: AUROC 0.857 and 0.874, 1 of 5, p = {p};"),
    ("fedmlp", FEDNORO, 3, "0.392", PAPERS, "five data sets: AUROC 0.857 and 0.859, 3 of 5, p = {p} |"),
    ("unifed", "server_only", 5, "0.041", PAPERS, "AUROC 0.889 and 0.862, 5 of 5, p = {p};"),
    ("fedmlp", FEDNORO, 3, "0.392", RESULTS, "ahead on 3 of 5 (p = {p})"),
    (FEDNORO, "fednoro", 5, "0.108", RESULTS, "on 5 of 5 (p = {p})"),
    ("unifed", "server_only", 5, "0.041", RESULTS, "AUROC +0.029, 5 of 5, p = {p};"),
]
"""Pairs of methods, in how many data sets the first is ahead, p, and the page with the words around that p."""


@pytest.fixture(scope="module")
def published() -> BenchmarkResult:
    return published_result("published")


@pytest.fixture(scope="module")
def fednoro() -> BenchmarkResult:
    return published_result("fednoro")


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


def paired_p(result: BenchmarkResult, first: str, second: str, measure: str = "auroc") -> float:
    both = (means_by_data(result, label, measure) for label in (first, second))
    return float(ttest_rel(*both).pvalue)


def leads(blocks: Iterable[BlockResult], first: str, second: str) -> list[float]:
    """By how much the first method is ahead of the second in each block."""
    return [block.entries[first].auroc - block.entries[second].auroc for block in blocks]


def signed(number: float) -> str:
    return f"{number:.3f}".replace("-", "−")


@pytest.mark.parametrize(("first", "second", "ahead", "p", "page", "words"), AHEAD)
def test_the_sentences_have_the_paired_t_test_over_the_five_data_sets(
    published: BenchmarkResult,
    fednoro: BenchmarkResult,
    first: str,
    second: str,
    ahead: int,
    p: str,
    page: str,
    words: str,
) -> None:
    result = fednoro if FEDNORO in (first, second) else published
    ours, theirs = (means_by_data(result, label) for label in (first, second))
    assert sum(a > b for a, b in zip(ours, theirs, strict=True)) == ahead
    assert f"{paired_p(result, first, second):.3f}" == p
    assert words.format(p=p) in page


@pytest.mark.parametrize(
    ("tested_in", "tests", "page", "sentence"),
    [
        (README, 6, RESULTS, "over the six tests makes the smallest {:.3f}"),
        (
            PAPERS,
            9,
            PAPERS,
            "Of the nine such tests in AUROC on this page Holm's correction makes the smallest p {:.3f}",
        ),
    ],
)
def test_the_smallest_p_by_holm_is_on_the_page(
    published: BenchmarkResult, fednoro: BenchmarkResult, tested_in: str, tests: int, page: str, sentence: str
) -> None:
    pairs = [(first, second) for first, second, *_, where, _ in AHEAD if where is tested_in]
    assert len(pairs) == tests
    p = [paired_p(fednoro if FEDNORO in pair else published, *pair) for pair in pairs]
    assert sentence.format(min(adjust_by_holm(p))) in page


def test_other_measures_have_their_p(published: BenchmarkResult, fednoro: BenchmarkResult) -> None:
    precision, balanced = "average_precision", "balanced_accuracy"
    p = [paired_p(published, "unifed", "server_only", measure) for measure in (precision, balanced)]
    assert "mAP +0.041, p = {:.3f}; balanced accuracy +0.043, p = {:.3f}".format(*p) in RESULTS
    assert "mAP 0.693 and 0.650, p = {:.3f}; balanced accuracy 0.821 and 0.775, p = {:.3f}".format(*p) in PAPERS
    assert f"balanced accuracy (p = {paired_p(fednoro, FEDNORO, 'fednoro', balanced):.3f})" in RESULTS
    rows = combinations([method.label for method in published.methods], 2)
    small = [paired_p(published, *pair) < 0.05 for pair in rows]
    assert f"of the {len(small)} pairs of rows nine have p below 0.05 in AUROC" in RESULTS
    assert sum(small) == 9


@pytest.mark.parametrize(
    "label", ["vanilla", "partial_loss", "surgical", "fedseq", "centralised", MASKED, KNOWN, "individual"]
)
def test_the_sentences_have_the_mean_and_that_without_composites(published: BenchmarkResult, label: str) -> None:
    both = f"{mean_of(label, published.blocks):.3f} ({mean_of(label, without_composites(published)):.3f})"
    assert both in README
    assert both in RESULTS


def test_the_ranks_and_what_nemenyis_test_decides_are_on_the_pages(published: BenchmarkResult) -> None:
    data = published.ranking_of_data
    first, last = data.ranks["fedseq"], data.ranks["vanilla"]
    assert min(data.ranks.values()) == first
    assert f"{first:.2f} of {len(data.ranks)}" in README
    assert f"{first:.2f} among {len(data.ranks)} methods" in RESULTS
    assert f"it is ahead of `vanilla` ({last:.2f}) alone" in RESULTS
    assert f"`fedseq` ({first:.2f}) against `vanilla` ({last:.2f}) is decided" in RESULTS
    assert decided(data.ranks, data.critical_difference) == {"fedseq": ["vanilla"]}
    assert f"(Friedman: p = {data.p:.3f})" in RESULTS
    assert f"Nemenyi's test is {data.critical_difference:.2f} ranks" in RESULTS


def decided(ranks: Mapping[str, float], critical: float | None) -> dict[str, list[str]]:
    """Each method with those behind it by the critical difference or more."""
    assert critical is not None
    behind = {first: [last for last in ranks if ranks[last] - ranks[first] >= critical] for first in ranks}
    return {first: methods for first, methods in behind.items() if methods}


def test_the_gap_of_vanilla_by_pattern_and_a_hospitals_own_model_are_those_of_the_blocks(
    published: BenchmarkResult,
) -> None:
    gap = {
        (block.data, block.pattern): lead
        for block in published.blocks
        for lead in leads([block], "partial_loss", "vanilla")
    }
    alone = [gap.pop((data, pattern)) for data in ("composites", "ham10000") for pattern in ("one7", "shared5")]
    kermany = gap.pop(("kermany", "one3"))
    words = f"by {min(alone):.3f} to {max(alone):.3f} on composites and HAM10000 in `one7` and `shared5`, "
    words += (
        f"by {kermany:.3f} on Kermany in `one3`, and by at most {max(gap.values()):.3f} elsewhere; on NIH by less in "
    )
    words += f"`shared5` ({gap['nih', 'shared5']:.3f}) than in `drawn7` ({gap['nih', 'drawn7']:.3f})"
    assert words in RESULTS
    furthest = sorted(
        means_by_data(published, "vanilla")[i] - own for i, own in enumerate(means_by_data(published, "partial_loss"))
    )
    assert furthest[:2] == [
        mean_of("vanilla", blocks) - mean_of("partial_loss", blocks)
        for blocks in (data_set("composites")(published), data_set("ham10000")(published))
    ]
    assert sum(lead > 0 for lead in leads(published.blocks, "individual", "partial_loss")) == 5
    assert "ahead in five of the fifteen pairs" in README
    assert "ahead in five of the fifteen pairs" in RESULTS


README_ROWS = [
    ("HAM10000, 7 sites, one owner a class", "ham10000", "one7"),
    ("HAM10000, 7 sites, owners drawn", "ham10000", "drawn7"),
    ("MNIST composites, 7 sites, one owner a class", "composites", "one7"),
    ("MNIST composites, 7 sites, owners drawn", "composites", "drawn7"),
]


@pytest.mark.parametrize(("title", "data", "pattern"), README_ROWS)
def test_the_table_of_the_readme_has_four_pairs(
    published: BenchmarkResult, title: str, data: str, pattern: str
) -> None:
    (block,) = [block for block in published.blocks if (block.data, block.pattern) == (data, pattern)]
    entries = [block.entries[label] for label in ("surgical", "partial_loss", "vanilla", "individual", MASKED)]
    cells = [f"{entry.auroc:.3f} ± {entry.seed_sd:.3f}" for entry in entries]
    assert f"| {' | '.join([title, *cells])} |" in README


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
    assert f"| {' | '.join([row, *figures, *parts])} |" in RESULTS


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
    assert both.format(composites, *of_composites, ham, *of_ham) in RESULTS
    for name in ("nih", "kermany"):
        assert any(not 0 <= percent_kept_apart([block]) <= 100 for block in data_set(name)(published))


def percent_kept_apart(blocks: Sequence[BlockResult]) -> int:
    """How much of what surgical aggregation lacks all images in one place have, with the same labels."""
    surgical, masked, known = (mean_of(label, blocks) for label in ("surgical", MASKED, KNOWN))
    return round(100 * (masked - surgical) / (known - surgical))


def test_composites_carry_the_parts_of_the_way_that_the_page_has(published: BenchmarkResult) -> None:
    shares = {
        (name, end): 100
        * sum(leads(data_set(name)(published), end, "surgical"))
        / sum(leads(published.blocks, end, "surgical"))
        for name in ("composites", "ham10000", "nih")
        for end in (MASKED, KNOWN)
    }
    rounded = [f"{share:.0f} %" for share in shares.values()]
    sentence = "carry {} of the way from surgical aggregation to `centralised, masked` and {} of that to all labels**"
    assert sentence.format(*rounded[:2]) in RESULTS
    assert "HAM10000 carries {} and {}".format(*rounded[2:4]) in RESULTS
    assert "NIH {} and {}".format(*rounded[4:]) in RESULTS
    rest = without_composites(published)
    fedseq, polyclinic = (mean(leads(rest, label, "surgical")) for label in ("fedseq", "polyclinic"))
    assert (
        f"`fedseq` is ahead of surgical aggregation by {fedseq:.3f}, and `polyclinic` behind by {-polyclinic:.3f}"
        in RESULTS
    )


def test_what_counting_as_absent_costs_in_one_place_is_on_the_page(published: BenchmarkResult) -> None:
    over_blocks = mean(leads(published.blocks, MASKED, "centralised"))
    ours, theirs = (means_by_data(published, label) for label in (MASKED, "centralised"))
    assert f"costs {over_blocks:.3f} over blocks, {mean(ours) - mean(theirs):.3f} over data sets" in RESULTS


def test_the_learning_rates_at_an_end_of_the_grid_are_counted() -> None:
    plan = BenchmarkVariantPlan.read_variant(FOLDER, "published")
    lines = read_result_lines(FOLDER / "published.jsonl").values()
    ranked = [method.label for method in plan.variant_methods if not method.beyond]
    rates = [choose_learning_rates(lines, data)[label] for data in plan.list_data_sets() for label in ranked]
    assert f"For {sum(rate in (1e-3, 1e-2) for rate in rates)} of the {len(rates)} pairs" in RESULTS


def test_what_it_says_has_the_blocks_in_which_a_method_is_ahead(published: BenchmarkResult) -> None:
    for other, words in (
        ("partial_loss", "in {} of 15 blocks, equal to three digits in three and behind in four, by {:.3f} over all"),
        ("vanilla", "in {}, equal in two and behind in one, by {:.3f} over all"),
    ):
        rounded = [
            round(block.entries["surgical"].auroc, 3) - round(block.entries[other].auroc, 3)
            for block in published.blocks
        ]
        ahead = sum(lead > 1e-9 for lead in rounded)
        assert (sum(abs(lead) < 1e-9 for lead in rounded), sum(lead < -1e-9 for lead in rounded)) == {
            8: (3, 4),
            12: (2, 1),
        }[ahead]
        assert words.format(ahead, mean(leads(published.blocks, "surgical", other))) in RESULTS
    nih = sorted(leads(data_set("nih")(published), "surgical", "partial_loss"))
    assert f"on NIH it is behind, by {-nih[0]:.3f} and {-nih[1]:.3f}" in RESULTS
    assert f"({mean(leads(without_composites(published), 'surgical', 'vanilla')):.3f} without composites)" in RESULTS
    fedsld = leads(data_set("ham10000")(published), "fedsld", "partial_loss")
    mednist = min(leads(data_set("mednist")(published), "fedsld", "partial_loss"))
    by = f"by {min(fedsld):.3f} to {max(fedsld):.3f}; on MedNIST it is behind by at most {-mednist:.3f}"
    assert f"ahead in each of HAM10000, {by}" in RESULTS
    behind = [
        lead
        for name in ("composites", "kermany", "nih")
        for lead in leads(data_set(name)(published), "fedsld", "partial_loss")
    ]
    assert max(behind) < 0
    unifed = leads(published.blocks, "unifed", "server_only")
    assert all(lead > 0 for lead in unifed)
    no_mednist = [lead for lead, block in zip(unifed, published.blocks, strict=True) if block.data != "mednist"]
    assert f"by {min(no_mednist):.3f} to {max(no_mednist):.3f} but on MedNIST (below 0.001)" in RESULTS


def test_the_differences_at_equal_sizes_are_those_of_the_eight_blocks(published: BenchmarkResult) -> None:
    blocks = [
        block
        for block in published.blocks
        if block.data in ("composites", "ham10000", "mednist") and block.pattern not in UNEQUAL
    ]
    assert len(blocks) == 8
    reference = mean_of("partial_loss", blocks)
    for label in ("fedsld", "rscfed", "fedmlp", "fedfixmatch", "fedirm", "fedlsr", "cbafed", "fednoro"):
        assert f"`{label}` −{reference - mean_of(label, blocks):.3f}" in RESULTS
    for label in ("fedprox", "fedavg_scaled"):
        assert abs(mean_of(label, blocks) - reference) < 0.0005
        assert f"`{label}` 0.000" in RESULTS


def test_the_leads_in_the_other_blocks_are_those_of_the_seven(published: BenchmarkResult) -> None:
    equal = [
        b for b in published.blocks if b.data in ("composites", "ham10000", "mednist") and b.pattern not in UNEQUAL
    ]
    others = [block for block in published.blocks if block not in equal]
    fedprox, scaled = (mean(leads(others, label, "partial_loss")) for label in ("fedprox", "fedavg_scaled"))
    assert f"of the seven other blocks (+{fedprox:.3f}, +{scaled:.3f})" in RESULTS


ROUNDS = (12, 24, 48)


def test_what_changes_with_more_rounds_has_the_leads(more_rounds: dict[int, BenchmarkResult]) -> None:
    def by_rounds(first: str, second: str, data: str) -> list[str]:
        blocks = (data_set(data)(more_rounds[rounds]) for rounds in ROUNDS)
        return [signed(mean(leads(each, first, second))) for each in blocks]

    three = "{}, {} and {}"
    composites, ham = "composites", "ham10000"
    fedseq, ours = (three.format(*by_rounds(name, "surgical", composites)) for name in ("fedseq", "polyclinic"))
    assert f"over surgical aggregation is {fedseq} with 12, 24 and 48 rounds, of `polyclinic` {ours}" in RESULTS
    fedseq, ours = (three.format(*by_rounds(name, "surgical", ham)) for name in ("fedseq", "polyclinic"))
    assert f"On HAM10000 the lead of `fedseq` is {fedseq}, of `polyclinic` {ours}." in RESULTS
    apart = [by_rounds(MASKED, "surgical", data) for data in (composites, ham)]
    assert f"by {three.format(*apart[0])} on composites, and by {three.format(*apart[1])} on HAM10000" in RESULTS
    partial = [by_rounds("surgical", "partial_loss", data) for data in (composites, ham)]
    assert f"its lead is {three.format(*partial[0])} on composites, {three.format(*partial[1])} on HAM10000" in RESULTS
    absent = [by_rounds(MASKED, "centralised", data) for data in (composites, ham)]
    assert f"by {three.format(*absent[0])} on composites, by {three.format(*absent[1])} on HAM10000" in RESULTS


def test_averaging_with_more_rounds_beside_twelve_of_passing_has_the_leads(
    more_rounds: dict[int, BenchmarkResult],
) -> None:
    def over(rounds: int, passing: str, data: str) -> list[float]:
        surgical, others = (data_set(data)(more_rounds[number]) for number in (rounds, 12))
        pairs = zip(surgical, others, strict=True)
        return sorted(block.entries["surgical"].auroc - other.entries[passing].auroc for block, other in pairs)

    behind, *ahead = over(48, "fedseq", "composites")
    three = f"in three patterns of composites, by {ahead[0]:.3f} to {ahead[-1]:.3f}"
    assert f"{three}, and behind by {-behind:.3f} in the fourth" in RESULTS
    assert min(over(48, "polyclinic", "composites")) > 0
    of_24 = [(name, data) for data in ("composites", "ham10000") for name in ("fedseq", "polyclinic")]
    assert [sum(lead > 0 for lead in over(24, name, data)) for name, data in of_24] == [3, 2, 2, 4]
    assert [sum(lead > 0 for lead in over(48, name, "ham10000")) for name in ("fedseq", "polyclinic")] == [2, 4]


@pytest.mark.parametrize(("rounds", "label"), [(24, "surgical"), (48, "surgical"), (12, "fedseq"), (12, "polyclinic")])
def test_the_table_of_steps_has_the_aurocs_of_each_pattern(rounds: int, label: str) -> None:
    row = next(line for line in RESULTS.splitlines() if line.startswith(f"| {label}, {rounds} rounds |"))
    blocks = [block for block in published_result(f"rounds{rounds}").blocks if block.data == "composites"]
    assert row.split("|")[3:-1:2] == [f" {block.entries[label].auroc:.3f} " for block in blocks]
