"""Figures in the sentences of README, results and papers that no command prints are those of the published runs."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from scipy.stats import ttest_rel

from studies.benchmark_results import BenchmarkResult, BlockResult
from tests.studies.published_runs import RESULTS, ROOT, published_result

README, PAPERS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/papers.md"))
FEDNORO = "fednoro as in FedMLP"
MASKED, KNOWN = "centralised, masked", "centralised, all labels known"
AHEAD = [
    ("partial_loss", "vanilla", 5, "0.089"),
    ("surgical", "partial_loss", 4, "0.739"),
    (MASKED, "surgical", 5, "0.185"),
    (KNOWN, MASKED, 5, "0.082"),
    ("partial_loss", "individual", 5, "0.110"),
    ("surgical", "vanilla", 5, "0.110"),
    ("surgical", "centralised", 3, "0.851"),
    ("surgical", "pfl", 4, "0.115"),
    ("surgical", "individual", 5, "0.090"),
    ("fedsld", "fedprox", 1, "0.186"),
    ("fedmlp", "partial_loss", 1, "0.134"),
    ("fedmlp", FEDNORO, 3, "0.392"),
    (FEDNORO, "fednoro", 5, "0.108"),
]
"""Pairs of methods of which the pages say in how many data sets the first is ahead, and p."""
UNEQUAL = ("drawn12", "one3")
"""Patterns with sites of unlike size; with patients of several images (Kermany, NIH) they are so in each pattern."""


@pytest.fixture(scope="module")
def published() -> BenchmarkResult:
    return published_result("published")


def mean_of(label: str, blocks: Iterable[BlockResult]) -> float:
    return float(np.mean([block.entries[label].auroc for block in blocks]))


def without_composites(result: BenchmarkResult) -> list[BlockResult]:
    return [block for block in result.blocks if block.data != "composites"]


@pytest.mark.parametrize(("first", "second", "ahead", "p"), AHEAD)
def test_the_sentences_have_the_paired_t_test_over_the_five_data_sets(
    published: BenchmarkResult, first: str, second: str, ahead: int, p: str
) -> None:
    result = published_result("fednoro") if FEDNORO in (first, second) else published
    by_data = {method.label: method.by_data for method in result.methods}
    ours, theirs = ([mean.auroc for mean in by_data[label].values()] for label in (first, second))
    assert sum(a > b for a, b in zip(ours, theirs, strict=True)) == ahead
    assert f"{ttest_rel(ours, theirs).pvalue:.3f}" == p
    assert f"p = {p}" in README + RESULTS + PAPERS


@pytest.mark.parametrize("label", ["vanilla", "partial_loss", "surgical", "fedseq", MASKED, KNOWN, "individual"])
def test_the_sentences_have_the_mean_and_that_without_composites(published: BenchmarkResult, label: str) -> None:
    both = f"{mean_of(label, published.blocks):.3f} ({mean_of(label, without_composites(published)):.3f})"
    assert both in README
    assert both in RESULTS


def data_set(name: str) -> Callable[[BenchmarkResult], list[BlockResult]]:
    return lambda result: [block for block in result.blocks if block.data == name]


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
    names = ("composites", "nih", "kermany", "ham10000")
    first, *others = (percent_kept_apart(data_set(name)(published)) for name in names)
    total, rest = percent_kept_apart(published.blocks), percent_kept_apart(without_composites(published))
    listed = "{} % on NIH, {} % on Kermany, {} % on HAM10000".format(*others)
    assert f"{first} % of the distance on composites, {listed}; {total} % over all ({rest} %)" in RESULTS
    assert f"missing labels are {100 - total} % ({100 - rest} %)" in README


def percent_kept_apart(blocks: Sequence[BlockResult]) -> int:
    """How much of what surgical aggregation lacks all images in one place have, with the same labels."""
    surgical, masked, known = (mean_of(label, blocks) for label in ("surgical", MASKED, KNOWN))
    return round(100 * (masked - surgical) / (known - surgical))


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


@pytest.mark.parametrize(("rounds", "label"), [(24, "surgical"), (48, "surgical"), (12, "fedseq"), (12, "polyclinic")])
def test_the_table_at_less_time_has_the_aurocs_of_each_pattern(rounds: int, label: str) -> None:
    row = next(line for line in RESULTS.splitlines() if line.startswith(f"| {label}, {rounds} rounds |"))
    blocks = [block for block in published_result(f"rounds{rounds}").blocks if block.data == "composites"]
    assert row.split("|")[3:-1:2] == [f" {block.entries[label].auroc:.3f} " for block in blocks]
