"""The service definition of ``flwr-server start``, from which systemd and Podman units are written."""

from pathlib import Path

from polyclinic.common.errors import BadInput
from polyclinic.common.system.service import Service, ServiceProgram
from polyclinic.server.coordinator.folder import is_coordinator_command_running, read_coordinator_folder

SERVER_PROGRAM = ServiceProgram(
    name="flwr-server",
    module="polyclinic.server.cli",
    # A fault in coordinator.toml, a certificate or the folder stays until a person has fixed it.
    final_exit_codes=(BadInput.exit_code,),
    image="localhost/flwr-server",
)


def make_server_service(folder: Path) -> tuple[Service, bool]:
    """Return the service of a coordinator's folder, and True if ``flwr-server start`` runs on the folder already.

    Raises:
        BadInput: With every fault of ``coordinator.toml``.
    """
    coordinator = read_coordinator_folder(folder)
    service = Service(SERVER_PROGRAM, "", folder.resolve(), port=coordinator.file.port)
    return service, is_coordinator_command_running(coordinator, "start")
