"""What a round over the network costs with many sites that train nothing: seconds, CPU seconds and memory.

python benchmarks/many_idle_sites.py [--sites 4,16,48] [--rounds N] [--repetitions N] [--processes N] [--out FILE]

As ``benchmarks/network.py`` with the tiny model: TLS, signed calls, gate and audit, one connection a site. The sites
share a few processes, a thread each. CPU seconds are given for the coordinator's processes and for the sites'.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from network import BIN, Federation, ends_of, eventually, processes, start_sites
from rich.console import Console
from rich.table import Table

MODEL = "tiny"


@dataclass
class Rounds:
    """What was measured with one number of sites; the first round of each repetition is left out.

    Attributes:
        seconds: Of each round.
        cpu: CPU seconds a round of the SuperLink, the run and the sites, one value a repetition.
        peak_mb: Largest resident memory of the SuperLink and the run.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)


def measured(sites: int, rounds: int, hosts: int, folder: Path, repetition: int, into: Rounds) -> None:
    """One repetition, in a folder of its own: the run of the one before is not read again."""
    federation = Federation(MODEL, folder / "federation")
    if not federation.folder.exists():
        federation.make(sites)
    scratch = folder / f"scratch-{repetition}"
    with processes(scratch) as these:
        these.start("coordinator", BIN / "flwr-server", "start", federation.folder / "coordinator")
        start_sites(these, federation.sites, hosts)
        out, setting = scratch / "run", ("--set", f"run.rounds={rounds + 1}")
        command = ("run", federation.folder / "coordinator", federation.folder / "experiment.toml", "--out", out)
        run = these.start("run", BIN / "flwr-server", *command, "--once", *setting)
        lines = out / "rounds.jsonl"
        ends_of(lines, 1, these)
        cpu = these.cpu_by_name()
        ends, _ = ends_of(lines, rounds + 1, these)
        into.seconds += [after - before for before, after in itertools.pairwise(ends)]
        for name, seconds in these.cpu_by_name().items():
            into.cpu.setdefault(name, []).append((seconds - cpu.get(name, 0.0)) / rounds)
        into.peak_mb = these.peak_mb()
        eventually(lambda: run.poll() is not None, these)


def table_of(results: dict[int, Rounds]) -> Table:
    table = Table("sites", "rounds", "s a round, median", "mean", "range", "CPU s a round", "peak MB")
    for sites, each in results.items():
        cpu = ", ".join(f"{NAMES[name]} {statistics.median(values):.2f}" for name, values in sorted(each.cpu.items()))
        peak = ", ".join(f"{NAMES[name]} {each.peak_mb[name]:.0f}" for name in ("superlink", "run"))
        spread = f"{min(each.seconds):.2f} - {max(each.seconds):.2f}"
        middle, mean = statistics.median(each.seconds), statistics.fmean(each.seconds)
        table.add_row(str(sites), str(len(each.seconds)), f"{middle:.2f}", f"{mean:.2f}", spread, cpu, peak)
    return table


NAMES = {"coordinator": "start", "superlink": "SuperLink", "run": "run", "site": "all sites", "other": "other"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", default="4,16,48")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.sites.split(",")]
    results = {number: Rounds() for number in numbers}
    with tempfile.TemporaryDirectory() as name:
        for repetition in range(arguments.repetitions):
            for number in numbers:
                folder = Path(name) / str(number)
                measured(number, arguments.rounds, arguments.processes, folder, repetition, results[number])
    Console(width=150).print(table_of(results))
    if arguments.out:
        rows = [{"sites": sites, **vars(each)} for sites, each in results.items()]
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
