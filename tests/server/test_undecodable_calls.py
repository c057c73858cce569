"""Signed calls whose request is no request: each is refused with a reason, and nothing of it stays behind."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

from common.wire.fleet_protocol import SERVICE
from tests.server.superlinks import Hospital, Port
from tests.signing import SignsCalls, pem

pytestmark = pytest.mark.slow
WITHIN_S = 20
METHODS = (
    *("ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "RegisterNode", "UnregisterNode", "PullMessages"),
    *("PushMessages", "ConfirmMessageReceived", "GetRun", "GetFab", "PushObject", "PullObject"),
)
BODIES = {
    "no protobuf": b"\xff" * 40,
    "a field that ends too late": b"\x0a\xff\xff\xff\xff\x0f",
    "a varint without an end": b"\x08" + b"\x80" * 30,
    "groups in groups": b"\x0b" * 5000,
    "a message cut off": b"\x0a\x10\x0a",
}


@dataclass
class Attacker:
    """An admitted hospital, and the one connection on which it sends what it likes."""

    site: Hospital
    channel: grpc.Channel
    port: Port

    def sends(self, method: str, body: bytes, compression: grpc.Compression | None = None) -> grpc.StatusCode:
        """Make one signed call; return how it ends."""
        call = self.channel.unary_unary(f"/{SERVICE}/{method}")
        with pytest.raises(grpc.RpcError) as ended:
            call(body, timeout=WITHIN_S, compression=compression)
        return ended.value.code()

    def is_answered(self) -> bool:
        """Whether an honest call on the same connection is answered."""
        call = self.channel.unary_unary(
            f"/{SERVICE}/SendNodeHeartbeat", request_serializer=SendNodeHeartbeatRequest.SerializeToString
        )
        call(SendNodeHeartbeatRequest(node=self.site.node, heartbeat_interval=30), timeout=WITHIN_S)
        return True


@pytest.fixture
def attacker(port: Port) -> Iterator[Attacker]:
    key = ec.generate_private_key(ec.SECP256R1())
    signing = SignsCalls(key, key.public_key())
    public = pem(key.public_key())
    site = Hospital(port.link, "north", port.stub(key), public, port.link.storage.sites.register("north", public))
    with grpc.secure_channel(port.address, grpc.ssl_channel_credentials(port.authority)) as plain:
        made = Attacker(site, grpc.intercept_channel(plain, signing), port)
        assert made.is_answered()
        yield made


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_cannot_be_read_is_refused_as_such(method: str, attacker: Attacker) -> None:
    ends = {name: attacker.sends(method, body) for name, body in BODIES.items()}
    assert ends == dict.fromkeys(BODIES, grpc.StatusCode.INVALID_ARGUMENT)
    assert attacker.is_answered()


def test_a_hundred_of_them_leave_the_connection_usable_and_no_thread_or_memory_behind(attacker: Attacker) -> None:
    process = psutil.Process()
    for _ in range(100):  # threads and buffers that stay in any case
        attacker.sends("SendNodeHeartbeat", BODIES["no protobuf"])
    threads, memory = threading.active_count(), process.memory_info().rss
    for _ in range(200):
        assert attacker.sends("SendNodeHeartbeat", BODIES["no protobuf"]) == grpc.StatusCode.INVALID_ARGUMENT
    assert attacker.is_answered()
    assert threading.active_count() <= threads + 2
    assert process.memory_info().rss - memory < 20e6  # 200 times 0.65 MB were 130 MB


@pytest.mark.parametrize("method", METHODS)
def test_text_that_is_no_utf8_is_refused_and_fails_nothing(method: str, attacker: Attacker) -> None:
    body = b"".join(bytes((field << 3 | 2, 2)) + b"\xff\xfe" for field in range(1, 8))
    refusals = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    assert attacker.sends(method, body) in refusals
    assert attacker.is_answered()


def test_a_small_body_that_unpacks_to_a_large_one_is_refused_by_its_size(attacker: Attacker) -> None:
    code = attacker.sends("PushMessages", bytes(500_000_000), compression=grpc.Compression.Gzip)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert attacker.is_answered()
