"""Plots for the report of one run. Markers, line styles and hatches make each plot readable without colour."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from polyclinic.common.metrics.measured import ValueWithError
from polyclinic.common.metrics.measured import format_value_with_error as figure_text
from polyclinic.common.metrics.multi_class import BestClientAccuracies, estimate_accuracy_density
from polyclinic.common.reporting.figure import ROW_HEIGHT, LegendEntry, draw_figure, make_line_entry
from polyclinic.common.reporting.plot import Axis, Plot, replace_none_by_nan
from polyclinic.common.reporting.svg import (
    BACKGROUND_COLOR,
    BLUE,
    DASHED,
    DOTTED,
    GREEN,
    LINE_COLOR,
    ORANGE,
    SKY,
    SOLID,
    TEXT_COLOR,
    VERMILION,
    choose_series_styles,
)
from polyclinic.common.system.plain_text import NOT_APPLICABLE, format_number
from polyclinic.server.reporting.page import AnnotatedClassGroup
from polyclinic.server.runs.schema import PrototypeSimilarity, RoundFileLine, SiteSummary

CHANCE_AUROC = 0.5
MARKER_BAND = 0.76
"""Share of a row's height in which the markers of several series are spread."""
MAX_TABLE_SIZE = 24
"""Number of sites or classes above which a table of annotations is hard to read, and a plot is drawn in addition."""
MAX_NUMBERED_COLUMNS = 10
"""Greatest number of classes or rounds with which the cells of a heat map show numbers."""
MAX_HEAT_MAP_CELLS = 1200
"""Greatest number of cells of a heat map; of more rounds only some are drawn."""
MAX_SITES_IN_ORDER_PLOT = 40
"""Greatest number of sites with which the plot of their order is drawn."""

GROUP_GAP = 0.7
"""Space between two groups of classes, in rows."""

_GROUP_FILLS = {"shared": (BLUE, ""), "some": (SKY, "dots"), "unique": (ORANGE, "stripes"), "varies": (GREEN, "grid")}
"""Kind of a group of classes -> colour and hatch of its bars."""
_CURVE_STYLES = {"training": (BLUE, SOLID, "circle"), "validation": (VERMILION, DASHED, "square")}
"""Name of a curve -> its colour, line and marker."""


def draw_learning_curves(rounds: Sequence[RoundFileLine], best_round: int | None, metric: str = "AUROC") -> Markup:
    """Draw training and validation loss by round, and in a second plot the validation AUROC or Dice by round.

    Args:
        best_round: Round that is marked as best; None for no mark.
        metric: Name of the metric in ``validation_auroc``: AUROC or Dice.
    """
    panels = {
        "loss": {"training": "train_loss", "validation": "validation_loss"},
        f"mean {metric}": {"validation": "validation_auroc"},
    }
    numbers = [line.round for line in rounds]
    plots = list[Plot]()
    drawn = list[str]()
    for label, fields in panels.items():
        plot = Plot(make_round_axis(), Axis(label, grid=True))
        for name, field in fields.items():
            values = replace_none_by_nan([getattr(line, field) for line in rounds])
            if np.isfinite(values).any():
                _add_curve(plot, numbers, values, _CURVE_STYLES[name])
                drawn.append(name)
        if plot.marks:
            plots.append(plot)
    if not plots:
        return Markup("")

    if best_round is not None:
        for plot in plots:
            plot.add_vertical_rule(best_round, dash=DOTTED)
        plots[0].above.append((best_round, f"best round: {best_round}"))
    legend = [
        make_line_entry(name, color, marker, dash)
        for name, (color, dash, marker) in _CURVE_STYLES.items()
        if name in drawn
    ]
    about = "Line chart: training and validation loss by round."
    return draw_figure(plots, "curves", about, height=165, legend=legend)


def make_round_axis() -> Axis:
    """Return an axis with ticks at whole rounds."""
    return Axis("round", whole_numbers=True)


def draw_accuracy_by_round(rounds: Sequence[RoundFileLine], best: BestClientAccuracies) -> Markup:
    """Draw mean and pooled accuracy by round, with a star at the best round of each; empty without accuracies."""
    scored = [(line.round, line.test_accuracy) for line in rounds if line.test_accuracy]
    if not scored:
        return Markup("")
    numbers = [server_round for server_round, _ in scored]
    means = [accuracy.mean for _, accuracy in scored]
    pooled = [accuracy.pooled for _, accuracy in scored]
    mean_style = _CURVE_STYLES["training"]
    pooled_style = _CURVE_STYLES["validation"]

    plot = Plot(make_round_axis(), Axis("accuracy", grid=True), "Accuracy on the sites' test images")
    _add_curve(plot, numbers, means, mean_style)
    _add_curve(plot, numbers, pooled, pooled_style, shift=0.5)
    plot.add_markers([best.best_mean_round], [best.best_mean_client_test_accuracy], "star", BLUE, 14)
    plot.add_markers([best.best_pooled_round], [best.best_test_accuracy], "star", VERMILION, 14)
    legend = [
        make_line_entry(name, color, marker, dash)
        for name, (color, dash, marker) in (("mean over sites", mean_style), ("all images pooled", pooled_style))
    ]
    about = "Line chart: accuracy on the sites' test images by round."
    return draw_figure([plot], "accuracy", about, height=150, legend=legend)


