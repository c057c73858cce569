"""``flwr-server start``: keep the SuperLink up, and registrations in line with admissions; without torch."""

import time
from collections.abc import Callable

from common.errors import BadInput, stop_on
from server.coordinator.admission import members
from server.coordinator.authority import RENEW_BEFORE_DAYS, days_valid
from server.coordinator.before_start import faults_of_start
from server.coordinator.connections import note_connections, read_sign_offs
from server.coordinator.folder import Coordinator, alone, keep_private
from server.deployment.superlink.control.client import Control, Node, SuperLinkGone, flower_key
from server.deployment.superlink.local.database import set_aside_if_damaged
from server.deployment.superlink.local.process import START_TIMEOUT_S, SuperLink
from server.deployment.timers import order_faults, timers
from server.runs.live_status import stopped_at

LOOK_S, RESTART_S = 1.0, 1.0
Tell = Callable[[str], None]


def serve(coordinator: Coordinator, tell: Tell) -> None:
    """Keep the SuperLink running until this process is told to stop; say who connects and who goes.

    Raises:
        BadInput: If the certificate is of no use, or the SuperLink does not start.
    """
    stop_on([*faults_of_start(coordinator), *order_faults(timers(None))])
    keep_private(coordinator, tell)
    with alone(coordinator, "start"):
        link = SuperLink(coordinator)
        try:
            tell(f"opening the port: the SuperLink is started, which takes up to {START_TIMEOUT_S:.0f} s")
            _start(coordinator, link, tell)
            control = Control(coordinator)
            registered(coordinator, control)
            where = f"{coordinator.public_address} (listening on {coordinator.fleet_address}, TLS)"
            tell(f"ready: hospitals connect to {where}")
            if (days := days_valid(coordinator)) < RENEW_BEFORE_DAYS:
                tell(f"the certificate expires in {days:.0f} days: flwr-server init {coordinator.folder} --renew")
            tell(f"admitted sites: {', '.join(members(coordinator)) or 'none yet'}")
            _watch(coordinator, link, control, tell)
        finally:
            link.stop()


def _start(coordinator: Coordinator, link: SuperLink, tell: Tell) -> None:
    """Start the SuperLink, on a new database where the one that is there is damaged."""
    if happened := set_aside_if_damaged(coordinator):
        tell(happened)
    link.start()


def _watch(coordinator: Coordinator, link: SuperLink, control: Control, tell: Tell) -> None:
    before, problem = dict[str, bool](), ""
    note_connections(coordinator.state, before)
    while True:
        if (code := link.ended()) is not None:
            tell(f"the SuperLink ended with {code}; starting it again. Runs and registrations are in its database")
            time.sleep(RESTART_S)
            try:
                _start(coordinator, link, tell)
            except BadInput as error:  # it started once: what keeps it from starting may pass
                tell(str(error))
                continue
        try:
            now = {node.name: node.online for node in registered(coordinator, control)}
            problem = ""
        except (SuperLinkGone, BadInput) as error:
            if str(error) != problem:
                tell(problem := str(error))
            now = before
        for site in sorted(now.keys() | before.keys()):
            if now.get(site, False) != before.get(site, False):
                tell(f"{site} connected" if now.get(site) else _gone(coordinator, site))
        if now != before:
            note_connections(coordinator.state, now)
        before = now
        time.sleep(LOOK_S)


def _gone(coordinator: Coordinator, site: str) -> str:
    if site not in members(coordinator):
        return f"{site} is revoked: its calls are refused from now on"
    if when := read_sign_offs(coordinator.state).get(site):
        return f"{site} {stopped_at(when)}"
    return f"{site} is gone: it gives no sign of life, and did not sign off"


def registered(coordinator: Coordinator, control: Control) -> list[Node]:
    """Bring the SuperLink's registrations in line with the folder's admissions; return them.

    ``admit`` and ``revoke`` write files, wherever they are run; here they take effect.
    """
    nodes = control.nodes()
    admitted = {flower_key(site.public_key): site for site in members(coordinator).values()}
    strangers = [node for node in nodes if node.public_key not in admitted]
    for node in strangers:  # before the others: a name may have gone to a new key
        control.unregister(node)
    missing = admitted.keys() - {node.public_key for node in nodes}
    for key in missing:
        control.register(admitted[key].site, admitted[key].public_key)
    return control.nodes() if strangers or missing else nodes
