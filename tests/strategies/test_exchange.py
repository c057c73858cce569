"""One exchange with sites that answer, fail, fall silent, get lost and come back, under a clock that tests move."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.records import TrainReply
from polyclinic.strategies.engine.exchange import (
    MAX_POLL_S,
    MESSAGE_GONE,
    NODE_UNAVAILABLE,
    REVOKED_ERROR_CODE,
    REVOKED_ERROR_MESSAGE,
    decode_reply,
    send_and_receive,
)
from tests.strategies.scripted import SUPERLINK, Answer, Clock, ScriptedGrid, Site, at, failed, lost, reply, text

DEADLINE_S = 60.0
Notices = list[tuple[set[int], set[int]]]


def orders(nodes: Collection[int]) -> list[Message]:
    """A message a site."""
    return [
        make_request(RecordDict({"do": ConfigRecord({"for": node})}), node, "train", group_id="3", ttl=DEADLINE_S)
        for node in sorted(nodes)
    ]


def exchanged(
    sites: Mapping[int, Site],
    clock: Clock,
    enough: int,
    notices: Notices | None = None,
    registered: Callable[[], Collection[int]] | None = None,
) -> tuple[dict[int, Message], ScriptedGrid]:
    """Replies by site; silent and lost sites go to ``notices``."""
    grid: Any = ScriptedGrid(sites, clock)
    notices = [] if notices is None else notices

    def waiting(silent: Collection[int], gone: Collection[int]) -> None:
        notices.append((set(silent), set(gone)))

    replies = list(
        send_and_receive(grid, orders(sites), waiting, deadline_s=DEADLINE_S, enough=enough, registered=registered)
    )
    by_site = {message.metadata.src_node_id: message for message in replies}
    assert len(by_site) == len(replies)
    return by_site, grid


def texts(replies: Mapping[int, Message]) -> dict[int, str]:
    return {node: text(message) for node, message in replies.items()}


@pytest.mark.parametrize(
    ("sites", "enough", "answered", "earliest", "latest"),
    [
        ({7: at(2, reply("7")), 8: at(9, reply("8"))}, 2, {7: "7", 8: "8"}, 9, 9),
        ({7: at(2, reply("7")), 8: at(50, reply("8"))}, 1, {7: "7", 8: "8"}, 50, 50),
        ({7: at(2, reply("7")), 8: Site(), 9: at(61, reply("late"))}, 3, {7: "7"}, DEADLINE_S, DEADLINE_S),
        ({}, 1, {}, 0, 0),
    ],
    ids=["all_answer", "more_than_enough_answer", "some_are_silent_at_the_deadline", "no_messages"],
)
def test_sites_at_work_are_waited_for_until_the_deadline_where(
    sites: Mapping[int, Site], enough: int, answered: dict[int, str], earliest: float, latest: float, clock: Clock
) -> None:
    replies, _ = exchanged(sites, clock, enough)
    assert texts(replies) == answered
    assert earliest <= clock.now <= latest + MAX_POLL_S


def test_a_site_that_is_no_longer_registered_has_an_error_that_says_so_and_is_not_waited_for(clock: Clock) -> None:
    replies, grid = exchanged({7: at(2, reply("seven")), 8: Site(registered=False)}, clock, enough=2)
    assert replies.keys() == {7, 8}
    assert replies[8].error.reason == REVOKED_ERROR_MESSAGE
    assert grid.to(8) == []
    assert clock.now < 3


def test_an_error_of_a_site_is_its_reply_and_it_is_not_asked_again(clock: Clock) -> None:
    replies, grid = exchanged({7: at(2, failed(2, "disk full"))}, clock, enough=1)
    assert replies[7].error.reason == "disk full"
    assert len(grid.to(7)) == 1
    assert clock.now < 3


def away_from_to(begin: float, end: float, *afterwards: Answer) -> Site:
    """A site that is found lost at ``begin``, is back at ``end`` and then answers like this."""
    return Site([Answer(begin, lost), *afterwards], (begin, end))


def test_a_lost_site_that_is_back_gets_its_work_again_and_its_reply_counts(clock: Clock) -> None:
    replies, grid = exchanged({7: away_from_to(10, 30, Answer(5, reply("at last")))}, clock, enough=1)
    assert text(replies[7]) == "at last"
    assert 35 <= clock.now <= 36
    (_, first), (when, again) = grid.sent
    assert again.metadata.message_id != first.metadata.message_id
    assert (again.content, again.metadata.dst_node_id) == (first.content, 7)
    assert (again.metadata.message_type, again.metadata.group_id) == ("train", "3")
    assert again.metadata.ttl == pytest.approx(DEADLINE_S - when)  # it lives no longer than the exchange


def test_a_lost_site_that_is_no_longer_registered_is_not_waited_for_though_it_is_needed(clock: Clock) -> None:
    sites = {7: at(2, reply("seven")), 8: away_from_to(10, 50, Answer(5, reply("revoked")))}
    replies, grid = exchanged(sites, clock, 2, registered=lambda: {7, 8} if clock.now < 30 else {7})
    assert (replies[8].error.code, replies[8].error.reason) == (REVOKED_ERROR_CODE, REVOKED_ERROR_MESSAGE)
    assert len(grid.to(8)) == 1
    assert 30 <= clock.now < 31


def test_a_site_that_is_revoked_at_work_is_neither_lost_nor_waited_for(clock: Clock) -> None:
    notices = Notices()
    sites = {7: at(2, reply("seven")), 8: at(10, failed(REVOKED_ERROR_CODE, REVOKED_ERROR_MESSAGE))}
    replies, _ = exchanged(sites, clock, 2, notices)
    assert replies[8].error.reason == REVOKED_ERROR_MESSAGE
    assert clock.now < 11
    assert not any(gone for _, gone in notices)


def test_a_site_may_be_lost_more_than_once(clock: Clock) -> None:
    site = Site([Answer(1, lost), Answer(1, lost), Answer(1, reply("third time"))])
    replies, grid = exchanged({7: site}, clock, enough=1)
    assert text(replies[7]) == "third time"
    assert len(grid.to(7)) == 3


@pytest.mark.parametrize(
    ("sites", "enough", "ends"),
    [
        ({7: at(2, reply("7")), 8: away_from_to(10, 10**9)}, 2, DEADLINE_S),
        ({7: at(2, reply("7")), 8: away_from_to(10, 10**9)}, 1, 10),
        ({7: at(2, failed(2, "disk full")), 8: away_from_to(10, 10**9), 9: at(3, reply("9"))}, 3, 10),
        ({7: away_from_to(1, 10**9), 8: away_from_to(10, 10**9)}, 0, 10),
    ],
    ids=["it_is_needed", "it_is_not_needed", "it_would_not_suffice_either", "nobody_is_needed"],
)
def test_a_lost_site_is_waited_for_only_where(
    sites: Mapping[int, Site], enough: int, ends: float, clock: Clock
) -> None:
    """Its reply is the error that the SuperLink makes, as if it were the site's own."""
    replies, _ = exchanged(sites, clock, enough)
    assert replies.keys() == sites.keys()
    assert replies[8].error.code == NODE_UNAVAILABLE
    assert SUPERLINK not in replies
    assert ends <= clock.now <= ends + MAX_POLL_S


