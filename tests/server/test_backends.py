"""One federation, several ways to run it, the same model bit for bit."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import BadInput
from server.simulation.backends.cluster import QUIET
from server.simulation.backends.ray_grid import RayGrid
from tests.federations import federation, finished

ON_RAY = 'simulation.backend="ray"'
RAY = Path(sys.executable).with_name("ray")
OWN_FOLDERS = "mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && exec"
WITHIN_S = 120


def events_of(run: Path, name: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in every if event["event"] == name]


def listening() -> set[str]:
    """Addresses outside this machine's loopback on which this process's children listen."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            found |= {one.laddr.ip for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ray_gives_the_inline_model_bit_for_bit_and_listens_on_loopback_alone(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, push = set[str](), RayGrid.push_messages

    def looking(grid: RayGrid, messages: Any) -> Any:
        addresses.update(listening())
        return push(grid, messages)

    monkeypatch.setattr(RayGrid, "push_messages", looking)
    _, inline = finished()
    on_ray = federation(tmp_path, ON_RAY, f"simulation.workers={workers}", out="ray")
    assert (inline["backend"], on_ray["backend"]) == ("inline", "ray")
    assert inline["model_sha256"] == on_ray["model_sha256"]
    assert inline["test"] == on_ray["test"]
    assert len(events_of(tmp_path / "ray", "worker_ready")) == workers
    assert addresses == {"::ffff:127.0.0.1", "127.0.0.1"}
    assert [child.name() for child in psutil.Process().children(recursive=True) if "ray" in child.name()] == []


def test_a_cluster_that_is_not_there_is_a_fault_of_the_experiment(tmp_path: Path) -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(BadInput, match=r'simulation\.address: "127\.0\.0\.1:\d+" cannot be joined'):
            federation(tmp_path, ON_RAY, f"simulation.address=127.0.0.1:{port}")


# ---------------------------------------------------------------------- a cluster


def ray_process(arguments: list[str], *, apart: bool = False) -> subprocess.Popen[bytes]:
    """One node; with folders for temporary files and shared memory that no other process sees, if it is apart."""
    command = [
        str(RAY),
        "start",
        *arguments,
        "--node-ip-address=127.0.0.1",
        "--num-cpus=2",
        "--object-store-memory=200000000",
        "--block",
    ]
    if apart:
        command = ["unshare", "-rm", "sh", "-c", f'{OWN_FOLDERS} "$@"', "sh", *command]
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.getcwd()}
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=nowhere, stderr=nowhere, start_new_session=True)


def ended(process: subprocess.Popen[bytes]) -> None:
    for one in (*psutil.Process(process.pid).children(recursive=True), process):
        one.kill()
    process.wait()


def free_port() -> int:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_for_nodes(address: str, many: int) -> None:
    code = f"import ray; ray.init('{address}', logging_level=50); raise SystemExit(len(ray.nodes()) != {many})"
    until = time.monotonic() + WITHIN_S
    while subprocess.run([sys.executable, "-c", code], env={**os.environ, **QUIET}, capture_output=True).returncode:
        assert time.monotonic() < until, "the nodes did not come up"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """A head without a GPU, and a node with one (which Ray only believes in) that shares no folder with it."""
    if subprocess.run(["unshare", "-rm", "sh", "-c", f"{OWN_FOLDERS} true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, for a node with folders of its own")
    port, temporary = free_port(), tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    address = f"127.0.0.1:{port}"
    head = ["--head", f"--port={port}", "--num-gpus=0", "--include-dashboard=false", f"--temp-dir={temporary}"]
    processes = [ray_process(head)]
    try:
        wait_for_nodes(address, 1)
        processes.append(ray_process([f"--address={address}", "--num-gpus=1"], apart=True))
        wait_for_nodes(address, 2)
        yield address
    finally:
        for process in reversed(processes):
            ended(process)
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.slow
def test_two_sites_share_a_gpu_of_a_node_that_shares_no_folder_with_the_coordinator(
    two_nodes: str, tmp_path: Path
) -> None:
    summary = federation(tmp_path, ON_RAY, f"simulation.address={two_nodes}")
    assert summary["model_sha256"] == finished()[1]["model_sha256"]
    ready = events_of(tmp_path / "run", "worker_ready")
    # One GPU and two cores: two sites of half a GPU each, none on the head.
    assert [event["gpus"] for event in ready] == [1, 1]
    assert len({event["node"] for event in ready}) == 1
    assert sorted(path.name for path in (tmp_path / "run" / "sites").iterdir()) == ["site-1", "site-2", "site-3"]


@pytest.mark.long
def test_both_nodes_train_where_no_gpu_is_asked_for(two_nodes: str, tmp_path: Path) -> None:
    settings = ("simulation.gpus_per_site=0", "simulation.workers=3", "training.reset_optimizer=false")
    summary = federation(tmp_path, ON_RAY, f"simulation.address={two_nodes}", *settings)
    assert summary["model_sha256"] == finished("training.reset_optimizer=false")[1]["model_sha256"]
    assert len({event["node"] for event in events_of(tmp_path / "run", "worker_ready")}) == 2


@pytest.mark.long
def test_a_site_that_takes_more_cores_than_any_node_has_is_refused(two_nodes: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a site takes 5 cores, and no node of the cluster has that"):
        federation(tmp_path, ON_RAY, f"simulation.address={two_nodes}", "training.threads=5")


@pytest.mark.long
def test_a_node_without_memory_loses_its_sites_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's memory killer takes every worker; nothing is tried for ever."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "50")
    with pytest.raises(Exception, match="memory"):
        federation(tmp_path, ON_RAY, "simulation.workers=1")
