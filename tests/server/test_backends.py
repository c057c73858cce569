"""One federation, several ways to run it, the same model bit for bit."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyclinic.common.errors import BadInput
from polyclinic.common.hosts import HostUse, permit_hosts
from polyclinic.server.simulation.backends.ray_grid import RayGrid
from polyclinic.strategies.engine.events import RunStopped
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import ALL_DIGITS, DIGITS, federation, finished, needs_of
from tests.network.real import eventually, lines_of
from tests.processes import command_line, kill
from tests.server.commands import PROGRAM, rounds_of
from tests.server.machines import POSSIBLE, Machine, ray_on, two_machines

ALONE = "evaluation.compare_local=true"
ON_RAY = 'simulation.backend="ray"'
LONG = ("run.rounds=30", "evaluation.checkpoint=last")
WITHIN_S = 240


def needs_machines(test: Any) -> Any:
    """For tests in namespaces of their own, which take a minute."""
    return pytest.mark.long(pytest.mark.skipif(not POSSIBLE, reason="network namespaces need root")(test))


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def events_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in lines_of(run / "events.jsonl") if event["event"] == name]


def sha256_of(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["model_sha256"])


def absences(run: Path) -> list[dict[str, str]]:
    return [line["absent"] for line in rounds_of(run) if line["absent"]]


def after_push(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Do this when the coordinator has sent so many times; the first is the roll call."""
    push, pushes = RayGrid.push_messages, list[int]()

    def acting(grid: RayGrid, messages: Any) -> Any:
        identifiers = push(grid, messages)
        pushes.append(len(identifiers))
        if len(pushes) == number:
            action()
        return identifiers

    monkeypatch.setattr(RayGrid, "push_messages", acting)


def listening(others: Collection[psutil.Process]) -> set[str]:
    """Return the addresses on which this process's children listen, but for those that other tests have started."""
    addresses = set()
    for process in set(children()) - set(others):
        try:
            connections = process.net_connections()
        except psutil.Error:
            continue
        addresses |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return addresses


ASK = """
import sys
from ray._raylet import GcsClient
try:
    print(GcsClient(address=sys.argv[1]).get_all_node_info())
except Exception as error:
    print(error)
"""


