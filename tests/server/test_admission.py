"""From a hospital's request to its kit, and the coordinator's certificates as a hospital's TLS judges them."""

import base64
import datetime as dt
import io
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from polyclinic.common.errors import BadInput
from polyclinic.common.security.identity import (
    SiteAdmissionRequest,
    SiteConnectionKit,
    compute_public_key_fingerprint,
    create_private_key,
    format_public_key_line,
    read_admission_request,
    read_connection_kit,
)
from polyclinic.server.coordinator.admission import (
    admit_site,
    find_admission_faults,
    make_site_claim_limits_reader,
    read_all_admitted_sites,
    read_unrevoked_sites,
    revoke_site,
)
from polyclinic.server.coordinator.authority import (
    count_certificate_days_left,
    find_server_certificate_faults,
    issue_server_certificate,
    make_certificate_authority,
)
from polyclinic.server.coordinator.folder import CoordinatorFolder, read_coordinator_folder
from polyclinic.strategies.engine.admission_limits import SiteAdmissionLimits
from tests.certificates import of_version_10, pem_of
from tests.network.real import flwr_client, flwr_server
from tests.server.superlinks import HOSTS, coordinator_in

LINE = (  # made, and its fingerprint printed, by OpenSSH's ssh-keygen
    "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBE4GjIPg4AKxfjdDskwj7LaqW0dfreVrxumJ5Q9h"
    "tknJy+HZH/1MLTMR7CC55Hij1noCGNHcIAGNl1EBQCiLCBo= north"
)
FINGERPRINT = "SHA256:b0ZzPD93OgiIRnl4Fh3MXvf8G8ab4yLvCsJSSwQ/s1I"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """Three public keys."""
    folder = tmp_path_factory.mktemp("keys")
    return [format_public_key_line(create_private_key(folder / f"{number}.key"), "comment") for number in range(3)]


def admit_key(coordinator: CoordinatorFolder, name: str, key: str) -> Path:
    """Admit a site; return its kit."""
    return admit_site(coordinator, SiteAdmissionRequest(site=name, public_key=key))


