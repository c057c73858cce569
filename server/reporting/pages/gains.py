"""What each site gains from the reference: sentences that a board can read, table and figure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from server.analysis.comparison import ENSEMBLE, Comparison
from server.analysis.site_gains import SiteGain
from server.reporting.comparison_claims import site_sentence
from server.reporting.figures.svg import INK, PAPER, RULE, SeriesStyle, canvas, inline, key, legend_above, looks, theme

NAMED = 24  # more sites than this stand in the figure by rank, not by name
PLAIN_WORDS = {
    "individual": "training alone",
    ENSEMBLE: "an ensemble of models trained alone",
    "vanilla": "FedAvg with missing labels taken as absent",
    "fedavg": "FedAvg",
    "partial_loss": "FedAvg with the partial loss",
    "centralised": "all images in one place",
}


@dataclass(frozen=True)
class GainRow:
    """One line of the table: a site's AUROC with the reference, and its gain over every other method in turn."""

    site: str
    classes: int
    auroc: float | None
    gains: tuple[SiteGain, ...]


def gain_rows(comparison: Comparison) -> list[GainRow]:
    """A line for every site, the number of classes and the AUROC as in the first comparison that could be made."""
    by_site: dict[str, list[SiteGain]] = {}
    for gain in comparison.site_gains:
        by_site.setdefault(gain.site, []).append(gain)
    made = {site: next((g for g in gains if g.gain is not None), gains[0]) for site, gains in by_site.items()}
    return [GainRow(s, len(made[s].classes), made[s].auroc, tuple(gains)) for s, gains in by_site.items()]


def gain_sentences(comparison: Comparison) -> list[str]:
    """What the sites gain over each other method, and what could not be compared and why."""
    by_other: dict[str, list[SiteGain]] = {}
    for gain in comparison.site_gains:
        by_other.setdefault(gain.other, []).append(gain)
    return [site_sentence(_plain(other, comparison.kinds), gains) for other, gains in by_other.items()]


def gains_figure(comparison: Comparison) -> Markup:
    """Gains by site, a marker for each other method; many sites are ranked instead of named. Empty without any."""
    by_other: dict[str, list[SiteGain]] = {}
    for gain in (gain for gain in comparison.site_gains if gain.gain is not None):
        by_other.setdefault(gain.other, []).append(gain)
    sites = list(dict.fromkeys(gain.site for gain in comparison.site_gains))
    if not by_other:
        return Markup("")
    with theme():
        ranked = len(sites) > NAMED
        figure, (axes,) = canvas(9, 3.2 if ranked else 1.2 + 0.3 * len(sites) + 0.27 * (len(by_other) // 4))
        drawn = list(zip(by_other.items(), _looks(comparison, by_other), strict=True))
        for place, ((_, gains), look) in enumerate(drawn):
            shift = 0.5 * (place - (len(drawn) - 1) / 2) / max(1, len(drawn))
            _ranked(axes, gains, look) if ranked else _named(axes, gains, sites, (look, shift))
        _frame(axes, sites, ranked)
        legend_above(axes, [key(f"over {other}", look) for (other, _), look in drawn])
        return inline(figure, "gains", "Dot chart: what each site gains over each other method.")


def _looks(comparison: Comparison, others: Iterable[str]) -> list[SeriesStyle]:
    """Return each method's style, which is the same in all figures of the report."""
    of_methods = zip(comparison.methods, looks(len(comparison.methods)), strict=True)
    by_label = {method.label: look for method, look in of_methods}
    return [by_label[other] for other in others]


def _frame(axes: Axes, sites: Sequence[str], ranked: bool) -> None:
    if ranked:
        axes.axhline(0, color=INK, linewidth=1)
        axes.set(xlabel="sites, from the largest loss to the largest gain", ylabel="gain in AUROC")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    axes.axvline(0, color=INK, linewidth=1)
    for row in range(len(sites) - 1):
        axes.axhline(row + 0.5, color=RULE, linewidth=0.6)
    axes.set_yticks(range(len(sites)), sites)
    axes.set(xlabel="← the site loses   ·   gain in AUROC   ·   the site gains →", ylim=(len(sites) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)


def _named(axes: Axes, gains: Sequence[SiteGain], sites: Sequence[str], drawn: tuple[SeriesStyle, float]) -> None:
    look, shift = drawn
    for gain in gains:
        assert gain.gain is not None
        row = sites.index(gain.site) + shift
        if gain.sd is not None:
            axes.plot([gain.gain - gain.sd, gain.gain + gain.sd], [row, row], color=look.color, linewidth=2)
        axes.plot([gain.gain], [row], look.marker, color=look.color, markersize=7, markeredgecolor=PAPER)


def _ranked(axes: Axes, gains: Sequence[SiteGain], look: SeriesStyle) -> None:
    values = sorted(gain.gain for gain in gains if gain.gain is not None)
    every = max(1, len(values) // 20)
    places = np.arange(1, len(values) + 1)
    axes.plot(places, values, color=look.color, marker=look.marker, markersize=5, markevery=every)


def _plain(label: str, kinds: Mapping[str, str]) -> str:
    words = PLAIN_WORDS.get(kinds.get(label, ""), "")
    return f"{words} ({label})" if words and words != label else label
