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
VICTIMS = {"worker": "ray::SiteWorker", "raylet": "raylet/raylet", "gcs": "gcs_server", "driver": "backends.ray_driver"}
WEIGHTS = (5, 2, 1, 1)
WITHIN_S = 1200
WHILE_IT_RECOVERS = 0.02
"""Chance of a look that comes before a round has ended since the last kill to kill all the same."""


def rounds_of(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_under_fire(arguments: list[str], out: Path, seed: int, kills: int) -> tuple[Counter[str], list[list[str]]]:
    """Run it and kill at random, with ``--resume`` where Ray has ended.

    Returns:
        Kills by kind, and the processes that each start left behind.
    """
    chance, mark, until = random.Random(seed), str(out), time.monotonic() + WITHIN_S
    killed, rounds_at_kill, left = Counter[str](), 0, list[list[str]]()
    environment = {**os.environ, MARK: mark}
    code = 1
    while code == 1:
        resume = ["--resume"] if rounds_of(out) else []
        command = [sys.executable, "-c", PROGRAM, *arguments, "--backend", "ray", "--out", mark, *resume]
        with out.with_suffix(".log").open("wb") as log:
            program = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        started = set[psutil.Process]()
        try:
            while program.poll() is None and time.monotonic() < until:
                time.sleep(chance.uniform(0.1, 1.5))
                started |= set(marked(mark))
                rounds = len(rounds_of(out))
                has_recovered = rounds > rounds_at_kill or chance.random() <= WHILE_IT_RECOVERS
                if killed.total() >= kills or rounds < 1 or not has_recovered:
                    continue
                kind = chance.choices(list(VICTIMS), WEIGHTS)[0]
                victims = [process for process in marked(mark) if VICTIMS[kind] in command_line(process)]
                with suppress(psutil.Error, IndexError):
                    chance.choice(victims).kill()
                    killed[kind] += 1
                    rounds_at_kill = rounds
            code = program.wait(30)
            left.append([command_line(process) for process in living(started)])
        finally:
            kill(started)
        words = " ".join(out.with_suffix(".log").read_text().split())
        assert code == 0 or (code == 1 and "--resume goes on" in words), words[-2000:]
    return killed, left
