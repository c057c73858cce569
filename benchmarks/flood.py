"""What 400 hostile connections cost the coordinator and ten hospitals: memory, file descriptors, and time a round.

python benchmarks/flood.py [--sites 10] [--connections 400] [--windows 4] [--seconds 30] [--kinds half,...] [--out FILE]

One run whose sites answer at once (benchmarks/idle_site.py). Windows without and with the flood take turns within it,
so that both see the same machine. The flood is tests/network/flood.py: half of its connections are half-sent calls, and
each is opened again when it is closed. Attacker, coordinator and hospitals share its cores, which in life they do not.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from network import BIN, HERE, Federation, Processes, eventually, processes

ROOT = HERE.parent
SETTLES_S = 3.0
"""After the flood begins or ends, left out."""
ROUNDS = 10_000


@dataclass
class FloodResult:
    """What was measured.

    Attributes:
        quiet, flooded: Seconds of each round without and with the flood.
        cpu_quiet, cpu_flooded: CPU seconds a second of the SuperLink, one value a window.
        megabytes: Resident memory of the SuperLink: before, most during, afterwards.
        descriptors: Open files of the SuperLink: before, most during, afterwards.
        attackers: What each flood says of itself.
        log_bytes: Of the SuperLink's log, before and afterwards.
    """

    quiet: list[float] = field(default_factory=list)
    flooded: list[float] = field(default_factory=list)
    cpu_quiet: list[float] = field(default_factory=list)
    cpu_flooded: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    attackers: list[str] = field(default_factory=list)
    log_bytes: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.flooded) / statistics.median(self.quiet)


@dataclass
class Watched:
    """The SuperLink and the run's rounds."""

    superlink: psutil.Process
    rounds: Path
    peak_mb: float = 0.0
    peak_files: int = 0

    @property
    def megabytes(self) -> float:
        return float(self.superlink.memory_info().rss / 1e6)

    def window(self, seconds: float) -> tuple[list[float], float]:
        """Seconds of the rounds that end in the next seconds, and the SuperLink's CPU seconds a second."""
        ends, begun = list[float](), time.monotonic()
        cpu, count = sum(self.superlink.cpu_times()[:2]), self._count()
        while (now := time.monotonic()) < begun + seconds:
            if (after := self._count()) > count:
                ends, count = [*ends, now], after
            self.peak_mb = max(self.peak_mb, self.megabytes)
            self.peak_files = max(self.peak_files, self.superlink.num_fds())
            time.sleep(0.01)
        used = sum(self.superlink.cpu_times()[:2]) - cpu
        return [later - earlier for earlier, later in itertools.pairwise(ends)], used / seconds

    def _count(self) -> int:
        return self.rounds.read_bytes().count(b"\n") if self.rounds.exists() else 0


def measured(federation: Federation, arguments: argparse.Namespace, scratch: Path) -> FloodResult:
    """One run, windows in turn."""
    coordinator, results = federation.folder / "coordinator", FloodResult()
    with processes(scratch) as these:
        started = these.start("coordinator", BIN / "flwr-server", "start", coordinator)
        for site in federation.sites:
            these.start(site.name, sys.executable, HERE / "idle_site.py", site)
        eventually(lambda: all("connected to bench" in these.log(site.name) for site in federation.sites), these)
        out = scratch / "run"
        run = (BIN / "flwr-server", "run", coordinator, federation.folder / "experiment.toml", "--out", out, "--once")
        these.start("run", *run)
        (superlink,) = started.children()
        watched = Watched(superlink, out / "rounds.jsonl")
        eventually(lambda: watched._count() >= 20, these)
        log = federation.coordinator.log_path
        results.megabytes, results.descriptors = [watched.megabytes], [superlink.num_fds()]
        results.log_bytes = [size_of(log)]
        for number in range(arguments.windows):
            rounds, cpu = watched.window(arguments.seconds)
            results.quiet, results.cpu_quiet = results.quiet + rounds, [*results.cpu_quiet, cpu]
            _flood(these, number, federation, arguments)
            time.sleep(SETTLES_S)
            rounds, cpu = watched.window(arguments.seconds)
            results.flooded, results.cpu_flooded = results.flooded + rounds, [*results.cpu_flooded, cpu]
            _ended(these, number, results)
            these.alive()
        time.sleep(40)  # the guard's calm, and the deadline of the last connections
        results.megabytes += [watched.peak_mb, watched.megabytes]
        results.descriptors += [watched.peak_files, superlink.num_fds()]
        results.log_bytes.append(size_of(log))
        if arguments.log:
            print(log.read_text())
    return results


def size_of(log: Path) -> int:
    return sum(path.stat().st_size for path in log.parent.glob(f"{log.name}*"))


def _flood(these: Processes, number: int, federation: Federation, arguments: argparse.Namespace) -> None:
    seconds = SETTLES_S + arguments.seconds + 0.5
    kinds = ("--kinds", arguments.kinds) if arguments.kinds else ()
    program = (sys.executable, ROOT / "tests" / "network" / "flood.py")
    port = federation.coordinator.file.port
    these.start(f"flood-{number}", *program, port, arguments.connections, seconds, *kinds)


def _ended(these: Processes, number: int, results: FloodResult) -> None:
    eventually(lambda: '"most_open"' in these.log(f"flood-{number}"), these)
    results.attackers.append(these.log(f"flood-{number}").splitlines()[-1])
    time.sleep(SETTLES_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--connections", type=int, default=400)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--log", action="store_true", help="show the SuperLink's log")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        federation = Federation("tiny", Path(scratch) / "federation")
        federation.make(arguments.sites, ROUNDS)
        results = measured(federation, arguments, Path(scratch) / "run")
    print(json.dumps(asdict(results) | {"quiet": len(results.quiet), "flooded": len(results.flooded)}, indent=1))
    quiet, flooded = statistics.median(results.quiet), statistics.median(results.flooded)
    print(f"a round: {quiet:.3f} s, under the flood {flooded:.3f} s, {results.ratio:.2f} times as long")
    print(f"memory {results.megabytes} MB; files {results.descriptors}")
    if arguments.out:
        arguments.out.write_text(json.dumps(asdict(results), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
