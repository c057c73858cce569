"""A plot with two linear axes; marks have the coordinates of the data, and are drawn once the plot's position
is known.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyclinic.common.reporting import svg
from polyclinic.common.reporting.svg import (
    BACKGROUND_COLOR,
    BLUE,
    LINE_COLOR,
    SOLID,
    TEXT_COLOR,
    Anchor,
    Point,
    format_length,
)

AXIS_MARGIN_SHARE = 0.05
"""Free space at both ends of an axis, as a share of the range of the data."""
MAX_PLOTTED_VALUE = 1e100
"""Absolute value from which a number is treated as missing."""
MAX_CELL_OPACITY = 0.6
"""Maximum opacity of a cell of a heat map, so that its number stays readable on light and dark pages."""

Tick = tuple[float, str]
Values = Iterable[float] | NDArray[np.float64]


@dataclass
class Axis:
    """One axis of a plot.

    Attributes:
        label: Name of the axis; empty for none.
        limits: Values at the start and at the end; None shows all data. The start may be the larger value.
        ticks: Values with their labels; None chooses round numbers.
        whole_numbers: True if there are ticks at whole numbers only, as for rounds.
        grid: True if there are lines across the plot at the ticks.
        line: False if the axis itself is not drawn.
        tick_length: Length of the small lines at the ticks.
        upright: True if labels of the horizontal axis are turned by 90 degrees and read from below.
        text_size: Size of the labels of the ticks.
    """

    label: str = ""
    limits: tuple[float, float] | None = None
    ticks: Sequence[Tick] | None = None
    whole_numbers: bool = False
    grid: bool = False
    line: bool = True
    tick_length: float = 3.5
    upright: bool = False
    text_size: float = svg.FONT_SIZE

    def label_rows(self, names: Sequence[str], positions: Sequence[float] | None = None) -> None:
        """Label the rows of a plot from the top; a row is one unit high, and there is no axis line.

        Args:
            names: Label of each row.
            positions: Value of each row on the axis; None counts rows from 0.
        """
        values = range(len(names)) if positions is None else positions
        self.ticks = list(zip(map(float, values), names, strict=True))
        self.limits = (max(values, default=0) + 0.5, -0.5)
        self.line = False
        self.tick_length = 0.0

    def label_columns(self, names: Sequence[str]) -> None:
        """Label the values 0, 1, 2, ... on the horizontal axis; labels of more than three letters are turned
        upright.
        """
        self.ticks = list(zip(map(float, range(len(names))), names, strict=True))
        self.upright = max(map(len, names), default=0) > 3


@dataclass(frozen=True)
class Frame:
    """Position of a plot in its figure, in points, and the values at its edges.

    Attributes:
        x_limits: Values at the left and at the right edge.
        y_limits: Values at the lower and at the upper edge.
        figure: Name of the figure, which is the prefix of element ids.
    """

    left: float
    top: float
    width: float
    height: float
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    figure: str

    @property
    def right(self) -> float:
        """Horizontal position of the right edge, in points."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Vertical position of the lower edge, in points."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Return the horizontal position of a value, in points."""
        first, last = self.x_limits
        return self.left + (value - first) / (last - first) * self.width

    def y(self, value: float) -> float:
        """Return the vertical position of a value, in points."""
        first, last = self.y_limits
        return self.bottom - (value - first) / (last - first) * self.height

    def points(self, xs: Values, ys: Values) -> list[Point]:
        """Convert values of both axes to positions in the figure, in points."""
        return [(self.x(x), self.y(y)) for x, y in zip(xs, ys, strict=True)]


@dataclass(frozen=True)
class Label:
    """A text beside a point of the data; ``x`` is a value, or None for the left edge of the plot."""

    text: str
    x: float | None
    y: float
    shift: Point
    anchor: Anchor
    size: float
    italic: bool

    def draw(self, frame: Frame) -> str:
        """Return the text as SVG at its position."""
        left = frame.left if self.x is None else frame.x(self.x)
        place = left + self.shift[0], frame.y(self.y) + self.shift[1]
        return svg.draw_text(self.text, place, anchor=self.anchor, size=self.size, italic=self.italic)

    def reach_beyond(self, frame: Frame) -> float:
        """Return the width by which the text extends beyond the right edge of the plot; negative if it does not."""
        left = frame.left if self.x is None else frame.x(self.x)
        width = svg.estimate_text_width(self.text, self.size)
        after = {"start": width, "middle": width / 2, "end": 0.0}[self.anchor]
        return left + self.shift[0] + after - frame.right


Mark = Callable[[Frame], str]
"""A function that draws a mark as SVG, given the position of the plot."""


@dataclass
class Plot:
    """A plot; marks are drawn in the order in which they are added.

    Attributes:
        title: Text above the plot; empty for none.
        title_size: Size of the title.
        above: Texts above the upper edge at values of ``x``.
    """

    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    title: str = ""
    title_size: float = svg.FONT_SIZE
    above: list[Tick] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    _x_range: list[float] = field(default_factory=list)
    _y_range: list[float] = field(default_factory=list)

    # ------------------------------------------------------------------ marks

    def add_line(
        self, xs: Values, ys: Values, color: str, *, width: float = 1.5, dash: str = SOLID, opacity: float = 1.0
    ) -> None:
        """Add a line through points; it has a gap where a value is NaN."""
        x_values, y_values = self._include(xs, ys)
        self.marks.append(
            lambda frame: svg.draw_path(frame.points(x_values, y_values), color, width, dash, opacity=opacity)
        )

    def add_markers(
        self, xs: Values, ys: Values, marker: str, color: str, diameter: float | Values, *, hollow: bool = False
    ) -> None:
        """Add a marker at each point with finite values; ``diameter`` is one number, or one for each point."""
        x_values, y_values = self._include(xs, ys)
        diameters = [diameter] * len(x_values) if isinstance(diameter, int | float) else [*diameter]
        rows = [row for row in zip(x_values, y_values, diameters, strict=True) if all(map(math.isfinite, row))]

        def draw(frame: Frame) -> str:
            points = [(frame.x(x), frame.y(y)) for x, y, _ in rows]
            return svg.draw_markers(points, marker, color, [size for *_, size in rows], hollow=hollow)

        if rows:
            self.marks.append(draw)

    def add_interval(
        self, low: float, high: float, row: float, color: str, width: float, *, opacity: float = 1.0, ends: float = 0
    ) -> None:
        """Add a horizontal line from ``low`` to ``high``, with a short stroke of length ``ends`` across either end."""
        self.add_line([low, high], [row, row], color, width=width, opacity=opacity)
        if ends:
            self.marks.append(
                lambda frame: "".join(
                    svg.draw_path(
                        [(frame.x(end), frame.y(row) - ends / 2), (frame.x(end), frame.y(row) + ends / 2)], color, width
                    )
                    for end in (low, high)
                )
            )

    def add_vertical_rule(self, x: float, color: str = TEXT_COLOR, *, width: float = 1.0, dash: str = SOLID) -> None:
        """Add a vertical line at a value of ``x``, over the whole height."""
        self._include([x], [])
        self.marks.append(
            lambda frame: svg.draw_path([(frame.x(x), frame.top), (frame.x(x), frame.bottom)], color, width, dash)
        )

    def add_horizontal_rule(self, y: float, color: str = TEXT_COLOR, *, width: float = 1.0, dash: str = SOLID) -> None:
        """Add a horizontal line at a value of ``y``, over the whole width."""
        self._include([], [y])
        self.marks.append(
            lambda frame: svg.draw_path([(frame.left, frame.y(y)), (frame.right, frame.y(y))], color, width, dash)
        )

    def add_band(self, xs: Values, low: Values, high: Values, color: str, opacity: float) -> None:
        """Fill the area between two lines."""
        x_values, low_values = self._include(xs, low)
        _, high_values = self._include(x_values, high)

        def draw(frame: Frame) -> str:
            upper = frame.points(x_values, high_values)
            lower = frame.points(x_values, low_values)
            return svg.draw_area([*upper, *reversed(lower)], color, opacity)

        self.marks.append(draw)

    def add_bar(self, start: float, end: float, row: float, height: float, color: str, hatch: str = "") -> None:
        """Add a horizontal bar around a row; ``height`` is in units of the vertical axis, ``hatch`` a name or empty."""
        self._include([start, end], [row - height / 2, row + height / 2])

        def draw(frame: Frame) -> str:
            left, right = sorted((frame.x(start), frame.x(end)))
            top, bottom = sorted((frame.y(row - height / 2), frame.y(row + height / 2)))
            place = left, top, right - left, bottom - top
            bar = svg.draw_rectangle(*place, f"fill: {color}")
            if not hatch:
                return bar
            return bar + svg.draw_rectangle(*place, f"fill: url(#{frame.figure}-{hatch})")

        self.marks.append(draw)

    def add_text(
        self,
        text: str,
        x: float | None,
        y: float,
        *,
        shift: Point = (0, 0),
        anchor: Anchor = "start",
        size: float = svg.FONT_SIZE,
        italic: bool = False,
    ) -> None:
        """Add a text beside a point, moved by ``shift`` to the right and down; with ``x=None``, at the left edge of the
        plot.
        """
        label = Label(text, x, y, shift, anchor, size, italic)
        self.labels.append(label)
        self.marks.append(label.draw)

    def add_heat_map(
        self, values: NDArray[np.float64], limits: tuple[float, float], texts: Sequence[Sequence[str]] = ()
    ) -> None:
        """Fill the plot with a heat map, with the first row on top; higher values have a stronger colour.

        Args:
            values: ``(rows, columns)``; a NaN leaves its cell empty.
            limits: Values of the weakest and the strongest colour.
            texts: Text of each cell, ``(rows, columns)``; empty for no texts.
        """
        low, high = limits
        strength = MAX_CELL_OPACITY * np.clip((values - low) / (high - low), 0.04, 1)  # (rows, columns)
        rows, columns = values.shape
        for axis in (self.x, self.y):
            axis.line = False
            axis.tick_length = 0.0
        self.x.limits = (-0.5, columns - 0.5)
        self.y.limits = (rows - 0.5, -0.5)

        def draw(frame: Frame) -> str:
            width, height = format_length(frame.width / columns), format_length(frame.height / rows)
            cells = list[str]()
            for row, line in enumerate(strength.tolist()):
                top = format_length(frame.y(row - 0.5))
                for column, opacity in enumerate(line):
                    if not math.isnan(opacity):
                        place = f'x="{format_length(frame.x(column - 0.5))}" y="{top}"'
                        size = f'width="{width}" height="{height}"'
                        cells.append(f'<rect {place} {size} fill-opacity="{format_length(opacity)}"/>')
            style = f"fill: {BLUE}; stroke: {BACKGROUND_COLOR}; stroke-width: 1"
            return f'<g style="{style}">{"".join(cells)}</g>'

        self.marks.append(draw)
        for row, names in enumerate(texts):
            for column, text in enumerate(names):
                if text:
                    self.add_text(text, column, row, anchor="middle", size=8)

    # ------------------------------------------------------------------ axes

    def _include(self, xs: Values, ys: Values) -> tuple[list[float], list[float]]:
        """Extend the range of the data to these values; return them as lists."""
        x_values = _replace_huge_by_nan(xs)
        y_values = _replace_huge_by_nan(ys)
        for values, bounds in ((x_values, self._x_range), (y_values, self._y_range)):
            finite = [value for value in [*values, *bounds] if math.isfinite(value)]
            bounds[:] = [min(finite), max(finite)] if finite else []
        return x_values, y_values

    @property
    def x_limits(self) -> tuple[float, float]:
        """Values at the left and at the right edge."""
        return self.x.limits or _widen_range(self._x_range)

    @property
    def y_limits(self) -> tuple[float, float]:
        """Values at the lower and at the upper edge."""
        return self.y.limits or _widen_range(self._y_range)

    def draw(self, frame: Frame, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]) -> str:
        """Draw grid, marks, axes and axis labels, in this order; return them as SVG."""
        parts = [*self._draw_grid(frame, x_ticks, y_ticks)]
        parts += [mark(frame) for mark in self.marks]
        parts += [*self._draw_horizontal_axis(frame, x_ticks), *self._draw_vertical_axis(frame, y_ticks)]
        parts += [svg.draw_text(text, (frame.x(x), frame.top - 8), anchor="middle") for x, text in self.above]
        if self.title:
            top = frame.top - 10 - (14 if self.above else 0)
            parts.append(svg.draw_text(self.title, (frame.left, top), size=self.title_size))
        return "\n".join(parts)

    def _draw_grid(self, frame: Frame, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]) -> Iterable[str]:
        if self.x.grid:
            for x, _ in x_ticks:
                yield svg.draw_path([(frame.x(x), frame.top), (frame.x(x), frame.bottom)], LINE_COLOR, 0.6)
        if self.y.grid:
            for y, _ in y_ticks:
                yield svg.draw_path([(frame.left, frame.y(y)), (frame.right, frame.y(y))], LINE_COLOR, 0.6)

    def _draw_horizontal_axis(self, frame: Frame, ticks: Sequence[Tick]) -> Iterable[str]:
        axis = self.x
        bottom = frame.bottom
        if axis.line:
            yield svg.draw_path([(frame.left, bottom), (frame.right, bottom)], LINE_COLOR, 0.8)
        for x, text in ticks:
            if axis.tick_length:
                yield svg.draw_path([(frame.x(x), bottom), (frame.x(x), bottom + axis.tick_length)], LINE_COLOR, 0.8)
            top = bottom + axis.tick_length + TICK_GAP
            if axis.upright:
                yield svg.draw_text(text, (frame.x(x), top), anchor="end", size=axis.text_size, upright=True)
            else:
                place = frame.x(x), top + axis.text_size / 2
                yield svg.draw_text(text, place, anchor="middle", size=axis.text_size)

    def _draw_vertical_axis(self, frame: Frame, ticks: Sequence[Tick]) -> Iterable[str]:
        axis = self.y
        left = frame.left
        if axis.line:
            yield svg.draw_path([(left, frame.top), (left, frame.bottom)], LINE_COLOR, 0.8)
        for y, text in ticks:
            if axis.tick_length:
                yield svg.draw_path([(left - axis.tick_length, frame.y(y)), (left, frame.y(y))], LINE_COLOR, 0.8)
            place = left - axis.tick_length - TICK_GAP, frame.y(y)
            yield svg.draw_text(text, place, anchor="end", size=axis.text_size)


TICK_GAP = 3.5
"""Distance between a tick and its label."""


def _widen_range(bounds: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis that shows these bounds with a margin; 0 to 1 without data."""
    if not bounds:
        return 0.0, 1.0
    low, high = bounds
    size = max(abs(low), abs(high))
    # Values that differ only in the last digits would have equal labels, so draw them as equal.
    margin = AXIS_MARGIN_SHARE * (high - low if high - low > 1e-5 * size else size or 1.0)
    return low - margin, high + margin


