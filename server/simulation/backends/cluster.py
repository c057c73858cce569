"""The cluster that a simulation runs on: one of its own on this machine, or one that is there."""

import logging
import math
import os
import platform
import secrets
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from common import __version__
from common.errors import BadInput, Fault, stop_on
from common.system.resources import LARGE_BUFFERS
from server.simulation.backends.own_ray.raylet import own_parts

BYTES_PER_WORKER = 1.5 * 2**30  # torch, Flower and a model of some 10 M parameters in one worker: an estimate
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's own switch for one machine: all its ports listen on 127.0.0.1 alone."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves a simulation on a machine that does anything else
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
_NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Processes of Ray's for people who look at a cluster: some four seconds of a processor at every start."""
CONNECT_S = 10.0
CANNOT_JOIN = 'On a node of the cluster, "auto" joins it; "ray status" shows whether it is there.'
GPU_PARTS = 10_000
"""The smallest share of a GPU that Ray knows is one of so many."""


@dataclass(frozen=True)
class Wanted:
    """What an experiment says about workers.

    Attributes:
        workers: Sites that train at a time; 0 for as many as fit.
        threads: Cores that each takes.
        gpus_per_site: Share of a GPU, or whole GPUs; negative chooses, 0 trains on the CPU.
        address: Cluster to join; empty starts one here.
        sites: How many there will be, as far as it is known.
        scratch: Folder for what lasts as long as the run; empty on a cluster that is joined.
        paths: Folders with our packages and a person's plug-ins, where they are not installed; a node of a cluster may
            have them at the same place.
        fork_server: Socket of the process that workers are forked from; empty starts Ray as it does by itself.
    """

    workers: int
    threads: int
    gpus_per_site: float
    address: str
    sites: int
    scratch: str
    paths: tuple[str, ...]
    fork_server: str = ""


