"""The critical-difference picture: methods on a line by mean rank, bars over those that the test does not part.

After Demsar, JMLR 2006, figure 1.
"""

from markupsafe import Markup
from matplotlib.axes import Axes

from server.analysis.benchmark.ranking import Ranking
from server.reporting.figures.svg import BLUE, INK, VERMILION, canvas, inline, theme

ROW = 0.26
"""Inches of height a line of text."""


def critical_difference_picture(ranking: Ranking, name: str) -> Markup:
    """Best methods at the top left; empty where the ranks have no critical difference."""
    if ranking.critical_difference is None:
        return Markup("")
    with theme():
        figure, (axes,) = canvas(9, 1.2 + ROW * (len(ranking.ranks) + len(ranking.cliques)))
        _methods(axes, ranking)
        _cliques(axes, ranking)
        _scale(axes, ranking)
        return inline(figure, name, "Critical-difference picture: mean rank of every method, best first.")


def _methods(axes: Axes, ranking: Ranking) -> None:
    for row, (method, rank) in enumerate(ranking.ranks.items(), start=1):
        axes.plot([rank], [row], "o", color=BLUE, markersize=6)
        _label(axes, f"{method}  {rank:.2f}", (rank, row))


def _cliques(axes: Axes, ranking: Ranking) -> None:
    """Bars below the methods, each from the first to the last of those that are not distinguished."""
    for row, group in enumerate(ranking.cliques, start=len(ranking.ranks) + 1):
        ends = [ranking.ranks[group[0]], ranking.ranks[group[-1]]]
        axes.plot(ends, [row, row], color=VERMILION, linewidth=4, solid_capstyle="butt")


def _scale(axes: Axes, ranking: Ranking) -> None:
    critical = ranking.critical_difference or 0.0
    axes.plot([1, 1 + critical], [0, 0], color=INK, linewidth=2, marker="|", markersize=8)
    _label(axes, f"critical difference {critical:.2f}", (1 + critical, 0))
    axes.set(xlabel="mean rank, 1 is best", xlim=(0.5, len(ranking.ranks) + 2.5), yticks=[])
    axes.invert_yaxis()
    axes.grid(axis="x")


def _label(axes: Axes, text: str, point: tuple[float, float]) -> None:
    axes.annotate(text, point, (8, 0), textcoords="offset points", va="center", color=INK)
