"""Tables for the terminal and for a README."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from common.errors import BadInput
from common.metrics.measured import Measured
from common.system.files import is_file
from server.analysis.comparison import SUBSETS, Comparison, MethodResult, Spread, Subset
from server.reporting.coverage import class_groups, owners
from server.reporting.run_claims import limits, run_result
from server.reporting.wording import MEASURE_NAMES, figure, probability, signed, spread
from server.runs.reader import Run, RunSummary, read_run

SITES_MARKED = 12  # more sites than this would not fit; they are counted instead
BEST = "★"
TESTED: tuple[Subset, ...] = ("all", "unique")


def coverage_table(summaries: Mapping[str, RunSummary]) -> Table:
    """Which site annotates which class, and how well each method does on it.

    Args:
        summaries: By label; sites and groups of classes are those of the first.
    """
    first = next(iter(summaries.values()))
    table = Table(title="AUROC by class", title_justify="left", caption_justify="left")
    table.caption = "● annotates the class" + (f"   {BEST} highest in its row" if len(summaries) > 1 else "")
    table.add_column("class")
    for heading in _site_headings(first):
        table.add_column(Text(heading), justify="center")
    for label in summaries:
        table.add_column(Text(label), justify="right", no_wrap=True)
    for group in class_groups(first):
        table.add_row(Text(group.title, style="italic dim"))
        for name in group.classes:
            aurocs = [_auroc(summary, name) for summary in summaries.values()]
            table.add_row(Text(f"  {name}"), *_marks(first, name), *_best_marked(aurocs))
        table.add_section()
    table.add_row(Text("mean", style="bold"), *_blank(first), *_best_marked(_means(list(summaries.values()))))
    return table


def result_of(run: Run) -> Group:
    """What the terminal shows at the end of a run: the table by class, the result, and what limits it."""
    summary = run.summary
    table = coverage_table({summary.label: summary})
    return Group(table, Text(run_result(run)), *_prominent(run))


def limits_of_model(folder: Path) -> Group:
    """What limits a run's model, for who uses it on images; nothing for a model without its run.

    Args:
        folder: Of a run, or with a model alone.
    """
    if not is_file(folder / "summary.json"):
        return Group()
    with suppress(BadInput):  # of another version, or edited: the model alone is enough
        return Group(*_prominent(read_run(folder)))
    return Group()


def _prominent(run: Run) -> list[Text]:
    return [Text(f"! {limit.text}", style="yellow") for limit in limits(run) if limit.prominent]


def comparison_table(comparison: Comparison, title: str = "AUROC") -> Group:
    """AUROC of each method over its seeds, and where the reference stands; below, what else a run has."""
    rows = [
        [method.label, *(spread(method.auroc[subset]) for subset in SUBSETS), *_contrasts(comparison, index)]
        for index, method in enumerate(comparison.methods)
    ]
    tables: list[Table | Group] = [_table(title, ["method", *SUBSETS, *_against(comparison)], rows)]
    if measures := _measures(comparison):
        rows = [[method.label, *_measured(comparison, method)] for method in comparison.methods]
        tables.append(_table("One class an image", ["method", *measures], rows))
    if comparison.external:
        tables.append(comparison_table(comparison.external, "AUROC on the external test set"))
    return Group(*tables)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=f"{title}, mean ± SD over seeds", title_justify="left")
    for heading in headings:
        table.add_column(Text(heading), justify="left" if heading == "method" else "right")
    for cells in rows:
        table.add_row(*(Text(cell) for cell in cells))
    return table


def markdown_table(comparison: Comparison) -> str:
    """Return one Markdown table, with average precision and balanced accuracy, ending in a line feed.

    Results on an external test set follow below a heading, as a second one.
    """
    aurocs = [f"AUROC, {subset}" for subset in SUBSETS]
    headings = ["method", *aurocs, "average precision", "balanced accuracy"]
    headings += [*_measures(comparison), *_against(comparison)]
    rows = [
        [method.label, *_over_classes(method), *_measured(comparison, method), *_contrasts(comparison, index)]
        for index, method in enumerate(comparison.methods)
    ]
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    table = "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
    external = comparison.external
    return f"{table}\n### External test set\n\n{markdown_table(external)}" if external else table


def _over_classes(method: MethodResult) -> list[str]:
    aurocs = [method.auroc[subset] for subset in SUBSETS]
    return [spread(each) for each in (*aurocs, method.average_precision, method.balanced_accuracy)]


def _measures(comparison: Comparison) -> list[str]:
    return [MEASURE_NAMES[measure] for measure in comparison.measures]


def _measured(comparison: Comparison, method: MethodResult) -> list[str]:
    return [spread(method.measures.get(measure, Spread(None, None))) for measure in comparison.measures]


def _against(comparison: Comparison) -> list[str]:
    return [f"{comparison.reference} ahead by, {subset}" for subset in TESTED]


def _contrasts(comparison: Comparison, index: int) -> list[str]:
    label = comparison.methods[index].label
    return [_contrast(comparison, label, subset) if index else "–" for subset in TESTED]


def _contrast(comparison: Comparison, label: str, subset: Subset) -> str:
    """Mean difference over the subset's classes, and Holm's p of the test that decides."""
    test = comparison.contrast(label, subset).result
    return f"{signed(test.mean_difference)}, {probability(test.holm_p)}"


def _site_headings(summary: RunSummary) -> list[str]:
    return list(summary.sites) if len(summary.sites) <= SITES_MARKED else ["sites"]


def _marks(summary: RunSummary, name: str) -> list[str]:
    if len(summary.sites) > SITES_MARKED:
        return [f"{len(owners(summary, name))} of {len(summary.sites)}"]
    return ["●" if name in record.classes else "" for record in summary.sites.values()]


def _blank(summary: RunSummary) -> list[str]:
    return [""] * len(_site_headings(summary))


def _auroc(summary: RunSummary, name: str) -> Measured | None:
    result = summary.test.per_class.get(name)
    return result.measured("auroc") if result else None


def _means(summaries: Sequence[RunSummary]) -> list[Measured | None]:
    return [summary.test.headline().mean for summary in summaries]


def _best_marked(values: Sequence[Measured | None]) -> list[Text]:
    """Figures, the largest as printed in bold with its mark.

    Nothing is marked where there is one method, or a figure has an error: the largest may be another one.
    """
    printed = [figure(value) for value in values]
    defined = [text for text, value in zip(printed, values, strict=True) if value is not None]
    exact = not any(value.error for value in values if value is not None)
    best = max(defined) if len(defined) > 1 and exact else None
    return [Text(f"{BEST} {text}", style="bold green") if text == best else Text(text) for text in printed]
