"""Small panels, one a class, both of whose axes go from 0 to 1."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.markers import TICKDOWN, TICKLEFT
from matplotlib.transforms import Affine2D, Transform

from server.reporting.figures.svg import INK, RULE, canvas, inline, theme

COLUMNS, MOST = 5, 25
INCHES, TITLE_INCHES = 1.75, 0.25
FROM, TO = -0.06, 1.06
WIDTH, HEIGHT = 1.3, 1.3 * (INCHES + TITLE_INCHES) / INCHES  # of a panel with its margins, where the axes have length 1
LONGEST = 22
TICKS = ("0", 0.0), ("0.5", 0.5), ("1", 1.0)

Of = TypeVar("Of")


def panels(
    of_classes: Mapping[str, Of],
    draw: Callable[[Axes, Transform, Of], None],
    name: str,
    labels: tuple[str, str],
    description: str,
) -> Markup:
    """Draw the first 25 classes, five in a row; nothing where there is none.

    All lie on one pair of axes: 25 pairs take matplotlib as long as the whole rest of a report.

    Args:
        draw: Draws one class by a transform from its panel's coordinates.
        labels: Of the horizontal and of the vertical axes.
    """
    shown = dict(list(of_classes.items())[:MOST])
    if not shown:
        return Markup("")
    rows, columns = -(-len(shown) // COLUMNS), min(COLUMNS, len(shown))
    with theme():
        figure, (axes,) = canvas(max(columns * INCHES, 2.6), rows * (INCHES + TITLE_INCHES) + 0.2)
        axes.set_axis_off()
        for index, (title, of_class) in enumerate(shown.items()):
            row, column = divmod(index, COLUMNS)
            at = Affine2D().translate(column * WIDTH, -row * HEIGHT) + axes.transData
            _frame(axes, at, title, left=not column, below=index + columns >= len(shown))
            draw(axes, at, of_class)
        axes.set(xlim=(-0.2, columns * WIDTH - 0.2), ylim=(-(rows - 1) * HEIGHT - 0.3, 1.25), aspect="equal")
        figure.supxlabel(labels[0], fontsize=10)
        figure.supylabel(labels[1], fontsize=10)
        return inline(figure, name, description)


def _frame(axes: Axes, at: Transform, title: str, *, left: bool, below: bool) -> None:
    """Title, left and lower edge with ticks, and numbers beside the first panel of a row and below the last rows."""
    short = title if len(title) <= LONGEST else f"{title[: LONGEST - 1]}…"
    axes.text(FROM, TO + 0.05, short, fontsize=9, transform=at)
    axes.plot([FROM, FROM, TO], [TO, FROM, FROM], color=RULE, linewidth=0.8, transform=at)
    places = [place for _, place in TICKS]
    axes.plot(places, [FROM] * 3, linestyle="", marker=TICKDOWN, markersize=3.5, color=RULE, transform=at)
    axes.plot([FROM] * 3, places, linestyle="", marker=TICKLEFT, markersize=3.5, color=RULE, transform=at)
    for text, place in TICKS:
        if left:
            axes.text(FROM - 0.08, place, text, ha="right", va="center", color=INK, transform=at)
        if below:
            axes.text(place, FROM - 0.08, text, ha="center", va="top", color=INK, transform=at)
