"""Random kills of a simulation's Ray: workers, and every process that keeps them, while a run goes on."""

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

from tests.network.ended import MARK, marked
from tests.processes import command_line, kill, living

PROGRAM = "from studies.cli import main; main()"
VICTIMS = {
    "worker": "ray::SiteWorker",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "agent": "stand_in_agent",
    "driver": "backends.driver",
    "fork server": "own_ray.fork_server",
}
WEIGHTS = (5, 2, 1, 1, 1, 1)
WITHIN_S = 1200
WHILE_IT_RECOVERS = 0.02
"""Chance of a look that comes before a round has ended since the last kill to kill all the same."""


def victims(mark: str, kind: str) -> list[psutil.Process]:
    return [process for process in marked(mark) if VICTIMS[kind] in command_line(process)]


def rounds_of(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_under_fire(arguments: list[str], out: Path, seed: int, kills: int) -> tuple[int, Counter[str], list[str]]:
    """Run it and kill at random; return its exit code, what was killed by kind, and what is left behind."""
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
    known = set[psutil.Process]()
    try:
        while program.poll() is None and time.monotonic() < until:
            time.sleep(chance.uniform(0.1, 1.5))
            known |= set(marked(mark))
            done = len(rounds_of(out))
            if killed.total() >= kills or done < 1 or (done <= seen and chance.random() > WHILE_IT_RECOVERS):
                continue
            kind = chance.choices(list(VICTIMS), WEIGHTS)[0]
            if found := victims(mark, kind):
                with suppress(psutil.Error):
                    chance.choice(found).kill()
                    killed[kind] += 1
                    seen = done
        code = program.wait(30)
        return code, killed, [command_line(process) for process in living(known)]
    finally:
        kill(known)
