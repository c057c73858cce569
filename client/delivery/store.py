"""Verify and store the packages that the coordinator hands out: ``flwr-client receive`` and ``flwr-client delivered``.

A package lies unpacked in ``state/delivered/RUN/``. It is verified again whenever it is listed or used.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from rich.console import Group
from rich.table import Table
from rich.text import Text

from polyclinic.client.connection.authority import refuse_other_authority
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import SiteSettings, read_and_check_connection_kit
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.delivery import (
    FILES,
    MANIFEST,
    MOST_BYTES,
    REPORT,
    SIGNATURE,
    Delivery,
    DeliveryFault,
    DeliveryManifest,
    unpack_delivery,
    verify_delivery,
)
from polyclinic.common.system.files import (
    make_missing_input_fault,
    make_private_folder,
    make_temporary_path,
    open_input_file,
    write_atomically,
)
from polyclinic.common.system.plain_names import PlainName, RunName, join_plain_name
from polyclinic.common.system.plain_text import format_bytes, format_count_with_noun, make_printable_line
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.common.wire.delivery import DeliveryRequest
from polyclinic.common.wire.records import RefusalNoted

FOLDER = "delivered"
SHOWN_DIGITS = 8
"""First digits of a run's identifier that a table shows; :func:`find_delivery` takes them."""
MOST_STORED_BY_NETWORK = 20
"""Packages after which none is stored that comes over the network: a coordinator could fill the hospital's disk."""
_AGAIN = "Have the coordinator make it again, with flwr-server deliver, and send it over a way that changes nothing."


@dataclass(frozen=True)
class StoredDelivery:
    """A package in the site's folder.

    Attributes:
        manifest: What the coordinator signed; None if the package is no longer what it signed.
        fault: Why; empty for a whole package.
    """

    folder: Path
    manifest: DeliveryManifest | None
    fault: str = ""


def get_delivered_folder(state: Path) -> Path:
    """Return the folder of all packages that this site has received."""
    return state / FOLDER


def receive_delivery_file(settings: SiteSettings, path: Path) -> StoredDelivery:
    """Verify a package that came as a file, and store it.

    Raises:
        BadInput: If the file cannot be read, was changed, is another site's, or another authority signed it.
        ConnectionNotAccepted: If the kit is of another authority than the one that this site knows.
    """
    authority = read_authority(settings)
    try:
        with open_input_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError:
        raise BadInput([make_missing_input_fault(path)]) from None
    try:
        delivery = verify_delivery(unpack_delivery(content), authority, settings.file.name)
    except DeliveryFault as fault:
        raise BadInput([Fault(str(path), f"is not stored: {fault}.", _AGAIN)]) from None
    return store_delivery(settings.state_folder, delivery)


def receive_delivery_request(site: Site, request: DeliveryRequest) -> RefusalNoted:
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
        if is_new and folder.is_dir() and len(_list_folders(folder)) >= MOST_STORED_BY_NETWORK:
            raise DeliveryFault(f"{MOST_STORED_BY_NETWORK} packages are stored here, and this one comes unasked")
    except DeliveryFault as fault:
        remedy = f"A person can store it here: flwr-client receive, or make room in {FOLDER}."
        raise BadInput([Fault("the package", f"is not stored: {fault}.", remedy)]) from None
    stored = store_delivery(site.folder, delivery)
    manifest = delivery.manifest
    site.tell(
        f"the coordinator {make_printable_line(manifest.coordinator)} delivers the model of {manifest.title}: "
        f"{stored.folder}"
    )
    return RefusalNoted(request.run, site.name)


def store_delivery(state: Path, delivery: Delivery) -> StoredDelivery:
    """Store a verified package in place of an earlier one of the same run."""
    folder = get_delivered_folder(state)
    make_private_folder(folder)
    place = join_plain_name(folder, RunName(delivery.manifest.run))
    if (place / MANIFEST).is_file() and (place / MANIFEST).read_bytes() == delivery.contents[MANIFEST]:
        return StoredDelivery(place, delivery.manifest)
    temporary = make_temporary_path(place)
    shutil.rmtree(temporary, ignore_errors=True)
    make_private_folder(temporary)
    for name, content in delivery.contents.items():
        write_atomically(join_plain_name(temporary, PlainName(name)), content, private=True)
    shutil.rmtree(place, ignore_errors=True)
    temporary.rename(place)
    return StoredDelivery(place, delivery.manifest)


