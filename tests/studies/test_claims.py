"""No verdict on several runs says more than the figures carry: each is read again, number by number, over odd runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import t as scipy_t
from scipy.stats import ttest_rel

from polyclinic.common.metrics.auroc import summarise_test_results
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.server.runs.schema import RoundFileLine
from polyclinic.studies.claims import (
    describe_headline_result,
    describe_large_differences,
    describe_method_verdicts,
    describe_site_gains,
    judge_test_outcome,
)
from polyclinic.studies.comparison import MeanAndSd, MethodComparison, compare_methods
from polyclinic.studies.study_report import describe_study_result
from polyclinic.studies.study_results import OurAndPaperNumber, StudyResult, TableResult
from tests.studies.made_runs import metrics, run_of, summary

CLASSES = ("edema", "hernia", "mass", "nodule", "fibrosis", "effusion")
MANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
Runs = dict[str, list[RunFolderContent]]
Drawn = tuple[MethodComparison, Runs]


def of_seed(method: str, seed: int, values: Mapping[str, float | None], **more: Any) -> RunFolderContent:
    """Make a run of two sites that annotate every class and are both tested like the whole."""
    results = metrics(values, 40, 90)
    site = {"per_class": {name: asdict(result) for name, result in results.items()}}
    test = {
        "test": asdict(summarise_test_results(results, set(values), set())),
        "per_site": {"north": site, "south": site},
    }
    return run_of(summary(method, values, seed=seed, **test, **more), f"{method}-{seed}")


@st.composite
def comparisons(draw: st.DrawFn) -> Drawn:
    """Two to four methods with one to five seeds each, alike, far apart or in between, some classes untested."""
    names = CLASSES[: draw(st.integers(1, 6))]
    methods: Runs = {}
    for method in ("ours", "theirs", "others", "more")[: draw(st.integers(2, 4))]:
        level, noise = draw(st.sampled_from([0.5, 0.6, 0.61, 0.8])), draw(st.sampled_from([0.0, 0.002, 0.15]))
        auroc = st.floats(-1, 1).map(lambda offset, level=level, noise=noise: level + noise * offset)
        value = st.sampled_from(range(10)).flatmap(lambda number, auroc=auroc: auroc if number else st.none())
        methods[method] = [
            of_seed(method, seed, {name: draw(value) for name in names}) for seed in range(draw(st.integers(1, 5)))
        ]
    return compare_methods([run for runs in methods.values() for run in runs]), methods


def class_means(
    ours: Sequence[RunFolderContent], theirs: Sequence[RunFolderContent]
) -> tuple[list[float], list[float], set[int]]:
    """Return the AUROC of each class over the seeds that both have, and these seeds: from the runs themselves."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    seeds = set()
    other_of_seed = {run.summary.seed: run.summary.test.per_class for run in theirs}
    for run in ours:
        for name, result in run.summary.test.per_class.items() if run.summary.seed in other_of_seed else ():
            other = other_of_seed[run.summary.seed][name].auroc
            if result.auroc is not None and other is not None:
                pairs.setdefault(name, []).append((result.auroc, other))
                seeds.add(run.summary.seed)
    first = [mean(a for a, _ in of_class) for of_class in pairs.values()]
    return first, [mean(b for _, b in of_class) for of_class in pairs.values()], seeds


@MANY
@given(comparisons())
def test_no_sentence_on_a_comparison_says_more_than_its_runs(drawn: Drawn) -> None:
    """All in one test: to draw and compare runs takes far longer than to read the sentences."""
    comparison, methods = drawn
    check_better_and_worse_need_three_seeds_a_test_and_an_interval_without_zero(comparison, methods)
    check_the_headline_says_of_each_method_what_its_own_sentence_says(comparison)
    check_every_large_difference_has_its_sentence_and_no_other_has(comparison)
    check_a_site_gains_or_loses_only_where_seeds_show_it(comparison, methods)


def check_better_and_worse_need_three_seeds_a_test_and_an_interval_without_zero(
    comparison: MethodComparison, methods: Runs
) -> None:
    reference, *others = methods
    for other, sentence in zip(others, describe_method_verdicts(comparison), strict=True):
        ours, theirs, seeds = class_means(methods[reference], methods[other])
        verdict = re.search(r" is (better|worse) than ", sentence)
        if not verdict or "Whether" in sentence:
            continue
        assert len(seeds) >= 3
        difference = mean(ours) - mean(theirs)
        assert (difference > 0) == (verdict[1] == "better")
        assert ttest_rel(ours, theirs).pvalue < 0.05
        interval = re.search(r"95 % interval ([+−]?[\d.]+) to ([+−]?[\d.]+)", sentence)
        assert interval is not None
        low, high = (float(end.replace("−", "-").replace("+", "")) for end in interval.groups())
        assert low > 0 if difference > 0 else high < 0
        assert f"{len(ours)} classes and {len(seeds)} seeds" in sentence


