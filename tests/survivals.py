"""The table at the end of `make torture`: the harms done to federations, and how often they survived.

A test states at its start the harm: ``record_property("survived", "SIGKILL of a site")``, or several at once as
``("NaN in an update", 40)``; and ``record_property("same model", "SIGKILL of a site")`` if it also compares the final
model with the undisturbed run's. The test passes or fails as a whole.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

COUNTS = {"survived": ("tried", "survived"), "same model": ("compared", "equal")}
"""Property of a test -> its two columns: of all tests, and of those that passed."""


class Survivals:
    """Gathers the properties of all workers' tests, and prints the table where there are any."""

    def __init__(self) -> None:
        self.properties: dict[str, list[tuple[str, Any]]] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test, teardown included; under xdist only the controller prints."""
        self.properties[report.nodeid] = [(name, value) for name, value in report.user_properties]
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table."""
        if kinds := self.kinds():
            terminalreporter.section("survived")
            for line in table(kinds):
                terminalreporter.write_line(line)

    def kinds(self) -> dict[str, Counter[str]]:
        """Return the columns of each kind of harm."""
        kinds = defaultdict[str, Counter[str]](Counter)
        for test, properties in self.properties.items():
            for name, value in properties:
                if name in COUNTS:
                    kind, number = (value, 1) if isinstance(value, str) else value
                    every, good = COUNTS[name]
                    kinds[kind] += Counter({every: number, good: number * (test not in self.failed)})
        return dict(sorted(kinds.items()))


def table(kinds: dict[str, Counter[str]]) -> Iterator[str]:
    """Yield one line a kind, and the sums."""
    width = max(map(len, kinds))
    yield f"{'':{width}}  tried  survived  final model equal"
    total = sum(kinds.values(), Counter[str]())
    for name, of in [*kinds.items(), ("all", total)]:
        equal = f"{of['equal']} of {of['compared']}" if of["compared"] else "not compared"
        yield f"{name:{width}}  {of['tried']:5}  {of['survived']:8}  {equal}"
    if total["compared"]:
        yield "all final hashes equal" if total["equal"] == total["compared"] else "NOT all final hashes equal"
