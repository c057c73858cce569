"""Measures the figures of docs/benchmarks.md and writes them into its table.

PYTHONPATH=. python benchmarks/table.py [--only NAME,...]    # make bench, make bench ONLY=idle,start
PYTHONPATH=. python benchmarks/table.py --draw               # measures nothing: the table from measured.json

Each entry of ``BENCHES`` is a command that writes JSON, and the rows that are made of it. ``measured.json`` keeps the
rows of each command with its date, commit, versions and the load of the machine when it began. Where some commands are
run, the rows of the others stay, with their own dates.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from supply.blocks import write_block

ROOT = Path(__file__).parents[1]
PAGE, MEASURED = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "measured.json"
RAW = ROOT / "runs" / "bench"
"""What each command wrote the last time."""
BLOCK = "benchmarks"
"""Block of the page."""
VERSIONS = ("flwr", "grpcio", "ray", "torch", "numpy")
FOR_ALL = {"PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"}
QUIET = 0.7
"""Load average of the last minute above which a warning is printed: other programs change the figures."""


class Row(NamedTuple):
    """A line of the table: what is measured, its figure, and what it is compared to."""

    what: str
    figure: str
    beside: str = ""


@dataclass(frozen=True)
class Bench:
    """A command, without ``--out FILE``, and what becomes of the JSON that it writes there."""

    command: str
    rows: Callable[[Any], Iterable[Row]]


def aim(value: float, limit: float, text: str) -> str:
    """``text`` is the limit as it is printed."""
    return f"aim: {text}" if value <= limit else f"aim, missed: {text}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, range and mean."""
    figures = min(values), statistics.median(values), max(values), statistics.fmean(values)
    low, middle, high, mean = (f"{value:.{digits}f}" for value in figures)
    return f"{middle} s ({low} to {high}, mean {mean})"


# ---------------------------------------------------------------------- rows of each command


def network(result: Any) -> Iterable[Row]:
    for model, name in (("tiny", "a model of 0.2 MB"), ("resnet18", "ResNet-18, 44.7 MB")):
        ours, raw, stock = (result["measured"][model][each] for each in ("ours", "raw", "stock"))
        cpu, theirs = statistics.median(ours["cpu"]), statistics.median(stock["cpu"])
        yield Row(
            f"a round of three hospitals over the network, nobody trains, {name}",
            f"{spread(ours['seconds'], 3)}, {cpu:.2f} CPU s",
            f"Flower's own deployment {statistics.median(stock['seconds']):.1f} s, {theirs:.1f} CPU s; "
            f"the bare bytes {statistics.median(raw['seconds']):.3f} s",
        )
    peak = result["measured"]["resnet18"]["ours"]["peak_mb"]
    together = f"{peak['superlink']:.0f} and {peak['coordinator']:.0f} MB"
    limit = aim(max(peak["superlink"], peak["coordinator"]), 200, "200 MB each")
    yield Row("peak memory of the SuperLink and of `flwr-server start` there, ResNet-18", together, limit)


def twelve(result: Any) -> Iterable[Row]:
    seconds = [result["measured"]["resnet18"][each]["seconds"] for each in ("ours", "raw")]
    (ours, raw), (mean, raw_mean) = map(statistics.median, seconds), map(statistics.fmean, seconds)
    times = f"{ours / raw:.1f} times the bare bytes, means {mean / raw_mean:.1f} times"
    figure = f"{spread(seconds[0])}, {times}"
    beside = f"the bare bytes {raw:.2f} s; {aim(mean / raw_mean, 2, '2 times')}"
    yield Row("a round of twelve hospitals over the network, nobody trains, ResNet-18", figure, beside)


