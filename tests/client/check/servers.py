"""A gRPC server at a coordinator's address: real sockets, real certificates, on loopback."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE, Hello
from server.coordinator.folder import Coordinator


@contextlib.contextmanager
def grpc_server(answer: Callable[[bytes], bytes] | grpc.GenericRpcHandler, credentials: object = None) -> Iterator[int]:
    """Serve the hello call, with TLS or without; yield the port."""
    server = grpc.server(ThreadPoolExecutor(2))
    if not isinstance(answer, grpc.GenericRpcHandler):
        method = grpc.unary_unary_rpc_method_handler(lambda request, context, say=answer: say(request))
        answer = grpc.method_handlers_generic_handler(HELLO_SERVICE, {HELLO_METHOD: method})
    server.add_generic_rpc_handlers((answer,))
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def tls_of(coordinator: Coordinator) -> grpc.ServerCredentials:
    chain, key = coordinator.authority / "server.crt", coordinator.authority / "server.key"
    return grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())])


def says(**fields: object) -> Callable[[bytes], bytes]:
    """A coordinator that says this of itself."""
    return lambda request: Hello(**fields).model_dump_json().encode()
