"""Write a comparison of runs as an HTML page with figures, and as tables for the terminal and for Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup
from rich.console import Group

from polyclinic.common.reporting.figure import ROW_HEIGHT, draw_figure, make_line_entry, make_marker_entry
from polyclinic.common.reporting.fitted_table import FittedTable
from polyclinic.common.reporting.plot import Axis, Plot
from polyclinic.common.reporting.svg import DOTTED, LINE_COLOR, SeriesStyle, choose_series_styles
from polyclinic.common.system.plain_text import format_number, format_signed
from polyclinic.server.reporting.page import AnnotatedClassGroup, write_template_page
from polyclinic.server.reporting.run_figures import CHANCE_AUROC, MARKER_BAND, label_class_rows, measure_class_rows
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.studies import claims
from polyclinic.studies.claims import MEASURE_NAMES, format_markdown_table, format_mean_and_sd, format_p_value
from polyclinic.studies.comparison import (
    SUBSETS,
    MeanAndSd,
    MethodComparison,
    MethodContrast,
    MethodResult,
    SiteGain,
    Subset,
)

TEMPLATES = Path(__file__).parent / "templates"
MAX_GAIN_ROWS = 60
MAX_NAMED_SITES = 24
"""If there are more sites, the figure of gains shows ranks instead of names."""
NEAR_CHANCE = 0.7
"""The AUROC axis begins at 0.5 only if a value is below this one, so that the markers do not crowd."""
LANE_HEIGHT = 0.5
"""Height of the lane of a method, as a fraction of a row."""
OWN_METRICS_TITLE = "Metrics of your own"
TESTED_SUBSETS: tuple[Subset, ...] = ("all", "unique")


def write_comparison_report(
    comparison: MethodComparison, destination: Path, runs: Sequence[RunFolderContent] = ()
) -> Path:
    """Write the comparison as the HTML file ``destination``; return its path.

    Args:
        runs: The compared runs; the page links to their reports that are below its folder.
    """
    groups = [AnnotatedClassGroup(kind, classes) for kind, classes in comparison.class_groups.items()]
    deciding = [each for each in comparison.contrasts if each.pairing == "classes"]
    pages = {(run.summary.table_label, run.summary.seed): run.folder / "report.html" for run in runs}
    folder, elsewhere = destination.parent, comparison.external
    by_site: dict[str, list[SiteGain]] = {}  # site -> its gain over every other method in turn
    for gain in comparison.site_gains:
        by_site.setdefault(gain.site, []).append(gain)
    return write_template_page(
        "comparison.html.j2",
        destination,
        TEMPLATES,
        claims=claims,
        comparison=comparison,
        own_metrics_title=_name_own_metrics(comparison),
        reports={
            key: quote(page.relative_to(folder).as_posix())
            for key, page in pages.items()
            if page.is_relative_to(folder)
        },
        groups=groups,
        headline=claims.describe_headline_result(comparison),
        sentences=claims.describe_method_verdicts(comparison) + claims.describe_large_differences(comparison),
        best=find_best_class_aurocs(comparison),
        deciding=deciding,
        subsets_shown=[
            subset for subset in SUBSETS if any(each.auroc[subset].mean is not None for each in comparison.methods)
        ],
        what_p_tests=claims.describe_what_p_tests(comparison),
        by_seed=[each for each in comparison.contrasts if each.pairing == "classes x seeds"],
        by_method=draw_auroc_by_method(comparison.methods, groups),
        differences=draw_method_differences(deciding) if deciding else "",
        gain_rows=list(by_site.items())[:MAX_GAIN_ROWS],
        gain_sentences=claims.describe_site_gains(comparison),
        gains=draw_gains_by_site(comparison),
        subsets=draw_auroc_by_subset(comparison.methods),
        elsewhere=elsewhere
        and {
            "comparison": elsewhere,
            "headline": claims.describe_headline_result(elsewhere),
            "deciding": [each for each in elsewhere.contrasts if each.pairing == "classes"],
            "best": find_best_class_aurocs(elsewhere),
        },
    )


def find_best_class_aurocs(comparison: MethodComparison) -> dict[str, str]:
    """Return class -> best AUROC to three decimals, so that all methods equal when printed are marked as best."""
    best = {}
    names = [name for group in comparison.class_groups.values() for name in group]
    for name in names:
        aurocs = [auroc for method in comparison.methods if (auroc := method.per_class.get(name)) is not None]
        if len(aurocs) > 1:
            best[name] = f"{max(aurocs):.3f}"
    return best


# ---------------------------------------------------------------------- figures


def draw_auroc_by_method(methods: Sequence[MethodResult], groups: Sequence[AnnotatedClassGroup]) -> Markup:
    """Draw the AUROC of each class (mean over seeds): a marker for each method, with its interval if known."""
    plot = Plot(Axis("AUROC (mean over seeds)"))
    positions = label_class_rows(plot, groups)
    styles = choose_series_styles(len(methods))
    for lane, (method, style) in enumerate(zip(methods, styles, strict=True)):
        beside = MARKER_BAND * ((lane + 0.5) / len(methods) - 0.5)
        rows = {name: row + beside for name, row in positions.items()}
        for name, (low, high) in method.intervals.items():
            if name in rows:
                plot.add_interval(low, high, rows[name], style.color, 1.4)
        dots = [(auroc, rows[name]) for name, auroc in method.per_class.items() if auroc is not None]
        plot.add_markers([auroc for auroc, _ in dots], [row for _, row in dots], style.marker, style.color, 7)
    for name, row in positions.items():
        if all(method.per_class.get(name) is None for method in methods):
            plot.add_text("n/a", None, row, shift=(6, 0), italic=True)

    ends = [end for method in methods for interval in method.intervals.values() for end in interval]
    values = [value for method in methods for value in method.per_class.values() if value is not None]
    if min([*values, *ends], default=CHANCE_AUROC) < NEAR_CHANCE:
        plot.add_vertical_rule(CHANCE_AUROC, dash=DOTTED)
    height = measure_class_rows(groups) * max(1.0, LANE_HEIGHT * len(methods))
    legend = [make_marker_entry(method.label, style) for method, style in zip(methods, styles, strict=True)]
    about = "Dot chart: AUROC of every class by method; the table has the numbers."
    return draw_figure([plot], "methods", about, height=height, legend=legend)


def draw_method_differences(contrasts: Sequence[MethodContrast]) -> Markup:
    """Draw the mean differences between the reference and each other method, by class subset, with intervals."""
    others = list(dict.fromkeys(each.other for each in contrasts))
    subsets = list(dict.fromkeys(each.subset for each in contrasts))
    styled = list(zip(subsets, choose_series_styles(len(subsets)), strict=True))
    plot = Plot(Axis("← reference scores lower   ·   difference in AUROC   ·   reference scores higher →"))
    plot.y.label_rows([f"against {other}" for other in others])
    for offset, (subset, style) in enumerate(styled):
        for each in contrasts:
            mean = each.result.mean_difference
            if each.subset != subset or mean is None:
                continue
            row = others.index(each.other) + 0.24 * (offset - 1)
            low, high = each.result.interval or (mean, mean)
            _add_marker_with_interval(plot, style, mean, row, (low, high))
            plot.add_text(format_signed(mean), high, row, shift=(7, 0), size=8.5)
    plot.add_vertical_rule(0)
    legend = [make_marker_entry(f"{subset} classes", style) for subset, style in styled]
    about = "Interval chart: mean differences with 95 % intervals."
    return draw_figure([plot], "differences", about, height=2.3 * ROW_HEIGHT * len(others), legend=legend)


def draw_auroc_by_subset(methods: Sequence[MethodResult]) -> Markup:
    """Draw each method's mean AUROC ± SD over seeds, for all, shared and unique classes."""
    styled = list(zip(methods, choose_series_styles(len(methods)), strict=True))
    plot = Plot(Axis("mean AUROC"))
    _label_divided_rows(plot, [f"{subset} classes" for subset in SUBSETS])
    for index, (method, style) in enumerate(styled):
        shift = 0.7 * (index - (len(styled) - 1) / 2) / len(styled)
        for row, subset in enumerate(SUBSETS):
            auroc = method.auroc[subset]
            if auroc.mean is not None:
                interval = _compute_sd_interval(auroc.mean, auroc.sd)
                _add_marker_with_interval(plot, style, auroc.mean, row + shift, interval, size=8)
    legend = [make_marker_entry(method.label, style) for method, style in styled]
    height = 30 + 15.0 * len(methods) * len(SUBSETS)
    about = "Dot chart: mean AUROC over all, shared and unique classes by method."
    return draw_figure([plot], "subsets", about, height=height, legend=legend)


