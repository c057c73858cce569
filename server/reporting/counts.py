"""Format hospitals' counts of patients and images: tables for the terminal, and a folder with JSON, csv and a page."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyclinic.common.counts import ABSENT, ALL, PRESENT, TABLE_MENU, UNKNOWN, list_states
from polyclinic.common.errors import raise_faults
from polyclinic.common.system.files import (
    find_output_folder_faults,
    make_private_folder,
    remove_outputs_on_failure,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_as_json_text, format_count_with_noun
from polyclinic.common.system.terminal import EscapingConsole, fold_long_words
from polyclinic.server.counts.pool import Count, CountResult
from polyclinic.server.reporting.page import write_template_page

POOLED_KEY = "all"
"""Key of the sum over hospitals in JSON and csv files."""
MAX_SITE_COLUMNS = 3
"""Greatest number of hospitals for which the terminal shows a column each."""
STATE_HEADINGS = {PRESENT: "shown", ABSENT: "not shown", UNKNOWN: "not annotated", ALL: ""}
COUNTS_NOTE = (
    "patients / images. A patient counts once in a table, by the first image. Hidden: of few patients, or needed to "
    "hide another number. At least: a hospital hides its part."
)


def format_patients(count: Count | None) -> str:
    """Format a number of patients, such as ``120``, ``at least 120``, ``118 (100–136)`` or ``hidden``.

    For None, which means that the count does not concern the hospital, the result is a dash.
    """
    if count is None:
        return "–"
    if count.patients is None:
        return "hidden"
    bound = "at least " if count.is_bound else ""
    if (interval := count.interval) is not None:
        return f"{bound}{max(count.patients, 0):,} ({interval[0]:,}–{interval[1]:,})"
    return f"{bound}{count.patients:,}"


def format_count_cell(count: Count | None) -> str:
    """Format numbers of patients and images, such as ``120 / 300``."""
    patients = format_patients(count)
    return patients if count is None or count.images is None else f"{patients} / {count.images:,}"


# ---------------------------------------------------------------------- terminal


def format_count_result(result: CountResult) -> RenderableType:
    """Format the answers for a terminal of 80 columns: a line for each hospital, then each table."""
    pieces: list[RenderableType] = [Text(result.question.title)] if result.question.title else []
    pieces += [Text(f"{site}: {result.describe_site(site)}") for site in result.sites]
    pieces += [Text(f"{site}: {reason}") for site, reason in result.silent.items()]
    if result.masked.fault:
        pieces.append(Text(f"no sum under masks: {result.masked.fault}"))
    for table in result.tables:
        pieces += [Text(f"\n{TABLE_MENU[table]}"), *_make_terminal_tables(result, table)]
    if result.tables:
        pieces.append(Text(COUNTS_NOTE, style="dim"))
    return Group(*pieces)


def _make_terminal_tables(result: CountResult, table: str) -> Iterator[RenderableType]:
    """Yield a table of pooled counts and, for two or three hospitals, a table of positives by hospital."""
    lines = result.list_lines(table)
    states = list_states(table)
    if not lines:
        yield Text("hidden by every hospital that was asked")
        return
    headings = [STATE_HEADINGS[state] or "patients / images" for state in states]
    columns = list(result.sites) if len(result.sites) <= MAX_SITE_COLUMNS and states == (ALL,) else []
    shown = fold_long_words(Table("", *headings, *columns, width=80))
    for name, value in lines:
        keys = [(table, name, state, value) for state in states]
        cells = [format_count_cell(result.pool_count(key)) for key in keys]
        cells += [format_count_cell(result.get_site_count(site, keys[0])) for site in columns]
        shown.add_row(Text(" ".join(filter(None, (name, value)))), *map(Text, cells))
    yield shown
    if PRESENT not in states or len(result.sites) > MAX_SITE_COLUMNS or len(result.sites) < 2:
        return
    by_site = fold_long_words(Table("shown, by hospital", *result.sites, width=80))
    for name, value in lines:
        key = (table, name, PRESENT, value)
        cells = [format_count_cell(result.get_site_count(site, key)) for site in result.sites]
        by_site.add_row(Text(" ".join(filter(None, (name, value)))), *map(Text, cells))
    yield by_site


def show_count_result(result: CountResult, console: EscapingConsole, out: Path | None, *, as_json: bool) -> None:
    """Print the counts; write their files if ``out`` is given."""
    paths = write_count_files(result, out) if out is not None else []
    if as_json:
        print(format_as_json_text(make_counts_json(result)))
        return
    console.print(format_count_result(result), highlight=False)
    if paths:
        console.print(f"Page: {paths[0]}", soft_wrap=True, highlight=False, markup=False)


# ---------------------------------------------------------------------- files


def make_counts_json(result: CountResult) -> dict[str, Any]:
    """Return the content of ``counts.json``: question, hospitals, and each count by hospital and in total."""
    return {
        "run": result.run,
        "time": result.time,
        "question": result.question.model_dump(mode="json"),
        "sites": {site: _make_site_json(result, site) for site in result.sites},
        "silent": dict(result.silent),
        "masked": {"sites": list(result.masked.sites), "fault": result.masked.fault},
        "counts": [
            {"table": table, "class": name, "state": state, "value": value, **_make_count_json(result, key)}
            for key in _list_keys(result)
            for table, name, state, value in [key]
        ],
    }


def _list_keys(result: CountResult) -> Iterator[tuple[str, str, str, str]]:
    for table in result.tables:
        yield from result.list_keys(table)


def _make_site_json(result: CountResult, site: str) -> dict[str, Any]:
    reply = result.sites[site].reply
    return {
        "level": reply.level,
        "as_of": reply.as_of,
        "smallest_count": reply.smallest_count,
        "classes": {name: list(words) for name, words in result.sites[site].words.items()},
        "allowed": list(reply.allowed),
        "refused": list(reply.refused),
        "missing": list(reply.missing),
        "noise": reply.noise,
        "masked": bool(reply.masked_rows),
    }


def _make_count_json(result: CountResult, key: tuple[str, str, str, str]) -> dict[str, Any]:
    by_site = {site: count for site in result.sites if (count := result.get_site_count(site, key)) is not None}
    hidden = result.masked.hidden.get(key)
    facts = {POOLED_KEY: _describe_count(result.pool_count(key))}
    facts["sites"] = {site: _describe_count(count) for site, count in by_site.items()}
    return facts if hidden is None else {**facts, "hidden_under_masks": hidden}


def _describe_count(count: Count) -> dict[str, Any]:
    interval = count.interval
    return {
        "patients": count.patients,
        "images": count.images,
        "is_bound": count.is_bound,
        **({"interval": list(interval)} if interval is not None else {}),
    }


def make_counts_csv(result: CountResult) -> str:
    """Return all counts as csv: a line for each count of each hospital, and for each sum over hospitals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["site", "table", "class", "state", "value", "patients", "images", "low", "high", "is_bound"])
    for key in _list_keys(result):
        rows = [(POOLED_KEY, result.pool_count(key))]
        rows += [(site, count) for site in result.sites if (count := result.get_site_count(site, key)) is not None]
        for site, count in rows:
            low, high = count.interval or ("", "")
            numbers = ["" if number is None else number for number in (count.patients, count.images)]
            writer.writerow([site, *key, *numbers, low, high, int(count.is_bound)])
    return text.getvalue()


