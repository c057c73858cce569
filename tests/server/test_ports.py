"""Ports that cannot be opened are found before anything is started, and named."""

import socket
import time
from pathlib import Path

from server.coordinator.folder import exclusive, is_running, read_coordinator
from server.coordinator.preflight import port_faults_of
from tests.network.real import flwr_server


def test_a_port_in_use_is_named_within_two_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        words = ("--name", "trial", "--host", "127.0.0.1", "--listen", "127.0.0.1", "--port", port)
        made = flwr_server("init", tmp_path / "trial", *words)
        assert made.code == 0, made.err
        began = time.monotonic()
        ended = flwr_server("start", tmp_path / "trial")
        assert time.monotonic() - began < 2
        said = " ".join(ended.err.split())
        assert ended.code == 2
        assert f"coordinator.toml: port: {port} of 127.0.0.1 cannot be opened: address already in use." in said
        assert "set another port in coordinator.toml" in said
        assert "Traceback" not in ended.out + ended.err
    assert port_faults_of(read_coordinator(tmp_path / "trial")) == []


def test_an_address_that_is_not_of_this_machine_is_named(tmp_path: Path) -> None:
    assert (
        flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "a.example", "--listen", "192.0.2.1").code
        == 0
    )
    (fault,) = port_faults_of(read_coordinator(tmp_path / "trial"))
    assert "of 192.0.2.1 cannot be opened: cannot assign requested address." in str(fault)


def test_a_start_at_work_is_seen_from_outside(tmp_path: Path) -> None:
    assert flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "a.example").code == 0
    coordinator = read_coordinator(tmp_path / "trial")
    assert not is_running(coordinator, "start")
    with exclusive(coordinator, "start"):
        assert is_running(coordinator, "start")
        assert "starting: it takes up to a minute" in " ".join(flwr_server("status", tmp_path / "trial").out.split())
    assert not is_running(coordinator, "start")
    assert "down: start it" in " ".join(flwr_server("status", tmp_path / "trial").out.split())
