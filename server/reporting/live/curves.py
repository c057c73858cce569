"""Curves as small SVG figures, in the page's own colours: drawn by hand, for a look each second has to cost nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 34
POINTS_SHOWN = 300
MARKED = 40  # rounds up to which each point has a dot

Values = Sequence[float | None]


@dataclass(frozen=True)
class Scale:
    """Maps values to places in the figure."""

    first: int
    last: int
    low: float
    high: float

    def x(self, number: float) -> float:
        """Return the place of a round."""
        return LEFT + (number - self.first) / max(self.last - self.first, 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a loss or an AUROC."""
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def curves(title: str, rounds: Sequence[int], series: Mapping[str, Values], last_round: int) -> Markup:
    """A line a series, with its name and its newest value; empty where there is no value yet.

    Args:
        last_round: Of the run: the axis goes so far, and what is missing of a line is to come.
    """
    known = {name: found for name, values in series.items() if (found := _known(rounds, values))}
    if not known:
        return Markup("")
    values = [value for points in known.values() for _, value in points]
    low, high, step = _nice(min(values), max(values))
    scale = Scale(1, max(last_round, rounds[-1]), low, high)
    said = "; ".join(f"{name} {points[-1][1]:.3f} after round {points[-1][0]}" for name, points in known.items())
    parts = [_grid(scale, step), *_lines(scale, known)]
    label = Markup('role="img" aria-label="{}"').format(f"{title} by round: {said}")
    return Markup('<svg class="figure" viewBox="0 0 {} {}" {}>{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(parts)
    )


def _known(rounds: Sequence[int], values: Values) -> list[tuple[int, float]]:
    points = [(n, v) for n, v in zip(rounds, values, strict=True) if v is not None and math.isfinite(v)]
    stride = -(-len(points) // POINTS_SHOWN)
    return points[:: max(stride, 1)] + (points[-1:] if stride > 1 and (len(points) - 1) % stride else [])


def _nice(low: float, high: float) -> tuple[float, float, float]:
    """An interval around both that begins and ends at a multiple of its step, in two to five steps."""
    width = max(high - low, abs(high) * 0.02, 1e-6)
    power = 10.0 ** math.floor(math.log10(width / 2))
    step = next(power * factor for factor in (1, 2, 5, 10) if width / (power * factor) <= 4)
    return math.floor(low / step) * step, max(math.ceil(high / step), math.floor(low / step) + 1) * step, step


def _grid(scale: Scale, step: float) -> Markup:
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    lines = []
    for index in range(round((scale.high - scale.low) / step) + 1):
        value = scale.low + index * step
        y = scale.y(value)
        lines.append(
            Markup('<path class="rule" d="M{} {:.1f}H{}"/>').format(LEFT, y, WIDTH - RIGHT)
            + _text(LEFT - 6, y + 4, f"{value:.{digits}f}", "end")
        )
    for number, anchor in ((scale.first, "start"), (scale.last, "end")):
        lines.append(_text(scale.x(number) if scale.last > scale.first else LEFT, HEIGHT - 14, str(number), anchor))
    lines.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "round", "middle"))
    return Markup("").join(lines)


def _lines(scale: Scale, known: Mapping[str, Sequence[tuple[int, float]]]) -> list[Markup]:
    drawn, x = [], float(LEFT)
    for index, (name, points) in enumerate(known.items()):
        place = " ".join(f"{scale.x(n):.1f},{scale.y(v):.1f}" for n, v in points)
        drawn.append(Markup('<polyline class="curve c{}" points="{}"/>').format(index, place))
        dots = points if len(points) <= MARKED else points[-1:]
        drawn += [
            Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(index, scale.x(n), scale.y(v))
            for n, v in dots
        ]
        words = f"{name} {points[-1][1]:.3f}"
        drawn.append(Markup('<path class="curve c{}" d="M{:.1f} 12h18"/>').format(index, x))
        drawn.append(_text(x + 23, 16, words, "start"))
        x += 23 + 9.6 * len(words) + 18
    return drawn


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, escape(words))
