"""The table of what was survived counts every worker's tests, and a failed one as tried."""

from types import SimpleNamespace

from tests.survivals import Survivals, table


def test_a_test_that_fails_in_any_phase_counts_as_tried_and_not_survived():
    survivals, both = Survivals(), [("survived", "kill"), ("same model", "kill")]
    for test, properties, phases in (
        ("a", both, (False, False, False)),
        ("b", both, (False, True, False)),
        ("c", [["survived", ["NaN", 40]], ["seed", 3]], (False, False, False)),
        ("d", [("survived", "cut")], (False, False, True)),
    ):
        for failed in phases:
            report = SimpleNamespace(nodeid=test, user_properties=properties, failed=failed)
            survivals.pytest_runtest_logreport(report)
    lines = list(table(survivals.kinds()))
    assert [line.split() for line in lines[1:5]] == [
        ["NaN", "40", "40", "not", "compared"],
        ["cut", "1", "0", "not", "compared"],
        ["kill", "2", "1", "1", "of", "2"],
        ["all", "43", "41", "1", "of", "2"],
    ]
    assert lines[-1] == "NOT all final hashes equal"
