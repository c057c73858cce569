"""What several runs side by side support; a verdict needs at least three seeds and an interval without zero."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from common.metrics.benefit import direction
from common.system.formatting import counted, listed, number
from server.analysis.comparison import Comparison, Contrast, MethodResult, Spread, Subset
from server.analysis.site_gains import SiteGain
from server.analysis.statistics import ALPHA, FEWEST_SEEDS, PairedTest
from server.reporting.wording import interval, probability, signed, spread

Standing = Literal["better", "worse", "not distinguishable", "too few seeds", "not tested"]
STANDINGS: tuple[Standing, ...] = get_args(Standing)
_PHRASES: Mapping[Standing, str] = {
    "better": "is better than",
    "worse": "is worse than",
    "not distinguishable": "is not distinguishable from",
    "too few seeds": f"has fewer than the {FEWEST_SEEDS} seeds that a verdict needs, against",
    "not tested": "could not be tested against",
}
LARGE = 0.05
"""Difference of two means from which a measure beside the deciding one gets a sentence."""
LISTED = 5
"""Sites in one sentence; more are counted."""


def standing(test: PairedTest) -> Standing:
    """Where the reference stands against the other; "better" and "worse" only where seeds and interval carry them."""
    if test.holm_p is None or test.mean_difference is None or test.interval is None:
        return "not tested"
    if test.seeds < FEWEST_SEEDS:
        return "too few seeds"
    if test.holm_p >= ALPHA or direction(test.interval) == "open":
        return "not distinguishable"
    return "better" if test.mean_difference > 0 else "worse"


def headline(comparison: Comparison) -> str:
    """Where the reference stands against all others, over all classes, in one sentence."""
    others = [method.label for method in comparison.methods[1:]]
    standings = {other: standing(comparison.contrast(other).result) for other in others}
    grouped = {phrase: [o for o in others if standings[o] == each] for each, phrase in _PHRASES.items()}
    sized = {
        other: f"{other} ({signed(comparison.contrast(other).result.mean_difference)})"
        if stands in ("better", "worse", "too few seeds")
        else other
        for other, stands in standings.items()
    }
    parts = [f"{phrase} {listed([sized[one] for one in names])}" for phrase, names in grouped.items() if names]
    return (
        f"By mean AUROC on these test images, {comparison.reference} {'; it '.join(parts)}."
        if parts
        else "There is one method, nothing to compare it with."
    )


def verdicts(comparison: Comparison) -> list[str]:
    """One sentence for each other method, over all classes, with the figures that it rests on."""
    others = [method.label for method in comparison.methods[1:]]
    return [_verdict(comparison.reference, comparison.contrast(other)) for other in others]


def _verdict(reference: str, contrast: Contrast) -> str:
    test, other, stands = contrast.result, contrast.other, standing(contrast.result)
    if stands == "not tested":
        seen = "" if test.mean_difference is None else f" The mean difference is {signed(test.mean_difference)}."
        return f"Whether {reference} is better than {other} cannot be tested: {test.reason}.{seen}"
    seeds = counted(test.seeds, "seed")
    figures = f"mean difference in AUROC {signed(test.mean_difference)} over {test.pairs} classes"
    if stands == "too few seeds":
        return f"{reference} beside {other}: {figures} in {seeds}, which does not show that either is better."
    link = "from" if stands == "not distinguishable" else "than"
    return (
        f"{reference} is {stands} {link} {other}: {figures} and {seeds} (95 % interval {interval(test)}; "
        f"{probability(test.holm_p)} after Holm's correction)."
    )


def large_effects(comparison: Comparison) -> list[str]:
    """One sentence for each other method whose means differ by :data:`LARGE` or more, beside the AUROC of all classes.

    It says what the paired test says of each difference, or that there is no test.
    """
    reference, *others = comparison.methods
    sentences = []
    for other in others:
        theirs, tests = _means(other), _subset_tests(comparison, other.label)
        parts = [
            f"{name} ({spread(ours)}) is {_side(ours, theirs[name])} than that of {other.label} "
            f"({spread(theirs[name])}; {tests.get(name, 'not tested')})"
            for name, ours in _means(reference).items()
            if _side(ours, theirs[name])
        ]
        if parts:
            sentences.append(f"On these test images, {reference.label}’s {'; its '.join(parts)}.")
    return sentences


def _side(ours: Spread, theirs: Spread) -> str:
    """``higher`` or ``lower`` by a large difference, else empty."""
    if ours.mean is None or theirs.mean is None or round(abs(ours.mean - theirs.mean), 9) < LARGE:
        return ""
    return "higher" if ours.mean > theirs.mean else "lower"


def _means(method: MethodResult) -> dict[str, Spread]:
    """What a method is compared by beside the AUROC of all classes."""
    return {
        "AUROC on shared classes": method.auroc["shared"],
        "AUROC on unique classes": method.auroc["unique"],
        "average precision": method.average_precision,
        "balanced accuracy": method.balanced_accuracy,
    }


def _subset_tests(comparison: Comparison, other: str) -> dict[str, str]:
    subsets: tuple[Subset, ...] = ("shared", "unique")
    return {f"AUROC on {s} classes": f"paired test: {standing(comparison.contrast(other, s).result)}" for s in subsets}


def site_sentence(other: str, gains: Sequence[SiteGain]) -> str:
    """What the sites gain over one other method, and what could not be compared and why.

    Args:
        other: What the other method is called.
        gains: Of all sites over that method.
    """
    compared = sorted((g for g in gains if g.gain is not None), key=lambda g: (-(g.gain or 0.0), g.site))
    left_out = _left_out([g for g in gains if g.gain is None])
    if not compared:
        reasons = dict.fromkeys(gain.reason for gain in gains)
        return f"No site can be compared with {other}: {left_out if len(reasons) > 1 else next(iter(reasons))}."
    by_verdict = {verdict: [g for g in compared if g.verdict == verdict] for verdict in ("gains", "loses", "open")}
    parts = [_who(by_verdict["gains"], len(compared), "gains", f"over {other}")]
    if by_verdict["loses"]:
        parts.append(_who(by_verdict["loses"], len(compared), "loses", "against it"))
    parts += _open(by_verdict["open"], other)
    if left_out:
        parts.append(f"Not compared: {left_out}.")
    return " ".join(part for part in parts if part)


def _who(gains: Sequence[SiteGain], compared: int, verb: str, against: str) -> str:
    if not gains:
        return ""
    plural = verb.removesuffix("s")
    who = (
        ("The only site " + verb if compared == 1 else f"All {compared} sites {plural}")
        if len(gains) == compared
        else f"{len(gains)} of {compared} sites {verb if len(gains) == 1 else plural}"
    )
    return f"{who} {against}: {_with_numbers(gains)}."


def _open(gains: Sequence[SiteGain], other: str) -> list[str]:
    """Sites whose difference is no more than chance may give, and those with too few seeds to say."""
    few = [gain for gain in gains if len(gain.seeds) < FEWEST_SEEDS]
    rest = [gain for gain in gains if len(gain.seeds) >= FEWEST_SEEDS]
    parts = []
    if rest:
        parts.append(f"Not distinguishable from {other} at {counted(len(rest), 'site')}: {_with_numbers(rest)}.")
    if few:
        parts.append(
            f"Beside {other}, with too few seeds for a verdict, which needs {FEWEST_SEEDS}: {_with_numbers(few)}."
        )
    return parts


def _with_numbers(gains: Sequence[SiteGain]) -> str:
    """The first sites with their figures, the rest counted."""
    shown = [f"{g.site} {signed(g.gain)} ({number(g.other_auroc)} → {number(g.auroc)})" for g in gains[:LISTED]]
    rest = len(gains) - len(shown)
    return listed([*shown, f"{rest:,} more"] if rest else shown)


def _left_out(gains: Sequence[SiteGain]) -> str:
    """Who could not be compared, by reason."""
    by_reason: dict[str, list[str]] = {}
    for gain in gains:
        by_reason.setdefault(gain.reason, []).append(gain.site)
    return "; ".join(
        f"{listed(sites) if len(sites) <= LISTED else counted(len(sites), 'site')}: {reason}"
        for reason, sites in by_reason.items()
    )