def idle(result: Any) -> Iterable[Row]:
    limits = {48: 0.6, 200: 3}
    for each in result["rows"]:
        sites, seconds = each["sites"], each["seconds"]
        cpu = ", ".join(f"{name} {statistics.median(each['cpu'][name]):.2f}" for name in ("superlink", "run", "site"))
        yield Row(
            f"a round of {sites} idle hospitals, a model of 0.2 MB",
            f"{spread(seconds)}; CPU s: {cpu.replace('site', 'all sites').replace('superlink', 'SuperLink')}; "
            f"SuperLink {each['peak_mb']['superlink']:.0f} MB",
            aim(statistics.median(seconds), limits[sites], f"{limits[sites]} s") if sites in limits else "",
        )


def _by_contender(result: Any) -> Mapping[str, Any]:
    return {each["contender"]: each for each in result["rows"]}


def over_bare(what: str, limit: float) -> Callable[[Any], Iterable[Row]]:
    def rows(result: Any) -> Iterable[Row]:
        cpu = {name: statistics.median(each["cpu"]) for name, each in _by_contender(result).items()}
        mean = {name: statistics.fmean(each["cpu"]) for name, each in _by_contender(result).items()}
        ratio, of_means = cpu["inline"] / cpu["bare"], mean["inline"] / mean["bare"]
        figure = f"{ratio:.2f} times, {cpu['inline']:.3f} CPU s a round; means {of_means:.2f} times"
        reached = aim(of_means, limit, f"{limit:.2f}")
        beside = f"a bare PyTorch loop, same bits: {cpu['bare']:.3f} CPU s a round; {reached}"
        yield Row(f"simulation: {what}", figure, beside)

    return rows


def on_ray(what: str, sites: int) -> Callable[[Any], Iterable[Row]]:
    def rows(result: Any) -> Iterable[Row]:
        cpu = {name: statistics.median(each["cpu"]) for name, each in _by_contender(result).items()}
        ours, stock = ((cpu[name] - cpu["bare"]) / sites for name in ("ray", "stock"))
        beside = f"Flower's own simulation {stock:.3f}; {aim(ours, stock, 'at most that')}"
        yield Row(f"simulation on Ray: {what}, above bare a site and round", f"{ours:.3f} CPU s", beside)

    return rows


def _after_the_last(each: Any) -> tuple[float, float]:
    """CPU seconds after the last round, and how many rounds they are worth."""
    end = statistics.median(each["end"])
    return end, end / statistics.median(each["cpu"])


def drawn(result: Any) -> Iterable[Row]:
    yield from over_bare("1,000 sites of 40 images, 50 a round", 1.3)(result)
    end, rounds = _after_the_last(_by_contender(result)["inline"])
    what = "what comes after the last round there, where 100 sites test"
    yield Row(what, f"{end:.1f} CPU s, {rounds:.1f} rounds' worth", aim(rounds, 2, "2 rounds' worth"))


def all_test(result: Any) -> Iterable[Row]:
    end, rounds = _after_the_last(_by_contender(result)["inline"])
    yield Row("the same where all 1,000 sites test", f"{end:.1f} CPU s, {rounds:.0f} rounds' worth")


def thousands(result: Any) -> Iterable[Row]:
    by_sites = {each["sites"]: each for each in result["rows"]}
    words = {
        sites: f"{statistics.median(each['cpu']):.2f} CPU s a round, {each['end'][0]:.1f} after the last, "
        f"{each['start'][0]:.0f} s to the first, {each['peak_mb'][0][0]:,.0f} MB"
        for sites, each in by_sites.items()
    }
    yield Row("simulation: 10,000 sites, 50 a round", words[10_000], f"1,000 sites: {words[1000]}")


def leaving(result: Any) -> Iterable[Row]:
    names = {"tiny_cnn": "0.2 MB", "resnet18": "ResNet-18"}
    for model, name in names.items():
        site = next(each for each in result["rows"] if each["model"] == model and "flushed" in each["check"])
        ours = next(
            each for each in result["rows"] if each["model"] == model and each["check"].startswith("coordinator")
        )
        figure = f"{site['cpu_ms']:.1f} CPU ms, {site['wall_ms']:.1f} ms"
        yield Row(f"gate and audit of a round at a site, {name}", figure, f"coordinator: {ours['cpu_ms']:.2f} CPU ms")


