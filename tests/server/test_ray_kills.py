"""A lost worker is not a lost hospital: kills of workers, and of what keeps them, change nothing in the model."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.federations import ALL_DIGITS, DIGITS, federation
from tests.network.ended import MARK, marked
from tests.processes import command_line, kill, living
from tests.server.commands import PROGRAM, rounds_of

KILLS = 10
VICTIMS = {"worker": "ray::SiteWorker", "raylet": "raylet/raylet", "gcs": "gcs_server", "driver": "backends.ray_driver"}
WEIGHTS = (5, 2, 1, 1)
WITHIN_S = 1200
WHILE_IT_RECOVERS = 0.02
"""Chance of a look that comes before a round has ended since the last kill to kill all the same."""


def run_under_fire(arguments: list[str], out: Path, seed: int) -> tuple[Counter[str], list[str]]:
    """Run it and kill at random, with ``--resume`` where Ray has ended.

    Returns:
        Kills by kind, and the processes that a start left behind.
    """
    chance, mark, until = random.Random(seed), str(out), time.monotonic() + WITHIN_S
    killed, rounds_at_kill, left = Counter[str](), 0, list[str]()
    code = 1
    while code == 1:
        resume = ["--resume"] if rounds_of(out) else []
        command = [sys.executable, "-c", PROGRAM, *arguments, "--backend", "ray", "--out", mark, *resume]
        with out.with_suffix(".log").open("wb") as log:
            program = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, MARK: mark})
        started = set[psutil.Process]()
        try:
            while program.poll() is None and time.monotonic() < until:
                time.sleep(chance.uniform(0.1, 1.5))
                started |= set(marked(mark))
                rounds = len(rounds_of(out))
                has_recovered = rounds > rounds_at_kill or chance.random() <= WHILE_IT_RECOVERS
                if killed.total() >= KILLS or rounds < 1 or not has_recovered:
                    continue
                kind = chance.choices(list(VICTIMS), WEIGHTS)[0]
                victims = [process for process in marked(mark) if VICTIMS[kind] in command_line(process)]
                with suppress(psutil.Error, IndexError):
                    chance.choice(victims).kill()
                    killed[kind] += 1
                    rounds_at_kill = rounds
            code = program.wait(30)
            left += [command_line(process) for process in living(started)]
        finally:
            kill(started)
        words = " ".join(out.with_suffix(".log").read_text().split())
        assert code == 0 or (code == 1 and "--resume goes on" in words), words[-2000:]
    return killed, left


@pytest.mark.long
@pytest.mark.parametrize(("seed", "min_sites"), [(0, 3), (1, 1), (2, 3)])
def test_ten_kills_of_workers_and_raylets_change_nothing(
    seed: int, min_sites: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Also where a round would do without the other sites."""
    record_property("survived", ("SIGKILL of a process of Ray", KILLS))
    record_property("same model", "SIGKILL of a process of Ray")
    settings = [
        "run.rounds=80",
        "evaluation.checkpoint=last",
        f"run.seed={seed}",
        f"participation.min_sites={min_sites}",
    ]
    (tmp_path / "fire.toml").write_text(DIGITS, encoding="utf-8")
    overrides = [part for setting in settings for part in ("--set", setting)]
    killed, left = run_under_fire(["run", str(tmp_path / "fire.toml"), *overrides], tmp_path / "fire", seed)
    assert killed.total() == KILLS
    assert killed["worker"] > 0  # a worker that is not found is not killed
    assert left == []
    assert [line["absent"] for line in rounds_of(tmp_path / "fire") if line["absent"]] == []
    summary = json.loads((tmp_path / "fire" / "summary.json").read_text())
    assert summary["model_sha256"] == federation(tmp_path, ALL_DIGITS, *settings, out="undisturbed")["model_sha256"]
