"""What a site makes of anyone who answers at the coordinator's address, against real servers and real certificates."""

import base64
import datetime as dt
import gc
import http.client
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from select import select

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

import client.connection.tls
from client.connection.exit_codes import ExitCode, Refused, Unreachable
from client.connection.tls import check_certificate, find_proxy_address
from server.coordinator.authority import issue_server_certificate
from server.coordinator.folder import Coordinator
from tests.client.handshakes import Handler, answers, coordinator_in, listening, shows

DIRECTLY: Mapping[str, str] = {}


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return coordinator_in(tmp_path / "ours")


def trusted(coordinator: Coordinator) -> str:
    """What stands in the kits."""
    return coordinator.ca_certificate.read_text(encoding="ascii")


def refusal(coordinator: Coordinator, address: str, environment: Mapping[str, str] = DIRECTLY) -> Refused:
    with pytest.raises(Refused) as refused:
        check_certificate(address, trusted(coordinator), environment)
    return refused.value


def not_now(coordinator: Coordinator, address: str, environment: Mapping[str, str] = DIRECTLY) -> str:
    """Why nobody was reached; the site will try again."""
    with pytest.raises(Unreachable) as unreachable:
        check_certificate(address, trusted(coordinator), environment)
    said = str(unreachable.value)
    del unreachable
    gc.collect(1)  # a connection that was left open is an error, and is to be one here
    return said


# ---------------------------------------------------------------------- certificates


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_coordinators_certificate_is_accepted_and_its_days_are_counted(host: str, coordinator: Coordinator) -> None:
    issue_server_certificate(coordinator, days=12.25)
    with listening(shows(coordinator)) as port:
        assert check_certificate(f"{host}:{port}", trusted(coordinator), DIRECTLY) == pytest.approx(12.25, abs=0.01)


def test_the_authority_of_another_coordinator_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    with listening(shows(coordinator_in(tmp_path / "theirs"))) as port:
        refused = refusal(coordinator, f"127.0.0.1:{port}")
    assert refused.exit_code == ExitCode.OTHER_AUTHORITY
    assert refused.problem.startswith("127.0.0.1 does not show the certificate of this kit's coordinator (")
    assert "ask for a new kit" in refused.remedy


