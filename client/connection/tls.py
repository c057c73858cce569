"""A TLS handshake before gRPC's handshake, to explain certificate faults that gRPC reports only as "unavailable"."""

import base64
import contextlib
import datetime as dt
import http.client
import ipaddress
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from cryptography import x509

from polyclinic.client.connection.exit_codes import ClientExitCode, ConnectionNotAccepted, CoordinatorUnreachable
from polyclinic.common.security.identity import UNREADABLE_CERTIFICATE_ERRORS, split_host_port
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.system.timers import TLS_TIMEOUT_S

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Environment variables with the proxy's URL, in gRPC's order: the first that is set counts, if it is ``http://``."""
NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")
"""Environment variables with the hosts that need no proxy; the first one that is set counts."""

MAX_PROXY_ANSWER_BYTES = 64 * 2**10
"""Maximum size of a proxy's answer to CONNECT; an ordinary answer has less than 100 bytes."""
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] +([0-9]{3})(?: [^\n]*)?\r?$")
_END_OF_HEADERS = re.compile(rb"\r?\n\r?\n")


def check_coordinator_certificate(
    address: str, ca_certificate: str, environment: Mapping[str, str] = os.environ, *, timeout_s: float | None = None
) -> float:
    """Connect in the same way as gRPC, verify the coordinator's certificate, and return the days until it expires.

    Raises:
        ConnectionNotAccepted: If the server speaks no TLS, or does not show the coordinator's certificate.
        CoordinatorUnreachable: If nobody answers.
    """
    context = ssl.create_default_context(cadata=ca_certificate)
    try:
        shown = _fetch_server_certificate(address, context, environment, timeout_s)
    except ConnectionNotAccepted as refusal:
        if refusal.exit_code is not ClientExitCode.EXPIRED:
            raise
        dates = ""  # for the message: dates show which clock is wrong
        with contextlib.suppress(ConnectionNotAccepted, CoordinatorUnreachable, ValueError):
            certificate = fetch_untrusted_certificate(address, environment)
            ends = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
            first, last, now = (f"{moment:%Y-%m-%d %H:%M}" for moment in (*ends, dt.datetime.now(dt.UTC)))
            dates = f" It is valid from {first} to {last} UTC; this machine's clock says {now} UTC."
        raise ConnectionNotAccepted(refusal.exit_code, f"{refusal.problem}{dates}", refusal.remedy) from None
    return (x509.load_der_x509_certificate(shown).not_valid_after_utc.timestamp() - time.time()) / 86400


def fetch_untrusted_certificate(address: str, environment: Mapping[str, str] = os.environ) -> x509.Certificate:
    """Return a server's certificate without verifying it, to explain why it was not accepted.

    Raises:
        ConnectionNotAccepted: If the server speaks no TLS.
        CoordinatorUnreachable: If nobody answers.
        ValueError: If the certificate cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        return x509.load_der_x509_certificate(_fetch_server_certificate(address, context, environment))
    except UNREADABLE_CERTIFICATE_ERRORS as error:
        raise ValueError(str(error)) from None


def _fetch_server_certificate(
    address: str, context: ssl.SSLContext, environment: Mapping[str, str], timeout_s: float | None = None
) -> bytes:
    """Return the server's certificate (DER) after a TLS handshake with this context, which may reject it."""
    host, port = split_host_port(address)
    within_s = TLS_TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + within_s
    context.set_alpn_protocols(["h2"])

    url = _find_proxy_url(host, environment)
    proxy = _split_proxy_address(url)
    try:
        with socket.create_connection(proxy or (host, port), within_s) as connection:
            if url is not None:
                _open_tunnel(connection, url, host, port, deadline)
            _limit_next_call(connection, deadline)
            with context.wrap_socket(connection, server_hostname=host) as tls:
                return tls.getpeercert(binary_form=True) or b""
    except ssl.SSLCertVerificationError as error:
        raise ConnectionNotAccepted.make_certificate_error(error, host) from None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
            problem = f"{address} does not speak TLS; this site talks to nobody without."
            remedy = "Check host and port of the kit, and proxies on the way."
            raise ConnectionNotAccepted(ClientExitCode.NO_TLS, problem, remedy) from None
        raise CoordinatorUnreachable(f"{address}: TLS failed ({error.reason or error})") from None
    except (socket.gaierror, UnicodeError):
        raise CoordinatorUnreachable(f"the name {proxy[0] if proxy else host} cannot be resolved") from None
    except TimeoutError:
        raise CoordinatorUnreachable(
            f"no answer from {_describe_connection_route(address, proxy)} within {within_s:.0f} s"
        ) from None
    except http.client.HTTPException:
        raise CoordinatorUnreachable(
            f"{_describe_connection_route(address, proxy)}: what answers is no proxy"
        ) from None
    except OSError as error:
        raise CoordinatorUnreachable(
            # The text may come from a proxy, so its length and characters are limited.
            f"{_describe_connection_route(address, proxy)}: {make_printable_line(error.strerror or str(error))}"
        ) from None