@dataclass(frozen=True)
class PageRow:
    """A row of a table on the page.

    Attributes:
        name: Heading of the row: class and value, or name of a hospital.
        cells: Texts of the other cells.
        is_sum: True for the sum over all hospitals, False for one hospital.
    """

    name: str
    cells: tuple[str, ...]
    is_sum: bool


def write_count_files(result: CountResult, out: Path) -> list[Path]:
    """Write ``counts.json``, ``counts.csv`` and the page ``counts.html`` into a new folder; return their paths.

    Raises:
        BadInput: If the folder exists and is not empty.
    """
    raise_faults(find_output_folder_faults(out))
    with remove_outputs_on_failure(out):
        make_private_folder(out)
        text = format_as_json_text(make_counts_json(result), indent=1) + "\n"
        write_atomically(out / "counts.json", text.encode(), private=True)
        write_atomically(out / "counts.csv", make_counts_csv(result).encode(), private=True)
        sections = [
            (table, TABLE_MENU[table], _list_headings(table), _list_page_rows(result, table)) for table in result.tables
        ]
        write_template_page(
            "counts.html.j2",
            out / "counts.html",
            private=True,
            result=result,
            hospitals=format_count_with_noun(len(result.sites), "hospital"),
            tables=sections,
        )
    return [out / "counts.html", out / "counts.csv", out / "counts.json"]


def _list_headings(table: str) -> list[str]:
    return [STATE_HEADINGS[state] or "patients / images" for state in list_states(table)]


def _list_page_rows(result: CountResult, table: str) -> list[PageRow]:
    """Return the rows of a table: for each class and value, the sum over all hospitals, then each hospital."""
    rows = list[PageRow]()
    states = list_states(table)
    for name, value in result.list_lines(table):
        keys = [(table, name, state, value) for state in states]
        title = ", ".join(filter(None, (name, value)))
        rows.append(PageRow(title, tuple(format_count_cell(result.pool_count(key)) for key in keys), is_sum=True))
        for site in result.sites:
            counts = [result.get_site_count(site, key) for key in keys]
            if any(count is not None for count in counts):
                rows.append(PageRow(site, tuple(format_count_cell(count) for count in counts), is_sum=False))
    return rows
