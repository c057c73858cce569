"""The coordinator's folder: ``coordinator.toml``, certificates, admitted sites and the SuperLink's state.

Content of the folder:

    coordinator.toml    name, hosts, port
    authority/          ca.crt, ca.key; server.crt, server.key; signing.crt, signing.key
    sites/NAME.toml     an admitted or revoked site
    kits/NAME.kit       connection kit for a hospital
    state/              the SuperLink's database and control socket, locks, state of the current run
    removed/NAME.json   runs and models with updates of a site that left; NAME.withdrawal: its signed statement
    logs/superlink.log
"""

import contextlib
import ipaddress
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.security.identity import check_site_name
from polyclinic.common.system.files import (
    is_file_locked,
    lock_file,
    make_private_folder,
    open_own_file,
    write_atomically,
)
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.toml import TomlSection, read_toml, to_toml_text, validate_tables
from polyclinic.server.runs.live_status import describe_runs_at_work

COORDINATOR_FILE = "coordinator.toml"
_HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*"
)

PortField = Field(ge=1, le=65535)


def normalize_host(host: str) -> str:
    """Check a host name or an IP address without scheme and port; return it in normalized form.

    Raises:
        ValueError: If the text is neither a host name nor an address.
    """
    with contextlib.suppress(ValueError):
        # The zone of an IPv6 address, after %, has a meaning on this machine only.
        if "%" not in (address := str(ipaddress.ip_address(host))):
            return address
    if re.fullmatch(r"[\d.]+", host) or not _HOST.fullmatch(host):
        raise ValueError(f'"{host}" is neither a host name nor an address; give it without https:// and port')
    return host


class RetentionSettings(TomlSection):
    """The table ``[retention]`` of ``coordinator.toml``: how long working files of finished runs are kept.

    Attributes:
        working_files_days: Days after the end of a finished run at which its ``updates/`` and ``checkpoints/`` are
            deleted; None to keep them.
    """

    working_files_days: int | None = Field(None, ge=1)


class CoordinatorTomlContent(TomlSection):
    """The keys of ``coordinator.toml``.

    Attributes:
        hosts: Names and addresses by which hospitals reach this machine; the first is written into connection kits.
        listen: Address that the hospitals' port is bound to.
        port: The only port that hospitals connect to (Flower's Fleet API over gRPC and TLS; every call is signed).
        connections: Greatest number of connections to that port at a time; further ones are closed at once.
    """

    name: str
    hosts: tuple[str, ...] = Field(min_length=1)
    listen: str = "0.0.0.0"
    port: int = PortField
    connections: int = Field(default=1000, ge=16, le=100_000)
    retention: RetentionSettings = RetentionSettings()

    _name = field_validator("name")(check_site_name)

    @field_validator("hosts")
    @classmethod
    def _normalize_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(normalize_host(host) for host in hosts)

    @field_validator("listen")
    @classmethod
    def _normalize_listen_address(cls, address: str) -> str:
        try:
            return str(ipaddress.ip_address(address))
        except ValueError:
            raise ValueError("must be an address of this machine, 0.0.0.0 for all of them") from None


@dataclass(frozen=True)
class CoordinatorFolder:
    """A coordinator's folder, with paths of its files and the content of its ``coordinator.toml``."""

    folder: Path
    file: CoordinatorTomlContent

    @property
    def authority_path(self) -> Path:
        return self.folder / "authority"

    @property
    def sites_path(self) -> Path:
        return self.folder / "sites"

    @property
    def state_path(self) -> Path:
        return self.folder / "state"

    @property
    def removed_path(self) -> Path:
        return self.folder / "removed"

    @property
    def log_path(self) -> Path:
        return self.folder / "logs" / "superlink.log"

    @property
    def ca_certificate_path(self) -> Path:
        return self.authority_path / "ca.crt"

    @property
    def hospital_listen_address(self) -> str:
        """Address and port that the server binds to for hospitals."""
        return _join_host_and_port(self.file.listen, self.file.port)

    @property
    def public_address(self) -> str:
        """Address and port that hospitals connect to, as written into connection kits."""
        return _join_host_and_port(self.file.hosts[0], self.file.port)


def _join_host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_coordinator_folder(folder: Path) -> CoordinatorFolder:
    """Read ``coordinator.toml`` in a coordinator's folder, and check it.

    Raises:
        BadInput: With every fault of the file.
    """
    if not (folder / COORDINATOR_FILE).is_file():
        problem = f"is no coordinator's folder: it holds no {COORDINATOR_FILE}."
        raise BadInput([Fault(str(folder), problem, "Make one with flwr-server init.")])
    return CoordinatorFolder(
        folder, validate_tables(CoordinatorTomlContent, read_toml(folder / COORDINATOR_FILE), COORDINATOR_FILE)
    )


