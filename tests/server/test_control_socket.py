"""The calls of the coordinator's own programs: who can open the folder is answered, and nobody else can connect."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import psutil
import pytest

from server.coordinator.folder import Coordinator, lock_coordinator, read_coordinator
from server.coordinator.preflight import no_superlink_faults
from server.coordinator.state import SOCKET, ControlSocket, accepts_connections
from server.deployment.superlink.control_client import SERVICE, ControlClient, is_superlink_answering
from server.deployment.superlink.process import SuperLink
from tests.network.real import flwr_server, free_ports
from tests.processes import command_line

pytestmark = pytest.mark.slow
SOMEBODY_ELSE = 65534
"""The account ``nobody``."""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A SuperLink that runs, in a folder whose path is longer than that of a socket may be."""
    folder = tmp_path_factory.mktemp("control") / ("long" * 20) / ("path" * 20) / "trial"
    folder.parent.mkdir(parents=True)
    words = ("--name", "trial", "--host", "127.0.0.1", "--port", free_ports(1)[0])
    assert flwr_server("init", folder, *words).code == 0
    made = read_coordinator(folder)
    link = SuperLink(made)
    with lock_coordinator(made, "start"):  # closes the folder, as flwr-server start does
        pass
    link.start()
    yield made
    link.stop()


def test_who_can_open_the_folder_is_answered(coordinator: Coordinator) -> None:
    assert is_superlink_answering(coordinator)
    assert accepts_connections(coordinator.state)
    with closing(ControlClient(coordinator)) as control:
        assert control.nodes() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
def test_another_account_of_the_machine_cannot_connect(coordinator: Coordinator) -> None:
    code = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setgid({SOMEBODY_ELSE}); os.setuid({SOMEBODY_ELSE})\n"
        "os.chdir('/')\n"
        "with socket.socket(socket.AF_UNIX) as connection:\n"
        "    try: connection.connect(sys.argv[1])\n"
        "    except PermissionError: print('refused')\n"
    )
    short = Path("/tmp") / f"control-{os.getpid()}"  # every folder above is open, so that only the mode of state counts
    shutil.rmtree(short, ignore_errors=True)
    short.mkdir()
    short.chmod(0o755)
    try:
        state = short / "state"
        state.mkdir()
        state.chmod(0o755)
        with closing(ControlSocket(state)) as place, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place.path)
            listening.listen()
            (state / SOCKET).chmod(0o777)
            call = [sys.executable, "-P", "-c", code, str(state / SOCKET)]
            assert subprocess.run(call, capture_output=True, text=True, check=True).stdout == ""
            state.chmod(coordinator.state.stat().st_mode & 0o777)  # as flwr-server start leaves it
            assert subprocess.run(call, capture_output=True, text=True, check=True).stdout == "refused\n"
    finally:
        shutil.rmtree(short)


def test_the_superlink_listens_on_the_port_for_hospitals_and_no_other(coordinator: Coordinator) -> None:
    (process,) = [child for child in psutil.Process().children() if "superlink.program" in command_line(child)]
    ports = {link.laddr.port for link in process.net_connections("inet") if link.status == psutil.CONN_LISTEN}
    assert ports == {coordinator.file.port}


def test_a_call_that_is_not_there_is_refused_as_such(coordinator: Coordinator) -> None:
    with closing(ControlSocket(coordinator.state)) as place, grpc.insecure_channel(place.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/{SERVICE}/None")(b"", timeout=20)
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_socket_that_a_killed_superlink_left_takes_no_connections(tmp_path: Path) -> None:
    assert not accepts_connections(tmp_path)
    with closing(ControlSocket(tmp_path)) as place, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place.path)
    assert (tmp_path / SOCKET).is_socket()
    assert not accepts_connections(tmp_path)
    assert not accepts_connections(tmp_path / "absent")


def test_a_superlink_that_takes_seconds_to_answer_is_there(coordinator: Coordinator) -> None:
    """As on a machine that has much to do."""
    (process,) = [child for child in psutil.Process().children() if "superlink.program" in command_line(child)]
    process.suspend()
    later = threading.Timer(4, process.resume)
    later.start()
    try:
        assert is_superlink_answering(coordinator)
    finally:
        later.cancel()
        process.resume()


def test_a_run_that_comes_too_early_is_told_that_start_is_at_work(coordinator: Coordinator) -> None:
    with lock_coordinator(coordinator, "start"):
        fault = no_superlink_faults(coordinator)
    assert fault.problem == "flwr-server start is at work on this folder, but its SuperLink does not answer."
    assert str(coordinator.log) in fault.remedy
    assert no_superlink_faults(coordinator).problem == "flwr-server start does not run on this folder."
