"""A hospital that answers each request with an error code: ``python -m tests.network.excuse start FOLDER``.

The code is the one that the request's run names.
"""

import sys

from flwr.app import Error, Message

import polyclinic.client.cli
from polyclinic.client.connection.service import HospitalMessageLoop

REASON = "an excuse"


def main() -> None:
    """``flwr-client`` with another way to reply."""

    def make_excuse(service: HospitalMessageLoop, message: Message) -> Message:
        return Message(Error(int(str(message.content["fields"]["run"])), REASON), reply_to=message)

    HospitalMessageLoop._make_reply = make_excuse  # type: ignore[method-assign]
    polyclinic.client.cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
