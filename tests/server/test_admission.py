"""From a hospital's request to its kit, and what keeps out a key that is not, or no longer, admitted."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from common.errors import BadInput
from common.security.identity import (
    SiteKit,
    SiteRequest,
    create_key,
    fingerprint,
    public_key_line,
    read_kit,
    read_request,
)
from server.coordinator.admission import admission_faults, admit, admitted_sites, claims_reader, revoke, unrevoked_sites
from server.coordinator.folder import Coordinator, read_coordinator
from strategies.engine.claims import AdmissionLimits
from tests.network.real import flwr_client, flwr_server

LINE = (  # made, and its fingerprint printed, by OpenSSH's ssh-keygen
    "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBE4GjIPg4AKxfjdDskwj7LaqW0dfreVrxumJ5Q9h"
    "tknJy+HZH/1MLTMR7CC55Hij1noCGNHcIAGNl1EBQCiLCBo= north"
)
FINGERPRINT = "SHA256:b0ZzPD93OgiIRnl4Fh3MXvf8G8ab4yLvCsJSSwQ/s1I"


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    folder = tmp_path / "trial"
    assert flwr_server("init", folder, "--name", "trial", "--host", "fl.example", "--host", "192.0.2.7").code == 0
    return read_coordinator(folder)


@pytest.fixture
def keys(tmp_path: Path) -> Sequence[str]:
    """Three public keys."""
    return [public_key_line(create_key(tmp_path / f"{number}.key"), "comment") for number in range(3)]


def refusal(coordinator: Coordinator, site: str, key: str) -> str:
    """Why a request is not granted, or an empty string."""
    return "\n".join(str(fault) for fault in admission_faults(coordinator, SiteRequest(site=site, public_key=key)))


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------- request -> kit


def test_both_sides_are_shown_the_same_fingerprint_and_nothing_is_written_before_the_coordinator_agrees(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = flwr_client("init", tmp_path / "north", "--name", "north")
    request, before = tmp_path / "north" / "north.request", everything_in(coordinator.folder)
    shown = fingerprint(read_request(request).public_key)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    declined = flwr_server("admit", coordinator.folder, request)
    assert declined.code == 1
    assert everything_in(coordinator.folder) == before
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    agreed = flwr_server("admit", coordinator.folder, request)
    assert agreed.code == 0
    for said in (made.out, declined.out, agreed.out):
        assert shown in said
    assert list(unrevoked_sites(coordinator)) == ["north"]


def test_without_standard_input_nobody_is_asked_and_the_option_is_named(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, before = requested(tmp_path), everything_in(coordinator.folder)
    monkeypatch.setattr("sys.stdin", None)  # as Python sets it where descriptor 0 is closed
    ended = flwr_server("admit", coordinator.folder, request)
    assert ended.code == 2
    assert "standard input: is closed, so nobody can be asked. Agree with --yes." in ended.err
    assert everything_in(coordinator.folder) == before


def test_a_fingerprint_is_the_one_that_openssh_prints() -> None:
    assert fingerprint(LINE) == FINGERPRINT


def test_a_kit_holds_the_first_host_the_port_the_authority_and_the_key_it_was_asked_for(
    coordinator: Coordinator,
) -> None:
    kit = read_kit(admit(coordinator, SiteRequest(site="north", public_key=LINE)))
    assert (kit.coordinator, kit.site, kit.address, kit.public_key) == ("trial", "north", "fl.example:9092", LINE)
    assert kit.ca_certificate == coordinator.ca_certificate.read_text(encoding="ascii")


def private_number(path: Path) -> bytes:
    """The secret of a key file."""
    text = path.read_bytes()
    key = form.load_ssh_private_key(text, None) if b"OPENSSH" in text else form.load_pem_private_key(text, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.private_numbers().private_value.to_bytes(32, "big")


def test_neither_request_nor_kit_holds_a_secret(coordinator: Coordinator, tmp_path: Path) -> None:
    flwr_client("init", tmp_path / "north", "--name", "north")
    request = tmp_path / "north" / "north.request"
    flwr_server("admit", coordinator.folder, request, "--yes")
    kit = read_kit(coordinator.folder / "kits" / "north.kit")
    assert SiteRequest.model_fields.keys() == {"site", "public_key"}
    assert SiteKit.model_fields.keys() == {"coordinator", "address", "site", "public_key", "ca_certificate"}
    certificate = x509.load_pem_x509_certificate(kit.ca_certificate.encode())
    in_them = b"".join(base64.b64decode(key.split()[1]) for key in (read_request(request).public_key, kit.public_key))
    in_them += certificate.public_bytes(form.Encoding.DER)
    for path in (tmp_path / "north" / "north.key", *coordinator.authority.glob("*.key")):
        assert private_number(path) not in in_them
    assert kit.ca_certificate.count("-----BEGIN") == 1


def test_a_request_that_comes_again_gets_the_kit_again(coordinator: Coordinator, keys: Sequence[str]) -> None:
    request = SiteRequest(site="north", public_key=keys[0])
    first = admit(coordinator, request).read_bytes()
    other_comment = request.model_copy(update={"public_key": keys[0].replace("comment", "other")})
    assert admit(coordinator, other_comment).read_bytes() == first.replace(b"comment", b"other")
    assert list(unrevoked_sites(coordinator)) == ["north"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('site = "../north"', "north.request: site: use letters, digits, spaces"),
        ('public_key = "ssh-rsa AAAA"', "north.request: public_key: is no OpenSSH public key"),
        (
            'public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILM+rvN+ot98qgEN796jTiQfZfG1KaT0PtFDJ/XFSqti n"',
            "north.request: public_key: is not a key on the curve NIST P-256",
        ),
        ('private_key = "mine"', "north.request: private_key: is not a known key."),
    ],
)
def test_a_request_that_is_none_is_refused_with_its_fault(line: str, said: str, tmp_path: Path) -> None:
    good = {"site": 'site = "north"', "public_key": f'public_key = "{LINE}"'}
    good[line.split(" = ")[0]] = line
    (tmp_path / "north.request").write_text("\n".join(good.values()), encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        read_request(tmp_path / "north.request")
    assert said in str(refused.value)


# ---------------------------------------------------------------------- names and keys are given once


def test_a_name_is_not_given_to_another_key_and_the_remedy_is_said(
    coordinator: Coordinator, keys: Sequence[str]
) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    before = everything_in(coordinator.folder)
    with pytest.raises(BadInput, match=r'the name "north" is taken by another key\. .*flwr-server revoke .* north'):
        admit(coordinator, SiteRequest(site="north", public_key=keys[1]))
    assert everything_in(coordinator.folder) == before


@pytest.mark.parametrize(
    ("name", "said"),
    [("s\u0456te-1", "mixes letters of CYRILLIC and LATIN"), ("SITE-1", 'differs from the admitted site "site-1" in')],
)
def test_a_name_that_looks_like_another_is_refused(
    name: str, said: str, coordinator: Coordinator, keys: Sequence[str]
) -> None:
    admit(coordinator, SiteRequest(site="site-1", public_key=keys[0]))
    (fault,) = admission_faults(coordinator, SiteRequest(site=name, public_key=keys[1]))
    assert said in str(fault)


def test_a_key_is_not_admitted_under_a_second_name_also_with_another_comment(
    coordinator: Coordinator, keys: Sequence[str]
) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    said = refusal(coordinator, "south", keys[0].replace("comment", "south"))
    assert said.startswith('south.request: its key was admitted under the name "north".')


def test_a_name_and_a_key_of_two_other_sites_are_two_faults(coordinator: Coordinator, keys: Sequence[str]) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    admit(coordinator, SiteRequest(site="south", public_key=keys[1]))
    said = refusal(coordinator, "north", keys[1])
    assert 'the name "north" is taken by another key.' in said
    assert 'its key was admitted under the name "south".' in said


# ---------------------------------------------------------------------- revoked


def test_a_revoked_site_is_no_member_and_still_listed(coordinator: Coordinator, keys: Sequence[str]) -> None:
    for name, key in zip(("south", "north", "east"), keys, strict=True):
        admit(coordinator, SiteRequest(site=name, public_key=key))
    revoke(coordinator, "north")
    assert list(unrevoked_sites(coordinator)) == ["east", "south"]
    assert list(admitted_sites(coordinator)) == ["east", "north", "south"]
    assert admitted_sites(coordinator)["north"].revoked


@pytest.mark.parametrize("name", ["north", "south"])
def test_a_revoked_key_is_admitted_under_no_name(name: str, coordinator: Coordinator, keys: Sequence[str]) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    revoke(coordinator, "north")
    with pytest.raises(BadInput, match=r'its key was revoked under the name "north"\. The site makes a new key'):
        admit(coordinator, SiteRequest(site=name, public_key=keys[0]))
    assert unrevoked_sites(coordinator) == {}


def test_a_revoked_site_comes_back_under_its_name_with_a_new_key(coordinator: Coordinator, keys: Sequence[str]) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    revoke(coordinator, "north")
    admit(coordinator, SiteRequest(site="north", public_key=keys[1]))
    assert unrevoked_sites(coordinator)["north"].public_key == keys[1]


def test_a_revoked_key_stays_revoked_after_its_name_has_gone_to_a_new_key(
    coordinator: Coordinator, keys: Sequence[str]
) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    revoke(coordinator, "north")
    admit(coordinator, SiteRequest(site="north", public_key=keys[1]))
    assert "its key was revoked" in refusal(coordinator, "south", keys[0])


def test_whoever_is_revoked_by_a_wrong_name_stays_and_the_nearest_name_is_offered(
    coordinator: Coordinator, keys: Sequence[str]
) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    with pytest.raises(BadInput, match=r'nort: is not an admitted site\. Did you mean "north"\?'):
        revoke(coordinator, "nort")
    assert list(unrevoked_sites(coordinator)) == ["north"]


def test_a_site_is_revoked_once_and_the_time_stays(coordinator: Coordinator, keys: Sequence[str]) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    when = revoke(coordinator, "north").revoked
    with pytest.raises(BadInput, match=r"north: is not an admitted site\. Admitted sites: none\."):
        revoke(coordinator, "north")
    assert admitted_sites(coordinator)["north"].revoked == when


def test_renewing_with_a_new_host_writes_new_kits_for_members_only(
    coordinator: Coordinator, keys: Sequence[str]
) -> None:
    kits = [
        admit(coordinator, SiteRequest(site=name, public_key=key))
        for name, key in zip(("north", "south"), keys, strict=False)
    ]
    revoke(coordinator, "south")
    renewed = flwr_server("init", coordinator.folder, "--renew", "--host", "new.example")
    assert [read_kit(kit).address for kit in kits] == ["new.example:9092", "fl.example:9092"]
    assert str(kits[0]) in renewed.out
    assert str(kits[1]) not in renewed.out


def test_an_admission_that_was_edited_wrongly_is_named_by_its_file(
    coordinator: Coordinator, keys: Sequence[str]
) -> None:
    admit(coordinator, SiteRequest(site="north", public_key=keys[0]))
    path = coordinator.sites / "north.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("revoked", "revokd"), encoding="utf-8")
    with pytest.raises(BadInput, match=r'sites/north\.toml: revokd: is not a known key\. Did you mean "revoked"\?'):
        admitted_sites(coordinator)


# ---------------------------------------------------------------------- what a site may claim


def requested(tmp_path: Path, name: str = "north") -> Path:
    assert flwr_client("init", tmp_path / name, "--name", name).code == 0
    return tmp_path / name / f"{name}.request"


def claims(coordinator: Coordinator) -> tuple[tuple[str, ...], int]:
    site = unrevoked_sites(coordinator)["north"]
    return site.classes, site.max_images


def test_what_a_site_may_claim_is_written_shown_kept_changed_and_taken_away(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    request = requested(tmp_path)
    admitting = ("admit", coordinator.folder, request, "--yes")
    assert flwr_server(*admitting).code == 0
    assert claims(coordinator) == ((), 0)
    assert flwr_server(*admitting, "--classes", "Pleural Effusion, Nodule", "--max-images", "500").code == 0
    assert claims(coordinator) == (("Pleural Effusion", "Nodule"), 500)
    assert 'north may claim "Pleural Effusion", "Nodule"; 500 training images at most' in flwr_server(
        "status", coordinator.folder
    ).out.replace("\n", "")
    assert flwr_server(*admitting).code == 0
    assert claims(coordinator) == (("Pleural Effusion", "Nodule"), 500)
    look = claims_reader(coordinator)
    assert look() == {"north": AdmissionLimits(frozenset({"Pleural Effusion", "Nodule"}), 500)}
    assert flwr_server(*admitting, "--classes", "", "--max-images", "0").code == 0
    assert look() == {"north": AdmissionLimits()}
    (coordinator.sites / "north.toml").write_text("broken", encoding="utf-8")
    assert look() == {"north": AdmissionLimits()}


@pytest.mark.parametrize("classes", ["a,a", "x" * 101, "\x1b[31m", "a\u202eb"])
def test_names_that_cannot_be_classes_are_refused(classes: str, coordinator: Coordinator, tmp_path: Path) -> None:
    ended = flwr_server("admit", coordinator.folder, requested(tmp_path), "--yes", "--classes", classes)
    assert ended.code == 2
    assert "flwr-server admit: classes: " in ended.err
    assert "\x1b" not in ended.err
    assert unrevoked_sites(coordinator) == {}


# ---------------------------------------------------------------------- another file in its place


def test_a_private_key_in_the_place_of_a_request_is_called_burnt_and_not_asked_for_again(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    flwr_client("init", tmp_path / "north", "--name", "north")
    before = everything_in(coordinator.folder)
    for key in (tmp_path / "north" / "north.key", coordinator.authority / "ca.key"):
        ended = flwr_server("admit", coordinator.folder, key, "--yes")
        said = " ".join(ended.err.split())
        assert ended.code == 2
        assert f"{key.name}: is a PRIVATE key. It must never leave the machine that made it" in said
        assert "Delete every copy; its owner makes a new key" in said
        assert "Have the hospital send it again" not in said
    assert everything_in(coordinator.folder) == before


def test_a_kit_or_a_folder_in_the_place_of_a_request_is_named_as_what_it_is(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    flwr_client("init", tmp_path / "north", "--name", "north")
    assert flwr_server("admit", coordinator.folder, tmp_path / "north" / "north.request", "--yes").code == 0
    kit = flwr_server("admit", coordinator.folder, coordinator.folder / "kits" / "north.kit", "--yes")
    folder = flwr_server("admit", coordinator.folder, tmp_path / "north", "--yes")
    assert (kit.code, folder.code) == (2, 2)
    assert "is a kit; a request is wanted here." in kit.err
    assert "is a folder. Name the file NAME.request." in " ".join(folder.err.split())


def test_a_kit_of_another_site_in_the_folder_is_said_to_be_there(coordinator: Coordinator, tmp_path: Path) -> None:
    for name in ("north", "south"):
        flwr_client("init", tmp_path / name, "--name", name)
        assert flwr_server("admit", coordinator.folder, tmp_path / name / f"{name}.request", "--yes").code == 0
    kit = next(coordinator.folder.rglob("south.kit"))
    (tmp_path / "north" / "south.kit").write_bytes(kit.read_bytes())
    (tmp_path / "north" / "site.toml").write_text('name = "north"\n[data]\nkind = "digits"\n', encoding="utf-8")
    ended = flwr_client("start", tmp_path / "north")
    assert ended.code == 2
    assert '"south.kit" is there: the kit of another site, or under another name.' in " ".join(ended.err.split())
