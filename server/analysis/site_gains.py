"""What each site gains: the reference against another method, at that site, on the classes that the site annotates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.metrics.auroc import mean_and_sd
from server.analysis.statistics import ALPHA, FEWEST_SEEDS, holm, without_spread
from server.runs.reader import Run

Verdict = Literal["gains", "loses", "open"]
OfSeeds = Mapping[int, Run]  # seed -> run of one method


@dataclass(frozen=True)
class SiteGain:
    """The reference minus another method at one site, on the same test images.

    Attributes:
        gain: Mean over seeds of the mean difference in AUROC over the site's classes; None where nothing compares.
        sd: Sample SD over seeds; None with one.
        auroc, other_auroc: What the gain is the difference of.
        classes: Those compared in at least one seed.
        losses: Of these, how many have a lower AUROC with the reference, averaged over seeds.
        seeds: Those compared.
        reason: Why nothing compares, or why a seed was left out; empty where all was compared.
        p: Of a two-sided t-test that the gain is zero, over seeds, after Holm's correction over the sites that are
            compared with the other method; None with fewer than three seeds, or where all seeds have the same gain.
    """

    site: str
    other: str
    gain: float | None = None
    sd: float | None = None
    auroc: float | None = None
    other_auroc: float | None = None
    classes: tuple[str, ...] = ()
    losses: int = 0
    seeds: tuple[int, ...] = ()
    reason: str = ""
    p: float | None = None

    @property
    def verdict(self) -> Verdict:
        """``gains`` or ``loses`` only where that is more than the seeds' spread explains."""
        if self.gain is None or self.p is None or self.p >= ALPHA:
            return "open"
        return "gains" if self.gain > 0 else "loses"


def site_gains(by_method: Mapping[str, OfSeeds]) -> tuple[SiteGain, ...]:
    """Every site of the reference, the first method, against every other method."""
    reference, *others = by_method
    runs = by_method[reference].values()
    sites = sorted({site for run in runs for site in run.summary.sites})
    found = [[_gain(site, other, by_method[reference], by_method[other]) for site in sites] for other in others]
    return tuple(gain for of_other in found for gain in _corrected(of_other))


def _corrected(gains: Sequence[SiteGain]) -> list[SiteGain]:
    return [replace(gain, p=p) for gain, p in zip(gains, holm([gain.p for gain in gains]), strict=True)]


def _gain(site: str, other: str, of_reference: OfSeeds, of_other: OfSeeds) -> SiteGain:
    pairs, reasons = dict[int, dict[str, tuple[float, float]]](), list[str]()
    for seed in sorted(of_reference.keys() & of_other.keys()):
        reason = _why_not(site, of_reference[seed], of_other[seed])
        if found := {} if reason else _pairs(site, of_reference[seed], of_other[seed]):
            pairs[seed] = found
        else:
            reasons.append(reason or "no class of the site has an AUROC with both")
    if not pairs:
        return SiteGain(site, other, reason=reasons[0] if reasons else "no seed in common")
    means = np.array([np.mean(list(of_seed.values()), axis=0) for of_seed in pairs.values()])  # (seeds, 2)
    gains = means[:, 0] - means[:, 1]
    return SiteGain(
        site=site,
        other=other,
        gain=float(gains.mean()),
        sd=float(gains.std(ddof=1)) if len(gains) > 1 else None,
        auroc=float(means[:, 0].mean()),
        other_auroc=float(means[:, 1].mean()),
        classes=tuple(dict.fromkeys(name for of_seed in pairs.values() for name in of_seed)),
        losses=_losses(list(pairs.values())),
        seeds=tuple(pairs),
        reason=reasons[0] if reasons else "",
        p=_p(gains),
    )


def _p(gains: NDArray[np.float64]) -> float | None:
    if len(gains) < FEWEST_SEEDS or without_spread(gains):
        return None
    from scipy.stats import ttest_1samp  # here: a program that only trains does not pay for its import

    return float(ttest_1samp(gains, 0.0).pvalue)


def _why_not(site: str, reference: Run, other: Run) -> str:
    """Why the two cannot be compared at this site, or an empty string."""
    mine, theirs = reference.summary, other.summary
    if site not in theirs.sites:
        return "it has no such site"
    if site not in mine.per_site or site not in theirs.per_site:
        return "the site was not tested with both"
    if set(mine.sites[site].classes) != set(theirs.sites[site].classes):
        return "the site annotates other classes there"
    tested = [
        {name: (one.positives, one.negatives) for name, one in run.per_site[site].per_class.items()}
        for run in (mine, theirs)
    ]
    same = all(tested[0][name] == tested[1][name] for name in tested[0].keys() & tested[1].keys())
    return "" if same else "it was tested on other images there"


def _pairs(site: str, reference: Run, other: Run) -> dict[str, tuple[float, float]]:
    """Class -> AUROC with the reference and with the other, where both have one."""
    mine, theirs = (run.summary.per_site[site].per_class for run in (reference, other))
    both = {name: (mine[name].auroc, theirs[name].auroc) for name in mine if name in theirs}
    return {name: (a, b) for name, (a, b) in both.items() if a is not None and b is not None}


def _losses(of_seeds: Sequence[Mapping[str, tuple[float, float]]]) -> int:
    names = {name for of_seed in of_seeds for name in of_seed}
    mean = {name: mean_and_sd(s[name][0] - s[name][1] for s in of_seeds if name in s)[0] for name in names}
    return sum(value is not None and value < 0 for value in mean.values())
