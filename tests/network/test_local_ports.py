"""What listens where: a coordinator on the one port for hospitals, a hospital on none; and what a crowd can do."""

import ipaddress
import resource
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.network.conftest import Trial
from tests.network.federated import admitted, hash_in, sites_by_round
from tests.network.real import PARTIAL, Program, Site, eventually, lines_of

pytestmark = pytest.mark.slow


def family(program: Program) -> list[psutil.Process]:
    """A program and everything that it started."""
    process = psutil.Process(program.process.pid)
    return [process, *process.children(recursive=True)]


def listeners(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Address and port of everything that these processes accept connections or datagrams on."""
    sockets = [one for process in processes for one in process.net_connections("inet")]
    heard = [one for one in sockets if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM]
    return {(plain(one.laddr.ip), one.laddr.port) for one in heard}


def plain(address: str) -> str:
    """An address of IPv4 as such, also where a socket of IPv6 is bound to it, as gRPC's are."""
    read = ipaddress.ip_address(address)
    mapped = read.ipv4_mapped if isinstance(read, ipaddress.IPv6Address) else None
    return str(mapped or read)


def test_the_port_for_hospitals_is_all_that_a_coordinator_opens_also_to_its_own_machine(trial: Trial) -> None:
    assert {port for _, port in listeners(family(trial.coordinator.program))} == {trial.coordinator.port}


def test_a_site_opens_no_port(hospital: Callable[[str], Site]) -> None:
    site = hospital("closed")
    site.start().says("connected to trial")
    assert listeners(family(site.program)) == set()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """The soft limit of open files that many systems have, for programs that are started meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.torture
def test_two_thousand_idle_and_two_thousand_half_sent_connections_slow_no_round_down(
    few_descriptors: None, tmp_path: Path
) -> None:
    (tmp_path / "federation").mkdir()
    with admitted(tmp_path / "federation", PARTIAL) as federation:
        federation.coordinator.start()
        federation.gather()
        superlink = federation.coordinator.superlink
        rounds = ("run.rounds=12", "training.epochs=6")
        assert federation.run(tmp_path / "warm", "run.rounds=2", once=True).ends() == 0
        assert federation.run(tmp_path / "calm", *rounds, once=True).ends() == 0
        files = superlink.num_fds()
        words = (federation.coordinator.port, 4000, 90, "--kinds", "silent,hello", "--pause", 20)
        crowd = federation.machine.start("flood", "-m", "tests.network.flood", *words)
        crowd.says("begun")
        time.sleep(20)  # until all have been opened
        run = federation.run(tmp_path / "crowded-run", *rounds, once=True)
        assert run.ends() == 0
        assert crowd.runs
        assert sites_by_round(tmp_path / "crowded-run") == [["east", "north", "south"]] * 12
        assert hash_in(tmp_path / "crowded-run") == hash_in(tmp_path / "calm")
        calm, crowded = (median_round_s(tmp_path / name) for name in ("calm", "crowded-run"))
        print(f"seconds a round: {calm:.3f} calm, {crowded:.3f} crowded, {crowded / calm:.2f} times")
        assert crowded < 1.2 * calm
        assert crowd.ends() == 0
        eventually(lambda: superlink.num_fds() <= files + 2, "the file descriptors are back")
        assert all(site.program.runs for site in federation.sites)


def median_round_s(folder: Path) -> float:
    return median(line["seconds"] for line in lines_of(folder / "rounds.jsonl"))
