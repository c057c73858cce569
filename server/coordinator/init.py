"""``flwr-server init``: create a coordinator's folder, or renew the server's certificate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.errors import Fault, raise_faults
from polyclinic.common.security.identity import check_site_name
from polyclinic.common.security.phrase import compute_certificate_phrase
from polyclinic.common.system.files import make_private_folder, remove_outputs_on_failure
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.common.system.toml import validate_tables
from polyclinic.server.coordinator.admission import read_unrevoked_sites, write_connection_kit
from polyclinic.server.coordinator.authority import (
    SERVER_CERTIFICATE_DAYS,
    issue_server_certificate,
    make_certificate_authority,
    read_authority_certificate,
)
from polyclinic.server.coordinator.folder import (
    COORDINATOR_FILE,
    CoordinatorFolder,
    CoordinatorTomlContent,
    normalize_host,
    read_coordinator_folder,
    write_coordinator_toml,
)


def make_coordinator_folder(folder: Path, name: str, hosts: Sequence[str], *, listen: str, port: int) -> list[str]:
    """Create a coordinator's folder with settings and certificates; return lines to print.

    Raises:
        BadInput: With every fault, such as a missing name, or a folder that already holds such settings or
            certificates.
    """
    faults = []
    if (folder / COORDINATOR_FILE).exists():
        remedy = "For a new certificate: --renew."
        faults.append(Fault(str(folder), "is a coordinator's folder already, and nothing is written over.", remedy))
    elif (folder / "authority").exists():
        problem = f"holds an authority and no {COORDINATOR_FILE}: this command was killed here, or the file is lost."
        remedy = (
            f"If {COORDINATOR_FILE} was never there, remove {folder / 'authority'} and try again. Else put a copy back."
        )
        faults.append(Fault(str(folder), problem, remedy))
    if not name:
        faults.append(Fault("--name", "is missing: the federation's name."))
    else:
        faults += _find_option_value_faults("--name", check_site_name, [name])
    if not hosts:
        faults.append(Fault("--host", "is missing: a name or address by which hospitals reach this machine."))
    raise_faults([*faults, *_find_option_value_faults("--host", normalize_host, hosts)])
    tree = {"name": name, "hosts": tuple(hosts), "listen": listen, "port": port}
    coordinator = CoordinatorFolder(folder, validate_tables(CoordinatorTomlContent, tree, "flwr-server init"))
    with remove_outputs_on_failure(folder, coordinator.authority_path, folder / COORDINATOR_FILE):
        make_private_folder(folder)
        make_certificate_authority(coordinator)
        issue_server_certificate(coordinator)
        write_coordinator_toml(folder, coordinator.file)
    quoted_folder = quote_for_shell(folder)
    return [
        f"{folder / COORDINATOR_FILE}: name, hosts and port.",
        f"{coordinator.authority_path}: the certificate authority of this federation and the server's certificate, for"
        f" {', '.join(coordinator.file.hosts)}; valid {SERVER_CERTIFICATE_DAYS} days. "
        "Keep a copy of ca.key in a safe place.",
        "The phrase of this authority, which you read out to each hospital by telephone:",
        f"    {compute_certificate_phrase(read_authority_certificate(coordinator))}",
        f"Hospitals will connect to {coordinator.public_address}: open this port, and no other.",
        f"Next, in any order: flwr-server start {quoted_folder}; "
        f"for each hospital flwr-server admit {quoted_folder} NAME.request",
    ]


@dataclass(frozen=True)
class Endpoint:
    """The address of the coordinator for hospitals. An empty or None value leaves ``coordinator.toml`` unchanged.

    Attributes:
        hosts: Names and addresses by which hospitals reach this machine.
        listen: Address that the port is bound to.
    """

    hosts: tuple[str, ...] = ()
    listen: str | None = None
    port: int | None = None


def renew_server_certificate(folder: Path, endpoint: Endpoint, name: str = "") -> list[str]:
    """Issue a new server certificate by the same authority, and return lines to print.

    The values of ``endpoint`` are written into ``coordinator.toml``. Connection kits are written again if their address
    may change.

    Args:
        name: Value of ``--name``: empty or the present name of the federation, which is in the authority's certificate.

    Raises:
        BadInput: If the folder is not a coordinator's folder, an option is not valid, or the name is another one.
    """
    coordinator = read_coordinator_folder(folder)
    faults = _find_option_value_faults("--host", normalize_host, endpoint.hosts)
    if name not in ("", coordinator.file.name):
        problem = f'"{name}" is not the name of this federation, "{coordinator.file.name}", which its authority bears.'
        faults.append(Fault("--name", problem, "Leave --name out, or make a new folder for another federation."))
    raise_faults(faults)
    changes: dict[str, object] = {}
    if endpoint.hosts:
        changes["hosts"] = endpoint.hosts
    if endpoint.listen is not None:
        changes["listen"] = endpoint.listen
    if endpoint.port is not None:
        changes["port"] = endpoint.port
    if changes:
        tree = coordinator.file.model_dump() | changes
        content = validate_tables(CoordinatorTomlContent, tree, "flwr-server init --renew")
        coordinator = write_coordinator_toml(folder, content)
    issue_server_certificate(coordinator)
    lines = [
        f"A new certificate for {', '.join(coordinator.file.hosts)}, valid {SERVER_CERTIFICATE_DAYS} days.",
        f"It counts from the next start: stop flwr-server start {quote_for_shell(folder)} and start it again.",
        "The authority and its phrase stay:",
        f"    {compute_certificate_phrase(read_authority_certificate(coordinator))}",
    ]
    if endpoint.hosts or endpoint.port is not None:
        kits = [str(write_connection_kit(coordinator, site)) for site in read_unrevoked_sites(coordinator).values()]
        if kits:
            lines.append(f"The address in kits is now {coordinator.public_address}; send them again: {', '.join(kits)}")
    return lines


def _find_option_value_faults(option: str, check: Callable[[str], object], values: Sequence[str]) -> list[Fault]:
    faults = []
    for value in values:
        try:
            check(value)
        except ValueError as error:
            faults.append(Fault(option, f"{error}."))
    return faults
