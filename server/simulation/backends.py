"""Where simulated sites run: Flower's simulation on Ray, or this process.

This is the only file of the coordinator's side that uses anything of Flower beyond its public API, and the only one
that reaches the hospital's half: by name, as Flower's own component strings (``module:attribute``) do, for ``server``
and ``client`` never import one another.
"""

import importlib
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from common.config import SimulationSection
from common.errors import BadInput, Fault
from common.system.malloc import LARGE_BUFFERS, keep_large_buffers
from common.system.stopping import handlers_kept, take_signals_again
from common.wire.flower_objects import act_as, name_as

CLIENT_APP = "client.simulation:simulated_app"
CLIENT_APP_RAISED = 2  # Flower's code for an exception in a site's app
BYTES_PER_WORKER = 1.5 * 2**30  # torch, Flower and a model of some 10 M parameters in one Ray worker: an estimate

Main = Callable[[Grid], None]


@dataclass(frozen=True)
class Workers:
    """How many sites train at a time, and each one's share of a GPU."""

    count: int
    gpus_per_site: float


def choose_workers(section: SimulationSection, sites: int, threads: int) -> Workers:
    """Workers by cores, memory and GPUs, where the experiment leaves them open."""
    gpus = torch.cuda.device_count() if section.gpus_per_site != 0 else 0
    cores = len(os.sched_getaffinity(0)) // threads
    room = int(psutil.virtual_memory().available / BYTES_PER_WORKER)
    count = section.workers or max(1, min(cores, sites, room))
    share = section.gpus_per_site if section.gpus_per_site >= 0 else min(1.0, gpus / count) if gpus else 0.0
    return Workers(count, share)


def site_app(experiment: str, base: Path, run_folder: Path, decoded: Path | None = None) -> ClientApp:
    """The ClientApp that serves every site, found by name."""
    module, _, attribute = CLIENT_APP.partition(":")
    app: ClientApp = getattr(importlib.import_module(module), attribute)(experiment, base, run_folder, decoded)
    return app


def on_ray(main: Main, app: ClientApp, sites: int, workers: Workers, address: str) -> None:
    """Run ``main`` against sites that Ray's workers serve."""
    try:
        import ray
        from flwr.simulation import run_simulation
    except ImportError as error:
        remedy = "Install polyclinic[sim], or use --backend inline."
        raise BadInput([Fault("simulation.backend", f"Ray is not installed ({error}).", remedy)]) from None
    failures: list[BaseException] = []
    init: dict[str, Any] = {"address": address} if address else {"num_cpus": workers.count}
    init |= {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    init["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # as Flower would
    os.environ.update(LARGE_BUFFERS)  # for the workers
    keep_large_buffers()
    resources: Any = {"num_cpus": 1.0, "num_gpus": workers.gpus_per_site}
    quiet_flower()
    with warnings.catch_warnings(), handlers_kept():
        warnings.simplefilter("ignore")  # Ray's and Flower's own: run_simulation is deprecated in 1.39, and works
        try:
            ray.init(**init)  # Flower takes it as it is
            take_signals_again()
            run_simulation(
                _server_app(main, failures),
                app,
                num_supernodes=sites,
                backend_config={"init_args": init, "client_resources": resources},
            )
        finally:
            ray.shutdown()
    if failures:
        raise failures[0]


def _server_app(main: Main, failures: list[BaseException]) -> ServerApp:
    """Flower runs it in a thread of its own and wraps what it raises; keep the original."""
    app = ServerApp()

    @app.main()
    def _(grid: Grid, context: Context) -> None:
        try:
            main(grid)
        except Exception as error:
            failures.append(error)

    return app


def inline(main: Main, app: ClientApp, sites: int) -> None:
    """Run ``main`` against sites that this process serves, one after the other."""
    quiet_flower()
    keep_large_buffers()
    act_as(1, 1)
    main(InlineGrid(app, sites))


def quiet_flower() -> None:
    """Keep Flower's own log lines off the terminal; errors still come as exceptions and reasons."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


class InlineGrid(Grid):
    """A ``Grid`` whose messages call the ClientApp in this process.

    Every record is written to Flower's form and read from it as on the wire; only the sockets are missing.
    """

    def __init__(self, app: ClientApp, sites: int) -> None:
        self._app = app
        self._numbers = itertools.count(1)
        self._asked: dict[str, Message] = {}
        self._contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 2, "num-partitions": sites},
                state=RecordDict(),
                run_config={},
            )
            for node in range(2, sites + 2)
        }

    def set_run(self, run: Any) -> None:
        raise NotImplementedError("the inline backend has no Flower run")

    @property
    def run(self) -> Any:
        raise NotImplementedError("the inline backend has no Flower run")

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError("use Message(...)")

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        identifiers = []
        for message in messages:
            identifier = str(next(self._numbers))
            name_as(message, identifier)
            self._asked[identifier] = message
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        """Have the first of these sites work, and return its reply: there is never more than one."""
        first = next((identifier for identifier in message_ids if identifier in self._asked), None)
        return [] if first is None else [self._answered(self._asked.pop(first))]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        return [reply for identifier in self.push_messages(messages) for reply in self.pull_messages([identifier])]

    def _answered(self, message: Message) -> Message:
        try:
            return self._app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # a site's process edge: the coordinator gets the reason, as over the network
            return Message(Error(CLIENT_APP_RAISED, str(error)), reply_to=message)
