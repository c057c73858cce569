"""Answers ``flwr-client check``: the time, the release, whether the site's key is admitted; nobody signs on by it."""

import time
from collections.abc import Callable
from typing import Any, Literal

import grpc
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.utils import get_metadata_bytes, get_metadata_str

from common import __version__
from common.hello import METHOD, SERVICE, Hello
from common.wire import WIRE_VERSION


def handler(node_of: Callable[[bytes], int | None]) -> grpc.GenericRpcHandler:
    """The service, for a gRPC server.

    Args:
        node_of: The node that a public key is registered for.
    """

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        known = _key(context.invocation_metadata(), node_of)
        return Hello(time=time.time(), release=__version__, wire=WIRE_VERSION, key=known).model_dump_json().encode()

    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(answer)})


def _key(metadata: Any, node_of: Callable[[bytes], int | None]) -> Literal["admitted", "unknown"]:
    """Whether the caller holds the private half of an admitted key, signed as for Flower's calls; at any time."""
    key = get_metadata_bytes(metadata, PUBLIC_KEY_HEADER)
    when, signature = get_metadata_str(metadata, TIMESTAMP_HEADER), get_metadata_bytes(metadata, SIGNATURE_HEADER)
    if not key or not when or not signature:
        return "unknown"
    try:
        signed = verify_signature(bytes_to_public_key(key), when.encode("ascii"), signature)
    except ValueError:  # bytes that are no key
        return "unknown"
    return "admitted" if signed and node_of(key) is not None else "unknown"