def draw_gains_by_site(comparison: MethodComparison) -> Markup:
    """Draw the gain of each site over each other method, sorted if there are many sites; empty without gains."""
    by_other: dict[str, list[tuple[str, float, float | None]]] = {}
    for gain in comparison.site_gains:
        if gain.gain is not None:
            by_other.setdefault(gain.other, []).append((gain.site, gain.gain, gain.sd))
    if not by_other:
        return Markup("")
    sites = list(dict.fromkeys(gain.site for gain in comparison.site_gains))
    # Each method has the same style in all figures of the report.
    styles = dict(
        zip([m.label for m in comparison.methods], choose_series_styles(len(comparison.methods)), strict=True)
    )
    about = "Dot chart: what each site gains over each other method."
    if len(sites) > MAX_NAMED_SITES:
        plot = _plot_sorted_gains(by_other, styles)
        legend = [make_line_entry(f"over {other}", styles[other].color, styles[other].marker) for other in by_other]
        return draw_figure([plot], "gains", about, height=165, legend=legend)

    plot = Plot(Axis("← the site loses   ·   gain in AUROC   ·   the site gains →"))
    _label_divided_rows(plot, sites)
    for index, (other, gains) in enumerate(by_other.items()):
        shift = 0.5 * (index - (len(by_other) - 1) / 2) / max(1, len(by_other))
        for site, value, sd in gains:
            interval = _compute_sd_interval(value, sd)
            _add_marker_with_interval(plot, styles[other], value, sites.index(site) + shift, interval)
    plot.add_vertical_rule(0)
    legend = [make_marker_entry(f"over {other}", styles[other]) for other in by_other]
    return draw_figure([plot], "gains", about, height=22.0 * len(sites), legend=legend)


