"""Elements of inline SVG, in the colours of the page (light or dark).

The palette is that of Okabe and Ito (2008); series also differ by markers, lines and hatches. Lengths are in points: a
figure is 648 points wide, and the page scales it. Each function returns SVG text, in which names are escaped.
"""

import itertools
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import escape

TEXT_COLOR = "currentColor"
"""Colour of text."""
LINE_COLOR = "var(--rule)"
"""Colour of axes and grid lines."""
BACKGROUND_COLOR = "var(--paper)"
"""Colour of the background."""
BLUE = "var(--blue)"
ORANGE = "var(--orange)"
GREEN = "var(--green)"
PURPLE = "var(--purple)"
VERMILION = "var(--vermilion)"
SKY = "var(--sky)"

FONT_SIZE = 10.0
SOLID, DASHED, DASH_DOTTED, DOTTED = "", "5.5 2.4", "9 2.4 1.5 2.4", "1.2 2"
"""Line styles as lengths of strokes and gaps; a solid line has none."""

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]


@dataclass(frozen=True)
class SeriesStyle:
    """Colour and marker of one series in a plot."""

    color: str
    marker: str


def choose_series_styles(amount: int) -> list[SeriesStyle]:
    """Return a style for each series; markers repeat after 13 series, pairs of colour and marker after 78."""
    colors = itertools.cycle((BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY))
    markers = itertools.cycle(MARKERS)
    return [SeriesStyle(next(colors), next(markers)) for _ in range(amount)]


# ---------------------------------------------------------------------- text

_NARROW_LETTERS = frozenset("!'(),-./:;I[]fijlrt| ")
_WIDE_LETTERS = frozenset("MW@%mw…—")
_NARROW_EM, _LOWER_EM, _UPPER_EM, _WIDE_EM = 0.38, 0.62, 0.75, 0.98
"""Widths of letters, as shares of the font size, in DejaVu Sans, which is at least as wide as the fonts of the
pages.
"""


def estimate_text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the approximate width of a text, in points."""
    width = 0.0
    for character in text:
        if character in _NARROW_LETTERS:
            width += _NARROW_EM
        elif character in _WIDE_LETTERS or unicodedata.east_asian_width(character) in "WF":
            width += _WIDE_EM
        elif character.isupper():
            width += _UPPER_EM
        elif not unicodedata.combining(character):
            width += _LOWER_EM
    return width * size


def shorten_to_width(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Return the text, shortened to its beginning and three dots if it is too wide."""
    if estimate_text_width(text, size) <= width:
        return text
    while text and estimate_text_width(f"{text}…", size) > width:
        text = text[:-1]
    return f"{text}…"


def draw_text(
    text: str,
    place: Point,
    *,
    anchor: Anchor = "start",
    size: float = FONT_SIZE,
    italic: bool = False,
    upright: bool = False,
) -> str:
    """Draw a line of text.

    Args:
        place: Point at the middle of the text's height; ``anchor`` says if it is the start, middle or end of the text.
        upright: True to turn the text by 90 degrees around this point, so that it is read from below.
    """
    x, y = place
    turned = f' transform="rotate(-90 {format_length(x)} {format_length(y)})"' if upright else ""
    baseline = y + 0.36 * size  # digits and capitals then extend equally above and below the middle
    style = f"font-size: {format_length(size)}px"
    if italic:
        style += "; font-style: italic"
    where = f'x="{format_length(x)}" y="{format_length(baseline)}" text-anchor="{anchor}"'
    return f'<text {where}{turned} style="{style}">{escape(text)}</text>'


def format_length(value: float) -> str:
    """Format a length or a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# ---------------------------------------------------------------------- lines and areas


def draw_path(points: Iterable[Point], color: str, width: float, dash: str = SOLID, *, opacity: float = 1.0) -> str:
    """Draw a line through points; it has a gap where a coordinate is not finite."""
    style = f"fill: none; stroke: {color}; stroke-width: {format_length(width)}"
    if dash:
        style += f"; stroke-dasharray: {dash}"
    if opacity < 1:
        style += f"; stroke-opacity: {opacity:g}"
    corners = list[str]()
    command = "M"
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            corners.append(f"{command}{format_length(x)} {format_length(y)}")
            command = "L"
        else:
            command = "M"
    return f'<path d="{"".join(corners)}" style="{style}"/>'


def draw_area(corners: Sequence[Point], color: str, opacity: float) -> str:
    """Return a filled polygon; ``opacity`` is from 0 to 1."""
    points = " ".join(f"{format_length(x)},{format_length(y)}" for x, y in corners)
    return f'<polygon points="{points}" style="fill: {color}; fill-opacity: {opacity:g}"/>'


def draw_rectangle(left: float, top: float, width: float, height: float, style: str) -> str:
    """Return a rectangle; ``style`` is CSS, such as ``fill: red``."""
    size = f'width="{format_length(width)}" height="{format_length(height)}"'
    return f'<rect x="{format_length(left)}" y="{format_length(top)}" {size} style="{style}"/>'


HATCHES = {
    "dots": (6.0, "M1.5 1.5h1.6v1.6h-1.6z", f"fill: {BACKGROUND_COLOR}"),
    "stripes": (6.0, "M-1 1l2 -2M0 6l6 -6M5 7l2 -2", f"stroke: {BACKGROUND_COLOR}; stroke-width: 1.2"),
    "grid": (6.0, "M0 0l6 6M0 6l6 -6", f"stroke: {BACKGROUND_COLOR}; stroke-width: 1"),
}
"""Name -> width of the pattern's tile, its path, and the CSS style of the path."""


