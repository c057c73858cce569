"""Write sentences that compare runs. They say "better" or "worse" only with three seeds, a significant test, and an
interval of the difference that excludes zero."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from polyclinic.common.metrics.benefit import compare_interval_with_zero
from polyclinic.common.system.plain_text import (
    NOT_APPLICABLE,
    format_count_with_noun,
    format_number,
    format_signed,
    join_as_english_list,
    list_first_and_count_rest,
)
from polyclinic.server.runs.schema import Measure
from polyclinic.studies.comparison import ENSEMBLE, MeanAndSd, MethodComparison, MethodResult, SiteGain, Subset
from polyclinic.studies.statistics import ALPHA, MIN_SEEDS, PairedTest

Standing = Literal["better", "worse", "not distinguishable", "too few seeds", "not tested"]
STANDINGS: tuple[Standing, ...] = get_args(Standing)
_PHRASES: Mapping[Standing, str] = {
    "better": "is better than",
    "worse": "is worse than",
    "not distinguishable": "is not distinguishable from",
    "too few seeds": f"has fewer than the {MIN_SEEDS} seeds that a verdict needs, against",
    "not tested": "could not be tested against",
}
LARGE_DIFFERENCE = 0.05
"""Minimum difference of two means for a sentence about a metric other than the mean AUROC."""
MAX_SITES_LISTED = 5
"""Maximum number of sites that a sentence lists; further sites are counted."""
MEASURE_NAMES: dict[Measure, str] = {
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "f1": "F1",
    "best_mean_client_test_accuracy": "BMCTA",
    "best_test_accuracy": "BTA",
}
PLAIN_METHOD_NAMES = {
    "individual": "training alone",
    ENSEMBLE: "an ensemble of models trained alone",
    "vanilla": "FedAvg with missing labels taken as absent",
    "fedavg": "FedAvg",
    "partial_loss": "FedAvg with the partial loss",
    "centralised": "all images in one place",
}


def format_mean_and_sd(value: MeanAndSd) -> str:
    """Format mean and SD over seeds, such as ``0.812 ± 0.004``; with one seed, only the mean."""
    return format_number(value.mean) if value.sd is None else f"{format_number(value.mean)} ± {format_number(value.sd)}"


def format_p_value(p: float | None) -> str:
    """Format a p-value, such as ``"p = 0.012"`` or ``"p < 0.001"``."""
    if p is None:
        return NOT_APPLICABLE
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def format_difference_interval(test: PairedTest) -> str:
    """Format the bootstrap interval of a difference, such as ``"+0.004 to +0.031"``."""
    return NOT_APPLICABLE if test.interval is None else " to ".join(format_signed(end) for end in test.interval)


def describe_deciding_test(test: PairedTest) -> str:
    """Return the name of the test with the Shapiro-Wilk p-value of the differences, or the reason why there is none."""
    if test.normality_p is None:
        return test.reason
    looks = "are not normal, so it is approximate" if test.normality_p < ALPHA else "look normal"
    return f"paired t-test; differences {looks} (Shapiro-Wilk {format_p_value(test.normality_p)})"


def format_markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """Format a Markdown table, with ``|`` in cells escaped.

    Args:
        names: Number of columns, from the left, that are left-aligned; the others are right-aligned.
    """
    lines = [headings, ["---" if index < names else "---:" for index in range(len(headings))], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def judge_test_outcome(test: PairedTest) -> Standing:
    """Return the outcome of a comparison of the reference with another method: "better", "worse", or why neither.

    "better" and "worse" need enough seeds, a significant p-value after Holm's correction, and an interval of the
    difference that excludes zero.
    """
    if test.holm_p is None or test.mean_difference is None or test.interval is None:
        return "not tested"
    if test.seeds < MIN_SEEDS:
        return "too few seeds"
    if test.holm_p >= ALPHA or compare_interval_with_zero(test.interval) == "open":
        return "not distinguishable"
    return "better" if test.mean_difference > 0 else "worse"


def get_reported_p(test: PairedTest) -> float | None:
    """Return the p-value after Holm's correction; None without a test, or with too few seeds for a verdict."""
    return test.holm_p if test.seeds >= MIN_SEEDS else None


def explain_missing_p(test: PairedTest) -> str:
    """Return the reason why no p-value is reported; empty if there is one."""
    if test.holm_p is None:
        return test.reason
    if test.seeds >= MIN_SEEDS:
        return ""
    seeds = format_count_with_noun(test.seeds, "seed")
    return f"no p-value with {seeds}: one more training could reverse the difference, so a verdict needs {MIN_SEEDS}"


