"""gRPC's options on the port for hospitals: what an outsider could make it hold is bounded before our code is reached.

Each option is tested in ``tests/server/test_grpc_options.py`` to do what it says.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from server.deployment.superlink.objects.reply_bounds import LARGEST_CALL
from server.deployment.superlink.port_guard.strangers import FIRST_CALL_S, Limits

CALLS_ON_A_CONNECTION = 32
"""gRPC has the others wait at the client."""
LARGEST_METADATA = 8192
"""Bytes of a call's names and values: a hospital's signature, key and versions are 1 KB."""
KEEPALIVE_MS = 210_000
"""Some networks cut lines that are silent for four minutes."""
BACKSTOP = 2
"""gRPC itself accepts so many times the connections, and closes all others at once, from any address."""


def options(limits: Limits) -> list[tuple[str, int]]:
    """gRPC's options."""
    return [
        ("grpc.max_receive_message_length", LARGEST_CALL),
        ("grpc.max_send_message_length", LARGEST_CALL),
        ("grpc.max_concurrent_streams", CALLS_ON_A_CONNECTION),
        ("grpc.max_metadata_size", LARGEST_METADATA),
        ("grpc.absolute_max_metadata_size", LARGEST_METADATA),
        ("grpc.max_allowed_incoming_connections", BACKSTOP * limits.connections),
        ("grpc.server_handshake_timeout_ms", int(FIRST_CALL_S * 1000)),
        # Else gRPC takes in more and more of what nobody reads yet: megabytes a connection, on a fast line. A message
        # that is being read has a window of a megabyte without it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.so_reuseport", 0),  # a second SuperLink on the port is an error
    ]


class AnythingElse(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses calls of methods that are not there, as gRPC would, and reports them.

    Args:
        note: Told the other end's address, as ``context.peer()`` has it, and the reason.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """For every call that no other handler takes."""

        def refuse(_: Any, context: grpc.ServicerContext) -> bytes:
            self._note(context.peer(), "no such method")
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            raise AssertionError("abort raises")

        refuse.experimental_thread_pool = _REFUSERS  # type: ignore[attr-defined]  # gRPC's name for a pool of its own
        return grpc.stream_unary_rpc_method_handler(refuse)


_REFUSERS = ThreadPoolExecutor(2, thread_name_prefix="refusing")
