"""What a hospital that is admitted can hold of the coordinator, over real sockets."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from common.wire.fleet_protocol import CHUNK_BYTES
from server.deployment.superlink.objects.reply_bounds import LARGEST_CALL
from server.deployment.superlink.port_guard import call_limits
from server.deployment.superlink.port_guard.call_limits import CALLS_PER_SITE, LARGE_PER_SITE, CallLimits
from server.deployment.superlink.port_guard.guard import Guard
from tests.network.flood import END_HEADERS, END_STREAM, HEADERS, RST_STREAM, frame, headers
from tests.server.guarded import METHOD, Fleet, call, eventually, in_background, running, still_open

SMALL = "/flwr.proto.Fleet/SendNodeHeartbeat"
NORTH = (b"site", b"north")
AN_ANSWER = bytes(4_000_000)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Answers with four megabytes; two objects may arrive at once."""
    with running(tmp_path, Guard(calls=CallLimits(large_at_once=2)), lambda body: AN_ANSWER) as fleet:
        yield fleet


def nothing_goes_on(fleet: Fleet) -> bool:
    return eventually(lambda: fleet.guard.calls.going_on == 0)


def test_a_hospitals_half_sent_call_is_cancelled_in_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "WHOLE_CALL_S", 1.0)
    connection = fleet.half_sent(NORTH)
    assert eventually(lambda: fleet.guard.calls.going_on == 1)
    assert nothing_goes_on(fleet)
    connection.settimeout(20)
    assert still_open(connection)  # the hospital's connection stays, the call does not


def test_dripping_does_not_make_a_call_last_longer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "WHOLE_CALL_S", 1.0)
    connection, begun = fleet.half_sent(NORTH), time.monotonic()
    assert eventually(lambda: fleet.guard.calls.going_on == 1)
    while fleet.guard.calls.going_on:
        connection.sendall(frame(0, 0, 1, b"\x00"))
        time.sleep(0.05)
    assert time.monotonic() - begun < 5.0


def test_a_call_that_brings_no_object_has_less_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "SMALL_BODY_S", 1.0)
    held = threading.Event()
    with fleet.channel() as channel:

        def never() -> Iterator[bytes]:
            held.wait(30)
            yield b""

        with pytest.raises(grpc.RpcError) as refused:
            channel.stream_unary(SMALL)(never(), metadata=(("site", "north"),), timeout=20)
        held.set()
    assert refused.value.code() == grpc.StatusCode.CANCELLED


def test_an_answer_that_is_never_read_is_let_go_in_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "WHOLE_CALL_S", 2.0)
    connection = fleet.half_sent(NORTH)
    connection.sendall(frame(RST_STREAM, 0, 1, bytes(4)))
    connection.sendall(frame(HEADERS, END_HEADERS, 3, headers(METHOD.encode(), NORTH)))
    connection.sendall(frame(0, END_STREAM, 3, bytes(5)))
    assert eventually(lambda: fleet.guard.calls.going_on == 1)
    time.sleep(0.5)
    assert fleet.guard.calls.going_on == 1  # answered, not read
    assert nothing_goes_on(fleet)


def test_a_hospital_with_too_many_calls_loses_its_oldest_and_no_other_hospital_any(fleet: Fleet) -> None:
    fleet.guard.calls.large_at_once = 100
    left = [fleet.half_sent(NORTH) for _ in range(LARGE_PER_SITE + 2)]
    assert eventually(lambda: fleet.guard.calls.going_on == LARGE_PER_SITE)
    with fleet.channel() as north, fleet.channel() as south:
        assert call(north, "north") == AN_ANSWER
        assert call(south, "south") == AN_ANSWER
    assert len(left) == LARGE_PER_SITE + 2
    assert CALLS_PER_SITE > LARGE_PER_SITE


def test_objects_beyond_what_memory_holds_wait_and_small_calls_do_not(fleet: Fleet) -> None:
    held = [fleet.half_sent(NORTH), fleet.half_sent(NORTH)]
    assert eventually(lambda: fleet.guard.calls._large == 2)
    answers: list[bytes] = []
    with fleet.channel() as south:
        waiting = in_background(lambda: answers.append(call(south, "south")))
        assert eventually(lambda: fleet.guard.calls.going_on == 3)
        assert call(south, "south", method=SMALL) == AN_ANSWER
        assert answers == []
        held[0].close()
        waiting.join(20)
        assert answers == [AN_ANSWER]
        held[1].close()
        assert nothing_goes_on(fleet)
    # A call is over for its caller before the thread that serves it has left its last line.
    assert eventually(lambda: fleet.guard.calls._large == 0)


def test_a_message_that_is_larger_than_a_part_of_an_array_is_refused_unread(fleet: Fleet) -> None:
    with fleet.channel() as channel:
        assert call(channel, "north", bytes(CHUNK_BYTES)) == AN_ANSWER
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, "north", bytes(LARGEST_CALL + 1))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert nothing_goes_on(fleet)


def test_a_call_without_a_message_is_refused(fleet: Fleet) -> None:
    with fleet.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        channel.stream_unary(METHOD)(iter(()), metadata=(("site", "north"),), timeout=20)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "the call has no request"
    assert nothing_goes_on(fleet)


def test_a_hospital_that_goes_away_leaves_nothing(fleet: Fleet) -> None:
    connection = fleet.half_sent(NORTH)
    assert eventually(lambda: fleet.guard.calls.going_on == 1)
    connection.close()
    assert nothing_goes_on(fleet)


def test_calls_that_follow_fast_upon_one_another_are_never_too_many(fleet: Fleet) -> None:
    def work(channel: grpc.Channel, method: str) -> None:
        for _ in range(50):
            assert call(channel, "north", method=method) == AN_ANSWER
        done.append(method)

    done: list[str] = []
    with fleet.channel() as channel:
        threads = [in_background(lambda name=name: work(channel, name)) for name in (METHOD, METHOD, SMALL, SMALL)]  # type: ignore[misc]
        for thread in threads:
            thread.join(60)
    assert sorted(done) == sorted([METHOD, METHOD, SMALL, SMALL])


def test_of_too_many_calls_the_answered_go_first_then_the_oldest() -> None:
    def calls(count: int, answered: int, *, large: bool = False) -> list[call_limits.Call]:
        return [call_limits.Call(None, large, 0.0, answered=number >= count - answered) for number in range(count)]

    waiting, answered = calls(10, 0), calls(8, 8)
    assert call_limits._surplus([*waiting, *answered]) == answered[:2]
    assert call_limits._surplus(calls(16, 3)) == []
    bringing = calls(6, 0, large=True)
    assert call_limits._surplus([*bringing, *calls(5, 5, large=True)]) == bringing[:2]
