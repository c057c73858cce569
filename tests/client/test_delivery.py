"""Packages of finished runs: what a hospital verifies and stores, whoever sends them."""

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.client.delivery.manifests import get_delivered_folder
from polyclinic.client.delivery.store import MAX_DELIVERIES_BY_NETWORK, receive_delivery_request
from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.client.site.site import Site
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.security.delivery import (
    MANIFEST_FILE,
    PACKAGE_FILES,
    Delivery,
    DeliveryFault,
    DeliveryManifest,
    describe_files,
    pack_delivery,
    sign_delivery,
    unpack_delivery,
    verify_delivery,
)
from polyclinic.common.wire.delivery import DeliveryRequest, make_delivery_request
from polyclinic.server.coordinator.authority import ensure_valid_signing_key, read_authority_certificate
from polyclinic.server.coordinator.folder import read_coordinator_folder
from tests.client.check.sites import Hospital
from tests.network.real import flwr_server

CONTENTS = {name: f"content of {name}".encode() for name in PACKAGE_FILES}


class Coordinator:
    """A coordinator that signs packages."""

    def __init__(self, folder: Path) -> None:
        assert flwr_server("init", folder, "--name", "trial", "--host", "127.0.0.1").code == 0
        coordinator = read_coordinator_folder(folder)
        self.key, self.certificate = ensure_valid_signing_key(coordinator)
        self.authority = x509.load_pem_x509_certificate(read_authority_certificate(coordinator).encode())

    def sign(self, site: str = "north", run: str = "run-1", key: ec.EllipticCurvePrivateKey | None = None) -> Delivery:
        manifest = DeliveryManifest(
            run=run,
            name="first study",
            site=site,
            coordinator="trial",
            time="2026-11-30T00:00:00+00:00",
            model_sha256="a" * 64,
            files=describe_files(CONTENTS),
        )
        return sign_delivery(manifest, CONTENTS, key or self.key, self.certificate)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Coordinator:
    return Coordinator(tmp_path_factory.mktemp("delivery") / "trial")


@pytest.fixture(scope="module")
def package(trial: Coordinator) -> bytes:
    return pack_delivery(trial.sign())


def test_the_same_files_are_the_same_bytes(trial: Coordinator) -> None:
    delivery = trial.sign()
    assert pack_delivery(delivery) == pack_delivery(delivery)
    unpacked = verify_delivery(unpack_delivery(pack_delivery(delivery)), trial.authority, "north")
    assert unpacked.manifest == delivery.manifest
    assert unpacked.contents == delivery.contents


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_package_with_a_changed_byte_is_refused_or_holds_what_was_signed(
    trial: Coordinator, package: bytes, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(package) - 1))
    other = data.draw(st.integers(1, 255))
    changed = package[:place] + bytes([package[place] ^ other]) + package[place + 1 :]
    try:
        delivery = verify_delivery(unpack_delivery(changed), trial.authority, "north")
    except DeliveryFault:
        return
    # The byte is a time or a mode of the zip file, which nobody reads.
    assert {name: delivery.contents[name] for name in PACKAGE_FILES} == CONTENTS


def test_a_package_whose_zip_directory_is_changed_is_refused_or_holds_what_was_signed(
    trial: Coordinator, package: bytes
) -> None:
    refused = 0
    for place in range(len(package) - 22, len(package)):  # the end record: offsets, sizes, counts
        for other in (1, 2, 128, 255):
            changed = package[:place] + bytes([package[place] ^ other]) + package[place + 1 :]
            try:
                delivery = verify_delivery(unpack_delivery(changed), trial.authority, "north")
            except DeliveryFault:
                refused += 1
            else:
                assert {name: delivery.contents[name] for name in PACKAGE_FILES} == CONTENTS
    assert refused >= 40


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=400))
def test_bytes_that_are_no_package_are_refused(content: bytes) -> None:
    with pytest.raises(DeliveryFault):
        unpack_delivery(content)


def test_a_package_that_is_cut_off_is_refused(package: bytes) -> None:
    for length in (0, 4, len(package) // 2, len(package) - 1):
        with pytest.raises(DeliveryFault):
            unpack_delivery(package[:length])


@pytest.mark.parametrize("name", ["../site.toml", "/etc/passwd", "extra.txt"])
def test_a_package_with_a_file_more_is_refused(package: bytes, name: str) -> None:
    file = io.BytesIO(package)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(name, b"more")
    with pytest.raises(DeliveryFault, match="other files"):
        unpack_delivery(file.getvalue())


def test_a_package_with_a_file_twice_is_refused(package: bytes) -> None:
    file = io.BytesIO(package)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr(PACKAGE_FILES[0], b"more")
    with pytest.raises(DeliveryFault, match="other files"):
        unpack_delivery(file.getvalue())


def test_a_compressed_package_is_refused_before_it_is_unpacked(package: bytes) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in unpack_delivery(package).items():
            archive.writestr(name, content)
    with pytest.raises(DeliveryFault, match="compressed"):
        unpack_delivery(file.getvalue())


def test_a_manifest_that_another_key_signed_is_refused(trial: Coordinator) -> None:
    forged = trial.sign(key=ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(DeliveryFault, match=MANIFEST_FILE):
        verify_delivery(forged.contents, trial.authority, "north")


# ---------------------------------------------------------------------- over the connection


@pytest.fixture
def site(hospital: Hospital, trial: Coordinator) -> Site:
    return replace(load_site(read_site_settings(hospital.folder)), authority=trial.authority)


def test_a_site_stores_a_package_that_is_its_own_and_no_other(site: Site, trial: Coordinator) -> None:
    noted = receive_delivery_request(site, make_delivery_request("delivery-1", pack_delivery(trial.sign(site.name))))
    assert (noted.run, noted.site) == ("delivery-1", site.name)
    stored = get_delivered_folder(site.folder) / "run-1"
    assert {name: (stored / name).read_bytes() for name in PACKAGE_FILES} == CONTENTS
    others = make_delivery_request("delivery-2", pack_delivery(trial.sign("another", "run-2")))
    with pytest.raises(BadInput, match="it is for the site"):
        receive_delivery_request(site, others)
    assert [path.name for path in get_delivered_folder(site.folder).iterdir()] == ["run-1"]


def test_a_coordinator_cannot_fill_the_disk_with_runs(site: Site, trial: Coordinator) -> None:
    for number in range(MAX_DELIVERIES_BY_NETWORK):
        package = pack_delivery(trial.sign(site.name, f"run-{number}"))
        receive_delivery_request(site, make_delivery_request("delivery-1", package))
    one_more = make_delivery_request("delivery-1", pack_delivery(trial.sign(site.name, "run-more")))
    with pytest.raises(BadInput, match="packages are stored here"):
        receive_delivery_request(site, one_more)
    again = make_delivery_request("delivery-1", pack_delivery(trial.sign(site.name, "run-0")))
    assert receive_delivery_request(site, again).site == site.name


def test_a_package_of_another_length_than_it_states_is_no_record() -> None:
    request = make_delivery_request("run", b"12345")
    assert request.content == b"12345"
    with pytest.raises(WireError):
        DeliveryRequest("run", 9, request.package)
