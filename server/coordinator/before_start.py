"""What is checked before ``flwr-server start`` and ``run`` import Flower or torch: within a second, with the remedy."""

from pathlib import Path

from common.config import ExperimentFile
from common.errors import Fault, quoted, stop_on
from common.system.preflight import flower_faults, port_faults, writable_folder_faults
from server.coordinator.admission import members
from server.coordinator.authority import certificate_faults
from server.coordinator.control_socket import takes_connections
from server.coordinator.folder import Coordinator, at_work


def faults_of_start(coordinator: Coordinator) -> list[Fault]:
    """Check certificates, rights, room and Flower's release; and the port, unless another one is at work."""
    faults = [*certificate_faults(coordinator), *flower_faults()]
    faults += [
        fault for folder in (coordinator.state, coordinator.log.parent) for fault in writable_folder_faults(folder)
    ]
    if at_work(coordinator, "start"):
        return [*faults, Fault(str(coordinator.folder), "another flwr-server start is at work in this folder.")]
    return list(dict.fromkeys([*faults, *port_faults_of(coordinator)]))


def faults_of_run(coordinator: Coordinator, out: Path, *, resume: bool) -> list[Fault]:
    """Certificates, rights and room under the run folder, Flower's release, and whether anything serves the sites.

    Args:
        resume: A run that goes on waits for what serves the sites, which may be starting again too.
    """
    faults = [*certificate_faults(coordinator), *writable_folder_faults(out), *flower_faults()]
    return faults if resume or takes_connections(coordinator.state) else [*faults, not_started(coordinator)]


def not_started(coordinator: Coordinator) -> Fault:
    """The fault of a run where nothing serves the sites."""
    if at_work(coordinator, "start"):
        problem = "flwr-server start is at work on this folder, but its SuperLink does not answer."
        remedy = f"Wait until it says ready; if it does not, {coordinator.log} says why."
        return Fault(str(coordinator.folder), problem, remedy)
    remedy = f"In another terminal or container: flwr-server start {coordinator.folder}"
    return Fault(str(coordinator.folder), "flwr-server start does not run on this folder.", remedy)


def expected_sites(coordinator: Coordinator, file: ExperimentFile, sites: int, *, resume: bool) -> int:
    """How many sites a run waits for.

    Args:
        sites: As the person wishes; 0 for all that are admitted.
        resume: Whether the run goes on: a site that was revoked meanwhile is not waited for.

    Raises:
        BadInput: If these are more than are admitted, or fewer than the experiment needs.
    """
    admitted, needed = members(coordinator), file.experiment.participation.min_sites
    expected = min(sites, len(admitted)) if sites and resume else sites or len(admitted)
    faults = []
    if not admitted:
        faults.append(Fault(str(coordinator.folder), "no site is admitted.", "flwr-server admit DIR NAME.request"))
    elif expected > len(admitted):
        faults.append(Fault("--sites", f"is {sites}, but {len(admitted)} are admitted: {quoted(admitted)}."))
    elif needed > expected:
        problem = f"is {needed}, but the run waits for {expected} sites."
        faults.append(Fault(f"{file.path.name}: participation.min_sites", problem))
    stop_on(faults)
    return expected


def port_faults_of(coordinator: Coordinator) -> list[Fault]:
    """Find out whether the port for hospitals can be opened, before anything is started."""
    remedy = "Stop what uses it, or set another port in coordinator.toml."
    return port_faults("coordinator.toml: port", coordinator.file.listen, coordinator.file.port, remedy)
