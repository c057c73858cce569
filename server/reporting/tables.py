"""Format runs as tables for the terminal."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.measured import ValueWithError, format_value_with_error
from polyclinic.common.system.files import is_file
from polyclinic.server.reporting.page import group_classes_by_annotation
from polyclinic.server.reporting.run_claims import describe_run_result, list_prominent_limitations
from polyclinic.server.runs.reader import RunFolderContent, RunSummary, read_run

SITES_MARKED = 12
"""Number of sites up to which each has a column; more are counted, because there would be no room."""
BEST = "★"


def make_class_auroc_table(summaries: Mapping[str, RunSummary]) -> Table:
    """Return a table with a row for each class: the sites that annotate it, and its AUROC in each run.

    Args:
        summaries: Label of a run -> its summary. The first summary determines the sites and the groups of classes.
    """
    first = next(iter(summaries.values()))
    marked = len(first.sites) <= SITES_MARKED
    headings = list(first.sites) if marked else ["sites"]
    table = Table(title="AUROC by class", title_justify="left", caption_justify="left")
    table.caption = "● annotates the class" + (f"   {BEST} highest in its row" if len(summaries) > 1 else "")
    table.add_column("class")
    for heading in headings:
        table.add_column(Text(heading), justify="center")
    for label in summaries:
        table.add_column(Text(label), justify="right", no_wrap=True)
    for group in group_classes_by_annotation(first):
        table.add_row(Text(group.title, style="italic dim"))
        for name in group.classes:
            results = [summary.test.per_class.get(name) for summary in summaries.values()]
            aurocs = [result.metric_with_error("auroc") if result else None for result in results]
            marks = ["●" if name in record.classes else "" for record in first.sites.values()]
            if not marked:
                marks = [f"{len(first.annotating_sites_by_class.get(name, ()))} of {len(first.sites)}"]
            table.add_row(Text(f"  {name}"), *marks, *_format_and_mark_best(aurocs))
        table.add_section()
    means = [summary.test.compute_headline_auroc().mean for summary in summaries.values()]
    table.add_row(Text("mean", style="bold"), *[""] * len(headings), *_format_and_mark_best(means))
    return table


def _format_and_mark_best(values: Sequence[ValueWithError | None]) -> list[Text]:
    """Format the values of a table row, and mark the largest with a star.

    Values that are equal as printed are all marked. None is marked if fewer than two values are defined (not None), or
    if any has an error, as in 0.81 ± 0.02.
    """
    printed = [format_value_with_error(value) for value in values]
    defined = [text for text, value in zip(printed, values, strict=True) if value is not None]
    exact = not any(value.error for value in values if value is not None)
    best = max(defined) if len(defined) > 1 and exact else None
    return [Text(f"{BEST} {text}", style="bold green") if text == best else Text(text) for text in printed]


def format_run_result(run: RunFolderContent) -> Group:
    """Format a finished run for the terminal: a table by class, the result, and its limitations."""
    table, result = make_class_auroc_table({run.summary.table_label: run.summary}), Text(describe_run_result(run))
    return Group(table, result, *_format_limitation_lines(list_prominent_limitations(run)))


def format_model_limitations(folder: Path, without: Collection[str] = ()) -> Group:
    """Format the limitations of a run's model, for users of the model; empty if the folder holds no run.

    Args:
        folder: Folder of a run, or with a model alone.
        without: Sentences to leave out, because they were shown before.
    """
    if is_file(folder / "summary.json"):
        with suppress(BadInput):  # of another version, or edited: the model alone is enough
            limits = [limit for limit in list_prominent_limitations(read_run(folder)) if limit not in without]
            return Group(*(["Of the run that trained the model:"] if limits else []), *_format_limitation_lines(limits))
    return Group()


def _format_limitation_lines(limits: Iterable[str]) -> list[Text]:
    return [Text(f"! {limit}", style="yellow") for limit in limits]