@pytest.fixture
def kit(coordinator: CoordinatorFolder, keys: Sequence[str]) -> Path:
    """The kit of the site ``north``, which is admitted with the first key."""
    return admit_key(coordinator, "north", keys[0])


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    """The request of a new site ``north``, whose key lies beside it."""
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    return tmp_path / "north" / "north.request"


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_both_sides_see_the_same_fingerprint_and_nothing_is_written_before_the_coordinator_agrees(
    coordinator: CoordinatorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = flwr_client("init", tmp_path / "north", "--name", "north")
    request, before = tmp_path / "north" / "north.request", everything_in(coordinator.folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    declined = flwr_server("admit", coordinator.folder, request)
    assert everything_in(coordinator.folder) == before
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    agreed = flwr_server("admit", coordinator.folder, request)
    fingerprint = compute_public_key_fingerprint(read_admission_request(request).public_key)
    ends = [(ended.code, fingerprint in ended.out) for ended in (created, declined, agreed)]
    assert ends == [(0, True), (1, True), (0, True)]
    assert list(read_unrevoked_sites(coordinator)) == ["north"]


def test_without_standard_input_the_option_is_named(
    coordinator: CoordinatorFolder, request_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything_in(coordinator.folder)
    monkeypatch.setattr("sys.stdin", None)  # as Python sets it where descriptor 0 is closed
    ended = flwr_server("admit", coordinator.folder, request_file)
    assert (ended.code, "--yes" in ended.err) == (2, True)
    assert everything_in(coordinator.folder) == before


def test_a_kit_holds_the_first_host_the_port_the_authority_and_the_key(coordinator: CoordinatorFolder) -> None:
    kit = read_connection_kit(admit_key(coordinator, "north", LINE))
    assert (kit.coordinator, kit.site, kit.address, kit.public_key) == ("trial", "north", "fl.example:9092", LINE)
    assert kit.ca_certificate == coordinator.ca_certificate_path.read_text(encoding="ascii")
    assert compute_public_key_fingerprint(LINE) == FINGERPRINT


def private_number(path: Path) -> bytes:
    """Return the secret of a key file."""
    text = path.read_bytes()
    key = form.load_ssh_private_key(text, None) if b"OPENSSH" in text else form.load_pem_private_key(text, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.private_numbers().private_value.to_bytes(32, "big")


def test_neither_request_nor_kit_holds_a_secret(coordinator: CoordinatorFolder, request_file: Path) -> None:
    flwr_server("admit", coordinator.folder, request_file, "--yes")
    kit = read_connection_kit(coordinator.folder / "kits" / "north.kit")
    assert SiteAdmissionRequest.model_fields.keys() == {"site", "public_key"}
    assert SiteConnectionKit.model_fields.keys() == {"coordinator", "address", "site", "public_key", "ca_certificate"}
    keys = (read_admission_request(request_file).public_key, kit.public_key)
    public = b"".join(base64.b64decode(key.split()[1]) for key in keys)
    public += x509.load_pem_x509_certificate(kit.ca_certificate.encode()).public_bytes(form.Encoding.DER)
    for path in (request_file.with_suffix(".key"), *coordinator.authority_path.glob("*.key")):
        assert private_number(path) not in public
    assert kit.ca_certificate.count("-----BEGIN") == 1
    request_file.write_text(request_file.read_text(encoding="utf-8") + 'private_key = "mine"\n', encoding="utf-8")
    with pytest.raises(BadInput, match="private_key"):
        read_admission_request(request_file)


def test_a_repeated_request_gets_the_kit_again(coordinator: CoordinatorFolder, kit: Path, keys: Sequence[str]) -> None:
    first = kit.read_bytes()
    again = admit_key(coordinator, "north", keys[0].replace("comment", "other"))
    assert again.read_bytes() == first.replace(b"comment", b"other")
    assert list(read_unrevoked_sites(coordinator)) == ["north"]


TAKEN, OWN_KEY = 'the name "north" is taken by another key.', 'its key was admitted under the name "{}".'


def test_a_name_and_a_key_are_given_once(coordinator: CoordinatorFolder, kit: Path, keys: Sequence[str]) -> None:
    admit_key(coordinator, "south", keys[1])
    before = everything_in(coordinator.folder)
    for name, key, *problems in (
        ("north", 2, TAKEN),
        ("n\u043erth", 2, "mixes letters of CYRILLIC and LATIN"),
        ("NORTH", 2, 'differs from the admitted site "north" in'),
        ("east", 0, OWN_KEY.format("north")),
        ("north", 1, TAKEN, OWN_KEY.format("south")),
    ):
        request = SiteAdmissionRequest(site=name, public_key=keys[key].replace("comment", "other"))
        with pytest.raises(BadInput) as refusal:
            admit_site(coordinator, request)
        assert list(refusal.value.faults) == find_admission_faults(coordinator, request)
        assert [problem for problem in problems if problem not in str(refusal.value)] == [], name
        assert everything_in(coordinator.folder) == before


@pytest.mark.parametrize("name", ["NORTH", "north ", "\uff4e\uff4f\uff52\uff54\uff48", "\u207forth", "north  "])
def test_a_name_that_looks_like_that_of_an_admitted_site_is_refused(
    name: str, coordinator: CoordinatorFolder, keys: Sequence[str]
) -> None:
    admit_key(coordinator, "north", keys[0])
    with pytest.raises(BadInput):
        admit_key(coordinator, name, keys[1])


@pytest.mark.parametrize(
    ("admitted", "name"),
    [("site i", "site  i"), ("site i", "site \u0131"), ("south", "\u017fouth")],
)
def test_spaces_dots_and_old_letters_make_no_other_name(
    admitted: str, name: str, coordinator: CoordinatorFolder, keys: Sequence[str]
) -> None:
    admit_key(coordinator, admitted, keys[0])
    with pytest.raises(BadInput):
        admit_key(coordinator, name, keys[1])


def test_a_space_at_the_end_is_no_part_of_a_new_name(
    coordinator: CoordinatorFolder, keys: Sequence[str], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="ends with a space"):
        admit_key(coordinator, "west ", keys[0])
    assert flwr_client("init", tmp_path / "west", "--name", "west ").code == 0
    assert read_admission_request(tmp_path / "west" / "west.request").site == "west"


@pytest.mark.parametrize("name", ["north 2", "north-east", "norte", "n.orth"])
def test_other_names_are_admitted_beside_it(name: str, coordinator: CoordinatorFolder, keys: Sequence[str]) -> None:
    admit_key(coordinator, "north", keys[0])
    assert admit_key(coordinator, name, keys[1]).exists()


def test_a_revoked_site_is_listed_with_its_time(coordinator: CoordinatorFolder, kit: Path, keys: Sequence[str]) -> None:
    for name, key in zip(("south", "east"), keys[1:], strict=True):
        admit_key(coordinator, name, key)
    when = revoke_site(coordinator, "north").revoked
    assert list(read_unrevoked_sites(coordinator)) == ["east", "south"]
    assert list(read_all_admitted_sites(coordinator)) == ["east", "north", "south"]
    with pytest.raises(BadInput, match="north: is not an admitted site"):
        revoke_site(coordinator, "north")
    assert read_all_admitted_sites(coordinator)["north"].revoked == when != ""


def test_a_revoked_site_comes_back_only_with_a_new_key(
    coordinator: CoordinatorFolder, kit: Path, keys: Sequence[str]
) -> None:
    revoke_site(coordinator, "north")
    for members in ({}, {"north": keys[1]}):
        for name in ("north", "south"):
            with pytest.raises(BadInput, match='its key was revoked under the name "north"'):
                admit_key(coordinator, name, keys[0])
        assert {name: site.public_key for name, site in read_unrevoked_sites(coordinator).items()} == members
        admit_key(coordinator, "north", keys[1])


def test_a_renewal_writes_new_kits_for_members_only(
    coordinator: CoordinatorFolder, kit: Path, keys: Sequence[str]
) -> None:
    revoked = admit_key(coordinator, "south", keys[1])
    revoke_site(coordinator, "south")
    renewed = flwr_server("init", coordinator.folder, "--renew", "--host", "new.example")
    assert [read_connection_kit(path).address for path in (kit, revoked)] == ["new.example:9092", "fl.example:9092"]
    assert [str(path) in renewed.out for path in (kit, revoked)] == [True, False]


def test_a_renewal_with_another_port_changes_settings_and_kits_and_no_host(
    coordinator: CoordinatorFolder, kit: Path
) -> None:
    renewed = flwr_server("init", coordinator.folder, "--renew", "--port", "9443", "--listen", "127.0.0.1")
    assert renewed.code == 0
    file = read_coordinator_folder(coordinator.folder).file
    assert (file.hosts, file.port, file.listen) == (coordinator.file.hosts, 9443, "127.0.0.1")
    assert read_connection_kit(kit).address == "fl.example:9443"
    assert str(kit) in renewed.out


@pytest.mark.parametrize("option", [("--port", "0"), ("--port", "70000"), ("--name", "other")])
def test_a_renewal_with_an_option_that_it_cannot_follow_changes_nothing(
    option: tuple[str, str], coordinator: CoordinatorFolder
) -> None:
    before = {path: path.read_bytes() for path in coordinator.folder.rglob("*") if path.is_file()}
    assert flwr_server("init", coordinator.folder, "--renew", *option).code == 2
    assert {path: path.read_bytes() for path in coordinator.folder.rglob("*") if path.is_file()} == before


def test_claims_are_written_shown_changed_and_removed(coordinator: CoordinatorFolder, request_file: Path) -> None:
    def admit_again(*options: str) -> tuple[tuple[str, ...], int]:
        assert flwr_server("admit", coordinator.folder, request_file, "--yes", *options).code == 0
        site = read_unrevoked_sites(coordinator)["north"]
        return site.classes, site.max_images

    limits = (("Pleural Effusion", "Nodule"), 500)
    assert admit_again() == ((), 0)
    assert admit_again("--classes", "Pleural Effusion, Nodule", "--max-images", "500") == limits
    status = flwr_server("status", coordinator.folder).out.replace("\n", "")
    assert 'north may claim "Pleural Effusion", "Nodule"; 500 training images at most' in status
    assert admit_again() == limits
    read = make_site_claim_limits_reader(coordinator)
    assert read() == {"north": SiteAdmissionLimits(frozenset(limits[0]), 500)}
    assert admit_again("--classes", "", "--max-images", "0") == ((), 0)
    assert read() == {"north": SiteAdmissionLimits()}
    (coordinator.sites_path / "north.toml").write_text("broken", encoding="utf-8")
    assert read() == {"north": SiteAdmissionLimits()}


def order_of(coordinator: CoordinatorFolder) -> list[str]:
    """The sites in the order that decides between contradicting labels."""
    limits = make_site_claim_limits_reader(coordinator)()
    return sorted(limits, key=lambda site: limits[site].order)


def test_no_site_changes_its_place_by_its_name_nor_by_another_admission(
    coordinator: CoordinatorFolder, keys: Sequence[str]
) -> None:
    for name, key in zip(("north", "aaa", "zzz"), keys, strict=True):  # within one second
        admit_key(coordinator, name, key)
    assert order_of(coordinator) == ["north", "aaa", "zzz"]
    admit_key(coordinator, "north", keys[0])  # the same key, for other limits
    revoke_site(coordinator, "aaa")
    assert order_of(coordinator) == ["north", "zzz"]
    admit_key(coordinator, "aaa", LINE)  # a new key
    assert order_of(coordinator) == ["north", "aaa", "zzz"]


def test_a_folder_of_an_earlier_release_keeps_its_order(coordinator: CoordinatorFolder, keys: Sequence[str]) -> None:
    for name, key, when in zip(("north", "aaa", "zzz"), keys, ("10", "30", "20"), strict=True):
        time = f"2026-01-01T00:00:{when}+00:00"
        text = f'site = "{name}"\npublic_key = "{key}"\nadmitted = "{time}"\n'
        coordinator.sites_path.mkdir(exist_ok=True)
        (coordinator.sites_path / f"{name}.toml").write_text(text, encoding="utf-8")
    assert order_of(coordinator) == ["north", "zzz", "aaa"]
    admit_key(coordinator, "north", keys[0])
    admit_key(coordinator, "east", LINE)
    assert order_of(coordinator) == ["north", "zzz", "aaa", "east"]


def test_names_that_cannot_be_classes_are_refused(coordinator: CoordinatorFolder, request_file: Path) -> None:
    for classes in ("a,a", "x" * 101, "\x1b[31m", "a\u202eb"):
        ended = flwr_server("admit", coordinator.folder, request_file, "--yes", "--classes", classes)
        assert (ended.code, "flwr-server admit: classes: " in ended.err, "\x1b" in ended.err) == (2, True, False)
        assert read_unrevoked_sites(coordinator) == {}


def test_another_file_in_the_place_of_a_request_is_named(
    coordinator: CoordinatorFolder, kit: Path, request_file: Path
) -> None:
    before = everything_in(coordinator.folder)
    for path, name in (
        (request_file.with_suffix(".key"), "PRIVATE key"),
        (coordinator.authority_path / "ca.key", "PRIVATE key"),
        (kit, "is a kit"),
        (request_file.parent, "is a folder"),
    ):
        ended = flwr_server("admit", coordinator.folder, path, "--yes")
        errors = " ".join(ended.err.split())
        # A private key is burnt, and is not asked for again.
        burnt = name == "PRIVATE key"
        assert (ended.code, name in errors, "Delete every copy" in errors) == (2, True, burnt), path
    assert everything_in(coordinator.folder) == before


def server_files(coordinator: CoordinatorFolder) -> tuple[Path, Path]:
    return coordinator.authority_path / "server.crt", coordinator.authority_path / "server.key"


def contents(coordinator: CoordinatorFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in coordinator.authority_path.iterdir()}


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def shake_hands(trusted: Path, host: str, chain: Path, key: Path) -> None:
    """Shake hands in memory, the client as strict as a hospital's; raise what the client refuses for."""
    client_context = ssl.create_default_context(cafile=str(trusted))
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(chain, key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    waiting = [client, server_context.wrap_bio(to_server, to_client, server_side=True)]
    while waiting:
        side = waiting.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(side)


def test_a_site_accepts_the_server_under_each_of_its_hosts_and_on_loopback_and_no_other(
    coordinator: CoordinatorFolder, tmp_path: Path
) -> None:
    for host in (*HOSTS, "localhost", "127.0.0.1"):
        shake_hands(coordinator.ca_certificate_path, host, *server_files(coordinator))
    for host in ("example", "x.fl.example", "192.0.2.8", "2001:db8::8"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake_hands(coordinator.ca_certificate_path, host, *server_files(coordinator))
    with pytest.raises(ssl.SSLCertVerificationError):  # another coordinator of the same name
        shake_hands(coordinator.ca_certificate_path, HOSTS[0], *server_files(coordinator_in(tmp_path / "stranger")))


def test_an_address_counts_as_an_address_and_never_as_a_name(coordinator: CoordinatorFolder) -> None:
    extensions = certificate(server_files(coordinator)[0]).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example", "fl-2.example", "localhost"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["192.0.2.7", "2001:db8::7", "127.0.0.1"]


def test_the_servers_key_cannot_issue_certificates(coordinator: CoordinatorFolder, tmp_path: Path) -> None:
    """Each of three marks alone prevents it."""
    chain, key_path = server_files(coordinator)
    authority, server = certificate(coordinator.ca_certificate_path), certificate(chain)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    key, now = form.load_pem_private_key(key_path.read_bytes(), None), dt.datetime.now(dt.UTC)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    forged = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bank.example")]))
        .issuer_name(server.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("bank.example")]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    both = tmp_path / "forged.crt"
    both.write_bytes(forged.public_bytes(form.Encoding.PEM) + chain.read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA certificate"):
        shake_hands(coordinator.ca_certificate_path, "bank.example", both, key_path)


def test_a_renewed_certificate_has_a_new_key_and_is_accepted_with_old_kits(coordinator: CoordinatorFolder) -> None:
    before = contents(coordinator)
    issue_server_certificate(coordinator)
    after = contents(coordinator)
    assert {name for name in before if before[name] != after[name]} == {"server.crt", "server.key"}
    shake_hands(coordinator.ca_certificate_path, HOSTS[0], *server_files(coordinator))
    with pytest.raises(FileExistsError):  # an authority is never written over
        make_certificate_authority(coordinator)
    assert contents(coordinator) == after


@pytest.mark.usefixtures("lax_umask")
def test_private_keys_are_their_owners_alone_also_after_a_renewal(tmp_path: Path) -> None:
    coordinator = coordinator_in(tmp_path / "trial")
    issue_server_certificate(coordinator)
    for name in ("ca.key", "server.key"):
        assert (coordinator.authority_path / name).stat().st_mode & 0o777 == 0o600
    assert contents(coordinator).keys() == {"ca.crt", "ca.key", "server.crt", "server.key"}


def test_a_new_certificate_holds_for_a_year_and_for_every_host(coordinator: CoordinatorFolder) -> None:
    assert count_certificate_days_left(coordinator) == pytest.approx(397, abs=0.01)
    assert find_server_certificate_faults(coordinator) == []
    hosts = (*HOSTS, "new.example", "192.0.2.9")
    wider = CoordinatorFolder(coordinator.folder, coordinator.file.model_copy(update={"hosts": hosts}))
    assert [fault.problem.split()[-1] for fault in find_server_certificate_faults(wider)] == [
        "new.example.",
        "192.0.2.9.",
    ]
    issue_server_certificate(coordinator, days=-2)
    assert count_certificate_days_left(coordinator) == pytest.approx(-2, abs=0.01)


def test_a_damaged_authority_or_certificate_is_named_and_the_servers_certificate_stays(
    coordinator: CoordinatorFolder,
) -> None:
    for name in ("ca.key", "ca.crt"):
        whole = (coordinator.authority_path / name).read_bytes()
        (coordinator.authority_path / name).write_bytes(b"-----BEGIN NOTHING-----\n")
        before = contents(coordinator)
        with pytest.raises(BadInput, match=r"the authority cannot be read"):
            issue_server_certificate(coordinator)
        assert contents(coordinator) == before
        (coordinator.authority_path / name).write_bytes(whole)
    path, _ = server_files(coordinator)
    path.write_text(pem_of(of_version_10(certificate(path))))  # a version that does not exist
    with pytest.raises(BadInput, match=r"server\.crt: cannot be read: it is damaged"):
        find_server_certificate_faults(coordinator)