@dataclass(frozen=True)
class ClusterNode:
    """What a node of a cluster has: cores, GPUs, bytes of memory."""

    cpus: float
    gpus: float
    memory: float

    def room(self, threads: int, gpus_per_site: float) -> int:
        """How many sites can train here at a time."""
        fitting = [self.cpus // threads, self.memory // BYTES_PER_WORKER]
        if gpus_per_site > 1:
            fitting.append(self.gpus // gpus_per_site)
        elif gpus_per_site > 0:
            fitting.append(math.floor(1 / gpus_per_site + 1e-6) * self.gpus)
        return max(int(min(fitting)), 0)


@dataclass(frozen=True)
class Workers:
    """How many sites train at a time, and each one's share of a GPU, or its GPUs."""

    count: int
    gpus_per_site: float


def choose_workers(wanted: Wanted, sites: int, machines: Sequence[ClusterNode]) -> Workers:
    """Workers by the cores, memory and GPUs of all machines, where the experiment leaves them open.

    Where a machine has a GPU, and the experiment does not say that it trains on CPUs, sites train on GPUs alone.
    """
    gpus = sum(machine.gpus for machine in machines) if wanted.gpus_per_site != 0 else 0
    share = max(wanted.gpus_per_site, 0.0)
    if gpus and wanted.gpus_per_site < 0:
        with_gpu = [machine for machine in machines if machine.gpus]
        together = wanted.workers or min(sites, max(1, sum(one.room(wanted.threads, 0) for one in with_gpu)))
        share = math.floor(GPU_PARTS / max(1, math.ceil(together / gpus))) / GPU_PARTS
    room = sum(machine.room(wanted.threads, share) for machine in machines)
    return Workers(wanted.workers or max(1, min(sites, room)), share)


def start(wanted: Wanted, say: Callable[[str], None]) -> None:
    """Start Ray on this machine, or join it; everything that Ray starts here ends with this process.

    Args:
        wanted: What the experiment says.
        say: Called with the reason where workers cannot be forked.

    Raises:
        BadInput: If there is no cluster at the address, or this machine has other versions than it.
    """
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    if wanted.address:
        variables = {**QUIET, **LARGE_BUFFERS, "PYTHONPATH": os.pathsep.join(wanted.paths)}
        options |= {"address": wanted.address, "runtime_env": {"env_vars": variables}}
    else:
        _leave_out_what_is_not_needed()
        cores = max(len(os.sched_getaffinity(0)), max(wanted.workers, 1) * wanted.threads)
        options |= {"num_cpus": cores, "_temp_dir": wanted.scratch}
    with warnings.catch_warnings(), own_parts(wanted.fork_server, say) if wanted.fork_server else nullcontext():
        warnings.simplefilter("ignore")  # Ray's own
        try:
            _reach(wanted.address)
            ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            if not wanted.address:
                raise
            problem = f'"{wanted.address}" cannot be joined: {_first_line(error)}'
            raise BadInput([Fault("simulation.address", problem, CANNOT_JOIN)]) from None


def _reach(address: str) -> None:
    """Ray itself tries for minutes.

    Raises:
        OSError: If nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _leave_out_what_is_not_needed() -> None:
    """Ray has no option for it; where it has other names one day, it only starts more slowly."""
    from ray._private.node import Node

    for name in _NOT_NEEDED:
        if hasattr(Node, name):
            setattr(Node, name, lambda node, *arguments, **options: None)
    Node._webui_url = ""


def nodes() -> list[dict[str, Any]]:
    """The living nodes of the cluster, as Ray describes them."""
    import ray

    every: Any = ray.nodes
    return [node for node in every() if node["Alive"]]


def machines(living: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """What each of :func:`nodes` has."""
    found = [node["Resources"] for node in living]
    return [ClusterNode(one.get("CPU", 0), one.get("GPU", 0), one.get("memory", 0)) for one in found]


def room_faults(wanted: Wanted, workers: Workers, found: Sequence[ClusterNode]) -> list[Fault]:
    """A site that fits on no node would be waited for without end."""
    share = workers.gpus_per_site
    if any(node.cpus >= wanted.threads and node.gpus >= share for node in found):
        return []
    asked = f"{wanted.threads} {'core' if wanted.threads == 1 else 'cores'}"
    asked += f" and {share:g} {'GPUs' if share > 1 else 'of a GPU'}" if share else ""
    have = "; ".join(f"{node.cpus:g} cores, {node.gpus:g} GPUs" for node in found) or "nothing"
    problem = f"a site takes {asked}, and no node of the cluster has that: {have}."
    return [Fault("simulation", problem, "Change training.threads or simulation.gpus_per_site.")]


# ---------------------------------------------------------------------- versions


def versions() -> dict[str, str]:
    """What must be the same on every node for the model to be the same."""
    found = {"Python": platform.python_version(), "polyclinic": __version__}
    for name in ("torch", "flwr", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def version_faults(here: Mapping[str, str], others: Mapping[str, Mapping[str, str]]) -> list[Fault]:
    """Every node that has something else.

    Args:
        others: Name of a node -> its versions.
    """
    found = []
    for node, there in sorted(others.items()):
        other = [
            f"{name} {there.get(name, 'none')}, here {here[name]}" for name in here if there.get(name) != here[name]
        ]
        if other:
            problem = f"node {node} has {'; '.join(other)}."
            found.append(Fault("simulation.address", problem, "Install the same versions on every node."))
    return found


def check_nodes(here: Mapping[str, str], probe: Callable[[], dict[str, str]]) -> None:
    """Ask every living node for its versions.

    Args:
        probe: Sent to each node by value: our package may not be there.

    Raises:
        BadInput: With every node that has others.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked: dict[str, Any] = {}
    for node in nodes():
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options: Any = {"num_cpus": 0, "scheduling_strategy": on_node, "max_retries": 3}
        asked[f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"] = ray.remote(**options)(probe).remote()
    stop_on(version_faults(here, {name: ray.get(reference) for name, reference in asked.items()}))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def own_paths() -> tuple[str, ...]:
    """Where this process finds modules that are neither installed nor Python's own."""
    installed = (sys.prefix, sys.base_prefix)
    found = [os.path.abspath(path) for path in sys.path]
    return tuple(path for path in found if not path.startswith(installed) and "site-packages" not in path)


def environment(address: str) -> dict[str, str]:
    """Environment of the process that drives Ray, which its workers here inherit."""
    paths = [os.path.abspath(path) for path in sys.path]  # "" is the working folder
    own = {"PYTHONPATH": os.pathsep.join(paths), **QUIET, **LARGE_BUFFERS}
    return {**os.environ, **own, **({} if address else LOOPBACK_ONLY | with_a_token())}


def with_a_token() -> dict[str, str]:
    """Have a Ray of our own answer nobody else on this machine; known from Ray 2.52 on.

    From 2.59 on Ray asks for a token by itself, but keeps one in the home folder, for ever and for all clusters, and
    does not start where that folder cannot be written.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
