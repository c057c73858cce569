"""What the simulation costs above a bare PyTorch loop, and beside Flower's stock simulation on Ray.

python benchmarks/simulation.py [--models tiny_cnn,resnet18] [--sites 4,12,100] [--contenders bare,inline] [--out FILE]

The same FedAvg on the same random images, every contender in a process of its own, in turn within one run:

bare    a bare PyTorch loop in one process (benchmarks/bare_loop.py), which ends in the same model to the bit
inline  flwr-sim run --backend inline
ray     flwr-sim run --backend ray, two workers
stock   Flower's quickstart: FedAvg, a ClientApp with train and evaluate, its own simulation on Ray, two workers
        (benchmarks/stock_simulation)
pfl     pfl-research's simulation in one process (benchmarks/pfl_loop.py, which says how to install it)

CPU seconds and memory are those of the process and all it starts, sampled five times a second; a round's are taken
from the end of the first to the end of the last, so that starting up is not in them. Medians hide rounds in which the
coordinator tried updates; means, beside them, have them. What comes after the last round
(validation, test, report, receipt) stands by itself, also as so many rounds' worth.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CONTENDERS = ("bare", "inline", "ray", "stock")
ONE_PROCESS = ("bare", "inline", "pfl", "pfl:validated")
SIDES = {"tiny_cnn": 16, "fedsld_cnn": 28, "femnist_cnn": 28, "resnet18": 32, "unifed_vgg11": 32}
MODELS = "tiny_cnn,fedsld_cnn,resnet18"
EVERY_S, WITHIN_S = 0.2, 1800.0
EXPERIMENT = """
[run]
method = "fedavg"
rounds = {rounds}
[model]
architecture = "{model}"
task = "multi_class"
channels = 1
image_size = {side}
mean = [0.5]
std = [0.5]
[training]
optimizer = "sgd"
lr = 0.01
epochs = {epochs}
batch_size = {batch}
[data]
kind = "npz"
path = "images.npz"
classes = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
[partition]
kind = "dirichlet"
alpha = 10000
sites = {sites}
seed = 0
validation_fraction = {validation}
[evaluation]
checkpoint = "last"
{testers}
[participation]
sites_per_round = {drawn}
[simulation]
workers = 2
"""


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: str
    sites: int
    images: int
    rounds: int
    epochs: int
    batch: int
    drawn: int = 0
    all_test: bool = False
    given_side: int = 0
    validation: float = 0.1

    @property
    def side(self) -> int:
        return self.given_side or SIDES[self.model]

    def write(self, folder: Path) -> Path:
        """Random images of ten classes, and the experiment."""
        folder.mkdir()
        random, side, n = np.random.default_rng(0), self.side, self.sites * self.images
        arrays: dict[str, Any] = {}
        for part, many in (("train", n), ("val", 10), ("test", max(200, 10 * self.sites))):
            arrays[f"{part}_images"] = random.integers(0, 256, (many, side, side), np.uint8)
            arrays[f"{part}_labels"] = (np.arange(many) % 10).astype(np.uint8)
        np.savez(folder / "images.npz", **arrays)
        experiment = folder / "experiment.toml"
        testers = "sites = 0" if self.all_test else ""
        text = EXPERIMENT.format(**vars(self), side=side, testers=testers)
        experiment.write_text(text, encoding="utf-8")
        return experiment


@dataclass
class Measured:
    """One contender with one case, all repetitions.

    Attributes:
        start: Seconds from the end of imports to the first round.
        wall, cpu: Of every round but the first.
        end: CPU seconds after the last round; of contenders in one process.
        peak_mb: Largest resident memory: of the process itself, and of any that it started.
        total_mb: Largest sum over all processes at a time, of memory that is theirs alone.
        sha256: Of the last model.
    """

    start: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    peak_mb: list[tuple[float, float]] = field(default_factory=list)
    total_mb: list[float] = field(default_factory=list)
    sha256: set[str] = field(default_factory=set)


@dataclass
class Watch:
    """CPU seconds and memory of a process and everything below it, as time goes by."""

    root: psutil.Process
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    own_peak: float = 0.0
    child_peak: float = 0.0
    total_peak: float = 0.0
    _last: dict[int, float] = field(default_factory=dict)

    def look(self) -> None:
        total = 0.0
        with contextlib.suppress(psutil.Error):
            for process in (self.root, *self.root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    self._last[process.pid] = sum(process.cpu_times()[:2])
                    memory = process.memory_info()
                    total += memory.rss - memory.shared
                    if process.pid == self.root.pid:
                        self.own_peak = max(self.own_peak, memory.rss)
                    else:
                        self.child_peak = max(self.child_peak, memory.rss)
        self.total_peak = max(self.total_peak, total)
        self.times.append(time.monotonic())
        self.cpu.append(sum(self._last.values()))


def measure(contender: str, experiment: Path, scratch: Path, into: Measured) -> None:
    """One repetition."""
    stamps, log = scratch / "stamps", scratch / "log"
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    # As flwr-sim has it for its user: the experiment sets the threads of a site, and idle threads sleep.
    environment.pop("OMP_NUM_THREADS", None)
    environment["OMP_WAIT_POLICY"] = "passive"
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):  # as `make` does, which keeps it in the environment
        environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir(), "polyclinic-benchmark-bytecode"))
    command = [sys.executable, str(HERE / "simulated_run.py"), contender, str(experiment), str(stamps)]
    with log.open("wb") as output:
        child = psutil.Popen(command, stdout=output, stderr=output, env=environment, cwd=scratch)
    watch, deadline = Watch(child), time.monotonic() + WITHIN_S
    while child.poll() is None and time.monotonic() < deadline:
        watch.look()
        time.sleep(EVERY_S)
    if child.poll() != 0:
        for process in (*child.children(recursive=True), child) if child.is_running() else ():
            process.kill()
        raise SystemExit(f"{contender} failed:\n{log.read_text(errors='replace')[-3000:]}")
    lines = [line.split() for line in stamps.read_text(encoding="ascii").splitlines()]
    rounds = [(float(line[1]), float(line[2])) for line in lines if line[0] == "round"]
    into.start.append(rounds[0][0] - float(next(line[1] for line in lines if line[0] == "imported")))
    into.wall += [after[0] - before[0] for before, after in itertools.pairwise(rounds[1:])]
    if contender in ONE_PROCESS:  # which knows exactly
        into.cpu += [after[1] - before[1] for before, after in itertools.pairwise(rounds[1:])]
        into.end.append(next(float(line[2]) for line in lines if line[0] == "done") - rounds[-1][1])
    else:
        first, last = np.interp([rounds[1][0], rounds[-1][0]], watch.times, watch.cpu)
        into.cpu.append((last - first) / (len(rounds) - 2))
    into.peak_mb.append((watch.own_peak / 1e6, watch.child_peak / 1e6))
    into.total_mb.append(watch.total_peak / 1e6)
    into.sha256.add(next(line[3] for line in lines if line[0] == "done"))


# ---------------------------------------------------------------------- the table


def table_of(measured: Mapping[Case, Mapping[str, Measured]]) -> Table:
    head = ("model", "sites", "", "start s", "s a round", "CPU s a round", "mean", "range", "x bare", "mean x bare")
    table = Table(*head, "end CPU s", "= rounds", "peak MB", "all MB")
    for case, contenders in measured.items():
        for name, entry in contenders.items():
            if not entry.cpu:
                continue
            cpu, mean = statistics.median(entry.cpu), statistics.fmean(entry.cpu)
            bare = contenders.get("bare", Measured()).cpu
            own, child = (max(values) for values in zip(*entry.peak_mb, strict=True))
            table.add_row(
                case.model if name == "bare" else "",
                f"{case.sites} x {case.images}" if name == "bare" else "",
                name,
                f"{statistics.median(entry.start):.2f}",
                f"{statistics.median(entry.wall):.3f}",
                f"{cpu:.3f}",
                f"{mean:.3f}",
                f"{min(entry.cpu):.3f} - {max(entry.cpu):.3f}",
                f"{cpu / statistics.median(bare):.2f}" if bare else "",
                f"{mean / statistics.fmean(bare):.2f}" if bare else "",
                f"{statistics.median(entry.end):.2f}" if entry.end else "",
                f"{statistics.median(entry.end) / cpu:.1f}" if entry.end else "",
                f"{own:.0f}" + (f", {child:.0f}" if child else ""),
                f"{max(entry.total_mb):.0f}",
            )
    return table


def same_model(contenders: Mapping[str, Measured]) -> None:
    """Raise if bare, inline and ray did not all end in one model."""
    results = set[str]().union(
        *(entry.sha256 for name, entry in contenders.items() if name not in ("stock", "pfl", "pfl:validated"))
    )
    if len(results) > 1:
        raise SystemExit(f"the contenders ended in different models: { {n: o.sha256 for n, o in contenders.items()} }")


def cases_of(options: argparse.Namespace) -> list[Case]:
    each = {
        int(n): options.images if int(n) <= options.many else options.images // 10 for n in options.sites.split(",")
    }
    common = (options.rounds, options.epochs, options.batch, options.drawn, options.all_test, options.side)
    return [Case(model, n, images, *common) for model in options.models.split(",") for n, images in each.items()]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--sites", default="4,12,100")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=4, help="the first is not counted")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--images", type=int, default=220, help="of a site, a tenth of them for validation")
    parser.add_argument("--many", type=int, default=50, help="with more sites than this, a tenth of the images each")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--drawn", type=int, default=0, help="sites that train in a round; 0: all")
    parser.add_argument("--side", type=int, default=0, help="of an image in pixels; 0: what suits the model")
    parser.add_argument("--all-test", action="store_true", help="every site tests the last model, not a sample")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    options, console = arguments(), Console()
    contenders = options.contenders.split(",")
    measured = {case: {name: Measured() for name in contenders} for case in cases_of(options)}
    for repetition in range(options.repetitions):
        for case, results in measured.items():
            for name in contenders:
                with tempfile.TemporaryDirectory() as scratch:
                    measure(name, case.write(Path(scratch) / "case"), Path(scratch), results[name])
            same_model(results)
        console.print(f"after {repetition + 1} of {options.repetitions}", table_of(measured))
    if options.out:
        versions = {name: version(name) for name in ("flwr", "ray", "torch", "numpy")}
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        rows = [
            vars(case) | {"contender": name} | vars(entry) | {"sha256": sorted(entry.sha256)}
            for case, results in measured.items()
            for name, entry in results.items()
        ]
        options.out.write_text(json.dumps({"machine": machine | versions, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
