"""Who is blamed: by hand, at the edges of each rule, and never an honest site by one liar's word."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.rounds.guard.odd_updates import Alignment, Signs
from strategies.rounds.guard.verdict import Judged, condemned, odd

ALIKE = Signs({"trunk": 1.0}, Alignment(0.9, 0.9))
TURNED = Signs({"trunk": 1.0}, Alignment(-0.9, 0.9))
BEFORE = {"east": 0.7, "north": 0.7, "south": 0.7, "west": 0.7}


def judged(**losses: float) -> Judged:
    return Judged(losses, {})


def test_an_update_four_times_as_long_as_usual_is_odd_and_a_shorter_one_is_not() -> None:
    signs = {"east": Signs({"trunk": 4.0}), "north": Signs({"trunk": 1.0}), "south": Signs({"trunk": 1.0})}
    assert odd(signs, {})["east"].reason == "its trunk moves 4 times as far as usual"
    assert odd({**signs, "east": Signs({"trunk": 3.99})}, {})["east"].reason == ""


def test_what_was_usual_earlier_counts_where_a_round_is_short() -> None:
    signs = {"east": Signs({"trunk": 4.0}), "north": Signs({"trunk": 1.0})}
    earlier = {"east": {"trunk": 3.0}, "north": {"trunk": 2.0}}
    assert odd(signs, earlier)["east"].times == pytest.approx(4 / 2.5)


def test_of_two_that_point_against_one_another_the_one_that_harms_both_goes() -> None:
    pair = {"east": Signs({"trunk": 1.0}, Alignment(-1.0)), "north": Signs({"trunk": 1.0}, Alignment(-1.0))}
    whole = judged(east=0.7, north=0.7)
    without = {"east": judged(east=0.68, north=0.68), "north": judged(east=0.72, north=0.72)}
    assert condemned(odd(pair, {}), whole, without, judges=BEFORE).keys() == {"east"}
    own_word_for_it = without | {"north": judged(east=0.68, north=0.72)}
    assert condemned(odd(pair, {}), whole, own_word_for_it, judges=BEFORE) == {}
    hardly = {"east": judged(east=0.69, north=0.69), "north": judged(east=0.71, north=0.71)}
    assert condemned(odd(pair, {}), whole, hardly, judges=BEFORE) == {}
    apart = dict.fromkeys(pair, Signs({"trunk": 1.0}, Alignment(-0.6)))
    assert condemned(odd(apart, {}), whole, without, judges=BEFORE) == {}


def test_of_two_an_update_is_not_condemned_for_being_long_beside_one_that_is_next_to_nothing() -> None:
    for least in (0.0, 1e-4):
        pair = {"east": Signs({"trunk": least}, Alignment(0.0)), "north": Signs({"trunk": 1.0}, Alignment(0.0))}
        useful = {"east": judged(east=1, north=1), "north": judged(east=2, north=2)}
        assert condemned(odd(pair, {}), judged(east=1, north=1), useful, judges=BEFORE) == {}
    beside_nothing = odd({"east": Signs({"trunk": 0.0}), "north": ALIKE}, {})
    assert beside_nothing["north"].reason == "its trunk moves, and no other's does"


def test_of_two_alone_the_longer_one_is_odd_without_any_earlier_round() -> None:
    oddities = odd({"east": Signs({"trunk": 1e30}), "north": Signs({"trunk": 1.0})}, {})
    assert oddities["east"].times == 1e30
    assert oddities["north"].reason == ""


def test_who_is_against_others_that_agree_is_opposed_and_whose_others_do_not_agree_is_not() -> None:
    assert odd({"east": TURNED, "north": ALIKE}, {})["east"].opposed
    apart = Signs({"trunk": 1.0}, Alignment(-0.9, 0.5))
    assert not odd({"east": apart, "north": ALIKE}, {})["east"].opposed


def test_without_judges_an_update_against_the_others_goes_only_where_no_other_bends_their_sum() -> None:
    others = dict.fromkeys(("a", "b", "c", "d"), ALIKE)
    nobody = {"east": Judged({}, {})}
    assert condemned(odd({"east": TURNED, **others}, {}), Judged({}, {}), nobody, judges={}).keys() == {"east"}
    bent = {**others, "d": Signs({"trunk": 5.0}, Alignment(0.9, 0.9))}
    assert condemned(odd({"east": TURNED, **bent}, {}), Judged({}, {}), nobody, judges={}) == {}


def test_a_short_update_that_points_elsewhere_is_not_odd() -> None:
    signs = {"east": Signs({"trunk": 0.4}, Alignment(0.0, 0.9)), "north": ALIKE, "south": ALIKE}
    assert odd(signs, {})["east"].reason == ""


def four(loss_without_east: float, signs: Signs) -> dict[str, str]:
    """Four sites, all of which judge; the loss with all updates is 1."""
    oddities = odd({"east": signs, "north": ALIKE, "south": ALIKE, "west": ALIKE}, {})
    without = judged(east=9, north=loss_without_east, south=loss_without_east, west=1)
    return condemned(oddities, judged(east=1, north=1, south=1, west=1), {"east": without}, judges=BEFORE)


def test_two_of_three_judges_condemn_an_update_against_the_others() -> None:
    assert four(math.exp(-0.06), TURNED).keys() == {"east"}
    assert four(math.exp(-0.04), TURNED) == {}


def test_an_update_that_is_not_odd_is_condemned_only_where_it_breaks_the_model() -> None:
    assert four(math.exp(-1.4), ALIKE) == {}
    assert four(math.exp(-1.6), ALIKE).keys() == {"east"}


@pytest.mark.parametrize(("loss", "condemns"), [(0.02, False), (0.4, True)])
def test_a_small_loss_that_doubles_by_chance_condemns_nobody(loss: float, condemns: bool) -> None:
    """Where training has settled, honest updates point anywhere, and the loss of a few images doubles and halves."""
    elsewhere = Signs({"trunk": 1.0}, Alignment(-0.3, 0.9))
    oddities = odd({"east": elsewhere, "north": ALIKE, "south": ALIKE}, {})
    whole, without = judged(east=loss, north=2 * loss, south=2 * loss), judged(east=loss, north=loss, south=loss)
    assert bool(condemned(oddities, whole, {"east": without}, judges=BEFORE)) == condemns


def long_one(gain: float, gain_without_north: float) -> dict[str, str]:
    """Three sites, each left out once; the update of the east is five times as long as the others'."""
    oddities = odd({"east": Signs({"trunk": 5.0}), "north": ALIKE, "south": ALIKE}, {})
    better, as_before = math.exp(-gain), judged(east=1, north=1, south=1)
    without = {
        "east": judged(east=9, north=better, south=better),
        "north": judged(east=math.exp(-gain_without_north), north=9, south=math.exp(-gain_without_north)),
        "south": as_before,
    }
    return condemned(oddities, as_before, without, judges=BEFORE)