def list_deliveries(settings: SiteSettings) -> list[StoredDelivery]:
    """Return the stored packages, verified again, the oldest signature first.

    Raises:
        BadInput: If the kit cannot be read.
    """
    folder = get_delivered_folder(settings.state_folder)
    if not folder.is_dir():
        return []
    authority = read_authority(settings)
    stored = [verify_stored_delivery(place, authority, settings.file.name) for place in _list_folders(folder)]
    return sorted(stored, key=lambda one: (one.manifest.time if one.manifest else "", one.folder.name))


def find_delivery(settings: SiteSettings, name: str) -> StoredDelivery | None:
    """Return the stored package of the run with this identifier, or whose identifier begins so; None if there is none.

    Raises:
        BadInput: If several begin so, the package was changed, or the kit cannot be read.
    """
    folder = get_delivered_folder(settings.state_folder)
    places = _list_folders(folder) if folder.is_dir() else []
    named = [place for place in places if place.name == name] or [p for p in places if name and p.name.startswith(name)]
    if not named:
        return None
    if len(named) > 1:
        problem = f"is the beginning of {format_count_with_noun(len(named), 'run')}."
        raise BadInput([Fault(name, problem, "Name more digits: flwr-client delivered lists them.")])
    stored = verify_stored_delivery(named[0], read_authority(settings), settings.file.name)
    if stored.manifest is None:
        raise BadInput([Fault(str(named[0]), f"is not as the coordinator signed it: {stored.fault}.", _AGAIN)])
    return stored


def verify_stored_delivery(folder: Path, authority: x509.Certificate, site: str) -> StoredDelivery:
    """Verify a stored package again."""
    try:
        names = (*FILES, MANIFEST, SIGNATURE)
        contents = {name: join_plain_name(folder, PlainName(name)).read_bytes() for name in names}
        return StoredDelivery(folder, verify_delivery(contents, authority, site).manifest)
    except OSError as error:
        return StoredDelivery(folder, None, f"{Path(str(error.filename)).name} cannot be read: {error.strerror}")
    except DeliveryFault as fault:
        return StoredDelivery(folder, None, str(fault))


def read_authority(settings: SiteSettings) -> x509.Certificate:
    """Return the certificate of the coordinator's authority, from the site's kit.

    Raises:
        BadInput: If the kit cannot be read.
        ConnectionNotAccepted: If it is of another authority than the one that this site knows.
    """
    kit = read_and_check_connection_kit(settings)
    refuse_other_authority(settings, kit)
    return x509.load_pem_x509_certificate(kit.ca_certificate.encode())


def _list_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


# ---------------------------------------------------------------------- for people


def describe_delivery(stored: StoredDelivery) -> list[str]:
    """Return lines on a package that was stored: from whom, of which run, and what to open."""
    manifest = stored.manifest
    assert manifest is not None, "it was verified just now"
    return [
        f"From the coordinator {make_printable_line(manifest.coordinator)}, signed on {manifest.time[:10]}, and whole.",
        f"Run: {manifest.title} ({manifest.run}); model {manifest.model_sha256[:12]}.",
        f"Stored in {stored.folder}.",
        f"This hospital's report: {join_plain_name(stored.folder, PlainName(REPORT))}",
    ]


def format_deliveries(deliveries: Sequence[StoredDelivery]) -> Group:
    """Format the stored packages as a table, with the faults of changed ones below it."""
    table = fold_long_words(Table("run", "study", "from", "signed", "size", "state", width=80))
    faults = list[Text]()
    for stored in deliveries:
        manifest, run = stored.manifest, stored.folder.name[:SHOWN_DIGITS]
        if manifest is None:
            table.add_row(Text(run), "", "", "", "", "CHANGED")
            faults.append(Text(f"{stored.folder} is not as the coordinator signed it: {stored.fault}. {_AGAIN}"))
            continue
        size = format_bytes(sum(file.bytes for file in manifest.files.values()))
        words = (run, manifest.title, manifest.coordinator, manifest.time[:10], size, "whole")
        table.add_row(*(Text(make_printable_line(word)) for word in words))
    return Group(table, *faults)


def make_deliveries_json(deliveries: Sequence[StoredDelivery]) -> list[dict[str, object]]:
    """Return the stored packages as JSON."""
    return [
        {
            "run": stored.folder.name,
            "folder": str(stored.folder),
            "fault": stored.fault,
            "manifest": None if stored.manifest is None else stored.manifest.model_dump(mode="json"),
        }
        for stored in deliveries
    ]