def secure(result: Any) -> Iterable[Row]:
    each = next(row for row in result["rows"] if (row["model"], row["sites"]) == ("ResNet-18", 12))
    beside = f"{each['up_kb']:.1f} kB up and {each['down_kb']:.1f} kB down beside the update"
    figure = f"{each['site_s']:.2f} CPU s of a site, {each['coordinator_s']:.2f} of the coordinator"
    yield Row("secure aggregation, ResNet-18, 12 sites", figure, beside)


def private(result: Any) -> Iterable[Row]:
    cpu = {each["privacy"]: each["cpu_ms"] for each in result["rows"]}
    beside = f"without privacy {cpu['none']:.0f} CPU ms"
    yield Row("DP-SGD (`sample`, epsilon 8), a site and round", f"{cpu['`sample`, epsilon 8']:.0f} CPU ms", beside)


def start(result: Any) -> Iterable[Row]:
    for each in result["programs"]:
        light = each["program"] in ("`flwr-server start`", "the SuperLink")
        figure = f"{statistics.median(each['cpu']):.1f} CPU s, {max(each['peak_mb']):.0f} MB"
        limit = aim(max(each["peak_mb"]), 200, "200 MB") if light else ""
        yield Row(f"imports of {each['program']}", figure, limit)
    cpu, peak = result["run"]["cpu"], result["run"]["peak_mb"]
    yield Row("a small `flwr-sim run`, whole", f"{statistics.median(cpu):.1f} CPU s, {max(peak):.0f} MB")
    first, whole = (statistics.median(each[part] for each in result["digits"]) for part in ("first", "whole"))
    yield Row(
        "`flwr-sim run experiments/digits_surgical.toml`, to the end of its first round",
        f"{first:.1f} CPU s",
        aim(first, 3, "3 CPU s"),
    )
    yield Row("the same, whole: five rounds, test and report", f"{whole:.1f} CPU s", aim(whole, 4, "4 CPU s"))
    yield Row("`flwr-sim --help`", spread(result["help"]))
    yield Row("`flwr-sim demo`, two runs on Ray", spread(result["demo"], 1), aim(max(result["demo"]), 40, "40 s"))
    on_ray = result["ray"]
    beside = f"{aim(statistics.median(on_ray), 6, '6 s')}; {sum(each > 6 for each in on_ray)} of {len(on_ray)} above it"
    yield Row("start on Ray, command to first round", spread(on_ray), beside)


def step(result: Any) -> Iterable[Row]:
    for each in result["rows"]:
        what = f"a step of `{each['model']}`, {result['side']} pixels, batch {result['batch']}: the fastest arithmetic"
        figure = f"{each['chosen']}, {each['times']:.2f} times as fast"
        beside = "; ".join(f"{name} {seconds * 1e3:.0f} CPU ms" for name, seconds in each["seconds"].items())
        yield Row(what, figure, beside)