def test_a_long_update_is_condemned_sooner_where_the_model_is_better_without_no_other() -> None:
    assert long_one(0.41, 0).keys() == {"east"}
    assert long_one(0.39, 0) == {}
    assert long_one(0.69, 0.01) == {}
    assert long_one(0.71, 0.01).keys() == {"east"}


def test_among_two_each_has_to_say_the_same() -> None:
    pair = {"east": Signs({"trunk": 1.0}, Alignment(-0.9)), "north": Signs({"trunk": 1.0}, Alignment(-0.9))}
    whole, oddities = judged(east=1, north=1), odd(pair, {})
    agreed = {"east": judged(east=2, north=0.5), "north": judged(east=2, north=2)}
    assert condemned(oddities, whole, agreed, judges=BEFORE).keys() == {"east"}
    each_blames_the_other = {"east": judged(east=2, north=0.5), "north": judged(east=0.5, north=2)}
    assert condemned(oddities, whole, each_blames_the_other, judges=BEFORE) == {}


@given(st.floats(0, math.inf), st.floats(0, math.inf), st.integers(3, 10))
def test_no_liars_word_condemns_an_honest_site(with_all: float, without: float, sites: int) -> None:
    """Honest judges find every update useful; whatever one of them says alone changes nothing."""
    names = [f"site-{n}" for n in range(sites)]
    oddities = odd(dict.fromkeys(names, ALIKE), {})
    whole = Judged({**dict.fromkeys(names, 0.5), "site-0": with_all}, {})
    each = {site: Judged({**dict.fromkeys(names, 0.55), "site-0": without}, {}) for site in names}
    assert condemned(oddities, whole, each, judges=dict.fromkeys(names, 0.6)) == {}