def _replace_huge_by_nan(values: Values) -> list[float]:
    """Replace values that no axis can show, such as the loss of a diverged run, by NaN, which leaves a gap."""
    return [float(value) if abs(value) < MAX_PLOTTED_VALUE else math.nan for value in values]


def choose_ticks(limits: tuple[float, float], max_ticks: float, *, whole_numbers: bool = False) -> list[Tick]:
    """Return round numbers between the limits with their labels; at most ``max_ticks``, and nearly as many."""
    low, high = sorted(limits)
    power = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    factors = (1, 2, 5, 10) if whole_numbers else (1, 2, 2.5, 5, 10)
    step = next(power * factor for factor in factors if (high - low) / (power * factor) <= max_ticks)
    if whole_numbers:
        step = max(1.0, step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if not math.isclose(step * 10**decimals, round(step * 10**decimals)):  # steps of 0.25
        decimals += 1
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    values = [index * step for index in range(first, last + 1)]
    large = max(abs(low), abs(high)) >= 1e6
    return [(value, _format_tick(value, decimals, large=large)) for value in values]


def _format_tick(value: float, decimals: int, *, large: bool) -> str:
    text = f"{value:.3g}" if large or decimals > 8 else f"{value:.{decimals}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def replace_none_by_nan(values: ArrayLike | Sequence[float | None]) -> NDArray[np.float64]:
    """Replace None by NaN, so that a line plot has a gap there."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)  # type: ignore[union-attr]
