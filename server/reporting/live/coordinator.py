"""``flwr-server status --web``: the live view of a coordinator's runs, with the coordinator's own certificate."""

import secrets
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from common.errors import stop_on
from common.system.stopping import closed_first
from server.coordinator.authority import certificate_faults
from server.coordinator.folder import Coordinator
from server.reporting.live.listening import listening
from server.reporting.live.service import Certificate, ViewServer, Watch
from server.reporting.live.snapshot import of_coordinator

EVERYWHERE = ("0.0.0.0", "::")


def show(coordinator: Coordinator, address: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until this process is told to stop. Only files are read: no run notices.

    Raises:
        BadInput: If the certificate is of no use, or the port cannot be had.
    """
    stop_on(certificate_faults(coordinator))
    files = Certificate(coordinator.authority / "server.crt", coordinator.authority / "server.key")
    token = secrets.token_urlsafe(24)
    with listening(address, port) as at:
        host = coordinator.file.hosts[0] if address in EVERYWHERE else address
        host = f"[{host}]" if ":" in host else host
        tell(f"live view: https://{host}:{at.getsockname()[1]}/?token={token}")
        tell(f"anyone who has this address may look; nobody can change anything. Certificate SHA-256 {_sha256(files)}")
        tell(f"for a browser that does not warn: trust {coordinator.ca_certificate}")
        server = ViewServer(Watch(of_coordinator(coordinator)), token, files)
        with closed_first(0, server.stop):  # what a signal's handler raises can be lost in a callback of asyncio
            server.until_told(at)


def _sha256(files: Certificate) -> str:
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()
