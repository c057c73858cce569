"""Ports that cannot be opened are found before anything is started, and named."""

import socket
import time
from pathlib import Path

import pytest

from server.coordinator.before_start import faults_of_ports
from server.coordinator.folder import alone, at_work, read_coordinator
from tests.network.real import flwr_server


@pytest.mark.parametrize("key", ["port", "control_port"])
def test_a_port_in_use_is_named_within_two_seconds(tmp_path: Path, key: str) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        ports = {"port": free.getsockname()[1], "control_port": free.getsockname()[1]}
        free.close()
        ports[key] = taken.getsockname()[1]
        words = ("--port", ports["port"], "--control-port", ports["control_port"])
        made = flwr_server(
            "init", tmp_path / "trial", "--name", "trial", "--host", "127.0.0.1", "--listen", "127.0.0.1", *words
        )
        assert made.code == 0, made.err
        began = time.monotonic()
        ended = flwr_server("start", tmp_path / "trial")
        assert time.monotonic() - began < 2
        said = " ".join(ended.err.split())
        assert ended.code == 2
        assert f"coordinator.toml: {key}: {ports[key]} of 127.0.0.1 cannot be opened: address already in use." in said
        assert f"set another {key} in coordinator.toml" in said
        assert "Traceback" not in ended.out + ended.err
    assert faults_of_ports(read_coordinator(tmp_path / "trial")) == []


def test_an_address_that_is_not_of_this_machine_is_named(tmp_path: Path) -> None:
    assert (
        flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "a.example", "--listen", "192.0.2.1").code
        == 0
    )
    (fault,) = faults_of_ports(read_coordinator(tmp_path / "trial"))
    assert "of 192.0.2.1 cannot be opened: cannot assign requested address." in str(fault)


def test_a_start_at_work_is_seen_from_outside(tmp_path: Path) -> None:
    assert flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "a.example").code == 0
    coordinator = read_coordinator(tmp_path / "trial")
    assert not at_work(coordinator, "start")
    with alone(coordinator, "start"):
        assert at_work(coordinator, "start")
        assert "starting: it takes up to a minute" in " ".join(flwr_server("status", tmp_path / "trial").out.split())
    assert not at_work(coordinator, "start")
    assert "down: start it" in " ".join(flwr_server("status", tmp_path / "trial").out.split())
