"""Figures: plots side by side and below one another, with margins, a legend on top, and common axis labels."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from polyclinic.common.reporting import svg
from polyclinic.common.reporting.plot import TICK_GAP, Axis, Frame, Plot, Tick, choose_ticks
from polyclinic.common.reporting.svg import SOLID, TEXT_COLOR, SeriesStyle, estimate_text_width, format_length

FIGURE_WIDTH = 648.0
"""Width of each figure in points; the page scales it."""
ROW_HEIGHT = 20.5
"""Height of one row in a plot with a row for each site or class."""
FIGURE_MARGIN = 4.0
"""Space at the edges of a figure."""
PLOT_GAP = 14.0
"""Space between plots side by side."""
ROW_GAP = 10.0
"""Space between two rows of plots."""
MAX_LABEL_WIDTH = 0.4 * FIGURE_WIDTH
"""Maximum width of a row's label; longer labels are shortened, and the tables have the whole name."""
LEGEND_LINE_HEIGHT = 16.0
"""Height of a line of a legend."""
SYMBOL_WIDTH = 24.0
"""Width of a legend symbol with its margins."""
LEGEND_GAP = 18.0
"""Space between two columns of a legend."""


@dataclass(frozen=True)
class LegendEntry:
    """A series in a legend, shown by its line, its marker or both; without either, by a filled box, possibly
    hatched.
    """

    label: str
    color: str
    marker: str = ""
    dash: str | None = None
    hatch: str = ""

    def draw(self, left: float, middle: float, width: float, figure: str) -> str:
        """Draw the symbol, starting at ``left``, and the name beside it, within ``width``."""
        parts = list[str]()
        if self.dash is not None:
            parts.append(svg.draw_path([(left, middle), (left + 19, middle)], self.color, 1.5, self.dash))
        if self.marker:
            parts.append(svg.draw_markers([(left + 9.5, middle)], self.marker, self.color, [7]))
        if self.dash is None and not self.marker:
            place = left, middle - 4, 19.0, 8.0
            parts.append(svg.draw_rectangle(*place, f"fill: {self.color}"))
            if self.hatch:
                parts.append(svg.draw_rectangle(*place, f"fill: url(#{figure}-{self.hatch})"))
        name = svg.shorten_to_width(self.label, width - SYMBOL_WIDTH)
        return "".join([*parts, svg.draw_text(name, (left + SYMBOL_WIDTH, middle))])


def make_marker_entry(label: str, style: SeriesStyle) -> LegendEntry:
    """Return a legend entry with a marker and no line."""
    return LegendEntry(label, style.color, style.marker)


def make_line_entry(label: str, color: str, marker: str = "", dash: str = SOLID) -> LegendEntry:
    """Return a legend entry with a line."""
    return LegendEntry(label, color, marker, dash)


def draw_figure(
    plots: Sequence[Plot],
    name: str,
    description: str,
    *,
    height: float,
    width: float | None = None,
    columns: int | None = None,
    legend: Sequence[LegendEntry] = (),
    common_labels: tuple[str, str] = ("", ""),
) -> Markup:
    """Draw plots as an ``<svg>`` element; equal plots give equal bytes.

    Args:
        plots: Plots of one size, row by row.
        name: Prefix of the element ids, unique on the page.
        description: Description for readers who cannot see the figure.
        height: Height of each plot within its axes; labels and legend come on top of it.
        width: Width of each plot within its axes; None fills the figure.
        columns: Number of plots in a row; None for all of them.
        legend: Entries of the legend above the plots.
        common_labels: Labels of the horizontal and of the vertical axes of all plots.
    """
    plots_per_row = columns or len(plots)
    rows = [plots[start : start + plots_per_row] for start in range(0, len(plots), plots_per_row)]
    y_ticks = {id(plot): _make_ticks(plot.y, plot.y_limits, height / 24) for plot in plots}

    top_of_plots = FIGURE_MARGIN + _measure_legend_height(legend)
    left_of_plots = FIGURE_MARGIN + (15 if common_labels[1] else 0)
    lefts = [
        max(_measure_left(row[place], y_ticks) for row in rows if place < len(row)) for place in range(plots_per_row)
    ]
    rights = [4.0] * plots_per_row
    frames: list[tuple[Plot, Frame]] = []
    # Labels that extend beyond a plot make it narrower, which moves the labels; the second pass has the final sizes.
    for _ in range(2):
        free_width = (
            FIGURE_WIDTH - left_of_plots - FIGURE_MARGIN - sum(lefts) - sum(rights) - PLOT_GAP * (plots_per_row - 1)
        )
        plot_width = min(free_width / plots_per_row, width) if width else free_width / plots_per_row
        frames = []
        top = top_of_plots
        for row in rows:
            left = left_of_plots
            top += max(map(_measure_top, row))
            for place, plot in enumerate(row):
                left += lefts[place]
                frames.append((plot, Frame(left, top, plot_width, height, plot.x_limits, plot.y_limits, name)))
                left += plot_width + rights[place] + PLOT_GAP
            top += height + max(_measure_bottom(plot, plot_width) for plot in row)
            top += ROW_GAP if row is not rows[-1] else 0
        for index, (plot, frame) in enumerate(frames):
            overhang = max([label.reach_beyond(frame) for label in plot.labels], default=0.0)
            overhang = max(overhang, _measure_last_tick(plot, frame))
            rights[index % plots_per_row] = max(rights[index % plots_per_row], overhang + 2)

    body = [_draw_legend(legend, name)] if legend else []
    for plot, frame in frames:
        x_ticks = _make_ticks(plot.x, plot.x_limits, _count_most_x_ticks(plot.x, frame.width))
        body += [plot.draw(frame, x_ticks, y_ticks[id(plot)]), *_draw_axis_labels(plot, frame, y_ticks)]
    body += _draw_common_labels(common_labels, frames, top)
    total = top + FIGURE_MARGIN + (15 if common_labels[0] else 0)
    text = "\n".join(body)
    hatches = [svg.define_hatch(hatch, name) for hatch in svg.HATCHES if f"url(#{name}-{hatch})" in text]
    head = f'<svg role="img" aria-label="{escape(description)}" class="figure" fill="{TEXT_COLOR}"'
    size = f'viewBox="0 0 {format_length(FIGURE_WIDTH)} {format_length(total)}"'
    return Markup("\n".join([f"{head} {size}>", *hatches, text, "</svg>"]))


