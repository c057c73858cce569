"""What an update looks like beside others: by hand."""

from collections.abc import Collection, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.models.state import Head
from common.wire.records import Groups
from strategies.aggregation.outliers import lengths_of
from strategies.rounds.guard.odd_updates import Signs, Variances, impossible, signs_of

NO_VARIANCES = Variances(np.zeros(2, np.float32))


def update(row: tuple[float, float, float], norm: tuple[float, float] = (1, 2), name: str = "a") -> Groups:
    """One head row: two weights and a bias."""
    head = Head((name,), np.array([row[:2]], np.float32), np.array(row[2:], np.float32))
    return Groups(np.array([1, -2], np.float32), np.array(norm, np.float32), head)


def signs_beside(
    updates: Mapping[str, Groups], annotated: Mapping[str, Collection[str]], variances: Variances
) -> dict[str, Signs]:
    """The signs of updates whose lengths were taken as they came."""
    return signs_of(updates, {site: lengths_of(one) for site, one in updates.items()}, annotated, variances)


def owning(*sites: str, name: str = "a") -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(sites, (name,))


def test_the_alignment_of_rows_by_hand() -> None:
    updates = {"east": update((3, 0, 4)), "north": update((0, 0, 7)), "south": update((-3, 0, -4))}
    signs = signs_beside(updates, owning(*updates), NO_VARIANCES)
    # Unit rows: (.6, 0, .8), (0, 0, 1), (-.6, 0, -.8). North and south together: (-.6, 0, .2), of length sqrt(.4).
    assert signs["east"].head.own == pytest.approx((-0.36 + 0.16) / 0.4**0.5)
    # East and south cancel out: there is nothing to point to.
    assert signs["north"].head.own == pytest.approx(0)
    # Among the others, east and north have a cosine of .8 with one another.
    assert signs["south"].head.others == pytest.approx(0.8)


def test_of_several_sites_a_row_that_two_send_says_nothing_of_who_is_wrong() -> None:
    updates = {"east": update((1, 0, 0)), "north": update((-1, 0, 0))}
    assert signs_beside(updates, owning(*updates), NO_VARIANCES)["east"].head.own == pytest.approx(-1)
    third = {**updates, "south": update((-1, 0, 0), name="b")}
    beside = signs_beside(third, {**owning(*updates), "south": ("b",)}, NO_VARIANCES)
    assert [one.head.own for one in beside.values()] == [None, None, None]
    three = signs_beside({**updates, "south": update((-1, 0, 0))}, owning(*updates, "south"), NO_VARIANCES)
    assert three["east"].head.own == pytest.approx(-1)


def test_a_row_of_a_class_that_a_site_does_not_annotate_is_not_compared() -> None:
    updates = {"east": update((1, 0, 0)), "north": update((-1, 0, 0))}
    signs = signs_beside(updates, {"east": ("a",), "north": ()}, NO_VARIANCES)
    assert signs["east"].head.own is None


def test_without_rows_the_trunks_are_compared() -> None:
    trunks = {"east": np.array([3, 4], np.float32), "north": np.array([-4, 3], np.float32)}
    signs = signs_beside({site: Groups(trunk) for site, trunk in trunks.items()}, owning(*trunks), NO_VARIANCES)
    assert signs["east"].head.own == pytest.approx(0)


@given(st.floats(1e-3, 1e30), st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3).filter(lambda r: any(r)))
def test_no_length_of_one_site_moves_how_the_others_are_aligned(times: float, row: list[float]) -> None:
    others = {"east": update((3, 1, 4)), "north": update((2, 0, 5))}
    length = float(np.linalg.norm(row)) or 1.0
    long = tuple(np.float32(times * value / length) for value in row)
    small, large = (
        signs_beside({**others, "south": update(lie)}, owning("east", "north", "south"), NO_VARIANCES)
        for lie in (tuple(value / length for value in row), long)
    )
    assert small["south"].head.others == large["south"].head.others
    assert small["east"].head.own == pytest.approx(large["east"].head.own, abs=1e-3)


def test_one_number_throughout_is_what_no_training_makes() -> None:
    assert impossible(Groups(np.full(16, 0.01, np.float32)), NO_VARIANCES) == "all numbers of a part are the same"
    assert impossible(Groups(np.zeros(16, np.float32)), NO_VARIANCES) == ""
    assert impossible(Groups(np.append(np.full(16, 0.01, np.float32), np.float32(0.02))), NO_VARIANCES) == ""


def test_a_negative_variance_is_what_no_training_makes() -> None:
    variances = Variances(np.array([-1, 2], np.float32), (slice(1, 2),))
    assert impossible(Groups(norm=np.array([-9, -2.1], np.float32)), variances).endswith("negative")
    assert impossible(Groups(norm=np.array([-9, -2.0], np.float32)), variances) == ""