def test_a_lost_site_that_is_back_while_others_work_gets_its_work_again_also_when_not_needed(clock: Clock) -> None:
    sites = {7: away_from_to(5, 15, Answer(5, reply("seven"))), 8: at(40, reply("eight"))}
    replies, _ = exchanged(sites, clock, enough=1)
    assert texts(replies) == {7: "seven", 8: "eight"}


def test_a_message_that_ran_out_just_before_the_deadline_is_one_without_a_reply(clock: Clock) -> None:
    sites = {7: at(2, reply("seven")), 8: at(DEADLINE_S - 0.5, failed(MESSAGE_GONE[0], "gone"))}
    replies, _ = exchanged(sites, clock, enough=1)
    assert set(replies) == {7}


def test_a_message_whose_site_was_removed_long_before_the_deadline_has_that_for_a_reply(clock: Clock) -> None:
    replies, _ = exchanged({7: at(2, reply("seven")), 8: at(3, failed(MESSAGE_GONE[0], "gone"))}, clock, enough=1)
    assert decode_reply(replies[8], TrainReply) == (None, "the site left the federation before it replied")


def exchange_with(grid: Any) -> list[Message]:
    return list(send_and_receive(grid, orders([7]), lambda silent, gone: None, deadline_s=DEADLINE_S, enough=1))


def test_a_reply_to_a_message_of_an_earlier_exchange_does_not_stand_for_one_that_is_missing(clock: Clock) -> None:
    grid = ScriptedGrid({7: Site()}, clock)
    assert exchange_with(grid) == []
    grid.strays = [reply("round 1")(grid.sent[0][1])]
    assert exchange_with(grid) == []
    assert grid.strays == []


def test_a_reply_to_work_that_was_sent_again_since_is_left_out(clock: Clock) -> None:
    def again(message: Message) -> Message:
        grid.strays = [reply("to the first")(grid.sent[0][1])]
        return reply("to the second")(message)

    grid = ScriptedGrid({7: away_from_to(10, 30, Answer(5, again))}, clock)
    (message,) = exchange_with(grid)
    assert text(message) == "to the second"
    assert grid.strays == []


def test_whoever_watches_is_told_who_is_silent_and_who_is_lost_when_it_changes_and_not_else(clock: Clock) -> None:
    notices = Notices()
    sites = {7: away_from_to(5, 15, Answer(5, reply("seven"))), 8: at(40, reply("eight"))}
    exchanged(sites, clock, 2, notices)
    assert notices[:4] == [({7, 8}, set()), ({7, 8}, {7}), ({7, 8}, set()), ({8}, set())]
    assert len(notices) <= 5


answers = st.builds(Answer, st.floats(0, 90), st.sampled_from([lost, reply("done"), failed(2, "broken")]))
federations = st.dictionaries(
    st.integers(2, 6),
    st.builds(Site, st.lists(answers, max_size=3), st.tuples(st.floats(0, 50), st.floats(50, 90)), st.booleans()),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(sites=federations, enough=st.integers(0, 4))
def test_whatever_sites_do_each_has_one_reply_at_most(sites: Mapping[int, Site], enough: int, clock: Clock) -> None:
    clock.now = 0.0
    notices = Notices()
    replies, grid = exchanged(sites, clock, enough, notices)
    accepted = {node for node, site in sites.items() if site.registered}
    assert replies.keys() - accepted == sites.keys() - accepted
    assert all(replies[node].error.reason == REVOKED_ERROR_MESSAGE for node in sites.keys() - accepted)
    assert clock.now <= DEADLINE_S + MAX_POLL_S
    for node in replies.keys() & accepted:
        sent = [message.metadata.message_id for message in grid.to(node)]
        assert replies[node].metadata.reply_to_message_id in sent
    assert accepted <= replies.keys() or clock.now >= DEADLINE_S
    assert all(gone <= silent <= accepted for silent, gone in notices)
