"""What a site makes of anyone who answers at the coordinator's address, against real servers and real certificates."""

import base64
import contextlib
import datetime as dt
import gc
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from select import select

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form

import polyclinic.client.connection.tls
from polyclinic.client.connection.exit_codes import ClientExitCode, ConnectionNotAccepted, CoordinatorUnreachable
from polyclinic.client.connection.tls import check_coordinator_certificate, find_proxy_address
from polyclinic.server.coordinator.authority import issue_server_certificate
from polyclinic.server.coordinator.folder import CoordinatorFolder
from tests.client.handshakes import answers, coordinator_in, leads_to, listening, shows

DIRECTLY: Mapping[str, str] = {}


@pytest.fixture
def coordinator(tmp_path: Path) -> CoordinatorFolder:
    return coordinator_in(tmp_path / "ours")


def refusal(
    coordinator: CoordinatorFolder, address: str, environment: Mapping[str, str] = DIRECTLY
) -> ConnectionNotAccepted:
    with pytest.raises(ConnectionNotAccepted) as refused:
        check_coordinator_certificate(address, coordinator.ca_certificate_path.read_text(), environment)
    return refused.value


def not_now(coordinator: CoordinatorFolder, address: str, environment: Mapping[str, str] = DIRECTLY) -> str:
    """Why nobody was reached; the site will try again."""
    with pytest.raises(CoordinatorUnreachable) as unreachable:
        check_coordinator_certificate(address, coordinator.ca_certificate_path.read_text(), environment)
    reason = str(unreachable.value)
    del unreachable
    gc.collect(1)  # a connection that was left open is an error, and is to be one here
    return reason


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_coordinators_certificate_is_accepted_and_its_days_are_counted(
    host: str, coordinator: CoordinatorFolder
) -> None:
    issue_server_certificate(coordinator, days=12.25)
    with listening(shows(coordinator)) as port:
        days = check_coordinator_certificate(f"{host}:{port}", coordinator.ca_certificate_path.read_text(), DIRECTLY)
    assert days == pytest.approx(12.25, abs=0.01)


def test_another_authority_is_refused_also_where_this_machine_trusts_it_for_the_web(
    coordinator: CoordinatorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = coordinator_in(tmp_path / "theirs")
    with listening(shows(other)) as port:
        refused = refusal(coordinator, f"127.0.0.1:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(other.ca_certificate_path))
        trusted = refusal(coordinator, f"127.0.0.1:{port}")
    assert refused.exit_code == trusted.exit_code == ClientExitCode.OTHER_AUTHORITY
    assert "ask for a new kit" in refused.remedy


def test_a_certificate_for_another_name_is_refused(coordinator: CoordinatorFolder) -> None:
    """To TLS 127.1 is a name, to the resolver 127.0.0.1."""
    with listening(shows(coordinator), "127.0.0.1") as port:
        refused = refusal(coordinator, f"127.1:{port}")
    assert refused.exit_code == ClientExitCode.WRONG_HOST
    assert "127.1" in refused.problem


def test_a_certificate_of_tomorrow_is_refused_as_a_matter_of_clocks(coordinator: CoordinatorFolder) -> None:
    """A site sees one if its clock is a day behind."""
    authority = form.load_pem_private_key((coordinator.authority_path / "ca.key").read_bytes(), None)
    today = x509.load_pem_x509_certificate((coordinator.authority_path / "server.crt").read_bytes())
    builder, tomorrow = x509.CertificateBuilder(), dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    for extension in today.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    builder = builder.subject_name(today.subject).issuer_name(today.issuer).public_key(today.public_key())
    builder = builder.serial_number(7).not_valid_before(tomorrow).not_valid_after(tomorrow + dt.timedelta(days=9))
    certificate = builder.sign(authority, hashes.SHA256())
    (coordinator.authority_path / "server.crt").write_bytes(certificate.public_bytes(form.Encoding.PEM))
    with listening(shows(coordinator)) as port:
        refused = refusal(coordinator, f"127.0.0.1:{port}")
    assert refused.exit_code == ClientExitCode.EXPIRED
    assert "not valid yet" in refused.problem


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"220 mail\r\n",
        b"\0\0\0\4\0\0\0\0\0",
        bytes(99),
    ],
    ids=["HTTP", "SSH", "SMTP", "HTTP/2", "zeros"],
)
def test_whoever_answers_in_clear_text_is_refused(line: bytes, coordinator: CoordinatorFolder) -> None:
    with listening(answers(line)) as port:
        refused = refusal(coordinator, f"127.0.0.1:{port}")
    assert refused.exit_code == ClientExitCode.NO_TLS
    assert f"127.0.0.1:{port}" in refused.problem


def test_a_coordinator_that_is_not_up_yet_or_whose_line_breaks_is_waited_for(coordinator: CoordinatorFolder) -> None:
    with listening(lambda connection: connection.recv(4096)) as port:
        assert f"127.0.0.1:{port}" in not_now(coordinator, f"127.0.0.1:{port}")
    assert not_now(coordinator, f"127.0.0.1:{port}") == f"127.0.0.1:{port}: Connection refused"


