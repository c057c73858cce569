"""Refused calls are counted: the last ones of an attack are recorded, too, and no caller fills the disk or the log."""

import logging
from pathlib import Path

import pytest

from server.deployment.superlink import refused_calls
from server.deployment.superlink.refused_calls import (
    FILE,
    MOST_KINDS,
    REPORT_EVERY_S,
    REPORT_LINES,
    RefusedCall,
    RefusedCalls,
    RefusedCallsReader,
    StrangerCalls,
)
from tests.network.real import eventually
from tests.server.superlinks import Clock

FORGED = RefusedCall("east", "PullMessages", "the node is another site's", "north")


def test_refusals_that_were_only_counted_are_written_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_calls, "PAUSE_S", 0.2)
    calls, lines = RefusedCalls(tmp_path / FILE), []
    calls.note(FORGED)  # before the run
    reader = RefusedCallsReader(tmp_path / FILE)
    for _ in range(9):
        calls.note(FORGED)  # during the run

    def times() -> int:
        lines.extend(reader.read_new())
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
def test_refused_calls_of_strangers_make_one_line_a_minute_for_an_address_and_a_reason(
    peer: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock = Clock()
    strangers = StrangerCalls(clock)
    for _ in range(2001):
        strangers.count(peer, "unknown key")
    clock.now += REPORT_EVERY_S
    strangers.count("ipv4:192.0.2.2:1", "no signature")
    assert [record.args for record in caplog.records] == [
        (address, "unknown key", 1),
        (address, "unknown key", 2000),
        ("192.0.2.2", "no signature", 1),
    ]


def test_the_last_refused_calls_are_reported_without_another(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(refused_calls, "REPORT_EVERY_S", 0.2)
    strangers = StrangerCalls()
    for _ in range(9):
        strangers.count("ipv4:192.0.2.1:4000", "unknown key")
    eventually(lambda: sum(record.args[2] for record in caplog.records) == 9, "all are reported")  # type: ignore[index, misc]


def test_many_addresses_make_few_lines_and_need_little_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    strangers = StrangerCalls(Clock())
    for number in range(50_001):
        strangers.count(f"ipv6:%5B2001:db8:{number:x}::1%5D:4000", "unknown key")
    assert len(strangers._counts) <= MOST_KINDS + 1
    strangers.report()
    numbers = [int(message.rsplit(" ", 2)[1]) for message in caplog.messages]
    assert len(numbers) == 1 + REPORT_LINES + 1
    assert sum(numbers) == 50_001
