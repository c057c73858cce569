"""What each site gains from the reference: sentences that a board can read, table and figure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from server.analysis.comparison import ENSEMBLE, Comparison
from server.analysis.site_gains import SiteGain
from server.reporting.figures.svg import INK, PAPER, RULE, SeriesStyle, canvas, inline, key, legend_above, looks, theme
from server.reporting.wording import counted, listed, number, signed

NAMED = 24  # more sites than this stand in the figure by rank, not by name
LISTED = 5
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
    return [_sentence(_plain(other, comparison.kinds), gains) for other, gains in by_other.items()]


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


def _sentence(other: str, gains: Sequence[SiteGain]) -> str:
    compared = sorted((g for g in gains if g.gain is not None), key=lambda g: (-(g.gain or 0.0), g.site))
    left_out = _left_out([g for g in gains if g.gain is None])
    if not compared:
        reasons = dict.fromkeys(gain.reason for gain in gains)
        return f"No site can be compared with {other}: {left_out if len(reasons) > 1 else next(iter(reasons))}."
    zero = number(0.0)
    up = [g for g in compared if signed(g.gain) != zero and (g.gain or 0.0) > 0]
    down = [g for g in reversed(compared) if signed(g.gain) != zero and (g.gain or 0.0) < 0]
    parts = [_who_gains(up, len(compared), other)]
    if down:
        parts.append(f"Worse off: {_with_numbers(down)}.")
    if even := len(compared) - len(up) - len(down):
        parts.append(f"{counted(even, 'site')} {'is' if even == 1 else 'are'} as well off with either.")
    if left_out:
        parts.append(f"Not compared: {left_out}.")
    return " ".join(parts)


def _who_gains(up: Sequence[SiteGain], compared: int, other: str) -> str:
    if not up:
        return f"No site gains over {other}."
    who = (
        ("The only site gains" if compared == 1 else f"All {compared} sites gain")
        if len(up) == compared
        else (f"{len(up)} of {compared} sites {'gains' if len(up) == 1 else 'gain'}")
    )
    return f"{who} over {other}: {_with_numbers(up)}."


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
