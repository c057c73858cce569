"""The table at the end of `make torture`: what was done to the federations, how often, and how often they lived.

A test says at its start what it will do: ``record_property("survived", "SIGKILL of a site")``, with several at once
as ``("NaN in an update", 40)``; if it also holds the final model against the undisturbed run's,
``record_property("same model", "SIGKILL of a site")``. The test passes or fails as a whole.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

SURVIVED = "survived"
SAME_MODEL = "same model"


@dataclass
class Kind:
    """One kind of harm."""

    tried: int = 0
    survived: int = 0
    compared: int = 0
    equal: int = 0


@dataclass(eq=False)
class Survivals:
    """Gathers what the tests of all workers said; prints it where anything was said.

    Attributes:
        said: Test -> what it recorded, as its latest report has it.
        failed: Tests of which any phase failed, teardown included.
    """

    said: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test; under xdist only the controller prints."""
        self.said[report.nodeid] = [(name, value) for name, value in report.user_properties]
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table."""
        kinds = self.kinds()
        if kinds:
            terminalreporter.section("survived")
            for line in table(kinds):
                terminalreporter.write_line(line)

    def kinds(self) -> dict[str, Kind]:
        """Kind of harm -> its numbers."""
        kinds: dict[str, Kind] = defaultdict(Kind)
        for test, said in self.said.items():
            passed = test not in self.failed
            for name, value in said:
                if name not in (SURVIVED, SAME_MODEL):
                    continue
                what, number = (value, 1) if isinstance(value, str) else value
                if name == SURVIVED:
                    kinds[what].tried += number
                    kinds[what].survived += number * passed
                else:
                    kinds[what].compared += number
                    kinds[what].equal += number * passed
        return dict(sorted(kinds.items()))


def table(kinds: dict[str, Kind]) -> Iterator[str]:
    """One line a kind, then whether every final model that was compared was the undisturbed run's."""
    width = max(len(what) for what in kinds)
    yield f"{'':{width}}  tried  survived  final model equal"
    for what, kind in kinds.items():
        equal = f"{kind.equal} of {kind.compared}" if kind.compared else "not compared"
        yield f"{what:{width}}  {kind.tried:5}  {kind.survived:8}  {equal}"
    tried, survived = sum(kind.tried for kind in kinds.values()), sum(kind.survived for kind in kinds.values())
    compared, equal = sum(kind.compared for kind in kinds.values()), sum(kind.equal for kind in kinds.values())
    yield f"{'all':{width}}  {tried:5}  {survived:8}  {equal} of {compared}"
    if compared:
        yield "all final hashes equal" if equal == compared else "NOT all final hashes equal"
