"""Anyone who may answer at a coordinator's address: real sockets, real certificates, real gRPC, on loopback."""

import contextlib
import datetime as dt
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE, Hello
from server.coordinator.folder import Coordinator
from tests.client.handshakes import Handler, answers, shows_certificate


@contextlib.contextmanager
def listening(handle: Handler, host: str = "127.0.0.1") -> Iterator[int]:
    """A server that does this with every caller, several at once; its port."""
    threads = list[threading.Thread]()

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            handle(connection)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=serve, args=(server.accept()[0],)))
                threads[-1].start()

    with socket.create_server((host, 0)) as server:
        acceptor = threading.Thread(target=answer)
        acceptor.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends accept
            for thread in (acceptor, *threads):
                thread.join()


speaks_http = answers(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
"""As a web server answers a request that it does not know."""


@contextlib.contextmanager
def grpc_server(answer: Callable[[bytes], bytes] | grpc.GenericRpcHandler, credentials: object = None) -> Iterator[int]:
    """A gRPC server with the service that sites may ask, with TLS or without; its port."""
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


def says(**words: object) -> Callable[[bytes], bytes]:
    """A coordinator that says this of itself."""
    return lambda request: Hello(**words).model_dump_json().encode()


@dataclass(frozen=True)
class Inspector:
    """A proxy that opens TLS: it answers in every host's name, with a certificate of its own authority."""

    folder: Path
    name: str = "ACME Web Gateway"

    def handle(self, near: socket.socket) -> None:
        request = near.recv(4096)
        host = request.split()[1].decode().rsplit(":", 1)[0]
        near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        shows_certificate(*self._issued(host))(near)

    def _issued(self, host: str) -> tuple[Path, Path]:
        key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=30))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
        )
        chain, secret = self.folder / "shown.crt", self.folder / "shown.key"
        chain.write_bytes(certificate.public_bytes(form.Encoding.PEM))
        secret.write_bytes(
            key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()),
        )
        return chain, secret
