"""The quickstart as its page says it: ``flwr run`` in Flower's simulation, and on a stock SuperLink with SuperNodes."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.network.real import ROOT, eventually, free_ports, listens

pytestmark = [pytest.mark.slow, pytest.mark.network]
BIN = Path(sys.executable).parent
BY_HTTP = tuple(int(part) for part in version("flwr").split(".")[:2]) >= (1, 40)
"""From 1.40 on Flower's SuperNode talks to the SuperLink's HTTP port."""
Starts = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's machine: the quickstart copied, Flower's own folder empty."""
    shutil.copytree(ROOT / "experiments" / "flower-quickstart", tmp_path / "app")
    for key, value in {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }.items():
        monkeypatch.setenv(key, value)
    return tmp_path


@pytest.fixture
def start(home: Path) -> Iterator[Starts]:
    """Starts a program in a group of its own, all of which ends with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def started(*command: str) -> subprocess.Popen[bytes]:
        with (home / f"{len(running)}.log").open("wb") as log:
            program = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], stdout=log, stderr=log, start_new_session=True
            )
        running.append(program)
        return program

    yield started
    for program in running:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def flwr_run(home: Path, *words: str) -> dict[str, float]:
    """Type ``flwr run``; return the AUROC of each digit and their mean, from its last line."""
    done = subprocess.run(
        [BIN / "flwr", "run", ".", *words, "--stream"], cwd=home / "app", capture_output=True, text=True, timeout=400
    )
    line = next(iter(re.findall(r"^AUROC .*$", done.stdout, re.MULTILINE)), "")
    aurocs = re.findall(r"(\w+): (\d\.\d{3})", line)
    assert len(aurocs) == 11, done.stdout[-3000:] + done.stderr[-3000:]
    return {name: float(value) for name, value in aurocs}


def to_superlink(home: Path, port: int) -> None:
    """Wait for the SuperLink and have ``flwr`` ask it."""
    eventually(lambda: listens(port), f"a SuperLink on {port}", 60)
    (home / "home").mkdir(exist_ok=True)
    text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "home" / "config.toml").write_text(text)


def test_in_flowers_simulation_surgical_aggregation_beats_vanilla(home: Path, start: Starts) -> None:
    (port,) = free_ports(1)
    start("flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port))
    to_superlink(home, port)
    surgical = flwr_run(home)
    vanilla = flwr_run(home, "--run-config", 'strategy="vanilla"')
    assert surgical["mean"] > 0.95
    assert surgical["mean"] > vanilla["mean"] + 0.05


def test_on_a_stock_superlink_with_stock_supernodes(home: Path, start: Starts) -> None:
    port, fleet, *own_ports = free_ports(4)
    grpc = () if BY_HTTP else ("--fleet-api-address", f"127.0.0.1:{fleet}")
    start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port), *grpc)
    to_superlink(home, port)
    for site in (0, 1):
        at = f"127.0.0.1:{port if BY_HTTP else fleet}"
        config = f"partition-id={site} num-partitions=2"
        start(
            "flower-supernode", "--insecure", "--superlink", at, "--node-config", config, "--port", str(own_ports[site])
        )
    assert flwr_run(home)["mean"] > 0.95
