"""Convert matplotlib figures to inline SVG that takes its colours from the page (light or dark).

Figures are drawn with placeholder colours, which are replaced by CSS variables. The palette is that of Okabe and Ito
(2008); series also differ by markers, lines and hatches.
"""

import io
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

ROW = 0.27
"""Inches of height for one line of text."""
STRONGEST = 0.6
"""Opacity of the strongest cell of a heat map, so that its number stays readable by day and by night."""
INK, RULE, PAPER = "#010203", "#020304", "#030405"
BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"

_ON_THE_PAGE = {
    INK: "currentColor",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    PURPLE: "var(--purple)",
    VERMILION: "var(--vermilion)",
    SKY: "var(--sky)",
}
_THEME: dict[str, object] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a class may be called "a_b" or "$x$"
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 1.2,
}


@dataclass(frozen=True)
class SeriesStyle:
    """Colour and marker of one series in a plot."""

    color: str
    marker: str


def choose_series_styles(amount: int) -> list[SeriesStyle]:
    """Return a style for each series; markers repeat after 13 series, pairs of colour and marker after 78."""
    colors, markers = itertools.cycle((BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)), itertools.cycle("osD^vPX<>ph*d")
    return [SeriesStyle(next(colors), next(markers)) for _ in range(amount)]


@contextmanager
def use_report_plot_theme() -> Iterator[None]:
    """Within the context, use the report's plot style and ignore the user's matplotlib settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_THEME)  # type: ignore[arg-type]
        yield


def replace_none_by_nan(values: Sequence[float | None]) -> NDArray[np.float64]:
    """Replace None by NaN, so that a line plot has a gap there."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def make_legend_marker(label: str, style: SeriesStyle) -> Line2D:
    """Return a legend entry with this style."""
    return Line2D(
        [], [], linestyle="", marker=style.marker, color=style.color, markeredgecolor=PAPER, markersize=8, label=label
    )


LEGEND_CHARACTERS, MARKER_CHARACTERS = 104, 8
"""Characters that fit into a line of a legend, and those that a marker with its margins takes."""
LEGEND_LINE = 0.22
"""Height in inches of a line of a legend."""


def draw_legend_above(axes: Axes, handles: Sequence[Artist]) -> None:
    """Draw a legend above the axes, with at most four entries per line, fewer where their names are long.

    The figure becomes higher by the lines that long names need.
    """
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    fewest_lines = -(-len(handles) // 4)
    columns = max(1, min(4, len(handles), LEGEND_CHARACTERS // (longest + MARKER_CHARACTERS)))
    more_lines = -(-len(handles) // columns) - fewest_lines
    if more_lines > 0:
        figure = axes.get_figure(root=True)
        assert figure is not None
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + more_lines * LEGEND_LINE)
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.4)


def make_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Create an empty figure of this size in inches; return the figure and its axes from left to right."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False).flat)


def style_round_axis(axes: Axes) -> None:
    """Style axes whose horizontal axis is the round: whole numbers, and a grid for the vertical axis."""
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_heat_map(
    axes: Axes, values: NDArray[np.float64], limits: tuple[float, float], texts: Sequence[Sequence[str]] = ()
) -> None:
    """Draw a heat map, with the first row on top; higher values have a stronger colour.

    Args:
        values: ``(rows, columns)``; a NaN leaves its cell empty.
        limits: Values of the weakest and the strongest colour.
        texts: Text of each cell, ``(rows, columns)``; empty for no texts.
    """
    low, high = limits
    strength = STRONGEST * np.clip((values - low) / (high - low), 0.04, 1)
    rows, columns = values.shape
    mesh = axes.pcolormesh(np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5, values, edgecolors=PAPER)
    opacities = [0.0 if np.isnan(opacity) else opacity for opacity in strength.flat]
    mesh.set(array=None, facecolor=[to_rgba(BLUE if opacity else PAPER, opacity) for opacity in opacities])
    for row, line in enumerate(texts):
        for place, text in enumerate(line):
            axes.annotate(text, (place, row), ha="center", va="center", fontsize=8)
    axes.set(ylim=(rows - 0.5, -0.5), xlim=(-0.5, columns - 0.5))
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def convert_figure_to_svg(figure: Figure, name: str, description: str) -> Markup:
    """Convert a figure to an ``<svg>`` element; equal figures give equal bytes.

    Args:
        figure: A figure drawn within :func:`use_report_plot_theme`.
        name: Prefix of the element ids, unique on the page.
        description: Description for readers who cannot see the figure.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the browser has the letters that our font lacks
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # a very long name
        layout = figure.get_layout_engine()
        assert layout is not None
        layout.execute(figure)
        figure.set_layout_engine(None)  # else savefig draws all of it once more, to lay it out
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style type.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    # Several figures share the page: keep only ids that something points to, under the figure's name.
    used = re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)
    for unused in set(re.findall(r' id="([^"]+)"', text)).difference(used):
        text = text.replace(f' id="{unused}"', "")
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: (\d+(?:\.\d+)?)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font: (\w+) (\d+(?:\.\d+)?)px [^;\"]*", r"font-weight: \1; font-size: \2px", text)
    for stand_in, color in _ON_THE_PAGE.items():
        text = text.replace(stand_in, color)
    label = f'<svg role="img" aria-label="{escape(description)}" class="figure"'
    return Markup(text.replace("<svg", label, 1))
