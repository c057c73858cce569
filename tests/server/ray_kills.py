"""Random kills of a simulation's Ray: workers and raylets, while a run goes on."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PROGRAM = "from server.sim_cli import main; main()"
MARK = "POLYCLINIC_TEST_RAY_KILLS"
VICTIMS = {"worker": "ray::SiteWorker", "raylet": "raylet/raylet"}
WITHIN_S = 900


def marked(mark: str) -> list[psutil.Process]:
    """Every living process that a program with this mark in its environment started, itself included."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def victims(mark: str, kind: str) -> list[psutil.Process]:
    found = []
    for process in marked(mark):
        with suppress(psutil.Error):
            if VICTIMS[kind] in " ".join(process.cmdline()):
                found.append(process)
    return found


def rounds_of(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_under_fire(arguments: list[str], out: Path, seed: int, kills: int) -> tuple[int, Counter[str]]:
    """Run it and kill at random; return its exit code and what was killed, by kind.

    Two of three kills wait until a round has ended since the last one; the third comes while Ray recovers from it.
    """
    chance, mark = random.Random(seed), str(out)
    log = out.with_suffix(".log")
    with log.open("wb") as said:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments, "--backend", "ray", "--out", mark],
            stdout=said,
            stderr=said,
            env={**os.environ, MARK: mark},
        )
    killed, until, seen = Counter[str](), time.monotonic() + WITHIN_S, 0
    try:
        while program.poll() is None and time.monotonic() < until:
            time.sleep(chance.uniform(0.1, 1.5))
            done = len(rounds_of(out))
            if killed.total() >= kills or done < 1 or (done <= seen and chance.random() < 0.98):
                continue
            kind = "raylet" if chance.random() < 0.3 else "worker"
            if found := victims(mark, kind):
                with suppress(psutil.Error):
                    chance.choice(found).kill()
                    killed[kind] += 1
                    seen = done
        return program.wait(30), killed
    finally:
        for process in marked(mark):
            with suppress(psutil.Error):
                process.kill()
