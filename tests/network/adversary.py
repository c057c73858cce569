"""A site whose program was changed to do harm: each round it sends something else that cannot count.

It has a key, was admitted, answers the roll call and evaluates as it should; what lies around its replies at an honest
site, the policy and its gate, is not in its way. ``python -m tests.network.adversary start FOLDER``.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import Message

import polyclinic.client.cli
from polyclinic.client.connection.fleet_client import FleetClient
from tests.harms import FORMS, OVERSIZED, REPEATED, Harm

DUPLICATED = Harm("duplicated reply", FORMS[0].spoil, FORMS[0].reason)
"""A bad reply, and after it a good one to the same message."""
BY_SIGNATURE = {
    "reply of another round": "its statement names another site, run, round or message",
    "reply of another run": "its statement names another site, run, round or message",
    "no record of ours": "its statement is about another record",
}
"""What the network link refuses before the reply is read."""
HARMS = (
    *(replace(harm, reason=BY_SIGNATURE.get(harm.kind, harm.reason)) for harm in FORMS),
    *(OVERSIZED, REPEATED, DUPLICATED),
)
"""By round, from 1."""

Reply = Callable[[FleetClient, bytes, Message], None]


def harmful(reply: Reply) -> Reply:
    """Spoil each training reply as it leaves."""

    def replied(link: FleetClient, received: bytes, message: Message) -> None:
        if message.metadata.message_type != "train" or not message.has_content():
            reply(link, received, message)
            return
        harm = HARMS[int(message.content["fields"]["round"]) - 1]  # type: ignore[arg-type, index]
        good = copy.deepcopy(message)
        harm.spoil(message.content)
        reply(link, received, message)
        if harm is DUPLICATED:
            reply(link, received, good)

    return replied


def main() -> None:
    """``flwr-client`` with another way to reply."""
    reply: Any = FleetClient.send_reply
    FleetClient.send_reply = harmful(reply)  # type: ignore[method-assign]
    polyclinic.client.cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
