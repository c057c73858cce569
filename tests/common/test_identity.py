"""Keys, requests and kits: what is written is read back, and nothing is taken for what it is not."""

import base64
import datetime as dt
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import example, given
from hypothesis import strategies as st

from polyclinic.common.errors import BadInput
from polyclinic.common.security.identity import (
    SiteAdmissionRequest,
    check_public_key,
    check_site_name,
    compute_public_key_fingerprint,
    create_private_key,
    format_public_key_line,
    is_same_public_key,
    read_admission_request,
    read_connection_kit,
    read_private_key,
    split_host_port,
    write_commented_toml_file,
)
from polyclinic.common.system.plain_text import PLAIN_NAME
from tests.certificates import of_version_10, pem_of

KEY = ec.derive_private_key(7, ec.SECP256R1())
LINE = format_public_key_line(KEY, "north")
OTHER = format_public_key_line(ec.derive_private_key(8, ec.SECP256R1()), "north")


@pytest.mark.usefixtures("lax_umask")
def test_a_new_key_is_its_owners_alone_is_read_back_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "site" / "north.key"
    key = create_private_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_private_key(path).private_numbers() == key.private_numbers()
    with pytest.raises(FileExistsError):
        create_private_key(path)
    assert read_private_key(path).private_numbers() == key.private_numbers()
    assert create_private_key(tmp_path / "other.key").private_numbers() != key.private_numbers()


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_key_that_others_may_touch_is_refused_with_the_command_that_mends_it(mode: int, tmp_path: Path) -> None:
    create_private_key(tmp_path / "north.key")
    (tmp_path / "north.key").chmod(mode)
    with pytest.raises(BadInput, match=rf"\(mode {mode:o}\)\. Run: chmod 600 .*/north\.key$"):
        read_private_key(tmp_path / "north.key")
    (tmp_path / "north.key").chmod(0o600)
    read_private_key(tmp_path / "north.key")


def test_a_key_is_the_same_under_any_comment_and_another_under_the_same_comment() -> None:
    renamed = format_public_key_line(KEY, "the same hospital, years later")
    assert [is_same_public_key(LINE, line) for line in (renamed, OTHER)] == [True, False]
    same, renamed, other = map(compute_public_key_fingerprint, (LINE, renamed, OTHER))
    assert same == renamed != other


@given(st.text(max_size=20))
def test_a_public_line_is_a_key_whatever_the_sites_name(comment: str) -> None:
    assert check_public_key(format_public_key_line(KEY, comment)).split(" ")[:2] == LINE.split()[:2]


@pytest.mark.parametrize("line", ["", "north", "ecdsa-sha2-nistp256", LINE.replace("nistp256", "nistp384"), LINE[:90]])
def test_a_line_that_is_no_public_key_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is no OpenSSH public key"):
        check_public_key(line)


def spelled_differently(line: str) -> list[str]:
    """The same key in other letters: OpenSSH's base64 may hold signs that count for nothing, and unused bits."""
    kind, letters, comment = line.split()
    raised = chr(ord(letters[-2]) + 1)
    others = [f"{letters[:9]}!{letters[9:]}", f"{letters[:-2]}{raised}=", f"{letters}AAAA"]
    assert {base64.b64decode(other)[:104] for other in others} == {base64.b64decode(letters)}
    return [f"{kind} {other} {comment}" for other in others]


def certified(key: ec.EllipticCurvePrivateKey) -> str:
    """The same key in a certificate that it made for itself."""
    builder = form.SSHCertificateBuilder().public_key(key.public_key()).type(form.SSHCertificateType.USER)
    builder = builder.key_id(b"north").serial(1).valid_after(0).valid_before(1).valid_for_all_principals()
    return f"{builder.sign(key).public_bytes().decode()} north"


