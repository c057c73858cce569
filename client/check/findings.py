"""What the check found: one thing at a time, with its exit code and what to do about it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from client.connection.exit_codes import ExitCode, Refused
from common.errors import BadInput, Cause

SCHEMA = 1
Area = Literal["connection", "machine", "data", "training"]


class Severity(IntEnum):
    """How bad a finding is."""

    NOTE = 0
    """Worth knowing; the exit code stays 0."""
    WARNING = 1
    """``flwr-client start`` works, but something is probably not as it should be."""
    FAULT = 2
    """``flwr-client start`` ends with it, or no round can succeed."""


@dataclass(frozen=True)
class Finding:
    """One fault or note of the check.

    Attributes:
        names: Files and the like that it is about, for this hospital only.
    """

    severity: Severity
    exit_code: ExitCode
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


def note(problem: str, remedy: str = "") -> Finding:
    return Finding(Severity.NOTE, ExitCode.STOPPED, problem, remedy)


def warning(exit_code: ExitCode, problem: str, remedy: str, names: Iterable[str] = ()) -> Finding:
    return Finding(Severity.WARNING, exit_code, problem, remedy, tuple(names))


def fault(exit_code: ExitCode, problem: str, remedy: str, names: Iterable[str] = ()) -> Finding:
    return Finding(Severity.FAULT, exit_code, problem, remedy, tuple(names))


def refused(refusal: Refused) -> Finding:
    """A refusal, as ``flwr-client start`` would end with it."""
    return fault(refusal.exit_code, refusal.problem, refusal.remedy)


_CODES: Mapping[Cause, ExitCode] = {
    "": ExitCode.BAD_INPUT,
    "column": ExitCode.COLUMN,
    "patients": ExitCode.PATIENTS,
    "unreadable": ExitCode.UNREADABLE,
}


def of_input(bad: BadInput) -> list[Finding]:
    """The faults of files that people wrote."""
    return [fault(_CODES[one.cause], f"{one.where}: {one.problem}", one.remedy) for one in bad.faults]


@dataclass(frozen=True)
class AreaFindings:
    """One area.

    Attributes:
        passed: What is as it should be, a line each.
        facts: What was measured, for ``--json``.
    """

    area: Area
    passed: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """All areas, in the order in which they are told."""

    site: str
    areas: tuple[AreaFindings, ...]

    @property
    def most_severe(self) -> Finding | None:
        """The first of the most severe findings; None where there are but notes."""
        found = [finding for area in self.areas for finding in area.findings if finding.severity]
        return max(found, key=lambda finding: finding.severity, default=None)

    @property
    def exit_code(self) -> ExitCode:
        return self.most_severe.exit_code if self.most_severe else ExitCode.STOPPED

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "site": self.site,
            "exit_code": int(self.exit_code),
            "areas": {
                area.area: {
                    "passed": list(area.passed),
                    "findings": [finding.as_json() for finding in area.findings],
                    "facts": dict(area.facts),
                }
                for area in self.areas
            },
        }
