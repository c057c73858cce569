"""The agreement with the coordinator on the wire version of a connection, for every program that connects a site."""

from collections.abc import Callable

from polyclinic.client.connection.exit_codes import ConnectionNotAccepted
from polyclinic.client.connection.fleet_client import FleetClient
from polyclinic.client.connection.status import describe_other_wire_version
from polyclinic.common.wire.fleet_protocol import HelloAnswer
from polyclinic.common.wire.versions import WIRE_VERSION, is_spoken


def agree_on_wire_version(link: FleetClient, tell: Callable[[str], None]) -> HelloAnswer | None:
    """Agree with the coordinator on the wire version of a new connection, before its first other call.

    The wire version determines how calls are signed. Without the agreement, a coordinator of the release before this
    one refuses the site's key.

    Args:
        tell: Prints one line for the hospital's staff, if the coordinator's release is another one.

    Returns:
        The coordinator's answer; None if its release does not have this call.

    Raises:
        ConnectionNotAccepted: If the two releases speak no common wire version.
        CoordinatorUnreachable: If nobody answers, or the answer is not acceptable.
    """
    hello = link.exchange_hello()
    if hello is None:
        return None
    if not is_spoken(hello.wire):
        raise ConnectionNotAccepted.make_wire_version_error(hello)
    if hello.newest_wire != WIRE_VERSION:
        tell(describe_other_wire_version(hello.release, hello.newest_wire))
    return hello
