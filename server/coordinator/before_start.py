"""What is checked before ``flwr-server start`` and ``run`` import Flower or torch: within a second, with the remedy."""

from pathlib import Path

from common.errors import Fault
from common.system.before_start import flower_faults, place_faults, port_faults
from server.coordinator.authority import certificate_faults
from server.coordinator.folder import Coordinator, at_work


def faults_of_start(coordinator: Coordinator) -> list[Fault]:
    """Certificates, rights and room, Flower's release and ports; of ports nothing where another one is at work."""
    faults = [*certificate_faults(coordinator), *flower_faults()]
    faults += [fault for folder in (coordinator.state, coordinator.log.parent) for fault in place_faults(folder)]
    if at_work(coordinator, "start"):
        return [*faults, Fault(str(coordinator.folder), "another flwr-server start is at work in this folder.")]
    return list(dict.fromkeys([*faults, *faults_of_ports(coordinator)]))


def faults_of_run(coordinator: Coordinator, out: Path) -> list[Fault]:
    """Certificates, rights and room under the run folder, and Flower's release."""
    return [*certificate_faults(coordinator), *place_faults(out), *flower_faults()]


def faults_of_ports(coordinator: Coordinator) -> list[Fault]:
    """Find ports that cannot be opened, before anything is started."""
    file = coordinator.file
    wanted = {"port": (file.listen, file.port), "control_port": ("127.0.0.1", file.control_port)}
    remedy = "Stop what uses it, or set another {} in coordinator.toml."
    return [
        fault
        for key, (host, port) in wanted.items()
        for fault in port_faults(f"coordinator.toml: {key}", host, port, remedy.format(key))
    ]