def describe_what_p_tests(comparison: MethodComparison) -> str:
    """Return a sentence that explains the p-values and their correction, or why there are none."""
    tests = [each.result for each in comparison.contrasts if each.pairing == "classes"]
    if all(get_reported_p(test) is None for test in tests):
        reason = next((reason for test in tests if (reason := explain_missing_p(test))), "")
        return f"{reason[:1].upper()}{reason[1:]}." if reason else ""
    others = format_count_with_noun(len(comparison.methods) - 1, "comparison")
    return (
        "p: two-sided paired t-test over the classes, each averaged over the seeds, after Holm's correction for the "
        f"{others} with {comparison.reference} on the same classes."
    )


def describe_headline_result(comparison: MethodComparison) -> str:
    """Return a sentence that compares the reference with all other methods by the mean AUROC over all classes."""
    by_standing: dict[Standing, list[str]] = {each: [] for each in STANDINGS}
    sentences = list[str]()
    if same := list(comparison.same_models):
        reason = ", because every site annotates every class" if all(comparison.same_models.values()) else ""
        whose = f"{comparison.reference} and {join_as_english_list(same)}"
        sentences.append(f"{whose} end with the same model in each seed{reason}.")
    for method in comparison.methods[1:]:
        if method.label in comparison.same_models:
            continue
        test = comparison.find_method_contrast(method.label).result
        position = judge_test_outcome(test)
        sized = position in ("better", "worse", "too few seeds")
        by_standing[position].append(
            f"{method.label} ({format_signed(test.mean_difference)})" if sized else method.label
        )
    parts = [f"{_PHRASES[each]} {join_as_english_list(others)}" for each, others in by_standing.items() if others]
    if len(comparison.methods) == 1:
        return "There is one method, nothing to compare it with."
    if parts:
        figure = f"mean {comparison.figure} on these test images"
        sentences.append(f"By {figure}, {comparison.reference} {'; it '.join(parts)}.")
    return " ".join(sentences)


def describe_method_verdicts(comparison: MethodComparison) -> list[str]:
    """Return a sentence for each method except the reference that says if the reference is better.

    The sentence is based on one test over all classes and seeds.
    """
    reference, sentences = comparison.reference, []
    for other in (method.label for method in comparison.methods[1:]):
        if other in comparison.same_models:
            sentences.append(describe_same_model(comparison, other))
            continue
        test = comparison.find_method_contrast(other).result
        outcome, seeds, mean = (
            judge_test_outcome(test),
            format_count_with_noun(test.seeds, "seed"),
            format_signed(test.mean_difference),
        )
        figures = f"mean difference in {comparison.figure} {mean} over "
        figures += format_count_with_noun(test.pairs, "class", "classes")
        if outcome == "not tested":
            known = "" if test.mean_difference is None else f" The mean difference is {mean}."
            sentence = f"Whether {reference} is better than {other} cannot be tested: {test.reason}.{known}"
        elif outcome == "too few seeds":
            sentence = f"{reference} beside {other}: {figures} in {seeds}, which does not show that either is better."
        else:
            interval, p = format_difference_interval(test), format_p_value(test.holm_p)
            link = "from" if outcome == "not distinguishable" else "than"
            compared = f"{reference} is {outcome} {link} {other}: {figures} and {seeds}"
            sentence = f"{compared} (95 % interval {interval}; {p} after Holm's correction)."
        sentences.append(sentence)
    return sentences


def describe_same_model(comparison: MethodComparison, other: str) -> str:
    """Return a sentence about a method whose final model is equal to the reference's in each seed (same SHA-256)."""
    sentence = f"{other} is the same model as {comparison.reference} in each seed (model_sha256)"
    if not comparison.same_models[other]:
        return f"{sentence}: there is no difference to test."
    why = "every site annotates every class, so that no label is missing"
    return f"{sentence}: {why}. They differ where a site does not annotate a class."


