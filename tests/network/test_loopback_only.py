"""What listens where: hospitals reach one port, and only this machine reaches that of the coordinator's programs."""

import ipaddress
import socket
from collections.abc import Callable, Iterable

import psutil
import pytest

from tests.network.conftest import Trial
from tests.network.real import Program, Site, eventually

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


def beyond_loopback(found: Iterable[tuple[str, int]]) -> set[int]:
    """The ports that other machines could reach."""
    return {port for address, port in found if not ipaddress.ip_address(address).is_loopback}


def test_the_port_for_hospitals_is_all_that_a_coordinator_opens_to_other_machines(trial: Trial) -> None:
    found = listeners(family(trial.coordinator.program))
    assert beyond_loopback(found) == {trial.coordinator.port}


def test_the_calls_of_the_coordinators_own_programs_are_on_loopback(trial: Trial) -> None:
    coordinator = trial.coordinator
    found = listeners([coordinator.superlink])
    assert {address for address, port in found if port == coordinator.control_port} == {"127.0.0.1"}
    socket.create_connection(("127.0.0.1", coordinator.control_port), timeout=20).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", coordinator.control_port), timeout=20)
    socket.create_connection(("127.0.0.2", coordinator.port), timeout=20).close()


def test_a_site_opens_its_health_port_on_loopback_and_nothing_else(hospital: Callable[[str], Site]) -> None:
    site = hospital("closed")
    site.start().says("connected to trial")
    found = eventually(lambda: listeners(family(site.program)), "the site listens")
    assert beyond_loopback(found) == set()
    assert len(found) == 1
