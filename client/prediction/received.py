"""Packages that this hospital has received: ``flwr-client receive``, ``flwr-client delivered``, and their models."""

from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from rich.console import Group
from rich.table import Table
from rich.text import Text

from polyclinic.client.connection.authority import refuse_other_authority
from polyclinic.client.delivery.manifests import get_delivered_folder, list_run_folders
from polyclinic.client.delivery.store import StoredDelivery, store_delivery, verify_stored_delivery
from polyclinic.client.site.site_file import SiteSettings, read_and_check_connection_kit
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.delivery import (
    REPORT,
    DeliveryFault,
    OtherSiteDelivery,
    unpack_delivery,
    verify_delivery,
)
from polyclinic.common.system.files import make_missing_input_fault, open_input_file
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import format_bytes, format_count_with_noun, make_printable_line
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.common.wire.delivery import MOST_PACKAGE_BYTES

SHOWN_DIGITS = 8
"""First digits of a run's identifier that a table shows; :func:`find_delivery` takes them."""
_AGAIN = "Have the coordinator make it again, with flwr-server deliver, and send it over a way that changes nothing."


def receive_delivery_file(settings: SiteSettings, path: Path) -> StoredDelivery:
    """Verify a package that came as a file, and store it.

    Raises:
        BadInput: If the file cannot be read, was changed, is another site's, or another authority signed it.
        ConnectionNotAccepted: If the kit is of another authority than the one that this site knows.
    """
    authority = read_authority(settings)
    try:
        with open_input_file(path) as file:
            content = file.read(MOST_PACKAGE_BYTES + 1)
    except OSError:
        raise BadInput([make_missing_input_fault(path)]) from None
    try:
        delivery = verify_delivery(unpack_delivery(content), authority, settings.file.name)
    except OtherSiteDelivery as fault:
        # Nothing is wrong with the package: to make it again would not help.
        remedy = f"Ask the coordinator for {settings.file.name}.delivery of the same run."
        raise BadInput([Fault(str(path), f"is not stored: {fault}.", remedy)]) from None
    except DeliveryFault as fault:
        raise BadInput([Fault(str(path), f"is not stored: {fault}.", _AGAIN)]) from None
    return store_delivery(settings.state_folder, delivery)


def list_deliveries(settings: SiteSettings) -> list[StoredDelivery]:
    """Return the stored packages, verified again, the oldest signature first.

    Raises:
        BadInput: If the kit cannot be read.
    """
    folder = get_delivered_folder(settings.state_folder)
    if not folder.is_dir():
        return []
    authority = read_authority(settings)
    stored = [verify_stored_delivery(place, authority, settings.file.name) for place in list_run_folders(folder)]
    return sorted(stored, key=lambda one: (one.manifest.time if one.manifest else "", one.folder.name))


def find_delivery(settings: SiteSettings, name: str) -> StoredDelivery | None:
    """Return the stored package of the run with this identifier, or whose identifier begins so; None if there is none.

    Raises:
        BadInput: If several begin so, the package was changed, or the kit cannot be read.
    """
    folder = get_delivered_folder(settings.state_folder)
    places = list_run_folders(folder) if folder.is_dir() else []
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


def read_authority(settings: SiteSettings) -> x509.Certificate:
    """Return the certificate of the coordinator's authority, from the site's kit.

    Raises:
        BadInput: If the kit cannot be read.
        ConnectionNotAccepted: If it is of another authority than the one that this site knows.
    """
    kit = read_and_check_connection_kit(settings)
    refuse_other_authority(settings, kit)
    return x509.load_pem_x509_certificate(kit.ca_certificate.encode())


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
        manifest = stored.manifest
        run = stored.folder.name[:SHOWN_DIGITS]
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
