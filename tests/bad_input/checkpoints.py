"""A run folder that was damaged, through ``flwr-sim run --resume``."""

import atexit
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.bad_input.catalogue import Case, Ended, simulation
from tests.federations import DIGITS

EXPERIMENT = DIGITS.replace("rounds = 2", "rounds = 1").replace("sites = 3", "sites = 2")
STATE, FACTS = "checkpoints/round-000001.safetensors", "checkpoints/round-000001.json"


@functools.lru_cache
def finished_run() -> Path:
    """Make a finished run of one round, once a process."""
    folder = Path(mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "experiment.toml").write_text(EXPERIMENT, encoding="utf-8")
    ended = simulation("run", folder / "experiment.toml", "--out", folder / "run")
    assert ended.code == 0, ended.err
    return folder


def copied_to(folder: Path) -> Path:
    """Copy ``experiment.toml`` and ``run/`` to ``folder``; return the latter."""
    shutil.copytree(finished_run(), folder, dirs_exist_ok=True)
    return folder / "run"


def resumed(change: Callable[[Path], object], *overrides: str, finished: bool = False) -> Callable[[Path], Ended]:
    """A run that was killed before its summary, or finished, and what happened to its folder since."""

    def done(folder: Path) -> Ended:
        run = copied_to(folder)
        if not finished:
            (run / "summary.json").unlink()
        change(run)
        setting = [word for override in overrides for word in ("--set", override)]
        return simulation("run", folder / "experiment.toml", "--out", run, "--resume", *setting)

    return done


def file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def flipped(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


def facts(**other: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | other).encode()


def of_a_former_round(content: bytes) -> bytes:
    whole = json.loads(content)
    whole["facts"]["books"]["train_seconds"] = 0.0
    return json.dumps(whole).encode()


def another_folder(folder: Path) -> Ended:
    copied_to(folder)
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("mine", encoding="utf-8")
    return simulation("run", folder / "experiment.toml", "--out", folder / "mine", "--resume")


CASES = (
    Case("the state is cut off", resumed(file(STATE, lambda content: content[:-7]))),
    Case("a byte of the state is another", resumed(file(STATE, flipped))),
    Case("the state is lost", resumed(lambda run: (run / STATE).unlink())),
    Case("the description is cut off", resumed(file(FACTS, lambda content: content[:50]))),
    Case("the description is empty", resumed(file(FACTS, lambda content: b""))),
    Case("the description is another's", resumed(file(FACTS, lambda content: b'["round", 1]'))),
    Case("the description was edited", resumed(file(FACTS, of_a_former_round))),
    Case("of another release", resumed(file(FACTS, facts(version=1)))),
    Case("a line of rounds.jsonl was edited", resumed(file("rounds.jsonl", lambda content: b"one\n" + content))),
    Case("another experiment", resumed(lambda run: None, "training.lr=0.5", "model.neck=8")),
    Case("no folder of a run", another_folder),
    Case("a summary that is cut off", resumed(file("summary.json", lambda content: content[:-20]), finished=True)),
)
