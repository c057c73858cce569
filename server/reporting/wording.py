"""Numbers as people read them, and results as sentences."""

from collections.abc import Mapping

from common.metrics.multi_label import ClassMetrics
from common.metrics.score_histograms import Bounded
from common.system.formatting import NOT_APPLICABLE, count, counted, duration, listed, number, shortened, size, spans
from server.analysis.comparison import Comparison, Contrast, Spread
from server.analysis.statistics import ALPHA, PairedTest
from server.runs.reader import Measure, RunSummary

__all__ = (
    "MEASURE_NAMES",
    "NOT_APPLICABLE",
    "bounded",
    "condemned",
    "count",
    "counted",
    "deciding_test",
    "duration",
    "extremes",
    "headline",
    "interval",
    "listed",
    "number",
    "probability",
    "run_result",
    "shortened",
    "signed",
    "size",
    "span",
    "spans",
    "spread",
    "standing",
    "verdicts",
    "why_undefined",
)
"""What templates and other modules say."""

MEASURE_NAMES: dict[Measure, str] = {
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "f1": "F1",
    "best_mean_client_test_accuracy": "BMCTA",
    "best_test_accuracy": "BTA",
}


def signed(value: float | None) -> str:
    """Write a number as :func:`number` does, with a plus or minus sign unless it prints as zero."""
    if value is None:
        return NOT_APPLICABLE
    text = number(abs(value))
    return text if text == number(0.0) else f"{'−' if value < 0 else '+'}{text}"


def told(value: int | None, smallest: int | None) -> str:
    """A site's count; where it does not tell one, by which threshold: a hidden count is never 0."""
    return f"hidden (<{smallest})" if value is None and smallest else count(value)


def spread(value: Spread) -> str:
    """Mean and SD over seeds, the mean alone with one seed."""
    return number(value.mean) if value.sd is None else f"{number(value.mean)} ± {number(value.sd)}"


def span(ends: tuple[float, float] | None) -> str:
    """Two ends: ``"0.812–0.871"``."""
    return NOT_APPLICABLE if ends is None else "–".join(map(number, ends))


def bounded(value: Bounded | None) -> str:
    """The middle and its bounds: ``"0.812 [0.811–0.813]"``; the bounds are left out where they print alike."""
    if value is None:
        return NOT_APPLICABLE
    ends = number(value.at_least), number(value.at_most)
    return number(value.value) if ends[0] == ends[1] else f"{number(value.value)} [{'–'.join(ends)}]"


def probability(p: float | None) -> str:
    """A p-value: ``"p = 0.012"``, ``"p < 0.001"``."""
    if p is None:
        return NOT_APPLICABLE
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def why_undefined(result: ClassMetrics | None) -> str:
    """The reason why a class has no AUROC, or an empty string if it has one."""
    if result is None:
        return "not among the test set's labels"
    if result.auroc is not None:
        return ""
    if result.positives is None:
        return "no site tells: each has too few patients with it, or without, or its policy keeps such figures"
    if not result.positives and not result.negatives:
        return "no test image has a known label"
    if not result.positives:
        return "no positive test image"
    return "the model has no output for it" if result.negatives else "no negative test image"


def run_result(summary: RunSummary) -> str:
    """What a run came to, in a sentence or two."""
    scored = summary.test.multi_class
    images = f" Accuracy is {number(scored.accuracy)} over {counted(scored.images, 'image')}." if scored else ""
    return f"{_auroc_result(summary)}{images}"


def _auroc_result(summary: RunSummary) -> str:
    test = summary.test
    training = f"After {counted(summary.rounds, 'round')} with {counted(len(summary.sites), 'site')}"
    if test.mean_auroc is None:
        return f"{training}, no class of the test set has an AUROC."
    defined = sum(result.auroc is not None for result in test.per_class.values())
    over = counted(defined, "class", "classes")
    result = f"{training}, the mean AUROC on the test set is {number(test.mean_auroc)} over {over}"
    groups = ((test.shared_classes, "every site annotates"), (test.unique_classes, "only one site annotates"))
    parts = [
        f"{number(group.mean_auroc)} on the {counted(len(group.classes), 'class', 'classes')} that {who}"
        for group, who in groups
        if group.mean_auroc is not None and len(group.classes) < len(test.per_class)
    ]
    return f"{result}: {listed(parts)}." if parts else f"{result}."


def extremes(accuracies: Mapping[str, float]) -> str:
    """The sites at both ends: ``"0.700 (north) to 0.930 (south)"``; of equals the first by name."""
    ends = (min(sorted(accuracies), key=accuracies.__getitem__), max(sorted(accuracies), key=accuracies.__getitem__))
    return " to ".join(f"{number(accuracies[site])} ({site})" for site in ends)


def headline(comparison: Comparison) -> str:
    """Where the reference stands against all others, over all classes, in one sentence."""
    others = [method.label for method in comparison.methods[1:]]
    phrases = {
        "better": "is better than",
        "worse": "is worse than",
        "not distinguishable": "is not distinguishable from",
        "not tested": "could not be tested against",
    }
    standings = {other: standing(comparison.contrast(other).result) for other in others}
    grouped = {phrase: [o for o in others if standings[o] == each] for each, phrase in phrases.items()}
    parts = [f"{phrase} {listed(names)}" for phrase, names in grouped.items() if names]
    return (
        f"{comparison.reference} {'; it '.join(parts)}."
        if parts
        else "There is one method, nothing to compare it with."
    )


def verdicts(comparison: Comparison) -> list[str]:
    """One sentence for each other method: better, worse, or not distinguishable, over all classes."""
    others = [method.label for method in comparison.methods[1:]]
    return [_verdict(comparison.reference, comparison.contrast(other)) for other in others]


def standing(test: PairedTest) -> str:
    """Where the reference stands against the other, in one to three words."""
    if test.holm_p is None or test.mean_difference is None:
        return "not tested"
    if test.holm_p >= ALPHA:
        return "not distinguishable"
    return "better" if test.mean_difference > 0 else "worse"


def deciding_test(test: PairedTest) -> str:
    """Which test decides and what Shapiro-Wilk said of its differences."""
    if test.normality_p is None:
        return test.reason
    if test.wilcoxon_p is None:
        return f"paired t-test; differences look normal (Shapiro-Wilk {probability(test.normality_p)})"
    return (
        f"Wilcoxon signed-rank test; differences are not normal (Shapiro-Wilk {probability(test.normality_p)}, "
        f"t-test {probability(test.t_test_p)})"
    )


def interval(test: PairedTest) -> str:
    """The bootstrap interval: ``"+0.004 to +0.031"``."""
    return NOT_APPLICABLE if test.interval is None else " to ".join(signed(end) for end in test.interval)


def _verdict(reference: str, contrast: Contrast) -> str:
    test, other = contrast.result, contrast.other
    if standing(test) == "not tested":
        seen = "" if test.mean_difference is None else f" The mean difference is {signed(test.mean_difference)}."
        return f"Whether {reference} is better than {other} cannot be tested: {test.reason}.{seen}"
    link = "from" if standing(test) == "not distinguishable" else "than"
    return (
        f"{reference} is {standing(test)} {link} {other}: mean difference in AUROC {signed(test.mean_difference)} "
        f"(95 % interval {interval(test)}; {probability(test.holm_p)} after Holm's correction; {test.pairs} classes)."
    )


def condemned(site: str, reason: str) -> str:
    """A site that the guard left out."""
    return f"{site} harmed the model and was left out for the rest of the run: {reason}."