def define_hatch(hatch: str, figure: str) -> str:
    """Define a hatch for one figure; its id contains the figure's name, because ids must be unique on a page."""
    tile, path, style = HATCHES[hatch]
    size = f'width="{tile:g}" height="{tile:g}" patternUnits="userSpaceOnUse"'
    return f'<pattern id="{figure}-{hatch}" {size}><path d="{path}" style="{style}"/></pattern>'


# ---------------------------------------------------------------------- markers


def _make_regular_corners(corner_count: int, radius: float, turn: float = -90) -> tuple[Point, ...]:
    """Return the corners of a regular polygon, the first at an angle of ``turn`` degrees."""
    angles = [math.radians(turn + 360 * index / corner_count) for index in range(corner_count)]
    return tuple((radius * math.cos(angle), radius * math.sin(angle)) for angle in angles)


def _make_star_corners(points: int, inner: float) -> tuple[Point, ...]:
    outer = _make_regular_corners(points, 1.15)
    between = _make_regular_corners(points, inner, -90 + 180 / points)
    return tuple(itertools.chain.from_iterable(zip(outer, between, strict=True)))


_PLUS: tuple[Point, ...] = (
    *((-0.33, -1), (0.33, -1), (0.33, -0.33), (1, -0.33), (1, 0.33), (0.33, 0.33)),
    *((0.33, 1), (-0.33, 1), (-0.33, 0.33), (-1, 0.33), (-1, -0.33), (-0.33, -0.33)),
)
_CROSS: tuple[Point, ...] = tuple(((x - y) * 0.78, (x + y) * 0.78) for x, y in _PLUS)
MARKERS: dict[str, tuple[Point, ...]] = {
    "circle": (),
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": _make_regular_corners(4, 1.2),
    "triangle up": ((0, -1.05), (1, 0.85), (-1, 0.85)),
    "triangle down": ((0, 1.05), (-1, -0.85), (1, -0.85)),
    "plus": _PLUS,
    "cross": _CROSS,
    "triangle left": ((-1.05, 0), (0.85, -1), (0.85, 1)),
    "triangle right": ((1.05, 0), (-0.85, 1), (-0.85, -1)),
    "pentagon": _make_regular_corners(5, 1.05),
    "hexagon": _make_regular_corners(6, 1.05),
    "star": _make_star_corners(5, 0.45),
    "thin diamond": ((0, -1.3), (0.75, 0), (0, 1.3), (-0.75, 0)),
}
"""Name -> corners of a marker of radius 1; a circle has none."""


def draw_markers(
    points: Iterable[Point], marker: str, color: str, diameters: Iterable[float], *, hollow: bool = False
) -> str:
    """Draw a marker at each point, with the diameter of that point, and an edge that separates overlapping markers."""
    style = (
        f"fill: none; stroke: {color}" if hollow else f"fill: {color}; stroke: {BACKGROUND_COLOR}; stroke-width: 0.8"
    )
    shapes = [
        _draw_marker_shape(point, marker, diameter / 2) for point, diameter in zip(points, diameters, strict=True)
    ]
    return f'<g style="{style}">{"".join(shapes)}</g>'


def _draw_marker_shape(point: Point, marker: str, radius: float) -> str:
    x, y = point
    corners = MARKERS[marker]
    if not corners:
        return f'<circle cx="{format_length(x)}" cy="{format_length(y)}" r="{format_length(radius)}"/>'
    points = " ".join(f"{format_length(x + radius * a)},{format_length(y + radius * b)}" for a, b in corners)
    return f'<polygon points="{points}"/>'
