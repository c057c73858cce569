"""Format runs as tables for the terminal."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group
from rich.table import Table
from rich.text import Text

from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.measured import ValueWithError, format_value_with_error
from polyclinic.common.metrics.segmentation import ClassOverlap
from polyclinic.common.system.files import is_file
from polyclinic.common.system.plain_text import format_number
from polyclinic.server.reporting.page import group_classes_by_annotation
from polyclinic.server.reporting.run_claims import describe_run_result, list_prominent_limitations
from polyclinic.server.runs.reader import RunFolderContent, read_run
from polyclinic.server.runs.schema import RunSummary

MAX_SITE_COLUMNS = 12
"""Greatest number of sites with a column each; if there are more, one column has the number of annotating sites."""
CLASS_COLUMN_DIVISOR = 4
"""The column of class names may take up to the terminal's width divided by this number without breaking words."""
BEST_MARK = "★"
DISTANCE = "HD95"
"""Heading of the 95 % Hausdorff distance, in mm where the spacing is known."""


def make_class_auroc_table(summaries: Mapping[str, RunSummary]) -> "ClassAurocTable":
    """Return a table with a row for each class: the sites that annotate it, and its AUROC in each run.

    Args:
        summaries: Label of a run -> its summary. The first summary determines the sites and the groups of classes.
    """
    return ClassAurocTable(summaries)


@dataclass(frozen=True)
class ClassAurocTable:
    """A table of classes by sites and runs; if the names of sites or runs are too long, it has numbers or letters."""

    summaries: Mapping[str, RunSummary]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """Yield the table with the longest headings that fit, and a legend of numbers and letters."""
        sites = list(next(iter(self.summaries.values())).sites)
        labels = list(self.summaries)
        # Short headings: numbers for sites, letters for runs.
        site_numbers = [str(number) for number in range(1, len(sites) + 1)]
        letters = [chr(ord("A") + index % 26) * (1 + index // 26) for index in range(len(labels))]
        if len(labels) == 1:
            letters = [next(iter(self.summaries.values())).test.figure_name]
        choices: list[tuple[list[str] | None, list[str]]] = [
            (sites, labels),
            (site_numbers, labels),
            (sites, letters),
            (site_numbers, letters),
            (None, letters),
        ]
        if len(sites) > MAX_SITE_COLUMNS:
            choices = [(None, labels), (None, letters)]
        for site_headings, run_headings in choices:
            table = self._make_table(site_headings, run_headings)
            # Words of class names are not broken, unless the column would become too wide.
            longest_word = max(cell_len(word) for cell in table.columns[0].cells for word in str(cell).split())
            class_width = min(longest_word, options.max_width // CLASS_COLUMN_DIVISOR)
            table.columns[0].min_width = class_width
            min_table_width = console.measure(table, options=options.update(width=10_000)).minimum
            if min_table_width - longest_word + class_width <= options.max_width:
                break
        yield table
        if site_headings is site_numbers:
            yield Text("Sites: " + ", ".join(map(" ".join, zip(site_numbers, sites, strict=True))))
        if run_headings is letters and len(labels) > 1:
            yield Text("Runs: " + ", ".join(map(" ".join, zip(letters, labels, strict=True))))

    def _make_table(self, site_headings: Sequence[str] | None, run_headings: Sequence[str]) -> Table:
        """Return the table with these headings.

        Args:
            site_headings: Heading of the column of each site; None for one column with the number of annotating sites.
            run_headings: Heading of the column of each run.
        """
        first = next(iter(self.summaries.values()))
        table = Table(title=f"{first.test.figure_name} by class", title_justify="left", caption_justify="left")
        marks_class = "" if site_headings is None else "● annotates the class"
        marks_best = f"{BEST_MARK} highest in its row" if len(self.summaries) > 1 else ""
        distances = first.test.segmentation if len(self.summaries) == 1 else None
        marks_distance = "" if distances is None else f"{DISTANCE} is the 95 % Hausdorff distance"
        table.caption = "   ".join(filter(None, (marks_class, marks_best, marks_distance)))
        table.add_column("class", overflow="fold")
        for heading in ["sites"] if site_headings is None else site_headings:
            table.add_column(Text(heading), justify="center", min_width=max(map(cell_len, heading.split()), default=1))
        for heading in [*run_headings, *([DISTANCE] if distances is not None else [])]:
            table.add_column(Text(heading), justify="right", no_wrap=True, min_width=cell_len(heading))
        for group in group_classes_by_annotation(first):
            table.add_row(Text(group.title, style="italic dim"))
            for name in group.classes:
                results = [summary.test.per_class.get(name) for summary in self.summaries.values()]
                aurocs = [result.main_figure_with_error if result else None for result in results]
                marks = ["●" if name in record.classes else "" for record in first.sites.values()]
                if site_headings is None:
                    marks = [f"{len(first.annotating_sites_by_class.get(name, ()))} of {len(first.sites)}"]
                far = [] if distances is None else [_format_distance(distances.per_class.get(name))]
                table.add_row(Text(f"  {name}"), *marks, *_format_and_mark_best(aurocs), *far)
            table.add_section()
        means = [summary.test.compute_headline_auroc().mean for summary in self.summaries.values()]
        empty = [""] * (1 if site_headings is None else len(site_headings))
        empty_end = [] if distances is None else [""]
        table.add_row(Text("mean", style="bold"), *empty, *_format_and_mark_best(means), *empty_end)
        return table


def _format_distance(of_class: ClassOverlap | None) -> str:
    return format_number(None if of_class is None else of_class.hd95, 1)


def _format_and_mark_best(values: Sequence[ValueWithError | None]) -> list[Text]:
    """Format the values of a table row, and mark the largest with a star.

    Values whose texts are equal are all marked. No value is marked if fewer than two values are defined (not None), or
    if a value has an error, as in 0.81 ± 0.02.
    """
    texts = [format_value_with_error(value) for value in values]
    defined = [text for text, value in zip(texts, values, strict=True) if value is not None]
    are_exact = not any(value.error for value in values if value is not None)
    best = max(defined) if len(defined) > 1 and are_exact else None
    return [Text(f"{BEST_MARK} {text}", style="bold green") if text == best else Text(text) for text in texts]


def format_run_result(run: RunFolderContent) -> Group:
    """Format a finished run for the terminal: a table by class, the result, and its limitations."""
    table = make_class_auroc_table({run.summary.table_label: run.summary})
    result = Text(describe_run_result(run))
    return Group(table, result, *_format_limitation_lines(list_prominent_limitations(run)))


def format_model_limitations(folder: Path, without: Collection[str] = ()) -> Group:
    """Format the limitations of a run's model, for users of the model; empty if the folder holds no run.

    Args:
        folder: Folder of a run, or folder with only a model.
        without: Sentences to leave out, because the user has seen them.
    """
    if is_file(folder / "summary.json"):
        with suppress(BadInput):  # of another version, or edited: the model alone is enough
            limits = [limit for limit in list_prominent_limitations(read_run(folder)) if limit not in without]
            return Group(*(["Of the run that trained the model:"] if limits else []), *_format_limitation_lines(limits))
    return Group()


def _format_limitation_lines(limits: Iterable[str]) -> list[Text]:
    return [Text(f"! {limit}", style="yellow") for limit in limits]