@pytest.mark.parametrize(
    "line", [*spelled_differently(LINE), certified(KEY)], ids=["sign", "bits", "rest", "certificate"]
)
def test_a_key_in_other_letters_is_refused_or_recognised(line: str) -> None:
    if not is_same_public_key(line, LINE):
        with pytest.raises(ValueError, match=r"^is no"):
            check_public_key(line)


ELSEWHERE = ("", ".", "..", "../north", "a/b", "a\\b", ".north", "-rf", " north", "north\n", "a\nb", "a\0")


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "letters, digits") for name in ELSEWHERE), ("n" * 101, "100 characters"), ("北" * 67, "200 bytes")],
)
def test_a_name_that_could_lead_elsewhere_or_is_too_long_is_refused(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        check_site_name(name)


@example("北" * 66)  # 198 bytes
@given(st.from_regex(PLAIN_NAME, fullmatch=True).filter(lambda name: len(name.encode()) <= 200))
def test_a_name_that_is_accepted_is_that_of_a_file_in_its_folder(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"{check_site_name(name)}.request"
    assert os.path.normpath(path) == f"{path.parent}/{name}.request"
    path.write_text("")
    path.unlink()


@given(
    host=st.sampled_from(["fl.example", "192.0.2.7", "localhost", "[2001:db8::7]", "[::1]"]),
    port=st.integers(1, 2**16 - 1),
)
def test_an_address_is_a_host_without_brackets_and_a_port(host: str, port: int) -> None:
    assert split_host_port(f"{host}:{port}") == (host.strip("[]"), port)


@pytest.mark.parametrize(
    "address",
    [
        *("", "fl.example", ":9092", *(f"fl.example:{port}" for port in ("", "0", "65536", "-1", "x"))),
        *("https://fl.example:9092", "fl.example:9092/", "fl.example:9092\n", "fl example:9092", "::1:9092", "[::1]"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"^expected host:port$"):
        split_host_port(address)


@example(site="north", comment="\x7f")
@given(
    site=st.text("aé北 .-_()", min_size=1, max_size=20).map(lambda rest: f"n{rest}"),
    comment=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=20),
)
def test_any_request_is_read_as_it_was_written(
    site: str, comment: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    request = SiteAdmissionRequest(site=site, public_key=f"{LINE} {comment}")
    path = tmp_path_factory.mktemp("request") / "site.request"
    write_commented_toml_file(path, request, "For the coordinator.")
    assert read_admission_request(path) == request
    assert path.read_text(encoding="utf-8").startswith("# For the coordinator.\n")


BAD_KIT = """
coordinator = "../trial"
address = "https://fl.example"
site = "north"
public_key = "ssh-rsa AAAA"
ca_certificate = "-----BEGIN CERTIFICATE-----"
adress = "fl.example:9092"
"""


def test_every_fault_of_a_kit_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "north.kit").write_text(BAD_KIT, encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        read_connection_kit(tmp_path / "north.kit")
    again = "Have the coordinator send it again, as flwr-server admit wrote it."
    faults = {fault.where.split(": ")[1]: fault for fault in refused.value.faults}
    assert faults.keys() == {"coordinator", "address", "public_key", "ca_certificate", "adress"}
    assert all(fault.remedy == again for fault in faults.values())
    assert faults["address"].problem.startswith("expected host:port")
    assert faults["adress"].problem == "is not a known key."
    assert faults["ca_certificate"].problem.startswith("is no PEM certificate")


def test_a_kit_with_a_certificate_of_a_version_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trial")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(KEY.public_key())
    builder = builder.serial_number(7).not_valid_before(now).not_valid_after(now + dt.timedelta(days=1))
    pem = pem_of(of_version_10(builder.sign(KEY, hashes.SHA256())))
    (tmp_path / "north.kit").write_text(BAD_KIT.replace('"-----BEGIN CERTIFICATE-----"', f"'''{pem}'''"))
    with pytest.raises(BadInput, match="ca_certificate: is no PEM certificate"):
        read_connection_kit(tmp_path / "north.kit")
