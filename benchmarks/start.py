"""What it costs to start: imports of each program, `--help`, the demo, a small run, digits, and the start on Ray.

python benchmarks/start.py [--repetitions 5] [--starts 7] [--out FILE]

CPU seconds and peak memory are those of one process. The small run has two rounds, from its start to its report; digits
have the five of their file. The start on Ray is counted from the command to the end of the roll call, when the first
round begins. Each start is a command of its own, and the first one is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "digits_surgical.toml"
COMMAND_LINE = (sys.executable, "-m", "polyclinic.studies.cli")
PROGRAMS = {
    "`flwr-server start`": "polyclinic.server.deployment.serve",
    "the SuperLink": "polyclinic.server.deployment.superlink.program",
    "`flwr-server run`": "polyclinic.server.deployment.network",
    "`flwr-client start`": "polyclinic.client.connection.service",
}


def cost(*arguments: object) -> tuple[float, float]:
    """CPU seconds and peak MB of one Python process."""
    with subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3


def repeated(repetitions: int, *arguments: object) -> dict[str, list[float]]:
    """One start that is not counted, so that all bytecode is there, then the others."""
    results = [cost(*arguments) for _ in range(repetitions + 1)][1:]
    return {"cpu": [cpu for cpu, _ in results], "peak_mb": [peak for _, peak in results]}


def run(folder: Path, backend: str) -> tuple[object, ...]:
    options = ("--backend", backend, "--set", "run.rounds=2", "--out", folder)
    return (*COMMAND_LINE[1:], "run", EXPERIMENT, *options)


def small_run(repetitions: int) -> dict[str, list[float]]:
    results = []
    for _ in range(repetitions + 1):
        with tempfile.TemporaryDirectory() as folder:
            results.append(cost(*run(Path(folder) / "run", "inline")))
    return {"cpu": [cpu for cpu, _ in results[1:]], "peak_mb": [peak for _, peak in results[1:]]}


def start_on_ray() -> float:
    """Seconds from the command to the end of the roll call."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        cost(*run(Path(folder) / "run", "ray"))
        lines = (Path(folder) / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    event = next(each for each in map(json.loads, lines) if each["event"] == "roll_call")
    return datetime.fromisoformat(event["time"]).timestamp() - began


def digits() -> dict[str, float]:
    """CPU seconds of the digits' example until its first round has ended, and as a whole, in this order."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["run", str(EXPERIMENT), "--backend", "inline", "--out", str(Path(folder) / "run")]
        rounds = Path(folder) / "run" / "rounds.jsonl"
        with subprocess.Popen([*COMMAND_LINE, *command], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            first = 0.0
            while not first and not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if rounds.exists() and rounds.stat().st_size:
                    first = sum(psutil.Process(process.pid).cpu_times()[:2])
                time.sleep(0.005)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return {"first": first, "whole": usage.ru_utime + usage.ru_stime}


def wall_seconds(*arguments: str) -> float:
    """Seconds of a `flwr-sim` command in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run([*COMMAND_LINE, *arguments], cwd=folder, stdout=subprocess.DEVNULL, check=True)
        return time.monotonic() - began


def table_of(results: dict[str, Any]) -> Table:
    table = Table("", "CPU s", "peak MB")

    def add(name: str, cpu: Sequence[float], peak: Sequence[float]) -> None:
        table.add_row(name, ", ".join(f"{each:.2f}" for each in cpu), ", ".join(f"{each:.0f}" for each in peak))

    for each in results["programs"]:
        add(each["program"], each["cpu"], each["peak_mb"])
    add("a small run", results["run"]["cpu"], results["run"]["peak_mb"])
    for part in ("first", "whole"):
        add(f"digits, {part}", [each[part] for each in results["digits"]], ())
    for name in ("help", "demo"):
        table.add_row(f"{name}, seconds", ", ".join(f"{each:.2f}" for each in results[name]), "")
    table.add_row("start on Ray, seconds", ", ".join(f"{each:.2f}" for each in results["ray"]), "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "programs": [
            {"program": program, **repeated(arguments.repetitions, "-c", f"import {module}")}
            for program, module in PROGRAMS.items()
        ],
        "run": small_run(arguments.repetitions),
        "digits": [digits() for _ in range(arguments.repetitions + 1)][1:],
        "help": [wall_seconds("--help") for _ in range(arguments.repetitions + 1)][1:],
        "demo": [wall_seconds("demo") for _ in range(4)][1:],
        "ray": [start_on_ray() for _ in range(arguments.starts + 1)][1:],
    }
    Console(width=150).print(table_of(results))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
