"""Ours, Flower's own simulation and pfl-research on the same sites, with and without validation, in turn.

python benchmarks/compare_frameworks.py [--pfl FOLDER] [--sites 1000 --drawn 50] [--repetitions 3] [--out FILE]
python benchmarks/compare_frameworks.py --sites 4 --images 22 --drawn 0 --rounds 3 --repetitions 1     # tries it

FedAvg on the same random images, each contender in a process of its own (benchmarks/simulation.py), in the order
A B C A B C. With validation a tenth of a site's images is held out, and each round's model is judged on it: ours and
the bare loop by the sites that train, pfl by as many drawn ones, Flower by an exchange of its own. Without it a site
has only its training images, as many as with it.

A repetition's figure is its CPU seconds of all processes over its rounds but the first, so that a round with trials
counts. Ours has its default settings. pfl is installed into FOLDER where it is not there yet: its dependencies do not
go with ours (benchmarks/pfl_loop.py).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from simulation import ONE_PROCESS, Case, Measured, measure, same_model

PFL = ("pfl", "multiprocess<0.71", "dp-accounting", "prv-accountant", "dill", "absl-py")
CONTENDERS = {
    "bare": ("bare PyTorch loop", "bare", "bare"),
    "inline": ("polyclinic, one process", "inline", "inline"),
    "ray": ("polyclinic, Ray", "ray", "ray"),
    "stock": ("Flower, Ray", "stock", "stock"),
    "pfl": ("pfl-research, one process", "pfl:validated", "pfl"),
}
"""Name -> its name in the table, and the contender of ``simulated_run.py`` with validation and without."""
VERSIONS = ("flwr", "ray", "torch", "numpy")


@dataclass
class FrameworkResult:
    """One contender with or without validation.

    Attributes:
        cpu: CPU seconds a round, one value a repetition.
        measured: All that ``simulation.py`` measures.
    """

    name: str
    contender: str
    validates: bool
    cpu: list[float] = field(default_factory=list)
    measured: Measured = field(default_factory=Measured)

    def add_repetition(self, case: Case) -> None:
        """Train once in a process of its own."""
        before = len(self.measured.cpu)
        with tempfile.TemporaryDirectory() as scratch:
            measure(self.contender, case.write(Path(scratch) / "case"), Path(scratch), self.measured)
        self.cpu.append(statistics.fmean(self.measured.cpu[before:]))


def make_case(options: argparse.Namespace, *, validates: bool) -> Case:
    """Return the case; without validation a site has the images that it trains with validation."""
    images = options.images if validates else options.images - options.images // 10
    return Case(
        options.model,
        options.sites,
        images,
        options.rounds,
        options.epochs,
        options.batch,
        options.drawn,
        validation=0.1 if validates else 0.0,
    )


def install_pfl(folder: Path) -> str:
    """Make pfl importable for the processes of this program; return its version."""
    if not (folder / "pfl").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PFL]
        subprocess.run(command, check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return next(found.version for found in distributions(path=[str(folder)]) if found.metadata["Name"] == "pfl")


def table_of(results: Sequence[FrameworkResult]) -> Table:
    """Return one row for each contender with and without validation."""
    bare = {result.validates: result.cpu for result in results if result.contender == "bare"}
    table = Table("", "validation", "CPU s a round, mean", "median", "range", "mean x bare", "start s", "end CPU s")
    for result in results:
        mean, measured = statistics.fmean(result.cpu), result.measured
        against = bare.get(result.validates)
        table.add_row(
            result.name,
            "with" if result.validates else "without",
            f"{mean:.3f}",
            f"{statistics.median(result.cpu):.3f}",
            f"{min(result.cpu):.3f} - {max(result.cpu):.3f}",
            f"{mean / statistics.fmean(against):.2f}" if against else "",
            f"{statistics.median(measured.start):.2f}",
            f"{statistics.median(measured.end):.2f}" if result.contender in ONE_PROCESS else "",
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in turn, and print the table after each repetition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_cnn")
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--images", type=int, default=40, help="of a site, a tenth of them for validation")
    parser.add_argument("--drawn", type=int, default=50, help="sites that train in a round; 0: all")
    parser.add_argument("--rounds", type=int, default=8, help="the first is not counted")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some of the contenders")
    parser.add_argument("--pfl", type=Path, help="folder with pfl-research; without it, pfl is left out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    versions = {name: version(name) for name in VERSIONS} | {"python": platform.python_version()}
    if options.pfl is not None:
        versions["pfl"] = install_pfl(options.pfl.resolve())
    results = [
        FrameworkResult(title, contender, validates)
        for name, (title, *pair) in CONTENDERS.items()
        for contender, validates in zip(pair, (True, False), strict=True)
        if name in options.only.split(",") and (options.pfl is not None or name != "pfl")
    ]
    console = Console(width=140)
    console.print(
        f"{options.sites} sites of {options.images} images, {options.drawn or 'all'} a round, {options.model}"
    )
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()), f"{os.cpu_count()} cores")
    for repetition in range(options.repetitions):
        for result in results:
            result.add_repetition(make_case(options, validates=result.validates))
        for validates in (True, False):
            same_model({result.contender: result.measured for result in results if result.validates == validates})
        console.print(f"after {repetition + 1} of {options.repetitions}", table_of(results))
    if options.out:
        rows = [
            {"name": each.name, "validates": each.validates, "cpu": each.cpu, "start": each.measured.start}
            for each in results
        ]
        content = {"versions": versions, "case": vars(make_case(options, validates=True)), "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
