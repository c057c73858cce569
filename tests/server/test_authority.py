"""The coordinator's certificates, judged by what a hospital's TLS makes of them."""

import datetime as dt
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from common.errors import BadInput
from server.coordinator.authority import certificate_faults, days_until_expiry, issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile
from tests.certificates import of_version_10, pem_of

HOSTS = ("fl.hospital.example", "fl-2.hospital.example", "192.0.2.7", "2001:db8::7")


def coordinator_in(folder: Path, *hosts: str) -> Coordinator:
    """A folder with an authority and a server certificate for these hosts."""
    file = CoordinatorFile(name="trial", hosts=hosts or HOSTS, port=9092)
    coordinator = Coordinator(folder, file)
    make_authority(coordinator)
    issue_server_certificate(coordinator)
    return coordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return coordinator_in(tmp_path)


def server_files(coordinator: Coordinator) -> tuple[Path, Path]:
    return coordinator.authority / "server.crt", coordinator.authority / "server.key"


def shake_hands(trusted: Path, host: str, chain: Path, key: Path) -> None:
    """A TLS handshake in memory, the client's side as strict as a hospital's; raises what the client refuses for."""
    client_context = ssl.create_default_context(cafile=str(trusted))
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(chain, key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in _steps(client, server):
        pass


def _steps(client: ssl.SSLObject, server: ssl.SSLObject) -> Iterator[None]:
    """Let each side go on until both are done."""
    waiting = [client, server]
    while waiting:
        side = waiting.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(side)
        yield


@pytest.mark.parametrize("host", [*HOSTS, "localhost", "127.0.0.1"])
def test_a_site_that_trusts_the_kit_accepts_the_server_under_every_host_and_on_loopback(
    host: str, coordinator: Coordinator
) -> None:
    shake_hands(coordinator.ca_certificate, host, *server_files(coordinator))


@pytest.mark.parametrize("host", ["hospital.example", "x.fl.hospital.example", "192.0.2.8", "2001:db8::8"])
def test_a_site_refuses_the_server_under_any_other_host(host: str, coordinator: Coordinator) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(coordinator.ca_certificate, host, *server_files(coordinator))


def test_an_address_counts_as_an_address_and_never_as_a_name(coordinator: Coordinator) -> None:
    certificate = x509.load_pem_x509_certificate(server_files(coordinator)[0].read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.hospital.example", "fl-2.hospital.example", "localhost"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["192.0.2.7", "2001:db8::7", "127.0.0.1"]


def test_the_certificate_of_another_coordinator_of_the_same_name_is_refused(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    stranger = coordinator_in(tmp_path / "stranger")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(coordinator.ca_certificate, HOSTS[0], *server_files(stranger))


def test_whoever_takes_the_servers_key_cannot_issue_certificates_with_it(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    chain, key_path = server_files(coordinator)
    server_key = form.load_pem_private_key(key_path.read_bytes(), None)
    assert isinstance(server_key, ec.EllipticCurvePrivateKey)
    server, now = x509.load_pem_x509_certificate(chain.read_bytes()), dt.datetime.now(dt.UTC)
    forged = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bank.example")]))
        .issuer_name(server.subject)
        .public_key(server_key.public_key())
        .serial_number(7)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("bank.example")]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(server_key.public_key()), critical=False)
        .sign(server_key, hashes.SHA256())
    )
    both = tmp_path / "forged.crt"
    both.write_bytes(forged.public_bytes(form.Encoding.PEM) + chain.read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA certificate"):
        shake_hands(coordinator.ca_certificate, "bank.example", both, key_path)


def test_each_of_three_marks_alone_keeps_the_servers_key_from_issuing_certificates(coordinator: Coordinator) -> None:
    authority, server = (
        x509.load_pem_x509_certificate((coordinator.authority / name).read_bytes()).extensions
        for name in ("ca.crt", "server.crt")
    )
    assert authority.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert not server.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_a_renewed_certificate_has_a_new_key_and_is_accepted_with_the_kits_that_are_out(
    coordinator: Coordinator,
) -> None:
    authority = [(coordinator.authority / name).read_bytes() for name in ("ca.crt", "ca.key")]
    before = [path.read_bytes() for path in server_files(coordinator)]
    issue_server_certificate(coordinator)
    after = [path.read_bytes() for path in server_files(coordinator)]
    assert [(coordinator.authority / name).read_bytes() for name in ("ca.crt", "ca.key")] == authority
    assert before[0] != after[0]
    assert before[1] != after[1]
    shake_hands(coordinator.ca_certificate, HOSTS[0], *server_files(coordinator))


def test_an_authority_is_never_written_over(coordinator: Coordinator) -> None:
    before = {path.name: path.read_bytes() for path in coordinator.authority.iterdir()}
    with pytest.raises(FileExistsError):
        make_authority(coordinator)
    assert {path.name: path.read_bytes() for path in coordinator.authority.iterdir()} == before


@pytest.mark.usefixtures("lax_umask")
def test_private_keys_are_their_owners_alone_also_after_a_renewal(tmp_path: Path) -> None:
    coordinator = coordinator_in(tmp_path)
    issue_server_certificate(coordinator)
    for name in ("ca.key", "server.key"):
        assert (coordinator.authority / name).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in coordinator.authority.iterdir()) == [
        *("ca.crt", "ca.key", "server.crt", "server.key")
    ]


def test_a_new_certificate_holds_for_a_year_and_one_of_every_host_has_no_fault(coordinator: Coordinator) -> None:
    assert days_until_expiry(coordinator) == pytest.approx(397, abs=0.01)
    assert certificate_faults(coordinator) == []


def test_an_expired_certificate_is_a_fault_that_says_how_to_renew_it(coordinator: Coordinator) -> None:
    issue_server_certificate(coordinator, days=-2)
    assert days_until_expiry(coordinator) == pytest.approx(-2, abs=0.01)
    (fault,) = certificate_faults(coordinator)
    remedy = f"Run: flwr-server init {coordinator.folder} --renew"
    expired = x509.load_pem_x509_certificate(server_files(coordinator)[0].read_bytes()).not_valid_after_utc
    assert str(fault).startswith(f"authority/server.crt: expired on {expired:%Y-%m-%d %H:%M} UTC; this machine's clock")
    assert str(fault).endswith(f" UTC. {remedy}")


def test_each_host_that_was_added_since_is_a_fault_of_its_own(coordinator: Coordinator) -> None:
    hosts = (*HOSTS, "new.hospital.example", "192.0.2.9")
    wider = Coordinator(coordinator.folder, coordinator.file.model_copy(update={"hosts": hosts}))
    problems = [fault.problem for fault in certificate_faults(wider)]
    assert problems == ["is not for the host new.hospital.example.", "is not for the host 192.0.2.9."]


@pytest.mark.parametrize("name", ["ca.key", "ca.crt"])
def test_a_damaged_authority_is_named_and_the_servers_certificate_stays(name: str, coordinator: Coordinator) -> None:
    before = [path.read_bytes() for path in server_files(coordinator)]
    (coordinator.authority / name).write_bytes(b"-----BEGIN NOTHING-----\n")
    with pytest.raises(BadInput, match=r"the authority cannot be read: .*start a new folder and new kits"):
        issue_server_certificate(coordinator)
    assert [path.read_bytes() for path in server_files(coordinator)] == before


def test_a_servers_certificate_of_a_version_that_does_not_exist_is_named(coordinator: Coordinator) -> None:
    path, _ = server_files(coordinator)
    path.write_text(pem_of(of_version_10(x509.load_pem_x509_certificate(path.read_bytes()))))
    with pytest.raises(BadInput, match=r"server\.crt: cannot be read: it is damaged"):
        certificate_faults(coordinator)


def test_a_missing_server_certificate_is_named_with_the_command_that_makes_one(coordinator: Coordinator) -> None:
    server_files(coordinator)[0].unlink()
    with pytest.raises(BadInput, match=r"server\.crt: cannot be read: .* Run: flwr-server init .* --renew"):
        certificate_faults(coordinator)