def _plot_sorted_gains(
    by_other: Mapping[str, Sequence[tuple[str, float, float | None]]], styles: Mapping[str, SeriesStyle]
) -> Plot:
    """Plot the gains over each other method as a line from the largest loss to the largest gain."""
    x_axis = Axis("sites, from the largest loss to the largest gain", whole_numbers=True)
    plot = Plot(x_axis, Axis("gain in AUROC", grid=True))
    for other, gains in by_other.items():
        style = styles[other]
        values = sorted(gain for _, gain, _ in gains)
        ranks, step = list(range(1, len(values) + 1)), max(1, len(values) // 20)
        plot.add_line(ranks, values, style.color)
        plot.add_markers(ranks[::step], values[::step], style.marker, style.color, 6)
    plot.add_horizontal_rule(0)
    return plot


def _compute_sd_interval(value: float, sd: float | None) -> tuple[float, float] | None:
    return None if sd is None else (value - sd, value + sd)


def _add_marker_with_interval(
    plot: Plot, style: SeriesStyle, value: float, row: float, ends: tuple[float, float] | None, *, size: int = 7
) -> None:
    """Add a marker, and its interval as a line if there is one."""
    if ends is not None:
        plot.add_interval(*ends, row, style.color, 2)
    plot.add_markers([value], [row], style.marker, style.color, size)


def _label_divided_rows(plot: Plot, names: Sequence[str]) -> None:
    """Label the rows of a figure from the top down, with thin lines between them."""
    plot.y.label_rows(names)
    for row in range(len(names) - 1):
        plot.add_horizontal_rule(row + 0.5, LINE_COLOR, width=0.6)


# ---------------------------------------------------------------------- tables


def make_comparison_tables(comparison: MethodComparison) -> list[FittedTable]:
    """Return the tables of a comparison, then those of the external test set.

    The tables: all methods, classes, tests, multi-class metrics, the user's metrics. Columns without a number are left
    out. A test with too few seeds has no p-value.
    """
    spread = any(len(method.seeds) > 1 for method in comparison.methods)
    over = "mean ± SD over seeds" if spread else "one seed"
    headings = ["method", *(f"AUROC, {subset}" for subset in SUBSETS), "average precision", "balanced accuracy"]
    rows = []
    for method in comparison.methods:
        means = [*(method.auroc[subset] for subset in SUBSETS), method.average_precision, method.balanced_accuracy]
        rows.append((method.label, *map(format_mean_and_sd, means)))
    tables = [FittedTable(f"All methods, {over}", tuple(headings), tuple(rows))]
    tables.append(_make_class_table(comparison, "mean over seeds" if spread else "one seed"))
    tables += _make_test_tables(comparison)
    undefined = MeanAndSd(None, None)
    if measures := comparison.available_metrics:
        rows = [
            (method.label, *(format_mean_and_sd(method.measures.get(measure, undefined)) for measure in measures))
            for method in comparison.methods
        ]
        headings = ["method", *(MEASURE_NAMES[measure] for measure in measures)]
        tables.append(FittedTable(f"One class an image, {over}", tuple(headings), tuple(rows)))
    if own_metrics := comparison.own_metrics:
        rows = [
            (method.label, *(format_mean_and_sd(method.more.get(name, undefined)) for name in own_metrics))
            for method in comparison.methods
        ]
        tables.append(
            FittedTable(f"{_name_own_metrics(comparison)}, {over}", ("method", *own_metrics.values()), tuple(rows))
        )
    for table in make_comparison_tables(comparison.external) if comparison.external else ():
        tables.append(replace(table, title=f"External test set: {table.title[0].lower()}{table.title[1:]}"))
    return [_name_figure_of_table(table.drop_empty_columns(), comparison) for table in tables]


def _name_own_metrics(comparison: MethodComparison) -> str:
    """Return the title of the table of further metrics; for segmentations these are distances."""
    return OWN_METRICS_TITLE if comparison.figure == "AUROC" else "95 % Hausdorff distance"


def _name_figure_of_table(table: FittedTable, comparison: MethodComparison) -> FittedTable:
    name = comparison.name_figure
    headings = tuple(map(name, table.headings))
    return replace(table, title=name(table.title), headings=headings, caption=name(table.caption))


def _make_class_table(comparison: MethodComparison, over: str) -> FittedTable:
    """Return the AUROC of each class with each method."""
    names = [name for group in comparison.class_groups.values() for name in group]
    rows = [(name, *(format_number(method.per_class.get(name)) for method in comparison.methods)) for name in names]
    headings = ("class", *(method.label for method in comparison.methods))
    return FittedTable(f"By class: AUROC, {over}", headings, tuple(rows))


def _make_test_tables(comparison: MethodComparison) -> list[FittedTable]:
    """Return a table for each tested subset of classes: the reference minus each other method."""
    tables = []
    others = [method.label for method in comparison.methods if method.label != comparison.reference]
    for subset in TESTED_SUBSETS:
        rows = []
        for other in others:
            test = comparison.find_method_contrast(other, subset).result
            if test.mean_difference is None:
                continue
            p = format_p_value(claims.get_reported_p(test)).removeprefix("p = ").removeprefix("p ")
            interval = claims.format_difference_interval(test)
            cells = (format_signed(test.mean_difference), interval, p, str(test.pairs), claims.judge_test_outcome(test))
            rows.append((other, *cells))
        if rows:
            headings = ("against", "difference", "95 % interval", "p", "compared classes", "reference is")
            title = f"{comparison.reference} minus each other method: AUROC, {subset} classes"
            tables.append(FittedTable(title, headings, tuple(rows)))
    if tables:
        has_interval = any(each.result.interval for each in comparison.contrasts if each.pairing == "classes")
        about_intervals = (
            "95 % interval: bootstrap over the classes, too narrow if these are few. " if has_interval else ""
        )
        caption = f"{about_intervals}{claims.describe_what_p_tests(comparison)}"
        tables[-1] = replace(tables[-1], caption=caption)
    return tables


def format_comparison_tables(comparison: MethodComparison) -> Group:
    """Format the tables of :func:`make_comparison_tables` for the terminal."""
    return Group(*make_comparison_tables(comparison))


def comparison_as_markdown(comparison: MethodComparison) -> str:
    """Format the tables of :func:`make_comparison_tables` as Markdown."""
    texts = []
    for table in make_comparison_tables(comparison):
        caption = f"\n\n{table.caption}" if table.caption else ""
        texts.append(f"### {table.title}\n\n{format_markdown_table(table.headings, table.rows)}{caption}\n")
    return "\n".join(texts)
