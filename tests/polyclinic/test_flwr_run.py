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

from tests.network.real import eventually, free_ports, listens
from tests.own_files import write_modules
from tests.processes import environment

pytestmark = [pytest.mark.slow, pytest.mark.network]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
BY_HTTP = tuple(int(part) for part in version("flwr").split(".")[:2]) >= (1, 40)
"""From 1.40 on Flower's SuperNode talks to the SuperLink's HTTP port."""
Starts = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's machine: the quickstart beside files of his with the names of our parts; Flower's own folder empty."""
    shutil.copytree(ROOT / "experiments" / "flower-quickstart", tmp_path / "app")
    write_modules(tmp_path / "app")
    for key, value in {
        **environment(),
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(key, value)
    return tmp_path


@pytest.fixture
def start(home: Path) -> Iterator[Starts]:
    """Starts a program in a group of its own, all of which ends with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def started(*command: str) -> subprocess.Popen[bytes]:
        with (home / f"{len(running)}.log").open("wb") as log:
            made = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], stdout=log, stderr=log, start_new_session=True
            )
        running.append(made)
        return made

    yield started
    for program in running:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def flwr_run(home: Path, *words: str) -> dict[str, float]:
    """Type ``flwr run``; return the AUROC of each digit and their mean, from its last line."""
    done = subprocess.run(
        [BIN / "flwr", "run", ".", *words, "--stream"], cwd=home / "app", capture_output=True, text=True, timeout=1200
    )
    aurocs = re.findall(r"(\w+): (\d\.\d{3})", next(iter(re.findall(r"^AUROC .*$", done.stdout, re.MULTILINE)), ""))
    assert len(aurocs) == 11, done.stdout[-3000:] + done.stderr[-3000:]
    return {name: float(value) for name, value in aurocs}


def superlink(home: Path, start: Starts, *options: str) -> int:
    """Start Flower's SuperLink, which ``flwr run`` then uses; return its port."""
    (port,) = free_ports(1)
    start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port), *options)
    eventually(lambda: listens(port), f"somebody listens on {port}", within_s=60)
    (home / "home").mkdir(exist_ok=True)
    text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "home" / "config.toml").write_text(text)
    return port


def test_in_flowers_simulation_surgical_aggregation_beats_vanilla(home: Path, start: Starts) -> None:
    superlink(home, start, "--simulation")
    surgical = flwr_run(home)
    vanilla = flwr_run(home, "--run-config", 'strategy="vanilla"')
    assert surgical["mean"] > 0.95
    assert surgical["mean"] > vanilla["mean"] + 0.05


def test_on_a_stock_superlink_with_stock_supernodes(home: Path, start: Starts) -> None:
    fleet, *ports = map(str, free_ports(3))
    port = superlink(home, start, *(() if BY_HTTP else ("--fleet-api-address", f"127.0.0.1:{fleet}")))
    at = f"127.0.0.1:{port if BY_HTTP else fleet}"
    for site, own in enumerate(ports):
        config = f"partition-id={site} num-partitions=2"
        start("flower-supernode", "--insecure", "--superlink", at, "--node-config", config, "--port", own)
    assert flwr_run(home)["mean"] > 0.95
