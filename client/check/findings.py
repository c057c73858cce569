"""The findings of ``flwr-client check`` by area, and their output on a terminal or as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.common.contract_points import ContractPoint, make_point_table
from polyclinic.common.errors import BadInput, Cause
from polyclinic.common.system.terminal import EscapingConsole

CHECK_JSON_SCHEMA = 1
AreaName = Literal["connection", "machine", "data", "training"]
_EXIT_CODES: Mapping[Cause, ClientExitCode] = {
    "": ClientExitCode.BAD_INPUT,
    "column": ClientExitCode.COLUMN,
    "patients": ClientExitCode.PATIENTS,
    "unreadable": ClientExitCode.UNREADABLE,
}


class FindingSeverity(IntEnum):
    """The severity of a finding: note, warning or fault."""

    NOTE = 0
    """Information only; the exit code stays 0."""
    WARNING = 1
    """``flwr-client start`` works, but something is probably wrong."""
    FAULT = 2
    """``flwr-client start`` would end because of it, or no round can succeed."""


@dataclass(frozen=True)
class CheckFinding:
    """One note, warning or fault of the check; ``names`` are the affected files, which are for this hospital only."""

    severity: FindingSeverity
    exit_code: ClientExitCode
    problem: str
    remedy: str = ""
    names: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity.name.lower(),
            "cause": self.exit_code.name.lower() if self.exit_code else "",
            "exit_code": int(self.exit_code),
            "problem": self.problem,
            "remedy": self.remedy,
            "names": list(self.names),
        }


@dataclass
class CheckArea:
    """One area of the check, such as "connection", with its findings.

    Attributes:
        passed: One line for each check that found nothing wrong.
        facts: Measured values for the JSON output.
    """

    name: AreaName
    passed: list[str] = field(default_factory=list)
    findings: list[CheckFinding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add_note(self, problem: str, remedy: str = "") -> None:
        """Add a note, which is a finding that leaves the exit code at 0."""
        self.findings.append(CheckFinding(FindingSeverity.NOTE, ClientExitCode.STOPPED, problem, remedy))

    def add_warning(
        self, exit_code: ClientExitCode, problem: str, remedy: str, names: Iterable[str] = (), *, fatal: bool = False
    ) -> None:
        """Add a warning, or a fault if ``fatal``; ``names`` are the affected files."""
        severity = FindingSeverity.FAULT if fatal else FindingSeverity.WARNING
        self.findings.append(CheckFinding(severity, exit_code, problem, remedy, tuple(names)))

    def add_fault(self, exit_code: ClientExitCode, problem: str, remedy: str) -> None:
        """Add a fault, which is a finding that stops ``flwr-client start`` or every round."""
        self.findings.append(CheckFinding(FindingSeverity.FAULT, exit_code, problem, remedy))

    def add_input_faults(self, bad: BadInput) -> None:
        """Add each fault of a ``BadInput`` exception, from a settings file or table, as a fault of this area."""
        for fault in bad.faults:
            self.add_fault(_EXIT_CODES[fault.cause], f"{fault.where}: {fault.problem}", fault.remedy)


@dataclass(frozen=True)
class ClassImageCounts:
    """Numbers of images of one class in all parts of the data together.

    Attributes:
        name: The hospital's own name of the class.
        unknown: Images that count as neither present nor absent.
        few: Two flags, for patients with the class and for patients without it: True if there are some, but fewer than
            ``smallest``.
        smallest: Minimum number of patients for a printed count of images.
        uncertain, blank: Numbers of uncertain and blank table cells; None if the table has no column for each class.
    """

    name: str
    present: int
    absent: int
    unknown: int
    few: tuple[bool, bool]
    smallest: int
    uncertain: int | None = None
    blank: int | None = None

    @property
    def printable_counts(self) -> tuple[str, str]:
        """Return the numbers of present and of absent images as text.

        If either is of too few patients, both are hidden, because one could be computed from the other. A 0 is always
        shown.
        """

        def format_count(count: int, few: bool) -> str:
            if few:
                return f"<{self.smallest}"
            return "not told" if any(self.few) and count else f"{count:,}"

        few_present, few_absent = self.few
        return format_count(self.present, few_present), format_count(self.absent, few_absent)

    def as_json(self) -> dict[str, object]:
        present, absent = self.printable_counts
        row: dict[str, object] = {"present": present, "absent": absent, "unknown": self.unknown}
        return row if self.blank is None else {**row, "uncertain": self.uncertain, "blank": self.blank}


@dataclass(frozen=True)
class CheckResult:
    """All findings of a check by area, in the order in which they are printed.

    Attributes:
        contract: The points on which the site and the experiment agree or differ; empty without an experiment.
    """

    site: str
    areas: tuple[CheckArea, ...]
    contract: tuple[ContractPoint, ...] = ()

    @property
    def most_severe_finding(self) -> CheckFinding | None:
        """The first finding of the highest severity; None if there are only notes."""
        findings = [finding for area in self.areas for finding in area.findings if finding.severity]
        return max(findings, key=lambda finding: finding.severity, default=None)

    @property
    def exit_code(self) -> ClientExitCode:
        return self.most_severe_finding.exit_code if self.most_severe_finding else ClientExitCode.STOPPED

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": CHECK_JSON_SCHEMA,
            "site": self.site,
            "exit_code": int(self.exit_code),
            "areas": {
                area.name: {
                    "passed": area.passed,
                    "findings": [finding.as_json() for finding in area.findings],
                    "facts": area.facts,
                }
                for area in self.areas
            },
            "contract": {point.name: point.as_json() for point in self.contract},
        }


# ---------------------------------------------------------------------- on one screen

OUTPUT_WIDTH = 100
MAX_PRINTED_NAMES = 5
"""Maximum number of file names printed with a finding; ``--json`` has all."""
_SEVERITY_MARKS = {
    FindingSeverity.NOTE: ("note", "cyan"),
    FindingSeverity.WARNING: ("warn", "bold yellow"),
    FindingSeverity.FAULT: ("FAULT", "bold red"),
}
_INDENT = (0, 0, 0, 8)


def make_narrow_console(file: Any = None) -> Console:
    """Make a console for ``file`` (None for standard output) with lines of at most :data:`OUTPUT_WIDTH` characters."""
    console = EscapingConsole(file=file, highlight=False)
    console.width = min(OUTPUT_WIDTH, console.width) if console.is_terminal else OUTPUT_WIDTH
    return console


def print_check_result(result: CheckResult, classes: Sequence[ClassImageCounts], console: Console) -> None:
    """Print the findings and remedies of each area, then repeat the most severe finding."""
    for area in result.areas:
        console.print(Text(area.name, style="bold"))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=5, justify="right")
        grid.add_column(overflow="fold")
        for line in area.passed:
            grid.add_row(Text("ok", style="green"), Text(line))
        for finding in sorted(area.findings, key=lambda finding: -finding.severity):
            mark, style = _SEVERITY_MARKS[finding.severity]
            grid.add_row(Text(mark, style=style), _format_check_finding(finding))
        console.print(grid)
        if area.name == "data" and classes:
            cells = any(row.blank is not None for row in classes)
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            table.add_column("class", overflow="fold")
            for name in ("present", "absent", "unknown", *(("uncertain", "blank") if cells else ())):
                table.add_column(name, justify="right")
            for row in classes:
                extra = [f"{row.uncertain or 0:,}", f"{row.blank or 0:,}"] if cells else []
                table.add_row(Text(row.name), *row.printable_counts, f"{row.unknown:,}", *extra)
            console.print(Padding(table, _INDENT))

    if result.contract:
        console.print(Text("contract", style="bold"))
        console.print(make_point_table(result.contract))

    console.print()
    worst = result.most_severe_finding
    if worst is None:
        console.print(Text(f"{result.site}: nothing stands in the way.", style="bold green"))
        return
    count = sum(bool(finding.severity) for area in result.areas for finding in area.findings)
    opening = "begin with this one" if count > 1 else "one finding"
    style = "bold red" if worst.severity == FindingSeverity.FAULT else "bold yellow"
    console.print(Text(f"{result.site}: {opening}, exit code {int(result.exit_code)}:", style=style))
    console.print(Padding(_format_check_finding(worst), _INDENT))


def _format_check_finding(finding: CheckFinding) -> Text:
    text = Text(finding.problem + (f" [{int(finding.exit_code)}]" if finding.severity else ""))
    if finding.names:
        more = len(finding.names) - MAX_PRINTED_NAMES
        names = "; ".join(finding.names[:MAX_PRINTED_NAMES]) + (f"; and {more} more" if more > 0 else "")
        text.append(f"\n{names}", style="dim")
    if finding.remedy:
        text.append(f"\n→ {finding.remedy}")
    return text
