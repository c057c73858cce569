"""What listens where: a coordinator on the one port for hospitals, a hospital on none; and what a crowd can do."""

import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.network.conftest import Hospital, Trial
from tests.network.federated import admitted, hash_in, sites_by_round
from tests.network.real import PARTIAL, Program, eventually, lines_of

pytestmark = pytest.mark.slow


def listeners(program: Program) -> set[int]:
    """The ports on which a program and its children accept connections or datagrams."""
    process = psutil.Process(program.process.pid)
    family = [process, *process.children(recursive=True)]
    sockets = [item for member in family for item in member.net_connections("inet")]
    heard = [item for item in sockets if item.status == psutil.CONN_LISTEN or item.type == socket.SOCK_DGRAM]
    return {item.laddr.port for item in heard}


def test_the_port_for_hospitals_is_all_that_a_coordinator_opens_also_to_its_own_machine_and_a_site_opens_none(
    trial: Trial, hospital: Hospital
) -> None:
    site = hospital("closed")
    site.connect()
    assert listeners(trial.coordinator.program) == {trial.coordinator.port}
    assert listeners(site.program) == set()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """The soft limit of open files that many systems have, for programs that are started meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.torture
def test_four_thousand_idle_or_half_sent_connections_slow_no_round_down(few_descriptors: None, tmp_path: Path) -> None:
    with admitted(tmp_path, PARTIAL) as federation:
        federation.coordinator.start()
        federation.gather()
        superlink = federation.coordinator.superlink
        rounds = ("run.rounds=12", "training.epochs=6")
        federation.run("run.rounds=2", once=True, out="warm").succeeds()
        federation.run(*rounds, once=True, out="calm").succeeds()
        files = superlink.num_fds()
        words = (federation.coordinator.port, 4000, 90, "--kinds", "silent,hello", "--pause", 20)
        crowd = federation.machine.start("flood", "-m", "tests.network.flood", *words)
        crowd.says("begun")
        time.sleep(20)  # until all have been opened
        federation.run(*rounds, once=True, out="crowded-run").succeeds()
        assert crowd.runs
        assert sites_by_round(tmp_path / "crowded-run") == [["east", "north", "south"]] * 12
        assert hash_in(tmp_path / "crowded-run") == hash_in(tmp_path / "calm")
        files_of_rounds = [tmp_path / name / "rounds.jsonl" for name in ("calm", "crowded-run")]
        calm, crowded = (median(line["seconds"] for line in lines_of(path)) for path in files_of_rounds)
        print(f"seconds a round: {calm:.3f} calm, {crowded:.3f} crowded, {crowded / calm:.2f} times")
        assert crowded < 1.2 * calm
        assert crowd.ends() == 0
        eventually(lambda: superlink.num_fds() <= files + 2, "the file descriptors are back")
        assert all(site.program.runs for site in federation.sites)
