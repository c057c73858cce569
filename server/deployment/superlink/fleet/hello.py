"""Answers ``flwr-client check``: the time, the release, whether the site's key is admitted; nobody signs on by it."""

import time
from collections.abc import Callable
from typing import Any, Literal

import grpc

from common import __version__
from common.security.call_signatures import is_signed_by
from common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE, WIRE_VERSION, Hello
from server.deployment.superlink.fleet.authentication import CallRefused, signed_headers


def handler(
    node_of: Callable[[bytes], int | None], note: Callable[[str, str], object] = lambda peer, what: None
) -> grpc.GenericRpcHandler:
    """The service, for a gRPC server.

    Args:
        node_of: The node that a public key is registered for.
        note: Told where a question of somebody unknown came from, as ``context.peer()`` has it, and what it was.
    """

    def answer(_: object, context: grpc.ServicerContext) -> bytes:
        known = _key(context.invocation_metadata(), node_of)
        if known == "unknown":
            note(context.peer(), "asked whether its key is admitted, which it is not")
        return Hello(time=time.time(), release=__version__, wire=WIRE_VERSION, key=known).model_dump_json().encode()

    # As a stream of requests that nobody reads: a stranger may ask, and no byte of the request is taken in.
    return grpc.method_handlers_generic_handler(
        HELLO_SERVICE, {HELLO_METHOD: grpc.stream_unary_rpc_method_handler(answer)}
    )


def _key(metadata: Any, node_of: Callable[[bytes], int | None]) -> Literal["admitted", "unknown"]:
    """Whether the caller holds the private half of an admitted key, signed as for Flower's calls; at any time."""
    try:
        key, when, signature = signed_headers(metadata)
    except CallRefused:
        return "unknown"
    return "admitted" if node_of(key) is not None and is_signed_by(key, when, signature) else "unknown"
