"""The table of what was survived counts every worker's tests, and a failed one as tried."""

from types import SimpleNamespace

from tests.survivals import Survivals, table


def report(survivals, test, properties, *outcomes):
    for failed in outcomes:
        survivals.pytest_runtest_logreport(SimpleNamespace(nodeid=test, user_properties=properties, failed=failed))


def test_a_failed_test_counts_as_tried_and_not_survived():
    survivals = Survivals()
    report(survivals, "a", [("survived", "kill"), ("same model", "kill")], False, False, False)
    report(survivals, "b", [("survived", "kill"), ("same model", "kill")], False, True, False)
    report(survivals, "c", [["survived", ["NaN", 40]], ["seed", 3]], False, False, False)

    lines = list(table(survivals.kinds()))

    assert [line.split() for line in lines[1:4]] == [
        ["NaN", "40", "40", "not", "compared"],
        ["kill", "2", "1", "1", "of", "2"],
        ["all", "42", "41", "1", "of", "2"],
    ]
    assert lines[-1] == "NOT all final hashes equal"


def test_a_failure_while_cleaning_up_is_a_failure():
    survivals = Survivals()
    report(survivals, "a", [("survived", "kill")], False, False, True)
    assert survivals.kinds()["kill"]["survived"] == 0
