"""Checks of ``flwr-server start`` and ``run`` that need neither Flower nor torch, so that faults show at once."""

from pathlib import Path

from polyclinic.common.config import ExperimentFile
from polyclinic.common.errors import Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.common.system.preflight import find_flower_release_faults, find_folder_write_faults, find_port_faults
from polyclinic.server.coordinator.admission import read_unrevoked_sites
from polyclinic.server.coordinator.authority import find_server_certificate_faults
from polyclinic.server.coordinator.folder import CoordinatorFolder, is_coordinator_command_running
from polyclinic.server.coordinator.state import is_control_socket_listening


def find_superlink_start_faults(coordinator: CoordinatorFolder) -> list[Fault]:
    """Check certificates, file rights, disk space, Flower's version, and that the hospitals' port is free."""
    faults = [*find_server_certificate_faults(coordinator), *find_flower_release_faults()]
    for folder in (coordinator.state_path, coordinator.log_path.parent):
        faults += find_folder_write_faults(folder)
    if is_coordinator_command_running(coordinator, "start"):
        return [*faults, Fault(str(coordinator.folder), "another flwr-server start is at work in this folder.")]
    return list(dict.fromkeys([*faults, *find_hospital_port_faults(coordinator)]))


def find_network_run_faults(coordinator: CoordinatorFolder, out: Path, *, resume: bool) -> list[Fault]:
    """Check certificates, file rights, disk space, Flower's version, and that a SuperLink is running.

    Args:
        resume: True for a resumed run, which is not refused for a missing SuperLink but waits for it.
    """
    faults = [
        *find_server_certificate_faults(coordinator),
        *find_folder_write_faults(out),
        *find_flower_release_faults(),
    ]
    if not resume and not is_control_socket_listening(coordinator.state_path):
        faults.append(make_no_superlink_fault(coordinator))
    return faults


def make_no_superlink_fault(coordinator: CoordinatorFolder) -> Fault:
    """Return the fault of a command that needs a running SuperLink and finds none."""
    if is_coordinator_command_running(coordinator, "start"):
        problem = "flwr-server start is at work on this folder, but its SuperLink does not answer."
        remedy = f"Wait until it says ready; if it does not, {coordinator.log_path} says why."
        return Fault(str(coordinator.folder), problem, remedy)
    remedy = f"In another terminal or container: flwr-server start {quote_for_shell(coordinator.folder)}"
    return Fault(str(coordinator.folder), "flwr-server start does not run on this folder.", remedy)


def count_expected_sites(coordinator: CoordinatorFolder, file: ExperimentFile, sites: int, *, resume: bool) -> int:
    """Return the number of sites that a run waits for before its first round.

    Args:
        sites: The number given on the command line; 0 for all admitted sites.
        resume: True for a resumed run, which does not wait for sites that were revoked meanwhile.

    Raises:
        BadInput: If no site is admitted, or the number is above that of admitted sites or below ``min_sites``.
    """
    participation = file.experiment.participation
    admitted = read_unrevoked_sites(coordinator)
    needed = participation.min_sites
    faults = list[Fault]()
    unknown = sorted(set(participation.sites) - admitted.keys())
    if unknown and not resume:
        problem = f"has {quote_names(unknown)}, and {quote_names(sorted(admitted)) or 'none'} are admitted."
        faults.append(Fault(f"{file.path.name}: participation.sites", problem))
    if participation.sites:
        admitted = {name: site for name, site in admitted.items() if name in participation.sites}
    expected = sites or len(admitted)
    if resume:
        expected = min(expected, len(admitted))
    if not admitted:
        faults.append(Fault(str(coordinator.folder), "no site is admitted.", "flwr-server admit DIR NAME.request"))
    elif expected > len(admitted):
        kind = "members of the run" if participation.sites else "admitted"
        faults.append(Fault("--sites", f"is {sites}, but {len(admitted)} are {kind}: {quote_names(admitted)}."))
    elif needed > expected:
        problem = f"is {needed}, but the run waits for {expected} sites."
        faults.append(Fault(f"{file.path.name}: participation.min_sites", problem))
    raise_faults(faults)
    return expected


def find_hospital_port_faults(coordinator: CoordinatorFolder) -> list[Fault]:
    """Return a fault if the hospitals' port cannot be opened."""
    remedy = "Stop what uses it, or set another port in coordinator.toml."
    return find_port_faults("coordinator.toml: port", coordinator.file.listen, coordinator.file.port, remedy)
