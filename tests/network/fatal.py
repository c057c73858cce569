"""A hospital's program that one run kills, as the kernel does when memory is short.

``python -m tests.network.fatal start FOLDER``.
"""

import os
import signal
import sys
from typing import Any

import polyclinic.client.cli
from polyclinic.client.connection.fleet_client import FleetClient

RUN = "fatal"


def main() -> None:
    """``flwr-client``, killed while it fetches a message of this run."""
    fetch: Any = FleetClient.fetch_message_content

    def fetched(link: FleetClient, received: bytes) -> Any:
        message = fetch(link, received)
        if message.content["fields"]["run"] == RUN:
            os.kill(os.getpid(), signal.SIGKILL)
        return message

    FleetClient.fetch_message_content = fetched  # type: ignore[method-assign]
    polyclinic.client.cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