def answer_to_a_stranger(home: Path) -> str:
    """Return what another user of this machine hears from the Ray that is running."""
    words = [word for child in children() for word in command_line(child).split()]
    address = next(word.partition("=")[2] for word in words if word.startswith("--gcs-address="))
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    command, pipe = [sys.executable, "-c", ASK, address], subprocess.PIPE
    alone = {**outside, "HOME": str(home)}
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=alone) as stranger:
        assert stranger.stdout is not None
        answer = stranger.stdout.readline()  # it would ask again and again
        stranger.kill()
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ray_gives_the_inline_model_bit_for_bit_and_answers_nobody_else(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, push, modes, answers = set[str](), RayGrid.push_messages, set[int](), list[str]()
    others = children()

    def looking(grid: RayGrid, messages: Any) -> Any:
        addresses.update(listening(others))
        if not answers:
            answers.append(answer_to_a_stranger(tmp_path))
        modes.add(Path(grid._process.settings.scratch).parent.stat().st_mode & 0o777)
        return push(grid, messages)

    monkeypatch.setattr(RayGrid, "push_messages", looking)
    monkeypatch.setenv("HOME", "/proc/nobody")  # from 2.59 on Ray would write a token there
    _, inline = finished(ALONE)
    on_ray = federation(tmp_path, ON_RAY, ALONE, f"simulation.workers={workers}", out="ray")
    assert (inline["backend"], on_ray["backend"]) == ("inline", "ray")
    for key in ("model_sha256", "test", "benefit"):
        assert inline[key] == on_ray[key]
    assert all(site["benefit"] for site in on_ray["benefit"].values())
    assert "Unauthenticated" in answers[0]
    assert modes == {0o700}  # sites' memory and Ray's logs lie there
    assert len(events_of(tmp_path / "ray", "worker_ready")) == workers
    assert addresses <= {"::ffff:127.0.0.1", "127.0.0.1"}
    assert addresses
    assert [child.name() for child in children() if "ray" in child.name()] == []


@pytest.mark.long
@pytest.mark.parametrize("method", STRATEGIES)
def test_ray_gives_the_inline_model_with_every_method(method: str, tmp_path: Path) -> None:
    """In three rounds, with what sites and coordinator remember from one round to the next."""
    overrides = (f"run.method={method}", "run.rounds=3", *needs_of(method))
    inline = federation(tmp_path, *overrides, out="inline")
    on_ray = federation(tmp_path, *overrides, ON_RAY, "simulation.workers=2", out="ray")
    assert (inline["backend"], on_ray["backend"]) == ("inline", "ray")
    for key in ("model_sha256", "test", "per_site"):
        assert inline[key] == on_ray[key]


@pytest.mark.long
def test_a_killed_worker_is_replaced_and_no_site_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_a_worker() -> None:  # Ray changes their titles, so that one look may find none
        workers = lambda: [child for child in children() if "SiteWorker" in command_line(child)]  # noqa: E731
        eventually(workers, "a worker of Ray's has come", 10)[0].kill()

    after_push(monkeypatch, 2, kill_a_worker)
    summary = federation(tmp_path, ON_RAY, "simulation.workers=2")
    assert summary["model_sha256"] == finished()[1]["model_sha256"]
    assert len(events_of(tmp_path / "run", "worker_lost")) == 1
    assert absences(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("server", [pytest.param("raylet", marks=pytest.mark.long), "gcs_server"])
def test_a_ray_whose_server_is_killed_stops_the_run_and_resume_ends_in_the_same_model(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = "evaluation.checkpoint=last"
    with monkeypatch.context() as patch:
        after_push(patch, 3, lambda: kill(child for child in children() if child.name() == server))
        with pytest.raises(RunStopped, match=r"ended.*; --resume goes on"):
            federation(tmp_path, ON_RAY, "simulation.workers=1", last, "run.rounds=40")
    rounds = len(rounds_of(tmp_path / "run"))
    assert 0 < rounds < 40
    assert [child for child in children() if "ray" in child.name()] == []
    settings = (last, f"run.rounds={rounds + 3}")  # beside the line that is written a round later
    assert federation(tmp_path, *settings, resume=True)["model_sha256"] == finished(*settings)[1]["model_sha256"]


def test_a_cluster_that_is_not_there_is_a_fault_of_the_experiment(tmp_path: Path) -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with (
            permit_hosts([HostUse(f"127.0.0.1:{port}")], tmp_path / "secrets.toml"),
            pytest.raises(BadInput, match=r'simulation\.address: "127\.0\.0\.1:\d+" cannot be joined'),
        ):
            federation(tmp_path, ON_RAY, f"simulation.address=127.0.0.1:{port}")


Cluster = tuple[Machine, Machine, str, Path]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head without a GPU, and a node with one that shares no folder and no network interface with it."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "experiment.toml").write_text(DIGITS, encoding="utf-8")
    with two_machines(folder) as (east, west), ray_on(east, west) as address:
        yield east, west, address, folder


def typed(folder: Path, out: str, *settings: str) -> list[str]:
    """Return the command line of a run on Ray."""
    run = [sys.executable, "-c", PROGRAM, "run", str(folder / "experiment.toml"), "--out", str(folder / out)]
    return [*run, "--backend", "ray", *(part for setting in settings for part in ("--set", setting))]


def wait_in_run(program: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    """Wait until a run has come so far, or has ended."""
    until = time.monotonic() + WITHIN_S
    while not condition() and program.poll() is None and time.monotonic() < until:
        time.sleep(0.05)


def check_end(program: subprocess.Popen[str], run: Path) -> list[dict[str, Any]]:
    """Wait for the end of a long run: no site was ever absent, and the model is the inline one; return lost workers."""
    _, err = program.communicate(timeout=2 * WITHIN_S)
    assert program.returncode == 0, err
    assert absences(run) == []
    assert sha256_of(run) == finished(ALL_DIGITS, *LONG)[1]["model_sha256"]
    return events_of(run, "worker_lost")


@needs_machines
def test_two_sites_share_a_gpu_of_a_node_that_shares_no_folder_with_the_coordinator(two_nodes: Cluster) -> None:
    east, west, address, folder = two_nodes
    long_enough = "run.rounds=60"  # for both workers to start
    done = east.run(*typed(folder, "shared", f"simulation.address={address}", long_enough))
    assert done.returncode == 0, done.stderr
    assert sha256_of(folder / "shared") == finished(ALL_DIGITS, long_enough)[1]["model_sha256"]
    ready = events_of(folder / "shared", "worker_ready")
    # One GPU and two cores: two sites of half a GPU each, none on the head.
    assert [event["gpus"] for event in ready] == [1, 1]
    assert len({event["node"] for event in ready}) == 1
    assert sorted(path.name for path in (folder / "shared" / "sites").iterdir()) == ["site-1", "site-2", "site-3"]
    files = west.run("ls", str(folder), "/tmp").stdout
    assert "shared" not in files
    assert "polyclinic" not in files


@needs_machines
def test_both_nodes_train_where_no_gpu_is_asked_for_and_auto_finds_the_cluster(two_nodes: Cluster) -> None:
    east, _, _, folder = two_nodes
    trained = ("training.reset_optimizer=false", "run.rounds=60")  # long enough for the second node's worker to start
    settings = ("simulation.gpus_per_site=0", "simulation.workers=3", *trained)
    done = east.run(*typed(folder, "both", "simulation.address=auto", *settings))
    assert done.returncode == 0, done.stderr
    assert sha256_of(folder / "both") == finished(ALL_DIGITS, *trained)[1]["model_sha256"]
    assert len({event["node"] for event in events_of(folder / "both", "worker_ready")}) == 2


@needs_machines
def test_a_site_that_takes_more_cores_than_any_node_has_is_refused(two_nodes: Cluster) -> None:
    east, _, address, folder = two_nodes
    settings = (f"simulation.address={address}", "simulation.gpus_per_site=0", "training.threads=5")
    done = east.run(*typed(folder, "refused", *settings))
    assert done.returncode == 2
    assert "a site takes 5 cores" in " ".join(done.stderr.split())


@needs_machines
def test_a_node_that_is_lost_loses_no_site(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(DIGITS, encoding="utf-8")
    settings = ("simulation.gpus_per_site=0", "simulation.workers=3", *LONG)
    with two_machines(tmp_path) as (east, west), ray_on(east, west) as address:
        program = east.start(*typed(tmp_path, "run", f"simulation.address={address}", *settings))
        wait_in_run(program, lambda: len(rounds_of(tmp_path / "run")) >= 2)
        west.kill_all("raylet/raylet")
        assert check_end(program, tmp_path / "run")


@pytest.mark.long
def test_a_node_without_memory_stops_the_run_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "50")
    with pytest.raises(Exception, match="memory"):
        federation(tmp_path, ON_RAY, "simulation.workers=1")


@needs_machines
def test_the_memory_killer_takes_workers_and_no_site(tmp_path: Path) -> None:
    """Ray reads what the kernel says of a container's memory: here it reads files of this test."""
    (tmp_path / "experiment.toml").write_text(DIGITS, encoding="utf-8")
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    for name, text in (("max", "8000000000"), ("current", "1000000000"), ("stat", "inactive_file 0\nactive_file 0\n")):
        (memory / f"memory.{name}").write_text(text)
    with two_machines(tmp_path) as (east, _):
        assert east.run("mount", "--bind", str(memory), "/sys/fs/cgroup").returncode == 0
        more = {"RAY_memory_monitor_refresh_ms": "50"}
        program = east.start(*typed(tmp_path, "run", "simulation.workers=2", *LONG), more=more)
        wait_in_run(program, lambda: len(rounds_of(run)) >= 2)
        (memory / "memory.current").write_text("7900000000")
        wait_in_run(program, lambda: (run / "events.jsonl").exists() and events_of(run, "worker_lost"))
        (memory / "memory.current").write_text("1000000000")
        lost = check_end(program, run)
    assert lost
    assert all("memory" in event["reason"] for event in lost)
