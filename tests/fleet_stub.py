"""Calls of the hospital link as any program can make and answer them, without Flower's gRPC services.

Flower 1.43 has no gRPC services. These use the messages of ``polyclinic.common.wire.fleet_protocol``.
"""

from collections.abc import Callable
from typing import Any

import grpc

from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.fleet_protocol import make_protobuf_message_classes

_MORE = make_protobuf_message_classes(
    "tests.fleet", "RegisterNodeRequest: 1 bytes public_key\nUnregisterNodeRequest: 1 uint64 node_id\nAnything:"
)
RegisterNodeRequest, UnregisterNodeRequest, Anything = (
    _MORE[f"tests.fleet.{name}"] for name in ("RegisterNodeRequest", "UnregisterNodeRequest", "Anything")
)
"""Messages of Flower's calls that our coordinator never serves, and a message of any content."""
SERVED = tuple(
    line.partition("Request:")[0]
    for line in fleet.MESSAGE_DEFINITIONS.splitlines()
    if line.partition(":")[0].endswith("Request")
)
"""Names of the calls that have messages."""


class FleetStub:
    """Every call of Flower's Fleet API over a channel: ``stub.PullMessages(request, timeout=5)``.

    Args:
        channel: Signs the calls, or does not.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, call: str) -> Callable[..., Any]:
        answer = getattr(fleet, f"{call}Response") if call in SERVED else Anything
        made: Callable[..., Any] = self._channel.unary_unary(
            f"/{fleet.FLEET_SERVICE}/{call}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return made


def add_fleet_servicer(servicer: object, server: grpc.Server) -> None:
    """Let a server answer the calls by a servicer's methods ``(request, context)`` of the same names."""
    handlers = {
        call: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, call),
            request_deserializer=getattr(fleet, f"{call}Request").FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        for call in SERVED
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(fleet.FLEET_SERVICE, handlers),))
