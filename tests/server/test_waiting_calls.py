"""A call for a message is held until there is one; and a message whose answer was lost on its way comes again."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

from common.security.call_signatures import LONGEST_WAIT_S, requested_wait_s
from server.deployment.superlink import fleet_service as service
from tests.server.superlinks import Hospital, Link, Port, opened

SOON_S, LONG = 2.0, "15"
"""Within which a held call is answered, however busy the machine is; what it would wait otherwise."""
Headers = tuple[tuple[str, str], ...]


@pytest.fixture
def site(port: Port) -> Hospital:
    return port.hospital("north")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def pulled(site: Hospital, wait: str | None = "0", process: str = "one") -> list[str]:
    """The names of the messages in the answer to one call."""
    headers: Headers = (("polyclinic-process", process), *((("polyclinic-wait", wait),) if wait is not None else ()))
    answer = site.stub.PullMessages(PullMessagesRequest(node=site.node), metadata=headers)
    return [one.metadata.message_id for one in answer.messages_list]


def held(pool: ThreadPoolExecutor, call: Callable[[], Any]) -> "Future[Any]":
    """A call that is being held: begun, and not answered."""
    found = pool.submit(call)
    time.sleep(0.5)
    assert not found.done()
    return found


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_a_held_call_is_answered_when_the_message_comes(port: Port, site: Hospital, pool: ThreadPoolExecutor) -> None:
    call = held(pool, lambda: pulled(site, LONG))
    other = held(pool, lambda: pulled(port.hospital("south"), "3"))
    name = port.ask(site)
    began = time.monotonic()
    assert call.result() == [name]
    assert time.monotonic() - began < SOON_S
    assert other.result() == []  # another site's message ends nobody's wait


def test_a_call_is_held_as_long_as_it_says_and_not_at_all_where_it_says_nothing(port: Port, site: Hospital) -> None:
    assert 1.0 <= seconds_of(lambda: pulled(site, "1")) < 1.0 + SOON_S
    assert seconds_of(lambda: pulled(site, "0")) < SOON_S / 2
    assert seconds_of(lambda: pulled(site, None)) < SOON_S / 2  # Flower's own SuperNode


@pytest.mark.parametrize("said", ["", "-1", "1e9", "nan", "inf", " 5", "5s", "0x5", "٣", "9" * 4, "1.2345"])
def test_what_is_no_number_of_seconds_is_no_wait(said: str) -> None:
    assert requested_wait_s(said) is None


def test_nobody_waits_longer_than_the_bound() -> None:
    assert (requested_wait_s("999"), requested_wait_s("0"), requested_wait_s("4.5")) == (LONGEST_WAIT_S, 0.0, 4.5)


def test_where_too_many_wait_the_others_are_answered_at_once(
    link: Link, certificates: tuple[bytes, bytes, bytes], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WAITING_CALLS", 2)
    with opened(link, certificates) as port:
        site = port.hospital("north")
        calls = [held(pool, lambda name=name: pulled(port.hospital(name), "4")) for name in ("south", "east")]
        assert seconds_of(lambda: pulled(site, LONG)) < SOON_S
        assert [call.result() for call in calls] == [[], []]
        assert seconds_of(lambda: pulled(site, "3")) >= 3.0  # there is room again


def test_a_message_that_was_lost_on_its_way_comes_again_to_who_has_none(port: Port, site: Hospital) -> None:
    name = port.ask(site)
    assert pulled(site) == [name]
    assert pulled(site) == [name]
    assert pulled(site, None) == []  # who says nothing may still be working on it
    site.announce(site.reply_to(name))
    assert pulled(site) == []


def test_it_comes_again_after_the_superlink_was_killed(port: Port, site: Hospital) -> None:
    name = port.ask(site)
    assert pulled(site) == [name]
    messages = port.link.restarted().messages
    again, once = messages.hand_out_next(site.node_id, again=True), messages.hand_out_next(site.node_id)
    assert again is not None
    assert (again.root, once) == (name, None)


def test_a_message_that_the_site_let_go_or_nobody_waits_for_does_not_come_again(port: Port, site: Hospital) -> None:
    name = port.ask(site)
    assert pulled(site) == [name]
    site.stub.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(node=site.node, run_id=port.link.run, message_object_id=name)
    )
    assert pulled(site) == []
    other = port.ask(site, "another")
    assert pulled(site) == [other]
    port.link.storage.messages.end(port.link.run)
    assert pulled(site) == []


def test_a_process_that_lost_its_place_while_it_waited_gets_no_message(
    port: Port, site: Hospital, pool: ThreadPoolExecutor
) -> None:
    beat = SendNodeHeartbeatRequest(node=site.node, heartbeat_interval=30.0)
    assert site.stub.SendNodeHeartbeat(beat, metadata=(("polyclinic-process", "one"),)).success
    call = held(pool, lambda: pulled(site, LONG))
    assert site.stub.SendNodeHeartbeat(beat, metadata=(("polyclinic-process", "two"),)).success
    name = port.ask(site)
    with pytest.raises(grpc.RpcError) as error:
        call.result()
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert pulled(site, process="two") == [name]


def test_a_site_that_was_revoked_while_it_waited_is_refused(
    port: Port, site: Hospital, pool: ThreadPoolExecutor
) -> None:
    call = held(pool, lambda: pulled(site, "2"))
    port.link.storage.sites.unregister(site.node_id)
    with pytest.raises(grpc.RpcError) as error:
        call.result()
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_nobody_waits_when_the_process_ends(port: Port, site: Hospital, pool: ThreadPoolExecutor) -> None:
    call = held(pool, lambda: pulled(site, LONG))
    began = time.monotonic()
    port.link.storage.messages.arrivals.close()
    assert call.result() == []
    assert time.monotonic() - began < SOON_S
    assert seconds_of(lambda: pulled(site, LONG)) < SOON_S