def restrict_folder_to_owner(coordinator: CoordinatorFolder, tell: Callable[[str], None]) -> None:
    """Restrict the folder to the current account (mode 700), because it holds keys, logs and the names of sites.

    Args:
        tell: Prints one line; called only if other accounts had access until now.
    """
    if make_private_folder(coordinator.folder):
        tell(f"other accounts could look into {coordinator.folder}; now only this one can (mode 700)")


def write_coordinator_toml(folder: Path, file: CoordinatorTomlContent) -> CoordinatorFolder:
    """Write ``coordinator.toml``; return the folder with the new content."""
    lines = ["# Polyclinic coordinator. To change hosts or port: flwr-server init DIR --renew --host HOST --port PORT."]
    lines += [f"{key} = {to_toml_text(value)}" for key, value in file.model_dump(exclude={"retention"}).items()]
    if (days := file.retention.working_files_days) is not None:
        lines += ["", "[retention]", f"working_files_days = {days}"]
    write_atomically(folder / COORDINATOR_FILE, ("\n".join(lines) + "\n").encode())
    return CoordinatorFolder(folder, file)


@contextlib.contextmanager
def lock_run_members(coordinator: CoordinatorFolder, members: Collection[str]) -> Iterator[None]:
    """Lock this folder for a run, so that no site trains for two runs at a time.

    Args:
        members: The sites of the run; empty for all. Runs of named members that have no site in common go on side by
            side.

    Raises:
        BadInput: If another run of these sites is in progress.
    """
    if not members:
        with lock_coordinator_folder(coordinator, "run"):
            yield
        return
    coordinator.state_path.mkdir(parents=True, exist_ok=True)
    coordinator.state_path.chmod(0o700)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_own_file(coordinator.state_path / "run.lock", "wb"))
        at_work = _name_runs_at_work(coordinator)
        problem = f"a flwr-server run of all sites is at work in this folder{at_work}."
        remedy = "Wait for its end. Runs whose experiments name their members (participation.sites) go on side by side."
        lock_file(file, Fault(str(coordinator.folder), problem, remedy), shared=True)
        faults = list[Fault]()
        for site in sorted(members):
            path = join_plain_name(coordinator.state_path, PlainName(site), ".runlock")
            file = stack.enter_context(open_own_file(path, "wb"))
            at_work = _name_runs_at_work(coordinator, site)
            problem = f"{site} takes part in another run, which has not ended{at_work}."
            remedy = "Wait for its end: a site trains for one run at a time."
            try:
                lock_file(file, Fault("participation.sites", problem, remedy))
            except BadInput as error:
                faults += error.faults
        raise_faults(faults)
        yield


def _name_runs_at_work(coordinator: CoordinatorFolder, site: str = "") -> str:
    """Return ": " and the names of the runs in progress, to end a message with; empty if no run has begun."""
    runs = describe_runs_at_work(coordinator.state_path, site)
    return f": {runs}" if runs else ""


def is_coordinator_command_running(coordinator: CoordinatorFolder, command: Literal["start", "run"]) -> bool:
    """Return whether a process of this ``flwr-server`` command (``start`` or ``run``) uses this folder now."""
    return is_file_locked(coordinator.state_path / f"{command}.lock")


@contextlib.contextmanager
def lock_coordinator_folder(coordinator: CoordinatorFolder, command: Literal["start", "run"]) -> Iterator[None]:
    """Lock this folder, so that a second process of this command (``start`` or ``run``) is refused.

    Raises:
        BadInput: If another process holds the lock.
    """
    coordinator.state_path.mkdir(parents=True, exist_ok=True)
    coordinator.state_path.chmod(0o700)
    at_work = remedy = ""
    if command == "run":
        at_work = _name_runs_at_work(coordinator)
        remedy = (
            "This experiment names no members, and so asks all sites. Wait for the end of what is at work, or name "
        )
        remedy += "members in each experiment (participation.sites), with no site in common."
    with open_own_file(coordinator.state_path / f"{command}.lock", "wb") as file:
        problem = f"another flwr-server {command} is at work in this folder{at_work}."
        lock_file(file, Fault(str(coordinator.folder), problem, remedy))
        yield
