"""A study's result as a sentence, as Markdown, and as an HTML page with figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from scipy.stats import t

from polyclinic.common.metrics.multi_class import estimate_accuracy_density
from polyclinic.common.system.plain_text import format_count_with_noun, format_number, format_rounds, format_signed
from polyclinic.server.reporting.page import write_template_page
from polyclinic.server.reporting.svg import (
    PAPER,
    SeriesStyle,
    choose_series_styles,
    convert_figure_to_svg,
    make_figure,
    replace_none_by_nan,
    use_report_plot_theme,
)
from polyclinic.studies import claims
from polyclinic.studies.claims import format_markdown_table, format_mean_and_sd, format_p_value
from polyclinic.studies.comparison import NO_BETTER_ROUND
from polyclinic.studies.comparison_report import TEMPLATES
from polyclinic.studies.statistics import FEWEST_SEEDS
from polyclinic.studies.study_results import AccuracyCurve, OurAndPaperNumber, StudyResult, TableResult

LEVEL = 0.95
LineStyle = Literal["-", "--", "-.", ":"]
Draw = Callable[[Axes, AccuracyCurve, SeriesStyle, LineStyle], None]
LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":")
POINTS = 801
PANELS = 3


def study_as_markdown(result: StudyResult) -> str:
    """Format all tables as Markdown, with our number and the paper's in one cell, and all differences."""
    parts = [
        f"# {result.title}",
        describe_study_result(result),
        f"{result.paper}. Seeds {format_rounds(result.seeds)}; ours (paper's).",
    ]
    parts += [_format_list_as_markdown("What differs in all tables:", result.differs)] if result.differs else []
    parts += [_format_table_as_markdown(table) for table in result.tables]
    return "\n\n".join(parts) + "\n"


def write_study_report(result: StudyResult, destination: Path) -> Path:
    """Write the study as the HTML file ``destination``; return its path."""
    return write_template_page(
        "study.html.j2",
        destination,
        TEMPLATES,
        claims=claims,
        study=result,
        headline=describe_study_result(result),
        figures=[_draw_figures(table, f"t{index}") for index, table in enumerate(result.tables)],
        format_entry=format_study_number,
        run_sizes=describe_run_sizes,
        untrained_sentence=describe_untrained_results,
    )


def describe_study_result(result: StudyResult) -> str:
    """Return a sentence on how many of the paper's numbers lie in the 95 % interval of ours over the seeds."""
    every = [e for table in result.tables for row in table.entries for cells in row for e in cells]
    published = [(entry.paper, entry.ours) for entry in every if entry.paper is not None]
    if not published:
        return "The paper gives no numbers for what was run."
    numbers, seeds = format_count_with_noun(len(published), "published number"), len(result.seeds)
    if seeds < FEWEST_SEEDS:
        few = f"{format_count_with_noun(seeds, 'seed')}, and a verdict needs {FEWEST_SEEDS}"
        return f"Whether the paper’s {numbers} are reproduced is open: this study has {few}."
    sides = list[int | None]()  # of our mean's t-interval: 0 within, 1 above, -1 below, None for unknown
    for paper, ours in published:
        if ours.mean is None or ours.sd is None:
            sides.append(None)
            continue
        half = float(t.ppf((1 + LEVEL) / 2, seeds - 1)) * ours.sd / seeds**0.5
        distance = paper - ours.mean
        sides.append(0 if abs(distance) <= half else 1 if distance > 0 else -1)
    unknown = sides.count(None)
    return (
        f"Of {numbers}, {sides.count(0)} lie in the 95 % interval of ours over "
        f"{format_count_with_noun(seeds, 'seed')}; "
        f"{sides.count(1)} lie above it and {sides.count(-1)} below"
        f"{f'; {unknown} cannot be compared' if unknown else ''}."
    )


def format_study_number(entry: OurAndPaperNumber) -> str:
    """Format our number with its SD: three decimals below 10, otherwise one."""
    mean = entry.ours.mean
    if mean is None or abs(mean) < 10:
        return format_mean_and_sd(entry.ours)
    sd = "" if entry.ours.sd is None else f" ± {entry.ours.sd:,.1f}"
    return f"{mean:,.1f}{sd}"


def describe_run_sizes(table: TableResult) -> list[str]:
    """Describe the size of our runs: one line if it is the same in all settings, otherwise a line for each setting."""
    if len(set(table.scale)) == 1:
        return [table.scale[0]]
    return [f"{setting}: {scale}" for setting, scale in zip(table.settings, table.scale, strict=True)]


def describe_untrained_results(table: TableResult) -> str:
    """Return a sentence on the results that are of the untrained initial model; empty if there are none."""
    if not table.untrained:
        return ""
    named = [method + (f", {setting}" if setting else "") for method, setting, _ in table.untrained]
    runs = format_count_with_noun(sum(count for *_, count in table.untrained), "run")
    return f"In {runs} {NO_BETTER_ROUND}, and the initial model is tested: {'; '.join(named)}."


