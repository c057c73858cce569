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
    REPORT_FILE,
    DeliveryFault,
    OtherSiteDelivery,
    unpack_delivery,
    verify_delivery,
)
from polyclinic.common.system.files import make_missing_input_fault, open_input_file
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import format_bytes, format_count_with_noun, make_printable_line
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.common.wire.delivery import MAX_PACKAGE_BYTES

PRINTED_RUN_DIGITS = 8
"""Number of a run identifier's digits in a table; :func:`find_delivery` accepts so few digits."""
_RESEND_REMEDY = (
    "Have the coordinator make it again, with flwr-server deliver, and send it over a way that changes nothing."
)


def receive_delivery_file(settings: SiteSettings, path: Path) -> StoredDelivery:
    """Verify a package that came as a file, and store it.

    Raises:
        BadInput: If the file cannot be read, was changed, is another site's, or another authority signed it.
        ConnectionNotAccepted: If the kit's authority is not the recorded one.
    """
    authority = read_authority_certificate(settings)
    try:
        with open_input_file(path) as file:
            content = file.read(MAX_PACKAGE_BYTES + 1)
    except OSError:
        raise BadInput([make_missing_input_fault(path)]) from None
    try:
        delivery = verify_delivery(unpack_delivery(content), authority, settings.file.name)
    except OtherSiteDelivery as fault:
        # The package has no fault, so the remedy is not to make it again.
        remedy = f"Ask the coordinator for {settings.file.name}.delivery of the same run."
        raise BadInput([Fault(str(path), f"is not stored: {fault}.", remedy)]) from None
    except DeliveryFault as fault:
        raise BadInput([Fault(str(path), f"is not stored: {fault}.", _RESEND_REMEDY)]) from None
    return store_delivery(settings.state_folder, delivery)


def list_deliveries(settings: SiteSettings) -> list[StoredDelivery]:
    """Verify the stored packages, and return them in the order of their signatures' times.

    Raises:
        BadInput: If the kit cannot be read.
    """
    folder = get_delivered_folder(settings.state_folder)
    if not folder.is_dir():
        return []
    authority = read_authority_certificate(settings)
    stored = [verify_stored_delivery(path, authority, settings.file.name) for path in list_run_folders(folder)]
    return sorted(stored, key=lambda each: (each.manifest.time if each.manifest else "", each.folder.name))


def find_delivery(settings: SiteSettings, name: str) -> StoredDelivery | None:
    """Return the stored package of a run; None if there is none.

    Args:
        name: The run's identifier, or its first digits.

    Raises:
        BadInput: If several identifiers begin with these digits, the package was changed, or the kit cannot be read.
    """
    folder = get_delivered_folder(settings.state_folder)
    run_folders = list_run_folders(folder) if folder.is_dir() else []
    named = [path for path in run_folders if path.name == name]
    if not named and name:
        named = [path for path in run_folders if path.name.startswith(name)]
    if not named:
        return None
    if len(named) > 1:
        problem = f"is the beginning of {format_count_with_noun(len(named), 'run')}."
        raise BadInput([Fault(name, problem, "Name more digits: flwr-client delivered lists them.")])
    stored = verify_stored_delivery(named[0], read_authority_certificate(settings), settings.file.name)
    if stored.manifest is None:
        raise BadInput([Fault(str(named[0]), f"is not as the coordinator signed it: {stored.fault}.", _RESEND_REMEDY)])
    return stored


def read_authority_certificate(settings: SiteSettings) -> x509.Certificate:
    """Return the certificate of the coordinator's authority, from the site's kit.

    Raises:
        BadInput: If the kit cannot be read.
        ConnectionNotAccepted: If the kit's authority is not the recorded one.
    """
    kit = read_and_check_connection_kit(settings)
    refuse_other_authority(settings, kit)
    return x509.load_pem_x509_certificate(kit.ca_certificate.encode())


# ---------------------------------------------------------------------- for people


def describe_delivery(stored: StoredDelivery) -> list[str]:
    """Return lines about a package that was just stored: coordinator, run, folder and report."""
    manifest = stored.manifest
    assert manifest is not None, "it was verified just now"
    return [
        f"From the coordinator {make_printable_line(manifest.coordinator)}, signed on {manifest.time[:10]}, and whole.",
        f"Run: {manifest.title} ({manifest.run}); model {manifest.model_sha256[:12]}.",
        f"Stored in {stored.folder}.",
        f"This hospital's report: {join_plain_name(stored.folder, PlainName(REPORT_FILE))}",
    ]


def format_deliveries(deliveries: Sequence[StoredDelivery]) -> Group:
    """Format the stored packages as a table, with the faults of changed ones below it."""
    table = fold_long_words(Table("run", "study", "from", "signed", "size", "state", width=80))
    faults = list[Text]()
    for stored in deliveries:
        manifest = stored.manifest
        run = stored.folder.name[:PRINTED_RUN_DIGITS]
        if manifest is None:
            table.add_row(Text(run), "", "", "", "", "CHANGED")
            faults.append(
                Text(f"{stored.folder} is not as the coordinator signed it: {stored.fault}. {_RESEND_REMEDY}")
            )
            continue
        size = format_bytes(sum(file.bytes for file in manifest.files.values()))
        words = (run, manifest.title, manifest.coordinator, manifest.time[:10], size, "whole")
        table.add_row(*(Text(make_printable_line(word)) for word in words))
    return Group(table, *faults)


def make_deliveries_json(deliveries: Sequence[StoredDelivery]) -> list[dict[str, object]]:
    """Return a dictionary for each stored package, for ``--json``."""
    return [
        {
            "run": stored.folder.name,
            "folder": str(stored.folder),
            "fault": stored.fault,
            "manifest": None if stored.manifest is None else stored.manifest.model_dump(mode="json"),
        }
        for stored in deliveries
    ]