def _open_tunnel(connection: socket.socket, proxy: SplitResult, host: str, port: int, deadline: float) -> None:
    """Ask a proxy for a connection to ``host``, and read its answer.

    Raises:
        http.client.HTTPException: If the answer is not a proxy's.
        OSError: If the proxy refuses.
        TimeoutError: If the answer is not complete at the deadline, even if parts of it still come.
    """
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.username is not None:  # as gRPC sends them
        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
    _limit_next_call(connection, deadline)
    connection.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii"))
    answer = b""
    while not _END_OF_HEADERS.search(answer):
        _limit_next_call(connection, deadline)
        part = connection.recv(4096)
        answer += part
        first, newline, _ = answer.partition(b"\n")
        status = _STATUS_LINE.match(first)
        if not part or len(answer) > MAX_PROXY_ANSWER_BYTES or (newline and status is None):
            raise http.client.HTTPException("no answer of a proxy")
        if newline and status is not None and status[1] != b"200":
            words = status[0].partition(b" ")[2].decode("latin-1").strip()
            raise OSError(f"Tunnel connection failed: {words}")


def _limit_next_call(connection: socket.socket, deadline: float) -> None:
    """Set a socket's timeout so that its next call ends at the deadline.

    Raises:
        TimeoutError: If the deadline has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    connection.settimeout(seconds)


def find_proxy_address(host: str, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the proxy through which gRPC reaches ``host``; None without a proxy.

    Raises:
        CoordinatorUnreachable: If the environment variable of the proxy cannot be read.
    """
    return _split_proxy_address(_find_proxy_url(host, environment))


def _split_proxy_address(proxy: SplitResult | None) -> tuple[str, int] | None:
    return (proxy.hostname or "", proxy.port or 80) if proxy else None


def _find_proxy_url(host: str, environment: Mapping[str, str]) -> SplitResult | None:
    exempt = next((environment[name] for name in NO_PROXY_VARIABLES if name in environment), "")
    host = host.lower()
    for entry in filter(None, (part.strip().lower() for part in exempt.split(","))):
        if "/" in entry:  # a network, perhaps with the host's address
            with contextlib.suppress(ValueError):
                if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                    return None
        elif host == entry.lstrip(".") or host.endswith(f".{entry.lstrip('.')}"):
            return None
    name = next((name for name in PROXY_VARIABLES if name in environment), "")
    try:
        parts = urlsplit(environment.get(name, ""))
        return parts if parts.scheme == "http" and parts.hostname and parts.port != 0 else None
    except ValueError as error:
        raise CoordinatorUnreachable(f"{name} names no proxy: {error}") from None


def _describe_connection_route(address: str, proxy: tuple[str, int] | None) -> str:
    return f"{address} through the proxy {proxy[0]}:{proxy[1]}" if proxy else address