def describe_large_differences(comparison: MethodComparison) -> list[str]:
    """Return a sentence for each method with a metric :data:`LARGE_DIFFERENCE` or more from the reference's.

    The mean AUROC of all classes is left out. Each difference is given with the outcome of its paired test, or with
    "not tested".
    """
    reference, *others = comparison.methods
    subsets: tuple[Subset, ...] = ("shared", "unique")
    sentences = []
    for other in others:
        of_subset = {subset: comparison.find_method_contrast(other.label, subset).result for subset in subsets}
        tests = {f"AUROC on {name} classes": f"paired test: {judge_test_outcome(t)}" for name, t in of_subset.items()}
        ours, theirs, parts = _list_class_metrics(reference), _list_class_metrics(other), []
        for name, mine in ours.items():
            mean, their_mean = mine.mean, theirs[name].mean
            if mean is None or their_mean is None or round(abs(mean - their_mean), 9) < LARGE_DIFFERENCE:
                continue
            side = "higher" if mean > their_mean else "lower"
            tested = tests.get(name, "not tested")
            ahead = f"{name} ({format_mean_and_sd(mine)}) is {side} than that of {other.label}"
            parts.append(f"{ahead} ({format_mean_and_sd(theirs[name])}; {tested})")
        if parts:
            sentences.append(f"On these test images, {reference.label}’s {'; its '.join(parts)}.")
    return list(map(comparison.name_figure, sentences))


def _list_class_metrics(method: MethodResult) -> dict[str, MeanAndSd]:
    """Return a method's mean metrics by name, except the mean AUROC of all classes."""
    return {
        "AUROC on shared classes": method.auroc["shared"],
        "AUROC on unique classes": method.auroc["unique"],
        "average precision": method.average_precision,
        "balanced accuracy": method.balanced_accuracy,
    }


def describe_site_gains(comparison: MethodComparison) -> list[str]:
    """Return a sentence for each other method with the sites that gain or lose, and the sites that are not compared."""
    sentences = []
    for other in dict.fromkeys(gain.other for gain in comparison.site_gains):
        words = PLAIN_METHOD_NAMES.get(comparison.kinds.get(other, ""), "")
        gains = [gain for gain in comparison.site_gains if gain.other == other]
        sentences.append(
            _describe_method_site_gains(f"{words} ({other})" if words and words != other else other, gains)
        )
    return sentences


def _list_or_count_sites(sites: Sequence[str]) -> str:
    if len(sites) <= MAX_SITES_LISTED:
        return join_as_english_list(sites)
    return format_count_with_noun(len(sites), "site")


def _describe_method_site_gains(other: str, gains: Sequence[SiteGain]) -> str:
    compared = sorted((g for g in gains if g.gain is not None), key=lambda g: (-(g.gain or 0.0), g.site))
    by_reason: dict[str, list[str]] = {}
    for gain in gains:
        if gain.gain is None:
            by_reason.setdefault(gain.reason, []).append(gain.site)
    left_out = "; ".join(f"{_list_or_count_sites(sites)}: {reason}" for reason, sites in by_reason.items())
    if not compared:
        return f"No site can be compared with {other}: {left_out if len(by_reason) > 1 else next(iter(by_reason))}."
    parts = []
    for verb, plural, against in (("gains", "gain", f"over {other}"), ("loses", "lose", "against it")):
        if winners := [gain for gain in compared if gain.verdict == verb]:
            who = f"{len(winners)} of {len(compared)} sites {verb if len(winners) == 1 else plural}"
            if len(winners) == len(compared):
                who = f"The only site {verb}" if len(compared) == 1 else f"All {len(compared)} sites {plural}"
            parts.append(f"{who} {against}: {_format_site_gains(winners)}.")
    undecided = [gain for gain in compared if gain.verdict == "open"]
    if enough := [gain for gain in undecided if len(gain.seeds) >= MIN_SEEDS]:
        parts.append(
            f"Not distinguishable from {other} at {format_count_with_noun(len(enough), 'site')}: "
            f"{_format_site_gains(enough)}."
        )
    if few := [gain for gain in undecided if len(gain.seeds) < MIN_SEEDS]:
        need = f"with too few seeds for a verdict, which needs {MIN_SEEDS}"
        parts.append(f"Beside {other}, {need}: {_format_site_gains(few)}.")
    return " ".join([*parts, f"Not compared: {left_out}."] if left_out else parts)


def _format_site_gains(gains: Sequence[SiteGain]) -> str:
    """Return a text with the first sites and their gains, and the number of further sites."""
    sites = [
        f"{g.site} {format_signed(g.gain)} ({format_number(g.other_auroc)} → {format_number(g.auroc)})" for g in gains
    ]
    return list_first_and_count_rest(sites, MAX_SITES_LISTED)
