"""``flwr-server start``: keep the SuperLink running, and apply admissions and revocations to it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from polyclinic.common.errors import BadInput, raise_faults
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.server.coordinator.admission import read_unrevoked_sites
from polyclinic.server.coordinator.authority import RENEW_BEFORE_DAYS, count_certificate_days_left
from polyclinic.server.coordinator.folder import CoordinatorFolder, lock_coordinator_folder, restrict_folder_to_owner
from polyclinic.server.coordinator.state import read_site_sign_offs, write_site_connections
from polyclinic.server.deployment.superlink.control_client import (
    SuperLinkControlClient,
    SuperLinkUnreachable,
    convert_openssh_key_to_pem,
)
from polyclinic.server.deployment.superlink.database import set_aside_unusable_database
from polyclinic.server.deployment.superlink.process import START_TIMEOUT_S, SuperLinkProcess
from polyclinic.server.deployment.superlink.registrations import RegisteredSite
from polyclinic.server.deployment.timers import find_timer_order_faults, list_timer_settings
from polyclinic.server.runs.live_status import describe_site_sign_off
from polyclinic.server.runs.retention import DAY_S, describe_removal, remove_old_working_files

POLL_INTERVAL_S = 1.0
RESTART_DELAY_S = 1.0
Tell = Callable[[str], None]


def serve_superlink(coordinator: CoordinatorFolder, tell: Tell) -> None:
    """Run the SuperLink until this process is stopped; print a line when a site connects or leaves.

    Raises:
        BadInput: If a timer would fire before another timer that must end first, or the SuperLink does not start.
    """
    raise_faults(find_timer_order_faults(list_timer_settings(None)))
    restrict_folder_to_owner(coordinator, tell)
    with lock_coordinator_folder(coordinator, "start"):
        superlink = SuperLinkProcess(coordinator)
        try:
            tell(f"opening the port: the SuperLink is started, which takes up to {START_TIMEOUT_S:.0f} s")
            _start_superlink(coordinator, superlink, tell)
            control = SuperLinkControlClient(coordinator)
            synchronize_site_registrations(coordinator, control)
            where = f"{coordinator.public_address} (listening on {coordinator.hospital_listen_address}, TLS)"
            tell(f"ready: hospitals connect to {where}")
            if (days := count_certificate_days_left(coordinator)) < RENEW_BEFORE_DAYS:
                command = f"flwr-server init {quote_for_shell(coordinator.folder)} --renew"
                tell(f"the certificate expires in {days:.0f} days: {command}")
            tell(f"admitted sites: {', '.join(read_unrevoked_sites(coordinator)) or 'none yet'}")
            _keep_superlink_running(coordinator, superlink, control, tell)
        finally:
            superlink.stop()


def _start_superlink(coordinator: CoordinatorFolder, superlink: SuperLinkProcess, tell: Tell) -> None:
    """Start the SuperLink; rename its database first if it is unusable, so that a new database is created."""
    if message := set_aside_unusable_database(coordinator):
        tell(message)
    superlink.start()


def _keep_superlink_running(
    coordinator: CoordinatorFolder, superlink: SuperLinkProcess, control: SuperLinkControlClient, tell: Tell
) -> None:
    """Loop for ever: restart a SuperLink that ended, synchronize registrations, report changed connections."""
    online_before = dict[str, bool]()  # site -> True if it was connected
    last_problem = ""
    retention = _DailyRetention(coordinator, tell)
    write_site_connections(coordinator.state_path, online_before)
    while True:
        if (code := superlink.get_exit_code()) is not None:
            tell(f"the SuperLink ended with {code}; starting it again. Runs and registrations are in its database")
            time.sleep(RESTART_DELAY_S)
            try:
                _start_superlink(coordinator, superlink, tell)
            except BadInput as error:  # the SuperLink started once: the obstacle may pass
                tell(str(error))
                continue

        try:
            online = {node.name: node.is_online for node in synchronize_site_registrations(coordinator, control)}
            last_problem = ""
        except (SuperLinkUnreachable, BadInput) as error:
            if str(error) != last_problem:  # print a lasting problem once
                last_problem = str(error)
                tell(last_problem)
            online = online_before

        for site in sorted(online.keys() | online_before.keys()):
            if online.get(site, False) == online_before.get(site, False):
                continue
            if online.get(site):
                tell(f"{site} connected")
            elif site not in read_unrevoked_sites(coordinator):
                tell(f"{site} is revoked: its calls are refused from now on")
            elif when := read_site_sign_offs(coordinator.state_path).get(site):
                tell(f"{site} {describe_site_sign_off(when)}")
            else:
                tell(f"{site} is gone: it gives no sign of life, and did not sign off")
        if online != online_before:
            write_site_connections(coordinator.state_path, online)
        retention.apply_if_due()
        online_before = online
        time.sleep(POLL_INTERVAL_S)


@dataclass
class _DailyRetention:
    """Removes the working files of old runs once a day, if ``[retention]`` of ``coordinator.toml`` asks for it.

    Attributes:
        _due: Monotonic time in seconds from which the next removal is due.
    """

    coordinator: CoordinatorFolder
    tell: Tell
    _due: float = 0.0

    def apply_if_due(self) -> None:
        """Remove working files of old runs if this is the first call or the last removal was a day ago."""
        days = self.coordinator.file.retention.working_files_days
        if days is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + DAY_S
        for removed in remove_old_working_files(self.coordinator.state_path, days, time.time()):
            self.tell(describe_removal(removed, days))


def synchronize_site_registrations(
    coordinator: CoordinatorFolder, control: SuperLinkControlClient
) -> list[RegisteredSite]:
    """Register newly admitted sites on the SuperLink and unregister revoked ones; return the registered sites.

    The commands ``admit`` and ``revoke`` only write files; this function makes them effective.
    """
    nodes = control.list_registered_sites()
    sites = read_unrevoked_sites(coordinator).values()
    admitted = {convert_openssh_key_to_pem(site.public_key): site for site in sites}
    revoked = [node for node in nodes if node.public_key not in admitted]
    for node in revoked:  # before the registrations: a name may have gone to a new key
        control.unregister_site(node)
    missing = admitted.keys() - {node.public_key for node in nodes}
    for key in missing:
        control.register_site(admitted[key].site, admitted[key].public_key)
    return control.list_registered_sites() if revoked or missing else nodes
