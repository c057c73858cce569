"""What is checked before ``flwr-client start`` imports torch or reads an image: within a second, with the remedy."""

import contextlib
from pathlib import Path

from cryptography import x509

from client.connection.exit_codes import Unreachable
from client.connection.tls import days_valid
from client.site.site_file import Settings, read_credentials, read_with_faults
from common.errors import BadInput, Fault, stop_on
from common.security.identity import SiteKit
from common.system.files import is_locked
from common.system.preflight import date_faults, flower_faults, writable_folder_faults

LOOK_S = 0.5
"""How long the coordinator may take to show its certificate; where it takes longer, the connection itself will tell."""


def refuse_to_start(folder: Path) -> None:
    """Look at file, key, kit, rights, room and releases, and at the certificate if the coordinator answers.

    Raises:
        BadInput: With every fault.
        Refused: If the coordinator shows a certificate that this site cannot accept.
    """
    settings, _ = read_with_faults(folder)  # what is wrong with class names is told with the faults of the data
    refuse_second(settings.state)
    stop_on([*_of_credentials(settings), *writable_folder_faults(settings.state), *flower_faults()])
    kit = read_credentials(settings)
    with contextlib.suppress(Unreachable):
        days_valid(kit.address, kit.ca_certificate, timeout_s=LOOK_S)


def refuse_second(state: Path) -> None:
    """Refuse where another process of this site runs.

    Raises:
        BadInput: If one does.
    """
    if is_held(state):
        raise BadInput([of_second(state)])


def is_held(state: Path) -> bool:
    """Return whether a process of this site runs: it holds the lock of the folder."""
    return is_locked(state / "lock")


def of_second(state: Path) -> Fault:
    """That another process of this site runs."""
    return Fault(str(state.parent), "another flwr-client runs on this folder.", "A site has one process.")


def _of_credentials(settings: Settings) -> list[Fault]:
    try:
        kit = read_credentials(settings)
    except BadInput as bad:
        return list(bad.faults)
    return _dates(kit, settings.kit_path.name)


def _dates(kit: SiteKit, name: str) -> list[Fault]:
    authority = x509.load_pem_x509_certificate(kit.ca_certificate.encode())
    return date_faults(f"{name}: the coordinator's authority", authority, "Ask the coordinator for a new kit.")
