"""Plots for the report of one run. Markers, line styles and hatches make each plot readable without colour."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from polyclinic.common.metrics.measured import ValueWithError
from polyclinic.common.metrics.measured import format_value_with_error as figure_text
from polyclinic.common.metrics.multi_class import BestClientAccuracies, estimate_accuracy_density
from polyclinic.common.system.plain_text import NOT_APPLICABLE, format_number
from polyclinic.server.reporting.page import AnnotatedClassGroup
from polyclinic.server.reporting.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    ROW,
    RULE,
    SKY,
    VERMILION,
    choose_series_styles,
    convert_figure_to_svg,
    draw_heat_map,
    draw_legend_above,
    make_figure,
    replace_none_by_nan,
    style_round_axis,
    use_report_plot_theme,
)
from polyclinic.server.runs.reader import PrototypeSimilarity, RoundFileLine, SiteSummary

CHANCE = 0.5
BAND = 0.76
"""Share of a row's height that markers may use."""
MOST_IN_TABLE = 24
"""Number of sites or classes beyond which the table of annotations alone is hard to read."""
MOST_NUMBERED = 10
"""Number of classes or rounds up to which a heat map has its numbers in the cells."""
MOST_CELLS = 1200
"""Largest number of cells of a heat map; of more rounds only some are drawn."""
MOST_SITES_IN_ORDER = 40
"""Number of sites up to which the figure of their order is drawn."""

_FILLS = {"shared": (BLUE, ""), "some": (SKY, "..."), "unique": (ORANGE, "///"), "varies": (GREEN, "xxx")}
_STYLES = {"training": (BLUE, "-", "o"), "validation": (VERMILION, "--", "s")}


def draw_learning_curves(rounds: Sequence[RoundFileLine], best_round: int | None) -> Markup:
    """Draw training and validation loss by round, and beside them the mean AUROC by round."""
    panels = {
        "loss": {"training": "train_loss", "validation": "validation_loss"},
        "mean AUROC": {"validation": "validation_auroc"},
    }
    measured: dict[str, dict[str, NDArray[np.float64]]] = {}
    for label, fields in panels.items():
        for name, field in fields.items():
            values = replace_none_by_nan([getattr(line, field) for line in rounds])
            if np.isfinite(values).any():
                measured.setdefault(label, {})[name] = values
    if not measured:
        return Markup("")
    with use_report_plot_theme():
        figure, every = make_figure(9, 3.2, columns=len(measured))
        for axes, (label, curves) in zip(every, measured.items(), strict=True):
            for name, values in curves.items():
                _draw_curve(axes, [line.round for line in rounds], values, name, _STYLES[name])
            style_round_axis(axes)
            axes.legend()
            axes.set(xlabel="round", ylabel=label)
            if best_round is not None:
                axes.axvline(best_round, color=INK, linewidth=1, linestyle=":")
        if best_round is not None:
            place, where = (best_round, 1.0), ("data", "axes fraction")
            every[0].annotate(f"best round: {best_round}", place, (0, 4), where, "offset points", ha="center")
        return convert_figure_to_svg(figure, "curves", "Line chart: training and validation loss by round.")


def draw_accuracy_by_round(rounds: Sequence[RoundFileLine], best: BestClientAccuracies) -> Markup:
    """Draw mean and pooled accuracy by round, with a star at the best round of each; empty without accuracies."""
    scored = [(line.round, line.test_accuracy) for line in rounds if line.test_accuracy]
    if not scored:
        return Markup("")
    numbers = [server_round for server_round, _ in scored]
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, 3)
        means = [accuracy.mean for _, accuracy in scored]
        _draw_curve(axes, numbers, means, "mean over sites", (BLUE, "-", "o"))
        pooled = [accuracy.pooled for _, accuracy in scored]
        _draw_curve(axes, numbers, pooled, "all images pooled", (VERMILION, "--", "s"), shift=0.5)
        for best_round, value, color in (
            (best.best_mean_round, best.best_mean_client_test_accuracy, BLUE),
            (best.best_pooled_round, best.best_test_accuracy, VERMILION),
        ):
            axes.plot([best_round], [value], "*", color=color, markersize=14, markeredgecolor=PAPER)
        axes.set(title="Accuracy on the sites' test images", xlabel="round", ylabel="accuracy")
        style_round_axis(axes)
        axes.legend()
        return convert_figure_to_svg(figure, "accuracy", "Line chart: accuracy on the sites' test images by round.")