def _format_table_as_markdown(table: TableResult) -> str:
    names, rows = ["setting", "method"] if any(table.settings) else ["method"], []
    for index, setting in enumerate(table.settings):
        for method, row in zip(table.methods, table.entries, strict=True):
            cells = [
                format_study_number(e) + ("" if e.paper is None else f" ({format_number(e.paper)})") for e in row[index]
            ]
            rows.append([*[setting, method][-len(names) :], *cells])
    below = [_format_list_as_markdown("Here:", describe_run_sizes(table))]
    below += [sentence] if (sentence := describe_untrained_results(table)) else []
    below += [_format_list_as_markdown("What differs:", table.differs)] if table.differs else []
    tests = []
    for comparison in table.tests:
        test, pairs = comparison.result, "classes" if comparison.setting else "settings"
        difference = f"{format_signed(test.mean_difference)}, {format_p_value(test.holm_p)} after Holm's correction"
        figures = f"not tested: {test.reason}" if test.holm_p is None else f"{difference}, {test.pairs} {pairs}"
        tests.append(f"{comparison.other}{f' ({comparison.setting})' if comparison.setting else ''}: {figures}")
    below += [_format_list_as_markdown(f"{table.reference} against:", tests)] if tests else []
    return "\n\n".join(
        [f"## {table.title}", format_markdown_table([*names, *table.headings], rows, len(names)), *below]
    )


def _format_list_as_markdown(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, "", *(f"- {line}" for line in lines)])


# ---------------------------------------------------------------------- figures


def _draw_figures(table: TableResult, name: str) -> Mapping[str, Markup]:
    """Draw the figures of a table for which the runs have data; return heading -> figure."""
    drawn: dict[str, Markup] = {}
    if "sweep" in table.figures and len(table.settings) > 1:
        drawn["Along the sweep"] = draw_measures_by_setting(table, f"{name}-sweep")

    def draw_accuracy(axes: Axes, curves: AccuracyCurve, style: SeriesStyle, line: LineStyle) -> None:
        (curve,) = axes.plot(curves.rounds, curves.accuracy, line, color=style.color, marker=style.marker, markersize=5)
        curve.set_markevery(max(1, len(curves.rounds) // 12))
        axes.set(xlabel="round", ylabel="mean accuracy of the sites")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")

    def draw_density(axes: Axes, curves: AccuracyCurve, style: SeriesStyle, line: LineStyle) -> None:
        marker, edge = style.marker, PAPER
        x, y = densities[curves.method, curves.setting]
        axes.plot(x, y, line, color=style.color, marker=marker, markevery=80, markersize=5, markeredgecolor=edge)
        axes.set(xlabel="accuracy of a site", ylabel="density")

    if "curves" in table.figures and (curves := [each for each in table.curves if each.rounds]):
        about = "Line chart: mean accuracy of the sites by round."
        drawn["Round by round"] = _draw_panels(curves, f"{name}-curves", about, draw_accuracy)
    densities = {}
    for each in table.curves if "density" in table.figures else ():
        if (density := estimate_accuracy_density(each.sites, POINTS)) is not None:
            densities[each.method, each.setting] = density
    if densities:
        about = "Density of the accuracies of the sites, by method."
        spread_out = [each for each in table.curves if (each.method, each.setting) in densities]
        drawn["From site to site"] = _draw_panels(spread_out, f"{name}-density", about, draw_density)
    return drawn


def draw_measures_by_setting(table: TableResult, name: str) -> Markup:
    """Draw the measures along the settings, with a line for each method; hollow markers are the paper's numbers."""
    headings, positions = table.headings[:PANELS], replace_none_by_nan(table.positions)
    with use_report_plot_theme():
        figure, panels = _make_axes_row(len(table.methods), len(headings))
        for measure, axes in enumerate(panels):
            for index, style in enumerate(choose_series_styles(len(table.methods))):
                entries, color = [cells[measure] for cells in table.entries[index]], style.color
                sd = np.nan_to_num(replace_none_by_nan([entry.ours.sd for entry in entries]))
                means, line = replace_none_by_nan([entry.ours.mean for entry in entries]), LINES[index % len(LINES)]
                axes.plot(positions, means, line, color=color, marker=style.marker, markersize=6)
                axes.errorbar(positions, means, yerr=sd, color=color, linestyle="none", capsize=3)
                paper = replace_none_by_nan([entry.paper for entry in entries])
                axes.plot(positions, paper, style.marker, color=color, markerfacecolor="none", markersize=7)
            axes.set(title=headings[measure])
            axes.set_xticks(positions, [f"{position:g}" for position in positions])
            axes.grid(axis="y")
        _draw_legend_above(figure, table.methods)
        return convert_figure_to_svg(
            figure, name, f"Line charts: {', '.join(headings)} of every method along the settings."
        )


def _draw_panels(drawn: Sequence[AccuracyCurve], name: str, description: str, draw: Draw) -> Markup:
    """Draw a panel for each setting, with a line for each method."""
    settings = list(dict.fromkeys(each.setting for each in drawn))
    methods = list(dict.fromkeys(each.method for each in drawn))
    with use_report_plot_theme():
        figure, panels = _make_axes_row(len(methods), len(settings))
        for axes, setting in zip(panels, settings, strict=True):
            for index, style in enumerate(choose_series_styles(len(methods))):
                for each in (each for each in drawn if (each.method, each.setting) == (methods[index], setting)):
                    draw(axes, each, style, LINES[index % len(LINES)])
            axes.set(title=setting)
        _draw_legend_above(figure, methods)
        return convert_figure_to_svg(figure, name, description)


def _make_axes_row(methods: int, columns: int) -> tuple[Figure, list[Axes]]:
    """Make axes side by side, with space above for a legend of four methods a line."""
    return make_figure(9, 3.2 + 0.25 * ((methods + 3) // 4), columns=columns)


def _draw_legend_above(figure: Figure, methods: Sequence[str]) -> None:
    handles = [
        Line2D([], [], color=style.color, marker=style.marker, linestyle=LINES[index % len(LINES)], label=method)
        for index, (method, style) in enumerate(zip(methods, choose_series_styles(len(methods)), strict=True))
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(4, len(handles)))
