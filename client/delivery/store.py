"""Verify and store the packages of finished models that the coordinator sends.

A package is stored unpacked in ``state/delivered/RUN/``. It is verified again each time that it is listed or used.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509

from polyclinic.client.delivery.manifests import (
    DELIVERED_FOLDER,
    DELIVERY_EVENT,
    get_delivered_folder,
    list_run_folders,
)
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.security.delivery import (
    MANIFEST_FILE,
    PACKAGE_FILES,
    SIGNATURE_FILE,
    Delivery,
    DeliveryFault,
    DeliveryManifest,
    unpack_delivery,
    verify_delivery,
)
from polyclinic.common.system.files import (
    make_private_folder,
    make_temporary_path,
    write_atomically,
)
from polyclinic.common.system.plain_names import PlainName, RunName, join_plain_name
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.wire.delivery import DeliveryRequest
from polyclinic.common.wire.records import RefusalNoted

if TYPE_CHECKING:
    from polyclinic.client.site.site import Site

MAX_DELIVERIES_BY_NETWORK = 20
"""Maximum number of stored packages that came over the network, so that no coordinator fills the hospital's disk."""


@dataclass(frozen=True)
class StoredDelivery:
    """A package in the site's folder.

    Attributes:
        manifest: The manifest that the coordinator signed; None if the package does not match its signature.
        fault: The reason why the package does not match its signature; empty if it does.
    """

    folder: Path
    manifest: DeliveryManifest | None
    fault: str = ""


def receive_delivery_request(site: "Site", request: DeliveryRequest) -> RefusalNoted:
    """Verify a package that came over the connection, store it, and acknowledge it.

    Raises:
        BadInput: If the package was changed or is another site's, or too many are stored.
    """
    folder = get_delivered_folder(site.folder)
    try:
        if site.authority is None:
            raise DeliveryFault("a simulated site stores none")
        delivery = verify_delivery(unpack_delivery(request.content), site.authority, site.name)
        is_new = not join_plain_name(folder, RunName(delivery.manifest.run)).exists()
        if is_new and folder.is_dir() and len(list_run_folders(folder)) >= MAX_DELIVERIES_BY_NETWORK:
            raise DeliveryFault(f"{MAX_DELIVERIES_BY_NETWORK} packages are stored here, and this one comes unasked")
    except DeliveryFault as fault:
        remedy = f"A person can store it here: flwr-client receive, or make room in {DELIVERED_FOLDER}."
        raise BadInput([Fault("the package", f"is not stored: {fault}.", remedy)]) from None
    stored = store_delivery(site.folder, delivery)
    manifest = delivery.manifest
    facts = {"name": manifest.title, "coordinator": make_printable_line(manifest.coordinator)}
    model = {"run": manifest.run, "sha256": manifest.model_sha256}
    AuditLog(site.folder, durable=site.durable).append(event=DELIVERY_EVENT, run=request.run, **facts, model=model)
    site.tell(
        f"the coordinator {make_printable_line(manifest.coordinator)} delivers the model of {manifest.title}: "
        f"{stored.folder}"
    )
    return RefusalNoted(request.run, site.name)


def store_delivery(state: Path, delivery: Delivery) -> StoredDelivery:
    """Store a verified package in place of an earlier one of the same run."""
    folder = get_delivered_folder(state)
    make_private_folder(folder)
    run_folder = join_plain_name(folder, RunName(delivery.manifest.run))
    if (run_folder / MANIFEST_FILE).is_file() and (run_folder / MANIFEST_FILE).read_bytes() == delivery.contents[
        MANIFEST_FILE
    ]:
        return StoredDelivery(run_folder, delivery.manifest)
    temporary = make_temporary_path(run_folder)
    shutil.rmtree(temporary, ignore_errors=True)
    make_private_folder(temporary)
    for name, content in delivery.contents.items():
        write_atomically(join_plain_name(temporary, PlainName(name)), content, private=True)
    shutil.rmtree(run_folder, ignore_errors=True)
    temporary.rename(run_folder)
    return StoredDelivery(run_folder, delivery.manifest)


def verify_stored_delivery(folder: Path, authority: x509.Certificate, site: str) -> StoredDelivery:
    """Verify the signature and the hashes of a stored package."""
    try:
        names = (*PACKAGE_FILES, MANIFEST_FILE, SIGNATURE_FILE)
        contents = {name: join_plain_name(folder, PlainName(name)).read_bytes() for name in names}
        return StoredDelivery(folder, verify_delivery(contents, authority, site).manifest)
    except OSError as error:
        return StoredDelivery(folder, None, f"{Path(str(error.filename)).name} cannot be read: {error.strerror}")
    except DeliveryFault as fault:
        return StoredDelivery(folder, None, str(fault))