def test_an_authority_that_this_machine_trusts_for_the_web_does_not_count(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firewall = coordinator_in(tmp_path / "firewall")
    monkeypatch.setenv("SSL_CERT_FILE", str(firewall.ca_certificate))
    with listening(shows(firewall)) as port:
        assert refusal(coordinator, f"127.0.0.1:{port}").exit_code == ExitCode.OTHER_AUTHORITY


# To TLS 127.1 is a name, to the resolver 127.0.0.1.
@pytest.mark.parametrize(("host", "bound"), [("127.0.0.2", "127.0.0.2"), ("127.1", "127.0.0.1")])
def test_a_certificate_for_another_address_or_name_is_refused(host: str, bound: str, coordinator: Coordinator) -> None:
    with listening(shows(coordinator), bound) as port:
        refused = refusal(coordinator, f"{host}:{port}")
    assert refused.exit_code == ExitCode.WRONG_HOST
    assert refused.problem == f"the coordinator's certificate is not for {host}."
    assert "--renew --host" in refused.remedy


def test_an_expired_certificate_is_refused_and_both_who_may_be_wrong_are_named(coordinator: Coordinator) -> None:
    issue_server_certificate(coordinator, days=-1)
    with listening(shows(coordinator)) as port:
        refused = refusal(coordinator, f"127.0.0.1:{port}")
    assert (refused.exit_code, refused.problem) == (ExitCode.EXPIRED, "the coordinator's certificate has expired.")
    assert "flwr-server init DIR --renew" in refused.remedy
    assert "this machine's clock is wrong" in refused.remedy


def issue_for_tomorrow(coordinator: Coordinator) -> None:
    """What a site sees whose clock is a day behind."""
    authority = form.load_pem_private_key((coordinator.authority / "ca.key").read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    today = x509.load_pem_x509_certificate((coordinator.authority / "server.crt").read_bytes())
    builder, tomorrow = x509.CertificateBuilder(), dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    for extension in today.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    builder = builder.subject_name(today.subject).issuer_name(today.issuer).public_key(today.public_key())
    builder = builder.serial_number(7).not_valid_before(tomorrow).not_valid_after(tomorrow + dt.timedelta(days=9))
    made = builder.sign(authority, hashes.SHA256())
    (coordinator.authority / "server.crt").write_bytes(made.public_bytes(form.Encoding.PEM))


def test_a_certificate_of_tomorrow_is_refused_as_a_matter_of_clocks(coordinator: Coordinator) -> None:
    issue_for_tomorrow(coordinator)
    with listening(shows(coordinator)) as port:
        refused = refusal(coordinator, f"127.0.0.1:{port}")
    assert refused.exit_code == ExitCode.EXPIRED
    assert refused.problem == "the coordinator's certificate is not valid yet."
    assert "clock" in refused.remedy


# ---------------------------------------------------------------------- no TLS, nobody there


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
def test_whoever_answers_in_clear_text_is_refused(line: bytes, coordinator: Coordinator) -> None:
    with listening(answers(line)) as port:
        refused = refusal(coordinator, f"127.0.0.1:{port}")
    assert refused.exit_code == ExitCode.NO_TLS
    assert refused.problem == f"127.0.0.1:{port} does not speak TLS; this site talks to nobody without."


def test_a_coordinator_that_is_not_up_yet_is_waited_for(coordinator: Coordinator) -> None:
    with listening(shows(coordinator)) as port:
        pass
    assert not_now(coordinator, f"127.0.0.1:{port}") == f"127.0.0.1:{port}: Connection refused"


def test_a_line_that_breaks_in_the_handshake_is_no_refusal(coordinator: Coordinator) -> None:
    with listening(lambda connection: connection.recv(4096)) as port:
        assert not_now(coordinator, f"127.0.0.1:{port}").startswith(f"127.0.0.1:{port}: ")


def test_a_coordinator_that_takes_the_call_and_says_nothing_is_given_up_for_now(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.connection.tls, "TLS_TIMEOUT_S", 0.05)
    with listening(lambda connection: [connection.recv(4096), connection.recv(4096)]) as port:
        said = not_now(coordinator, f"127.0.0.1:{port}")
    assert said == f"no answer from 127.0.0.1:{port} within 0 s"


def test_a_name_that_cannot_be_resolved_is_named(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert not_now(coordinator, "fl.example:9092") == "the name fl.example cannot be resolved"
    proxied = {"https_proxy": "http://proxy.example:3128"}
    assert not_now(coordinator, "fl.example:9092", proxied) == "the name proxy.example cannot be resolved"


# ---------------------------------------------------------------------- proxies


def leads_to(port: int, heads: list[bytes]) -> Handler:
    """A proxy that connects anyone who asks to this port of this machine; what it was asked stands in ``heads``."""

    def relay(near: socket.socket) -> None:
        heads.append(near.recv(4096))
        with socket.create_connection(("127.0.0.1", port)) as far:
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            ways = {near: far, far: near}
            while pending := select(ways, [], [])[0]:
                for one in pending:
                    if not (data := one.recv(65536)):
                        return
                    ways[one].sendall(data)

    return relay


def test_through_a_proxy_the_coordinator_is_asked_for_by_name_and_its_certificate_is_checked(
    coordinator: Coordinator,
) -> None:
    heads: list[bytes] = []
    with listening(shows(coordinator)) as port, listening(leads_to(port, heads)) as proxy:
        proxied = {"https_proxy": f"http://127.0.0.1:{proxy}"}
        assert check_certificate("fl.example:9092", trusted(coordinator), proxied) == pytest.approx(397, abs=0.01)
    assert heads[0].startswith(b"CONNECT fl.example:9092 HTTP/1.")


def test_a_proxy_that_opens_tls_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    with listening(shows(coordinator_in(tmp_path / "firewall"))) as port, listening(leads_to(port, [])) as proxy:
        refused = refusal(coordinator, "fl.example:9092", {"https_proxy": f"http://127.0.0.1:{proxy}"})
    assert refused.exit_code == ExitCode.OTHER_AUTHORITY
    assert "a firewall opens TLS on the way" in refused.remedy


def test_a_proxy_that_declines_is_named_with_its_reason(coordinator: Coordinator) -> None:
    with listening(answers(b"HTTP/1.1 403 Forbidden\r\n\r\n")) as proxy:
        said = not_now(coordinator, "fl.example:9092", {"https_proxy": f"http://127.0.0.1:{proxy}"})
    assert said.startswith(f"fl.example:9092 through the proxy 127.0.0.1:{proxy}: ")
    assert "403 Forbidden" in said


def test_a_proxy_that_speaks_no_http_does_not_end_the_sites_program(coordinator: Coordinator) -> None:
    with listening(answers(b"SSH-2.0-OpenSSH_9.6\r\n")) as proxy:
        proxied = {"https_proxy": f"http://127.0.0.1:{proxy}"}
        with pytest.raises((Unreachable, http.client.HTTPException)) as ended:
            check_certificate("fl.example:9092", trusted(coordinator), proxied)
    kind = ended.type
    del ended
    gc.collect(1)
    assert kind is Unreachable


def test_a_proxy_that_asks_for_a_password_gets_the_one_of_its_url(coordinator: Coordinator) -> None:
    heads: list[bytes] = []
    with listening(shows(coordinator)) as port, listening(leads_to(port, heads)) as proxy:
        proxied = {"https_proxy": f"http://north:p%40ss@127.0.0.1:{proxy}"}
        check_certificate("fl.example:9092", trusted(coordinator), proxied)
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"north:p@ss") in heads[0]


@pytest.fixture
def no_proxy_here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Whatever the machine of the tests has set."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return monkeypatch


PROXY = "http://127.0.0.1:PORT"


@pytest.mark.parametrize(
    ("host", "environment"),
    [
        ("localhost", {}),
        *(("localhost", {name: PROXY}) for name in ("grpc_proxy", "https_proxy", "http_proxy")),
        *(("localhost", {name: PROXY}) for name in ("GRPC_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy")),
        *(
            ("localhost", {"https_proxy": PROXY, name: "localhost"})
            for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY")
        ),
        *(
            ("localhost", {"https_proxy": PROXY, "no_proxy": f"example, {name} "})
            for name in ("localhost", ".localhost")
        ),
        *(("localhost", {"https_proxy": PROXY, "no_proxy": name}) for name in ("calhost", "*", ",", "10.0.0.0/8")),
        ("localhost", {"https_proxy": PROXY, "no_grpc_proxy": "example", "no_proxy": "localhost"}),
        ("localhost", {"grpc_proxy": PROXY, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}),
        ("localhost", {"https_proxy": PROXY, "http_proxy": "http://127.0.0.1:9"}),
        ("127.0.0.1", {"https_proxy": PROXY, "no_proxy": "127.0.0.1"}),
        ("localhost", {"https_proxy": "127.0.0.1:PORT"}),  # a proxy without http:// is none
        ("localhost", {"https_proxy": "https://127.0.0.1:PORT"}),
        ("localhost", {"grpc_proxy": "", "https_proxy": PROXY}),  # the first variable that is set counts
        ("localhost", {"https_proxy": PROXY, "no_grpc_proxy": "", "no_proxy": "localhost"}),
        ("127.0.0.1", {"https_proxy": PROXY, "no_proxy": "127.0.0.0/8"}),
        ("localhost", {"https_proxy": PROXY, "no_proxy": "LOCALHOST"}),
    ],
)
def test_the_handshake_goes_the_way_that_grpc_will_go(
    host: str, environment: Mapping[str, str], no_proxy_here: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as target:
        for name, value in environment.items():
            no_proxy_here.setenv(name, value.replace("PORT", str(proxy.getsockname()[1])))
        ours = {None: target, proxy.getsockname(): proxy}[find_proxy_address(host, os.environ)]
        with grpc.secure_channel(f"{host}:{target.getsockname()[1]}", grpc.ssl_channel_credentials()) as channel:
            call = channel.unary_unary("/any").future(b"", timeout=20)
            called, _, _ = select([proxy, target], [], [], 20)
            call.cancel()
    assert called == [ours]
