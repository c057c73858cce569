"""The reverse proxy that docker/ ships: its configuration, other ports, the real program, between real programs."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.network.federated import EVERYBODY, Federation
from tests.network.real import ROOT, eventually, free_ports, listens

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
CONFIGURATION = ROOT / "docker" / "haproxy.cfg"
A_CROWD, FROM_ONE_ADDRESS = 400, 256

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed: apt-get install haproxy"),
]


@contextmanager
def proxy(folder: Path, to: int) -> Iterator[int]:
    """A running HAProxy with the shipped configuration, but for the ports; its port."""
    (port,) = free_ports(1)
    text = CONFIGURATION.read_text(encoding="utf-8")
    for old, new in (("bind :9092", f"bind 127.0.0.1:{port}"), (" coordinator:9092 ", f" 127.0.0.1:{to} ")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "haproxy.cfg").write_text(text, encoding="utf-8")
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            [str(HAPROXY), "-db", "-f", folder / "haproxy.cfg"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        eventually(lambda: listens(port), "HAProxy listens")
        yield port
    finally:
        process.terminate()
        process.wait(30)


def closed(connection: socket.socket) -> bool:
    """Whether the proxy has closed it."""
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.fixture
def port(federation: Federation, tmp_path: Path) -> Iterator[int]:
    """The port of a proxy through which all three sites reach their coordinator."""
    with proxy(tmp_path, federation.coordinator.port) as port, federation.rerouted(dict.fromkeys(EVERYBODY, port)):
        yield port


def test_the_configuration_is_valid_as_it_is_shipped() -> None:
    checked = subprocess.run([str(HAPROXY), "-c", "-f", CONFIGURATION], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_a_run_through_the_proxy_goes_on_beside_a_crowd(federation: Federation, port: int) -> None:
    superlink = federation.coordinator.superlink
    files = superlink.num_fds()
    run = federation.run("run.rounds=4", once=True)
    with ExitStack() as stack:
        crowd = [stack.enter_context(socket.socket()) for _ in range(A_CROWD)]
        for connection in crowd:
            connection.settimeout(20)
            with suppress(OSError):  # the proxy may close it before it is open here
                connection.connect(("127.0.0.1", port))
        eventually(lambda: sum(map(closed, crowd)) >= A_CROWD - FROM_ONE_ADDRESS, "those beyond the limit are closed")
        assert superlink.num_fds() <= files + 10  # who says nothing is not let through
        federation.ends_unharmed(run, 4, "run.rounds=4")
        eventually(lambda: all(map(closed, crowd)), "who says nothing is closed")