def _add_curve(
    plot: Plot,
    rounds: Sequence[int],
    values: Sequence[float] | NDArray[np.float64],
    style: tuple[str, str, str],
    *,
    shift: float = 0,
) -> None:
    """Add a curve with about 15 markers.

    Args:
        style: Colour, dash pattern and marker.
        shift: Share of the markers' spacing by which they are shifted, so that both of two equal curves are visible.
    """
    color, dash, marker = style
    plot.add_line(rounds, values, color, dash=dash)
    stride = max(1, len(rounds) // 15)
    first = int(shift * stride)
    plot.add_markers(rounds[first::stride], values[first::stride], marker, color, 6)


def draw_accuracy_density(accuracies: Sequence[float]) -> Markup:
    """Draw the kernel density of the sites' accuracies, with a tick per site; empty if all are equal."""
    # 2001 points give a smooth curve even if twelve sites are within one per cent.
    curve = estimate_accuracy_density(accuracies, 2001)
    if curve is None:
        return Markup("")
    grid, density = curve
    visible = density > 0.005 * density.max()
    grid, density = grid[visible], density[visible]
    limits = float(min(*accuracies, grid[0])), float(max(*accuracies, grid[-1]))

    top = 1.05 * float(density.max())
    plot = Plot(Axis("accuracy of a site", limits), Axis("density", (0.0, top)), "How accuracy spreads over sites")
    plot.add_band(grid, np.zeros_like(density), density, BLUE, 0.15)
    plot.add_line(grid, density, BLUE, width=2)
    for accuracy in accuracies:
        plot.add_line([accuracy, accuracy], [0, 0.1 * top], VERMILION, width=1.8)
    legend = [make_line_entry("density", BLUE), make_line_entry("one site", VERMILION)]
    about = f"Density of the accuracies of {len(accuracies)} sites, a tick for each."
    return draw_figure([plot], "density", about, height=125, legend=legend)


def draw_auroc_bars(
    groups: Sequence[AnnotatedClassGroup],
    aurocs: Mapping[str, ValueWithError | None],
    intervals: Mapping[str, tuple[float, float]],
    metric: str = "AUROC",
) -> Markup:
    """Draw a bar with an interval for each class: its AUROC from 0.5, or its Dice from 0.

    Args:
        groups: The classes, grouped by the number of sites that annotate them.
        aurocs: Class -> value of the metric; None if undefined.
        intervals: Class -> 95 % interval, for classes that have one.
        metric: Name of the metric: AUROC or Dice.
    """
    start = CHANCE_AUROC if metric == "AUROC" else 0.0
    ends = [end for each in intervals.values() for end in each]
    values = [*(auroc.value for auroc in aurocs.values() if auroc is not None), *ends]
    least = min([0.45, *(value - 0.06 for value in values)]) if metric == "AUROC" else start
    plot = Plot(Axis(metric, (least, 1.0)))
    positions = label_class_rows(plot, groups)
    for group in groups:
        for name in group.classes:
            measured = aurocs.get(name)
            if measured is None:
                plot.add_text("n/a", start, positions[name], shift=(6, 0), italic=True)
            else:
                _add_bar(plot, positions[name], start, measured, intervals.get(name), _GROUP_FILLS[group.kind])
    plot.add_vertical_rule(start)
    legend = [
        LegendEntry(group.title, color, hatch=hatch) for group in groups for color, hatch in [_GROUP_FILLS[group.kind]]
    ]
    about = f"Bar chart: {metric} of every class; the table beside it has the numbers."
    return draw_figure([plot], "bars", about, height=measure_class_rows(groups), legend=legend)


def _add_bar(
    plot: Plot,
    row: float,
    start: float,
    measured: ValueWithError,
    interval: tuple[float, float] | None,
    fill: tuple[str, str],
) -> None:
    """Add a bar with its interval, and the value to the right of them.

    Args:
        row: Vertical position of the bar.
        start: Horizontal position at which the bar begins.
        fill: Colour and hatch of the bar.
    """
    color, hatch = fill
    value = measured.value
    plot.add_bar(start, value, row, 0.68, color, hatch)
    low, high = interval or (value, value)
    if interval:
        plot.add_interval(low, high, row, BACKGROUND_COLOR, 4)
        plot.add_interval(low, high, row, TEXT_COLOR, 1.4, ends=7)
    plot.add_text(figure_text(measured), max(high, start), row, shift=(4, 0))


def measure_class_rows(groups: Sequence[AnnotatedClassGroup]) -> float:
    """Return the height in points of a plot with one row per class and gaps between groups."""
    return ROW_HEIGHT * (sum(len(group.classes) for group in groups) + GROUP_GAP * (len(groups) - 1) + 0.3)


def label_class_rows(plot: Plot, groups: Sequence[AnnotatedClassGroup]) -> dict[str, float]:
    """Label a row for each class from the top, with a gap between groups; return class -> vertical position."""
    positions: dict[str, float] = {}
    row = 0.0
    for group in groups:
        for name in group.classes:
            positions[name] = row
            row += 1
        row += GROUP_GAP
    plot.y.label_rows(list(positions), list(positions.values()))
    plot.y.limits = (max(positions.values(), default=0) + 0.65, -0.65)
    return positions


def draw_site_participation(rounds: Sequence[RoundFileLine], sites: Sequence[str]) -> Markup:
    """Draw a row for each site, with a dot for each round in which it took part, and a cross if it was absent."""
    present = [(line.round, row) for line in rounds for row, site in enumerate(sites) if site in line.sites]
    absent = [(line.round, row) for line in rounds for row, site in enumerate(sites) if site in line.absent]
    diameter = float(np.clip(500 / max(1, len(rounds)), 2.5, 7))
    plot = Plot(make_round_axis())
    plot.y.label_rows(sites)
    plot.y.line = True
    plot.add_markers([x for x, _ in present], [y for _, y in present], "circle", BLUE, diameter)
    plot.add_markers([x for x, _ in absent], [y for _, y in absent], "cross", VERMILION, 1.3 * diameter)
    legend = [LegendEntry("took part", BLUE, "circle"), LegendEntry("absent", VERMILION, "cross")]
    about = "Dot chart: which site took part in which round."
    return draw_figure([plot], "participation", about, height=ROW_HEIGHT * len(sites), legend=legend)


def draw_label_coverage(sites: Mapping[str, SiteSummary], groups: Sequence[AnnotatedClassGroup]) -> Markup:
    """Draw a row for each class, with bars over the sites that annotate it.

    Sites are sorted by their annotated classes, so that sites with equal classes are neighbours. The result is empty
    for at most :data:`MAX_TABLE_SIZE` sites and classes, because a table is then clearer.
    """
    kinds = {name: group.kind for group in groups for name in group.classes}
    names = list(kinds)
    if max(len(sites), len(names)) <= MAX_TABLE_SIZE:
        return Markup("")
    covered = np.array([[name in record.classes for name in names] for record in sites.values()])  # (sites, classes)
    order = np.lexsort(~covered.T[::-1])

    plot = Plot(Axis(limits=(0.5, len(sites) + 0.5)))
    plot.y.label_rows(names)
    for row, name in enumerate(names):
        plot.add_horizontal_rule(row, LINE_COLOR, width=0.6)
        members = np.concatenate([[False], covered[order, row], [False]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(members)).reshape(-1, 2).tolist()
        for first, end in edges:
            plot.add_bar(first + 0.5, end + 0.5, row, 0.76, _GROUP_FILLS[kinds[name]][0])  # sites count from 1
    if len(sites) <= MAX_TABLE_SIZE:
        in_order = [list(sites)[row] for row in order]
        plot.x.ticks = [(float(position), name) for position, name in enumerate(in_order, start=1)]
        plot.x.upright = True
    else:
        plot.x.label = "number of sites; neighbours annotate alike"
        plot.x.whole_numbers = True
    about = f"Bar chart: which of {len(names)} classes {len(sites)} sites annotate."
    return draw_figure([plot], "coverage", about, height=17.5 * len(names))


# ---------------------------------------------------------------------- plots for some methods only


def draw_model_pass_order(rounds: Sequence[RoundFileLine], sites: Sequence[str]) -> Markup:
    """Draw the position of each site in every pass of the model, and the slope of the site's loss (UniFed).

    The result is empty for methods that do not pass the model from site to site, and for more than
    :data:`MAX_SITES_IN_ORDER_PLOT` sites. Slopes are drawn only if the rounds have them.
    """
    has_slopes = any(line.learned.slopes for line in rounds)
    is_sorted_by_name = all(list(line.sites) == sorted(line.sites) for line in rounds)  # as without passes
    if len(sites) > MAX_SITES_IN_ORDER_PLOT or not rounds or (is_sorted_by_name and not has_slopes):
        return Markup("")
    numbers = [line.round for line in rounds]
    stride = max(1, len(rounds) // 15)
    ticks = [(float(position), str(position)) for position in range(1, len(sites) + 1)]
    position_axis = Axis(limits=(len(sites) + 0.5, 0.5), ticks=ticks)
    position_plot = Plot(make_round_axis(), position_axis, "Place in the pass")
    slope_plot = Plot(make_round_axis(), Axis(grid=True), "Slope of the site's loss, a batch")
    # Site -> its last round and its position in the last pass; the site's name stands there.
    ends = {site: (line.round, position) for line in rounds for position, site in enumerate(line.sites, start=1)}
    for site, style in zip(sites, choose_series_styles(len(sites)), strict=True):
        orders = [line.sites for line in rounds]
        positions = replace_none_by_nan([order.index(site) + 1 if site in order else None for order in orders])
        slopes = replace_none_by_nan([line.learned.slopes.get(site) for line in rounds])
        for plot, values in ((position_plot, positions), (slope_plot, slopes)):
            plot.add_line(numbers, values, style.color, width=2)
            plot.add_markers(numbers[::stride], values[::stride], style.marker, style.color, 7)
    for site, (last_round, position) in ends.items():
        position_plot.add_text(site, last_round, position, shift=(8, 0))
    plots = [position_plot, slope_plot] if has_slopes else [position_plot]
    about = "Line chart: place of every site in each pass, round by round."
    return draw_figure(plots, "order", about, height=max(135.0, ROW_HEIGHT * len(sites)))


def draw_confident_share_by_round(rounds: Sequence[RoundFileLine]) -> Markup:
    """Draw the share of unlabelled images with a confident prediction by class and round (FedMLP).

    The result is empty for other methods.
    """
    difficulties = [(line.round, line.learned.difficulty) for line in rounds if line.learned.difficulty]
    if not difficulties:
        return Markup("")
    names = list(difficulties[-1][1])
    stride = -(-len(difficulties) * len(names) // MAX_HEAT_MAP_CELLS)  # rounded up
    difficulties = difficulties[::stride]
    values = np.array([replace_none_by_nan([by_class.get(name) for _, by_class in difficulties]) for name in names])
    plot = Plot(Axis("round"), title="Share of unlabelled images of which the model is sure")
    plot.y.label_rows(names)
    texts = _format_two_decimals(values) if len(difficulties) <= MAX_NUMBERED_COLUMNS else ()
    plot.add_heat_map(values, (0.0, 1.0), texts)
    tick_columns = range(0, len(difficulties), -(-len(difficulties) // 12))
    plot.x.ticks = [(float(column), str(difficulties[column][0])) for column in tick_columns]
    about = "Heat map: share of sure images by class and round."
    return draw_figure([plot], "difficulty", about, height=ROW_HEIGHT * len(names))


def draw_prototype_similarity(prototypes: PrototypeSimilarity) -> Markup:
    """Draw the similarity of the prototypes (mean features) of different classes.

    A heat map shows the cosine similarity of positive prototypes for every pair of classes. A bar chart shows the angle
    between the negative and the positive prototype of each class.
    """
    names = prototypes.classes
    similarities = np.array(prototypes.positives, np.float64)  # (classes, classes)
    off_diagonal = similarities[~np.eye(len(names), dtype=bool)]
    # Cosines of these features are near 1. So the colour scale begins at the least similar pair.
    lowest = min(np.nanmin(off_diagonal) if np.isfinite(off_diagonal).any() else 0.0, 0.99)
    cosines = Plot(title="Cosine between positives of two classes")
    cosines.x.label_columns(names)
    cosines.y.label_rows(names)
    texts = _format_two_decimals(similarities) if len(names) <= MAX_NUMBERED_COLUMNS else ()
    cosines.add_heat_map(similarities, (lowest, 1.0), texts)

    degrees = np.degrees(np.arccos(replace_none_by_nan(prototypes.signs)))
    widest = np.nanmax(degrees) if np.isfinite(degrees).any() else 1.0
    angles = Plot(Axis(limits=(0.0, float(1.15 * max(widest, 1e-6)))), title="Positives apart from negatives, degrees")
    angles.y.label_rows([""] * len(names))
    for row, angle in enumerate(degrees.tolist()):
        if np.isnan(angle):
            angles.add_text(NOT_APPLICABLE, 0, row, shift=(4, 0), italic=True)
        else:
            angles.add_bar(0, angle, row, 0.68, ORANGE, "stripes")
            angles.add_text(format_number(angle, 1), angle, row, shift=(4, 0))
    angles.add_vertical_rule(0)
    about = "Heat map and bar chart: how much the classes' prototypes are alike."
    return draw_figure([cosines, angles], "prototypes", about, height=24.0 * len(names))


def _format_two_decimals(values: NDArray[np.float64]) -> list[list[str]]:
    return [["–" if np.isnan(value) else f"{value:.2f}" for value in row] for row in values.tolist()]
