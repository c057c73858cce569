"""Write the result of a study as a sentence, as Markdown, and as an HTML page with figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from scipy.stats import t

from polyclinic.common.metrics.multi_class import estimate_accuracy_density
from polyclinic.common.reporting.figure import LegendEntry, draw_figure, make_line_entry
from polyclinic.common.reporting.plot import Axis, Plot, replace_none_by_nan
from polyclinic.common.reporting.svg import DASH_DOTTED, DASHED, DOTTED, SOLID, SeriesStyle, choose_series_styles
from polyclinic.common.system.plain_text import format_count_with_noun, format_number, format_rounds, format_signed
from polyclinic.server.reporting.page import write_template_page
from polyclinic.server.reporting.run_figures import make_round_axis
from polyclinic.studies import claims
from polyclinic.studies.claims import format_markdown_table, format_mean_and_sd, format_p_value
from polyclinic.studies.comparison import NO_BETTER_ROUND_SENTENCE
from polyclinic.studies.comparison_report import TEMPLATES
from polyclinic.studies.statistics import MIN_SEEDS
from polyclinic.studies.study_results import AccuracyCurve, OurAndPaperNumber, StudyResult, TableResult

CONFIDENCE_LEVEL = 0.95
AddCurve = Callable[[Plot, AccuracyCurve, SeriesStyle, str], None]
"""Adds a curve to a plot in a style and a dash pattern."""
DASH_PATTERNS = (SOLID, DASHED, DASH_DOTTED, DOTTED)
DENSITY_POINTS = 801
MAX_PANELS = 3
PLOT_HEIGHT = 175.0
"""Height of a plot within its axes in points."""


def study_as_markdown(result: StudyResult) -> str:
    """Format all tables as Markdown, with our number and the paper's in one cell, and what differs."""
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
    """Return a sentence on how many numbers of the paper lie in the 95 % interval of ours over the seeds."""
    every = [e for table in result.tables for row in table.entries for cells in row for e in cells]
    published = [(entry.paper, entry.ours) for entry in every if entry.paper is not None]
    if not published:
        return "The paper gives no numbers for what was run."
    numbers, seeds = format_count_with_noun(len(published), "published number"), len(result.seeds)
    if seeds < MIN_SEEDS:
        few = f"{format_count_with_noun(seeds, 'seed')}, and a verdict needs {MIN_SEEDS}"
        return f"Whether the paper’s {numbers} are reproduced is open: this study has {few}."
    sides = list[int | None]()  # of our mean's t-interval: 0 within, 1 above, -1 below, None for unknown
    for paper, ours in published:
        if ours.mean is None or ours.sd is None:
            sides.append(None)
            continue
        half = float(t.ppf((1 + CONFIDENCE_LEVEL) / 2, seeds - 1)) * ours.sd / seeds**0.5
        distance = paper - ours.mean
        if abs(distance) <= half:
            sides.append(0)
        else:
            sides.append(1 if distance > 0 else -1)
    unknown = f"; {sides.count(None)} cannot be compared" if None in sides else ""
    return (
        f"Of {numbers}, {sides.count(0)} lie in the 95 % interval of ours over "
        f"{format_count_with_noun(seeds, 'seed')}; "
        f"{sides.count(1)} lie above it and {sides.count(-1)} below{unknown}."
    )


def format_study_number(entry: OurAndPaperNumber) -> str:
    """Format our number with its SD: three decimals below 10, otherwise one."""
    mean = entry.ours.mean
    if mean is None or abs(mean) < 10:
        return format_mean_and_sd(entry.ours)
    sd = "" if entry.ours.sd is None else f" ± {entry.ours.sd:,.1f}"
    return f"{mean:,.1f}{sd}"


def describe_run_sizes(table: TableResult) -> list[str]:
    """Describe the size of our runs: in one line if all settings have the same, otherwise in a line for each."""
    if len(set(table.scale)) == 1:
        return [table.scale[0]]
    return [f"{setting}: {scale}" for setting, scale in zip(table.settings, table.scale, strict=True)]


def describe_untrained_results(table: TableResult) -> str:
    """Return a sentence on the results of the untrained initial model; empty if there are none."""
    if not table.untrained:
        return ""
    named = [method + (f", {setting}" if setting else "") for method, setting, _ in table.untrained]
    runs = format_count_with_noun(sum(count for *_, count in table.untrained), "run")
    return f"In {runs} {NO_BETTER_ROUND_SENTENCE}, and the initial model is tested: {'; '.join(named)}."


def _format_table_as_markdown(table: TableResult) -> str:
    names, rows = ["setting", "method"] if any(table.settings) else ["method"], []
    for index, setting in enumerate(table.settings):
        for method, row in zip(table.methods, table.entries, strict=True):
            cells = [
                format_study_number(e) + ("" if e.paper is None else f" ({format_number(e.paper)})") for e in row[index]
            ]
            rows.append([*[setting, method][-len(names) :], *cells])
    below = [_format_list_as_markdown("Here:", describe_run_sizes(table))]
    untrained = describe_untrained_results(table)
    below += [untrained] if untrained else []
    below += [_format_list_as_markdown("What differs:", table.differs)] if table.differs else []
    tests = []
    for comparison in table.tests:
        test = comparison.result
        pairs = "classes" if comparison.setting else "settings"
        difference = f"{format_signed(test.mean_difference)}, {format_p_value(test.holm_p)} after Holm's correction"
        figures = f"not tested: {test.reason}" if test.holm_p is None else f"{difference}, {test.pairs} {pairs}"
        setting = f" ({comparison.setting})" if comparison.setting else ""
        tests.append(f"{comparison.other}{setting}: {figures}")
    below += [_format_list_as_markdown(f"{table.reference} against:", tests)] if tests else []
    return "\n\n".join(
        [f"## {table.title}", format_markdown_table([*names, *table.headings], rows, len(names)), *below]
    )