def _draw_curve(
    axes: Axes,
    rounds: Sequence[int],
    values: Sequence[float] | NDArray[np.float64],
    name: str,
    style: tuple[str, str, str],
    *,
    shift: float = 0,
) -> None:
    """Draw a line in a style (colour, line, marker) with about 15 markers.

    The markers are shifted by a share of their spacing, so that coinciding lines stay visible.
    """
    color, line, marker = style
    every = max(1, len(rounds) // 15)
    places = (int(shift * every), every)
    axes.plot(rounds, values, line, color=color, marker=marker, markersize=4.5, markevery=places, label=name)


def draw_accuracy_density(accuracies: Sequence[float]) -> Markup:
    """Draw the kernel density of the sites' accuracies, with a tick per site; empty if all are equal."""
    curve = estimate_accuracy_density(accuracies, 2001)  # twelve sites within one per cent still give a smooth curve
    if curve is None:
        return Markup("")
    grid, density = curve
    visible = [*accuracies, *grid[density > 0.005 * density.max()].tolist()]
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, 2.6)
        axes.plot(grid, density, color=BLUE, linewidth=2, label="density")
        axes.fill_between(grid, density, color=BLUE, alpha=0.15, linewidth=0)
        ticks = axes.get_xaxis_transform()  # accuracy along x, share of the height along y
        axes.vlines(list(accuracies), 0, 0.1, VERMILION, linewidth=1.8, transform=ticks, label="one site")
        axes.set(title="How accuracy spreads over sites", xlabel="accuracy of a site", ylabel="density")
        axes.set(xlim=(min(visible), max(visible)), ylim=(0, None))
        axes.legend()
        about = f"Density of the accuracies of {len(accuracies)} sites, a tick for each."
        return convert_figure_to_svg(figure, "density", about)


def draw_auroc_bars(
    groups: Sequence[AnnotatedClassGroup],
    aurocs: Mapping[str, ValueWithError | None],
    intervals: Mapping[str, tuple[float, float]],
) -> Markup:
    """Draw the AUROC of each class as a bar from 0.5, with its interval; classes are grouped by annotation."""
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, compute_class_axis_height(groups))
        positions = draw_class_row_labels(axes, groups)
        for group in groups:
            color, hatch = _FILLS[group.kind]
            for name in group.classes:
                row, measured, interval = positions[name], aurocs.get(name), intervals.get(name)
                if measured is None:
                    axes.annotate("n/a", (CHANCE, row), (6, 0), "data", "offset points", va="center", style="italic")
                    continue
                auroc, width = measured.value, measured.value - CHANCE
                axes.barh(row, width, left=CHANCE, height=0.68, color=color, hatch=hatch, edgecolor=PAPER, linewidth=0)
                low, high = interval or (auroc, auroc)
                if interval:
                    axes.plot([low, high], [row, row], color=PAPER, linewidth=4)
                    axes.plot([low, high], [row, row], color=INK, linewidth=1.4, marker="|", markersize=7)
                x, points, side = (high, 4, "left") if auroc >= CHANCE else (low, -4, "right")
                text = figure_text(measured)
                axes.annotate(text, (x, row), (points, 0), "data", "offset points", va="center", ha=side)
        ends = [end for each in intervals.values() for end in each]
        values = [*(auroc.value for auroc in aurocs.values() if auroc is not None), *ends]
        axes.set(xlim=(min([0.45, *(value - 0.06 for value in values)]), 1.0), xlabel="AUROC")
        axes.axvline(CHANCE, color=INK, linewidth=1)
        fills = [(group.title, *_FILLS[group.kind]) for group in groups]
        patches = [Patch(facecolor=c, edgecolor=PAPER, hatch=pattern, label=title) for title, c, pattern in fills]
        draw_legend_above(axes, patches)
        about = "Bar chart: AUROC of every class; the table beside it has the numbers."
        return convert_figure_to_svg(figure, "bars", about)


def compute_class_axis_height(groups: Sequence[AnnotatedClassGroup]) -> float:
    """Return the height in inches of a plot with one row per class."""
    return 1.1 + ROW * (sum(len(group.classes) for group in groups) + 0.7 * len(groups))