def check_the_headline_says_of_each_method_what_its_own_sentence_says(comparison: MethodComparison) -> None:
    line, others = describe_headline_result(comparison), [method.label for method in comparison.methods[1:]]
    for other, sentence in zip(others, describe_method_verdicts(comparison), strict=True):
        parts = [part for part in line.removesuffix(".").split("; it ") if re.search(rf"\b{other}\b", part)]
        assert len(parts) == 1
        stands = judge_test_outcome(comparison.find_method_contrast(other).result)
        if stands in ("better", "worse"):
            assert f"is {stands} than" in parts[0]
            assert f"is {stands} than" in sentence
        else:
            assert "better" not in parts[0]
            assert "worse" not in parts[0]


def check_every_large_difference_has_its_sentence_and_no_other_has(comparison: MethodComparison) -> None:
    reference, *others = comparison.methods
    sentences = "\n".join(describe_large_differences(comparison))
    for other in others:
        for name, ours, theirs, subset in (
            ("AUROC on shared classes", reference.auroc["shared"], other.auroc["shared"], "shared"),
            ("AUROC on unique classes", reference.auroc["unique"], other.auroc["unique"], "unique"),
            ("average precision", reference.average_precision, other.average_precision, None),
            ("balanced accuracy", reference.balanced_accuracy, other.balanced_accuracy, None),
        ):
            pattern = rf"{name} \([^)]*\) is (higher|lower) than that of {re.escape(other.label)} \([^;]*; ([^)]*)\)"
            matches = re.findall(pattern, sentences)
            large = ours.mean is not None and theirs.mean is not None and abs(ours.mean - theirs.mean) >= 0.05 - 1e-12
            assert len(matches) == large
            for side, tested in matches:
                assert (side == "higher") == ((ours.mean or 0) > (theirs.mean or 0))
                of_subset = subset and judge_test_outcome(comparison.find_method_contrast(other.label, subset).result)  # type: ignore[arg-type]
                assert tested == (f"paired test: {of_subset}" if of_subset else "not tested")


def check_a_site_gains_or_loses_only_where_seeds_show_it(comparison: MethodComparison, methods: Runs) -> None:
    reference, *others = methods
    for other, sentence in zip(others, describe_site_gains(comparison), strict=True):
        ours, theirs, seeds = class_means(methods[reference], methods[other])
        if " gain" in sentence or " lose" in sentence:
            assert len(seeds) >= 3
            assert (mean(ours) > mean(theirs)) == (" gain" in sentence)


def test_a_clear_and_constant_lead_is_called_better_and_each_limit_of_that_counts() -> None:
    """The rule can also say yes: else the properties above would hold of silence."""
    high = [of_seed("ours", s, {n: 0.8 + 0.01 * i + 0.001 * s for i, n in enumerate(CLASSES)}) for s in range(3)]
    low = [of_seed("theirs", s, {n: 0.7 + 0.012 * i for i, n in enumerate(CLASSES)}) for s in range(3)]
    assert describe_headline_result(compare_methods([*high, *low])).endswith("ours is better than theirs (+0.096).")
    assert describe_headline_result(compare_methods([*low, *high])).endswith("theirs is worse than ours (−0.096).")
    assert "fewer than the 3 seeds" in describe_headline_result(compare_methods([*high[:2], *low[:2]]))
    assert describe_site_gains(compare_methods([*high, *low]))[0].startswith("All 2 sites gain over theirs")


def test_runs_of_unknown_patients_and_lost_sites_are_cautioned_in_a_comparison() -> None:
    ours = of_seed("ours", 0, {"edema": 0.8})
    theirs = of_seed("theirs", 0, {"edema": 0.8}, patients_known=False)
    line = RoundFileLine(round=1, sites=("north",), absent={"south": "late"})
    cautions = compare_methods([ours, RunFolderContent(theirs.folder, theirs.summary, (line,))]).cautions
    assert any("which images belong to one patient" in caution for caution in cautions)
    assert any("south was absent" in caution and "theirs with seed 0" in caution for caution in cautions)


ENTRIES = st.lists(
    st.tuples(st.floats(0, 1), st.none() | st.just(0.0) | st.floats(1e-6, 0.1), st.none() | st.floats(0, 1)),
    min_size=1,
    max_size=12,
)


@MANY
@given(ENTRIES, st.integers(1, 6))
def test_a_published_number_is_reproduced_where_it_lies_in_the_interval_of_ours(
    drawn: list[tuple[float, float | None, float | None]], seeds: int
) -> None:
    entries = tuple(OurAndPaperNumber(MeanAndSd(mean, sd), paper) for mean, sd, paper in drawn)
    table = TableResult("", (), (), (), (), ((entries,),), "", (), (), (), (), ())
    sentence = describe_study_result(StudyResult("", "", tuple(range(seeds)), (), (table,)))
    published = [(ours, sd, paper) for ours, sd, paper in drawn if paper is not None]
    if not published or seeds < 3:
        assert " lie in " not in sentence
        assert ("gives no numbers" in sentence) == (not published)
        return
    within = above = below = 0
    for ours, sd, paper in published:
        if sd is None:
            continue
        low, high = scipy_t.interval(0.95, seeds - 1, ours, sd / seeds**0.5) if sd else (ours, ours)
        within, above, below = within + (low <= paper <= high), above + (paper > high), below + (paper < low)
    counts = re.search(r"Of (\d+) published numbers?, (\d+) lie in .*; (\d+) lie above it and (\d+) below", sentence)
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [len(published), within, above, below]
