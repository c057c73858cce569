"""The result on one screen."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from client.check.findings import AreaFindings, Finding, Result, Severity
from client.check.labels import ClassCounts
from common.system.terminal import PlainConsole

WIDTH = 100
NAMES = 5
"""Of files a finding is about; --json has all."""
_MARKS = {
    Severity.NOTE: ("note", "cyan"),
    Severity.WARNING: ("warn", "bold yellow"),
    Severity.FAULT: ("FAULT", "bold red"),
}


def narrow(file: Any = None) -> Console:
    """Make a console as wide as a page, in colour on a terminal."""
    console = PlainConsole(file=file, highlight=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    return console


def show(result: Result, classes: Sequence[ClassCounts], console: Console) -> None:
    """Print it: what is well in a line each, what is not with what to do, then the one thing to begin with."""
    for area in result.areas:
        console.print(Text(area.area, style="bold"))
        _show_area(area, console)
        if area.area == "data" and classes:
            console.print(Padding(_table(classes), (0, 0, 0, 8)))
    console.print()
    _show_verdict(result, console)


def _show_area(area: AreaFindings, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=5, justify="right")
    grid.add_column(overflow="fold")
    for line in area.passed:
        grid.add_row(Text("ok", style="green"), Text(line))
    for finding in sorted(area.findings, key=lambda finding: -finding.severity):
        mark, style = _MARKS[finding.severity]
        grid.add_row(Text(mark, style=style), _told(finding))
    console.print(grid)


def _told(finding: Finding) -> Text:
    code = f" [{int(finding.exit_code)}]" if finding.severity else ""
    text = Text(f"{finding.problem}{code}")
    if finding.names:
        more = len(finding.names) - NAMES
        text.append("\n" + "; ".join(finding.names[:NAMES]) + (f"; and {more} more" if more > 0 else ""), style="dim")
    if finding.remedy:
        text.append(f"\n→ {finding.remedy}")
    return text


def _table(classes: Sequence[ClassCounts]) -> Table:
    cells = any(one.blank is not None for one in classes)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("class", overflow="fold")
    for name in ("present", "absent", "unknown", *(("uncertain", "blank") if cells else ())):
        table.add_column(name, justify="right")
    for one in classes:
        extra = [f"{one.uncertain or 0:,}", f"{one.blank or 0:,}"] if cells else []
        table.add_row(Text(one.name), *one.told(), f"{one.unknown:,}", *extra)
    return table


def _show_verdict(result: Result, console: Console) -> None:
    if result.most_severe is None:
        console.print(Text(f"{result.site}: nothing stands in the way.", style="bold green"))
        return
    count = sum(bool(finding.severity) for area in result.areas for finding in area.findings)
    stops = result.most_severe.severity == Severity.FAULT
    words = "begin with this one" if count > 1 else "one finding"
    console.print(
        Text(
            f"{result.site}: {words}, exit code {int(result.exit_code)}:", style="bold red" if stops else "bold yellow"
        )
    )
    console.print(Padding(_told(result.most_severe), (0, 0, 0, 8)))
