"""What a round costs over the network when nobody trains: ours, the bare bytes, and Flower's stock deployment.

python benchmarks/network.py [--rounds N] [--stock-rounds N] [--repetitions N] [--models tiny,resnet18] [--sites 3]
    [--set method.compress_model=float16] [--out FILE]
python benchmarks/network.py --models tiny,vit_b --sites 10 --rounds 3 --repetitions 1 --stock-rounds 0
python benchmarks/network.py --models tiny,vit_l --sites 10 --hosts 1 --rounds 2 --repetitions 1 --stock-rounds 0

One coordinator and its sites on this machine, TLS and signed calls, all in turn within one run of this script:

raw    a program that moves the same bytes over gRPC and TLS on loopback, and does nothing else
ours   flwr-server start, flwr-server run, sites in three processes that answer at once with a new update each round
stock  flower-superlink and a flower-supernode a site as installed, FedAvg, a client that does not train

A round lasts from one round's end to the next one's, so aggregation, validation's bookkeeping and the checkpoint on
disk are in it. CPU seconds are those of all processes together, also of those that have ended.

vit_b and vit_l have 86 and 303 million parameters. Where ``tiny`` is measured too, the copies of a model in a process
are given: its peak of private memory beyond the one with ``tiny``, divided by the model's size.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from polyclinic.common.system.toml import read_toml
from polyclinic.server.coordinator.folder import CoordinatorFolder, read_coordinator_folder

HERE = Path(__file__).parent
RAW, BIN = HERE / "raw_grpc.py", Path(sys.executable).parent
ARCHITECTURES = {
    "tiny": ("tiny_cnn", 16),
    "resnet18": ("resnet18", 32),
    "vit_b": ("timm:vit_base_patch16_224", 32),
    "vit_l": ("timm:vit_large_patch16_224", 32),
}
USUAL = "tiny,resnet18"
LARGE = ("vit_b", "vit_l")
"""Models of which sites that share a process hold one at a time."""
MODEL_GB = {"tiny": 0.0, "resnet18": 0.045, "vit_b": 0.344, "vit_l": 1.214}
COPIES_AT_SITE, OTHER_COPIES = 8, 7
"""Copies of a model that a site holds here at most, and that all else holds: measured with vit_b at ten sites."""
PORT, CONTROL_PORT, CLIENT_PORT = 9493, 8493, 9593
STOCK_PORT = PORT if tuple(map(int, version("flwr").split(".")[:2])) < (1, 40) else CONTROL_PORT
"""Where a stock SuperNode connects: by gRPC up to Flower 1.39, by HTTP since."""
WITHIN_S = 600.0
SAMPLE_S = 0.02
HOSTS = 3
"""Processes at most in which the sites run, a thread each: twelve of their own would need more memory than there is."""
EXPERIMENT = """
[run]
method = "surgical"
rounds = {rounds}
[model]
architecture = "{architecture}"
channels = 1
image_size = {size}
[training]
batch_size = 64
lr = 0.0001
[data]
kind = "digits"
image_size = {size}
[partition]
kind = "class_subsets"
sites = {sites}
shared = 2
"""


@dataclass
class Measured:
    """The rounds of one contender with one model, one to warm up left out of each repetition.

    Attributes:
        seconds: Of each round.
        cpu: CPU seconds a round, one value a repetition.
        peak_mb: Largest resident memory of each long-lived process, in MB.
        private_mb: Largest part of it that no file backs, in MB. Pages of files count as resident, and the system can
            take them back at any time.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak_mb: dict[str, float] = field(default_factory=dict)
    private_mb: dict[str, float] = field(default_factory=dict)

    def add(self, ends: Sequence[float], cpu: float) -> None:
        """Add a repetition, arguments when each of its rounds ended."""
        self.seconds += [after - before for before, after in itertools.pairwise(ends)]
        self.cpu.append(cpu / (len(ends) - 1))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def mean(self) -> float:
        """Rounds in which updates were tried are in it; the median hides them."""
        return statistics.fmean(self.seconds)


# ---------------------------------------------------------------------- processes


