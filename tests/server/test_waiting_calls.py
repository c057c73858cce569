"""Calls for a message are held until there is one; refused calls are counted."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from polyclinic.common.security.call_signatures import MAX_WAIT_S, parse_wait_header_s
from polyclinic.server.deployment.superlink import fleet_service, refused_calls
from polyclinic.server.deployment.superlink.refused_calls import (
    MAX_DISTINCT_REFUSALS,
    MAX_REPORT_LINES,
    REFUSED_CALLS_FILE,
    REPORT_INTERVAL_S,
    RefusedCall,
    RefusedCallLog,
    UnknownCallerCounts,
)
from polyclinic.server.runs.live_status import JsonLinesReader
from tests.network.real import eventually
from tests.server.superlinks import Clock, Hospital, Link, Port, opened, refused

SOON_S, LONG = 2.0, "15"
"""Within which a held call is answered, however busy the machine is; what it would wait otherwise."""


@pytest.fixture
def site(port: Port) -> Hospital:
    return port.hospital("north")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def pulled(site: Hospital, wait: str | None = "0", process: str = "one") -> list[str]:
    """Return the names of the messages in the answer to one call, which waits so many seconds."""
    waits = () if wait is None else (("polyclinic-wait", wait),)
    return site.pull(metadata=(("polyclinic-process", process), *waits))


def held(pool: ThreadPoolExecutor, *arguments: Any) -> "Future[list[str]]":
    """Pull in a thread, and make sure that the call is not answered at once."""
    call = pool.submit(pulled, *arguments)
    time.sleep(0.5)
    assert not call.done()
    return call


def seconds_of(call: Callable[..., Any], *arguments: Any) -> float:
    began = time.monotonic()
    call(*arguments)
    return time.monotonic() - began


def test_a_held_call_is_answered_when_the_message_comes(port: Port, site: Hospital, pool: ThreadPoolExecutor) -> None:
    call = held(pool, site, LONG)
    other = held(pool, port.hospital("south"), "3")
    name = port.ask(site)
    assert seconds_of(call.result) < SOON_S
    assert call.result() == [name]
    assert other.result() == []  # another site's message ends nobody's wait


def test_a_call_is_held_as_long_as_it_says_and_not_at_all_where_it_says_nothing(site: Hospital) -> None:
    assert 1.0 <= seconds_of(pulled, site, "1") < 1.0 + SOON_S
    assert seconds_of(pulled, site, "0") < SOON_S / 2
    assert seconds_of(pulled, site, None) < SOON_S / 2  # Flower's own SuperNode


@pytest.mark.parametrize("header", ["", "-1", "1e9", "nan", "inf", " 5", "5s", "0x5", "٣", "9" * 4, "1.2345"])
def test_a_header_that_is_no_number_of_seconds_is_no_wait(header: str) -> None:
    assert parse_wait_header_s(header) is None


def test_nobody_waits_longer_than_the_bound() -> None:
    assert (parse_wait_header_s("999"), parse_wait_header_s("0"), parse_wait_header_s("4.5")) == (
        MAX_WAIT_S,
        0.0,
        4.5,
    )


def test_where_too_many_wait_the_others_are_answered_at_once(
    link: Link, certificates: tuple[bytes, bytes, bytes], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_service, "MAX_WAITING_CALLS", 2)
    with opened(link, certificates) as port:
        site = port.hospital("north")
        calls = [held(pool, port.hospital(name), "4") for name in ("south", "east")]
        assert seconds_of(pulled, site, LONG) < SOON_S
        assert [call.result() for call in calls] == [[], []]
        assert seconds_of(pulled, site, "3") >= 3.0  # there is room again


def test_a_message_that_was_lost_on_its_way_comes_again_to_who_has_none(port: Port, site: Hospital) -> None:
    name = port.ask(site)
    assert [pulled(site), pulled(site)] == [[name], [name]]
    assert pulled(site, None) == []  # who says nothing may still be working on it
    messages = port.link.restarted().messages
    again, once = messages.hand_out_next_request(site.node_id, again=True), messages.hand_out_next_request(site.node_id)
    assert again is not None
    assert (again.root, once) == (name, None)
    site.announce(site.reply_to(name))
    assert pulled(site) == []


def test_a_message_that_the_site_let_go_or_nobody_waits_for_does_not_come_again(port: Port, site: Hospital) -> None:
    name = port.ask(site)
    assert pulled(site) == [name]
    site.confirm(name)
    assert pulled(site) == []
    other = port.ask(site, "another")
    assert pulled(site) == [other]
    port.link.storage.messages.end_run(port.link.run)
    assert pulled(site) == []


def test_a_process_that_lost_its_place_gets_no_message(port: Port, site: Hospital, pool: ThreadPoolExecutor) -> None:
    assert site.beat(metadata=(("polyclinic-process", "one"),))
    call = held(pool, site, LONG)
    assert site.beat(metadata=(("polyclinic-process", "two"),))
    name = port.ask(site)
    assert refused(call.result)[0] == grpc.StatusCode.UNAUTHENTICATED
    assert pulled(site, process="two") == [name]


def test_a_site_revoked_while_it_waited_is_refused(port: Port, site: Hospital, pool: ThreadPoolExecutor) -> None:
    call = held(pool, site, "2")
    port.link.storage.sites.unregister_site(site.node_id)
    assert refused(call.result)[0] == grpc.StatusCode.UNAUTHENTICATED


def test_nobody_waits_when_the_process_ends(port: Port, site: Hospital, pool: ThreadPoolExecutor) -> None:
    call = held(pool, site, LONG)
    port.link.storage.messages.arrivals.close()
    assert seconds_of(call.result) < SOON_S
    assert call.result() == []
    assert seconds_of(pulled, site, LONG) < SOON_S


FORGED = RefusedCall("east", "PullMessages", "the node is another site's", "north")


def test_counted_refusals_are_written_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_calls, "REPEAT_INTERVAL_S", 0.2)
    calls, lines = RefusedCallLog(tmp_path / REFUSED_CALLS_FILE), []
    calls.record_refused_call(FORGED)  # before the run
    reader = JsonLinesReader(tmp_path / REFUSED_CALLS_FILE)
    reader.poll_new_lines()
    for _ in range(9):
        calls.record_refused_call(FORGED)  # during the run

    def times() -> int:
        lines.extend(reader.read_new_lines())
        return sum(line["times"] for line in lines)

    eventually(lambda: times() == 9, "all are written")
    assert {(line["caller"], line["other"]) for line in lines} == {("east", "north")}


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:4000", "192.0.2.1"),
        ("ipv6:%5B2001:db8:0:7:1::2%5D:4000", "2001:db8:0:7:1::2"),
        ("unix:", ""),
    ],
)
def test_strangers_make_one_line_a_minute_for_address_and_reason(
    peer: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock = Clock()
    strangers = UnknownCallerCounts(clock)
    for _ in range(2001):
        strangers.count_refused_call(peer, "unknown key")
    clock.now += REPORT_INTERVAL_S
    strangers.count_refused_call("ipv4:192.0.2.2:1", "no signature")
    assert [record.args for record in caplog.records] == [
        (address, "unknown key", 1),
        (address, "unknown key", 2000),
        ("192.0.2.2", "no signature", 1),
    ]


def test_the_last_refused_calls_are_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(refused_calls, "REPORT_INTERVAL_S", 0.2)
    strangers = UnknownCallerCounts()
    for _ in range(9):
        strangers.count_refused_call("ipv4:192.0.2.1:4000", "unknown key")
    eventually(lambda: sum(record.args[2] for record in caplog.records) == 9, "all are reported")  # type: ignore[index, misc]


def test_many_addresses_make_few_lines_and_need_little_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    strangers = UnknownCallerCounts(Clock())
    for number in range(5001):
        strangers.count_refused_call(f"ipv6:%5B2001:db8:{number:x}::1%5D:4000", "unknown key")
    assert len(strangers._counts) <= MAX_DISTINCT_REFUSALS + 1
    strangers.log_refused_call_counts()
    numbers = [int(message.rsplit(" ", 2)[1]) for message in caplog.messages]
    assert (len(numbers), sum(numbers)) == (1 + MAX_REPORT_LINES + 1, 5001)