SIMULATION = "python benchmarks/simulation.py"
THOUSAND = f"{SIMULATION} --models tiny_cnn --sites 1000 --images 40 --many 1000 --drawn 50 --batch 20"
BENCHES: Mapping[str, Bench] = {
    "network": Bench("python benchmarks/network.py --rounds 15 --stock-rounds 2", network),
    "twelve": Bench("python benchmarks/network.py --models resnet18 --sites 12 --rounds 8 --stock-rounds 0", twelve),
    "idle": Bench("python benchmarks/many_idle_sites.py --sites 48,200 --rounds 6", idle),
    "training": Bench(
        f"{SIMULATION} --models fedsld_cnn --sites 12 --images 550 --epochs 5 --batch 256 --contenders bare,inline "
        "--rounds 3 --repetitions 3",
        over_bare("12 sites of 550 images, five epochs", 1.0),
    ),
    "short": Bench(
        f"{SIMULATION} --models fedsld_cnn --sites 12 --contenders bare,inline --rounds 8 --repetitions 3",
        over_bare("12 sites of 220 images, one epoch", 1.1),
    ),
    "batch": Bench(
        f"{SIMULATION} --models resnet18 --sites 12 --images 22 --contenders bare,inline --rounds 5 --repetitions 3",
        over_bare("ResNet-18, 12 sites of 22 images, one batch", 1.2),
    ),
    "ray": Bench(
        f"{SIMULATION} --models resnet18 --sites 12 --images 22 --contenders bare,ray,stock --rounds 5 --repetitions 3",
        on_ray("ResNet-18 with one batch", 12),
    ),
    "ray-tiny": Bench(
        f"{SIMULATION} --models tiny_cnn --sites 12 --images 22 --contenders bare,ray,stock --rounds 12 "
        "--repetitions 3",
        on_ray("a model of 0.2 MB with one batch", 12),
    ),
    "many": Bench(
        f"{THOUSAND} --contenders bare,inline --rounds 8 --repetitions 3",
        drawn,
    ),
    "all-test": Bench(
        f"{THOUSAND} --contenders inline --rounds 4 --repetitions 1 --all-test",
        all_test,
    ),
    "thousands": Bench(
        f"{SIMULATION} --models tiny_cnn --sites 1000,10000 --images 40 --many 10000 --drawn 50 --batch 20 "
        "--contenders inline --rounds 6 --repetitions 1",
        thousands,
    ),
    "start": Bench("python benchmarks/start.py", start),
    "leaving": Bench("python benchmarks/leaving.py", leaving),
    "secure": Bench("python benchmarks/secure_aggregation.py", secure),
    "private": Bench("python benchmarks/private.py --rounds 4 --seeds 1", private),
    "arithmetic": Bench("python benchmarks/arithmetic.py", step),
}


# ---------------------------------------------------------------------- measuring


def measured(name: str) -> dict[str, Any]:
    """Run one command; its rows, and what they were measured on."""
    load, began = os.getloadavg()[0], time.monotonic()
    if load > QUIET:
        print(f"{name}: load average {load:.1f}: something else is running", file=sys.stderr)
    RAW.mkdir(parents=True, exist_ok=True)
    out = RAW / f"{name}.json"
    command = [sys.executable, *shlex.split(BENCHES[name].command)[1:], "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env=os.environ | FOR_ALL, check=True)
    rows = list(BENCHES[name].rows(json.loads(out.read_text(encoding="utf-8"))))
    return {
        "command": BENCHES[name].command,
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}",
        "versions": ", ".join(f"{each} {version(each)}" for each in VERSIONS),
        "load": round(load, 1),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "rows": rows,
    }


def commit() -> str:
    """Name what is measured; ``-changed`` where anything but the results differs from it."""
    results = [f":!{path.relative_to(ROOT)}" for path in (PAGE, MEASURED)]
    changed = _git("status", "--porcelain", "--", ".", *results)
    return f"{_git('describe', '--always') or 'unknown'}{'-changed' if changed else ''}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def table_of(result: Mapping[str, Any]) -> str:
    """Both tables as they stand on the page: the figures, and the commands."""
    lines = ["| what | figure | beside it | command | date |", "| --- | --- | --- | --- | --- |"]
    entries = [(name, result[name]) for name in BENCHES if name in result]
    for name, each in entries:
        lines += [f"| {' | '.join(row)} | `{name}` | {each['date']} |" for row in each["rows"]]
    lines += [
        "",
        "| | command | minutes | load before it | commit, machine, versions |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, each in entries:
        where = f"{each['commit']}; {each['machine']}; {each['versions']}"
        lines.append(f"| `{name}` | `{each['command']}` | {each['minutes']} | {each['load']} | {where} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"some of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    names = [] if options.draw else [name for name in options.only.split(",") if name] or list(BENCHES)
    if unknown := set(names) - set(BENCHES):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    result = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    for name in names:
        result[name] = measured(name)
        MEASURED.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_block(PAGE, BLOCK, table_of(result))
    write_block(PAGE, BLOCK, table_of(result))


if __name__ == "__main__":
    main()
