"""A hospital that fails in the name of another: ``python -m tests.network.blamer start FOLDER``.

The call that brings the reply names the hospital itself, as it must; the reply inside names another node.
"""

import sys
from typing import Any

from flwr.app import Error, Message

import polyclinic.client.cli
import polyclinic.client.connection.fleet_client
from polyclinic.client.connection.service import HospitalMessageLoop
from polyclinic.common.wire.flower_messages import replace_metadata

BLAMED = 12345
"""Number of the node that is named."""


def main() -> None:
    """``flwr-client`` with another way to reply."""
    announce: Any = polyclinic.client.connection.fleet_client.make_announcement  # type: ignore[attr-defined]
    own: list[int] = []

    def fail_for_another(service: HospitalMessageLoop, message: Message) -> Message:
        reply = Message(Error(999, "out of order"), reply_to=message)
        own[:] = [reply.metadata.src_node_id]
        return replace_metadata(reply, src_node_id=BLAMED)

    def announce_as_oneself(message: Message, message_id: str) -> Any:
        announced = announce(message, message_id)
        announced.metadata.src_node_id = own[0]
        return announced

    polyclinic.client.connection.fleet_client.make_announcement = announce_as_oneself  # type: ignore[attr-defined]
    HospitalMessageLoop._make_reply = fail_for_another  # type: ignore[method-assign]
    polyclinic.client.cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