class Processes:
    """Everything that one contender starts, and what it costs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, psutil.Popen] = {}
        self.private_mb: dict[str, float] = {}
        self._seconds_of_sample = 0.0
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(folder / "flwr"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self, name: str, *arguments: object) -> psutil.Popen:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._started[name] = psutil.Popen(
                [str(each) for each in arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
            )
        return self._started[name]

    def typed(self, *arguments: object) -> None:
        """A command that must succeed, in the same environment."""
        typed(*arguments, environment=self._environment)

    def name_superlink(self, address: str, authority: Path) -> None:
        """Write the connection that ``flwr`` uses by default: the SuperLink at this address."""
        home = Path(self._environment["FLWR_HOME"])
        home.mkdir(exist_ok=True)
        connection = f'address = "{address}"\nroot-certificates = "{authority}"\n'
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}'
        (home / "config.toml").write_text(text, encoding="utf-8")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def alive(self) -> None:
        """Raise with the log of a process that has failed."""
        for name, process in self._started.items():
            if process.poll():
                raise SystemExit(f"{name} ended with {process.poll()}:\n{self.log(name)[-3000:]}")

    def cpu(self) -> float:
        """CPU seconds so far, of all processes and of all their children that have ended."""
        seconds = 0.0
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4])
        return seconds

    def cpu_by_name(self) -> dict[str, float]:
        """CPU seconds so far by the part of a process's name before the first dash: all sites are one."""
        result: dict[str, float] = {}
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                name = self._name(process).split("-")[0]
                result[name] = result.get(name, 0.0) + sum(process.cpu_times()[:2])
        return result

    def peak_mb(self) -> dict[str, float]:
        """Largest resident memory of every process so far."""
        peaks: dict[str, float] = {}
        for process in self._all():
            name = self._name(process)
            peaks[name] = max(peaks.get(name, 0), read_memory_mb(process.pid, "VmHWM"))
        return peaks

    def sample_private_memory(self) -> None:
        """Note the private memory of every process, at most every :data:`SAMPLE_S`; the system counts no peak of it."""
        if time.monotonic() - self._seconds_of_sample < SAMPLE_S:
            return
        self._seconds_of_sample = time.monotonic()
        for process in self._all():
            name = self._name(process)
            self.private_mb[name] = max(self.private_mb.get(name, 0), read_memory_mb(process.pid, "RssAnon"))

    def _all(self) -> list[psutil.Process]:
        result: list[psutil.Process] = []
        for process in self._started.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                result += [process, *process.children(recursive=True)]
        return result

    def _name(self, process: psutil.Process) -> str:
        own = {started.pid: name for name, started in self._started.items()}
        if process.pid in own:
            return own[process.pid]
        # Flower starts a process for each message, which may have ended since the list was made.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() == self._started["coordinator"].pid:
                return "superlink"
        return "other"

    def end(self) -> None:
        """SIGTERM, and after 20 s SIGKILL."""
        every = self._all()
        for started in reversed(self._started.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                started.terminate()
        _, late = psutil.wait_procs(every, timeout=20)
        for process in late:
            process.kill()
        psutil.wait_procs(late, timeout=20)


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """Ended at the end in any case."""
    folder.mkdir(parents=True, exist_ok=True)
    these = Processes(folder)
    try:
        yield these
    finally:
        these.end()


def eventually(condition: Callable[[], Any], these: Processes) -> None:
    """Wait until ``wanted`` returns something true."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        these.alive()
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {WITHIN_S:.0f} s in vain")
        time.sleep(0.1)


def read_memory_mb(pid: int, key: str) -> float:
    """Return a value of a process's ``/proc/PID/status`` in MB; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return round(int(line.split()[1]) * 1.024 / 1000)
    return 0


def listens(port: int) -> bool:
    """Whether anybody listens on this port of 127.0.0.1."""
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0


def typed(*arguments: object, environment: Mapping[str, str] | None = None) -> None:
    """A command that must succeed."""
    words = [str(each) for each in arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{arguments}:\n{done.stdout}{done.stderr}")


def ends_of(path: Path, count: int, these: Processes) -> tuple[list[float], float]:
    """When each of ``count`` lines appeared in a file, and the CPU seconds between the first and the last."""
    ends: list[float] = []
    deadline, before = time.monotonic() + WITHIN_S, 0.0
    while len(ends) < count:
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        if lines > len(ends):
            if not ends:
                before = these.cpu()
            ends += [time.monotonic()] * (lines - len(ends))
            continue
        these.alive()
        these.sample_private_memory()
        if time.monotonic() > deadline:
            raise SystemExit(f"{path}: {len(ends)} of {count} rounds after {WITHIN_S:.0f} s")
        time.sleep(0.005)
    return ends, these.cpu() - before


# ---------------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Federation:
    """A coordinator's folder and those of its sites, made once for each model."""

    model: str
    folder: Path

    @property
    def coordinator(self) -> CoordinatorFolder:
        return read_coordinator_folder(self.folder / "coordinator")

    @property
    def sites(self) -> list[Path]:
        return sorted((self.folder / "sites").iterdir())

    def is_too_large_for_all_sites(self, hosts: int) -> bool:
        """Whether sites that share a process must not all hold this model at once."""
        return len(self.sites) > hosts and self.model in LARGE

    def make(self, sites: int = 3, rounds: int = 1) -> None:
        """As on the first day, with the programs themselves."""
        self.folder.mkdir(parents=True)
        architecture, size = ARCHITECTURES[self.model]
        text = EXPERIMENT.format(rounds=rounds, architecture=architecture, size=size, sites=sites)
        (self.folder / "experiment.toml").write_text(text, encoding="utf-8")
        self.admit()

    def admit(self) -> None:
        """Make the coordinator's folder and those of the experiment's sites, and admit them."""
        typed(BIN / "flwr-sim", "sites", self.folder / "experiment.toml", "--out", self.folder / "sites")
        for site in self.sites:
            with (site / "site.toml").open("a", encoding="utf-8") as text:  # the file ends with [policy]
                text.write("maximum_parameters = 400_000_000\n")
        coordinator = self.folder / "coordinator"
        port = ("--port", PORT)
        typed(BIN / "flwr-server", "init", coordinator, "--name", "bench", "--host", "127.0.0.1", *port)
        for site in self.sites:
            typed(BIN / "flwr-client", "init", site, "--name", site.name)
            typed(BIN / "flwr-server", "admit", coordinator, site / f"{site.name}.request", "--yes")
            shutil.copy(coordinator / "kits" / f"{site.name}.kit", site)


def start_sites(these: Processes, sites: Sequence[Path], hosts: int, *, one_at_a_time: bool = False) -> None:
    """Start idle sites in at most so many processes, and wait until all are connected."""
    names = [f"site-{host}" for host in range(min(hosts, len(sites)))]
    options = ["--one-at-a-time"] if one_at_a_time else []
    for host, name in enumerate(names):
        these.start(name, sys.executable, HERE / "idle_site.py", *options, *sites[host::hosts])
    eventually(lambda: sum(these.log(name).count("connected to bench") for name in names) == len(sites), these)


def ours(
    federation: Federation, rounds: int, into: Measured, scratch: Path, overrides: Sequence[str], hosts: int
) -> int:
    """One repetition; returns the bytes that a site was sent in a round."""
    coordinator = federation.folder / "coordinator"
    with processes(scratch) as these:
        these.start("coordinator", BIN / "flwr-server", "start", coordinator)
        start_sites(these, federation.sites, hosts, one_at_a_time=federation.is_too_large_for_all_sites(hosts))
        out = scratch / "run"
        setting = ("--set", f"run.rounds={rounds + 1}")
        run = (
            BIN / "flwr-server",
            "run",
            coordinator,
            federation.folder / "experiment.toml",
            "--out",
            out,
            "--once",
            *setting,
            *itertools.chain.from_iterable(("--set", override) for override in overrides),
        )
        process = these.start("run", *run)
        ends, cpu = ends_of(out / "rounds.jsonl", rounds + 1, these)
        into.add(ends, cpu)
        into.peak_mb, into.private_mb = these.peak_mb(), these.private_mb
        eventually(lambda: process.poll() is not None, these)
        lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert len(lines[-1]["sites"]) == len(federation.sites), lines[-1]
    # A trial of the round's updates sends more models: the round that sent least has the size of one.
    return int(min(line["bytes_down"] for line in lines)) // len(federation.sites)


def stock(federation: Federation, rounds: int, into: Measured, scratch: Path) -> None:
    """One repetition of Flower's stock deployment, with the same certificates and keys, by Flower's own commands."""
    coordinator, stamps = federation.coordinator, scratch / "stamps"
    authority = coordinator.authority_path
    options = [
        *("--host", "127.0.0.1", "--port", str(CONTROL_PORT)),
        *("--fleet-api-type", "grpc-rere", "--fleet-api-address", coordinator.hospital_listen_address),
        *("--ssl-ca-certfile", coordinator.ca_certificate_path, "--ssl-certfile", authority / "server.crt"),
        *("--ssl-keyfile", authority / "server.key", "--enable-supernode-auth"),
        "--disable-runtime-dependency-installation",
    ]
    with processes(scratch) as these:
        these.start("coordinator", BIN / "flower-superlink", *options, "--database", scratch / "superlink.db")
        eventually(lambda: listens(CONTROL_PORT), these)
        these.name_superlink(f"127.0.0.1:{CONTROL_PORT}", coordinator.ca_certificate_path)
        for number, site in enumerate(federation.sites):
            public_key = scratch / f"{site.name}.pub"
            public_key.write_text(str(read_toml(site / f"{site.name}.request")["public_key"]), encoding="utf-8")
            these.typed(BIN / "flwr", "supernode", "register", public_key, "--name", site.name)
            link = ("--superlink", f"127.0.0.1:{STOCK_PORT}", "--root-certificates", coordinator.ca_certificate_path)
            key = ("--auth-supernode-private-key", site / f"{site.name}.key")
            port = ("--port", CLIENT_PORT + number, "--host", "127.0.0.1")
            these.start(site.name, BIN / "flower-supernode", *link, *key, *port)
        sites = len(federation.sites)
        settings = f'model="{federation.model}" rounds={rounds + 1} sites={sites} stamps="{stamps}"'
        these.typed(BIN / "flwr", "run", HERE / "stock_flower", "--run-config", settings)
        ends, cpu = ends_of(stamps, rounds + 1, these)
        into.add(ends, cpu)
        into.peak_mb, into.private_mb = these.peak_mb(), these.private_mb


def raw(federation: Federation, size: int, rounds: int, into: Measured, hosts: int) -> None:
    """One repetition of the bare bytes."""
    folder = federation.folder / "coordinator"
    options = ["forget"] if federation.is_too_large_for_all_sites(hosts) else []
    done = subprocess.run(
        [sys.executable, RAW, folder, str(size), str(rounds), str(len(federation.sites)), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peaks = done.stdout.splitlines()
    into.seconds += [float(second) for second in seconds.split()]
    into.peak_mb = dict(zip(("server", "client"), map(float, peaks.split()), strict=True))


# ---------------------------------------------------------------------- the table


def copies_of(each: Measured, tiny: Measured | None, model_mb: float) -> str:
    """How many models of this size each process held at its peak, beyond its memory with the tiny model.

    Without the pages of files, which the system can take back, where they were sampled.
    """
    if tiny is None or each is tiny:
        return ""
    peak, usual = (some.private_mb or some.peak_mb for some in (each, tiny))
    held = {name: (mb - usual[name]) / model_mb for name, mb in peak.items() if name in usual}
    return ", ".join(f"{process} {copies:.1f}" for process, copies in sorted(held.items()))


def refuse_too_little_memory(models: Sequence[str], sites: int, hosts: int) -> None:
    """Exit where the largest model would not fit into the free memory."""
    needed = max(
        MODEL_GB[model] * (COPIES_AT_SITE * min(sites, hosts if model in LARGE else sites) + OTHER_COPIES)
        for model in models
    )
    available = psutil.virtual_memory().available / 1e9
    if needed > available:
        raise SystemExit(f"these models at {sites} sites take some {needed:.0f} GB, and {available:.0f} GB are free")


def table_of(measured: dict[str, dict[str, Measured]], bytes_of: dict[str, int]) -> Table:
    head = (
        "model",
        "contender",
        "rounds",
        "s a round, median",
        "mean",
        "range",
        "CPU s a round",
        "x raw",
        "mean x raw",
    )
    table = Table(*head, "peak MB", "private MB", "copies")
    for model, contenders in measured.items():
        for name, each in contenders.items():
            table.add_row(
                f"{model}, {bytes_of[model] / 1e6:.1f} MB" if name == "raw" else "",
                name,
                str(len(each.seconds)),
                f"{each.median:.3f}",
                f"{each.mean:.3f}",
                f"{min(each.seconds):.3f} - {max(each.seconds):.3f}",
                f"{statistics.median(each.cpu):.2f}" if each.cpu else "",
                f"{each.median / contenders['raw'].median:.1f}",
                f"{each.mean / contenders['raw'].mean:.1f}",
                ", ".join(f"{process} {mb:.0f}" for process, mb in sorted(each.peak_mb.items())),
                ", ".join(f"{process} {mb:.0f}" for process, mb in sorted(each.private_mb.items())),
                copies_of(each, measured.get("tiny", {}).get(name), bytes_of[model] / 1e6),
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--stock-rounds", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--models", default=USUAL)
    parser.add_argument("--set", action="append", default=[], help="of our experiment, such as run.method=fedavg")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=HOSTS, help="most processes for the sites")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, too
    console, models = Console(width=200), arguments.models.split(",")
    refuse_too_little_memory(models, arguments.sites, arguments.hosts)
    contenders = ["raw", "ours", *(["stock"] if arguments.stock_rounds else [])]
    measured = {model: {name: Measured() for name in contenders} for model in models}
    bytes_of: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        federations = [Federation(model, folder / model) for model in models]
        for federation in federations:
            federation.make(arguments.sites)
        for repetition in range(arguments.repetitions):
            for federation in federations:
                of, model = measured[federation.model], federation.model
                scratch = folder / f"{model}-{repetition}"
                bytes_of[model] = ours(
                    federation, arguments.rounds, of["ours"], scratch / "ours", arguments.set, arguments.hosts
                )
                raw(federation, bytes_of[model], arguments.rounds, of["raw"], arguments.hosts)
                if arguments.stock_rounds:
                    stock(federation, arguments.stock_rounds, of["stock"], scratch / "stock")
                shutil.rmtree(scratch)
            console.print(table_of(measured, bytes_of))
    if arguments.out:
        versions = {name: version(name) for name in ("flwr", "grpcio", "torch", "numpy")}
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        results = {model: {name: vars(each) for name, each in result.items()} for model, result in measured.items()}
        result = {"machine": machine | versions, "bytes": bytes_of, "measured": results}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
