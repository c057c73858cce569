"""Fast checks of ``flwr-client start`` before it imports torch or reads an image."""

import contextlib
from pathlib import Path

from cryptography import x509

from polyclinic.client.connection.authority import refuse_other_authority
from polyclinic.client.connection.exit_codes import CoordinatorUnreachable
from polyclinic.client.connection.tls import check_coordinator_certificate
from polyclinic.client.site.site_file import read_and_check_connection_kit, read_site_with_faults
from polyclinic.client.site.withdrawn import refuse_withdrawn_site
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import is_file_locked
from polyclinic.common.system.preflight import (
    find_certificate_date_faults,
    find_flower_release_faults,
    find_folder_write_faults,
)

CERTIFICATE_TIMEOUT_S = 0.5
"""Time for the coordinator to show its certificate; after that, the connection itself reports a fault."""


def check_client_before_start(folder: Path, *, has_job: bool = False) -> None:
    """Check settings, key, kit (the coordinator's file), disk and Flower, and the coordinator if it answers.

    Args:
        has_job: True if a queue's job waits or runs on the folder. Then another ``flwr-client`` process, that of the
            job, may run too.

    Raises:
        BadInput: If a check finds faults (it lists all), or if this site has left its federation.
        ConnectionNotAccepted: If this site cannot accept the coordinator's certificate, or knows another authority.
    """
    settings, _ = read_site_with_faults(folder)  # faults of class names are reported with those of the data
    refuse_withdrawn_site(folder, settings.state_folder)
    if not has_job:
        refuse_running_site(settings.state_folder)
    faults = list[Fault]()
    try:
        kit = read_and_check_connection_kit(settings)
    except BadInput as bad:
        faults += bad.faults
    else:
        authority = x509.load_pem_x509_certificate(kit.ca_certificate.encode())
        name = settings.kit_path.name
        faults += find_certificate_date_faults(
            f"{name}: the coordinator's authority", authority, "Ask the coordinator for a new kit."
        )
    raise_faults([*faults, *find_folder_write_faults(settings.state_folder), *find_flower_release_faults()])
    refuse_other_authority(settings, kit)
    with contextlib.suppress(CoordinatorUnreachable):
        check_coordinator_certificate(kit.address, kit.ca_certificate, timeout_s=CERTIFICATE_TIMEOUT_S)


def is_client_running(state: Path) -> bool:
    """Return True if a ``flwr-client`` process holds the lock of this state folder."""
    return is_file_locked(state / "lock")


def refuse_running_site(state: Path) -> None:
    """Check that no ``flwr-client`` process runs on the site.

    Raises:
        BadInput: If a ``flwr-client`` process holds the lock of this state folder.
    """
    if is_client_running(state):
        raise BadInput([make_already_running_fault(state)])


def make_already_running_fault(state: Path) -> Fault:
    """Make the fault that another ``flwr-client`` process runs on this folder."""
    return Fault(
        str(state.parent), "another flwr-client runs on this folder.", "A site has one process: stop it first."
    )