def draw_class_row_labels(axes: Axes, groups: Sequence[AnnotatedClassGroup]) -> dict[str, float]:
    """Label one row per class from the top, with a gap between groups; return class -> row."""
    positions: dict[str, float] = {}
    row = 0.0
    for group in groups:
        for name in group.classes:
            positions[name] = row
            row += 1
        row += 0.7
    axes.set_yticks(list(positions.values()), list(positions))
    axes.set_ylim(row - 1.1, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return positions


def draw_site_participation(rounds: Sequence[RoundFileLine], sites: Sequence[str]) -> Markup:
    """Draw sites by round: a dot if the site took part, a cross if it was absent."""
    present = [(line.round, row) for line in rounds for row, site in enumerate(sites) if site in line.sites]
    absent = [(line.round, row) for line in rounds for row, site in enumerate(sites) if site in line.absent]
    area = float(np.clip(3000 / max(1, len(rounds)), 6, 45))
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, 0.9 + ROW * len(sites))
        x, y = np.array(present, float).reshape(-1, 2).T
        axes.scatter(x, y, s=area, color=BLUE, marker="o", linewidths=0, label="took part")
        x, y = np.array(absent, float).reshape(-1, 2).T
        axes.scatter(x, y, s=area * 1.6, color=VERMILION, marker="x", linewidths=1.8, label="absent")
        axes.set_yticks(range(len(sites)), sites)
        axes.set(xlabel="round", ylim=(len(sites) - 0.5, -0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        draw_legend_above(axes, list(axes.collections))
        return convert_figure_to_svg(figure, "participation", "Dot chart: which site took part in which round.")


def draw_label_coverage(sites: Mapping[str, SiteSummary], groups: Sequence[AnnotatedClassGroup]) -> Markup:
    """Draw which sites annotate which classes: a row for each class, with bars over the sites that annotate it.

    Sites are sorted by their annotated classes, so that sites with equal classes are neighbours. The result is empty
    for at most :data:`MOST_IN_TABLE` sites and classes, for which a table is clearer.
    """
    kinds = {name: group.kind for group in groups for name in group.classes}
    names = list(kinds)
    if max(len(sites), len(names)) <= MOST_IN_TABLE:
        return Markup("")
    covered = np.array([[name in record.classes for name in names] for record in sites.values()])  # (sites, classes)
    order = np.lexsort(~covered.T[::-1])
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, 0.9 + 0.24 * len(names))
        for row, name in enumerate(names):
            axes.axhline(row, color=RULE, linewidth=0.6, zorder=0)
            members = np.concatenate([[False], covered[order, row], [False]]).astype(np.int8)
            edges = np.flatnonzero(np.diff(members)).reshape(-1, 2).tolist()
            bars = [(first + 0.5, end - first) for first, end in edges]  # sites count from 1
            axes.broken_barh(bars, (row - 0.38, 0.76), color=_FILLS[kinds[name]][0], linewidth=0)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(0.5, len(sites) + 0.5), ylim=(len(names) - 0.5, -0.5))
        if len(sites) <= MOST_IN_TABLE:
            axes.set_xticks(range(1, len(sites) + 1), [list(sites)[row] for row in order], rotation=90)
        else:
            axes.set_xlabel("number of sites; neighbours annotate alike")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(axis="y", length=0)
        about = f"Bar chart: which of {len(names)} classes {len(sites)} sites annotate."
        return convert_figure_to_svg(figure, "coverage", about)


# ---------------------------------------------------------------------- what only some methods have