def _make_ticks(axis: Axis, limits: tuple[float, float], most: float) -> list[Tick]:
    if axis.ticks is None:
        return choose_ticks(limits, max(2.0, min(most, 9.0)), whole_numbers=axis.whole_numbers)
    return [(place, svg.shorten_to_width(text, MAX_LABEL_WIDTH, axis.text_size)) for place, text in axis.ticks]


def _count_most_x_ticks(axis: Axis, width: float) -> float:
    return width / (4.5 * axis.text_size)


# ---------------------------------------------------------------------- margins


def _measure_left(plot: Plot, y_ticks: dict[int, list[Tick]]) -> float:
    """Return the width of the labels of the vertical axis."""
    widest = max((estimate_text_width(text, plot.y.text_size) for _, text in y_ticks[id(plot)]), default=0.0)
    space = widest + plot.y.tick_length + (TICK_GAP if widest else 0)
    return space + (16 if plot.y.label else 0)


def _measure_top(plot: Plot) -> float:
    return (18 if plot.title else 4) + (14 if plot.above else 0)


def _measure_bottom(plot: Plot, width: float) -> float:
    """Return the height of the labels of the horizontal axis."""
    space = plot.x.tick_length + (15 if plot.x.label else 0)
    texts = [text for _, text in _make_ticks(plot.x, plot.x_limits, _count_most_x_ticks(plot.x, width))]
    if plot.x.upright:
        return space + max((estimate_text_width(text, plot.x.text_size) for text in texts), default=0.0) + TICK_GAP
    return space + (plot.x.text_size + TICK_GAP + 2 if any(texts) else 0)


def _measure_last_tick(plot: Plot, frame: Frame) -> float:
    """Return the width by which the label of the last tick extends beyond the right edge of the plot."""
    if plot.x.upright:
        return 0.0
    ticks = _make_ticks(plot.x, plot.x_limits, _count_most_x_ticks(plot.x, frame.width))
    ends = [frame.x(x) + estimate_text_width(text, plot.x.text_size) / 2 for x, text in ticks]
    return max(ends, default=frame.right) - frame.right


# ---------------------------------------------------------------------- labels and legend


def _draw_axis_labels(plot: Plot, frame: Frame, y_ticks: dict[int, list[Tick]]) -> list[str]:
    parts = list[str]()
    if plot.x.label:
        bottom = frame.bottom + _measure_bottom(plot, frame.width) - 8
        parts.append(svg.draw_text(plot.x.label, (frame.left + frame.width / 2, bottom), anchor="middle"))
    if plot.y.label:
        left = frame.left - _measure_left(plot, y_ticks) + 2
        middle = frame.top + frame.height / 2
        parts.append(svg.draw_text(plot.y.label, (left, middle), anchor="middle", upright=True))
    return parts


def _draw_common_labels(labels: tuple[str, str], frames: Sequence[tuple[Plot, Frame]], bottom: float) -> list[str]:
    """Draw the common label below all plots, and the one on their left."""
    below, beside = labels
    left, right = min(frame.left for _, frame in frames), max(frame.right for _, frame in frames)
    top = min(frame.top for _, frame in frames)
    lowest = max(frame.bottom for _, frame in frames)
    parts = list[str]()
    if below:
        parts.append(svg.draw_text(below, ((left + right) / 2, bottom + 9), anchor="middle"))
    if beside:
        parts.append(svg.draw_text(beside, (FIGURE_MARGIN + 3, (top + lowest) / 2), anchor="middle", upright=True))
    return parts


def _choose_legend_columns(legend: Sequence[LegendEntry]) -> tuple[int, float]:
    """Return the number of columns of a legend, and the width of each."""
    room = FIGURE_WIDTH - 2 * FIGURE_MARGIN
    widest = max(SYMBOL_WIDTH + estimate_text_width(entry.label) + LEGEND_GAP for entry in legend)
    columns = max(1, min(len(legend), int(room // widest)))
    return columns, min(widest, room)


def _measure_legend_height(legend: Sequence[LegendEntry]) -> float:
    if not legend:
        return 0.0
    columns, _ = _choose_legend_columns(legend)
    return LEGEND_LINE_HEIGHT * -(-len(legend) // columns) + 4


def _draw_legend(legend: Sequence[LegendEntry], name: str) -> str:
    columns, width = _choose_legend_columns(legend)
    parts = []
    for index, entry in enumerate(legend):
        row, column = divmod(index, columns)
        parts.append(
            entry.draw(
                FIGURE_MARGIN + column * width,
                FIGURE_MARGIN + LEGEND_LINE_HEIGHT * (row + 0.5),
                width - LEGEND_GAP,
                name,
            )
        )
    return "\n".join(parts)
