"""Whose update is far: by hand, at the edges of the rule, and how many may be dropped."""

import numpy as np
import pytest

from common.models.state import Head
from common.wire.records import Groups
from strategies.aggregation.outliers import Far, dropped, far_updates, lengths_of


def trunks(*lengths: float) -> dict[str, dict[str, float]]:
    return {f"site {place}": {"trunk": length} for place, length in enumerate(lengths)}


def test_the_lengths_of_an_update_by_hand() -> None:
    head = Head(("b", "a"), np.array([[3, 0], [1, 2]], np.float32), np.array([4, -2], np.float32))
    update = Groups(np.array([2, -1, 2], np.float32), np.array([-6], np.float32), head)
    # rows: sqrt(9 + 16) = 5, sqrt(1 + 4 + 4) = 3
    assert lengths_of(update) == {"trunk": 3.0, "batch normalisation": 6.0, "longest head row": 5.0}
    assert lengths_of(Groups()) == {}


def test_enormous_numbers_have_a_finite_length() -> None:
    assert lengths_of(Groups(np.full(2, 3e38, np.float32)))["trunk"] == pytest.approx(3e38 * 2**0.5)


def test_lengths_much_alike_bear_three_times_the_median_and_no_more() -> None:
    # median 10, MAD 0: the spread is 10 / 3, the bound 10 + 6 * 10 / 3 = 30
    assert far_updates(trunks(10, 10, 10, 10, 30)) == {}
    far = far_updates(trunks(10, 10, 10, 10, 31))
    assert far.keys() == {"site 4"}
    assert far["site 4"].reason == "its update is far longer than the others': trunk 31, their median 10"
    assert far["site 4"].spreads == pytest.approx(6.3)


def test_lengths_unlike_one_another_bear_six_deviations() -> None:
    # median 10, distances 9 8 0 8 x: MAD 8, spread 1.4826 * 8 = 11.8608, bound 81.16
    assert far_updates(trunks(1, 2, 10, 18, 81)) == {}
    assert far_updates(trunks(1, 2, 10, 18, 82)).keys() == {"site 4"}


def test_a_short_update_is_not_far() -> None:
    assert far_updates(trunks(0, 10, 10, 10, 10)) == {}


def test_among_three_nobody_is_far() -> None:
    assert far_updates(trunks(1, 1, 1e9)) == {}


def test_where_most_send_nothing_nobody_is_far() -> None:
    assert far_updates(trunks(0, 0, 0, 5)) == {}


def test_each_part_is_judged_by_itself_and_the_worst_one_is_told() -> None:
    alike = {"trunk": 10.0, "longest head row": 1.0}
    lengths = {"east": alike, "north": alike, "south": {"trunk": 40.0, "longest head row": 20.0}, "west": alike}
    far = far_updates(lengths)
    assert far.keys() == {"south"}
    assert far["south"].reason.endswith("longest head row 20, their median 1")


@pytest.mark.parametrize(
    ("sites", "needed", "names"),
    [(5, 1, ("a", "c")), (5, 4, ("c",)), (5, 5, ()), (4, 1, ("c",)), (9, 6, ("a", "b", "c"))],
)
def test_the_farthest_are_dropped_as_long_as_enough_and_more_than_half_stay(
    sites: int, needed: int, names: tuple[str, ...]
) -> None:
    far = {"a": Far(20, ""), "b": Far(7, ""), "c": Far(90, "")}
    assert dropped(far, sites, needed) == names