def draw_model_pass_order(rounds: Sequence[RoundFileLine], sites: Sequence[str]) -> Markup:
    """Draw the place of each site in every pass of the model, and the slope of the site's loss (UniFed).

    The result is empty for methods that do not pass the model from site to site, and for more than
    :data:`MOST_SITES_IN_ORDER` sites. Slopes are drawn only if the rounds have them.
    """
    sloped = [line for line in rounds if line.learned.slopes]
    in_order = [list(line.sites) for line in rounds] == [sorted(line.sites) for line in rounds]
    if len(sites) > MOST_SITES_IN_ORDER or not rounds or (in_order and not sloped):
        return Markup("")
    numbers, every = [line.round for line in rounds], max(1, len(rounds) // 15)
    with use_report_plot_theme():
        figure, panels = make_figure(9, 1.1 + max(1.9, ROW * len(sites)), columns=2 if sloped else 1)
        for site, style in zip(sites, choose_series_styles(len(sites)), strict=True):
            sequences = [line.sites for line in rounds]
            places = replace_none_by_nan([order.index(site) + 1 if site in order else None for order in sequences])
            slopes = replace_none_by_nan([line.learned.slopes.get(site) for line in rounds])
            for axes, values in zip(panels, (places, slopes), strict=False):
                (curve,) = axes.plot(numbers, values, color=style.color, marker=style.marker, markersize=6, linewidth=2)
                curve.set_markevery(every)
        panels[0].set(title="Place in the pass", xlabel="round", ylim=(len(sites) + 0.5, 0.5))
        panels[0].set_yticks(range(1, len(sites) + 1))
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        ends = {site: (line.round, place) for line in rounds for place, site in enumerate(line.sites, start=1)}
        for site, end in ends.items():
            panels[0].annotate(site, end, (8, 0), "data", "offset points", va="center", annotation_clip=False)
        if sloped:
            panels[1].set(title="Slope of the site's loss, a batch", xlabel="round")
            style_round_axis(panels[1])
        return convert_figure_to_svg(figure, "order", "Line chart: place of every site in each pass, round by round.")


def draw_confident_share_by_round(rounds: Sequence[RoundFileLine]) -> Markup:
    """Draw by class and round the share of unlabelled images with a confident prediction; empty except for FedMLP."""
    learned = [(line.round, line.learned.difficulty) for line in rounds if line.learned.difficulty]
    if not learned:
        return Markup("")
    names = list(learned[-1][1])
    learned = learned[:: -(-len(learned) * len(names) // MOST_CELLS)]
    values = np.array([replace_none_by_nan([difficulty.get(name) for _, difficulty in learned]) for name in names])
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, 1.0 + ROW * len(names))
        draw_heat_map(axes, values, (0.0, 1.0), _format_two_decimals(values) if len(learned) <= MOST_NUMBERED else ())
        ticks = range(0, len(learned), -(-len(learned) // 12))
        axes.set_xticks(list(ticks), [str(learned[place][0]) for place in ticks])
        axes.set_yticks(range(len(names)), names)
        axes.set(title="Share of unlabelled images of which the model is sure", xlabel="round")
        return convert_figure_to_svg(figure, "difficulty", "Heat map: share of sure images by class and round.")


def draw_prototype_similarity(prototypes: PrototypeSimilarity) -> Markup:
    """Draw how similar the prototypes (mean features) of different classes are.

    A heat map shows the cosine similarity of positive prototypes for every pair of classes. A bar chart shows the angle
    between the negative and the positive prototype of each class.
    """
    names, between = prototypes.classes, np.array(prototypes.positives, np.float64)
    others = between[~np.eye(len(names), dtype=bool)]
    # Cosines of these features lie near 1: colours begin at the least similar pair.
    lowest = min(np.nanmin(others) if np.isfinite(others).any() else 0.0, 0.99)
    with use_report_plot_theme():
        figure, (left, right) = make_figure(9, 1.9 + 0.33 * len(names), columns=2)
        texts = _format_two_decimals(between) if len(names) <= MOST_NUMBERED else ()
        draw_heat_map(left, between, (lowest, 1.0), texts)
        left.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 3 else 0)
        left.set_yticks(range(len(names)), names)
        left.set_title("Cosine between positives of two classes")
        degrees = np.degrees(np.arccos(replace_none_by_nan(prototypes.signs)))
        right.barh(range(len(names)), degrees, height=0.68, color=ORANGE, hatch="///", edgecolor=PAPER, linewidth=0)
        for row, angle in enumerate(degrees.tolist()):
            text, style = (NOT_APPLICABLE, "italic") if np.isnan(angle) else (format_number(angle, 1), "normal")
            right.annotate(text, (np.nan_to_num(angle), row), (4, 0), "data", "offset points", va="center", style=style)
        right.axvline(0, color=INK, linewidth=1)
        right.set(ylim=(len(names) - 0.5, -0.5), yticks=[])
        right.margins(x=0.15)
        right.spines["left"].set_visible(False)
        right.set_title("Positives apart from negatives, degrees")
        about = "Heat map and bar chart: how much the classes' prototypes are alike."
        return convert_figure_to_svg(figure, "prototypes", about)


def _format_two_decimals(values: NDArray[np.float64]) -> list[list[str]]:
    return [["–" if np.isnan(value) else f"{value:.2f}" for value in row] for row in values.tolist()]
