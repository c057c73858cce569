"""Simulated sites in this process, one after the other.

The hospital's half is reached by name, as Flower's own component strings (``module:attribute``) do, for ``server`` and
``client`` never import one another.
"""

import importlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from common.system.resources import keep_large_buffers
from common.wire.flower_objects import set_identity, set_message_id

CLIENT_APP = "client.simulation:simulated_app"
CLIENT_APP_RAISED = 2  # Flower's code for an exception in a site's app
FIRST_NODE = 2
"""Node of the first site: Flower's SuperLink is node 1."""

Main = Callable[[Grid], None]


def site_app(experiment: str, base: Path, run_folder: Path) -> ClientApp:
    """The ClientApp that serves every site, found by name."""
    module, _, attribute = CLIENT_APP.partition(":")
    app: ClientApp = getattr(importlib.import_module(module), attribute)(experiment, base, run_folder)
    return app


def inline(main: Main, app: ClientApp, sites: int) -> None:
    """Run ``main`` against sites that this process serves, one after the other."""
    prepare_flower()
    keep_large_buffers()
    main(InlineGrid(app, sites))


def prepare_flower() -> None:
    """What Flower needs in a process without its own runtime."""
    quiet_flower()
    set_identity(1, 1)


def quiet_flower() -> None:
    """Keep Flower's own log lines off the terminal; errors still come as exceptions and reasons."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def context_of(node: int, sites: int) -> Context:
    """What Flower tells an app of the node that it runs on."""
    config: dict[str, Any] = {"partition-id": node - FIRST_NODE, "num-partitions": sites}
    return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})


def answered(app: ClientApp, message: Message, context: Context) -> Message:
    """The app's reply, or the reason why there is none, as over the network."""
    try:
        return app(message, context)
    except Exception as error:  # a site's process edge
        return Message(Error(CLIENT_APP_RAISED, str(error)), reply_to=message)


class LocalGrid(Grid):
    """A ``Grid`` without a SuperLink: messages get their numbers here."""

    def __init__(self, sites: int) -> None:
        self._nodes = list(range(FIRST_NODE, FIRST_NODE + sites))
        self._numbers = itertools.count(1)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError("a simulation has no Flower run")

    @property
    def run(self) -> Any:
        raise NotImplementedError("a simulation has no Flower run")

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError("use Message(...)")

    def get_node_ids(self) -> Iterable[int]:
        return self._nodes

    def numbered(self, messages: Iterable[Message]) -> dict[str, Message]:
        """Give each message its number; return them by it."""
        found = {}
        for message in messages:
            identifier = str(next(self._numbers))
            set_message_id(message, identifier)
            found[identifier] = message
        return found


class InlineGrid(LocalGrid):
    """A ``Grid`` whose messages call the ClientApp in this process.

    Every record is written to Flower's form and read from it as on the wire; only the sockets are missing.
    """

    def __init__(self, app: ClientApp, sites: int) -> None:
        super().__init__(sites)
        self._app = app
        self._asked: dict[str, Message] = {}
        self._contexts: dict[int, Context] = {}  # what an app keeps from one message of a site to the next

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        asked = self.numbered(messages)
        self._asked |= asked
        return list(asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        """Have the first of these sites work, and return its reply: there is never more than one."""
        first = next((identifier for identifier in message_ids if identifier in self._asked), None)
        return [] if first is None else [self._answered(self._asked.pop(first))]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        return [reply for identifier in self.push_messages(messages) for reply in self.pull_messages([identifier])]

    def _answered(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self._contexts:
            self._contexts[node] = context_of(node, len(self._nodes))
        return answered(self._app, message, self._contexts[node])