def _format_list_as_markdown(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, "", *(f"- {line}" for line in lines)])


# ---------------------------------------------------------------------- figures


def _draw_figures(table: TableResult, name: str) -> Mapping[str, Markup]:
    """Draw those figures of a table for which the runs have data; return heading -> figure."""
    drawn: dict[str, Markup] = {}
    if "sweep" in table.figures and len(table.settings) > 1:
        drawn["Along the sweep"] = draw_measures_by_setting(table, f"{name}-sweep")

    def add_accuracy(plot: Plot, curves: AccuracyCurve, style: SeriesStyle, dash: str) -> None:
        step = max(1, len(curves.rounds) // 12)
        plot.add_line(curves.rounds, curves.accuracy, style.color, dash=dash)
        plot.add_markers(curves.rounds[::step], curves.accuracy[::step], style.marker, style.color, 6)

    def add_density(plot: Plot, curves: AccuracyCurve, style: SeriesStyle, dash: str) -> None:
        x, y = densities[curves.method, curves.setting]
        plot.add_line(x, y, style.color, dash=dash)
        plot.add_markers(x[::80], y[::80], style.marker, style.color, 6)

    if "curves" in table.figures and (curves := [each for each in table.curves if each.rounds]):
        about = "Line chart: mean accuracy of the sites by round."
        y_axis = Axis("mean accuracy of the sites", grid=True)
        drawn["Round by round"] = _draw_panels(
            curves, f"{name}-curves", about, add_accuracy, (make_round_axis(), y_axis)
        )
    densities = {}
    for each in table.curves if "density" in table.figures else ():
        if (density := estimate_accuracy_density(each.sites, DENSITY_POINTS)) is not None:
            densities[each.method, each.setting] = density
    if densities:
        about = "Density of the accuracies of the sites, by method."
        spread_out = [each for each in table.curves if (each.method, each.setting) in densities]
        axes = Axis("accuracy of a site"), Axis("density")
        drawn["From site to site"] = _draw_panels(spread_out, f"{name}-density", about, add_density, axes)
    return drawn


def draw_measures_by_setting(table: TableResult, name: str) -> Markup:
    """Draw the measures by setting, with a line for each method; hollow markers are the paper's numbers."""
    headings, positions = table.headings[:MAX_PANELS], replace_none_by_nan(table.positions)
    ticks = [(float(position), f"{position:g}") for position in positions if np.isfinite(position)]
    plots = [Plot(Axis(ticks=ticks), Axis(grid=True), heading) for heading in headings]
    for measure, plot in enumerate(plots):
        for index, style in enumerate(choose_series_styles(len(table.methods))):
            entries, color = [cells[measure] for cells in table.entries[index]], style.color
            means = replace_none_by_nan([entry.ours.mean for entry in entries])
            plot.add_line(positions, means, color, dash=_choose_dash(index))
            for entry, position in zip(entries, positions.tolist(), strict=True):
                if entry.ours.mean is not None and entry.ours.sd:
                    ends = [entry.ours.mean - entry.ours.sd, entry.ours.mean + entry.ours.sd]
                    plot.add_line([position, position], ends, color)
            plot.add_markers(positions, means, style.marker, color, 7)
            paper = replace_none_by_nan([entry.paper for entry in entries])
            plot.add_markers(positions, paper, style.marker, color, 8, hollow=True)
    about = f"Line charts: {', '.join(headings)} of every method along the settings."
    return draw_figure(plots, name, about, height=PLOT_HEIGHT, legend=_make_legend(table.methods))


def _draw_panels(
    drawn: Sequence[AccuracyCurve], name: str, description: str, add_curve: AddCurve, axes: tuple[Axis, Axis]
) -> Markup:
    """Draw a panel for each setting, with a line for each method."""
    settings = list(dict.fromkeys(each.setting for each in drawn))
    methods = list(dict.fromkeys(each.method for each in drawn))
    plots = [Plot(*axes, title=setting) for setting in settings]
    for plot, setting in zip(plots, settings, strict=True):
        for index, style in enumerate(choose_series_styles(len(methods))):
            for each in drawn:
                if each.method == methods[index] and each.setting == setting:
                    add_curve(plot, each, style, _choose_dash(index))
    return draw_figure(plots, name, description, height=PLOT_HEIGHT, legend=_make_legend(methods))


def _choose_dash(index: int) -> str:
    return DASH_PATTERNS[index % len(DASH_PATTERNS)]


def _make_legend(methods: Sequence[str]) -> list[LegendEntry]:
    styles = choose_series_styles(len(methods))
    return [
        make_line_entry(method, style.color, style.marker, _choose_dash(index))
        for index, (method, style) in enumerate(zip(methods, styles, strict=True))
    ]
