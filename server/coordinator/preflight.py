"""Checks of ``flwr-server start`` and ``run`` before they import Flower or torch: fast, and with a remedy."""

from pathlib import Path

from common.config import ExperimentFile
from common.errors import Fault, quote_names, raise_faults
from common.system.preflight import flower_faults, port_faults, writable_folder_faults
from server.coordinator.admission import unrevoked_sites
from server.coordinator.authority import certificate_faults
from server.coordinator.folder import CoordinatorFolder, is_command_running
from server.coordinator.state import is_control_socket_listening


def find_faults_before_start(coordinator: CoordinatorFolder) -> list[Fault]:
    """Check certificates, rights, room and Flower's release; also the port, unless another ``start`` has it."""
    faults = [*certificate_faults(coordinator), *flower_faults()]
    for folder in (coordinator.state, coordinator.log.parent):
        faults += writable_folder_faults(folder)
    if is_command_running(coordinator, "start"):
        return [*faults, Fault(str(coordinator.folder), "another flwr-server start is at work in this folder.")]
    return list(dict.fromkeys([*faults, *hospital_port_faults(coordinator)]))


def find_faults_before_run(coordinator: CoordinatorFolder, out: Path, *, resume: bool) -> list[Fault]:
    """Check certificates, rights, room under the run folder, Flower's release, and that a SuperLink serves the sites.

    Args:
        resume: Whether the run is resumed: it then waits for the SuperLink, which may be starting again too.
    """
    faults = [*certificate_faults(coordinator), *writable_folder_faults(out), *flower_faults()]
    return (
        faults
        if resume or is_control_socket_listening(coordinator.state)
        else [*faults, make_no_superlink_fault(coordinator)]
    )


def make_no_superlink_fault(coordinator: CoordinatorFolder) -> Fault:
    """Return the fault of a run where no SuperLink serves the sites."""
    if is_command_running(coordinator, "start"):
        problem = "flwr-server start is at work on this folder, but its SuperLink does not answer."
        remedy = f"Wait until it says ready; if it does not, {coordinator.log} says why."
        return Fault(str(coordinator.folder), problem, remedy)
    remedy = f"In another terminal or container: flwr-server start {coordinator.folder}"
    return Fault(str(coordinator.folder), "flwr-server start does not run on this folder.", remedy)


def expected_site_count(coordinator: CoordinatorFolder, file: ExperimentFile, sites: int, *, resume: bool) -> int:
    """Return the number of sites that a run waits for.

    Args:
        sites: The number that the person asked for; 0 for all admitted sites.
        resume: Whether the run is resumed: it does not wait for a site that was revoked meanwhile.

    Raises:
        BadInput: If the number is larger than that of admitted sites, or smaller than the experiment needs.
    """
    admitted, needed = unrevoked_sites(coordinator), file.experiment.participation.min_sites
    expected = min(sites, len(admitted)) if sites and resume else sites or len(admitted)
    faults = []
    if not admitted:
        faults.append(Fault(str(coordinator.folder), "no site is admitted.", "flwr-server admit DIR NAME.request"))
    elif expected > len(admitted):
        faults.append(Fault("--sites", f"is {sites}, but {len(admitted)} are admitted: {quote_names(admitted)}."))
    elif needed > expected:
        problem = f"is {needed}, but the run waits for {expected} sites."
        faults.append(Fault(f"{file.path.name}: participation.min_sites", problem))
    raise_faults(faults)
    return expected


def hospital_port_faults(coordinator: CoordinatorFolder) -> list[Fault]:
    """Check that the port for hospitals can be opened."""
    remedy = "Stop what uses it, or set another port in coordinator.toml."
    return port_faults("coordinator.toml: port", coordinator.file.listen, coordinator.file.port, remedy)
