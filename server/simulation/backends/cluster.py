"""The Ray cluster of a simulation: Ray is started on this machine, or an existing cluster is joined."""

import logging
import math
import os
import platform
import secrets
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from polyclinic.common import __version__
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.resources import BUFFER_REUSE_ENVIRONMENT

BYTES_PER_WORKER = 1.5 * 2**30
"""Estimated memory of a worker with torch, Flower and a model of 10 million parameters."""
LOCAL_RAY_VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # with 0, all of Ray's ports listen only on 127.0.0.1
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # short, because a local server that does not answer has ended
}
"""Environment variables of a Ray that is started on this machine."""
QUIET_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # with Ray's default of 15, a simulation gets no time beside other programs
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
"""Environment variables without which Ray and Flower send data to their authors or disturb a run."""
CONNECT_TIMEOUT_S = 10.0
GPU_UNITS = 10_000
"""Number of units into which Ray divides a GPU; shares of a GPU are rounded down to whole units."""


@dataclass(frozen=True)
class RayWorkerSettings:
    """An experiment's settings for Ray workers, each of which trains one site at a time.

    Attributes:
        workers: Number of workers; 0 for as many as fit.
        threads: CPU cores per worker.
        gpus_per_site: GPUs per worker, a fraction or a whole number; None to choose by the cluster, 0 to train on CPUs.
        address: Address of the cluster to join; empty to start Ray on this machine.
        scratch: Folder for temporary files of the run; empty on a joined cluster.
        paths: Folders with modules that are not installed (Polyclinic or plug-ins). Other nodes must have them under
            the same paths.
    """

    workers: int
    threads: int
    gpus_per_site: float | None
    address: str
    scratch: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class ClusterNode:
    """The resources of one cluster node: CPU cores, GPUs, bytes of memory."""

    cpus: float
    gpus: float
    memory: float

    def count_fitting_sites(self, threads: int, gpus_per_site: float) -> int:
        """Return the number of sites that can train on this node at the same time.

        Args:
            threads: CPU cores per site.
            gpus_per_site: GPUs per site, a fraction or a whole number.
        """
        limits = [self.cpus // threads, self.memory // BYTES_PER_WORKER]
        if gpus_per_site > 1:
            limits.append(self.gpus // gpus_per_site)
        elif gpus_per_site > 0:
            limits.append(math.floor(1 / gpus_per_site + 1e-6) * self.gpus)
        return max(int(min(limits)), 0)


@dataclass(frozen=True)
class WorkerAllocation:
    """The number of workers, and the GPUs of each worker, a fraction or a whole number."""

    count: int
    gpus_per_site: float


def allocate_simulation_workers(
    settings: RayWorkerSettings, sites: int, machines: Sequence[ClusterNode]
) -> WorkerAllocation:
    """Choose the number of workers and their GPUs by the cluster's resources, unless the experiment sets them.

    If any machine has a GPU, sites train only on GPUs, unless the experiment requests CPUs.
    """
    gpus = sum(machine.gpus for machine in machines) if settings.gpus_per_site != 0 else 0
    share = settings.gpus_per_site or 0.0
    if gpus and settings.gpus_per_site is None:
        with_gpu = [machine for machine in machines if machine.gpus]
        capacity = sum(machine.count_fitting_sites(settings.threads, 0) for machine in with_gpu)
        workers = settings.workers or min(sites, max(1, capacity))
        workers_per_gpu = max(1, math.ceil(workers / gpus))
        share = math.floor(GPU_UNITS / workers_per_gpu) / GPU_UNITS
    capacity = sum(machine.count_fitting_sites(settings.threads, share) for machine in machines)
    return WorkerAllocation(settings.workers or max(1, min(sites, capacity)), share)


def find_cluster_host(address: str) -> str:
    """Return the host to which joining a cluster connects; empty for Ray on this machine or in the environment."""
    return "" if address in ("", "auto", "local") else address


def start_or_join_ray(settings: RayWorkerSettings) -> None:
    """Start Ray on this machine, or join a cluster. Processes that Ray starts here end with this process.

    Raises:
        BadInput: If no cluster answers at the address.
    """
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    if settings.address:
        variables = {**QUIET_VARIABLES, **BUFFER_REUSE_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(settings.paths)}
        options |= {"address": settings.address, "runtime_env": {"env_vars": variables}}
    else:
        cores = max(len(os.sched_getaffinity(0)), max(settings.workers, 1) * settings.threads)
        # "local" starts a new Ray, even if RAY_ADDRESS in the environment names a cluster.
        options |= {"address": "local", "num_cpus": cores, "_temp_dir": settings.scratch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Ray's code
        try:
            host, _, port = settings.address.rpartition(":")
            if host and port.isdigit():  # without this check, Ray would retry for minutes
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
            ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            if not settings.address:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise BadInput([make_cluster_join_fault(settings.address, reason)]) from None


def make_cluster_join_fault(address: str, reason: str) -> Fault:
    """Return the fault that this machine cannot join a cluster."""
    remedy = 'On a node of the cluster, "auto" joins it; "ray status" shows whether it is there.'
    return Fault("simulation.address", f'"{address}" cannot be joined: {reason}', remedy)


def list_living_ray_nodes() -> list[dict[str, Any]]:
    """Return Ray's descriptions of the cluster's living nodes."""
    import ray

    list_nodes: Any = ray.nodes  # Ray's function has no types
    return [node for node in list_nodes() if node["Alive"]]


def read_node_resources(living: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """Return the resources of each node, from Ray's descriptions (:func:`list_living_ray_nodes`)."""
    resources = [node["Resources"] for node in living]
    return [ClusterNode(node.get("CPU", 0), node.get("GPU", 0), node.get("memory", 0)) for node in resources]


def find_cluster_capacity_faults(
    settings: RayWorkerSettings, workers: WorkerAllocation, machines: Sequence[ClusterNode]
) -> list[Fault]:
    """Return a fault if no node has enough cores and GPUs for a worker; without it, Ray would wait for ever."""
    share = workers.gpus_per_site
    if any(node.cpus >= settings.threads and node.gpus >= share for node in machines):
        return []
    needs = f"{settings.threads} {'core' if settings.threads == 1 else 'cores'}"
    needs += f" and {share:g} {'GPUs' if share > 1 else 'of a GPU'}" if share else ""
    available = "; ".join(f"{node.cpus:g} cores, {node.gpus:g} GPUs" for node in machines) or "nothing"
    problem = f"a site takes {needs}, and no node of the cluster has that: {available}."
    return [Fault("simulation", problem, "Change training.threads or simulation.gpus_per_site.")]


# ---------------------------------------------------------------------- versions


def collect_node_versions() -> dict[str, str]:
    """Return the software versions that must be equal on all nodes for a reproducible model."""
    installed = {"Python": platform.python_version(), "polyclinic": __version__}
    for name in ("torch", "flwr", "numpy"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "none"
    return installed


def find_node_version_faults(here: Mapping[str, str], others: Mapping[str, Mapping[str, str]]) -> list[Fault]:
    """Return a fault for each node whose versions differ from ``here``.

    Args:
        others: Node -> its versions.
    """
    faults = []
    for node, versions in sorted(others.items()):
        differences = [
            f"{name} {versions.get(name, 'none')}, here {here[name]}"
            for name in here
            if versions.get(name) != here[name]
        ]
        if differences:
            problem = f"node {node} has {'; '.join(differences)}."
            faults.append(Fault("simulation.address", problem, "Install the same versions on every node."))
    return faults


def check_node_versions(here: Mapping[str, str], probe: Callable[[], dict[str, str]]) -> None:
    """Check that all living nodes have the same software versions as this machine.

    Args:
        here: The versions of this machine.
        probe: Returns a node's versions. Ray sends the function by value, because a node may not have this package.

    Raises:
        BadInput: For each node whose versions differ.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    answers: dict[str, Any] = {}
    for node in list_living_ray_nodes():
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options: Any = {"num_cpus": 0, "scheduling_strategy": on_node, "max_retries": 3}
        answers[f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"] = ray.remote(**options)(probe).remote()
    raise_faults(find_node_version_faults(here, {name: ray.get(reference) for name, reference in answers.items()}))


def list_uninstalled_import_folders() -> tuple[str, ...]:
    """Return the import folders of this process that belong neither to Python nor to installed packages."""
    installed = (sys.prefix, sys.base_prefix)
    paths = [os.path.abspath(path) for path in sys.path]
    return tuple(path for path in paths if not path.startswith(installed) and "site-packages" not in path)


def make_ray_driver_environment(address: str) -> dict[str, str]:
    """Return the environment variables of the process that drives Ray; its workers on this machine inherit them."""
    paths = [os.path.abspath(path) for path in sys.path]  # "" is the working folder
    variables = {"PYTHONPATH": os.pathsep.join(paths), **QUIET_VARIABLES, **BUFFER_REUSE_ENVIRONMENT}
    return {**os.environ, **variables, **({} if address else LOCAL_RAY_VARIABLES | make_ray_token_variables())}


def make_ray_token_variables() -> dict[str, str]:
    """Return environment variables by which Ray (2.52 or later) serves only processes that know a secret token.

    Without them, Ray 2.59 and later stores a permanent token for all clusters in the home folder, and fails if this
    folder is not writable.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
