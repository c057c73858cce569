"""Simulate sites in this process, one after the other.

The hospital's ClientApp is imported by name (``module:attribute``, as in Flower), because the packages ``server`` and
``client`` must not import each other.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from polyclinic.common.system.resources import reuse_large_buffers
from polyclinic.common.wire.flower_messages import replace_metadata

CLIENT_APP = "polyclinic.client.simulation:make_simulation_client_app"
"""Function that makes the hospital's ClientApp, as ``module:attribute``."""
CLIENT_APP_RAISED = 2
"""Flower's error code for an exception in a site's app."""
FIRST_NODE = 2
"""Flower's number of the first site; its SuperLink is node 1."""

RunOnGrid = Callable[[Grid], None]
"""A function that runs the coordinator over a Grid."""


def import_client_app(experiment: str, base: Path, run_folder: Path) -> ClientApp:
    """Import and make the ClientApp that serves all sites.

    Args:
        experiment: The experiment as JSON.
        base: Folder from which relative paths in the experiment start.
        run_folder: The run folder, which has the sites' folders.
    """
    app: ClientApp = resolve_name(CLIENT_APP)(experiment, base, run_folder)
    return app


def run_with_inline_grid(run_on_grid: RunOnGrid, app: ClientApp, sites: int) -> None:
    """Call a function with a Grid whose messages this process answers, one site after the other.

    Args:
        run_on_grid: Runs the coordinator over the Grid.
        app: Answers the messages to all sites.
        sites: Number of sites.
    """
    silence_flower_logs()
    reuse_large_buffers()
    run_on_grid(InlineGrid(app, sites))


def silence_flower_logs() -> None:
    """Suppress Flower's log lines on the terminal; errors are still reported as exceptions."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def make_flower_context(index: int, sites: int) -> Context:
    """Return Flower's Context for the site with this index in the partition."""
    config: dict[str, Any] = {"partition-id": index, "num-partitions": sites}
    return Context(run_id=1, node_id=FIRST_NODE + index, node_config=config, state=RecordDict(), run_config={})


def call_client_app(app: ClientApp, message: Message, context: Context) -> Message:
    """Pass a message to the ClientApp; return its reply, or an error message if it raises an exception."""
    try:
        return app(message, context)
    except Exception as error:  # the edge of a site's process
        return Message(Error(CLIENT_APP_RAISED, str(error)), reply_to=message)


class SimulatedGrid(Grid):
    """The base class of Flower ``Grid`` classes without a SuperLink, which numbers the messages itself."""

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

    def assign_message_ids(self, messages: Iterable[Message]) -> dict[str, Message]:
        """Give each message an id, run 1 and sender 1; return id -> message."""
        numbered = {}
        for message in messages:
            identifier = str(next(self._numbers))
            numbered[identifier] = replace_metadata(message, message_id=identifier, run_id=1, src_node_id=1)
        return numbered


class InlineGrid(SimulatedGrid):
    """A Flower ``Grid`` that calls the ClientApp in this process, with the real records but without a network."""

    def __init__(self, app: ClientApp, sites: int) -> None:
        super().__init__(sites)
        self._app = app
        self._pending: dict[str, Message] = {}
        self._contexts: dict[int, Context] = {}  # a site's context keeps the app's state between messages

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        numbered = self.assign_message_ids(messages)
        self._pending |= numbered
        return list(numbered)

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        """Let a site answer the first unanswered message; return its reply, or nothing if all are answered."""
        for identifier in message_ids:
            if identifier in self._pending:
                return [self.answer_message(self._pending.pop(identifier))]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        return [reply for identifier in self.push_messages(messages) for reply in self.pull_messages([identifier])]

    def answer_message(self, message: Message) -> Message:
        """Return the reply of the site to which a message is addressed."""
        node = message.metadata.dst_node_id
        if node not in self._contexts:
            self._contexts[node] = make_flower_context(node - FIRST_NODE, len(self._nodes))
        return call_client_app(self._app, message, self._contexts[node])
