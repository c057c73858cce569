"""One exchange with sites that answer, fail, fall silent, get lost and come back, under a clock that tests move."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.wire.records import TrainReply
from strategies.engine.exchange import (
    MAX_POLL_S,
    MESSAGE_GONE,
    NODE_UNAVAILABLE,
    NOT_REGISTERED,
    REVOKED,
    decode_reply,
    send_and_receive,
)
from tests.strategies.scripted import LOST, SUPERLINK, Answer, Clock, ScriptedGrid, Site, at, failed, lost, reply, said

DEADLINE_S = 60.0
Told = list[tuple[set[int], set[int]]]


def orders(nodes: Collection[int]) -> list[Message]:
    """A message a site."""
    return [
        Message(RecordDict({"do": ConfigRecord({"for": node})}), node, "train", group_id="3", ttl=DEADLINE_S)
        for node in sorted(nodes)
    ]


def exchanged(
    sites: Mapping[int, Site],
    clock: Clock,
    enough: int,
    told: Told | None = None,
    deadline_s: float = DEADLINE_S,
    registered: Callable[[], Collection[int]] | None = None,
) -> tuple[dict[int, Message], ScriptedGrid]:
    """Replies by site."""
    grid, heard = ScriptedGrid(sites, clock), [] if told is None else told

    def waiting(silent: Collection[int], gone: Collection[int]) -> None:
        heard.append((set(silent), set(gone)))

    found: Any = grid
    replies = list(
        send_and_receive(found, orders(sites), waiting, deadline_s=deadline_s, enough=enough, registered=registered)
    )
    by_site = {message.metadata.src_node_id: message for message in replies}
    assert len(by_site) == len(replies)
    return by_site, grid


def test_the_codes_are_flowers() -> None:
    assert NODE_UNAVAILABLE == ErrorCode.NODE_UNAVAILABLE == LOST
    assert set(MESSAGE_GONE) == {ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE}


# ---------------------------------------------------------------------- who is waited for, and how long


def test_every_reply_comes_as_soon_as_the_last_site_has_answered(clock: Clock) -> None:
    replies, _ = exchanged({7: at(2, reply("seven")), 8: at(9, reply("eight"))}, clock, enough=2)
    assert {node: said(message) for node, message in replies.items()} == {7: "seven", 8: "eight"}
    assert 9 <= clock.now <= 9 + MAX_POLL_S


def test_without_messages_nobody_is_waited_for(clock: Clock) -> None:
    assert exchanged({}, clock, enough=1) == ({}, ScriptedGrid({}, clock))
    assert clock.now == 0


def test_a_site_at_work_is_waited_for_also_when_the_others_suffice(clock: Clock) -> None:
    replies, _ = exchanged({7: at(2, reply("seven")), 8: at(50, reply("eight"))}, clock, enough=1)
    assert replies.keys() == {7, 8}


def test_whoever_is_silent_at_the_deadline_is_missing_and_the_others_count(clock: Clock) -> None:
    replies, _ = exchanged({7: at(2, reply("seven")), 8: Site(), 9: at(61, reply("late"))}, clock, enough=3)
    assert replies.keys() == {7}
    assert DEADLINE_S <= clock.now <= DEADLINE_S + MAX_POLL_S


def test_a_site_that_is_no_longer_registered_has_an_error_that_says_so_and_is_not_waited_for(clock: Clock) -> None:
    replies, grid = exchanged({7: at(2, reply("seven")), 8: Site(registered=False)}, clock, enough=2)
    assert replies.keys() == {7, 8}
    assert replies[8].error.reason == NOT_REGISTERED
    assert grid.to(8) == []
    assert clock.now < 3


def test_an_error_of_a_site_is_its_reply_and_it_is_not_asked_again(clock: Clock) -> None:
    replies, grid = exchanged({7: at(2, failed(2, "disk full"))}, clock, enough=1)
    assert replies[7].error.reason == "disk full"
    assert len(grid.to(7)) == 1
    assert clock.now < 3


# ---------------------------------------------------------------------- lost, and back


def away_from_to(begin: float, end: float, *afterwards: Answer) -> Site:
    """A site that is found lost at ``begin``, is back at ``end`` and then answers like this."""
    return Site([Answer(begin, lost), *afterwards], (begin, end))


def test_a_lost_site_that_is_back_gets_its_work_again_and_its_reply_counts(clock: Clock) -> None:
    replies, grid = exchanged({7: away_from_to(10, 30, Answer(5, reply("at last")))}, clock, enough=1)
    assert said(replies[7]) == "at last"
    assert 35 <= clock.now <= 36
    first, again = (message for _, message in grid.sent)
    assert again.metadata.message_id != first.metadata.message_id
    assert (again.content, again.metadata.dst_node_id) == (first.content, 7)
    assert (again.metadata.message_type, again.metadata.group_id) == ("train", "3")


def test_a_lost_site_that_is_no_longer_registered_is_not_waited_for_though_it_is_needed(clock: Clock) -> None:
    sites = {7: at(2, reply("seven")), 8: away_from_to(10, 50, Answer(5, reply("revoked")))}
    replies, grid = exchanged(sites, clock, 2, registered=lambda: {7, 8} if clock.now < 30 else {7})
    assert (replies[8].error.code, replies[8].error.reason) == (REVOKED, NOT_REGISTERED)
    assert len(grid.to(8)) == 1
    assert 30 <= clock.now < 31


def test_a_site_that_is_revoked_at_work_is_neither_lost_nor_waited_for(clock: Clock) -> None:
    told = Told()
    replies, _ = exchanged({7: at(2, reply("seven")), 8: at(10, failed(REVOKED, NOT_REGISTERED))}, clock, 2, told)
    assert replies[8].error.reason == NOT_REGISTERED
    assert clock.now < 11
    assert not any(gone for _, gone in told)


def test_work_that_is_sent_again_lives_no_longer_than_the_exchange(clock: Clock) -> None:
    _, grid = exchanged({7: away_from_to(10, 30, Answer(5, reply("at last")))}, clock, enough=1)
    (when, again) = grid.sent[1]
    assert again.metadata.ttl == pytest.approx(DEADLINE_S - when)


def test_a_site_may_be_lost_more_than_once(clock: Clock) -> None:
    site = Site([Answer(1, lost), Answer(1, lost), Answer(1, reply("third time"))])
    replies, grid = exchanged({7: site}, clock, enough=1)
    assert said(replies[7]) == "third time"
    assert len(grid.to(7)) == 3


def test_a_lost_site_that_is_needed_is_waited_for_until_the_deadline_and_then_is_lost(clock: Clock) -> None:
    replies, _ = exchanged({7: at(2, reply("seven")), 8: away_from_to(10, 10**9)}, clock, enough=2)
    assert said(replies[7]) == "seven"
    assert replies[8].error.code == NODE_UNAVAILABLE
    assert clock.now >= DEADLINE_S


def test_a_lost_site_that_is_not_needed_is_not_waited_for(clock: Clock) -> None:
    replies, _ = exchanged({7: at(2, reply("seven")), 8: away_from_to(10, 10**9)}, clock, enough=1)
    assert replies[8].error.code == NODE_UNAVAILABLE
    assert 10 <= clock.now <= 10 + MAX_POLL_S


def test_lost_sites_that_would_not_suffice_either_are_not_waited_for(clock: Clock) -> None:
    sites = {7: at(2, failed(2, "disk full")), 8: away_from_to(10, 10**9), 9: at(3, reply("nine"))}
    replies, _ = exchanged(sites, clock, enough=3)
    assert replies.keys() == {7, 8, 9}
    assert clock.now <= 10 + MAX_POLL_S


def test_a_lost_site_that_is_back_while_others_work_gets_its_work_again_also_when_not_needed(clock: Clock) -> None:
    sites = {7: away_from_to(5, 15, Answer(5, reply("seven"))), 8: at(40, reply("eight"))}
    replies, _ = exchanged(sites, clock, enough=1)
    assert {node: said(message) for node, message in replies.items()} == {7: "seven", 8: "eight"}


def test_an_error_that_the_superlink_makes_is_taken_for_the_sites(clock: Clock) -> None:
    replies, _ = exchanged({7: away_from_to(1, 10**9), 8: away_from_to(2, 10**9)}, clock, enough=0)
    assert replies.keys() == {7, 8}
    assert SUPERLINK not in replies


# ---------------------------------------------------------------------- replies and what they answer


def test_a_message_that_ran_out_just_before_the_deadline_is_one_without_a_reply(clock: Clock) -> None:
    replies, _ = exchanged(
        {7: at(2, reply("seven")), 8: at(DEADLINE_S - 0.5, failed(MESSAGE_GONE[0], "gone"))}, clock, enough=1
    )
    assert set(replies) == {7}


def test_a_message_whose_site_was_removed_long_before_the_deadline_has_that_for_a_reply(clock: Clock) -> None:
    replies, _ = exchanged({7: at(2, reply("seven")), 8: at(3, failed(MESSAGE_GONE[0], "gone"))}, clock, enough=1)
    assert decode_reply(replies[8], TrainReply) == (None, "the site left the federation before it replied")


def test_a_reply_to_a_message_of_an_earlier_exchange_does_not_stand_for_one_that_is_missing(clock: Clock) -> None:
    grid: Any = ScriptedGrid({7: Site()}, clock)
    assert list(send_and_receive(grid, orders([7]), lambda silent, gone: None, deadline_s=DEADLINE_S, enough=1)) == []
    grid.strays = [reply("round 1")(grid.sent[0][1])]
    assert list(send_and_receive(grid, orders([7]), lambda silent, gone: None, deadline_s=DEADLINE_S, enough=1)) == []
    assert grid.strays == []


def test_a_reply_to_work_that_was_sent_again_since_is_left_out(clock: Clock) -> None:
    grid: Any = ScriptedGrid({7: away_from_to(10, 30)}, clock)

    def again(message: Message) -> Message:
        grid.strays = [reply("to the first")(grid.sent[0][1])]
        return reply("to the second")(message)

    grid.sites[7].answers = [*grid.sites[7].answers, Answer(5, again)]
    (came,) = send_and_receive(grid, orders([7]), lambda silent, gone: None, deadline_s=DEADLINE_S, enough=1)
    assert said(came) == "to the second"
    assert grid.strays == []


# ---------------------------------------------------------------------- who is told what


def test_whoever_watches_is_told_who_is_silent_and_who_is_lost_when_it_changes_and_not_else(clock: Clock) -> None:
    told: Told = []
    sites = {7: away_from_to(5, 15, Answer(5, reply("seven"))), 8: at(40, reply("eight"))}
    exchanged(sites, clock, enough=2, told=told)
    assert told[:4] == [({7, 8}, set()), ({7, 8}, {7}), ({7, 8}, set()), ({8}, set())]
    assert len(told) <= 5


# ---------------------------------------------------------------------- whatever sites do

answers = st.builds(Answer, st.floats(0, 90), st.sampled_from([lost, reply("done"), failed(2, "broken")]))
federations = st.dictionaries(
    st.integers(2, 6),
    st.builds(
        Site,
        st.lists(answers, max_size=3),
        st.tuples(st.floats(0, 50), st.floats(50, 90)),
        st.booleans(),
    ),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(sites=federations, enough=st.integers(0, 4))
def test_whatever_sites_do_each_has_at_most_one_reply_of_its_own_and_the_deadline_holds(
    sites: Mapping[int, Site], enough: int, clock: Clock
) -> None:
    clock.now = 0.0
    told: Told = []
    replies, grid = exchanged(sites, clock, enough, told)
    accepted = {node for node, site in sites.items() if site.registered}
    assert replies.keys() - accepted == sites.keys() - accepted
    assert all(replies[node].error.reason == NOT_REGISTERED for node in sites.keys() - accepted)
    assert clock.now <= DEADLINE_S + MAX_POLL_S
    for node in replies.keys() & accepted:
        message = replies[node]
        assert message.metadata.reply_to_message_id in _identifiers(grid.to(node))
    assert accepted <= replies.keys() or clock.now >= DEADLINE_S
    assert all(gone <= silent <= accepted for silent, gone in told)


def _identifiers(messages: Sequence[Message]) -> list[str]:
    return [message.metadata.message_id for message in messages]