def test_a_coordinator_that_says_nothing_is_given_up(
    coordinator: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polyclinic.client.connection.tls, "TLS_TIMEOUT_S", 0.05)
    with listening(lambda connection: [connection.recv(4096), connection.recv(4096)]) as port:
        assert f"127.0.0.1:{port} within 0 s" in not_now(coordinator, f"127.0.0.1:{port}")


def test_a_name_that_cannot_be_resolved_is_named(
    coordinator: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "fl.example" in not_now(coordinator, "fl.example:9092")
    assert "proxy.example" in not_now(coordinator, "fl.example:9092", {"https_proxy": "http://proxy.example:3128"})


def test_a_proxy_is_asked_for_the_coordinators_name_with_the_password_of_its_url(
    coordinator: CoordinatorFolder,
) -> None:
    heads: list[bytes] = []
    with listening(shows(coordinator)) as port, listening(leads_to(port, heads)) as proxy:
        proxied = {"https_proxy": f"http://north:p%40ss@127.0.0.1:{proxy}"}
        days = check_coordinator_certificate("fl.example:9092", coordinator.ca_certificate_path.read_text(), proxied)
    assert days == pytest.approx(397, abs=0.01)
    assert heads[0].startswith(b"CONNECT fl.example:9092 HTTP/1.")
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"north:p@ss") in heads[0]


def test_a_proxy_that_declines_or_speaks_no_http_is_named(coordinator: CoordinatorFolder) -> None:
    for line, reason in ((b"HTTP/1.1 403 Forbidden\r\n\r\n", "403 Forbidden"), (b"SSH-2.0-OpenSSH_9.6\r\n", "")):
        with listening(answers(line)) as proxy:
            words = not_now(coordinator, "fl.example:9092", {"https_proxy": f"http://127.0.0.1:{proxy}"})
        assert words.startswith(f"fl.example:9092 through the proxy 127.0.0.1:{proxy}: ")
        assert reason in words


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-A: "], ids=["before its status", "in its headers"])
def test_a_proxy_that_trickles_its_answer_is_given_up_at_the_deadline(
    head: bytes, coordinator: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(head)
        with contextlib.suppress(OSError):
            while True:  # until the site closes
                connection.sendall(b"y")
                time.sleep(0.05)

    monkeypatch.setattr(polyclinic.client.connection.tls, "TLS_TIMEOUT_S", 0.6)
    began = time.monotonic()
    with listening(trickle) as port:
        assert "within 1 s" in not_now(coordinator, "fl.example:9092", {"https_proxy": f"http://127.0.0.1:{port}"})
    assert time.monotonic() - began < 5


PROXY = "http://127.0.0.1:PORT"


HERE = {"https_proxy": PROXY}
ELSEWHERE = "http://127.0.0.1:9"
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "GRPC_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy")
EXEMPTIONS = ("example, localhost ", "example, .localhost ", "calhost", "*", ",", "10.0.0.0/8", "LOCALHOST")


@pytest.mark.parametrize(
    ("host", "environment"),
    [
        ("localhost", {}),
        *(("localhost", {name: PROXY}) for name in VARIABLES),
        *(("localhost", {**HERE, name: "localhost"}) for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY")),
        *(("localhost", {**HERE, "no_proxy": value}) for value in EXEMPTIONS),
        ("localhost", {**HERE, "no_grpc_proxy": "example", "no_proxy": "localhost"}),
        ("localhost", {**HERE, "no_grpc_proxy": "", "no_proxy": "localhost"}),
        ("localhost", {"grpc_proxy": PROXY, "https_proxy": ELSEWHERE, "http_proxy": ELSEWHERE}),
        ("localhost", {**HERE, "http_proxy": ELSEWHERE}),
        ("localhost", {"grpc_proxy": "", "https_proxy": PROXY}),  # the first variable that is set counts
        ("localhost", {"https_proxy": "127.0.0.1:PORT"}),  # a proxy without http:// is none
        ("localhost", {"https_proxy": "https://127.0.0.1:PORT"}),
        ("127.0.0.1", {**HERE, "no_proxy": "127.0.0.1"}),
        ("127.0.0.1", {**HERE, "no_proxy": "127.0.0.0/8"}),
    ],
)
def test_the_handshake_goes_the_way_that_grpc_will_go(
    host: str, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as target:
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("PORT", str(proxy.getsockname()[1])))
        ours = {None: target, proxy.getsockname(): proxy}[find_proxy_address(host, os.environ)]
        with grpc.secure_channel(f"{host}:{target.getsockname()[1]}", grpc.ssl_channel_credentials()) as channel:
            call = channel.unary_unary("/any").future(b"", timeout=20)
            called, _, _ = select([proxy, target], [], [], 20)
            call.cancel()
    assert called == [ours]


def test_the_reason_of_a_proxy_is_one_short_line(coordinator: CoordinatorFolder) -> None:
    line = b"HTTP/1.1 403 " + b"\x1b[2J" + b"x" * 60_000 + b"\r\n\r\n"
    with listening(answers(line)) as port:
        reason = not_now(coordinator, "fl.example:9092", {"https_proxy": f"http://127.0.0.1:{port}"})
    assert "403" in reason
    assert len(reason) < 700
    assert reason.isprintable()
